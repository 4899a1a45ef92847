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
	"lookaside/tiers/tenant"
	"lookaside/tiers/vfs"
)

// Store implements tiers.Tier. All transfers of a call share their syncs. On media that are memory,
// groups of a few transfers do.
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
		// A small first group starts copying soon; a small last group leaves little to do after the
		// last copy.
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
	// Nothing becomes visible before all have their slots. Otherwise the call's first chunks could
	// be evicted for its last.
	for _, g := range groups {
		g.wait.Wait()
		d.enter(g.sorted)
		d.syncAll(g.sorted, func(j *job) bool { return j.failure() == nil })
		for _, j := range g.jobs {
			done(j.i, d.endStore(j))
		}
	}
}

// storing is a group of a call's stores that share their syncs.
type storing struct {
	most   int            // limit of the group, if the medium is memory
	jobs   []*job         // in the order of the call
	sorted []*job         // by slab and slot
	wait   sync.WaitGroup // for the submitted jobs
}

// memoryGroup is the largest group on a medium that is memory, where syncs are cheap. While one
// group is copied, the next is prepared. Preparing all transfers before the first copy made stores
// 2 % slower. On other media a call is one group.
const memoryGroup = 8

func (g *storing) full() bool {
	if len(g.jobs) < g.most {
		return false
	}
	_, memory := g.jobs[0].s.buffed.(vfs.Summing)
	return memory
}

// prepareStore gets a slot for a chunk. It returns nil without an error if the chunk is held
// already, nil with an error if there is no room.
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
	// Other calls may take slots between makeRoom and the grant. Counting them keeps this one from
	// evicting while a blank place has room.
	d.makeRoom(sp.g, more+int(d.granting.Add(1))-1)
	defer d.granting.Add(-1)
	prev := t.Prev
	if t.First == 0 {
		prev = nil
	} else if len(prev) == 0 {
		prev = make([]byte, sp.g.DigestBytes) // the hash of no page
	}
	var room [1]engine.Grant
	o := sp.owner()
	res, grants, err := d.engine.PrepareStoring(o, t.First, prev, t.Hashes,
		engine.Storing{Tenant: t.Tenant}, room[:0])
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
		// not reached: a region being filled stays, and nothing is extended
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

// bySlab returns the jobs sorted by slab and slot.
func bySlab(jobs []*job) []*job {
	sorted := slices.Clone(jobs)
	slices.SortFunc(sorted, func(a, b *job) int {
		return cmp.Or(cmp.Compare(a.s.region, b.s.region),
			a.slot-b.slot)
	})
	return sorted
}

// slabs yields each slab of sorted jobs with its jobs.
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

// sound returns the jobs that have not failed, and their slots.
func sound(jobs []*job) (left []*job, slots []uint32) {
	left = slices.DeleteFunc(slices.Clone(jobs), func(j *job) bool { return j.failure() != nil })
	slots = make([]uint32, len(left))
	for i, j := range left {
		slots[i] = uint32(j.slot)
	}
	return left, slots
}

// freeOld durably frees the old entries of sorted jobs' slots, because their data is about to be
// overwritten.
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

// syncAll syncs the slabs of those sorted jobs for which wants returns true. A slab whose sync
// fails is given up, and its jobs fail.
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

// enter writes the entries of those sorted jobs whose data is written.
func (d *Disk) enter(sorted []*job) {
	for s, jobs := range slabs(sorted) {
		jobs, slots := sound(jobs)
		s.runs(slots, func(from, to int) {
			entries := make([]media.Entry, to-from)
			for i, j := range jobs[from:to] {
				entries[i] = j.entry(d.engine.TenantKey(j.t.Tenant))
			}
			if err := s.writeEntries(d, slots[from], entries); err != nil {
				for _, j := range jobs[from:to] {
					j.fail(err)
				}
			}
		})
	}
}

// encodeSums returns checksums in the form of an entry.
func encodeSums(sums []uint64) []byte {
	b := make([]byte, 0, 8*len(sums))
	for _, sum := range sums {
		b = binary.LittleEndian.AppendUint64(b, sum)
	}
	return b
}

// entry returns the directory entry of a job's chunk.
func (j *job) entry(tenant tenant.Key) media.Entry {
	e := media.Entry{Generation: j.gen, Space: j.sp.print, First: j.t.First, Pages: j.t.Pages(),
		Digests: j.t.Hashes, Tenant: tenant}
	if j.t.First > 0 {
		e.Prev = j.t.Prev
	}
	e.Sums = encodeSums(j.sums[:e.Pages])
	return e
}

// endStore makes a job's chunk visible, or frees its slot if the job failed.
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
	// The entry may have been written. Mark it as stale while the slot is still ours.
	j.s.noteFree(uint32(j.slot))
	return errors.Join(err, d.engine.AbortStore(j.sp.owner(), j.lease))
}
