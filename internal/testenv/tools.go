package testenv

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
)

// toolset is a module of pinned programs, built once per version of its go.mod.
type toolset struct {
	name     string // folder of the binaries
	module   string // folder of the module, below internal/tools
	packages []string
}

// The daemons live in modules of their own: they share package names, and each
// needs the dependencies of its time.
var (
	tools = toolset{"tools", ".", []string{
		"github.com/containerd/containerd/v2/cmd/containerd",
		"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
		"github.com/containerd/containerd/v2/cmd/ctr",
		"github.com/distribution/distribution/v3/cmd/registry",
		"sigs.k8s.io/cri-tools/cmd/crictl",
	}}
	tools17 = toolset{"containerd-1.7", "containerd-1.7", []string{
		"github.com/containerd/containerd/cmd/containerd",
		"github.com/containerd/containerd/cmd/containerd-shim-runc-v2",
	}}
	tools23 = toolset{"containerd-2.3", "containerd-2.3", []string{
		"github.com/containerd/containerd/v2/cmd/containerd",
		"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
	}}
)

// Tool returns the path of one of the rig's pinned programs (ctr, crictl,
// registry, containerd), building it if needed.
func Tool(t T, name string) string {
	t.Helper()
	return filepath.Join(tools.build(t), name)
}

// Prepare builds and fetches what a rig with the newest daemon needs.
func Prepare(t T) {
	t.Helper()
	tools.build(t)
	runc(t)
}

// daemon returns the folder of a containerd's binaries.
func daemon(t T, version string) string {
	t.Helper()
	switch version {
	case V16:
		return filepath.Join(debian(t, "containerd"), "usr", "bin")
	case V17:
		return tools17.build(t)
	case V23:
		return tools23.build(t)
	case Newest:
		return tools.build(t)
	}
	t.Fatalf("the rig has no containerd %q", version)
	return ""
}

// build returns the folder of the tool set's binaries.
func (s toolset) build(t T) string {
	t.Helper()
	module := filepath.Join(Tree(t), "internal", "tools", s.module)
	sum := sha256.New()
	fmt.Fprintln(sum, runtime.Version())
	for _, f := range []string{"go.mod", "go.sum"} {
		b, err := os.ReadFile(filepath.Join(module, f))
		if err != nil {
			t.Fatalf("reading the tools module: %v", err)
		}
		sum.Write(b)
	}
	return once(t, fmt.Sprintf("%s-%.6x", s.name, sum.Sum(nil)), func(dir string) error {
		t.Logf("building %s (minutes on a cold machine, once)", s.name)
		return command(module, "go", append([]string{"build", "-ldflags=-s -w", "-o", dir + "/"}, s.packages...)...)
	})
}

// runc returns the folder of Debian's runc, which is built with seccomp: CRI's
// default profile needs that.
func runc(t T) string {
	t.Helper()
	return filepath.Join(debian(t, "runc"), "usr", "sbin")
}

// debian returns the folder of a package of Debian. It is unpacked beside the other
// tools, so that nothing is installed on the machine.
func debian(t T, name string) string {
	t.Helper()
	return once(t, "debian-"+name, func(dir string) error {
		t.Logf("fetching Debian's %s", name)
		apt := filepath.Join(dir, "apt")
		if err := os.MkdirAll(filepath.Join(apt, "lists", "partial"), 0o755); err != nil {
			return err
		}
		opts := []string{"-qq", "-o", "APT::Sandbox::User=root", "-o", "Dir::State::lists=" + apt + "/lists", "-o", "Dir::Cache=" + apt}
		if err := command(dir, "apt-get", append(opts, "update")...); err != nil {
			return err
		}
		if err := command(dir, "apt-get", append(opts, "download", name)...); err != nil {
			return err
		}
		if err := os.RemoveAll(apt); err != nil {
			return err
		}
		debs, err := filepath.Glob(filepath.Join(dir, name+"_*.deb"))
		if err != nil || len(debs) != 1 {
			return fmt.Errorf("apt-get download left %q in %s", debs, dir)
		}
		return command(dir, "dpkg-deb", "--extract", debs[0], dir)
	})
}

// once returns the folder .cache/tools/name, filled by fill the first time. A
// lock keeps test binaries that run side by side from filling it twice, and the
// rename at the end keeps half a folder from being taken for a whole one.
func once(t T, name string, fill func(dir string) error) string {
	t.Helper()
	parent := filepath.Join(Tree(t), ".cache", "tools")
	if err := os.MkdirAll(parent, 0o755); err != nil {
		t.Fatalf("making %s: %v", parent, err)
	}
	lock, err := os.OpenFile(filepath.Join(parent, "."+name+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		t.Fatalf("locking the tools folder: %v", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatalf("locking the tools folder: %v", err)
	}
	dir := filepath.Join(parent, name)
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	part := dir + ".part"
	if err := os.RemoveAll(part); err != nil {
		t.Fatalf("preparing %s: %v", name, err)
	}
	if err := os.MkdirAll(part, 0o755); err != nil {
		t.Fatalf("preparing %s: %v", name, err)
	}
	if err := fill(part); err != nil {
		t.Fatalf("preparing %s: %v", name, err)
	}
	if err := os.Rename(part, dir); err != nil {
		t.Fatalf("preparing %s: %v", name, err)
	}
	return dir
}

// command runs a program in dir; its output is in the error.
func command(dir, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

// Kip builds the kip of this tree, with the race detector where race is set,
// and returns the path of the binary.
func Kip(t T, dir string, race bool) string {
	t.Helper()
	path := filepath.Join(dir, "kip")
	args := []string{"build", "-o", path}
	if race {
		args = append(args, "-race")
	}
	if err := command(Tree(t), "go", append(args, "./cmd/kip")...); err != nil {
		t.Fatalf("building kip: %v", err)
	}
	return path
}
