package resolver

import (
	"net/http"
	"net/netip"
	"net/url"
	"testing"

	"github.com/containerd/containerd/v2/core/remotes/docker"
)

// FuzzChallenge gives the authorizer any challenge of a registry with TLS. What it
// accepts is a token service with TLS that is not at an address of the node's.
func FuzzChallenge(f *testing.F) {
	for _, seed := range []string{
		`Bearer realm="https://auth.example.com/token",service="s",scope="repository:x:pull"`, `Basic realm="r"`, `BASIC realm="r"`,
		`Negotiate, Basic realm="r"`, `Basic realm="r", Bearer realm="https://a/t"`, `Bearer`, `Bearer realm=`, `Bearer realm="`, `Digest x`, ``,
		`Bearer realm="http://169.254.169.254/"`, `Bearer realm="https://[::1]/"`, `Bearer realm="//x"`, `Bearer realm="https://localhost/"`,
	} {
		f.Add(seed)
	}
	registry, _ := url.Parse("https://reg.example.com/v2/x/manifests/1")
	f.Fuzz(func(t *testing.T, challenge string) {
		a := &authorizer{Authorizer: docker.NewDockerAuthorizer()}
		resp := &http.Response{StatusCode: 401, Header: http.Header{"Www-Authenticate": {challenge}}, Request: &http.Request{URL: registry, Header: http.Header{}}}
		_ = a.AddResponses(t.Context(), []*http.Response{resp}) // it must not panic
		if checkRealm(registry, challenge) != nil {
			return
		}
		u, err := url.Parse(challenge)
		if err != nil || u.Scheme != "https" {
			t.Fatalf("accepted the token service %q", challenge)
		}
		if ip, err := netip.ParseAddr(u.Hostname()); err == nil && (ip.IsLoopback() || ip.IsPrivate() || ip.IsLinkLocalUnicast()) {
			t.Errorf("accepted the token service %q", challenge)
		}
	})
}
