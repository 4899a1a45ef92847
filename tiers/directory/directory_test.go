package directory

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
	"lookaside/tiers/tiertest"
)

var small = tiers.Geometry{PageBytes: 1024, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32}

// What was committed is found by the next process, with the same bytes, and nothing else is.
func TestFoundAgain(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	if p.d.Why() == "" || !p.d.Lasting() {
		t.Errorf("%q %v", p.d.Why(), p.d.Lasting())
	}
	p.addRegion(64 << 10)
	p.addRegion(64 << 10)
	a, b := tiertest.Prefix("a prefix of 22 pages .."), tiertest.Prefix("another one")
	p.store(0, a, 0, len(a))
	p.store(0, b, 0, 8)
	open := p.prepare(0, b, 8, len(b))
	if open == nil {
		t.Fatal("no room")
	}
	p.fill(open) // but it is not committed
	p.keepAll()
	if st := p.d.Stats(); st.Kept != 8 || st.Failed != 0 {
		t.Errorf("%+v", st)
	}
	generation := p.d.Generation()
	p.close()

	q := m.start(engine.Config{}, nil)
	defer q.close()
	if q.d.Why() != "" || q.d.Generation() != generation+1 || len(q.d.Regions()) != 2 ||
		q.d.Next() != 2 {
		t.Errorf("%q, generation %d after %d, %+v", q.d.Why(), q.d.Generation(), generation,
			q.d.Regions())
	}
	if q.found != (Found{Chunks: 8}) || q.e.Unverified() != 8 || q.d.Stats().Kept != 8 {
		t.Errorf("%+v, %d unverified, %+v", q.found, q.e.Unverified(), q.d.Stats())
	}
	if n := q.readable(0, a); n != 0 {
		t.Errorf("%d pages that nobody has checked", n)
	}
	q.verifyAll(0, a)
	q.verifyAll(0, b)
	if n, n2 := q.readable(0, a), q.readable(0, b); n != len(a) || n2 != 8 {
		t.Errorf("%d and %d pages are back", n, n2)
	}
	if err := q.e.Check(); err != nil {
		t.Error(err)
	}
}

// A piece that has no entry yet lies where others had entries. These do not count as damaged,
// neither before its first entry is written nor later.
func TestBarePiece(t *testing.T) {
	m := newMachine(t, small, tiers.Geometry{PageBytes: 700, PagesPerChunk: 3, PageTokens: 16,
		DigestBytes: 16})
	p := m.start(engine.Config{}, nil)
	p.addRegion(16 << 10)
	a, b := tiertest.Prefix("all of the arena"), tiertest.Prefix("but not kept")
	p.store(0, a, 0, len(a))
	p.keepAll()
	p.e.ClearSpace(p.ids[0])
	p.store(1, b, 0, len(b))
	if p.e.Stats().Recarved == 0 {
		t.Fatal("the second geometry took no memory of the first one")
	}
	for _, takeover := range []bool{false, true} {
		p.close()
		p = m.start(engine.Config{}, func(o *Options) { o.Takeover = takeover })
		if p.found != (Found{}) {
			t.Errorf("%+v", p.found)
		}
	}
	p.store(1, b, 0, 3) // the piece is there, and its memory is free
	if p.e.Stats().Recarved != 0 {
		t.Errorf("%+v", p.e.Stats())
	}
	p.keepAll()
	p.close()
	p = m.start(engine.Config{}, nil)
	defer p.close()
	p.verifyAll(1, b)
	if n := p.readable(1, b); p.found != (Found{Chunks: 1}) || n != 3 {
		t.Errorf("%+v, %d pages", p.found, n)
	}
}

// A chunk whose bytes are not what they were is dropped before anybody reads it.
func TestBadBytes(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	p.addRegion(64 << 10)
	a := tiertest.Prefix("twelve pages")
	p.store(0, a, 0, len(a))
	p.keepAll()
	p.close()
	page := make([]byte, 1024)
	tiertest.Fill(page, m.spaces[0], a.Digests(5, 6, 32))
	at := strings.Index(string(m.memory[0]), string(page))
	m.memory[0][at+700] ^= 1
	q := m.start(engine.Config{}, nil)
	defer q.close()
	q.verifyAll(0, a)
	if n := q.readable(0, a); n != 4 {
		t.Errorf("%d pages, want 4", n)
	}
	if st := q.e.Stats(); st.VerifyFailed != 1 || st.Verified != 2 || q.d.Stats().Kept != 2 {
		t.Errorf("%+v %+v", st, q.d.Stats())
	}
}

// list returns what an engine holds and may be read.
func list(e *engine.Engine) (all []engine.Verification) {
	var at engine.PatrolPlace
	for {
		v, _, ok := e.NextPatrol(&at, nil)
		if !ok {
			return all
		}
		all = append(all, v)
	}
}

func TestRecheck(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	defer p.close()
	p.addRegion(64 << 10)
	a := tiertest.Prefix("eleven page")
	p.store(0, a, 0, 10)
	check := func(want bool) {
		t.Helper()
		for _, v := range list(p.e) {
			if known, err := p.d.Recheck(&v); known != want || err != nil {
				t.Errorf("chunk at page %d: known %v, %v", v.First, known, err)
			}
		}
	}
	check(false) // which keeps them
	check(true)
	if n := p.d.Stats().Kept; n != 3 {
		t.Errorf("%d kept", n)
	}
	// A chunk grows: what it had is compared with what it should be, as it was.
	all := list(p.e)
	last := all[slices.IndexFunc(all, func(v engine.Verification) bool { return v.First == 8 })]
	m.memory[0][last.Offset+5] ^= 1
	p.store(0, a, 8, 11)
	p.keepAll()
	all = list(p.e)
	grown := all[slices.IndexFunc(all, func(v engine.Verification) bool { return v.First == 8 })]
	if grown.Pages != 3 || grown.Offset != last.Offset {
		t.Fatalf("%+v", grown)
	}
	if known, err := p.d.Recheck(&grown); !known || !errors.Is(err, tiers.ErrCorrupt) {
		t.Errorf("%v %v", known, err)
	}
	m.memory[0][last.Offset+5] ^= 1
	check(true)
	if n := p.d.Stats().Kept; n != 3 {
		t.Errorf("%d kept", n)
	}
	gone := list(p.e)[0]
	p.e.ClearSpace(p.ids[0])
	if known, err := p.d.Recheck(&gone); known || err != nil {
		t.Errorf("%v %v", known, err)
	}
	if n := p.d.Stats().Kept; n != 0 {
		t.Errorf("%d kept", n)
	}
}

// TestTakeover: what the process before has stored or checked itself need not be checked again.
func TestTakeover(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	p.addRegion(64 << 10)
	a, b, c := tiertest.Prefix("checked."), tiertest.Prefix("not yet."), tiertest.Prefix("stored..")
	p.store(0, a, 0, 8)
	p.store(0, b, 0, 8)
	p.keepAll()
	p.close()
	old := m.start(engine.Config{}, nil)
	old.verifyAll(0, a)
	old.store(0, c, 0, 8)
	old.keepAll()
	for round := range 2 {
		q := m.start(engine.Config{}, func(o *Options) { o.Takeover = true })
		if q.d.Generation() != old.d.Generation() || q.found.Chunks != 6 || q.e.Unverified() != 2 {
			t.Errorf("round %d: generation %d after %d, %+v, %d unverified", round,
				q.d.Generation(), old.d.Generation(), q.found, q.e.Unverified())
		}
		if n, n2, n3 := q.readable(0, a), q.readable(0, b), q.readable(0, c); n != 8 || n2 != 0 ||
			n3 != 8 {
			t.Errorf("round %d: %d, %d, %d", round, n, n2, n3)
		}
		// What becomes of chunks in the process before does not matter any more.
		old.d.Leave()
		old.e.ClearSpace(old.ids[0])
		old.close()
		old = q
	}
	if n := old.d.Stats().Kept; n != 6 {
		t.Errorf("%d are kept", n)
	}
	old.close()
	q := m.start(engine.Config{}, nil)
	defer q.close()
	if q.e.Unverified() != 6 {
		t.Errorf("%d of 6 are checked after a crash", q.e.Unverified())
	}
}

// What must not be found is not, and the reason is named.
func TestStartsEmpty(t *testing.T) {
	edit := func(at int64, b ...byte) func(t *testing.T, m *machine) {
		return func(t *testing.T, m *machine) {
			f, err := os.OpenFile(m.path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			for copies := range int64(2) {
				if _, err := f.WriteAt(b, at+copies*headerBytes); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for name, tc := range map[string]struct {
		change  func(t *testing.T, m *machine)
		options func(*Options)
		why     string
	}{
		"none":             {func(t *testing.T, m *machine) { os.Remove(m.path) }, nil, "there is no directory"},
		"machine started":  {nil, func(o *Options) { o.boot = "boot 2" }, "last start of this machine"},
		"another lock":     {nil, func(o *Options) { o.LockInode++ }, "another runtime directory"},
		"another device":   {nil, func(o *Options) { o.LockDev++ }, "another runtime directory"},
		"next version":     {edit(8, 99, 0, 0, 0, 0, 1), nil, "another version of the program has written it: version 99, this is for 1"},
		"foreign":          {edit(0, 'x'), nil, "damaged"},
		"a flipped bit":    {edit(700, 1), nil, "damaged"},
		"empty":            {func(t *testing.T, m *machine) { os.Truncate(m.path, 0) }, nil, "damaged"},
		"cut":              {func(t *testing.T, m *machine) { os.Truncate(m.path, entriesAt) }, nil, "cut short"},
		"cut in the table": {func(t *testing.T, m *machine) { os.Truncate(m.path, 9000) }, nil, "cut short"},
		"a directory": {func(t *testing.T, m *machine) {
			os.Remove(m.path)
			os.Mkdir(m.path, 0o700)
		}, nil, "is a directory"},
		"a fifo": {func(t *testing.T, m *machine) {
			os.Remove(m.path)
			unix.Mkfifo(m.path, 0o600)
		}, nil, "not a file of this user"},
		"a link": {func(t *testing.T, m *machine) {
			os.Rename(m.path, m.path+"2")
			os.Symlink(m.path+"2", m.path)
		}, nil, "too many levels"},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, small)
			p := m.start(engine.Config{}, nil)
			p.addRegion(64 << 10)
			p.store(0, tiertest.Prefix("page"), 0, 4)
			p.keepAll()
			p.close()
			if tc.change != nil {
				tc.change(t, m)
			}
			if d, err := Open(m.options(func(o *Options) {
				if o.Takeover = true; tc.options != nil {
					tc.options(o)
				}
			})); err == nil {
				t.Errorf("a takeover goes on: %v", d.Close())
			} else if name != "none" && !strings.Contains(err.Error(), tc.why) {
				t.Errorf("%q does not say %q", err, tc.why)
			}
			q := m.start(engine.Config{}, tc.options)
			if !strings.Contains(q.d.Why(), tc.why) || len(q.d.Regions()) != 0 ||
				q.found.Chunks != 0 {
				t.Errorf("%q %+v %+v", q.d.Why(), q.d.Regions(), q.found)
			}
			if name == "a directory" != !q.d.Lasting() {
				t.Errorf("lasting %v", q.d.Lasting())
			}
			q.addRegion(64 << 10)
			q.store(0, tiertest.Prefix("next"), 0, 4)
			q.keepAll()
			q.close()
			if name == "a directory" {
				return
			}
			m.memory[0] = m.memory[q.d.next-1]
			q = m.start(engine.Config{}, tc.options)
			defer q.close()
			q.verifyAll(0, tiertest.Prefix("next"))
			if q.found.Chunks != 1 || q.readable(0, tiertest.Prefix("next")) != 4 {
				t.Errorf("the new one is not found: %q %+v", q.d.Why(), q.found)
			}
		})
	}
}

// Regions that are not there any more are dropped, and their ids are not used again.
func TestDrop(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	for range 3 {
		p.addRegion(16 << 10)
	}
	var all []tiertest.Prefix
	for i := range 12 {
		all = append(all, tiertest.Prefix(fmt.Sprintf("%04d", i)))
		p.store(0, all[i], 0, 4)
	}
	p.keepAll()
	p.close()
	d := m.open(nil)
	if err := d.Drop(0, 2, 9); err != nil {
		t.Fatal(err)
	}
	q, err := m.tryStart(d, engine.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if q.found.Chunks != 4 || q.d.Next() != 3 {
		t.Errorf("%+v, next %d", q.found, q.d.Next())
	}
	q.addRegion(32 << 10)
	q.addRegion(16 << 10)
	if rs := q.d.Regions(); len(rs) != 3 || rs[0].ID != 1 || rs[1].ID != 3 || rs[2].ID != 4 {
		t.Errorf("%+v", rs)
	}
	for _, a := range all {
		q.store(0, a, 0, 4)
	}
	q.keepAll()
	q.close()
	q = m.start(engine.Config{}, nil)
	for i, a := range all {
		q.verifyAll(0, a)
		if q.readable(0, a) != 4 {
			t.Errorf("prefix %d is gone", i)
		}
	}
	q.close()
	d = m.open(nil)
	if err := errors.Join(d.Drop(1, 3, 4), d.Close()); err != nil {
		t.Fatal(err)
	}
	d = m.open(nil)
	if d.Next() != 5 || len(d.Regions()) != 0 {
		t.Errorf("next %d of %+v", d.Next(), d.Regions())
	}
	if err := errors.Join(d.Remove(), d.Remove()); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if names, _ := filepath.Glob(filepath.Dir(m.path) + "/*"); len(names) > 0 {
		t.Errorf("left: %v", names)
	}
}

// A directory that cannot be made, or not written any more, costs nothing but that nothing is
// found.
func TestNoRoom(t *testing.T) {
	m := newMachine(t, small)
	m.path = filepath.Join(t.TempDir(), "missing", "directory")
	p := m.start(engine.Config{}, nil)
	if p.d.Lasting() || p.d.Why() == "" {
		t.Errorf("%v %q", p.d.Lasting(), p.d.Why())
	}
	p.addRegion(64 << 10)
	a := tiertest.Prefix("eleven page")
	p.store(0, a, 0, len(a))
	p.keepAll()
	for _, v := range list(p.e) {
		if known, err := p.d.Recheck(&v); !known || err != nil {
			t.Errorf("%v %v", known, err)
		}
	}
	if err := p.d.AddRegion(Region{ID: 0, SizeBytes: 4096, PageSize: 4096}); err == nil {
		t.Error("a region twice")
	}
	if err := p.d.AddRegion(Region{ID: 5, SizeBytes: 4096, PageSize: 5}); err == nil {
		t.Error("a region of odd pages")
	}
	p.close()

	m = newMachine(t, small)
	p = m.start(engine.Config{}, nil)
	defer p.close()
	p.addRegion(64 << 10)
	p.store(0, a, 0, 4)
	p.keepAll()
	// A file that can be read only fails as one without room does.
	whole := p.d.file.f
	f, err := os.Open(m.path)
	if err != nil {
		t.Fatal(err)
	}
	p.d.file.f = f
	p.store(0, a, 4, len(a))
	p.keepAll()
	if st := p.d.Stats(); st.Kept != 1 || st.Failed != 2 || p.held(0, a) != len(a) {
		t.Errorf("%+v", st)
	}
	p.d.file.f = whole
	f.Close()
	for _, v := range list(p.e) {
		if _, err := p.d.Recheck(&v); err != nil {
			t.Error(err)
		}
	}
	if st := p.d.Stats(); st.Kept != 3 {
		t.Errorf("%+v", st)
	}
}

// A piece whose entries are read by several goroutines is found whole.
func TestPartsOfAPiece(t *testing.T) {
	before := readBytes
	readBytes = 1000
	t.Cleanup(func() { readBytes = before })
	m := newMachine(t, small, tiers.Geometry{PageBytes: 256, PagesPerChunk: 1, PageTokens: 16,
		DigestBytes: 8})
	p := m.start(engine.Config{}, nil)
	p.addRegion(8 << 20)
	all := make([]tiertest.Prefix, 300)
	for i := range all {
		all[i] = tiertest.Prefix(fmt.Sprintf("%08d", i))
		p.store(0, all[i], 0, 8)
		p.store(1, all[i], 0, 8)
	}
	p.keepAll()
	p.close()
	q := m.start(engine.Config{}, nil)
	defer q.close()
	if q.found != (Found{Chunks: q.d.Stats().Kept}) ||
		q.found.Chunks < 500 {
		t.Errorf("%+v", q.found)
	}
	for _, a := range all {
		for i := range m.spaces {
			if q.verifyAll(i, a); q.readable(i, a) != 8 {
				t.Fatalf("prefix %q of space %d is gone", a, i)
			}
		}
	}
	if err := q.e.Check(); err != nil {
		t.Error(err)
	}
}

// A file that is cut short under a running process costs what was kept, and nothing else.
func TestCutShort(t *testing.T) {
	m := newMachine(t, small)
	p := m.start(engine.Config{}, nil)
	defer p.close()
	p.addRegion(64 << 10)
	a, b := tiertest.Prefix("eleven page"), tiertest.Prefix("another one")
	p.store(0, a, 0, len(a))
	p.keepAll()
	if err := os.Truncate(m.path, 0); err != nil {
		t.Fatal(err)
	}
	p.store(0, b, 0, len(b))
	p.keepAll()
	for _, v := range list(p.e) {
		if _, err := p.d.Recheck(&v); err != nil {
			t.Error(err)
		}
	}
	p.e.ClearSpace(p.ids[0])
	p.addRegion(64 << 10)
	p.store(0, a, 0, len(a))
	p.keepAll()
	if err := p.e.Check(); err != nil || p.held(0, a) != len(a) {
		t.Error(err)
	}
	p.close()
	q := m.start(engine.Config{}, nil)
	defer q.close()
	if q.d.Why() == "" || q.found.Chunks != 0 {
		t.Errorf("%q %+v", q.d.Why(), q.found)
	}
}

// TestTenants: an entry names its chunk's tenant, and the next process knows it, in a registry of
// its own. A program that knows no tenants reads the entry as well.
func TestTenants(t *testing.T) {
	registry := func() *tenant.Registry {
		r, err := tenant.New(tenant.Config{Max: 4})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	m := newMachine(t, small)
	r := registry()
	p := m.start(engine.Config{Tenants: r}, nil)
	p.addRegion(64 << 10)
	r.Find([]byte("another"))
	who := r.Find([]byte("a"))
	run := tiertest.Prefix("a prefix of 22 pages ..").Run(m.spaces[0], 0, 8)
	res, _, err := p.e.PrepareStoring(owner(0), 0, nil, run.Hashes, engine.Storing{Tenant: who},
		nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.e.CommitStore(owner(0), res.Store, nil); err != nil {
		t.Fatal(err)
	}
	p.store(0, tiertest.Prefix("nobody's"), 0, 4)
	p.keepAll()
	p.close()

	r = registry()
	q := m.start(engine.Config{Tenants: r}, nil)
	if id := r.Find([]byte("a")); id == who {
		t.Fatal("both registries count alike: the test shows nothing")
	}
	of := map[string]int{}
	for _, info := range r.List() {
		for _, st := range q.e.Tenants(nil) {
			if st.ID == info.ID {
				of[info.Name] = st.Slots
			}
		}
	}
	if of["a"] != 2 || of[""] != 1 {
		t.Fatalf("slots of tenants: %v", of)
	}
	q.close()

	z := m.start(engine.Config{}, nil)
	defer z.close()
	if z.found.Chunks != 3 {
		t.Fatalf("%+v", z.found)
	}
}
