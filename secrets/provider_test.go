package secrets

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// program writes a provider that notes each run's request and environment in its folder, and then does as the script
// says. Shell scripts stand for the clouds' programs: they speak the same protocol.
func program(t *testing.T, dir, name, script string) {
	t.Helper()
	write(t, dir+"/"+name, "#!/bin/sh\ncat >> "+dir+"/requests\necho >> "+dir+"/requests\nenv > "+dir+"/env\n"+script+"\n")
	if err := os.Chmod(dir+"/"+name, 0o755); err != nil {
		t.Fatal(err)
	}
}

func requests(t *testing.T, dir string) []string {
	t.Helper()
	b, err := os.ReadFile(dir + "/requests")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return strings.Fields(string(b))
}

func answer(kind, hold, auth string) string {
	return `echo '{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"` + kind + `"` + hold + `,"auth":` + auth + `}'`
}

func providerYAML(fields string) string {
	return "kind: CredentialProviderConfig\napiVersion: kubelet.config.k8s.io/v1\nproviders:\n" + fields
}

const oneProvider = `- name: p
  apiVersion: credentialprovider.kubelet.k8s.io/v1
  matchImages: ["*.r.io", "r.io/team"]
  defaultCacheDuration: 12h
  args: ["get", "it"]
  env: [{name: REGION, value: here}, {name: HOME, value: /configured}]
`

func newProvider(t *testing.T, script string) (*Providers, string) {
	t.Helper()
	dir := t.TempDir()
	program(t, dir, "p", script)
	write(t, dir+"/config.yaml", providerYAML(oneProvider))
	p, problems, err := NewProviders(dir+"/config.yaml", dir)
	if err != nil || len(problems) > 0 {
		t.Fatal(problems, err)
	}
	return p, dir
}

func logins(list []Credential) string {
	var all []string
	for _, c := range list {
		all = append(all, c.Name()+" "+c.Username+":"+c.Password.Reveal())
	}
	return strings.Join(all, ", ")
}

func TestAProviderIsRunAsTheKubeletRunsIt(t *testing.T) {
	t.Setenv("KIP_AUTH_TOKEN", "canary")
	t.Setenv("AWS_ROLE_ARN", "role")
	p, dir := newProvider(t, `echo "$@" > `+"$(dirname $0)"+`/args
`+answer("Registry", "", `{"*.r.io":{"username":"any","password":"1"},"x.r.io/a":{"username":"a","password":"2"},"other.io":{"username":"o","password":"3"}}`))
	if got, want := logins(p.Lookup(t.Context(), "x.r.io/a/b")), "p/x.r.io/a a:2, p/*.r.io any:1"; got != want {
		t.Errorf("credentials %s, want %s", got, want)
	}
	if got := p.Lookup(t.Context(), "other.io/x"); got != nil || len(requests(t, dir)) != 1 {
		t.Errorf("asked for an image that is not its: %v", got)
	}
	if want := `{"kind":"CredentialProviderRequest","apiVersion":"credentialprovider.kubelet.k8s.io/v1","image":"x.r.io/a/b"}`; requests(t, dir)[0] != want {
		t.Errorf("request %s", requests(t, dir)[0])
	}
	args, _ := os.ReadFile(dir + "/args")
	env, _ := os.ReadFile(dir + "/env")
	if string(args) != "get it\n" || strings.Contains(string(env), "canary") {
		t.Errorf("arguments %q, environment %s", args, env)
	}
	for _, want := range []string{"REGION=here", "HOME=/configured", "AWS_ROLE_ARN=role", "PATH="} {
		if !strings.Contains("\n"+string(env), "\n"+want) {
			t.Errorf("no %s in the environment", want)
		}
	}
}

func TestAnAnswerHoldsAsLongAsItSays(t *testing.T) {
	auth := `{"*.r.io":{"username":"u","password":"p"}}`
	for _, test := range []struct {
		name, kind, hold, auth string
		images                 []string
		runs                   int
		after                  time.Duration // then the first image again
		runsAfter              int
	}{
		{"for its registry", "Registry", "", auth, []string{"x.r.io/a", "x.r.io/b"}, 1, time.Hour, 1},
		{"and no other", "Registry", "", auth, []string{"x.r.io/a", "y.r.io/a"}, 2, time.Hour, 2},
		{"for its image", "Image", "", auth, []string{"x.r.io/a", "x.r.io/a", "x.r.io/b"}, 2, time.Hour, 2},
		{"for all", "Global", "", auth, []string{"x.r.io/a", "y.r.io/b"}, 1, time.Hour, 1},
		{"until the default time is over", "Registry", "", auth, []string{"x.r.io/a"}, 1, 12 * time.Hour, 2},
		{"or its own", "Registry", `,"cacheDuration":"10m0s"`, auth, []string{"x.r.io/a"}, 1, 10 * time.Minute, 2},
		{"not at all with none", "Registry", `,"cacheDuration":"0s"`, auth, []string{"x.r.io/a", "x.r.io/a"}, 2, 0, 3},
		{"a minute without credentials", "Registry", "", "null", []string{"x.r.io/a", "x.r.io/a"}, 1, time.Minute, 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, dir := newProvider(t, answer(test.kind, test.hold, test.auth))
			now := time.Unix(0, 0)
			p.list[0].now = func() time.Time { return now }
			for _, image := range test.images {
				p.Lookup(t.Context(), image)
			}
			if got := len(requests(t, dir)); got != test.runs {
				t.Errorf("%d runs, want %d", got, test.runs)
			}
			now = now.Add(test.after)
			p.Lookup(t.Context(), test.images[0])
			if got := len(requests(t, dir)); got != test.runsAfter {
				t.Errorf("%d runs after %s, want %d", got, test.after, test.runsAfter)
			}
		})
	}
}

func TestImagesOfOneRegistryShareARun(t *testing.T) {
	p, dir := newProvider(t, answer("Registry", "", `{"*.r.io":{"username":"u","password":"p"}}`))
	var pulls sync.WaitGroup
	for i := range 10 {
		pulls.Go(func() {
			if got := p.Lookup(t.Context(), fmt.Sprintf("x.r.io/%d", i)); len(got) != 1 {
				t.Errorf("credentials %v", got)
			}
		})
	}
	pulls.Wait()
	if got := len(requests(t, dir)); got != 1 {
		t.Errorf("%d runs", got)
	}
	if !p.Forget() || p.Forget() {
		t.Error("Forget does not tell whether there was something")
	}
	p.Lookup(t.Context(), "x.r.io/a")
	if got := len(requests(t, dir)); got != 2 {
		t.Errorf("%d runs after Forget", got)
	}
}

func TestAProviderThatFailsGivesNothing(t *testing.T) {
	const good = `"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1"`
	for name, script := range map[string]string{
		"it fails":                `echo canary; echo "no identity" >&2; exit 3`,
		"it says nothing":         ``,
		"it says no JSON":         `echo canary`,
		"an unknown field":        `echo '{` + good + `,"cacheKeyType":"Registry","auth":{},"canary":1}'`,
		"another protocol":        `echo '{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1beta1","cacheKeyType":"Registry"}'`,
		"another kind":            `echo '{"kind":"Canary","apiVersion":"credentialprovider.kubelet.k8s.io/v1","cacheKeyType":"Registry"}'`,
		"no cache key type":       `echo '{` + good + `,"auth":{}}'`,
		"a duration that is none": `echo '{` + good + `,"cacheKeyType":"Registry","cacheDuration":"canary"}'`,
		"too much":                `head -c 2000000 /dev/zero`,
	} {
		t.Run(name, func(t *testing.T) {
			p, dir := newProvider(t, script)
			_, err := p.list[0].ask(t.Context(), "x.r.io/a")
			if err == nil || strings.Contains(err.Error(), "canary") || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v", err)
			}
			if name == "it fails" && !strings.Contains(err.Error(), "exit status 3: no identity") {
				t.Errorf("error %v", err)
			}
			if got := p.Lookup(t.Context(), "x.r.io/a"); got != nil || len(requests(t, dir)) != 2 {
				t.Errorf("credentials %v after %d runs: a failure is not kept", got, len(requests(t, dir)))
			}
		})
	}
}

func TestAProviderThatHangsEndsWithItsChildren(t *testing.T) {
	p, dir := newProvider(t, `sleep 1000 & echo $! > $(dirname $0)/child; wait`)
	p.list[0].timeout = time.Second
	if _, err := p.list[0].ask(t.Context(), "x.r.io/a"); err == nil || !strings.Contains(err.Error(), "no answer in 1s") {
		t.Fatalf("error %v", err)
	}
	b, err := os.ReadFile(dir + "/child")
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
		if err != nil || strings.Contains(string(status), ") Z ") {
			return // gone, or only waiting for its parent to look
		}
		if time.Now().After(end) {
			t.Fatalf("the child lives on: %s", status)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestAProviderConfigIsReadAsTheKubeletReadsIt(t *testing.T) {
	second := strings.ReplaceAll(oneProvider, "name: p\n", "name: q\n")
	for _, test := range []struct {
		name  string
		files map[string]string
		err   string // part of it; empty for none
		warn  string
	}{
		{"one file", map[string]string{"a.yaml": providerYAML(oneProvider)}, "", ""},
		{"a folder of them", map[string]string{"a.yaml": providerYAML(oneProvider), "b.yml": providerYAML(second), "README": "x"}, "", ""},
		{"JSON", map[string]string{"a.json": `{"kind":"CredentialProviderConfig","apiVersion":"kubelet.config.k8s.io/v1","providers":[]}`}, "", ""},
		{"a name twice", map[string]string{"a.yaml": providerYAML(oneProvider), "b.yaml": providerYAML(oneProvider)}, `"p" stands twice`, ""},
		{"an unknown field", map[string]string{"a.yaml": providerYAML(oneProvider + "  x: 1\n")}, "unknown field", ""},
		{"another kind", map[string]string{"a.yaml": "kind: Pod\napiVersion: v1\n"}, "is no CredentialProviderConfig", ""},
		{"a program that is not there", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, "name: p\n", "name: none\n"))}, "no such file", ""},
		{"a name with a slash", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, "name: p\n", "name: ../p\n"))}, "is no file's name", ""},
		{"no images", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, `["*.r.io", "r.io/team"]`, "[]"))}, "matchImages is empty", ""},
		{"no duration", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, "  defaultCacheDuration: 12h\n", ""))}, "defaultCacheDuration is missing", ""},
		{"a negative duration", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, "12h", "-1s"))}, "negative", ""},
		{"another protocol", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, "k8s.io/v1\n", "k8s.io/v9\n"))}, "apiVersion", ""},
		{"images that never match", map[string]string{"a.yaml": providerYAML(strings.ReplaceAll(oneProvider, `"r.io/team"`, `"https://r.io", "r.io/*"`))}, "", "never matches"},
		{"a pod's token", map[string]string{"a.yaml": providerYAML(oneProvider + "  tokenAttributes: {serviceAccountTokenAudience: a, cacheType: Token, requireServiceAccount: true}\n")}, "", "not run"},
	} {
		t.Run(test.name, func(t *testing.T) {
			bin, config := t.TempDir(), t.TempDir()
			program(t, bin, "p", "")
			program(t, bin, "q", "")
			path := config
			for name, data := range test.files {
				write(t, filepath.Join(config, name), data)
				if len(test.files) == 1 {
					path = filepath.Join(config, name)
				}
			}
			_, problems, err := NewProviders(path, bin)
			if (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("error %v, want %q", err, test.err)
			}
			if (len(problems) == 0) != (test.warn == "") || !strings.Contains(messages(problems), test.warn) {
				t.Errorf("problems %v, want %q", problems, test.warn)
			}
		})
	}
}

func TestProvidersComeAfterSecrets(t *testing.T) {
	p, _ := newProvider(t, answer("Registry", "", `{"r.io/team":{"username":"plugin","password":"p"}}`))
	root := t.TempDir()
	write(t, root+"/s/.dockerconfigjson", `{"auths":{"r.io":{"username":"secret"}}}`)
	s := NewStore(Loader{Dirs: []string{root}}, p)
	s.Refresh()
	if got, want := logins(s.Lookup(t.Context(), "r.io/team/x")), "s/r.io secret:, p/r.io/team plugin:p"; got != want {
		t.Errorf("credentials %s, want %s", got, want)
	}
	if g := s.Generation(); !s.LookAgain(g) || s.LookAgain(g) {
		t.Error("LookAgain does not tell whether there is something else to try")
	}
}
