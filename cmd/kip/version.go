package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/urfave/cli/v2"
)

// Set by the linker in a release.
var (
	version = ""
	commit  = ""
)

const clientModule = "github.com/containerd/containerd/v2"

// buildVersion is kip's version: the linker's, else the module's.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}

func userAgent() string { return "kip/" + buildVersion() }

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:         "version",
		Usage:        "print the versions of kip and of what it is made of",
		ArgsUsage:    " ",
		OnUsageError: plainError,
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return fmt.Errorf("kip version takes no argument, but got %q", c.Args().First())
			}
			client, revision := "unknown", commit
			if info, ok := debug.ReadBuildInfo(); ok {
				for _, dep := range info.Deps {
					if dep.Path == clientModule {
						client = dep.Version
					}
				}
				for _, s := range info.Settings {
					if s.Key == "vcs.revision" && revision == "" {
						revision = s.Value
					}
				}
			}
			if revision == "" {
				revision = "unknown"
			}
			fmt.Fprintf(c.App.Writer, "kip:               %s\ncommit:            %s\ngo:                %s\ncontainerd client: %s\n",
				buildVersion(), revision, runtime.Version(), client)
			return nil
		},
	}
}
