package puller

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"example.com/kip/resolver"
)

func TestAKeyIsHeldByOneAndForgottenAfterAll(t *testing.T) {
	var m keyedMutex
	var wg sync.WaitGroup
	a, b := new(int), new(int) // each guarded by its key, which the race detector checks
	for i := range 100 {
		key, n := "a", a
		if i%2 == 1 {
			key, n = "b", b
		}
		wg.Go(func() {
			if err := m.Lock(t.Context(), key); err != nil {
				t.Error(err)
				return
			}
			*n++
			m.Unlock(key)
		})
	}
	wg.Wait()
	if *a != 50 || *b != 50 || len(m.locks) != 0 {
		t.Errorf("%d and %d, %d locks left", *a, *b, len(m.locks))
	}
}

func TestAWaitForAKeyEndsWithItsContext(t *testing.T) {
	var m keyedMutex
	if err := m.Lock(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Lock(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	m.Unlock("a")
	if err := m.Lock(t.Context(), "a"); err != nil || len(m.locks) != 1 {
		t.Errorf("error %v, %d locks", err, len(m.locks))
	}
}

// headerTimeout is net/http's own error for a server that says nothing.
func headerTimeout(t *testing.T) error {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := http.Client{Transport: &http.Transport{ResponseHeaderTimeout: time.Millisecond}}
	_, err = c.Get("http://" + l.Addr().String())
	if err == nil {
		t.Fatal("no error")
	}
	return fmt.Errorf("failed to do request: %w", err)
}

func TestEachErrorHasItsReason(t *testing.T) {
	status := func(code int) error {
		return fmt.Errorf("pulling: %w", remoteerrors.ErrUnexpectedStatus{StatusCode: code, Status: fmt.Sprint(code)})
	}
	refused := func(codes ...int) error {
		e := &resolver.RefusedError{}
		for _, c := range codes {
			e.Attempts = append(e.Attempts, resolver.Attempt{Status: c})
		}
		return fmt.Errorf("resolving: %w", e)
	}
	for _, in := range []struct {
		err    error
		reason Reason
	}{
		{refused(401), Unauthorized},
		{refused(403, 404), Denied},
		{refused(404), NotFound},
		{refused(404, 401), NotFound},
		{refused(401, 404), NotFound},
		{refused(401, 403), Denied},
		{fmt.Errorf("failed to extract layer sha256:a: gzip: unexpected EOF: %w", io.ErrUnexpectedEOF), BadLayer},
		{errors.New("failed to extract layer sha256:a: write /x: no space left on device"), NoSpace},
		{fmt.Errorf("failed to extract layer sha256:a: %w", context.Canceled), Cancelled},
		{headerTimeout(t), NetworkError},
		{errors.New("unable to fetch descriptor () which reports content size of zero: invalid argument"), NotAnImage},
		{errors.New("number of layers and diffIDs don't match: 1 != 2"), BadLayer},
		{status(429), RateLimited},
		{status(500), RegistryUnavailable},
		{status(503), RegistryUnavailable},
		{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, NetworkError},
		{&net.DNSError{Name: "nowhere.example", IsNotFound: true}, NetworkError},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, NetworkError},
		{fmt.Errorf("failed to copy: %w", io.ErrUnexpectedEOF), NetworkError},
		{fmt.Errorf("dial: %w", x509.UnknownAuthorityError{}), TLSError},
		{errors.New("http: server gave HTTP response to HTTPS client"), TLSError},
		{fmt.Errorf("read: %w", resolver.ErrStalled), Stalled},
		{fmt.Errorf("write: no space left on device: %w", errdefs.ErrUnknown), NoSpace},
		{errors.New(`unexpected commit digest sha256:a, expected sha256:b: failed precondition`), DigestMismatch},
		{fmt.Errorf("no match for platform in manifest: %w", errdefs.ErrNotFound), NoMatchingPlatform},
		{errors.New("failed to extract layer sha256:a: archive/tar: invalid tar header"), BadLayer},
		{fmt.Errorf("rpc: %w", errdefs.ErrUnavailable), DaemonUnavailable},
		{fmt.Errorf("failed to copy: failed to send write: %w", errgrpc.ToNative(io.EOF)), DaemonUnavailable},
		{fmt.Errorf("pull: %w", context.DeadlineExceeded), DeadlineExceeded},
		{fmt.Errorf("pull: %w", context.Canceled), Cancelled},
		{errors.New("what is this"), Internal},
	} {
		if got := reasonOf(in.err); got != in.reason {
			t.Errorf("%v: %s, want %s", in.err, got, in.reason)
		}
	}
}

func TestAReferenceIsNormalisedAsCRIDoes(t *testing.T) {
	const digest = "@sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	for in, want := range map[string]string{
		"nginx":                    "docker.io/library/nginx:latest",
		"elyra/kernel-py:3":        "docker.io/elyra/kernel-py:3",
		"localhost:5000/x":         "localhost:5000/x:latest",
		"ghcr.io/a/b:1" + digest:   "ghcr.io/a/b" + digest,
		"index.docker.io/a/b":      "docker.io/a/b:latest",
		"registry.example/a/b":     "registry.example/a/b:latest",
		"[::1]:5000/a/b":           "[::1]:5000/a/b:latest",
		"MyRegistry/kernel-py:1":   "MyRegistry/kernel-py:1",
		"r.io/app:t" + digest:      "r.io/app" + digest,
		"myreg/x/y":                "docker.io/myreg/x/y:latest",
		"LOCALHOST/x":              "LOCALHOST/x:latest",
		"My.Registry/x":            "My.Registry/x:latest",
		"NGINX":                    "",
		"r.io/App":                 "",
		strings.Repeat("a1", 32):   "",
		"myDockerHub/MyKernel:tag": "",
		"${KERNEL_IMAGE}":          "",
		"https://reg/x:1":          "",
		"":                         "",
		"a b":                      "",
	} {
		ref, err := ParseReference(in)
		if got := ref; (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("%q: %v, error %v, want %q", in, got, err, want)
		}
	}
}

func TestHasRegistryKnowsARegistryFromARepository(t *testing.T) {
	for in, want := range map[string]bool{
		"nginx": false, "elyra/kernel:1": false, "nginx:1.2": false, "a/b/c": false, "MyReg/x": false,
		"localhost/x": true, "localhost:5000/x": true, "quay.io/x": true, "reg:5000/x/y": true, "10.0.0.1/x": true,
	} {
		if got := HasRegistry(in); got != want {
			t.Errorf("%q: %v", in, got)
		}
	}
}

// clock is a memory's, moved by hand.
func clock() (*memory, func(time.Duration)) {
	now := time.Now()
	return &memory{now: func() time.Time { return now }}, func(d time.Duration) { now = now.Add(d) }
}

func anyReference(t *testing.T) Reference {
	t.Helper()
	ref, err := ParseReference("r.io/x:1")
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func TestAFightWithTheGarbageCollectorIsNotFought(t *testing.T) {
	const gib = 1 << 30
	ref := anyReference(t)
	for name, c := range map[string]struct {
		full  bool
		pulls int // in the first 24 hours, after the first
	}{
		"the disk is full": {true, 4},
		"it is not":        {false, 5}, // once at once: a person may have done it
	} {
		m, pass := clock()
		pulls := -1
		for at := time.Duration(0); at < 24*time.Hour; at += 5 * time.Minute {
			if m.held(ref, 10*gib) == nil {
				m.notePulled(ref, []string{"r.io/x:1"}, gib)
				pulls++
			}
			pass(5 * time.Minute)
			if len(m.records(ref)) > 0 {
				m.noteRemoved(ref, c.full, 10*gib) // each time, and soon
			}
		}
		if pulls > c.pulls || pulls < 3 {
			t.Errorf("%s: %d pulls", name, pulls)
		}
	}
}

func TestAHoldEndsWithMoreSpace(t *testing.T) {
	const gib = 1 << 30
	ref := anyReference(t)
	m, _ := clock()
	m.notePulled(ref, []string{"r.io/x:1"}, 3*gib)
	m.noteRemoved(ref, true, 10*gib)
	for _, c := range []struct {
		free int64
		held bool
	}{{-1, true}, {10 * gib, true}, {12 * gib, true}, {13 * gib, false}, {10 * gib, false}} {
		if err := m.held(ref, c.free); (err != nil) != c.held {
			t.Errorf("with %d free: %v", c.free, err)
		}
	}
	m.noteNoSpace(ref, 3*gib, gib, syscall.ENOSPC)
	if err := m.held(ref, 2*gib); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v", err)
	}
	if err := m.held(ref, 3*gib); err != nil {
		t.Errorf("error %v", err)
	}
}

func TestAnImageThatStaysHasNoPast(t *testing.T) {
	ref := anyReference(t)
	m, pass := clock()
	m.notePulled(ref, []string{"r.io/x:1"}, 1)
	m.noteRemoved(ref, false, -1)
	m.notePulled(ref, []string{"r.io/x:1"}, 1)
	pass(2 * soon)
	m.notePresent(ref)
	if len(m.records(ref)) > 0 {
		t.Error("a removal would count as soon after the pull")
	}
	m.notePulled(ref, []string{"r.io/x:1"}, 1)
	m.noteRemoved(ref, false, -1)
	if err := m.held(ref, -1); err != nil {
		t.Errorf("the first removal in hours: %v", err)
	}
}

func TestWhatIsHopelessIsSoForOneDigestAndDaemon(t *testing.T) {
	ref := anyReference(t)
	m, _ := clock()
	m.noteHopeless(ref, "sha256:a", "2.4", errNotRunnable)
	if err := m.isHopeless(ref, "sha256:a", "2.4"); !errors.Is(err, errNotRunnable) {
		t.Errorf("error %v", err)
	}
	if m.isHopeless(ref, "sha256:b", "2.4") != nil || m.isHopeless(ref, "sha256:a", "2.5") != nil {
		t.Error("another digest or daemon is not tried")
	}
	m.forget(map[string]bool{})
	if m.isHopeless(ref, "sha256:a", "2.4") != nil {
		t.Error("an image that was not wanted meanwhile is not tried")
	}
}

func TestWhatIsReservedIsGivenBackOnce(t *testing.T) {
	d := disk{opts: DiskOptions{Threshold: 100}, path: t.TempDir()}
	need := func() (int64, error) { return 1, nil }
	first, err := d.reserve(t.Context(), need)
	if err != nil {
		t.Fatal(err)
	}
	a := &admission{release: first}
	second, err := d.reserve(t.Context(), need)
	if err != nil || d.pulls != 2 {
		t.Fatalf("%d reserved, error %v", d.pulls, err)
	}
	a.close()
	a.close()
	if d.pulls != 1 {
		t.Errorf("%d reserved", d.pulls)
	}
	second()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	hold, err := d.reserve(t.Context(), need)
	if err != nil {
		t.Fatal(err)
	}
	defer hold()
	if _, err := d.reserve(ctx, func() (int64, error) { return 1 << 62, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait for others goes on after its context: %v", err)
	}
}
