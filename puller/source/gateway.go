package source

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"example.com/kip/secrets"
)

// GatewayOptions say where a gateway is and how to speak to it.
type GatewayOptions struct {
	// Host is the gateway's URL, with or without a path.
	Host string
	// Token is sent to that host, where it is not empty.
	Token secrets.Secret
	// ValidateCert has the gateway's certificate checked.
	ValidateCert bool
	UserAgent    string
	// Timeout is the limit of one request with its answer, 30 s where it is not set.
	Timeout time.Duration
}

// Gateway is a Jupyter Enterprise Gateway: the images are those of its
// kernelspecs.
type Gateway struct {
	opts   GatewayOptions
	url    *url.URL
	client *http.Client
}

const (
	// maxAnswer bounds the gateway's answer. A thousand kernelspecs have about 1 MB.
	maxAnswer    = 16 << 20
	maxRedirects = 5
)

// NewGateway returns a gateway. It fails for a host that is no plain http or https
// URL; it does not ask the gateway yet.
func NewGateway(opts GatewayOptions) (*Gateway, error) {
	u, err := url.Parse(opts.Host)
	if err != nil { // the error of Parse shows the URL, and a password in it
		return nil, errors.New("the gateway's address is not a URL")
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https" || u.Host == "":
		return nil, errors.New("the gateway's address is not an http or https URL such as http://gateway:8888")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("the gateway's address has a user, a query or a fragment in it; give the token by KIP_AUTH_TOKEN")
	}
	if opts.Timeout == 0 {
		opts.Timeout = 30 * time.Second
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: !opts.ValidateCert}
	// Cycles are minutes apart: a connection kept so long is a dead one.
	transport.DisableKeepAlives = true
	g := &Gateway{opts: opts, url: u.JoinPath("api", "kernelspecs")}
	g.client = &http.Client{Transport: transport, CheckRedirect: g.checkRedirect, Timeout: opts.Timeout}
	return g, nil
}

// Name returns "gateway".
func (g *Gateway) Name() string { return "gateway" }

// Images asks the gateway for its kernelspecs.
func (g *Gateway) Images(ctx context.Context) (Answer, error) {
	body, err := g.get(ctx)
	if err != nil {
		return Answer{}, fmt.Errorf("asking %s: %w", g.url, withoutURL(err))
	}
	answer, err := decodeKernelspecs(body)
	if err != nil {
		return Answer{}, fmt.Errorf("asking %s: %w", g.url, err)
	}
	if g.exposesToken() {
		answer.Warnings = append(answer.Warnings, "the token is sent to a gateway whose identity is not checked: use https and KIP_VALIDATE_CERT=true")
	}
	return answer, nil
}

func (g *Gateway) get(ctx context.Context) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.url.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	if g.opts.UserAgent != "" {
		req.Header.Set("User-Agent", g.opts.UserAgent)
	}
	if g.hasToken() {
		req.Header.Set("Authorization", "token "+g.opts.Token.Reveal())
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if err := g.checkStatus(resp); err != nil {
		return nil, err
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, fmt.Errorf("the answer ends in the middle: %w", err)
	}
	if err != nil {
		return nil, err
	}
	if len(body) > maxAnswer {
		return nil, fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	}
	return body, nil
}

func (g *Gateway) checkStatus(resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusOK:
		return nil
	case http.StatusUnauthorized, http.StatusForbidden:
		why := "no token was given, see KIP_AUTH_TOKEN"
		if g.hasToken() {
			why = "the token was refused"
			if !sameOrigin(resp.Request.URL, g.url) {
				why = "after a redirect to " + origin(resp.Request.URL) + ", which is not given the token"
			}
		}
		return fmt.Errorf("it answered %s: %s", resp.Status, why)
	}
	return fmt.Errorf("it answered %s", resp.Status)
}

// checkRedirect follows few redirects and drops the token at the first change of
// origin; net/http keeps it for other ports of the same host.
func (g *Gateway) checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) >= maxRedirects {
		return fmt.Errorf("stopped after %d redirects", maxRedirects)
	}
	stays := sameOrigin(req.URL, g.url)
	for _, v := range via {
		stays = stays && sameOrigin(v.URL, g.url)
	}
	if !stays {
		req.Header.Del("Authorization")
	}
	req.Header.Del("Referer")
	return nil
}

func sameOrigin(a, b *url.URL) bool { return origin(a) == origin(b) }

func origin(u *url.URL) string { return u.Scheme + "://" + strings.ToLower(u.Host) }

func (g *Gateway) hasToken() bool { return g.opts.Token != secrets.Secret{} }

// exposesToken tells whether somebody on the way could read the token.
func (g *Gateway) exposesToken() bool {
	if !g.hasToken() || g.url.Scheme == "https" && g.opts.ValidateCert {
		return false
	}
	ip := net.ParseIP(g.url.Hostname())
	return g.url.Hostname() != "localhost" && !ip.IsLoopback()
}

// withoutURL is the error below a url.Error, whose text repeats the URL: after a
// redirect that is the target's, with its query.
func withoutURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		if u.Timeout() && !errors.Is(u.Err, context.DeadlineExceeded) {
			return fmt.Errorf("no answer in time: %w", context.DeadlineExceeded)
		}
		return u.Err
	}
	return err
}
