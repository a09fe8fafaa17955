package puller

import (
	"context"
	"fmt"
	"maps"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
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

// names are the names of the records that CRI writes for a reference: the ID and
// the digest, and the tag of a tagged one.
func (r Reference) names(target, id digest.Digest) []string {
	list := []string{id.String(), r.digestName(target)}
	if !r.digested() {
		list = append(list, r.String())
	}
	return list
}

// isManaged tells whether a record has CRI's label.
func isManaged(img images.Image) bool { return img.Labels[managedLabel] == managedValue }

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

// labels are what the record of a reference has now, and CRI's label. The client
// replaces all labels of a record that it pulls again.
func (p *Puller) labels(ctx context.Context, ref Reference) (map[string]string, error) {
	labels := map[string]string{}
	img, err := p.client.ImageService().Get(ctx, ref.String())
	if err != nil && !errdefs.IsNotFound(err) {
		return nil, fmt.Errorf("reading the image record %s: %w", ref, err)
	}
	maps.Copy(labels, img.Labels)
	labels[managedLabel] = managedValue
	return labels, nil
}
