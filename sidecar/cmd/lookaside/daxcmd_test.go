package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
)

// Files stand in for devices.
func TestDAXFromTheCommandLine(t *testing.T) {
	dir := t.TempDir()
	dev := func(n int) string { return filepath.Join(dir, fmt.Sprintf("dax%d.0", n)) }
	s := serveProcess(t, "--dax="+dev(0)+","+dev(1)+
		":8M:slab=1M:allow_files=true:hotplug=true:load_timeout=30s", "--lookup-deadline=30s",
		"--cascade-partial-delay=10ms", "--sessions-share=1", "--sessions-joint-share=1",
		"--lookup-promote=always")
	c := commander{t, s.dir}
	words := storePages(t, s, 100)
	c.untilStored(100)
	var st admin.DAXStatus
	c.says([]string{"dax", "status", "--json"}, &st)
	if len(st.Devices) != 2 || !st.HotPlugEnabled || st.TotalUsedBytes == 0 {
		t.Fatalf("%+v", st)
	}
	c.says([]string{"dax", "status"}, nil, "DEVICE", dev(0), dev(1), "active", "hot plug")
	c.says([]string{"dax", "add", dev(2), "8M"}, nil, dev(2)+": active")
	var r admin.DAXResult
	c.says([]string{"dax", "remove", dev(0), "--json"}, &r)
	if r.State != "removed" || r.MovedKeys == nil || *r.MovedKeys == 0 || *r.DeletedKeys != 0 {
		t.Errorf("%+v", r)
	}
	// Nothing is lost.
	c.says([]string{"clear", "--all", "--tier=arena", "--yes"}, nil)
	c.says(append([]string{"lookup", "--timeout=30s", "--engine-id=engine"}, words...), nil,
		"hit: 100 of 100 pages")
	c.says([]string{"dax", "resize", dev(1), "4M", "--mode=evict", "--force"}, nil,
		dev(1)+": active")
	c.says([]string{"dax", "remove", dev(1), "--mode", "drain"}, nil, dev(1)+": draining")
	c.says([]string{"dax", "status"}, nil, "draining")
	c.says([]string{"dax", "remove", dev(1), "--mode=evict", "--force", "--quiet", "--adapter=0"},
		nil, dev(1)+": removed")
	c.says([]string{"dax", "status", "--json"}, &st)
	if len(st.Devices) != 1 || st.Devices[0].DevicePath != dev(2) {
		t.Errorf("%+v", st)
	}

	c.fails([]string{"dax", "remove", dev(1)}, dev(1), "404", "status")
	c.says([]string{"dax", "add", dev(2), "8M"}, nil, dev(2)+": active") // as it is
	c.fails([]string{"dax", "add", dev(2), "9M"}, dev(2), "409")
	c.fails([]string{"dax", "add", dev(3), "lots"}, `"lots"`, "400", "100GiB")
	c.fails([]string{"dax", "add", dir, "8M"}, dir, "400")
	c.fails([]string{"dax", "add", dev(3), "8M", "--adapter=7"}, "adapter_index", "404")
	c.fails([]string{"dax", "remove", dev(2), "--mode=copy"}, "mode", "422")
	c.fails([]string{"dax", "add", dev(3)}, "a device and how much of it to use",
		"lookaside dax add DEVICE SIZE")
	c.fails([]string{"dax", "remove"}, "one device")
	if out, _, code := run(t, nil, "dax", "--help"); code != 0 ||
		!strings.Contains(out, "resize") || !strings.Contains(out, "hotplug") {
		t.Errorf("exit code %d: %s", code, out)
	}
}

// stored is what all pages of storeMapped are filled with.
const stored = 0xa7

// storeMapped stores pages into regions that it maps, as vLLM's workers do, and leaves.
func storeMapped(t *testing.T, s *server, pages int) (words []string) {
	t.Helper()
	w, err := client.Dial(s.dir, hello(wire.RoleWorker), patience)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	packed, words := hashes(pages)
	if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: packed}); err != nil {
		t.Fatal(err)
	}
	regions := map[uint32]*dax.Attached{}
	for {
		b, files, err := w.Recv(patience)
		if err != nil {
			t.Fatal(err)
		}
		switch typ, _ := wire.Peek(b); typ {
		case wire.TypeRegionAdded:
			var m wire.RegionAdded
			if err := m.Decode(b, &wire.DefaultLimits); err != nil {
				t.Fatal(err)
			}
			if regions[m.Region], err = dax.Attach(files[0], int64(m.Offset), int64(m.SizeBytes),
				int64(m.PageSize)); err != nil {
				t.Fatal(err)
			}
			files[0].Close()
			defer regions[m.Region].Close()
			if err := w.Send(&wire.RegionMapped{Region: m.Region}); err != nil {
				t.Fatal(err)
			}
			continue
		case wire.TypeStoreGrant:
		default:
			t.Fatalf("got %v", typ)
		}
		var g wire.StoreGrant
		if err := g.Decode(b, &wire.DefaultLimits); err != nil || g.Shed > 0 || g.Held > 0 {
			t.Fatalf("%v: %+v", err, g)
		}
		for _, e := range g.Grants {
			page := regions[e.Region].Bytes()[e.Offset:][:int(e.Pages)*4096]
			for i := range page {
				page[i] = stored
			}
		}
		if err := errors.Join(w.Send(&wire.CommitStore{Store: g.Store}),
			w.Send(&wire.Ping{ID: 2})); err != nil {
			t.Fatal(err)
		}
		if b, _, err = w.Recv(patience); err != nil {
			t.Fatal(err)
		}
		if typ, _ := wire.Peek(b); typ != wire.TypePong {
			t.Fatalf("got %v", typ)
		}
		return words
	}
}

// The same of an arena; and what is on its devices is checked when the sidecar has ended.
func TestArenaOnDAXFromTheCommandLine(t *testing.T) {
	dir := t.TempDir()
	dev := func(n int) string { return filepath.Join(dir, fmt.Sprintf("dax%d.0", n)) }
	s := serveOnly(t, "--arena-kind=dax", "--arena-dax-devices="+dev(0)+":8M,"+dev(1)+":8M",
		"--arena-dax-slab=1M", "--arena-dax-allow-files=true", "--arena-dax-hotplug=true", "--sessions-share=1",
		"--sessions-joint-share=1")
	c := commander{t, s.dir}
	words := storeMapped(t, s, 100)
	hits := func() {
		t.Helper()
		// without a worker there is no space to ask in
		w, err := client.Dial(s.dir, hello(wire.RoleWorker), patience)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		c.says(append([]string{"lookup", "--timeout=30s", "--engine-id=engine"}, words...), nil,
			"hit: 100 of 100 pages")
	}
	var st admin.DAXArenasResult
	c.says([]string{"dax", "status", "--arena", "--json"}, &st)
	if len(st.Arenas) != 2 || st.Arenas[0].UsedBytes+st.Arenas[1].UsedBytes == 0 {
		t.Fatalf("%+v", st)
	}
	c.says([]string{"dax", "status", "--arena"}, nil, "ARENA DEVICE", dev(0), dev(1), "active")
	c.says([]string{"status"}, nil, "on 2 DAX devices", "kept", dev(1))
	c.says([]string{"dax", "status"}, nil, "no tier of DAX devices", "--arena")
	c.says([]string{"dax", "add", "--arena", dev(2), "8M"}, nil, dev(2)+": active")
	var r admin.DAXArenaRemoveResult
	c.says([]string{"dax", "remove", "--arena", dev(0), "--mode=migrate", "--force", "--json"}, &r)
	if r.Removed.Arenas[0].State != "removed" || r.Removed.MovedKeys == nil ||
		*r.Removed.MovedKeys == 0 {
		t.Errorf("%+v", r)
	}
	hits()
	c.says([]string{"dax", "resize", "--arena", dev(1), "4M", "--force"}, nil, dev(1)+": active")
	c.says([]string{"dax", "remove", "--arena", dev(1)}, nil, dev(1)+": ")
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if c.says([]string{"dax", "status", "--arena", "--json"}, &st); len(st.Arenas) == 1 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%+v", st)
		}
	}
	hits()
	c.fails([]string{"dax", "remove", "--arena", dev(2)}, "only device", "409")
	c.fails([]string{"dax", "remove", "--arena", dev(1)}, dev(1), "404")
	c.fails([]string{"dax", "add", "--arena", dev(2), "8M"}, "409")
	c.fails([]string{"dax", "add", "--arena", "--adapter=0", dev(3), "8M"}, "adapter", "arena")
	c.fails([]string{"check", dev(2)}, "in use")

	s.signal(syscall.SIGTERM)
	if code := s.exit(patience); code != 0 {
		t.Fatalf("exit code %d: %s", code, s.text())
	}
	if out, errs, code := run(t, nil, "check", dev(2)); code != 0 ||
		!strings.Contains(out, dev(2)+"/slab-") {
		t.Fatalf("exit code %d: %s%s", code, out, errs)
	}
	b, err := os.ReadFile(dev(2))
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.LastIndexByte(b, stored)
	b[at] ^= 1
	if err := os.WriteFile(dev(2), b, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, errs, code := run(t, nil, "check", dev(2)); code != 1 ||
		!strings.Contains(errs, "1 things are bad") {
		t.Errorf("exit code %d: %s%s", code, out, errs)
	}
	if out, errs, code := run(t, nil, "check", "--repair", dev(2)); code != 1 ||
		!strings.Contains(errs, "check again") {
		t.Errorf("exit code %d: %s%s", code, out, errs)
	}
	if out, errs, code := run(t, nil, "check", dev(2)); code != 0 {
		t.Errorf("exit code %d: %s%s", code, out, errs)
	}
}

func TestDAXWithoutDevices(t *testing.T) {
	s := serveProcess(t)
	c := commander{t, s.dir}
	c.says([]string{"dax", "status"}, nil, "no tier of DAX devices", "--dax")
	c.fails([]string{"dax", "add", "/dev/dax0.0", "1G"}, "no tier of DAX devices", "404")
	c.fails([]string{"dax", "add", "--arena", "/dev/dax0.0", "1G"}, "not on DAX", "409",
		"arena.kind")
	c.fails([]string{"dax", "status", "--arena"}, "not on DAX", "409")
	if _, stderr, code := run(t, nil, "dax", "status", "--runtime-dir=/nowhere"); code != 1 ||
		!strings.Contains(stderr, "no sidecar") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// A change that takes long shows how far it is; interrupted, it is given up, and so it is by the
// sidecar, whose connection ends.
func TestDAXProgress(t *testing.T) {
	var asked atomic.Int64
	var endless atomic.Bool
	finish := make(chan struct{})
	left := make(chan struct{}, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /reconfigure/dax/status", func(w http.ResponseWriter, _ *http.Request) {
		devices := []admin.DAXDeviceStatus{{
			DevicePath: "/dev/dax0.0", State: "migrating",
			Progress: admin.DAXProgress{Moved: 10 * asked.Add(1), Total: 200},
		}}
		st := admin.DAXStatus{DAXTierStatus: admin.DAXTierStatus{Devices: devices}}
		if asked.Load() == 3 && !endless.Load() {
			close(finish)
		}
		_ = json.NewEncoder(w).Encode(st)
	})
	mux.HandleFunc("POST /reconfigure/dax/remove", func(w http.ResponseWriter, r *http.Request) {
		var in admin.DAXRemoveRequest
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil ||
			in.DevicePath != "/dev/dax0.0" || in.Mode != "migrate" || in.Force {
			t.Errorf("%v: %+v", err, in)
		}
		done := finish
		if endless.Load() {
			done = nil
		}
		select {
		case <-done:
			n := int64(200)
			_ = json.NewEncoder(w).Encode(admin.DAXResult{Status: "ok", DevicePath: in.DevicePath,
				State: "removed", MovedKeys: &n, Seconds: 1.5})
		case <-r.Context().Done():
			left <- struct{}{}
		}
	})
	dir, err := os.MkdirTemp("", "la") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	srv := httptest.NewUnstartedServer(mux)
	srv.Listener.Close()
	if srv.Listener, err = net.Listen("unix", filepath.Join(dir, "admin.sock")); err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer srv.Close()
	c := commander{t, dir}
	out, progress, code := c.run("dax", "remove", "/dev/dax0.0")
	if code != 0 || out != "/dev/dax0.0: removed: 200 chunks moved, in 1.5s\n" ||
		!strings.Contains(progress, "/dev/dax0.0: migrating, 10 of 200 chunks (5 %)\n") ||
		!strings.Contains(progress, "20 of 200 chunks (10 %)") {
		t.Errorf("exit code %d: %q, %q", code, out, progress)
	}

	endless.Store(true)
	asked.Store(0)
	cmd := exec.Command(binary, "dax", "remove", "/dev/dax0.0", "--runtime-dir", dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); asked.Load() < 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not ask how far it is")
		}
	}
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	err = cmd.Wait()
	if err == nil || !strings.Contains(stderr.String(), "stopped: /dev/dax0.0 is still a device") {
		t.Errorf("%v: %s", err, &stderr)
	}
	select {
	case <-left:
	case <-time.After(patience):
		t.Error("the sidecar was not told")
	}
}

// LMCache's calls, as its operators make them, are answered as LMCache answers them: by status, and
// by the fields that a script reads.
func TestCallsOfLMCache(t *testing.T) {
	dir := t.TempDir()
	dev := func(name string) string { return filepath.Join(dir, name) }
	s := serveOnly(t, "--arena-kind=dax", "--arena-dax-devices="+dev("l1-0")+":8M,"+dev("l1-1")+":8M",
		"--arena-dax-slab=1M", "--arena-dax-allow-files", "--arena-dax-hotplug",
		"--dax", dev("l2-0")+":8M:slab=1M:allow_files=true:hotplug=true",
		"--cascade-partial-delay=10ms")
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(s.dir, "admin.sock"))
		}}}
	ask := func(method, path, body string) (int, string) {
		t.Helper()
		req, err := http.NewRequest(method, "http://localhost"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if body != "" {
			req.Header.Set("Content-Type", "application/json")
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, strings.Join(strings.Fields(string(b)), " ")
	}
	call := func(status int, path, body string, want ...string) {
		t.Helper()
		method := http.MethodPost
		if body == "" {
			method = http.MethodGet
		}
		code, answer := ask(method, path, strings.ReplaceAll(body, "DIR", dir))
		if code != status {
			t.Errorf("%s %s: %d, want %d: %s", path, body, code, status, answer)
		}
		for _, w := range want {
			if !strings.Contains(answer, strings.ReplaceAll(w, "DIR", dir)) {
				t.Errorf("%s %s: %s lacks %s", path, body, answer, w)
			}
		}
		if status != 200 && !strings.Contains(strings.ReplaceAll(answer, `": "`, `":"`),
			`"error":"`) {
			t.Errorf("%s %s: %s has no error", path, body, answer)
		}
	}

	const l1, l2, old = "/reconfigure/dax/l1/", "/reconfigure/dax/l2/", "/reconfigure/dax/"
	for _, at := range []string{old, l2} {
		other := map[string]string{old: "l2-1", l2: "l2-2"}[at]
		call(200, at+"status", "", `"enabled": true`, `"backend": "dax"`, `"num_adapters": 1`,
			`"device_path": "DIR/l2-0"`)
		add := `{"device_path": "DIR/` + other + `", "size": "4MiB"}`
		call(200, at+"add", add, `"status": "ok"`, `"operation": "add"`, `"state": "active"`)
		// it is there
		call(200, at+"add", add, `"status": "ok"`, `"operation": "add"`, `"adapter_index": 0`,
			`"state": "active"`, other)
		call(200, at+"add", `{"adapter_index": 0, "device_path": "DIR/`+other+`", "size": 4194304}`,
			`"size_bytes": 4194304`)
		call(409, at+"add", `{"device_path": "DIR/`+other+`", "size": "5MiB"}`, other)
		call(200, at+"resize", `{"device_path": "DIR/`+other+`", "size": "4MiB"}`,
			`"operation": "resize"`, `"old_size_bytes": 4194304`, `"new_size_bytes": 4194304`)
		for range 2 { // twice
			call(200, at+"remove", `{"device_path": "DIR/`+other+`", "mode": "drain"}`,
				`"operation": "drain"`, `"state": "draining"`)
		}
		call(200, at+"remove", `{"device_path": "DIR/`+other+`", "mode": "evict", "force": true}`,
			`"operation": "remove"`, `"state": "removed"`, `"moved_keys": 0`, `"deleted_keys": `)
		call(404, at+"remove", `{"device_path": "DIR/`+other+`", "mode": "drain"}`, other)
		call(404, at+"remove", `{"device_path": "DIR/`+other+`"}`, other)
		call(404, at+"resize", `{"device_path": "DIR/`+other+`", "size": "4MiB"}`, other)
		call(422, at+"remove", `{"device_path": "DIR/l2-0", "mode": "copy"}`, "mode")
		call(422, at+"resize", `{"device_path": "DIR/l2-0", "size": 1024, "mode": "drain"}`, "mode")
		call(422, at+"remove", `{"device_path": "DIR/l2-0", "timeout_s": 1}`, "timeout_s")
		call(422, at+"add", `{"device_path": "DIR/l2-3", "size_bytes": 1024}`, "size")
	}
	call(200, l1+"status", "", `"device_path": "DIR/l1-0"`, `"state": "active"`,
		`"is_primary": false`)
	call(200, l1+"add", `{"device_path": "DIR/l1-2", "size": "4MiB"}`, `"added": {`,
		`"device_path": "DIR/l1-2"`, `"state": "active"`, `"size_in_bytes": 4194304`)
	call(409, l1+"add", `{"device_path": "DIR/l1-2", "size": "4MiB"}`, "l1-2") // it is there
	call(409, l1+"add", `{"device_path": "DIR//l1-2", "size": "8MiB"}`, "l1-2")
	call(200, l1+"remove", `{"device_path": "DIR//l1-2"}`, `"removed": {`,
		`"device_path": "DIR/l1-2"`, `"arenas": [ {`)
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		// Again, while it is draining, and when it is gone.
		code, answer := ask(http.MethodPost, l1+"remove", `{"device_path": "`+dev("l1-2")+
			`", "mode": "drain"}`)
		if code == http.StatusNotFound {
			break
		}
		if code != http.StatusOK || !strings.Contains(answer, `"device_path": "`+dev("l1-2")+`"`) ||
			time.Now().After(end) {
			t.Fatalf("%d: %s", code, answer)
		}
	}
	for _, mode := range []string{"migrate", "evict", "copy"} {
		call(422, l1+"remove", `{"device_path": "DIR/l1-0", "mode": "`+mode+`"}`, "mode")
	}
	call(422, l1+"remove", `{"device_path": "DIR/l1-0", "force": true}`, "force")
	call(404, l1+"resize", `{"device_path": "DIR/l1-0", "size": "4MiB"}`, l1+"resize")
	for _, at := range []string{old, l1, l2} {
		call(422, at+"add", `{"device_path": "DIR/new", "size": true}`, "size")
		call(422, at+"add", `{"device_path": "DIR/new", "size": 4096.0}`, "size")
		call(422, at+"add", `{"device_path": "DIR/new", "size": 4096.5}`, "size")
		call(400, at+"add", `{"device_path": "DIR/new", "size": "4Zi"}`, "size")
		call(400, at+"add", `{"device_path": "DIR/new", "size": "-1"}`, "size")
		pathological := "9" + strings.Repeat(" ", 5000) + "x"
		if code, answer := ask(http.MethodPost, at+"add", `{"device_path": "`+dev("new")+
			`", "size": "`+pathological+`"}`); code != 400 || len(answer) > 1000 {
			t.Errorf("%d: %d bytes", code, len(answer))
		}
	}

	memory := serveProcess(t)
	s.dir = memory.dir
	call(409, l1+"status", "", "not on DAX")
	call(409, l1+"add", `{"device_path": "DIR/l1-0", "size": "4MiB"}`, "not on DAX")
	call(200, l2+"status", "", `"enabled": false`, `"num_adapters": 0`, `"adapters": []`)
	call(404, l2+"add", `{"device_path": "DIR/l1-0", "size": "4MiB"}`)
}
