package puller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Presence is what of an image is at the daemon. An image is present when nothing
// is missing: its manifest and configuration can be read, its snapshot is there in
// each snapshotter in use, and so are the records that CRI writes. The blobs of its
// layers are of no concern: daemons may forget those that are unpacked.
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

	chain   digest.Digest // of the snapshot, empty without layers
	content bool          // manifest, configuration and snapshots are there
	broken  digest.Digest // a blob that is there and cannot be read
}

// Check reports what of an image is at the daemon. It asks no registry.
func (p *Puller) Check(ctx context.Context, ref Reference) (Presence, error) {
	ctx = p.context(ctx)
	var have Presence
	img, err := p.record(ctx, ref.String())
	if errdefs.IsNotFound(err) {
		have.Missing = []string{"record " + ref.String()}
		return have, nil
	}
	if err != nil {
		return have, err
	}
	have.Target = &img.Target
	if err := p.checkContent(ctx, &have); err != nil {
		return have, err
	}
	return have, p.checkRecords(ctx, ref, img, &have)
}

// checkContent looks for manifest, configuration and snapshots.
func (p *Puller) checkContent(ctx context.Context, have *Presence) error {
	store := verified{p.client.ContentStore()}
	manifest, err := images.Manifest(ctx, store, *have.Target, platforms.Default())
	if err != nil {
		return have.lack("manifest of "+have.Target.Digest.String(), err)
	}
	var config ocispec.Image
	b, err := store.read(ctx, manifest.Config)
	if err == nil {
		err = json.Unmarshal(b, &config)
	}
	if err != nil {
		return have.lack("config "+manifest.Config.Digest.String(), err)
	}
	have.ID = manifest.Config.Digest
	have.content = true
	if len(config.RootFS.DiffIDs) == 0 { // FROM scratch, with nothing in it
		return nil
	}
	have.chain = identity.ChainID(config.RootFS.DiffIDs)
	for _, name := range p.settings.Snapshotters {
		if err := p.checkSnapshot(ctx, name, have); err != nil {
			return err
		}
	}
	return p.checkReferences(ctx, have)
}

// lack notes a part that cannot be read; other errors are the daemon's and are
// returned.
func (have *Presence) lack(part string, err error) error {
	var broken *brokenError
	switch {
	case errdefs.IsNotFound(err):
	case errors.As(err, &broken):
		have.broken = broken.digest
		part += " (" + broken.Error() + ")"
	default:
		return fmt.Errorf("reading the %s: %w", part, err)
	}
	have.Missing = append(have.Missing, part)
	return nil
}

func (p *Puller) checkSnapshot(ctx context.Context, snapshotter string, have *Presence) error {
	info, err := p.client.SnapshotService(snapshotter).Stat(ctx, have.chain.String())
	if errdefs.IsNotFound(err) || err == nil && info.Kind != snapshots.KindCommitted {
		have.content = false
		have.Missing = append(have.Missing, fmt.Sprintf("snapshot %s in %s", have.chain, snapshotter))
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the snapshot %s: %w", have.chain, err)
	}
	return nil
}

// snapshotRef is the label by which a configuration keeps the snapshot of its
// image from the daemon's garbage collection.
func snapshotRef(snapshotter string) string { return "containerd.io/gc.ref.snapshot." + snapshotter }

// checkReferences looks for the labels that hold the snapshots: an image that was
// unpacked by hand may have none.
func (p *Puller) checkReferences(ctx context.Context, have *Presence) error {
	info, err := p.client.ContentStore().Info(ctx, have.ID)
	if err != nil {
		return fmt.Errorf("reading the labels of the config %s: %w", have.ID, err)
	}
	for _, name := range p.settings.Snapshotters {
		if info.Labels[snapshotRef(name)] != have.chain.String() {
			have.Missing = append(have.Missing, fmt.Sprintf("label %s of config %s", snapshotRef(name), have.ID))
		}
	}
	return nil
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
			img, err = p.record(ctx, name)
		}
		if errdefs.IsNotFound(err) {
			have.Missing = append(have.Missing, "record "+name)
			continue
		}
		if err != nil {
			return err
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
	slices.Sort(have.Missing)
	return nil
}
