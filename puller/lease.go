package puller

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
)

// leaseLabel is on each lease of kip; its value is the image's reference.
const leaseLabel = "kip/image-reference"

// expireLabel says until when the daemon keeps what a lease holds.
const expireLabel = "containerd.io/gc.expire"

// leaseLife is how long the daemon keeps what a kip that is gone had begun, after
// the time that its pull was allowed to take.
const leaseLife = 24 * time.Hour

// maxLost is how often a pull begins again because its lease has gone.
const maxLost = 5

// isLeaseLost tells whether the lease went while it was in use: a kip beside this
// one pulls the same image under the same lease, and was done first. Then there is
// little left to do.
func isLeaseLost(err error) bool {
	return strings.Contains(err.Error(), "lease does not exist") // metadata.addContentLease and its like, over gRPC
}

// leaseOf is kip's own lease for an image.
func leaseOf(ref Reference) leases.Lease {
	return leases.Lease{
		ID:     fmt.Sprintf("kip-%.16x", sha256.Sum256([]byte(ref.String()))),
		Labels: map[string]string{leaseLabel: ref.String()},
	}
}

// hold is kip's own lease for an image while it is in use.
type hold struct {
	ctx     context.Context // under the lease
	resumed bool            // the lease was there: an earlier attempt left it
	lock    content.Writer  // see lockOf; nil where another kip has it
}

// lease makes kip's own lease for the image, or takes up the one that an earlier
// attempt left: what that one downloaded is held by it. The client would make a lease
// for each pull and drop it, with all partial downloads, when the pull fails. The
// caller lets go of it.
func (p *Puller) lease(ctx context.Context, ref Reference) (held hold, err error) {
	l := leaseOf(ref)
	err = p.createLease(ctx, l)
	if errdefs.IsAlreadyExists(err) {
		held.resumed = true
		err = p.renew(ctx, l)
	}
	if err != nil {
		return held, fmt.Errorf("making a lease: %w", err)
	}
	held.ctx = leases.WithLease(ctx, l.ID)
	held.lock, err = p.client.ContentStore().Writer(held.ctx, content.WithRef(lockOf(l.ID)))
	if err != nil && !errdefs.IsUnavailable(err) {
		return held, fmt.Errorf("locking a lease: %w", err)
	}
	return held, nil
}

// letGo ends the use of a lease, which itself stays.
func (p *Puller) letGo(held hold, ref Reference) {
	if held.lock == nil {
		return
	}
	held.lock.Close()
	p.abort(held.ctx, lockOf(leaseOf(ref).ID))
}

// lockOf is the name of an ingest, always empty, that is open while a kip pulls under
// a lease. The daemon lets one client at a time have it, and ends that when the client
// is gone, however it went: so kips in other processes and pods can tell a lease that
// is in use from one that was left.
func lockOf(lease string) string { return lease + "-in-use" }

// inUse tells whether a kip pulls under a lease.
func (p *Puller) inUse(ctx context.Context, lease string) bool {
	w, err := p.client.ContentStore().Writer(ctx, content.WithRef(lockOf(lease)))
	if err != nil {
		return errdefs.IsUnavailable(err)
	}
	w.Close()
	p.abort(ctx, lockOf(lease))
	return false
}

// afterwards is a context for what has to be done also when the pull was cancelled.
func afterwards(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
}

// abort removes an ingest.
func (p *Puller) abort(ctx context.Context, ref string) {
	ctx, cancel := afterwards(ctx)
	defer cancel()
	if err := p.client.ContentStore().Abort(ctx, ref); err != nil && !errdefs.IsNotFound(err) {
		slog.Debug("an ingest is left behind", "ingest", ref, "error", err)
	}
}

func (p *Puller) createLease(ctx context.Context, l leases.Lease) error {
	_, err := p.client.LeasesService().Create(ctx, leases.WithID(l.ID), leases.WithLabels(l.Labels), leases.WithExpiration(leaseLife+p.opts.Deadline))
	return err
}

// renew gives a lease that is there its whole life again, when it might end within
// this attempt. Leases cannot be changed, so what it holds goes to another one and
// back.
func (p *Puller) renew(ctx context.Context, l leases.Lease) error {
	list, err := p.client.LeasesService().List(ctx, "id=="+l.ID)
	if err != nil {
		return err
	}
	for _, old := range list {
		expires, err := time.Parse(time.RFC3339, old.Labels[expireLabel])
		if err == nil && time.Until(expires) > p.opts.Deadline {
			return nil
		}
	}
	interim := leases.Lease{ID: l.ID + "-renewed", Labels: l.Labels}
	return errors.Join(p.move(ctx, l, interim), p.move(ctx, interim, l))
}

// move makes a lease that holds what another one holds, and deletes that.
func (p *Puller) move(ctx context.Context, from, to leases.Lease) error {
	manager := p.client.LeasesService()
	if err := p.createLease(ctx, to); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	resources, err := manager.ListResources(ctx, from)
	if err != nil {
		return err
	}
	for _, r := range resources {
		if err := manager.AddResource(ctx, to, r); err != nil {
			return err
		}
	}
	return manager.Delete(ctx, from)
}

// unlease deletes the image's lease, where there is one. With now set, it waits
// until what only the lease held has gone.
func (p *Puller) unlease(ctx context.Context, ref Reference, now bool) error {
	var opts []leases.DeleteOpt
	if now {
		opts = append(opts, leases.SynchronousDelete)
	}
	return p.deleteLease(ctx, leaseOf(ref).ID, opts...)
}

func (p *Puller) deleteLease(ctx context.Context, id string, opts ...leases.DeleteOpt) error {
	ctx, cancel := afterwards(ctx)
	defer cancel()
	if err := p.client.LeasesService().Delete(ctx, leases.Lease{ID: id}, opts...); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing the lease %s: %w", id, err)
	}
	return nil
}

// deleteLeases deletes those leases of kip that are not in use and whose image is as
// asked.
func (p *Puller) deleteLeases(ctx context.Context, which func(ref string) bool) error {
	list, err := p.client.LeasesService().List(ctx, `labels."`+leaseLabel+`"`)
	if err != nil {
		return fmt.Errorf("listing the leases: %w", err)
	}
	for _, l := range list {
		if which(l.Labels[leaseLabel]) && !p.inUse(ctx, l.ID) {
			err = errors.Join(err, p.deleteLease(ctx, l.ID))
		}
	}
	return err
}
