package slab

import (
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs/vfstest"
)

var _ tiers.Victims = (*Disk)(nil)

// A disk that is nearly full names the chunks that it would drop next, keeps them while they are
// read, and names none again that are kept below.
func TestVictims(t *testing.T) {
	g := tiers.Geometry{PageBytes: 4096, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32}
	sp := tiertest.NewSpace("victims", g)
	d, err := Open(Options{FS: vfstest.NewMem(), Dirs: []string{"/d"}, CapacityBytes: 1 << 20,
		SlabBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if v := d.NextVictims(10, nil); len(v) != 0 {
		t.Fatalf("an empty disk names %d victims", len(v))
	}
	put := func(first byte) tiers.Run {
		run := tiertest.Prefix{first, 1, 2, 3}.Run(sp, 0, 4)
		b := make([]byte, 4*4096)
		tiertest.FillRun(b, run)
		d.Store(t.Context(), []tiers.Transfer{{Run: run, Bytes: b}}, func(_ int, err error) {
			if err != nil {
				t.Fatal(err)
			}
		})
		return run
	}
	var runs []tiers.Run
	stored := 0
	for d.Stats().Evictions == 0 {
		runs = append(runs, put(byte(stored)))
		stored++
	}
	runs = runs[1:] // the first has been evicted
	select {
	case <-d.VictimsReady():
	default:
		t.Error("it does not say that it has victims")
	}
	victims := d.NextVictims(1000, nil)
	if len(victims) == 0 || len(victims) > stored/4 {
		t.Fatalf("%d victims of %d chunks", len(victims), stored)
	}
	b := make([]byte, 4*4096)
	for i, v := range victims {
		if string(v.Hashes) != string(runs[i].Hashes) || v.Space.Fingerprint != sp.Fingerprint ||
			v.First != 0 {
			t.Fatalf("victim %d is not the %d-th oldest", i, i)
		}
		d.Load(t.Context(), []tiers.Transfer{{Run: v.Run, Bytes: b}}, func(_ int, err error) {
			if err != nil || tiertest.WrongPage(b, v.Run) >= 0 {
				t.Fatalf("victim %d: %v", i, err)
			}
		})
		d.EndVictim(v.Handle, true)
	}
	// The loads were uses, so others are next; none that is kept below is named before them.
	for _, v := range d.NextVictims(1000, nil) {
		for _, old := range victims {
			if string(v.Hashes) == string(old.Hashes) {
				t.Error("a victim that is kept below is named again")
			}
		}
		d.EndVictim(v.Handle, false)
	}
}
