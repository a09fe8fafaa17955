// Command bench pulls one set of images with kip and with crictl, by turns, into
// an empty containerd each time, and prints the times, the ratio of each round
// and kip's peak memory.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"example.com/kip/internal/testenv"
)

// The set: eight images of about 300 MB unpacked that share two base layers.
const (
	images    = 8
	baseBytes = 100 << 20
	ownBytes  = 100 << 20
)

func main() {
	rounds := flag.Int("rounds", 5, "how often each is run")
	flag.Parse()
	testenv.Run(func(t testenv.T) { bench(t, *rounds) })
}

// set is what is pulled, and from where.
type set struct {
	dir, kip, crictl, secrets string
	refs                      []string
}

func bench(t testenv.T, rounds int) {
	testenv.Prepare(t)
	s := makeSet(t)
	for _, atOnce := range []int{images, 2} {
		fmt.Printf("\n%d images, %d at once, empty store each time\n", images, atOnce)
		fmt.Println("round  kip      crictl   ratio  kip's peak RSS")
		var kips, crictls, ratios []float64
		var peak int64
		for round := range rounds {
			var kip, crictl float64
			var rss int64
			turns := []func(){
				func() { kip, rss = s.turn(t, func(address string) int64 { return s.pullWithKip(t, address, atOnce) }) },
				func() {
					crictl, _ = s.turn(t, func(address string) int64 { return s.pullWithCrictl(t, address, atOnce) })
				},
			}
			if round%2 == 1 { // who goes first has a colder machine, or a cooler one
				slices.Reverse(turns)
			}
			for _, turn := range turns {
				turn()
			}
			fmt.Printf("%5d  %6.2fs  %6.2fs  %5.2f  %.1f MiB\n", round+1, kip, crictl, kip/crictl, float64(rss)/1024)
			kips, crictls, ratios, peak = append(kips, kip), append(crictls, crictl), append(ratios, kip/crictl), max(peak, rss)
		}
		fmt.Printf("median %5.2fs  %6.2fs  %5.2f  %.1f MiB at most\n", median(kips), median(crictls), median(ratios), float64(peak)/1024)
	}
}

func makeSet(t testenv.T) set {
	t.Helper()
	fmt.Println("making the set")
	s := set{dir: testenv.Dir(t), crictl: testenv.Tool(t, "crictl")}
	s.kip = testenv.Kip(t, s.dir, false)
	reg := testenv.StartRegistry(t, testenv.Bearer, map[string]testenv.User{"team": {Password: "s3cret"}})
	m := testenv.NewImages(t)
	base := []testenv.Layer{
		m.Layer(testenv.RealFiles(t, "base-1", 0, baseBytes)...),
		m.Layer(testenv.RealFiles(t, "base-2", baseBytes, baseBytes)...),
	}
	for i := range images {
		own := m.Layer(testenv.RealFiles(t, "own-"+strconv.Itoa(i), 0, ownBytes)...)
		s.refs = append(s.refs, reg.Push(m, m.Image(base[0], base[1], own), fmt.Sprintf("team/kernel-%d:1", i)))
	}
	s.secrets = filepath.Join(s.dir, "secrets")
	testenv.MountSecret(t, s.secrets, "team-pull", map[string]testenv.Login{reg.Host: {Username: "team", Password: "s3cret"}})
	return s
}

// turn starts an empty daemon and returns the seconds that pull takes, with
// pull's own result.
func (s set) turn(t testenv.T, pull func(address string) int64) (float64, int64) {
	t.Helper()
	node := testenv.StartContainerd(t, testenv.Config{})
	defer node.Close()
	syscall.Sync() // what was written before is not this turn's
	began := time.Now()
	rss := pull(node.Address)
	took := time.Since(began).Seconds()
	seen := map[string]bool{}
	for _, img := range node.ListImages() {
		for _, tag := range img.RepoTags {
			seen[tag] = true
		}
	}
	for _, ref := range s.refs {
		if !seen[ref] {
			t.Fatalf("%s is not on the node after the pull", ref)
		}
	}
	return took, rss
}

// pullWithKip returns kip's peak resident memory in KiB.
func (s set) pullWithKip(t testenv.T, address string, atOnce int) int64 {
	t.Helper()
	args := []string{"-a", address, "--log-level", "ERROR", "pull", "--secrets-dir", s.secrets, "--num-pullers", strconv.Itoa(atOnce)}
	cmd := exec.Command(s.kip, append(args, s.refs...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatalf("kip: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	// Not what wait reports: that counts this program's own memory in, which the
	// child shares until it executes kip.
	var peak int64
	for {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatalf("kip: %v\n%s", err, &out)
			}
			return peak
		case <-time.After(10 * time.Millisecond):
			peak = max(peak, residentPeak(cmd.Process.Pid))
		}
	}
}

// residentPeak is the peak resident memory of a process so far, in KiB.
func residentPeak(pid int) int64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
			return n
		}
	}
	return 0
}

func (s set) pullWithCrictl(t testenv.T, address string, atOnce int) int64 {
	t.Helper()
	refs := make(chan string)
	errs := make(chan error, len(s.refs))
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for ref := range refs {
				cmd := exec.Command(s.crictl, "-r", "unix://"+address, "-i", "unix://"+address, "pull", "--creds", "team:s3cret", ref)
				cmd.Env = append(os.Environ(), "HOME="+s.dir)
				if out, err := cmd.CombinedOutput(); err != nil {
					errs <- fmt.Errorf("crictl: %w\n%s", err, strings.TrimSpace(string(out)))
				}
			}
		})
	}
	for _, ref := range s.refs {
		refs <- ref
	}
	close(refs)
	workers.Wait()
	close(errs)
	for err := range errs {
		t.Fatalf("%v", err)
	}
	return 0
}

func median(list []float64) float64 {
	sorted := slices.Sorted(slices.Values(list))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
