package daxtier

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/slab"
)

var (
	seedFlag  = flag.Uint64("pool.seed", 0, "replay this one seed")
	timesFlag = flag.Uint64("pool.times", 1, "how many times as many seeds to run")
)

// seeds calls f as a subtest for each of n seeds, or for the one that is asked for.
func seeds(t *testing.T, n uint64, f func(t *testing.T, seed uint64)) {
	from := uint64(1)
	n *= *timesFlag
	if *seedFlag != 0 {
		from, n = *seedFlag, 1
	}
	for seed := from; seed < from+n; seed++ {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			f(t, seed)
		})
	}
}

// childEnv makes the test binary the process that TestKilled kills: it names the directory of the
// devices and the seed.
const childEnv = "LOOKASIDE_POOL_TEST_CHILD"

const (
	killChunks   = 60 // that the child stores, loads and drops, over and over
	killCapacity = 4 << 20
)

func killOptions(dir string) Options {
	o := files(dir, 3, killCapacity) // two have room for all of it
	o.SlabBytes = 1 << 20
	return o
}

// child stores and drops chunks, and has devices come and go, until it is killed. It prints what it
// is about to do and what is done: "+n" chunk n is stored, "-n" it may be dropped from now on.
func child(spec string) {
	dir, text, _ := strings.Cut(spec, "#")
	seed, _ := strconv.ParseUint(text, 10, 64)
	p, err := Open(killOptions(dir))
	if err != nil {
		fmt.Println("!", err)
		os.Exit(1)
	}
	fmt.Println("open")
	space := testSpace()
	for w := range 2 {
		go func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(w)))
			for {
				// each worker has chunks of its own, so that its lines are in order
				n := w + 2*rnd.IntN(killChunks/2)
				if rnd.IntN(4) == 0 {
					fmt.Printf("-%d\n", n)
					if err := p.Drop(context.Background(), run(space, n)); err != nil {
						fmt.Println("!", err)
					}
					continue
				}
				if err := store(context.Background(), p, space, n, n+1)[0]; err != nil {
					fmt.Println("!", err)
				}
				fmt.Printf("+%d\n", n)
			}
		}()
	}
	rnd := rand.New(rand.NewPCG(seed, 2))
	for {
		path, ctx := killOptions(dir).Devices[rnd.IntN(3)].Path, context.Background()
		var err error
		if rnd.IntN(2) == 0 {
			err = errors.Join(p.Resize(ctx, path, killCapacity/2, Migrate, true),
				p.Resize(ctx, path, killCapacity, Migrate, true))
		} else if err = p.Remove(ctx, path, Migrate, true); err == nil {
			err = p.Add(ctx, path, killCapacity)
		}
		if err != nil {
			fmt.Println("!", err)
		}
	}
}

// TestKilled kills a process at a random moment, again and again. Opened again, the devices have
// every chunk that it printed as stored, right in every byte, and nothing is damaged.
func TestKilled(t *testing.T) {
	t.Parallel()
	seeds(t, 4, func(t *testing.T, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		dir := memory(t)
		state := map[int]bool{} // true: stored; false: either
		for round := range 4 {
			killed(t, rnd, fmt.Sprintf("%s=%s#%d", childEnv, dir, seed<<8|uint64(round)), 60,
				func(line string, kill func()) {
					if line == "open" {
						kill()
					} else if n, err := strconv.Atoi(line[1:]); err == nil {
						// else it was cut off by the kill
						state[n] = line[0] == '+'
					}
				})
			p, err := Open(killOptions(dir))
			if err != nil {
				t.Fatal(err)
			}
			for n := range killChunks {
				switch err := load(t, p, n, n+1)[0]; {
				case err == nil:
				case !errors.Is(err, tiers.ErrNotFound):
					t.Errorf("round %d: chunk %d: %v", round, n, err)
				case state[n]:
					t.Errorf("round %d: chunk %d was stored before the process was killed, and is gone", round, n)
				}
			}
			if st := p.Stats(); st.Corrupt > 0 || st.Evictions > 0 {
				t.Errorf("round %d: %+v", round, st)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			checkClean(t, killOptions(dir))
		}
	})
}

func checkClean(t *testing.T, o Options) slab.Report {
	t.Helper()
	var paths []string
	for _, d := range o.Devices {
		paths = append(paths, d.Path)
	}
	r, err := Check(t.Context(), CheckOptions{Devices: paths})
	if err != nil || r.Bad() > 0 {
		t.Fatalf("check: %v, %+v", err, r)
	}
	return r
}

func chunksOf(r slab.Report) (n int) {
	for i := range r.Slabs {
		n += r.Slabs[i].Chunks
	}
	return n
}

// Everything else that can be wrong with what is on the devices costs chunks at most: faults 26 to
// 29.
func TestDamaged(t *testing.T) {
	t.Parallel()
	seeds(t, 8, func(t *testing.T, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 3))
		o := files(memory(t), 1, 8<<20)
		o.SlabBytes = 2 << 20
		p := mustOpen(t, o)
		mustStore(t, p, 0, 80)
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		path := o.Devices[0].Path
		good, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for round := range 2 * damages {
			what, b := damage(rnd, round, bytes.Clone(good))
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			oo := o
			if what == "cut short" {
				oo = files(filepath.Dir(path), 1, 0)
				oo.SlabBytes = o.SlabBytes
			}
			q, err := Open(oo)
			if err != nil { // its very first bytes are none of ours any more
				if errors.Is(err, ErrForeign) {
					continue
				}
				t.Fatalf("round %d, %s: %v", round, what, err)
			}
			found := 0
			for n := range 80 {
				switch err := load(t, q, n, n+1)[0]; {
				case err == nil:
					found++
				case !errors.Is(err, tiers.ErrNotFound) && !errors.Is(err, tiers.ErrCorrupt):
					t.Errorf("round %d, %s: chunk %d: %v", round, what, n, err)
				}
			}
			mustStore(t, q, 100, 105)
			if err := errors.Join(load(t, q, 100, 105)...); err != nil {
				t.Errorf("round %d, %s: stored after it: %v", round, what, err)
			}
			t.Logf("round %d, %s: %d of 80 chunks are left", round, what, found)
			if err := q.Close(); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestCheck(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := files(dir, 2, 8<<20)
	o.SlabBytes = 1 << 20
	o.Ranks = 2
	if _, err := Check(t.Context(), CheckOptions{Devices: []string{o.Devices[0].Path}}); !errors.Is(
		err, os.ErrNotExist) {
		t.Errorf("of a device that is not there: %v", err)
	}
	for rank := range 2 {
		o := o
		o.Rank = rank
		p := mustOpen(t, o)
		mustStore(t, p, rank*20, rank*20+20)
		if rank == 1 {
			rot(t, &p.devices)
		} else if _, err := Check(t.Context(),
			CheckOptions{Devices: []string{o.Devices[0].Path}}); err == nil ||
			!strings.Contains(err.Error(), "in use") {
			t.Errorf("of devices that are in use: %v", err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	paths := []string{o.Devices[0].Path, o.Devices[1].Path}
	check := func(o CheckOptions) (chunks, bad int) {
		t.Helper()
		o.Devices = paths
		r, err := Check(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range r.Slabs {
			chunks += s.Chunks
		}
		return chunks, r.Bad()
	}
	if chunks, bad := check(CheckOptions{}); chunks != 20 || bad != 20 {
		t.Errorf("%d chunks are whole, %d bad", chunks, bad)
	}
	if chunks, bad := check(CheckOptions{OffsetBytes: 4 << 20}); chunks != 0 || bad != 20 {
		t.Errorf("in the second half %d chunks are whole, %d bad", chunks, bad)
	}
	if _, bad := check(CheckOptions{Repair: true}); bad != 20 {
		t.Errorf("%d bad", bad)
	}
	if chunks, bad := check(CheckOptions{}); chunks != 20 || bad != 0 {
		t.Errorf("repaired: %d chunks are whole, %d bad", chunks, bad)
	}
}
