package puller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"

	"example.com/kip/internal/backoff"
)

// Labels that CRI puts on its image records. Only records with the first one are
// sure to be listed; the kubelet's garbage collection leaves those with the
// second.
const (
	managedLabel = "io.cri-containerd.image"
	managedValue = "managed"
	pinnedLabel  = "io.cri-containerd.pinned"
	pinnedValue  = "pinned"
)

// criNamespace is the namespace that CRI works in.
const criNamespace = "k8s.io"

// names are the names of the records that CRI writes for a reference: the ID and
// the digest, and the tag of a tagged one.
func (r Reference) names(target, id digest.Digest) []string {
	list := []string{id.String(), r.digestName(target)}
	if !r.digested() {
		list = append(list, r.String())
	}
	return list
}

// record reads an image record; errdefs.IsNotFound is true of the error where there is
// none.
func (p *Puller) record(ctx context.Context, name string) (images.Image, error) {
	img, err := p.client.ImageService().Get(ctx, name)
	if err != nil {
		return img, fmt.Errorf("reading the image record %s: %w", name, err)
	}
	return img, nil
}

// isManaged tells whether a record has CRI's label.
func isManaged(img images.Image) bool { return img.Labels[managedLabel] == managedValue }

// unrecorded is the image store of the client that fetches. The client's Pull
// writes the record of the tag before there are those of ID and digest, and
// replaces all labels of a record that is there; with this store it writes none.
type unrecorded struct{ images.Store }

// Create keeps nothing.
func (unrecorded) Create(_ context.Context, img images.Image) (images.Image, error) { return img, nil }

// writeRecords makes the records of a reference as CRI does: each is created, or
// its target and the one label are updated. The tag is last, since a pod that
// finds it takes the image for whole.
func (p *Puller) writeRecords(ctx context.Context, ref Reference, target ocispec.Descriptor, id digest.Digest) error {
	store := p.client.ImageService()
	for _, name := range ref.names(target.Digest, id) {
		img := images.Image{Name: name, Target: target, Labels: map[string]string{managedLabel: managedValue}}
		_, err := store.Create(ctx, img)
		if errdefs.IsAlreadyExists(err) {
			_, err = store.Update(ctx, img, "target", "labels."+managedLabel)
		}
		if err != nil {
			return fmt.Errorf("writing the image record %s: %w", name, err)
		}
	}
	return nil
}

// holdSnapshots makes the configuration hold its snapshots.
func (p *Puller) holdSnapshots(ctx context.Context, id, chain digest.Digest) error {
	if chain == "" {
		return nil
	}
	info := content.Info{Digest: id, Labels: map[string]string{}}
	var paths []string
	for _, name := range p.settings.Snapshotters {
		info.Labels[snapshotRef(name)] = chain.String()
		paths = append(paths, "labels."+snapshotRef(name))
	}
	if _, err := p.client.ContentStore().Update(ctx, info, paths...); err != nil {
		return fmt.Errorf("labelling the config %s: %w", id, err)
	}
	return nil
}

// criLimit is the time that CRI has to list an image whose records are there. It
// takes each of them in by an event, and looks again after seconds where it could
// not.
const criLimit = 10 * time.Second

// awaitCRI waits until the kubelet sees the image. Where it does not, CRI has
// missed an event, and the records are written once more.
func (p *Puller) awaitCRI(ctx context.Context, ref Reference, have Presence) error {
	if !p.settings.CRI || p.opts.Namespace != criNamespace {
		return nil
	}
	for again := false; ; again = true {
		err := p.awaitListed(ctx, ref, have.ID)
		if err == nil || again || !errors.Is(err, errNotListed) {
			return err
		}
		if err := p.writeRecords(ctx, ref, *have.Target, have.ID); err != nil {
			return err
		}
	}
}

var errNotListed = errors.New("the records are written, but CRI does not list the image")

func (p *Puller) awaitListed(ctx context.Context, ref Reference, id digest.Digest) error {
	ctx, cancel := context.WithTimeoutCause(ctx, criLimit, fmt.Errorf("%w after %s", errNotListed, criLimit))
	defer cancel()
	cri := runtime.NewImageServiceClient(connOf(p.client))
	wait := backoff.BackOff{Wait: 4 * time.Millisecond, Max: time.Second}
	for {
		status, err := cri.ImageStatus(ctx, &runtime.ImageStatusRequest{Image: &runtime.ImageSpec{Image: ref.String()}})
		if err == nil && status.GetImage().GetId() == id.String() {
			return nil
		}
		if err == nil {
			err = backoff.Sleep(ctx, wait.Next())
		}
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		if err != nil {
			return fmt.Errorf("asking CRI for the image: %w", errgrpc.ToNative(err))
		}
	}
}
