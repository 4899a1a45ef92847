package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
)

// storePages stores that many pages, of four a chunk, and leaves the worker connected.
func storePages(t *testing.T, s *server, pages int) (words []string) {
	t.Helper()
	packed, words := hashes(pages)
	storeThese(t, s.worker(), packed)
	return words
}

// storeThese stores pages under these names.
func storeThese(t *testing.T, w *client.Session, packed []byte) {
	t.Helper()
	var g wire.StoreGrant
	if err := w.Call(&wire.PrepareStore{ID: 1, Hashes: packed}, &g, patience); err != nil {
		t.Fatal(err)
	}
	if g.Store != 0 {
		if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Call(&wire.Ping{ID: 2}, new(wire.Pong), patience); err != nil {
		t.Fatal(err)
	}
}

// A commander runs commands on one sidecar.
type commander struct {
	t   *testing.T
	dir string
}

func (c commander) run(args ...string) (stdout, stderr string, code int) {
	c.t.Helper()
	return run(c.t, []string{"LOOKASIDE_RUNTIME_DIR=" + c.dir}, args...)
}

// says runs a command that must succeed and say all of want, and with --json be of the form of out.
func (c commander) says(args []string, out any, want ...string) {
	c.t.Helper()
	stdout, stderr, code := c.run(args...)
	if code != 0 {
		c.t.Fatalf("%v: exit code %d: %s", args, code, stderr)
	}
	for _, w := range want {
		if !strings.Contains(stdout, w) {
			c.t.Errorf("%v: %q does not say %s", args, stdout, w)
		}
	}
	if out != nil {
		if err := json.Unmarshal([]byte(stdout), out); err != nil {
			c.t.Errorf("%v: %v: %s", args, err, stdout)
		}
	}
}

func (c commander) fails(args []string, want ...string) {
	c.t.Helper()
	_, stderr, code := c.run(args...)
	if code != 1 {
		c.t.Errorf("%v: exit code %d", args, code)
	}
	for _, w := range want {
		if !strings.Contains(stderr, w) {
			c.t.Errorf("%v: %q does not say %s", args, stderr, w)
		}
	}
}

// untilStored waits until the first tier has pages.
func (c commander) untilStored(pages int64) {
	c.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		var r admin.TiersResult
		c.says([]string{"tiers", "--json"}, &r)
		if r.Tiers[0].Pages == pages {
			return
		}
		if time.Now().After(end) {
			c.t.Fatalf("%+v", r)
		}
	}
}

func TestTiersFromTheCommandLine(t *testing.T) {
	near, far := t.TempDir(), t.TempDir()
	flags := []string{"--disk", near + ":8M:slab=1M:name=near:load_timeout=30s",
		"--disk=" + far + ":8M:slab=1M:name=far:admit=never:load_timeout=30s",
		"--lookup-deadline=30s", "--cascade-partial-delay=10ms", "--sessions-share=1"}
	s := serveProcess(t, flags...)
	c := commander{t, s.dir}
	words := storePages(t, s, 10)
	c.untilStored(10)
	file := filepath.Join(t.TempDir(), "hashes")
	if err := os.WriteFile(file, []byte(strings.Join(words, "\n")), 0o600); err != nil {
		t.Fatal(err)
	}

	c.says([]string{"tiers"}, nil, "TIER", "near", "far", " on ", "never", near)
	c.says([]string{"status"}, nil, "near", "promotions", "far")
	c.says([]string{"move", "--from=near", "--to=far", "--keep", "--hashes", file}, nil,
		"in far: 10 of 10 pages")
	c.fails([]string{"clear", "--all", "--tier=near"}, "everything in near", "--yes")
	c.fails([]string{"clear", "--yes"}, "--space", "--all")
	c.says([]string{"clear", "--all", "--tier=near", "--yes"}, nil, "near: 3 chunks")
	c.says([]string{"clear", "--all", "--tier=arena", "--yes"}, nil, "arena: 3 chunks")
	var p admin.ProgressResult
	c.says(append([]string{"prefetch", "--json"}, words...), &p)
	if p.Pages != 10 || !p.Complete {
		t.Errorf("%+v", p)
	}
	var pin admin.PinStatus
	c.says([]string{"pin", "--prefetch", "--label=a label", "--hashes=" + file, "--json"}, &pin)
	if pin.Pages != 10 || pin.Label != "a label" {
		t.Errorf("%+v", pin)
	}
	c.says([]string{"pin", "--list"}, nil, pin.Pin, "a label")
	c.says([]string{"pin", "--hashes=" + file}, nil, "10 of 10", "lookaside unpin")
	c.says([]string{"unpin", pin.Pin}, nil, "unpinned: 1")
	c.fails([]string{"unpin", pin.Pin}, pin.Pin, "404", "/v1/pins")
	c.says([]string{"unpin", "--all"}, nil, "unpinned: 1")
	c.fails([]string{"unpin"}, "--all")
	c.fails([]string{"prefetch", "--space=00ff", words[0]}, "00ff", "open are")
	c.fails([]string{"prefetch"}, "no page hashes")
	c.fails([]string{"move", "--from=near", "--to=fra", words[0]}, `"fra"`, `"far"`)
	c.fails([]string{"move", "--to=far", words[0]}, "from")
	c.fails([]string{"clear", "--all", "--yes", "--tier=neer"}, `"neer"`, `"near"`)

	// It lasts: what another process finds there after the first has drained.
	c.untilStored(10)
	_, stderr, code := run(t, nil, "serve", "--runtime-dir", filepath.Join(t.TempDir(), "x"),
		"--arena-limit=8M", "--disk="+near+":8M:slab=1M")
	if code != 1 || !strings.Contains(stderr, fmt.Sprint(s.cmd.Process.Pid)) ||
		!strings.Contains(stderr, near) {
		t.Errorf("a second sidecar on the directory: exit code %d: %s", code, stderr)
	}
	s.signal(syscall.SIGTERM)
	if code := s.exit(patience); code != 0 {
		t.Errorf("exit code %d:\n%s", code, s.text())
	}
	if out, stderr, code := run(t, nil, "check", near, far); code != 0 {
		t.Errorf("exit code %d: %s%s", code, out, stderr)
	}
	s = serveProcess(t, flags...)
	s.worker()
	commander{t, s.dir}.says(append([]string{"lookup", "--timeout=30s", "--engine-id=engine"},
		words...), nil, "hit: 10 of 10 pages")

	// So does what was there when it was killed.
	s.signal(syscall.SIGKILL)
	s.exit(patience)
	s = serveProcess(t, flags...)
	s.worker()
	commander{t, s.dir}.says(append([]string{"lookup", "--timeout=30s", "--engine-id=engine"},
		words...), nil, "hit: 10 of 10 pages")
}

func TestTiersFromTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	_, stderr, code := run(t, []string{"LOOKASIDE_DISK=" + dir}, "serve")
	if code != 78 || !strings.Contains(stderr, "LOOKASIDE_DISK") ||
		!strings.Contains(stderr, "capacity") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	_, stderr, code = run(t, nil, "serve", "--redis=redis://:hunter2@h")
	if code != 78 || !strings.Contains(stderr, "password_file") ||
		strings.Contains(stderr, "hunter2") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// The help of each command says how it is used.
func TestHelpOfCommands(t *testing.T) {
	for _, name := range []string{"tiers", "prefetch", "pin", "unpin", "clear", "move"} {
		out, _, code := run(t, nil, name, "--help")
		for _, want := range []string{"Usage:", "lookaside " + name, "--json", "--runtime-dir"} {
			if code != 0 || !strings.Contains(out, want) {
				t.Errorf("%s: exit code %d, the help lacks %q", name, code, want)
			}
		}
	}
	if _, stderr, code := run(t, nil, "tiers", "--runtime-dir=/nowhere"); code != 1 ||
		!strings.Contains(stderr, "no sidecar") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}
