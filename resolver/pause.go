package resolver

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"example.com/kip/internal/backoff"
)

// Pauses remembers, over all pulls of a process, which registries have asked to be
// left alone for a while. The zero value is ready for use.
type Pauses struct {
	// Now is the clock, time.Now where it is not set.
	Now func() time.Time

	mu    sync.Mutex
	hosts map[string]*pause
}

// pause is what is known of one host. While there are refusals, requests go one at a
// time: those that were held back must not arrive all at once.
type pause struct {
	turn chan struct{} // has room for the one whose turn it is

	// Guarded by Pauses.mu:
	refusals int // in a row
	status   int // of the last
	until    time.Time
}

const (
	// maxPause bounds what a registry can ask for.
	maxPause = 15 * time.Minute
	// maxHeld is how long a request waits for the end of a pause. One that would wait
	// longer fails at once.
	maxHeld = 30 * time.Second
)

// PausedError is the error of a request to a registry that has asked to be left alone:
// it was refused, or not sent at all.
type PausedError struct {
	Host string
	// Status is that of the refusal: 429, or 503 with a time to wait.
	Status int
	// Until is when the registry may be asked again.
	Until time.Time
}

func (e *PausedError) Error() string {
	return fmt.Sprintf("registry %s answered %d %s and is not asked again before %s", e.Host, e.Status, http.StatusText(e.Status), e.Until.UTC().Format(time.RFC3339))
}

// of returns what is known of a host.
func (p *Pauses) of(host string) *pause {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hosts == nil {
		p.hosts = map[string]*pause{}
	}
	h := p.hosts[host]
	if h == nil {
		h = &pause{turn: make(chan struct{}, 1)}
		p.hosts[host] = h
	}
	return h
}

// enter waits until a host may be asked. The function that is returned takes the
// answer, and returns an error for one that is about the rate of requests.
func (p *Pauses) enter(ctx context.Context, host string) (leave func(*http.Response) error, err error) {
	h := p.of(host)
	p.mu.Lock()
	paused := h.refusals > 0
	p.mu.Unlock()
	if !paused {
		return func(resp *http.Response) error { return p.leave(h, host, resp) }, nil
	}
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	leave = func(resp *http.Response) error {
		defer func() { <-h.turn }()
		return p.leave(h, host, resp)
	}
	if err := p.wait(ctx, h, host); err != nil {
		<-h.turn
		return nil, err
	}
	return leave, nil
}

func (p *Pauses) wait(ctx context.Context, h *pause, host string) error {
	p.mu.Lock()
	until, status := h.until, h.status
	p.mu.Unlock()
	switch left := until.Sub(p.now()); {
	case left > maxHeld:
		return &PausedError{host, status, until}
	case left > 0 && backoff.Sleep(ctx, left) != nil:
		return context.Cause(ctx)
	}
	return nil
}

// leave notes an answer: a refusal begins or prolongs a pause, anything else that a
// registry says ends it. Without an answer nothing is known.
func (p *Pauses) leave(h *pause, host string, resp *http.Response) error {
	if resp == nil {
		return nil
	}
	asked, refused := retryAfter(resp, p.now())
	p.mu.Lock()
	defer p.mu.Unlock()
	if !refused {
		h.refusals = 0
		return nil
	}
	h.refusals++
	h.status = resp.StatusCode
	if asked == 0 {
		asked = time.Second << min(h.refusals-1, 10)
	}
	asked = min(asked, maxPause)
	// Never earlier than asked, and not all nodes at the same moment.
	if until := p.now().Add(asked + rand.N(asked/10+time.Millisecond)); until.After(h.until) {
		h.until = until
	}
	return &PausedError{host, h.status, h.until}
}

// retryAfter tells whether an answer is about the rate of requests, and how long it
// asks to wait; 0 where it does not say (RFC 9110, 10.2.3: seconds or a date).
func retryAfter(resp *http.Response, now time.Time) (wait time.Duration, refused bool) {
	value := resp.Header.Get("Retry-After")
	if resp.StatusCode != http.StatusTooManyRequests && (resp.StatusCode != http.StatusServiceUnavailable || value == "") {
		return 0, false
	}
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second, true
	}
	if date, err := http.ParseTime(value); err == nil {
		return max(0, date.Sub(now)), true
	}
	return 0, true
}

func (p *Pauses) now() time.Time {
	if p.Now != nil {
		return p.Now()
	}
	return time.Now()
}

// pauser keeps to the pauses that registries ask for. Containerd would repeat a
// request that is answered with 429 four times, at once: it does not repeat errors.
type pauser struct {
	next   http.RoundTripper
	pauses *Pauses
}

// RoundTrip waits for the end of a pause before the request is sent.
func (t *pauser) RoundTrip(req *http.Request) (*http.Response, error) {
	leave, err := t.pauses.enter(req.Context(), req.URL.Host)
	if err != nil {
		return nil, err
	}
	resp, err := t.next.RoundTrip(req)
	if refused := leave(resp); refused != nil {
		resp.Body.Close()
		return nil, refused
	}
	return resp, err
}
