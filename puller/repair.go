package puller

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// repair looks, after a layer could not be unpacked, whether its blob at the daemon
// is what it should be, and removes those that are not, so that they are fetched
// again. It tells whether there was one.
func (a *attempt) repair(ctx context.Context) bool {
	store := a.p.client.ContentStore()
	manifest, err := images.Manifest(ctx, store, *a.target, platforms.Default())
	if err != nil {
		return false
	}
	found := false
	for _, l := range manifest.Layers {
		if !isBroken(ctx, store, l) {
			continue
		}
		slog.Warn("the blob of a layer is broken at the daemon and is fetched again", "image", a.ref, "layer", l.Digest)
		if err := a.p.removeBlob(ctx, l.Digest); err != nil {
			slog.Warn("a broken blob cannot be removed", "layer", l.Digest, "error", err)
			return false
		}
		found = true
	}
	return found
}

// isBroken tells whether a blob is at the daemon and has other bytes than its digest
// says. One that the daemon's garbage collection takes meanwhile is not broken.
func isBroken(ctx context.Context, store content.Store, desc ocispec.Descriptor) bool {
	known := func() bool {
		_, err := store.Info(ctx, desc.Digest)
		return err == nil
	}
	return known() && !isWhole(ctx, store, desc) && known()
}

// isWhole tells whether the bytes of a blob are those of its digest, as far as the
// daemon answers.
func isWhole(ctx context.Context, store content.Store, desc ocispec.Descriptor) bool {
	ra, err := store.ReaderAt(ctx, desc)
	if err != nil {
		return !errdefs.IsNotFound(err) // its file has gone
	}
	defer ra.Close()
	verifier := desc.Digest.Verifier()
	if _, err := io.Copy(verifier, content.NewReader(ra)); err != nil {
		return isDaemonError(ctx, err)
	}
	return verifier.Verified()
}

// removeBlob removes a broken blob from the daemon, and waits until its file is
// gone. What it refers to stays: the lease in the context takes it over. This is
// the one thing that kip removes and did not make; the same blob comes back.
func (p *Puller) removeBlob(ctx context.Context, dgst digest.Digest) error {
	store := p.client.ContentStore()
	info, err := store.Info(ctx, dgst)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err == nil {
		err = p.takeOver(ctx, info)
	}
	if err == nil {
		err = store.Delete(ctx, dgst)
	}
	if err == nil {
		err = p.collectGarbage(ctx)
	}
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("removing the broken blob %s: %w", dgst, err)
	}
	return nil
}

// takeOver makes the lease in the context hold what a blob holds.
func (p *Puller) takeOver(ctx context.Context, info content.Info) error {
	id, ok := leases.FromContext(ctx)
	if !ok {
		return nil
	}
	var errs []error
	for label, value := range info.Labels {
		resource := leases.Resource{ID: value, Type: "content"}
		if name, ok := strings.CutPrefix(label, snapshotRef("")); ok {
			resource.Type = "snapshots/" + name
		} else if !strings.HasPrefix(label, "containerd.io/gc.ref.content.") {
			continue
		}
		errs = append(errs, p.client.LeasesService().AddResource(ctx, leases.Lease{ID: id}, resource))
	}
	return errors.Join(errs...)
}

// collectGarbage has the daemon remove now what nothing refers to: a deletion with
// SynchronousDelete waits for that, of whatever lease.
func (p *Puller) collectGarbage(ctx context.Context) error {
	l, err := p.client.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(leaseLife))
	if err != nil {
		return err
	}
	return p.deleteLease(ctx, l.ID, leases.SynchronousDelete)
}

// isOrphaned tells whether a snapshotter could not make a snapshot since the folder of
// another one is in its place: a containerd that was killed in the middle had made the
// folder, and its database does not know of it.
func isOrphaned(err error) bool {
	text := err.Error()
	return strings.Contains(text, "failed to rename") && strings.Contains(text, "file exists")
}

// cleanUp removes the extractions that an earlier pull of the image did not end. Once
// something was removed from a snapshotter, the daemon's next garbage collection also
// removes the folders that belong to no snapshot. It tells whether there was any.
func (a *attempt) cleanUp(ctx context.Context) bool {
	held, err := a.p.client.LeasesService().ListResources(ctx, leaseOf(a.ref))
	if err != nil {
		return false
	}
	found := false
	for _, r := range held {
		name, ok := strings.CutPrefix(r.Type, "snapshots/")
		if ok && strings.HasPrefix(r.ID, snapshots.UnpackKeyPrefix) && a.p.client.SnapshotService(name).Remove(ctx, r.ID) == nil {
			found = true
		}
	}
	return found && a.p.collectGarbage(ctx) == nil
}

// extracted finds the layer in the unpacker's error.
var extracted = regexp.MustCompile(`failed to extract layer \((\S+) (sha256:[0-9a-f]{64})\)`)

// explain adds to the error of a layer that cannot be unpacked what there is of it.
func (p *Puller) explain(ctx context.Context, err error) error {
	m := extracted.FindStringSubmatch(err.Error())
	switch {
	case m == nil || ctx.Err() != nil:
		return err
	case reasonOf(err) == UnsupportedLayer:
		return fmt.Errorf("containerd %s cannot unpack layers of the type %s: %w", p.settings.Version, m[1], err)
	case reasonOf(err) != BadLayer:
		return err
	}
	ra, e := p.client.ContentStore().ReaderAt(ctx, ocispec.Descriptor{Digest: digest.Digest(m[2])})
	if e != nil {
		return err
	}
	defer ra.Close()
	first := make([]byte, 4)
	n, _ := ra.ReadAt(first, 0)
	return fmt.Errorf("layer %s of the type %s begins with %x: %w", m[2], m[1], first[:n], err)
}
