package resolver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"
	"unicode"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"

	"example.com/kip/secrets"
)

// ErrNotAnImage is in the error of a name that stands for no image: the page of a
// portal, a blob.
var ErrNotAnImage = errors.New("the registry has no image there")

// RefusedError says that a registry refused every credential that there was for
// a repository.
type RefusedError struct {
	Registry, Repository string
	// Attempts has at least one element.
	Attempts []Attempt
	// NearMisses are keys of secrets that look as if they were meant for this.
	NearMisses []secrets.NearMiss
}

// Attempt is one credential, or none, that a registry refused.
type Attempt struct {
	// Credential is the name of the credential, SECRET/KEY or anonymous.
	Credential string
	// About says what the credential is: its user, kind, age and version.
	About string
	// Status is the HTTP status of the refusal.
	Status int
	// Answer is what the registry said, on one line and without secrets.
	Answer string
	// Hosts are the answers of all hosts that were asked: mirrors, then the registry.
	Hosts []Request
	// Hint is what may be the cause, where something speaks for it.
	Hint string
}

func (e *RefusedError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "registry %s refused repository %s", e.Registry, e.Repository)
	for i, a := range e.Attempts {
		sep := "; then "
		if i == 0 {
			sep = ": "
		}
		b.WriteString(sep + a.String())
	}
	if len(e.Attempts) == 1 && e.Attempts[0].Credential == Anonymous {
		fmt.Fprintf(&b, "; no secret has a credential for %s/%s", e.Registry, e.Repository)
	}
	for _, miss := range e.NearMisses {
		fmt.Fprintf(&b, "; key %q of secret %s does not match: %s", miss.Key, miss.Source, miss.Why)
	}
	return b.String()
}

// Status is the HTTP status that says most of all attempts. A login that was
// accepted and then got 403 or 404 says more than one that was not, and what
// nobody's request got says nothing where there was a login.
func (e *RefusedError) Status() int {
	best := e.Attempts[0].Status
	for _, a := range e.Attempts[1:] {
		if a.Credential != Anonymous && weight[a.Status] > weight[best] {
			best = a.Status
		}
	}
	return best
}

// weight orders the statuses of refusals.
var weight = map[int]int{http.StatusUnauthorized: 1, http.StatusNotFound: 2, http.StatusForbidden: 3}

// String returns the attempt in words.
func (a Attempt) String() string {
	if a.Credential == Anonymous {
		return "anonymous got " + a.Answer + listed(a.Hosts)
	}
	text := fmt.Sprintf("credential %s (%s) got %s%s", a.Credential, a.About, a.Answer, listed(a.Hosts))
	if a.Hint != "" {
		text += " (" + a.Hint + ")"
	}
	return text
}

// listed says what each host answered, where there were several.
func listed(hosts []Request) string {
	if len(hosts) < 2 {
		return ""
	}
	var list []string
	for _, h := range hosts {
		list = append(list, h.String())
	}
	return " (hosts asked: " + strings.Join(list, ", ") + ")"
}

func newAttempt(s *session, err error) Attempt {
	a := Attempt{Credential: s.name(), Status: status(err), Answer: answer(err)}
	if c := s.credential; c != nil {
		a.About, a.Hint = about(*c, time.Now()), hint(*c, time.Now())
	}
	if a.Status == http.StatusUnauthorized && s.credential != nil && errors.Is(err, docker.ErrInvalidAuthorization) && strings.Contains(err.Error(), "insufficient_scope") {
		// The login was good, it just may not pull this repository.
		a.Status, a.Answer = http.StatusForbidden, "a token without the right to pull (insufficient_scope)"
	}
	return a
}

// about says what a credential is, without what is secret in it. A user name can
// be a token.
func about(c secrets.Credential, now time.Time) string {
	user := fmt.Sprintf("user %q", c.Username)
	if strings.HasPrefix(c.Username, "eyJ") || len(c.Username) > 100 {
		user = "a token as user"
	}
	parts := []string{user}
	if kind := c.Kind(); kind != secrets.Password {
		parts = []string{string(kind)}
	}
	if !c.Modified.IsZero() {
		parts = append(parts, fmt.Sprintf("written %s ago, content %s", age(now.Sub(c.Modified)), c.Content))
	}
	return strings.Join(parts, ", ")
}

// age rounds a time to what people say.
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// hint names a known cause of a refusal that can be seen in the credential.
func hint(c secrets.Credential, now time.Time) string {
	old := func(d time.Duration) bool { return !c.Modified.IsZero() && now.Sub(c.Modified) > d }
	switch {
	case c.Kind() == secrets.Password && c.Password == secrets.Secret{}:
		return "its password is empty, so the request was anonymous"
	case c.Username == "AWS" && old(11*time.Hour):
		return "a token of Amazon ECR lives for 12 hours"
	case c.Username == "oauth2accesstoken" && old(50*time.Minute):
		return "an access token of Google lives for an hour"
	case c.Username == "gitlab-ci-token":
		return "a GitLab job's token ends with the job: use a deploy token"
	}
	return ""
}

// isRefusal tells whether another credential may have more success. That is not
// so for rate limits, failing servers and networks: there, one more login is just
// one more request.
func isRefusal(err error) bool {
	switch status(err) {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		return true
	}
	return false
}

// status is the HTTP status behind an error of containerd's resolver, 0 where
// there is none.
func status(err error) int {
	var unexpected remoteerrors.ErrUnexpectedStatus
	switch {
	case errors.As(err, &unexpected):
		return unexpected.StatusCode
	case errors.Is(err, docker.ErrInvalidAuthorization), errors.Is(err, auth.ErrNoToken):
		return http.StatusUnauthorized
	case errdefs.IsNotFound(err):
		return http.StatusNotFound
	}
	return 0
}

// answer is what a registry said when it refused, in few words.
func answer(err error) string {
	var unexpected remoteerrors.ErrUnexpectedStatus
	if !errors.As(err, &unexpected) {
		if errors.Is(err, auth.ErrNoToken) {
			return "an answer without a token from the token service"
		}
		if errors.Is(err, docker.ErrInvalidAuthorization) {
			return "401 Unauthorized" + serverMessage(err)
		}
		return "404 Not Found"
	}
	text := unexpected.Status
	if u, err := url.Parse(unexpected.RequestURL); err == nil {
		text += fmt.Sprintf(" from %s://%s%s", u.Scheme, u.Host, u.Path)
		if strings.HasPrefix(u.Path, "/v2/") { // a token service's answer may hold anything
			text += detail(unexpected.Body)
		}
	}
	return Sanitize(text)
}

// serverMessage is what the registry's challenge said, in brackets.
func serverMessage(err error) string {
	_, text, ok := strings.Cut(err.Error(), "server message: ")
	if !ok {
		return ""
	}
	text, _, _ = strings.Cut(text, ": ")
	return " (" + Sanitize(text) + ")"
}

// detail is the first error of a registry's answer, by the distribution
// specification's section on errors.
func detail(body []byte) string {
	var doc struct {
		Errors []struct{ Code, Message string }
	}
	if json.Unmarshal(body, &doc) != nil || len(doc.Errors) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s: %s)", doc.Errors[0].Code, doc.Errors[0].Message)
}

var (
	// urls finds URLs in a text, up to the end of what may stand in one.
	urls = regexp.MustCompile(`(?i)\b[a-z][a-z0-9+.-]*:(?://|%2f%2f)[^\s"'<>\\]+`)
	// queries finds those of paths alone, as in a relative redirect.
	queries = regexp.MustCompile(`(/[^\s"'<>\\?]*)\?[^\s"'<>\\]+`)
)

// maxText bounds what a registry can put into a message.
const maxText = 2000

// Sanitize makes a text that a registry had a part in fit for logs and reports:
// one line of bounded length, its URLs without user and query, which can hold a
// signature that is as good as a password.
func Sanitize(text string) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}, text)
	text = urls.ReplaceAllStringFunc(text, func(raw string) string {
		if i := strings.IndexAny(raw, "?#"); i >= 0 {
			raw = raw[:i]
		}
		scheme, rest, _ := strings.Cut(raw, "//")
		host, path, slash := strings.Cut(rest, "/")
		if i := strings.LastIndexByte(host, '@'); i >= 0 {
			host = host[i+1:]
		}
		if slash {
			path = "/" + path
		}
		return scheme + "//" + host + path
	})
	text = queries.ReplaceAllString(text, "$1")
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "..."
	}
	return strings.TrimSpace(text)
}
