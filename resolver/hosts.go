package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/containerd/log"
	"github.com/sirupsen/logrus"
)

// ErrHostsConfig is in the error of a registry whose configuration on the node cannot
// be read: then it is not asked at all.
var ErrHostsConfig = errors.New("the registry's configuration on this node is broken")

// hostsHook hears what containerd says while it reads a registry's folder. A
// hosts.toml that it cannot parse it only logs, and goes on to the registry itself,
// past the mirror that somebody wanted.
type hostsHook struct{ err error }

// listen returns a context in which containerd's log is heard.
func (h *hostsHook) listen(ctx context.Context) context.Context {
	l := logrus.New()
	l.SetOutput(io.Discard)
	l.AddHook(h)
	return log.WithLogger(ctx, logrus.NewEntry(l))
}

// Levels are those of errors.
func (h *hostsHook) Levels() []logrus.Level { return []logrus.Level{logrus.ErrorLevel} }

// Fire keeps the first error.
func (h *hostsHook) Fire(e *logrus.Entry) error {
	err, ok := e.Data[logrus.ErrorKey].(error)
	if ok && h.err == nil {
		h.err = fmt.Errorf("%s%s: %w", e.Message, line(err), err)
	}
	return nil
}

// line is where in a file an error is, empty where that is not known.
func line(err error) string {
	var at interface{ Position() (row, column int) } // as toml.DecodeError
	if !errors.As(err, &at) {
		return ""
	}
	row, column := at.Position()
	return fmt.Sprintf(", line %d, column %d", row, column)
}

// check returns what is wrong with a registry's configuration; err is what containerd
// itself returned.
func (h *hostsHook) check(registry string, err error) error {
	if err == nil {
		err = h.err
	}
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w: %s: %w", ErrHostsConfig, registry, err)
}
