package puller

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/image-spec/identity"
)

// pinnedByLabel is on the records that kip has pinned, beside CRI's label; its
// value is the image's reference. Pins of others are left alone.
const pinnedByLabel = "kip/pinned-for"

// pin pins the present images in their order while the budget lasts, and unpins
// those that it no longer has room for. What several of them share counts once.
func (p *Puller) pin(ctx context.Context, results []Result) error {
	if p.opts.PinBudget == 0 {
		return nil
	}
	left := p.opts.PinBudget
	counted := map[string]int64{}
	over := map[string]bool{}
	var errs []error
	for i := range results {
		r := &results[i]
		if r.State != Present {
			continue
		}
		parts, err := p.parts(ctx, *r)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		need := int64(0)
		for part, n := range parts {
			if _, ok := counted[part]; !ok {
				need += n
			}
		}
		if need > left {
			over[r.Ref] = true
			slog.Debug("the pin budget has no room for an image", "image", r.Ref, "need", need, "left", left)
			continue
		}
		left -= need
		maps.Copy(counted, parts)
		if err := p.pinRecords(ctx, r); err != nil {
			errs = append(errs, err)
		}
	}
	errs = append(errs, p.unpin(ctx, func(ref string) bool { return over[ref] }))
	for i := range results {
		if r := &results[i]; over[r.Ref] && r.Pinned {
			pinned, err := p.isPinned(ctx, r.Names) // somebody else may have pinned it
			r.Pinned = pinned
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// isPinned tells whether one of the records keeps its image.
func (p *Puller) isPinned(ctx context.Context, names []string) (bool, error) {
	for _, name := range names {
		img, err := p.record(ctx, name)
		if err != nil {
			return false, err
		}
		if img.Labels[pinnedLabel] == pinnedValue {
			return true, nil
		}
	}
	return false, nil
}

// parts are what an image takes of the disk: the blobs that are at the daemon and
// the snapshots, by their names.
func (p *Puller) parts(ctx context.Context, r Result) (map[string]int64, error) {
	store := p.client.ContentStore()
	img, err := p.record(ctx, r.Ref)
	if err != nil {
		return nil, err
	}
	manifest, err := images.Manifest(ctx, store, img.Target, platforms.Default())
	if err != nil {
		return nil, fmt.Errorf("reading the manifest of %s: %w", r.Ref, err)
	}
	diffIDs, err := images.RootFS(ctx, store, manifest.Config)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration of %s: %w", r.Ref, err)
	}
	parts := map[string]int64{}
	for _, l := range manifest.Layers {
		if _, err := store.Info(ctx, l.Digest); err == nil {
			parts[l.Digest.String()] = l.Size
		} else if !errdefs.IsNotFound(err) {
			return nil, fmt.Errorf("reading the layer %s: %w", l.Digest, err)
		}
	}
	for _, name := range p.settings.Snapshotters {
		for _, chain := range identity.ChainIDs(slices.Clone(diffIDs)) {
			usage, err := p.client.SnapshotService(name).Usage(ctx, chain.String())
			if err != nil {
				return nil, fmt.Errorf("reading the size of the snapshot %s: %w", chain, err)
			}
			parts[name+" "+chain.String()] = usage.Size
		}
	}
	return parts, nil
}

// pinRecords pins an image by each of its names, as CRI does.
func (p *Puller) pinRecords(ctx context.Context, r *Result) error {
	store := p.client.ImageService()
	for _, name := range r.Names {
		img, err := p.record(ctx, name)
		if err != nil {
			return err
		}
		if img.Labels[pinnedLabel] != pinnedValue {
			img.Labels = map[string]string{pinnedLabel: pinnedValue, pinnedByLabel: r.Ref}
			if _, err := store.Update(ctx, img, "labels."+pinnedLabel, "labels."+pinnedByLabel); err != nil {
				return fmt.Errorf("pinning the image record %s: %w", name, err)
			}
		}
	}
	r.Pinned = true
	return nil
}

// unpin takes kip's pins, under whatever name, from the images that are asked for.
func (p *Puller) unpin(ctx context.Context, which func(ref string) bool) error {
	store := p.client.ImageService()
	list, err := store.List(ctx, `labels."`+pinnedByLabel+`"`)
	if err != nil {
		return fmt.Errorf("listing the pinned images: %w", err)
	}
	for _, img := range list {
		if img.Labels[pinnedByLabel] == "" || !which(img.Labels[pinnedByLabel]) {
			continue
		}
		img.Labels = map[string]string{} // an empty label is none
		if _, e := store.Update(ctx, img, "labels."+pinnedLabel, "labels."+pinnedByLabel); e != nil && !errdefs.IsNotFound(e) {
			err = errors.Join(err, fmt.Errorf("unpinning the image record %s: %w", img.Name, e))
		}
	}
	return err
}
