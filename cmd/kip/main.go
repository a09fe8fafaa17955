// Command kip pre-pulls container images on a Kubernetes node by talking to
// containerd.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args, os.Stdout, os.Stderr))
}

// run is kip: it returns the exit status. A signal ends ctx.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	app := newApp(stdout, stderr)
	cleanVariables(app)
	err := app.RunContext(ctx, args)
	status := exitStatus(ctx, err)
	if status == exitInterrupted {
		err = errors.New("interrupted")
	}
	if err != nil {
		fmt.Fprintf(stderr, "kip: %v\n", err)
	}
	return status
}
