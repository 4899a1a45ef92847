package engine

import (
	"errors"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/tiers"
)

// The part of the random histories that is about followers: what they were sent must add up to what
// can be found.

// follower applies what a feed tells to sets of digests by space.
type follower struct {
	f    *Feed
	only SpaceID // 0: all
	held map[uint32]map[string]bool
	buf  []byte
	told uint64
}

// apply applies what comes next, and reports whether the follower is up to date.
func (x *follower) apply(maxPages int, check func(ev *Event)) (bool, error) {
	b, buf, err := x.f.Next(maxPages, x.buf, nil)
	x.buf = buf
	if err != nil {
		return false, err
	}
	if b.Reset {
		x.held = map[uint32]map[string]bool{}
	}
	for i := range b.Events {
		ev := &b.Events[i]
		check(ev)
		set := x.held[ev.Space.serial]
		if set == nil {
			set = map[string]bool{}
			x.held[ev.Space.serial] = set
		}
		d := ev.Space.Geometry.DigestBytes
		for at := 0; at < len(ev.Hashes); at += d {
			if ev.Kind == PagesStored {
				set[string(ev.Hashes[at:at+d])] = true
			} else {
				delete(set, string(ev.Hashes[at:at+d]))
			}
			x.told++
		}
	}
	return !b.More, nil
}

// followers of a history. They have randomness of their own, so that the histories do not depend on
// them.
type followers struct {
	rng    *rand.Rand
	all    []*follower
	synced int
	gaps   uint64
}

// follow lets followers come, go, and take in some of what happened.
func (w *world) follow() {
	fs := &w.followers
	if fs.rng == nil {
		fs.rng = rand.New(rand.NewPCG(w.seed, 2))
		// more than a record of 16 pages; the smallest are overrun often
		w.e.journal.words = 1 << (7 + fs.rng.IntN(7))
	}
	if len(fs.all) < 3 && fs.rng.IntN(8) == 0 {
		x := &follower{}
		if fs.rng.IntN(3) == 0 {
			x.only = w.spaces[fs.rng.IntN(len(w.spaces))].id
		}
		var err error
		x.f, err = w.e.Follow(x.only)
		w.check(err)
		fs.all = append(fs.all, x)
	}
	for i := 0; i < len(fs.all); i++ {
		x := fs.all[i]
		switch fs.rng.IntN(40) {
		case 0:
			fs.gaps += x.f.Gaps()
			x.f.Close()
			fs.all = append(fs.all[:i], fs.all[i+1:]...)
			i--
		case 1:
			w.catchUp(x)
		case 2:
			x.f.Restart()
		case 3, 4, 5, 6, 7, 8, 9, 10, 11, 12:
			w.apply(x, 1+fs.rng.IntN(10))
		}
	}
}

func (w *world) apply(x *follower, pages int) bool {
	done, err := x.apply(pages, func(ev *Event) { w.checkEvent(x, ev) })
	w.check(err)
	return done
}

func (w *world) checkEvent(x *follower, ev *Event) {
	g := ev.Space.Geometry
	n := len(ev.Hashes) / g.DigestBytes
	if n < 1 || n*g.DigestBytes != len(ev.Hashes) || ev.First%g.PagesPerChunk+n > g.PagesPerChunk ||
		x.only != 0 && ev.Space.ID != x.only ||
		len(ev.Prev) != 0 && (len(ev.Prev) != g.DigestBytes || ev.First == 0 ||
			ev.Kind != PagesStored) {
		w.fatal("%+v of %+v", ev, ev.Space)
	}
	prev := string(ev.Prev)
	for i := range n {
		d := string(ev.Hashes[i*g.DigestBytes : (i+1)*g.DigestBytes])
		if place, known := w.place[d]; !known || place != ev.First+i ||
			prev != "" && w.chain[d] != prev {
			w.fatal("page %d of %+v has digest %x after %x, which is that of page %d after %x", i,
				ev, d, prev, place, w.chain[d])
		}
		prev = d
	}
}

// catchUp reads to the end, and compares what was sent with what is held.
func (w *world) catchUp(x *follower) {
	for !w.apply(x, 64) {
	}
	w.followers.synced++
	for _, s := range w.spaces {
		if x.only != 0 && x.only != s.id {
			continue
		}
		sp := w.e.spaces[s.id]
		set := x.held[sp.serial]
		if len(set) != sp.pages {
			w.fatal("a follower knows %d pages of space %d, which has %d", len(set), s.id, sp.pages)
		}
		for d := range set {
			if w.e.find(sp, []byte(d)) == 0 {
				w.fatal("a follower knows page %x of space %d, which is not held", d, s.id)
			}
		}
		if w.e.Unverified() > 0 { // Contains does not count these
			continue
		}
		p := w.prefix2()
		h := p.digests(0, len(p), s.g.DigestBytes)
		held := make([]uint16, len(p)/s.g.PagesPerChunk+1)
		w.check(w.e.Contains(s.id, 0, h, held))
		for i := range p {
			if has := int(held[i/s.g.PagesPerChunk]) > i%s.g.PagesPerChunk; has != set[string(
				p.digests(i, i+1, s.g.DigestBytes))] {
				w.fatal("a follower knows page %d of %v: %v; it is held: %v", i, p, !has, has)
			}
		}
	}
}

// prefix2 is prefix with the followers' randomness.
func (w *world) prefix2() prefix {
	p := make(prefix, 1+w.followers.rng.IntN(w.depth))
	same := w.followers.rng.IntN(len(p) + 1)
	for i := same; i < len(p); i++ {
		p[i] = byte(w.followers.rng.IntN(w.alphabet))
	}
	return p
}

// endFollow compares what all followers know at the end, and ends them.
func (w *world) endFollow() {
	for _, x := range w.followers.all {
		w.catchUp(x)
		w.followers.gaps += x.f.Gaps()
		x.f.Close()
		x.f.Close()
		if _, _, err := x.f.Next(1, nil, nil); !errors.Is(err, tiers.ErrClosed) {
			w.fatal("a closed feed answers %v", err)
		}
	}
	if j := &w.e.journal; j.on || j.walks != 0 || len(j.feeds) != 0 || j.start != j.end {
		w.fatal("without followers the journal is %+v", w.e.Journal())
	}
}

// held is what a follower comes to know by the end of its feed.
func (b *bench) followed(x *follower) map[string]bool {
	b.t.Helper()
	for {
		done, err := x.apply(1<<20, func(*Event) {})
		b.ok(err)
		if done {
			return x.held[b.e.spaces[b.sp].serial]
		}
	}
}

func TestFollow(t *testing.T) {
	b := newBench(t, 8, 4, Config{JournalBytes: minJournalBytes})
	p := numbered(1, 10)
	b.store(p[:6*32])
	f, err := b.e.Follow(b.sp)
	b.ok(err)
	x := &follower{f: f}
	if n := len(b.followed(x)); n != 6 {
		t.Fatalf("%d pages", n)
	}
	select {
	case <-f.Ready():
		t.Fatal("rung for nothing")
	default:
	}
	b.store(p) // extends the second chunk, and adds one
	<-f.Ready()
	batch, _, err := f.Next(100, nil, nil)
	b.ok(err)
	if len(batch.Events) != 2 || batch.Reset || batch.More {
		t.Fatalf("%+v", batch)
	}
	for i, want := range []struct{ first, pages int }{{6, 2}, {8, 2}} {
		ev := batch.Events[i]
		if ev.Kind != PagesStored || ev.First != want.first ||
			string(ev.Hashes) != string(p[32*want.first:32*(want.first+want.pages)]) ||
			string(ev.Prev) != string(p[32*(want.first-1):32*want.first]) {
			t.Errorf("%+v", ev)
		}
	}
	if n := b.e.ClearSpace(b.sp); n != 3 {
		t.Fatal(n)
	}
	<-f.Ready()
	batch, _, err = f.Next(100, nil, nil)
	b.ok(err)
	if len(batch.Events) != 3 || batch.Events[0].Kind != PagesRemoved ||
		len(batch.Events[0].Prev) != 0 {
		t.Fatalf("%+v", batch)
	}
	f.Close()
	_, err = newBench(t, 2, 1, Config{}).e.Follow(0)
	b.is(err, tiers.ErrInvalid)
	_, err = New(Config{JournalBytes: 1})
	b.is(err, tiers.ErrInvalid)
	_, err = b.e.Follow(77)
	b.is(err, tiers.ErrNotFound)
}

// TestFollowRestored follows what is restored while the engine is in use: few chunks by themselves,
// many by beginning anew.
func TestFollowRestored(t *testing.T) {
	for _, words := range []int{1 << 8, 1 << 14} {
		b := newBench(t, 4, 2, Config{JournalBytes: minJournalBytes, FixedRegions: true})
		b.e.journal.words = words
		g := tiers.Geometry{PageBytes: 64, PagesPerChunk: 2, PageTokens: 16, DigestBytes: 32}
		b.ok(b.e.AddCarvedRegion(8, g, 50, Placement{Stride: 128}))
		f, err := b.e.Follow(0)
		b.ok(err)
		defer f.Close()
		x := &follower{f: f}
		if n := len(b.followed(x)); n != 0 {
			t.Fatal(n)
		}
		p := numbered(1, 100)
		var entries []Restored
		for i := range 50 {
			r := Restored{Slot: uint32(i), Space: b.sp, First: 2 * i, Pages: 2,
				Hashes: p[64*i : 64*i+64], Order: uint64(i)}
			if i > 0 {
				r.Prev = p[64*i-32 : 64*i]
			}
			entries = append(entries, r)
		}
		b.ok(b.e.Restore(8, entries))
		if n := b.e.EndRestore(); n != 50 {
			t.Fatal(n)
		}
		<-f.Ready()
		if n := len(b.followed(x)); n != 100 {
			t.Fatalf("%d pages", n)
		}
		if gaps := f.Gaps(); gaps != 0 && words > 1<<8 || gaps != 1 && words == 1<<8 {
			t.Fatalf("%d gaps with %d words", gaps, words)
		}
	}
}

// TestFollowClosedSpaces: what is sent of a space that has been closed since names it, however many
// come and go.
func TestFollowClosedSpaces(t *testing.T) {
	b := newBench(t, 8, 1, Config{JournalBytes: minJournalBytes})
	f, err := b.e.Follow(0)
	b.ok(err)
	x := &follower{f: f}
	b.followed(x)
	for i := range 3 * maxClosedSpaces {
		g := tiers.Geometry{PageBytes: 64, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 32}
		fp := tiers.Fingerprint{2, byte(i)}
		id, err := b.e.OpenSpace(fp, g)
		b.ok(err)
		b.ok(b.e.AddOwner(2, id))
		res, _, err := b.e.PrepareStore(2, 0, nil, numbered(uint64(i), 1), nil)
		b.ok(err)
		b.ok(b.e.CommitStore(2, res.Store, nil))
		b.e.RemoveOwner(2)
		b.e.ClearSpace(id)
		b.ok(b.e.CloseSpace(id))
		if i%2 == 0 && i < maxClosedSpaces {
			batch, _, err := f.Next(100, nil, nil)
			b.ok(err)
			if last := batch.Events[len(batch.Events)-1]; last.Space.Fingerprint != fp ||
				last.Kind != PagesRemoved {
				t.Fatalf("%+v of %+v", last, last.Space)
			}
		}
	}
	if n := len(b.e.journal.names); n > maxClosedSpaces+1 {
		t.Fatalf("%d names", n)
	}
	if n := len(b.followed(x)); n != 0 || f.Gaps() != 1 {
		t.Fatal(n, f.Gaps())
	}
	f.Close()
	if n := len(b.e.journal.names); n != 1 {
		t.Fatalf("%d names", n)
	}
}

// BenchmarkStore stores prefixes of 64 chunks in an arena that is full: with the journal off, and
// with a follower who reads along, whose reading counts. An op is one prefix.
func BenchmarkStore(b *testing.B) {
	for name, journal := range map[string]int64{"alone": 0, "followed": 16 << 20} {
		b.Run(name, func(b *testing.B) {
			const ppc, chunks = 16, 64
			t := newBench(b, 2000, ppc, Config{JournalBytes: journal})
			hashes := make([][]byte, 256)
			for i := range hashes {
				hashes[i] = numbered(uint64(i), ppc*chunks)
			}
			var f *Feed
			var err error
			if journal > 0 {
				f, err = t.e.Follow(0)
				t.ok(err)
				defer f.Close()
			}
			var buf []byte
			var events []Event
			i := 0
			b.ReportAllocs()
			var from, to unix.Rusage
			t.ok(unix.Getrusage(unix.RUSAGE_SELF, &from))
			for b.Loop() {
				res, _, err := t.e.PrepareStore(me, 0, nil, hashes[i%len(hashes)], nil)
				t.ok(err)
				t.ok(t.e.CommitStore(me, res.Store, nil))
				i++
				if f != nil && i%16 == 0 {
					for more := true; more; {
						var batch FeedBatch
						batch, buf, err = f.Next(1<<14, buf, events[:0])
						t.ok(err)
						events, more = batch.Events, batch.More
					}
				}
			}
			t.ok(unix.Getrusage(unix.RUSAGE_SELF, &to)) // of use on a machine that is busy
			b.ReportMetric(float64(to.Utime.Nano()+
				to.Stime.Nano()-from.Utime.Nano()-from.Stime.Nano())/float64(i), "cpu-ns/op")
		})
	}
}
