package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/disk"
	"lookaside/tiers/pool"
	"lookaside/tiers/tiertest"
)

// What lies on a device is checked, found bad and repaired, as a directory's is.
func TestCheckDevices(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "dax0.0")
	p, err := pool.Open(pool.Options{Devices: []pool.DeviceSpec{{Path: path, SizeBytes: 8 << 20}}, AllowFiles: true, SlabBytes: 8<<20 - 8192})
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
	var r disk.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil || len(r.Slabs) != 1 || r.Slabs[0].Chunks != 1 || r.Slabs[0].File != path+"/slab-000" {
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
