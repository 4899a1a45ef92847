package sidecar

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
)

// startPeer starts a sidecar that finds those which were started in the same directory.
func startPeer(t *testing.T, dir, name string, edit func(*settings.Config)) (*Daemon, *logBuffer) {
	t.Helper()
	return startDaemon(t, func(c *settings.Config) {
		c.Runtime.Dir = filepath.Join(dir, name)
		if edit != nil {
			edit(c)
		}
	})
}

// await waits until something holds.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it has not come to pass that %s", what)
		}
	}
}

const peerPage = 4096

// dialPeerWorker connects a worker whose space differs only by its fields.
func dialPeerWorker(t *testing.T, d *Daemon, fields ...wire.Field) *client.Session {
	t.Helper()
	w, err := client.Dial(d.cfg.Runtime.Dir, &wire.Hello{
		Role: wire.RoleWorker, EngineID: "e", PageTokens: 16, PageBytes: peerPage, PagesPerChunk: 4,
		DigestBytes: 32, Fields: fields,
	}, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// peerHashes are the hashes of a prefix of n pages.
func peerHashes(prefix byte, n int) []byte {
	var out []byte
	for i := range n {
		h := sha256.Sum256([]byte{prefix, byte(i), byte(i >> 8)})
		out = append(out, h[:]...)
	}
	return out
}

// prepareStore asks for room for pages from the first of a prefix on.
func prepareStore(t *testing.T, w *client.Session, hashes []byte) *wire.StoreGrant {
	t.Helper()
	if err := w.Send(&wire.PrepareStore{ID: 1, Hashes: hashes}); err != nil {
		t.Fatal(err)
	}
	for {
		typ, b, r := next(t, w)
		if r != nil {
			continue
		}
		if typ != wire.TypeStoreGrant {
			t.Fatalf("%v for a StoreGrant", typ)
		}
		g := new(wire.StoreGrant)
		if err := g.Decode(b, &wire.DefaultLimits); err != nil {
			t.Fatal(err)
		}
		return g
	}
}

// store stores pages, without copying anything.
func store(t *testing.T, w *client.Session, hashes []byte) *wire.StoreGrant {
	t.Helper()
	g := prepareStore(t, w, hashes)
	if g.Store != 0 {
		if err := w.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

func TestSidecarsOfOneDirectoryShare(t *testing.T) {
	before := touchPatience
	touchPatience = patience
	t.Cleanup(func() { touchPatience = before })
	dir := testDir(t)
	a, _ := startPeer(t, dir, "a", nil)
	b, _ := startPeer(t, dir, "b", nil)
	off, _ := startPeer(t, dir, "off", func(c *settings.Config) { c.Peers.Enabled = false })
	keeps, _ := startPeer(t, dir, "keeps", func(c *settings.Config) { c.Peers.SkipStores = false })
	alone, _ := startPeer(t, dir, "alone", func(c *settings.Config) { c.Events.Journal = 0 })
	for _, d := range []*Daemon{a, b, keeps} {
		await(t, "all others are found", func() bool {
			return len(d.Status().Peers.Lenders) == 2 &&
				len(d.Status().Peers.Borrowers) == 2
		})
	}
	if st := off.Status().Peers; st.Enabled || off.peers != nil {
		t.Errorf("with peers.enabled false: %+v", st)
	}
	if st := alone.Status().Peers; st.Enabled {
		t.Errorf("without a journal: %+v", st)
	}

	wa, wb, wk := dialPeerWorker(t, a), dialPeerWorker(t, b), dialPeerWorker(t, keeps)
	if wa.Welcome.Peers == 0 || wb.Welcome.Peers != wa.Welcome.Peers {
		t.Errorf("workers are told to be of the groups %x and %x", wa.Welcome.Peers,
			wb.Welcome.Peers)
	}
	disk, _ := startPeer(t, testDir(t), "disk", withDisk(t, t.TempDir(), ""))
	for what, d := range map[string]*Daemon{"peers.enabled false": off,
		"peers.skip_stores false": keeps, "no journal": alone, "a disk below": disk} {
		if w := dialPeerWorker(t, d); w.Welcome.Peers != 0 {
			t.Errorf("with %s: group %x, where each has to store everything", what, w.Welcome.Peers)
		}
	}
	hashes := peerHashes(1, 10) // two whole chunks and a half
	if g := store(t, wa, hashes); g.Held != 0 || g.Shed != 0 || len(g.Grants) != 3 {
		t.Fatalf("the first store: %+v", g)
	}
	for _, d := range []*Daemon{b, keeps} {
		await(t, "the others know what it holds",
			func() bool { return d.Status().Peers.HintPages == 10 })
	}
	// A store does not wait for ever for the others to say what they hold: when they are late, it
	// is all asked for, and here given up.
	held := uint64(0)
	storeBeside := func(what string, hashes []byte) (g *wire.StoreGrant) {
		t.Helper()
		await(t, what+" is not stored again", func() bool {
			g = prepareStore(t, wb, hashes)
			held += uint64(g.Held)
			if g.Held != 8 && g.Store != 0 {
				if err := wb.Send(&wire.AbortStore{Store: g.Store}); err != nil {
					t.Fatal(err)
				}
			}
			return g.Held == 8
		})
		return g
	}
	if g := storeBeside("what the other holds", hashes[:8*32]); g.Store != 0 {
		t.Errorf("what the other holds: %+v", g)
	}
	if g := store(t, wk, hashes); g.Held != 0 || len(g.Grants) != 3 {
		t.Errorf("with peers.skip_stores false: %+v", g)
	}
	// A longer version: its whole chunks are there, the last one is not.
	longer := append(slices.Clone(hashes), peerHashes(2, 2)...)
	g := storeBeside("what the other holds of the longer version", longer)
	if err := wb.Send(&wire.CommitStore{Store: g.Store}); err != nil {
		t.Fatal(err)
	}
	if len(g.Grants) != 1 || g.Grants[0].Page != 8 || g.Grants[0].Pages != 4 {
		t.Errorf("the longer version: %+v", g)
	}
	await(t, "it is stored", func() bool { return b.Status().Counters.Stores == 1 })
	if c := b.Status().Counters; c.ElsewherePages != held || c.StoredPages != 4 ||
		c.HeldPages != held {
		t.Errorf("%d pages were elsewhere, %d held, %d stored: want %d, %d and 4", c.ElsewherePages,
			c.HeldPages, c.StoredPages, held, held)
	}
	var text strings.Builder
	if err := b.Status().WriteTable(&text); err != nil ||
		!strings.Contains(text.String(), fmt.Sprintf("%d pages not stored, being there", held)) {
		t.Errorf("%v: %s", err, text.String())
	}
}

func TestWorkersMapWhatOthersLendForReading(t *testing.T) {
	dir := testDir(t)
	a, _ := startPeer(t, dir, "a", nil)
	w := dialPeerWorker(t, a)
	if _, _, own := next(t, w); own == nil || own.ReadOnly {
		t.Fatalf("%+v is told of first", own)
	}

	c := a.cfg
	c.Runtime.Dir = filepath.Join(dir, "b")
	b, err := Start(context.Background(), c, NewLogger(c.Log, new(logBuffer)), Origin{})
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	stop := func() {
		if !closed {
			closed = true
			if err := b.Shutdown(context.Background()); err != nil {
				t.Error(err)
			}
		}
	}
	defer stop()
	m, files, err := w.Recv(patience)
	if err != nil {
		t.Fatal(err)
	}
	var r wire.RegionAdded
	if err := r.Decode(m, &wire.DefaultLimits); err != nil || len(files) != 1 {
		t.Fatalf("%v, with %d files", err, len(files))
	}
	fd := int(files[0].Fd())
	defer files[0].Close()
	if !r.ReadOnly || r.Region < firstPeerRegion || r.Generation != a.generation {
		t.Errorf("%+v is no region of another, or not of this run", r)
	}
	if _, err := unix.Mmap(fd, 0, int(r.SizeBytes), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err == nil {
		t.Error("it can be mapped for writing")
	}
	mem, err := unix.Mmap(fd, int64(r.Offset), int(r.SizeBytes), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	copy(b.arena.Bytes(0), "theirs")
	if string(mem[:6]) != "theirs" {
		t.Error("it is other memory")
	}

	// One that connects later hears of it with its handshake; and both hear of its end.
	late := dialPeerWorker(t, a)
	var told []bool
	for range 2 {
		_, _, region := next(t, late)
		told = append(told, region != nil && region.ReadOnly)
	}
	if !slices.Contains(told, true) || !slices.Contains(told, false) {
		t.Errorf("a later worker was told of the regions %v", told)
	}
	stop()
	for _, w := range []*client.Session{w, late} {
		typ, m, _ := next(t, w)
		var gone wire.RegionRemoved
		if typ != wire.TypeRegionRemoved || gone.Decode(m, &wire.DefaultLimits) != nil ||
			gone.Region != r.Region {
			t.Fatalf("%v %+v for the end of region %d", typ, gone, r.Region)
		}
		if err := w.Send(&wire.RegionUnmapped{Region: gone.Region}); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "nothing is left of it", func() bool { return len(a.Status().Peers.Lenders) == 0 })
	if a.Status().Counters.Errors["malformed"] != 0 || a.server.Sessions() != 2 {
		t.Errorf("%+v", a.Status().Counters.Errors)
	}
}

func TestNothingIsSharedWhereOthersCouldLookIn(t *testing.T) {
	dir := testDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	a, log := startPeer(t, dir, "a", nil)
	if st := a.Status().Peers; !strings.Contains(st.Off, "mode 0755") ||
		!strings.Contains(st.Off, "chmod 0700") {
		t.Errorf("off: %q", st.Off)
	}
	if text := log.String(); strings.Count(text, "mode 0755") != 1 {
		t.Errorf("the log says\n%s", text)
	}
	var text strings.Builder
	if err := a.Status().WriteTable(&text); err != nil ||
		!strings.Contains(text.String(), "chmod 0700") {
		t.Errorf("%v: %s", err, text.String())
	}
	if w := dialPeerWorker(t, a); w.Welcome.Peers != 0 {
		t.Errorf("group %x, where nothing is shared", w.Welcome.Peers)
	}
	// When it has been put right they are looked for.
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	b, _ := startPeer(t, dir, "b", nil)
	await(t, "they have found each other",
		func() bool {
			return len(a.Status().Peers.Lenders) == 1 &&
				len(b.Status().Peers.Lenders) == 1
		})
	wa, wb := dialPeerWorker(t, a), dialPeerWorker(t, b)
	if wa.Welcome.Peers == 0 || wb.Welcome.Peers != wa.Welcome.Peers {
		t.Errorf("workers are told to be of the groups %x and %x", wa.Welcome.Peers,
			wb.Welcome.Peers)
	}
}

// Prefixes that are named by another seed, or are another model's, are not shared.
func TestStatusSaysWhySpacesAreNotShared(t *testing.T) {
	for _, field := range []string{"hash_seed", "model"} {
		t.Run(field, func(t *testing.T) {
			dir := testDir(t)
			a, _ := startPeer(t, dir, "a", nil)
			b, log := startPeer(t, dir, "b", nil)
			await(t, "they have found each other",
				func() bool {
					return len(a.Status().Peers.Lenders) == 1 &&
						len(b.Status().Peers.Lenders) == 1
				})
			fields := func(value string) []wire.Field {
				all := []wire.Field{{Key: "hash_seed", Value: "0"}, {Key: "model", Value: "m"}}
				for i := range all {
					if all[i].Key == field {
						all[i].Value = value
					}
				}
				return all
			}
			store(t, dialPeerWorker(t, a, fields("1")...), peerHashes(1, 4))
			wb := dialPeerWorker(t, b, fields("2")...)
			await(t, "b knows why", func() bool {
				l := b.Status().Peers.Lenders
				return len(l) == 1 && len(l[0].Unshared) == 1 && l[0].Shared == 0
			})
			u := b.Status().Peers.Lenders[0].Unshared[0]
			if len(u.Differences) != 1 || u.Differences[0].Field != field ||
				u.Differences[0].Ours != "2" || u.Differences[0].Theirs != "1" {
				t.Errorf("%+v", u)
			}
			if g := store(t, wb, peerHashes(1, 4)); g.Held != 0 {
				t.Errorf("pages of another space are held: %+v", g)
			}
			var text strings.Builder
			if err := b.Status().WriteTable(&text); err != nil ||
				!strings.Contains(text.String(), field+` is "2" here, "1" there`) {
				t.Errorf("%v: %s", err, text.String())
			}
			await(t, "the log says so", func() bool {
				return strings.Contains(log.String(),
					field+`: ours`)
			})
		})
	}
}

// Instances that differ by accident, on one sidecar or on two that share, are named in the status,
// the metrics, the log and to their schedulers.
func TestAccidentsAreNamed(t *testing.T) {
	dir := testDir(t)
	a, _ := startPeer(t, dir, "a", nil)
	b, log := startPeer(t, dir, "b", nil)
	await(t, "they have found each other",
		func() bool {
			return len(a.Status().Peers.Lenders) == 1 &&
				len(b.Status().Peers.Lenders) == 1
		})
	fields := func(dtype, seed string) []wire.Field {
		return []wire.Field{{Key: "dtype", Value: dtype}, {Key: "model", Value: "m"},
			{Key: "none_hash", Value: seed}}
	}
	dialPeerWorker(t, a, fields("float16", "0")...)
	dialPeerWorker(t, b, fields("float16", "1")...)
	scheduler, err := client.Dial(b.cfg.Runtime.Dir, &wire.Hello{Role: wire.RoleScheduler,
		EngineID: "e", PageTokens: 16, PagesPerChunk: 4, DigestBytes: 32}, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { scheduler.Close() })
	await(t, "b knows why nothing is shared with a",
		func() bool { return len(b.Status().Unshared) == 1 })
	u := b.Status().Unshared[0]
	if len(u.Causes) != 1 || u.Causes[0].Field != "none_hash" || u.Causes[0].Ours != "1" ||
		u.Causes[0].Theirs != "0" || !strings.Contains(u.Whose, fmt.Sprint(os.Getpid())) {
		t.Errorf("%+v", u)
	}
	var text strings.Builder
	if err := b.Status().WriteTable(&text); err != nil ||
		!strings.Contains(text.String(), "PYTHONHASHSEED=0") {
		t.Errorf("%v: %s", err, text.String())
	}
	if v := b.Status().Verdict; !strings.HasPrefix(v,
		"instances of one model share nothing: the seed of the hashes differs") {
		t.Errorf("%q", v)
	}
	if m := metricsOf(t, b); !strings.Contains(m,
		`lookaside_unshared_spaces{field="none_hash"} 1`) {
		t.Errorf("%s", m)
	}
	await(t, "the log says so", func() bool {
		return strings.Contains(log.String(),
			"instances of one model share nothing")
	})
	await(t, "its scheduler is told", func() bool {
		var pong wire.Pong
		if err := scheduler.Call(&wire.Ping{ID: 1}, &pong, patience); err != nil {
			t.Fatal(err)
		}
		return len(scheduler.Notices) == 1 && strings.Contains(scheduler.Notices[0],
			"PYTHONHASHSEED=0")
	})
}

func TestStatusSaysOnWhichDevicesOthersHoldWhat(t *testing.T) {
	dir, devices := testDir(t), t.TempDir()
	var all []*Daemon
	for rank := range 2 {
		edit := onDAX(t, devices, "--arena-dax-ranks=2", fmt.Sprintf("--arena-dax-rank=%d", rank))
		d, _ := startPeer(t, dir, fmt.Sprint(rank), func(c *settings.Config) {
			edit(c)
			c.Peers.Dir = dir
		})
		all = append(all, d)
	}
	store(t, dialPeerWorker(t, all[0]), peerHashes(1, 4))
	await(t, "the other knows its pages and its device", func() bool {
		l := all[1].Status().Peers.Lenders
		return len(l) == 1 && l[0].Pages == 4 && len(l[0].Devices) == 2
	})
	d := all[1].Status().Peers.Lenders[0].Devices[0]
	if path := filepath.Join(devices, "dax0.0"); d.Path != path || d.Kind != "file" ||
		d.Regions < 1 || d.SizeBytes <= 0 || d.SizeBytes > 2<<20 {
		t.Errorf("%+v, want a part of %s", d, path)
	}
	var text strings.Builder
	if err := all[1].Status().WriteTable(&text); err != nil ||
		!strings.Contains(text.String(), fmt.Sprintf("pid %d holds 4 pages on %s (file, ",
			os.Getpid(), d.Path)) {
		t.Errorf("%v: %s", err, text.String())
	}
}

// A sidecar that begins anew replaces the files of its arena. What was borrowed of the old ones
// stays what it was.
func TestRestartedOwnerOfFilesLeavesWhatWasLent(t *testing.T) {
	files := t.TempDir()
	open := func() *dax.Region {
		r, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindFile, SizeBytes: 1 << 20,
			Path: filepath.Join(files, "lookaside-region-0000"), NUMANode: dax.NoNUMANode})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	first := open()
	copy(first.Bytes(), "lent")
	fd, err := dax.ReadOnly(first.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	mem, err := unix.Mmap(fd, 0, 1<<20, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := open()
	defer second.Close()
	copy(second.Bytes(), "anew")
	if string(mem[:4]) != "lent" {
		t.Errorf("a borrower reads %q", mem[:4])
	}
}
