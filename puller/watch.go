package puller

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"example.com/kip/internal/backoff"
)

// errDaemonGone ends a pull whose daemon no longer answers.
var errDaemonGone = fmt.Errorf("containerd no longer answers: %w", errdefs.ErrUnavailable)

// watchEvery is the time between two looks at the daemon in a pull, and the time
// that it has to answer.
const watchEvery = 5 * time.Second

// maxMissed is how many looks in a row a daemon may miss, as in a restart.
const maxMissed = 2

// watchDaemon returns a context that ends when the daemon no longer answers. No
// call to it has a limit of its own, and for the content writer of a daemon that is
// gone the client tries for ever. The function that is returned ends the watch.
func (p *Puller) watchDaemon(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for missed := 0; backoff.Sleep(ctx, watchEvery) == nil; {
			asked, done := context.WithTimeout(ctx, watchEvery)
			_, err := p.client.Version(asked)
			done()
			if missed++; err == nil {
				missed = 0
			}
			if missed == maxMissed {
				cancel(errDaemonGone)
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-ended
	}
}
