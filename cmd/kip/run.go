package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"example.com/kip/puller/agent"
	"example.com/kip/puller/source"
	"example.com/kip/resolver"
	"example.com/kip/secrets"
)

const imagesVariable = "KIP_IMAGES"

// The names of image sources in the KIP that kip replaces.
const (
	kernelSpecs = "KernelSpecsFetcher"
	staticList  = "StaticListFetcher"
	configMap   = "ConfigMapImagesFetcher"
	combined    = "CombinedImagesFetcher"
)

const (
	ifNotPresent = "IfNotPresent"
	always       = "Always"
)

func runCommand() *cli.Command {
	return &cli.Command{
		Name:         "run",
		Usage:        "keep the wanted images on this node",
		ArgsUsage:    " ",
		OnUsageError: plainError,
		Action:       runAgent,
		Flags: append([]cli.Flag{
			&cli.BoolFlag{Name: "once", Usage: "do one cycle, print the report and exit"},
			&cli.StringFlag{Name: "gateway-host", Usage: "`URL` of the Enterprise Gateway", Value: "http://localhost:18888", EnvVars: []string{"KIP_GATEWAY_HOST"}},
			&cli.StringFlag{Name: "auth-token", Usage: "the gateway's `TOKEN`; better given by the variable, which other users of the node cannot see", EnvVars: []string{"KIP_AUTH_TOKEN"}},
			&cli.BoolFlag{Name: "validate-cert", Usage: "check the gateway's certificate", EnvVars: []string{"KIP_VALIDATE_CERT"}},
			&cli.StringFlag{Name: "interval", Usage: "`TIME` between cycles, in seconds or with a unit", Value: "300", EnvVars: []string{"KIP_INTERVAL"}},
			&cli.StringFlag{Name: "pull-policy", Usage: "`POLICY`: IfNotPresent or Always", Value: ifNotPresent, EnvVars: []string{"KIP_PULL_POLICY"}},
			&cli.StringFlag{Name: "pin-budget", Usage: "`SIZE`, as in 50Gi, of images that the kubelet's garbage collection is kept from, in their order; 0 for none", Value: "0"},
			&cli.StringFlag{Name: "default-container-registry", Usage: "`REGISTRY` for names without one", EnvVars: []string{"KIP_DEFAULT_CONTAINER_REGISTRY"}},
			&cli.StringFlag{Name: "image-fetcher", Usage: "image `SOURCE`: " + strings.Join([]string{kernelSpecs, staticList, combined}, ", ") + " (default: what --images and --gateway-host ask for)", EnvVars: []string{"KIP_IMAGE_FETCHER"}},
			&cli.StringFlag{Name: "internal-fetchers", Usage: "comma-separated `SOURCES` of " + combined, Value: kernelSpecs, EnvVars: []string{"KIP_INTERNAL_FETCHERS"}},
			&cli.StringFlag{Name: "images", Usage: "comma-separated `IMAGES` of " + staticList, EnvVars: []string{imagesVariable}},
		}, pullFlags()...),
	}
}

func runAgent(c *cli.Context) error {
	if c.Args().Present() {
		return fmt.Errorf("kip run takes no argument, but got %q", c.Args().First())
	}
	a, err := newAgent(c)
	if err != nil {
		return err
	}
	ctx, cancel := withTimeout(c)
	defer cancel()
	if c.Bool("once") {
		return once(ctx, c, a)
	}
	return a.Run(ctx, func(r agent.Report) error {
		if !c.IsSet("output") {
			return nil
		}
		return write(c, r)
	})
}

func newAgent(c *cli.Context) (*agent.Agent, error) {
	opts, err := pullOptions(c)
	if err != nil {
		return nil, err
	}
	switch policy := c.String("pull-policy"); policy {
	case always:
		opts.Always = true
	case ifNotPresent:
	default: // as the old KIP always did
		slog.Warn("invalid pull policy, using IfNotPresent", "policy", policy)
	}
	interval, err := seconds(c.String("interval"))
	if err != nil || interval <= 0 {
		return nil, fmt.Errorf("--interval (KIP_INTERVAL) is %q: it must be a number of seconds, or a time such as 5m", c.String("interval"))
	}
	opts.Registry.Logins = &resolver.Logins{MaxBackOff: interval}
	if opts.PinBudget, err = byteSize(c.String("pin-budget")); err != nil {
		return nil, fmt.Errorf("--pin-budget is %q: it must be a number of bytes, or one with a unit, as in 50Gi", c.String("pin-budget"))
	}
	connect, err := connector(c, opts)
	if err != nil {
		return nil, err
	}
	registry := strings.Trim(c.String("default-container-registry"), "/ ")
	if strings.Contains(registry, "://") {
		return nil, fmt.Errorf("--default-container-registry (KIP_DEFAULT_CONTAINER_REGISTRY) is %q: it must be a registry as in image names, without a scheme", registry)
	}
	sources, err := imageSources(c)
	if err != nil {
		return nil, err
	}
	store, err := pullSecrets(c)
	if err != nil {
		return nil, err
	}
	return agent.New(agent.Config{
		Sources: sources, Secrets: store, Interval: interval, Connect: connect,
		DefaultRegistry: registry, Keeper: true,
	}), nil
}

// imageSources makes the sources that the flags name.
func imageSources(c *cli.Context) ([]source.Source, error) {
	var names []string
	switch fetcher := c.String("image-fetcher"); {
	case fetcher == combined:
		for name := range strings.SplitSeq(c.String("internal-fetchers"), ",") {
			if name = strings.TrimSpace(name); name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	case fetcher != "":
		names = []string{fetcher}
	default:
		if c.IsSet("gateway-host") || c.String("images") == "" {
			names = append(names, kernelSpecs)
		}
		if c.String("images") != "" {
			names = append(names, staticList)
		}
	}
	if c.String("images") != "" && !slices.Contains(names, staticList) {
		slog.Warn("--images (KIP_IMAGES) is set but not read by the image sources", "sources", names)
	}
	var list []source.Source
	for _, name := range names {
		s, err := imageSource(c, name)
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	return list, nil
}

func imageSource(c *cli.Context, name string) (source.Source, error) {
	switch name {
	case kernelSpecs:
		g, err := source.NewGateway(source.GatewayOptions{
			Host: c.String("gateway-host"), Token: secrets.NewSecret(c.String("auth-token")),
			ValidateCert: c.Bool("validate-cert"), UserAgent: userAgent(),
		})
		if err != nil {
			return nil, fmt.Errorf("--gateway-host (KIP_GATEWAY_HOST): %w", err)
		}
		return g, nil
	case staticList:
		return source.NewList("static", strings.Split(c.String("images"), ",")), nil
	case configMap:
		return nil, fmt.Errorf("image source %s is not there yet: use %s or %s", name, kernelSpecs, staticList)
	}
	return nil, fmt.Errorf("unknown image source %q: it must be one of %s, %s, %s, %s", name, kernelSpecs, staticList, configMap, combined)
}

// once does one cycle and writes its report.
func once(ctx context.Context, c *cli.Context, a *agent.Agent) error {
	r, err := a.Once(ctx)
	if err != nil {
		return err
	}
	if err := write(c, r); err != nil {
		return err
	}
	if !r.OK() {
		return errNotPresent
	}
	return nil
}

func write(c *cli.Context, r agent.Report) error {
	f := r.WriteText
	if c.String("output") == "json" {
		f = r.WriteJSON
	}
	if err := f(c.App.Writer); err != nil {
		return fmt.Errorf("%w: %w", errOutput, err)
	}
	return nil
}
