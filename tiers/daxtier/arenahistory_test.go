package daxtier

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// arenaWorld is an arena under a random history, and what a model knows of it.
type arenaWorld struct {
	*rig
	t      *testing.T
	rnd    *rand.Rand
	o      ArenaOptions
	size   int64 // of a device
	paths  []string
	spaces []*tiers.Space
	// held has the digests of the pages that may be found, by space: those that were committed and
	// not cleared since.
	held []map[string]bool
	// stored are the prefixes that must be found if nothing was forgotten.
	stored []map[string]tiertest.Prefix
	exact  bool
	finds  int // pages found after the arena was opened anew
}

func (w *arenaWorld) prefix() tiertest.Prefix {
	p := make(tiertest.Prefix, 1+w.rnd.IntN(14))
	same := w.rnd.IntN(len(p) + 1)
	for i := range p {
		if i >= same {
			p[i] = byte(w.rnd.IntN(4))
		}
	}
	return p
}

func (w *arenaWorld) storeOne() {
	i, p := w.rnd.IntN(len(w.spaces)), w.prefix()
	space := w.spaces[i]
	g := space.Geometry
	n := w.store(space, p, len(p))
	if n < len(p) {
		w.exact = false
	}
	for k := range n {
		w.held[i][string(p.Digests(k, k+1, g.DigestBytes))] = true
	}
	w.stored[i][string(p[:n])] = p[:n]
}

// abandon begins a store that does not come to its end.
func (w *arenaWorld) abandon() {
	i, p := w.rnd.IntN(len(w.spaces)), w.prefix()
	g := w.spaces[i].Geometry
	_, o := w.session(w.spaces[i])
	res, grants, err := w.e.PrepareStore(o, 0, nil, p.Digests(0, len(p), g.DigestBytes), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, x := range grants {
		clear(w.at(x.Region, x.Offset, int64(x.Pages)*g.PageBytes))
	}
	if res.Store != 0 {
		if err := w.e.AbortStore(o, res.Store); err != nil {
			w.t.Fatal(err)
		}
	}
}

// check looks a prefix up, and returns how many pages of it are there.
func (w *arenaWorld) check(r *rig, i int, p tiertest.Prefix) int {
	w.t.Helper()
	n := r.find(w.spaces[i], p)
	for k := range n {
		if !w.held[i][string(p.Digests(k, k+1, w.spaces[i].Geometry.DigestBytes))] {
			w.t.Fatalf("page %d of %v in space %d is found, and was never stored, or cleared", k, p,
				i)
		}
	}
	return n
}

// checkAll looks all up that was stored; it must be there if nothing was forgotten.
func (w *arenaWorld) checkAll(r *rig, all bool, what string) {
	w.t.Helper()
	exact := all && w.exact && r.e.Stats().Evictions == 0
	for i := range w.spaces {
		for _, p := range w.stored[i] {
			n := w.check(r, i, p)
			w.finds += n
			if exact && n < len(p) {
				w.t.Fatalf("%s: %d pages of %v in space %d are there; %+v", what, n, p, i,
					r.a.Stats())
			}
		}
	}
}

// clear clears a space, some of which may just be on its way to where it is kept, or leased.
func (w *arenaWorld) clear() {
	i := w.rnd.IntN(len(w.spaces))
	space := w.spaces[i]
	id, o := w.session(space)
	size := space.Geometry.DigestBytes
	switch w.rnd.IntN(3) {
	case 0:
		for range 1 + w.rnd.IntN(8) {
			w.store(space, prefixOf(w.rnd.Int()|1<<8, 14), 14)
		}
	case 1:
		for _, p := range w.stored[i] {
			w.verify(o, p.Digests(0, len(p), size))
			if _, err := w.e.Lookup(o, uint64(len(p))<<32, 0,
				p.Digests(0, len(p), size)); err != nil {
				w.t.Fatal(err)
			}
		}
	}
	var some []tiertest.Prefix
	for _, p := range w.stored[i] {
		some = append(some, p)
	}
	w.e.ClearSpace(id)
	if err := w.a.Forget(); err != nil {
		w.t.Fatal(err)
	}
	clear(w.held[i])
	clear(w.stored[i])
	if w.rnd.IntN(2) == 0 {
		w.crashed(func(r *rig) {
			for _, st := range r.e.Spaces() {
				if st.Fingerprint == space.Fingerprint && st.Chunks > 0 {
					w.t.Fatalf("%d chunks of space %d are there, which was cleared", st.Chunks, i)
				}
			}
			for _, p := range some {
				w.check(r, i, p)
			}
		})
	}
	for n := range uint64(20) {
		_ = w.e.Cancel(o, n<<32)
	}
}

func (w *arenaWorld) drop() {
	i, p := w.rnd.IntN(len(w.spaces)), w.prefix()
	size := w.spaces[i].Geometry.DigestBytes
	id, _ := w.session(w.spaces[i])
	from := w.rnd.IntN(len(p))
	if _, err := w.e.Drop(id, from, p.Digests(from, len(p), size)); err != nil {
		w.t.Fatal(err)
	}
	if err := w.a.Forget(); err != nil {
		w.t.Fatal(err)
	}
	for k := from; k < len(p); k++ {
		delete(w.held[i], string(p.Digests(k, k+1, size)))
	}
	for name, q := range w.stored[i] {
		for k := from; k < min(len(p), len(q)); k++ {
			if string(q.Digests(k, k+1, size)) == string(p.Digests(k, k+1, size)) {
				// What holds a page of a chunk holds those before it: they are gone too.
				delete(w.stored[i], name)
				ppc := w.spaces[i].Geometry.PagesPerChunk
				if short := q[:k/ppc*ppc]; len(short) > 0 {
					w.stored[i][string(short)] = short
				}
				break
			}
		}
	}
	w.exact = false // chunks that shared the dropped ones' first pages are not followed
}

// plug has a device come, go, or change its size.
func (w *arenaWorld) plug() {
	path := w.paths[w.rnd.IntN(len(w.paths))]
	modes := []Mode{Migrate, Migrate, Evict, Drain}
	mode := modes[w.rnd.IntN(len(modes))]
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if w.rnd.IntN(6) == 0 {
		cancel()
	}
	var err error
	switch w.rnd.IntN(3) {
	case 0:
		err = w.a.Add(ctx, path, []int64{w.size, 0}[w.rnd.IntN(2)])
	case 1:
		err = w.a.Remove(ctx, path, mode, w.rnd.IntN(2) == 0)
		w.exact = w.exact && mode != Evict
	case 2:
		if mode == Drain {
			mode = Migrate
		}
		err = w.a.Resize(ctx, path, []int64{w.size / 2, w.size, 2 * w.size}[w.rnd.IntN(3)], mode,
			w.rnd.IntN(2) == 0)
		w.exact = w.exact && mode != Evict
	}
	if err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrExists) &&
		!errors.Is(err, ErrLeased) && !errors.Is(err, ErrNoRoom) &&
		!errors.Is(err, context.Canceled) &&
		!errors.Is(err, tiers.ErrBusy) && !errors.Is(err, tiers.ErrInvalid) &&
		!errors.Is(err, ErrDevice) {
		w.t.Fatal(err)
	}
}

// devicesNow are the options for the devices that are there now.
func (w *arenaWorld) devicesNow(dir string) ArenaOptions {
	o := w.o
	o.Devices = nil
	for _, d := range w.a.Status().Devices {
		path := d.Path
		if dir != "" {
			path = filepath.Join(dir, filepath.Base(d.Path))
		}
		o.Devices = append(o.Devices, DeviceSpec{Path: path, SizeBytes: d.SizeBytes})
	}
	return o
}

// crash opens a copy of the devices as they are at a moment.
func (w *arenaWorld) crash() {
	kept := w.rnd.IntN(2) == 0
	if kept {
		w.flush()
	}
	evicted := w.e.Stats().Evictions
	w.crashed(func(r *rig) { w.checkAll(r, kept && evicted == 0, "crashed") })
}

// crashed calls f with an arena on a copy of the devices.
func (w *arenaWorld) crashed(f func(*rig)) {
	dir, err := os.MkdirTemp(filepath.Dir(w.paths[0]), "copy")
	noError(w.t, err)
	defer os.RemoveAll(dir)
	o := w.devicesNow(dir)
	for _, d := range o.Devices {
		copyFile(w.t, filepath.Join(filepath.Dir(w.paths[0]), filepath.Base(d.Path)), d.Path)
	}
	r, err := tryRig(w.t, o)
	if err != nil {
		w.t.Fatal(err)
	}
	defer r.close()
	f(r)
}

// reopen closes the arena and opens it again.
func (w *arenaWorld) reopen() {
	kept := w.rnd.IntN(2) == 0
	if kept {
		w.flush()
	}
	w.exact = w.exact && kept && w.e.Stats().Evictions == 0
	o := w.devicesNow("")
	w.rig.close()
	if kept && len(o.Devices) > 0 {
		checkClean(w.t, o.Options)
	}
	var err error
	if w.rig, err = tryRig(w.t, o); err != nil {
		w.t.Fatal(err)
	}
}

func copyFile(t testing.TB, from, to string) {
	t.Helper()
	in, err := os.Open(from)
	noError(t, err)
	defer in.Close()
	out, err := os.Create(to)
	noError(t, err)
	defer out.Close()
	_, err = io.Copy(out, in)
	noError(t, err)
}

// TestArenaHistories: whatever happens, what is found is what was committed and not cleared, and
// what was kept stays as long as there is room for it.
func TestArenaHistories(t *testing.T) {
	t.Parallel()
	finds := make(chan int, 100)
	t.Run("seeds", func(t *testing.T) {
		seeds(t, 10, func(t *testing.T, seed uint64) {
			rnd := rand.New(rand.NewPCG(seed, 21))
			w := &arenaWorld{t: t, rnd: rnd, size: []int64{1 << 20, 3 << 20, 12 << 20}[rnd.IntN(3)],
				exact: true}
			w.o = arenaOptions(files(memory(t), 1+rnd.IntN(3), w.size))
			w.o.SlabBytes, w.o.HotPlug, w.o.StoreWorkers = []int64{256 << 10, 512 << 10,
				1 << 20}[rnd.IntN(3)], true, 1+rnd.IntN(3)
			w.o.Books.MaxSpaces = 4
			for _, d := range w.o.Devices {
				w.paths = append(w.paths, d.Path)
			}
			w.paths = append(w.paths, filepath.Join(filepath.Dir(w.paths[0]), "more"))
			geometries := []tiers.Geometry{{PageBytes: 4 << 10, PagesPerChunk: 4, PageTokens: 16,
				DigestBytes: 32}, {PageBytes: 5000, PagesPerChunk: 3, PageTokens: 8,
				DigestBytes: 16}}
			for i := range 1 + rnd.IntN(2) {
				w.spaces = append(w.spaces, tiertest.NewSpace("history", geometries[i]),
					tiertest.NewSpace("other", geometries[i]))
			}
			for range w.spaces {
				w.held, w.stored = append(w.held, map[string]bool{}),
					append(w.stored, map[string]tiertest.Prefix{})
			}
			var err error
			if w.rig, err = tryRig(t, w.o); err != nil {
				t.Fatal(err)
			}
			defer func() { w.rig.close() }()
			for range 250 {
				switch k := rnd.IntN(100); {
				case k < 50:
					w.storeOne()
				case k < 76:
					i := rnd.IntN(len(w.spaces))
					w.check(w.rig, i, w.prefix())
				case k < 80:
					w.abandon()
				case k < 82:
					w.clear()
				case k < 85:
					w.drop()
				case k < 92:
					w.plug()
				case k < 95:
					w.flush()
					if err := w.e.Check(); err != nil {
						t.Fatal(err)
					}
				case k < 98:
					w.crash()
				default:
					w.reopen()
				}
				if t.Failed() {
					t.FailNow()
				}
			}
			w.flush()
			if st := w.a.Stats(); st.Failed > 0 || st.Unreadable > 0 || st.GivenUp > 0 {
				t.Errorf("%+v", st)
			}
			finds <- w.finds
		})
	})
	close(finds)
	total := 0
	for n := range finds {
		total += n
	}
	if total == 0 && !t.Failed() {
		t.Error("nothing was ever found after the arena was opened again: nothing was tested")
	}
}

// arenaChildEnv makes the test binary the process that TestArenaKilled kills.
const arenaChildEnv = "LOOKASIDE_ARENA_TEST_CHILD"

// arenaKillCapacity is room for all chunks several times over on each device: nothing is ever
// evicted.
const arenaKillCapacity = 2 * killCapacity

func arenaKillOptions(dir string) Options {
	o := files(dir, 3, arenaKillCapacity)
	o.SlabBytes = 1 << 20
	return o
}

// complaining is a testing.TB of a process that is no test.
type complaining struct{ testing.TB }

func (complaining) Helper()           {}
func (complaining) Error(args ...any) { fmt.Println("!", fmt.Sprint(args...)) }
func (complaining) Errorf(format string, args ...any) {
	fmt.Println("!",
		fmt.Sprintf(format, args...))
}
func (complaining) Fatal(args ...any) {
	fmt.Println("!", fmt.Sprint(args...))
	os.Exit(1)
}
func (complaining) Fatalf(format string, args ...any) {
	complaining{}.Fatal(fmt.Sprintf(format, args...))
}

// arenaChild stores and drops chunks, and has devices come and go, until it is killed. It prints
// what it is about to do and what is done: "?n" chunk n may be there or not from now on, "+n" it is
// kept, "-n" it is dropped for good.
func arenaChild(spec string) {
	dir, text, _ := strings.Cut(spec, "#")
	seed, _ := strconv.ParseUint(text, 10, 64)
	r, err := tryRig(complaining{}, arenaOptions(arenaKillOptions(dir)))
	if err != nil {
		fmt.Println("!", err)
		os.Exit(1)
	}
	fmt.Println("open")
	space := testSpace()
	id, _ := r.session(space)
	for w := range 2 {
		go func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(w)))
			for {
				// each worker has chunks of its own, so that its lines are in order
				n := w + 2*rnd.IntN(killChunks/2)
				p := prefixOf(n, testPages)
				fmt.Printf("?%d\n", n)
				if rnd.IntN(3) == 0 {
					if _, err := r.e.Drop(id, 0, p.Digests(0, testPages, 32)); err != nil {
						fmt.Println("!", err)
					}
					if rnd.IntN(2) == 0 { // its place may be another's before its entry is freed
						continue
					}
					if err := r.a.Forget(); err != nil {
						fmt.Println("!", err)
					}
					fmt.Printf("-%d\n", n)
					continue
				}
				if held := r.store(space, p, testPages); held != testPages {
					fmt.Printf("! %d pages of chunk %d are held\n", held, n)
				}
				if rnd.IntN(3) > 0 {
					r.flush()
					fmt.Printf("+%d\n", n)
					if st := r.e.Stats(); st.Evictions > 0 {
						fmt.Printf("! %d chunks are evicted\n", st.Evictions)
					}
				}
				if rnd.IntN(4) == 0 {
					r.find(space, prefixOf(rnd.IntN(killChunks), testPages))
				}
			}
		}()
	}
	rnd := rand.New(rand.NewPCG(seed, 2))
	for {
		path, ctx := arenaKillOptions(dir).Devices[rnd.IntN(3)].Path, context.Background()
		var err error
		if rnd.IntN(2) == 0 {
			err = errors.Join(r.a.Resize(ctx, path, arenaKillCapacity/2, Migrate, true),
				r.a.Resize(ctx, path, arenaKillCapacity, Migrate, true))
		} else if err = r.a.Remove(ctx, path, Migrate, true); err == nil {
			err = r.a.Add(ctx, path, arenaKillCapacity)
		}
		if err != nil {
			fmt.Println("!", err)
		}
	}
}

// TestArenaKilled kills a process at a random moment, again and again. Opened again, the devices
// have every chunk that it printed as kept, right in every byte, and none that it printed as
// dropped.
func TestArenaKilled(t *testing.T) {
	t.Parallel()
	seeds(t, 4, func(t *testing.T, seed uint64) {
		rnd := rand.New(rand.NewPCG(seed, 9))
		dir := memory(t)
		space := testSpace()
		state := map[int]byte{}
		kept := 0
		for round := range 4 {
			killed(t, rnd, fmt.Sprintf("%s=%s#%d", arenaChildEnv, dir, seed<<8|uint64(round)), 120,
				func(line string, kill func()) {
					if line == "open" {
						if round > 0 { // else there must be something to lose
							kill()
						}
					} else if n, err := strconv.Atoi(line[1:]); err == nil {
						// else it was cut off by the kill
						if state[n] = line[0]; line[0] == '+' {
							kill()
						}
					}
				})
			o := arenaOptions(arenaKillOptions(dir))
			r, err := tryRig(t, o)
			if err != nil {
				t.Fatal(err)
			}
			for n := range killChunks {
				switch found := r.find(space, prefixOf(n, testPages)); {
				case found == testPages && state[n] == '-':
					t.Errorf("round %d: chunk %d was dropped for good before the process was killed, and is found", round, n)
				case found != testPages && state[n] == '+':
					t.Errorf("round %d: chunk %d was kept before the process was killed, and %d pages of it are found; %+v", round, n, found, r.a.Stats())
				case found == testPages:
					kept++
					state[n] = '+'
				default:
					state[n] = '-'
				}
			}
			if st := r.e.Stats(); st.Evictions > 0 {
				t.Errorf("round %d: %+v", round, st)
			}
			r.close()
			checkClean(t, o.Options)
		}
		if kept == 0 {
			t.Error("nothing was ever kept: nothing was tested")
		}
	})
}
