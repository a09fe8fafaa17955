package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
	"k8s.io/apimachinery/pkg/api/resource"

	"example.com/kip/puller"
	"example.com/kip/resolver"
	"example.com/kip/secrets"
)

const (
	defaultAddress        = "/run/containerd/containerd.sock"
	defaultConnectTimeout = 10 * time.Second
	defaultSecretsDir     = "/mnt/secrets"
)

// globalFlags stand before the command, as in ctr.
func globalFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "address", Aliases: []string{"a", "cri-endpoint"}, Usage: "containerd's `SOCKET`", Value: defaultAddress, EnvVars: []string{"CONTAINERD_ADDRESS", "KIP_CRI_ENDPOINT"}},
		&cli.StringFlag{Name: "namespace", Aliases: []string{"n"}, Usage: "containerd `NAMESPACE`; the kubelet's is k8s.io", Value: "k8s.io", EnvVars: []string{"CONTAINERD_NAMESPACE"}},
		&cli.DurationFlag{Name: "timeout", Usage: "end the command after this `TIME`; 0 for no limit"},
		&cli.DurationFlag{Name: "connect-timeout", Usage: "give up reaching containerd after this `TIME`", Value: defaultConnectTimeout},
		&cli.BoolFlag{Name: "debug", Usage: "log everything, as --log-level DEBUG does"},
		&cli.StringFlag{Name: "log-level", Usage: "`LEVEL`: DEBUG, INFO, WARN or ERROR", Value: "INFO", EnvVars: []string{"KIP_LOG_LEVEL"}},
		&cli.StringFlag{Name: "log-format", Usage: "`FORMAT`: text or json", Value: "text"},
	}
}

// nearFlags may stand before and after the command. Only those before it read
// the environment, so that a flag there is not hidden by a variable.
func nearFlags(global bool) []cli.Flag {
	env := func(name string) []string {
		if global {
			return []string{name}
		}
		return nil
	}
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "secrets-dir", Usage: "`FOLDER` with pull secrets, one folder a secret or secret files directly; may repeat (default: " + defaultSecretsDir + ")", EnvVars: env("KIP_SECRETS_DIR")},
		&cli.StringSliceFlag{Name: "hosts-dir", Usage: "`FOLDER` with hosts.toml files; may repeat (default: what the daemon says)", EnvVars: env("KIP_HOSTS_DIR")},
		&cli.StringFlag{Name: "snapshotter", Usage: "`NAME` of the snapshotter to unpack into (default: the daemon's)", EnvVars: env("CONTAINERD_SNAPSHOTTER")},
	}
}

// near returns the context in which a flag of nearFlags is set, from the command
// outwards; urfave itself looks at the innermost one that defines it. The
// outermost has the environment.
func near(c *cli.Context, name string) *cli.Context {
	var last *cli.Context
	for _, ctx := range c.Lineage() {
		if ctx.Command == nil { // urfave's own root, above the app's
			break
		}
		last = ctx
		if slices.Contains(ctx.LocalFlagNames(), name) {
			break
		}
	}
	return last
}

// folders returns a flag that is a list of folders, each of its values a list
// with colons.
func folders(c *cli.Context, name string) []string {
	var list []string
	for _, v := range near(c, name).StringSlice(name) {
		list = append(list, filepath.SplitList(v)...)
	}
	return list
}

// pullFlags say how images are pulled, by kip run and kip pull.
func pullFlags() []cli.Flag {
	return append([]cli.Flag{
		&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FORMAT` of the report: text or json", Value: "text"},
		&cli.IntFlag{Name: "num-pullers", Usage: "`NUMBER` of images in progress at once", DefaultText: "16", EnvVars: []string{"KIP_NUM_PULLERS"}},
		&cli.IntFlag{Name: "num-retries", Usage: "`NUMBER` of pulls of an image, all told, before it has failed", Value: 3, EnvVars: []string{"KIP_NUM_RETRIES"}},
		&cli.DurationFlag{Name: "image-deadline", Usage: "`TIME` that one image may take; what is downloaded by then is kept for the next cycle", Value: 6 * time.Hour},
		&cli.IntFlag{Name: "disk-threshold", Usage: "`PERCENT` up to which images may fill their filesystem; 0 for no limit", Value: 85},
		&cli.Float64Flag{Name: "disk-factor", Usage: "`NUMBER` of times its compressed size that an image takes of the disk while it is unpacked", Value: 3},
		&cli.StringFlag{Name: "image-fs", Usage: "`FOLDER` on the filesystem of the images, as kip sees it (default: what CRI says)"},
		&cli.BoolFlag{Name: "sync-fs", Usage: "write each layer to the disk before the next: a power failure leaves no empty files"},
		&cli.BoolFlag{Name: "discard-unpacked-layers", Usage: "forget the blobs of unpacked layers, where the daemon does so and does not say (containerd 2.0 to 2.3)"},
		&cli.StringFlag{Name: "image-verifier-dir", Usage: "`FOLDER` of containerd's image verifiers, as kip sees it (default: /opt/containerd/image-verifier/bin)"},
		&cli.BoolFlag{Name: "bypass-image-verifiers", Usage: "pull although containerd's image verifiers are not asked"},
		&cli.BoolFlag{Name: "anonymous-fallback", Usage: "when all credentials were refused, try once without", Value: true},
		&cli.BoolFlag{Name: "pass-upstream-credentials", Usage: "send a mirror the credential of the registry that it mirrors, as CRI does"},
		&cli.BoolFlag{Name: "strict-paths", Usage: "a secret's path matches whole segments: r.io/team is not for r.io/team2"},
		&cli.StringFlag{Name: "image-credential-provider-config", Usage: "`PATH` of a CredentialProviderConfig, as the kubelet's flag"},
		&cli.StringFlag{Name: "image-credential-provider-bin-dir", Usage: "`FOLDER` of the programs that it names"},
		&cli.StringSliceFlag{Name: "secret-registry", Usage: "`SECRET=REGISTRY`, for secrets that do not say which registry they are for; may repeat"},
	}, nearFlags(false)...)
}

// pullOptions reads the flags of pullFlags and the global ones.
func pullOptions(c *cli.Context) (puller.Options, error) {
	opts := puller.Options{
		Namespace:   c.String("namespace"),
		Snapshotter: near(c, "snapshotter").String("snapshotter"),
		Pullers:     c.Int("num-pullers"),
		Retries:     c.Int("num-retries"),
		Deadline:    c.Duration("image-deadline"),
		Disk: puller.DiskOptions{
			Path: c.String("image-fs"), Threshold: c.Int("disk-threshold"), Factor: c.Float64("disk-factor"),
		},
		SyncFS:                c.Bool("sync-fs"),
		DiscardUnpackedLayers: c.Bool("discard-unpacked-layers"),
		VerifierDir:           c.String("image-verifier-dir"),
		BypassVerifiers:       c.Bool("bypass-image-verifiers"),
		Registry: resolver.Options{
			HostsDirs:               folders(c, "hosts-dir"),
			NoAnonymousFallback:     !c.Bool("anonymous-fallback"),
			PassUpstreamCredentials: c.Bool("pass-upstream-credentials"),
			UserAgent:               userAgent(),
		},
	}
	if err := oneOf(c, "output", "text", "json"); err != nil {
		return opts, err
	}
	return opts, checkLimits(c, opts)
}

// checkLimits refuses numbers that mean nothing.
func checkLimits(c *cli.Context, opts puller.Options) error {
	switch {
	case c.IsSet("num-pullers") && opts.Pullers < 1:
		return fmt.Errorf("--num-pullers (KIP_NUM_PULLERS) is %d: it must be 1 or more", opts.Pullers)
	case opts.Retries < 1:
		return fmt.Errorf("--num-retries (KIP_NUM_RETRIES) is %d: it must be 1 or more", opts.Retries)
	case opts.Deadline <= 0:
		return fmt.Errorf("--image-deadline is %s: it must be more than 0", opts.Deadline)
	case opts.Disk.Threshold < 0 || opts.Disk.Threshold > 100:
		return fmt.Errorf("--disk-threshold is %d: it must be a percentage, 0 to 100", opts.Disk.Threshold)
	case !(opts.Disk.Factor >= 1 && opts.Disk.Factor <= 1000): // NaN is neither
		return fmt.Errorf("--disk-factor is %g: it must be 1 or more, and at most 1000", opts.Disk.Factor)
	case opts.Disk.Path != "" && !isDir(opts.Disk.Path):
		return fmt.Errorf("--image-fs is %q: there is no such folder", opts.Disk.Path)
	}
	return nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// pullSecrets says where the pull secrets are and how they are read.
func pullSecrets(c *cli.Context) (*secrets.Store, error) {
	l := secrets.Loader{Dirs: folders(c, "secrets-dir"), StrictPaths: c.Bool("strict-paths"), Registries: map[string]string{}}
	if len(l.Dirs) == 0 {
		// The default need not be there: on a node, kip pull often needs no secret.
		if _, err := os.Stat(defaultSecretsDir); !errors.Is(err, fs.ErrNotExist) {
			l.Dirs = []string{defaultSecretsDir}
		}
	}
	for _, pair := range c.StringSlice("secret-registry") {
		secret, registry, ok := strings.Cut(pair, "=")
		if !ok || secret == "" || registry == "" {
			return nil, fmt.Errorf("--secret-registry is %q: it must be SECRET=REGISTRY", pair)
		}
		l.Registries[secret] = registry
	}
	config, binDir := c.String("image-credential-provider-config"), c.String("image-credential-provider-bin-dir")
	if (config == "") != (binDir == "") {
		return nil, errors.New("--image-credential-provider-config and --image-credential-provider-bin-dir go together")
	}
	if config == "" {
		return secrets.NewStore(l, nil), nil
	}
	providers, problems, err := secrets.NewProviders(config, binDir)
	if err != nil {
		return nil, fmt.Errorf("--image-credential-provider-config: %w", err)
	}
	for _, p := range problems {
		slog.Warn(p.String())
	}
	return secrets.NewStore(l, providers), nil
}

// connector returns a function that reaches the daemon.
func connector(c *cli.Context, opts puller.Options) (func(context.Context) (*puller.Puller, error), error) {
	address, timeout := c.String("address"), c.Duration("connect-timeout")
	if strings.Contains(filepath.Base(address), "docker") { // docker.sock, dockershim.sock, cri-dockerd.sock
		return nil, fmt.Errorf("--address (KIP_CRI_ENDPOINT) is %q: kip works with containerd only, not with a docker endpoint", address)
	}
	if scheme, _, ok := strings.Cut(address, "://"); ok && scheme != "unix" {
		return nil, fmt.Errorf("--address (CONTAINERD_ADDRESS, KIP_CRI_ENDPOINT) is %q: it must be the path of a socket, with or without unix://", address)
	}
	if timeout <= 0 {
		timeout = defaultConnectTimeout
	}
	return func(ctx context.Context) (*puller.Puller, error) { return puller.Connect(ctx, address, timeout, opts) }, nil
}

// withTimeout is the command's context with the limit of --timeout.
func withTimeout(c *cli.Context) (context.Context, context.CancelFunc) {
	if d := c.Duration("timeout"); d > 0 {
		return context.WithTimeout(c.Context, d)
	}
	return context.WithCancel(c.Context)
}

// oneOf checks a flag whose values are words.
func oneOf(c *cli.Context, name string, words ...string) error {
	if v := c.String(name); !slices.Contains(words, v) {
		return fmt.Errorf("--%s is %q: it must be one of %s", name, v, strings.Join(words, ", "))
	}
	return nil
}

// seconds reads a time that is a number of seconds, as in the old KIP, or has a
// unit, as in 5m.
func seconds(s string) (time.Duration, error) {
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second, nil
	}
	return time.ParseDuration(s)
}

// byteSize reads an amount of bytes in Kubernetes' notation, as in 50Gi.
func byteSize(s string) (int64, error) {
	q, err := resource.ParseQuantity(s)
	if err != nil {
		return 0, err
	}
	n, ok := q.AsInt64()
	if !ok || n < 0 {
		return 0, errors.New("out of range")
	}
	return n, nil
}
