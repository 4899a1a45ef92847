// Package doctor says whether a host's sidecars and the vLLM instances on them work, whether they
// are of use, and what to do.
//
// [Gather] collects facts, once, each kind within a deadline: what the kernel says of the host,
// what each sidecar answers, what processes of vLLM were started with. It changes nothing: the only
// thing that it writes is a file without a name in the directories of disk tiers, to learn how fast
// they are. [Diagnose] is a pure function of the facts: it runs a table of checks, each of which
// can be tested with facts that are made up.
//
// A finding has an id that does not change between releases. docs/troubleshooting.md has all of
// them.
package doctor

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// Schema is the version of the JSON form of a [Report]. It changes when a field changes its
// meaning or goes; new fields and new ids do not change it.
const Schema = 1

// Level says how much a finding matters.
type Level string

// The levels, from the least to the worst.
const (
	OK      Level = "ok"      // as it should be
	Note    Level = "note"    // good to know; nothing has to be done
	Warning Level = "warning" // it works, but worse than it could
	Error   Level = "error"   // something does not work
)

var levels = []Level{OK, Note, Warning, Error}

// Finding is one thing that was seen.
type Finding struct {
	ID      string `json:"id" doc:"Stable name of the finding: docs/troubleshooting.md lists them."`
	Level   Level  `json:"level" doc:"ok, note, warning or error."`
	Subject string `json:"subject" doc:"What it is about: host, the directory of a sidecar, an engine, a process."`
	Seen    string `json:"seen" doc:"What was seen."`
	Fix     string `json:"fix" doc:"What to do; empty if nothing is to be done."`
}

// Report is the result of [Diagnose].
type Report struct {
	Schema   int           `json:"schema" doc:"Version of this form: 1."`
	Version  string        `json:"version" doc:"Of the command."`
	Worst    Level         `json:"worst" doc:"The worst level of all findings."`
	Counts   map[Level]int `json:"counts" doc:"Findings by level."`
	Findings []Finding     `json:"findings" doc:"In the order of the checks: the host, the sidecars, the engines, what they share, of what use it is."`
}

// A check looks at one thing. It may only return findings with its ids.
type check struct {
	ids []string
	run func(*Facts) []Finding
}

var checks = slices.Concat(hostChecks, sidecarChecks, engineChecks, shareChecks, useChecks,
	gpuChecks)

// IDs returns the ids of all findings there can be, in the order of the checks.
func IDs() (ids []string) {
	for _, c := range checks {
		for _, id := range c.ids {
			if !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// Diagnose runs all checks on the facts. It panics if a check returns an id that is not its own.
func Diagnose(f *Facts) Report {
	r := Report{Schema: Schema, Version: f.Release, Worst: OK, Counts: map[Level]int{},
		Findings: []Finding{}}
	for _, l := range levels {
		r.Counts[l] = 0
	}
	for _, c := range checks {
		for _, found := range c.run(f) {
			if !slices.Contains(c.ids, found.ID) {
				panic(fmt.Sprintf("doctor: finding %q of a check for %v", found.ID, c.ids))
			}
			r.Findings = append(r.Findings, found)
			r.Counts[found.Level]++
			if slices.Index(levels, found.Level) > slices.Index(levels, r.Worst) {
				r.Worst = found.Level
			}
		}
	}
	return r
}

// Summary returns the report in one line.
func (r *Report) Summary() string {
	n := func(l Level) string {
		if r.Counts[l] == 1 {
			return "1 " + string(l)
		}
		return fmt.Sprintf("%d %ss", r.Counts[l], l)
	}
	return n(Error) + ", " + n(Warning) + ", " + n(Note)
}

// WriteText writes the report for people: the worst first, and what is fine in short. With all,
// what is fine is written as the rest.
func (r *Report) WriteText(w io.Writer, all bool) error {
	var b strings.Builder
	for i := len(levels) - 1; i >= 0; i-- {
		for _, f := range r.Findings {
			if f.Level != levels[i] || f.Level == OK && !all {
				continue
			}
			fmt.Fprintf(&b, "%s  %s  (%s)\n", strings.ToUpper(string(f.Level)), f.ID, f.Subject)
			writeWrapped(&b, "    ", f.Seen)
			if f.Fix != "" {
				writeWrapped(&b, "    → ", f.Fix)
			}
			b.WriteByte('\n')
		}
	}
	var fine []string
	for _, f := range r.Findings {
		if f.Level == OK && !all && !slices.Contains(fine, f.ID) {
			fine = append(fine, f.ID)
		}
	}
	if len(fine) > 0 {
		writeWrapped(&b, "fine: ", strings.Join(fine, ", "))
		b.WriteByte('\n')
	}
	b.WriteString(r.Summary() + "\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// columns is the width of the text.
const columns = 100

// writeWrapped writes text in lines of the width, the first one after the prefix, the others as far
// in.
func writeWrapped(b *strings.Builder, prefix, text string) {
	indent := strings.Repeat(" ", len([]rune(prefix)))
	line := prefix
	for _, word := range strings.Fields(text) {
		if n := len([]rune(line)); n > len([]rune(indent)) && n+len([]rune(word)) >= columns {
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line = indent
		}
		line += word + " "
	}
	b.WriteString(strings.TrimRight(line, " ") + "\n")
}
