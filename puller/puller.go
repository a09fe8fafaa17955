// Package puller is the containerd side: it brings one image (Pull, Check) or a
// set of them (Sync) into the state in which the kubelet finds them.
package puller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strconv"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"golang.org/x/sync/semaphore"

	"example.com/kip/resolver"
)

// Options say how images are pulled. The zero value is what the daemon's own
// pulls would do.
type Options struct {
	// Namespace is containerd's; k8s.io, the kubelet's, where it is empty.
	Namespace string
	// Snapshotter is unpacked into instead of the daemon's own.
	Snapshotter string
	// Always asks the registry for each tag, present or not, as imagePullPolicy
	// Always does. Otherwise what is present is left alone.
	Always bool
	// Pullers is how many images may be in progress at once, at least 1. Where it is
	// not set there is a limit to downloads only.
	Pullers int
	// Retries is how many pulls there are of an image before it has failed, all
	// told; 3 where it is not set.
	Retries int
	// BackOff is the wait before the second pull of an image. It doubles each time,
	// with jitter. 1 s where it is not set.
	BackOff time.Duration
	// Registry says how registries are reached. Its HostsDirs are the daemon's own
	// where there are none.
	Registry resolver.Options
}

const (
	// downloads is how many blobs are fetched at once, over all images. CRI's
	// default is 3 and counts in images' layers too.
	downloads = 4
	// maxPullers bounds the images in progress where no number is given.
	maxPullers = 16
	maxBackOff = 30 * time.Second
)

// Puller pulls into one containerd. Its methods may be called side by side.
type Puller struct {
	client   *containerd.Client
	settings settings
	opts     Options

	downloads *semaphore.Weighted
	unpacks   *semaphore.Weighted
	busy      keyedMutex
}

// ErrUnreachable is in the error of Connect when no containerd answers.
var ErrUnreachable = errors.New("containerd cannot be reached")

// ErrNoSnapshotter is in the error of Connect when containerd does not have the
// snapshotter of the options.
var ErrNoSnapshotter = errors.New("containerd has no such snapshotter")

// Connect returns a puller for the containerd at a socket, after asking that
// daemon for its settings. It gives up with ErrUnreachable after timeout. The
// address is a path; a unix:// before it is accepted. Close ends the connection.
func Connect(ctx context.Context, address string, timeout time.Duration, opts Options) (*Puller, error) {
	path := strings.TrimPrefix(address, "unix://")
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer in %s", timeout))
	defer cancel()
	// The client connects at its first call and hides why it cannot.
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, unreachable(ctx, path, err)
	}
	conn.Close()
	client, err := containerd.New(path)
	if err != nil {
		return nil, unreachable(ctx, path, err)
	}
	p := newPuller(client, opts)
	if err := p.learn(ctx); err != nil {
		client.Close()
		if errors.Is(err, ErrNoSnapshotter) {
			return nil, err
		}
		return nil, unreachable(ctx, path, err)
	}
	return p, nil
}

func unreachable(ctx context.Context, path string, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("%w at %s: %w", ErrUnreachable, path, err)
}

func newPuller(client *containerd.Client, opts Options) *Puller {
	opts.Namespace = cmp.Or(opts.Namespace, "k8s.io")
	opts.Retries = cmp.Or(opts.Retries, 3)
	opts.BackOff = cmp.Or(opts.BackOff, time.Second)
	opts.Pullers = cmp.Or(opts.Pullers, maxPullers)
	if opts.Registry.Logins == nil {
		opts.Registry.Logins = &resolver.Logins{}
	}
	return &Puller{
		client: client, opts: opts,
		downloads: semaphore.NewWeighted(downloads),
		unpacks:   semaphore.NewWeighted(int64(runtime.GOMAXPROCS(0))),
	}
}

// learn fills in what the options leave to the daemon.
func (p *Puller) learn(ctx context.Context) error {
	s, err := askDaemon(p.context(ctx), p.client)
	if err != nil {
		return err
	}
	p.settings = s
	if name := p.opts.Snapshotter; name != "" {
		p.settings.Snapshotter = name
		known, err := pluginExports(p.context(ctx), p.client, "type==io.containerd.snapshotter.v1,id=="+strconv.Quote(name))
		if err != nil {
			return err
		}
		if len(known) == 0 {
			return fmt.Errorf("%w: %q", ErrNoSnapshotter, name)
		}
	}
	if len(p.opts.Registry.HostsDirs) == 0 {
		p.opts.Registry.HostsDirs = s.HostsDirs
	}
	slog.Debug("settings of the daemon", "snapshotter", p.settings.Snapshotter,
		"hosts", p.opts.Registry.HostsDirs, "discardUnpackedLayers", s.DiscardUnpackedLayers)
	return nil
}

// Close ends the connection to the daemon.
func (p *Puller) Close() error { return p.client.Close() }

func (p *Puller) context(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, p.opts.Namespace)
}
