// Package backoff holds the pauses between tries of what may work later.
package backoff

import (
	"context"
	"math/rand/v2"
	"time"
)

// BackOff is a pause that doubles each time, up to a limit, with jitter: of many
// nodes that fail together, each tries again at another moment.
type BackOff struct {
	// Wait is the next pause without its jitter, at least 4 ns; Max is the longest.
	Wait, Max time.Duration
}

// Next returns the pause before the next try: Wait and up to a quarter of it more.
func (b *BackOff) Next() time.Duration {
	pause := b.Wait + rand.N(b.Wait/4)
	b.Wait = min(2*b.Wait, b.Max)
	return pause
}

// Sleep waits, and returns the context's error when that ends first.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
