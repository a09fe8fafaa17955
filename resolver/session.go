package resolver

import (
	"context"
	"net/http"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"

	"example.com/kip/secrets"
)

// session is one credential, or none, with the connections and tokens that go
// with it.
type session struct {
	credential *secrets.Credential
	registry   string // the registry's host, as containerd reaches it
	resolver   remotes.ResolverWithOptions

	opts       Options
	requests   requests
	hostsError *hostsHook

	mu         sync.Mutex          // guards what follows
	transports []http.RoundTripper // as containerd made them
	hosts      []string            // in the order in which they are asked
	mirrors    map[string]bool     // the hosts that hosts.toml names for the registry
}

func newSession(ctx context.Context, named reference.Named, cred *secrets.Credential, keyring Keyring, opts Options) *session {
	s := &session{credential: cred, registry: reference.Domain(named), opts: opts, hostsError: &hostsHook{}}
	if s.registry == "docker.io" {
		s.registry = "registry-1.docker.io" // where containerd finds Docker Hub
	}
	forMirror := func(host string) *secrets.Credential {
		for _, c := range keyring.Lookup(ctx, host+"/"+reference.Path(named)) {
			if !c.RegistryToken && c.Kind() != secrets.Anonymous {
				return &c
			}
		}
		if opts.PassUpstreamCredentials {
			return cred
		}
		return nil
	}
	headers := http.Header{"User-Agent": {opts.UserAgent}}
	hosts := config.ConfigureHosts(s.hostsError.listen(ctx), config.HostOptions{
		HostDir:        hostDir(opts.HostsDirs),
		Credentials:    s.confine(forMirror),
		UpdateClient:   func(c *http.Client) error { s.guard(c); return nil },
		AuthorizerOpts: []docker.AuthorizerOpt{docker.WithAuthHeader(headers)},
	})
	r := docker.NewResolver(docker.ResolverOptions{Hosts: s.remember(reference.Domain(named), hosts), Headers: headers})
	s.resolver = r.(remotes.ResolverWithOptions)
	return s
}

// idleConns is how many connections to a host are kept for the next blob: as many as
// are in use at once.
const idleConns = 4

// guard puts kip's guards on a client that containerd made. It may be called
// twice for one client: containerd does so for a host that only has headers.
func (s *session) guard(c *http.Client) {
	c.CheckRedirect = checkRedirect
	if _, ok := c.Transport.(*answers); ok {
		return
	}
	s.mu.Lock()
	s.transports = append(s.transports, c.Transport)
	s.mu.Unlock()
	if base, ok := c.Transport.(*http.Transport); ok {
		base.ForceAttemptHTTP2 = true // containerd sets a dialer, with which net/http leaves it out
		base.MaxIdleConnsPerHost = idleConns
	}
	t := c.Transport
	t = &recorder{t, &s.requests, s.name()}
	t = &stallGuard{next: t, timeout: s.opts.StallTimeout}
	t = &pauser{t, s.opts.Pauses}
	c.Transport = &answers{next: t, isLast: s.isLast}
}

// isLast tells whether a host is the last one that is asked.
func (s *session) isLast(host string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.hosts) == 0 || s.hosts[len(s.hosts)-1] == host
}

// outcomes are the last answers of each host, in the order of the hosts.
func (s *session) outcomes() []Request {
	s.mu.Lock()
	hosts := s.hosts
	s.mu.Unlock()
	return s.requests.outcomes(hosts)
}

// close gives up the connections that nobody reads from.
func (s *session) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.transports {
		(&http.Client{Transport: t}).CloseIdleConnections()
	}
}

// name is the credential's name in reports.
func (s *session) name() string {
	if s.credential == nil {
		return Anonymous
	}
	return s.credential.Name()
}

// confine returns a callback for containerd's authorizer that gives the credential
// to the registry that it is for, a mirror what is the mirror's, and nobody else
// anything. The authorizer asks with the host that answered 401, which after a
// redirect is the target's.
func (s *session) confine(forMirror func(host string) *secrets.Credential) func(host string) (string, string, error) {
	return func(host string) (string, string, error) {
		cred := s.credential
		if host != s.registry {
			s.mu.Lock()
			isMirror := s.mirrors[host]
			s.mu.Unlock()
			if cred = nil; isMirror {
				cred = forMirror(host)
			}
		}
		if cred == nil || cred.RegistryToken {
			return "", "", nil
		}
		return cred.Username, cred.Password.Reveal(), nil
	}
}

// hostDir finds a registry's folder below the first root that has one, with the
// root's _default as its last choice, as CRI does.
func hostDir(roots []string) func(host string) (string, error) {
	return func(host string) (string, error) {
		for _, root := range roots {
			dir, err := config.HostDirFromRoot(root)(host)
			if err == nil || !errdefs.IsNotFound(err) {
				return dir, err
			}
		}
		return "", errdefs.ErrNotFound
	}
}

// remember makes the hosts of the session's registry once. The docker resolver
// asks for them anew to resolve and to fetch, and with new hosts the token would be
// fetched anew too.
func (s *session) remember(registry string, hosts docker.RegistryHosts) docker.RegistryHosts {
	made := sync.OnceValues(func() ([]docker.RegistryHost, error) {
		list, err := hosts(registry)
		if err = s.hostsError.check(registry, err); err != nil {
			return nil, err
		}
		s.guardHosts(list)
		return list, nil
	})
	return func(string) ([]docker.RegistryHost, error) { return made() }
}

// guardHosts puts kip's guards on the hosts of a registry.
func (s *session) guardHosts(hosts []docker.RegistryHost) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mirrors = map[string]bool{}
	for i, h := range hosts {
		s.hosts = append(s.hosts, h.Host)
		s.mirrors[h.Host] = h.Host != s.registry
		if s.credential != nil && s.credential.RegistryToken && h.Host == s.registry {
			hosts[i].Authorizer = bearer{h.Host, s.credential.Password}
		} else {
			hosts[i].Authorizer = &authorizer{Authorizer: h.Authorizer}
		}
	}
}
