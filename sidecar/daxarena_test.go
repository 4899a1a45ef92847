package sidecar

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	"lookaside/internal/prefixes"
	"lookaside/ipc/wire"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// drainEvery is how often an arena looks at devices that are drained.
const drainEvery = 250 * time.Millisecond

// onDAX puts a sidecar's arena on two files that stand in for devices, of 4 MiB each; more are
// further settings, as on the command line.
func onDAX(t *testing.T, dir string, more ...string) func(*settings.Config) {
	t.Helper()
	return withArena(t, fmt.Sprintf("%s:4M,%s:4M", filepath.Join(dir, "dax0.0"),
		filepath.Join(dir, "dax1.0")), more...)
}

func withArena(t *testing.T, devices string, more ...string) func(*settings.Config) {
	t.Helper()
	c, err := load(t, "", nil, append([]string{
		"--arena-kind=dax", "--arena-dax-devices=" + devices, "--arena-dax-allow-files=true",
		"--arena-dax-slab=1M", "--sessions-share=1", "--sessions-joint-share=1",
		"--lookup-promote=always", "--cascade-partial-delay=5ms", "--lookup-deadline=30s",
	}, more...)...)
	if err != nil {
		t.Fatal(err)
	}
	return func(to *settings.Config) {
		c := c
		c.Runtime.Dir, c.Peers.Dir, c.Lifecycle = to.Runtime.Dir, to.Peers.Dir, to.Lifecycle
		c.Lifecycle.Flush = patience
		*to = c
	}
}

// arenaState returns the status of an arena on DAX.
func arenaState(d *Daemon) *admin.DAXArenaState { return d.Status().Arena.DAX }

// storedOnAll is storedPrefix in an arena that has nothing yet, on all of its devices: they get
// their first slabs one after the other.
func storedOnAll(t *testing.T, d *Daemon, pages int) *prefixRig {
	t.Helper()
	b := newPrefix(t, d, pages)
	until(t, func() any { return arenaState(d).Devices }, func() bool {
		return !slices.ContainsFunc(arenaState(d).Devices,
			func(x admin.DAXArena) bool { return x.Slots.Free+x.Slots.Used == 0 })
	})
	if err := b.Store(); err != nil {
		t.Fatal(err)
	}
	return b
}

// untilKept waits until all that was committed outlives the sidecar.
func untilKept(t *testing.T, d *Daemon) {
	t.Helper()
	until(t, func() any { return arenaState(d) }, func() bool {
		st := d.Status()
		return st.Arena.WaitingChunks == 0 && st.Arena.KeptChunks == st.Slots.Ready
	})
}

// crash ends a sidecar as a kill does for what is on its devices: nothing is flushed.
func crash(t *testing.T, d *Daemon) {
	t.Helper()
	d.cfg.Lifecycle.Flush, d.cfg.Lifecycle.Drain = 0, 0
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := d.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestAnArenaOnDAXOutlivesItsSidecar(t *testing.T) {
	dir := t.TempDir()
	const pages = 42 // the last chunk is half full
	d, log := startDaemon(t, onDAX(t, dir))
	b := storedOnAll(t, d, pages)
	b.hits(t)
	b.cancel(t)
	untilKept(t, d)
	st := d.Status()
	if a := st.Arena; a.Kind != "dax" || a.CapacityBytes < 7<<20 ||
		a.LimitBytes != a.CapacityBytes || a.UsedBytes != 11*4*4096 || len(a.Regions) == 0 ||
		len(a.DAX.Devices) != 2 || a.KeptChunks != 11 {
		t.Errorf("%+v, %+v", a, a.DAX)
	}
	for _, r := range st.Arena.Regions {
		if r.Kind != "file" || !strings.HasPrefix(r.Device, dir) || r.SizeBytes <= 0 ||
			r.PageSize != 4096 {
			t.Errorf("%+v", r)
		}
	}
	if !strings.Contains(log.String(), "device opened") {
		t.Errorf("%s", log)
	}
	b.Close()
	for round, end := range []func(){
		func() {
			if err := d.Shutdown(context.Background()); err != nil {
				t.Fatal(err)
			}
		},
		func() { crash(t, d) },
	} {
		end()
		d, _ = startDaemon(t, onDAX(t, dir))
		if st := d.Status(); st.Arena.Recovered.Chunks != 11 ||
			st.Verifications != (admin.VerificationStatus{Unverified: 11}) {
			t.Errorf("round %d: %+v", round, st)
		}
		b = newPrefix(t, d, pages)
		b.hits(t)
		b.cancel(t)
		b.hits(t)
		st := d.Status()
		if a := st.Arena.DAX; st.Verifications != (admin.VerificationStatus{Verified: 11}) ||
			a.CorruptChunks != 0 || st.Arena.KeptChunks != 11 {
			t.Errorf("round %d: %+v, %+v", round, st, a)
		}
		var table bytes.Buffer
		if err := st.WriteTable(&table); err != nil ||
			!strings.Contains(table.String(), "on 2 DAX devices") ||
			!strings.Contains(table.String(), "11 were found at the start") ||
			!strings.Contains(table.String(), "dax1.0") {
			t.Errorf("%v: %s", err, &table)
		}
		b.Close()
		if err := d.engine.Check(); err != nil {
			t.Error(err)
		}
	}
}

// What is committed while the end begins is kept, as far as lifecycle.flush goes.
func TestShutdownFlushesAnArenaOnDAX(t *testing.T) {
	dir := t.TempDir()
	const pages = 400
	d, log := startDaemon(t, onDAX(t, dir))
	storedOnAll(t, d, pages).Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(log.String(), "lifecycle.flush") {
		t.Errorf("it gave up:\n%s", log)
	}
	d, _ = startDaemon(t, onDAX(t, dir))
	newPrefix(t, d, pages).hits(t)
}

// What was spoilt while no sidecar ran is a miss, and what comes before it hits.
func TestSpoiltArenaOnDAXIsAMiss(t *testing.T) {
	dir := t.TempDir()
	const pages = 40
	d, _ := startDaemon(t, onDAX(t, dir))
	b := storedOnAll(t, d, pages)
	untilKept(t, d)
	b.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 4096)
	prefixes.Content(pages-1, want)
	spoilt := false
	for n := range 2 {
		path := filepath.Join(dir, fmt.Sprintf("dax%d.0", n))
		bytesOf, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if at := bytes.Index(bytesOf, want); at >= 0 {
			bytesOf[at+1000] ^= 4
			if err := os.WriteFile(path, bytesOf, 0o600); err != nil {
				t.Fatal(err)
			}
			spoilt = true
		}
	}
	if !spoilt {
		t.Fatal("the last page is nowhere on the devices")
	}
	d, _ = startDaemon(t, onDAX(t, dir))
	b = newPrefix(t, d, pages)
	if _, err := b.Lookup(); err == nil || !strings.Contains(err.Error(), "hit 36 of 40") {
		t.Errorf("got %v", err)
	}
	if st := d.Status(); st.Arena.DAX.CorruptChunks != 1 ||
		st.Verifications != (admin.VerificationStatus{Verified: 9, Corrupt: 1}) {
		t.Errorf("%+v", st)
	}
	b.cancel(t)
}

// The ranks of an instance have a part each of the same devices, at the same time.
func TestRanksShareTheDevicesOfTheirArenas(t *testing.T) {
	dir := t.TempDir()
	const pages = 20
	for round := range 2 {
		var all []*Daemon
		for rank := range 2 {
			d, _ := startDaemon(t, onDAX(t, dir, "--arena-dax-ranks=2", fmt.Sprintf("--arena-dax-rank=%d",
				rank)))
			all = append(all, d)
		}
		for rank, d := range all {
			if round == 0 && rank == 0 {
				storedOnAll(t, d, pages).Close()
				untilKept(t, d)
			}
			want := 0
			if round == 1 && rank == 0 {
				want = pages / 4
			}
			if got := d.Status().Arena.Recovered.Chunks; got != want {
				t.Errorf("round %d: rank %d found %d chunks, want %d", round, rank, got, want)
			}
		}
		for _, d := range all {
			if err := d.Shutdown(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// An arena on devices has tiers below it as any other: what is evicted from it is found there, and
// comes up again.
func TestTiersBelowAnArenaOnDAX(t *testing.T) {
	dir := t.TempDir()
	const pages = 300
	edit := withArena(t, filepath.Join(dir, "dax0.0")+":4M", "--disk="+filepath.Join(dir, "disk")+
		":16M:slab=4M")
	d, _ := startDaemon(t, edit)
	var all []*prefixRig
	for n := range 5 {
		all = append(all, otherPrefix(t, d, n, pages))
		untilTierHas(t, d, 0, int64((n+1)*pages))
		untilKept(t, d)
	}
	for round := range 2 {
		for _, b := range all {
			// In so small an arena what is being kept, or written to the disk, may leave no room
			// for all of it.
			var err error
			until(t, func() any { return fmt.Sprintf("round %d: %v", round, err) }, func() bool {
				_, err = b.Lookup()
				return err == nil
			})
			if err := b.Verify(); err != nil {
				t.Fatal(err)
			}
			b.cancel(t)
		}
		if st := d.Status(); st.Tiers[0].LoadedChunks == 0 || st.Arena.DAX.CorruptChunks != 0 {
			t.Errorf("%+v", st)
		}
		if err := d.engine.Check(); err != nil {
			t.Error(err)
		}
		if round == 0 {
			for _, b := range all {
				b.Close()
			}
			untilKept(t, d)
			crash(t, d)
			d, _ = startDaemon(t, edit)
			for n := range all {
				all[n] = namedPrefix(t, d, n, pages)
			}
		}
	}
}

// A device that cannot be used is an error of the start that names it, and what to do.
func TestStartSaysWhyADeviceOfTheArenaCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	startDaemon(t, onDAX(t, dir))
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(strings.Repeat("precious", 1<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		devices, more string
		want          []string
	}{
		"in use": {filepath.Join(dir, "dax0.0") + ":4M", "",
			[]string{"in use", fmt.Sprintf("process %d ", os.Getpid())}},
		"not there": {"/dev/dax77.0", "--arena-dax-allow-files=false", []string{"/dev/dax77.0",
			"no such file", "daxctl"}},
		"no device":  {"/dev/null", "", []string{"/dev/null", "DAX subsystem"}},
		"file":       {file, "--arena-dax-allow-files=false", []string{file, "allow_files"}},
		"not ours":   {file, "", []string{file, "something else"}},
		"misaligned": {filepath.Join(dir, "new") + ":4097", "", []string{"not aligned", "4KiB"}},
		"slab": {filepath.Join(dir, "other") + ":4M", "--arena-dax-slab=2K",
			[]string{"slabs of 2048 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := settings.Defaults()
			c.Runtime.Dir = filepath.Join(testDir(t), "rank-0") // what is beside it are its peers
			withArena(t, tc.devices, strings.Fields(tc.more)...)(&c)
			c, err := c.Complete(nil)
			if err != nil {
				t.Fatal(err)
			}
			d, err := Start(context.Background(), c, zap.NewNop(), Origin{})
			if err == nil {
				_ = d.Shutdown(context.Background())
				t.Fatal("started")
			}
			for _, w := range append(tc.want, "arena.dax.devices") {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
}

// A client of the sidecar before that is stopped may still copy to a slot that it was granted. The
// entry of the slot's old chunk may be there, and match until then.
func TestAnArenaOnDAXWaitsForClientsOfTheSidecarBefore(t *testing.T) {
	dir, runtime := t.TempDir(), filepath.Join(testDir(t), "rank-0")
	again := func(c *settings.Config) {
		onDAX(t, dir)(c)
		c.Runtime.Dir, c.Peers.Enabled = runtime, false
	}
	d, _ := startDaemon(t, again)
	const pages = 40
	before := storedPrefix(t, d, pages)
	untilKept(t, d)
	crash(t, d) // the client keeps its claim, as if it were stopped

	d, _ = startDaemon(t, again)
	if r := d.Status().Arena.Recovered; !r.Frozen || !slices.Equal(r.PIDs, []int{os.Getpid()}) ||
		r.Chunks != pages/4 {
		t.Fatalf("%+v", r)
	}
	b := newPrefix(t, d, pages)
	if found, err := b.Find(); found != 0 || err != nil {
		t.Errorf("%d pages are found, %v: they may be overwritten", found, err)
	}
	other := namedPrefix(t, d, 1, pages)
	if err := other.Store(); err == nil || !strings.Contains(err.Error(), "found no room") {
		t.Errorf("stored where the client before may copy: %v", err)
	}
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, func() any { return d.Status().Arena },
		func() bool { return !d.Status().Arena.Recovered.Frozen })
	b.hits(t)
	if err := other.Store(); err != nil {
		t.Error(err)
	}
}

// arenaRig asks a sidecar whose arena is on two devices, which may be changed, of what becomes of
// them.
type arenaRig struct {
	*adminRig
	d   *Daemon
	dir string
}

func newArenaRig(t *testing.T, more ...string) *arenaRig {
	t.Helper()
	dir := t.TempDir()
	d, _ := startDaemon(t, onDAX(t, dir, append([]string{"--arena-dax-hotplug=true"}, more...)...))
	return &arenaRig{newAdminRig(t, d.AdminAddr(), ""), d, dir}
}

func (r *arenaRig) dev(n int) string { return filepath.Join(r.dir, fmt.Sprintf("dax%d.0", n)) }

const (
	arenaAt  = "/reconfigure/dax/l1/" // LMCache's
	arenaOwn = "/v1/dax/arena/"       // what it has not
)

func (r *arenaRig) devices() []admin.DAXArena {
	r.t.Helper()
	var st admin.DAXArenasResult
	r.get(arenaAt+"status", &st)
	return st.Arenas
}

// has wants these devices, with nothing leased.
func (r *arenaRig) has(what string, paths ...string) {
	r.t.Helper()
	var list []admin.DAXArena
	until(r.t, func() any { return list }, func() bool {
		// those who keep what was committed have leases too, for a moment
		list = r.devices()
		return !slices.ContainsFunc(list, func(x admin.DAXArena) bool { return x.Slots.Leased > 0 })
	})
	var got []string
	for _, x := range list {
		got = append(got, x.DevicePath)
		if x.UsedBytes+x.FreeBytes != x.CapacityBytes {
			r.t.Errorf("%s: %+v", what, x)
		}
	}
	if !slices.Equal(got, paths) {
		r.t.Errorf("%s: %v, want %v", what, got, paths)
	}
}

// gone waits until a device is no more.
func (r *arenaRig) gone(path string) {
	r.t.Helper()
	until(r.t, func() any { return r.devices() }, func() bool {
		return !slices.ContainsFunc(r.devices(),
			func(a admin.DAXArena) bool { return a.DevicePath == path })
	})
}

// Devices come and go, and change their size; nothing that hit before is a miss, but for what was
// to be dropped.
func TestHotPlugOfTheArena(t *testing.T) {
	r := newArenaRig(t)
	d := r.d
	const pages = 400
	b := storedOnAll(t, d, pages)
	hits := func(what string) {
		t.Helper()
		if _, err := b.Lookup(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if err := b.Verify(); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		b.cancel(t)
		if err := d.engine.Check(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	r.has("at first", r.dev(0), r.dev(1))
	for _, x := range r.devices() {
		if x.State != "active" || x.IsPrimary || x.SizeInBytes != 4<<20 ||
			x.ActiveAllocations == 0 || x.ActiveAllocations != x.Slots.Used {
			t.Errorf("%+v", x)
		}
	}

	// Adding makes room, and moves nothing.
	var added admin.DAXArenaAddResult
	r.post(arenaAt+"add", body{"device_path": r.dev(2), "size": "4MiB"}, &added)
	if a := added.Added; a.DevicePath != r.dev(2) || a.State != "active" || a.UsedBytes != 0 ||
		a.SizeInBytes != 4<<20 {
		t.Errorf("%+v", a)
	}
	hits("added")

	// Migrating keeps everything.
	var out admin.DAXArenaRemoveResult
	r.post(arenaOwn+"remove", body{"device_path": r.dev(0), "mode": "migrate", "force": true}, &out)
	if x := out.Removed; x.DevicePath != r.dev(0) || len(x.Arenas) != 1 ||
		x.Arenas[0].State != "removed" || x.MovedKeys == nil || *x.MovedKeys == 0 ||
		x.DeletedKeys != nil {
		t.Errorf("%+v", x)
	}
	r.has("migrated", r.dev(1), r.dev(2))
	hits("migrated")

	// Draining, too, where there is room; by itself.
	out = admin.DAXArenaRemoveResult{}
	r.post(arenaAt+"remove", body{"device_path": r.dev(1)}, &out)
	if x := out.Removed; x.DevicePath != r.dev(1) || len(x.Arenas) != 1 ||
		x.Arenas[0].State != "draining" && x.Arenas[0].State != "removed" || x.MovedKeys != nil {
		t.Errorf("%+v", x)
	}
	r.gone(r.dev(1))
	hits("drained")

	// Growing and shrinking.
	var sized admin.DAXArenaResizeResult
	r.post(arenaOwn+"resize", body{"device_path": r.dev(2), "size": "8MiB"}, &sized)
	if sized.OldSizeBytes != 4<<20 || sized.NewSizeBytes != 8<<20 ||
		sized.Resized.SizeInBytes != 8<<20 {
		t.Errorf("%+v", sized)
	}
	more := otherPrefix(t, d, 1, 700)
	hits("grown")
	r.post(arenaOwn+"resize", body{"device_path": r.dev(2), "size": 6 << 20, "force": true}, &sized)
	if sized.Resized.SizeInBytes != 6<<20 {
		t.Errorf("%+v", sized)
	}
	hits("shrunk")
	more.hits(t)
	more.cancel(t)

	// What cannot be.
	r.fails(arenaAt+"add", body{"device_path": r.dev(2), "size": "4MiB"}, 409, r.dev(2), "resize",
		"/reconfigure/dax/l1/status")
	r.fails(arenaAt+"add", body{"device_path": r.dir, "size": "4MiB"}, 400, r.dir)
	r.fails(arenaAt+"add", body{"device_path": "dax7.0", "size": "4MiB"}, 400, "absolute")
	r.fails(arenaAt+"add", body{"device_path": r.dev(3), "size": 1}, 400, r.dev(3))
	r.fails(arenaAt+"add", body{"device_path": r.dev(3), "size": "0"}, 400, "size")
	r.fails(arenaAt+"add", body{"device_path": r.dev(8), "size": "4000TiB"}, 507, "ask for less")
	r.fails(arenaAt+"remove", body{"device_path": r.dev(0)}, 404, r.dev(0),
		"/reconfigure/dax/l1/status")
	r.fails(arenaAt+"remove", body{"device_path": ""}, 400, "absolute")
	r.fails(arenaOwn+"resize", body{"device_path": r.dev(0), "size": "4MiB"}, 404, r.dev(0))
	r.fails(arenaOwn+"resize", body{"device_path": r.dev(2), "size": "4097"}, 400,
		"multiple of 4KiB")
	r.fails(arenaOwn+"resize", body{"device_path": r.dev(2), "size": "2MiB", "force": true}, 507,
		"evict")
	for _, mode := range []string{"drain", "migrate", "evict"} {
		r.fails(arenaOwn+"remove", body{"device_path": r.dev(2), "mode": mode}, 409, r.dev(2),
			"only device", "add another one")
	}
	r.fails(arenaOwn+"remove", body{"device_path": r.dev(2), "mode": "copy"}, 422, "mode")
	for _, mode := range []string{"migrate", "evict", "copy"} {
		r.fails(arenaAt+"remove", body{"device_path": r.dev(2), "mode": mode}, 422, "mode")
	}
	r.fails(arenaAt+"remove", body{"device_path": r.dev(2), "force": true}, 422, "force")
	// LMCache has no such call, so it is none of the document's.
	if resp, answer := r.send(http.MethodPost, arenaAt+"resize", "application/json",
		[]byte("{}")); resp.StatusCode != http.StatusNotFound ||
		!strings.Contains(string(answer), "there is no "+arenaAt+"resize") {
		t.Errorf("%s: %s", resp.Status, answer)
	}
	r.fails(arenaOwn+"resize", body{"device_path": r.dev(2), "size": 1, "mode": "drain"}, 422,
		"mode")
	r.fails(arenaAt+"add", body{"device_path": r.dev(2)}, 422, "size")
	r.fails(arenaOwn+"remove", body{"device_path": r.dev(2), "forse": true}, 422,
		`nearest name is "force"`)
	r.fails(arenaAt+"add", []byte("{"), 400)
	if list := r.devices(); len(list) != 1 || !list[0].IsPrimary || list[0].State != "active" {
		t.Errorf("%+v", list)
	}
	hits("refused")

	// Another process has the device; and one whose settings do not allow changes refuses.
	other, _ := startDaemon(t, withArena(t, r.dev(5)+":4M"))
	r.fails(arenaAt+"add", body{"device_path": r.dev(5), "size": "4MiB"}, 409, r.dev(5),
		fmt.Sprint(os.Getpid()), "arena.dax.offset")
	fixed := newAdminRig(t, other.AdminAddr(), "")
	fixed.fails(arenaAt+"add", body{"device_path": r.dev(6), "size": "4MiB"}, 403,
		"arena.dax.hotplug: true")
	fixed.fails(arenaAt+"remove", body{"device_path": r.dev(5)}, 403, "arena.dax.hotplug: true")
	fixed.fails(arenaOwn+"resize", body{"device_path": r.dev(5), "size": "8MiB"}, 403,
		"arena.dax.hotplug: true")

	// No room elsewhere; then it is dropped.
	r.post(arenaAt+"add", body{"device_path": r.dev(4), "size": "2MiB"}, &added)
	r.fails(arenaOwn+"remove", body{"device_path": r.dev(2), "mode": "migrate", "force": true}, 507,
		"evict")
	hits("no room")
	before := d.Status().Pages
	out = admin.DAXArenaRemoveResult{}
	r.post(arenaOwn+"remove", body{"device_path": r.dev(2), "mode": "evict", "force": true}, &out)
	if x := out.Removed; x.Arenas[0].State != "removed" || x.DeletedKeys == nil ||
		*x.DeletedKeys == 0 || x.MovedKeys != nil || d.Status().Pages >= before {
		t.Errorf("%+v: %d pages, and before %d", x, d.Status().Pages, before)
	}
	r.has("evicted", r.dev(4))
	b.Close()
	more.Close()

	// It is there after a restart, with the devices that there are now.
	small := otherPrefix(t, d, 7, 40)
	small.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	d, _ = startDaemon(t, withArena(t, r.dev(4)+":2M"))
	namedPrefix(t, d, 7, 40).hits(t)
}

// A lease keeps a device: a lookup, until its request is loaded or given up, and a pin, until it is
// unpinned.
func TestLeasesKeepADeviceOfTheArena(t *testing.T) {
	r := newArenaRig(t)
	const pages = 200
	b := storedOnAll(t, r.d, pages)
	ask := func() { // and hold what was leased
		t.Helper()
		if _, err := b.Lookup(); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	for _, mode := range []string{"migrate", "evict"} {
		r.fails(arenaOwn+"remove", body{"device_path": r.dev(0), "mode": mode}, 409, "in use",
			"force", "/v1/pins", "drain")
	}
	r.fails(arenaOwn+"resize", body{"device_path": r.dev(0), "size": "1M", "mode": "evict"}, 409,
		"in use", "force")
	if list := r.devices(); len(list) != 2 || list[0].State != "active" ||
		list[0].Slots.Leased == 0 {
		t.Errorf("%+v", list)
	}
	b.cancel(t)

	var pin admin.PinStatus
	r.post("/v1/pin", admin.PinRequest{PrefixRequest: admin.PrefixRequest{Hashes: b.Words()}}, &pin)
	r.fails(arenaOwn+"remove", body{"device_path": r.dev(1), "mode": "evict"}, 409, "in use")

	// It may be drained, and is there until the last lease ends.
	var out admin.DAXArenaRemoveResult
	r.post(arenaAt+"remove", body{"device_path": r.dev(1)}, &out)
	time.Sleep(2 * drainEvery) // what comes later is what happens also if nothing was tried yet
	b.hits(t)
	b.cancel(t)
	if list := r.devices(); len(list) != 2 || list[1].State != "draining" ||
		list[1].Slots.Leased == 0 || list[1].Slots.Free != 0 {
		t.Errorf("%+v", list)
	}
	// Meanwhile others may come, and it may be taken into use again.
	r.post(arenaAt+"add", body{"device_path": r.dev(2), "size": "4M"}, new(admin.DAXArenaAddResult))
	var added admin.DAXArenaAddResult
	r.post(arenaAt+"add", body{"device_path": r.dev(1), "size": "4M"}, &added)
	if added.Added.State != "active" {
		t.Errorf("%+v", added)
	}
	r.post(arenaAt+"remove", body{"device_path": r.dev(1)}, &out)
	r.post("/v1/unpin", admin.UnpinRequest{All: true}, new(admin.UnpinResult))
	r.gone(r.dev(1))
	r.has("drained", r.dev(0), r.dev(2))
	b.hits(t)
	b.cancel(t)

	// With force the change waits; meanwhile another one is answered so.
	ask()
	answer := make(chan int, 1)
	go func() {
		code, _ := r.try(arenaOwn+"remove", body{"device_path": r.dev(0), "mode": "migrate",
			"force": true})
		answer <- code
	}()
	until(t, func() any { return r.devices() },
		func() bool { return r.devices()[0].State == "migrating" })
	r.fails(arenaAt+"add", body{"device_path": r.dev(3), "size": "4M"}, 503, "again")
	b.cancel(t)
	if code := <-answer; code != http.StatusOK {
		t.Errorf("%d", code)
	}
	r.has("forced", r.dev(2))
	b.hits(t)
	if err := r.d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// Where a drained device's chunks find no room, they are dropped.
func TestDrainedDeviceOfAFullArena(t *testing.T) {
	r := newArenaRig(t)
	var all []*prefixRig
	for n := range 5 {
		all = append(all, otherPrefix(t, r.d, n, 400))
		untilKept(t, r.d) // what is being kept is not evicted
	}
	r.post(arenaAt+"remove", body{"device_path": r.dev(0)}, new(admin.DAXArenaRemoveResult))
	r.gone(r.dev(0))
	until(t, func() any { return r.d.Status().Arena },
		func() bool { return r.d.Status().Arena.CapacityBytes < 4<<20 })
	for _, b := range all {
		b.Close()
	}
	b := otherPrefix(t, r.d, 9, 40)
	b.hits(t)
	if err := r.d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// Devices come, go, grow and shrink while others look up: nothing is lost, and every byte is right.
func TestHotPlugOfTheArenaUnderTraffic(t *testing.T) {
	r := newArenaRig(t)
	const pages, readers = 60, 3
	var rigs []*prefixRig
	for n := range readers {
		rigs = append(rigs, otherPrefix(t, r.d, n, pages))
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var loads atomic.Int64
	for _, b := range rigs {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				_, err := b.Lookup()
				if err == nil {
					err = b.Verify()
				}
				if err == nil {
					err = b.Cancel()
				}
				if err != nil {
					t.Error(err)
					return
				}
				loads.Add(1)
			}
		})
	}
	for round := range 5 {
		a, b, c := r.dev(2*round), r.dev(2*round+1), r.dev(2*round+2)
		r.post(arenaAt+"add", body{"device_path": c, "size": "4MiB"}, new(admin.DAXArenaAddResult))
		r.post(arenaOwn+"resize", body{"device_path": b, "size": "3MiB", "force": true},
			new(admin.DAXArenaResizeResult))
		r.post(arenaOwn+"remove", body{"device_path": a, "mode": "migrate", "force": true},
			new(admin.DAXArenaRemoveResult))
		r.post(arenaOwn+"resize", body{"device_path": b, "size": "4MiB", "force": true},
			new(admin.DAXArenaResizeResult))
		r.post(arenaAt+"add", body{"device_path": r.dev(2*round + 3), "size": "4MiB"},
			new(admin.DAXArenaAddResult))
		r.post(arenaAt+"remove", body{"device_path": b}, new(admin.DAXArenaRemoveResult))
		r.gone(b)
	}
	close(stop)
	wg.Wait()
	t.Logf("%d loads", loads.Load())
	for _, b := range rigs {
		b.hits(t)
		b.Close()
	}
	if err := r.d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// Stores are not granted what their worker has not mapped yet, while there is room elsewhere: they
// would be lost.
func TestArenaOnDAXGrantsWhatIsMapped(t *testing.T) {
	before := slabPatience
	slabPatience = time.Hour // for this worker, which maps them when nothing else is left
	t.Cleanup(func() { slabPatience = before })
	d, _ := startDaemon(t, onDAX(t, t.TempDir()))
	w := dialWorker(t, d, 16<<10)
	const stores, pages, late = 100, 4, 5
	// those by the store at which they are mapped
	mapped, pending := map[uint32]bool{}, map[uint32]int{}
	ready := func(region uint32) {
		mapped[region] = true
		delete(pending, region)
		if err := w.Send(&wire.RegionMapped{Region: region}); err != nil {
			t.Fatal(err)
		}
	}
	store := func(n int) {
		var hashes []byte
		for page := range pages {
			h := prefixes.Digest(n, page)
			hashes = append(hashes, h[:]...)
		}
		if err := w.Send(&wire.PrepareStore{ID: uint32(n), Hashes: hashes}); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(patience); ; {
			b, files, err := w.Recv(50 * time.Millisecond)
			if errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(end) {
				for region := range pending {
					// there is no room elsewhere any more, and so the store waits
					ready(region)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				f.Close()
			}
			switch typ, _ := wire.Peek(b); typ {
			case wire.TypeRegionAdded:
				var r wire.RegionAdded
				if err := r.Decode(b, &wire.DefaultLimits); err != nil {
					t.Fatal(err)
				}
				pending[r.Region] = n + late
			case wire.TypeStoreGrant:
				var g wire.StoreGrant
				if err := g.Decode(b, &wire.DefaultLimits); err != nil || g.ID != uint32(n) ||
					g.Shed > 0 || len(g.Grants) == 0 {
					t.Fatalf("store %d: %v, %+v", n, err, g)
				}
				for _, e := range g.Grants {
					if !mapped[e.Region] {
						t.Fatalf("store %d: region %d is granted, and mapped are %v", n, e.Region,
							mapped)
					}
				}
				if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
					t.Fatal(err)
				}
				return
			default:
				t.Fatalf("got %v", typ)
			}
		}
	}
	for n := range stores {
		for region, at := range pending {
			if n >= at {
				ready(region)
			}
		}
		store(n)
	}
	if st := d.Status(); len(mapped) < 6 || st.Slots.Ready+st.Slots.Filling != stores*pages {
		t.Errorf("%d regions, slots %+v", len(mapped), st.Slots)
	}
}

// An arena may begin without a device: nothing is held until there is one.
func TestFirstDeviceOfTheArena(t *testing.T) {
	edit := withArena(t, "", "--arena-dax-hotplug=true")
	d, _ := startDaemon(t, edit)
	r := newAdminRig(t, d.AdminAddr(), "")
	var st admin.DAXArenasResult
	if r.get(arenaAt+"status", &st); len(st.Arenas) != 0 {
		t.Errorf("%+v", st)
	}
	path := filepath.Join(t.TempDir(), "dax0.0")
	r.post(arenaAt+"add", body{"device_path": path, "size": "4MiB"}, new(admin.DAXArenaAddResult))
	b := storedPrefix(t, d, 40)
	b.hits(t)
}

// Metrics tell what becomes of what is committed, and of the devices.
func TestMetricsOfAnArenaOnDAX(t *testing.T) {
	dir := t.TempDir()
	d, _ := startDaemon(t, onDAX(t, dir))
	storedPrefix(t, d, 40).Close()
	untilKept(t, d)
	resp, text := newAdminRig(t, d.AdminAddr(), "").send(http.MethodGet, "/metrics", "", nil)
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	for _, want := range []string{
		"lookaside_arena_kept_chunks 10", "lookaside_arena_waiting_chunks 0",
		"lookaside_unverified_chunks 0", `lookaside_arena_slabs{state="given_up"} 0`,
		`lookaside_arena_device_state{device="` + filepath.Join(dir, "dax0.0") +
			`",state="active"} 1`, `lookaside_arena_device_bytes{device="` + filepath.Join(dir,
			"dax1.0") + `",use="free"}`,
		`lookaside_region_bytes{device="` + filepath.Join(dir, "dax0.0") + `",kind="file",region="`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("metrics lack %s", want)
		}
	}
}
