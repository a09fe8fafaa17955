package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/pkg/namespaces"

	"example.com/kip/internal/testenv"
	"example.com/kip/puller"
	"example.com/kip/puller/agent"
)

// TestMain keeps the variables of the machine away from the tests.
func TestMain(m *testing.M) {
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "KIP_") || strings.HasPrefix(name, "CONTAINERD_") {
			os.Unsetenv(name)
		}
	}
	os.Exit(m.Run())
}

// outcome is what a run of kip leaves.
type outcome struct {
	status         int
	stdout, stderr string
}

func (o outcome) String() string {
	return fmt.Sprintf("status %d\nstdout: %s\nstderr: %s", o.status, o.stdout, o.stderr)
}

func kip(t *testing.T, args ...string) outcome {
	t.Helper()
	return kipIn(t.Context(), args...)
}

func kipIn(ctx context.Context, args ...string) outcome {
	var stdout, stderr bytes.Buffer
	status := run(ctx, append([]string{"kip"}, args...), &stdout, &stderr)
	return outcome{status, stdout.String(), stderr.String()}
}

// report reads kip's JSON, which must be one document of known fields.
func (o outcome) report(t *testing.T) agent.Report {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(o.stdout))
	d.DisallowUnknownFields()
	var r agent.Report
	if err := d.Decode(&r); err != nil || d.More() {
		t.Fatalf("standard output is not one JSON report: %v\n%s", err, o)
	}
	return r
}

// cluster is a node, a registry with a private and a public part, and a gateway.
type cluster struct {
	node    *testenv.Containerd
	reg     *testenv.Registry
	gateway *testenv.Gateway
	images  *testenv.Images
	secrets string
	refs    []string // three private ones and one that is public
	kernels []testenv.Image
}

const gatewayToken = "canary-gateway-token"

func startCluster(t *testing.T, version string) *cluster {
	t.Helper()
	testenv.NeedRoot(t)
	c := &cluster{
		node:    testenv.StartContainerd(t, testenv.Config{Version: version}),
		reg:     testenv.StartRegistry(t, testenv.Bearer, map[string]testenv.User{"team": {Password: "canary/pass+word", Prefixes: []string{"team/"}}}),
		gateway: testenv.StartGateway(t, gatewayToken),
		images:  testenv.NewImages(t),
		secrets: filepath.Join(testenv.Dir(t), "secrets"),
	}
	c.kernels = c.images.Kernels(4)
	specs := map[string]json.RawMessage{
		"broken": json.RawMessage(`{"spec":{"metadata":{"process_proxy":"?"}}}`),
		"local":  json.RawMessage(`{"name":"local","spec":{"argv":["python"],"metadata":{}}}`),
	}
	for i, name := range []string{"team/kernel-py:1", "team/kernel-r:1", "team/kernel-scala:1", "public/kernel:1"} {
		ref := c.reg.Push(c.images, c.kernels[i], name)
		c.refs = append(c.refs, ref)
		specs[name] = testenv.Kernelspec(name, ref)
	}
	c.gateway.SetKernelspecs(specs)
	c.login(t, "canary/pass+word")
	c.reg.Forget()
	t.Setenv("CONTAINERD_ADDRESS", "unix://"+c.node.Address)
	t.Setenv("KIP_SECRETS_DIR", c.secrets)
	t.Setenv("KIP_GATEWAY_HOST", c.gateway.URL)
	t.Setenv("KIP_AUTH_TOKEN", gatewayToken)
	return c
}

func (c *cluster) login(t *testing.T, password string) {
	t.Helper()
	testenv.MountSecret(t, c.secrets, "team-pull", map[string]testenv.Login{c.reg.Host: {Username: "team", Password: password}})
}

func TestKernelspecsBecomeImagesThatTheKubeletSees(t *testing.T) {
	for _, version := range testenv.Smoke() {
		t.Run("containerd "+version, func(t *testing.T) {
			c := startCluster(t, version)
			got := kip(t, "run", "--once", "-o", "json")
			r := got.report(t)
			if got.status != exitOK || r.Version != 1 || r.Present != 4 || r.Failed != 0 || r.Skipped != 0 || len(r.Images) != 4 {
				t.Fatal(got)
			}
			if len(r.Sources) != 1 || r.Sources[0] != (agent.SourceReport{Name: "gateway", State: "ok", Images: 4}) {
				t.Errorf("sources %+v", r.Sources)
			}
			if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], `"broken"`) {
				t.Errorf("warnings %q", r.Warnings)
			}
			for _, img := range r.Images {
				i := slices.Index(c.refs, img.Image)
				if i < 0 || img.Action != puller.Pulled || img.Source != "gateway" || img.Credential != "team-pull/"+c.reg.Host || img.Attempts != 1 || img.Bytes == 0 {
					t.Errorf("image %+v", img)
					continue
				}
				id, digestName := c.kernels[i].ID.String(), strings.TrimSuffix(img.Image, ":1")+"@"+c.kernels[i].Manifest.Digest.String()
				for _, name := range []string{img.Image, digestName, id} {
					s := c.node.ImageStatus(name)
					if s == nil || s.Id != id || !slices.Equal(s.RepoTags, []string{img.Image}) || !slices.Equal(s.RepoDigests, []string{digestName}) {
						t.Errorf("CRI's ImageStatus of %s: %v", name, s)
					}
				}
			}
			if list := c.node.ListImages(); len(list) != 4 {
				t.Errorf("CRI lists %d images", len(list))
			}

			c.reg.Forget()
			got = kip(t, "run", "--once", "-o", "json")
			for _, img := range got.report(t).Images {
				if img.State != puller.Present || img.Action != puller.None || img.Attempts != 0 || img.Credential != "" {
					t.Errorf("second run: %+v", img)
				}
			}
			if seen := c.reg.Requests(); got.status != exitOK || len(seen) > 0 {
				t.Errorf("second run: requests %v, %s", seen, got)
			}
		})
	}
}

func TestAWrongPasswordFailsItsImagesOnly(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	testenv.MountSecret(t, c.secrets, "team-pull", map[string]testenv.Login{c.reg.Host + "/team/kernel-r": {Username: "team", Password: "canary-wrong"}})
	testenv.MountSecret(t, c.secrets, "team-rest", map[string]testenv.Login{
		c.reg.Host + "/team/kernel-py": {Username: "team", Password: "canary/pass+word"}, c.reg.Host + "/team/kernel-scala": {Username: "team", Password: "canary/pass+word"},
	})
	got := kip(t, "--debug", "run", "--once", "-o", "json")
	r := got.report(t)
	if got.status != exitFailed || r.Present != 3 || r.Failed != 1 {
		t.Fatal(got)
	}
	for _, img := range r.Images {
		if img.State == puller.Present {
			continue
		}
		if img.Image != c.refs[1] || img.Reason != puller.Unauthorized || img.Credential != "team-pull/"+c.reg.Host+"/team/kernel-r" {
			t.Errorf("failed image %+v", img)
		}
		for _, want := range []string{"registry " + c.reg.Host, "repository team/kernel-r", img.Credential} {
			if !strings.Contains(img.Message, want) {
				t.Errorf("the message does not name %q: %s", want, img.Message)
			}
		}
	}
	text := kip(t, "run", "--once")
	if !strings.Contains(text.stdout, "3 present, 1 failed") || !strings.Contains(text.stdout, "Unauthorized: registry "+c.reg.Host) {
		t.Error(text)
	}
}

func TestTeamsOfOneRegistryDoNotUseEachOthersLogins(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	reg := testenv.StartRegistry(t, testenv.Bearer, map[string]testenv.User{
		"a": {Password: "canary-a", Prefixes: []string{"team-a/"}}, "b": {Password: "canary-b", Prefixes: []string{"team-b/"}},
	})
	var refs []string
	for i, name := range []string{"team-a/x:1", "team-b/x:1", "team-a/y:1", "team-b/y:1"} {
		refs = append(refs, reg.Push(c.images, c.kernels[i], name))
	}
	testenv.MountSecret(t, c.secrets, "team-a", map[string]testenv.Login{reg.Host + "/team-a": {Username: "a", Password: "canary-a"}})
	testenv.MountSecret(t, c.secrets, "team-b", map[string]testenv.Login{reg.Host + "/team-b": {Username: "b", Password: "canary-b"}})
	reg.Forget()
	got := kip(t, append([]string{"pull", "-o", "json"}, refs...)...)
	if r := got.report(t); got.status != exitOK || r.Present != 4 {
		t.Fatal(got)
	}
	for _, grant := range reg.Grants() {
		if want := "team-" + grant.User + "/"; !strings.HasPrefix(grant.Repository, want) {
			t.Errorf("user %q asked for %s", grant.User, grant.Repository)
		}
	}
	if n := len(reg.Grants()); n != 4 {
		t.Errorf("%d tokens for 4 images", n)
	}
}

func TestASecretIsRotatedWhileTheAgentRuns(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	c.gateway.SetKernels(map[string]string{"a": c.refs[0]})
	c.login(t, "canary-old")
	t.Setenv("KIP_INTERVAL", "1")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	reports := newReports()
	ended := make(chan int)
	go func() { ended <- run(ctx, []string{"kip", "run", "-o", "json"}, reports, &lines{}) }()
	if r := reports.next(t); r.Failed != 1 || r.Images[0].Reason != puller.Unauthorized {
		t.Errorf("with the old password: %+v", r)
	}
	c.login(t, "canary/pass+word")
	reports.await(t, func(r agent.Report) bool { return r.Present == 1 })
	stop()
	<-ended
	if failed := c.reg.FailedLogins(); failed > 2 {
		t.Errorf("%d failed logins: the old password was sent again", failed)
	}
}

func TestTheSecondSecretIsUsedWhenTheFirstIsRevoked(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	testenv.MountSecret(t, c.secrets, "a-revoked", map[string]testenv.Login{c.reg.Host: {Username: "team", Password: "canary-wrong"}})
	got := kip(t, "run", "--once", "-o", "json")
	r := got.report(t)
	if got.status != exitOK || r.Present != 4 {
		t.Fatal(got)
	}
	for _, img := range r.Images {
		if img.Credential != "team-pull/"+c.reg.Host {
			t.Errorf("%s: credential %s", img.Image, img.Credential)
		}
	}
	if failed := c.reg.FailedLogins(); failed > 2 { // the OAuth2 POST and the GET that follows it
		t.Errorf("%d failed logins for four images", failed)
	}
}

func TestAPublicImageWithAStalePasswordIsPulledWithAWarning(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	c.login(t, "canary-wrong")
	got := kip(t, "pull", "-o", "json", c.refs[3])
	r := got.report(t)
	want := c.refs[3] + ": credential team-pull/" + c.reg.Host + ` (user "team", written `
	if got.status != exitOK || r.Images[0].Credential != "anonymous" || len(r.Warnings) != 1 || !strings.HasPrefix(r.Warnings[0], want) {
		t.Error(got)
	}
	if got := kip(t, "pull", "--anonymous-fallback=false", c.refs[3]); got.status != exitFailed {
		t.Error(got)
	}
}

func TestNoSecretIsInAnyOutput(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	canaries := []string{"canary/pass+word", gatewayToken, "canary-wrong", "canary-broken", "canary-registry-header"}
	testenv.MountSecret(t, c.secrets, "a-wrong", map[string]testenv.Login{c.reg.Host: {Username: "team", Password: "canary-wrong"}})
	testenv.MountFile(t, c.secrets, "b-broken", ".dockerconfigjson", []byte(`{"auths":{"r.io":{"auth":"canary-broken"},"s.io":{"password":canary-broken}`))
	testenv.MountFile(t, c.secrets, "c-no-colon", ".dockerconfigjson", []byte(`{"auths":{"r.io":{"auth":"`+base64.StdEncoding.EncodeToString([]byte("canary-broken"))+`"}}}`))
	// A registry that answers with what should not be repeated: redirects of
	// manifests and blobs to signed addresses, and secrets in headers and bodies.
	signed := httpServer(t, func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("X-Secret", "canary-registry-header")
		if strings.HasSuffix(req.URL.Path, "/manifests/blobs") || strings.Contains(req.URL.Path, "/manifests/sha256:") {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			fmt.Fprintf(w, `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:%064d","size":9},"layers":[]}`, 1)
			return
		}
		if strings.HasPrefix(req.URL.Path, "/v2/") && req.URL.RawQuery == "" {
			http.Redirect(w, req, "/v2/elsewhere?X-Amz-Signature=canary-registry-header", http.StatusTemporaryRedirect)
			return
		}
		http.Error(w, "no", http.StatusInternalServerError)
	})
	t.Setenv("KIP_NUM_RETRIES", "1")
	for _, args := range [][]string{
		{"--debug", "run", "--once"},
		{"--log-level", "DEBUG", "--log-format", "json", "run", "--once", "-o", "json"},
		{"--debug", "pull", c.refs[0], signed + "/x/y:1", signed + "/x/y:blobs"},
		{"--debug", "pull", "--secrets-dir", t.TempDir(), c.refs[0]},
		{"--debug", "run", "--once", "--gateway-host", "http://user:" + gatewayToken + "@" + strings.TrimPrefix(c.gateway.URL, "http://")},
		{"--debug", "run", "--once", "--gateway-host", c.gateway.URL + "?token=" + gatewayToken},
		{"--debug", "run", "--once", "--auth-token", "canary-wrong"},
	} {
		got := kip(t, args...)
		all := got.stdout + got.stderr
		if !strings.Contains(all, "level=DEBUG") && !strings.Contains(all, `"level":"DEBUG"`) && got.status != exitUsage {
			t.Errorf("%q logged nothing at the debug level: %s", args, got)
		}
		for _, canary := range canaries {
			for _, form := range []string{canary, url.QueryEscape(canary), base64.StdEncoding.EncodeToString([]byte("team:" + canary)), base64.StdEncoding.EncodeToString([]byte(canary))} {
				if i := strings.Index(all, form); i >= 0 {
					t.Errorf("%q shows %q: ...%s", args, form, all[max(0, i-200):i+len(form)])
				}
			}
		}
	}
}

// httpServer serves on loopback and returns its address without a scheme.
func httpServer(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h}
	var wg sync.WaitGroup
	wg.Go(func() { s.Serve(l) })
	t.Cleanup(func() { s.Close(); wg.Wait() })
	return l.Addr().String()
}

func TestBadInputIsOneClearLine(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	answer := func(body string) func(*testing.T) {
		return func(*testing.T) { c.gateway.SetAnswer([]byte(body)) }
	}
	env := func(name, value string) func(*testing.T) {
		return func(t *testing.T) { t.Setenv(name, value) }
	}
	once := []string{"run", "--once"}
	for _, in := range []struct {
		name   string
		given  func(*testing.T)
		args   []string
		status int
		line   string // in one line of all output
	}{
		{"an empty variable is none", func(t *testing.T) {
			t.Setenv("CONTAINERD_ADDRESS", "")
			t.Setenv("KIP_CRI_ENDPOINT", "unix://"+c.node.Address)
			t.Setenv("KIP_NUM_RETRIES", "")
		}, once, exitOK, "1 present, 0 failed"},
		{"numbers with spaces", func(t *testing.T) {
			t.Setenv("KIP_NUM_PULLERS", " 2 ")
			t.Setenv("KIP_INTERVAL", " 300 ")
			t.Setenv("KIP_VALIDATE_CERT", " true ")
			t.Setenv("KIP_IMAGE_FETCHER", "CombinedImagesFetcher")
			t.Setenv("KIP_INTERNAL_FETCHERS", "KernelSpecsFetcher, KernelSpecsFetcher,")
		}, once, exitOK, "1 present, 0 failed"},
		{"a default registry with a scheme", env("KIP_DEFAULT_CONTAINER_REGISTRY", "https://reg.example/"), once, exitUsage, "without a scheme"},
		{"a tag that is not there", env("KIP_IMAGES", c.refs[0]+"-typo"), []string{"run", "--once", "--image-fetcher", "StaticListFetcher"}, exitFailed, "-typo: NotFound: "},
		{"no socket", env("CONTAINERD_ADDRESS", "/nowhere/containerd.sock"), once, exitUnreachable, "containerd cannot be reached at /nowhere/containerd.sock: dial unix /nowhere/containerd.sock: connect: no such file or directory"},
		{"a socket that nobody serves", env("CONTAINERD_ADDRESS", "/etc/passwd"), once, exitUnreachable, "containerd cannot be reached at /etc/passwd: dial unix /etc/passwd: connect: connection refused"},
		{"a docker endpoint", env("CONTAINERD_ADDRESS", "unix:///var/run/docker.sock"), once, exitUsage, "kip works with containerd only"},
		{"an endpoint of a docker's CRI", env("CONTAINERD_ADDRESS", "unix:///run/cri-dockerd.sock"), once, exitUsage, "kip works with containerd only"},
		{"a socket below docker's folder", env("CONTAINERD_ADDRESS", "/run/docker/containerd/containerd.sock"), once, exitUnreachable, "no such file or directory"},
		{"a TCP endpoint", env("CONTAINERD_ADDRESS", "tcp://127.0.0.1:1"), once, exitUsage, "must be the path of a socket"},
		{"gateway down", env("KIP_GATEWAY_HOST", "http://127.0.0.1:1"), once, exitFailed, "source gateway failed: GET http://127.0.0.1:1/api/kernelspecs: dial tcp 127.0.0.1:1: connect: connection refused"},
		{"gateway refuses the token", env("KIP_AUTH_TOKEN", "other"), once, exitFailed, "answered 403 Forbidden: the token was refused"},
		{"gateway wants a token", env("KIP_AUTH_TOKEN", ""), once, exitFailed, "answered 403 Forbidden: no token was given (KIP_AUTH_TOKEN)"},
		{"gateway answers HTML", answer("<html><body>Jupyter</body></html>"), once, exitFailed, "answered HTML, not JSON: is this the gateway's address?"},
		{"gateway answers half a JSON", answer(`{"kernelspecs":{"a":{"spec":{"metada`), once, exitFailed, "the answer ends in the middle"},
		{"gateway answers nothing", answer(""), once, exitFailed, "the answer is empty"},
		{"gateway answers other JSON", answer(`{"message":"hello"}`), once, exitFailed, "the answer is JSON without a kernelspecs object"},
		{"gateway answers a list", answer(`[1,2]`), once, exitFailed, "the answer is JSON without a kernelspecs object"},
		{"gateway lists no kernel", answer(`{"kernelspecs":{}}`), once, exitOK, "warning: source gateway: the gateway lists no kernelspecs"},
		{"an address that is no URL", env("KIP_GATEWAY_HOST", "gateway:8888"), once, exitUsage, "(KIP_GATEWAY_HOST): the gateway's host is not an absolute http or https URL"},
		{"an empty image list", env("KIP_IMAGES", ""), []string{"run", "--once", "--image-fetcher", "StaticListFetcher"}, exitOK, "warning: no image is wanted"},
		{"an image list of commas", env("KIP_IMAGES", " , ,"), []string{"run", "--once", "--image-fetcher", "StaticListFetcher"}, exitOK, "warning: no image is wanted"},
		{"an invalid reference", env("KIP_IMAGES", "https://reg/x:1"), []string{"run", "--once", "--image-fetcher", "StaticListFetcher"}, exitFailed, `https://reg/x:1: InvalidReference: "https://reg/x:1" is no image reference: invalid reference format`},
		{"a reference in capitals", nil, []string{"pull", "myDockerHub/myKernel:1"}, exitFailed, "InvalidReference: "},
		{"no reference", nil, []string{"pull"}, exitUsage, "kip pull needs an image reference"},
		{"an unknown command", nil, []string{"pul"}, exitUsage, `unknown command "pul"`},
		{"an unknown command below images", nil, []string{"images", "burn"}, exitUsage, `unknown command "burn"`},
		{"an unknown flag", nil, []string{"pull", "--what", "x"}, exitUsage, "flag provided but not defined: -what"},
		{"a flag after the arguments", nil, []string{"pull", "x", "-o", "json"}, exitUsage, `"-o" stands after the first argument: flags go before arguments`},
		{"an empty reference", nil, []string{"pull", " "}, exitUsage, "an argument of kip pull is empty"},
		{"an argument of run", nil, []string{"run", "now"}, exitUsage, `kip run takes no argument, but got "now"`},
		{"an unknown output", nil, []string{"pull", "-o", "yaml", "x"}, exitUsage, `--output is "yaml": it must be one of text, json`},
		{"an unknown log level", env("KIP_LOG_LEVEL", "LOUD"), once, exitUsage, `(KIP_LOG_LEVEL) is "LOUD"`},
		{"an unknown source", env("KIP_IMAGE_FETCHER", "Mine"), once, exitUsage, `unknown image source "Mine"`},
		{"an unknown inner source", env("KIP_INTERNAL_FETCHERS", "KernelSpecsFetcher,Mine"), []string{"run", "--once", "--image-fetcher", "CombinedImagesFetcher"}, exitUsage, `unknown image source "Mine"`},
		{"no pullers", env("KIP_NUM_PULLERS", "0"), once, exitUsage, "(KIP_NUM_PULLERS) is 0"},
		{"pullers that are no number", env("KIP_NUM_PULLERS", "two"), once, exitUsage, `"KIP_NUM_PULLERS"`},
		{"no retries", env("KIP_NUM_RETRIES", "0"), once, exitUsage, "(KIP_NUM_RETRIES) is 0"},
		{"a deadline of nothing", nil, []string{"pull", "--image-deadline", "0s", "x"}, exitUsage, "--image-deadline is 0s"},
		{"a threshold above all", nil, []string{"pull", "--disk-threshold", "101", "x"}, exitUsage, "--disk-threshold is 101"},
		{"a factor that is no number", nil, []string{"pull", "--disk-factor", "NaN", "x"}, exitUsage, "--disk-factor is NaN"},
		{"a factor below one", nil, []string{"pull", "--disk-factor", "0.5", "x"}, exitUsage, "--disk-factor is 0.5"},
		{"an image filesystem that is not there", nil, []string{"pull", "--image-fs", "/no/such", "x"}, exitUsage, `--image-fs is "/no/such"`},
		{"a budget of many", nil, []string{"run", "--once", "--pin-budget", "many"}, exitUsage, `--pin-budget is "many"`},
		{"a budget below nothing", nil, []string{"run", "--once", "--pin-budget", "-1"}, exitUsage, `--pin-budget is "-1"`},
		{"a budget beyond all", nil, []string{"run", "--once", "--pin-budget", "100E"}, exitUsage, `--pin-budget is "100E"`},
		{"a removal of nothing", nil, []string{"images", "rm"}, exitUsage, "kip images rm needs the name of an image record"},
		{"an interval that is none", env("KIP_INTERVAL", "often"), once, exitUsage, `(KIP_INTERVAL) is "often"`},
		{"an invalid policy warns", env("KIP_PULL_POLICY", "Never"), once, exitOK, "invalid pull policy"},
	} {
		t.Run(in.name, func(t *testing.T) {
			c.gateway.SetKernels(map[string]string{"plain": c.refs[3]})
			if in.given != nil {
				in.given(t)
			}
			got := kip(t, in.args...)
			if got.status != in.status {
				t.Errorf("want status %d: %s", in.status, got)
			}
			lines := 0
			for line := range strings.Lines(got.stdout + got.stderr) {
				if strings.Contains(line, in.line) {
					lines++
				}
				if strings.HasPrefix(line, "goroutine ") || strings.HasPrefix(line, "panic") {
					t.Errorf("a stack trace: %s", got)
				}
			}
			if lines != 1 {
				t.Errorf("%d lines say %q: %s", lines, in.line, got)
			}
		})
	}
}

func TestFoldersAreTakenFromTheNearestFlag(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	right, wrong := c.secrets, t.TempDir()
	for _, in := range []struct {
		name, variable string
		args           []string
		status         int
	}{
		{"the variable alone", right, []string{"pull"}, exitOK},
		{"a flag before the command", wrong, []string{"--secrets-dir", right, "pull"}, exitOK},
		{"a flag after the command", wrong, []string{"pull", "--secrets-dir", right}, exitOK},
		{"the flag after the command before that before it", right, []string{"--secrets-dir", wrong, "pull", "--secrets-dir", right}, exitOK},
		{"and so when it is the wrong one", right, []string{"--secrets-dir", right, "pull", "--secrets-dir", wrong}, exitFailed},
		{"two flags", "", []string{"pull", "--secrets-dir", wrong, "--secrets-dir", right}, exitOK},
		{"a list in the variable", wrong + ":" + right, []string{"pull"}, exitOK},
		{"the same below images", wrong, []string{"images", "pull", "--secrets-dir", right}, exitOK},
		{"and before images", wrong, []string{"--secrets-dir", right, "i", "pull"}, exitOK},
		{"an empty variable is none", "", []string{"pull"}, exitFailed},
	} {
		t.Run(in.name, func(t *testing.T) {
			t.Setenv("KIP_SECRETS_DIR", in.variable)
			if got := kip(t, append(in.args, c.refs[0])...); got.status != in.status {
				t.Errorf("want status %d: %s", in.status, got)
			}
		})
	}
	t.Run("one secret's folder with its files", func(t *testing.T) {
		got := kip(t, "pull", "-o", "json", "--secrets-dir", filepath.Join(right, "team-pull"), c.refs[0])
		if r := got.report(t); got.status != exitOK || r.Images[0].Credential != "team-pull/"+c.reg.Host || r.Images[0].Source != "cli" {
			t.Error(got)
		}
	})
	t.Run("a snapshotter that the daemon does not have", func(t *testing.T) {
		if got := kip(t, "--snapshotter", "other", "pull", c.refs[1]); got.status != exitUsage || !strings.Contains(got.stderr, `containerd has no such snapshotter: "other"`) {
			t.Error(got)
		}
		if got := kip(t, "--snapshotter", "other", "pull", "--snapshotter", "native", c.refs[1]); got.status != exitOK {
			t.Error(got)
		}
	})
	t.Run("a hosts folder", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "mirrored.example")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		hosts := fmt.Sprintf("server = \"http://%s\"\n", c.reg.Host)
		if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644); err != nil {
			t.Fatal(err)
		}
		got := kip(t, "--hosts-dir", t.TempDir(), "pull", "--hosts-dir", filepath.Dir(dir), "mirrored.example/public/kernel:1")
		if got.status != exitOK {
			t.Error(got)
		}
	})
}

func TestTheDefaultRegistryIsForNamesWithoutOne(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	t.Setenv("KIP_DEFAULT_CONTAINER_REGISTRY", c.reg.Host)
	got := kip(t, "run", "--once", "-o", "json", "--image-fetcher", "StaticListFetcher", "--images", "public/kernel:1,"+c.refs[0])
	r := got.report(t)
	if got.status != exitOK || r.Images[0].Image != "public/kernel:1" || r.Images[0].Ref != c.refs[3] || r.Images[1].Ref != c.refs[0] {
		t.Fatal(got)
	}
	if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "public/kernel:1 is read as "+c.refs[3]) {
		t.Errorf("warnings %q", r.Warnings)
	}
}

func TestSourcesAreCombined(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	c.gateway.SetKernels(map[string]string{"a": c.refs[0]})
	t.Setenv("KIP_IMAGE_FETCHER", "CombinedImagesFetcher")
	t.Setenv("KIP_INTERNAL_FETCHERS", "KernelSpecsFetcher,StaticListFetcher")
	t.Setenv("KIP_IMAGES", c.refs[1]+","+c.refs[0])
	got := kip(t, "run", "--once", "-o", "json")
	r := got.report(t)
	if got.status != exitOK || len(r.Sources) != 2 || len(r.Images) != 2 || r.Images[0].Source != "gateway" || r.Images[1].Source != "static" {
		t.Fatal(got)
	}
	c.gateway.SetAnswer(nil)
	got = kip(t, "run", "--once", "-o", "json")
	if r := got.report(t); got.status != exitFailed || r.Present != 2 || r.Sources[0].State != "failed" || r.Sources[0].Message == "" || r.Sources[1].State != "ok" {
		t.Errorf("with the gateway failing: %s", got)
	}
}

func TestAnInterruptEndsAPull(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	ctx, interrupt := context.WithCancel(t.Context())
	silent := httpServer(t, func(_ http.ResponseWriter, req *http.Request) {
		interrupt()
		<-req.Context().Done()
	})
	got := kipIn(ctx, "pull", "-o", "json", silent+"/x/y:1")
	if r := got.report(t); got.status != exitInterrupted || r.Images[0].Reason != puller.Cancelled {
		t.Error(got)
	}
	if list, err := c.node.Client().LeasesService().List(namespaces.WithNamespace(t.Context(), "k8s.io")); err != nil || len(list) > 0 {
		t.Errorf("leases %v, error %v", list, err)
	}
}

func TestTheAgentWaitsForContainerdAndRestoresWhatGoes(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	c.node.Kill()
	t.Setenv("KIP_INTERVAL", "1")
	ctx, stop := context.WithCancel(namespaces.WithNamespace(t.Context(), "k8s.io"))
	defer stop()
	reports := newReports()
	var stderr lines
	ended := make(chan int)
	go func() { ended <- run(ctx, []string{"kip", "run", "-o", "json"}, reports, &stderr) }()
	stderr.await(t, "waiting for containerd: ")
	c.node.Start()
	if r := reports.next(t); r.Present != 4 {
		t.Errorf("first cycle: %+v", r)
	}
	client := c.node.Client()
	if err := client.ImageService().Delete(ctx, c.refs[0], images.SynchronousDelete()); err != nil {
		t.Fatal(err)
	}
	reports.await(t, func(agent.Report) bool {
		_, err := client.ImageService().Get(ctx, c.refs[0])
		return err == nil
	})
	stop()
	if status := <-ended; status != exitInterrupted {
		t.Errorf("status %d", status)
	}
}

func TestADaemonLostInMidRunIsAFailure(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	silent := httpServer(t, func(_ http.ResponseWriter, req *http.Request) {
		c.node.Kill()
		<-req.Context().Done()
	})
	t.Setenv("KIP_NUM_RETRIES", "2")
	got := kip(t, "pull", "-o", "json", silent+"/x/y:1", c.refs[0])
	r := got.report(t)
	if got.status != exitFailed || r.Failed == 0 || r.Images[0].Reason != puller.DaemonUnavailable {
		t.Error(got)
	}
}

func TestADaemonThatHangsIsAFailure(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	hung := httpServer(t, func(_ http.ResponseWriter, req *http.Request) {
		c.node.Pause()
		<-req.Context().Done()
	})
	got := kip(t, "pull", "-o", "json", "--num-pullers", "1", hung+"/x/y:1", c.refs[0])
	if r := got.report(t); got.status != exitFailed || r.Images[0].Reason != puller.DaemonUnavailable || r.Images[1].Reason != puller.DaemonUnavailable {
		t.Error(got)
	}
}

func TestVersionNamesWhatKipIsMadeOf(t *testing.T) {
	got := kip(t, "version")
	for _, want := range []string{"kip:", "commit:", "go:", "containerd client: v2."} {
		if !strings.Contains(got.stdout, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
}

func TestImagesRmIsCtrs(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	if got := kip(t, "pull", c.refs[0], c.refs[1]); got.status != exitOK {
		t.Fatal(got)
	}
	digestName := c.reg.Host + "/team/kernel-py@" + c.kernels[0].Manifest.Digest.String()
	if got := kip(t, "images", "rm", digestName, "no/such:1"); got.status != exitOK || got.stdout != digestName+"\n" || !strings.Contains(got.stderr, "no/such:1") {
		t.Error(got)
	}
	got := kip(t, "i", "remove", "--all-names", "--sync", c.refs[0])
	names := strings.Fields(got.stdout)
	slices.Sort(names)
	if want := []string{c.refs[0], c.kernels[0].ID.String()}; got.status != exitOK || !slices.Equal(names, want) {
		t.Errorf("%s\nwant %q", got, want)
	}
	if c.node.ImageStatus(c.refs[0]) != nil || c.node.ImageStatus(c.refs[1]) == nil {
		t.Error("CRI sees other images than those that are left")
	}
	if got := kip(t, "images", "rm"); got.status != exitUsage {
		t.Error(got)
	}
	if got := kip(t, "images", "rm", c.refs[1], "--sync"); got.status != exitUsage || !strings.Contains(got.stderr, "flags go before arguments") {
		t.Error(got)
	}
}

func TestTheAgentGivesUpWhatIsNoLongerWanted(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	c.gateway.SetKernels(map[string]string{"a": c.refs[0], "b": c.refs[1]})
	client := c.node.Client()
	ctx := namespaces.WithNamespace(t.Context(), "k8s.io")
	if _, err := client.LeasesService().Create(ctx, leases.WithID("kip-old"), leases.WithLabels(map[string]string{"kip/image-reference": "r.io/old:1"})); err != nil {
		t.Fatal(err)
	}
	left := func() (leases, pins int) {
		t.Helper()
		l, err := client.LeasesService().List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		all, err := client.ImageService().List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, img := range all {
			if img.Labels["kip/pinned-for"] != "" {
				pins++
			}
		}
		return len(l), pins
	}
	run := []string{"run", "--once", "-o", "json", "--pin-budget", "1Gi"}
	for _, step := range []struct {
		name         string
		given        func()
		args         []string
		leases, pins int
	}{
		{"kip pull is not the keeper", func() {}, []string{"pull", c.refs[0]}, 1, 0},
		{"the gateway is down, so nobody knows", func() { t.Setenv("KIP_GATEWAY_HOST", "http://127.0.0.1:1") }, append(run, "--images", c.refs[0], "--image-fetcher", "CombinedImagesFetcher", "--internal-fetchers", "KernelSpecsFetcher,StaticListFetcher"), 1, 3},
		{"all is known", func() { t.Setenv("KIP_GATEWAY_HOST", c.gateway.URL) }, run, 0, 6},
		{"one is not wanted any more", func() { c.gateway.SetKernels(map[string]string{"a": c.refs[0]}) }, run, 0, 3},
		{"kip pull unpins nothing", func() {}, []string{"pull", c.refs[1]}, 0, 3},
		{"pins are off", func() {}, run[:4], 0, 0},
	} {
		step.given()
		got := kip(t, step.args...)
		if leases, pins := left(); leases != step.leases || pins != step.pins {
			t.Errorf("%s: %d leases and %d pins, want %d and %d\n%s", step.name, leases, pins, step.leases, step.pins, got)
		}
	}
}

func TestTheProxyOfTheEnvironmentIsUsed(t *testing.T) {
	c := startCluster(t, testenv.UnderTest())
	reg := testenv.StartRegistry(t, testenv.Basic, map[string]testenv.User{"team": {Password: "canary"}})
	reg.Push(c.images, c.kernels[0], "team/kernel:1")
	testenv.MountSecret(t, c.secrets, "upstream", map[string]testenv.Login{"upstream.example": {Username: "team", Password: "canary"}})
	var proxied atomic.Int64
	proxy := httpServer(t, func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Host != "upstream.example" {
			http.Error(w, "not for this proxy", http.StatusBadGateway)
			return
		}
		proxied.Add(1)
		(&httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Host, p.Out.Host = reg.Host, reg.Host
		}}).ServeHTTP(w, req)
	})
	hosts := filepath.Join(testenv.Dir(t), "named.example")
	if err := os.MkdirAll(hosts, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(hosts, "hosts.toml"), []byte("server = \"http://upstream.example\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	// A process of its own: Go reads the variables once.
	cmd := exec.CommandContext(t.Context(), testenv.Kip(t, testenv.Dir(t), false), "pull", "--hosts-dir", filepath.Dir(hosts), "named.example/team/kernel:1")
	cmd.Env = append(os.Environ(), "HTTP_PROXY=http://"+proxy, "NO_PROXY=")
	if out, err := cmd.CombinedOutput(); err != nil || proxied.Load() == 0 {
		t.Errorf("%d requests came by the proxy, error %v\n%s", proxied.Load(), err, out)
	}
}
