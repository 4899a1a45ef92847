package slab

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// checkTransfer returns an error unless a transfer is one chunk with the memory that it needs. All
// that the tier does with a transfer relies on that.
func checkTransfer(t *tiers.Transfer) error {
	g := &t.Space.Geometry
	n := t.Pages()
	if n < 1 || n > g.PagesPerChunk || t.First < 0 || t.First%g.PagesPerChunk != 0 ||
		len(t.Hashes) != n*g.DigestBytes || int64(len(t.Bytes)) != int64(n)*g.PageBytes ||
		len(t.Prev) != 0 && len(t.Prev) != g.DigestBytes {
		return fmt.Errorf("%w: a transfer of %d pages from page %d with %d bytes", tiers.ErrInvalid,
			n, t.First, len(t.Bytes))
	}
	return nil
}

// Load implements tiers.Tier.
func (d *Disk) Load(ctx context.Context, transfers []tiers.Transfer, done func(i int, err error)) {
	if err := d.begin(ctx); err != nil {
		for i := range transfers {
			done(i, err)
		}
		return
	}
	defer d.end()
	var wait sync.WaitGroup
	near := neighbours{d: d}
	for i := range transfers {
		j, err := d.prepareLoad(ctx, i, &transfers[i])
		if err != nil {
			done(i, err)
			continue
		}
		wait.Add(1)
		j.done = func(j *job) {
			done(j.i, d.endLoad(j))
			wait.Done()
		}
		near.submit(j)
	}
	near.flush()
	wait.Wait()
}

// prepareLoad finds a chunk and leases its slot.
func (d *Disk) prepareLoad(ctx context.Context, i int, t *tiers.Transfer) (*job, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err := checkTransfer(t); err != nil {
		return nil, err
	}
	sp, err := d.space(t.Space.Fingerprint, t.Space.Geometry, false)
	if err != nil {
		return nil, err
	}
	if sp == nil {
		return nil, tiers.ErrNotFound
	}
	j, err := d.lease(ctx, sp, i, t)
	if err != nil {
		d.letGo(sp)
		return nil, err
	}
	return j, nil
}

func (d *Disk) lease(ctx context.Context, sp *space, i int, t *tiers.Transfer) (*job, error) {
	id, o := d.lookups.Add(1), sp.owner()
	n, err := d.engine.Lookup(o, id, t.First, t.Hashes)
	if err != nil {
		return nil, err
	}
	if n < t.Pages() {
		if n > 0 {
			err = d.engine.Cancel(o, id)
		}
		return nil, errors.Join(tiers.ErrNotFound, err)
	}
	var room [1]engine.Extent
	load, extents, err := d.engine.PrepareLoad(o, o, id, t.First, n, room[:0])
	if err != nil {
		if errors.Is(err, tiers.ErrStale) || errors.Is(err, tiers.ErrNotFound) {
			// dropped meanwhile
			_ = d.engine.Cancel(o, id)
			err = tiers.ErrNotFound
		}
		return nil, err
	}
	s := d.slabOf(extents[0].Region)
	if s == nil { // cannot be: a region with leases stays
		return nil, errors.Join(tiers.ErrNotFound, d.engine.Release(o, load, nil))
	}
	d.touch(s)
	slot := s.slotAt(extents[0].Offset)
	return &job{
		ctx: ctx, i: i, t: t, s: s, sp: sp, slot: slot, gen: s.gens.Slice()[slot],
		sums: s.pageSums(slot), lease: load,
	}, nil
}

// endLoad ends a load's lease, and drops the chunk if its bytes are wrong.
func (d *Disk) endLoad(j *job) error {
	err := j.failure()
	var bad []uint32
	switch {
	case err == nil:
		j.s.faults.Store(0)
	case errors.Is(err, tiers.ErrCorrupt):
		bad = []uint32{0}
		d.corrupt.Add(1)
		d.log.Warn("a chunk on disk is corrupt; dropped", zap.Error(err))
	case j.ctx.Err() != nil && errors.Is(err, context.Cause(j.ctx)) || callersFault(err):
	default:
		// The chunk may become readable later, but nothing would notice. Dropping it lets the next
		// tier serve it.
		bad = []uint32{0}
		d.unread.Add(1)
		d.faulty(j.s, err)
	}
	// Touch nothing of the slab after this: without leases it may be closed.
	if e := d.engine.Release(j.sp.owner(), j.lease, bad); e != nil && err == nil {
		err = e
	}
	d.letGo(j.sp)
	return err
}
