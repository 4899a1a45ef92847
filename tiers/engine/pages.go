package engine

import (
	"encoding/binary"
	"slices"

	"lookaside/tiers/why"
)

// Pages: the records of what slots hold, and how a page is found. Each page of a slot has a record;
// of the records of one page that is in several slots, one is in the index (index.go), and the
// others are linked to it.

// A page's record is named by a ref: the region's number and the record's number in it. Records lie
// slot by slot, so the number also gives slot and position. 0 is no ref, as regions count from 1.
// Slots are named likewise, by region and slot.
const (
	recordBits = 26
	recordMask = 1<<recordBits - 1
	maxRegions = 1<<(32-recordBits) - 1
)

// link chains the records of one page that several slots hold. The one without prev is in the
// index.
type link struct{ next, prev uint32 }

func (a *arena) links(record uint32) *link {
	return &a.regions[record>>recordBits].links[record&recordMask]
}

// split is the slot of a record in its region, and the position in it. The division would be a good
// part of a lookup's time.
func (r *region) split(rec uint32) (slot, pos uint32) {
	if r.shift >= 0 {
		return rec >> (r.shift & 31), rec & uint32(r.ppc-1)
	}
	slot = rec / uint32(r.ppc)
	return slot, rec - slot*uint32(r.ppc)
}

// slotOf is the slot of a page's record, and the page's position in it.
func (a *arena) slotOf(page uint32) (ref uint32, pos int) {
	i, p := a.regions[page>>recordBits].split(page & recordMask)
	return page&^recordMask | i, int(p)
}

// at reports whether a record is that of the given page of its prefix. For an honest client it
// always is.
func (a *arena) at(record uint32, page int) bool {
	r := a.regions[record>>recordBits]
	i, pos := r.split(record & recordMask)
	return int(r.slots[i].chunk)*r.ppc+int(pos) == page
}

// record is that of page pos of a slot of the region.
func (r *region) record(ref uint32, pos int) uint32 {
	return ref&^recordMask | uint32(int(ref&recordMask)*r.ppc+pos)
}

// enter indexes pages [from, to) of a slot, whose digests are written. If one of them is held as
// another page of its prefix, which no honest client can bring about, it undoes its work and
// returns false.
func (e *Engine) enter(ref uint32, from, to int) bool {
	r, s := e.slot(ref)
	sp := e.spaces[s.space]
	base := int(ref&recordMask) * r.ppc
	var tags [tagGroup]uint32
	noted := e.journal.on
	unnoted := from // pages from here on are new and not in the journal yet
	for pos := from; pos < to; pos++ {
		i := (pos - from) % tagGroup
		if i == 0 {
			e.tagsOf(sp, r, ref, tags[:min(to-pos, tagGroup)], pos)
		}
		rec := ref&^recordMask | uint32(base+pos)
		head := e.findOrInsert(sp, tags[i], r.digest(ref&recordMask, pos), rec)
		if head == 0 {
			sp.pages++
			s.pages++
			continue
		}
		if noted {
			e.note(PagesStored, ref, unnoted, pos)
			unnoted = pos + 1
		}
		if !e.at(head, int(s.chunk)*r.ppc+pos) {
			e.retract(ref, from, why.End, why.By{})
			return false
		}
		e.linkAfter(head, rec)
		s.pages++
		if noted && e.journal.walks > 0 {
			e.note(PagesStored, ref, pos, pos+1)
		}
		// The slot that ended here is the shorter version of this one.
		if other, _ := e.slotOf(head); other != ref {
			_, o := e.slot(other)
			if int(o.pages) == pos+1 && o.idle() && pos+1 < r.ppc {
				e.stats.Replaced++
				e.leave(other, why.End)
				e.release(other)
			}
		}
	}
	if noted {
		e.note(PagesStored, ref, unnoted, to)
	}
	return true
}

func (e *Engine) linkAfter(head, rec uint32) {
	e.idx.linkSteps++
	h, l := e.links(head), e.links(rec)
	l.prev, l.next = head, h.next
	if h.next != 0 {
		e.links(h.next).prev = rec
	}
	h.next = rec
}

// retract takes a slot's pages from page from on out of the index. Where another slot has the page
// too, that slot takes its place. Of the other pages it is remembered why they are gone, and by
// what.
func (e *Engine) retract(ref uint32, from int, reason why.Reason, by why.By) {
	r, s := e.slot(ref)
	sp := e.spaces[s.space]
	var tags [tagGroup]uint32
	noted := e.journal.on
	unnoted := from
	var gone [tagGroup]uint64 // keys of pages that are not remembered yet
	n, remember := 0, reason != why.End && e.cfg.Gone != nil
	for pos := from; pos < int(s.pages); pos++ {
		i := (pos - from) % tagGroup
		if i == 0 {
			e.tagsOf(sp, r, ref, tags[:min(int(s.pages)-pos, tagGroup)], pos)
		}
		if e.unlink(tags[i], r, ref, pos) {
			sp.pages--
			if remember {
				gone[n] = why.Key(sp.goneSalt, r.digest(ref&recordMask, pos))
				if n++; n == len(gone) {
					e.cfg.Gone.Note(gone[:], reason, by)
					n = 0
				}
			}
		} else if noted {
			e.note(PagesRemoved, ref, unnoted, pos)
			unnoted = pos + 1
		}
	}
	if noted {
		e.note(PagesRemoved, ref, unnoted, int(s.pages))
	}
	e.cfg.Gone.Note(gone[:n], reason, by)
	s.pages = uint16(from)
}

// unlink takes one page of a slot, by its tag, out of the index. It reports whether no other slot
// of the space has the page.
func (e *Engine) unlink(tag uint32, r *region, ref uint32, pos int) (gone bool) {
	e.idx.linkSteps++
	at := int(ref&recordMask)*r.ppc + pos
	rec := ref&^recordMask | uint32(at)
	l := &r.links[at]
	switch {
	case l.prev != 0:
		e.links(l.prev).next = l.next
		if l.next != 0 {
			e.links(l.next).prev = l.prev
		}
	case l.next != 0:
		e.links(l.next).prev = 0
		e.idx.replace(tag, rec, l.next)
	default:
		e.idx.remove(tag, rec)
		gone = true
	}
	*l = link{}
	return gone
}

// equal compares a record's digest with one from a message.
func equal(words []uint64, d []byte) bool {
	var diff uint64
	for i, w := range words {
		diff |= w ^ binary.LittleEndian.Uint64(d[8*i:])
	}
	return diff == 0
}

// same reports whether ref is the record of digest d in space s.
func (e *Engine) same(s *space, ref uint32, d []byte) bool {
	r := e.regions[ref>>recordBits]
	if r.class != s.class {
		return false
	}
	i, pos := r.split(ref & recordMask)
	return r.slots[i].space == s.id && equal(r.digest(i, int(pos)), d)
}

// sameAs is same for a digest as records keep it.
func (e *Engine) sameAs(s *space, ref uint32, words []uint64) bool {
	r := e.regions[ref>>recordBits]
	if r.class != s.class {
		return false
	}
	i, pos := r.split(ref & recordMask)
	return r.slots[i].space == s.id && slices.Equal(r.digest(i, int(pos)), words)
}

// alike reports whether two records are of the same page.
func (a *arena) alike(one, other uint32) bool {
	q, r := a.regions[one>>recordBits], a.regions[other>>recordBits]
	if q.class != r.class {
		return false
	}
	i, posA := q.split(one & recordMask)
	j, posB := r.split(other & recordMask)
	return q.slots[i].space == r.slots[j].space && slices.Equal(q.digest(i, int(posA)),
		r.digest(j, int(posB)))
}

// find returns the indexed record of digest d in space s, 0 if the page is not held.
func (e *Engine) find(s *space, d []byte) uint32 {
	rec, steps := e.seek(s, d)
	e.idx.steps += steps
	return rec
}

// seek is find for a caller that may not change anything. It returns how many entries it looked at,
// for the caller to count.
func (e *Engine) seek(s *space, d []byte) (rec uint32, steps uint64) {
	tag := s.tag(d)
	for _, t := range [...]*table{&e.idx.cur, &e.idx.old} {
		if t.used == 0 {
			continue
		}
		for i := t.home(tag); t.words[i] != 0; i = t.next(i) {
			steps++
			if w := t.words[i]; uint32(w>>32) == tag && e.same(s, uint32(w), d) {
				return uint32(w), steps
			}
		}
	}
	return 0, steps
}

// findOrInsert is find for a page that a record has, by its tag and digest: if it is not held, the
// record's entry is put where it was looked for.
func (e *Engine) findOrInsert(s *space, tag uint32, digest []uint64, rec uint32) (held uint32) {
	held, at := e.findIn(&e.idx.cur, s, tag, digest)
	if held == 0 && e.idx.old.used > 0 {
		held, _ = e.findIn(&e.idx.old, s, tag, digest)
	}
	if held == 0 {
		e.idx.cur.words[at] = entry(tag, rec)
		e.idx.cur.used++
	}
	return held
}

// findIn is the record of a page in one table and the place of its entry; without one the record is
// 0, and the place is where its entry belongs.
func (e *Engine) findIn(t *table, s *space, tag uint32, digest []uint64) (rec, at uint32) {
	for at = t.home(tag); t.words[at] != 0; at = t.next(at) {
		e.idx.steps++
		if w := t.words[at]; uint32(w>>32) == tag && e.sameAs(s, uint32(w), digest) {
			return uint32(w), at
		}
	}
	return 0, at
}

// tagGroup is how many pages' tags are computed at a time.
const tagGroup = 32

// tagsOf computes the tags of a slot's pages from one on, and reads their homes, which are about to
// be used, in a loop of its own: its cache misses overlap.
func (e *Engine) tagsOf(s *space, r *region, ref uint32, tags []uint32, from int) {
	for i := range tags {
		tags[i] = s.tagOfRecord(r.digest(ref&recordMask, from+i))
	}
	seen := uint64(0)
	t := &e.idx.cur
	for _, tag := range tags {
		seen |= t.words[t.home(tag)]
	}
	e.scratch.touched = seen // keeps the loop that only reads
}
