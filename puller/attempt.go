package puller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"example.com/kip/internal/backoff"
	"example.com/kip/resolver"
	"example.com/kip/secrets"
)

// remedy is something that makes a failed pull worth another one at once.
type remedy struct {
	left    int // how often it may still help
	applies func(err error, reason Reason) bool
}

// maxRejected bounds the credentials that may resolve an image and not fetch it,
// and maxBroken the blobs of it that the daemon has and cannot read.
const (
	maxRejected = 100
	maxBroken   = 10
)

// tryAll pulls until it succeeds, the number of pulls is used up or the reason
// is one that does not pass.
func (p *Puller) tryAll(ctx context.Context, ref Reference, known *ocispec.Descriptor, have Presence, keyring resolver.Keyring, res *Result) error {
	a := &attempt{p: p, ref: ref, known: known, have: have, keyring: keyring, res: res}
	rotated := watchRotation(keyring)
	var broken *brokenError
	remedies := []remedy{
		{maxLost, func(err error, _ Reason) bool { return isLeaseLost(err) }},
		{maxRejected, func(err error, _ Reason) bool { return errors.Is(err, errRejected) }}, // the credential is left alone then
		// ECR answers 403, not 401, to a token that is over.
		{1, func(_ error, r Reason) bool { return (r == Unauthorized || r == Denied) && rotated() }},
		{1, func(_ error, r Reason) bool { return r == NotFound && a.followTag() }},
		{1, func(_ error, r Reason) bool { return r == BadLayer && a.repair(ctx) }},
		{maxBroken, func(err error, _ Reason) bool { return errors.As(err, &broken) && a.replace(broken.digest) }},
		{1, func(_ error, r Reason) bool { return r == NoSpace && a.stepAside() }},
		{1, func(err error, _ Reason) bool { return isOrphaned(err) && a.cleanUp(ctx) }},
	}
	wait := backoff.BackOff{Wait: p.opts.BackOff, Max: maxBackOff}
	for {
		res.Attempts++
		err := a.run(ctx)
		if err == nil {
			return nil
		}
		reason := reasonOf(err)
		if ctx.Err() == nil && help(remedies, err, reason) {
			continue
		}
		if !reason.passing() || res.Attempts >= p.opts.Retries {
			return a.remember(err, reason)
		}
		pause := wait.Next()
		slog.Warn("pull failed, trying again", "image", res.Ref, "reason", reason, "attempt", res.Attempts,
			"wait", pause.Round(time.Millisecond), "message", message(err))
		if err := backoff.Sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// help tells whether one of the remedies is worth another pull.
func help(remedies []remedy, err error, reason Reason) bool {
	for i := range remedies {
		if r := &remedies[i]; r.left > 0 && r.applies(err, reason) {
			r.left--
			return true
		}
	}
	return false
}

// watchRotation returns a function that reads the secrets behind the keyring
// again, and tells whether a credential has changed since the pull began.
func watchRotation(keyring resolver.Keyring) func() bool {
	store, ok := keyring.(*secrets.Store)
	if !ok {
		return func() bool { return false }
	}
	before := store.Generation()
	return func() bool { return store.LookAgain(before) }
}

// attempt is one pull after another of an image: under kip's lease, into the
// daemon's snapshotters, up to the records.
type attempt struct {
	p       *Puller
	ref     Reference
	known   *ocispec.Descriptor // what the reference stands for, where that is not asked
	have    Presence            // what was there before
	keyring resolver.Keyring
	res     *Result
	alone   bool // no other pull may run

	// Of the last pull:
	target *ocispec.Descriptor // what it went for
	need   int64               // of space on the disk
	leased bool                // it came to make a lease
	resume bool                // or to take up one that was there
	shared bool                // other pulls were running
}

// followTag has the next pull ask what the tag stands for now, since the registry
// has forgotten what it stood for.
func (a *attempt) followTag() bool {
	if a.known == nil || a.ref.digested() {
		return false
	}
	a.known = nil
	return true
}

// replace has the next pull fetch a blob anew that is broken at the daemon.
func (a *attempt) replace(blob digest.Digest) bool {
	again := a.have.broken != blob
	a.have.broken = blob
	return again
}

// stepAside has the next pull run alone: the others may have taken the space, and
// give it back when they fail too.
func (a *attempt) stepAside() bool {
	a.alone = a.shared
	return a.alone
}

// remember keeps what the next cycle should know of a failure.
func (a *attempt) remember(err error, reason Reason) error {
	var guarded *spaceError
	switch {
	case reason.hopeless() && a.target != nil:
		a.p.memory.noteHopeless(a.ref, a.target.Digest.String(), a.p.settings.Daemon, err)
	case reason == NoSpace && !errors.As(err, &guarded):
		a.p.memory.noteNoSpace(a.ref, a.need, a.p.disk.free(), err)
	}
	return err
}

// run pulls once.
func (a *attempt) run(ctx context.Context) error {
	done, err := a.p.slots.take(ctx, a.alone)
	if err != nil {
		return err
	}
	a.leased, a.resume, a.need = false, false, 0
	r := resolver.New(a.ref.named, a.known, a.keyring, a.p.registry)
	gate := &admission{p: a.p, layers: map[digest.Digest][]ocispec.Descriptor{}}
	err = a.pull(ctx, r, gate)
	gate.close()
	r.Close()
	a.need = gate.need
	a.res.Bytes += r.Bytes()
	a.res.Credential = r.Credential()
	if err != nil {
		err = a.fail(ctx, r, err)
	} else {
		a.warn(r)
	}
	a.shared = done()
	return err
}

// pull resolves the reference, and fetches and unpacks what it stands for.
func (a *attempt) pull(ctx context.Context, r *resolver.Resolver, gate *admission) error {
	if d, ok := a.ref.named.(reference.Digested); ok {
		if err := a.p.memory.isHopeless(a.ref, d.Digest().String(), a.p.settings.Daemon); err != nil {
			return err
		}
	}
	_, target, err := r.Resolve(ctx, a.ref.String())
	if err != nil {
		return err
	}
	a.target = &target
	if err := a.p.memory.isHopeless(a.ref, target.Digest.String(), a.p.settings.Daemon); err != nil {
		return err
	}
	if a.have.content && a.have.Target.Digest == target.Digest { // the tag has not moved
		return a.p.mend(ctx, a.ref, a.have)
	}
	if err := a.p.checkVerifiers(); err != nil {
		return err
	}
	held, err := a.p.lease(ctx, a.ref)
	if err != nil {
		return err
	}
	defer a.p.letGo(held, a.ref)
	ctx, a.leased, a.resume = held.ctx, true, held.resumed
	if a.have.broken != "" {
		if err := a.p.removeBlob(ctx, a.have.broken); err != nil {
			return err
		}
	}
	id, err := a.unpack(ctx, r, gate)
	if err != nil {
		return err
	}
	if err := a.p.writeRecords(ctx, a.ref, target, id); err != nil {
		return err
	}
	a.p.memory.notePulled(a.ref, a.ref.names(target.Digest, id), gate.need)
	return a.p.unlease(ctx, a.ref, false)
}

// warn reports what of the credentials a person should know.
func (a *attempt) warn(r *resolver.Resolver) {
	for _, refused := range r.Refused() {
		a.res.Warnings = append(a.res.Warnings, fmt.Sprintf("%s: %s; used is %s", a.ref, refused, r.Credential()))
	}
	if note := r.Note(); note != "" {
		a.res.Warnings = append(a.res.Warnings, fmt.Sprintf("%s: a pod could not use the credential %s: %s", a.ref, r.Credential(), note))
	}
}

// unpack fetches the image and unpacks it into each snapshotter in use. It returns
// the image's ID.
func (a *attempt) unpack(ctx context.Context, r *resolver.Resolver, gate *admission) (digest.Digest, error) {
	var id digest.Digest
	for _, snapshotter := range a.p.settings.Snapshotters {
		img, err := a.p.fetching.Pull(ctx, a.ref.String(), a.p.remoteOpts(a.ref, r, gate, snapshotter)...)
		if err != nil {
			return "", err
		}
		config, err := img.Config(ctx)
		if err != nil {
			return "", fmt.Errorf("reading the configuration: %w", err)
		}
		id = config.Digest
	}
	return id, nil
}

// remoteOpts are the options of a pull. There is no WithUnpackLimiter among them,
// with which the client (2.4) unpacks the layers of an image side by side: a folder
// that a layer has files in and does not describe itself would lose the mode and
// owner that the layer below gives it.
func (p *Puller) remoteOpts(ref Reference, r *resolver.Resolver, gate *admission, snapshotter string) []containerd.RemoteOpt {
	opts := []containerd.RemoteOpt{
		containerd.WithResolver(r),
		containerd.WithPlatformMatcher(platforms.Default()),
		containerd.WithPullUnpack,
		containerd.WithPullSnapshotter(snapshotter),
		containerd.WithDownloadLimiter(p.downloads),
		containerd.WithUnpackOpts([]containerd.UnpackOpt{
			containerd.WithUnpackDuplicationSuppressor(&p.busy),
			containerd.WithUnpackApplyOpts(diff.WithSyncFs(p.opts.SyncFS)),
		}),
		containerd.WithImageHandlerWrapper(func(h images.Handler) images.Handler {
			if p.settings.Loaded[snapshotter] {
				h = snapshotters.AppendInfoHandlerWrapper(ref.String())(h)
			}
			return gate.wrap(h)
		}),
	}
	if p.settings.DiscardUnpackedLayers {
		opts = append(opts, containerd.WithChildLabelMap(images.ChildGCLabelsFilterLayers))
	}
	return opts
}

// errRejected is in the error of a pull whose credential could resolve the image
// and may not fetch it. The next credential may.
var errRejected = errors.New("the credential may not fetch what it could resolve")

// fail ends a pull that failed. Its lease goes with it, unless that holds what a
// later pull can go on with.
func (a *attempt) fail(ctx context.Context, r *resolver.Resolver, err error) error {
	if r.Reject(err) {
		err = fmt.Errorf("%w: %w", errRejected, err)
	}
	err = a.p.explain(ctx, err) // while its layers are there
	reason := reasonOf(err)
	keep := (reason.resumable() || isOrphaned(err)) && (!a.leased || a.resume || r.Bytes() > 0)
	if !keep {
		// What a later pull must not find has to be gone before it.
		now := reason == DigestMismatch || reason == NoSpace
		if e := a.p.unlease(ctx, a.ref, now); e != nil {
			slog.Warn("a lease is left behind", "image", a.ref, "error", e)
		}
	}
	return err
}
