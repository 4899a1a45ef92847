package engine

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"lookaside/dax"
	"lookaside/tiers"
)

// EventKind is a kind of change to pages.
type EventKind uint8

const (
	PagesStored  EventKind = iota // they can be found from now on
	PagesRemoved                  // they cannot be found any more
)

func (k EventKind) String() string { return [...]string{"stored", "removed"}[k&1] }

// FollowedSpace identifies the space of an event while at least one feed is open, even after the
// space was closed and its ID was reused. It is immutable.
type FollowedSpace struct {
	ID          SpaceID
	Fingerprint tiers.Fingerprint
	Geometry    tiers.Geometry
	serial      uint32
}

// Event is a change in what can be found: a run of pages of one chunk.
type Event struct {
	Kind  EventKind
	Space *FollowedSpace
	First int // index of the first page in its prefix
	// Prev is the digest of the page before First, for stored pages. It is empty if there is no
	// such page or the engine does not know it.
	Prev   []byte
	Hashes []byte // digests of the pages, end to end
}

// FeedBatch is what Feed.Next returns.
type FeedBatch struct {
	// Reset voids all earlier events: only pages in this and later batches are held.
	Reset  bool
	Events []Event
	// More reports that Next has more to return now. Without it, the events since the last Reset
	// add up to exactly what can be found.
	More bool
	// Seq is the position in the journal. It rises with each event.
	Seq uint64
}

// Feed sends one follower what can be found: first everything held, then each change in order. A
// follower that falls behind by more than the journal holds gets everything again from the start.
//
// The walk over what is held takes slices of the engine's lock. Each slice follows all changes
// before it. During a walk, a page that moves to another slot and stays findable is reported as
// stored again. Otherwise it could slip from a slot that the walk has not reached into one that it
// has passed. So a page can be reported as stored twice, but is never reported as removed while it
// is held.
//
// Pages of restored chunks count as held from EndRestore on, even if their bytes were not checked
// yet.
//
// Any goroutine may call its methods, but only one at a time may call Next.
type Feed struct {
	e      *Engine
	serial uint32        // of the only space to follow; 0: all spaces
	bell   chan struct{} // cap 1

	// Guarded by the engine's lock.
	closed       bool
	cursor       uint64
	reset        bool
	walking      bool
	region, slot int // where the walk continues
	gaps         uint64
}

// journal is a ring of words with the latest changes, off the Go heap. It is written only while a
// feed is open. A record is a head (kind, whether there is a digest before, length of digests,
// pages, serial of the space), the number of its first page, the digest before, and the pages'
// digests. Positions only rise.
type journal struct {
	on         bool // a feed is open
	words      int  // length of the ring; a power of two
	mem        *dax.Table[uint64]
	ring       []uint64
	start, end uint64 // of the whole records
	allocating bool

	// The last record grows until a feed has read it.
	open bool
	at   uint64
	kind EventKind
	ref  uint32
	gen  uint32
	pos  int // position after its last page

	before    [4]uint64 // of the page before a slot that is being entered and has no parent yet
	hasBefore bool

	walks int // feeds in a walk
	feeds map[*Feed]struct{}
	idle  bool // a feed has reached the end since the feeds were last woken

	serials uint32
	names   map[uint32]*FollowedSpace // of the open spaces and of those in closed
	closed  []closedSpace
	stored  uint64 // pages recorded
	removed uint64
}

// closedSpace is a closed space that records before position at may still name.
type closedSpace struct {
	serial uint32
	at     uint64
}

const (
	// minJournalBytes holds more than the largest record.
	minJournalBytes = 512 << 10
	maxJournalBytes = 1 << 32
	// maxClosedSpaces bounds how many closed spaces are remembered.
	maxClosedSpaces = 64
	// lookRecords bounds the records that a call of Next passes.
	lookRecords = 4096
)

func head(k EventKind, prev bool, words, pages int, serial uint32) uint64 {
	h := uint64(k) | uint64(words)<<2 | uint64(pages)<<8 | uint64(serial)<<32
	if prev {
		h |= 2
	}
	return h
}

// recordWords returns the length of a record.
func recordWords(head uint64) uint64 {
	words, pages := head>>2&7, head>>8&0xFFFF
	return 2 + (pages+head>>1&1)*words
}

// Follow returns a feed of what can be found from now on: in one space, or in all if space is 0.
// The caller must Close it. It returns ErrInvalid if the engine keeps no journal, ErrBusy if the
// caller should try again.
func (e *Engine) Follow(space SpaceID) (*Feed, error) {
	e.mu.Lock()
	defer e.unlock()
	f := &Feed{e: e, bell: make(chan struct{}, 1)}
	switch {
	case e.closed:
		return nil, tiers.ErrClosed
	case e.journal.words == 0:
		return nil, invalid("no journal is kept")
	case space != 0:
		s, err := e.space(space)
		if err != nil {
			return nil, err
		}
		f.serial = s.serial
	}
	j := &e.journal
	if !j.on {
		if j.allocating {
			return nil, fmt.Errorf("%w: the journal is being made", tiers.ErrBusy)
		}
		j.allocating = true
		e.mu.Unlock()
		mem, err := dax.NewTable[uint64](j.words)
		e.mu.Lock()
		j.allocating = false
		if err != nil {
			return nil, err
		}
		if e.closed {
			mem.Close()
			return nil, tiers.ErrClosed
		}
		j.mem, j.ring, j.on, j.feeds = mem, mem.Slice(), true, map[*Feed]struct{}{}
		j.start, j.open = j.end, false
	}
	j.feeds[f] = struct{}{}
	f.restart(j)
	return f, nil
}

// Ready returns the channel that receives a value when Next may have more to return.
func (f *Feed) Ready() <-chan struct{} { return f.bell }

// Gaps returns how often the feed restarted because the follower was too slow.
func (f *Feed) Gaps() uint64 {
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	return f.gaps
}

// Restart makes the feed begin again with everything held.
func (f *Feed) Restart() {
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	if !f.closed && !f.e.closed {
		f.restart(&f.e.journal)
		f.ring()
	}
}

func (f *Feed) restart(j *journal) {
	if !f.walking {
		j.walks++
	}
	j.open = false // so that the record at the cursor is a new one
	f.cursor, f.walking, f.region, f.slot, f.reset = j.end, true, 1, 0, true
}

func (f *Feed) ring() {
	select {
	case f.bell <- struct{}{}:
	default:
	}
}

// Close ends the feed. It is idempotent.
func (f *Feed) Close() {
	e := f.e
	e.mu.Lock()
	defer e.unlock()
	if f.closed || e.closed {
		return
	}
	f.closed = true
	j := &e.journal
	if f.walking {
		j.walks--
	}
	delete(j.feeds, f)
	if len(j.feeds) == 0 {
		e.idx.garbage = append(e.idx.garbage, j.mem)
		j.on, j.mem, j.ring = false, nil, nil
		j.start = j.end
		j.forgetClosed()
	}
}

// Next appends the next changes to out: about maxPages pages, at most one chunk more. Their digests
// are copied into buf, which Next returns for reuse. They are valid until buf's bytes change.
func (f *Feed) Next(maxPages int, buf []byte, out []Event) (b FeedBatch, _ []byte, err error) {
	e := f.e
	e.mu.Lock()
	defer e.unlock()
	buf = buf[:0]
	if e.closed || f.closed {
		return b, buf, tiers.ErrClosed
	}
	j := &e.journal
	if f.cursor < j.start {
		f.gaps++
		f.restart(j)
	}
	b.Reset, f.reset = f.reset, false
	pages := 0
	for n := 0; f.cursor < j.end && pages < maxPages && n < lookRecords; n++ {
		var ev Event
		serial := uint32(j.ring[f.cursor&j.mask()] >> 32)
		if f.serial == 0 || f.serial == serial {
			ev, buf = j.read(f.cursor, buf)
			pages += len(ev.Hashes) / ev.Space.Geometry.DigestBytes
			out = append(out, ev)
		}
		f.cursor += recordWords(j.ring[f.cursor&j.mask()])
	}
	j.open = false
	if f.walking && f.cursor == j.end && pages < maxPages {
		out, buf = f.walk(maxPages-pages, buf, out)
	}
	b.Events, b.Seq = out, f.cursor
	if b.More = f.walking || f.cursor < j.end; !b.More {
		j.idle = true
	}
	return b, buf, nil
}

// walk appends the pages of the next slots.
func (f *Feed) walk(maxPages int, buf []byte, out []Event) ([]Event, []byte) {
	e := f.e
	for looked, pages := 0, 0; looked < clearSlice && pages < maxPages; looked++ {
		if f.region > e.nregion {
			f.walking = false
			e.journal.walks--
			break
		}
		r := e.regions[f.region]
		if r.class == nil || r.foreign || f.slot >= r.fresh {
			f.region, f.slot = f.region+1, 0
			continue
		}
		i := f.slot
		f.slot++
		s := &r.slots[i]
		if s.state != ready || s.doomed() || s.pages == 0 ||
			f.serial != 0 && e.spaces[s.space].serial != f.serial {
			continue
		}
		ev := Event{Kind: PagesStored, Space: e.journal.names[e.spaces[s.space].serial],
			First: int(s.chunk) * r.ppc}
		ev.Prev, ev.Hashes, buf = e.digests(r.num<<recordBits|uint32(i), buf)
		out = append(out, ev)
		pages += int(s.pages)
	}
	return out, buf
}

func (j *journal) mask() uint64 { return uint64(len(j.ring) - 1) }

// read decodes the record at a position.
func (j *journal) read(at uint64, buf []byte) (Event, []byte) {
	m := j.mask()
	h := j.ring[at&m]
	ev := Event{Kind: EventKind(h & 1), Space: j.names[uint32(h>>32)], First: int(j.ring[(at+1)&m])}
	from, mid := len(buf), len(buf)
	if h&2 != 0 {
		mid += int(h>>2&7) * 8
	}
	for w := at + 2; w < at+recordWords(h); w++ {
		buf = binary.LittleEndian.AppendUint64(buf, j.ring[w&m])
	}
	ev.Prev, ev.Hashes = buf[from:mid:mid], buf[mid:len(buf):len(buf)]
	return ev, buf
}

// note records that pages [from, to) of a slot can be found now, or cannot any more.
func (e *Engine) note(k EventKind, ref uint32, from, to int) {
	j := &e.journal
	if from >= to {
		return
	}
	r, s := e.slot(ref)
	n := to - from
	if j.open && j.ref == ref && j.gen == s.gen && j.kind == k && j.pos == from {
		j.room(uint64(n * r.words))
		j.ring[j.at&j.mask()] += uint64(n) << 8
	} else {
		e.noteRun(k, r, s, ref, from, n)
	}
	j.pos = to
	slot := ref & recordMask
	if to == r.ppc {
		to--
	}
	if from < to {
		at := int(slot) * (r.ppc - 1)
		j.put(r.digests[(at+from)*r.words : (at+to)*r.words])
	}
	if j.pos == r.ppc {
		j.put(r.digest(slot, r.ppc-1))
	}
	if k == PagesStored {
		j.stored += uint64(n)
	} else {
		j.removed += uint64(n)
	}
}

// noteRun begins a record of n pages. It writes all of the record except their digests.
func (e *Engine) noteRun(k EventKind, r *region, s *slot, ref uint32, pos, n int) {
	j := &e.journal
	var prev []uint64
	if k == PagesStored {
		switch {
		case pos > 0:
			prev = r.digest(ref&recordMask, pos-1)
		case !e.orphan(ref):
			k := e.kin(ref)
			parent := e.regions[k.parent>>recordBits]
			prev = parent.digest(k.parent&recordMask, parent.ppc-1)
		case j.hasBefore:
			prev = j.before[:r.words]
		}
	}
	j.room(uint64(2 + len(prev) + n*r.words))
	j.open, j.at, j.kind, j.ref, j.gen = true, j.end, k, ref, s.gen
	j.ring[j.end&j.mask()] = head(k, len(prev) > 0, r.words, n, e.spaces[s.space].serial)
	j.ring[(j.end+1)&j.mask()] = uint64(s.chunk)*uint64(r.ppc) + uint64(pos)
	j.end += 2
	j.put(prev)
	if j.idle {
		j.idle = false
		for f := range j.feeds {
			f.ring()
		}
	}
}

func (j *journal) put(words []uint64) {
	n := copy(j.ring[j.end&j.mask():], words)
	copy(j.ring, words[n:])
	j.end += uint64(len(words))
}

// room drops the oldest records until n more words fit.
func (j *journal) room(n uint64) {
	for j.end+n-j.start > uint64(len(j.ring)) {
		j.start += recordWords(j.ring[j.start&j.mask()])
	}
	if len(j.closed) > 0 {
		j.forgetClosed()
	}
}

// skip makes all feeds begin again with everything held.
func (j *journal) skip() {
	j.end++
	j.start, j.open = j.end, false
	j.forgetClosed()
	for f := range j.feeds {
		f.ring()
	}
}

// opened gives a new space its serial and name.
func (j *journal) opened(s *space) {
	if j.words == 0 {
		return
	}
	if j.names == nil {
		j.names = map[uint32]*FollowedSpace{}
	}
	for j.serials++; j.serials == 0 || j.names[j.serials] != nil; j.serials++ {
	}
	s.serial = j.serials
	j.name(s)
}

// name records the present name of a space.
func (j *journal) name(s *space) {
	if j.words > 0 {
		j.names[s.serial] = &FollowedSpace{ID: SpaceID(s.id), Fingerprint: s.print, Geometry: s.g,
			serial: s.serial}
	}
}

// forgotten records that a space is closed. Its name stays as long as records need it.
func (j *journal) forgotten(s *space) {
	if j.words == 0 {
		return
	}
	j.closed = append(j.closed, closedSpace{s.serial, j.end})
	if len(j.closed) > maxClosedSpaces {
		j.start, j.open = max(j.start, j.closed[0].at), false
	}
	j.forgetClosed()
}

func (j *journal) forgetClosed() {
	n := 0
	for n < len(j.closed) && j.closed[n].at <= j.start {
		delete(j.names, j.closed[n].serial)
		n++
	}
	j.closed = j.closed[:copy(j.closed, j.closed[n:])]
}

// noteBefore keeps the digest of the page before a slot that will be entered without a parent, if
// that page is held.
func (e *Engine) noteBefore(ref uint32, d []byte) {
	r, s := e.slot(ref)
	rec, _ := e.seek(e.spaces[s.space], d)
	if e.journal.hasBefore = rec != 0 && e.at(rec, int(s.chunk)*r.ppc-1); !e.journal.hasBefore {
		return
	}
	for i := range len(d) / 8 {
		e.journal.before[i] = binary.LittleEndian.Uint64(d[8*i:])
	}
}

// noteRestored records what was restored. If that is more than a quarter of the ring, all feeds
// begin again instead.
func (e *Engine) noteRestored(all []*stagedRegion) {
	j := &e.journal
	if !j.on {
		return
	}
	each := func(f func(ref uint32, r *region, s *slot)) {
		for _, of := range all {
			of.each(func(x *staged) {
				if r, s := e.slot(x.ref); s.state == ready && !s.doomed() {
					f(x.ref, r, s)
				}
			})
		}
	}
	words := 0
	each(func(_ uint32, r *region, s *slot) { words += 2 + (int(s.pages)+1)*r.words })
	if words > len(j.ring)/4 {
		j.skip()
		return
	}
	each(func(ref uint32, _ *region, s *slot) { e.note(PagesStored, ref, 0, int(s.pages)) })
}

func (j *journal) close() {
	if j.mem != nil {
		j.mem.Close()
		j.mem, j.ring, j.on = nil, nil, false
	}
	for f := range j.feeds {
		f.ring()
	}
}

// journalWords returns the length in words of a ring of the given bytes.
func journalWords(bytes int64) int {
	if bytes == 0 {
		return 0
	}
	return 1 << bits.Len64(uint64(bytes-1)>>3)
}

// JournalStats describes the journal at one moment.
type JournalStats struct {
	Feeds         int
	Bytes         int64  // of memory
	StoredPages   uint64 // recorded since the start
	RemovedPages  uint64
	RetainedWords int // in the ring, of 8 bytes; a follower may fall behind by that much
}

// Journal returns the journal's present state.
func (e *Engine) Journal() JournalStats {
	e.mu.Lock()
	defer e.unlock()
	j := &e.journal
	return JournalStats{Feeds: len(j.feeds), Bytes: int64(len(j.ring)) * 8, StoredPages: j.stored,
		RemovedPages: j.removed, RetainedWords: int(j.end - j.start)}
}
