package engine

import (
	"encoding/binary"

	"lookaside/tiers/why"
)

// Absence is what an engine knows of a page that a lookup did not find.
type Absence struct {
	why.Gone
	// Other is a space that holds a page of the same digest, if the reason is OtherSpace.
	Other SpaceID
}

// maxOtherSpaces bounds the spaces in which Why looks.
const maxOtherSpaces = 64

// Why returns why a page of a space is not held. Reasons are those that Config.Gone remembers;
// OtherSpace, if another space holds a page of this digest; Late, if the page is held and a lookup
// could not have it; else NeverStored. It allocates nothing.
func (e *Engine) Why(id SpaceID, digest []byte) (a Absence) {
	a.Reason = why.NeverStored
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil || len(digest) != s.g.DigestBytes {
		return a
	}
	if e.find(s, digest) != 0 {
		a.Reason = why.Late
		return a
	}
	if a.Gone = e.cfg.Gone.Find(s.keyOfGone(digest)); a.Reason != why.NeverStored {
		return a
	}
	left := maxOtherSpaces
	for _, other := range e.spaces {
		if other == nil || other == s || other.pages == 0 || other.g.DigestBytes != len(digest) {
			continue
		}
		if e.find(other, digest) != 0 {
			a.Reason, a.Other = why.OtherSpace, SpaceID(other.id)
			return a
		}
		if left--; left == 0 {
			break
		}
	}
	return a
}

// keyOfGone returns what Config.Gone knows a page by.
func (s *space) keyOfGone(digest []byte) uint64 {
	var words [4]uint64
	n := len(digest) / 8
	for i := range n {
		words[i] = binary.LittleEndian.Uint64(digest[8*i:])
	}
	return why.Key(s.goneSalt, words[:n])
}

// noteShed remembers that pages of a walk, from its chunk i on, were offered and not stored: all of
// the first chunk, and the first one of each chunk after it. A lookup misses one of these first.
func (e *Engine) noteShed(s *space, w *walk, i int, by why.By) {
	if e.cfg.Gone == nil {
		return
	}
	var keys [tagGroup]uint64
	n := 0
	add := func(page int) {
		keys[n] = s.keyOfGone(w.hash(page))
		if n++; n == len(keys) {
			e.cfg.Gone.Note(keys[:], why.Shed, by)
			n = 0
		}
	}
	for page := w.start(i); page <= w.last(i); page++ {
		add(page)
	}
	for i++; i < w.chunks; i++ {
		add(w.start(i))
	}
	e.cfg.Gone.Note(keys[:n], why.Shed, by)
}

// noteUnfilled remembers that pages [from, to) of a slot were granted and not stored.
func (e *Engine) noteUnfilled(r *region, ref uint32, from, to int) {
	if e.cfg.Gone == nil || r.foreign {
		return
	}
	s := e.spaces[r.slots[ref&recordMask].space]
	by := why.By{Space: s.mark, Tenant: r.tenants[ref&recordMask], Tier: e.cfg.GoneTier}
	for pos := from; pos < to; pos++ {
		key := why.Key(s.goneSalt, r.digest(ref&recordMask, pos))
		e.cfg.Gone.Note([]uint64{key}, why.Shed, by)
	}
}
