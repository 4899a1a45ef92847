package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/dax"
	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
)

// A fakePool remembers what it was asked for, and answers what it is told to.
type fakePool struct {
	mu     sync.Mutex
	status daxtier.Status
	calls  []string
	err    error
	during func(ctx context.Context) error // runs in a call
}

var _ admin.DevicePool = (*fakePool)(nil)

func (p *fakePool) Status() daxtier.Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

func (p *fakePool) call(ctx context.Context, format string, args ...any) error {
	p.mu.Lock()
	p.calls = append(p.calls, fmt.Sprintf(format, args...))
	during, err := p.during, p.err
	p.mu.Unlock()
	if during != nil {
		return during(ctx)
	}
	return err
}

func (p *fakePool) Add(ctx context.Context, path string, sizeBytes int64) error {
	return p.call(ctx, "add %s %d", path, sizeBytes)
}

func (p *fakePool) Remove(ctx context.Context, path string, mode daxtier.Mode, force bool) error {
	return p.call(ctx, "remove %s %s %v", path, mode, force)
}

func (p *fakePool) Resize(ctx context.Context, path string, sizeBytes int64, mode daxtier.Mode,
	force bool) error {
	return p.call(ctx, "resize %s %d %s %v", path, sizeBytes, mode, force)
}

func (p *fakePool) took() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls := p.calls
	p.calls = nil
	return calls
}

func fakeDevice(path string, used int) (d daxtier.DeviceStatus) {
	d.Path, d.State, d.SizeBytes, d.CapacityBytes, d.UsedBytes = path, "active", 101<<20, 100<<20,
		int64(used)<<20
	d.Slots.Free, d.Slots.Used, d.Slots.Leased, d.Slots.Draining = 100-used, used, 3, 1
	return d
}

// daxRig serves the operations of a daemon whose devices are made up. edit may change its parts.
func daxRig(t *testing.T, edit func(*admin.Parts), pools ...*fakePool) (*adminRig,
	*admin.Operations) {
	t.Helper()
	d, _ := startDaemon(t, nil)
	parts := d.parts()
	for i, p := range pools {
		parts.Adapters = append(parts.Adapters, admin.Adapter{Tier: fmt.Sprintf("dax-%d", i),
			HotPlug: true, DevicePool: p})
	}
	if edit != nil {
		edit(&parts)
	}
	operations := admin.New(parts)
	srv := httptest.NewServer(admin.Handler(operations))
	t.Cleanup(srv.Close)
	return newAdminRig(t, srv.Listener.Addr().String(), ""), operations
}

type body = map[string]any

// daxRoots are where LMCache's earlier and later versions have the interface.
var daxRoots = []string{"/reconfigure/dax/", "/reconfigure/dax/l2/"}

func TestHotPlugRequests(t *testing.T) {
	p, q := new(fakePool), new(fakePool)
	p.status = daxtier.Status{Devices: []daxtier.DeviceStatus{fakeDevice("/dev/dax0.0", 10)},
		TotalCapacityBytes: 100 << 20, TotalUsedBytes: 10 << 20}
	q.status = daxtier.Status{Devices: []daxtier.DeviceStatus{fakeDevice("/dev/dax1.0", 20),
		fakeDevice("/dev/dax1.1", 30)}, TotalCapacityBytes: 200 << 20, TotalUsedBytes: 50 << 20}
	r, _ := daxRig(t, nil, p, q)
	for _, root := range daxRoots {
		for _, tc := range []struct {
			operation string
			in        string
			p, q      string // what the first and the second pool are asked for
		}{
			{"add", `{"device_path": "/dev/dax2.0", "size": 1048576}`, "add /dev/dax2.0 1048576",
				""},
			{"add", `{"device_path": "/dev/dax2.0", "size": "100GiB"}`,
				"add /dev/dax2.0 107374182400", ""},
			{"add", `{"device_path": "/dev/dax2.0", "size": "1.5 gib"}`,
				"add /dev/dax2.0 1610612736", ""},
			// as LMCache
			{"add", `{"device_path": "/dev/dax2.0", "size": "100GB"}`,
				"add /dev/dax2.0 107374182400", ""},
			{"add", `{"device_path": "/dev/dax2.0", "size": "2097152"}`, "add /dev/dax2.0 2097152",
				""},
			{"add", `{"device_path": "/dev/dax2.0", "size": "2M", "adapter_index": 1}`, "",
				"add /dev/dax2.0 2097152"},
			{"remove", `{"device_path": "/dev/dax0.0"}`, "remove /dev/dax0.0 migrate false", ""},
			{"remove", `{"device_path": "/dev/dax0.0", "mode": "evict", "force": true}`,
				"remove /dev/dax0.0 evict true", ""},
			{"remove", `{"device_path": "/dev/dax0.0", "mode": "drain", "adapter_index": 0}`,
				"remove /dev/dax0.0 drain false", ""},
			// the tier that has it
			{"remove", `{"device_path": "/dev/dax1.1"}`, "", "remove /dev/dax1.1 migrate false"},
			{"resize", `{"device_path": "/dev/dax0.0", "size": "200MiB"}`,
				"resize /dev/dax0.0 209715200 migrate false", ""},
			{"resize", `{"device_path": "/dev/../dev/dax1.0", "size": 1, "mode": "evict", "force": true}`, "", "resize /dev/../dev/dax1.0 1 evict true"},
		} {
			var out admin.DAXResult
			r.post(root+tc.operation, []byte(tc.in), &out)
			if got := strings.Join(p.took(), ";"); got != tc.p {
				t.Errorf("%s%s %s: the first pool was asked for %q", root, tc.operation, tc.in, got)
			}
			if got := strings.Join(q.took(), ";"); got != tc.q {
				t.Errorf("%s%s %s: the second pool was asked for %q", root, tc.operation, tc.in,
					got)
			}
			if out.Status != "ok" ||
				out.AdapterIndex != map[bool]int{true: 0, false: 1}[tc.p != ""] {
				t.Errorf("%s%s %s: %+v", root, tc.operation, tc.in, out)
			}
		}
		var st admin.DAXStatus
		r.get(root+"status", &st)
		if !st.Enabled || st.Backend != "dax" || st.NumAdapters != 2 ||
			st.TotalCapacityBytes != 300<<20 || st.TotalUsedBytes != 60<<20 ||
			len(st.Devices) != 3 || len(st.Adapters) != 2 || !st.HotPlugEnabled {
			t.Errorf("%+v", st)
		}
		dev := st.Adapters[1].Status.Devices[1]
		if dev.DevicePath != "/dev/dax1.1" || dev.Index != 1 || dev.AdapterIndex != 1 ||
			dev.State != "active" || dev.SizeBytes != 101<<20 || dev.MaxDAXSizeBytes != 101<<20 ||
			dev.CapacityBytes != 100<<20 || dev.UsedBytes != 30<<20 ||
			dev.Slots != (admin.DAXSlots{Free: 70, Used: 30, Leased: 3, Draining: 1}) ||
			dev.LiveSlotCount != 30 ||
			dev.MaxSlots != 100 || st.Devices[2] != dev {
			t.Errorf("%+v", dev)
		}
		var table bytes.Buffer
		if err := st.WriteTable(&table); err != nil ||
			!strings.Contains(table.String(), "/dev/dax1.1") ||
			!strings.Contains(table.String(), "30MiB of 100MiB") {
			t.Errorf("%v:\n%s", err, &table)
		}
	}
}

// What a change came to is said in LMCache's fields.
func TestHotPlugAnswers(t *testing.T) {
	p := new(fakePool)
	p.status = daxtier.Status{Devices: []daxtier.DeviceStatus{fakeDevice("/dev/dax0.0", 10),
		fakeDevice("/dev/dax1.0", 20)}}
	r, _ := daxRig(t, nil, p)
	answer := func(operation, in string) body {
		t.Helper()
		var out body
		r.post("/reconfigure/dax/"+operation, []byte(in), &out)
		delete(out, "seconds")
		return out
	}
	same := func(got, want body) {
		t.Helper()
		for key, v := range want {
			if n, ok := v.(int); ok {
				v = float64(n) // as JSON has numbers
			}
			if got[key] != v {
				t.Errorf("%s is %v, want %v: %v", key, got[key], v, got)
			}
		}
	}
	p.during = func(context.Context) error { // the device goes
		p.mu.Lock()
		defer p.mu.Unlock()
		p.status.Devices = p.status.Devices[:1]
		return nil
	}
	same(answer("remove", `{"device_path": "/dev/dax1.0"}`),
		body{"status": "ok", "operation": "remove", "adapter_index": 0,
			"device_path": "/dev/dax1.0", "index": 1, "state": "removed",
			"moved_keys": 20, "moved_bytes": 20 << 20, "deleted_keys": 0, "source_slots_freed": 20})
	p.status.Devices = append(p.status.Devices, fakeDevice("/dev/dax1.0", 20))
	same(answer("remove", `{"device_path": "/dev/dax1.0", "mode": "evict"}`),
		body{"state": "removed", "moved_keys": 0, "deleted_keys": 20, "source_slots_freed": 20})
	p.during = func(context.Context) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.status.Devices[0].State = "draining"
		return nil
	}
	drained := answer("remove", `{"device_path": "/dev/dax0.0", "mode": "drain"}`)
	same(drained, body{"operation": "drain", "state": "draining", "index": 0})
	if _, ok := drained["moved_keys"]; ok {
		t.Errorf("%v", drained)
	}
	p.during = func(context.Context) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.status.Devices[0].SizeBytes = 200 << 20
		return nil
	}
	same(answer("resize", `{"device_path": "/dev/dax0.0", "size": "200MiB"}`),
		body{"operation": "resize", "old_size_bytes": 101 << 20, "new_size_bytes": 200 << 20,
			"state": "draining"})
	added := answer("add", `{"device_path": "/dev/dax0.0", "size": "200MiB"}`)
	if dev, ok := added["device"].(body); !ok || dev["device_path"] != "/dev/dax0.0" ||
		dev["max_dax_size_bytes"] != 200.0*(1<<20) {
		t.Errorf("%v", added)
	}
}

// Every status, with words that say what blocks and what would help.
func TestHotPlugRefusals(t *testing.T) {
	p, fixed := new(fakePool), new(fakePool)
	p.status.Devices = []daxtier.DeviceStatus{fakeDevice("/dev/dax0.0", 10)}
	fixed.status.Devices = []daxtier.DeviceStatus{fakeDevice("/dev/dax9.0", 1)}
	r, _ := daxRig(t, func(p *admin.Parts) { p.Adapters[1].HotPlug = false }, p, fixed)
	none, _ := daxRig(t, nil)
	dev := body{"device_path": "/dev/dax0.0"}
	with := func(more ...any) body {
		out := body{"device_path": "/dev/dax0.0"}
		for i := 0; i < len(more); i += 2 {
			out[more[i].(string)] = more[i+1]
		}
		return out
	}
	for _, root := range daxRoots {
		// 422: not of the form.
		r.fails(root+"add", dev, 422, "size")
		r.fails(root+"add", body{"size": 1}, 422, "device_path")
		r.fails(root+"add", with("size", true), 422, "size")
		r.fails(root+"add", with("size", 1.5), 422, "size")
		r.fails(root+"add", with("size", []int{1}), 422, "size")
		r.fails(root+"add", with("size", 1, "sizee", 2), 422, "sizee", `nearest name is "size"`)
		r.fails(root+"add", with("size", 1, "adapter_index", "x"), 422, "adapter_index")
		r.fails(root+"remove", with("mode", "copy"), 422, "mode")
		r.fails(root+"remove", with("force", "yes"), 422, "force")
		r.fails(root+"resize", with("size", 1, "mode", "drain"), 422, "mode") // a resize has an end
		r.fails(root+"remove", body{"device_path": 7}, 422, "device_path")
		r.fails(root+"add", []byte("{"), 400)
		// 400: a size or a path that is none.
		for _, size := range []any{0, -1, "", "0", "-1", "lots", "100XiB", "1e9",
			strings.Repeat("9", 70), "1.2.3G"} {
			r.fails(root+"add", with("size", size), 400, "size", "100GiB")
		}
		r.fails(root+"resize", with("size", "0GiB"), 400, "size")
		for _, path := range []string{"", " ", "dax0.0", "./dax0.0", "../dev/dax0.0"} {
			r.fails(root+"remove", body{"device_path": path}, 400, "device_path", "/dev/dax0.0")
			r.fails(root+"add", body{"device_path": path, "size": 1}, 400, "absolute")
		}
		// 403 and 404.
		r.fails(root+"remove", body{"device_path": "/dev/dax9.0"}, 403, "dax-1", "hotplug: true")
		r.fails(root+"add", with("size", 1, "adapter_index", 1), 403, "hotplug: true")
		r.fails(root+"add", with("size", 1, "adapter_index", 2), 404, "adapter_index", "2 tiers")
		r.fails(root+"add", with("size", 1, "adapter_index", -1), 404, "adapter_index")
		none.fails(root+"add", with("size", 1), 404, "no tier of DAX devices", "kind dax")
		if calls := append(p.took(), fixed.took()...); len(calls) > 0 {
			t.Errorf("%v", calls)
		}

		// What the pool says.
		for _, tc := range []struct {
			err    error
			status int
			want   []string
		}{
			{fmt.Errorf("%w: /dev/dax7.0", daxtier.ErrNotFound), 404,
				[]string{"/dev/dax7.0", "/reconfigure/dax/status"}},
			{fmt.Errorf("%w: /dev/dax0.0, of 4GiB", daxtier.ErrExists), 409,
				[]string{"/dev/dax0.0", "4GiB", "resize"}},
			{fmt.Errorf("%w: 3 chunks", daxtier.ErrLeased), 409, []string{"3 chunks", "force"}},
			{fmt.Errorf("%w: 5GiB are missing", daxtier.ErrNoRoom), 507, []string{"5GiB", "evict",
				"add a device"}},
			{fmt.Errorf("%w: %w", daxtier.ErrNoRoom, dax.ErrNoSpace), 507,
				[]string{"ask for less"}},
			{fmt.Errorf("/dev/dax0.0: %w: permission denied", daxtier.ErrDevice), 400,
				[]string{"permission denied", "alignment"}},
			{fmt.Errorf("/mnt/x: %w", daxtier.ErrForeign), 400, []string{"/mnt/x", "another file"}},
			{fmt.Errorf("%w: %w", daxtier.ErrLeased, &dax.RangeLockedError{Path: "/dev/dax0.0",
				PID: 4711, SizeBytes: 4096}), 409, []string{"4711", "offset"}},
			{fmt.Errorf("%w: another change", tiers.ErrBusy), 503, []string{"another change",
				"again"}},
			{tiers.ErrClosed, 503, []string{"successor"}},
			{fmt.Errorf("%w: a size of -1", tiers.ErrInvalid), 400, []string{"size of -1"}},
			{errors.New("input/output error"), 502, []string{"input/output"}},
		} {
			p.err = tc.err
			r.fails(root+"add", with("size", 1), tc.status, tc.want...)
			r.fails(root+"remove", dev, tc.status, tc.want...)
			r.fails(root+"resize", with("size", 1), tc.status, tc.want...)
		}
		p.err = nil
		p.took()
	}
	var st admin.DAXStatus
	if none.get("/reconfigure/dax/status", &st); st.Enabled || st.NumAdapters != 0 ||
		len(st.Devices) != 0 || st.HotPlugEnabled {
		t.Errorf("%+v", st)
	}
	// A method that is not for it.
	if resp, b := r.send(http.MethodGet, "/reconfigure/dax/add", "", nil); resp.StatusCode != 405 ||
		!strings.Contains(string(b), "use POST") {
		t.Errorf("%s: %s", resp.Status, b)
	}
}

// An arena that is not on DAX says so, whatever it is asked.
func TestHotPlugOfAnArenaOfMemory(t *testing.T) {
	r, _ := daxRig(t, nil)
	resp, b := r.send(http.MethodGet, "/reconfigure/dax/l1/status", "", nil)
	r.conforms(http.MethodGet, "/reconfigure/dax/l1/status", resp, b)
	if resp.StatusCode != 409 || !strings.Contains(string(b), "the arena is not on DAX") ||
		!strings.Contains(string(b), "/reconfigure/dax/l2") {
		t.Errorf("%s: %s", resp.Status, b)
	}
	r.fails("/reconfigure/dax/l1/add", body{"device_path": "/dev/dax0.0", "size": 1}, 409,
		"not on DAX", "memfd", "arena.kind: dax")
	r.fails("/reconfigure/dax/l1/remove", body{"device_path": "/dev/dax0.0"}, 409, "not on DAX")
	r.fails("/v1/dax/arena/remove", body{"device_path": "/dev/dax0.0"}, 409, "not on DAX")
	r.fails("/v1/dax/arena/resize", body{"device_path": "/dev/dax0.0", "size": 1}, 409,
		"not on DAX")
}

// A change ends when who asked for it leaves, and when the sidecar does, which waits for it.
func TestChangesEnd(t *testing.T) {
	p := new(fakePool)
	p.status.Devices = []daxtier.DeviceStatus{fakeDevice("/dev/dax0.0", 10)}
	started, ended := make(chan struct{}, 1), make(chan error, 1)
	p.during = func(ctx context.Context) error {
		started <- struct{}{}
		<-ctx.Done()
		time.Sleep(20 * time.Millisecond) // until it notices
		ended <- context.Cause(ctx)
		return ctx.Err()
	}
	background, stop := context.WithCancel(context.Background())
	r, operations := daxRig(t, func(p *admin.Parts) { p.Background = background }, p)

	ctx, leave := context.WithCancel(context.Background())
	gone := make(chan error, 1)
	go func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+r.addr+
			"/reconfigure/dax/remove", strings.NewReader(`{"device_path": "/dev/dax0.0"}`))
		if err == nil {
			req.Header.Set("Content-Type", "application/json")
			var resp *http.Response
			if resp, err = http.DefaultClient.Do(req); err == nil {
				resp.Body.Close()
			}
		}
		gone <- err
	}()
	<-started
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := <-ended; errors.Is(err, tiers.ErrClosed) {
		t.Errorf("%v", err)
	}

	type refusal struct {
		admin.APIError
		status int
	}
	answer := make(chan refusal, 1)
	go func() {
		code, b := r.try("/reconfigure/dax/remove", body{"device_path": "/dev/dax0.0"})
		e := refusal{status: code}
		_ = json.Unmarshal(b, &e)
		answer <- e
	}()
	<-started
	stop()
	operations.Close()
	select {
	case err := <-ended:
		if !errors.Is(err, tiers.ErrClosed) {
			t.Errorf("%v", err)
		}
	default:
		t.Error("the end did not wait for it")
	}
	if e := <-answer; e.status != 503 || !strings.Contains(e.Message, "ending") {
		t.Errorf("%d: %+v", e.status, e)
	}
	r.fails("/reconfigure/dax/remove", body{"device_path": "/dev/dax0.0"}, 503, "successor")
}

// otherPrefix stores a prefix that begins differently, by n.
func otherPrefix(t *testing.T, d *Daemon, n, pages int) *prefixRig {
	t.Helper()
	b := namedPrefix(t, d, n, pages)
	if err := b.Store(); err != nil {
		t.Fatal(err)
	}
	return b
}

// namedPrefix is that prefix without storing it.
func namedPrefix(t *testing.T, d *Daemon, n, pages int) *prefixRig {
	t.Helper()
	p, err := prefixes.Dial(d.cfg.Runtime.Dir, prefixes.Shape{PageBytes: 4096, PagesPerChunk: 4}, n,
		pages)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return &prefixRig{p}
}

// Real pools on files that stand in for devices, with traffic. Nothing is lost but what is dropped.
func TestHotPlugOfDevices(t *testing.T) {
	dir := t.TempDir()
	dev := func(n int) string { return filepath.Join(dir, fmt.Sprintf("dax%d.0", n)) }
	const pages = 400
	d, _ := startDaemon(t, withDAX(t, dir, ":hotplug=true")) // dax0.0 and dax1.0, of 4 MiB each
	r := newAdminRig(t, d.AdminAddr(), "")
	b := storedPrefix(t, d, pages)
	untilTierHas(t, d, 0, pages)
	status := func() admin.DAXStatus {
		var st admin.DAXStatus
		r.get("/reconfigure/dax/l2/status", &st)
		return st
	}
	has := func(what string, paths ...string) {
		t.Helper()
		var st admin.DAXStatus
		until(t, func() any { return st }, func() bool {
			// who stores or loads has leases, until a moment after
			st = status()
			return !slices.ContainsFunc(st.Devices,
				func(x admin.DAXDeviceStatus) bool { return x.Slots.Leased != 0 })
		})
		var got []string
		used, capacity := int64(0), int64(0)
		for _, x := range st.Devices {
			got = append(got, x.DevicePath)
			used, capacity = used+x.UsedBytes, capacity+x.CapacityBytes
		}
		if !slices.Equal(got, paths) || st.TotalUsedBytes != used ||
			st.TotalCapacityBytes != capacity {
			t.Errorf("%s: %v: %+v", what, got, st)
		}
	}
	clearArena := func() {
		t.Helper()
		r.post("/v1/clear", admin.ClearRequest{All: true, Tier: "arena"}, new(admin.ClearResult))
	}
	var out admin.DAXResult
	has("at first", dev(0), dev(1))
	before := status()

	// Adding makes room, and moves nothing.
	r.post("/reconfigure/dax/add", body{"device_path": dev(2), "size": "4MiB"}, &out)
	if out.State != "active" || out.Index != 2 || out.Device == nil || out.Device.UsedBytes != 0 ||
		out.Device.CapacityBytes < 3<<20 {
		t.Errorf("%+v", out)
	}
	has("added", dev(0), dev(1), dev(2))
	if st := status(); st.TotalUsedBytes != before.TotalUsedBytes ||
		st.TotalCapacityBytes != before.TotalCapacityBytes+out.Device.CapacityBytes {
		t.Errorf("%+v after %+v", st, before)
	}

	// Migrating keeps everything.
	out = admin.DAXResult{}
	r.post("/reconfigure/dax/l2/remove", body{"device_path": dev(0), "adapter_index": 0,
		"force": true}, &out)
	if out.State != "removed" || out.Device != nil || out.MovedKeys == nil ||
		*out.MovedKeys != before.Devices[0].Slots.Used || *out.MovedKeys == 0 {
		t.Errorf("%+v, had %+v", out, before.Devices[0])
	}
	has("migrated", dev(1), dev(2))
	clearArena()
	b.hits(t)
	b.cancel(t)
	if got := d.operations.Tiers()[0].Pages; got != pages {
		t.Errorf("%d of %d pages are left", got, pages)
	}

	// Draining keeps what is there, and lets nothing new in.
	out = admin.DAXResult{}
	r.post("/reconfigure/dax/remove", body{"device_path": dev(1), "mode": "drain"}, &out)
	drained := status().Devices[0]
	if out.Operation != "drain" || out.State != "draining" || drained.State != "draining" ||
		drained.Slots.Draining != drained.Slots.Used || drained.Slots.Free != 0 {
		t.Errorf("%+v, %+v", out, drained)
	}
	more := otherPrefix(t, d, 1, 40)
	untilTierHas(t, d, 0, pages+40)
	if now := status().Devices[0]; now.Slots.Used != drained.Slots.Used {
		t.Errorf("%d chunks, then %d", drained.Slots.Used, now.Slots.Used)
	}
	clearArena()
	b.hits(t)
	b.cancel(t)

	// A drained device that is added again is in use again.
	out = admin.DAXResult{}
	r.post("/reconfigure/dax/add", body{"device_path": dev(1), "size": "4MiB"}, &out)
	if out.State != "active" {
		t.Errorf("%+v", out)
	}

	// Growing and shrinking.
	out = admin.DAXResult{}
	r.post("/reconfigure/dax/resize", body{"device_path": dev(2), "size": "6MiB", "force": true},
		&out)
	if out.OldSizeBytes == nil || *out.OldSizeBytes != 4<<20 || *out.NewSizeBytes != 6<<20 ||
		out.Device.SizeBytes != 6<<20 {
		t.Errorf("%+v", out)
	}
	out = admin.DAXResult{}
	r.post("/reconfigure/dax/l2/resize", body{"device_path": dev(2), "size": 4 << 20,
		"mode": "migrate", "force": true}, &out)
	if out.Device.SizeBytes != 4<<20 || d.operations.Tiers()[0].Pages != pages+40 {
		t.Errorf("%+v, %d pages", out, d.operations.Tiers()[0].Pages)
	}

	// What cannot be.
	r.fails("/reconfigure/dax/add", body{"device_path": dev(2), "size": "5MiB"}, 409, dev(2),
		"resize")
	r.fails("/reconfigure/dax/add", body{"device_path": dev(2), "size": "8MiB"}, 409, dev(2))
	r.fails("/reconfigure/dax/add", body{"device_path": dir, "size": "4MiB"}, 400, dir)
	r.fails("/reconfigure/dax/add", body{"device_path": "dax7.0/..", "size": "4MiB"}, 400)
	r.fails("/reconfigure/dax/add", body{"device_path": dev(3), "size": 1}, 400, dev(3))
	r.fails("/reconfigure/dax/remove", body{"device_path": dev(0)}, 404, dev(0))
	r.fails("/reconfigure/dax/resize", body{"device_path": dev(0), "size": "4MiB"}, 404, dev(0))
	has("refused", dev(1), dev(2))
	if used := status().Devices; used[0].UsedBytes+used[1].UsedBytes > used[1].CapacityBytes {
		t.Errorf("too much for one device: %+v", used)
	}
	big := otherPrefix(t, d, 2, 700)
	untilTierHas(t, d, 0, pages+40+700)
	r.fails("/reconfigure/dax/remove", body{"device_path": dev(1), "force": true}, 507, "evict")
	has("no room", dev(1), dev(2))
	if st := status(); st.Devices[0].State != "active" ||
		d.operations.Tiers()[0].Pages != pages+40+700 {
		t.Errorf("%+v, %d pages", st.Devices, d.operations.Tiers()[0].Pages)
	}

	// Another sidecar has the partition.
	other, _ := startDaemon(t, withTiers(t, "--dax="+dev(5)+":4M:slab=1M:allow_files=true"))
	r.fails("/reconfigure/dax/add", body{"device_path": dev(5), "size": "4MiB"}, 409, dev(5))
	newAdminRig(t, other.AdminAddr(), "").fails("/reconfigure/dax/remove",
		body{"device_path": dev(5)}, 403,
		"hotplug: true")

	// Evicting drops.
	gone := status().Devices[0].Slots.Used
	out = admin.DAXResult{}
	r.post("/reconfigure/dax/remove", body{"device_path": dev(1), "mode": "evict", "force": true},
		&out)
	if out.State != "removed" || *out.DeletedKeys != gone || *out.MovedKeys != 0 ||
		d.operations.Tiers()[0].Pages >= pages+40+700 {
		t.Errorf("%+v, %d pages", out, d.operations.Tiers()[0].Pages)
	}
	has("evicted", dev(2))
	for _, b := range []*prefixRig{b, more, big} { // from the arena
		b.hits(t)
		b.Close()
	}

	// It is there after a restart, with the devices that there are now.
	left := d.operations.Tiers()[0].Pages
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	d, _ = startDaemon(t, withTiers(t, "--dax="+dev(2)+":4M:slab=1M:allow_files=true:hotplug=true"))
	if got := d.operations.Tiers()[0].Pages; got != left {
		t.Errorf("%d pages, and there were %d", got, left)
	}
	if err := d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// Devices come, go, grow and shrink while others look up and load from them: nothing is lost, and
// every byte is right.
func TestHotPlugUnderTraffic(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if *hotPlugSeed != 0 {
		seed = *hotPlugSeed
	}
	t.Logf("-hotplug.seed=%d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	dir := t.TempDir()
	const pages, readers, prefixes = 60, 3, 6
	edit := withDAX(t, dir, ":hotplug=true")
	d, _ := startDaemon(t, func(c *settings.Config) {
		edit(c)
		// for two thirds of it all, so that most of what is looked up has to come from the devices
		c.Arena.Limit = 1 << 20
	})
	r := newAdminRig(t, d.AdminAddr(), "")
	var rigs []*prefixRig
	for n := range prefixes {
		rigs = append(rigs, otherPrefix(t, d, n, pages))
		untilTierHas(t, d, 0, int64(n+1)*pages)
	}

	stop := make(chan struct{})
	var wg sync.WaitGroup
	var loads atomic.Int64
	for n := range readers {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				b := rigs[n+readers*(i%2)]
				if _, err := b.Lookup(); err != nil {
					t.Error(err)
					return
				}
				if err := b.Verify(); err != nil {
					t.Error(err)
					return
				}
				if err := b.Cancel(); err != nil {
					t.Error(err)
					return
				}
				loads.Add(1)
			}
		})
	}
	in := map[string]int{filepath.Join(dir, "dax0.0"): 4, filepath.Join(dir, "dax1.0"): 4} // MiB
	next := 2
	for range 30 {
		paths := slices.Sorted(maps.Keys(in))
		path := paths[rnd.IntN(len(paths))]
		var out admin.DAXResult
		switch k := rnd.IntN(4); {
		case k == 0 && len(in) < 5 || len(in) == 1:
			path = filepath.Join(dir, fmt.Sprintf("dax%d.0", next))
			next++
			in[path] = 4
			r.post("/reconfigure/dax/add", body{"device_path": path, "size": "4MiB"}, &out)
		case k == 1:
			in[path] = 3 + rnd.IntN(4)
			r.post("/reconfigure/dax/resize", body{"device_path": path, "size": in[path] << 20,
				"force": true}, &out)
		case k == 2:
			r.post("/reconfigure/dax/remove", body{"device_path": path, "mode": "drain"}, &out)
			r.post("/reconfigure/dax/add", body{"device_path": path, "size": in[path] << 20}, &out)
		default:
			delete(in, path)
			r.post("/reconfigure/dax/remove", body{"device_path": path, "force": true}, &out)
		}
	}
	close(stop)
	wg.Wait()
	st := d.operations.Tiers()[0]
	t.Logf("%d loads of %d pages; %d chunks came from the devices", loads.Load(), pages,
		st.LoadedChunks)
	if st.Pages != prefixes*pages || st.CorruptChunks != 0 || st.LoadFailures != 0 ||
		st.LoadedChunks == 0 {
		t.Errorf("%d loads: %+v", loads.Load(), st)
	}
	for _, b := range rigs {
		b.Close()
	}
	if err := d.engine.Check(); err != nil {
		t.Error(err)
	}
}

var hotPlugSeed = flag.Uint64("hotplug.seed", 0, "replay this seed of TestHotPlugUnderTraffic")

// A tier may begin without a device.
func TestHotPlugOfTheFirstDevice(t *testing.T) {
	dir := t.TempDir()
	edit := withTiers(t, "--dax="+filepath.Join(dir, "x")+
		":4M:slab=1M:allow_files=true:hotplug=true")
	d, _ := startDaemon(t, func(c *settings.Config) {
		edit(c)
		c.Tiers[0].DAX.Devices = nil
	})
	r := newAdminRig(t, d.AdminAddr(), "")
	b := newPrefix(t, d, 40)
	if err := b.Store(); err != nil { // to where there is nothing yet
		t.Fatal(err)
	}
	var st admin.DAXStatus
	if r.get("/reconfigure/dax/status", &st); len(st.Devices) != 0 || !st.Enabled ||
		st.TotalCapacityBytes != 0 {
		t.Errorf("%+v", st)
	}
	var out admin.DAXResult
	r.post("/reconfigure/dax/add", body{"device_path": filepath.Join(dir, "dax0.0"),
		"size": "4MiB"}, &out)
	if out.State != "active" {
		t.Errorf("%+v", out)
	}
	otherPrefix(t, d, 1, 40)
	until(t, func() any { return d.operations.Tiers()[0] },
		func() bool { return d.operations.Tiers()[0].Pages >= 40 })
}
