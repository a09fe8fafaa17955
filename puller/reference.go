package puller

import (
	"fmt"
	"strings"

	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

// Reference is an image reference in the form in which CRI writes it: with
// registry and tag, or with a digest and no tag.
type Reference struct {
	named reference.Named
}

// ParseReference normalises a reference as CRI does (ParseDockerRef): docker.io
// and library/ and :latest are filled in, and a tag beside a digest is dropped.
func ParseReference(s string) (Reference, error) {
	named, err := reference.ParseDockerRef(s)
	if err != nil {
		return Reference{}, fmt.Errorf("%q is no image reference: %w", s, err)
	}
	return Reference{named}, nil
}

// String returns the normalised reference, which is the name of its record.
func (r Reference) String() string { return r.named.String() }

// digested tells whether the reference is by digest.
func (r Reference) digested() bool {
	_, ok := r.named.(reference.Digested)
	return ok
}

// digestName is the name of the record for a digest in this repository.
func (r Reference) digestName(d digest.Digest) string {
	return r.named.Name() + "@" + d.String()
}

// HasRegistry tells whether an image name says which registry it is from. A first
// part is a registry's when it is localhost or has a dot or a colon; all others
// are Docker Hub's (distribution/reference also takes upper case for a registry).
func HasRegistry(name string) bool {
	first, _, ok := strings.Cut(name, "/")
	return ok && (first == "localhost" || strings.ContainsAny(first, ".:"))
}
