package stack

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
)

// firstOwner is the first of the owners that the Stack itself leases for: one for each call, until
// the call ends.
const firstOwner = math.MaxUint64 >> 1 &^ 0xFFFFFFFF

// window is how many chunks Prefetch and Move lease at a time.
const window = 64

// asOwner calls f with an owner of a space, which is removed when f returns.
func (s *Stack) asOwner(id engine.SpaceID, f func(o engine.Owner, sp *tiers.Space) error) error {
	sp := s.space(id)
	if sp == nil {
		return fmt.Errorf("%w: space %d", tiers.ErrNotFound, id)
	}
	o := engine.Owner(firstOwner + s.owners.Add(1)%(1<<32))
	if err := s.engine.AddArenaOwner(o, id); err != nil {
		return err
	}
	defer s.RemoveOwner(o)
	return f(o, sp)
}

// answer is an Asker that sends the pages of the answer.
type answer chan int

func (answer) LookupPending(engine.Owner, uint64, int, time.Duration) {}
func (a answer) LookupAnswered(x Answer)                              { a <- x.Pages }

// windows calls f with a prefix piece by piece, until f returns less than its piece or fails. It
// returns the sum of the pages.
func windows(sp *tiers.Space, hashes []byte, f func(run tiers.Run) (int, error)) (pages int,
	err error) {
	run := tiers.Run{Space: sp, Hashes: hashes}
	if len(hashes)%sp.Geometry.DigestBytes != 0 {
		return 0, fmt.Errorf("%w: %d bytes of hashes, want a multiple of %d", tiers.ErrInvalid,
			len(hashes), sp.Geometry.DigestBytes)
	}
	for i := 0; i < run.Chunks(); i += window {
		part := tail(run, i)
		part.Hashes = part.Hashes[:min(len(part.Hashes),
			window*sp.Geometry.PagesPerChunk*sp.Geometry.DigestBytes)]
		n, err := f(part)
		pages += n
		if err != nil || n < part.Pages() {
			return pages, err
		}
	}
	return pages, nil
}

// Prefetch promotes a prefix, as far as some tier holds it and there is room, which is charged to a
// tenant. It returns how many pages of it the arena held at some moment of the call. Nothing of it
// stays leased.
func (s *Stack) Prefetch(ctx context.Context, id engine.SpaceID, who tenant.ID,
	hashes []byte) (pages int, err error) {
	err = s.asOwner(id, func(o engine.Owner, sp *tiers.Space) error {
		pages, err = windows(sp, hashes, func(run tiers.Run) (int, error) {
			run.Tenant = who
			return s.fetch(ctx, o, id, run)
		})
		return err
	})
	return pages, err
}

// fetch promotes a run.
func (s *Stack) fetch(ctx context.Context, o engine.Owner, id engine.SpaceID,
	run tiers.Run) (pages int, err error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	got := make(answer, 1)
	q := Query{Owner: o, Lookup: uint64(run.First), Space: id, FirstPage: run.First, Prev: run.Prev,
		Hashes: run.Hashes, Deadline: time.Hour, Tenant: run.Tenant, always: true}
	pages, done, err := s.Lookup(&q, got)
	defer func() { _ = s.Cancel(o, q.Lookup) }()
	if done || err != nil {
		return pages, err
	}
	select {
	case pages = <-got:
		return pages, nil
	case <-ctx.Done():
		return pages, context.Cause(ctx)
	case <-s.ctx.Done():
		return pages, tiers.ErrClosed
	}
}

// probeTier loads the first chunk of a rest that the plan cut off whole, if the chunk's tier has
// not been measured for probeAge: what made the tier slow may be over. It loads in the background.
func (s *Stack) probeTier(r *request) {
	if r.plan.chunks > 0 || len(r.plan.source) == 0 || r.plan.source[0] < 0 {
		return
	}
	if _, _, age := s.tiers[r.plan.source[0]].estimate.read(); age < probeAge ||
		!s.probe.CompareAndSwap(false, true) {
		return
	}
	run := r.seen.rest.Chunk(0)
	run.Prev, run.Hashes = append([]byte(nil), run.Prev...), append([]byte(nil), run.Hashes...)
	id := r.space
	s.mu.Lock()
	defer s.unlockAndWake()
	if s.closed {
		return
	}
	s.wg.Go(func() {
		defer s.probe.Store(false)
		_ = s.asOwner(id, func(o engine.Owner, _ *tiers.Space) error {
			_, err := s.fetch(s.ctx, o, id, run)
			return err
		})
	})
}

// probeAge is how old a tier's estimates must be for a probe.
const probeAge = time.Second

// tierNamed returns a tier by its name, nil for the arena.
func (s *Stack) tierNamed(name string) (*tier, error) {
	if name == arenaName {
		return nil, nil
	}
	for _, t := range s.tiers {
		if t.Name == name {
			return t, nil
		}
	}
	return nil, fmt.Errorf("%w: tier %q", tiers.ErrNotFound, name)
}

// Move copies a prefix from one tier to another, either of which may be "arena", as far as the
// first has it without a gap and the second has room, and unless keep drops it from the first. It
// returns how many pages arrived.
func (s *Stack) Move(ctx context.Context, id engine.SpaceID, hashes []byte, from, to string,
	keep bool) (pages int, err error) {
	src, err := s.tierNamed(from)
	if err != nil {
		return 0, err
	}
	dst, err := s.tierNamed(to)
	if err != nil {
		return 0, err
	}
	if src == dst {
		return 0, fmt.Errorf("%w: %q is the tier that it would be moved from", tiers.ErrInvalid, to)
	}
	var bounce []byte
	err = s.asOwner(id, func(o engine.Owner, sp *tiers.Space) error {
		pages, err = windows(sp, hashes, func(run tiers.Run) (n int, err error) {
			if ctx.Err() != nil {
				return 0, context.Cause(ctx)
			}
			switch {
			case dst == nil:
				n, err = s.fetch(ctx, o, id, run)
			case src == nil:
				n, err = s.putDown(ctx, o, run, dst)
			default:
				n, bounce, err = s.carryOver(ctx, run, src, dst, bounce)
			}
			if n == 0 || keep {
				return n, err
			}
			run.Hashes = run.Hashes[:n*sp.Geometry.DigestBytes]
			if src == nil {
				_, dropErr := s.engine.Drop(id, run.First, run.Hashes)
				if dropErr = errors.Join(dropErr, s.forget()); err == nil {
					err = dropErr
				}
				return n, err
			}
			if dropErr := src.Tier.Drop(ctx, run); err == nil {
				err = dropErr
			}
			return n, err
		})
		return err
	})
	return pages, err
}

// putDown stores in a tier what the arena holds of a run.
func (s *Stack) putDown(ctx context.Context, o engine.Owner, run tiers.Run,
	to *tier) (pages int, err error) {
	if err := s.VerifyRun(ctx, o, run); err != nil {
		return 0, err
	}
	n, err := s.engine.Lookup(o, 1, run.First, run.Hashes)
	if err != nil || n == 0 {
		return 0, err
	}
	load, extents, err := s.engine.PrepareLoad(o, o, 1, run.First, n, nil)
	if err != nil {
		return 0, err
	}
	defer func() { _ = s.engine.Release(o, load, nil) }()
	g := &run.Space.Geometry
	run.Hashes = run.Hashes[:n*g.DigestBytes]
	kept := make([]bool, len(extents))
	for at := 0; at < len(extents); at += to.Batch {
		batch := extents[at:min(at+to.Batch, len(extents))]
		transfers := make([]tiers.Transfer, len(batch))
		for i, x := range batch {
			size := uint64(x.Pages) * uint64(g.PageBytes)
			transfers[i] = tiers.Transfer{Run: run.Chunk(at + i),
				Bytes: s.cfg.Arena(x.Region)[x.Offset : x.Offset+size : x.Offset+size]}
		}
		if !s.beginStore(to) {
			return 0, tiers.ErrClosed
		}
		if ok, _ := to.breaker.enter(); !ok {
			s.endStore(to)
			err = ErrOff
			break
		}
		to.breaker.leave(s.callStore(to, transfers,
			func(i int, err error) { kept[at+i] = err == nil }))
		s.endStore(to)
	}
	return prefixOf(run, kept), err
}

// carryOver copies what one tier holds of a run to another. It returns buf, to use again.
func (s *Stack) carryOver(ctx context.Context, run tiers.Run, from, to *tier,
	buf []byte) (pages int, bounce []byte, err error) {
	if !from.breaker.usable() || !to.breaker.usable() {
		return 0, buf, ErrOff
	}
	g := &run.Space.Geometry
	held := make([]uint16, run.Chunks())
	if err := from.Tier.Contains(ctx, run, held); err != nil {
		return 0, buf, err
	}
	var parts []tiers.Run
	for i, n := range held {
		part := run.Chunk(i)
		whole := int(n) >= part.Pages()
		if !whole {
			part.Hashes = part.Hashes[:int(n)*g.DigestBytes]
		}
		if n > 0 {
			parts = append(parts, part)
		}
		if !whole {
			break
		}
	}
	kept := make([]bool, len(parts))
	for at := 0; at < len(parts); {
		var n int
		of := func(i int) tiers.Run { return parts[at+i] }
		if buf, n = s.bounce(buf, min(to.Batch, len(parts)-at), of); n == 0 {
			return prefixOf(run, kept), buf,
				fmt.Errorf("%w: a chunk is larger than the buffer between tiers", tiers.ErrBusy)
		}
		if !s.beginStore(to) {
			return 0, buf, tiers.ErrClosed
		}
		s.copyUp(from, to, carry(buf, n, of), kept[at:at+n])
		s.endStore(to)
		if at += n; ctx.Err() != nil {
			err = context.Cause(ctx)
			break
		}
	}
	pages = 0
	for i, ok := range kept {
		if !ok {
			break
		}
		pages += parts[i].Pages()
	}
	return pages, buf, err
}

// prefixOf returns how many pages the first chunks of a run have, up to the first that was not
// kept.
func prefixOf(run tiers.Run, kept []bool) (pages int) {
	for i, ok := range kept {
		if !ok {
			break
		}
		pages += run.Chunk(i).Pages()
	}
	return pages
}

// Cleared is what was dropped from one tier.
type Cleared struct {
	Tier   string // "arena" for the arena
	Chunks int    // -1: not known
	Err    error  // why the tier may still have some
}

// Clear drops a space from the tier of that name ("arena" for the arena), or with no name from all
// of them. With the zero Fingerprint it drops everything. What is on its way from one tier to
// another is dropped as well. A tier whose Clear fails is in out with its error. ErrNotFound: there
// is no such tier.
func (s *Stack) Clear(ctx context.Context, fp tiers.Fingerprint,
	name string) (out []Cleared, err error) {
	return s.everywhere(ctx, name,
		func() (int, error) { return s.clearArena(fp) },
		func(t *tier) (int, error) { return t.Tier.Clear(ctx, fp) })
}

// Drop drops a prefix's pages from firstPage on, and those before it in the same chunk, from the
// tier of that name ("arena" for the arena), or with no name from all of them. A chunk that is
// leased or pinned is not found any more, and is freed when its last lease or pin ends. A tier that
// fails is in out with its error.
func (s *Stack) Drop(ctx context.Context, id engine.SpaceID, hashes []byte, firstPage int,
	name string) (out []Cleared, err error) {
	sp := s.space(id)
	if sp == nil {
		return nil, fmt.Errorf("%w: space %d", tiers.ErrNotFound, id)
	}
	d := sp.Geometry.DigestBytes
	if len(hashes)%d != 0 || firstPage < 0 || firstPage >= len(hashes)/d {
		return nil, fmt.Errorf("%w: page %d of %d bytes of hashes", tiers.ErrInvalid, firstPage,
			len(hashes))
	}
	first := firstPage / sp.Geometry.PagesPerChunk * sp.Geometry.PagesPerChunk
	run := tiers.Run{Space: sp, First: first, Hashes: hashes[first*d:]}
	if first > 0 {
		run.Prev = hashes[(first-1)*d : first*d]
	}
	drop := func() (int, error) {
		chunks, err := s.engine.Drop(id, run.First, run.Hashes)
		return chunks, errors.Join(err, s.forget())
	}
	return s.everywhere(ctx, name, drop, func(t *tier) (int, error) {
		return -1,
			t.Tier.Drop(ctx, run)
	})
}

// everywhere calls fromTier for the tier of that name, or with no name for all tiers, and fromArena
// for the arena. What moves from one to another during the call is dropped as well.
func (s *Stack) everywhere(ctx context.Context, name string, fromArena func() (int, error),
	fromTier func(*tier) (int, error)) (out []Cleared, err error) {
	which := s.tiers
	arena := name == "" || name == arenaName
	if name != "" {
		t, err := s.tierNamed(name)
		if err != nil {
			return nil, err
		}
		if which = nil; t != nil {
			which = []*tier{t}
		}
	}
	if arena {
		c := Cleared{Tier: arenaName}
		if s.cfg.Restored != nil {
			c.Err = s.cfg.Restored(ctx)
		}
		if c.Err == nil {
			c.Chunks, c.Err = fromArena()
		}
		out = append(out, c)
	}
	for _, t := range which {
		// Nothing is stored in any tier until all are clear. Otherwise a chunk that is promoted
		// from one tier meanwhile could be stored in another again.
		defer s.resume(t)
		c := Cleared{Tier: t.Name}
		if c.Err = s.pause(ctx, t); c.Err == nil {
			c.Chunks, c.Err = fromTier(t)
		}
		out = append(out, c)
	}
	if arena && len(which) > 0 && out[0].Err == nil {
		chunks, err := fromArena() // chunks that were promoted meanwhile
		out[0].Chunks, out[0].Err = out[0].Chunks+chunks, err
	}
	return out, nil
}

func (s *Stack) clearArena(fp tiers.Fingerprint) (chunks int, err error) {
	for _, sp := range s.engine.Spaces() {
		if fp == (tiers.Fingerprint{}) || sp.Fingerprint == fp {
			chunks += s.engine.ClearSpace(sp.ID)
		}
	}
	return chunks, s.forget()
}

// pause waits until no call of the tier's Store is under way. No new one begins until resume, which
// the caller must call even if pause fails.
func (s *Stack) pause(ctx context.Context, t *tier) error {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.unlockAndWake()
		t.calm.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.unlockAndWake()
	t.paused++
	for t.storing > 0 {
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case s.closed:
			return tiers.ErrClosed
		}
		t.calm.Wait()
	}
	return nil
}

// resume ends one pause.
func (s *Stack) resume(t *tier) {
	s.mu.Lock()
	defer s.unlockAndWake()
	if t.paused--; t.paused == 0 {
		t.calm.Broadcast()
	}
}
