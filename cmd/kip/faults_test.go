package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller/agent"
)

// victim is a set of images that a kip of its own process pulls, and is hindered in.
type victim struct {
	*cluster
	t      *testing.T
	kip    string // the program
	ctx    context.Context
	client *containerd.Client
	images []testenv.Image
	took   time.Duration // a pull of the set from nothing
}

func startVictim(t *testing.T) *victim {
	c := startCluster(t, testenv.UnderTest())
	v := &victim{cluster: c, t: t, kip: testenv.Kip(t, testenv.Dir(t), false), client: c.node.Client()}
	v.ctx = namespaces.WithNamespace(t.Context(), "k8s.io")
	base := []testenv.Layer{c.images.Layer(testenv.Hello(t)), c.images.Noise("base", 4<<20)}
	kernels := map[string]string{}
	for i := range 4 {
		name := fmt.Sprintf("k%d", i)
		img := c.images.Image(append(base[:2:2], c.images.Noise(name+"-a", 3<<20), c.images.Noise(name+"-b", 2<<20))...)
		v.images = append(v.images, img)
		kernels[name] = c.reg.Push(c.images, img, "team/"+name+":1")
	}
	c.gateway.SetKernels(kernels)
	c.reg.Shape(0, 30<<20) // else most of a layer is on its way at any moment
	began := time.Now()
	v.recovers()
	v.took = time.Since(began)
	v.clear()
	return v
}

// start begins a cycle of kip.
func (v *victim) start() (cmd *exec.Cmd, stdout, stderr *bytes.Buffer) {
	v.t.Helper()
	cmd = exec.CommandContext(v.t.Context(), v.kip, "run", "--once", "-o", "json")
	stdout, stderr = &bytes.Buffer{}, &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if err := cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	return cmd, stdout, stderr
}

// recovers does a cycle that nothing hinders, after which all is as it should be.
func (v *victim) recovers() {
	v.t.Helper()
	cmd, stdout, stderr := v.start()
	err := cmd.Wait()
	var r agent.Report
	if e := json.Unmarshal(stdout.Bytes(), &r); err != nil || e != nil || r.Present != len(v.images) {
		v.t.Fatalf("kip: %v\n%s\n%s", err, stdout, stderr)
	}
	testenv.CollectGarbage(v.t, v.client)
	left, err := v.client.LeasesService().List(v.ctx)
	if err != nil || len(left) > 0 {
		v.t.Fatalf("leases left behind: %v, error %v", left, err)
	}
	open, err := v.client.ContentStore().ListStatuses(v.ctx)
	if err != nil || len(open) > 0 {
		v.t.Fatalf("ingests left behind: %v, error %v", open, err)
	}
}

// clear takes all images from the node.
func (v *victim) clear() {
	v.t.Helper()
	list, err := v.client.ImageService().List(v.ctx)
	for _, img := range list {
		if err == nil {
			err = v.client.ImageService().Delete(v.ctx, img.Name, images.SynchronousDelete())
		}
	}
	if err != nil {
		v.t.Fatal(err)
	}
	v.reg.Forget()
}

// progress is what the daemon has of the images.
type progress struct {
	stored  map[string]bool // blobs in whole
	partial map[string]bool // and in part
	seen    int             // requests so far
}

func (v *victim) progress() progress {
	v.t.Helper()
	p := progress{map[string]bool{}, map[string]bool{}, len(v.reg.Requests())}
	err := v.client.ContentStore().Walk(v.ctx, func(i content.Info) error {
		p.stored[i.Digest.String()] = true
		return nil
	})
	if err != nil {
		v.t.Fatal(err)
	}
	open, err := v.client.ContentStore().ListStatuses(v.ctx)
	if err != nil {
		v.t.Fatal(err)
	}
	for _, s := range open {
		if s.Offset > 0 {
			p.partial[strings.TrimPrefix(s.Ref, "layer-")] = true
		}
	}
	return p
}

// again counts, over all requests so far, the layers of which more was sent than
// they have, and by how much: in all, and of the one image with most of them.
func (v *victim) again() (layers, most int, excess int64) {
	sent := map[string]int64{}
	for _, r := range v.reg.Requests() {
		if _, blob, ok := strings.Cut(r.Path, "/blobs/"); ok && r.Method == "GET" {
			sent[blob] += r.Sent
		}
	}
	seen := map[string]bool{}
	for _, img := range v.images {
		own := 0
		for _, l := range img.Layers {
			over := sent[l.Digest.String()] - l.Size
			if over <= 0 || seen[l.Digest.String()] {
				continue
			}
			seen[l.Digest.String()] = true
			own++
			excess += over
		}
		layers += own
		most = max(most, own)
	}
	return layers, most, excess
}

// figures sum up the rounds of a test.
type figures struct {
	rounds, hit, layers, most int
	excess                    int64
}

func (f *figures) add(v *victim, before progress) {
	v.t.Helper()
	f.rounds++
	for _, r := range v.reg.Requests()[before.seen:] {
		_, blob, ok := strings.Cut(r.Path, "/blobs/")
		if ok && before.stored[blob] {
			v.t.Errorf("the blob %s was there and was fetched again", blob)
		}
		if ok && before.partial[blob] && r.Status != http.StatusPartialContent {
			v.t.Errorf("the blob %s was there in part and was fetched again from its beginning", blob)
		}
	}
	layers, most, excess := v.again()
	f.layers += layers
	f.most = max(f.most, most)
	f.excess += excess
}

func (f figures) log(t *testing.T, what string) {
	t.Logf("%s: %d of %d times in mid-work, and each time all images were present after the next cycle, with 0 leases and 0 ingests left; "+
		"layers fetched again in part: %d in all (%d bytes), at most %d of one image", what, f.hit, f.rounds, f.layers, f.excess, f.most)
}

// kill hinders rounds cycles of kip, each at a random moment, and has each followed
// by one that is left alone.
func (v *victim) kill(what string, rounds int, kill func(kip *exec.Cmd)) {
	v.t.Helper()
	var f figures
	for range rounds {
		cmd, stdout, _ := v.start()
		time.Sleep(rand.N(v.took)) // any moment will do
		kill(cmd)
		err := cmd.Wait()
		if err != nil || strings.Contains(stdout.String(), `"attempts":2`) {
			f.hit++
		}
		if code := cmd.ProcessState.ExitCode(); err != nil && code != -1 && code != exitFailed && code != exitUnreachable {
			v.t.Errorf("kip ended with %v\n%s", err, stdout)
		}
		before := v.progress()
		v.recovers()
		f.add(v, before)
		v.clear()
	}
	f.log(v.t, what)
}

func TestAKilledKipLosesNothing(t *testing.T) {
	v := startVictim(t)
	v.kill("kip killed", testenv.Rounds(t, 5), func(kip *exec.Cmd) { kip.Process.Kill() })
}

func TestAKilledContainerdLosesNothing(t *testing.T) {
	v := startVictim(t)
	v.kill("containerd killed", testenv.Rounds(t, 3), func(*exec.Cmd) {
		v.node.Kill()
		v.node.Start()
	})
}

func TestTheAgentGoesOnWhenContainerdIsBack(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	img := c.images.Image(c.images.Layer(testenv.Hello(t)), c.images.Noise("noise", 16<<20))
	c.gateway.SetKernels(map[string]string{"a": c.reg.Push(c.images, img, "team/big:1")})
	t.Setenv("KIP_INTERVAL", "86400")
	t.Setenv("KIP_NUM_RETRIES", "1")
	killed := make(chan struct{})
	c.reg.OnBlob(img.Layers[1].Digest, 8<<20, func() {
		c.node.Kill()
		close(killed)
	})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	reports := newReports()
	ended := make(chan int)
	go func() { ended <- run(ctx, []string{"kip", "run", "-o", "json"}, reports, &lines{}) }()
	<-killed
	c.node.Start()
	if r := reports.next(t); r.Failed != 1 || r.Images[0].Reason != "DaemonUnavailable" {
		t.Errorf("when containerd went away: %+v", r)
	}
	reports.await(t, func(r agent.Report) bool { return r.Present == 1 })
	stop()
	<-ended
}
