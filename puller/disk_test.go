package puller_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
	"golang.org/x/sys/unix"
)

// smallDisk starts a node with 160 MiB for its images, and an image of about 40
// compressed and unpacked each.
func smallDisk(t *testing.T, threshold int) (n *node, big, small string) {
	t.Helper()
	n = startNode(t, testenv.Config{DiskMiB: 160}, puller.Options{})
	n.puller = n.connect(puller.Options{Retries: 2, Disk: puller.DiskOptions{Path: n.SeenRoot(), Threshold: threshold, Factor: 2}})
	big = n.push("big", 40)
	return n, big, n.push("small", 1)
}

// push makes an image of so many MiB that do not compress.
func (n *node) push(name string, mib int) string {
	n.t.Helper()
	img := n.images.Image(n.images.Layer(testenv.Hello(n.t)), n.images.Noise(name, mib<<20))
	return n.reg.Push(n.images, img, "team/"+name+":1")
}

// fill takes space from the daemon's disk until only so many MiB are free, and
// returns a function that gives it back.
func (n *node) fill(mib int64) (empty func()) {
	n.t.Helper()
	path := filepath.Join(n.SeenRoot(), "filler")
	f, err := os.Create(path)
	if err == nil {
		err = unix.Fallocate(int(f.Fd()), 0, 0, n.freeBytes()-mib<<20)
		f.Close()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return func() {
		if err := os.Remove(path); err != nil {
			n.t.Fatal(err)
		}
	}
}

func (n *node) freeBytes() int64 {
	n.t.Helper()
	var s unix.Statfs_t
	if err := unix.Statfs(n.SeenRoot(), &s); err != nil {
		n.t.Fatal(err)
	}
	return int64(s.Bavail) * s.Bsize
}

func TestAnImageThatDoesNotFitIsNotFetched(t *testing.T) {
	n, big, small := smallDisk(t, 85)
	empty := n.fill(90) // 85 % leave about 66, and it needs more than 80
	n.reg.Forget()
	res := n.pull(big)
	if res.Reason != puller.NoSpace || res.Attempts != 1 || res.Bytes > 10<<10 || !strings.Contains(res.Message, "85 %") {
		t.Errorf("reason %q, %d attempts, %d bytes: %s", res.Reason, res.Attempts, res.Bytes, res.Message)
	}
	for _, r := range n.reg.Requests() {
		if strings.Contains(r.Path, "/blobs/") && r.Method == "GET" {
			if got := fetched(n.reg.Requests()); len(got) > 2 {
				t.Errorf("more than manifest and configuration were fetched: %q", got)
			}
		}
	}
	n.noLeases()
	n.mustPull(small)
	empty()
	n.mustPull(big)
}

func TestImagesWaitForTheSpaceThatOthersHaveReserved(t *testing.T) {
	n, big, _ := smallDisk(t, 100)
	n.mustPull(big) // takes 80
	if err := n.removeAll(); err != nil {
		t.Fatal(err)
	}
	var wanted []puller.Wanted
	for i := range 3 { // each needs 44 of 130, and takes no more: the last has to wait
		wanted = append(wanted, puller.Wanted{Image: n.push(fmt.Sprintf("third-%d", i), 20)})
	}
	n.fill(130)
	for _, res := range n.puller.Sync(t.Context(), wanted, n.keyring, func(puller.Result) {}) {
		if res.State != puller.Present {
			t.Errorf("%s: %s: %s", res.Image, res.Reason, res.Message)
		}
	}
}

// removeAll removes all images, and what only they held.
func (n *node) removeAll() error {
	list, err := n.client.ImageService().List(n.ctx())
	for _, img := range list {
		if err == nil {
			err = n.client.ImageService().Delete(n.ctx(), img.Name)
		}
	}
	n.collectGarbage()
	return err
}

func TestAFullDiskIsNamedAndGivenBack(t *testing.T) {
	n, big, small := smallDisk(t, 0) // nothing is checked before
	present := n.push("present", 1)
	n.mustPull(present)
	empty := n.fill(60) // the blobs go in, the files do not
	before := n.freeBytes()
	res := n.pull(big)
	if res.Reason != puller.NoSpace || !strings.Contains(res.Message, "no space left on device") {
		t.Errorf("reason %q: %s", res.Reason, res.Message)
	}
	n.collectGarbage()
	if lost := before - n.freeBytes(); lost > 1<<20 {
		t.Errorf("%d bytes are not given back", lost)
	}
	n.noLeases()
	n.mustPull(present)
	n.mustPull(small)
	n.reg.Forget()
	if res := n.pull(big); res.Reason != puller.NoSpace || res.Attempts != 0 || len(n.reg.Requests()) > 0 {
		t.Errorf("again, without more space: reason %q, %d attempts, requests %v", res.Reason, res.Attempts, n.reg.Requests())
	}
	empty()
	n.mustPull(big)
}

func TestAFullDiskLeavesTheOtherImagesOfTheSet(t *testing.T) {
	n, big, small := smallDisk(t, 0)
	n.fill(60)
	wanted := []puller.Wanted{{Image: big}, {Image: small}, {Image: n.push("third", 20)}} // which fits alone
	for i, res := range n.puller.Sync(t.Context(), wanted, n.keyring, func(puller.Result) {}) {
		if want := i > 0; (res.State == puller.Present) != want {
			t.Errorf("%s: %s: %s", res.Image, res.Reason, res.Message)
		}
	}
	n.noLeases()
}

func TestPinsEndWithTheBudget(t *testing.T) {
	n := startNode(t, testenv.Config{}, puller.Options{})
	refs := []string{n.push("a", 4), n.push("b", 4), n.push("c", 1)}
	base := int64(5 << 20) // the program that all of them share, packed and unpacked
	sync := func(budget int64, refs ...string) []bool {
		t.Helper()
		p := n.connect(puller.Options{PinBudget: budget})
		var wanted []puller.Wanted
		for _, ref := range refs {
			wanted = append(wanted, puller.Wanted{Image: ref})
		}
		if err := p.Release(t.Context(), wanted); err != nil {
			t.Fatal(err)
		}
		var pinned []bool
		for _, res := range p.Sync(t.Context(), wanted, n.keyring, func(puller.Result) {}) {
			if res.State != puller.Present {
				t.Fatalf("%s: %s: %s", res.Image, res.Reason, res.Message)
			}
			pinned = append(pinned, res.Pinned)
			if testenv.UnderTest() != testenv.V16 { // which takes a label in at its next start
				n.AwaitPinned(res.Ref, res.Pinned)
			}
		}
		return pinned
	}
	for _, step := range []struct {
		budget int64
		refs   []string
		want   []bool
	}{
		{0, refs, []bool{false, false, false}},
		{base + 11<<20, refs, []bool{true, false, true}}, // b does not fit beside a, c does
		{base + 30<<20, refs, []bool{true, true, true}},
		{base + 11<<20, []string{refs[1], refs[0]}, []bool{true, false}}, // c is not wanted any more
		{0, refs, []bool{false, false, false}},
	} {
		if got := sync(step.budget, step.refs...); !slices.Equal(got, step.want) {
			t.Errorf("budget %d for %d images: pinned %v, want %v", step.budget, len(step.refs), got, step.want)
		}
	}
	// What others have pinned stays so.
	img := n.record(refs[0])
	img.Labels["io.cri-containerd.pinned"] = "pinned"
	if _, err := n.client.ImageService().Update(n.ctx(), img, "labels.io.cri-containerd.pinned"); err != nil {
		t.Fatal(err)
	}
	sync(base+30<<20, refs...)
	sync(0, refs[1])
	if got := n.record(refs[0]).Labels; got["io.cri-containerd.pinned"] != "pinned" {
		t.Errorf("the pin of somebody else is gone: %v", got)
	}
	for _, name := range n.puller.Pull(t.Context(), parse(t, refs[2]), n.keyring).Names {
		if l := n.record(name).Labels; l["io.cri-containerd.pinned"] != "" || l["kip/pinned-for"] != "" {
			t.Errorf("%s is still pinned: %v", name, l)
		}
	}
}
