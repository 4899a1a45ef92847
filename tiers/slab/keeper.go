package slab

import (
	"cmp"
	"errors"
	"slices"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// keepBatch is the most chunks that a keeper takes at a time; it takes fewer large ones. Their
// entries are synced together, and Forget waits for at most one batch.
const keepBatch = 32

// batch returns how many chunks a keeper takes next.
func (a *Arena) batch() int {
	a.d.regionsMu.RLock()
	defer a.d.regionsMu.RUnlock()
	most := int64(keepBatch)
	for _, s := range a.d.byRegion {
		most = min(most, max(batchBytes/s.layout.StrideBytes, 1))
	}
	return int(most)
}

// keeper keeps committed chunks until the arena is closed.
func (a *Arena) keeper() {
	var k keepings
	for {
		full := a.keepSome(&k)
		if full {
			a.ring() // another keeper may find more
		}
		select {
		case <-a.d.stop:
			return
		default:
		}
		if full {
			continue
		}
		select {
		case <-a.bell:
		case <-a.d.stop:
			return
		}
	}
}

// keeping is one chunk that is being kept.
type keeping struct {
	item engine.CascadeItem
	sp   *tiers.Space
	s    *slab
	slot int
	gen  uint64
	sums []uint64
	err  error // why it is not kept
	lost bool  // its bytes cannot be read or made durable
}

// keepings is one keeper's batch, with its memory.
type keepings struct {
	items []engine.CascadeItem
	names []byte // backs the items' digests
	all   []keeping
	seeds []uint64
}

// keepSome keeps the next chunks that wait. full reports whether more may wait.
func (a *Arena) keepSome(k *keepings) (full bool) {
	d := a.d
	// With it, a holder of the write lock sees each chunk either waiting or with its entry written.
	d.moving.RLock()
	defer d.moving.RUnlock()
	a.keeping.Add(1)
	defer a.keeping.Add(-1)
	batch := a.batch()
	k.items, k.names = d.engine.NextCascades(a.tier, batch, k.names, k.items[:0])
	k.all = k.all[:0]
	for _, c := range k.items {
		x := keeping{item: c, sp: d.spaceByID(c.Space), s: d.slabOf(c.Region)}
		if x.s == nil || x.s.failed.Load() || x.sp == nil {
			// the slab is being given up: the chunk goes with it
			d.engine.EndCascade(c.Handle, false)
			continue
		}
		x.slot = x.s.slotAt(c.Offset)
		if x.s.isKept(x.slot) { // by a migration
			d.engine.EndCascade(c.Handle, true)
			continue
		}
		k.all = append(k.all, x)
	}
	if len(k.all) > 0 {
		// Some of these chunks may have been dropped and stored again, and their old slots may hold
		// other chunks by now. Only one of two entries may be found.
		_ = d.eachSlab((*slab).hideStale) // a slab that fails is given up
	}
	slices.SortFunc(k.all, func(x, y keeping) int {
		return cmp.Or(cmp.Compare(x.s.region, y.s.region), cmp.Compare(x.slot, y.slot))
	})
	for from := 0; from < len(k.all); {
		to := from + 1
		for to < len(k.all) && k.all[to].s == k.all[from].s {
			to++
		}
		a.keepIn(k.all[from].s, k.all[from:to], k)
		from = to
	}
	return len(k.items) == batch
}

// keepIn keeps chunks of one slab, in the order of their slots. It makes their bytes durable, then
// writes their entries, then makes the entries durable.
func (a *Arena) keepIn(s *slab, all []keeping, k *keepings) {
	d, file := a.d, s.buffed.(vfs.Resident)
	for i := range all {
		x := &all[i]
		if x.err = x.sum(file, k); x.err != nil {
			x.lost = true
			d.faulty(s, x.err)
		}
	}
	inRuns(all, func(some []keeping) error {
		last := &some[len(some)-1]
		from := s.layout.SlotOffset(some[0].slot)
		return file.Persist(from, s.layout.SlotOffset(last.slot)+
			int64(last.item.Pages)*s.layout.Geometry.PageBytes-from)
	}, func(x *keeping) {
		x.lost = true
		var bad *vfs.BadPlaceError
		if errors.As(x.err, &bad) {
			d.faulty(s, x.err)
		} else {
			d.giveUp(s, x.err)
		}
	})
	inRuns(all, func(some []keeping) error {
		entries := make([]media.Entry, len(some))
		for i := range some {
			x := &some[i]
			s.setSums(x.slot, x.gen, x.sums)
			entries[i] = media.Entry{
				Generation: x.gen, Space: x.sp.Fingerprint, First: x.item.First,
				Pages: x.item.Pages, Prev: x.item.Prev, Digests: x.item.Hashes,
				Sums: encodeSums(x.sums), Tenant: d.engine.TenantKey(x.item.Tenant),
			}
		}
		return s.writeEntries(d, uint32(some[0].slot), entries)
	}, func(x *keeping) {
		s.noteFree(uint32(x.slot)) // a part of the entry may be on the medium
		d.faulty(s, x.err)
	})
	err := s.sync()
	if err != nil {
		d.giveUp(s, err)
	}
	for i := range all {
		x := &all[i]
		if x.err == nil {
			x.err = err
		}
		switch {
		case x.lost:
			d.unread.Add(1)
			d.log.Warn("a chunk cannot be read where it was stored; dropped", zap.Error(x.err))
			// only this chunk, or a longer version of it, has this last page
			digest := s.layout.Geometry.DigestBytes
			if _, err := d.engine.Drop(x.item.Space, x.item.First+x.item.Pages-1,
				x.item.Hashes[(x.item.Pages-1)*digest:]); err != nil {
				d.log.Warn("dropping a chunk", zap.Error(err))
			}
		case x.err != nil:
			a.failed.Add(1)
			d.log.Warn("a chunk cannot be kept", zap.Error(x.err))
		default:
			s.faults.Store(0)
		}
		d.engine.EndCascade(x.item.Handle, x.err == nil) // without leases the slab may go
	}
}

// inRuns calls do for each run of neighbouring slots among the chunks without an error. If do fails
// for a run of several, it calls do for each of them alone. It calls failed for each chunk that
// fails alone.
func inRuns(all []keeping, do func(some []keeping) error, failed func(x *keeping)) {
	for from := 0; from < len(all); {
		if all[from].err != nil {
			from++
			continue
		}
		to := from + 1
		for to < len(all) && all[to].err == nil && all[to].slot == all[to-1].slot+1 &&
			(to-from+1)*all[to].s.layout.EntryBytes <= maxRun {
			to++
		}
		if err := do(all[from:to]); err != nil {
			for i := from; i < to; i++ {
				if x := &all[i]; to-from == 1 {
					x.err = err
				} else {
					x.err = do(all[i : i+1])
				}
				if all[i].err != nil {
					failed(&all[i])
				}
			}
		}
		from = to
	}
}

// sum computes the checksums of a chunk.
func (x *keeping) sum(file vfs.Resident, k *keepings) error {
	g := &x.s.layout.Geometry
	x.gen = media.Generation(x.s.header.Epoch, x.s.fills.Add(1))
	k.seeds = x.s.seeds(k.seeds[:0], x.item.Hashes, x.gen)
	x.sums = make([]uint64, x.item.Pages)
	return file.Sums(x.s.layout.SlotOffset(x.slot), g.PageBytes, k.seeds, x.sums)
}

// seeds appends the seeds of pages' checksums to out.
func (s *slab) seeds(out []uint64, digests []byte, gen uint64) []uint64 {
	for size := s.layout.Geometry.DigestBytes; len(digests) > 0; digests = digests[size:] {
		out = append(out, s.id.PageSeed(digests[:size], gen))
	}
	return out
}
