package puller

import (
	"cmp"
	"context"

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
// for all.
func (p *Puller) Sync(ctx context.Context, wanted []Wanted, keyring resolver.Keyring, done func(Result)) []Result {
	var unique []Wanted
	seen := map[string]bool{}
	for _, w := range wanted {
		w.Ref = cmp.Or(w.Ref, w.Image)
		key := w.Ref
		if ref, err := ParseReference(w.Ref); err == nil {
			key = ref.String()
		}
		if !seen[key] {
			seen[key] = true
			unique = append(unique, w)
		}
	}
	results := make([]Result, len(unique))
	finished := make(chan int)
	var group errgroup.Group
	group.SetLimit(p.opts.Pullers)
	go func() {
		defer close(finished)
		for i, w := range unique {
			group.Go(func() error {
				results[i] = p.pullWanted(ctx, w, keyring)
				finished <- i
				return nil
			})
		}
		group.Wait() // no function fails
	}()
	for i := range finished {
		done(results[i])
	}
	return results
}

func (p *Puller) pullWanted(ctx context.Context, w Wanted, keyring resolver.Keyring) Result {
	ref, err := ParseReference(w.Ref)
	res := Result{State: Failed, Action: None, Reason: InvalidReference, Names: []string{}}
	if err != nil {
		res.Message = resolver.Sanitize(err.Error())
	} else {
		res = p.Pull(ctx, ref, keyring)
	}
	res.Image, res.Source = w.Image, w.Source
	return res
}
