package engine

import (
	"math"
	"testing"
	"time"
)

// Fault 47: the clock jumps. A jump forward ends what has a deadline, and nothing else; one back
// keeps it for longer, and no more: what is held stays found, and what is leased is freed by its
// owner as ever.
func TestClockJumps(t *testing.T) {
	const year = int64(365 * 24 * time.Hour)
	for name, jumps := range map[string][]int64{
		"forward":      {year},
		"back":         {-year},
		"to and fro":   {year, -2 * year, 3 * year, -year},
		"a little":     {1, -1, int64(time.Millisecond), -int64(time.Second)},
		"to the edges": {math.MaxInt64 - 2*year, -math.MaxInt64},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, 16, 4, Config{LeaseDeadline: 30 * time.Second,
				Tiers: []TierAdmission{{Admit: AdmitStored}}, PartialDelay: time.Second})
			b.now = year
			p, q := numbered(1, 10), numbered(2, 8)
			b.store(p)
			latest := b.now
			for _, jump := range jumps {
				b.wantHits(10, p)
				n, err := b.e.Lookup(me, 5, 0, p)
				b.ok(err)
				if n != 10 {
					t.Fatalf("%d pages", n)
				}
				res, _ := b.prepare(q) // a store that is under way has no deadline
				b.now += jump
				latest = max(latest, b.now)
				expired := b.e.Expire()
				if want := jump > int64(30*time.Second); (expired > 0) != want {
					t.Errorf("after %v %d lookups have expired", time.Duration(jump), expired)
				}
				if expired == 0 {
					load, _, err := b.e.PrepareLoad(me, me, 5, 0, 10, nil)
					b.ok(err)
					b.now += jump / 2
					latest = max(latest, b.now)
					b.e.Expire() // a load has no deadline
					b.ok(b.e.Release(me, load, nil))
				}
				if res.Store != 0 {
					b.ok(b.e.CommitStore(me, res.Store, nil))
				}
				b.wantHits(8, q)
				b.wantHits(10, p)
				if st := b.e.Stats(); st.Leases != 0 ||
					st.OpenLookups+st.OpenLoads+st.OpenStores != 0 {
					t.Errorf("%+v", st)
				}
				b.ok(b.e.Check())
				if _, err := b.e.Drop(b.sp, 0, q); err != nil {
					t.Fatal(err)
				}
			}
			// Partly filled chunks still go to the tier, when the clock has come to where it was.
			b.now = latest + int64(time.Hour)
			items, _ := b.e.NextCascades(0, 100, nil, nil)
			pages := 0
			for _, c := range items {
				if c.Space == b.sp && c.First+c.Pages <= 10 {
					pages += c.Pages
				}
				b.e.EndCascade(c.Handle, true)
			}
			if pages < 10 {
				t.Errorf("%d pages go to the tier", pages)
			}
		})
	}
}
