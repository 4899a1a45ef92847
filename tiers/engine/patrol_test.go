package engine

import (
	"testing"

	"github.com/zeebo/xxh3"
)

// patrolling is a chunk of a random history that was read, and whose checksum is yet to be noted:
// it may be gone by then.
type patrolling struct {
	v   Verification
	sum uint64
}

// patrolSome patrols a part of the arena. Nothing rots in a history, so no checksum is ever another
// than the one before, whatever became of the slot meanwhile.
func (w *world) patrolSome() {
	if w.chance(2) {
		v, _, ok := w.e.NextUnsummed(nil)
		if !ok || w.chance(3) {
			v, _, ok = w.e.NextPatrol(&w.patrolPlace, nil)
		}
		if ok {
			size := int64(v.Pages) * w.e.spaces[v.Space].g.PageBytes
			w.patrols = append(w.patrols,
				patrolling{v, xxh3.Hash(w.arena[v.Region][v.Offset : int64(v.Offset)+size])})
		}
	}
	if len(w.patrols) > 0 && w.chance(2) {
		i := w.rng.IntN(len(w.patrols))
		p := w.patrols[i]
		w.patrols = append(w.patrols[:i], w.patrols[i+1:]...)
		known, same := w.e.NoteSum(p.v.Handle, p.v.Pages, p.sum)
		if !same {
			w.fatal("%+v has another checksum than before", p.v)
		}
		if known {
			w.compared++
		}
	}
}

// A chunk's checksum is that of its slot's generation and pages; what rots after it was noted is
// told, and dropped.
func TestPatrol(t *testing.T) {
	b := newBench(t, 6, 4, Config{Sums: true})
	sum := func(v Verification, sum uint64, known, same bool) {
		t.Helper()
		if k, s := b.e.NoteSum(v.Handle, v.Pages, sum); k != known || s != same {
			t.Fatalf("known %v, same %v; want %v, %v", k, s, known, same)
		}
	}
	next := func() Verification {
		t.Helper()
		v, _, ok := b.e.NextUnsummed(nil)
		if !ok {
			t.Fatal("nothing wants a checksum")
		}
		return v
	}
	none := func() {
		t.Helper()
		if v, _, ok := b.e.NextUnsummed(nil); ok {
			t.Fatalf("%+v wants a checksum", v)
		}
	}
	walk := func() (list []Verification) {
		var at PatrolPlace
		for v, _, ok := b.e.NextPatrol(&at, nil); ok; v, _, ok = b.e.NextPatrol(&at, nil) {
			list = append(list, v)
		}
		return list
	}
	h := numbered(1, 8)[:32*6] // a whole chunk and a half
	b.store(h)
	first, second := next(), next()
	none()
	if first.Pages != 4 || second.Pages != 2 ||
		string(first.Hashes)+string(second.Hashes) != string(h) || len(walk()) != 2 {
		t.Fatalf("%+v, %+v, %+v", first, second, walk())
	}
	sum(first, 10, false, true)
	sum(first, 10, true, true)
	sum(second, 20, false, true)
	longer := numbered(1, 8)
	b.store(longer) // the second is extended
	grown := next()
	none()
	if grown.Handle != second.Handle || grown.Pages != 4 {
		t.Fatalf("%+v", grown)
	}
	sum(second, 20, true, true)
	sum(second, 21, true, false)
	sum(grown, 30, false, true)
	sum(second, 20, false, true) // of fewer pages than the one that is noted
	sum(grown, 30, true, true)
	sum(grown, 31, true, false)
	b.wantHits(8, longer)
	if !b.e.DropRotten(grown.Handle, false) || b.e.DropRotten(grown.Handle, false) {
		t.Fatal("it is not dropped once")
	}
	b.wantHits(4, longer)
	sum(grown, 31, false, true) // it is gone
	if st := b.e.Stats(); st.Rotten != 1 || st.Bad != 1 {
		t.Fatalf("%+v", st)
	}
	b.store(longer)
	again := next()
	if again.Handle == grown.Handle || again.Offset != grown.Offset {
		t.Fatalf("%+v, then %+v", grown, again)
	}
	sum(grown, 31, false, true)
	sum(again, 40, false, true)
	// What is leased is out of the index at once, and free when its last reader has left. Memory
	// that cannot be read is not granted again.
	n, err := b.e.Lookup(me, 7, 0, longer)
	b.ok(err)
	if n != 8 || !b.e.DropRotten(again.Handle, true) {
		t.Fatal(n)
	}
	b.wantHits(4, longer)
	free := b.e.Stats().FreeSlots
	b.ok(b.e.Cancel(me, 7))
	if st := b.e.Stats(); st.FreeSlots != free || st.ReadySlots != 1 {
		t.Fatalf("%+v", st)
	}
	b.ok(b.e.Check())
	if list := walk(); len(list) != 1 || list[0].Handle != first.Handle {
		t.Fatalf("%+v", list)
	}
	b.e.ClearSpace(b.sp)
	if len(walk()) != 0 {
		t.Fatal("the walk finds what is gone")
	}
	none()
}

// More come than the ring has room for: the oldest are left to the walk.
func TestRecentIsBounded(t *testing.T) {
	var u recent
	for i := range uint64(maxRecent + 10) {
		u.push(i)
	}
	if u.n != maxRecent || len(u.ring) != maxRecent || u.ring[u.head] != 10 {
		t.Fatalf("%d of %d, the first is %d", u.n, len(u.ring), u.ring[u.head])
	}
}
