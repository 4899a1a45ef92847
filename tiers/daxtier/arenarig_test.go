package daxtier

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// rig is an arena and what uses it: a session for each space, and a worker's mappings of the
// regions.
type rig struct {
	t testing.TB
	a *Arena
	e *engine.Engine

	mu      sync.Mutex
	regions map[uint32]Region
	worker  map[uint32][]byte // the same bytes as a worker has them mapped
	owners  map[engine.SpaceID]bool
	lookups uint64
}

// arenaOptions are those of an arena in so many files, with slabs that are carved one by one.
func arenaOptions(o Options) ArenaOptions {
	return ArenaOptions{Options: o, Books: engine.Config{OwnerShare: 1, PromotingShare: 1}}
}

// openRig opens an arena. It is closed, and its books checked, at the end of the test.
func openRig(t testing.TB, o ArenaOptions) *rig {
	t.Helper()
	r, err := tryRig(t, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func tryRig(t testing.TB, o ArenaOptions) (*rig, error) {
	r := &rig{t: t, regions: map[uint32]Region{}, worker: map[uint32][]byte{},
		owners: map[engine.SpaceID]bool{}}
	o.Added, o.Removed = r.added, r.removed
	a, err := OpenArena(o)
	if err != nil {
		for id := range r.worker {
			_ = unix.Munmap(r.worker[id])
		}
		return nil, err
	}
	r.a, r.e = a, a.Engine()
	return r, nil
}

// close closes the arena once.
func (r *rig) close() {
	r.t.Helper()
	if err := r.e.Check(); err != nil && !errors.Is(err, tiers.ErrClosed) {
		r.t.Error(err)
	}
	if err := r.a.Close(); err != nil {
		r.t.Errorf("Close: %v", err)
	}
	for id, mem := range r.worker {
		if err := unix.Munmap(mem); err != nil {
			r.t.Error(err)
		}
		delete(r.worker, id)
	}
}

func (r *rig) added(x Region) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.regions[x.ID]; there {
		r.t.Errorf("region %d is added twice", x.ID)
	}
	if x.OffsetBytes%x.PageSize != 0 || x.SizeBytes%x.PageSize != 0 ||
		int64(len(x.Bytes)) != x.SizeBytes {
		r.t.Errorf("%+v", x)
	}
	var err error
	if r.worker[x.ID], err = unix.Mmap(x.FD, x.OffsetBytes, int(x.SizeBytes),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return err
	}
	r.regions[x.ID] = x
	return nil
}

func (r *rig) removed(id uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, there := r.regions[id]; !there {
		r.t.Errorf("region %d is removed, and is not there", id)
		return
	}
	if _, there := r.e.Region(id); there {
		r.t.Errorf("region %d is removed, and the engine has it", id)
	}
	if err := unix.Munmap(r.worker[id]); err != nil {
		r.t.Error(err)
	}
	delete(r.worker, id)
	delete(r.regions, id)
}

// at is the memory of n bytes of a region, as a worker has it.
func (r *rig) at(region uint32, offset uint64, n int64) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	mem := r.worker[region]
	if mem == nil || int64(offset)+n > int64(len(mem)) {
		r.t.Errorf("bytes %d to %d of region %d, which has %d", offset, int64(offset)+n, region,
			len(mem))
		return make([]byte, n)
	}
	return mem[offset : int64(offset)+n]
}

// session opens a space and its owner, once.
func (r *rig) session(space *tiers.Space) (engine.SpaceID, engine.Owner) {
	id, err := r.e.OpenSpace(space.Fingerprint, space.Geometry)
	if err != nil {
		r.t.Fatal(err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.owners[id] {
		if err := r.e.AddOwner(engine.Owner(id), id); err != nil {
			r.t.Fatal(err)
		}
		r.owners[id] = true
	}
	return id, engine.Owner(id)
}

// store stores pages [0, pages) of a prefix as a session does, and returns how many are held then.
func (r *rig) store(space *tiers.Space, p tiertest.Prefix, pages int) (held int) {
	_, o := r.session(space)
	g := space.Geometry
	r.a.MakeRoom(g, (pages+g.PagesPerChunk-1)/g.PagesPerChunk)
	res, grants, err := r.e.PrepareStore(o, 0, nil, p.Digests(0, pages, g.DigestBytes), nil)
	if err != nil {
		r.t.Error(err)
		return 0
	}
	for _, x := range grants {
		from, to := int(x.Page), int(x.Page+x.Pages)
		tiertest.FillRun(r.at(x.Region, x.Offset, int64(x.Pages)*g.PageBytes),
			p.Run(space, from, to))
	}
	if res.Store != 0 {
		if err := r.e.CommitStore(o, res.Store, nil); err != nil {
			r.t.Error(err)
			return 0
		}
	}
	return pages - res.Shed
}

// verify has checked what a lookup needs.
func (r *rig) verify(o engine.Owner, hashes []byte) {
	for {
		v, _, err := r.e.NextVerify(o, 0, hashes, nil, nil)
		if err != nil {
			r.t.Error(err)
		}
		if len(v) == 0 || err != nil {
			return
		}
		r.a.Verify(context.Background(), v)
	}
}

// find returns how many of a prefix's pages are found, all of which must be right.
func (r *rig) find(space *tiers.Space, p tiertest.Prefix) (pages int) {
	_, o := r.session(space)
	g := space.Geometry
	hashes := p.Digests(0, len(p), g.DigestBytes)
	r.verify(o, hashes)
	r.mu.Lock()
	r.lookups++
	lookup := r.lookups
	r.mu.Unlock()
	n, err := r.e.Lookup(o, lookup, 0, hashes)
	if err != nil {
		r.t.Error(err)
	}
	if n == 0 || err != nil {
		return 0
	}
	load, extents, err := r.e.PrepareLoad(o, o, lookup, 0, n, nil)
	if err != nil {
		if !errors.Is(err, tiers.ErrStale) && !errors.Is(err, tiers.ErrNotFound) {
			// dropped meanwhile
			r.t.Error(err)
		}
		_ = r.e.Cancel(o, lookup)
		return 0
	}
	for _, x := range extents {
		run := p.Run(space, int(x.Page), int(x.Page+x.Pages))
		if wrong := tiertest.WrongPage(r.at(x.Region, x.Offset, int64(x.Pages)*g.PageBytes),
			run); wrong >= 0 {
			r.t.Errorf("FALSE HIT: page %d of %v is wrong", run.First+wrong, p)
		}
	}
	if err := r.e.Release(o, load, nil); err != nil {
		r.t.Error(err)
	}
	return n
}

// flush waits until all is kept.
func (r *rig) flush() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.a.Flush(ctx); err != nil {
		r.t.Fatal(err)
	}
}

// prefixOf is the n-th of prefixes that have no page in common.
func prefixOf(n, pages int) tiertest.Prefix {
	p := make(tiertest.Prefix, pages)
	copy(p, []byte{byte(n), byte(n >> 8), byte(n >> 16)})
	return p
}

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}
