package main

import (
	"errors"

	"github.com/urfave/cli/v2"

	"example.com/kip/puller/agent"
	"example.com/kip/puller/source"
)

func pullCommand() *cli.Command {
	return &cli.Command{
		Name:         "pull",
		Usage:        "pull images now",
		ArgsUsage:    "REF...",
		OnUsageError: plainError,
		Action:       pullImages,
		Flags:        pullFlags(),
	}
}

func pullImages(c *cli.Context) error {
	if err := checkArgs(c); err != nil {
		return err
	}
	if !c.Args().Present() {
		return errors.New("kip pull needs an image reference")
	}
	opts, err := pullOptions(c)
	if err != nil {
		return err
	}
	opts.Always = true // a person who says pull wants what the registry has now
	connect, err := connector(c, opts)
	if err != nil {
		return err
	}
	store, err := pullSecrets(c)
	if err != nil {
		return err
	}
	ctx, cancel := withTimeout(c)
	defer cancel()
	return once(ctx, c, agent.New(agent.Config{
		Sources: []source.Source{source.NewList("cli", c.Args().Slice())},
		Secrets: store, Connect: connect,
	}))
}
