package testenv

import (
	"net"
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
	// Reset breaks the connection after so many bytes of the body.
	Reset int
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
		if a.Reset > 0 && a.Reset < len(a.Body) {
			w.Write([]byte(a.Body[:a.Reset]))
			reset(w)
			return
		}
		w.Write([]byte(a.Body))
		if a.Stall {
			http.NewResponseController(w).Flush()
			<-req.Context().Done()
		}
	}))}
}

// reset ends a connection in the way that a firewall does.
func reset(w http.ResponseWriter) {
	c := http.NewResponseController(w)
	c.Flush()
	conn, _, err := c.Hijack()
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	conn.Close()
}

// Host is the server's address, as it stands in image names.
func (f *Fake) Host() string { return f.host }

// Requests are those that the server has seen so far.
func (f *Fake) Requests() []Request { return f.requests() }
