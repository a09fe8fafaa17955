// Package source says which images are wanted on the node.
package source

import (
	"context"
	"strings"
)

// Source names images.
type Source interface {
	// Name returns the word for the kind of source that reports use: gateway, static, file, configmap or cli.
	Name() string

	// Images asks the source once and returns what it wants. An error means that the source as a whole gave no list.
	// One bad item is a warning, and the others are in the answer. The answer's warnings hold with an error too. A
	// context that ends is found in the error by errors.Is.
	Images(ctx context.Context) (Answer, error)
}

// Answer is what a source wants.
type Answer struct {
	// Images are the names as the source has them, without space around them, none empty, none twice, in an order
	// that is the same as long as the source says the same. They need not be valid references.
	Images []string

	// Warnings are one line each: what was skipped and why, and what is unsafe about the source.
	Warnings []string
}

// clean trims the names, and drops empty ones and all but the first of equal ones.
func clean(images []string) []string {
	var kept []string
	seen := map[string]bool{"": true}
	for _, image := range images {
		image = strings.TrimSpace(image)
		if !seen[image] {
			seen[image] = true
			kept = append(kept, image)
		}
	}
	return kept
}
