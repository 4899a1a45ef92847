package stack

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// sums has the checksums of chunks, each from when it was first seen.
type sums struct {
	mu    sync.Mutex
	known map[summed]uint64
	arena func(region uint32) []byte
}

type summed struct {
	handle uint64
	pages  int
}

// recheck is Config.Recheck.
func (s *sums) recheck(v *engine.Verification) (known bool, err error) {
	mem := s.arena(v.Region)[v.Offset:][:v.Pages*pageBytes]
	var sum uint64
	if err := dax.Guard(func() { sum = xxh3.Hash(mem) }, mem); err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := summed{v.Handle, v.Pages}
	was, known := s.known[key]
	if known && was != sum {
		return true, tiers.ErrCorrupt
	}
	s.known[key] = sum
	return known, nil
}

// keepAll makes the checksums of all that was committed of late, as keepers do.
func (r *rig) keepAll() {
	for {
		v, _, ok := r.engine.NextUnkept(nil)
		if !ok {
			return
		}
		if _, err := r.cfg.Recheck(&v); err != nil {
			r.t.Fatal(err)
		}
	}
}

// patrolled are the options of a rig whose arena is walked over in a minute.
func patrolled(o rigOptions) rigOptions {
	config := o.config
	o.config = func(c *Config) {
		c.PatrolBytes, c.PatrolEvery = 1<<20, time.Minute
		if config != nil {
			config(c)
		}
		c.Recheck = (&sums{known: map[summed]uint64{}, arena: c.Arena}).recheck
	}
	books := o.engine
	o.engine = func(c *engine.Config) {
		wake := c.Wake
		c.Keep, c.Wake = true, func(w engine.Work) {
			if w != engine.WorkKeep {
				wake(w)
			}
		}
		if books != nil {
			books(c)
		}
	}
	return o
}

// at is where page i of a prefix lies in the arena.
func (r *rig) at(lookup uint64, p tiertest.Prefix, i int) []byte {
	r.t.Helper()
	n, err := r.engine.Lookup(scheduler, lookup, 0, p.Digests(0, i+1, 32))
	if err != nil || n != i+1 {
		r.t.Fatalf("%d pages, %v", n, err)
	}
	load, extents, err := r.engine.PrepareLoad(worker, scheduler, lookup, 0, n, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.engine.Release(worker, load, nil); err != nil {
		r.t.Fatal(err)
	}
	x := extents[len(extents)-1]
	at := int(x.Offset) + (i-int(x.Page))*pageBytes
	return r.arena[at : at+pageBytes]
}

// What is punched or spoilt in the arena is found within a walk over it, dropped and counted; all
// else stays.
func TestPatrolFindsRot(t *testing.T) {
	inBubble(t, patrolled(rigOptions{}), func(t *testing.T, r *rig) {
		rnd := rand.New(rand.NewPCG(1, 2))
		const n = 10
		var all [n]tiertest.Prefix
		for i := range all {
			all[i] = prefix(rnd, 3*ppc, byte(i))
			r.store(all[i], 2*ppc+1)
		}
		r.keepAll()
		r.store(all[7], 3*ppc) // the last chunk is extended
		r.keepAll()
		// A walk begins with each minute, whether the first one saw a chunk or not. It has ended
		// well before the next one.
		time.Sleep(170 * time.Second)
		if st := r.engine.Stats(); st.Rotten != 0 || r.patrol.passes.Load() != 3 ||
			r.patrol.checked.Load() < 2*3*n {
			t.Fatalf("%d passes, %d checked; %+v", r.patrol.passes.Load(), r.patrol.checked.Load(),
				st)
		}
		clear(r.at(1, all[2], ppc+1)) // a hole reads as zeros
		r.at(2, all[5], 0)[17] ^= 4
		r.at(3, all[7], 2*ppc+2)[pageBytes-1]++
		time.Sleep(2 * time.Minute)
		if st := r.engine.Stats(); st.Rotten != 3 || st.Bad != 3 {
			t.Errorf("%+v", st)
		}
		for i := range all {
			want := 2*ppc + 1
			switch i {
			case 2:
				want = ppc
			case 5:
				want = 0
			case 7:
				want = 2 * ppc
			}
			r.want(10+uint64(i), all[i], 0, 2*ppc+1, want)
		}
		if n := r.patrol.mute.Load(); n > 2 {
			t.Errorf("%d lines are not logged", n)
		}
		// What is stored again is whole, and stays.
		r.store(all[5], 2*ppc)
		time.Sleep(3 * time.Minute)
		r.want(30, all[5], 0, 2*ppc+1, 2*ppc+1)
		if st := r.engine.Stats(); st.Rotten != 3 {
			t.Errorf("%+v", st)
		}
	})
}

// A walk that began when the arena held next to nothing goes on at the pace of what it holds now.
func TestPatrolKeepsUp(t *testing.T) {
	inBubble(t, patrolled(rigOptions{}), func(t *testing.T, r *rig) {
		synctest.Wait() // a walk over an empty arena has ended
		rnd := rand.New(rand.NewPCG(9, 10))
		r.store(prefix(rnd, 1, 0), 1)
		r.keepAll()
		time.Sleep(time.Minute) // the next walk begins
		synctest.Wait()
		if n, passes := r.patrol.checked.Load(), r.patrol.passes.Load(); n != 1 || passes != 1 {
			t.Fatalf("%d chunks are checked in %d walks", n, passes)
		}
		const chunks = 30
		r.store(prefix(rnd, chunks*ppc, 1), chunks*ppc)
		r.keepAll()
		time.Sleep(50 * time.Second)
		if n, passes := r.patrol.checked.Load(), r.patrol.passes.Load(); n != 1+chunks ||
			passes != 2 {
			t.Errorf("%d chunks are checked in %d walks", n, passes)
		}
	})
}

// A space that no session has opened since the arena was restored is walked over at the same pace.
func TestPatrolPacesSpacesNobodyHasOpened(t *testing.T) {
	inBubble(t, patrolled(rigOptions{}), func(t *testing.T, r *rig) {
		const chunks = 50
		r.store(prefix(rand.New(rand.NewPCG(11, 12)), chunks*ppc), chunks*ppc)
		r.keepAll()
		time.Sleep(90 * time.Second) // between two walks
		r.spaces.Store(&[]*tiers.Space{})
		before := r.patrol.checked.Load()
		time.Sleep(40 * time.Second) // 10 s of a walk
		if n := r.patrol.checked.Load() - before; n < 10 || n > 20 {
			t.Errorf("%d chunks of a space are checked in 10 s of a minute's walk", n)
		}
	})
}

// What has rotted goes to no tier, also between two walks. What a tier brings up has been checked
// by the tier, and gets its checksum then.
func TestRotDoesNotCascade(t *testing.T) {
	o := rigOptions{tiers: []tiertest.MemoryOptions{{}},
		config: func(c *Config) { c.PatrolEvery = time.Hour }}
	o.engine = func(c *engine.Config) { c.Tiers[0].Admit = engine.AdmitReused }
	inBubble(t, patrolled(o), func(t *testing.T, r *rig) {
		rnd := rand.New(rand.NewPCG(3, 4))
		good, bad := prefix(rnd, 2*ppc, 1), prefix(rnd, 2*ppc, 2)
		r.store(good, 2*ppc)
		r.store(bad, 2*ppc)
		r.keepAll()
		// Its place is not looked up by a lookup, which would be its first use.
		for i := range len(r.arena) / pageBytes {
			page := r.arena[i*pageBytes : (i+1)*pageBytes]
			run := bad.Run(r.space, ppc, 2*ppc)
			run.Hashes = run.Hashes[:32]
			if tiertest.WrongPage(page, run) < 0 {
				clear(page)
			}
		}
		r.want(1, good, 0, 2*ppc, 2*ppc) // the first use: it goes down
		n := r.lookup(2, bad, 0, 2*ppc)
		if n != 2*ppc {
			t.Fatalf("%d pages", n)
		}
		if err := r.engine.Cancel(scheduler, 2); err != nil {
			t.Fatal(err)
		}
		r.flush()
		synctest.Wait()
		held := make([]uint16, 2)
		if err := r.mem[0].Contains(t.Context(), good.Run(r.space, 0, 2*ppc), held); err != nil ||
			held[0] != ppc || held[1] != ppc {
			t.Errorf("of what is whole the tier has %v, %v", held, err)
		}
		if err := r.mem[0].Contains(t.Context(), bad.Run(r.space, 0, 2*ppc), held); err != nil ||
			held[0] != ppc || held[1] != 0 {
			t.Errorf("of what has rotted the tier has %v, %v", held, err)
		}
		if st := r.engine.Stats(); st.Rotten != 1 || st.Leases != 0 {
			t.Errorf("%+v", st)
		}
		r.want(3, bad, 0, 2*ppc, ppc)
		r.clearArena()
		r.want(4, good, 0, 2*ppc, 2*ppc) // comes up
		r.keepAll()
		checked := r.patrol.checked.Load()
		r.at(5, good, ppc)[0]++
		time.Sleep(2 * time.Hour)
		if st := r.engine.Stats(); st.Rotten != 2 || r.patrol.checked.Load() == checked {
			t.Errorf("%+v", st)
		}
	})
}

// No more is read than is allowed, and what rots before its chunk has a checksum is not found: that
// is what the documentation says.
func TestPatrolIsBounded(t *testing.T) {
	o := rigOptions{config: func(c *Config) {
		c.PatrolBytes, c.PatrolEvery = 2*slotBytes,
			time.Nanosecond
	}}
	inBubble(t, patrolled(o), func(t *testing.T, r *rig) {
		p := prefix(rand.New(rand.NewPCG(5, 6)), 20*ppc)
		r.store(p, 20*ppc)
		clear(r.arena[:pageBytes])
		time.Sleep(9 * time.Second)
		if n := r.patrol.checked.Load(); n > 0 {
			t.Errorf("%d chunks are compared before all have a checksum", n)
		}
		time.Sleep(20 * time.Second)
		if n := r.patrol.checked.Load(); n < 30 || n > 41 {
			t.Errorf("%d chunks are read in 20 s", n)
		}
		if st := r.engine.Stats(); st.Rotten != 0 {
			t.Errorf("%+v", st)
		}
	})
}

// Memory that cannot be read is not granted again.
func TestPatrolMeetsBadMemory(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "arena"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const slots = 8
	if err := f.Truncate(slots * slotBytes); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, slots*slotBytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Munmap(mem); err != nil {
			t.Error(err)
		}
	}()
	inBubble(t, patrolled(rigOptions{slots: slots,
		config: func(c *Config) { c.Arena = func(uint32) []byte { return mem } }}),
		func(t *testing.T, r *rig) {
			r.arena = mem
			rnd := rand.New(rand.NewPCG(7, 8))
			for i := range 4 {
				r.store(prefix(rnd, 2*ppc, byte(i)), 2*ppc)
			}
			r.keepAll()
			if err := f.Truncate((slots - 1) * slotBytes / 4096 * 4096); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * time.Minute)
			st := r.engine.Stats()
			if st.Rotten == 0 || st.FreeSlots != 0 || st.ReadySlots != slots-int(st.Rotten) {
				t.Errorf("%+v", st)
			}
			if err := f.Truncate(slots * slotBytes); err != nil {
				t.Fatal(err)
			}
		})
}
