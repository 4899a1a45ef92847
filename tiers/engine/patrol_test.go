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

// patrolledPages names pages of a slot under one generation.
type patrolledPages struct {
	handle uint64
	pages  int
}

// patrolSome patrols a part of the arena. Nothing rots in a history, so what is still held has the
// checksum that it had before, whatever became of the slot meanwhile.
func (w *world) patrolSome() {
	if w.chance(2) {
		if v, _, ok := w.e.NextPatrol(&w.patrolPlace, nil); ok {
			size := int64(v.Pages) * w.e.spaces[v.Space].g.PageBytes
			w.patrols = append(w.patrols,
				patrolling{v, xxh3.Hash(w.arena[v.Region][v.Offset : int64(v.Offset)+size])})
		}
	}
	if len(w.patrols) > 0 && w.chance(2) {
		i := w.rng.IntN(len(w.patrols))
		p := w.patrols[i]
		w.patrols = append(w.patrols[:i], w.patrols[i+1:]...)
		if !w.e.Publish(p.v.Handle, p.v.Pages, func() {}) {
			return
		}
		if w.patrolSums == nil {
			w.patrolSums = map[patrolledPages]uint64{}
		}
		key := patrolledPages{p.v.Handle, p.v.Pages}
		switch was, known := w.patrolSums[key]; {
		case !known:
			w.patrolSums[key] = p.sum
		case was != p.sum:
			w.fatal("%+v has another checksum than before", p.v)
		default:
			w.compared++
		}
	}
}

// The patrol sees all that is held, and drops what has rotted.
func TestPatrol(t *testing.T) {
	b := newBench(t, 6, 4, Config{})
	walk := func() (list []Verification) {
		var at PatrolPlace
		for v, _, ok := b.e.NextPatrol(&at, nil); ok; v, _, ok = b.e.NextPatrol(&at, nil) {
			list = append(list, v)
		}
		return list
	}
	h := numbered(1, 8)[:32*6] // a whole chunk and a half
	b.store(h)
	all := walk()
	if len(all) != 2 || all[0].Pages != 4 || all[1].Pages != 2 ||
		string(all[0].Hashes)+string(all[1].Hashes) != string(h) {
		t.Fatalf("%+v", all)
	}
	longer := numbered(1, 8)
	b.store(longer) // the second is extended
	grown := walk()[1]
	if grown.Handle != all[1].Handle || grown.Pages != 4 {
		t.Fatalf("%+v", grown)
	}
	b.wantHits(8, longer)
	if !b.e.DropRotten(grown.Handle, false) || b.e.DropRotten(grown.Handle, false) {
		t.Fatal("it is not dropped once")
	}
	b.wantHits(4, longer)
	if st := b.e.Stats(); st.Rotten != 1 || st.Bad != 1 {
		t.Fatalf("%+v", st)
	}
	b.store(longer)
	again := walk()[1]
	if again.Handle == grown.Handle || again.Offset != grown.Offset {
		t.Fatalf("%+v, then %+v", grown, again)
	}
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
	if list := walk(); len(list) != 1 || list[0].Handle != all[0].Handle {
		t.Fatalf("%+v", list)
	}
	b.e.ClearSpace(b.sp)
	if len(walk()) != 0 {
		t.Fatal("the walk finds what is gone")
	}
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
