package resolver_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/transfer"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"

	"example.com/kip/internal/testenv"
	"example.com/kip/resolver"
	"example.com/kip/secrets"
)

// keyring finds the same credentials for every repository.
type keyring []secrets.Credential

func (k keyring) Lookup(context.Context, string) []secrets.Credential { return k }

func (k keyring) NearMisses(string) []secrets.NearMiss { return nil }

func credential(source, user, password string) secrets.Credential {
	return secrets.Credential{Source: source, Key: "reg", Username: user, Password: secrets.NewSecret(password)}
}

func basic(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

var (
	manifest     = []byte(`{"schemaVersion":2}`)
	manifestDesc = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: digest.FromBytes(manifest), Size: int64(len(manifest))}
	layer        = bytes.Repeat([]byte("layer"), 20_000)
	layerDesc    = ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayerGzip, Digest: digest.FromBytes(layer), Size: int64(len(layer))}
)

// found answers for the manifest x/y:1 and its layer.
func found(req *http.Request) testenv.Answer {
	if strings.Contains(req.URL.Path, "/blobs/") {
		return testenv.Answer{Status: 200, Body: string(layer)}
	}
	return testenv.Answer{Status: 200, Body: string(manifest), Header: map[string]string{
		"Content-Type": manifestDesc.MediaType, "Docker-Content-Digest": manifestDesc.Digest.String(),
	}}
}

func refuse(status int, challenge string) testenv.Answer {
	a := testenv.Answer{Status: status}
	if challenge != "" {
		a.Header = map[string]string{"WWW-Authenticate": challenge}
	}
	return a
}

func newResolver(t *testing.T, host string, k keyring, opts resolver.Options) (*resolver.Resolver, string) {
	t.Helper()
	named, err := reference.ParseDockerRef(host + "/x/y:1")
	if err != nil {
		t.Fatal(err)
	}
	r := resolver.New(named, nil, k, opts)
	t.Cleanup(r.Close)
	return r, named.String()
}

func fetch(ctx context.Context, r *resolver.Resolver, ref string, desc ocispec.Descriptor) ([]byte, error) {
	f, err := r.Fetcher(ctx, ref)
	if err != nil {
		return nil, err
	}
	rc, err := f.Fetch(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer rc.Close()
	return io.ReadAll(rc)
}

func TestCredentialsAreTriedInTurn(t *testing.T) {
	alice, bob := credential("a", "alice", "1"), credential("b", "bob", "2")
	byUser := func(answers map[string]testenv.Answer) func(*http.Request) testenv.Answer {
		return func(req *http.Request) testenv.Answer {
			user, _, _ := req.BasicAuth()
			if a, ok := answers[user]; ok {
				return a
			}
			return found(req)
		}
	}
	challenge := refuse(401, `Basic realm="r"`)
	for _, in := range []struct {
		name       string
		keyring    keyring
		answers    map[string]testenv.Answer
		opts       resolver.Options
		credential string
		refused    int
		fails      bool
	}{
		{"none needed, none sent", keyring{alice}, nil, resolver.Options{}, "a/reg", 0, false},
		{"the first works", keyring{alice, bob}, map[string]testenv.Answer{"": challenge}, resolver.Options{}, "a/reg", 0, false},
		{"401, then the second", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": challenge}, resolver.Options{}, "b/reg", 1, false},
		{"403, then the second", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": refuse(403, "")}, resolver.Options{}, "b/reg", 1, false},
		{"404, then the second", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": refuse(404, "")}, resolver.Options{}, "b/reg", 1, false},
		{"404 for an accepted login, then not anonymously", keyring{alice}, map[string]testenv.Answer{"": challenge, "alice": refuse(404, "")}, resolver.Options{}, "a/reg", 1, true},
		{"a rate limit is no reason for another login", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": refuse(429, "")}, resolver.Options{}, "a/reg", 1, true},
		{"nor is a failing server", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": refuse(502, "")}, resolver.Options{}, "a/reg", 1, true},
		{"all refused, the last one tried is named", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": challenge, "bob": challenge}, resolver.Options{}, "b/reg", 3, true},
		{"without the anonymous attempt", keyring{alice, bob}, map[string]testenv.Answer{"": challenge, "alice": challenge, "bob": challenge}, resolver.Options{NoAnonymousFallback: true}, "b/reg", 2, true},
		{"the same login in two secrets is one", keyring{alice, credential("c", "alice", "1")}, map[string]testenv.Answer{"": challenge, "alice": challenge}, resolver.Options{NoAnonymousFallback: true}, "a/reg", 1, true},
		{"none at all is anonymous", nil, nil, resolver.Options{}, "anonymous", 0, false},
		{"none at all, and one is wanted", nil, map[string]testenv.Answer{"": challenge}, resolver.Options{}, "anonymous", 1, true},
	} {
		t.Run(in.name, func(t *testing.T) {
			reg := testenv.StartFake(t, byUser(in.answers))
			r, ref := newResolver(t, reg.Host(), in.keyring, in.opts)
			name, desc, err := r.Resolve(t.Context(), ref)
			if (err != nil) != in.fails {
				t.Fatalf("error %v", err)
			}
			if err == nil && (name != ref || desc.Digest != manifestDesc.Digest) {
				t.Errorf("resolved to %s %s", name, desc.Digest)
			}
			if r.Credential() != in.credential || len(r.Refused()) != in.refused {
				t.Errorf("credential %s after %v", r.Credential(), r.Refused())
			}
		})
	}
}

func TestARefusedLoginIsLeftAloneForAWhile(t *testing.T) {
	now := time.Unix(0, 0)
	logins := &resolver.Logins{MaxBackOff: 3 * time.Minute, Now: func() time.Time { return now }}
	var status atomic.Int32
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		if _, _, ok := req.BasicAuth(); ok && status.Load() == 200 {
			return found(req)
		} else if ok {
			return refuse(int(status.Load()), "")
		}
		return refuse(401, `Basic realm="r"`)
	})
	sent := func() (n int) {
		for _, req := range reg.Requests() {
			if req.Authorization != "" {
				n++
			}
		}
		return n
	}
	for _, step := range []struct {
		name     string
		after    time.Duration
		password string
		status   int32
		repo     string
		sent     bool
	}{
		{"a first try", 0, "1", 401, "x/y", true},
		{"not again at once", 0, "1", 401, "x/y", false},
		{"nor in another repository", 30 * time.Second, "1", 401, "x/z", false},
		{"a changed password at once", 0, "2", 401, "x/y", true},
		{"the first one after a minute", 30 * time.Second, "1", 401, "x/y", true},
		{"then not after one more", time.Minute, "1", 401, "x/y", false},
		{"but after two", time.Minute, "1", 401, "x/y", true},
		{"and at most one interval later", 3 * time.Minute, "1", 200, "x/y", true},
		{"what works is not held back", 0, "1", 403, "x/y", true},
		{"403 is about the repository", 0, "1", 403, "x/y", false},
		{"and no other one", 0, "1", 404, "x/z", true},
		{"404 is about the tag", 0, "1", 404, "x/z", false},
		{"and no other one", 0, "1", 200, "x/z:2", true},
		{"a rate limit is about neither", 0, "1", 429, "x/w", true},
		{"and is no refusal", 0, "1", 200, "x/w", true},
	} {
		now = now.Add(step.after)
		status.Store(step.status)
		named, err := reference.ParseDockerRef(reg.Host() + "/" + step.repo)
		if err != nil {
			t.Fatal(err)
		}
		r := resolver.New(named, nil, keyring{credential("a", "u", step.password)}, resolver.Options{Logins: logins, NoAnonymousFallback: true})
		before := sent()
		_, _, err = r.Resolve(t.Context(), named.String())
		r.Close()
		if got := sent() > before; got != step.sent || (err == nil) != (step.status == 200) {
			t.Errorf("%s: sent %t, want %t, error %v", step.name, got, step.sent, err)
		}
		if !step.sent && !strings.Contains(fmt.Sprint(err), "not tried again before 00:0") {
			t.Errorf("%s: the error does not say until when: %v", step.name, err)
		}
	}
}

func TestASetSendsAWrongPasswordOnce(t *testing.T) {
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer { return refuse(401, `Basic realm="r"`) })
	logins := &resolver.Logins{}
	var pulls sync.WaitGroup
	for range 10 {
		pulls.Go(func() {
			r, ref := newResolver(t, reg.Host(), keyring{credential("a", "u", "p")}, resolver.Options{Logins: logins})
			if _, _, err := r.Resolve(t.Context(), ref); err == nil {
				t.Error("no error")
			}
		})
	}
	pulls.Wait()
	sent := 0
	for _, req := range reg.Requests() {
		if req.Authorization != "" {
			sent++
		}
	}
	if sent != 1 {
		t.Errorf("sent %d times", sent)
	}
}

func TestACredentialThatMayNotFetchGivesWayToTheNext(t *testing.T) {
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		switch user, _, _ := req.BasicAuth(); {
		case user == "":
			return refuse(401, `Basic realm="r"`)
		case user == "alice" && strings.Contains(req.URL.Path, "/blobs/"):
			return refuse(403, "")
		}
		return found(req)
	})
	logins := &resolver.Logins{}
	k := keyring{credential("a", "alice", "1"), credential("b", "bob", "2")}
	r, ref := newResolver(t, reg.Host(), k, resolver.Options{Logins: logins})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || r.Credential() != "a/reg" {
		t.Fatalf("credential %s, error %v", r.Credential(), err)
	}
	_, err := fetch(t.Context(), r, ref, layerDesc)
	if err == nil || !r.Reject(err) {
		t.Fatalf("error %v is not taken for a refusal", err)
	}
	if r.Reject(errors.New("something else")) {
		t.Error("any error is taken for a refusal")
	}
	r, ref = newResolver(t, reg.Host(), k, resolver.Options{Logins: logins})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || r.Credential() != "b/reg" {
		t.Fatalf("credential %s, error %v", r.Credential(), err)
	}
	if _, err := fetch(t.Context(), r, ref, layerDesc); err != nil {
		t.Error(err)
	}
}

func TestATokenServiceWithoutATokenIsARefusal(t *testing.T) {
	reg := testenv.StartFake(t, withHost(func(host string, req *http.Request) testenv.Answer {
		if user, _, ok := req.BasicAuth(); ok && user == "bob" {
			return found(req)
		}
		if req.URL.Path == "/token" {
			return testenv.Answer{Status: 200, Body: `{}`}
		}
		return testenv.Answer{Status: 401, Header: map[string]string{"WWW-Authenticate": `Bearer realm="http://` + host + `/token",service="s"`}}
	}))
	r, ref := newResolver(t, reg.Host(), keyring{credential("a", "alice", "1")}, resolver.Options{})
	_, _, err := r.Resolve(t.Context(), ref)
	var refused *resolver.RefusedError
	if !errors.As(err, &refused) || !strings.Contains(err.Error(), "an answer without a token") || len(refused.Attempts) != 2 {
		t.Errorf("error %v", err)
	}
}

func TestTheWinnerComesFirstNextTime(t *testing.T) {
	challenge := refuse(401, `Basic realm="r"`)
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		if user, _, _ := req.BasicAuth(); user != "bob" {
			return challenge
		}
		return found(req)
	})
	now := time.Unix(0, 0)
	logins := &resolver.Logins{Now: func() time.Time { now = now.Add(time.Hour); return now }} // no back-off holds
	for i, want := range []int{1, 0} {
		r, ref := newResolver(t, reg.Host(), keyring{credential("a", "alice", "1"), credential("b", "bob", "2")}, resolver.Options{Logins: logins})
		if _, _, err := r.Resolve(t.Context(), ref); err != nil || len(r.Refused()) != want || r.Credential() != "b/reg" {
			t.Errorf("pull %d: %d refused, credential %s, error %v", i+1, len(r.Refused()), r.Credential(), err)
		}
	}
}

func TestTokensAreSentAsTheirKindWants(t *testing.T) {
	var form url.Values
	reg := testenv.StartFake(t, withHost(func(host string, req *http.Request) testenv.Answer {
		switch {
		case req.URL.Path == "/token":
			req.ParseForm()
			form = req.Form
			return testenv.Answer{Status: 200, Body: `{"access_token":"access","token":"access"}`}
		case req.Header.Get("Authorization") == "Bearer access", req.Header.Get("Authorization") == "Bearer registry-token":
			return found(req)
		}
		return refuse(401, `Bearer realm="http://`+host+`/token",service="s"`)
	}))
	identity := secrets.Credential{Source: "a", Key: "reg", Password: secrets.NewSecret("refresh")}
	r, ref := newResolver(t, reg.Host(), keyring{identity}, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || form.Get("grant_type") != "refresh_token" || form.Get("refresh_token") != "refresh" {
		t.Errorf("identity token: form %v, error %v", form, err)
	}
	form = nil
	token := secrets.Credential{Source: "a", Key: "reg", Password: secrets.NewSecret("registry-token"), RegistryToken: true}
	r, ref = newResolver(t, reg.Host(), keyring{token}, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || form != nil || r.Credential() != "a/reg" {
		t.Errorf("registry token: form %v, credential %s, error %v", form, r.Credential(), err)
	}
	token.Password = secrets.NewSecret("stale")
	r, ref = newResolver(t, reg.Host(), keyring{token, identity}, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil || len(r.Refused()) != 1 {
		t.Errorf("a stale registry token: refused %v, error %v", r.Refused(), err)
	}
}

func TestAMirrorGetsWhatIsTheMirrors(t *testing.T) {
	var got atomic.Value
	serve := func(req *http.Request) testenv.Answer {
		user, password, ok := req.BasicAuth()
		if !ok {
			return refuse(401, `Basic realm="r"`)
		}
		got.Store(user + ":" + password)
		return found(req)
	}
	for _, in := range []struct {
		name    string
		own     bool // a secret names the mirror
		pass    bool
		want    string
		refused bool
	}{
		{"nothing that no secret names for it", false, false, "", true},
		{"its own credential", true, false, "mirror:m", false},
		{"its own before the upstream's", true, true, "mirror:m", false},
		{"the upstream's where it is passed on", false, true, "up:u", false},
	} {
		t.Run(in.name, func(t *testing.T) {
			got.Store("")
			mirror := testenv.StartFake(t, serve)
			dir := filepath.Join(t.TempDir(), "upstream.example")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			hosts := "server = \"http://" + mirror.Host() + "\"\n"
			if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644); err != nil {
				t.Fatal(err)
			}
			k := byRepository{"upstream.example/x/y": {Source: "s", Key: "up", Username: "up", Password: secrets.NewSecret("u")}}
			if in.own {
				k[mirror.Host()+"/x/y"] = secrets.Credential{Source: "s", Key: "m", Username: "mirror", Password: secrets.NewSecret("m")}
			}
			named, err := reference.ParseDockerRef("upstream.example/x/y:1")
			if err != nil {
				t.Fatal(err)
			}
			r := resolver.New(named, nil, k, resolver.Options{HostsDirs: []string{filepath.Dir(dir)}, PassUpstreamCredentials: in.pass})
			defer r.Close()
			_, _, err = r.Resolve(t.Context(), named.String())
			if got.Load() != in.want || (err != nil) != in.refused {
				t.Errorf("the mirror got %q, error %v", got.Load(), err)
			}
		})
	}
}

// byRepository finds one credential for each repository.
type byRepository map[string]secrets.Credential

func (k byRepository) Lookup(_ context.Context, repository string) []secrets.Credential {
	if c, ok := k[repository]; ok {
		return []secrets.Credential{c}
	}
	return nil
}

func (byRepository) NearMisses(string) []secrets.NearMiss { return nil }

func TestATokenServiceOfNobodysIsNotAsked(t *testing.T) {
	trap := testenv.StartFake(t, func(*http.Request) testenv.Answer { return testenv.Answer{Status: 200, Body: `{"token":"t"}`} })
	for _, realm := range []string{
		"http://localhost:" + port(trap.Host()) + "/token", "http://[::1]:1/token", "http://169.254.169.254/latest", "http://10.0.0.1/token",
		"http://[::ffff:127.0.0.2]:1/", "http://0.0.0.0:1/", "/token", "ftp://x/", "",
	} {
		reg := testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(401, `Bearer realm="`+realm+`",service="s"`) })
		r, ref := newResolver(t, reg.Host(), keyring{credential("a", "u", "p"), credential("b", "v", "q")}, resolver.Options{})
		if _, _, err := r.Resolve(t.Context(), ref); err == nil || realm != "" && !errors.Is(err, resolver.ErrRealm) {
			t.Errorf("%s: error %v", realm, err)
		}
		if n := len(reg.Requests()); n != 1 {
			t.Errorf("%s: %d requests to the registry: no other credential helps", realm, n)
		}
	}
	if seen := trap.Requests(); len(seen) > 0 {
		t.Errorf("the trap saw %v", seen)
	}
}

func port(host string) string { return host[strings.LastIndexByte(host, ':')+1:] }

func TestAPublicImageWithAStaleCredentialIsPulledAnonymously(t *testing.T) {
	reg := testenv.StartFake(t, withHost(func(host string, req *http.Request) testenv.Answer {
		if req.URL.Path == "/token" {
			if user, _, ok := req.BasicAuth(); ok || req.Method == "POST" {
				return testenv.Answer{Status: 401, Body: user}
			}
			return testenv.Answer{Status: 200, Body: `{"token":"anonymous-token"}`}
		}
		if req.Header.Get("Authorization") != "Bearer anonymous-token" {
			return refuse(401, `Bearer realm="http://`+host+`/token",service="s",scope="repository:x/y:pull"`)
		}
		return found(req)
	}))
	r, ref := newResolver(t, reg.Host(), keyring{credential("old", "u", "p")}, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	if r.Credential() != resolver.Anonymous || len(r.Refused()) != 1 || r.Refused()[0].Credential != "old/reg" || r.Refused()[0].Status != 401 {
		t.Errorf("credential %s after %+v", r.Credential(), r.Refused())
	}
}

// withHost gives a script the host that the request was for.
func withHost(script func(host string, req *http.Request) testenv.Answer) func(*http.Request) testenv.Answer {
	return func(req *http.Request) testenv.Answer { return script(req.Host, req) }
}

func TestARefusalSaysWhoAskedAndWhatWasAnswered(t *testing.T) {
	denied := testenv.Answer{Status: 403, Body: `{"errors":[{"code":"DENIED","message":"requested access\nis denied"}]}`}
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		if _, _, ok := req.BasicAuth(); ok {
			return denied
		}
		return refuse(401, `Basic realm="r"`)
	})
	r, ref := newResolver(t, reg.Host(), keyring{credential("team", "u", "p")}, resolver.Options{})
	_, _, err := r.Resolve(t.Context(), ref)
	var refused *resolver.RefusedError
	if !errors.As(err, &refused) || refused.Status() != 403 { // what the login got
		t.Fatalf("error %v", err)
	}
	want := fmt.Sprintf("registry %[1]s refused repository x/y: credential team/reg (user \"u\") got 403 Forbidden from http://%[1]s/v2/x/y/manifests/1 "+
		"(DENIED: requested access is denied); then anonymous got 401 Unauthorized", reg.Host())
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
}

func TestARefusalHintsAtWhatIsKnown(t *testing.T) {
	reg := testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(401, `Basic realm="r"`) })
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	for _, in := range []struct {
		name string
		c    secrets.Credential
		want string
	}{
		{"an old token of ECR", secrets.Credential{Username: "AWS", Password: secrets.NewSecret("p"), Modified: ago(13 * time.Hour), Content: "0123abcd"},
			`(user "AWS", written 13h ago, content 0123abcd) got 401 Unauthorized (a token of Amazon ECR lives for 12 hours)`},
		{"a fresh one", secrets.Credential{Username: "AWS", Password: secrets.NewSecret("p"), Modified: ago(61 * time.Minute), Content: "0123abcd"},
			`(user "AWS", written 1h ago, content 0123abcd) got 401 Unauthorized`},
		{"one of Google", secrets.Credential{Username: "oauth2accesstoken", Password: secrets.NewSecret("p"), Modified: ago(72 * time.Hour), Content: "x"},
			`written 3d ago, content x) got 401 Unauthorized (an access token of Google lives for an hour)`},
		{"a job's token", secrets.Credential{Username: "gitlab-ci-token", Password: secrets.NewSecret("p")}, "(a GitLab job's token ends with the job: use a deploy token)"},
		{"an empty password", secrets.Credential{Username: "u"}, "(its password is empty, so the request was anonymous)"},
		{"a token as user", secrets.Credential{Username: "eyJcanary", Password: secrets.NewSecret("x-oauth-basic")}, "(a token as user) got 401"},
		{"an identity token", secrets.Credential{Password: secrets.NewSecret("t")}, "(identitytoken) got 401"},
	} {
		t.Run(in.name, func(t *testing.T) {
			r, ref := newResolver(t, reg.Host(), keyring{in.c}, resolver.Options{NoAnonymousFallback: true})
			_, _, err := r.Resolve(t.Context(), ref)
			if err == nil || !strings.HasSuffix(err.Error(), in.want) && !strings.Contains(err.Error(), in.want) || strings.Contains(err.Error(), "canary") {
				t.Errorf("got  %v\nwant %s", err, in.want)
			}
		})
	}
}

func TestAnAnonymousRefusalNamesNearMisses(t *testing.T) {
	reg := testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(401, `Basic realm="r"`) })
	dir := t.TempDir()
	testenv.MountSecret(t, dir, "harbor", map[string]testenv.Login{"127.0.0.1": {Username: "u", Password: "canary"}})
	store := secrets.NewStore(secrets.Loader{Dirs: []string{dir}}, nil)
	store.Refresh()
	named, err := reference.ParseDockerRef(reg.Host() + "/x/y:1")
	if err != nil {
		t.Fatal(err)
	}
	r := resolver.New(named, nil, store, resolver.Options{})
	_, _, err = r.Resolve(t.Context(), named.String())
	want := fmt.Sprintf(`registry %[1]s refused repository x/y: anonymous got 401 Unauthorized; no secret has a credential for %[1]s/x/y; `+
		`key "127.0.0.1" of secret harbor does not match: the port is none, the image's is %[2]s`, reg.Host(), port(reg.Host()))
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestABasicLoginIsRefusedOnce(t *testing.T) {
	reg := testenv.StartFake(t, func(*http.Request) testenv.Answer { return refuse(401, `Basic realm="r"`) })
	r, ref := newResolver(t, reg.Host(), keyring{credential("a", "u", "p")}, resolver.Options{NoAnonymousFallback: true})
	if _, _, err := r.Resolve(t.Context(), ref); err == nil {
		t.Fatal("no error")
	}
	logins := 0
	for _, req := range reg.Requests() {
		if req.Authorization != "" {
			logins++
		}
	}
	if logins != 1 {
		t.Errorf("%d failed logins", logins)
	}
}

func TestOneTokenServesAPull(t *testing.T) {
	reg := testenv.StartFake(t, withHost(func(host string, req *http.Request) testenv.Answer {
		if req.URL.Path == "/token" {
			return testenv.Answer{Status: 200, Body: `{"access_token":"t","token":"t"}`}
		}
		if req.Header.Get("Authorization") != "Bearer t" {
			return refuse(401, `Bearer realm="http://`+host+`/token",service="s"`)
		}
		return found(req)
	}))
	r, ref := newResolver(t, reg.Host(), keyring{credential("a", "u", "p")}, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	for _, desc := range []ocispec.Descriptor{manifestDesc, layerDesc} {
		if b, err := fetch(t.Context(), r, ref, desc); err != nil || digest.FromBytes(b) != desc.Digest {
			t.Fatalf("fetched %d bytes, error %v", len(b), err)
		}
	}
	tokens := 0
	for _, req := range reg.Requests() {
		if req.Path == "/token" {
			tokens++
		}
	}
	if tokens != 1 || r.Bytes() != manifestDesc.Size+layerDesc.Size {
		t.Errorf("%d tokens, %d bytes", tokens, r.Bytes())
	}
}

func TestALoginGoesToItsRegistryOnly(t *testing.T) {
	login := basic("u", "canary")
	for _, scheme := range []string{"", "Basic", "Bearer"} {
		t.Run("a redirect whose target asks for "+scheme, func(t *testing.T) {
			var leaks atomic.Int32
			target := testenv.StartFake(t, withHost(func(host string, req *http.Request) testenv.Answer {
				body, _ := io.ReadAll(req.Body)
				if strings.Contains(string(body), "canary") || strings.HasPrefix(req.Header.Get("Authorization"), "Basic ") {
					leaks.Add(1)
				}
				switch {
				case req.URL.Path == "/token":
					return testenv.Answer{Status: 200, Body: `{"token":"t","access_token":"t"}`}
				case scheme != "" && req.Header.Get("Authorization") == "":
					return refuse(401, scheme+` realm="http://`+host+`/token"`)
				}
				return found(req)
			}))
			reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
				if req.Header.Get("Authorization") != login {
					return refuse(401, `Basic realm="r"`)
				}
				if strings.Contains(req.URL.Path, "/blobs/") {
					return testenv.Answer{Status: 307, Header: map[string]string{"Location": "http://" + target.Host() + "/blobs/?X-Signature=canary"}}
				}
				return found(req)
			})
			r, ref := newResolver(t, reg.Host(), keyring{credential("a", "u", "canary")}, resolver.Options{})
			if _, _, err := r.Resolve(t.Context(), ref); err != nil {
				t.Fatal(err)
			}
			b, err := fetch(t.Context(), r, ref, layerDesc)
			if scheme == "" && (err != nil || !bytes.Equal(b, layer)) {
				t.Errorf("fetched %d bytes, error %v", len(b), err)
			}
			if scheme != "" && (err == nil || strings.Contains(resolver.Sanitize(err.Error()), "canary")) {
				t.Errorf("error %v", err)
			}
			if len(target.Requests()) == 0 || leaks.Load() > 0 {
				t.Errorf("the target got a login in %d of its requests %v", leaks.Load(), target.Requests())
			}
		})
	}
}

func TestALayersOwnAddressesAreNotFollowed(t *testing.T) {
	other := testenv.StartFake(t, found)
	reg := testenv.StartFake(t, found)
	r, ref := newResolver(t, reg.Host(), nil, resolver.Options{})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	desc := layerDesc
	desc.URLs = []string{"http://" + other.Host() + "/blobs/x"}
	if _, err := fetch(t.Context(), r, ref, desc); err != nil {
		t.Fatal(err)
	}
	if seen := other.Requests(); len(seen) > 0 {
		t.Errorf("requests %v", seen)
	}
}

func TestAnAnswerThatStopsEndsTheFetch(t *testing.T) {
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		a := found(req)
		if strings.Contains(req.URL.Path, "/blobs/") {
			a.Length, a.Body, a.Stall = len(a.Body), a.Body[:1000], true
		}
		return a
	})
	r, ref := newResolver(t, reg.Host(), nil, resolver.Options{StallTimeout: 500 * time.Millisecond})
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	b, err := fetch(t.Context(), r, ref, layerDesc)
	if !errors.Is(err, resolver.ErrStalled) || len(b) != 1000 {
		t.Errorf("%d bytes, error %v", len(b), err)
	}
}

func TestAKnownImageAsksTheRegistryOnlyToFetch(t *testing.T) {
	reg := testenv.StartFake(t, found)
	named, err := reference.ParseDockerRef(reg.Host() + "/x/y:1")
	if err != nil {
		t.Fatal(err)
	}
	r := resolver.New(named, &manifestDesc, keyring{credential("a", "u", "p")}, resolver.Options{})
	defer r.Close()
	if _, desc, err := r.Resolve(t.Context(), named.String()); err != nil || desc.Digest != manifestDesc.Digest {
		t.Fatalf("descriptor %v, error %v", desc, err)
	}
	if seen := reg.Requests(); len(seen) > 0 || r.Credential() != "" {
		t.Errorf("requests %v, credential %q", seen, r.Credential())
	}
	if _, err := fetch(t.Context(), r, named.String(), layerDesc); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, req := range reg.Requests() {
		got = append(got, req.Method+" "+req.Path)
	}
	want := []string{"HEAD /v2/x/y/manifests/" + manifestDesc.Digest.String(), "GET /v2/x/y/blobs/" + layerDesc.Digest.String()}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
}

func TestAFetchCanBeTakenUpInTheMiddle(t *testing.T) {
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		a := found(req)
		if v := req.Header.Get("Range"); v != "" {
			var from int
			fmt.Sscanf(v, "bytes=%d-", &from)
			a.Status, a.Body = 206, a.Body[from:]
			a.Header = map[string]string{"Content-Range": fmt.Sprintf("bytes %d-%d/%d", from, len(layer)-1, len(layer))}
		}
		return a
	})
	r, ref := newResolver(t, reg.Host(), nil, resolver.Options{})
	f, err := r.Fetcher(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	rc, err := f.Fetch(t.Context(), layerDesc)
	if err != nil {
		t.Fatal(err)
	}
	defer rc.Close()
	seeker, ok := rc.(io.Seeker)
	if !ok {
		t.Fatal("what is fetched cannot be resumed")
	}
	if _, err := seeker.Seek(60_000, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(rc); err != nil || !bytes.Equal(b, layer[60_000:]) || r.Bytes() != int64(len(b)) {
		t.Errorf("%d bytes, %d counted, error %v", len(b), r.Bytes(), err)
	}
}

func TestDownloadsKeepToTheLimit(t *testing.T) {
	var mu sync.Mutex
	var active, most int
	reg := testenv.StartFake(t, func(req *http.Request) testenv.Answer {
		if !strings.Contains(req.URL.Path, "/blobs/") {
			return found(req)
		}
		mu.Lock()
		active++
		most = max(most, active)
		mu.Unlock()
		time.Sleep(10 * time.Millisecond) // time for a second one, if there is no limit
		mu.Lock()
		active--
		mu.Unlock()
		return found(req)
	})
	r, ref := newResolver(t, reg.Host(), nil, resolver.Options{})
	r.SetOptions(transfer.WithDownloadLimiter(semaphore.NewWeighted(1)))
	if _, _, err := r.Resolve(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	var fetches sync.WaitGroup
	for range 5 {
		fetches.Go(func() {
			if _, err := fetch(t.Context(), r, ref, layerDesc); err != nil {
				t.Error(err)
			}
		})
	}
	fetches.Wait()
	if most != 1 {
		t.Errorf("%d downloads at once", most)
	}
}

func TestKipNeverPushes(t *testing.T) {
	r, ref := newResolver(t, "reg.example.com", nil, resolver.Options{})
	if _, err := r.Pusher(t.Context(), ref); !errdefs.IsNotImplemented(err) {
		t.Errorf("error %v", err)
	}
}

func TestSanitizeTakesSecretsOutOfAText(t *testing.T) {
	for _, in := range []struct{ name, text, want string }{
		{"a signed query", `Get "https://s3.example.com/b?X-Amz-Signature=canary&x=1": EOF`, `Get "https://s3.example.com/b": EOF`},
		{"a user and a password", "proxy http://user:canary@proxy:3128/x failed", "proxy http://proxy:3128/x failed"},
		{"a password with a slash and an @", "http://user:can@ary@proxy/", "http://proxy/"},
		{"a relative address", `Get "/blob?X-Amz-Signature=canary": stopped`, `Get "/blob": stopped`},
		{"another scheme", `Get "ftp://x:canary@h/x?sig=canary": no`, `Get "ftp://h/x": no`},
		{"lines", "one\ntwo\x1b[31m\x00", "one two [31m"},
		{"no URL at all", "plain text? yes", "plain text? yes"},
		{"upper case", "HTTPS://h/p?sig=canary", "HTTPS://h/p"},
		{"a fragment", "https://h/p#canary", "https://h/p"},
	} {
		t.Run(in.name, func(t *testing.T) {
			if got := resolver.Sanitize(in.text); got != in.want {
				t.Errorf("got %q, want %q", got, in.want)
			}
		})
	}
	if long := resolver.Sanitize(strings.Repeat("é", 10_000)); len(long) > 2100 {
		t.Errorf("%d bytes", len(long))
	}
}
