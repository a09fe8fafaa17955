package puller_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
)

// chains returns the committed snapshots of a snapshotter.
func (n *node) chains(snapshotter string) []string {
	n.t.Helper()
	var list []string
	err := n.client.SnapshotService(snapshotter).Walk(n.ctx(), func(_ context.Context, i snapshots.Info) error {
		if i.Kind == snapshots.KindCommitted {
			list = append(list, i.Name)
		}
		return nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return list
}

func TestEachSnapshotterInUseIsUnpackedInto(t *testing.T) {
	if testenv.UnderTest() == testenv.V16 {
		t.Log("containerd 1.6 has one snapshotter for all runtimes")
		return
	}
	for _, discard := range []bool{false, true} {
		n := startNode(t, testenv.Config{RuntimeSnapshotter: "native", DiscardUnpackedLayers: discard}, puller.Options{})
		img := n.images.Kernels(1)[0]
		ref := n.reg.Push(n.images, img, "team/kernel:1")
		n.reg.Forget()
		n.mustPull(ref)
		if got := fetched(n.reg.Requests()); len(got) != 2+len(img.Layers) {
			t.Errorf("discard %v: fetched %q", discard, got)
		}
		n.collectGarbage()
		for _, name := range []string{"overlayfs", "native"} {
			if !slices.Contains(n.chains(name), img.Chain().String()) {
				t.Errorf("discard %v: the image is not unpacked in %s", discard, name)
			}
		}
		if discard {
			continue // then its layers are gone, and have to be fetched again
		}
		if err := n.client.SnapshotService("native").Remove(n.ctx(), img.Chain().String()); err != nil {
			t.Fatal(err)
		}
		if have, err := n.puller.Check(t.Context(), parse(t, ref)); err != nil || !slices.Equal(have.Missing, []string{"snapshot " + img.Chain().String() + " in native"}) {
			t.Errorf("missing %q, error %v", have.Missing, err)
		}
		n.reg.Forget()
		if n.mustPull(ref); len(n.reg.Requests()) > 0 {
			t.Errorf("healed with requests: %v", n.reg.Requests())
		}
	}
}

func TestARemoteSnapshotterIsToldWhatALayerIsOf(t *testing.T) {
	proxy := testenv.StartProxySnapshotter(t)
	n := startNode(t, testenv.Config{ProxySnapshotter: proxy.Socket}, puller.Options{Snapshotter: "proxy"})
	img := n.images.Kernels(1)[0]
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	n.mustPull(ref)
	told := proxy.Prepared()
	if len(told) != len(img.Layers) {
		t.Fatalf("%d snapshots for %d layers", len(told), len(img.Layers))
	}
	// On 1.x it says itself whether CRI tells, and the default is no.
	want := ref
	if v := testenv.UnderTest(); v == testenv.V16 || v == testenv.V17 {
		want = ""
	}
	for i, labels := range told {
		if got := labels["containerd.io/snapshot/cri.image-ref"]; got != want {
			t.Errorf("layer %d: told of %q, want %q", i, got, want)
		}
	}
}

func TestImageVerifiersAreNotPassedBy(t *testing.T) {
	verifiers := testenv.Dir(t)
	write := func(mode os.FileMode) {
		path := filepath.Join(verifiers, "verify")
		if err := os.WriteFile(path, []byte("#!/bin/sh\nexit 1\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	n := startNode(t, testenv.Config{}, puller.Options{VerifierDir: verifiers})
	kernels := n.images.Kernels(2)
	first := n.reg.Push(n.images, kernels[0], "team/kernel:1")
	second := n.reg.Push(n.images, kernels[1], "team/kernel:2")
	write(0o644) // no program
	n.mustPull(first)
	write(0o755)
	n.mustPull(first) // what is present is present
	n.reg.Forget()
	res := n.pull(second)
	if v := testenv.UnderTest(); v == testenv.V16 || v == testenv.V17 {
		if res.State != puller.Present {
			t.Errorf("containerd %s asks no verifiers: %s: %s", v, res.Reason, res.Message)
		}
		return
	}
	if res.Reason != puller.PolicyBypass || !strings.Contains(res.Message, verifiers) || len(fetched(n.reg.Requests())) > 0 {
		t.Errorf("reason %q, requests %v: %s", res.Reason, n.reg.Requests(), res.Message)
	}
	n.puller = n.connect(puller.Options{VerifierDir: verifiers, Always: true})
	n.mustPull(first) // its tag has not moved, so nothing is pulled
	n.puller = n.connect(puller.Options{VerifierDir: verifiers, BypassVerifiers: true})
	n.mustPull(second)
}

func TestWhatIsBrokenOnTheDiskIsReplaced(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
	kernels := n.images.Kernels(3)
	plain := n.reg.Push(n.images, kernels[0], "team/plain:1")
	index := n.images.Index(kernels[1].For(otherArch()), kernels[0].For(here))
	indexed := n.reg.Push(n.images, index, "team/indexed:1")
	for _, broken := range []struct {
		name  string
		ref   string
		blobs []digest.Digest
		snap  bool // the snapshot is gone too, else the layer is not needed
	}{
		{"manifest", plain, []digest.Digest{kernels[0].Manifest.Digest}, false},
		{"config", plain, []digest.Digest{kernels[0].ID}, false},
		{"manifest and config", plain, []digest.Digest{kernels[0].Manifest.Digest, kernels[0].ID}, false},
		{"index", indexed, []digest.Digest{index.Manifest.Digest}, false},
		{"index and manifest", indexed, []digest.Digest{index.Manifest.Digest, kernels[0].Manifest.Digest}, false},
		{"last layer", plain, []digest.Digest{kernels[0].Layers[2].Digest}, true},
	} {
		t.Run(broken.name, func(t *testing.T) {
			n := n.in(t)
			n.mustPull(broken.ref)
			if broken.snap {
				if err := n.client.SnapshotService("overlayfs").Remove(n.ctx(), kernels[0].Chain().String()); err != nil {
					t.Fatal(err)
				}
			}
			var want []string
			for _, b := range broken.blobs {
				n.BreakBlob(b)
				want = append(want, b.String())
			}
			n.reg.Forget()
			n.mustPull(broken.ref)
			got := fetched(n.reg.Requests())
			slices.Sort(got)
			slices.Sort(want)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("fetched (-want +got):\n%s", diff)
			}
			n.noLeases()
			n.reg.Forget()
			if res := n.mustPull(broken.ref); res.Action != puller.None || len(n.reg.Requests()) > 0 {
				t.Errorf("it is not whole then: action %s, requests %v", res.Action, n.reg.Requests())
			}
		})
	}
}

func TestTheFolderOfNoSnapshotIsInNobodysWay(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	ref, layer := n.half(puller.Options{})
	// What a containerd leaves that is killed while it makes a snapshot: an extraction
	// that never ends, and folders of which its database does not know.
	held := leases.WithLease(n.ctx(), n.ownLease().ID)
	if _, err := n.client.SnapshotService("overlayfs").Prepare(held, "extract-1-kill sha256:1", ""); err != nil {
		t.Fatal(err)
	}
	n.collectGarbage() // now, since it would remove what follows
	for i := range 20 {
		orphan := filepath.Join(n.Root, "io.containerd.snapshotter.v1.overlayfs", "snapshots", strconv.Itoa(i), "fs")
		if err := os.MkdirAll(orphan, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	res := n.mustPull(ref)
	if res.Attempts != 2 || res.Bytes > layer-4<<20 {
		t.Errorf("%d attempts, %d bytes of a layer of %d that was half there", res.Attempts, res.Bytes, layer)
	}
	n.noLeases()
}

func TestALabelThatHoldsTheSnapshotIsWrittenAgain(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	img := n.images.Kernels(1)[0]
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	n.mustPull(ref)
	const label = "containerd.io/gc.ref.snapshot.overlayfs"
	if _, err := n.client.ContentStore().Update(n.ctx(), content.Info{Digest: img.ID, Labels: map[string]string{}}, "labels."+label); err != nil {
		t.Fatal(err)
	}
	n.reg.Forget()
	n.mustPull(ref)
	n.collectGarbage()
	if !slices.Contains(n.chains("overlayfs"), img.Chain().String()) || len(n.reg.Requests()) > 0 {
		t.Errorf("snapshots %q, requests %v", n.chains("overlayfs"), n.reg.Requests())
	}
}

func TestARecordOfOthersGetsCRIsLabel(t *testing.T) {
	// CRI looks at its own namespace only, and would write the label itself there.
	n := startNode(t, testenv.Config{}, puller.Options{Namespace: "elsewhere"})
	img := n.images.Kernels(1)[0]
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	n.mustPull(ref)
	ctx := namespaces.WithNamespace(t.Context(), "elsewhere")
	if _, err := n.client.ImageService().Update(ctx, images.Image{Name: ref, Target: img.Manifest, Labels: map[string]string{"team.example/owner": "x"}}); err != nil {
		t.Fatal(err)
	}
	n.mustPull(ref)
	got, err := n.client.ImageService().Get(ctx, ref)
	want := map[string]string{"team.example/owner": "x", "io.cri-containerd.image": "managed"}
	if diff := cmp.Diff(want, got.Labels); err != nil || diff != "" {
		t.Errorf("labels (-want +got):\n%s error %v", diff, err)
	}
}

func TestAnImageThatOthersRemoveIsLeftAlone(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	img := n.images.Kernels(1)[0]
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	other := n.reg.Push(n.images, img, "team/other:1")
	n.mustPull(ref)
	n.RemoveImage(ref)
	if res := n.mustPull(ref); res.Action != puller.Pulled {
		t.Errorf("the first time: action %s", res.Action)
	}
	n.RemoveImage(ref)
	n.reg.Forget()
	for range 2 {
		res := n.pull(ref)
		if res.State != puller.Skipped || res.Reason != puller.GCRemoved || res.Attempts != 0 || len(n.reg.Requests()) > 0 {
			t.Errorf("the second time: %s, %s, %d attempts, requests %v", res.State, res.Reason, res.Attempts, n.reg.Requests())
		}
	}
	n.mustPull(other)
	// Somebody brings it back.
	if _, err := n.client.ImageService().Create(n.ctx(), images.Image{Name: ref, Target: img.Manifest}); err != nil {
		t.Fatal(err)
	}
	n.mustPull(ref)
}

func TestRemoveTakesTheNamesThatItIsTold(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	kernels := n.images.Kernels(2)
	first := n.reg.Push(n.images, kernels[0], "team/kernel:1")
	same := n.reg.Push(n.images, kernels[0], "team/again:1")
	other := n.reg.Push(n.images, kernels[1], "team/kernel:2")
	for _, ref := range []string{first, same, other} {
		n.mustPull(ref)
	}
	if removed, err := n.puller.Remove(t.Context(), first, false, false); err != nil || !slices.Equal(removed, []string{first}) {
		t.Errorf("removed %q, error %v", removed, err)
	}
	n.record(same)
	removed, err := n.puller.Remove(t.Context(), same, true, true)
	slices.Sort(removed)
	want := []string{
		same, n.reg.Host + "/team/again@" + kernels[0].Manifest.Digest.String(),
		n.reg.Host + "/team/kernel@" + kernels[0].Manifest.Digest.String(), kernels[0].ID.String(),
	}
	slices.Sort(want)
	if err != nil || !slices.Equal(removed, want) {
		t.Errorf("removed %q, want %q, error %v", removed, want, err)
	}
	if slices.Contains(n.chains("overlayfs"), kernels[0].Chain().String()) {
		t.Error("its snapshot is still there after a removal that waits")
	}
	if n.ImageStatus(first) != nil || n.ImageStatus(other) == nil {
		t.Error("CRI sees other images than those that are left")
	}
}
