package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"
)

func newApp(stdout, stderr io.Writer) *cli.App {
	return &cli.App{
		Name:      "kip",
		Usage:     "pre-pulls container images on a Kubernetes node",
		Version:   buildVersion(),
		Writer:    stdout,
		ErrWriter: stderr,
		Flags:     append(globalFlags(), nearFlags(true)...),
		Before:    setUpLog,
		Action:    noCommand,
		Commands: []*cli.Command{
			runCommand(),
			pullCommand(),
			imagesCommand(),
			versionCommand(),
		},
		DisableSliceFlagSeparator: true, // kip splits by itself: lists of folders at colons, of names at commas
		OnUsageError:              plainError,
		ExitErrHandler:            func(*cli.Context, error) {}, // run gives the status
	}
}

// plainError keeps urfave from printing the whole help below an error.
func plainError(_ *cli.Context, err error, _ bool) error { return err }

// noCommand shows the help of a command that only has commands below it.
func noCommand(c *cli.Context) error {
	if c.Args().Present() {
		return fmt.Errorf("unknown command %q: %s --help lists the commands", c.Args().First(), c.Command.HelpName)
	}
	if len(c.Command.Subcommands) > 0 && c.Command.Name != c.App.Name {
		return cli.ShowSubcommandHelp(c)
	}
	return cli.ShowAppHelp(c)
}

// checkArgs refuses empty arguments and those that look like flags: urfave takes
// no flag after the first argument, and would hand it on as an image.
func checkArgs(c *cli.Context) error {
	for _, arg := range c.Args().Slice() {
		switch {
		case strings.TrimSpace(arg) == "":
			return fmt.Errorf("an argument of kip %s is empty", c.Command.Name)
		case strings.HasPrefix(arg, "-"):
			return fmt.Errorf("%q stands after the first argument: flags go before arguments, as in kip %s [flags] ARGUMENT", arg, c.Command.Name)
		}
	}
	return nil
}

// cleanVariables trims variables and removes those that are set to nothing, so
// that they count as not set. An empty KIP_IMAGES is an empty list.
func cleanVariables(app *cli.App) {
	flags := slices.Clone(app.Flags)
	for _, c := range app.Commands {
		flags = append(flags, c.Flags...)
	}
	for _, f := range flags {
		doc, ok := f.(cli.DocGenerationFlag)
		if !ok {
			continue
		}
		for _, name := range doc.GetEnvVars() {
			value, ok := os.LookupEnv(name)
			switch trimmed := strings.TrimSpace(value); {
			case !ok || name == imagesVariable:
			case trimmed == "":
				os.Unsetenv(name)
			case trimmed != value: // the old KIP's Python took numbers so
				os.Setenv(name, trimmed)
			}
		}
	}
}
