package testenv

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Containerd is a running daemon with its CRI plugin on.
type Containerd struct {
	// Address is the path of the daemon's socket.
	Address string
	// Root is the folder of its content and snapshots.
	Root string

	// HostsDir is its folder of hosts.toml files.
	HostsDir string

	t      T
	dir    string
	config Config
	proc   *process
}

// PauseImage is the sandbox image that the daemon is configured with. Load it
// before the first pod.
const PauseImage = "testenv.example/pause:1"

// Config is a daemon's configuration. The zero value is the version under test with
// containerd's defaults.
type Config struct {
	Version               string
	Snapshotter           string
	DiscardUnpackedLayers bool
	// RuntimeSnapshotter is the snapshotter of a second runtime handler, "other".
	RuntimeSnapshotter string
	// ProxySnapshotter is the socket of a snapshotter outside of the daemon, "proxy",
	// that says it is remote.
	ProxySnapshotter string
	// DiskMiB puts the daemon's root on a filesystem of its own, of that size.
	DiskMiB int
}

// Versions of containerd that the rig can start.
const (
	Newest = "2" // the newest 2.x, the version of kip's client
	V23    = "2.3"
	V17    = "1.7"
	V16    = "1.6" // Debian's
)

// UnderTest is the version of containerd that tests are about where they do not
// say: that of TEST_CONTAINERD, or else the newest.
func UnderTest() string { return cmp.Or(os.Getenv("TEST_CONTAINERD"), Newest) }

// Smoke are the versions for a test of what matters most: the one under test, and
// beside the newest the last of 1.x.
func Smoke() []string {
	if UnderTest() == Newest {
		return []string{Newest, V17}
	}
	return []string{UnderTest()}
}

// StartContainerd starts a daemon with a root, state and socket of its own.
//
// It runs as the first process of a PID and mount namespace, with an empty /run:
// when it ends, however it ends, the kernel ends its shims and containers and
// drops its mounts, and the shims' sockets (whose folder below /run is fixed) are
// never seen outside.
func StartContainerd(t T, config Config) *Containerd {
	t.Helper()
	dir := Dir(t)
	c := &Containerd{
		Address: filepath.Join(dir, "containerd.sock"), Root: filepath.Join(dir, "root"),
		HostsDir: filepath.Join(dir, "certs.d"), t: t, dir: dir, config: config,
	}
	c.config.Version = cmp.Or(config.Version, UnderTest())
	c.config.Snapshotter = cmp.Or(config.Snapshotter, "overlayfs")
	if len(c.Address)+len(".ttrpc") > 100 { // a socket's path has room for 107 bytes
		t.Fatalf("the path %s is too long for a socket: move the tree to a shorter one", c.Address)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.toml"), []byte(c.file()), 0o644); err != nil {
		t.Fatalf("configuring containerd: %v", err)
	}
	cleanup(t, removeCgroups) // after the daemon's end, which is that of its containers
	c.Start()
	return c
}

// file is the daemon's configuration file. oom_score_adj may be restricted: some
// machines do not let even root lower it.
func (c *Containerd) file() string {
	var b strings.Builder
	is1 := c.config.Version == V16 || c.config.Version == V17
	version := 3
	if is1 {
		version = 2
	}
	fmt.Fprintf(&b, `version = %d
root = %q
state = %q
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]
[grpc]
  address = %q
`, version, c.Root, filepath.Join(c.dir, "state"), c.Address)
	runtimes := "io.containerd.cri.v1.runtime"
	if is1 {
		runtimes = "io.containerd.grpc.v1.cri"
		fmt.Fprintf(&b, `
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = %q
  discard_unpacked_layers = %t
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = %q
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = %q
`, c.config.Snapshotter, c.config.DiscardUnpackedLayers, c.HostsDir, PauseImage)
	} else {
		fmt.Fprintf(&b, `
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.images"]
  snapshotter = %q
  discard_unpacked_layers = %t
[plugins."io.containerd.cri.v1.images".registry]
  config_path = %q
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q
`, c.config.Snapshotter, c.config.DiscardUnpackedLayers, c.HostsDir, PauseImage)
	}
	if s := c.config.RuntimeSnapshotter; s != "" {
		for handler, snapshotter := range map[string]string{"runc": "", "other": s} {
			fmt.Fprintf(&b, "[plugins.%q.containerd.runtimes.%s]\n  runtime_type = \"io.containerd.runc.v2\"\n  snapshotter = %q\n", runtimes, handler, snapshotter)
		}
	}
	if socket := c.config.ProxySnapshotter; socket != "" {
		fmt.Fprintf(&b, "[proxy_plugins.proxy]\n  type = \"snapshot\"\n  address = %q\n", socket)
		if !is1 {
			b.WriteString("[proxy_plugins.proxy.exports]\n  enable_remote_snapshot_annotations = \"true\"\n")
		}
	}
	return b.String()
}

// Start starts the daemon again after Kill, and waits until it serves.
func (c *Containerd) Start() {
	c.t.Helper()
	bin := daemon(c.t, c.config.Version)
	enter := `mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs -o mode=755 tmpfs /run && `
	if c.config.DiskMiB > 0 {
		enter += c.disk() + " && "
	}
	cmd := exec.Command("sh", "-c", enter+`exec "$0" --config "$1"`, filepath.Join(bin, "containerd"), filepath.Join(c.dir, "config.toml"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID}
	cmd.Env = append(os.Environ(), "PATH="+strings.Join([]string{bin, runc(c.t), os.Getenv("PATH")}, ":"))
	c.proc = start(c.t, c.dir, "containerd", cmd)
	await(c.t, "containerd and its CRI plugin", func() error {
		if err := c.proc.alive(); err != nil {
			c.t.Fatalf("%v", err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		return c.CRI(func(conn *grpc.ClientConn) error {
			status, err := runtime.NewRuntimeServiceClient(conn).Status(ctx, &runtime.StatusRequest{})
			if err != nil {
				return err
			}
			for _, cond := range status.Status.Conditions {
				if cond.Type == runtime.RuntimeReady && !cond.Status {
					return fmt.Errorf("runtime is not ready: %s", cond.Message)
				}
			}
			return nil
		})
	})
}

// disk makes the filesystem of the daemon's root, where it is not there yet, and
// returns the command that mounts it. The mount is in the daemon's namespace and
// goes with it.
func (c *Containerd) disk() string {
	c.t.Helper()
	path := filepath.Join(c.dir, "disk.img")
	if _, err := os.Stat(path); err != nil {
		if err := command(c.dir, "truncate", "-s", fmt.Sprintf("%dM", c.config.DiskMiB), path); err != nil {
			c.t.Fatalf("making a filesystem: %v", err)
		}
		if err := command(c.dir, "mkfs.ext4", "-q", "-m", "0", path); err != nil {
			c.t.Fatalf("making a filesystem: %v", err)
		}
	}
	return fmt.Sprintf("mkdir -p '%s' && mount -o loop '%s' '%s'", c.Root, path, c.Root)
}

// SeenRoot is the daemon's root as seen through its namespace: where DiskMiB is
// set, there is nothing at Root outside of it.
func (c *Containerd) SeenRoot() string {
	return filepath.Join("/proc", strconv.Itoa(c.proc.cmd.Process.Pid), "root", c.Root)
}

// Kill ends the daemon with SIGKILL, and with it all that it started.
func (c *Containerd) Kill() { c.proc.kill() }

// Pause stops the daemon's process without ending it: it answers nothing.
func (c *Containerd) Pause() { c.proc.cmd.Process.Signal(syscall.SIGSTOP) }

// Close ends the daemon and removes its folder, before the end of the test.
func (c *Containerd) Close() {
	c.Kill()
	if err := os.RemoveAll(c.dir); err != nil {
		c.t.Logf("removing %s: %v", c.dir, err)
	}
}

// Client returns a client of the daemon's k8s.io namespace, closed at the end.
func (c *Containerd) Client() *containerd.Client {
	c.t.Helper()
	client, err := containerd.New(c.Address, containerd.WithDefaultNamespace("k8s.io"))
	if err != nil {
		c.t.Fatalf("connecting to containerd: %v", err)
	}
	cleanup(c.t, func() { client.Close() })
	return client
}

// CollectGarbage makes the daemon of a client forget now, in the k8s.io namespace, what
// nothing refers to.
func CollectGarbage(t T, client *containerd.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), "k8s.io"), limit)
	defer cancel()
	manager := client.LeasesService()
	l, err := manager.Create(ctx, leases.WithRandomID())
	if err == nil {
		err = manager.Delete(ctx, l, leases.SynchronousDelete)
	}
	if err != nil {
		t.Fatalf("collecting garbage: %v", err)
	}
}

// CRI calls f with a connection to the daemon's socket.
func (c *Containerd) CRI(f func(conn *grpc.ClientConn) error) error {
	conn, err := grpc.NewClient("unix://"+c.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to CRI: %w", err)
	}
	defer conn.Close()
	return f(conn)
}
