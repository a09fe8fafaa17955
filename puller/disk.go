package puller

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/containerd/containerd/v2/pkg/progress"
	"golang.org/x/sys/unix"
)

// DiskOptions say how full the filesystem of the images may become.
type DiskOptions struct {
	// Path is a folder on that filesystem as this process sees it. Where it is empty,
	// it is the folder that CRI names; where that cannot be seen, nothing is checked.
	Path string
	// Threshold is the percentage up to which images may fill it: the kubelet begins
	// to delete images at 85 (imageGCHighThresholdPercent), and evicts pods where less
	// than 15 are free. 0 turns the check off.
	Threshold int
	// Factor is what an image takes of the disk, in units of its compressed size,
	// while it is unpacked: the blobs and, beside them, the files. 3 where it is 0.
	Factor float64
}

func (o DiskOptions) factor() float64 { return cmp.Or(o.Factor, 3) }

// spaceError says that an image does not fit.
type spaceError struct {
	need, room, total int64
	threshold         int
	path              string
}

func (e *spaceError) Error() string {
	return fmt.Sprintf("not enough space at %s: unpacking needs up to %s, and of %s there are %s left before %d %% are in use",
		e.path, progress.Bytes(e.need), progress.Bytes(e.total), progress.Bytes(max(0, e.room)), e.threshold)
}

// disk guards the filesystem of the images.
type disk struct {
	opts DiskOptions
	path string // empty while the filesystem cannot be seen

	mu       sync.Mutex
	pulls    int           // in progress that have reserved something
	reserved int64         // what they may still need
	ended    chan struct{} // closed at the end of a reservation, and made anew
}

// find looks for the filesystem, at the place that CRI names.
func (d *disk) find(criPath string) {
	d.path = cmp.Or(d.opts.Path, criPath)
	if _, err := d.stat(); err != nil {
		slog.Info("the image filesystem cannot be seen, so nothing is checked before a pull", "path", d.path, "error", err)
		d.path = ""
	}
}

// space is what there is on a filesystem, in bytes.
type space struct{ total, free int64 }

// stat counts as the kubelet does: what only root may use is not free.
func (d *disk) stat() (space, error) {
	if d.path == "" {
		return space{}, unix.ENOENT
	}
	var s unix.Statfs_t
	if err := unix.Statfs(d.path, &s); err != nil {
		return space{}, err
	}
	return space{int64(s.Blocks) * s.Bsize, int64(s.Bavail) * s.Bsize}, nil
}

// below is how much more may be used before a percentage of all is in use.
func (s space) below(percent int) int64 { return s.total/100*int64(percent) - (s.total - s.free) }

// free is the free space, -1 where the filesystem cannot be seen.
func (d *disk) free() int64 {
	s, err := d.stat()
	if err != nil {
		return -1
	}
	return s.free
}

// gcTarget is the percentage down to which the kubelet deletes images
// (imageGCLowThresholdPercent).
const gcTarget = 80

// full tells whether the kubelet may be deleting images.
func (d *disk) full() bool {
	s, err := d.stat()
	return err == nil && s.below(gcTarget) <= 0
}

// reserve takes room for a pull, until the function that it returns is called. It
// fails with a spaceError when there is not enough; while other pulls may be about
// to use or to give back what they have reserved, it waits for them. need is asked
// again after each of them: they may have brought layers that are shared.
func (d *disk) reserve(ctx context.Context, need func() (int64, error)) (release func(), err error) {
	for {
		n, err := need()
		if err != nil {
			return nil, err
		}
		release, ended, err := d.try(n)
		if release != nil || err != nil {
			return release, err
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// try reserves at once, or returns a channel that tells when to try again.
func (d *disk) try(need int64) (release func(), ended <-chan struct{}, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s, err := d.stat()
	if err != nil || need == 0 || d.opts.Threshold == 0 {
		return func() {}, nil, nil
	}
	room := s.below(d.opts.Threshold)
	switch {
	case need+d.reserved <= room:
	case d.pulls > 0:
		return nil, d.ended, nil
	default:
		return nil, nil, &spaceError{need: need, room: room, total: s.total, threshold: d.opts.Threshold, path: d.path}
	}
	if d.ended == nil {
		d.ended = make(chan struct{})
	}
	d.pulls++
	d.reserved += need
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.pulls--
		d.reserved -= need
		close(d.ended)
		d.ended = make(chan struct{})
	}), nil, nil
}
