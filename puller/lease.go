package puller

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// leaseLabel is on each lease of kip; its value is the image's reference.
const leaseLabel = "kip/image-reference"

// leaseLife is how long the daemon keeps what a kip that is gone had begun.
const leaseLife = 24 * time.Hour

// maxLost is how often a pull begins again because its lease has gone.
const maxLost = 5

// isLeaseLost tells whether the lease went while it was in use: a kip beside this
// one pulls the same image under the same lease, and was done first. Then there is
// little left to do.
func isLeaseLost(err error) bool {
	return strings.Contains(err.Error(), "lease does not exist") // metadata.addContentLease and its like, over gRPC
}

// lease makes a context under kip's own lease for the image, or takes up the one
// that an earlier attempt left: what that one downloaded is held by it. The client
// would make a lease for each pull and drop it, with all partial downloads, when
// the pull fails. The function that is returned deletes the lease; with now set, it
// waits until what only the lease held has gone.
func (p *Puller) lease(ctx context.Context, ref Reference) (context.Context, func(now bool) error, error) {
	id := fmt.Sprintf("kip-%.16x", sha256.Sum256([]byte(ref.String())))
	manager := p.client.LeasesService()
	_, err := manager.Create(ctx, leases.WithID(id), leases.WithExpiration(leaseLife),
		leases.WithLabels(map[string]string{leaseLabel: ref.String()}))
	if err != nil && !errdefs.IsAlreadyExists(err) {
		return nil, nil, fmt.Errorf("making a lease: %w", err)
	}
	remove := func(now bool) error {
		// Also when the pull was cancelled, hence without the cancelled context.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		var opts []leases.DeleteOpt
		if now {
			opts = append(opts, leases.SynchronousDelete)
		}
		if err := manager.Delete(ctx, leases.Lease{ID: id}, opts...); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("removing the lease %s: %w", id, err)
		}
		return nil
	}
	return leases.WithLease(ctx, id), remove, nil
}
