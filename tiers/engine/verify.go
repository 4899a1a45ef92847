package engine

import (
	"lookaside/tiers/tenant"

	"lookaside/tiers/why"
)

// Verification is a chunk whose bytes are to be read as they are: to check them, as those of a
// restored one, or to make their checksums.
type Verification struct {
	Handle uint64 // for EndVerify and Publish: names slot and generation
	Space  SpaceID
	Region uint32
	Piece  uint32
	Slot   uint32 // its number in the piece
	Offset uint64 // bytes, of its first page
	First  int    // index of its first page
	Pages  int
	Prev   []byte    // digest of the page before; empty if there is none, or it is not known
	Hashes []byte    // digests of the pages, end to end
	Tenant tenant.ID // whose chunk it is
}

// maxShared bounds the slots with a page in common that are looked at for one that is verified. One
// behind them is not found until those before it are.
const maxShared = 16

// Unverified returns how many slots hold what was restored and not checked since. It takes no lock.
func (e *Engine) Unverified() int { return int(e.unverified.Load()) }

// served returns a record of the same page as an indexed one whose slot may be read. 0: there is
// none, or it was not found among the first maxShared.
func (e *Engine) served(rec uint32) uint32 {
	if e.unverified.Load() == 0 {
		return rec
	}
	for n := 0; rec != 0 && n < maxShared; n++ {
		ref, _ := e.slotOf(rec)
		if _, s := e.slot(ref); !s.unverified() {
			return rec
		}
		rec = e.links(rec).next
	}
	return 0
}

// vouch makes an unverified slot an ordinary one, because it was checked or leaves the index.
func (e *Engine) vouch(s *slot) {
	if s.unverified() {
		s.flags &^= pending
		e.unverified.Add(-1)
	}
}

func verifyHandle(ref uint32, s *slot) uint64 { return uint64(s.gen)<<32 | uint64(ref) }

// verifying resolves a handle: a slot that still holds what it did then, and can be found. nil if
// it does not.
func (e *Engine) verifying(handle uint64) (uint32, *slot) {
	ref, gen := uint32(handle), uint32(handle>>32)
	n, i := int(ref>>recordBits), int(ref&recordMask)
	if e.closed || n == 0 || n > e.nregion || e.regions[n] == nil || i >= e.regions[n].fresh {
		return 0, nil
	}
	if s := &e.regions[n].slots[i]; s.gen == gen && s.state == ready && !s.doomed() {
		return ref, s
	}
	return 0, nil
}

// NextVerify appends to out the chunks that must be checked before all that is held of a run of
// pages can be read. For each chunk it is the slot that holds the furthest of its pages, also
// behind gaps. When these are checked there may be others, which share pages with what was dropped.
// Nothing is leased. Digests are copied into buf, which is returned for its reuse; what was
// appended is valid until its bytes change.
func (e *Engine) NextVerify(o Owner, firstPage int, hashes, buf []byte,
	out []Verification) ([]Verification, []byte, error) {
	buf = buf[:0]
	if e.unverified.Load() == 0 {
		return out, buf, nil
	}
	e.mu.Lock()
	defer e.unlock()
	ow, err := e.owner(o)
	if err != nil {
		return out, buf, err
	}
	w, err := e.walk(ow.space.g, firstPage, hashes)
	if err != nil {
		return out, buf, err
	}
	for i := 0; i < w.chunks; i += probeGroup {
		n := min(probeGroup, w.chunks-i)
		refs := e.scratch.refs[:n]
		e.probe(ow.space, &w, i, n, refs)
		for j, rec := range refs {
			if rec == 0 || !e.at(rec, w.last(i+j)) {
				if rec, _ = e.lastHeld(ow.space, &w, i+j); rec == 0 {
					continue
				}
			}
			if e.served(rec) == 0 {
				ref, _ := e.slotOf(rec)
				var v Verification
				v, buf = e.verification(ref, buf)
				out = append(out, v)
			}
		}
	}
	return out, buf, nil
}

func (e *Engine) verification(ref uint32, buf []byte) (Verification, []byte) {
	r, s := e.slot(ref)
	v := Verification{
		Handle: verifyHandle(ref, s), Space: SpaceID(s.space), Region: r.id, Piece: r.num,
		Slot: ref & recordMask, Offset: r.offset(ref, 0), First: int(s.chunk) * r.ppc,
		Pages: int(s.pages), Tenant: r.tenants[ref&recordMask],
	}
	v.Prev, v.Hashes, buf = e.digests(ref, buf)
	return v, buf
}

// EndVerify ends the check of a chunk. With ok the chunk can be read from now on, otherwise it is
// dropped. It returns false and changes nothing if the chunk has left, or was found good by another
// check.
func (e *Engine) EndVerify(handle uint64, ok bool) (ended bool) {
	e.mu.Lock()
	defer e.unlock()
	ref, s := e.verifying(handle)
	if s == nil || !s.unverified() {
		return false
	}
	e.idx.migrate(migrateStep)
	e.tick++
	if ok {
		e.vouch(s)
		e.stats.Verified++
		return true
	}
	e.stats.Bad++
	e.stats.VerifyFailed++
	e.doom(ref, why.Lost)
	return true
}

// NeedsVerify reports whether what a handle names is still held, and still to be checked.
func (e *Engine) NeedsVerify(handle uint64) bool {
	e.mu.Lock()
	defer e.unlock()
	_, s := e.verifying(handle)
	return s != nil && s.unverified()
}

// Verified reports whether what a handle names is still held, and need not be checked any more.
func (e *Engine) Verified(handle uint64) bool {
	e.mu.Lock()
	defer e.unlock()
	_, s := e.verifying(handle)
	return s != nil && !s.unverified()
}
