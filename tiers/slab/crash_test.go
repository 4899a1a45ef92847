package slab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
	"lookaside/tiers/vfs"
	"lookaside/tiers/vfs/vfstest"
)

// universe is the chunks that a history stores and looks for.
type universe struct {
	spaces []*tiers.Space
	runs   []tiers.Run // of one chunk each
}

func newUniverse(gs ...tiers.Geometry) *universe {
	u := &universe{}
	for i, g := range gs {
		space := tiertest.NewSpace(fmt.Sprintf("crash %d", i), g)
		u.spaces = append(u.spaces, space)
		for p := range byte(4) {
			prefix := make(tiertest.Prefix, 3*g.PagesPerChunk)
			prefix[0] = p / 2
			prefix[g.PagesPerChunk] = p % 2
			run := prefix.Run(space, 0, len(prefix))
			for i := range run.Chunks() {
				whole := run.Chunk(i)
				u.runs = append(u.runs, whole)
				if n := whole.Pages() / 2; n > 0 && i == 2 {
					part := whole
					part.Hashes = part.Hashes[:n*g.DigestBytes]
					u.runs = append(u.runs, part)
				}
			}
		}
	}
	return u
}

func (u *universe) transfer(i int) tiers.Transfer {
	r := u.runs[i]
	t := tiers.Transfer{Run: r, Bytes: make([]byte, int64(r.Pages())*r.Space.Geometry.PageBytes)}
	return t
}

func (u *universe) store(ctx context.Context, d *Disk, which ...int) []error {
	var ts []tiers.Transfer
	for _, i := range which {
		t := u.transfer(i)
		tiertest.FillRun(t.Bytes, t.Run)
		ts = append(ts, t)
	}
	errs := make([]error, len(ts))
	d.Store(ctx, ts, func(i int, err error) { errs[i] = err })
	return errs
}

// load answers whether a chunk was loaded. Wrong bytes are the one thing that must never be.
func (u *universe) load(t testing.TB, d *Disk, i int) error {
	t.Helper()
	tr := u.transfer(i)
	var err error
	d.Load(context.Background(), []tiers.Transfer{tr}, func(_ int, e error) { err = e })
	if err == nil {
		if page := tiertest.WrongPage(tr.Bytes, tr.Run); page >= 0 {
			t.Fatalf("page %d of chunk %d is wrong", page, i)
		}
	}
	return err
}

// covers says whether chunk i being held makes j be held.
func (u *universe) covers(i, j int) bool {
	a, b := u.runs[i], u.runs[j]
	return a.Space == b.Space && a.First == b.First && len(a.Hashes) >= len(b.Hashes) &&
		string(a.Hashes[:len(b.Hashes)]) == string(b.Hashes)
}

func cleanCheck(t testing.TB, fsys vfs.FS, dirs []string) {
	t.Helper()
	r, err := Check(context.Background(), CheckOptions{FS: fsys, Dirs: dirs})
	if err != nil {
		t.Fatal(err)
	}
	if r.Bad() != 0 {
		t.Fatalf("Check: %+v", r)
	}
}

// TestPowerCut clones a history's files after every write as a power cut might leave them. Opened
// again, all that was acknowledged is there, whatever is found has the right bytes, and Check is
// clean.
func TestPowerCut(t *testing.T) {
	t.Parallel()
	seeds := uint64(6)
	if testing.Short() {
		seeds = 1
	}
	for seed := range seeds {
		for _, tight := range []bool{false, true} {
			t.Run(fmt.Sprintf("seed %d tight %v", seed, tight), func(t *testing.T) {
				t.Parallel()
				powerCut(t, seed, tight)
			})
		}
	}
}

func powerCut(t *testing.T, seed uint64, tight bool) {
	rnd := rand.New(rand.NewPCG(seed, 77))
	u := newUniverse(tiers.Geometry{PageBytes: 700, PagesPerChunk: 4, PageTokens: 16,
		DigestBytes: 16}, tiers.Geometry{PageBytes: 5000, PagesPerChunk: 3, PageTokens: 16,
		DigestBytes: 32})
	mem := vfstest.NewMem()
	o := Options{FS: mem, Dirs: []string{"/a", "/b"}, CapacityBytes: 8 << 20, SlabBytes: 1 << 20,
		PieceBytes: 4096, Workers: 2, RetryEvery: time.Millisecond}
	steps := 40
	if tight { // so that slots are used again and again
		u = newUniverse(tiers.Geometry{PageBytes: 5000, PagesPerChunk: 3, PageTokens: 16,
			DigestBytes: 32})
		o.CapacityBytes, o.SlabBytes = 128<<10, 64<<10
		steps = 80
	}
	var (
		mu     sync.Mutex
		acked  = map[int]bool{}
		clones int
		cutErr error
	)
	examine := func() {
		mu.Lock()
		defer mu.Unlock()
		if clones++; cutErr != nil || clones%3 != int(seed%3) {
			// every third: all seeds together cut everywhere
			return
		}
		oo := o
		oo.FS = mem.CrashClone(seed<<32 | uint64(clones))
		d, err := Open(oo)
		if err != nil {
			cutErr = fmt.Errorf("cut %d: %w", clones, err)
			return
		}
		for i := range u.runs {
			err := u.load(t, d, i)
			switch {
			case err == nil:
			case !errors.Is(err, tiers.ErrNotFound):
				cutErr = errors.Join(cutErr, fmt.Errorf("cut %d: chunk %d: %w", clones, i, err))
			case acked[i] && !tight:
				cutErr = errors.Join(cutErr,
					fmt.Errorf("cut %d: chunk %d was acknowledged and is gone", clones, i))
			}
		}
		if err := d.Close(); err != nil {
			cutErr = errors.Join(cutErr, err)
		}
		cleanCheck(t, oo.FS, o.Dirs)
	}
	open := func() *Disk {
		d, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := open()
	mem.OnWrite(examine)
	for step := range steps {
		switch k := rnd.IntN(20); {
		case k < 12:
			var which []int
			for range 1 + rnd.IntN(4) {
				which = append(which, rnd.IntN(len(u.runs)))
			}
			errs := u.store(t.Context(), d, which...)
			mu.Lock()
			for i, err := range errs {
				if err == nil {
					acked[which[i]] = true
				} else if !tight || !errors.Is(err, tiers.ErrBusy) {
					t.Fatalf("step %d: %v", step, err)
				}
			}
			mu.Unlock()
		case k < 16:
			i := rnd.IntN(len(u.runs))
			if err := u.load(t, d, i); err != nil && (!errors.Is(err, tiers.ErrNotFound) ||
				acked[i] && !tight) {
				t.Fatalf("step %d: chunk %d: %v", step, i, err)
			}
		case k < 18:
			i := rnd.IntN(len(u.runs))
			mu.Lock()
			for j := range u.runs {
				if u.covers(i, j) || u.covers(j, i) || u.runs[i].First == u.runs[j].First {
					// what shares pages may go as well
					delete(acked, j)
				}
			}
			mu.Unlock()
			if err := d.Drop(t.Context(), u.runs[i]); err != nil {
				t.Fatal(err)
			}
		case k < 19:
			var fp tiers.Fingerprint
			if rnd.IntN(2) == 0 {
				fp = u.spaces[0].Fingerprint
			}
			mu.Lock()
			for j := range u.runs {
				if fp == (tiers.Fingerprint{}) || u.runs[j].Space.Fingerprint == fp {
					delete(acked, j)
				}
			}
			mu.Unlock()
			if _, err := d.Clear(t.Context(), fp); err != nil {
				t.Fatal(err)
			}
		default:
			if err := d.Close(); err != nil {
				t.Fatal(err)
			}
			d = open()
		}
		mu.Lock()
		err := cutErr
		mu.Unlock()
		if err != nil {
			t.Fatalf("seed %d step %d: %v", seed, step, err)
		}
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	mem.OnWrite(nil) // nobody writes any more
	cleanCheck(t, mem, o.Dirs)
	t.Logf("%d changes", clones)
}
