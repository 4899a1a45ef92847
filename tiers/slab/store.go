package slab

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"slices"
	"sync"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// Store implements tiers.Tier. The transfers of a call share their syncs: all of them, or of media
// that are memory a few at a time.
func (d *Disk) Store(ctx context.Context, transfers []tiers.Transfer, done func(i int, err error)) {
	if err := d.begin(ctx); err != nil {
		for i := range transfers {
			done(i, err)
		}
		return
	}
	defer d.end()
	var groups []*storing
	for i := 0; i < len(transfers); {
		// The first few begin soon, and what is to be done after the last copy is little.
		g := &storing{most: min(memoryGroup, len(groups)+1, (len(transfers)-i+1)/2)}
		for ; i < len(transfers) && !g.full(); i++ {
			j, err := d.prepareStore(ctx, i, &transfers[i], len(transfers)-i)
			if j == nil {
				done(i, err)
				continue
			}
			g.jobs = append(g.jobs, j)
		}
		g.sorted = bySlab(g.jobs)
		d.freeOld(g.sorted)
		for _, j := range g.jobs {
			if j.failure() != nil {
				continue
			}
			g.wait.Add(1)
			j.done = func(*job) { g.wait.Done() }
			d.submit(j)
		}
		groups = append(groups, g)
	}
	// Nothing becomes visible before all have their slots: what comes first must not make room for
	// what comes last.
	for _, g := range groups {
		g.wait.Wait()
		d.enter(g.sorted)
		d.syncAll(g.sorted, func(j *job) bool { return j.failure() == nil })
		for _, j := range g.jobs {
			done(j.i, d.endStore(j))
		}
	}
}

// storing is some of a call's stores, which share their syncs.
type storing struct {
	most   int            // if the medium is memory
	jobs   []*job         // in the order of the call
	sorted []*job         // in that of their slabs and slots
	wait   sync.WaitGroup // for those that were submitted
}

// memoryGroup is how many chunks go together at most to a medium that is memory, where syncs are
// cheap: while they are copied the next are prepared. Any other takes all of a call together.
const memoryGroup = 8

func (g *storing) full() bool {
	if len(g.jobs) < g.most {
		return false
	}
	_, memory := g.jobs[0].s.buffed.(vfs.Summing)
	return memory
}

// prepareStore has a slot granted for a chunk. It answers nil if there is nothing to do: the chunk
// is held (no error), or there is no room.
func (d *Disk) prepareStore(ctx context.Context, i int, t *tiers.Transfer, more int) (*job, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err := checkTransfer(t); err != nil {
		return nil, err
	}
	sp, err := d.space(t.Space.Fingerprint, t.Space.Geometry, true)
	if err != nil {
		return nil, err
	}
	j, err := d.grant(ctx, sp, i, t, more)
	if j == nil {
		d.letGo(sp)
	}
	return j, err
}

func (d *Disk) grant(ctx context.Context, sp *space, i int, t *tiers.Transfer,
	more int) (*job, error) {
	// Whoever else is here may take a slot between our looking for room and our being granted one:
	// nothing is evicted while a blank place has room.
	d.makeRoom(sp.g, more+int(d.granting.Add(1))-1)
	defer d.granting.Add(-1)
	prev := t.Prev
	if t.First == 0 {
		prev = nil
	} else if len(prev) == 0 {
		prev = make([]byte, sp.g.DigestBytes) // of no page
	}
	var room [1]engine.Grant
	o := sp.owner()
	res, grants, err := d.engine.PrepareStore(o, t.First, prev, t.Hashes, room[:0])
	if err != nil {
		return nil, err
	}
	if res.Store == 0 {
		if res.Shed == 0 {
			return nil, nil
		}
		return nil, d.noRoom()
	}
	s := d.slabOf(grants[0].Region)
	if s == nil || len(grants) != 1 || int(grants[0].Pages) != t.Pages() {
		// cannot be: a region being filled stays, and nothing is extended
		return nil, errors.Join(tiers.ErrBusy, d.engine.AbortStore(o, res.Store))
	}
	if s.failed.Load() {
		return nil, errors.Join(d.noRoom(), d.engine.AbortStore(o, res.Store))
	}
	d.touch(s)
	slot := s.slotAt(grants[0].Offset)
	gen := media.Generation(s.header.Epoch, s.fills.Add(1))
	s.gens.Slice()[slot] = gen
	return &job{ctx: ctx, i: i, t: t, s: s, sp: sp, slot: slot, gen: gen, sums: s.pageSums(slot),
		store: true, lease: res.Store}, nil
}

// bySlab is the jobs in the order of their slabs and slots.
func bySlab(jobs []*job) []*job {
	sorted := slices.Clone(jobs)
	slices.SortFunc(sorted, func(a, b *job) int {
		return cmp.Or(cmp.Compare(a.s.region, b.s.region),
			a.slot-b.slot)
	})
	return sorted
}

// slabs is the jobs of each slab, of those that are in order.
func slabs(sorted []*job) iter.Seq2[*slab, []*job] {
	return func(yield func(*slab, []*job) bool) {
		for len(sorted) > 0 {
			s, n := sorted[0].s, 1
			for n < len(sorted) && sorted[n].s == s {
				n++
			}
			if !yield(s, sorted[:n]) {
				return
			}
			sorted = sorted[n:]
		}
	}
}

// sound is those jobs that have not failed, and their slots.
func sound(jobs []*job) (left []*job, slots []uint32) {
	left = slices.DeleteFunc(slices.Clone(jobs), func(j *job) bool { return j.failure() != nil })
	slots = make([]uint32, len(left))
	for i, j := range left {
		slots[i] = uint32(j.slot)
	}
	return left, slots
}

// freeOld frees the entries of what the slots of jobs, which are in order, held before, durably:
// their data is about to be overwritten.
func (d *Disk) freeOld(sorted []*job) {
	for s, jobs := range slabs(sorted) {
		jobs, slots := sound(jobs)
		s.freeSlots(slots, func(slot uint32, err error) {
			i, _ := slices.BinarySearch(slots, slot)
			if err != nil {
				jobs[i].fail(err)
				d.faulty(s, err)
			} else {
				jobs[i].freed = true
			}
		})
	}
	d.syncAll(sorted, func(j *job) bool { return j.freed && j.failure() == nil })
}

// syncAll syncs the slabs of the jobs, which are in order, that want it. A slab that fails at it is
// given up, and all its jobs fail.
func (d *Disk) syncAll(sorted []*job, wants func(*job) bool) {
	for s, jobs := range slabs(sorted) {
		if !slices.ContainsFunc(jobs, wants) {
			continue
		}
		if err := s.sync(); err != nil {
			d.giveUp(s, err)
			for _, j := range jobs {
				j.fail(err)
			}
		}
	}
}

// enter writes the entries of the jobs, which are in order, whose data is written.
func (d *Disk) enter(sorted []*job) {
	for s, jobs := range slabs(sorted) {
		jobs, slots := sound(jobs)
		s.runs(slots, func(from, to int) {
			entries := make([]media.Entry, to-from)
			for i, j := range jobs[from:to] {
				entries[i] = j.entry()
			}
			if err := s.writeEntries(d, slots[from], entries); err != nil {
				for _, j := range jobs[from:to] {
					j.fail(err)
				}
			}
		})
	}
}

// encodeSums is checksums as an entry has them.
func encodeSums(sums []uint64) []byte {
	b := make([]byte, 0, 8*len(sums))
	for _, sum := range sums {
		b = binary.LittleEndian.AppendUint64(b, sum)
	}
	return b
}

// entry is what the directory is to say of a job's chunk.
func (j *job) entry() media.Entry {
	e := media.Entry{Generation: j.gen, Space: j.sp.print, First: j.t.First, Pages: j.t.Pages(),
		Digests: j.t.Hashes}
	if j.t.First > 0 {
		e.Prev = j.t.Prev
	}
	e.Sums = encodeSums(j.sums[:e.Pages])
	return e
}

// endStore makes a job's chunk visible, or gives its slot back.
func (d *Disk) endStore(j *job) error {
	err := j.failure()
	defer d.letGo(j.sp)
	if err == nil {
		j.s.faults.Store(0)
		if !j.direct {
			_ = j.s.buffed.Advise(j.s.layout.SlotOffset(j.slot), int64(len(j.t.Bytes)),
				vfs.DontNeed)
		}
		return d.engine.CommitStore(j.sp.owner(), j.lease, nil)
	}
	if !callersFault(err) && j.ctx.Err() == nil {
		d.faulty(j.s, err)
	}
	// Its entry may have been written. The slot is still ours, so nobody else frees it, and it is
	// stale from now on.
	j.s.noteFree(uint32(j.slot))
	return errors.Join(err, d.engine.AbortStore(j.sp.owner(), j.lease))
}
