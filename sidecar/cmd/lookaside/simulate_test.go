package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"lookaside/internal/simulate"
)

// sampleTrace writes conversations of two turns between prompts that come once.
func sampleTrace(t *testing.T, name string) string {
	t.Helper()
	var b strings.Builder
	for i := range 200 {
		fmt.Fprintf(&b, "{\"timestamp\": %d, \"input_length\": 1536, \"hash_ids\": [0, %d, %d]}\n",
			i, 10*i+1, 10*i+2)
		if i%3 == 0 {
			fmt.Fprintf(&b, "{\"hash_ids\": [0, %d, %d, %d]}\n", 10*i+1, 10*i+2, 10*i+3)
		}
	}
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func simulated(t *testing.T, stdin string, args ...string) (string, error) {
	t.Helper()
	root := newRoot()
	var out bytes.Buffer
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&out)
	root.SetErr(&bytes.Buffer{})
	root.SetArgs(append([]string{"simulate"}, args...))
	err := root.Execute()
	return out.String(), err
}

func TestSimulate(t *testing.T) {
	t.Parallel()
	trace := sampleTrace(t, "sample.jsonl")
	out, err := simulated(t, "", trace, "--capacity", "10,0.1k", "--policy", "lru,arc")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out, "\n")
	if lines[0] != "sample: 267 requests, 868 blocks, 468 of them distinct; a cache that never evicts hits 0.4608 of them" {
		t.Error(lines[0])
	}
	if got := strings.Join(strings.Fields(strings.Join(lines[1:4], " ")),
		" "); got != "blocks 10 100 lru 0.4608* 0.4608* arc 0.4608* 0.4608*" {
		t.Error(got)
	}

	out, err = simulated(t, "{\"hash_ids\": [1, 2]}\n{\"hash_ids\": [1, 2]}\n", "-", trace,
		"--format", "json", "--capacity", "5")
	if err != nil {
		t.Fatal(err)
	}
	var report simulate.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Traces) != 2 || len(report.Results) != 12 ||
		report.Traces[0].Name != "standard input" {
		t.Fatalf("%+v", report)
	}
	if r := report.Results[0]; r.Policy != "lru" || r.Capacity != 5 || r.Hits != 2 ||
		r.Ratio != 0.5 {
		t.Errorf("%+v", r)
	}
}

func TestSimulateTiers(t *testing.T) {
	t.Parallel()
	trace := sampleTrace(t, "sample.jsonl")
	out, err := simulated(t, "", trace, "--capacity", "10", "--tier", "0,1k", "--admit", "all")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out, "\n")
	fields := func(line int) string { return strings.Join(strings.Fields(lines[line]), " ") }
	if lines[2] != "adaptive; tier hits and writes against stored in brackets" ||
		fields(3) != "arena tier admit hits of the tier written" ||
		!strings.HasPrefix(fields(4), "10 none 46.1 %") ||
		!strings.HasPrefix(fields(5), "10 1k stored 46.1 % 0.0 % (-) 468 (1.00)") ||
		!strings.HasPrefix(fields(10), "10 1k oracle 46.1 %") {
		t.Error(out)
	}
	out, err = simulated(t, "", trace, "--capacity", "10", "--tier", "1k", "--admit",
		"evicted,learned", "--format", "json")
	if err != nil {
		t.Fatal(err)
	}
	var report simulate.Report
	if err := json.Unmarshal([]byte(out), &report); err != nil || len(report.Results) != 2 ||
		report.Results[0].Admit != "evicted" || report.Results[1].Admit != "learned" ||
		report.Results[1].Tier != 1000 {
		t.Errorf("%v: %s", err, out)
	}
}

func TestSimulateRefuses(t *testing.T) {
	t.Parallel()
	trace := sampleTrace(t, "sample.jsonl")
	for want, args := range map[string][]string{
		"requires at least 1 arg":                   {},
		"no such file":                              {"/nowhere/trace.jsonl"},
		"--format xml: want table or json":          {trace, "--format", "xml"},
		`no eviction policy "fifo": there are lru`:  {trace, "--policy", "fifo"},
		`"0": want a whole number of blocks from 1`: {trace, "--capacity", "0"},
		`"1.5": want a whole number`:                {trace, "--capacity", "1.5"},
		`"99999m": want a whole number`:             {trace, "--capacity", "99999m"},
		`"many": want a whole number`:               {trace, "--capacity", "many"},
		"standard input can be read once only":      {"-", "-"},
		"standard input: line 1: no hash_ids":       {"-"},
		`--tier: "0.5": want a whole`:               {trace, "--tier", "0.5"},
		"use --capacity instead of --memory":        {trace, "--memory", "1G"},
		"--admit never: want one of stored, evicted, learned, reused, second-sight, oracle, or all": {
			trace, "--admit", "never"},
		"unknown flag: --capcity": {trace, "--capcity", "1"},
	} {
		if _, err := simulated(t, "{}", args...); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %s", args, err, want)
		}
	}
}

func TestProgress(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	progress := progressTo(&out, 0)
	progress(0.25)
	progress(1)
	if s := out.String(); !strings.HasPrefix(s, "simulated 25 %, some ") ||
		strings.Count(s, "\n") != 1 {
		t.Errorf("%q", s)
	}
	out.Reset()
	progressTo(&out, time.Hour)(0.5)
	if out.Len() != 0 {
		t.Errorf("%q", out.String())
	}
}
