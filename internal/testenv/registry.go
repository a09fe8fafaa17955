package testenv

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing/iotest"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/crypto/bcrypt"
	"golang.org/x/sync/semaphore"
)

// Auth is how a registry wants to know its users.
type Auth int

// The registry asks for a login by itself, or sends its users to a token
// service.
const (
	Basic Auth = iota
	Bearer
)

// User is an account of a registry.
type User struct {
	Password string
	// Prefixes are the beginnings of the repositories that the user may pull, all
	// where there are none. A registry with Basic auth lets each user pull all.
	Prefixes []string
}

// Registry is a real distribution registry behind a proxy that counts. With
// Bearer auth, anyone may pull the repositories below public/.
type Registry struct {
	// Host is the registry's address as it stands in image names.
	Host string

	t        T
	cut      atomic.Int64 // see CutAfter
	down     atomic.Bool
	lie      atomic.Bool
	watch    atomic.Pointer[blobWatch]
	shape    atomic.Pointer[shape]
	gone     sync.Map // paths of manifests, see Delete
	front    *server
	token    *tokenService
	password string // the pusher's
}

// Request is what a server of the rig saw.
type Request struct {
	Method, Path string
	// Authorization is the header that came with it, empty for none.
	Authorization string
	// Status is what was answered, and Sent how many bytes of it.
	Status int
	Sent   int64
}

// pusher may do everything in each registry of the rig. Its password is made
// for the run.
const pusher = "testenv"

// StartRegistry starts a registry that knows the given users.
func StartRegistry(t T, auth Auth, users map[string]User) *Registry {
	t.Helper()
	dir := Dir(t)
	r := &Registry{t: t, password: rand.Text()}
	all := map[string]User{pusher: {Password: r.password}}
	for name, u := range users {
		all[name] = u
	}
	var access string
	switch auth {
	case Basic:
		access = "htpasswd: {realm: testenv, path: " + htpasswd(t, dir, all) + "}"
	case Bearer:
		r.token = startTokenService(t, dir, all)
		access = fmt.Sprintf("token: {realm: %q, service: %s, issuer: %s, jwks: %s}",
			"http://"+r.token.host+"/token", tokenServiceName, tokenServiceName, r.token.jwks)
	}
	socket := filepath.Join(dir, "registry.sock")
	config := fmt.Sprintf(`version: 0.1
log: {level: warn}
storage: {filesystem: {rootdirectory: %q}, delete: {enabled: true}}
http: {net: unix, addr: %q, secret: %s, relativeurls: true}
auth: {%s}
`, filepath.Join(dir, "registry"), socket, rand.Text(), access)
	path := filepath.Join(dir, "registry.yml")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatalf("configuring the registry: %v", err)
	}
	cmd := exec.Command(Tool(t, "registry"), "serve", path)
	cmd.Env = append(os.Environ(), "OTEL_TRACES_EXPORTER=none")
	proc := start(t, dir, "registry", cmd)
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	await(t, "the registry", func() error {
		if err := proc.alive(); err != nil {
			t.Fatalf("%v", err)
		}
		conn, err := dial(context.Background(), "", "")
		if err == nil {
			conn.Close()
		}
		return err
	})
	proxy := &httputil.ReverseProxy{
		ErrorLog:       log.New(io.Discard, "", 0),
		Transport:      &http.Transport{DialContext: dial, DisableCompression: true, MaxIdleConnsPerHost: 64},
		ModifyResponse: r.spoil,
		Rewrite:        func(p *httputil.ProxyRequest) { p.Out.URL.Scheme, p.Out.URL.Host = "http", p.In.Host },
	}
	r.front = startServer(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if r.down.Load() {
			panic(http.ErrAbortHandler)
		}
		if _, gone := r.gone.Load(req.URL.Path); gone {
			http.NotFound(w, req)
			return
		}
		proxy.ServeHTTP(w, req)
	}))
	r.Host = r.front.host
	return r
}

// htpasswd writes the registry's password file.
func htpasswd(t T, dir string, users map[string]User) string {
	t.Helper()
	var file strings.Builder
	for name, u := range users {
		hash, err := bcrypt.GenerateFromPassword([]byte(u.Password), bcrypt.MinCost)
		if err != nil {
			t.Fatalf("writing the password file: %v", err)
		}
		fmt.Fprintf(&file, "%s:%s\n", name, hash)
	}
	path := filepath.Join(dir, "htpasswd")
	if err := os.WriteFile(path, []byte(file.String()), 0o600); err != nil {
		t.Fatalf("writing the password file: %v", err)
	}
	return path
}

// Push puts an image of m into the registry and returns its full reference.
// name is the repository and tag, as in team/kernel:1.
func (r *Registry) Push(m *Images, image Image, name string) string {
	r.t.Helper()
	ref := r.Host + "/" + name
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p, err := r.resolver().Pusher(ctx, ref)
	if err != nil {
		r.t.Fatalf("pushing %s: %v", ref, err)
	}
	// One at a time: the authorizer of containerd 2.4 has a data race when several
	// requests ask for the first token.
	if err := remotes.PushContent(ctx, p, image.Manifest, m.store, semaphore.NewWeighted(1), platforms.All, nil); err != nil {
		r.t.Fatalf("pushing %s: %v", ref, err)
	}
	return ref
}

// Delete makes the registry forget a manifest.
func (r *Registry) Delete(repository string, manifest ocispec.Descriptor) {
	r.t.Helper()
	r.gone.Store("/v2/"+repository+"/manifests/"+manifest.Digest.String(), true)
}

// DeleteTag makes the registry forget a tag.
func (r *Registry) DeleteTag(repository, tag string) {
	r.t.Helper()
	r.gone.Store("/v2/"+repository+"/manifests/"+tag, true)
}

// OnBlob calls f once, when n bytes of a blob have been sent; with no blob, that
// ends.
func (r *Registry) OnBlob(blob digest.Digest, n int64, f func()) {
	r.watch.Store(&blobWatch{blob: blob, left: n, f: f})
}

// blobWatch is what OnBlob waits for.
type blobWatch struct {
	blob digest.Digest
	left int64
	f    func()
}

// watched is the body of a blob that is watched.
type watched struct {
	io.ReadCloser
	*blobWatch
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.ReadCloser.Read(p)
	if before := w.left; before > 0 {
		if w.left -= int64(n); w.left <= 0 {
			w.f()
		}
	}
	return n, err
}

// resolver has the pusher's rights.
func (r *Registry) resolver() remotes.Resolver {
	creds := func(string) (string, string, error) { return pusher, r.password, nil }
	return docker.NewResolver(docker.ResolverOptions{Hosts: docker.ConfigureDefaultRegistries(
		docker.WithPlainHTTP(docker.MatchAllHosts),
		docker.WithAuthorizer(docker.NewDockerAuthorizer(docker.WithAuthCreds(creds))),
	)})
}

// Requests returns what the registry and its token service have seen since the
// start or the last Forget.
func (r *Registry) Requests() []Request {
	seen := r.front.requests()
	if r.token != nil {
		seen = append(seen, r.token.requests()...)
	}
	return seen
}

// FailedLogins counts the logins that the token service has refused.
func (r *Registry) FailedLogins() int {
	n := 0
	for _, req := range r.token.requests() {
		if req.Status == http.StatusUnauthorized {
			n++
		}
	}
	return n
}

// Grants returns the tokens that were given out for repositories since the last
// Forget.
func (r *Registry) Grants() []Grant {
	r.token.mu.Lock()
	defer r.token.mu.Unlock()
	return slices.Clone(r.token.grants)
}

// Forget drops the requests and grants seen so far.
func (r *Registry) Forget() {
	r.front.forget()
	if r.token != nil {
		r.token.forget()
		r.token.mu.Lock()
		defer r.token.mu.Unlock()
		r.token.grants = nil
	}
}

// CutAfter makes the registry break the connection in the first answer that is
// longer than n bytes, after n bytes, and each later request at once; 0 ends that.
func (r *Registry) CutAfter(n int64) {
	r.cut.Store(n)
	r.down.Store(false)
}

// Shape makes the registry answer each request after a latency, and send no more
// than so many bytes a second on each connection.
func (r *Registry) Shape(latency time.Duration, rate int64) {
	r.shape.Store(&shape{latency, rate})
}

type shape struct {
	latency time.Duration
	rate    int64
}

// shaped is a body that comes at a rate.
type shaped struct {
	io.ReadCloser
	rate int64
}

func (s shaped) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p[:min(len(p), 32<<10)])
	time.Sleep(time.Duration(n) * time.Second / time.Duration(s.rate))
	return n, err
}

// LieOnce makes the registry change a byte of the next blob.
func (r *Registry) LieOnce() { r.lie.Store(true) }

// spoil changes an answer as Shape, OnBlob, CutAfter and LieOnce have said.
func (r *Registry) spoil(resp *http.Response) error {
	if isBlob := strings.Contains(resp.Request.URL.Path, "/blobs/sha256"); isBlob && resp.Request.Method == "GET" && r.lie.CompareAndSwap(true, false) {
		if _, err := io.CopyN(io.Discard, resp.Body, 1); err != nil {
			return err
		}
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(strings.NewReader("?"), resp.Body), resp.Body}
	}
	if s := r.shape.Load(); s != nil {
		time.Sleep(s.latency)
		resp.Body = shaped{resp.Body, s.rate}
	}
	if w := r.watch.Load(); w != nil && w.blob != "" && strings.HasSuffix(resp.Request.URL.Path, w.blob.String()) && resp.Request.Method == "GET" {
		resp.Body = &watched{resp.Body, w}
	}
	if n := r.cut.Load(); n > 0 && resp.ContentLength > n {
		r.down.Store(true)
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(io.LimitReader(resp.Body, n), iotest.ErrReader(errors.New("cut by the rig"))), resp.Body}
	}
	return nil
}

// Stop closes the registry's doors: connections to it are refused from now on.
func (r *Registry) Stop() {
	r.front.close()
	if r.token != nil {
		r.token.close()
	}
}

// server is an HTTP server on loopback that keeps a record of its requests.
type server struct {
	host  string
	http  http.Server
	close func()

	mu   sync.Mutex
	seen []*Request
}

func startServer(t T, h http.Handler) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listening on loopback: %v", err)
	}
	s := &server{host: l.Addr().String()}
	s.http.Handler = s.record(h)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.http.Serve(l)
	}()
	s.close = func() {
		s.http.Close()
		<-done
	}
	cleanup(t, s.close)
	return s
}

// record notes each request before it is answered, and its status before the
// client can see it: what a client knows of, the record has.
func (s *server) record(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r := &Request{req.Method, req.URL.Path, req.Header.Get("Authorization"), http.StatusOK, 0}
		s.mu.Lock()
		s.seen = append(s.seen, r)
		s.mu.Unlock()
		h.ServeHTTP(&statusWriter{w, s, r}, req)
	})
}

func (s *server) requests() []Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Request
	for _, r := range s.seen {
		list = append(list, *r)
	}
	return list
}

func (s *server) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = nil
}

// statusWriter notes the status and length of an answer in its request.
type statusWriter struct {
	http.ResponseWriter
	server  *server
	request *Request
}

func (w *statusWriter) WriteHeader(status int) {
	w.server.mu.Lock()
	w.request.Status = status
	w.server.mu.Unlock()
	w.ResponseWriter.WriteHeader(status)
}

func (w *statusWriter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.server.mu.Lock()
	w.request.Sent += int64(n)
	w.server.mu.Unlock()
	return n, err
}

// Unwrap lets the server find the Flusher below.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
