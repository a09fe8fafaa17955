package puller

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/kip/resolver"
)

// Wanted is an image that a source wants on the node.
type Wanted struct {
	// Image is the reference as the source named it, Source that source.
	Image, Source string
	// Ref is what Image is to be read as where that is something else: with a
	// default registry before it.
	Ref string
}

// Sync makes a set of images present, several at a time. It returns a result for
// each in the order of the set, and calls done with it as soon as it is known,
// for one image at a time. Of names that mean the same image the first stands
// for all. In the same order, images are pinned for as long as the budget lasts.
func (p *Puller) Sync(ctx context.Context, wanted []Wanted, keyring resolver.Keyring, done func(Result)) []Result {
	unique := distinct(wanted)
	results := make([]Result, len(unique))
	finished := make(chan int)
	watched, stopWatch := p.watchDaemon(p.context(ctx))
	var group errgroup.Group
	group.SetLimit(p.opts.Pullers)
	go func() {
		defer close(finished)
		for i, w := range unique {
			group.Go(func() error {
				results[i] = p.pullWanted(watched, w, keyring)
				finished <- i
				return nil
			})
		}
		group.Wait() // no function fails
	}()
	for i := range finished {
		done(results[i])
	}
	stopWatch()
	gone := slices.ContainsFunc(results, func(r Result) bool { return r.Reason == DaemonUnavailable })
	if ctx.Err() != nil || gone {
		return results
	}
	if err := p.tidy(p.context(ctx), results); err != nil {
		slog.Warn("giving up leases and pinning images", "error", err)
	}
	return results
}

// distinct leaves one of each image, and fills in how it is to be read.
func distinct(wanted []Wanted) []Wanted {
	var unique []Wanted
	seen := map[string]bool{}
	for _, w := range wanted {
		w.Ref = cmp.Or(w.Ref, w.Image)
		if key := w.name(); !seen[key] {
			seen[key] = true
			unique = append(unique, w)
		}
	}
	return unique
}

// name is the normalised reference, or what stands in its place.
func (w Wanted) name() string {
	text := cmp.Or(w.Ref, w.Image)
	if ref, err := ParseReference(text); err == nil {
		return ref.String()
	}
	return text
}

// tidyLimit is the time for what is done between the pulls of two cycles.
const tidyLimit = 30 * time.Second

// tidy removes the leases of images that are present: a kip that was killed may
// have left one, and somebody else may have brought the image since. Then it pins.
func (p *Puller) tidy(ctx context.Context, results []Result) error {
	ctx, cancel := limited(ctx, tidyLimit)
	defer cancel()
	present := map[string]bool{}
	for _, r := range results {
		present[r.Ref] = r.State == Present
	}
	err := p.deleteLeases(ctx, func(ref string) bool { return present[ref] })
	return errors.Join(err, p.pin(ctx, results))
}

// Release gives up what kip holds for images that are not wanted: the leases of
// pulls that have not ended, pins, and what is remembered of failures. It is for
// the one kip that keeps the images of the node, and only when it knows all that
// are wanted.
func (p *Puller) Release(ctx context.Context, wanted []Wanted) error {
	ctx, cancel := limited(p.context(ctx), tidyLimit)
	defer cancel()
	names := map[string]bool{}
	for _, w := range wanted {
		names[w.name()] = true
	}
	p.memory.forget(names)
	unwanted := func(ref string) bool { return !names[ref] }
	return errors.Join(p.deleteLeases(ctx, unwanted), p.unpin(ctx, func(ref string) bool { return p.opts.PinBudget == 0 || unwanted(ref) }))
}

func (p *Puller) pullWanted(ctx context.Context, w Wanted, keyring resolver.Keyring) Result {
	ref, err := ParseReference(w.Ref)
	res := Result{State: Failed, Action: None, Reason: InvalidReference, Names: []string{}}
	if err != nil {
		res.Message = resolver.Sanitize(err.Error())
	} else {
		res = p.pullImage(ctx, ref, keyring)
	}
	res.Image, res.Source = w.Image, w.Source
	return res
}
