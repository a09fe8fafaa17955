package puller

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// settings are what the daemon's own pulls go by, and kip's therefore too.
type settings struct {
	// Daemon is another string after each start of the daemon.
	Daemon string
	// Version is containerd's.
	Version string
	// CRI is set where the daemon serves the kubelet.
	CRI bool
	// Snapshotters are those that CRI unpacks into, its default first: runtime
	// handlers, as of Kata Containers, may have one of their own.
	Snapshotters []string
	// Loaded are all snapshotters of the daemon. One that is remote wants to be told
	// which image a layer is of, and then need not have the layer fetched.
	Loaded map[string]remote
	// HostsDirs are the folders in which CRI looks for hosts.toml.
	HostsDirs []string
	// DiscardUnpackedLayers is set where CRI lets go of a layer's blob once its
	// snapshot is there.
	DiscardUnpackedLayers bool
	// Verifiers is set where the daemon can ask image verifiers before a pull.
	Verifiers bool
	// ImageFS is the folder that CRI says images are in.
	ImageFS string
	// Problems are what is odd about the settings.
	Problems []string
}

type remote bool

// The settings of a daemon that says nothing else: containerd's defaults.
const (
	defaultSnapshotter = "overlayfs"
	defaultHostsDirs   = "/etc/containerd/certs.d:/etc/docker/certs.d"
)

// askDaemon asks the daemon for its settings. Each line of containerd tells another
// part in another place: 1.x all in CRI's Status, 2.4 the image settings by
// introspection, all 2.x the snapshotter by the image filesystem's path.
func askDaemon(ctx context.Context, client *containerd.Client) (settings, error) {
	s := settings{Loaded: map[string]remote{}}
	if err := s.identify(ctx, client); err != nil {
		return s, err
	}
	hosts, roots, err := s.readPlugins(ctx, client)
	if err != nil {
		return s, fmt.Errorf("asking containerd for its plugins: %w", err)
	}
	config, err := s.statusConfig(ctx, client)
	if err != nil {
		return s, fmt.Errorf("asking CRI for its settings: %w", err)
	}
	if s.ImageFS, err = imageFS(ctx, client); err != nil {
		return s, fmt.Errorf("asking CRI for its image filesystem: %w", err)
	}
	s.HostsDirs = filepath.SplitList(cmp.Or(hosts, config.Registry.ConfigPath, defaultHostsDirs))
	s.DiscardUnpackedLayers = s.DiscardUnpackedLayers || config.Containerd.DiscardUnpackedLayers
	if off := config.Containerd.DisableSnapshotAnnotations; off != nil && !*off { // 1.x
		for name := range s.Loaded {
			s.Loaded[name] = true
		}
	}
	s.choose(cmp.Or(config.Containerd.Snapshotter, snapshotterAt(s.ImageFS, roots), defaultSnapshotter), config)
	return s, nil
}

// identify fills in which daemon this is.
func (s *settings) identify(ctx context.Context, client *containerd.Client) error {
	version, err := client.Version(ctx)
	if err != nil {
		return fmt.Errorf("asking containerd for its version: %w", err)
	}
	server, err := client.IntrospectionService().Server(ctx)
	if err != nil {
		return fmt.Errorf("asking containerd for its identity: %w", err)
	}
	s.Version = version.Version
	s.Daemon = fmt.Sprintf("%s %s %d", version.Version, server.UUID, server.Pid)
	return nil
}

// readPlugins reads what the plugins say of themselves. It returns CRI's folders
// of hosts.toml and where each snapshotter keeps its files.
func (s *settings) readPlugins(ctx context.Context, client *containerd.Client) (hosts string, roots map[string]string, err error) {
	resp, err := client.IntrospectionService().Plugins(ctx)
	if err != nil {
		return "", nil, err
	}
	roots = map[string]string{}
	for _, p := range resp.Plugins {
		if p.InitErr != nil {
			continue
		}
		switch {
		case p.Type == "io.containerd.snapshotter.v1":
			s.Loaded[p.ID] = p.Exports["enable_remote_snapshot_annotations"] == "true" // as in containerd's Transfer service
			roots[p.ID] = p.Exports["root"]
		case p.Type == "io.containerd.cri.v1" && p.ID == "images":
			hosts = p.Exports["RegistryConfigPath"]
			s.DiscardUnpackedLayers = p.Exports["DiscardUnpackedLayers"] == "true"
		case p.Type == "io.containerd.image-verifier.v1":
			s.Verifiers = true
		}
	}
	return hosts, roots, nil
}

// choose fills in the snapshotters in use.
func (s *settings) choose(main string, config criConfig) {
	s.Snapshotters = []string{main}
	for handler, r := range config.Containerd.Runtimes {
		switch _, loaded := s.Loaded[r.Snapshotter]; {
		case r.Snapshotter == "" || slices.Contains(s.Snapshotters, r.Snapshotter):
		case !loaded:
			s.Problems = append(s.Problems, fmt.Sprintf("the runtime %s uses the snapshotter %s, which containerd has not loaded: images are not unpacked for it", handler, r.Snapshotter))
		default:
			s.Snapshotters = append(s.Snapshotters, r.Snapshotter)
		}
	}
	slices.Sort(s.Snapshotters[1:])
	slices.Sort(s.Problems)
}

// criConfig is the part of CRI's configuration that kip wants. All else in it is
// left unread: in 1.x it holds registry passwords.
type criConfig struct {
	Containerd struct {
		Snapshotter                string `json:"snapshotter"`
		DiscardUnpackedLayers      bool   `json:"discardUnpackedLayers"`
		DisableSnapshotAnnotations *bool  `json:"disableSnapshotAnnotations"`
		Runtimes                   map[string]struct {
			Snapshotter string `json:"snapshotter"`
		} `json:"runtimes"`
	} `json:"containerd"`
	Registry struct {
		ConfigPath string `json:"configPath"`
	} `json:"registry"`
}

// statusConfig reads the configuration in CRI's Status. A daemon without CRI has
// none.
func (s *settings) statusConfig(ctx context.Context, client *containerd.Client) (criConfig, error) {
	var config criConfig
	status, err := runtime.NewRuntimeServiceClient(connOf(client)).Status(ctx, &runtime.StatusRequest{Verbose: true})
	if err != nil {
		return config, withoutCRI(err)
	}
	s.CRI = true
	if text := status.Info["config"]; text != "" {
		err = json.Unmarshal([]byte(text), &config)
	}
	return config, err
}

// imageFS is the folder of CRI's default snapshotter, empty without CRI.
func imageFS(ctx context.Context, client *containerd.Client) (string, error) {
	info, err := runtime.NewImageServiceClient(connOf(client)).ImageFsInfo(ctx, &runtime.ImageFsInfoRequest{})
	if err != nil {
		return "", withoutCRI(err)
	}
	if len(info.ImageFilesystems) == 0 {
		return "", nil
	}
	return info.ImageFilesystems[0].GetFsId().GetMountpoint(), nil
}

// snapshotterAt finds the snapshotter that keeps its files in a folder.
func snapshotterAt(path string, roots map[string]string) string {
	for name, root := range roots {
		if root != "" && root == path {
			return name
		}
	}
	_, name, _ := strings.Cut(filepath.Base(path), "io.containerd.snapshotter.v1.")
	return name
}

// connOf is the client's connection; CRI is served on the same socket.
func connOf(client *containerd.Client) grpc.ClientConnInterface {
	return client.Conn().(*grpc.ClientConn) // see newPuller
}

// withoutCRI is nil for the error of a daemon that has no CRI plugin.
func withoutCRI(err error) error {
	err = errgrpc.ToNative(err)
	if errdefs.IsNotImplemented(err) {
		return nil
	}
	return err
}
