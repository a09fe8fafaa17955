// Package agent is kip's loop on a node: it asks the sources which images are
// wanted, reads the pull secrets, and has the puller make the images present.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"example.com/kip/internal/backoff"
	"example.com/kip/puller"
	"example.com/kip/puller/source"
	"example.com/kip/secrets"
)

// Config says what the agent does.
type Config struct {
	// Sources are asked in this order.
	Sources []source.Source
	// Secrets are the pull secrets. They are read anew for each cycle, and a change
	// brings the next cycle at once.
	Secrets *secrets.Store
	// DefaultRegistry is put before names that have no registry.
	DefaultRegistry string
	// Interval is the time from the end of a cycle to the next one.
	Interval time.Duration
	// Connect reaches the daemon. It is called again while it fails with
	// puller.ErrUnreachable.
	Connect func(ctx context.Context) (*puller.Puller, error)
	// Keeper is set where the sources name all images that kip is to keep on the
	// node: what it holds for others is given up.
	Keeper bool
}

// Agent keeps the images of a node.
type Agent struct {
	config Config
	// said is what this cycle has said of each subject, and before what the last one
	// did: each change is logged once, and nothing every cycle.
	said, before map[string]string
	// reported is set where somebody reads the report: what is wrong stands there,
	// and need not be in the log as well.
	reported bool
}

// New returns an agent.
func New(config Config) *Agent {
	return &Agent{config: config, said: map[string]string{}}
}

// Waits for a daemon that is not there.
const (
	firstConnectWait = time.Second
	maxConnectWait   = 30 * time.Second
)

// Run does cycles and hands on their reports until the context or done fails,
// and returns that error. It waits for a daemon that is not there, and does a cycle
// as soon as one that went away is back.
func (a *Agent) Run(ctx context.Context, done func(Report) error) error {
	var p *puller.Puller
	err := a.await(ctx, func() (err error) {
		p, err = a.config.Connect(ctx)
		return err
	}, puller.ErrUnreachable)
	if err != nil {
		return err
	}
	defer p.Close()
	a.config.Secrets.Refresh() // what is there at first is no change
	ctx, cancel := context.WithCancel(ctx)
	changed := make(chan struct{}, 1)
	var watch sync.WaitGroup
	defer watch.Wait()
	defer cancel()
	watch.Go(func() {
		a.config.Secrets.Watch(ctx, func() {
			select {
			case changed <- struct{}{}:
			default: // one is waiting already
			}
		})
	})
	for {
		r := a.Cycle(ctx, p)
		slog.Debug("cycle ended", "present", r.Present, "failed", r.Failed, "skipped", r.Skipped)
		if err := done(r); err != nil {
			return err
		}
		wait := a.config.Interval
		if r.daemonGone() {
			wait = min(wait, firstConnectWait)
		}
		select {
		case <-time.After(wait):
		case <-changed:
			slog.Info("a pull secret has changed")
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := a.await(ctx, func() error { return p.Learn(ctx) }, puller.ErrUnreachable, puller.ErrNoSnapshotter); err != nil {
			return err
		}
	}
}

// await calls reach until the daemon answers: while the error is one of those that
// pass.
func (a *Agent) await(ctx context.Context, reach func() error, passing ...error) error {
	wait := backoff.BackOff{Wait: firstConnectWait, Max: maxConnectWait}
	for {
		err := reach()
		passes := slices.ContainsFunc(passing, func(p error) bool { return errors.Is(err, p) })
		if err == nil || !passes || ctx.Err() != nil {
			return err
		}
		a.once(slog.LevelWarn, "containerd", "waiting for containerd: "+err.Error())
		if err := backoff.Sleep(ctx, wait.Next()); err != nil {
			return err
		}
	}
}

// Once reaches the daemon, which must be there, and does one cycle.
func (a *Agent) Once(ctx context.Context) (Report, error) {
	p, err := a.config.Connect(ctx)
	if err != nil {
		return Report{}, err
	}
	defer p.Close()
	a.reported = true
	return a.Cycle(ctx, p), nil
}

// Cycle asks the sources and makes present what they want, once.
func (a *Agent) Cycle(ctx context.Context, p *puller.Puller) Report {
	a.nextCycle()
	r := Report{Version: 1, Sources: []SourceReport{}, Warnings: []string{}, Images: []puller.Result{}}
	wanted := a.ask(ctx, &r)
	for _, problem := range a.config.Secrets.Refresh() {
		a.warn(&r, problem.String())
	}
	if a.config.Keeper && r.OK() { // else the list may not be whole
		if err := p.Release(ctx, wanted); err != nil && ctx.Err() == nil {
			slog.Warn("giving up what is no longer wanted", "error", err)
		}
	}
	r.Images = append(r.Images, p.Sync(ctx, wanted, a.config.Secrets, a.logResult)...)
	for _, i := range r.Images {
		for _, warning := range i.Warnings {
			a.warn(&r, warning)
		}
		switch i.State {
		case puller.Present:
			r.Present++
		case puller.Failed:
			r.Failed++
		case puller.Skipped:
			r.Skipped++
		}
	}
	return r
}

// nextCycle forgets what was said before the last cycle.
func (a *Agent) nextCycle() { a.before, a.said = a.said, map[string]string{} }

// ask returns what all sources want.
func (a *Agent) ask(ctx context.Context, r *Report) []puller.Wanted {
	var wanted []puller.Wanted
	for _, s := range a.config.Sources {
		answer, err := s.Images(ctx)
		report := SourceReport{Name: s.Name(), State: sourceOK, Images: len(answer.Images)}
		if err != nil {
			report.State, report.Message = sourceFailed, err.Error()
			a.once(slog.LevelError, "source "+s.Name(), fmt.Sprintf("source %s failed: %v", s.Name(), err))
		} else {
			a.once(slog.LevelInfo, "source "+s.Name(), fmt.Sprintf("source %s names %d images", s.Name(), len(answer.Images)))
		}
		r.Sources = append(r.Sources, report)
		for _, warning := range answer.Warnings {
			a.warn(r, fmt.Sprintf("source %s: %s", s.Name(), warning))
		}
		for _, image := range answer.Images {
			w := puller.Wanted{Image: image, Source: s.Name()}
			if a.config.DefaultRegistry != "" && !puller.HasRegistry(image) {
				w.Ref = a.config.DefaultRegistry + "/" + image
				a.warn(r, fmt.Sprintf("%s is read as %s, by the default registry; a pod's own image string is not", image, w.Ref))
			}
			wanted = append(wanted, w)
		}
	}
	if len(wanted) == 0 && r.OK() {
		a.warn(r, "no image is wanted")
	}
	return wanted
}

// warn puts a warning into the report, and into the log the first time.
func (a *Agent) warn(r *Report, text string) {
	r.Warnings = append(r.Warnings, text)
	a.once(slog.LevelWarn, text, text)
}

// once logs a message unless it is the last one that was logged of its subject.
func (a *Agent) once(level slog.Level, subject, message string, args ...any) {
	if a.before[subject] != message && a.said[subject] != message {
		a.log(level, message, args...)
	}
	a.said[subject] = message
}

// log leaves what is wrong to the report, where there is one that is read.
func (a *Agent) log(level slog.Level, message string, args ...any) {
	if a.reported && level > slog.LevelInfo {
		level = slog.LevelDebug
	}
	slog.Log(context.Background(), level, message, args...)
}

func (a *Agent) logResult(res puller.Result) {
	subject := "image " + res.Image
	switch {
	case res.State == puller.Failed:
		a.once(slog.LevelError, subject, res.Message, "image", res.Image, "reason", res.Reason, "credential", res.Credential, "attempts", res.Attempts)
	case res.State == puller.Skipped:
		a.once(slog.LevelWarn, subject, res.Message, "image", res.Image, "reason", res.Reason)
	case res.Action == puller.Pulled:
		a.said[subject] = string(res.State)
		a.log(slog.LevelInfo, "pulled", "image", res.Image, "digest", res.Digest, "credential", res.Credential, "bytes", res.Bytes)
	default:
		a.once(slog.LevelInfo, subject, string(res.State), "image", res.Image, "digest", res.Digest)
	}
}
