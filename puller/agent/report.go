package agent

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/containerd/containerd/v2/pkg/progress"

	"example.com/kip/puller"
)

// Report is the outcome of one cycle, in the form of kip's JSON output.
type Report struct {
	Version  int             `json:"version"`
	Sources  []SourceReport  `json:"sources"`
	Warnings []string        `json:"warnings"`
	Images   []puller.Result `json:"images"`
	Present  int             `json:"present"`
	Failed   int             `json:"failed"`
	Skipped  int             `json:"skipped"`
}

// SourceReport says how a source of images answered.
type SourceReport struct {
	Name string `json:"name"`
	// State is ok or failed; Message says why it failed.
	State   string `json:"state"`
	Message string `json:"message"`
	// Images is how many it named.
	Images int `json:"images"`
}

const (
	sourceOK     = "ok"
	sourceFailed = "failed"
)

// OK tells whether all wanted images are present and all sources answered.
func (r Report) OK() bool {
	for _, s := range r.Sources {
		if s.State != sourceOK {
			return false
		}
	}
	return r.Failed == 0
}

// daemonGone tells whether containerd went away in the cycle.
func (r Report) daemonGone() bool {
	return slices.ContainsFunc(r.Images, func(i puller.Result) bool { return i.Reason == puller.DaemonUnavailable })
}

// WriteJSON writes the report as one JSON document.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// WriteText writes the report for people: a line for each image, the reason and
// message of a failed one below it, and the sums.
func (r Report) WriteText(w io.Writer) error {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	if len(r.Images) > 0 {
		fmt.Fprintln(table, "IMAGE\tSTATE\tACTION\tCREDENTIAL\tBYTES\tSECONDS")
	}
	for _, i := range r.Images {
		cred := i.Credential
		if cred == "" {
			cred = "-"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%.1f\n", i.Image, i.State, i.Action, cred, progress.Bytes(i.Bytes), i.Seconds)
	}
	table.Flush()
	for _, s := range r.Sources {
		if s.State != sourceOK {
			fmt.Fprintf(&b, "source %s failed: %s\n", s.Name, s.Message)
		}
	}
	for _, i := range r.Images {
		if i.State != puller.Present {
			fmt.Fprintf(&b, "%s: %s: %s\n", i.Image, i.Reason, i.Message)
		}
	}
	for _, warning := range r.Warnings {
		fmt.Fprintf(&b, "warning: %s\n", warning)
	}
	fmt.Fprintf(&b, "%d present, %d failed, %d skipped\n", r.Present, r.Failed, r.Skipped)
	_, err := io.WriteString(w, b.String())
	return err
}
