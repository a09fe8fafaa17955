package puller

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Presence is what of an image is at the daemon. An image is present when nothing
// is missing: its manifest and configuration can be read, its snapshot is there,
// and so are the records that CRI writes.
type Presence struct {
	// Target is what the reference stands for, nil where no record says so.
	Target *ocispec.Descriptor
	// ID is the digest of the configuration, empty where it cannot be read.
	ID digest.Digest
	// Missing names the parts that are not there, empty for a present image.
	Missing []string
	// Names are the records that are there.
	Names []string
	// Pinned is set when one of the records keeps the image from the kubelet's
	// garbage collection.
	Pinned bool

	content bool // manifest, configuration and snapshot are there
}

// maxConfig bounds an image's configuration. The largest in the field have some
// hundred kilobytes.
const maxConfig = 8 << 20

// Check reports what of an image is at the daemon. It asks no registry.
func (p *Puller) Check(ctx context.Context, ref Reference) (Presence, error) {
	ctx = p.context(ctx)
	var have Presence
	img, err := p.client.ImageService().Get(ctx, ref.String())
	if errdefs.IsNotFound(err) {
		have.Missing = []string{"record " + ref.String()}
		return have, nil
	}
	if err != nil {
		return have, fmt.Errorf("reading the image record %s: %w", ref, err)
	}
	have.Target = &img.Target
	if err := p.checkContent(ctx, &have); err != nil {
		return have, err
	}
	return have, p.checkRecords(ctx, ref, img, &have)
}

// checkContent looks for manifest, configuration and snapshot.
func (p *Puller) checkContent(ctx context.Context, have *Presence) error {
	store := p.client.ContentStore()
	manifest, err := images.Manifest(ctx, store, *have.Target, platforms.Default())
	if errdefs.IsNotFound(err) {
		have.Missing = append(have.Missing, "manifest of "+have.Target.Digest.String())
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the manifest %s: %w", have.Target.Digest, err)
	}
	config, err := readConfig(ctx, store, manifest.Config)
	if errdefs.IsNotFound(err) {
		have.Missing = append(have.Missing, "config "+manifest.Config.Digest.String())
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the configuration %s: %w", manifest.Config.Digest, err)
	}
	have.ID = manifest.Config.Digest
	return p.checkSnapshot(ctx, config.RootFS.DiffIDs, have)
}

func (p *Puller) checkSnapshot(ctx context.Context, layers []digest.Digest, have *Presence) error {
	have.content = true
	if len(layers) == 0 { // FROM scratch, with nothing in it
		return nil
	}
	chain := identity.ChainID(layers)
	info, err := p.client.SnapshotService(p.settings.Snapshotter).Stat(ctx, chain.String())
	if errdefs.IsNotFound(err) || err == nil && info.Kind != snapshots.KindCommitted {
		have.content = false
		have.Missing = append(have.Missing, fmt.Sprintf("snapshot %s in %s", chain, p.settings.Snapshotter))
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the snapshot %s: %w", chain, err)
	}
	return nil
}

func readConfig(ctx context.Context, store content.Provider, desc ocispec.Descriptor) (ocispec.Image, error) {
	var config ocispec.Image
	if desc.Size > maxConfig {
		return config, fmt.Errorf("it has %d bytes, more than %d", desc.Size, maxConfig)
	}
	b, err := content.ReadBlob(ctx, store, desc)
	if err != nil {
		return config, err
	}
	return config, json.Unmarshal(b, &config)
}

// checkRecords looks for the records of the reference; own is the one of its name.
// Without a configuration the name of one of them is not known, and the image is to
// be healed anyway.
func (p *Puller) checkRecords(ctx context.Context, ref Reference, own images.Image, have *Presence) error {
	if have.ID == "" {
		return nil
	}
	for _, name := range ref.names(have.Target.Digest, have.ID) {
		img, err := own, error(nil)
		if name != own.Name {
			img, err = p.client.ImageService().Get(ctx, name)
		}
		if errdefs.IsNotFound(err) {
			have.Missing = append(have.Missing, "record "+name)
			continue
		}
		if err != nil {
			return fmt.Errorf("reading the image record %s: %w", name, err)
		}
		have.Names = append(have.Names, name)
		have.Pinned = have.Pinned || img.Labels[pinnedLabel] == pinnedValue
		if !isManaged(img) {
			have.Missing = append(have.Missing, "label "+managedLabel+" of record "+name)
		}
		// The ID is shared by all indexes with this configuration, so its target may be
		// another one's.
		if name != have.ID.String() && img.Target.Digest != have.Target.Digest {
			have.Missing = append(have.Missing, "target of record "+name)
		}
	}
	return nil
}
