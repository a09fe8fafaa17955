package resolver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	"github.com/containerd/errdefs"

	"example.com/kip/secrets"
)

// authorizer is containerd's with three guards.
type authorizer struct {
	docker.Authorizer
	// mu makes requests wait for the first token one by one: the authorizer of
	// containerd 2.4 reads a token's expiry while another request sets it.
	mu sync.Mutex
}

func (a *authorizer) Authorize(ctx context.Context, req *http.Request) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.Authorizer.Authorize(ctx, req)
}

// AddResponses takes the first 401 to a Basic login as the answer. Containerd
// would send the same password up to four times, and registries lock accounts.
func (a *authorizer) AddResponses(ctx context.Context, responses []*http.Response) error {
	last := responses[len(responses)-1]
	if strings.HasPrefix(last.Request.Header.Get("Authorization"), "Basic ") {
		return fmt.Errorf("%s: %w", last.Status, docker.ErrInvalidAuthorization)
	}
	for _, c := range auth.ParseAuthHeader(last.Header) {
		if c.Scheme == auth.BearerAuth {
			if err := checkRealm(last.Request.URL, c.Parameters["realm"]); err != nil {
				return err
			}
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.Authorizer.AddResponses(ctx, responses)
}

// ErrRealm is in the error of a registry that names a token service to which no
// login is sent.
var ErrRealm = errors.New("the registry names a token service that is not asked")

// checkRealm refuses the token services that a hostile registry would name. Any
// other host is one by design (auth.docker.io for registry-1.docker.io), but not
// over plain http for a registry with https, and not an address of the node or of a
// private network, where the metadata service of a cloud is, unless it is the
// registry's own.
func checkRealm(registry *url.URL, realm string) error {
	u, err := url.Parse(realm)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("%w: it is no http or https URL", ErrRealm)
	}
	where := u.Scheme + "://" + u.Host
	if registry.Scheme == "https" && u.Scheme != "https" {
		return fmt.Errorf("%w: %s is not https, as the registry is", ErrRealm, where)
	}
	if u.Hostname() == registry.Hostname() {
		return nil
	}
	slog.Debug("the registry's token service is another host", "registry", registry.Host, "service", where)
	ip, err := netip.ParseAddr(u.Hostname())
	if strings.EqualFold(u.Hostname(), "localhost") || err == nil && !isPublic(ip.Unmap()) {
		return fmt.Errorf("%w: %s is an address of this machine or of a private network", ErrRealm, where)
	}
	return nil
}

func isPublic(ip netip.Addr) bool {
	return !ip.IsLoopback() && !ip.IsPrivate() && !ip.IsLinkLocalUnicast() && !ip.IsUnspecified() && !ip.IsMulticast()
}

// bearer sends a registry token, as it is, to one host.
type bearer struct {
	host  string
	token secrets.Secret
}

func (b bearer) Authorize(_ context.Context, req *http.Request) error {
	if req.URL.Host == b.host {
		req.Header.Set("Authorization", "Bearer "+b.token.Reveal())
	}
	return nil
}

// AddResponses has nothing to learn from a challenge: the token is all there is.
func (bearer) AddResponses(context.Context, []*http.Response) error {
	return fmt.Errorf("asking for a token: %w", errdefs.ErrNotImplemented)
}
