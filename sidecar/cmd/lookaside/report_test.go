package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"lookaside/dax"
	"lookaside/dax/memcopy"
)

// benchForm checks that a bench printed its table to standard error and one line of JSON in the
// common form to standard output, and wrote the same to the file. It answers the values, of those
// cases that have no limit under false.
func benchForm(t *testing.T, benchmark, stdout, stderr, file string) map[bool][]string {
	t.Helper()
	if strings.Count(stdout, "\n") != 1 || !strings.HasSuffix(stdout, "\n") {
		t.Fatalf("standard output is not one line: %q", stdout)
	}
	written, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[bool][]string)
	for _, text := range []string{stdout, string(written)} {
		var whole map[string]json.RawMessage
		var cases []map[string]any
		if err := json.Unmarshal([]byte(text), &whole); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(whole["cases"], &cases); err != nil {
			t.Fatal(err)
		}
		if len(whole) != 2 || string(whole["benchmark"]) != `"`+benchmark+`"` || len(cases) == 0 {
			t.Errorf("%s", text)
		}
		clear(names)
		for _, c := range cases {
			name, _ := c["name"].(string)
			unit, _ := c["unit"].(string)
			value, ok := c["value"].(float64)
			if len(c) != 6 || name == "" || unit == "" || !ok || value <= 0 {
				t.Errorf("case %v", c)
			}
			limited := c["limit"] != nil
			for _, key := range []string{"limit", "ratio", "spread"} {
				v, there := c[key]
				if _, number := v.(float64); !there || number != limited {
					t.Errorf("%s of case %v", key, c)
				}
			}
			names[limited] = append(names[limited], name)
			if !strings.Contains(stderr, name) {
				t.Errorf("%s is not in the table:\n%s", name, stderr)
			}
		}
	}
	return names
}

func TestBenchEngine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "engine.json")
	stdout, stderr, code := run(t, nil, "bench", "engine", "--pages=8192", "--json", file)
	if code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	names := benchForm(t, "engine", stdout, stderr, file)
	if want := []string{"hits_4096.p50.8192_pages.16_a_chunk",
		"hits_4096.p50.8192_pages.1_a_chunk"}; !slices.Equal(names[true], want) {
		t.Errorf("%v have a limit, not %v", names[true], want)
	}
	if len(names[false]) != 12 {
		t.Errorf("figures without a limit: %v", names[false])
	}
}

func TestBenchMemcopy(t *testing.T) {
	ms, err := memcopy.Measure(t.Context(), memcopy.MeasureOptions{
		SizesBytes: []int{64 << 10}, Threads: []int{1, 2}, Rounds: 3, WorkingSetBytes: 2 << 20,
		Kind: dax.KindMemfd})
	if err != nil {
		t.Fatal(err)
	}
	var stdout, stderr strings.Builder
	cmd := &cobra.Command{}
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	file := filepath.Join(t.TempDir(), "memcopy.json")
	if err := memcopyReport(ms).print(cmd, file); err != nil {
		t.Fatal(err)
	}
	names := benchForm(t, "memcopy", stdout.String(), stderr.String(), file)
	want := []string{"copy.64KiB.1_threads", "pool.64KiB.1_threads", "copy.64KiB.2_threads",
		"pool.64KiB.2_threads"}
	if !slices.Equal(names[true], want) || len(names[false]) > 0 {
		t.Errorf("%v", names)
	}
}

// TestBenchRounds has the numbers of test_bench.py.
func TestBenchRounds(t *testing.T) {
	r := newBenchReport("x")
	// 1, 3, 1.2, 1.6, 1.5
	r.rounds("five", "us", []float64{10, 30, 24, 8, 60}, []float64{10, 10, 20, 5, 40})
	r.rounds("one", "us", []float64{123456.7}, []float64{1000})
	got, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"benchmark":"x","cases":[{"name":"five","value":24,"unit":"us","limit":10,"ratio":2.4,"spread":0.4},` +
		`{"name":"one","value":123460,"unit":"us","limit":1000,"ratio":123.46,"spread":0}]}`
	if string(got) != want {
		t.Errorf("%s, not %s", got, want)
	}
	if err := r.print(&cobra.Command{}, filepath.Join(t.TempDir(), "none", "x.json")); err == nil {
		t.Error("a file where none can be was no error")
	}
}
