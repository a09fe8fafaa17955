package testenv

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Entry is one entry of a layer's archive, of any type.
type Entry struct {
	tar.Header
	Data []byte
}

// archive makes a tar of entries.
func (m *Images) archive(entries ...Entry) []byte {
	m.t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.Data))
		if err := w.WriteHeader(&e.Header); err != nil {
			m.t.Fatalf("making a layer: %v", err)
		}
		if _, err := w.Write(e.Data); err != nil {
			m.t.Fatalf("making a layer: %v", err)
		}
	}
	if err := w.Close(); err != nil {
		m.t.Fatalf("making a layer: %v", err)
	}
	return b.Bytes()
}

// Pack makes a layer of entries with a media type and a compression, which need not
// fit each other.
func (m *Images) Pack(mediaType string, c compression.Compression, entries ...Entry) Layer {
	m.t.Helper()
	return m.pack(mediaType, c, m.archive(entries...))
}

func (m *Images) pack(mediaType string, c compression.Compression, archive []byte) Layer {
	m.t.Helper()
	var blob bytes.Buffer
	w, err := compression.CompressStream(&blob, c)
	if err == nil {
		_, err = w.Write(archive)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		m.t.Fatalf("compressing a layer: %v", err)
	}
	return Layer{m.add(mediaType, blob.Bytes()), digest.FromBytes(archive)}
}

// Raw makes a layer of bytes that need not be an archive.
func (m *Images) Raw(mediaType string, blob []byte) Layer {
	m.t.Helper()
	return Layer{m.add(mediaType, blob), digest.FromBytes(blob)}
}

// Sparse makes a layer with one file, holes, of n bytes that are all a hole, in one
// of tar's formats.
func (m *Images) Sparse(format string, n int64) Layer {
	m.t.Helper()
	dir := Dir(m.t)
	f, err := os.Create(filepath.Join(dir, "holes"))
	if err == nil {
		err = f.Truncate(n)
		f.Close()
	}
	if err != nil {
		m.t.Fatalf("making a sparse file: %v", err)
	}
	archive, err := exec.Command("tar", "--format="+format, "--sparse", "-C", dir, "-c", "holes").Output()
	if err != nil {
		m.t.Fatalf("making a layer of a sparse file: %v", err)
	}
	return m.pack(ocispec.MediaTypeImageLayerGzip, compression.Gzip, archive)
}

// ImageFor makes an image for a platform.
func (m *Images) ImageFor(p ocispec.Platform, layers ...Layer) Image {
	m.t.Helper()
	return m.manifest(m.config(p, layers), layers)
}

// Manifest makes another manifest for an image's configuration.
func (m *Images) Manifest(image Image, layers ...Layer) Image {
	m.t.Helper()
	info, err := m.store.Info(context.Background(), image.ID)
	if err != nil {
		m.t.Fatalf("finding a configuration: %v", err)
	}
	return m.manifest(ocispec.Descriptor{MediaType: ocispec.MediaTypeImageConfig, Digest: info.Digest, Size: info.Size}, layers)
}

// Artifact makes what is in registries as images are and is none.
func (m *Images) Artifact(configType, layerType string) Image {
	m.t.Helper()
	return m.manifest(m.add(configType, []byte("{}")), []Layer{{Descriptor: m.add(layerType, []byte("a chart"))}})
}

// Member is a manifest in an index.
type Member struct {
	Image
	// Platform is nil where the index does not say it.
	Platform *ocispec.Platform
}

// For is a member for a platform, in the form of linux/amd64.
func (image Image) For(platform string) Member {
	p := platforms.MustParse(platform)
	return Member{image, &p}
}

// Attestation is a member as build tools put them beside an image.
func (m *Images) Attestation(of Image) Member {
	m.t.Helper()
	a := m.Artifact(ocispec.MediaTypeImageConfig, "application/vnd.in-toto+json")
	a.Manifest.Annotations = map[string]string{
		"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": of.Manifest.Digest.String(),
	}
	return Member{a, &ocispec.Platform{OS: "unknown", Architecture: "unknown"}}
}

// Index makes an index. Its ID is that of the first member for this machine.
func (m *Images) Index(members ...Member) Image {
	m.t.Helper()
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex}
	var whole Image
	var others []digest.Digest
	for _, member := range members {
		desc := member.Image.Manifest
		desc.Platform = member.Platform
		index.Manifests = append(index.Manifests, desc)
		if whole.ID == "" && (desc.Platform == nil || platforms.Default().Match(*desc.Platform)) {
			whole = member.Image
		} else {
			others = append(others, desc.Digest)
		}
	}
	whole.Others = append(whole.Others, others...)
	whole.Manifest = m.addJSON(ocispec.MediaTypeImageIndex, index)
	return whole
}

// Files lists what a container of a snapshot would see, as find does: path,
// type, mode and, of a link, where it leads. The mount is in a namespace that goes with find.
func (c *Containerd) Files(snapshotter string, chain digest.Digest) string {
	c.t.Helper()
	client := c.Client()
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), "k8s.io"), limit)
	defer cancel()
	sn := client.SnapshotService(snapshotter)
	key := "testenv-view-" + chain.Encoded()
	mounts, err := sn.View(ctx, key, chain.String())
	if err != nil {
		c.t.Fatalf("looking into the snapshot %s: %v", chain, err)
	}
	defer sn.Remove(ctx, key)
	target := Dir(c.t)
	args := []string{"-t", mounts[0].Type}
	for _, o := range mounts[0].Options {
		args = append(args, "-o", o)
	}
	args = append(args, mounts[0].Source, target)
	const look = `mount --make-rprivate / && dir=$1 && shift && mount "$@" && cd "$dir" && find . -mindepth 1 -printf '%P %y %m %l\n' | sort`
	cmd := exec.Command("unshare", append([]string{"-m", "sh", "-c", look, "sh", target}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		c.t.Fatalf("looking into the snapshot %s: %v\n%s", chain, err, &stderr)
	}
	return string(out)
}

// BreakBlob empties a blob's file in the daemon's store, as a power failure may.
func (c *Containerd) BreakBlob(d digest.Digest) {
	c.t.Helper()
	path := filepath.Join(c.Root, "io.containerd.content.v1.content", "blobs", d.Algorithm().String(), d.Encoded())
	if err := os.Truncate(path, 0); err != nil {
		c.t.Fatalf("emptying a blob: %v", err)
	}
}
