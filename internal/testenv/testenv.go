// Package testenv is the rig of kip's tests, demo and benchmark: a real
// containerd, a real registry, a token service, an Enterprise Gateway and images
// that truly run. Everything it starts it stops again, also when a test fails
// or is interrupted, and what it writes stays below .cache in the tree.
package testenv

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"
)

// T is what the rig needs of a test. testing.TB has it, and so has Main for the
// demo and the benchmark, which are no tests.
type T interface {
	Helper()
	Cleanup(func())
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
}

// limit bounds each single wait of the rig: starting a daemon, an answer of CRI.
const limit = 60 * time.Second

// NeedRoot ends a test that cannot run without root. Under CI that is a
// failure: nothing is left out there.
func NeedRoot(t interface {
	T
	Skipf(format string, args ...any)
}) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatalf("this test needs root, and CI leaves nothing out")
	}
	t.Skipf("needs root: it starts a containerd")
}

// Rounds is how often a test does what goes wrong now and then: few times in the
// gate, and as often as TEST_ROUNDS says in a long run.
func Rounds(t T, few int) int {
	t.Helper()
	text := os.Getenv("TEST_ROUNDS")
	if text == "" {
		return few
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("TEST_ROUNDS is %q: it must be a number, 1 or more", text)
	}
	return n
}

// Tree returns the root of the source tree that the working folder is in.
func Tree(t T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatalf("finding the source tree: %v", err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		b, _ := os.ReadFile(filepath.Join(dir, "go.mod"))
		if strings.HasPrefix(string(b), "module example.com/kip\n") {
			return dir
		}
	}
	t.Fatalf("finding the source tree: no go.mod of kip above the working folder")
	return ""
}

// Dir makes a folder for one run of the rig, below .cache/run in the tree, and
// removes it at the end. Its name begins with the process's ID, so that a later
// run finds and removes what a killed one left.
func Dir(t T) string {
	t.Helper()
	runs := filepath.Join(Tree(t), ".cache", "run")
	if err := os.MkdirAll(runs, 0o755); err != nil {
		t.Fatalf("making %s: %v", runs, err)
	}
	sweep(runs)
	dir, err := os.MkdirTemp(runs, strconv.Itoa(os.Getpid())+"-")
	if err != nil {
		t.Fatalf("making a folder for the run: %v", err)
	}
	cleanup(t, func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Logf("removing %s: %v", dir, err)
		}
	})
	return dir
}

// sweep removes the folders and control groups of runs whose process is gone.
func sweep(runs string) {
	gone := func(name string) bool {
		pid, err := strconv.Atoi(name)
		return err == nil && errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}
	entries, _ := os.ReadDir(runs)
	for _, e := range entries {
		if pid, _, _ := strings.Cut(e.Name(), "-"); gone(pid) {
			os.RemoveAll(filepath.Join(runs, e.Name()))
		}
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + cgroupPrefix + "*")
	for _, g := range groups {
		if gone(strings.TrimPrefix(filepath.Base(g), cgroupPrefix)) {
			removeCgroup(g)
		}
	}
}

const cgroupPrefix = "kip-testenv-"

// cgroupParent is the control group that holds the containers of this process.
func cgroupParent() string { return cgroupPrefix + strconv.Itoa(os.Getpid()) }

// removeCgroups removes what is empty of this process's control groups.
func removeCgroups() {
	groups, _ := filepath.Glob("/sys/fs/cgroup/*/" + cgroupParent())
	for _, g := range groups {
		removeCgroup(g)
	}
}

// removeCgroup removes an empty control group and those below it. Only folders
// can be removed there, the files in them are the kernel's.
func removeCgroup(dir string) {
	var dirs []string
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	slices.Reverse(dirs)
	for _, d := range dirs {
		os.Remove(d)
	}
}

// pending holds the cleanups that have not run, for the case of ^C: the testing
// package runs none then.
var pending struct {
	sync.Mutex
	once    sync.Once
	running sync.Mutex // held while cleanups run
	fns     []func()
}

// cleanup registers f to run once: at the end of the test, or on an interrupt.
func cleanup(t T, f func()) {
	f = sync.OnceFunc(f)
	pending.once.Do(onInterrupt)
	pending.Lock()
	pending.fns = append(pending.fns, f)
	pending.Unlock()
	t.Cleanup(f)
}

func onInterrupt() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-c
		signal.Stop(c) // a second one ends the process at once
		fmt.Fprintln(os.Stderr, "interrupted: cleaning up")
		runPending()
		os.Exit(130)
	}()
}

// runPending runs all cleanups. A second caller waits until they have run.
func runPending() {
	pending.running.Lock()
	defer pending.running.Unlock()
	pending.Lock()
	fns := pending.fns
	pending.fns = nil
	pending.Unlock()
	for _, f := range slices.Backward(fns) {
		f()
	}
}

// Main is the T of a program that is no test. Run calls f with it.
type Main struct{}

// Run calls f and then all cleanups, and ends the process: with status 0, or
// with 1 after a Fatalf.
func Run(f func(t T)) {
	logrus.SetLevel(logrus.ErrorLevel) // containerd's packages warn of what a rig need not have
	status := 0
	done := make(chan struct{})
	go func() { // its own goroutine, for Goexit in Fatalf
		defer close(done)
		defer runPending()
		status = 1
		f(Main{})
		status = 0
	}()
	<-done
	os.Exit(status)
}

// Helper does nothing.
func (Main) Helper() {}

// Cleanup does nothing: cleanup keeps all functions, and Run calls them.
func (Main) Cleanup(func()) {}

// Logf writes a line to standard error.
func (Main) Logf(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Fatalf writes a line to standard error and ends the function given to Run.
func (m Main) Fatalf(format string, args ...any) {
	m.Logf(format, args...)
	runtime.Goexit()
}

// await calls ready until it returns nil, and fails with its last error when
// the time limit is over.
func await(t T, what string, ready func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := ready()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waiting for %s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
