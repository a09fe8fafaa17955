package puller_test

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/pkg/archive/compression"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
)

// oddImage is an image such as people really push, and what becomes of it.
type oddImage struct {
	name   string
	make   func(m *testenv.Images) testenv.Image
	reason puller.Reason // none: it is present
	says   string        // in the message of a failed one
	files  []string      // what a container sees, among others: path, type, mode, where a link leads
	hidden []string      // what it does not see
	// unsupportedBy are daemons for which the reason is UnsupportedLayer.
	unsupportedBy []string
}

func file(path string, data string) testenv.Entry {
	return testenv.Entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: path, Mode: 0o644}, Data: []byte(data)}
}

func link(kind byte, path, target string) testenv.Entry {
	return testenv.Entry{Header: tar.Header{Typeflag: kind, Name: path, Linkname: target, Mode: 0o644}}
}

func dir(path string) testenv.Entry {
	return testenv.Entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: path, Mode: 0o755}}
}

const gzipLayer = ocispec.MediaTypeImageLayerGzip

// here is the platform of this machine.
const here = "linux/" + runtime.GOARCH

// otherArch is one that this machine is not.
func otherArch() string {
	if runtime.GOARCH == "arm64" {
		return "linux/amd64"
	}
	return "linux/arm64"
}

func oddImages() []oddImage {
	gz := func(m *testenv.Images, e ...testenv.Entry) testenv.Layer {
		return m.Pack(gzipLayer, compression.Gzip, e...)
	}
	return []oddImage{
		{name: "130 layers", make: func(m *testenv.Images) testenv.Image {
			var layers []testenv.Layer
			for i := range 130 {
				layers = append(layers, gz(m, file(fmt.Sprintf("f%d", i), fmt.Sprint(i))))
			}
			return m.Image(layers...)
		}},
		{name: "one layer three times", make: func(m *testenv.Images) testenv.Image {
			l := gz(m, file("a", "three times"))
			return m.Image(l, l, l)
		}, files: []string{"a f 644"}},
		{name: "an empty layer between two", make: func(m *testenv.Images) testenv.Image {
			return m.Image(gz(m, file("a", "below an empty one")), gz(m), gz(m, file("b", "above an empty one")))
		}, files: []string{"a f 644", "b f 644"}},
		{name: "no layers", make: func(m *testenv.Images) testenv.Image { return m.Image() }},
		{name: "zstd", make: func(m *testenv.Images) testenv.Image {
			return m.Image(m.Pack(ocispec.MediaTypeImageLayerZstd, compression.Zstd, file("z", "zstd")))
		}, files: []string{"z f 644"}},
		{name: "Docker's zstd", make: func(m *testenv.Images) testenv.Image {
			return m.Image(m.Pack("application/vnd.docker.image.rootfs.diff.tar.zstd", compression.Zstd, file("z", "docker zstd")))
		}, files: []string{"z f 644"}, unsupportedBy: []string{testenv.V16, testenv.V17}},
		{name: "not compressed", make: func(m *testenv.Images) testenv.Image {
			return m.Image(m.Pack(ocispec.MediaTypeImageLayer, compression.Uncompressed, file("t", "plain tar")))
		}, files: []string{"t f 644"}},
		{name: "gzip labelled as tar", make: func(m *testenv.Images) testenv.Image {
			return m.Image(m.Pack(ocispec.MediaTypeImageLayer, compression.Gzip, file("t", "mislabelled")))
		}, reason: puller.BadLayer, says: "begins with 1f8b"},
		{name: "an encrypted layer", make: func(m *testenv.Images) testenv.Image {
			return m.Image(m.Pack(gzipLayer+"+encrypted", compression.Gzip, file("t", "encrypted")))
		}, reason: puller.UnsupportedLayer, says: gzipLayer + "+encrypted"},
		{name: "a layer that is no archive", make: func(m *testenv.Images) testenv.Image {
			return m.Image(m.Raw(gzipLayer, []byte("<html>not a layer</html>")))
		}, reason: puller.BadLayer, says: "begins with 3c68746d"},
		{name: "a diff ID that does not fit", make: func(m *testenv.Images) testenv.Image {
			a, b := gz(m, file("a", "one")), gz(m, file("b", "another"))
			return m.Manifest(m.Image(a), b)
		}, reason: puller.BadLayer, says: "wrong diff id"},
		{name: "fewer layers than diff IDs", make: func(m *testenv.Images) testenv.Image {
			a, b := gz(m, file("a", "one")), gz(m, file("b", "another"))
			return m.Manifest(m.Image(a, b), a)
		}, reason: puller.NotAnImage, says: "1 layers"},
		{name: "hard links", make: func(m *testenv.Images) testenv.Image {
			return m.Image(gz(m, file("a", "linked"), link(tar.TypeLink, "hard", "a"), link(tar.TypeLink, "absolute", "/a"),
				link(tar.TypeSymlink, "soft", "nowhere"), link(tar.TypeLink, "hard-to-soft", "soft")))
		}, files: []string{"hard f 644", "absolute f 644", "hard-to-soft l 777 nowhere"}},
		{name: "a hard link into the layer below", make: func(m *testenv.Images) testenv.Image { // CRI cannot unpack it either
			return m.Image(gz(m, file("below", "1")), gz(m, link(tar.TypeLink, "above", "below")))
		}, reason: puller.BadLayer, says: "no such file"},
		{name: "a folder that only the layer below describes", make: func(m *testenv.Images) testenv.Image {
			d := dir("private")
			d.Mode = 0o700
			return m.Image(gz(m, d, file("private/a", "1")), gz(m, file("private/b", "2")))
		}, files: []string{"private d 700", "private/a f 644", "private/b f 644"}},
		{name: "a parent that is not in the archive", make: func(m *testenv.Images) testenv.Image {
			return m.Image(gz(m, file("not/there/a", "deep")))
		}, files: []string{"not d 755", "not/there d 755", "not/there/a f 644"}},
		{name: "whiteouts", make: func(m *testenv.Images) testenv.Image {
			return m.Image(
				gz(m, dir("d"), file("d/gone", "1"), file("gone", "1"), dir("e"), file("e/gone", "1"), file("stays", "1")),
				gz(m, file(".wh.gone", ""), dir("d"), file("d/.wh..wh..opq", ""), file("d/new", "2")),
				gz(m, dir("e"), file("e/new", "3"), file("e/.wh..wh..opq", "")),
			)
		}, files: []string{"stays f 644", "d/new f 644", "e/new f 644"}, hidden: []string{"gone f 644", "d/gone f 644", "e/gone f 644", ".wh.gone f 644"}},
		{name: "extended attributes", make: func(m *testenv.Images) testenv.Image {
			f := file("ping", "setcap")
			f.PAXRecords = map[string]string{
				"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
				"SCHILY.xattr.security.selinux":    "system_u:object_r:unlabeled_t:s0\x00",
				"SCHILY.xattr.user.note":           "here",
			}
			return m.Image(gz(m, f))
		}, files: []string{"ping f 644"}},
		{name: "devices and pipes", make: func(m *testenv.Images) testenv.Image {
			return m.Image(gz(m,
				testenv.Entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3, Mode: 0o666}},
				testenv.Entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "pipe", Mode: 0o666}}))
		}, files: []string{"null c 666", "pipe p 666"}},
		{name: "a path that leads out", make: func(m *testenv.Images) testenv.Image {
			return m.Image(gz(m, file("../../../../../../escaped", "out"), link(tar.TypeSymlink, "up", "/"), file("up/escaped-by-link", "out")))
		}, files: []string{"escaped f 644"}},
		{name: "GNU's form of a sparse file", make: func(m *testenv.Images) testenv.Image { return m.Image(m.Sparse("gnu", 4<<30)) }, reason: puller.BadLayer, says: "unhandled tar header"},
		{name: "POSIX's form of a sparse file", make: func(m *testenv.Images) testenv.Image { return m.Image(m.Sparse("posix", 64<<20)) }, files: []string{"holes f 644"}},

		{name: "an index with attestations", make: func(m *testenv.Images) testenv.Image {
			a, b := m.Image(gz(m, file("here", "1"))), m.Image(gz(m, file("elsewhere", "1")))
			return m.Index(m.Attestation(a), m.Attestation(b), b.For(otherArch()), a.For(here))
		}, files: []string{"here f 644"}},
		{name: "a nested index", make: func(m *testenv.Images) testenv.Image {
			return m.Index(testenv.Member{Image: m.Index(m.Image(gz(m, file("nested", "1"))).For(here))})
		}, files: []string{"nested f 644"}},
		{name: "an index that says no platform", make: func(m *testenv.Images) testenv.Image {
			return m.Index(testenv.Member{Image: m.Image(gz(m, file("no-platform", "1")))})
		}, files: []string{"no-platform f 644"}},
		{name: "gzip and zstd with one configuration", make: func(m *testenv.Images) testenv.Image {
			e := file("twice", "packed")
			a := m.Image(gz(m, e))
			return m.Index(a.For(here), m.Manifest(a, m.Pack(ocispec.MediaTypeImageLayerZstd, compression.Zstd, e)).For(here))
		}, files: []string{"twice f 644"}},
		{name: "an index for others only", make: func(m *testenv.Images) testenv.Image {
			a := m.Image(gz(m, file("a", "others")))
			return m.Index(a.For(otherArch()), a.For("windows/"+runtime.GOARCH), m.Attestation(a))
		}, reason: puller.NoMatchingPlatform, says: "no match for " + here + " (has: " + otherArch() + ", windows/" + runtime.GOARCH + ")"},
		{name: "a manifest for others", make: func(m *testenv.Images) testenv.Image {
			return m.ImageFor(*m.Image().For(otherArch()).Platform, gz(m, file("a", "another machine")))
		}, reason: puller.NoMatchingPlatform, says: "it is for " + otherArch()},
		{name: "a helm chart", make: func(m *testenv.Images) testenv.Image {
			return m.Artifact("application/vnd.cncf.helm.config.v1+json", "application/vnd.cncf.helm.chart.content.v1.tar+gzip")
		}, reason: puller.NotAnImage, says: "helm.config"},
		{name: "a signature", make: func(m *testenv.Images) testenv.Image {
			return m.Artifact(ocispec.MediaTypeImageConfig, "application/vnd.dev.cosign.simplesigning.v1+json")
		}, reason: puller.NotAnImage, says: "simplesigning"},
	}
}

func TestOddImages(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	for i, odd := range oddImages() {
		t.Run(odd.name, func(t *testing.T) {
			n := n.in(t)
			img := odd.make(n.images)
			ref := n.reg.Push(n.images, img, fmt.Sprintf("team/odd:%d", i))
			want := odd.reason
			if slices.Contains(odd.unsupportedBy, testenv.UnderTest()) {
				want = puller.UnsupportedLayer
			}
			n.reg.Forget()
			res := n.pull(ref)
			if res.Reason != want || res.Attempts != 1 {
				t.Fatalf("reason %q after %d attempts, want %q: %s", res.Reason, res.Attempts, want, res.Message)
			}
			n.noLeases()
			if want != "" {
				n.failsAtOnce(ref, odd.says)
				return
			}
			if got := n.ImageStatus(ref); got == nil || got.Id != img.ID.String() {
				t.Errorf("CRI's ImageStatus: %v, want ID %s", got, img.ID)
			}
			got := n.fetchedOnce()
			for _, a := range img.Others {
				if slices.Contains(got, a.String()) {
					t.Errorf("fetched what is for others: %s", a)
				}
			}
			if len(odd.files) > 0 {
				look(t, n.Files("overlayfs", img.Chain()), odd)
			}
		})
	}
	if _, err := os.Stat("/escaped"); err == nil {
		t.Error("a layer wrote outside of its root")
	}
	for _, name := range []string{"escaped", "escaped-by-link"} {
		found, _ := filepath.Glob(filepath.Join(n.Root, name))
		if len(found) > 0 {
			t.Errorf("a layer wrote outside of its root: %q", found)
		}
	}
}

// failsAtOnce pulls again, twice, an image that cannot become better: its message says why,
// and nothing of it is fetched.
func (n *node) failsAtOnce(ref, says string) {
	n.t.Helper()
	n.reg.Forget()
	n.pull(ref)
	res := n.pull(ref)
	if !strings.Contains(res.Message, says) || strings.Count(res.Message, "not tried again") != 1 {
		n.t.Errorf("the message does not say %q, or, once, that it is not tried again: %s", says, res.Message)
	}
	if got := fetched(n.reg.Requests()); len(got) > 0 {
		n.t.Errorf("it fetched %q", got)
	}
}

func look(t *testing.T, got string, want oddImage) {
	t.Helper()
	lines := strings.Split(got, "\n")
	for i, l := range lines {
		lines[i] = strings.TrimSpace(l)
	}
	for _, f := range want.files {
		if !slices.Contains(lines, f) {
			t.Errorf("a container does not see %q, but\n%s", f, got)
		}
	}
	for _, f := range want.hidden {
		if slices.Contains(lines, f) {
			t.Errorf("a container sees %q", f)
		}
	}
}
