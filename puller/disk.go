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
	need, free, total int64
	threshold         int
	path              string
}

func (e *spaceError) Error() string {
	return fmt.Sprintf("not enough space at %s: unpacking needs up to %s, and of %s there are %s left before %d %% are in use",
		e.path, progress.Bytes(e.need), progress.Bytes(e.total), progress.Bytes(max(0, e.free)), e.threshold)
}

// disk guards the filesystem of the images.
type disk struct {
	opts DiskOptions
	path string // empty while the filesystem cannot be seen

	mu       sync.Mutex
	reserved map[*int64]struct{} // what pulls in progress may still need
	ended    chan struct{}       // closed at the end of a reservation, and made anew
}

// find looks for the filesystem, at the place that CRI names.
func (d *disk) find(criPath string) {
	if d.opts.Threshold == 0 {
		return
	}
	d.path = d.opts.Path
	if d.path == "" {
		d.path = criPath
	}
	if _, _, err := d.room(); err != nil {
		slog.Info("the image filesystem cannot be seen, so nothing is checked before a pull", "path", d.path, "error", err)
		d.path = ""
	}
}

// room returns how many bytes may still be filled, and how many there are in all.
// It counts as the kubelet does: what only root may use is in use.
func (d *disk) room() (free, total int64, err error) {
	var s unix.Statfs_t
	if d.path == "" {
		return 0, 0, unix.ENOENT
	}
	if err := unix.Statfs(d.path, &s); err != nil {
		return 0, 0, err
	}
	total = int64(s.Blocks) * s.Bsize
	used := total - int64(s.Bavail)*s.Bsize
	return total/100*int64(d.opts.Threshold) - used, total, nil
}

// free is what may still be filled, -1 where the filesystem cannot be seen.
func (d *disk) free() int64 {
	free, _, err := d.room()
	if err != nil {
		return -1
	}
	return free
}

// full tells whether the kubelet may be deleting images: it does so down to 5 below
// its threshold (imageGCLowThresholdPercent is 80).
func (d *disk) full() bool {
	free, total, err := d.room()
	return err == nil && free <= total/20
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
	free, total, err := d.room()
	if err != nil || need == 0 {
		return func() {}, nil, nil
	}
	others := int64(0)
	for n := range d.reserved {
		others += *n
	}
	switch {
	case need+others <= free:
	case len(d.reserved) > 0:
		return nil, d.ended, nil
	default:
		return nil, nil, &spaceError{need: need, free: free, total: total, threshold: d.opts.Threshold, path: d.path}
	}
	if d.reserved == nil {
		d.reserved, d.ended = map[*int64]struct{}{}, make(chan struct{})
	}
	d.reserved[&need] = struct{}{}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.reserved, &need)
		close(d.ended)
		d.ended = make(chan struct{})
	}), nil, nil
}
