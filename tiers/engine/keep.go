package engine

import "lookaside/tiers"

// Keeping: a driver writes down what the arena holds where the next process finds it. The engine
// tells it how regions are carved (Config.OnCarve, OnUncarve), which chunks are new (NextUnkept),
// and which are gone (Config.OnGone). Publish is the last step of writing a chunk down. So what is
// written down is held at any time, and no slot of it is granted.
//
// Nothing is leased: a chunk may leave while it is written down. Then Publish refuses it.

// MaxPieces is the most pieces that there are at a time. Their numbers begin with 1.
const MaxPieces = maxRegions

// Piece is a region that was added carved, or a part of one that was carved for a geometry. It has
// slots of that geometry only.
type Piece struct {
	Num    uint32 // other pieces do not have it until this one is gone
	Region uint32
	Placement
	Geometry tiers.Geometry // PageTokens is 0
	Slots    int
}

func (r *region) piece() Piece {
	return Piece{Num: r.num, Region: r.id, Placement: r.at, Geometry: r.class.geometry,
		Slots: len(r.slots)}
}

// recent are slots that have become ready, or grown, of late. It is a ring, so that a burst costs
// nothing but that the oldest are left to those who walk over all slots.
type recent struct {
	ring []uint64 // handles
	head int
	n    int
}

// maxRecent bounds the ring.
const maxRecent = 1 << 16

func (u *recent) push(handle uint64) {
	if u.n == len(u.ring) {
		if u.n == maxRecent {
			u.head = (u.head + 1) % u.n // the oldest
			u.n--
		} else {
			bigger := make([]uint64, max(64, 2*u.n))
			for i := range u.n {
				bigger[i] = u.ring[(u.head+i)%u.n]
			}
			u.ring, u.head = bigger, 0
		}
	}
	u.ring[(u.head+u.n)%len(u.ring)] = handle
	u.n++
}

func (u *recent) pop() (handle uint64) {
	handle = u.ring[u.head]
	u.head, u.n = (u.head+1)%len(u.ring), u.n-1
	return handle
}

// unkept are the chunks that wait to be written down.
type unkept struct {
	recent
	awake bool // Wake was called, and NextUnkept has not come to the end since
}

// came notes that a ready slot has pages that it had not before.
func (e *Engine) came(ref uint32) {
	r, s := e.slot(ref)
	if !e.cfg.Keep || r.foreign {
		return
	}
	if e.unkept.n == maxRecent {
		e.stats.KeepLost++
	}
	e.unkept.push(verifyHandle(ref, s))
	if !e.unkept.awake && e.cfg.Wake != nil {
		e.unkept.awake = true
		e.cfg.Wake(WorkKeep)
	}
}

// NextUnkept returns the oldest of the chunks that were stored, came up, were moved, were copied or
// have grown of late. It may name a chunk twice. Those before the last 65,536 are not named any
// more: NextPatrol finds them, and Counters.KeepLost counts them. What was restored is not named.
// Digests are in buf, which is returned for its reuse. false: there is none for now; Config.Wake is
// called with WorkKeep when there is. It is for engines with Config.Keep.
func (e *Engine) NextUnkept(buf []byte) (Verification, []byte, bool) {
	e.mu.Lock()
	defer e.unlock()
	for e.unkept.n > 0 {
		if ref, _, s := e.patrolled(e.unkept.pop()); s != nil {
			v, buf := e.verification(ref, buf[:0])
			return v, buf, true
		}
	}
	e.unkept.awake = false
	return Verification{}, buf, false
}

// Publish calls publish if a chunk is held that has been written down with so many pages: under the
// handle that NextUnkept, NextPatrol or a CascadeItem named it by, verified, and with no fewer
// pages. It reports whether it did. From then on it is the caller's to forget the chunk when
// Config.OnGone names its slot. publish is called under the engine's lock, so it must be quick and
// must not call the engine.
func (e *Engine) Publish(handle uint64, pages int, publish func()) bool {
	e.mu.Lock()
	defer e.unlock()
	_, r, s := e.patrolled(handle)
	if s == nil || r.foreign || pages < 1 || pages > int(s.pages) {
		return false
	}
	publish()
	return true
}
