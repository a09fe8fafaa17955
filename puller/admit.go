package puller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// errNotRunnable is in the error of something that is in a registry as images are,
// and that no container can be made of: a chart, a signature, a file.
var errNotRunnable = errors.New("it is not an image that can be run")

// errOtherPlatform is in the error of an image that is for other machines.
var errOtherPlatform = errors.New("it is not made for this platform")

// admission looks at a manifest and its configuration before the first layer is
// fetched: whether they are an image for this machine, and whether there is room
// for it on the disk.
type admission struct {
	p *Puller

	mu      sync.Mutex
	layers  map[digest.Digest][]ocispec.Descriptor // by configuration
	need    int64                                  // what was asked of the disk
	release func()                                 // gives that back
}

// close gives back what was reserved.
func (a *admission) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.release != nil {
		a.release()
	}
}

// wrap puts the admission between the handler that fetches and the unpacker, which
// asks for layers once the handler is through with the configuration.
func (a *admission) wrap(h images.Handler) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		children, err := h.Handle(ctx, desc)
		switch {
		case err != nil:
			err = a.explain(ctx, desc, err)
		case images.IsManifestType(desc.MediaType):
			err = a.manifest(ctx, desc)
		case images.IsConfigType(desc.MediaType):
			err = a.config(ctx, desc)
		}
		return children, err
	})
}

// explain says what is behind an error of the fetching handler: that the daemon has
// the blob and cannot read it, or that an index has nothing for this platform.
func (a *admission) explain(ctx context.Context, desc ocispec.Descriptor, err error) error {
	var broken *brokenError
	if images.IsLayerType(desc.MediaType) {
		return err
	}
	if _, e := (verified{a.p.client.ContentStore()}).read(ctx, desc); errors.As(e, &broken) {
		return broken
	}
	if !images.IsIndexType(desc.MediaType) || !strings.Contains(err.Error(), "no match for platform") { // images.LimitManifests
		return err
	}
	var index ocispec.Index
	if err := a.read(ctx, desc, &index); err != nil {
		return err
	}
	has := []string{}
	for _, m := range index.Manifests {
		if m.Platform != nil && m.Platform.OS != "unknown" { // attestations are for unknown/unknown
			has = append(has, platforms.FormatAll(*m.Platform))
		}
	}
	return fmt.Errorf("%w: no match for %s (has: %s)", errOtherPlatform, platforms.DefaultString(), strings.Join(has, ", "))
}

// manifest refuses what is no image, and keeps the layers for the configuration.
func (a *admission) manifest(ctx context.Context, desc ocispec.Descriptor) error {
	var m ocispec.Manifest
	if err := a.read(ctx, desc, &m); err != nil {
		return err
	}
	if !images.IsConfigType(m.Config.MediaType) {
		return fmt.Errorf("%w: its configuration is of the type %q", errNotRunnable, m.Config.MediaType)
	}
	for _, l := range m.Layers {
		if !images.IsLayerType(l.MediaType) {
			return fmt.Errorf("%w: its layer %s is of the type %q", errNotRunnable, l.Digest, l.MediaType)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.layers[m.Config.Digest] = m.Layers
	return nil
}

// config refuses an image for other machines, and one for which there is no room.
func (a *admission) config(ctx context.Context, desc ocispec.Descriptor) error {
	var config ocispec.Image
	if err := a.read(ctx, desc, &config); err != nil {
		return err
	}
	if config.OS != "" && config.Architecture != "" && !platforms.Default().Match(config.Platform) {
		return fmt.Errorf("%w: it is for %s, and this machine is %s", errOtherPlatform, platforms.Format(config.Platform), platforms.DefaultString())
	}
	a.mu.Lock()
	layers := a.layers[desc.Digest]
	a.mu.Unlock()
	if len(layers) != len(config.RootFS.DiffIDs) {
		return fmt.Errorf("%w: its manifest has %d layers, and its configuration %d", errNotRunnable, len(layers), len(config.RootFS.DiffIDs))
	}
	a.close() // what was reserved for the snapshotter before this one
	release, err := a.p.disk.reserve(ctx, func() (int64, error) {
		need, err := a.p.need(ctx, layers, config.RootFS.DiffIDs)
		a.need = need
		return need, err
	})
	if err == nil {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.release = release
	}
	return err
}

func (a *admission) read(ctx context.Context, desc ocispec.Descriptor, v any) error {
	b, err := verified{a.p.client.ContentStore()}.read(ctx, desc)
	if err != nil {
		return fmt.Errorf("reading %s: %w", desc.Digest, err)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %s cannot be decoded: %w", errNotRunnable, desc.Digest, err)
	}
	return nil
}

// need is what the layers will take of the disk: of those whose snapshot is there,
// nothing, and of those that are downloaded already, their files only.
func (p *Puller) need(ctx context.Context, layers []ocispec.Descriptor, diffIDs []digest.Digest) (int64, error) {
	if p.disk.path == "" { // nobody asks
		return 0, nil
	}
	files := p.opts.Disk.factor() - 1
	need, counted := 0.0, map[digest.Digest]bool{}
	chains := identity.ChainIDs(slices.Clone(diffIDs))
	for _, name := range p.settings.Snapshotters {
		for i, l := range layers {
			_, err := p.client.SnapshotService(name).Stat(ctx, chains[i].String())
			if err == nil {
				continue
			}
			if !errdefs.IsNotFound(err) {
				return 0, fmt.Errorf("reading the snapshot %s: %w", chains[i], err)
			}
			need += float64(l.Size) * files
			if counted[l.Digest] {
				continue
			}
			counted[l.Digest] = true
			if _, err := p.client.ContentStore().Info(ctx, l.Digest); errdefs.IsNotFound(err) {
				need += float64(l.Size)
			} else if err != nil {
				return 0, fmt.Errorf("reading the layer %s: %w", l.Digest, err)
			}
		}
	}
	return int64(need), nil
}
