package resolver

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/auth"
)

// maxAnswer bounds a token service's answer and the text of a refusal.
const maxAnswer = 1 << 20

// answers puts right what registries and token services answer and containerd's
// resolver does not understand.
type answers struct {
	next http.RoundTripper
	// isLast tells whether there is no further host to ask.
	isLast func(host string) bool
}

// RoundTrip returns an answer that containerd's resolver understands.
func (t *answers) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if isToken(req) {
		return tokenAnswer(req, resp)
	}
	splitChallenges(resp.Header)
	isManifest := strings.Contains(req.URL.Path, "/manifests/")
	switch {
	case req.Method == http.MethodHead && isManifest:
		t.head(resp)
	case req.Method == http.MethodGet && resp.StatusCode >= http.StatusBadRequest:
		keepBody(resp)
	case req.Method == http.MethodGet && isManifest:
		resp.Body = &bounded{resp.Body, docker.MaxManifestSize}
	}
	return resp, nil
}

// isToken tells a request for a token from one to a registry: kip posts nothing else,
// and a registry is asked with neither of these.
func isToken(req *http.Request) bool {
	q := req.URL.Query()
	return req.Method == http.MethodPost || q.Has("service") || q.Has("scope")
}

// head makes a HEAD of a manifest that says too little be followed by a GET.
func (t *answers) head(resp *http.Response) {
	if t.askAgain(resp) { // some registries refuse HEAD in other words than this
		resp.StatusCode, resp.Status = http.StatusMethodNotAllowed, "405 Method Not Allowed"
	}
	if resp.ContentLength == 0 { // no manifest is empty
		resp.ContentLength = -1
	}
}

// askAgain tells whether the answer to a HEAD may be about HEAD only. That a mirror
// does not have an image is what mirrors say all the time.
func (t *answers) askAgain(resp *http.Response) bool {
	switch resp.StatusCode {
	case http.StatusBadRequest, http.StatusForbidden, http.StatusNotImplemented:
		return true
	case http.StatusNotFound:
		return t.isLast(resp.Request.URL.Host)
	}
	return false
}

// bounded is the body of a manifest. Containerd would read one that says no length to
// its end, before it finds that it is too large.
type bounded struct {
	io.ReadCloser
	left int64
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return n, fmt.Errorf("%w: its manifest has more than %d bytes", ErrNotAnImage, docker.MaxManifestSize)
	}
	return n, err
}

// keepBody reads the beginning of a refusal's text, which containerd closes before it
// reads it.
func keepBody(resp *http.Response) {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 8<<10))
	resp.Body.Close()
	resp.Body = io.NopCloser(bytes.NewReader(b))
}

// tokenAnswer makes the answer of a token service one that containerd can read. A
// POST that is not answered with an access token is called unknown: a GET follows it.
func tokenAnswer(req *http.Request, resp *http.Response) (*http.Response, error) {
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	resp.Body.Close()
	if err != nil {
		return nil, err
	}
	if len(b) > maxAnswer {
		return nil, fmt.Errorf("the token service %s answers with more than %d bytes", req.URL.Host, maxAnswer)
	}
	if resp.StatusCode == http.StatusOK {
		fixed, err := tokenDocument(b, req.Method == http.MethodPost)
		switch {
		case err == nil:
			b = fixed
		case req.Method == http.MethodPost:
			resp.StatusCode, resp.Status = http.StatusNotFound, "404 Not Found"
		default:
			return nil, fmt.Errorf("%w: the token service %s answers 200 with the type %q: %w", auth.ErrNoToken, req.URL.Host, resp.Header.Get("Content-Type"), err)
		}
	}
	if req.Method == http.MethodPost && (resp.StatusCode == http.StatusForbidden || resp.StatusCode == http.StatusNotImplemented) {
		resp.StatusCode, resp.Status = http.StatusNotFound, "404 Not Found"
	}
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(b)), int64(len(b))
	return resp, nil
}

// tokenDocument reads a token service's document and writes it with expires_in as a
// number, which some write as a string. By POST the token is called access_token.
func tokenDocument(b []byte, post bool) ([]byte, error) {
	var doc map[string]json.RawMessage
	if err := json.Unmarshal(b, &doc); err != nil {
		return nil, errors.New("it is no JSON object")
	}
	if len(doc["access_token"]) == 0 && (post || len(doc["token"]) == 0) {
		return nil, errors.New("it has no token in it")
	}
	var text string
	if json.Unmarshal(doc["expires_in"], &text) == nil {
		var n json.Number
		if json.Unmarshal([]byte(text), &n) != nil {
			n = "60" // the shortest that the specification allows
		}
		doc["expires_in"] = json.RawMessage(n)
	}
	return json.Marshal(doc)
}

// splitChallenges gives each challenge a header of its own. Containerd sees only the
// first of those that share one (RFC 9110, 11.6.1 allows it).
func splitChallenges(h http.Header) {
	var list []string
	for _, line := range h.Values("Www-Authenticate") {
		list = append(list, challenges(line)...)
	}
	if len(list) > 0 {
		h["Www-Authenticate"] = list
	}
}

// challenges splits one header's value. A new challenge begins after a comma with a
// word that is followed by a space, or by nothing, and not by an equals sign.
func challenges(line string) []string {
	var list []string
	begin, quoted := 0, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\\' && quoted:
			i++
		case c == '"':
			quoted = !quoted
		case c == ',' && !quoted && isScheme(line[i+1:]):
			list = append(list, strings.TrimSpace(line[begin:i]))
			begin = i + 1
		}
	}
	return append(list, strings.TrimSpace(line[begin:]))
}

// isScheme tells whether a text begins with a scheme and not with a parameter.
func isScheme(text string) bool {
	text = strings.TrimLeft(text, " \t")
	end := strings.IndexAny(text, " \t=,\"")
	if end == 0 || text == "" {
		return false
	}
	if end < 0 {
		return true
	}
	rest := strings.TrimLeft(text[end:], " \t")
	return rest == "" || rest[0] != '=' && rest[0] != '"'
}
