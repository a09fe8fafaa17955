package puller_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/image-spec/identity"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
	"example.com/kip/resolver"
	"example.com/kip/secrets"
)

// node is a daemon with a puller, and a registry whose repositories below team/
// need the login in keyring.
type node struct {
	*testenv.Containerd
	t       *testing.T
	client  *containerd.Client
	reg     *testenv.Registry
	images  *testenv.Images
	keyring *secrets.Store
	puller  *puller.Puller
}

func startNode(t *testing.T, config testenv.Config, opts puller.Options) *node {
	t.Helper()
	testenv.NeedRoot(t)
	n := &node{Containerd: testenv.StartContainerd(t, config), t: t, images: testenv.NewImages(t)}
	n.client = n.Client()
	n.reg = testenv.StartRegistry(t, testenv.Bearer, map[string]testenv.User{"team": {Password: "right", Prefixes: []string{"team/"}}})
	n.login("right")
	n.puller = n.connect(opts)
	return n
}

func (n *node) connect(opts puller.Options) *puller.Puller {
	n.t.Helper()
	p, err := puller.Connect(n.t.Context(), n.Address, time.Minute, opts)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { p.Close() })
	return p
}

// in is the node in a test below the one that it was started for.
func (n *node) in(t *testing.T) *node {
	c := *n
	c.t = t
	return &c
}

// login makes the keyring hold one password for the registry.
func (n *node) login(password string) {
	n.t.Helper()
	dir := testenv.Dir(n.t)
	testenv.MountSecret(n.t, dir, "team", map[string]testenv.Login{n.reg.Host: {Username: "team", Password: password}})
	n.keyring = secrets.NewStore(secrets.Loader{Dirs: []string{dir}}, nil)
	if problems := n.keyring.Refresh(); len(problems) > 0 {
		n.t.Fatal(problems)
	}
}

func (n *node) pull(ref string) puller.Result {
	n.t.Helper()
	return n.puller.Pull(n.t.Context(), parse(n.t, ref), n.keyring)
}

// mustPull pulls and fails the test unless the image is present then.
func (n *node) mustPull(ref string) puller.Result {
	n.t.Helper()
	res := n.pull(ref)
	if res.State != puller.Present {
		n.t.Fatalf("%s: %s: %s", ref, res.Reason, res.Message)
	}
	return res
}

func parse(t *testing.T, s string) puller.Reference {
	t.Helper()
	ref, err := puller.ParseReference(s)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func (n *node) ctx() context.Context { return namespaces.WithNamespace(n.t.Context(), "k8s.io") }

// record returns an image record, failing the test when it is not there.
func (n *node) record(name string) images.Image {
	n.t.Helper()
	img, err := n.client.ImageService().Get(n.ctx(), name)
	if err != nil {
		n.t.Fatal(err)
	}
	return img
}

// noLeases fails the test when a lease of anybody is left.
func (n *node) noLeases() {
	n.t.Helper()
	list, err := n.client.LeasesService().List(n.ctx())
	if err != nil || len(list) > 0 {
		n.t.Errorf("leases left behind: %v %v", list, err)
	}
}

func TestAPullLeavesWhatTheKubeletExpects(t *testing.T) {
	for _, version := range testenv.Smoke() {
		t.Run("containerd "+version, func(t *testing.T) {
			n := startNode(t, testenv.Config{Version: version}, puller.Options{})
			img := n.images.Kernels(1)[0]
			ref := n.reg.Push(n.images, img, "team/kernel:1")
			n.LoadPause(n.images, n.reg)

			res := n.mustPull(ref)
			digestName := n.reg.Host + "/team/kernel@" + img.Manifest.Digest.String()
			names := []string{img.ID.String(), digestName, ref}
			want := puller.Result{
				Ref: ref, State: puller.Present, Action: puller.Pulled, Digest: img.Manifest.Digest.String(), ID: img.ID.String(),
				Credential: "team/" + n.reg.Host, Attempts: 1, Bytes: res.Bytes, Seconds: res.Seconds, Names: names,
			}
			if diff := cmp.Diff(want, res); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
			for _, name := range names {
				if r := n.record(name); r.Target.Digest != img.Manifest.Digest || r.Labels["io.cri-containerd.image"] != "managed" {
					t.Errorf("record %s: target %s, labels %v", name, r.Target.Digest, r.Labels)
				}
				if got := n.ImageStatus(name); got == nil || got.Id != img.ID.String() ||
					!slices.Equal(got.RepoTags, []string{ref}) || !slices.Equal(got.RepoDigests, []string{digestName}) {
					t.Errorf("CRI's ImageStatus of %s: %v", name, got)
				}
			}
			n.noLeases()

			n.reg.Stop()
			n.RunContainer(ref, "hello from k1")
		})
	}
}

func TestAPresentImageCostsNoRequest(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	ref := n.reg.Push(n.images, n.images.Kernels(1)[0], "team/kernel:1")
	n.mustPull(ref)
	n.reg.Forget()
	res := n.mustPull(ref)
	if seen := n.reg.Requests(); res.Action != puller.None || res.Attempts != 0 || len(seen) > 0 {
		t.Errorf("action %s, %d attempts, requests %v", res.Action, res.Attempts, seen)
	}
}

// fetched are the blobs and manifests that were read from the registry.
func fetched(seen []testenv.Request) []string {
	var list []string
	for _, r := range seen {
		_, object, ok := strings.Cut(r.Path, "@")
		if i := strings.LastIndexByte(r.Path, '/'); !ok {
			object = r.Path[i+1:]
		}
		if r.Method == "GET" && r.Status == 200 && r.Path != "/token" {
			list = append(list, object)
		}
	}
	return list
}

func (n *node) collectGarbage() {
	n.t.Helper()
	testenv.CollectGarbage(n.t, n.client)
}

// fetchedOnce is fetched, sorted, and fails the test where something was fetched twice.
func (n *node) fetchedOnce() []string {
	n.t.Helper()
	got := fetched(n.reg.Requests())
	slices.Sort(got)
	if unique := slices.Compact(slices.Clone(got)); len(unique) != len(got) {
		n.t.Errorf("fetched twice: %q", got)
	}
	return got
}

func TestWhatIsRemovedIsRestored(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	img := n.images.Kernels(1)[0]
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	digestName := n.reg.Host + "/team/kernel@" + img.Manifest.Digest.String()
	records, blobs := n.client.ImageService(), n.client.ContentStore()
	everything := []string{img.Manifest.Digest.String(), img.ID.String(), img.Layers[0].Digest.String(), img.Layers[1].Digest.String(), img.Layers[2].Digest.String()}
	chain := func() string {
		i, err := n.client.GetImage(n.ctx(), ref)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := i.RootFS(n.ctx())
		if err != nil {
			t.Fatal(err)
		}
		return identity.ChainID(ids).String()
	}
	for _, part := range []struct {
		name    string
		remove  func() error
		fetched []string
		silent  bool // no request at all
	}{
		{"tag record", func() error { return records.Delete(n.ctx(), ref, images.SynchronousDelete()) }, nil, false},
		{"digest record", func() error { return records.Delete(n.ctx(), digestName, images.SynchronousDelete()) }, nil, true},
		{"ID record", func() error { return records.Delete(n.ctx(), img.ID.String(), images.SynchronousDelete()) }, nil, true},
		{"all records, and so all content", func() error {
			for _, name := range []string{ref, digestName, img.ID.String()} {
				if err := records.Delete(n.ctx(), name, images.SynchronousDelete()); err != nil {
					return err
				}
			}
			return nil
		}, everything, false},
		{"snapshot", func() error { return n.client.SnapshotService("overlayfs").Remove(n.ctx(), chain()) }, nil, true},
		{"config blob", func() error { return blobs.Delete(n.ctx(), img.ID) }, []string{img.ID.String()}, false},
		// Without it the daemon's garbage collection takes all that it refers to.
		{"manifest blob", func() error { return blobs.Delete(n.ctx(), img.Manifest.Digest) }, everything, false},
	} {
		t.Run(part.name, func(t *testing.T) {
			n.mustPull(ref)
			if err := part.remove(); err != nil {
				t.Fatal(err)
			}
			n.collectGarbage()
			if have, err := n.puller.Check(t.Context(), parse(t, ref)); err != nil || len(have.Missing) == 0 {
				t.Fatalf("Check after the removal: missing %q, error %v", have.Missing, err)
			}
			n.reg.Forget()
			n.mustPull(ref)
			seen := n.reg.Requests()
			got := fetched(seen)
			slices.Sort(got)
			slices.Sort(part.fetched)
			if !slices.Equal(got, part.fetched) {
				t.Errorf("fetched %q, want %q", got, part.fetched)
			}
			if part.silent && len(seen) > 0 {
				t.Errorf("requests: %v", seen)
			}
			if s := n.ImageStatus(digestName); s == nil || !slices.Equal(s.RepoTags, []string{ref}) {
				t.Errorf("CRI's ImageStatus: %v", s)
			}
			n.noLeases()
		})
	}
}

func TestAPresentImageStaysWhenItsTagMoves(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
	kernels := n.images.Kernels(2)
	ref := n.reg.Push(n.images, kernels[0], "team/kernel:1")
	n.mustPull(ref)
	n.reg.Push(n.images, kernels[1], "team/kernel:1")
	if res := n.mustPull(ref); res.ID != kernels[0].ID.String() {
		t.Errorf("ID %s", res.ID)
	}
	// Healed, too, is what is there, while the registry has it.
	remove := func() {
		if err := n.client.ContentStore().Delete(n.ctx(), kernels[0].ID); err != nil {
			t.Fatal(err)
		}
		n.collectGarbage()
	}
	remove()
	if res := n.mustPull(ref); res.ID != kernels[0].ID.String() || res.Action != puller.Pulled {
		t.Errorf("healed: ID %s, action %s", res.ID, res.Action)
	}
	remove()
	n.reg.Delete("team/kernel", kernels[0].Manifest)
	if res := n.mustPull(ref); res.ID != kernels[1].ID.String() {
		t.Errorf("when the registry has forgotten it: ID %s, want what the tag says now", res.ID)
	}
}

func TestARePullKeepsLabelsOfOthers(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Always: true})
	kernels := n.images.Kernels(2)
	ref := n.reg.Push(n.images, kernels[0], "team/kernel:1")
	n.mustPull(ref)
	for _, label := range []string{"io.cri-containerd.pinned", "team.example/owner"} {
		img := n.record(ref)
		img.Labels[label] = "pinned"
		if _, err := n.client.ImageService().Update(n.ctx(), img, "labels."+label); err != nil {
			t.Fatal(err)
		}
	}
	n.reg.Push(n.images, kernels[1], "team/kernel:1") // the tag moves
	res := n.mustPull(ref)
	got := n.record(ref)
	if res.ID != kernels[1].ID.String() || !res.Pinned || got.Labels["team.example/owner"] != "pinned" {
		t.Errorf("ID %s, pinned %v, labels %v", res.ID, res.Pinned, got.Labels)
	}
	if res := n.mustPull(ref); res.Action != puller.None || res.Bytes != 0 {
		t.Errorf("a third pull of the same: action %s, %d bytes", res.Action, res.Bytes)
	}
}

func TestAReferenceByDigestHasTwoRecords(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	img := n.images.Kernels(1)[0]
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	digestName := n.reg.Host + "/team/kernel@" + img.Manifest.Digest.String()
	for _, name := range []string{digestName, ref + "@" + img.Manifest.Digest.String()} {
		res := n.mustPull(name)
		if want := []string{img.ID.String(), digestName}; res.Ref != digestName || !slices.Equal(res.Names, want) {
			t.Errorf("%s: ref %s, names %q, want %q", name, res.Ref, res.Names, want)
		}
		if n.ImageStatus(name) == nil {
			t.Errorf("CRI does not see %s", name)
		}
	}
	if list, err := n.client.ImageService().List(n.ctx()); err != nil || len(list) != 2 {
		t.Errorf("records %v, error %v", list, err)
	}
}

func TestAWrongPasswordIsNamed(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	ref := n.reg.Push(n.images, n.images.Kernels(1)[0], "team/kernel:1")
	n.login("canary-password")
	n.reg.Forget()
	res := n.pull(ref)
	if res.State != puller.Failed || res.Reason != puller.Unauthorized || res.Attempts != 1 {
		t.Errorf("state %s, reason %s, %d attempts", res.State, res.Reason, res.Attempts)
	}
	for _, want := range []string{n.reg.Host, "team/kernel", "team/" + n.reg.Host, "401"} {
		if !strings.Contains(res.Message, want) {
			t.Errorf("the message does not name %q: %s", want, res.Message)
		}
	}
	if strings.Contains(res.Message, "canary") {
		t.Errorf("the message shows the password: %s", res.Message)
	}
	if res.Credential != "team/"+n.reg.Host {
		t.Errorf("credential %q", res.Credential)
	}
	if logins := n.reg.FailedLogins(); logins > 2 { // the OAuth2 POST and the GET that follows it
		t.Errorf("%d failed logins", logins)
	}
	n.noLeases()
}

func TestAPartialDownloadIsTakenUpAgain(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
	img := n.images.Image(n.images.Layer(testenv.Hello(t)), n.images.Noise("noise", 8<<20))
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	n.reg.CutAfter(5 << 20) // within the second layer's blob
	res := n.pull(ref)
	if res.State != puller.Failed || res.Reason != puller.NetworkError {
		t.Fatalf("state %s, reason %s: %s", res.State, res.Reason, res.Message)
	}
	all, err := n.client.LeasesService().List(n.ctx())
	if err != nil || len(all) != 1 || all[0].Labels["kip/image-reference"] != ref {
		t.Fatalf("leases %v, error %v: want the image's own", all, err)
	}
	n.reg.CutAfter(0)
	first := res.Bytes
	res = n.mustPull(ref)
	total := img.Manifest.Size + img.Layers[0].Size + img.Layers[1].Size
	if got := first + res.Bytes; got > total+1<<20 {
		t.Errorf("%d bytes came over the network for an image of %d", got, total)
	}
	n.noLeases()
}

func TestTwoKipsPullTheSameImage(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
	other := n.connect(puller.Options{Retries: 1})
	for i := range 4 {
		name := fmt.Sprintf("noise-%d", i)
		img := n.images.Image(n.images.Layer(testenv.Hello(t)), n.images.Noise(name, 4<<20))
		ref := parse(t, n.reg.Push(n.images, img, "team/"+name+":1"))
		n.reg.Forget()
		results := make(chan puller.Result)
		for _, p := range []*puller.Puller{n.puller, other} {
			go func() { results <- p.Pull(t.Context(), ref, n.keyring) }()
		}
		for range 2 {
			if res := <-results; res.State != puller.Present {
				t.Errorf("%s: %s: %s", ref, res.Reason, res.Message)
			}
		}
		n.fetchedOnce()
	}
	n.noLeases()
}

func TestWhatIsNoImageIsRefused(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	for _, mediaType := range []string{"text/html", "application/json", "application/octet-stream"} {
		portal := testenv.StartFake(t, func(*http.Request) testenv.Answer {
			return testenv.Answer{Status: 200, Body: "<html>log in</html>", Header: map[string]string{"Content-Type": mediaType}}
		})
		res := n.pull(portal.Host() + "/x/y:1")
		if res.Reason != puller.NotAnImage || res.Attempts != 1 || !strings.Contains(res.Message, mediaType) {
			t.Errorf("%s: %s after %d attempts: %s", mediaType, res.Reason, res.Attempts, res.Message)
		}
	}
	n.noLeases()
}

func TestAWrongDigestIsNotKept(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 2, BackOff: time.Millisecond})
	ref := n.reg.Push(n.images, n.images.Kernels(1)[0], "team/kernel:1")
	n.reg.LieOnce()
	res := n.mustPull(ref)
	if res.Attempts != 2 {
		t.Errorf("%d attempts", res.Attempts)
	}
	n.noLeases()
}

func TestALeaseOfOthersIsLeftAlone(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	if _, err := n.client.LeasesService().Create(n.ctx(), leases.WithID("somebody")); err != nil {
		t.Fatal(err)
	}
	n.mustPull(n.reg.Push(n.images, n.images.Kernels(1)[0], "team/kernel:1"))
	if all, err := n.client.LeasesService().List(n.ctx()); err != nil || len(all) != 1 || all[0].ID != "somebody" {
		t.Errorf("leases %v, error %v", all, err)
	}
}

func TestASetSharesLayersAndNames(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	kernels := n.images.Kernels(3)
	var wanted []puller.Wanted
	blobs := map[string]bool{}
	for i, img := range kernels {
		ref := n.reg.Push(n.images, img, "team/kernel:"+string(rune('1'+i)))
		wanted = append(wanted, puller.Wanted{Image: ref, Source: "static"}, puller.Wanted{Image: ref, Source: "gateway"})
		blobs[img.Manifest.Digest.String()], blobs[img.ID.String()] = true, true
		for _, l := range img.Layers {
			blobs[l.Digest.String()] = true
		}
	}
	wanted = append(wanted, puller.Wanted{Image: "Not/A/Reference", Source: "static"})
	n.reg.Forget()
	done := 0
	results := n.puller.Sync(t.Context(), wanted, n.keyring, func(puller.Result) { done++ })
	if len(results) != 4 || done != 4 {
		t.Fatalf("%d results, %d reported", len(results), done)
	}
	for i, res := range results[:3] {
		if res.State != puller.Present || res.Image != wanted[2*i].Image || res.Source != "static" {
			t.Errorf("result %d: %+v", i, res)
		}
	}
	if last := results[3]; last.State != puller.Failed || last.Reason != puller.InvalidReference || last.Names == nil {
		t.Errorf("invalid reference: %+v", last)
	}
	if got := fetched(n.reg.Requests()); len(got) != len(blobs) {
		t.Errorf("fetched %d blobs and manifests, want each of %d once: %q", len(got), len(blobs), got)
	}
	n.noLeases()
}

func TestTheDaemonsOwnSettingsHold(t *testing.T) {
	for _, version := range testenv.Smoke() {
		t.Run("containerd "+version, func(t *testing.T) {
			n := startNode(t, testenv.Config{Version: version, Snapshotter: "native", DiscardUnpackedLayers: true}, puller.Options{})
			if version == testenv.V23 { // which does not say
				n.puller = n.connect(puller.Options{DiscardUnpackedLayers: true, Registry: resolver.Options{HostsDirs: []string{n.HostsDir}}})
			}
			img := n.images.Kernels(1)[0]
			n.reg.Push(n.images, img, "public/kernel:1")
			hosts := filepath.Join(n.HostsDir, "named.example")
			if err := os.MkdirAll(hosts, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(hosts, "hosts.toml"), []byte("server = \"http://"+n.reg.Host+"\"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
			const ref = "named.example/public/kernel:1"
			n.mustPull(ref)
			n.collectGarbage()
			for name, want := range map[string]int{"native": len(img.Layers), "overlayfs": 0} {
				got := 0
				err := n.client.SnapshotService(name).Walk(n.ctx(), func(context.Context, snapshots.Info) error { got++; return nil })
				if err != nil || got != want {
					t.Errorf("%d snapshots in %s, want %d, error %v", got, name, want, err)
				}
			}
			for _, l := range img.Layers {
				if _, err := n.client.ContentStore().Info(n.ctx(), l.Digest); !errdefs.IsNotFound(err) {
					t.Errorf("the layer %s is still there, error %v", l.Digest, err)
				}
			}
			n.reg.Forget()
			if res := n.mustPull(ref); res.Action != puller.None || len(n.reg.Requests()) > 0 {
				t.Errorf("a second pull: action %s, requests %v", res.Action, n.reg.Requests())
			}
		})
	}
}

func TestNoContainerdIsOneClearError(t *testing.T) {
	dir := testenv.Dir(t)
	_, err := puller.Connect(t.Context(), "unix://"+dir+"/no.sock", time.Minute, puller.Options{Registry: resolver.Options{}})
	want := puller.ErrUnreachable.Error() + " at " + dir + "/no.sock: dial unix " + dir + "/no.sock: connect: no such file or directory"
	if err == nil || err.Error() != want {
		t.Errorf("got %v\nwant %s", err, want)
	}
}
