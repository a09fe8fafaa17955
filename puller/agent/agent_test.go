package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"example.com/kip/puller"
	"example.com/kip/puller/source"
)

// logTo makes the default logger write to a buffer for the test.
func logTo(t *testing.T) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&b, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return &b
}

// broken is a source that fails.
type broken struct{}

func (broken) Name() string { return "gateway" }

func (broken) Images(context.Context) (source.Answer, error) {
	return source.Answer{Warnings: []string{"it is slow too"}}, errors.New("not there")
}

func TestAFailingSourceLeavesTheOthers(t *testing.T) {
	logTo(t)
	a := New(Config{Sources: []source.Source{broken{}, source.NewList("static", []string{"reg.example/x:1"})}})
	var r Report
	wanted := a.ask(t.Context(), &r)
	if len(wanted) != 1 || wanted[0] != (puller.Wanted{Image: "reg.example/x:1", Source: "static"}) {
		t.Errorf("wanted %+v", wanted)
	}
	if r.OK() || r.Sources[0] != (SourceReport{Name: "gateway", State: "failed", Message: "not there"}) || r.Sources[1] != (SourceReport{Name: "static", State: "ok", Images: 1}) {
		t.Errorf("sources %+v", r.Sources)
	}
	if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "it is slow too") {
		t.Errorf("warnings %q", r.Warnings)
	}
}

func TestAChangeIsLoggedOnceAndNothingEachCycle(t *testing.T) {
	log := logTo(t)
	a := New(Config{Sources: []source.Source{broken{}}})
	failed := puller.Result{Image: "x", State: puller.Failed, Reason: puller.NotFound, Message: "the registry has no x"}
	present := puller.Result{Image: "x", State: puller.Present, Action: puller.None}
	pulled := puller.Result{Image: "x", State: puller.Present, Action: puller.Pulled}
	for _, result := range []puller.Result{failed, failed, pulled, pulled, present, present, failed, failed} {
		a.nextCycle()
		a.ask(t.Context(), &Report{})
		a.logResult(result)
	}
	if len(a.said) > 3 {
		t.Errorf("what was said is never forgotten: %v", a.said)
	}
	for text, want := range map[string]int{"source gateway failed: not there": 1, "it is slow too": 1, "the registry has no x": 2, "msg=pulled": 2, "msg=present": 0} {
		if got := strings.Count(log.String(), text); got != want {
			t.Errorf("%q is logged %d times, want %d:\n%s", text, got, want, log)
		}
	}
}

func TestTheReportIsTheContract(t *testing.T) {
	r := Report{
		Version: 1, Sources: []SourceReport{{Name: "static", State: "ok", Images: 1}}, Warnings: []string{}, Present: 1,
		Images: []puller.Result{{Image: "a", Source: "static", Ref: "docker.io/library/a:latest", State: "present", Action: "pulled", Names: []string{"n"}}},
	}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	const want = `{"version":1,"sources":[{"name":"static","state":"ok","message":"","images":1}],"warnings":[],` +
		`"images":[{"image":"a","source":"static","ref":"docker.io/library/a:latest","state":"present","action":"pulled","reason":"","message":"",` +
		`"digest":"","id":"","credential":"","attempts":0,"bytes":0,"seconds":0,"pinned":false,"names":["n"]}],"present":1,"failed":0,"skipped":0}` + "\n"
	if b.String() != want {
		t.Errorf("got  %s\nwant %s", &b, want)
	}
}

// ExampleReport_WriteText shows what a person sees of a cycle.
func ExampleReport_WriteText() {
	r := Report{
		Images: []puller.Result{
			{Image: "reg.example/team/a:1", State: puller.Present, Action: puller.Pulled, Credential: "team/reg.example", Bytes: 3 << 20, Seconds: 1.5},
			{Image: "reg.example/team/b:1", State: puller.Failed, Action: puller.None, Reason: puller.NotFound, Message: "the registry does not have it"},
		},
		Present: 1, Failed: 1,
	}
	var b bytes.Buffer
	r.WriteText(&b)
	fmt.Print(b.String())
	// Output:
	// IMAGE                 STATE    ACTION  CREDENTIAL        BYTES    SECONDS
	// reg.example/team/a:1  present  pulled  team/reg.example  3.0 MiB  1.5
	// reg.example/team/b:1  failed   none    -                 0.0 B    0.0
	// reg.example/team/b:1: NotFound: the registry does not have it
	// 1 present, 1 failed, 0 skipped
}
