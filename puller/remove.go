package puller

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
)

// Remove deletes the image record of a name, which is taken as it stands. With
// allNames set, it deletes all records of that image: those that CRI lists as one,
// since they have the same configuration. With wait set, it waits until what
// nothing refers to has gone. It returns the names that it has deleted; an error
// for which errdefs.IsNotFound is true says that there is no such record.
func (p *Puller) Remove(ctx context.Context, name string, allNames, wait bool) ([]string, error) {
	ctx, cancel := limited(p.context(ctx), tidyLimit)
	defer cancel()
	names := []string{name}
	if allNames {
		var err error
		if names, err = p.namesOf(ctx, name); err != nil {
			return nil, err
		}
	}
	var removed []string
	for i, n := range names {
		var opts []images.DeleteOpt
		if wait && i == len(names)-1 {
			opts = append(opts, images.SynchronousDelete())
		}
		err := p.client.ImageService().Delete(ctx, n, opts...)
		if errdefs.IsNotFound(err) && allNames {
			continue // somebody else was faster
		}
		if err != nil {
			return removed, fmt.Errorf("removing the image record %s: %w", n, err)
		}
		removed = append(removed, n)
	}
	return removed, nil
}

// namesOf returns the records of the image that a name stands for.
func (p *Puller) namesOf(ctx context.Context, name string) ([]string, error) {
	store := p.client.ContentStore()
	own, err := p.record(ctx, name)
	if err != nil {
		return nil, err
	}
	id, err := own.Config(ctx, store, platforms.Default())
	if err != nil && !errdefs.IsNotFound(err) {
		return nil, fmt.Errorf("reading the image %s: %w", name, err)
	}
	all, err := p.client.ImageService().List(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing the images: %w", err)
	}
	var names []string
	for _, img := range all {
		same := img.Target.Digest == own.Target.Digest
		if !same && id.Digest != "" {
			other, err := img.Config(ctx, store, platforms.Default())
			same = err == nil && other.Digest == id.Digest
		}
		if same {
			names = append(names, img.Name)
		}
	}
	return names, nil
}
