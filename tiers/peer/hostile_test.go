package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc"
	"lookaside/ipc/wire"
)

// fakeLender is a socket in a directory, where the test answers in place of a Peers.
type fakeLender struct {
	t   *testing.T
	gen uint64
	dir *ipc.PeerDir
	l   *ipc.Listener
}

func newFakeLender(t *testing.T, dir string) *fakeLender {
	t.Helper()
	d, err := ipc.OpenPeerDir(dir)
	check(t, err)
	generations.Lock()
	generations.n++
	f := &fakeLender{t: t, gen: generations.n, dir: d}
	generations.Unlock()
	f.l, err = d.Listen(f.gen, ipc.Options{SendPatience: patience})
	check(t, err)
	t.Cleanup(func() { f.l.Close(); d.Close() })
	return f
}

// accept takes the next borrower in, as far as its PeerHello.
func (f *fakeLender) accept() *ipc.Conn {
	f.t.Helper()
	c, err := f.l.Accept(f.t.Context())
	check(f.t, err)
	f.t.Cleanup(func() { c.Close() })
	b, err := c.Recv()
	check(f.t, err)
	var h wire.PeerHello
	check(f.t, h.Decode(b, &wire.DefaultLimits))
	return c
}

func (f *fakeLender) send(c *ipc.Conn, m wire.Message, fds ...int) {
	f.t.Helper()
	check(f.t, c.Send(m.Append(nil), fds...))
}

func (f *fakeLender) welcome() *ipc.Conn {
	f.t.Helper()
	c := f.accept()
	f.send(c, &wire.PeerWelcome{Generation: f.gen, MaxPages: 65536})
	return c
}

// ends waits until the other side has ended the connection.
func ends(t *testing.T, c *ipc.Conn) {
	t.Helper()
	check(t, c.SetRecvDeadline(time.Now().Add(patience)))
	for {
		if _, err := c.Recv(); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("the connection does not end")
			}
			return
		}
	}
}

// What a lender sends that makes no sense ends its connection, and costs others nothing.
func TestBrokenLenders(t *testing.T) {
	dir := peerDir(t)
	good := newSide(t, dir, "good", sideOptions{})
	good.store(theirSpace, theirPrefix)
	f := newFakeLender(t, dir)
	var c *ipc.Conn
	mem, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd, SizeBytes: 4096})
	check(t, err)
	defer mem.Close()
	region := func(id uint32) *wire.RegionAdded {
		return &wire.RegionAdded{Region: id, Kind: "memfd", SizeBytes: 4096, PageSize: 4096}
	}
	pages := func(seq uint64, begin bool) *wire.PeerPages {
		return &wire.PeerPages{Seq: seq, Begin: begin, Hints: make([]byte, 800)}
	}
	fp := theirSpace.Fingerprint[:]
	for name, do := range map[string]func(){
		"garbage": func() { check(t, c.Send([]byte("garbage"))) },
		"an array bomb": func() {
			check(t,
				c.Send([]byte{0xdd, 0xff, 0xff, 0xff, 0xff, 73}))
		},
		"a request": func() {
			f.send(c, &wire.PeerLease{Fingerprint: fp,
				Hashes: theirPrefix})
		},
		"a second welcome": func() {
			f.send(c, &wire.PeerWelcome{Generation: f.gen,
				MaxPages: 1})
		},
		"a grant that nobody asked": func() { f.send(c, &wire.PeerGrant{ID: 7, Pages: 1}) },
		"pages without a begin":     func() { f.send(c, pages(1, false)) },
		"pages out of order": func() {
			f.send(c, pages(1, true))
			f.send(c,
				pages(3, false))
		},
		"a region without descriptor": func() { f.send(c, region(1)) },
		"a region with two":           func() { f.send(c, region(1), mem.FD(), mem.FD()) },
		"a region with ten": func() {
			f.send(c, region(1), mem.FD(), mem.FD(), mem.FD(), mem.FD(), mem.FD(), mem.FD(),
				mem.FD(), mem.FD(), mem.FD(), mem.FD())
		},
		"a region twice": func() {
			f.send(c, region(1), mem.FD())
			f.send(c, region(1),
				mem.FD())
		},
		"the end of no region": func() { f.send(c, &wire.RegionRemoved{Region: 4}) },
		"descriptors with pages": func() {
			f.send(c, pages(1, true), mem.FD())
			check(t,
				c.Send([]byte{1}))
		},
		"a thousand regions": func() {
			flood(c,
				func(i int) ([]byte, int) { return region(uint32(i)).Append(nil), mem.FD() })
		},
		"a thousand spaces": func() {
			flood(c, func(i int) ([]byte, int) {
				s := wire.PeerSpace{Fingerprint: make([]byte, 32), PageBytes: 1, PagesPerChunk: 1,
					DigestBytes: 8}
				binary.LittleEndian.PutUint32(s.Fingerprint, uint32(i))
				return s.Append(nil), -1
			})
		},
	} {
		s := newSide(t, dir, "s", sideOptions{})
		c = f.welcome()
		// Others of the directory come, too: only s is sent nonsense; they wait.
		if st := s.p.Status(); st.Malformed != 0 {
			t.Fatalf("%s: %+v", name, st)
		}
		before := good.p.Status().Malformed + s.p.Status().Malformed
		do()
		ends(t, c)
		eventually(t, name+" is counted", func() bool {
			return good.p.Status().Malformed+
				s.p.Status().Malformed > before
		})
		check(t, s.verify(s.borrows(theirSpace, theirPrefix, 16)))
		s.close()
		_ = c.Close()
		f.l.Close()
		f = newFakeLender(t, dir)
	}
}

// flood sends until it cannot.
func flood(c *ipc.Conn, m func(i int) ([]byte, int)) {
	for i := range 1000 {
		b, fd := m(i)
		var err error
		if fd >= 0 {
			err = c.Send(b, fd)
		} else {
			err = c.Send(b)
		}
		if err != nil {
			return
		}
	}
}

// What a lender grants is checked before it is used, however it was asked for.
func TestBrokenGrants(t *testing.T) {
	for _, by := range []string{"asked", "borrowed"} {
		t.Run(by, func(t *testing.T) { testBrokenGrants(t, by) })
	}
}

func testBrokenGrants(t *testing.T, by string) {
	dir := peerDir(t)
	mem, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd, SizeBytes: 1 << 20})
	check(t, err)
	defer mem.Close()
	hashes := prefix(stretch(1, 8)...)
	sp := space("m", 4)
	for name, extents := range map[string][]wire.Extent{
		"beyond its region": {{Page: 0, Pages: 4, Region: 1, Offset: 1<<20 - 4*pageSize +
			1}},
		"an offset that wraps":    {{Page: 0, Pages: 4, Region: 1, Offset: 1<<63 - 1}},
		"more pages than a chunk": {{Page: 0, Pages: 8, Region: 1}},
		"from another page":       {{Page: 4, Pages: 4, Region: 1}},
		"a gap": {{Page: 0, Pages: 2, Region: 1},
			{Page: 4, Pages: 4, Region: 1}},
		"more than was asked for": {{Page: 0, Pages: 4, Region: 1},
			{Page: 4, Pages: 4, Region: 1}, {Page: 8, Pages: 4, Region: 1}},
		"one chunk twice": {{Page: 0, Pages: 4, Region: 1},
			{Page: 0, Pages: 4, Region: 1}},
		"a region that never came":  nil,
		"a region that is not told": nil,
	} {
		f := newFakeLender(t, dir)
		s := newSide(t, dir, "s", sideOptions{})
		c := f.welcome()
		f.send(c, &wire.RegionAdded{Region: 1, Kind: "memfd", SizeBytes: 1 << 20, PageSize: 4096},
			mem.FD())
		f.send(c, &wire.PeerSpace{Fingerprint: sp.Fingerprint[:], PageBytes: pageSize,
			PagesPerChunk: 4, DigestBytes: 32})
		p := wire.PeerPages{Seq: 1, Begin: true, End: true}
		for i := range 8 {
			p.Hints = append(p.Hints, packedKey(hintKey(&sp.Fingerprint, hashes[i*32:(i+1)*32]))...)
		}
		f.send(c, &p)
		s.learns(sp, hashes, 8)
		s.reads(f.gen, 1)
		answered := make(chan error, 1)
		go func() {
			b, err := c.Recv()
			var m wire.PeerLease
			if err == nil {
				err = m.Decode(b, &wire.DefaultLimits)
			}
			if err == nil {
				e := extents
				if e == nil {
					e = []wire.Extent{{Page: 0, Pages: 4, Region: 99}}
				}
				g := wire.PeerGrant{ID: m.ID, Load: 5, Pages: 8, Extents: e}
				err = c.Send(g.Append(nil))
			}
			answered <- err
		}()
		var loans []loan
		var pages int
		var err error
		if by == "asked" {
			var asked bool
			if loans, pages, asked = s.ask(run(sp, hashes)); !asked {
				t.Fatalf("%s: it is not asked", name)
			}
			err = wire.ErrMalformed // ask returns no error
		} else {
			loans, pages, err = s.borrow(sp, hashes)
		}
		check(t, <-answered)
		if pages != 0 || len(loans) != 0 {
			t.Errorf("%s: %d pages are borrowed", name, pages)
		}
		if extents != nil {
			if !errors.Is(err, wire.ErrMalformed) {
				t.Errorf("%s: %v", name, err)
			}
			ends(t, c)
		} else { // it is given back
			b, err := c.Recv()
			check(t, err)
			var m wire.PeerRelease
			if err := m.Decode(b, &wire.DefaultLimits); err != nil || m.Load != 5 ||
				len(m.Extents) != 1 || m.Bad {
				t.Errorf("%s: %+v, %v", name, m, err)
			}
		}
		s.close()
		_ = c.Close()
		f.l.Close()
	}
}

func TestWrongVersions(t *testing.T) {
	dir := peerDir(t)
	f := newFakeLender(t, dir)
	s := newSide(t, dir, "s", sideOptions{})
	c := f.accept()
	f.send(c, &wire.PeerWelcome{Version: wire.Version + 1, Generation: f.gen, MaxPages: 1})
	ends(t, c)
	eventually(t, "the status says why", func() bool {
		st := s.p.Status()
		return len(st.Unusable) == 1 && strings.Contains(st.Unusable[0].Why, "version")
	})

	d, err := ipc.OpenPeerDir(dir)
	check(t, err)
	defer d.Close()
	c, err = d.Dial(s.gen, patience)
	check(t, err)
	defer c.Close()
	check(t, c.Send((&wire.PeerHello{Version: wire.Version - 1, Generation: 5}).Append(nil)))
	b, err := c.Recv()
	check(t, err)
	var r wire.Refuse
	check(t, r.Decode(b, &wire.DefaultLimits))
	if r.Code != wire.RefuseVersion || r.Got != fmt.Sprint(wire.Version-1) {
		t.Errorf("%+v", r)
	}
	ends(t, c)

	// Another sidecar than the one that the socket is named after.
	g := newFakeLender(t, dir)
	c = g.accept()
	g.send(c, &wire.PeerWelcome{Generation: 1, MaxPages: 1})
	ends(t, c)
	eventually(t, "the status says why", func() bool { return len(s.p.Status().Unusable) == 2 })
	// One that refuses.
	h := newFakeLender(t, dir)
	c = h.accept()
	h.send(c, &wire.Refuse{Code: wire.RefuseBusy, Field: "peers", Want: "64", Message: "full"})
	ends(t, c)
	eventually(t, "the status says why", func() bool { return len(s.p.Status().Unusable) == 3 })
}

// client is a borrower that is no Peers.
type client struct {
	t    *testing.T
	dir  *ipc.PeerDir
	conn *ipc.Conn
	fds  []int
	seq  uint64
	held map[uint64]bool
	told bool // all that is held
	news int  // times that all was void
}

func dialClient(t *testing.T, s *side) *client {
	t.Helper()
	d, err := ipc.OpenPeerDir(s.dir)
	check(t, err)
	c, err := d.Dial(s.gen, patience)
	check(t, err)
	x := &client{t: t, dir: d, conn: c, held: map[uint64]bool{}}
	t.Cleanup(func() {
		c.Close()
		d.Close()
		for _, fd := range x.fds {
			unix.Close(fd)
		}
	})
	x.send(&wire.PeerHello{Generation: 5})
	b := x.recv()
	var w wire.PeerWelcome
	if err := w.Decode(b, &wire.DefaultLimits); err != nil || w.Generation != s.gen {
		t.Fatalf("%+v, %v", w, err)
	}
	return x
}

func (x *client) send(m wire.Message) { x.t.Helper(); check(x.t, x.conn.Send(m.Append(nil))) }

func (x *client) recv() []byte {
	x.t.Helper()
	check(x.t, x.conn.SetRecvDeadline(time.Now().Add(patience)))
	b, fds, err := x.conn.RecvFDs(x.fds)
	check(x.t, err)
	x.fds = fds
	return b
}

// next receives one message, applies it if it has pages, and returns it.
func (x *client) next() (wire.Type, []byte) {
	x.t.Helper()
	b := x.recv()
	typ, err := wire.Peek(b)
	check(x.t, err)
	if typ != wire.TypePeerPages {
		return typ, b
	}
	var m wire.PeerPages
	check(x.t, m.Decode(b, &wire.DefaultLimits))
	if x.seq++; m.Seq != x.seq {
		x.t.Fatalf("pages %d after %d", m.Seq, x.seq-1)
	}
	if m.Begin {
		clear(x.held)
		x.told = false
		x.news++
	}
	for i := range len(m.Hints) / 8 {
		if h := m.Hint(i); h&1 != 0 {
			x.held[h] = true
		} else {
			delete(x.held, h|1)
		}
	}
	x.told = x.told || m.End
	return typ, b
}

func (x *client) until(typ wire.Type) []byte {
	x.t.Helper()
	for {
		if t, b := x.next(); t == typ {
			return b
		}
	}
}

// A borrower that does not read is sent everything anew when it does, and nothing waits for it.
func TestBorrowerThatDoesNotRead(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, "a", sideOptions{regions: 4, bytes: 16 << 20})
	sp := space("m", 4)
	a.store(sp, prefix(stretch(1, 8)...))
	x := dialClient(t, a)
	for !x.told {
		x.next()
	}
	if len(x.held) != 8 || x.news != 1 {
		t.Fatalf("%d pages, told anew %d times", len(x.held), x.news)
	}
	b := newSide(t, dir, "b", sideOptions{})
	// More than the journal and the socket hold.
	held := map[uint64]bool{}
	var last []byte
	for i := range 3000 {
		last = prefix(append([]byte{byte(i), byte(i >> 8)}, stretch(2, 120)...)...)
		o := a.open(sp)
		res, _, err := a.e.PrepareStore(o, 0, nil, last, nil) // the bytes are not read
		check(t, err)
		check(t, a.e.CommitStore(o, res.Store, nil))
	}
	b.learns(sp, last, 122)
	walkEngine(a, func(k uint64) { held[k] = true })
	for !x.told || len(x.held) != len(held) || x.news == 1 {
		x.next()
	}
	for k := range held {
		if !x.held[k] {
			t.Fatal("a page that is held was not told of")
		}
	}
	if st := b.p.Status(); st.Malformed != 0 {
		t.Errorf("%+v", st)
	}
}

// walkEngine lists what an engine holds, by a feed of its own.
func walkEngine(s *side, each func(key uint64)) {
	s.t.Helper()
	f, err := s.e.Follow(0)
	check(s.t, err)
	defer f.Close()
	for {
		batch, _, err := f.Next(4096, nil, nil)
		check(s.t, err)
		for _, ev := range batch.Events {
			for d := ev.Hashes; len(d) > 0; d = d[32:] {
				each(hintKey(&ev.Space.Fingerprint, d[:32]))
			}
		}
		if !batch.More {
			return
		}
	}
}

// What a borrower sends that makes no sense ends its connection; what it had stays its own while it
// lives.
func TestBrokenBorrowers(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, "a", sideOptions{})
	a.store(theirSpace, theirPrefix)
	lease := func(x *client) wire.PeerGrant {
		t.Helper()
		for len(x.fds) == 0 || !x.told {
			x.next()
		}
		for {
			x.send(&wire.PeerLease{ID: 3, Fingerprint: theirSpace.Fingerprint[:],
				Hashes: theirPrefix})
			var g wire.PeerGrant
			check(t, g.Decode(x.until(wire.TypePeerGrant), &wire.DefaultLimits))
			if g.ID != 3 {
				t.Fatalf("%+v", g)
			}
			if g.Pages > 0 {
				return g
			}
		}
	}
	for name, do := range map[string]func(x *client, g wire.PeerGrant){
		"garbage": func(x *client, _ wire.PeerGrant) {
			check(t,
				x.conn.Send([]byte("garbage")))
		},
		"an answer": func(x *client, g wire.PeerGrant) { x.send(&g) },
		"a second hello": func(x *client,
			_ wire.PeerGrant) {
			x.send(&wire.PeerHello{Generation: 5})
		},
		"a loan of another": func(x *client,
			g wire.PeerGrant) {
			x.send(&wire.PeerRelease{Load: g.Load + 1<<32})
		},
		"an extent not there": func(x *client,
			g wire.PeerGrant) {
			x.send(&wire.PeerRelease{Load: g.Load, Extents: []uint32{0, 4}})
		},
		"a region that stays": func(x *client,
			_ wire.PeerGrant) {
			x.send(&wire.RegionUnmapped{Region: 0})
		},
		"a region never known": func(x *client,
			_ wire.PeerGrant) {
			x.send(&wire.RegionUnmapped{Region: 7})
		},
		"half a hash": func(x *client, _ wire.PeerGrant) {
			x.send(&wire.PeerLease{ID: 4, Fingerprint: theirSpace.Fingerprint[:],
				Hashes: theirPrefix[:33]})
		},
		"ends of fewer chunks": func(x *client, _ wire.PeerGrant) {
			x.send(&wire.PeerLease{ID: 4, Fingerprint: theirSpace.Fingerprint[:], Pages: 12,
				Hashes: theirPrefix[:2*32]})
		},
		"ends of more chunks": func(x *client, _ wire.PeerGrant) {
			x.send(&wire.PeerLease{ID: 4, Fingerprint: theirSpace.Fingerprint[:], Pages: 8,
				Hashes: theirPrefix[:3*32]})
		},
		"ends from within a chunk": func(x *client, _ wire.PeerGrant) {
			x.send(&wire.PeerLease{ID: 4, Fingerprint: theirSpace.Fingerprint[:], FirstPage: 1,
				Pages: 4, Hashes: theirPrefix[:32]})
		},
		"ends of all there is": func(x *client, _ wire.PeerGrant) {
			x.send(&wire.PeerLease{ID: 4, Fingerprint: theirSpace.Fingerprint[:], Pages: 1<<32 - 1,
				Hashes: theirPrefix[:32]})
		},
		"pages beyond all": func(x *client, _ wire.PeerGrant) {
			x.send(&wire.PeerLease{ID: 4, Fingerprint: theirSpace.Fingerprint[:],
				FirstPage: 1<<32 - 1e6, Hashes: theirPrefix})
		},
	} {
		x := dialClient(t, a)
		g := lease(x)
		if g.Pages != 16 || len(g.Extents) != 4 {
			t.Fatalf("%+v", g)
		}
		malformed := a.p.Status().Malformed
		do(x, g)
		ends(t, x.conn)
		eventually(t, name+" is counted", func() bool {
			return a.p.Status().Malformed == malformed+
				1
		})
		if st := a.e.Stats(); st.LeasedSlots != 4 {
			t.Errorf("%s: %d slots are leased to one that lives", name, st.LeasedSlots)
		}
	}
	// One that ends orderly.
	x := dialClient(t, a)
	g := lease(x)
	x.send(&wire.PeerRelease{Load: g.Load, Extents: []uint32{1, 3}})
	loans := a.e.Stats().OpenLoans
	x.send(&wire.PeerRelease{})
	eventually(t, "its loan has ended", func() bool { return a.e.Stats().OpenLoans == loans-1 })
	ends(t, x.conn)
	// And one that sends nothing at all.
	d, err := ipc.OpenPeerDir(dir)
	check(t, err)
	defer d.Close()
	c, err := d.Dial(a.gen, patience)
	check(t, err)
	defer c.Close()
	b := newSide(t, dir, "b", sideOptions{})
	check(t, b.verify(b.borrows(theirSpace, theirPrefix, 16)))
	a.close() // with all of these connected
}

// A borrower that asks and asks, and reads no answer, takes none of others' time or memory.
func TestFloodOfLeases(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, "a", sideOptions{})
	a.store(theirSpace, theirPrefix)
	x := dialClient(t, a)
	m := (&wire.PeerLease{ID: 3, Fingerprint: theirSpace.Fingerprint[:],
		Hashes: theirPrefix}).Append(nil)
	for full := 0; full < 20; {
		sent, err := x.conn.TrySend(m)
		check(t, err)
		if !sent {
			full++
			time.Sleep(time.Millisecond)
		}
	}
	b := newSide(t, dir, "b", sideOptions{})
	loans := b.borrows(theirSpace, theirPrefix, 16)
	check(t, b.verify(loans))
	b.giveBack(loans, false)
	if st := a.e.Stats(); st.OpenLoans > 4097 {
		t.Errorf("%+v", st)
	}
	check(t, x.conn.Close())
	start := time.Now()
	a.close()
	t.Logf("closed within %v", time.Since(start))
}
