package engine

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"lookaside/tiers"
	"lookaside/tiers/why"
)

// Spaces: whose pages are alike. A space has an id, a geometry, and a salt by which the digests of
// its pages are hashed, so that equal digests of two spaces are two pages.

// SpaceID names an open space. 0 is none.
type SpaceID uint16

type space struct {
	id    uint16
	print tiers.Fingerprint
	g     tiers.Geometry
	class *class
	salt  uint64
	// the salt and the mark by which Config.Gone knows its pages and it
	goneSalt uint64
	mark     uint16
	tagMask  uint32
	owners   int
	chunks   int    // slots that are not free
	staged   int    // named by Restore, until EndRestore
	pages    int    // indexed
	clears   int    // ClearSpace calls under way
	serial   uint32 // by which the journal knows it
	pinner   owner  // of its pins; in no map
	// what peers lent of it, with a salt and a class of its own, and the same id; nil: nothing can
	// be
	shadow *space
	// recovered: only RecoverSpace opened it, so its PageTokens are unknown.
	recovered bool
	// the tick when an owner last came or went; of one that is recovered, when the newest of its
	// chunks was restored
	lastUse uint64
}

// OpenSpace returns the space of a fingerprint, and makes it if it is new. ErrIncompatible: the
// fingerprint has another geometry; ErrBusy: there are too many spaces.
//
// Room for a new space is made by closing one that only RecoverSpace opened: an empty one, or else
// the one that was used longest ago, which is cleared. OpenSpace may release the lock for that.
func (e *Engine) OpenSpace(fp tiers.Fingerprint, g tiers.Geometry) (SpaceID, error) {
	if err := g.Validate(e.cfg.MinPageBytes); err != nil {
		return 0, err
	}
	e.mu.Lock()
	defer e.unlock()
	for e.byPrint[fp] == nil && len(e.byPrint) == e.cfg.MaxSpaces && e.closeRecovered() {
	}
	s, err := e.openSpace(fp, g)
	if err != nil {
		return 0, err
	}
	if s.recovered {
		s.g, s.recovered = g, false
		e.journal.name(s)
	}
	return SpaceID(s.id), nil
}

// RecoverSpace returns the space of a fingerprint whose chunks will be restored, and makes it if it
// is new. Its PageTokens are unknown until OpenSpace names them. Errors are those of OpenSpace, but
// no room is made.
func (e *Engine) RecoverSpace(fp tiers.Fingerprint, g tiers.Geometry) (SpaceID, error) {
	g.PageTokens = 1
	if err := g.Validate(e.cfg.MinPageBytes); err != nil {
		return 0, err
	}
	e.mu.Lock()
	defer e.unlock()
	known := e.byPrint[fp]
	if known != nil {
		g.PageTokens = known.g.PageTokens
	}
	s, err := e.openSpace(fp, g)
	if err != nil {
		return 0, err
	}
	s.recovered = s.recovered || known == nil
	return SpaceID(s.id), nil
}

// closeRecovered makes room for a space, as OpenSpace describes. It returns false if no space can
// be closed. It may release the lock.
func (e *Engine) closeRecovered() bool {
	old := e.oldestRecovered()
	if old != nil && old.inUse() == 0 {
		e.closeSpace(old)
		return true
	}
	if e.closed || old == nil {
		return false
	}
	e.clearSpace(old)
	switch {
	case e.closed:
		return false
	case !old.recovered: // OpenSpace opened it in the meantime
		return true
	case old.inUse() > 0 || old.owners > 0 || old.clears > 0:
		return false
	}
	e.closeSpace(old)
	return true
}

// oldestRecovered returns a space that only RecoverSpace opened and that is not in use: an empty
// one, or else the one that was used longest ago. It is nil if there is none.
func (e *Engine) oldestRecovered() (old *space) {
	if len(e.staging.regions) > 0 {
		return nil
	}
	for _, s := range e.spaces {
		if s == nil || !s.recovered || s.owners > 0 || s.clears > 0 {
			continue
		}
		if s.inUse() == 0 {
			return s
		}
		if old == nil || s.lastUse < old.lastUse {
			old = s
		}
	}
	return old
}

// openSpace finds or makes a space. g.PageTokens does not matter for a space that only RecoverSpace
// opened.
func (e *Engine) openSpace(fp tiers.Fingerprint, g tiers.Geometry) (*space, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	if s := e.byPrint[fp]; s != nil {
		has := s.g
		if s.recovered {
			has.PageTokens = g.PageTokens
		}
		if has != g {
			return nil, fmt.Errorf("%w: space %s has geometry %+v, asked for %+v",
				tiers.ErrIncompatible, fp.Short(), s.g, g)
		}
		return s, nil
	}
	if len(e.byPrint) == e.cfg.MaxSpaces {
		return nil, fmt.Errorf("%w: %d spaces are open", tiers.ErrBusy, e.cfg.MaxSpaces)
	}
	id := 1
	for id < len(e.spaces) && e.spaces[id] != nil {
		id++
	}
	if id == len(e.spaces) {
		e.spaces = append(e.spaces, nil)
	}
	e.dropClasses()
	s := &space{id: uint16(id), print: fp, g: g, class: e.classOf(g), tagMask: e.tagMask,
		salt: e.cfg.Seed ^ 0x6C6F6F6B61736964, goneSalt: why.Salt(fp), mark: why.Mark(fp)}
	s.pinner.all.owned, s.pinner.space, s.pinner.own = true, s, true
	for i := range 4 {
		var w uint64
		for j := range 8 {
			w = w<<8 | uint64(fp[8*i+j])
		}
		s.salt = mix(s.salt, w)
	}
	e.addShadow(s)
	e.journal.opened(s)
	e.spaces[id], e.byPrint[fp] = s, s
	e.relimit()
	return s, nil
}

// dropClasses forgets the classes that have neither regions nor spaces, unless a region is being
// carved for one of them.
func (e *Engine) dropClasses() {
	if e.carving {
		return
	}
	used := map[*class]bool{}
	for _, s := range e.byPrint {
		used[s.class] = true
	}
	for key, c := range e.classes {
		if len(c.regions) == 0 && !used[c] {
			e.dropForeign(c)
			e.dropBlock(c)
			delete(e.classes, key)
		}
	}
}

// CloseSpace forgets a space. ErrBusy: it has owners or chunks. Clear it first if its chunks are
// not wanted.
func (e *Engine) CloseSpace(id SpaceID) error {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return err
	}
	if s.owners > 0 || s.inUse() > 0 || s.clears > 0 {
		return fmt.Errorf("%w: space %d has %d owners and %d chunks", tiers.ErrBusy, id, s.owners,
			s.inUse())
	}
	e.closeSpace(s)
	return nil
}

// inUse returns how many slots hold something of the space, are being filled for it, or will be
// restored.
func (s *space) inUse() int {
	if s.shadow != nil {
		return s.chunks + s.staged + s.shadow.chunks
	}
	return s.chunks + s.staged
}

func (e *Engine) closeSpace(s *space) {
	e.journal.forgotten(s)
	e.spaces[s.id] = nil
	delete(e.byPrint, s.print)
}

func (e *Engine) space(id SpaceID) (*space, error) {
	if e.closed {
		return nil, tiers.ErrClosed
	}
	if int(id) >= len(e.spaces) || e.spaces[id] == nil {
		return nil, fmt.Errorf("%w: space %d", tiers.ErrNotFound, id)
	}
	return e.spaces[id], nil
}

// useSpace notes that a space is in use now.
func (e *Engine) useSpace(s *space) {
	e.tick++
	s.lastUse = e.tick
}

// ClearSpace drops all chunks that a space has now, and returns how many. Leased chunks cannot be
// found when it returns, and become free at their release. What is being stored does not appear. It
// releases the lock between slices of its work.
func (e *Engine) ClearSpace(id SpaceID) (chunks int) {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return 0
	}
	return e.clearSpace(s)
}

func (e *Engine) clearSpace(s *space) (chunks int) {
	s.clears++
	defer func() { s.clears-- }()
	left := clearSlice
	for n := 1; n <= e.nregion; n++ {
		for i := 0; ; i++ {
			if left == 0 {
				left = clearSlice
				if !e.pause() {
					return chunks
				}
			}
			r := e.regions[n]
			if r.class == nil || r.class.geometry != s.class.geometry || i >= r.fresh {
				break
			}
			left--
			if sl := &r.slots[i]; sl.state != free && sl.space == s.id && !sl.doomed() {
				if sl.state == ready && !r.foreign {
					chunks++
				}
				e.doom(r.num<<recordBits|uint32(i), why.Cleared)
			}
		}
	}
	e.stats.Cleared += uint64(chunks)
	return chunks
}

// SpaceStats is one space at one moment.
type SpaceStats struct {
	ID          SpaceID
	Fingerprint tiers.Fingerprint
	Geometry    tiers.Geometry
	Owners      int
	Chunks      int    // slots that it has, filling ones as well
	Pages       int    // that can be found
	Pinned      int    // slots that pins lease, one in two pins counting twice
	LastUse     uint64 // rises from one coming or going of an owner to the next, of any space
}

// Space returns one open space; false: there is none of that id.
func (e *Engine) Space(id SpaceID) (SpaceStats, bool) {
	e.mu.Lock()
	defer e.unlock()
	s, err := e.space(id)
	if err != nil {
		return SpaceStats{}, false
	}
	return s.stats(), true
}

func (s *space) stats() SpaceStats {
	return SpaceStats{ID: SpaceID(s.id), Fingerprint: s.print, Geometry: s.g, Owners: s.owners,
		Chunks: s.chunks, Pages: s.pages,
		Pinned: s.pinner.leases, LastUse: s.lastUse}
}

// Spaces returns the open spaces, by id.
func (e *Engine) Spaces() []SpaceStats {
	e.mu.Lock()
	defer e.unlock()
	var out []SpaceStats
	for _, s := range e.spaces {
		if s != nil {
			out = append(out, s.stats())
		}
	}
	return out
}

const mixer = 0x9E3779B97F4A7C15

func mix(h, w uint64) uint64 {
	hi, lo := bits.Mul64(h^w, mixer)
	return hi ^ lo
}

// hash is a digest's, keyed by its space.
func (s *space) hash(d []byte) uint64 {
	h := s.salt
	for i := 0; i+8 <= len(d); i += 8 {
		h = mix(h, binary.LittleEndian.Uint64(d[i:]))
	}
	return h
}

// hashOfRecord is hash for a digest as records keep it.
func (s *space) hashOfRecord(words []uint64) uint64 {
	h := s.salt
	for _, w := range words {
		h = mix(h, w)
	}
	return h
}

// tag is what the index has of a digest's hash.
func (s *space) tag(d []byte) uint32 { return uint32(s.hash(d)>>32) & s.tagMask }

// tagOfRecord is tag for a digest as records keep it.
func (s *space) tagOfRecord(words []uint64) uint32 {
	return uint32(s.hashOfRecord(words)>>32) & s.tagMask
}

// key is what the policies know a page by.
func (s *space) key(words []uint64) uint64 { return max(s.hashOfRecord(words), 1) }
