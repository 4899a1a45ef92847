package stack

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs/vfstest"
)

// Over the real disk tier: what was flushed is found by the next Stack on the same disk, whole and
// partly filled chunks alike, and its bytes are right.
func TestDiskOutlivesTheStack(t *testing.T) {
	fs := vfstest.NewMem()
	rnd := rand.New(rand.NewPCG(1, 1))
	var list []tiertest.Prefix
	for round := range 4 {
		r := newRig(t, rigOptions{slots: 48, tiers: []tiertest.MemoryOptions{{}},
			wrap: func(_ int, unused tiers.Tier) tiers.Tier {
				if err := unused.Close(); err != nil {
					t.Fatal(err)
				}
				d, err := slab.Open(slab.Options{FS: fs, Dirs: []string{"/a", "/b"},
					CapacityBytes: 16 << 20, SlabBytes: 1 << 20})
				if err != nil {
					t.Fatal(err)
				}
				return d
			}, config: func(c *Config) { c.beSlow(30 * time.Second) }})
		for i, p := range list {
			r.want(uint64(100+i), p, 0, len(p), len(p))
			if i%2 == 0 {
				r.want(uint64(500+i), p, 4, len(p), len(p)-4)
			}
		}
		for range 5 {
			p := prefix(rnd, 20+rnd.IntN(40))
			if len(list) > 0 {
				p = prefix(rnd, 60, list[rnd.IntN(len(list))][:10+rnd.IntN(8)]...)
			}
			if n := r.store(p, len(p)); n != len(p) {
				t.Fatalf("round %d: %d pages stored", round, n)
			}
			r.flush()
			list = append(list, p)
		}
		if st := r.Status()[0]; st.Kind != "disk" || !st.Local ||
			st.StoreFailures+st.LoadFailures+st.Shed != 0 {
			t.Errorf("%+v", st)
		}
		time.Sleep(time.Millisecond)
		d := r.Stack.tiers[0].Tier
		r.close()
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// demoted is a disk that knows whether whoever writes its victims elsewhere has none left.
type demoted struct {
	*slab.Disk
	waits atomic.Bool
}

func (d *demoted) NextVictims(max int, out []tiers.Victim) []tiers.Victim {
	d.waits.Store(false)
	return d.Disk.NextVictims(max, out)
}

func (d *demoted) VictimsReady() <-chan struct{} {
	d.waits.Store(true)
	return d.Disk.VictimsReady()
}

func (d *demoted) ahead() bool { return d.waits.Load() && len(d.Disk.VictimsReady()) == 0 }

// What a full disk drops has gone to the tier below before, which admits what is evicted: a working
// set of several times arena and disk is found whole.
func TestDiskHandsDown(t *testing.T) {
	var above *demoted
	r := newRig(t, rigOptions{slots: 32, tiers: []tiertest.MemoryOptions{{}, {}},
		wrap: func(i int, mem tiers.Tier) tiers.Tier {
			if i > 0 {
				return mem
			}
			d, err := slab.Open(slab.Options{FS: vfstest.NewMem(), Dirs: []string{"/a"},
				CapacityBytes: 1 << 20, SlabBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			})
			above = &demoted{Disk: d}
			return above
		},
		config: func(c *Config) {
			c.Tiers[1].Admit = engine.AdmitEvicted
			c.BounceBytes = 4 * slotBytes
			c.beSlow(30 * time.Second)
		},
	})
	defer r.close()
	rnd := rand.New(rand.NewPCG(1, 1))
	var list []tiertest.Prefix
	for range 60 {
		p := prefix(rnd, 10*ppc)
		r.store(p, 10*ppc)
		r.flush()
		list = append(list, p)
		eventually(t, "what is to be evicted next is handed down", above.ahead)
	}
	st := r.Status()
	if st[0].Evictions == 0 || st[1].Demoted == 0 || st[1].Stores > 600 {
		t.Fatalf("%+v", st)
	}
	found := 0
	for i, p := range list {
		n := r.lookup(uint64(i), p, 0, 10*ppc)
		r.load(uint64(i), p, 0, n)
		found += n
	}
	// What was evicted in a burst, faster than it could be handed down, may be lost.
	if found < 60*10*ppc*8/10 {
		t.Errorf("%d of %d pages found", found, 60*10*ppc)
	}
}

// Fault 30: a disk that does nothing for as long as it likes. What the arena has is answered at
// once, what only the disk has when the lookup's time is up, what waits to be written is bounded,
// and what does not fit is shed. When the disk goes on, so does all that waited.
func TestSlowDisk(t *testing.T) {
	const queue, workers, batch = 8, 2, 4
	var mu sync.Mutex
	var shut chan struct{} // nil: open
	var waiting atomic.Int32
	slow := vfstest.Faulty(vfstest.NewMem(), func(c vfstest.Call) vfstest.Fault {
		mu.Lock()
		gate := shut
		mu.Unlock()
		if gate != nil && c.Op&(vfstest.OpRead|vfstest.OpWrite|vfstest.OpSync) != 0 {
			waiting.Add(1)
			<-gate
			waiting.Add(-1)
		}
		return vfstest.Fault{}
	})
	var d *slab.Disk
	r := newRig(t, rigOptions{slots: 200, tiers: []tiertest.MemoryOptions{{}},
		wrap: func(_ int, unused tiers.Tier) tiers.Tier {
			err := unused.Close()
			if err == nil {
				d, err = slab.Open(slab.Options{FS: slow, Dirs: []string{"/a"},
					CapacityBytes: 4 << 20,
					SlabBytes:     1 << 20})
			}
			if err != nil {
				t.Fatal(err)
			}
			return d
		}, config: func(c *Config) {
			c.beSlow(time.Minute)
			c.Promote = PromoteAlways
			t := &c.Tiers[0]
			t.Queue, t.StoreWorkers, t.LoadWorkers, t.Batch = queue, workers, workers, batch
		}})
	defer func() {
		r.close()
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	rnd := rand.New(rand.NewPCG(30, 30))
	below := prefix(rnd, 4*ppc, 1)
	r.store(below, 4*ppc)
	r.flush()
	r.clearArena()

	gate := make(chan struct{})
	mu.Lock()
	shut = gate
	mu.Unlock()
	var list []tiertest.Prefix
	for i := range 30 {
		p := prefix(rnd, 4*ppc, 2, byte(i))
		r.store(p, 4*ppc)
		list = append(list, p)
	}
	eventually(t, "the disk is being written to", func() bool { return waiting.Load() > 0 })
	for i, p := range list { // the arena has it: this waits for nobody
		if n, done := r.ask(uint64(10+i), p, 0, 4*ppc); !done || n != 4*ppc {
			t.Fatalf("lookup %d: %d pages, answered: %v", i, n, done)
		}
		r.load(uint64(10+i), p, 0, 4*ppc)
	}
	st := r.Status()[0]
	if st.StoreQueue > queue || st.Shed == 0 || st.Shed < uint64(len(list)*4-queue-workers*batch) {
		t.Errorf("a queue for %d chunks has %d; %d were shed of %d", queue, st.StoreQueue, st.Shed,
			len(list)*4)
	}
	if n, done := r.ask(100, below, 0, 4*ppc,
		func(q *Query) { q.Deadline = 50 * time.Millisecond }); done {
		t.Fatalf("answered at once with %d pages", n)
	}
	if n, ok := r.answer(100, time.Minute); !ok || n != 0 {
		t.Errorf("%d pages, answered: %v", n, ok)
	}
	held := make([]uint16, 4)
	if err := d.Contains(t.Context(), below.Run(r.space, 0, 4*ppc), held); err != nil ||
		held[3] != ppc {
		t.Errorf("the disk's index says %v: %v", held, err)
	}
	if st := r.LookupStats(); st.Late == 0 || st.Pending > 0 {
		t.Errorf("%+v", st)
	}

	mu.Lock()
	shut = nil
	mu.Unlock()
	close(gate)
	r.flush()
	r.want(200, below, 0, 4*ppc, 4*ppc)
	r.clearArena()
	r.want(201, below, 0, 4*ppc, 4*ppc)
	if st := r.Status()[0]; st.StoreFailures+st.LoadFailures > 0 || st.Breaker != "closed" {
		t.Errorf("%+v", st)
	}
}
