package secrets

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Providers are credential provider plugins, as the kubelet runs them: programs that give credentials for the images
// that they are configured for (kubelet: credentialprovider/plugin). A nil Providers has none.
type Providers struct {
	list []*provider
}

// provider is one program and what it has said.
type provider struct {
	fields  providerFields
	path    string
	matches []location
	timeout time.Duration
	now     func() time.Time

	mu    sync.Mutex // one run at a time: images of one registry shall share an answer
	cache map[string]cached
}

// cached is an answer, for as long as it holds.
type cached struct {
	keyring *Keyring
	until   time.Time
}

const (
	// providerTimeout is the kubelet's.
	providerTimeout = time.Minute
	// killDelay is how long a program that was told to end may keep its output open.
	killDelay = 2 * time.Second
	// maxNegative bounds how long an answer without credentials holds. The kubelet keeps it as long as any other, so that
	// a program that fails once at start is out for half a day.
	maxNegative = time.Minute
	maxOutput   = 1 << 20
	maxStderr   = 500
)

// NewProviders reads a CredentialProviderConfig, a file or a folder of them, whose programs are in binDir. Problems are
// about what is accepted and will not work.
func NewProviders(config, binDir string) (*Providers, []Problem, error) {
	fields, err := readProviderConfig(config)
	if err != nil {
		return nil, nil, err
	}
	var p Providers
	var problems []Problem
	seen := map[string]bool{}
	for _, f := range fields {
		if err := f.check(binDir); err != nil {
			return nil, nil, fmt.Errorf("credential provider %q: %w", f.Name, err)
		}
		if seen[f.Name] {
			return nil, nil, fmt.Errorf("credential provider %q stands twice", f.Name)
		}
		seen[f.Name] = true
		if len(f.TokenAttributes) > 0 && string(f.TokenAttributes) != "null" {
			problems = append(problems, Problem{Source: f.Name, File: config,
				Message: "wants the token of a pod's service account (tokenAttributes), which only the kubelet has: not run"})
			continue
		}
		for _, warning := range f.lint() {
			problems = append(problems, Problem{Source: f.Name, File: config, Message: warning})
		}
		one := &provider{fields: f, path: filepath.Join(binDir, f.Name), timeout: providerTimeout, now: time.Now, cache: map[string]cached{}}
		for _, pattern := range f.MatchImages {
			l, _ := parseLocation(pattern) // checked
			one.matches = append(one.matches, l)
		}
		p.list = append(p.list, one)
	}
	return &p, problems, nil
}

// Lookup asks the programs that are configured for a repository, or takes what they said before, and returns their
// credentials in the order of the configuration. A program that fails gives none; that is logged.
func (p *Providers) Lookup(ctx context.Context, repository string) []Credential {
	image, err := parseLocation(repository)
	if p == nil || err != nil {
		return nil
	}
	var found []Credential
	for _, one := range p.list {
		if !slices.ContainsFunc(one.matches, func(l location) bool { return l.matches(image) }) {
			continue
		}
		keyring, err := one.ask(ctx, repository)
		if err != nil {
			slog.Error("credential provider failed", "provider", one.fields.Name, "repository", repository, "error", err)
			continue
		}
		found = append(found, keyring.Lookup(repository)...)
	}
	return found
}

// Forget drops what the programs have said, so that they are asked again. It returns whether there was anything.
func (p *Providers) Forget() bool {
	if p == nil {
		return false
	}
	dropped := false
	for _, one := range p.list {
		one.mu.Lock()
		dropped = dropped || len(one.cache) > 0
		clear(one.cache)
		one.mu.Unlock()
	}
	return dropped
}

// ask returns what the program says of a repository, or said.
func (p *provider) ask(ctx context.Context, repository string) (*Keyring, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.cache, func(_ string, c cached) bool { return !p.now().Before(c.until) })
	registry, _, _ := strings.Cut(repository, "/")
	for _, key := range []string{cacheKey("Image", repository), cacheKey("Registry", registry), cacheKey("Global", "")} {
		if c, ok := p.cache[key]; ok {
			return c.keyring, nil
		}
	}
	answer, err := p.run(ctx, repository)
	if err != nil {
		return nil, err
	}
	keyring := answer.keyring(p.fields.Name)
	hold := time.Duration(*p.fields.DefaultCacheDuration)
	if answer.CacheDuration != nil {
		hold = time.Duration(*answer.CacheDuration)
	}
	if len(keyring.entries) == 0 {
		hold = min(hold, maxNegative)
	}
	if hold > 0 {
		of := map[string]string{"Image": repository, "Registry": registry, "Global": ""}[answer.CacheKeyType]
		p.cache[cacheKey(answer.CacheKeyType, of)] = cached{keyring, p.now().Add(hold)}
	}
	return keyring, nil
}

func cacheKey(kind, of string) string { return kind + " " + of }

// providerRequest and providerResponse are the protocol: JSON on standard input and output.
type providerRequest struct {
	Kind       string `json:"kind"`
	APIVersion string `json:"apiVersion"`
	Image      string `json:"image"`
}

type providerResponse struct {
	Kind          string    `json:"kind"`
	APIVersion    string    `json:"apiVersion"`
	CacheKeyType  string    `json:"cacheKeyType"`
	CacheDuration *duration `json:"cacheDuration"`
	Auth          map[string]struct {
		Username string `json:"username"`
		Password string `json:"password"`
	} `json:"auth"`
}

// run runs the program once.
func (p *provider) run(ctx context.Context, repository string) (providerResponse, error) {
	request, err := json.Marshal(providerRequest{"CredentialProviderRequest", p.fields.APIVersion, repository})
	if err != nil {
		return providerResponse{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.path, p.fields.Args...)
	cmd.Env = p.environment()
	cmd.Stdin = bytes.NewReader(request)
	stdout, stderr := &limited{left: maxOutput}, &limited{left: maxStderr}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	// A group of its own, so that its children end with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = killDelay
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer in %s: %w", p.timeout, ctx.Err())
		}
		return providerResponse{}, fmt.Errorf("%w: %s", err, strings.Map(printable, strings.TrimSpace(stderr.String())))
	}
	return p.decode(stdout)
}

// decode reads an answer strictly, as the kubelet does. The error quotes nothing of it.
func (p *provider) decode(output *limited) (providerResponse, error) {
	var answer providerResponse
	d := json.NewDecoder(output)
	d.DisallowUnknownFields()
	if output.left < 0 {
		return answer, fmt.Errorf("the answer has more than %d bytes", maxOutput)
	}
	if err := d.Decode(&answer); err != nil {
		return answer, errors.New("the answer is no CredentialProviderResponse")
	}
	if answer.Kind != "CredentialProviderResponse" || answer.APIVersion != p.fields.APIVersion {
		return answer, fmt.Errorf("the answer is no CredentialProviderResponse of %s", p.fields.APIVersion)
	}
	if !slices.Contains([]string{"Image", "Registry", "Global"}, answer.CacheKeyType) {
		return answer, errors.New("cacheKeyType is none of Image, Registry, Global")
	}
	return answer, nil
}

// keyring makes the answer's keys match as those of a secret do.
func (r providerResponse) keyring(source string) *Keyring {
	var entries []entry
	for _, key := range slices.Sorted(maps.Keys(r.Auth)) {
		login := r.Auth[key]
		e, err := newEntry(key, Credential{Source: source, Username: login.Username, Password: NewSecret(login.Password)})
		if err == nil {
			entries = append(entries, e)
		}
	}
	return newKeyring(entries)
}

// inherited are the variables that a program gets of kip's own, by the beginning of their names: what finds its tools,
// its proxy and its identity with a cloud. Others, such as KIP_AUTH_TOKEN, are secrets of kip's.
var inherited = []string{"PATH=", "HOME=", "TMPDIR=", "SSL_CERT_", "AWS_", "AZURE_", "GOOGLE_",
	"HTTP_PROXY=", "HTTPS_PROXY=", "NO_PROXY=", "http_proxy=", "https_proxy=", "no_proxy="}

func (p *provider) environment() []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return !slices.ContainsFunc(inherited, func(prefix string) bool { return strings.HasPrefix(v, prefix) })
	})
	for _, v := range p.fields.Env {
		env = append(env, v.Name+"="+v.Value) // the last one of a name wins
	}
	return env
}

// limited is a buffer that drops what is too much, and then has less than nothing left.
type limited struct {
	bytes.Buffer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := len(p)
	if l.left >= 0 {
		l.Buffer.Write(p[:min(n, l.left)])
		l.left -= n
	}
	return n, nil
}
