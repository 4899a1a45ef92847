package stack

import (
	"math/rand/v2"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/disk"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
)

// Over the real disk tier: what was flushed is found by the next Stack on the same disk, whole and partly filled chunks alike, and its bytes are right.
func TestDiskOutlivesTheStack(t *testing.T) {
	fs := vfs.NewMem()
	rnd := rand.New(rand.NewPCG(1, 1))
	var list []tiertest.Prefix
	for round := range 4 {
		r := newRig(t, rigOptions{slots: 48, tiers: []tiertest.MemoryOptions{{}}, wrap: func(_ int, unused tiers.Tier) tiers.Tier {
			if err := unused.Close(); err != nil {
				t.Fatal(err)
			}
			d, err := disk.Open(disk.Options{FS: fs, Dirs: []string{"/a", "/b"}, CapacityBytes: 16 << 20, SlabBytes: 1 << 20})
			if err != nil {
				t.Fatal(err)
			}
			return d
		}})
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
		if st := r.Status()[0]; st.Kind != "disk" || !st.Local || st.StoreFailures+st.LoadFailures+st.Shed != 0 {
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
