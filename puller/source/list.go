package source

import (
	"context"
	"slices"
)

// List is a fixed list of images: KIP_IMAGES, or the arguments of a command.
type List struct {
	name   string
	images []string
}

// NewList returns the source with this name ("static" or "cli") that wants these images, in their order. Space around
// an image is dropped, and so are repeated and empty ones: KIP_IMAGES="" is an empty list, not a list of one empty
// name as in the puller that kip replaces.
func NewList(name string, images []string) List {
	return List{name: name, images: clean(images)}
}

// Name returns the name that NewList was given.
func (l List) Name() string { return l.name }

// Images returns the list. It never fails and never warns.
func (l List) Images(context.Context) (Answer, error) {
	return Answer{Images: slices.Clone(l.images)}, nil
}
