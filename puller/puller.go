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
	"reflect"
	"strings"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc"

	"example.com/kip/resolver"
)

// Options say how images are pulled. The zero value is what the daemon's own
// pulls would do.
type Options struct {
	// Namespace is containerd's; k8s.io, the kubelet's, where it is empty.
	Namespace string
	// Snapshotter is unpacked into instead of those that the daemon uses.
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
	// Deadline is how long one image may take in one cycle, 6 h where it is not set.
	// What has been downloaded by then is kept for the next cycle.
	Deadline time.Duration
	// Disk says how full the image filesystem may become.
	Disk DiskOptions
	// PinBudget is how many bytes of images the kubelet's garbage collection is kept
	// from; none where it is 0.
	PinBudget int64
	// SyncFS has the daemon write each layer to the disk before the next one, so that
	// a power failure cannot leave empty files in a layer that counts as unpacked.
	SyncFS bool
	// DiscardUnpackedLayers has the daemon forget the blob of a layer that is
	// unpacked. Containerd 2.0 to 2.3 do not tell that this is their own setting.
	DiscardUnpackedLayers bool
	// VerifierDir is where the daemon looks for image verifiers: programs that decide
	// what may be pulled, which no client's pull asks. Where it holds any, nothing is
	// pulled unless BypassVerifiers is set. /opt/containerd/image-verifier/bin where
	// it is empty.
	VerifierDir     string
	BypassVerifiers bool
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

	defaultDeadline    = 6 * time.Hour
	defaultVerifierDir = "/opt/containerd/image-verifier/bin"
)

// Puller pulls into one containerd. Its methods may be called side by side, save
// Learn.
type Puller struct {
	address  string
	client   *containerd.Client
	fetching *containerd.Client // the same connection, see unrecorded
	opts     Options
	settings settings         // of the daemon, with what the options say instead
	registry resolver.Options // those of opts, with the daemon's hosts folders

	downloads *semaphore.Weighted
	busy      keyedMutex
	disk      disk
	slots     slots
	memory    memory
}

// ErrUnreachable is in the error of Connect and Learn when no containerd answers.
var ErrUnreachable = errors.New("containerd cannot be reached")

// ErrNoSnapshotter is in the error of Connect and Learn when containerd does not
// have the snapshotter of the options.
var ErrNoSnapshotter = errors.New("containerd has no such snapshotter")

// Connect returns a puller for the containerd at a socket, after asking that
// daemon for its settings. It gives up with ErrUnreachable after timeout. The
// address is a path; a unix:// before it is accepted. Close ends the connection.
func Connect(ctx context.Context, address string, timeout time.Duration, opts Options) (*Puller, error) {
	path := strings.TrimPrefix(address, "unix://")
	ctx, cancel := limited(ctx, timeout)
	defer cancel()
	// The client connects at its first call and hides why it cannot.
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, unreachable(ctx, path, err)
	}
	conn.Close()
	// A daemon that is restarted is waited for, up to the limit that each call has by
	// its context.
	client, err := containerd.New(path, containerd.WithExtraDialOpts([]grpc.DialOption{grpc.WithDefaultCallOptions(grpc.WaitForReady(true))}))
	if err != nil {
		return nil, unreachable(ctx, path, err)
	}
	p, err := newPuller(path, client, opts)
	if err == nil {
		err = p.learn(ctx)
	}
	if err != nil {
		client.Close()
		return nil, err
	}
	return p, nil
}

func limited(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, timeout, fmt.Errorf("no answer in %s", timeout))
}

func unreachable(ctx context.Context, path string, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	return fmt.Errorf("%w at %s: %w", ErrUnreachable, path, err)
}

func newPuller(path string, client *containerd.Client, opts Options) (*Puller, error) {
	opts.Namespace = cmp.Or(opts.Namespace, criNamespace)
	opts.Retries = cmp.Or(opts.Retries, 3)
	opts.BackOff = cmp.Or(opts.BackOff, time.Second)
	opts.Pullers = cmp.Or(opts.Pullers, maxPullers)
	opts.Deadline = cmp.Or(opts.Deadline, defaultDeadline)
	opts.VerifierDir = cmp.Or(opts.VerifierDir, defaultVerifierDir)
	if opts.Registry.Logins == nil {
		opts.Registry.Logins = &resolver.Logins{}
	}
	if opts.Registry.Pauses == nil {
		opts.Registry.Pauses = &resolver.Pauses{}
	}
	conn, ok := client.Conn().(*grpc.ClientConn)
	if !ok {
		return nil, errors.New("the client of containerd has no gRPC connection")
	}
	fetching, err := containerd.NewWithConn(conn, containerd.WithServices(containerd.WithImageStore(unrecorded{client.ImageService()})))
	if err != nil {
		return nil, err
	}
	return &Puller{
		address: path, client: client, fetching: fetching, opts: opts, registry: opts.Registry,
		downloads: semaphore.NewWeighted(downloads),
		disk:      disk{opts: opts.Disk},
		slots:     slots{all: int64(opts.Pullers), free: semaphore.NewWeighted(int64(opts.Pullers))},
		memory:    memory{now: time.Now},
	}, nil
}

// learnLimit is the time that a daemon has to say its settings.
const learnLimit = 10 * time.Second

// Learn asks the daemon for its settings again: it may have been restarted with
// others, or replaced by another version. No other method may run meanwhile.
func (p *Puller) Learn(ctx context.Context) error {
	ctx, cancel := limited(ctx, learnLimit)
	defer cancel()
	return p.learn(ctx)
}

// learn fills in what the options leave to the daemon.
func (p *Puller) learn(ctx context.Context) error {
	s, err := askDaemon(p.context(ctx), p.client)
	if err != nil {
		return unreachable(ctx, p.address, err)
	}
	if name := p.opts.Snapshotter; name != "" {
		if _, ok := s.Loaded[name]; !ok {
			return fmt.Errorf("%w: %q", ErrNoSnapshotter, name)
		}
		s.Snapshotters = []string{name}
	}
	s.DiscardUnpackedLayers = s.DiscardUnpackedLayers || p.opts.DiscardUnpackedLayers
	if reflect.DeepEqual(s, p.settings) {
		return nil
	}
	p.settings = s
	p.registry = p.opts.Registry
	if len(p.registry.HostsDirs) == 0 {
		p.registry.HostsDirs = s.HostsDirs
	}
	slog.Debug("settings of the daemon", "daemon", s.Daemon, "snapshotters", s.Snapshotters,
		"hosts", p.registry.HostsDirs, "discardUnpackedLayers", s.DiscardUnpackedLayers)
	for _, problem := range s.Problems {
		slog.Warn(problem)
	}
	p.disk.find(s.ImageFS)
	return nil
}

// Close ends the connection to the daemon.
func (p *Puller) Close() error { return p.client.Close() }

func (p *Puller) context(ctx context.Context) context.Context {
	return namespaces.WithNamespace(ctx, p.opts.Namespace)
}
