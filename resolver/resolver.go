// Package resolver is the registry side of a pull: a containerd remotes.Resolver
// that tries the credentials of a keyring in turn and keeps the one that works.
package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/transfer"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"example.com/kip/secrets"
)

// Keyring finds the credentials for a repository, in the order in which they are
// to be tried. The repository is a normalised name without tag or digest.
type Keyring interface {
	Lookup(ctx context.Context, repository string) []secrets.Credential
	// NearMisses are the keys that look as if they were for the repository.
	NearMisses(repository string) []secrets.NearMiss
}

// Options say how registries are reached.
type Options struct {
	// HostsDirs are folders laid out as containerd's certs.d. The first that knows
	// a registry holds, as in CRI.
	HostsDirs []string
	// NoAnonymousFallback turns off the attempt without a login that follows when
	// all credentials were refused.
	NoAnonymousFallback bool
	// PassUpstreamCredentials sends a mirror the credential of the registry that it
	// is for, where no secret has one for the mirror itself, as CRI does.
	PassUpstreamCredentials bool
	// Logins remembers refused logins over several resolvers, where it is set.
	Logins *Logins
	// Pauses remembers which registries have asked to be left alone, over several
	// resolvers, where it is set.
	Pauses *Pauses
	// UserAgent is sent with each request.
	UserAgent string
	// StallTimeout ends a request that is not answered for so long, or whose answer
	// brings no byte, or next to nothing. 60 s where it is not set.
	StallTimeout time.Duration
}

// Anonymous is the name under which an attempt without a login is reported.
const Anonymous = "anonymous"

// Resolver resolves and fetches one image, once: tokens and connections are
// kept for the attempt and no longer, since containerd's authorizer never forgets
// a failed token. Create one with New for each attempt.
type Resolver struct {
	opts    Options
	named   reference.Named
	keyring Keyring
	known   *ocispec.Descriptor

	bytes  atomic.Int64
	limits []transfer.ImageResolverOption

	mu     sync.Mutex // held while credentials are tried; guards what follows
	winner *session
	tried  []Attempt
}

// New returns a resolver for the image that named refers to: a tag or a digest.
// Where known is not nil, it is what the name stands for already; the registry is
// then asked only when something has to be fetched.
func New(named reference.Named, known *ocispec.Descriptor, keyring Keyring, opts Options) *Resolver {
	if opts.StallTimeout == 0 {
		opts.StallTimeout = time.Minute
	}
	if opts.Logins == nil {
		opts.Logins = &Logins{}
	}
	if opts.Pauses == nil {
		opts.Pauses = &Pauses{}
	}
	return &Resolver{opts: opts, named: named, known: known, keyring: keyring}
}

// Resolve returns the name that was given to New and the descriptor that it
// stands for, which it asks once. It fails with a RefusedError when every credential
// was refused, and with ErrNotAnImage when what is there is no manifest.
func (r *Resolver) Resolve(ctx context.Context, ref string) (string, ocispec.Descriptor, error) {
	if r.known != nil {
		return ref, *r.known, nil
	}
	_, desc, err := r.login(ctx, r.named)
	if err == nil {
		r.known = &desc
	}
	return ref, desc, err
}

// Fetcher returns a fetcher that logs in with the credential that Resolve found,
// or finds one at the first blob.
func (r *Resolver) Fetcher(_ context.Context, ref string) (remotes.Fetcher, error) {
	return remotes.FetcherFunc(func(ctx context.Context, desc ocispec.Descriptor) (io.ReadCloser, error) {
		s, err := r.session(ctx)
		if err != nil {
			return nil, err
		}
		f, err := s.resolver.Fetcher(ctx, ref)
		if err != nil {
			return nil, err
		}
		// Content is fetched from the registry and from nowhere else: the client would
		// follow these first, without any of our guards.
		desc.URLs = nil
		rc, err := f.Fetch(ctx, desc)
		if err != nil {
			return nil, err
		}
		return &countingReader{ReadCloser: rc, n: &r.bytes}, nil
	}), nil
}

// Pusher is not there: kip never pushes.
func (r *Resolver) Pusher(context.Context, string) (remotes.Pusher, error) {
	return nil, fmt.Errorf("pushing: %w", errdefs.ErrNotImplemented)
}

// SetOptions takes the client's limits on downloads.
func (r *Resolver) SetOptions(opts ...transfer.ImageResolverOption) {
	r.limits = opts
}

// Reject tells the resolver how a fetch failed. When the registry refused the
// credential there, although it could resolve the name, that credential is left
// alone for this image for a while, and Reject returns true: a new resolver with
// the same Logins tries the next one.
func (r *Resolver) Reject(err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	var refused *RefusedError
	if r.winner == nil || r.winner.credential == nil || errors.As(err, &refused) {
		return false
	}
	switch status(err) {
	case http.StatusUnauthorized, http.StatusForbidden:
		r.opts.Logins.reject(keyOf(reference.Domain(r.named), r.winner.credential), r.named, newAttempt(r.winner, err))
		return true
	}
	return false
}

// Close gives up the connections of the attempt.
func (r *Resolver) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner != nil {
		r.winner.close()
	}
}

// Credential returns the name of the credential that is in use, or else of the
// last one that was tried; it is empty while none was needed.
func (r *Resolver) Credential() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner != nil {
		return r.winner.name()
	}
	name := ""
	for _, a := range r.tried {
		if name == "" || a.Credential != Anonymous {
			name = a.Credential
		}
	}
	return name
}

// Note says why a pod could not use the credential that is in use, empty where it
// could.
func (r *Resolver) Note() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner == nil || r.winner.credential == nil {
		return ""
	}
	return r.winner.credential.Note
}

// Refused returns the attempts that failed before the credential in use was
// found.
func (r *Resolver) Refused() []Attempt {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tried
}

// Bytes returns how many bytes of content came from the registry.
func (r *Resolver) Bytes() int64 { return r.bytes.Load() }

// session returns the login to fetch with.
func (r *Resolver) session(ctx context.Context) (*session, error) {
	r.mu.Lock()
	s := r.winner
	r.mu.Unlock()
	if s != nil {
		return s, nil
	}
	named := r.named
	if r.known != nil { // the content is known, a login is not: asking for it by digest finds one
		digested, err := reference.WithDigest(reference.TrimNamed(r.named), r.known.Digest)
		if err != nil {
			return nil, err
		}
		named = digested
	}
	s, _, err := r.login(ctx, named)
	return s, err
}

// login resolves a name with one credential after the other.
func (r *Resolver) login(ctx context.Context, named reference.Named) (*session, ocispec.Descriptor, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.winner != nil { // another fetch was first
		return r.winner, ocispec.Descriptor{}, nil
	}
	r.tried = nil
	for _, cred := range r.candidates(ctx) {
		// Without a login there is no more to see than with one that was accepted.
		if cred == nil && slices.ContainsFunc(r.tried, func(a Attempt) bool { return a.Status == http.StatusNotFound }) {
			continue
		}
		s, desc, err := r.try(ctx, named, cred)
		if err != nil {
			return nil, desc, err
		}
		if s != nil {
			r.winner = s
			return s, desc, nil
		}
	}
	return nil, ocispec.Descriptor{}, &RefusedError{
		Registry: reference.Domain(r.named), Repository: reference.Path(r.named),
		Attempts: r.tried, NearMisses: r.keyring.NearMisses(r.named.Name()),
	}
}

// try resolves a name with one credential, nil for none. Where that was refused,
// also earlier and not long ago, it returns no session and no error, and the
// refusal is noted.
func (r *Resolver) try(ctx context.Context, named reference.Named, cred *secrets.Credential) (*session, ocispec.Descriptor, error) {
	done := func(*Attempt) {}
	if cred != nil {
		refused, end, err := r.opts.Logins.begin(ctx, keyOf(reference.Domain(r.named), cred), named)
		if err != nil {
			return nil, ocispec.Descriptor{}, err
		}
		if refused != nil {
			refused.Credential = cred.Name() // the same login may be in several secrets
			r.tried = append(r.tried, *refused)
			return nil, ocispec.Descriptor{}, nil
		}
		done = end
	}
	s := newSession(ctx, r.named, cred, r.keyring, r.opts)
	s.resolver.SetOptions(r.limits...)
	_, desc, err := s.resolver.Resolve(ctx, named.String())
	if err == nil && !images.IsManifestType(desc.MediaType) && !images.IsIndexType(desc.MediaType) {
		err = fmt.Errorf("%w: it answers with the type %q", ErrNotAnImage, Sanitize(desc.MediaType))
	}
	if err == nil {
		done(nil)
		return s, desc, nil
	}
	if desc.Digest == "" && strings.Contains(err.Error(), " byte manifest for ") { // docker.MaxManifestSize; it is NotFound there
		err = fmt.Errorf("%w: its manifest is too large: %v", ErrNotAnImage, err)
	}
	s.close()
	outcomes := s.outcomes()
	err = decisive(err, outcomes)
	attempt := newAttempt(s, err)
	attempt.Hosts = outcomes
	done(&attempt)
	r.tried = append(r.tried, attempt)
	if !isRefusal(err) {
		return nil, desc, fmt.Errorf("resolving %s as %s%s: %w", named, s.name(), listed(outcomes), err)
	}
	return nil, desc, nil
}

// candidates are the credentials to try, each login once, the one that worked
// last time first; nil stands for none.
func (r *Resolver) candidates(ctx context.Context) []*secrets.Credential {
	repository, registry := r.named.Name(), reference.Domain(r.named)
	seen := map[loginKey]bool{}
	var list []*secrets.Credential
	for _, c := range r.keyring.Lookup(ctx, repository) {
		key := keyOf(registry, &c)
		if seen[key] {
			continue
		}
		seen[key] = true
		if c.Kind() == secrets.Anonymous {
			list = append(list, nil)
		} else if r.opts.Logins.wonAt(repository, key) {
			list = slices.Insert(list, 0, &c)
		} else {
			list = append(list, &c)
		}
	}
	if !slices.Contains(list, nil) && (len(list) == 0 || !r.opts.NoAnonymousFallback) {
		list = append(list, nil)
	}
	return list
}

// countingReader counts what is read and stays seekable: containerd resumes a
// partial download by seeking.
type countingReader struct {
	io.ReadCloser
	n *atomic.Int64
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	r.n.Add(int64(n))
	return n, err
}

func (r *countingReader) Seek(offset int64, whence int) (int64, error) {
	s, ok := r.ReadCloser.(io.Seeker)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	return s.Seek(offset, whence)
}
