package puller

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc"
	runtime "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// settings are what the daemon's own pulls go by, and kip's therefore too.
type settings struct {
	// Snapshotter is the one that CRI unpacks into.
	Snapshotter string
	// HostsDirs are the folders in which CRI looks for hosts.toml.
	HostsDirs []string
	// DiscardUnpackedLayers is set where CRI lets go of a layer's blob once its
	// snapshot is there.
	DiscardUnpackedLayers bool
}

// The settings of a daemon that says nothing else: containerd's defaults.
const (
	defaultSnapshotter = "overlayfs"
	defaultHostsDirs   = "/etc/containerd/certs.d:/etc/docker/certs.d"
)

// askDaemon asks the daemon for its settings. Each line of containerd tells another
// part in another place: 1.x all in CRI's Status, 2.4 the image settings by
// introspection, all 2.x the snapshotter by the image filesystem's path.
func askDaemon(ctx context.Context, client *containerd.Client) (settings, error) {
	var s settings
	var hosts string
	exports, err := pluginExports(ctx, client, "type==io.containerd.cri.v1,id==images")
	if err != nil {
		return s, fmt.Errorf("asking containerd for its plugins: %w", err)
	}
	for _, e := range exports {
		hosts = e["RegistryConfigPath"]
		s.DiscardUnpackedLayers = e["DiscardUnpackedLayers"] == "true"
	}
	status, err := statusConfig(ctx, client)
	if err != nil {
		return s, fmt.Errorf("asking CRI for its settings: %w", err)
	}
	s.DiscardUnpackedLayers = s.DiscardUnpackedLayers || status.Containerd.DiscardUnpackedLayers
	hosts = cmp.Or(hosts, status.Registry.ConfigPath, defaultHostsDirs)
	s.HostsDirs = filepath.SplitList(hosts)
	s.Snapshotter = status.Containerd.Snapshotter
	if s.Snapshotter == "" {
		s.Snapshotter, err = imageFSSnapshotter(ctx, client)
	}
	s.Snapshotter = cmp.Or(s.Snapshotter, defaultSnapshotter)
	return s, err
}

// criConfig is the part of CRI's configuration that kip wants. All else in it is
// left unread: in 1.x it holds registry passwords.
type criConfig struct {
	Containerd struct {
		Snapshotter           string `json:"snapshotter"`
		DiscardUnpackedLayers bool   `json:"discardUnpackedLayers"`
	} `json:"containerd"`
	Registry struct {
		ConfigPath string `json:"configPath"`
	} `json:"registry"`
}

// statusConfig reads the configuration in CRI's Status. A daemon without CRI has
// none.
func statusConfig(ctx context.Context, client *containerd.Client) (criConfig, error) {
	var config criConfig
	conn, err := connOf(client)
	if err != nil {
		return config, err
	}
	status, err := runtime.NewRuntimeServiceClient(conn).Status(ctx, &runtime.StatusRequest{Verbose: true})
	if err != nil {
		return config, withoutCRI(err)
	}
	if text := status.Info["config"]; text != "" {
		err = json.Unmarshal([]byte(text), &config)
	}
	return config, err
}

// imageFSSnapshotter finds the snapshotter by the folder that CRI names as its
// image filesystem.
func imageFSSnapshotter(ctx context.Context, client *containerd.Client) (string, error) {
	conn, err := connOf(client)
	if err != nil {
		return "", err
	}
	info, err := runtime.NewImageServiceClient(conn).ImageFsInfo(ctx, &runtime.ImageFsInfoRequest{})
	if err != nil {
		return "", withoutCRI(err)
	}
	if len(info.ImageFilesystems) == 0 {
		return "", nil
	}
	path := info.ImageFilesystems[0].GetFsId().GetMountpoint()
	roots, err := pluginExports(ctx, client, "type==io.containerd.snapshotter.v1")
	if err != nil {
		return "", fmt.Errorf("asking containerd for its snapshotters: %w", err)
	}
	for name, e := range roots {
		if e["root"] == path {
			return name, nil
		}
	}
	_, name, _ := strings.Cut(filepath.Base(path), "io.containerd.snapshotter.v1.")
	return name, nil
}

// connOf is the client's connection; CRI is served on the same socket.
func connOf(client *containerd.Client) (grpc.ClientConnInterface, error) {
	conn, ok := client.Conn().(grpc.ClientConnInterface)
	if !ok {
		return nil, errors.New("the client of containerd has no gRPC connection")
	}
	return conn, nil
}

// withoutCRI is nil for the error of a daemon that has no CRI plugin.
func withoutCRI(err error) error {
	err = errgrpc.ToNative(err)
	if errdefs.IsNotImplemented(err) {
		return nil
	}
	return err
}

// pluginExports returns what the plugins that match a filter say of themselves,
// by plugin ID.
func pluginExports(ctx context.Context, client *containerd.Client, filter string) (map[string]map[string]string, error) {
	resp, err := client.IntrospectionService().Plugins(ctx, filter)
	if err != nil {
		return nil, err
	}
	exports := map[string]map[string]string{}
	for _, plugin := range resp.Plugins {
		exports[plugin.ID] = plugin.Exports
	}
	return exports, nil
}
