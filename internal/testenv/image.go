package testenv

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Images makes images in a content store of its own.
type Images struct {
	t     T
	store content.Store
}

// Layer is a compressed layer in the store.
type Layer struct {
	ocispec.Descriptor
	diffID digest.Digest
}

// Image is a made image, not yet in any registry.
type Image struct {
	// Manifest is the descriptor that a reference resolves to.
	Manifest ocispec.Descriptor
	// ID is the digest of the configuration, which CRI calls the image's ID.
	ID digest.Digest
	// Layers are its layers, the base first.
	Layers []Layer
	// Others are the manifests beside it in an index.
	Others []digest.Digest
}

// NewImages returns a maker with an empty store.
func NewImages(t T) *Images {
	t.Helper()
	store, err := local.NewStore(filepath.Join(Dir(t), "content"))
	if err != nil {
		t.Fatalf("making a content store: %v", err)
	}
	return &Images{t: t, store: store}
}

// File is one regular file of a layer.
type File struct {
	Path string
	Mode int64
	Data []byte
}

// Layer makes a layer of files.
func (m *Images) Layer(files ...File) Layer {
	m.t.Helper()
	var entries []Entry
	for _, f := range files {
		entries = append(entries, Entry{tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Mode: f.Mode}, f.Data})
	}
	return m.Pack(ocispec.MediaTypeImageLayerGzip, compression.Gzip, entries...)
}

// Image makes an image for this machine's platform that runs /hello, which one
// of its layers must hold (see Hello).
func (m *Images) Image(layers ...Layer) Image {
	m.t.Helper()
	return m.ImageFor(platforms.Normalize(platforms.DefaultSpec()), layers...)
}

// config makes the configuration of an image.
func (m *Images) config(p ocispec.Platform, layers []Layer) ocispec.Descriptor {
	m.t.Helper()
	config := ocispec.Image{Platform: p, Config: ocispec.ImageConfig{Entrypoint: []string{"/hello"}}, RootFS: ocispec.RootFS{Type: "layers"}}
	for _, l := range layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, l.diffID)
	}
	return m.addJSON(ocispec.MediaTypeImageConfig, config)
}

// manifest makes the manifest of an image.
func (m *Images) manifest(config ocispec.Descriptor, layers []Layer) Image {
	m.t.Helper()
	manifest := ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config, Layers: []ocispec.Descriptor{},
	}
	for _, l := range layers {
		manifest.Layers = append(manifest.Layers, l.Descriptor)
	}
	return Image{Manifest: m.addJSON(ocispec.MediaTypeImageManifest, manifest), ID: config.Digest, Layers: layers}
}

// Chain is the name of the image's snapshot.
func (image Image) Chain() digest.Digest {
	var diffIDs []digest.Digest
	for _, l := range image.Layers {
		diffIDs = append(diffIDs, l.diffID)
	}
	return identity.ChainID(diffIDs)
}

func (m *Images) addJSON(mediaType string, v any) ocispec.Descriptor {
	m.t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		m.t.Fatalf("making an image: %v", err)
	}
	return m.add(mediaType, b)
}

func (m *Images) add(mediaType string, blob []byte) ocispec.Descriptor {
	m.t.Helper()
	desc := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(blob), Size: int64(len(blob))}
	err := content.WriteBlob(context.Background(), m.store, desc.Digest.String(), bytes.NewReader(blob), desc)
	if err != nil {
		m.t.Fatalf("storing a blob: %v", err)
	}
	return desc
}

// hello is the static program of the images, built once in a process.
var hello struct {
	sync.Mutex
	binary []byte
}

// Hello returns a static program that writes "hello from NAME", where the file
// /kernel-name holds NAME, and then waits for its end.
func Hello(t T) File {
	t.Helper()
	hello.Lock()
	defer hello.Unlock()
	if hello.binary == nil {
		path := filepath.Join(Dir(t), "hello")
		err := command(Tree(t), "env", "CGO_ENABLED=0", "go", "build", "-ldflags=-s -w", "-o", path, "./internal/testenv/hello")
		if err != nil {
			t.Fatalf("building the program of the images: %v", err)
		}
		if hello.binary, err = os.ReadFile(path); err != nil {
			t.Fatalf("building the program of the images: %v", err)
		}
	}
	return File{Path: "hello", Mode: 0o755, Data: hello.binary}
}

// Kernels makes n images that share two base layers and differ in the last.
func (m *Images) Kernels(n int) []Image {
	m.t.Helper()
	base := []Layer{
		m.Layer(Hello(m.t)),
		m.Layer(noise("shared-by-all-kernels", 2<<20)),
	}
	var kernels []Image
	for i := range n {
		own := m.Layer(File{Path: "kernel-name", Mode: 0o644, Data: []byte{'k', byte('1' + i)}})
		kernels = append(kernels, m.Image(base[0], base[1], own))
	}
	return kernels
}

// Noise makes a layer with one file of n bytes that do not compress, the same for the
// same name. The layer is not compressed either, which takes long with the race
// detector.
func (m *Images) Noise(name string, n int) Layer {
	m.t.Helper()
	f := noise(name, n)
	return m.Pack(ocispec.MediaTypeImageLayer, compression.Uncompressed, Entry{tar.Header{Typeflag: tar.TypeReg, Name: f.Path, Mode: f.Mode}, f.Data})
}

func noise(name string, n int) File {
	data := make([]byte, n)
	seed := sha256.Sum256([]byte(name))
	rand.NewChaCha8(seed).Read(data)
	return File{Path: name, Mode: 0o644, Data: data}
}

// RealFiles takes n bytes of Go's own source and programs, after the first skip
// bytes of them. The mark stands before each file, so that layers with different
// marks have no blob in common.
func RealFiles(t T, mark string, skip, n int64) []File {
	t.Helper()
	out, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatalf("finding Go's files: %v", err)
	}
	root := strings.TrimSpace(string(out))
	var files []File
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if skip -= int64(len(data)); skip > 0 {
			return nil
		}
		rel, _ := filepath.Rel(root, path)
		files = append(files, File{Path: "opt/" + mark + "/" + rel, Mode: 0o644, Data: append([]byte(mark+"\n"), data...)})
		if n -= int64(len(data)); n < 0 {
			return fs.SkipAll
		}
		return nil
	})
	if err != nil {
		t.Fatalf("reading Go's files: %v", err)
	}
	return files
}
