package resolver

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes/docker"
)

// authorizer is containerd's with two guards.
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
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.Authorizer.AddResponses(ctx, responses)
}
