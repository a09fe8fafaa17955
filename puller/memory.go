package puller

import (
	"fmt"
	"sync"
	"time"
)

// memory is what a puller knows of images from earlier cycles. It is lost with the
// process: the first cycle tries everything.
type memory struct {
	now func() time.Time

	mu     sync.Mutex
	images map[string]*past // by reference
}

// past is what is known of one image.
type past struct {
	// hopeless is a failure that lasts until the digest or the daemon is another.
	hopeless *hopeless
	// pulled is when kip last brought the image; names are its records and need what
	// it took of the disk.
	pulled time.Time
	names  []string
	need   int64
	// rest is set while the image is left alone.
	rest *rest
	// setbacks counts how often in a row others have removed the image soon after a
	// pull, or the disk became full in one.
	setbacks int
}

type hopeless struct {
	digest, daemon string
	err            error
}

// rest is a time in which an image is not pulled, unless there is more room on the
// disk than there was.
type rest struct {
	err    error
	until  time.Time
	enough int64 // free bytes with which it ends before; 0 where that cannot be seen
}

// An image that others remove soon after each pull is most likely removed by the
// kubelet for lack of space: images that have never been used are the first to go.
// To pull it again at once would go on for ever.
const (
	soon         = time.Hour
	firstRemoval = 2 * time.Hour
	firstNoSpace = 10 * time.Minute
	maxRest      = 6 * time.Hour
)

func (m *memory) of(ref Reference) *past {
	if m.images == nil {
		m.images = map[string]*past{}
	}
	p := m.images[ref.String()]
	if p == nil {
		p = &past{}
		m.images[ref.String()] = p
	}
	return p
}

// forget drops what is known of images that are not wanted.
func (m *memory) forget(wanted map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for ref := range m.images {
		if !wanted[ref] {
			delete(m.images, ref)
		}
	}
}

// noteHopeless remembers a failure that lasts.
func (m *memory) noteHopeless(ref Reference, digest, daemon string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	if h := p.hopeless; h == nil || h.digest != digest || h.daemon != daemon {
		p.hopeless = &hopeless{digest, daemon, err}
	}
}

// isHopeless returns the error of a pull that failed and can only fail again.
func (m *memory) isHopeless(ref Reference, digest, daemon string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if h := m.of(ref).hopeless; h != nil && h.digest == digest && h.daemon == daemon {
		return fmt.Errorf("%w (not tried again before the image or containerd has changed)", h.err)
	}
	return nil
}

// notePulled remembers a pull that brought the image.
func (m *memory) notePulled(ref Reference, names []string, need int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	p.pulled, p.names, p.need = m.now(), names, need
	p.hopeless, p.rest = nil, nil
}

// notePresent remembers that the image is still there.
func (m *memory) notePresent(ref Reference) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	p.rest = nil
	if m.now().Sub(p.pulled) > soon {
		p.setbacks = 0
	}
}

// records are those that the image had when kip brought it, not long ago.
func (m *memory) records(ref Reference) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	if p.pulled.IsZero() || m.now().Sub(p.pulled) > soon {
		return nil
	}
	return p.names
}

// noteRemoved remembers that others have removed the image, which may be a reason to
// leave it alone for a while. The first time it is brought back, since a person may
// have done it, unless the disk is so full that the kubelet deletes images.
func (m *memory) noteRemoved(ref Reference, full bool, free int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	if p.rest != nil || p.pulled.IsZero() {
		return
	}
	p.setbacks++
	if p.setbacks == 1 && !full {
		p.pulled = time.Time{}
		return
	}
	after := m.now().Sub(p.pulled).Round(time.Second)
	p.pulled = time.Time{}
	p.rest = m.newRest(p.setbacks-1, firstRemoval, fmt.Errorf("%w: others removed it %s after it was pulled", errRemoved, after))
	if free >= 0 { // they made room down to this, and would again
		p.rest.enough = free + max(p.need, 1)
	}
}

// noteNoSpace remembers that the disk became full in a pull.
func (m *memory) noteNoSpace(ref Reference, need, free int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	p.setbacks++
	p.rest = m.newRest(p.setbacks-1, firstNoSpace, err)
	if free >= 0 { // what was free was not enough, whatever kip had thought
		p.rest.enough = max(need, free+need/10, 1)
	}
}

func (m *memory) newRest(times int, first time.Duration, err error) *rest {
	wait := min(first<<min(times, 10), maxRest)
	until := m.now().Add(wait)
	return &rest{fmt.Errorf("%w (left alone until %s, or until there is more space)", err, until.UTC().Format(time.RFC3339)), until, 0}
}

// held returns why the image is to be left alone now, nil where it is not.
func (m *memory) held(ref Reference, free int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.of(ref)
	h := p.rest
	if h == nil || m.now().After(h.until) || h.enough > 0 && free >= h.enough {
		p.rest = nil
		return nil
	}
	return h.err
}
