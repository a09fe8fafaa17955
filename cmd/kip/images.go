package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/containerd/errdefs"
	"github.com/urfave/cli/v2"

	"example.com/kip/puller"
)

// imagesCommand has the commands of ctr images.
func imagesCommand() *cli.Command {
	return &cli.Command{
		Name: "images", Aliases: []string{"image", "i"}, Usage: "work with images", Action: noCommand, OnUsageError: plainError,
		Subcommands: []*cli.Command{pullCommand(), removeCommand()},
	}
}

func removeCommand() *cli.Command {
	return &cli.Command{
		Name:         "rm",
		Aliases:      []string{"remove", "delete", "del"},
		Usage:        "remove image records by their names, as they stand",
		ArgsUsage:    "NAME...",
		OnUsageError: plainError,
		Action:       removeImages,
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "all-names", Usage: "remove every name of the image: tags, digests and ID"},
			&cli.BoolFlag{Name: "sync", Usage: "wait until the daemon has removed what nothing refers to any more"},
		},
	}
}

// removeImages goes on after a name that cannot be removed; one that is not there
// is no error, as in ctr.
func removeImages(c *cli.Context) error {
	if err := checkArgs(c); err != nil {
		return err
	}
	if !c.Args().Present() {
		return errors.New("kip images rm needs the name of an image record")
	}
	connect, err := connector(c, puller.Options{Namespace: c.String("namespace")})
	if err != nil {
		return err
	}
	ctx, cancel := withTimeout(c)
	defer cancel()
	p, err := connect(ctx)
	if err != nil {
		return err
	}
	defer p.Close()
	var failed error
	for i, name := range c.Args().Slice() {
		err := removeImage(ctx, c, p, name, c.Bool("sync") && i == c.NArg()-1)
		if err != nil {
			slog.Error("not removed", "image", name, "error", err)
			failed = errNotRemoved
		}
	}
	return failed
}

func removeImage(ctx context.Context, c *cli.Context, p *puller.Puller, name string, wait bool) error {
	removed, err := p.Remove(ctx, name, c.Bool("all-names"), wait)
	for _, n := range removed {
		if _, e := fmt.Fprintln(c.App.Writer, n); e != nil {
			return fmt.Errorf("%w: %w", errOutput, e)
		}
	}
	if errdefs.IsNotFound(err) {
		slog.Warn("there is no such image record", "image", name)
		return nil
	}
	return err
}
