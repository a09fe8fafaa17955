package puller_test

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
)

// half leaves a pull that broke in the middle of its second layer.
func (n *node) half(opts puller.Options) (ref string, total int64) {
	n.t.Helper()
	img := n.images.Image(n.images.Layer(testenv.Hello(n.t)), n.images.Noise("noise", 8<<20))
	ref = n.reg.Push(n.images, img, "team/half:1")
	n.reg.CutAfter(5 << 20)
	opts.Retries = 1
	if res := n.connect(opts).Pull(n.t.Context(), parse(n.t, ref), n.keyring); res.Reason != puller.NetworkError {
		n.t.Fatalf("reason %q: %s", res.Reason, res.Message)
	}
	n.reg.CutAfter(0)
	return ref, img.Layers[1].Size
}

// ownLease returns the one lease of kip.
func (n *node) ownLease() leases.Lease {
	n.t.Helper()
	list, err := n.client.LeasesService().List(n.ctx(), `labels."kip/image-reference"`)
	if err != nil || len(list) != 1 {
		n.t.Fatalf("leases %v, error %v", list, err)
	}
	return list[0]
}

func TestALeaseIsRenewedWithWhatItHolds(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	ref, layer := n.half(puller.Options{})
	before := n.ownLease()
	held, err := n.client.LeasesService().ListResources(n.ctx(), before)
	if err != nil {
		t.Fatal(err)
	}
	// One that may take 48 h does not get by with what is left of 30.
	n.reg.CutAfter(1 << 20)
	long := n.connect(puller.Options{Retries: 1, Deadline: 48 * time.Hour})
	if res := long.Pull(t.Context(), parse(t, ref), n.keyring); res.State == puller.Present {
		t.Fatal("the registry is broken and the image there")
	}
	n.reg.CutAfter(0)
	after := n.ownLease()
	until, err := time.Parse(time.RFC3339, after.Labels["containerd.io/gc.expire"])
	if err != nil || time.Until(until) < 71*time.Hour || after.ID != before.ID {
		t.Errorf("lease %+v, error %v", after, err)
	}
	now, err := n.client.LeasesService().ListResources(n.ctx(), after)
	for _, r := range held { // ingests end, in content
		if err != nil || r.Type == "content" && !slices.Contains(now, r) {
			t.Errorf("it held %v, and holds %v, error %v", held, now, err)
		}
	}
	n.collectGarbage()
	if res := n.mustPull(ref); res.Bytes > layer-4<<20 {
		t.Errorf("%d bytes were fetched, of a layer of %d that was half there", res.Bytes, layer)
	}
	n.noLeases()
}

func TestALeaseThatIsNoLongerOfUseGoes(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(n *node, ref string) // what happened since
		tidy func(n *node, ref string)
	}{
		"the image is not wanted": {
			func(*node, string) {},
			func(n *node, _ string) {
				if err := n.puller.Release(n.t.Context(), nil); err != nil {
					n.t.Error(err)
				}
			},
		},
		"somebody else brought it": {
			func(n *node, ref string) { n.CRIPull(ref, "team", "right") },
			func(n *node, ref string) {
				n.puller.Sync(n.t.Context(), []puller.Wanted{{Image: ref}}, n.keyring, func(puller.Result) {})
			},
		},
		"the registry has it no longer": {
			func(n *node, _ string) {},
			func(n *node, ref string) {
				n.reg.DeleteTag("team/half", "1")
				if res := n.pull(ref); res.Reason != puller.NotFound {
					n.t.Errorf("reason %q", res.Reason)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
			ref, _ := n.half(puller.Options{})
			c.end(n, ref)
			n.ownLease()
			c.tidy(n, ref)
			n.noLeases()
			n.collectGarbage()
			if list, err := n.client.ContentStore().ListStatuses(n.ctx()); err != nil || len(list) > 0 {
				t.Errorf("ingests left behind: %v, error %v", list, err)
			}
		})
	}
}

func TestALeaseInUseIsLeftToItsUser(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Retries: 1})
	other := n.connect(puller.Options{})
	img := n.images.Image(n.images.Layer(testenv.Hello(t)), n.images.Noise("noise", 16<<20))
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	n.reg.Forget()
	n.reg.OnBlob(img.Layers[1].Digest, 8<<20, func() {
		if err := other.Release(t.Context(), nil); err != nil { // a node agent that does not want this image
			t.Error(err)
		}
		n.collectGarbage()
	})
	n.mustPull(ref)
	n.fetchedOnce()
	n.noLeases()
	if list, err := n.client.ContentStore().ListStatuses(n.ctx()); err != nil || len(list) > 0 {
		t.Errorf("ingests left behind: %v, error %v", list, err)
	}
}

func TestReleaseKeepsWhatIsWanted(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	ref, _ := n.half(puller.Options{})
	if err := n.puller.Release(t.Context(), []puller.Wanted{{Image: ref}}); err != nil {
		t.Fatal(err)
	}
	n.ownLease()
}

func TestAnImageHasADeadline(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{Deadline: time.Second})
	slow := testenv.StartFake(t, func(*http.Request) testenv.Answer { return testenv.Answer{Status: 200, Length: 100, Stall: true} })
	res := n.pull(slow.Host() + "/x/y:1")
	if res.Reason != puller.DeadlineExceeded || !strings.Contains(res.Message, "after 1s") {
		t.Errorf("reason %q: %s", res.Reason, res.Message)
	}
	n.noLeases()
}

func TestAPullThatIsCancelledKeepsWhatItHas(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	img := n.images.Image(n.images.Layer(testenv.Hello(t)), n.images.Noise("noise", 32<<20))
	ref := n.reg.Push(n.images, img, "team/kernel:1")
	ctx, cancel := context.WithCancel(namespaces.WithNamespace(t.Context(), "k8s.io"))
	defer cancel()
	n.reg.OnBlob(img.Layers[1].Digest, 24<<20, cancel)
	if res := n.puller.Pull(ctx, parse(t, ref), n.keyring); res.Reason != puller.Cancelled {
		t.Fatalf("reason %q: %s", res.Reason, res.Message)
	}
	n.ownLease()
	n.collectGarbage()
	n.reg.OnBlob("", 0, nil)
	if res := n.mustPull(ref); res.Bytes > 24<<20 { // what was on its way is lost
		t.Errorf("%d bytes were fetched again", res.Bytes)
	}
	n.noLeases()
}
