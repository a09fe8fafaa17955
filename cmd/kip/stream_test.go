package main

import (
	"encoding/json"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/kip/puller/agent"
)

// wait is the limit of each wait for a running kip.
const wait = time.Minute

// reports takes the standard output of a kip that runs on, as a report a cycle.
type reports struct {
	*io.PipeWriter
	cycles chan agent.Report
	last   agent.Report
}

func newReports() *reports {
	out, in := io.Pipe()
	r := &reports{PipeWriter: in, cycles: make(chan agent.Report, 100)}
	go func() {
		d := json.NewDecoder(out)
		for {
			var report agent.Report
			if d.Decode(&report) != nil {
				return
			}
			r.cycles <- report
		}
	}()
	return r
}

func (r *reports) next(t *testing.T) agent.Report {
	t.Helper()
	select {
	case report := <-r.cycles:
		r.last = report
		return report
	case <-time.After(wait):
		t.Fatalf("no further cycle after %+v", r.last)
		return agent.Report{}
	}
}

// await waits for a cycle of which ok is true.
func (r *reports) await(t *testing.T, ok func(agent.Report) bool) {
	t.Helper()
	for range 50 {
		if ok(r.next(t)) {
			return
		}
	}
	t.Fatal("not after 50 cycles")
}

// lines takes the standard error of a kip that runs on.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
	more chan struct{}
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
	return l.text.Write(p)
}

// await waits until a text was written.
func (l *lines) await(t *testing.T, text string) {
	t.Helper()
	limit := time.After(wait)
	for {
		l.mu.Lock()
		if strings.Contains(l.text.String(), text) {
			l.mu.Unlock()
			return
		}
		if l.more == nil {
			l.more = make(chan struct{})
		}
		more := l.more
		l.mu.Unlock()
		select {
		case <-more:
		case <-limit:
			t.Fatalf("no %q in %s", text, l.text.String())
		}
	}
}
