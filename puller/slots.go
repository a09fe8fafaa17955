package puller

import (
	"context"
	"sync/atomic"

	"golang.org/x/sync/semaphore"
)

// slots bounds the pulls in progress.
type slots struct {
	all  int64
	free *semaphore.Weighted

	begun, running atomic.Int64
}

// take waits for a slot, or for all of them where the pull is to be alone. The
// function that is returned gives it back, and tells whether there were other pulls
// at the same time.
func (s *slots) take(ctx context.Context, alone bool) (done func() (shared bool), err error) {
	n := int64(1)
	if alone {
		n = s.all
	}
	if err := s.free.Acquire(ctx, n); err != nil {
		return nil, err
	}
	others, begun := s.running.Add(1)-1, s.begun.Add(1)
	return func() bool {
		s.running.Add(-1)
		s.free.Release(n)
		return others > 0 || s.begun.Load() > begun
	}, nil
}
