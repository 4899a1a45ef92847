package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"lookaside/internal/lmcache"
	"lookaside/sidecar/settings"
)

func TestConfigFromLMCache(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lmcache.yaml")
	if err := os.WriteFile(file,
		[]byte("max_local_cpu_size: 7\nlocal_disk: kv\nmax_local_disk_size: 9\nenable_p2p: true\nremote_url: redis://u:hunter2@h\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out, table, code := run(t, nil, "config", "from-lmcache", file)
	if code != 0 || !strings.Contains(table, "enable_p2p: true") ||
		!strings.Contains(table, "no equivalent") || !strings.Contains(out, file) ||
		strings.Contains(out+table, "hunter2") {
		t.Fatalf("exit code %d:\n%s\n%s", code, out, table)
	}
	// What is printed is what a sidecar takes. Relative paths are of this directory.
	c, err := settings.Parse("stdout", []byte(out), nil)
	here, err2 := os.Getwd()
	if err != nil || err2 != nil || c.Arena.Limit != 7<<30 || len(c.Tiers) != 2 ||
		c.Tiers[0].Disk.Paths[0] != filepath.Join(here, "kv") || c.Tiers[0].Disk.Capacity != 9<<30 {
		t.Errorf("%v, %v: %+v", err, err2, c)
	}

	// The environment counts when asked for, and names the file.
	environ := []string{"LMCACHE_MAX_LOCAL_CPU_SIZE=8", "LMCACHE_CONFIG_FILE=" + file}
	if out, _, code := run(t, environ, "config", "from-lmcache", file); code != 0 ||
		!strings.Contains(out, "limit: 7G") {
		t.Errorf("exit code %d: %s", code, out)
	}
	if out, _, code := run(t, environ, "config", "from-lmcache", "--env"); code != 0 ||
		!strings.Contains(out, "limit: 8G") || !strings.Contains(out, "kind: redis") {
		t.Errorf("exit code %d: %s", code, out)
	}

	// JSON in place of a file, adapters, the server's command line, and JSON out.
	out, table, code = run(t, nil, "config", "from-lmcache", "--json", "--disk-capacity=5G",
		"--l2-adapter", `{"type": "fs", "base_path": "/a"}`,
		`{"max_local_cpu_size": 3}`, "--", "lmcache", "server", "--l2-adapter",
		`{"type": "fs", "base_path": "/b"}`, "--port", "5555")
	var r lmcache.Result
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != 0 || table != "" {
		t.Fatalf("%v, exit code %d: %s%s", err, code, out, table)
	}
	if c, err := settings.Parse("json", []byte(r.YAML), nil); err != nil || len(c.Tiers) != 2 ||
		c.Tiers[0].Disk.Capacity != 5<<30 || c.Arena.Limit != 3<<30 || len(r.Missing()) != 1 {
		t.Errorf("%v: %+v, %+v", err, c, r.Keys)
	}

	cmd := exec.Command(binary, "config", "from-lmcache", "-")
	cmd.Stdin = strings.NewReader("chunk_size: 512\n")
	if b, err := cmd.Output(); err != nil ||
		!strings.Contains(string(b), `"lookaside.chunk_tokens":512`) {
		t.Errorf("%v: %s", err, b)
	}
}

func TestConfigFromLMCacheSaysWhatIsWrong(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want []string
	}{
		{nil, []string{"nothing to convert"}},
		{[]string{"/nowhere"}, []string{"/nowhere"}},
		{[]string{"a", "b"}, []string{`"b"`, "--"}},
		{[]string{"--disk-capacity=lots", "{}"}, []string{"--disk-capacity", "lots"}},
		{[]string{"--l2-adaptor=x"}, []string{"--l2-adaptor", `"--l2-adapter"`}},
		{[]string{`{"chunk_size": "many"}`}, []string{"chunk_size", "many"}},
		// converted, but no sidecar would take it
		{[]string{`{"remote_url": "redis://h h"}`}, []string{"by hand", "url"}},
	} {
		_, stderr, code := run(t, nil, append([]string{"config", "from-lmcache"}, tc.args...)...)
		for _, w := range tc.want {
			if code != 1 || !strings.Contains(stderr, w) {
				t.Errorf("%v: exit code %d: %q does not say %s", tc.args, code, stderr, w)
			}
		}
	}
	out, _, code := run(t, nil, "config", "--help")
	if code != 0 || !strings.Contains(out, "from-lmcache") {
		t.Errorf("exit code %d: %s", code, out)
	}
}
