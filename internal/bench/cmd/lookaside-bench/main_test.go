package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"lookaside/dax"
	"lookaside/internal/bench/lookupserver"
	"lookaside/internal/bench/memcopybench"
	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
)

// benchForm checks that a bench printed its table to standard error and one line of JSON in the
// common form to standard output, and wrote the same to the file. It returns the names of the
// cases: those with a limit under true, the others under false.
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

// It is a process of its own: the race detector's memory would count as the engine's.
func TestEngine(t *testing.T) {
	dir := t.TempDir()
	binary, file := filepath.Join(dir, "lookaside-bench"), filepath.Join(dir, "engine.json")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var stdout, stderr strings.Builder
	cmd := exec.Command(binary, "engine", "--pages=8192", "--json", file)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, &stderr)
	}
	names := benchForm(t, "engine", stdout.String(), stderr.String(), file)
	if want := []string{"hits_4096.p50.8192_pages.16_a_chunk",
		"hits_4096.p50.8192_pages.1_a_chunk"}; !slices.Equal(names[true], want) {
		t.Errorf("%v have a limit, not %v", names[true], want)
	}
	if len(names[false]) != 12 {
		t.Errorf("figures without a limit: %v", names[false])
	}
}

func TestMemcopy(t *testing.T) {
	ms, err := memcopybench.Run(t.Context(), memcopybench.Options{
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
	if err := memcopyReport(ms).Print(cmd.OutOrStdout(), cmd.ErrOrStderr(), file); err != nil {
		t.Fatal(err)
	}
	names := benchForm(t, "memcopy", stdout.String(), stderr.String(), file)
	want := []string{"copy.64KiB.1_threads", "pool.64KiB.1_threads", "copy.64KiB.2_threads",
		"pool.64KiB.2_threads"}
	if !slices.Equal(names[true], want) || len(names[false]) > 0 {
		t.Errorf("%v", names)
	}
}

// command is a command with its arguments, and what it will have printed.
func command(args ...string) (root *cobra.Command, stdout, stderr *bytes.Buffer) {
	root, stdout, stderr = newRoot(), new(bytes.Buffer), new(bytes.Buffer)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetArgs(args)
	return root, stdout, stderr
}

// serving starts a command that serves, and decodes the line that says where. The test's end closes
// its input and waits for it.
func serving(t *testing.T, ready any, args ...string) (end func()) {
	t.Helper()
	root, _, _ := command(args...)
	in, closeIn := io.Pipe()
	out, printed := io.Pipe()
	root.SetIn(in)
	root.SetOut(printed)
	ended := make(chan error, 1)
	go func() {
		err := root.Execute()
		ended <- errors.Join(err, printed.CloseWithError(err))
	}()
	end = sync.OnceFunc(func() {
		closeIn.Close()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, ready)
	}
	if err != nil {
		t.Fatal(err)
	}
	return end
}

func TestLookupServer(t *testing.T) {
	var ready lookupserver.Ready
	end := serving(t, &ready, "lookup-server", "--pages=20000", "--prefix-pages=1000",
		"--copy-threads=1")
	answer, err := admin.Ask(t.Context(), ready.Endpoint, admin.Query{EngineID: ready.EngineID,
		Hashes: prefixes.Digests(1, 1000), DigestBytes: ready.DigestBytes, Timeout: time.Minute})
	if err != nil || answer.HitPages != 1000 {
		t.Errorf("%+v, %v", answer, err)
	}
	if ready.Prefixes != 20 || ready.PID != os.Getpid() || ready.CopyThreads != 1 {
		t.Errorf("%+v", ready)
	}
	end()
	if _, err := os.Stat(ready.Endpoint); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", ready.Endpoint, err)
	}
}

// A wrong name must not pass for success.
func TestWrongNames(t *testing.T) {
	for name, args := range map[string][]string{"nothing": {"nothing"},
		"--pages": {"engine", "--pags=1"}, "more": {"echo", "more"}} {
		root, _, _ := command(args...)
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v, want one that names %s", args, err, name)
		}
	}
}

func TestPlot(t *testing.T) {
	dir := t.TempDir()
	report := filepath.Join(dir, "report.json")
	if err := os.WriteFile(report, []byte(`{"traces": [{"name": "x", "ceiling": 0.5}], "results": [
		{"trace": "x", "policy": "lru", "capacity": 10, "hit_ratio": 0.2}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	image := filepath.Join(dir, "hits.svg")
	root, _, _ := command("plot", report, image)
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(image); err != nil || !bytes.Contains(b, []byte("<svg")) {
		t.Errorf("%v: %.100q", err, b)
	}
	for want, args := range map[string][]string{
		"want a name that ends in .png or .svg": {"plot", report, "x.gif"},
		"no such file":                          {"plot", "/nowhere/x.json", image},
		"no report of lookaside simulate":       {"plot", "-", image},
		"accepts 2 arg":                         {"plot", report},
	} {
		root, _, _ := command(args...)
		root.SetIn(strings.NewReader("{}"))
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %s", args, err, want)
		}
	}
}
