package testenv

import (
	"net/http"
	"strconv"
)

// Fake is a server that answers as a test tells it to: a registry that lies, a
// host that must get no login. What a real registry does is tested with one.
type Fake struct {
	*server
}

// Answer is what a Fake answers.
type Answer struct {
	Status int
	Header map[string]string
	Body   string
	// Length is the Content-Length, the body's own where it is 0.
	Length int
	// Stall keeps the answer open after the body until the client gives up.
	Stall bool
}

// StartFake starts a server that answers each request as script says.
func StartFake(t T, script func(req *http.Request) Answer) *Fake {
	t.Helper()
	return &Fake{startServer(t, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		a := script(req)
		for name, value := range a.Header {
			w.Header().Set(name, value)
		}
		if a.Length == 0 {
			a.Length = len(a.Body)
		}
		w.Header().Set("Content-Length", strconv.Itoa(a.Length))
		w.WriteHeader(a.Status)
		w.Write([]byte(a.Body))
		if a.Stall {
			http.NewResponseController(w).Flush()
			<-req.Context().Done()
		}
	}))}
}

// Host is the server's address, as it stands in image names.
func (f *Fake) Host() string { return f.host }

// Requests are those that the server has seen so far.
func (f *Fake) Requests() []Request { return f.requests() }
