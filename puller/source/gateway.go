package source

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"
	"unicode"

	"example.com/kip/secrets"
)

const (
	defaultTimeout = 30 * time.Second
	maxAnswer      = 16 << 20 // bytes, after decompression
	maxRedirects   = 5
)

// GatewayOptions say where an Enterprise Gateway is and how to ask it. All but Host may be left out.
type GatewayOptions struct {
	// Host is the gateway's URL, http or https, without user and query (KIP_GATEWAY_HOST). It may have a path, which
	// is the prefix of /api/kernelspecs, and a slash at its end.
	Host string

	// Token is sent in the Authorization header, to Host's own scheme, host and port only (KIP_AUTH_TOKEN). Space
	// around it is dropped.
	Token secrets.Secret

	// ValidateCert has the certificate of an https gateway verified (KIP_VALIDATE_CERT).
	ValidateCert bool

	// UserAgent is the User-Agent header; Go's own where it is empty.
	UserAgent string

	// Timeout limits the whole request, redirects and the answer's body included; 30 s where it is not positive.
	Timeout time.Duration
}

// Gateway wants the images that the kernelspecs of a Jupyter Enterprise Gateway name. It may be used by several
// goroutines.
type Gateway struct {
	url       string // of the kernelspecs
	token     secrets.Secret
	userAgent string
	timeout   time.Duration
	exposed   string // the warning that the token can be read on its way; empty where it cannot
	client    *http.Client
}

// NewGateway returns a source for the gateway. It fails where Host is not an absolute http or https URL or holds a
// user, a query or a fragment, and where no header can carry Token. The error holds nothing of either.
func NewGateway(options GatewayOptions) (*Gateway, error) {
	u, err := parseHost(options.Host)
	if err != nil {
		return nil, err
	}
	token := strings.TrimSpace(options.Token.Reveal())
	if strings.ContainsFunc(token, unicode.IsControl) {
		return nil, errors.New("the gateway's token (KIP_AUTH_TOKEN) holds a control character")
	}
	g := &Gateway{
		url:       u.JoinPath("api", "kernelspecs").String(),
		token:     secrets.NewSecret(token),
		userAgent: options.UserAgent,
		timeout:   options.Timeout,
	}
	if g.timeout <= 0 {
		g.timeout = defaultTimeout
	}
	if token != "" {
		g.exposed = exposure(u, options.ValidateCert)
	}
	g.client = newClient(options.ValidateCert)
	return g, nil
}

// parseHost shows the value in no error, nor the error of url.Parse, which quotes it: people put passwords there.
func parseHost(host string) (*url.URL, error) {
	u, err := url.Parse(strings.TrimSpace(host))
	switch {
	case err != nil, u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return nil, errors.New("the gateway's host is not an absolute http or https URL, such as http://localhost:18888")
	case u.User != nil:
		return nil, errors.New("the gateway's URL holds a user or password: only a token is sent, and it is given apart from the URL")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, errors.New("the gateway's URL holds a query or fragment: a token is given apart from the URL")
	}
	return u, nil
}

// exposure returns the warning about a token that is sent to u, if it needs one.
func exposure(u *url.URL, validateCert bool) string {
	switch {
	case u.Scheme == "https" && !validateCert:
		return "the gateway's token is sent over TLS without verification of the certificate (KIP_VALIDATE_CERT)"
	case u.Scheme == "http" && !isLoopback(u.Hostname()):
		return "the gateway's token is sent over plain HTTP: it can be read on its way"
	}
	return ""
}

func isLoopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.IsLoopback() || strings.EqualFold(host, "localhost")
}

// newClient sets no timeout of its own: the context of each request limits the whole of it.
func newClient(validateCert bool) *http.Client {
	transport := http.DefaultTransport.(*http.Transport).Clone() // has ProxyFromEnvironment
	transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: !validateCert}
	transport.DisableKeepAlives = true // minutes lie between two requests
	return &http.Client{Transport: transport, CheckRedirect: checkRedirect}
}

// checkRedirect keeps the token to the origin that it is for. Go itself would send it to another port or scheme of the
// same host and to sub-domains, and would send it again when a chain comes back: it copies the headers of the first
// request each time, so the whole chain is looked at.
func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) > maxRedirects {
		return problem(fmt.Sprintf("more than %d redirects", maxRedirects))
	}
	for _, hop := range append(via[1:len(via):len(via)], req) {
		if hop.URL.Scheme != via[0].URL.Scheme || hop.URL.Host != via[0].URL.Host {
			req.Header.Del("Authorization")
		}
	}
	return nil
}

// Name returns "gateway".
func (g *Gateway) Name() string { return "gateway" }

// Images asks the gateway for its kernelspecs and returns the images of each, in the order of the kernelspecs' names:
// image_name, then executor_image_name, of metadata.process_proxy.config, or where that names none, of
// metadata.kernel_provisioner.config. The order is that of KernelSpecsFetcher in Enterprise Gateway.
//
// An answer that is no list of kernelspecs is an error: another status than 200, HTML, broken JSON, more than 16 MiB.
// A fault in one kernelspec is a warning. So is a list of none, and a token that can be read on its way. Errors and
// warnings name the URL or kernelspec, and hold neither the token nor text of the answer's body other than a bad
// image name. Of what lies behind an error only the context's is wrapped; a timeout is a context.DeadlineExceeded.
func (g *Gateway) Images(ctx context.Context) (Answer, error) {
	limited, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	body, err := g.fetch(limited)
	var answer Answer
	if err == nil {
		answer, err = parseKernelspecs(body, g.redact)
	}
	if g.exposed != "" {
		answer.Warnings = append(answer.Warnings, g.exposed)
	}
	if err != nil {
		err = g.failure(ctx, err)
	}
	return answer, err
}

// fetch returns the body of the gateway's answer.
func (g *Gateway) fetch(ctx context.Context) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "application/json")
	if g.userAgent != "" {
		req.Header.Set("User-Agent", g.userAgent)
	}
	if token := g.token.Reveal(); token != "" {
		req.Header.Set("Authorization", "token "+token)
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, g.statusProblem(resp)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		return nil, err
	case len(body) > maxAnswer:
		return nil, problem(fmt.Sprintf("the answer is larger than %d MiB", maxAnswer>>20))
	case isHTML(resp.Header.Get("Content-Type"), body):
		return nil, problem("answered HTML, not JSON: is this the gateway's address?")
	}
	return body, nil
}

// statusProblem says what a status means. It does not use the server's own words for it.
func (g *Gateway) statusProblem(resp *http.Response) problem {
	answered := strings.TrimSpace(fmt.Sprintf("answered %d %s", resp.StatusCode, http.StatusText(resp.StatusCode)))
	switch {
	case resp.StatusCode != http.StatusUnauthorized && resp.StatusCode != http.StatusForbidden:
		return problem(answered)
	case g.token == secrets.Secret{}:
		return problem(answered + ": no token was given (KIP_AUTH_TOKEN)")
	case resp.Request.Header.Get("Authorization") == "":
		return problem(answered + ": a redirect led away from the gateway's address, and the token is not sent there")
	}
	return problem(answered + ": the token was refused")
}

// isHTML tells the page of a login or a portal from JSON, whatever its Content-Type says.
func isHTML(contentType string, body []byte) bool {
	start := bytes.TrimLeft(body, "\ufeff \t\r\n")
	mediaType, _, _ := mime.ParseMediaType(contentType)
	return bytes.HasPrefix(start, []byte("<")) ||
		mediaType == "text/html" && len(start) > 0 && start[0] != '{'
}

// problem is an error in words of this package, which may be shown.
type problem string

func (p problem) Error() string { return string(p) }

// failure makes of an error the one that Images returns. The context is the caller's.
func (g *Gateway) failure(ctx context.Context, err error) error {
	prefix := "GET " + g.redact(g.url)
	var own problem
	var network net.Error
	switch {
	case errors.As(err, &own):
		return fmt.Errorf("%s: %s", prefix, own)
	case ctx.Err() != nil:
		return fmt.Errorf("%s: %w", prefix, ctx.Err())
	case errors.As(err, &network) && network.Timeout(): // its own or an earlier one, of connecting or of TLS
		return fmt.Errorf("%s: no whole answer in time (%s at most): %w", prefix, g.timeout, context.DeadlineExceeded)
	}
	return fmt.Errorf("%s: %s", prefix, printable(g.redact(describe(err))))
}

// describe puts an error of net/http in words. Only the kinds that hold nothing of the answer are shown as they are:
// the others quote lines of it, a Location with a signed query, or the proxy's URL with its password.
func describe(err error) string {
	var network *net.OpError
	var certificate *tls.CertificateVerificationError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the answer ends in the middle"
	case errors.Is(err, io.EOF):
		return "the connection was closed without an answer"
	case errors.Is(err, http.ErrSchemeMismatch):
		return "answered plain HTTP, not HTTPS"
	case errors.As(err, &network):
		return network.Error()
	case errors.As(err, &certificate):
		return certificate.Error()
	}
	return "no valid HTTP answer: is this the gateway's address?"
}

// printable makes one line of a text: the names in a certificate can hold any byte.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, text)
}

// redact takes the token out of a text that others had a part in: it can be in the URL's path, where it may be escaped,
// or in a name that the gateway sends.
func (g *Gateway) redact(text string) string {
	token := g.token.Reveal()
	if token == "" {
		return text
	}
	escaped := (&url.URL{Path: token}).EscapedPath()
	shown := g.token.String()
	return strings.NewReplacer(token, shown, escaped, shown).Replace(text)
}
