package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/slab"
	"lookaside/tiers/tiertest"
)

// What lies on a device is checked, found bad and repaired, as a directory's is.
func TestCheckDevices(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "dax0.0")
	p, err := daxtier.Open(daxtier.Options{Devices: []daxtier.DeviceSpec{{Path: path,
		SizeBytes: 8 << 20}}, AllowFiles: true, SlabBytes: 8<<20 - 8192})
	if err != nil {
		t.Fatal(err)
	}
	run := func(want int, args ...string) (string, string) {
		t.Helper()
		out, errs := new(bytes.Buffer), new(bytes.Buffer)
		root := newRoot()
		root.SetArgs(append([]string{"check"}, args...))
		root.SetOut(out)
		root.SetErr(errs)
		if err := root.ExecuteContext(t.Context()); (err != nil) != (want != 0) {
			t.Errorf("check %v: %v", args, err)
		} else if err != nil {
			errs.WriteString(err.Error())
		}
		return out.String(), errs.String()
	}
	g := tiers.Geometry{PageBytes: 4096, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32}
	space := tiertest.NewSpace("check", g)
	prefix := tiertest.Prefix{1, 2, 3, 4}
	tr := tiers.Transfer{Run: prefix.Run(space, 0, 4), Bytes: make([]byte, 4*4096)}
	tiertest.FillRun(tr.Bytes, tr.Run)
	p.Store(t.Context(), []tiers.Transfer{tr}, func(_ int, e error) { err = e })
	if err != nil {
		t.Fatal(err)
	}
	if _, errs := run(1, path); !strings.Contains(errs, "in use") {
		t.Errorf("of a device in use: %s", errs)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	out, _ := run(0, "--json", path)
	var r slab.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Slabs) != 1 ||
		r.Slabs[0].Chunks != 1 || r.Slabs[0].File != path+"/slab-000" {
		t.Errorf("%s: %v", out, err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(b, tr.Bytes[4096:2*4096])
	if at < 0 {
		t.Fatal("the chunk is not on the device")
	}
	b[at] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, errs := run(1, path); !strings.Contains(errs, "1 things are bad") {
		t.Errorf("of a chunk that has rotted: %s", errs)
	}
	run(1, "--repair", path)
	run(0, path)
	if _, errs := run(1, path, dir); !strings.Contains(errs, "a tier at a time") {
		t.Errorf("of a device and a directory: %s", errs)
	}
	if _, errs := run(1, path, "--offset", "4K"); !strings.Contains(errs, "no partition") {
		t.Errorf("of another place: %s", errs)
	}
	if _, errs := run(1, filepath.Join(dir, "none")); !strings.Contains(errs, "no such file") {
		t.Errorf("of nothing: %s", errs)
	}
}

// Whatever has the name of a slab, a lock or a tier: check says what is wrong, and waits for
// nobody.
func TestCheckPipesAndLinks(t *testing.T) {
	check := func(args ...string) string {
		t.Helper()
		out := new(bytes.Buffer)
		root := newRoot()
		root.SetArgs(append([]string{"check"}, args...))
		root.SetOut(out)
		root.SetErr(out)
		if err := root.ExecuteContext(t.Context()); err != nil {
			out.WriteString(err.Error())
		} else {
			t.Errorf("check %v finds nothing wrong: %s", args, out)
		}
		return out.String()
	}
	fails := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	pipe, loop := filepath.Join(dir, "pipe"), filepath.Join(dir, "loop")
	fails(syscall.Mkfifo(pipe, 0o600))
	fails(os.Symlink(loop, loop))
	for path, want := range map[string]string{pipe: "neither", loop: "too many levels",
		"/dev/null": "/dev/null", os.Args[0]: "no partition"} {
		if said := check(path); !strings.Contains(said, want) {
			t.Errorf("%s: %s", path, said)
		}
	}
	d, err := slab.Open(slab.Options{Dirs: []string{filepath.Join(dir, "kv")},
		CapacityBytes: 1 << 20, SlabBytes: 256 << 10})
	fails(err)
	fails(d.Close())
	file := func(n uint32) string { return filepath.Join(dir, "kv", slab.SlabName(n)) }
	fails(errors.Join(os.Remove(file(1)), syscall.Mkfifo(file(1), 0o600)))
	fails(errors.Join(os.Rename(file(2), filepath.Join(dir, "elsewhere")),
		os.Symlink("../elsewhere", file(2))))
	fails(errors.Join(os.Remove(file(3)), os.Symlink(pipe, file(3))))
	said := check(filepath.Join(dir, "kv"))
	if !strings.Contains(said, "3 things are bad") ||
		strings.Count(said, "not a regular file") != 3 {
		t.Error(said)
	}
	lock := filepath.Join(dir, "kv", slab.LockName)
	fails(errors.Join(os.Remove(lock), syscall.Mkfifo(lock, 0o600)))
	if said := check(filepath.Join(dir, "kv")); !strings.Contains(said, "not a regular file") {
		t.Error(said)
	}
	// A sidecar goes on without them: what is no file is made one.
	fails(os.Remove(lock))
	d, err = slab.Open(slab.Options{Dirs: []string{filepath.Join(dir, "kv")},
		CapacityBytes: 1 << 20, SlabBytes: 256 << 10, RetryEvery: time.Millisecond})
	fails(err)
	for end := time.Now().Add(time.Minute); d.Stats().CapacityBytes < 1<<20; time.Sleep(
		time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v", d.Stats())
		}
	}
	fails(d.Close())
	if info, err := os.Stat(filepath.Join(dir, "elsewhere")); err != nil || info.Size() != 256<<10 {
		t.Errorf("what a link led to: %v, %v", info, err)
	}
}
