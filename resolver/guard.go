package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"time"
)

// ErrStalled is in the error of a request whose answer stopped coming.
var ErrStalled = errors.New("the registry stopped sending")

// maxRedirects is net/http's own limit.
const maxRedirects = 10

// checkRedirect keeps a login to the origin that it is for. Go itself sends it
// on to another port of the same host, to sub-domains and from https to http.
func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("stopped after %d redirects", maxRedirects)
	}
	if !sameOrigin(req.URL, via[0].URL) {
		req.Header.Del("Authorization")
	}
	return nil
}

func sameOrigin(a, b *url.URL) bool { return a.Scheme == b.Scheme && a.Host == b.Host }

// minRate is how many bytes a second a body has to bring, over a whole StallTimeout
// of waiting: a peer that sends a byte now and then holds a download for ever.
const minRate = 100

// stallGuard ends a request whose answer does not come, or whose body stops coming.
// Containerd's transport limits the time until the headers are there to 30 s, and
// nothing after that.
type stallGuard struct {
	next    http.RoundTripper
	timeout time.Duration
}

// RoundTrip limits the wait for the answer and for each part of it.
func (g *stallGuard) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	watch := time.AfterFunc(g.timeout, func() { cancel(ErrStalled) })
	resp, err := g.next.RoundTrip(req.WithContext(ctx))
	watch.Stop()
	if err != nil {
		if context.Cause(ctx) == ErrStalled {
			err = fmt.Errorf("no answer in %s: %w", g.timeout, ErrStalled)
		}
		cancel(nil)
		return nil, err
	}
	resp.Body = &stallBody{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, timeout: g.timeout}
	return resp, nil
}

// stallBody counts the time that a Read waits for the network, not the time
// between Reads, which is the daemon's.
type stallBody struct {
	io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timeout time.Duration

	waited time.Duration // since the rate was looked at
	got    int64         // in that time
}

func (b *stallBody) Read(p []byte) (int, error) {
	began := time.Now()
	watch := time.AfterFunc(b.timeout, func() { b.cancel(ErrStalled) })
	n, err := b.ReadCloser.Read(p)
	watch.Stop()
	b.waited += time.Since(began)
	b.got += int64(n)
	switch {
	case err == io.EOF:
	case err == nil:
		err = b.checkRate()
	case context.Cause(b.ctx) == ErrStalled:
		err = fmt.Errorf("no byte for %s: %w", b.timeout, ErrStalled)
	case b.ctx.Err() == nil:
		// A connection that broke, in whatever way. Containerd's fetcher goes on from
		// where it was after this error only.
		slog.Debug("the connection to the registry broke", "error", Sanitize(err.Error()))
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// checkRate fails once too little came in the time that was waited.
func (b *stallBody) checkRate() error {
	if b.waited < b.timeout {
		return nil
	}
	if float64(b.got) < minRate*b.waited.Seconds() {
		b.cancel(ErrStalled)
		return fmt.Errorf("%d bytes in %s: %w", b.got, b.waited.Round(time.Millisecond), ErrStalled)
	}
	b.waited, b.got = 0, 0
	return nil
}

func (b *stallBody) Close() error {
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}
