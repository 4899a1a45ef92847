package connector_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

func TestRefusals(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.worker(workerHello("e"))
	for _, tc := range []struct {
		name            string
		hello           *wire.Hello
		edit            func(*wire.Hello)
		code, field     string
		wantVal, gotVal string
		messageHas      string
	}{
		{name: "version", hello: workerHello("v"),
			edit: func(h *wire.Hello) { h.Version = wire.Version + 1 },
			code: wire.RefuseVersion, field: "version", wantVal: fmt.Sprint(wire.Version),
			gotVal: fmt.Sprint(wire.Version + 1)},
		{name: "scheduler before its worker", hello: schedulerHello("nobody"),
			code: wire.RefuseNoWorker, messageHas: `"nobody"`},
		{name: "scheduler of another rank", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) { h.Rank = 1 },
			code: wire.RefuseNoWorker, messageHas: "rank 1"},
		{name: "scheduler with other page tokens", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) { h.PageTokens = 32 },
			code: wire.RefuseIncompatible, field: "page_tokens", wantVal: "16", gotVal: "32"},
		{name: "scheduler with other page bytes", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) { h.PageBytes = 512 },
			code: wire.RefuseIncompatible, field: "page_bytes", wantVal: "256", gotVal: "512"},
		{name: "scheduler with other chunks", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) { h.PagesPerChunk = 8 },
			code: wire.RefuseIncompatible, field: "pages_per_chunk", wantVal: "4", gotVal: "8"},
		{name: "scheduler with other digests", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) { h.DigestBytes = 16 },
			code: wire.RefuseIncompatible, field: "digest_bytes", wantVal: "32", gotVal: "16"},
		{name: "scheduler of another model", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) { h.Fields[0].Value = "large" },
			code: wire.RefuseIncompatible, field: "model", wantVal: "small", gotVal: "large"},
		{name: "scheduler with a field that its worker lacks", hello: schedulerHello("e"),
			edit: func(h *wire.Hello) {
				h.Fields = append(h.Fields, wire.Field{Key: "tp_size", Value: "2"})
			}, code: wire.RefuseIncompatible, field: "tp_size", wantVal: "(not given)",
			gotVal: "2"},
		{name: "second worker of the engine, other space", hello: workerHello("e"),
			edit: func(h *wire.Hello) { h.Fields[0].Value = "bfloat16" },
			code: wire.RefuseIncompatible, field: "dtype", wantVal: "float32", gotVal: "bfloat16"},
		{name: "page larger than the arena", hello: workerHello("big"),
			edit: func(h *wire.Hello) { h.PageBytes = 1 << 40 },
			code: wire.RefuseLimit, field: "page_bytes", gotVal: fmt.Sprint(1 << 40),
			messageHas: "geometry"},
		{name: "chunk whose bytes would wrap", hello: workerHello("wrap"),
			edit: func(h *wire.Hello) { h.PageBytes, h.PagesPerChunk = 1<<62, 4096 },
			code: wire.RefuseLimit, field: "page_bytes", gotVal: fmt.Sprint(1 << 62)},
		{name: "tiny page", hello: workerHello("tiny"),
			edit: func(h *wire.Hello) { h.PageBytes = 8 },
			code: wire.RefuseLimit, field: "page_bytes", gotVal: "8"},
		{name: "digest of an odd length", hello: workerHello("odd"),
			edit: func(h *wire.Hello) { h.DigestBytes = 20 },
			code: wire.RefuseLimit, field: "digest_bytes", wantVal: "8, 16 or 32", gotVal: "20"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.edit != nil {
				tc.edit(tc.hello)
			}
			s, err := client.Dial(r.dir, tc.hello, patience)
			if err == nil {
				s.Close()
				t.Fatal("welcomed")
			}
			var no *client.Refused
			if !errors.As(err, &no) {
				t.Fatalf("got %v", err)
			}
			if no.Code != tc.code || no.Field != tc.field ||
				tc.wantVal != "" && no.Want != tc.wantVal || no.Got != tc.gotVal ||
				!strings.Contains(no.Message, tc.messageHas) {
				t.Errorf("got %+v", no.Refuse)
			}
		})
	}
	// After all of that the first worker still is the only one.
	r.eventually("the refused are gone", func() bool { return r.listener.Stats().Sessions == 1 })
	if n := r.server.Sessions(); n != 1 {
		t.Errorf("%d sessions", n)
	}
}

func TestMalformedHello(t *testing.T) {
	r := newRig(t, rigOptions{})
	for _, b := range [][]byte{{0xc0}, {0x9a, 0x01, 0x01}, {0xdd, 0xff, 0xff, 0xff, 0xff, 1},
		[]byte("GET / HTTP/1.1\r\n\r\n"), (&wire.Ping{ID: 1}).Append(nil)} {
		s, err := client.Connect(r.dir)
		check(t, err)
		check(t, s.SendRaw(b))
		p, _, err := s.Recv(patience)
		check(t, err)
		var m wire.Refuse
		check(t, m.Decode(p, &wire.DefaultLimits))
		if m.Code != wire.RefuseMalformed {
			t.Errorf("%x: %+v", b, m)
		}
		if _, _, err := s.Recv(patience); !errors.Is(err, io.EOF) {
			t.Errorf("%x: the connection is still open: %v", b, err)
		}
		s.Close()
	}
}

func TestSpacesLimitNamesTheClosestSpace(t *testing.T) {
	r := newRig(t, rigOptions{spaces: 2})
	far := workerHello("far")
	far.PageBytes, far.PageTokens, far.Fields[0].Value = 512, 32, "int8"
	fw := r.worker(far)
	near := r.worker(workerHello("near"))
	h := workerHello("third")
	h.Fields[1].Value = "other"
	_, err := client.Dial(r.dir, h, patience)
	var no *client.Refused
	if !errors.As(err, &no) || no.Code != wire.RefuseIncompatible || no.Field != "model" ||
		no.Want != "small" || no.Got != "other" ||
		!strings.Contains(no.Message, "spaces.limit") {
		t.Fatalf("got %v", err)
	}
	fw.close()
	near.close()
}

// TestIdleSpaceMakesRoom: of the spaces that nobody uses the one used longest ago goes for a new
// one. What is in use or pinned stays, and what went is found again in the tier below.
func TestIdleSpaceMakesRoom(t *testing.T) {
	r := newRig(t, rigOptions{spaces: 3, tiers: []tiertest.MemoryOptions{{}}})
	hello := func(model string) *wire.Hello {
		h := workerHello(model)
		h.Fields[1].Value = model
		return h
	}
	p := onePrefix(1)
	leave := func(w *worker) {
		t.Helper()
		sessions := r.server.Sessions()
		w.close()
		r.eventually("the worker is gone", func() bool { return r.server.Sessions() == sessions-1 })
	}
	bring := func(model string) *worker {
		t.Helper()
		w := r.worker(hello(model))
		w.store(p, 0, 2*perChunk)
		return w
	}
	held := func(models ...string) {
		t.Helper()
		var got []string
		for _, sp := range r.server.Status().Spaces {
			got = append(got, sp.Fields["model"])
		}
		if slices.Sort(got); !slices.Equal(got, models) {
			t.Fatalf("the spaces held are of %v, want %v", got, models)
		}
	}

	first, second := bring("a"), bring("b")
	third := bring("c")
	leave(second)
	leave(first)
	leave(third)
	check(t, r.stack.Flush(t.Context()))
	fourth := bring("d") // b was used longest ago
	held("a", "c", "d")
	again := r.worker(hello("a")) // is in use
	var c engine.SpaceStats
	for _, sp := range r.engine.Spaces() {
		if sp.Owners == 0 {
			c = sp
		}
	}
	pin, pages, err := r.engine.Pin(c.ID, p.hashes(0, 2*perChunk))
	if err != nil || pages != 2*perChunk {
		t.Fatalf("%d pages pinned: %v", pages, err)
	}
	var no *client.Refused
	if _, err := client.Dial(r.dir, hello("b"), patience); !errors.As(err, &no) ||
		no.Code != wire.RefuseIncompatible || !strings.Contains(no.Message, "pins") {
		t.Fatalf("got %v, want a refusal: two spaces are in use, and one is pinned", err)
	}
	held("a", "c", "d")
	check(t, r.engine.Unpin(pin))
	back := r.worker(hello("b"))
	held("a", "b", "d")
	if st, _ := r.engine.Space(c.ID); st.Fingerprint == c.Fingerprint {
		t.Fatalf("%+v is still open", st)
	}
	sh := schedulerHello("b")
	sh.Fields[0].Value = "b"
	s := r.scheduler(sh)
	if _, hit := s.lookup(p, 0, 2*perChunk); hit != 2*perChunk {
		t.Fatalf("%d pages of the space that is back hit, of %d that the tier below has", hit,
			2*perChunk)
	}
	s.close()
	for _, w := range []*worker{fourth, again, back} {
		w.close()
	}
}

func TestWelcome(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	a, b := w.ses.Welcome, s.ses.Welcome
	if hexOf(a.Fingerprint) != hexOf(b.Fingerprint) {
		t.Errorf("worker and scheduler are in different spaces")
	}
	if a.Session == b.Session || a.Session == 0 || a.Generation != 77 || a.LeaseMs != 3600000 ||
		a.MaxPages != 4096 || a.ReplyEndpoint != "" || a.Regions != 1 ||
		b.Regions != 0 || b.ReplyEndpoint == "" {
		t.Errorf("worker %+v\nscheduler %+v", a, b)
	}
	// The control region may be read, and nothing else.
	fd := int(s.ses.Control.Fd())
	mem, err := unix.Mmap(fd, 0, dax.ControlSize, unix.PROT_READ, unix.MAP_SHARED)
	check(t, err)
	defer unix.Munmap(mem)
	if string(mem[:8]) != dax.ControlMagic || mem[16] != 77 {
		t.Errorf("control region %x", mem[:32])
	}
	if m, err := unix.Mmap(fd, 0, dax.ControlSize, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED); err == nil {
		unix.Munmap(m)
		t.Error("a client may map the control region for writing")
	}
	// Another engine of the same declaration shares the space; one that differs in a field does
	// not.
	same := r.worker(workerHello("other"))
	h := workerHello("third")
	h.Fields[1].Value = "x"
	other := r.worker(h)
	if hexOf(same.ses.Welcome.Fingerprint) != hexOf(a.Fingerprint) ||
		hexOf(other.ses.Welcome.Fingerprint) == hexOf(a.Fingerprint) {
		t.Error("spaces do not follow their declarations")
	}
}

func TestStoreLookupLoad(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	if _, hit := s.lookup(p, 0, 10); hit != 0 {
		t.Fatalf("%d pages hit in an empty arena", hit)
	}
	g, err := w.prepare(p, 0, 10)
	check(t, err)
	if g.Held != 0 || g.Shed != 0 || g.Store == 0 || len(g.Grants) != 3 {
		t.Fatalf("grant %+v", g)
	}
	check(t, w.fill(p, g.Grants))
	if _, hit := s.lookup(p, 0, 10); hit != 0 {
		t.Errorf("%d pages hit before the commit", hit)
	}
	check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
	w.sync()
	id, hit := s.lookup(p, 0, 12)
	if hit != 10 {
		t.Fatalf("%d pages hit of 10", hit)
	}
	lg, err := w.load(s, id, p, 3, 6)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
	w.sync()
	// Another instance of the same model has it, too.
	w2 := r.worker(workerHello("e2"))
	s2 := r.scheduler(schedulerHello("e2"))
	id, hit = s2.lookup(p, 0, 10)
	if hit != 10 {
		t.Fatalf("%d pages hit in the other instance", hit)
	}
	lg, err = w2.load(s2, id, p, 0, 10)
	check(t, err)
	check(t, w2.ses.Send(&wire.Release{Load: lg.Load}))
	w2.sync()

	n := r.server.Counters()
	if n.StoredPages != 10 || n.StoredBytes != 10*pageBytes || n.LoadedPages != 16 ||
		n.LoadedBytes != 16*pageBytes || n.HitPages != 20 ||
		n.HitTokens != 20*pageTokens || n.Lookups != 4 || n.Stores != 1 || n.Loads != 2 {
		t.Errorf("counters %+v", n)
	}
	for kind, v := range n.Errors {
		if v != 0 {
			t.Errorf("%d errors of kind %s", v, kind)
		}
	}
}

// TestLongLookups asks for more pages than lookup.max_pages, which are answered for as many:
// silence would be a miss.
func TestLongLookups(t *testing.T) {
	const most = 8
	r := newRig(t, rigOptions{maxPages: most})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	if n := s.ses.Welcome.MaxPages; n != most {
		t.Fatalf("%d pages at most, says the handshake", n)
	}
	p := onePrefix(1)
	w.store(p, 0, most)
	w.store(p, most, most)
	for _, pages := range []int{most, most + 1, 2 * most, 4096} {
		id, hit := s.lookup(p, 0, pages)
		if hit != most {
			t.Errorf("%d of %d pages hit, of a lookup that is answered for %d", hit, pages, most)
		}
		lg, err := w.load(s, id, p, 0, most)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
		w.sync()
	}
	if _, hit := s.lookup(p, most, 2*most); hit != most {
		t.Errorf("%d pages hit from page %d on", hit, most)
	}
	if n := r.server.Counters(); n.LookupPages != 5*most || r.errorCount("malformed") != 0 {
		t.Errorf("counters %+v", n)
	}
}

func TestWrongRequests(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	other := r.worker(workerHello("other"))
	p := onePrefix(1)
	w.store(p, 0, 8)
	id, hit := s.lookup(p, 0, 8)
	if hit != 8 {
		t.Fatal("no hit")
	}
	_, err := other.load(s, id, p, 0, 8)
	wantCode(t, err, wire.CodeIncompatible) // the lookup of another engine
	_, err = w.load(s, id+1, p, 0, 8)
	wantCode(t, err, wire.CodeNotFound)
	_, err = w.load(s, id, p, 0, 9)
	wantCode(t, err, wire.CodeStale) // more than is leased
	var lg wire.LoadGrant
	err = w.call(&wire.PrepareLoad{ID: 5, Session: w.ses.Welcome.Session, Lookup: id,
		Ticket: w.ses.Ticket(id), Pages: 1, Names: make([]byte, 32)}, &lg)
	wantCode(t, err, wire.CodeNotFound) // a worker's session is no scheduler's
	err = w.call(&wire.PrepareLoad{ID: 5, Session: 12345, Lookup: id, Ticket: s.ses.Ticket(id),
		Pages: 1, Names: make([]byte, 32)}, &lg)
	wantCode(t, err, wire.CodeNotFound)
	_, err = w.prepare(p, 2, 4)
	wantCode(t, err, wire.CodeMalformed) // not the first page of a chunk
	var sg wire.StoreGrant
	err = w.call(&wire.PrepareStore{ID: 6, Hashes: make([]byte, 33)}, &sg)
	wantCode(t, err, wire.CodeMalformed)

	lg, err = w.load(s, id, p, 0, 8)
	check(t, err)
	before := r.errorCount("stale") + r.errorCount("not_found") + r.errorCount("malformed")
	check(t, other.ses.Send(&wire.Release{Load: lg.Load})) // somebody else's
	check(t, w.ses.Send(&wire.Release{Load: lg.Load, Bad: []uint32{99}}))
	check(t, w.ses.Send(&wire.CommitStore{Store: 42}))
	check(t, w.ses.Send(&wire.AbortStore{Store: 42}))
	other.sync()
	w.sync()
	if n := r.errorCount("stale") + r.errorCount("not_found") +
		r.errorCount("malformed"); n != before+4 {
		t.Errorf("%d errors counted, want 4", n-before)
	}
	if st := r.engine.Stats(); st.OpenLoads != 1 {
		t.Errorf("%d loads", st.OpenLoads)
	}
	check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
	check(t, w.ses.Send(&wire.Release{Load: lg.Load})) // twice
	w.sync()
	if st := r.engine.Stats(); st.Leases != 0 {
		t.Errorf("%d leases", st.Leases)
	}
}

// What a role may not say, and what is no message, ends the session.
func TestBrokenProtocolEndsTheSession(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 4)
	ends := func(name string, s *client.Session, b []byte) {
		t.Helper()
		n := r.server.Sessions()
		check(t, s.SendRaw(b))
		if _, _, err := s.Recv(patience); !errors.Is(err, io.EOF) {
			t.Errorf("%s: got %v, want the end", name, err)
		}
		r.eventually("session ended", func() bool { return r.server.Sessions() == n-1 })
	}
	ends("a scheduler stores", r.scheduler(schedulerHello("e")).ses,
		(&wire.PrepareStore{ID: 1, Hashes: p.hashes(0, 4)}).Append(nil))
	ends("a lookup on the session socket", r.scheduler(schedulerHello("e")).ses,
		(&wire.Lookup{Session: 1, Secret: make([]byte, 16), Lookup: 1,
			Hashes: p.hashes(0, 4)}).Append(nil))
	ends("a second hello", r.scheduler(schedulerHello("e")).ses, schedulerHello("e").Append(nil))
	ends("an array bomb", r.worker(workerHello("f")).ses, []byte{0xdd, 0xff, 0xff, 0xff, 0xff, 10})
	ends("more pages than max_pages", r.worker(workerHello("f")).ses,
		(&wire.PrepareStore{ID: 6, Hashes: make([]byte, 32*4097)}).Append(nil))
	ends("trailing bytes", r.worker(workerHello("f")).ses, append((&wire.Ping{ID: 1}).Append(nil),
		0))
	ends("a region that stays is unmapped", r.worker(workerHello("f")).ses,
		(&wire.RegionUnmapped{Region: 0}).Append(nil))
	ends("a region that never was is unmapped", r.worker(workerHello("f")).ses,
		(&wire.RegionUnmapped{Region: 9}).Append(nil))
	ends("a scheduler unmaps a region", r.scheduler(schedulerHello("e")).ses,
		(&wire.RegionUnmapped{Region: 0}).Append(nil))
	ends("an answer as a request", r.worker(workerHello("f")).ses, (&wire.Pong{ID: 1}).Append(nil))
	w.sync() // others do not notice
}

func TestTrimCancelAndExpiry(t *testing.T) {
	var now atomic.Int64
	const lease = 500 * time.Millisecond
	r := newRig(t, rigOptions{lease: lease, now: now.Load})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 16)
	id, _ := s.lookup(p, 0, 16)
	if st := r.engine.Stats(); st.Leases != 4 {
		t.Fatalf("%d leases of 4 chunks", st.Leases)
	}
	s.trim(id, 9)
	r.eventually("trim", func() bool { return r.engine.Stats().Leases == 2 })
	s.cancel(id)
	r.eventually("cancel", func() bool { return r.engine.Stats().Leases == 0 })
	s.cancel(id) // again: that is no error
	id, hit := s.lookup(p, 0, 16)
	if hit != 16 {
		t.Fatalf("%d hits", hit)
	}
	now.Add(int64(lease) - 1)
	r.engine.Expire()
	if st := r.engine.Stats(); st.Leases != 4 {
		t.Errorf("%d leases of 4 chunks before their deadline", st.Leases)
	}
	now.Add(2)
	r.eventually("the lease's deadline", func() bool { return r.engine.Stats().Leases == 0 })
	_, err := w.load(s, id, p, 0, 16)
	wantCode(t, err, wire.CodeNotFound)
	// A lookup that a worker took over has no deadline.
	id, _ = s.lookup(p, 0, 16)
	lg, err := w.load(s, id, p, 0, 16)
	check(t, err)
	now.Add(int64(2 * lease))
	r.engine.Expire()
	check(t, w.verify(p, lg.Extents, 0, 16))
	if st := r.engine.Stats(); st.Leases != 4 || st.OpenLoads != 1 {
		t.Errorf("%d leases, %d loads", st.Leases, st.OpenLoads)
	}
	check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
	w.sync()
	for kind, n := range r.server.Counters().Errors {
		if n != 0 && kind != "not_found" {
			t.Errorf("%d errors of kind %s", n, kind)
		}
	}
}

// Lookups that no session of a scheduler asks for are dropped, and do not disturb others.
func TestStrangeLookups(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 4)
	send := func(b []byte) { check(t, s.lookups.Send(b)) }
	send((&wire.Lookup{Session: 4711, Secret: s.ses.Welcome.Secret, Lookup: 1,
		Hashes: p.hashes(0, 4)}).Append(nil))
	send((&wire.Lookup{Session: w.ses.Welcome.Session, Secret: w.ses.Welcome.Secret, Lookup: 1,
		Hashes: p.hashes(0, 4)}).Append(nil))
	send((&wire.Cancel{Session: 4711, Secret: s.ses.Welcome.Secret, Lookup: 1}).Append(nil))
	send([]byte{0xdd, 0xff, 0xff, 0xff, 0xff})
	send([]byte("\x80\x04]\x94.")) // a pickle
	send((&wire.Ping{ID: 1}).Append(nil))
	check(t, s.lookups.Send([]byte{1}, []byte{2})) // of two frames
	if _, hit := s.lookup(p, 0, 4); hit != 4 {
		t.Errorf("%d hits", hit)
	}
	if n := r.errorCount("unknown_session"); n != 3 {
		t.Errorf("%d messages of unknown sessions, want 3", n)
	}
	if n := r.errorCount("malformed"); n != 3 {
		t.Errorf("%d malformed messages, want 3", n)
	}
	// Hashes of another length are a miss.
	res, err := s.lookups.Lookup(&wire.Lookup{Session: s.ses.Welcome.Session,
		Secret: s.ses.Welcome.Secret, Lookup: 999, Hashes: make([]byte, 40)}, patience)
	check(t, err)
	if res.HitPages != 0 {
		t.Error("a hit")
	}
}

func TestBadExtentsAreDropped(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 12)
	id, _ := s.lookup(p, 0, 12)
	lg, err := w.load(s, id, p, 0, 12)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: lg.Load, Bad: []uint32{1}}))
	w.sync()
	if _, hit := s.lookup(p, 0, 12); hit != 4 {
		t.Errorf("%d pages hit, want the 4 before the bad chunk", hit)
	}
	if n := r.server.Counters(); n.BadExtents != 1 || n.LoadedPages != 8 {
		t.Errorf("counters %+v", n)
	}
}

func TestClearSpace(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	h := workerHello("f")
	h.Fields[1].Value = "other"
	w2 := r.worker(h)
	s := r.scheduler(schedulerHello("e"))
	sh := schedulerHello("f")
	sh.Fields[0].Value = "other"
	s2 := r.scheduler(sh)
	p := onePrefix(1)
	w.store(p, 0, 12)
	w2.store(p, 0, 12)
	id, _ := s.lookup(p, 0, 12)
	lg, err := w.load(s, id, p, 0, 12)
	check(t, err)
	var c wire.Cleared
	check(t, s.ses.Call(&wire.ClearSpace{ID: 7}, &c, patience))
	if c.ID != 7 || c.Chunks != 3 {
		t.Errorf("cleared %+v", c)
	}
	if _, hit := s.lookup(p, 0, 12); hit != 0 {
		t.Errorf("%d pages hit after clearing", hit)
	}
	if _, hit := s2.lookup(p, 0, 12); hit != 12 {
		t.Errorf("%d pages hit in the space that was not cleared", hit)
	}
	check(t, w.verify(p, lg.Extents, 0, 12)) // the loader's bytes stay until it is done
	check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
	w.store(p, 0, 12)
	if _, hit := s.lookup(p, 0, 12); hit != 12 {
		t.Errorf("%d pages hit after storing again", hit)
	}
}

func TestGrowthIsPushedBeforeItIsGranted(t *testing.T) {
	r := newRig(t, rigOptions{regionBytes: 16 * perChunk * pageBytes})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p, q := onePrefix(1), onePrefix(2)
	w.store(p, 0, 16*perChunk)
	r.grow(64 * perChunk * pageBytes)
	w.store(q, 0, 32*perChunk) // fill checks that each extent is in a region that has been mapped
	if len(w.regions) != 2 {
		t.Fatalf("%d regions mapped", len(w.regions))
	}
	for _, x := range []struct {
		p prefix
		n int
	}{{p, 16 * perChunk}, {q, 32 * perChunk}} {
		id, hit := s.lookup(x.p, 0, x.n)
		if hit != x.n {
			t.Errorf("%d pages hit of %d: growing must evict nothing", hit, x.n)
		}
		lg, err := w.load(s, id, x.p, 0, hit)
		check(t, err)
		check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
		w.sync()
	}
	late := r.worker(workerHello("late"))
	if len(late.regions) != 2 {
		t.Errorf("a worker that came late has %d regions", len(late.regions))
	}
}

func TestDraining(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 8)
	g, err := w.prepare(onePrefix(2), 0, 4)
	check(t, err)
	id, _ := s.lookup(p, 0, 8)
	lg, err := w.load(s, id, p, 0, 8)
	check(t, err)
	drained := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		drained <- r.server.Drain(ctx)
	}()
	r.eventually("draining", r.server.Draining)
	var no *client.Refused
	if _, err := client.Dial(r.dir, workerHello("new"), patience); !errors.As(err, &no) ||
		no.Code != wire.RefuseDraining {
		t.Errorf("got %v", err)
	}
	_, err = w.prepare(onePrefix(3), 0, 4)
	wantCode(t, err, wire.CodeClosed)
	if _, hit := s.lookup(p, 0, 8); hit != 0 {
		t.Errorf("a lookup hit %d pages while draining", hit)
	}
	check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
	w.sync()
	select {
	case err := <-drained:
		t.Fatalf("drained with a load under way: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
	check(t, <-drained)
}

func TestDrainGivesUp(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	_, err := w.prepare(onePrefix(2), 0, 4)
	check(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := r.server.Drain(ctx); err == nil || !strings.Contains(err.Error(), "1 stores") {
		t.Errorf("got %v", err)
	}
}

// A lookup in steady state allocates nothing here: what it costs would otherwise come back as
// collections, in the tail.
func TestLookupAllocatesNothing(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	p := onePrefix(1)
	w.store(p, 0, 64)
	session := s.ses.Welcome.Session
	ask := (&wire.Lookup{Session: session, Secret: s.ses.Welcome.Secret, Lookup: 7,
		Hashes: p.hashes(0, 64), DeadlineMs: 1000}).Append(nil)
	cancel := (&wire.Cancel{Session: session, Secret: s.ses.Welcome.Secret, Lookup: 7}).Append(nil)
	reply := make([]byte, 0, 64)
	// Nobody else asks, so this goroutine stands in for that of the sockets.
	allocs := testing.AllocsPerRun(200, func() {
		if to, b := r.server.HandleLookup(ask, reply); to != session || len(b) == 0 {
			t.Fatal("no answer")
		}
		r.server.HandleLookup(cancel, reply)
	})
	if allocs != 0 {
		t.Errorf("%v allocations a lookup", allocs)
	}
	if n := r.server.Counters(); n.HitPages != 64*n.Lookups {
		t.Errorf("%d pages hit in %d lookups of 64", n.HitPages, n.Lookups)
	}
}
