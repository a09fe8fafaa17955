// Package source says which images are wanted on the node.
package source

import (
	"context"
	"slices"
	"strings"
)

// Source names the images that are wanted.
type Source interface {
	// Name is the source's name in reports: gateway, static, cli.
	Name() string
	// Images asks the source. An answer may come with warnings about items that were
	// left out; an error means that the source could not be asked.
	Images(ctx context.Context) (Answer, error)
}

// Answer is what a source wants.
type Answer struct {
	// Images are references as the source has them, trimmed, none of them empty and
	// each once, in a stable order.
	Images []string
	// Warnings are one line each.
	Warnings []string
}

// add takes an image unless it is empty or there already.
func (a *Answer) add(image string) {
	image = strings.TrimSpace(image)
	if image != "" && !slices.Contains(a.Images, image) {
		a.Images = append(a.Images, image)
	}
}
