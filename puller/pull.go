package puller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"example.com/kip/resolver"
)

// Pull makes one image present: it does nothing for a present one, writes what
// records are missing, and fetches and unpacks what else is missing. Credentials
// come from the keyring. The result says how it went, also when it failed.
func (p *Puller) Pull(ctx context.Context, ref Reference, keyring resolver.Keyring) Result {
	ctx, stopWatch := p.watchDaemon(p.context(ctx))
	defer stopWatch()
	return p.pullImage(ctx, ref, keyring)
}

// pullImage is Pull with a context that ends when the daemon is gone.
func (p *Puller) pullImage(ctx context.Context, ref Reference, keyring resolver.Keyring) Result {
	began := time.Now()
	res := Result{Ref: ref.String(), State: Failed, Action: None, Names: []string{}}
	ctx, cancel := context.WithTimeoutCause(ctx, p.opts.Deadline, fmt.Errorf("%w after %s", errDeadline, p.opts.Deadline))
	defer cancel()
	err := p.pull(ctx, ref, keyring, &res)
	if cause := context.Cause(ctx); err != nil && (errors.Is(cause, errDaemonGone) || errors.Is(cause, errDeadline)) {
		err = cause
	}
	if err != nil {
		res.Reason, res.Message = reasonOf(err), message(err)
	}
	if res.Reason == GCRemoved {
		res.State = Skipped
	}
	res.Seconds = time.Since(began).Seconds()
	return res
}

// errDeadline ends a pull that takes longer than one image may.
var errDeadline = fmt.Errorf("the image is not complete: %w", context.DeadlineExceeded)

// errRemoved is in the error of an image that others remove again and again.
var errRemoved = errors.New("the image does not stay on this node")

func (p *Puller) pull(ctx context.Context, ref Reference, keyring resolver.Keyring, res *Result) error {
	have, err := p.Check(ctx, ref)
	if err != nil {
		return err
	}
	known := have.Target
	if p.opts.Always && !ref.digested() {
		known = nil
	}
	before := have
	if known != nil && have.content && len(have.Missing) > 0 {
		slog.Info("writing what is missing", "image", res.Ref, "missing", have.Missing)
		if err := p.mend(ctx, ref, have); err != nil {
			return err
		}
		// What nothing had held may have been collected meanwhile.
		if have, err = p.Check(ctx, ref); err != nil {
			return err
		}
	}
	if len(have.Missing) == 0 {
		p.memory.notePresent(ref)
	}
	if known == nil || !have.content {
		if err := p.isLeftAlone(ctx, ref, have); err != nil {
			return err
		}
		slog.Debug("pulling", "image", res.Ref, "missing", have.Missing)
		if err := p.tryAll(ctx, ref, known, have, keyring, res); err != nil {
			return err
		}
		if have, err = p.Check(ctx, ref); err != nil {
			return err
		}
	}
	return p.confirm(ctx, ref, before, have, res)
}

// mend writes what is missing beside the content.
func (p *Puller) mend(ctx context.Context, ref Reference, have Presence) error {
	if len(have.Missing) == 0 {
		return nil
	}
	if err := p.holdSnapshots(ctx, have.ID, have.chain); err != nil {
		return err
	}
	return p.writeRecords(ctx, ref, *have.Target, have.ID)
}

// isLeftAlone returns why the image is not to be pulled for a while, nil where it
// is: it does not stay on this node, or does not fit.
func (p *Puller) isLeftAlone(ctx context.Context, ref Reference, have Presence) error {
	if have.Target == nil {
		gone, err := p.isRemoved(ctx, ref)
		if err != nil {
			return err
		}
		if gone {
			p.memory.noteRemoved(ref, p.disk.full(), p.disk.free())
		}
	}
	return p.memory.held(ref, p.disk.free())
}

// isRemoved tells whether all records have gone that kip wrote not long ago.
func (p *Puller) isRemoved(ctx context.Context, ref Reference) (bool, error) {
	names := p.memory.records(ref)
	for _, name := range names {
		_, err := p.client.ImageService().Get(ctx, name)
		if !errdefs.IsNotFound(err) {
			return false, err
		}
	}
	return len(names) > 0, nil
}

// errPolicy is in the error of a pull that would go around the daemon's image
// verifiers.
var errPolicy = errors.New("image verifiers decide what may be pulled on this node")

// checkVerifiers looks whether the daemon has image verifiers. The daemon asks
// them only when it pulls itself. Where their folder cannot be seen, there is
// nothing to know.
func (p *Puller) checkVerifiers() error {
	if !p.settings.Verifiers || p.opts.BypassVerifiers {
		return nil
	}
	entries, _ := os.ReadDir(p.opts.VerifierDir)
	for _, e := range entries {
		path := filepath.Join(p.opts.VerifierDir, e.Name())
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return fmt.Errorf("%w, as %s, and a pull by kip would not ask them: --bypass-image-verifiers allows that", errPolicy, path)
		}
	}
	return nil
}

// confirm fills in what is there, once nothing is missing and the kubelet sees it.
func (p *Puller) confirm(ctx context.Context, ref Reference, before, have Presence, res *Result) error {
	if len(have.Missing) > 0 {
		return fmt.Errorf("still missing after the pull: %q", have.Missing)
	}
	if err := p.awaitCRI(ctx, ref, have); err != nil {
		return err
	}
	res.State = Present
	res.Digest, res.ID = have.Target.Digest.String(), have.ID.String()
	res.Names, res.Pinned = have.Names, have.Pinned
	if res.Attempts > 0 && (before.Target == nil || before.Target.Digest != have.Target.Digest || len(before.Missing) > 0) {
		res.Action = Pulled
	}
	return nil
}
