package puller_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/google/go-cmp/cmp"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
	"example.com/kip/resolver"
)

// difference is a label that kip leaves at a daemon and CRI's own pull does not, or
// the other way round. This table is the one place where they stand.
type difference struct {
	on          []string // versions of containerd
	what, label string
	why         string
}

var differences = []difference{
	{old, "snapshot", "containerd.io/snapshot/diff-id", "the 2.x client notes the diff ID of a layer; a 1.x daemon pulls with the client of its time and does not"},
	{old, "snapshot", "containerd.io/snapshot/parent-chain-id", "likewise, for what the layer is on"},
}

var old = []string{testenv.V16, testenv.V17}

// state lists all that a pull leaves: records, blobs, snapshots and leases, with
// their labels, one a line.
func (n *node) state() []string {
	n.t.Helper()
	var lines []string
	add := func(labels map[string]string, format string, args ...any) {
		line := fmt.Sprintf(format, args...)
		for _, k := range slices.Sorted(maps.Keys(labels)) {
			line += fmt.Sprintf(" %s=%s", k, labels[k])
		}
		lines = append(lines, line)
	}
	records, err := n.client.ImageService().List(n.ctx())
	for _, r := range records {
		add(r.Labels, "record %s: %s %s %d", r.Name, r.Target.MediaType, r.Target.Digest, r.Target.Size)
	}
	if err == nil {
		err = n.client.ContentStore().Walk(n.ctx(), func(i content.Info) error {
			add(i.Labels, "blob %s: %d", i.Digest, i.Size)
			return nil
		})
	}
	if err == nil {
		err = n.client.SnapshotService("overlayfs").Walk(n.ctx(), func(_ context.Context, i snapshots.Info) error {
			add(i.Labels, "snapshot %s: %s on %q", i.Name, i.Kind, i.Parent)
			return nil
		})
	}
	if err != nil {
		n.t.Fatal(err)
	}
	leases, err := n.client.LeasesService().List(n.ctx())
	for _, l := range leases {
		add(l.Labels, "lease %s", l.ID)
	}
	ingests, e := n.client.ContentStore().ListStatuses(n.ctx())
	for _, i := range ingests {
		add(nil, "ingest %s: %d", i.Ref, i.Offset)
	}
	if err != nil || e != nil {
		n.t.Fatal(err, e)
	}
	slices.Sort(lines)
	return lines
}

// explained drops from the lines what the table of differences explains.
func explained(lines []string) []string {
	var list []string
	for _, line := range lines {
		words := strings.Fields(line)
		for _, d := range differences {
			if slices.Contains(d.on, testenv.UnderTest()) && words[0] == d.what {
				words = slices.DeleteFunc(words, func(w string) bool { return strings.HasPrefix(w, d.label+"=") })
			}
		}
		list = append(list, strings.Join(words, " "))
	}
	return list
}

func TestAPullLeavesWhatCrictlsDoes(t *testing.T) {
	crictl := testenv.Tool(t, "crictl")
	for _, form := range []string{"tag", "digest", "tag and digest", "index", "discard"} {
		t.Run(form, func(t *testing.T) {
			config := testenv.Config{DiscardUnpackedLayers: form == "discard"}
			n := startNode(t, config, puller.Options{DiscardUnpackedLayers: form == "discard" && testenv.UnderTest() == testenv.V23})
			img := n.images.Kernels(1)[0]
			if form == "index" {
				img = n.images.Index(n.images.Attestation(img), img.For(here))
			}
			ref := n.reg.Push(n.images, img, "team/kernel:1")
			switch form {
			case "digest":
				ref = n.reg.Host + "/team/kernel@" + img.Manifest.Digest.String()
			case "tag and digest":
				ref += "@" + img.Manifest.Digest.String()
			}
			n.mustPull(ref)
			n.collectGarbage()

			other := n.in(t)
			other.Containerd = testenv.StartContainerd(t, config)
			other.client = other.Client()
			cmd := exec.Command(crictl, "--runtime-endpoint", "unix://"+other.Address, "--image-endpoint", "unix://"+other.Address,
				"pull", "--creds", "team:right", ref)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			other.collectGarbage()
			if diff := cmp.Diff(explained(other.state()), explained(n.state())); diff != "" {
				t.Errorf("(-crictl +kip):\n%s", diff)
			}
		})
	}
}

func TestKipAndTheKubeletPullTheSameImageAtOnce(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
	base := n.images.Layer(testenv.Hello(t))
	for i := range testenv.Rounds(t, 5) {
		name := fmt.Sprintf("both-%d", i)
		img := n.images.Image(base, n.images.Noise(name+"-a", 2<<20), n.images.Noise(name+"-b", 1<<20))
		ref := n.reg.Push(n.images, img, "team/"+name+":1")
		n.reg.Forget()
		var wg sync.WaitGroup
		var res puller.Result
		wg.Go(func() { res = n.pull(ref) })
		id := n.CRIPull(ref, "team", "right")
		wg.Wait()
		if res.State != puller.Present || id != img.ID.String() {
			t.Errorf("round %d: CRI has %s; kip: %s: %s", i, id, res.Reason, res.Message)
		}
		layers := map[string]int{}
		for _, got := range fetched(n.reg.Requests()) {
			layers[got]++
		}
		for _, l := range img.Layers[1:] {
			if layers[l.Digest.String()] != 1 {
				t.Errorf("round %d: the layer %s was fetched %d times", i, l.Digest, layers[l.Digest.String()])
			}
		}
	}
	n.collectGarbage()
	n.noLeases()
}

func TestMirrorsAreAskedInCrictlsOrder(t *testing.T) {
	for _, version := range testenv.Smoke() {
		t.Run("containerd "+version, func(t *testing.T) {
			n := startNode(t, testenv.Config{Version: version}, puller.Options{})
			img := n.images.Kernels(1)[0]
			n.reg.Push(n.images, img, "public/kernel:1")
			var mu sync.Mutex
			var asked []string
			hosts := "server = \"http://" + n.reg.Host + "\"\n"
			for name, status := range map[string]int{"first": 404, "second": 500, "third": 403} {
				mirror := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
					if strings.HasSuffix(req.URL.Path, "/manifests/1") {
						mu.Lock()
						defer mu.Unlock()
						asked = append(asked, name+" "+req.URL.RawQuery)
					}
					return testenv.Answer{Status: status}
				})
				hosts += "[host.\"http://" + mirror.Host() + "\"]\n"
				if name == "third" {
					hosts += "capabilities = [\"pull\"]\n" // not for tags
				}
			}
			pull := func(n *node, by func()) []string {
				t.Helper()
				dir := filepath.Join(n.HostsDir, "named.example")
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644); err != nil {
					t.Fatal(err)
				}
				asked = nil
				n.reg.Forget()
				by()
				if len(n.reg.Requests()) == 0 {
					t.Error("the registry itself was not asked")
				}
				return slices.Compact(slices.Clone(asked))
			}
			const ref = "named.example/public/kernel:1"
			if version == testenv.V23 { // which does not say where its hosts.toml files are
				n.puller = n.connect(puller.Options{Registry: resolver.Options{HostsDirs: []string{n.HostsDir}}})
			}
			kip := pull(n, func() { n.mustPull(ref) })
			other := n.in(t)
			other.Containerd = testenv.StartContainerd(t, testenv.Config{Version: version})
			cri := pull(other, func() { other.CRIPull(ref, "", "") })
			if diff := cmp.Diff(cri, kip); diff != "" || len(kip) < 2 {
				t.Errorf("asked (-CRI +kip):\n%s", diff)
			}
		})
	}
}
