package main

import (
	"context"
	"errors"

	"example.com/kip/puller"
)

// The exit statuses of kip.
const (
	exitOK          = 0
	exitFailed      = 1   // at least one image or source failed
	exitUsage       = 2   // wrong usage or configuration
	exitUnreachable = 3   // containerd cannot be reached
	exitInterrupted = 130 // ended by a signal, as a shell says it
)

// errNotPresent ends a command whose report says already what failed.
var errNotPresent = errors.New("not all images are present")

// errNotRemoved ends a command that could not remove all that it should.
var errNotRemoved = errors.New("not all images are removed")

// errOutput is in the error of a report that could not be written.
var errOutput = errors.New("writing the report")

// exitStatus is the one place that gives an error its exit status. What is
// neither of the cases below is about the command line.
func exitStatus(ctx context.Context, err error) int {
	switch {
	case err == nil:
		return exitOK
	case ctx.Err() != nil:
		return exitInterrupted
	case errors.Is(err, puller.ErrUnreachable):
		return exitUnreachable
	case errors.Is(err, errNotPresent), errors.Is(err, errNotRemoved), errors.Is(err, errOutput), errors.Is(err, context.DeadlineExceeded):
		return exitFailed
	}
	return exitUsage
}
