package source

import (
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"example.com/kip/secrets"
)

// canary is the token of all gateways here. It may be in no error and no warning.
const canary = "canary-7f3a"

const oneKernel = `{"kernelspecs":{"k":{"spec":{"metadata":{"process_proxy":{"config":{"image_name":"a:1"}}}}}}}`

// newGateway returns a gateway that sends the canary.
func newGateway(t *testing.T, host string) *Gateway {
	t.Helper()
	g, err := NewGateway(GatewayOptions{Host: host, Token: secrets.NewSecret(canary)})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// ask asks the gateway and looks at all that it says for the token and for more than one line.
func ask(t *testing.T, ctx context.Context, g *Gateway) (Answer, error) {
	t.Helper()
	answer, err := g.Images(ctx)
	said := answer.Warnings
	if err != nil {
		said = append(said, err.Error(), fmt.Sprintf("%+v", err))
	}
	for _, text := range said {
		if strings.Contains(text, canary) {
			t.Errorf("the token is shown: %s", text)
		}
		if strings.ContainsFunc(text, unicode.IsControl) {
			t.Errorf("not one line of plain text: %q", text)
		}
	}
	return answer, err
}

func serve(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server
}

func serveTLS(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // handshakes that a test wants to fail
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// answer is a handler that gives this body.
func answer(contentType, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		io.WriteString(w, body)
	}
}

// raw is a handler that writes these bytes to the connection, with TOKEN in them replaced by what the client sent, and
// closes it.
func raw(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(err)
		}
		defer conn.Close()
		io.WriteString(conn, strings.ReplaceAll(text, "TOKEN", req.Header.Get("Authorization")))
	}
}

func TestGatewayIsAskedWithTheTokenInTheHeaderOnly(t *testing.T) {
	for _, test := range []struct{ name, prefix, token, path, authorization string }{
		{"without a path", "", "T", "/api/kernelspecs", "token T"},
		{"with a slash at the end", "/", "T", "/api/kernelspecs", "token T"},
		{"with a path", "/gateway", "T", "/gateway/api/kernelspecs", "token T"},
		{"with a path and a slash", "/a/b%2Fc/", "T", "/a/b%2Fc/api/kernelspecs", "token T"},
		{"with space around the token", "", " T\n", "/api/kernelspecs", "token T"},
		{"with space around the host", "\n", "T", "/api/kernelspecs", "token T"},
		{"without a token", "", "", "/api/kernelspecs", ""},
		{"with a token of space", "", "\n", "/api/kernelspecs", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got *http.Request
			server := serve(t, func(w http.ResponseWriter, req *http.Request) {
				got = req
				io.WriteString(w, oneKernel)
			})
			var g Source
			g, err := NewGateway(GatewayOptions{Host: server.URL + test.prefix, Token: secrets.NewSecret(test.token), UserAgent: "kip/1"})
			if err != nil {
				t.Fatal(err)
			}
			if g.Name() != "gateway" {
				t.Errorf("the name is %q", g.Name())
			}
			images, err := g.Images(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Answer{Images: []string{"a:1"}}, images); diff != "" {
				t.Error(diff)
			}
			want := []string{"GET", test.path, test.authorization, "kip/1", "application/json"}
			is := []string{got.Method, got.RequestURI, got.Header.Get("Authorization"), got.UserAgent(), got.Header.Get("Accept")}
			if diff := cmp.Diff(want, is); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestGatewayAnswersEveryShapeAtOnce(t *testing.T) {
	body, want := allShapes()
	got, err := ask(t, t.Context(), newGateway(t, serve(t, answer("application/json", body)).URL))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestGatewayIsRefusedForItsHost(t *testing.T) {
	const notURL = "the gateway's host is not an absolute http or https URL, such as http://localhost:18888"
	for _, test := range []struct{ name, host, want string }{
		{"that is empty", "", notURL},
		{"without a scheme", "localhost:18888", notURL},
		{"without a scheme and a port", "gateway.example.com", notURL},
		{"of another scheme", "ftp://gateway.example.com", notURL},
		{"that is a socket", "unix:///run/gateway.sock", notURL},
		{"without a name", "http://", notURL},
		{"with a port alone", "http://:18888", notURL},
		{"that is no URL", "http://us%er:" + canary + "@gateway", notURL},
		{"with a port that is none", "http://gateway:" + canary, notURL},
		{"with a user", "http://user@gateway", "the gateway's URL holds a user or password: only a token is sent, and it is given apart from the URL"},
		{"with a password", "https://user:" + canary + "@gateway", "the gateway's URL holds a user or password: only a token is sent, and it is given apart from the URL"},
		{"with a query", "http://gateway/?token=" + canary, "the gateway's URL holds a query or fragment: a token is given apart from the URL"},
		{"with an empty query", "http://gateway/?", "the gateway's URL holds a query or fragment: a token is given apart from the URL"},
		{"with a fragment", "http://gateway/#" + canary, "the gateway's URL holds a query or fragment: a token is given apart from the URL"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := NewGateway(GatewayOptions{Host: test.host})
			if err == nil || err.Error() != test.want {
				t.Errorf("got %v, want %s", err, test.want)
			}
		})
	}
}

func TestGatewayIsRefusedForATokenThatNoHeaderCarries(t *testing.T) {
	_, err := NewGateway(GatewayOptions{Host: "http://gateway", Token: secrets.NewSecret(canary + "\n" + canary)})
	if err == nil || err.Error() != "the gateway's token (KIP_AUTH_TOKEN) holds a control character" {
		t.Error(err)
	}
}

func TestGatewayFailsOn(t *testing.T) {
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, req *http.Request) {
			http.Error(w, "<html>"+req.Header.Get("Authorization"), code)
		}
	}
	const html = "answered HTML, not JSON: is this the gateway's address?"
	const notHTTP = "no valid HTTP answer: is this the gateway's address?"
	for _, test := range []struct {
		name    string
		handler http.HandlerFunc
		want    string
	}{
		{"status 401", status(401), "answered 401 Unauthorized: the token was refused"},
		{"status 403", status(403), "answered 403 Forbidden: the token was refused"},
		{"status 404", status(404), "answered 404 Not Found"},
		{"status 500", status(500), "answered 500 Internal Server Error"},
		{"status 204", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, "answered 204 No Content"},
		{"a redirect to nowhere", status(302), "answered 302 Found"},
		{"a status with words of its own", raw("HTTP/1.1 599 TOKEN\r\nContent-Length: 0\r\n\r\n"), "answered 599"},

		{"an HTML page", answer("text/html; charset=utf-8", "<!DOCTYPE html><title>"+canary+"</title>"), html},
		{"an HTML page that says it is JSON", answer("application/json", "\n <html>"), html},
		{"an HTML page with a byte order mark", answer("text/plain", "\ufeff<html>"), html},
		{"a text that says it is HTML", answer("text/html", "Sign in"), html},
		{"an empty page", answer("text/html", ""), "the answer is empty"},
		{"a body that is cut", raw("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + oneKernel), "the answer ends in the middle"},
		{"a chunk that is cut", raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n" + oneKernel), "the answer ends in the middle"},
		{"headers that are cut", raw("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n"), "the answer ends in the middle"},
		{"no answer", raw(""), "the connection was closed without an answer"},
		{"no HTTP", raw("TOKEN\r\n"), notHTTP},
		{"a bad header", raw("HTTP/1.1 200 OK\r\nTOKEN\r\n\r\n"), notHTTP},
		{"a bad chunk", raw("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nTOKEN\r\n"), notHTTP},
		{"bad compression", raw("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nTOKEN and more than a header"), notHTTP},
		{"a redirect to no URL", raw("HTTP/1.1 302 Found\r\nLocation: http://[TOKEN\r\n\r\n"), notHTTP},
		{"a redirect to another protocol", raw("HTTP/1.1 302 Found\r\nLocation: ftp://TOKEN\r\n\r\n"), notHTTP},
	} {
		t.Run(test.name, func(t *testing.T) {
			fails(t, serve(t, test.handler), test.want)
		})
	}
	for _, test := range notKernelspecs {
		t.Run(test.name, func(t *testing.T) {
			fails(t, serve(t, answer("application/json", test.body)), test.want)
		})
	}
}

// fails asserts that a server's answer is this error and nothing else.
func fails(t *testing.T, server *httptest.Server, want string) {
	t.Helper()
	got, err := ask(t, t.Context(), newGateway(t, server.URL))
	want = "GET " + server.URL + "/api/kernelspecs: " + want
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if diff := cmp.Diff(Answer{}, got); diff != "" {
		t.Error(diff)
	}
}

func TestGatewayThatWantsATokenWhenNoneIsGiven(t *testing.T) {
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	g, err := NewGateway(GatewayOptions{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	_, err = g.Images(t.Context())
	want := "GET " + server.URL + "/api/kernelspecs: answered 403 Forbidden: no token was given (KIP_AUTH_TOKEN)"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestGatewayThatIsNotThere(t *testing.T) {
	server := serve(t, nil)
	server.Close()
	_, err := ask(t, t.Context(), newGateway(t, server.URL))
	want := "GET " + server.URL + "/api/kernelspecs: dial tcp " + server.Listener.Addr().String() + ": connect: connection refused"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestGatewayAnswerIsLimited(t *testing.T) {
	const limit = 16 << 20
	right := []byte(oneKernel + strings.Repeat(" ", limit-len(oneKernel)))
	// plain and zipped send the answer, and then the tail, times over.
	plain := func(tail string, times int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { write(w, right, tail, times) }
	}
	zipped := func(tail string, times int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			z, _ := gzip.NewWriterLevel(w, gzip.BestSpeed)
			defer z.Close()
			write(z, right, tail, times)
		}
	}
	const tooLarge = "the answer is larger than 16 MiB"
	megabyte := strings.Repeat(" ", 1<<20)
	t.Run("one byte too much", func(t *testing.T) { fails(t, serve(t, plain(" ", 1)), tooLarge) })
	t.Run("one byte too much, compressed", func(t *testing.T) { fails(t, serve(t, zipped(" ", 1)), tooLarge) })
	t.Run("without an end", func(t *testing.T) { fails(t, serve(t, plain(megabyte, math.MaxInt)), tooLarge) })
	t.Run("without an end, compressed", func(t *testing.T) { fails(t, serve(t, zipped(megabyte, math.MaxInt)), tooLarge) })
	t.Run("just right", func(t *testing.T) {
		got, err := ask(t, t.Context(), newGateway(t, serve(t, plain("", 0)).URL))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(Answer{Images: []string{"a:1"}}, got); diff != "" {
			t.Error(diff)
		}
	})
}

// write writes a body and then the tail, times over or until the reader leaves.
func write(w io.Writer, body []byte, tail string, times int) {
	_, err := w.Write(body)
	for range times {
		if err != nil {
			return
		}
		_, err = io.WriteString(w, tail)
	}
}

func TestGatewayThatIsSlowIsGivenUp(t *testing.T) {
	// Both handlers hang until the client leaves.
	silent := func(_ http.ResponseWriter, req *http.Request) { <-req.Context().Done() }
	stalled := func(w http.ResponseWriter, req *http.Request) {
		io.WriteString(w, `{"kernelspecs":`)
		w.(http.Flusher).Flush()
		<-req.Context().Done()
	}
	for name, handler := range map[string]http.HandlerFunc{"before it answers": silent, "in the middle of the answer": stalled} {
		t.Run(name+" when the caller cancels", func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			server := serve(t, func(w http.ResponseWriter, req *http.Request) {
				cancel()
				handler(w, req)
			})
			_, err := ask(t, ctx, newGateway(t, server.URL))
			givenUp(t, err, context.Canceled, "GET "+server.URL+"/api/kernelspecs: context canceled")
		})
		t.Run(name+" when the caller's time is over", func(t *testing.T) {
			server := serve(t, handler)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			_, err := ask(t, ctx, newGateway(t, server.URL))
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		})
		t.Run(name+" when its own time is over", func(t *testing.T) {
			server := serve(t, handler)
			g, err := NewGateway(GatewayOptions{Host: server.URL, Token: secrets.NewSecret(canary), Timeout: 20 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			_, err = ask(t, t.Context(), g)
			givenUp(t, err, context.DeadlineExceeded, "GET "+server.URL+"/api/kernelspecs: no whole answer in time (20ms at most): context deadline exceeded")
		})
	}
}

func givenUp(t *testing.T, err, is error, want string) {
	t.Helper()
	if err == nil || !errors.Is(err, is) || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestGatewayTimeoutIs30SecondsUnlessSet(t *testing.T) {
	if g := newGateway(t, "http://gateway"); g.timeout != 30*time.Second {
		t.Errorf("it is %s", g.timeout)
	}
}

func TestGatewayConnectionsAreClosedAfterTheCall(t *testing.T) {
	closed := make(chan struct{}, 1)
	server := httptest.NewUnstartedServer(answer("application/json", oneKernel))
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateClosed {
			closed <- struct{}{}
		}
	}
	server.Start()
	defer server.Close()
	if _, err := ask(t, t.Context(), newGateway(t, server.URL)); err != nil {
		t.Fatal(err)
	}
	select {
	case <-closed:
	case <-time.After(time.Minute):
		t.Error("the connection is still open")
	}
}

func TestGatewayNeverShowsTheToken(t *testing.T) {
	const redactedURL = "/[redacted]/api/kernelspecs: "
	t.Run("that is in the host's path", func(t *testing.T) {
		server := serve(t, http.NotFound)
		_, err := ask(t, t.Context(), newGateway(t, server.URL+"/"+canary))
		if want := "GET " + server.URL + redactedURL + "answered 404 Not Found"; err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	})
	t.Run("that is escaped in the host's path", func(t *testing.T) {
		server := serve(t, http.NotFound)
		g, err := NewGateway(GatewayOptions{Host: server.URL + "/ca%20na%22ry", Token: secrets.NewSecret(`ca na"ry`)})
		if err != nil {
			t.Fatal(err)
		}
		_, err = ask(t, t.Context(), g)
		if want := "GET " + server.URL + redactedURL + "answered 404 Not Found"; err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	})
	t.Run("that is in the host's path when time is over", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := ask(t, ctx, newGateway(t, "http://127.0.0.1:1/"+canary))
		givenUp(t, err, context.Canceled, "GET http://127.0.0.1:1"+redactedURL+"context canceled")
	})
	t.Run("that is in the host's name", func(t *testing.T) {
		g := newGateway(t, "http://"+canary+".example.com")
		g.client.Transport.(*http.Transport).DialContext = func(_ context.Context, network, addr string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("lookup " + addr + ":\nno such host")}
		}
		_, err := ask(t, t.Context(), g)
		want := "GET http://[redacted].example.com/api/kernelspecs: dial tcp: lookup [redacted].example.com:80:?no such host"
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	})
	t.Run("that is in what the gateway sends", func(t *testing.T) {
		long := strings.Repeat("x", 95) + canary // cutting comes after redacting
		body := `{"kernelspecs":{"` + canary + `":{"spec":{"metadata":{"process_proxy":{"config":{"image_name":"` + canary + `\u0000"}}}}},` +
			`"` + long + `":null}}`
		got, err := ask(t, t.Context(), newGateway(t, serve(t, answer("application/json", body)).URL))
		if err != nil {
			t.Fatal(err)
		}
		want := []string{
			`kernelspec "[redacted]": process_proxy.config.image_name holds a control character: "[redacted]\x00"`,
			`kernelspec "` + long[:95] + `[reda": the entry is null, not an object`,
		}
		if diff := cmp.Diff(want, got.Warnings); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("when a gateway is printed", func(t *testing.T) {
		g := newGateway(t, "http://gateway")
		for _, verb := range []string{"%v", "%+v", "%#v"} {
			if text := fmt.Sprintf(verb, *g); strings.Contains(text, canary) {
				t.Error(text)
			}
		}
	})
}

// world has every host name that ends in .test, on plain ports and on TLS ports (443 and 8443).
type world struct {
	plain, tls *httptest.Server
}

func newWorld(t *testing.T, handler http.HandlerFunc) world {
	return world{serve(t, handler), serveTLS(t, handler)}
}

// open has the gateway live in the world.
func (w world) open(g *Gateway) {
	transport := g.client.Transport.(*http.Transport)
	transport.Proxy = nil
	transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		server := w.plain
		if strings.HasSuffix(addr, "443") {
			server = w.tls
		}
		return new(net.Dialer).DialContext(ctx, network, server.Listener.Addr().String())
	}
}

func TestRedirect(t *testing.T) {
	const start = "http://gw.test/api/kernelspecs"
	const secure = "https://gw.test/api/kernelspecs"
	const T = "token " + canary
	for _, test := range []struct {
		name  string
		chain []string // the URL that is asked and where each answer leads
		want  []string // Authorization, as each server saw it
	}{
		{"to another path keeps the token", []string{start, "http://gw.test/other"}, []string{T, T}},
		{"to a relative path keeps the token", []string{start, "/other"}, []string{T, T}},
		{"within an https origin keeps the token", []string{secure, "https://gw.test/other"}, []string{T, T}},
		{"within an origin with a port keeps the token", []string{"http://gw.test:8888/api/kernelspecs", "http://gw.test:8888/x"}, []string{T, T}},
		{"five times within the origin keeps the token", []string{start, "/1", "/2", "/3", "/4", "/5"}, []string{T, T, T, T, T, T}},
		{"to another port drops the token", []string{start, "http://gw.test:8888/api/kernelspecs"}, []string{T, ""}},
		{"to another port over TLS drops the token", []string{secure, "https://gw.test:8443/api/kernelspecs"}, []string{T, ""}},
		{"to https drops the token", []string{start, secure}, []string{T, ""}},
		{"from https to http drops the token", []string{secure, start}, []string{T, ""}},
		{"to the other scheme on one port drops the token", []string{"http://gw.test:80/api/kernelspecs", "https://gw.test:443/x"}, []string{T, ""}},
		{"to another host drops the token", []string{start, "http://other.test/api/kernelspecs"}, []string{T, ""}},
		{"to a sub-domain drops the token", []string{start, "http://sub.gw.test/api/kernelspecs"}, []string{T, ""}},
		{"to the parent domain drops the token", []string{start, "http://test/api/kernelspecs"}, []string{T, ""}},
		{"away and back does not bring the token back", []string{start, "http://gw.test:8888/x", start}, []string{T, "", ""}},
		{"to a sub-domain and back does not bring the token back", []string{start, "http://sub.gw.test/x", start, "/more"}, []string{T, "", "", ""}},
		{"away after a step within the origin drops the token", []string{start, "/x", "http://other.test/"}, []string{T, T, ""}},
	} {
		t.Run(test.name, func(t *testing.T) {
			saw, asked, got, err := follow(t, test.chain)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"a:1"}, got.Images); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(test.want, saw); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(absolute(t, test.chain), asked); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// follow asks the first URL's gateway, in a world where each answer but the last leads to the next URL, and returns
// the Authorization and the URL of each request.
func follow(t *testing.T, chain []string) (saw, asked []string, _ Answer, _ error) {
	var mu sync.Mutex
	w := newWorld(t, func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		scheme := "http"
		if req.TLS != nil {
			scheme = "https"
		}
		saw = append(saw, req.Header.Get("Authorization"))
		asked = append(asked, scheme+"://"+req.Host+req.RequestURI)
		if len(saw) == len(chain) {
			io.WriteString(w, oneKernel)
			return
		}
		w.Header().Set("Location", chain[len(saw)])
		w.WriteHeader(http.StatusFound)
	})
	g := newGateway(t, strings.TrimSuffix(chain[0], "/api/kernelspecs"))
	w.open(g)
	got, err := ask(t, t.Context(), g)
	mu.Lock()
	defer mu.Unlock()
	return saw, asked, got, err
}

func absolute(t *testing.T, chain []string) []string {
	base, err := url.Parse(chain[0])
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, location := range chain {
		if base, err = base.Parse(location); err != nil {
			t.Fatal(err)
		}
		all = append(all, base.String())
	}
	return all
}

func TestSixthRedirectIsNotFollowed(t *testing.T) {
	saw, _, _, err := follow(t, []string{"http://gw.test/api/kernelspecs", "/1", "/2", "/3", "/4", "/5", "/6"})
	want := "GET http://gw.test/api/kernelspecs: more than 5 redirects"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if len(saw) != 6 {
		t.Errorf("%d requests", len(saw))
	}
}

func TestRefusalBehindARedirectSaysThatTheTokenWasNotSent(t *testing.T) {
	w := newWorld(t, func(w http.ResponseWriter, req *http.Request) {
		if req.Host == "gw.test" {
			http.Redirect(w, req, "http://other.test/", http.StatusFound)
			return
		}
		w.WriteHeader(http.StatusForbidden)
	})
	g := newGateway(t, "http://gw.test")
	w.open(g)
	_, err := ask(t, t.Context(), g)
	want := "GET http://gw.test/api/kernelspecs: answered 403 Forbidden: a redirect led away from the gateway's address, and the token is not sent there"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestTokenThatCanBeReadOnItsWay(t *testing.T) {
	const plain = "the gateway's token is sent over plain HTTP: it can be read on its way"
	const unverified = "the gateway's token is sent over TLS without verification of the certificate (KIP_VALIDATE_CERT)"
	for _, test := range []struct{ name, host, token, want string }{
		{"over http to another machine has a warning", "http://gw.test", canary, plain},
		{"over http to an address has a warning", "http://192.0.2.1", canary, plain},
		{"over https without verification has a warning", "https://gw.test", canary, unverified},
		{"over https without verification to this machine has a warning", "https://localhost:8443", canary, unverified},
		{"over http to localhost has none", "http://LocalHost:8888", canary, ""},
		{"over http to 127.0.0.1 has none", "http://127.0.0.1", canary, ""},
		{"over http to another loopback address has none", "http://127.1.2.3:8888", canary, ""},
		{"over http to ::1 has none", "http://[::1]:8888", canary, ""},
		{"when there is none has none, over http", "http://gw.test", "", ""},
		{"when there is none has none, over https", "https://gw.test", "", ""},
	} {
		for _, code := range []int{http.StatusOK, http.StatusInternalServerError} {
			t.Run(fmt.Sprintf("%s, answer %d", test.name, code), func(t *testing.T) {
				w := newWorld(t, func(w http.ResponseWriter, _ *http.Request) {
					w.WriteHeader(code)
					io.WriteString(w, oneKernel)
				})
				g, err := NewGateway(GatewayOptions{Host: test.host, Token: secrets.NewSecret(test.token)})
				if err != nil {
					t.Fatal(err)
				}
				w.open(g)
				got, err := ask(t, t.Context(), g)
				if (err == nil) != (code == http.StatusOK) {
					t.Error(err)
				}
				if diff := cmp.Diff(test.want, strings.Join(got.Warnings, "\n")); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

func TestGatewayCertificate(t *testing.T) {
	server := serveTLS(t, answer("application/json", oneKernel))
	verifying := func(t *testing.T) *Gateway {
		g, err := NewGateway(GatewayOptions{Host: server.URL, Token: secrets.NewSecret(canary), ValidateCert: true})
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	t.Run("of an unknown authority is refused", func(t *testing.T) {
		got, err := ask(t, t.Context(), verifying(t))
		want := "GET " + server.URL + "/api/kernelspecs: tls: failed to verify certificate: x509: certificate signed by unknown authority"
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
		if diff := cmp.Diff(Answer{}, got); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("of a known authority is accepted, without a warning", func(t *testing.T) {
		g := verifying(t)
		roots := x509.NewCertPool()
		roots.AddCert(server.Certificate())
		g.client.Transport.(*http.Transport).TLSClientConfig.RootCAs = roots
		got, err := ask(t, t.Context(), g)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(Answer{Images: []string{"a:1"}}, got); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("with control characters in its names is described in one line", func(t *testing.T) {
		g := newGateway(t, "http://gateway")
		err := g.failure(t.Context(), &tls.CertificateVerificationError{Err: errors.New("valid for a\n\x1b[31m" + canary)})
		want := "GET http://gateway/api/kernelspecs: tls: failed to verify certificate: valid for a??[31m[redacted]"
		if err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	})
	t.Run("that is not there is said", func(t *testing.T) {
		plain := serve(t, answer("application/json", oneKernel))
		host := "https" + strings.TrimPrefix(plain.URL, "http")
		_, err := ask(t, t.Context(), newGateway(t, host))
		want := "GET " + host + "/api/kernelspecs: answered plain HTTP, not HTTPS"
		if err == nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	})
}
