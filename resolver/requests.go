package resolver

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
)

// Request is one request that was sent, without anything secret.
type Request struct {
	// Host is the registry, mirror, token service or redirect target that was asked.
	Host, Method string
	// Status is the answer's, 0 where there was none; Error says why not.
	Status int
	Error  string
	// Credential is the name of the credential of the attempt, or anonymous.
	Credential string
	// Duration is the time until the head of the answer.
	Duration time.Duration

	url *url.URL
	err error
}

// maxRequests bounds what is remembered of one image.
const maxRequests = 1000

// recorder notes each request.
type recorder struct {
	next       http.RoundTripper
	requests   *requests
	credential string
}

type requests struct {
	mu   sync.Mutex
	list []Request
}

// RoundTrip notes the request and how it was answered.
func (t *recorder) RoundTrip(req *http.Request) (*http.Response, error) {
	began := time.Now()
	resp, err := t.next.RoundTrip(req)
	r := Request{Host: req.URL.Host, Method: req.Method, Credential: t.credential, Duration: time.Since(began), url: req.URL, err: err}
	if err != nil {
		r.Error = Sanitize(err.Error())
	} else {
		r.Status = resp.StatusCode
	}
	t.requests.mu.Lock()
	defer t.requests.mu.Unlock()
	if len(t.requests.list) < maxRequests {
		t.requests.list = append(t.requests.list, r)
	}
	return resp, err
}

// all returns what was sent so far.
func (r *requests) all() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// outcomes are the last answers of each of the hosts, in their order.
func (r *requests) outcomes(hosts []string) []Request {
	var list []Request
	all := r.all()
	for _, host := range hosts {
		for _, req := range slices.Backward(all) {
			if req.Host == host {
				list = append(list, req)
				break
			}
		}
	}
	return list
}

// String says what became of a request.
func (r Request) String() string {
	if r.err != nil {
		return r.Host + " " + r.Error
	}
	return fmt.Sprintf("%s %d", r.Host, r.Status)
}

// decisive looks at the answers of all hosts where containerd's resolver says that an
// image is not found: a mirror's 404 comes before the refusal or the failure of the
// registry itself there. It returns the error that counts.
func decisive(err error, outcomes []Request) error {
	if !errdefs.IsNotFound(err) {
		return err
	}
	for _, o := range slices.Backward(outcomes) {
		if o.err != nil {
			return fmt.Errorf("asking %s: %w", o.Host, o.err)
		}
		if o.Status >= http.StatusBadRequest && o.Status != http.StatusNotFound {
			return remoteerrors.ErrUnexpectedStatus{
				Status: fmt.Sprintf("%d %s", o.Status, http.StatusText(o.Status)), StatusCode: o.Status,
				RequestMethod: o.Method, RequestURL: o.url.String(),
			}
		}
	}
	return err
}
