package resolver

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/distribution/reference"

	"example.com/kip/secrets"
)

// Logins remembers how logins went, over all pulls of a process: a password that
// was refused is not sent again for a while, since registries lock accounts, and
// the credential that worked for a repository comes first the next time. A changed
// password is a new login. The zero value is ready for use.
type Logins struct {
	// MaxBackOff is the longest time that a refused login is left alone. 5 minutes
	// where it is not set.
	MaxBackOff time.Duration
	// Now is the clock, time.Now where it is not set.
	Now func() time.Time

	mu      sync.Mutex
	known   map[loginKey]*login
	winners map[string]loginKey // by repository with its registry
}

// The first time that a refused login is left alone. It doubles each time.
const firstBackOff = time.Minute

// maxLogins bounds what is remembered: tokens that are renewed twice a day add up
// in an agent that runs for months. All is forgotten then.
const maxLogins = 10_000

// loginKey is a login at a registry; with a place, a repository or a reference, it
// is that login there.
type loginKey struct {
	registry, place, user string
	secret                secrets.Secret
	token                 bool
}

// login is what is known of a login. Its fields belong to the one who holds it,
// or who holds the login that it is a place of.
type login struct {
	held     chan struct{} // has room for the one who holds it
	good     bool
	failures int
	until    time.Time
	last     Attempt
}

func keyOf(registry string, c *secrets.Credential) loginKey {
	return loginKey{registry: registry, user: c.Username, secret: c.Password, token: c.RegistryToken}
}

// at is the login in one place.
func (k loginKey) at(place string) loginKey {
	k.place = place
	return k
}

func (l *Logins) get(k loginKey) *login {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.known == nil || len(l.known) >= maxLogins {
		l.known, l.winners = map[loginKey]*login{}, map[string]loginKey{}
	}
	known := l.known[k]
	if known == nil {
		known = &login{held: make(chan struct{}, 1)}
		l.known[k] = known
	}
	return known
}

// begin waits until nobody else tries the login for the first time, so that the
// images of a set do not send one wrong password once each. It returns the refusal
// that still holds, or nil: then the caller tries, and calls the function with the
// outcome.
func (l *Logins) begin(ctx context.Context, k loginKey, named reference.Named) (*Attempt, func(*Attempt), error) {
	anywhere := l.get(k)
	select {
	case anywhere.held <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, context.Cause(ctx)
	}
	for _, known := range []*login{anywhere, l.get(k.at(named.Name())), l.get(k.at(named.String()))} {
		if l.now().Before(known.until) {
			last := known.last
			last.Answer += ", not tried again before " + known.until.UTC().Format(time.TimeOnly)
			<-anywhere.held
			return &last, nil, nil
		}
	}
	held := !anywhere.good
	if !held { // known to be good: many may use it at once
		<-anywhere.held
	}
	return nil, func(refused *Attempt) {
		if !held {
			anywhere.held <- struct{}{}
		}
		defer func() { <-anywhere.held }()
		l.end(k, named, anywhere, refused)
	}, nil
}

// end notes an outcome. A 401 is about the login, a 403 about the repository, a
// 404 about the tag, since others of the repository may well be there. Anything
// else is about none of them.
func (l *Logins) end(k loginKey, named reference.Named, anywhere *login, refused *Attempt) {
	if refused == nil {
		anywhere.good, anywhere.failures = true, 0
		l.mu.Lock()
		l.winners[named.Name()] = k
		l.mu.Unlock()
		return
	}
	switch refused.Status {
	case http.StatusUnauthorized:
		anywhere.good = false
		l.fail(anywhere, refused)
	case http.StatusForbidden:
		l.fail(l.get(k.at(named.Name())), refused)
	case http.StatusNotFound:
		l.fail(l.get(k.at(named.String())), refused)
	}
}

// reject notes that a login which could resolve a reference may not fetch it.
func (l *Logins) reject(k loginKey, named reference.Named, refused Attempt) {
	anywhere := l.get(k)
	anywhere.held <- struct{}{}
	defer func() { <-anywhere.held }()
	l.fail(l.get(k.at(named.String())), &refused)
}

func (l *Logins) fail(known *login, refused *Attempt) {
	limit := l.MaxBackOff
	if limit == 0 {
		limit = 5 * time.Minute
	}
	wait := min(firstBackOff<<min(known.failures, 10), limit)
	known.failures++
	known.until, known.last = l.now().Add(wait), *refused
}

// wonAt tells whether this login was the last one that worked for a repository.
func (l *Logins) wonAt(repository string, k loginKey) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.winners[repository] == k
}

func (l *Logins) now() time.Time {
	if l.Now != nil {
		return l.Now()
	}
	return time.Now()
}
