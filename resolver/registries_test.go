package resolver_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"example.com/kip/internal/testenv"
	"example.com/kip/resolver"
)

// sent lists what a server saw: method, the last part of the path, and the status.
func sent(seen []testenv.Request) []string {
	var list []string
	for _, r := range seen {
		list = append(list, fmt.Sprintf("%s %s %d", r.Method, r.Path[strings.LastIndexByte(r.Path, '/')+1:], r.Status))
	}
	return list
}

// tokenRegistry wants a token from a service on its own host, which answers POST and
// GET as it is told.
func tokenRegistry(t *testing.T, challenge string, post, get testenv.Answer) *testenv.Fake {
	return testenv.StartFake(t, withHost(func(host string, req *http.Request) testenv.Answer {
		switch {
		case req.URL.Path == "/token" && req.Method == "POST":
			return post
		case req.URL.Path == "/token":
			return get
		case req.Header.Get("Authorization") == "Bearer good", strings.HasPrefix(req.Header.Get("Authorization"), "Basic ") && !strings.Contains(challenge, "Bearer"):
			return found(req)
		}
		return refuse(401, strings.ReplaceAll(challenge, "HOST", host))
	}))
}

func TestRegistriesThatMisbehave(t *testing.T) {
	const bearer = `Bearer realm="http://HOST/token",service="s"`
	html := testenv.Answer{Status: 200, Body: "<html>", Header: map[string]string{"Content-Type": "text/html"}}
	token := func(body string) testenv.Answer { return testenv.Answer{Status: 200, Body: body} }
	good := token(`{"token":"good"}`)
	head := func(status int, get testenv.Answer) func(*testing.T) *testenv.Fake {
		return func(t *testing.T) *testenv.Fake {
			return testenv.StartFake(t, func(req *http.Request) testenv.Answer {
				if req.Method == "HEAD" {
					return testenv.Answer{Status: status}
				}
				if get.Status == 0 {
					return found(req)
				}
				return get
			})
		}
	}
	tokens := func(challenge string, post, get testenv.Answer) func(*testing.T) *testenv.Fake {
		return func(t *testing.T) *testenv.Fake { return tokenRegistry(t, challenge, post, get) }
	}
	withToken := func(posted, got int) []string {
		list := []string{"HEAD 1 401", fmt.Sprintf("POST token %d", posted)}
		if got > 0 {
			list = append(list, fmt.Sprintf("GET token %d", got))
		}
		return append(list, "HEAD 1 200")
	}
	refused := testenv.Answer{Status: 403, Body: `{"errors":[{"code":"DENIED","message":"not from here"}]}`}
	for _, in := range []struct {
		name  string
		start func(*testing.T) *testenv.Fake
		sent  []string
		fails string // in the error
	}{
		{"HEAD 400", head(400, testenv.Answer{}), []string{"HEAD 1 400", "GET 1 200"}, ""},
		{"HEAD 403", head(403, testenv.Answer{}), []string{"HEAD 1 403", "GET 1 200"}, ""},
		{"HEAD 404", head(404, testenv.Answer{}), []string{"HEAD 1 404", "GET 1 200"}, ""},
		{"HEAD 405", head(405, testenv.Answer{}), []string{"HEAD 1 405", "GET 1 200"}, ""},
		{"HEAD 501", head(501, testenv.Answer{}), []string{"HEAD 1 501", "GET 1 200"}, ""},
		{"HEAD and GET 404", head(404, refuse(404, "")), []string{"HEAD 1 404", "GET 1 404"}, "404 Not Found"},
		{"HEAD and GET 403", head(403, refused), []string{"HEAD 1 403", "GET 1 403"}, "DENIED: not from here"},
		{"HEAD without a length", head(200, testenv.Answer{}), []string{"HEAD 1 200", "GET 1 200"}, ""},
		{"a token by POST", tokens(bearer, token(`{"access_token":"good"}`), refuse(500, "")), withToken(200, 0), ""},
		{"a POST that is answered with the old name only", tokens(bearer, good, good), withToken(200, 200), ""},
		{"a POST that is not found", tokens(bearer, refuse(404, ""), good), withToken(404, 200), ""},
		{"a POST that is forbidden", tokens(bearer, refuse(403, ""), good), withToken(403, 200), ""},
		{"a POST that is not allowed", tokens(bearer, refuse(405, ""), good), withToken(405, 200), ""},
		{"a POST that is not implemented", tokens(bearer, refuse(501, ""), good), withToken(501, 200), ""},
		{"a POST that is answered with a page", tokens(bearer, html, good), withToken(200, 200), ""},
		{"a lifetime as text", tokens(bearer, refuse(404, ""), token(`{"token":"good","expires_in":"300"}`)), withToken(404, 200), ""},
		{"a lifetime that is no number", tokens(bearer, token(`{"access_token":"good","expires_in":"soon"}`), good), withToken(200, 0), ""},
		{"a page for all", tokens(bearer, html, html), []string{"HEAD 1 401", "POST token 200", "GET token 200"}, "without a token"},
		{"a token of 2 MiB", tokens(bearer, refuse(404, ""), token(`{"token":"`+strings.Repeat("x", 2<<20)+`"}`)), []string{"HEAD 1 401", "POST token 404", "GET token 200"}, "more than 1048576 bytes"},
		{"no service", tokens(`Bearer realm="http://HOST/token"`, refuse(404, ""), good), withToken(404, 200), ""},
		{"a joined challenge", tokens(`Basic realm="a, b", Bearer realm="http://HOST/token",service="s"`, refuse(404, ""), good), withToken(404, 200), ""},
		{"Negotiate before Basic", tokens(`Negotiate, Basic realm="r"`, refuse(500, ""), refuse(500, "")), []string{"HEAD 1 401", "HEAD 1 200"}, ""},
		{"BASIC", tokens(`BASIC realm="r"`, refuse(500, ""), refuse(500, "")), []string{"HEAD 1 401", "HEAD 1 200"}, ""},
		{"no challenge", tokens("", refuse(500, ""), refuse(500, "")), []string{"HEAD 1 401"}, "401"},
	} {
		t.Run(in.name, func(t *testing.T) {
			reg := in.start(t)
			r, ref := newResolver(t, reg.Host(), keyring{credential("a", "alice", "1")}, resolver.Options{NoAnonymousFallback: true})
			_, desc, err := r.Resolve(t.Context(), ref)
			if in.fails == "" && (err != nil || desc.Digest != manifestDesc.Digest || desc.Size != manifestDesc.Size) {
				t.Errorf("%v, error %v", desc, err)
			}
			if in.fails != "" && (err == nil || !strings.Contains(err.Error(), in.fails)) {
				t.Errorf("error %v, want one that says %q", err, in.fails)
			}
			if diff := cmp.Diff(in.sent, sent(reg.Requests())); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWhatIsNoManifestIsNoImage(t *testing.T) {
	const huge = 5 << 20 // containerd's limit is 4.4 MB
	manifestOf := func(length int, digest bool) testenv.Answer {
		a := testenv.Answer{Status: 200, Body: strings.Repeat(" ", length), Header: map[string]string{"Content-Type": manifestDesc.MediaType}}
		if digest {
			a.Header["Docker-Content-Digest"] = manifestDesc.Digest.String()
		}
		return a
	}
	for name, answer := range map[string]testenv.Answer{
		"too large":                   manifestOf(huge, true),
		"too large, without a digest": manifestOf(huge, false),
		"schema 1":                    {Status: 200, Body: "{}", Header: map[string]string{"Content-Type": "application/vnd.docker.distribution.manifest.v1+prettyjws", "Docker-Content-Digest": manifestDesc.Digest.String()}},
		"a page":                      {Status: 200, Body: "<html>", Header: map[string]string{"Content-Type": "text/html; charset=utf-8"}},
	} {
		reg := testenv.StartFake(t, func(*http.Request) testenv.Answer { return answer })
		r, ref := newResolver(t, reg.Host(), nil, resolver.Options{})
		if _, _, err := r.Resolve(t.Context(), ref); !errors.Is(err, resolver.ErrNotAnImage) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// serveFound answers as found says, on a server that a test makes itself.
func serveFound(w http.ResponseWriter, req *http.Request) {
	a := found(req)
	for k, v := range a.Header {
		w.Header().Set(k, v)
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(a.Body)))
	io.WriteString(w, a.Body)
}

func TestARegistryAtAnIPv6Address(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Logf("this machine has no IPv6 loopback, so there is nothing to reach: %v", err)
		return
	}
	var authorization atomic.Value
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if _, _, ok := req.BasicAuth(); !ok {
			w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
			w.WriteHeader(401)
			return
		}
		authorization.Store(req.Header.Get("Authorization"))
		serveFound(w, req)
	})}
	go server.Serve(l)
	defer server.Close()
	root := nodeHosts(t, l.Addr().String(), map[string]string{"hosts.toml": "server = \"http://" + l.Addr().String() + "\"\n"})
	r, ref := newResolver(t, l.Addr().String(), keyring{credential("a", "alice", "1")}, resolver.Options{HostsDirs: []string{root}})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || authorization.Load() != basic("alice", "1") {
		t.Errorf("authorization %v, error %v", authorization.Load(), err)
	}
}

func TestHTTP2IsUsedWhereItIsOffered(t *testing.T) {
	var proto atomic.Value
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		proto.Store(req.Proto)
		serveFound(w, req)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	root := nodeHosts(t, "named.example", map[string]string{"hosts.toml": "[host.\"" + server.URL + "\"]\nskip_verify = true\n"})
	r, ref := newResolver(t, "named.example", nil, resolver.Options{HostsDirs: []string{root}})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || proto.Load() != "HTTP/2.0" {
		t.Errorf("%v, error %v", proto.Load(), err)
	}
}

func TestAPauseIsKeptByAllPullsAndForOneRegistry(t *testing.T) {
	for status, value := range map[int]string{429: "3600", 503: "60"} {
		var limited atomic.Bool
		limited.Store(true)
		busy := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
			if limited.Load() {
				return testenv.Answer{Status: status, Header: map[string]string{"Retry-After": value}}
			}
			return found(req)
		})
		idle := testenv.StartFake(t, found)
		var passed atomic.Int64
		opts := resolver.Options{Pauses: &resolver.Pauses{Now: func() time.Time { return time.Now().Add(time.Duration(passed.Load())) }}}
		resolve := func(host string) error {
			r, ref := newResolver(t, host, nil, opts)
			_, _, err := r.Resolve(t.Context(), ref)
			return err
		}
		for range 3 {
			var paused *resolver.PausedError
			if err := resolve(busy.Host()); !errors.As(err, &paused) || paused.Status != status {
				t.Errorf("%d: error %v", status, err)
			}
		}
		if err := resolve(idle.Host()); err != nil {
			t.Errorf("another registry is held back too: %v", err)
		}
		if got := sent(busy.Requests()); len(got) != 1 {
			t.Errorf("%d: requests %q, want one", status, got)
		}
		limited.Store(false)
		passed.Store(int64(20 * time.Minute)) // an hour is not believed
		if err := resolve(busy.Host()); err != nil {
			t.Errorf("%d, after the pause: %v", status, err)
		}
	}
}

func TestAShortPauseIsWaitedFor(t *testing.T) {
	var asked atomic.Int64
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		if asked.Add(1) == 1 {
			return testenv.Answer{Status: 429, Header: map[string]string{"Retry-After": time.Now().UTC().Format(http.TimeFormat)}}
		}
		return found(req)
	})
	opts := resolver.Options{Pauses: &resolver.Pauses{}}
	for i := range 2 {
		r, ref := newResolver(t, reg.Host(), nil, opts)
		if _, _, err := r.Resolve(t.Context(), ref); (err == nil) != (i == 1) {
			t.Errorf("pull %d: error %v", i, err)
		}
	}
}

func TestABrokenConnectionIsTakenUpWhereItWas(t *testing.T) {
	const every = 8 << 20
	big := bytes.Repeat([]byte("0123456789abcdef"), 4<<20) // 64 MiB
	desc := ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromBytes(big), Size: int64(len(big))}
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		if !strings.Contains(req.URL.Path, "/blobs/") {
			return found(req)
		}
		from := 0
		fmt.Sscanf(req.Header.Get("Range"), "bytes=%d-", &from)
		a := testenv.Answer{Status: 200, Body: string(big[from:]), Reset: every}
		if from > 0 {
			a.Status = 206
			a.Header = map[string]string{"Content-Range": fmt.Sprintf("bytes %d-%d/%d", from, len(big)-1, len(big))}
		}
		return a
	})
	r, ref := newResolver(t, reg.Host(), nil, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	got, err := fetch(t.Context(), r, ref, desc)
	if err != nil || !bytes.Equal(got, big) {
		t.Fatalf("%d bytes, error %v", len(got), err)
	}
	resets := 0
	for _, s := range sent(reg.Requests()) {
		if strings.HasSuffix(s, " 206") {
			resets++
		}
	}
	if resets < len(big)/every-1 {
		t.Errorf("%d resets", resets)
	}
	if n := r.Bytes(); n != int64(len(big)) {
		t.Errorf("%d bytes were delivered of %d", n, len(big))
	}
}

// nodeHosts writes a registry's folder with files, and returns the root.
func nodeHosts(t *testing.T, registry string, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	dir := filepath.Join(root, registry)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestABrokenHostsConfigIsNotPassedBy(t *testing.T) {
	reg := testenv.StartFake(t, found)
	server := "server = \"http://" + reg.Host() + "\"\n"
	for name, in := range map[string]struct{ text, says string }{
		"no closing bracket": {server + "[host.\"http://mirror.invalid\"\n", "hosts.toml, line 2"},
		"no TOML":            {"<html>", "hosts.toml, line 1"},
		"a capability":       {server + "[host.\"http://mirror.invalid\"]\ncapabilities = [\"pull\", \"list\"]\n", "list"},
		"a CA":               {server + "[host.\"https://mirror.invalid\"]\nca = \"/no/such/ca.crt\"\n", "/no/such/ca.crt"},
		"a client's key":     {server + "[host.\"https://mirror.invalid\"]\nclient = [[\"/no/such/client.crt\", \"/no/such/client.key\"]]\n", "/no/such/client.crt"},
	} {
		root := nodeHosts(t, "named.example", map[string]string{"hosts.toml": in.text})
		opts := resolver.Options{HostsDirs: []string{root}}
		r, ref := newResolver(t, "named.example", keyring{credential("a", "alice", "1")}, opts)
		_, _, err := r.Resolve(t.Context(), ref)
		if !errors.Is(err, resolver.ErrHostsConfig) || !strings.Contains(err.Error(), in.says) || !strings.Contains(err.Error(), "named.example") {
			t.Errorf("%s: error %v", name, err)
		}
		if got := reg.Requests(); len(got) > 0 {
			t.Fatalf("%s: the registry was asked: %v", name, got)
		}
	}
	// Once it is mended, it is used.
	root := nodeHosts(t, "named.example", map[string]string{"hosts.toml": server})
	r, ref := newResolver(t, "named.example", nil, resolver.Options{HostsDirs: []string{root}})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Error(err)
	}
}

func TestAllHostsCountAndAreNamed(t *testing.T) {
	mirror := testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(404, "") })
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	for name, in := range map[string]struct {
		upstream string
		status   int // of the refusal, 0 for another error
		says     string
	}{
		"the registry refuses":  {testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(401, "") }).Host(), 401, "401"},
		"the registry forbids":  {testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(403, "") }).Host(), 403, "403"},
		"the registry fails":    {testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(502, "") }).Host(), 0, "502"},
		"the registry is gone":  {gone.Addr().String(), 0, "connection refused"},
		"nobody has it":         {testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(404, "") }).Host(), 404, "404"},
		"its token service ...": {tokenRegistry(t, `Bearer realm="http://HOST/token",service="s"`, refuse(401, ""), refuse(401, "")).Host(), 401, "401"},
	} {
		root := nodeHosts(t, "named.example", map[string]string{"hosts.toml": "server = \"http://" + in.upstream + "\"\n[host.\"http://" + mirror.Host() + "\"]\n"})
		r, ref := newResolver(t, "named.example", nil, resolver.Options{HostsDirs: []string{root}})
		_, _, err := r.Resolve(t.Context(), ref)
		var refused *resolver.RefusedError
		if errors.As(err, &refused) != (in.status != 0) || refused != nil && refused.Status() != in.status {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, want := range []string{mirror.Host() + " 404", in.upstream, in.says} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: the error does not say %q: %v", name, want, err)
			}
		}
	}
}

func TestEachRequestHasALimit(t *testing.T) {
	silent := testenv.Answer{Status: 200, Length: 1 << 20, Stall: true}
	never := func(req *http.Request) testenv.Answer {
		<-req.Context().Done()
		return testenv.Answer{Status: 500}
	}
	for name, script := range map[string]func(string, *http.Request) testenv.Answer{
		"resolving": func(_ string, req *http.Request) testenv.Answer { return never(req) },
		"a token": func(host string, req *http.Request) testenv.Answer {
			if req.URL.Path == "/token" {
				return never(req)
			}
			return refuse(401, `Bearer realm="http://`+host+`/token"`)
		},
		"the body of a token": func(host string, req *http.Request) testenv.Answer {
			if req.URL.Path == "/token" {
				return silent
			}
			return refuse(401, `Bearer realm="http://`+host+`/token"`)
		},
		"a blob": func(_ string, req *http.Request) testenv.Answer {
			if strings.Contains(req.URL.Path, "/blobs/") {
				return never(req)
			}
			return found(req)
		},
		"the body of a blob": func(_ string, req *http.Request) testenv.Answer {
			if strings.Contains(req.URL.Path, "/blobs/") {
				return silent
			}
			return found(req)
		},
	} {
		t.Run(name, func(t *testing.T) {
			reg := testenv.StartFake(t, withHost(script))
			r, ref := newResolver(t, reg.Host(), keyring{credential("a", "alice", "1")}, resolver.Options{StallTimeout: 50 * time.Millisecond})
			_, _, err := r.Resolve(t.Context(), ref)
			if err == nil {
				_, err = fetch(t.Context(), r, ref, layerDesc)
			}
			if !errors.Is(err, resolver.ErrStalled) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestABodyThatTricklesIsStalled(t *testing.T) {
	trickle := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !strings.Contains(req.URL.Path, "/blobs/") {
			serveFound(w, req)
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(layer)))
		for tick := time.NewTicker(50 * time.Millisecond); ; <-tick.C {
			if _, err := w.Write(layer[:1]); err != nil || http.NewResponseController(w).Flush() != nil || req.Context().Err() != nil {
				tick.Stop()
				return
			}
		}
	}))
	defer trickle.Close()
	r, ref := newResolver(t, strings.TrimPrefix(trickle.URL, "http://"), nil, resolver.Options{StallTimeout: time.Second})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if _, err := fetch(t.Context(), r, ref, layerDesc); !errors.Is(err, resolver.ErrStalled) || !strings.Contains(err.Error(), " bytes in ") {
		t.Errorf("error %v", err)
	}
}

// authority signs certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.cert, a.key = template, nil
	cert, key := a.sign(template)
	a.key = key
	parsed, err := x509.ParseCertificate(cert.Certificate[0])
	if err != nil {
		t.Fatal(err)
	}
	a.cert = parsed
	a.pem = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]}))
	return a
}

func (a *authority) sign(template *x509.Certificate) (tls.Certificate, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	signer := a.key
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, key
}

// issue signs a certificate for a name or address.
func (a *authority) issue(name string, until time.Time) tls.Certificate {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: until,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if ip := net.ParseIP(name); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{name}
	}
	cert, _ := a.sign(template)
	return cert
}

func TestTLSIsAsTheNodeSays(t *testing.T) {
	ca := newAuthority(t)
	later, before := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	client := ca.issue("kip", later)
	keyDER, err := x509.MarshalPKCS8PrivateKey(client.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	clientFiles := map[string]string{
		"client.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: client.Certificate[0]})),
		"client.key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})),
	}
	for _, in := range []struct {
		name  string
		cert  tls.Certificate
		wants bool   // a client's certificate
		host  string // in hosts.toml
		files map[string]string
		fails string
	}{
		{"a private CA", ca.issue("127.0.0.1", later), false, "ca = \"ca.crt\"", nil, ""},
		{"an unknown CA", ca.issue("127.0.0.1", later), false, "", nil, "unknown authority"},
		{"not verified", ca.issue("127.0.0.1", later), false, "skip_verify = true", nil, ""},
		{"another name", ca.issue("elsewhere.example", later), false, "ca = \"ca.crt\"", nil, "127.0.0.1"},
		{"expired", ca.issue("127.0.0.1", before), false, "ca = \"ca.crt\"", nil, "expired"},
		{"a client's certificate", ca.issue("127.0.0.1", later), true, "ca = \"ca.crt\"\nclient = [[\"client.crt\", \"client.key\"]]", clientFiles, ""},
		{"no client's certificate", ca.issue("127.0.0.1", later), true, "ca = \"ca.crt\"", nil, "certificate required"},
	} {
		t.Run(in.name, func(t *testing.T) {
			server := httptest.NewUnstartedServer(http.HandlerFunc(serveFound))
			server.Config.ErrorLog = log.New(io.Discard, "", 0)
			server.TLS = &tls.Config{Certificates: []tls.Certificate{in.cert}}
			if in.wants {
				pool := x509.NewCertPool()
				pool.AddCert(ca.cert)
				server.TLS.ClientAuth, server.TLS.ClientCAs = tls.RequireAndVerifyClientCert, pool
			}
			server.StartTLS()
			defer server.Close()
			files := map[string]string{"ca.crt": ca.pem, "hosts.toml": "server = \"" + server.URL + "\"\n[host.\"" + server.URL + "\"]\n" + in.host + "\n"}
			for k, v := range in.files {
				files[k] = v
			}
			root := nodeHosts(t, "named.example", files)
			r, ref := newResolver(t, "named.example", nil, resolver.Options{HostsDirs: []string{root}})
			_, _, err := r.Resolve(t.Context(), ref)
			if (err != nil) != (in.fails != "") || err != nil && !strings.Contains(err.Error(), in.fails) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// raw serves what net/http's own conveniences would put right.
func raw(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

func TestAnswersThatSayLittle(t *testing.T) {
	chunked := func(h http.Header, body []byte) http.HandlerFunc {
		return func(w http.ResponseWriter, req *http.Request) {
			for k, v := range h {
				w.Header()[k] = v
			}
			w.Header().Set("Content-Type", manifestDesc.MediaType)
			w.WriteHeader(200)
			http.NewResponseController(w).Flush() // so there is no length
			if req.Method == "GET" {
				w.Write(body)
			}
		}
	}
	other := digest.FromString("something else")
	for name, in := range map[string]struct {
		h      http.HandlerFunc
		digest digest.Digest
	}{
		"no length":                  {chunked(http.Header{"Docker-Content-Digest": {manifestDesc.Digest.String()}}, manifest), manifestDesc.Digest},
		"no length and no digest":    {chunked(nil, manifest), manifestDesc.Digest},
		"a digest of something else": {chunked(http.Header{"Docker-Content-Digest": {other.String()}}, manifest), manifestDesc.Digest},
		"a digest that is none":      {chunked(http.Header{"Docker-Content-Digest": {"latest"}}, manifest), manifestDesc.Digest},
		"a body that never stops ...": {func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Type", manifestDesc.MediaType)
			for req.Method == "GET" {
				if _, err := w.Write(make([]byte, 1<<20)); err != nil {
					return
				}
			}
			http.NewResponseController(w).Flush()
		}, ""},
	} {
		r, ref := newResolver(t, raw(t, in.h), nil, resolver.Options{})
		_, desc, err := r.Resolve(t.Context(), ref)
		if (err == nil) != (in.digest != "") || desc.Digest != in.digest && err == nil {
			t.Errorf("%s: %v, error %v", name, desc, err)
		}
		if err != nil && !errors.Is(err, resolver.ErrNotAnImage) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestCertificatesAsDockerHasThem(t *testing.T) {
	ca := newAuthority(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(serveFound))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{ca.issue("127.0.0.1", time.Now().Add(time.Hour))}}
	server.StartTLS()
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "https://")
	for _, folder := range []string{host, strings.Replace(host, ":", "_", 1) + "_"} {
		root := nodeHosts(t, folder, map[string]string{"ca.crt": ca.pem})
		r, ref := newResolver(t, host, nil, resolver.Options{HostsDirs: []string{t.TempDir(), root}})
		if _, _, err := r.Resolve(t.Context(), ref); err != nil {
			t.Errorf("%s: %v", folder, err)
		}
	}
}

func TestARealmIsAWholeURL(t *testing.T) {
	for _, realm := range []string{"/token", "token", "", "ftp://127.0.0.1/token"} {
		reg := testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(401, `Bearer realm="`+realm+`",service="s"`) })
		r, ref := newResolver(t, reg.Host(), keyring{credential("a", "alice", "1")}, resolver.Options{NoAnonymousFallback: true})
		if _, _, err := r.Resolve(t.Context(), ref); !errors.Is(err, resolver.ErrRealm) {
			t.Errorf("%q: error %v", realm, err)
		}
		if got := sent(reg.Requests()); len(got) != 1 {
			t.Errorf("%q: requests %q", realm, got)
		}
	}
}
