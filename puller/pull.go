package puller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"example.com/kip/internal/backoff"
	"example.com/kip/resolver"
	"example.com/kip/secrets"
)

// Pull makes one image present: it does nothing for a present one, writes what
// records are missing, and fetches and unpacks what else is missing. Credentials
// come from the keyring. The result says how it went, also when it failed.
func (p *Puller) Pull(ctx context.Context, ref Reference, keyring resolver.Keyring) Result {
	began := time.Now()
	res := Result{Ref: ref.String(), State: Failed, Action: None, Names: []string{}}
	ctx, stopWatch := p.watchDaemon(p.context(ctx))
	defer stopWatch()
	err := p.pull(ctx, ref, keyring, &res)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errDaemonGone) {
		err = cause
	}
	if err != nil {
		res.Reason, res.Message = reasonOf(err), message(err)
	}
	res.Seconds = time.Since(began).Seconds()
	return res
}

func (p *Puller) pull(ctx context.Context, ref Reference, keyring resolver.Keyring, res *Result) error {
	have, err := p.Check(ctx, ref)
	if err != nil {
		return err
	}
	known := have.Target
	if p.opts.Always && !ref.digested() {
		known = nil
	}
	if known != nil && have.content && len(have.Missing) > 0 {
		slog.Info("writing missing records", "image", res.Ref, "missing", have.Missing)
		if err := p.writeRecords(ctx, ref, *have.Target, have.ID); err != nil {
			return err
		}
	}
	if known == nil || !have.content {
		slog.Debug("pulling", "image", res.Ref, "missing", have.Missing)
		if err := p.tryAll(ctx, ref, known, keyring, res); err != nil {
			return err
		}
	}
	return p.confirm(ctx, ref, have, res)
}

// confirm looks at the daemon again and fills in what is there.
func (p *Puller) confirm(ctx context.Context, ref Reference, before Presence, res *Result) error {
	have := before
	if len(before.Missing) > 0 || res.Attempts > 0 {
		var err error
		if have, err = p.Check(ctx, ref); err != nil {
			return err
		}
	}
	if len(have.Missing) > 0 {
		return fmt.Errorf("still missing after the pull: %q", have.Missing)
	}
	res.State = Present
	res.Digest, res.ID = have.Target.Digest.String(), have.ID.String()
	res.Names, res.Pinned = have.Names, have.Pinned
	if res.Attempts > 0 && (before.Target == nil || before.Target.Digest != have.Target.Digest || len(before.Missing) > 0) {
		res.Action = Pulled
	}
	return nil
}

// tryAll pulls until it succeeds, the number of pulls is used up or the reason
// is one that does not pass.
func (p *Puller) tryAll(ctx context.Context, ref Reference, known *ocispec.Descriptor, keyring resolver.Keyring, res *Result) error {
	wait := backoff.BackOff{Wait: p.opts.BackOff, Max: maxBackOff}
	lost := 0
	rotated := watchRotation(keyring)
	for {
		res.Attempts++
		err := p.attempt(ctx, ref, known, keyring, res)
		if err == nil {
			return nil
		}
		if isLeaseLost(err) && lost < maxLost {
			lost++
			continue
		}
		if errors.Is(err, errRejected) {
			continue // at most once for each credential, which is left alone now
		}
		reason := reasonOf(err)
		// ECR answers 403, not 401, to a token that is over.
		if (reason == Unauthorized || reason == Denied) && rotated() {
			continue
		}
		if reason == NotFound && known != nil && !ref.digested() {
			known = nil // the registry has forgotten this digest: take what the tag says now
			continue
		}
		if !reason.passing() || res.Attempts >= p.opts.Retries {
			return err
		}
		pause := wait.Next()
		slog.Warn("pull failed, trying again", "image", res.Ref, "reason", reason, "attempt", res.Attempts,
			"wait", pause.Round(time.Millisecond), "message", message(err))
		if err := backoff.Sleep(ctx, pause); err != nil {
			return err
		}
	}
}

// watchRotation returns a function that reads the secrets behind the keyring
// again, the first time that it is called, and tells whether a credential has
// changed since.
func watchRotation(keyring resolver.Keyring) func() bool {
	store, ok := keyring.(*secrets.Store)
	if !ok {
		return func() bool { return false }
	}
	before, asked := store.Generation(), false
	return func() bool {
		if asked {
			return false
		}
		asked = true
		return store.LookAgain(before)
	}
}

// attempt is one pull: under kip's lease, into the daemon's snapshotter, up to
// the records. The lease goes with the attempt, unless it holds what a later one
// can go on with.
func (p *Puller) attempt(ctx context.Context, ref Reference, known *ocispec.Descriptor, keyring resolver.Keyring, res *Result) (err error) {
	labels, err := p.labels(ctx, ref)
	if err != nil {
		return err
	}
	leased, unlease, err := p.lease(ctx, ref)
	if err != nil {
		return err
	}
	r := resolver.New(ref.named, known, keyring, p.opts.Registry)
	defer func() {
		r.Close()
		res.Bytes += r.Bytes()
		res.Credential = r.Credential()
		if err != nil && r.Bytes() > 0 && reasonOf(err).resumable() {
			return
		}
		if e := unlease(reasonOf(err) == DigestMismatch); e != nil && err == nil {
			err = e
		}
	}()
	img, err := p.client.Pull(leased, ref.String(), p.remoteOpts(r, labels)...)
	if err != nil {
		if r.Reject(err) {
			err = fmt.Errorf("%w: %w", errRejected, err)
		}
		return err
	}
	for _, refused := range r.Refused() {
		res.Warnings = append(res.Warnings, fmt.Sprintf("%s: %s; used is %s", ref, refused, r.Credential()))
	}
	if note := r.Note(); note != "" {
		res.Warnings = append(res.Warnings, fmt.Sprintf("%s: a pod could not use the credential %s: %s", ref, r.Credential(), note))
	}
	config, err := img.Config(leased)
	if err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	return p.writeRecords(leased, ref, img.Target(), config.Digest)
}

// errRejected is in the error of a pull whose credential could resolve the image
// and may not fetch it. The next credential may.
var errRejected = errors.New("the credential may not fetch what it could resolve")

func (p *Puller) remoteOpts(r *resolver.Resolver, labels map[string]string) []containerd.RemoteOpt {
	opts := []containerd.RemoteOpt{
		containerd.WithResolver(r),
		containerd.WithPlatformMatcher(platforms.Default()),
		containerd.WithPullUnpack,
		containerd.WithPullSnapshotter(p.settings.Snapshotter),
		containerd.WithPullLabels(labels),
		containerd.WithDownloadLimiter(p.downloads),
		containerd.WithUnpackOpts([]containerd.UnpackOpt{
			containerd.WithUnpackDuplicationSuppressor(&p.busy),
			containerd.WithUnpackLimiter(p.unpacks),
		}),
	}
	if p.settings.DiscardUnpackedLayers {
		opts = append(opts, containerd.WithChildLabelMap(images.ChildGCLabelsFilterLayers))
	}
	return opts
}
