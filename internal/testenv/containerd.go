package testenv

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	containerd "github.com/containerd/containerd/v2/client"
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

// Config is a daemon's configuration. The zero value is the newest one with
// containerd's defaults.
type Config struct {
	Version               string
	Snapshotter           string
	DiscardUnpackedLayers bool
}

// Versions of containerd that the rig can start.
const (
	Newest = "2" // the newest 2.x, the version of kip's client
	V17    = "1.7"
)

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
	version, cri := 3, `
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.images"]
  snapshotter = %q
  discard_unpacked_layers = %t
[plugins."io.containerd.cri.v1.images".registry]
  config_path = %q
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = %q
`
	if c.config.Version == V17 {
		version, cri = 2, `
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = %q
  discard_unpacked_layers = %t
[plugins."io.containerd.grpc.v1.cri".registry]
  config_path = %q
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = %q
`
	}
	return fmt.Sprintf(`version = %d
root = %q
state = %q
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.nri.v1.nri"]
[grpc]
  address = %q
`, version, c.Root, filepath.Join(c.dir, "state"), c.Address) +
		fmt.Sprintf(cri, c.config.Snapshotter, c.config.DiscardUnpackedLayers, c.HostsDir, PauseImage)
}

// Start starts the daemon again after Kill, and waits until it serves.
func (c *Containerd) Start() {
	c.t.Helper()
	bin := tools.build(c.t)
	if c.config.Version == V17 {
		bin = tools17.build(c.t)
	}
	const enter = `mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs -o mode=755 tmpfs /run && exec "$0" --config "$1"`
	cmd := exec.Command("sh", "-c", enter, filepath.Join(bin, "containerd"), filepath.Join(c.dir, "config.toml"))
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

// CRI calls f with a connection to the daemon's socket.
func (c *Containerd) CRI(f func(conn *grpc.ClientConn) error) error {
	conn, err := grpc.NewClient("unix://"+c.Address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to CRI: %w", err)
	}
	defer conn.Close()
	return f(conn)
}
