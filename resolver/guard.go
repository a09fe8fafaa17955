package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"
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

// stallGuard ends a request whose body brings nothing for a time. Containerd's
// transport limits the time until the headers are there and nothing after that.
type stallGuard struct {
	next    http.RoundTripper
	timeout time.Duration
}

func (g *stallGuard) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := g.next.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	resp.Body = &stallBody{resp.Body, ctx, cancel, g.timeout}
	return resp, nil
}

// stallBody counts the time that a Read waits for the network, not the time
// between Reads, which is the daemon's.
type stallBody struct {
	io.ReadCloser
	ctx     context.Context
	cancel  context.CancelCauseFunc
	timeout time.Duration
}

func (b *stallBody) Read(p []byte) (int, error) {
	watch := time.AfterFunc(b.timeout, func() { b.cancel(ErrStalled) })
	n, err := b.ReadCloser.Read(p)
	watch.Stop()
	if err != nil && err != io.EOF && context.Cause(b.ctx) == ErrStalled {
		err = fmt.Errorf("no byte for %s: %w", b.timeout, ErrStalled)
	}
	return n, err
}

func (b *stallBody) Close() error {
	defer b.cancel(nil)
	return b.ReadCloser.Close()
}
