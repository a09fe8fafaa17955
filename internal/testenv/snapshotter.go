package testenv

import (
	"context"
	"maps"
	"net"
	"path/filepath"
	"sync"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/plugins/snapshots/native"
	"google.golang.org/grpc"
)

// ProxySnapshotter is a real snapshotter outside of the daemon, which notes what it
// is told of each layer.
type ProxySnapshotter struct {
	// Socket is for Config.ProxySnapshotter.
	Socket string

	snapshots.Snapshotter
	mu       sync.Mutex
	prepared []map[string]string
}

// StartProxySnapshotter serves a snapshotter until the end of the test.
func StartProxySnapshotter(t T) *ProxySnapshotter {
	t.Helper()
	dir := Dir(t)
	sn, err := native.NewSnapshotter(filepath.Join(dir, "snapshots"))
	if err != nil {
		t.Fatalf("making a snapshotter: %v", err)
	}
	p := &ProxySnapshotter{Socket: filepath.Join(dir, "snapshotter.sock"), Snapshotter: sn}
	l, err := net.Listen("unix", p.Socket)
	if err != nil {
		t.Fatalf("serving a snapshotter: %v", err)
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(p))
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(l)
	}()
	cleanup(t, func() {
		server.Stop()
		<-done
		sn.Close()
	})
	return p
}

// Prepare notes the labels of the new snapshot.
func (p *ProxySnapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	var info snapshots.Info
	for _, o := range opts {
		if err := o(&info); err != nil {
			return nil, err
		}
	}
	p.mu.Lock()
	p.prepared = append(p.prepared, maps.Clone(info.Labels))
	p.mu.Unlock()
	return p.Snapshotter.Prepare(ctx, key, parent, opts...)
}

// Prepared returns the labels of all snapshots that were asked for.
func (p *ProxySnapshotter) Prepared() []map[string]string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]map[string]string(nil), p.prepared...)
}
