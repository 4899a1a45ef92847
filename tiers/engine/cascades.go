package engine

import (
	"fmt"
	"math/bits"
	"slices"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tenant"
	"lookaside/tiers/worth"
)

// MaxTiers bounds the tiers below the arena.
const MaxTiers = 8

// Admission is when a chunk goes to a tier.
type Admission uint8

const (
	AdmitStored Admission = iota // when it is committed, or comes up from a tier below
	AdmitReused                  // at its first use after that
	// when it will soon be evicted: written ahead, so that evicting it loses nothing
	AdmitEvicted
	AdmitLearned // as AdmitEvicted, if it is worth that: see package worth
	AdmitNever
)

func (a Admission) String() string {
	if a > AdmitNever {
		return fmt.Sprintf("Admission(%d)", a)
	}
	return [...]string{"stored", "reused", "evicted", "learned", "never"}[a]
}

// TierAdmission is what the engine knows of one tier.
type TierAdmission struct {
	Admit Admission
	// Queue bounds the chunks that wait to be written to the tier. What comes when it is full is
	// shed. Default 4,096.
	Queue int
	// RoomBytes is how much the tier has room for; 0 is unknown. Only AdmitLearned needs it.
	RoomBytes int64
	// Self marks the arena as its own lowest tier. To store a chunk there means to write its entry;
	// its bytes do not move. A partly filled chunk is queued at once. A promoted chunk is queued
	// whatever tier it comes from. A restored chunk is held. The arena admits what is stored, and
	// wants NoExtend.
	Self bool
}

const (
	defaultQueue        = 4096
	defaultPartialDelay = time.Second
	// DefaultLowWater is Config.LowWater if that is 0. It gives a tier time to write what is
	// evicted next. A larger part would also write chunks that are used again before their turn.
	DefaultLowWater = 1.0 / 8
)

// validateTiers checks the tiers, and replaces them by a copy with defaults.
func (c *Config) validateTiers() error {
	if len(c.Tiers) > MaxTiers {
		return fmt.Errorf("%w: %d tiers, at most %d", tiers.ErrInvalid, len(c.Tiers), MaxTiers)
	}
	c.Tiers = slices.Clone(c.Tiers)
	for i := range c.Tiers {
		t := &c.Tiers[i]
		if t.Queue == 0 {
			t.Queue = defaultQueue
		}
		if t.Admit > AdmitNever || t.Queue < 1 || t.Queue > 1<<24 {
			return fmt.Errorf("%w: tier %d admits %v with a queue of %d", tiers.ErrInvalid, i,
				t.Admit, t.Queue)
		}
		if t.Self && (t.Admit != AdmitStored || !c.NoExtend) {
			return fmt.Errorf("%w: tier %d is the arena itself and admits %v, with NoExtend %v",
				tiers.ErrInvalid, i, t.Admit, c.NoExtend)
		}
	}
	return nil
}

// CascadeItem is a chunk to write to a tier. Its slot is neither evicted nor moved until
// EndCascade, and these pages of it do not change.
type CascadeItem struct {
	Handle uint64
	Space  SpaceID
	Region uint32
	Offset uint64 // bytes, of its first page
	First  int    // index of its first page
	Pages  int
	Prev   []byte // digest of the page before; empty if there is none, or it is not known
	Hashes []byte // digests of the pages, end to end

	Unverified   bool      // to be checked before it is written
	VerifyHandle uint64    // for EndVerify and Verified
	Tenant       tenant.ID // whose chunk it is
}

// route is how a slot stands to the tiers below: a bit for each.
type route struct {
	held  uint8 // that have all its pages
	whole uint8 // that it is queued for
	part  uint8 // that it is queued for as a partly filled chunk
	busy  uint8 // that it is being written to
	// declined are those that it is not worth writing to. It is judged again after its next use.
	declined uint8
	traits   traits
	// Of a cold slot that is not in use: its neighbours among the class's, by ref.
	next, prev uint32
}

// cascades are the queues of all tiers.
type cascades struct {
	queues  [MaxTiers]cascadeQueue
	stored  uint8 // tiers that admit what is stored
	self    uint8 // those of them that are the arena itself
	reused  uint8
	evicted uint8          // tiers that admit what is evicted, or what is learned
	learned uint8          // those of them that admit what is learned
	owner   owner          // of the leases on what is being written
	learner *worth.Learner // nil if no tier needs one
	room    int64          // bytes, of the largest tier that admits what is learned; 0: unknown
}

// cascadeQueue is what waits to be written to one tier: whole chunks in their order, and partly
// filled ones in theirs, each until it has not grown for a while. An entry whose slot does not say
// that it is queued is void.
type cascadeQueue struct {
	whole, part fifo
	limit       int
	queued      int // that are not void
	shed        uint64
	declined    uint64
	awake       bool // Wake was called, and NextCascades has not come to the end since
}

type fifo struct {
	entries []queued
	head    int
}

type queued struct {
	due      int64
	ref, gen uint32
	pages    uint16
}

func (e *Engine) setUpCascades() {
	e.cascades.owner.all.owned = true
	for i, t := range e.cfg.Tiers {
		e.cascades.queues[i].limit = t.Queue
		bit := uint8(1) << i
		if t.Self {
			e.cascades.self |= bit
		}
		switch t.Admit {
		case AdmitStored:
			e.cascades.stored |= bit
		case AdmitReused:
			e.cascades.reused |= bit
		case AdmitEvicted:
			e.cascades.evicted |= bit
		case AdmitLearned:
			e.cascades.evicted |= bit
			e.learnFor(bit, t.RoomBytes)
		}
	}
}

// route is nil if there are no tiers.
func (a *arena) route(ref uint32) *route {
	r := a.regions[ref>>recordBits]
	if r.routes == nil {
		return nil
	}
	return &r.routes[ref&recordMask]
}

// admit queues a ready slot for those of the given tiers that neither have it nor are getting it.
// It returns the tiers whose queues were full.
func (e *Engine) admit(ref uint32, tiers uint8) (shed uint8) {
	t := e.route(ref)
	if t == nil {
		return 0
	}
	r, s := e.slot(ref)
	isWhole := int(s.pages) == r.ppc
	x := queued{ref: ref, gen: s.gen, pages: s.pages}
	for left := tiers &^ (t.held | t.whole | t.busy); left != 0; left &= left - 1 {
		i := bits.TrailingZeros8(left)
		bit := uint8(1) << i
		q := &e.cascades.queues[i]
		switch {
		case t.part&bit != 0 && isWhole:
			t.part &^= bit
			q.queued--
		case t.part&bit != 0:
			continue
		case q.queued >= q.limit:
			q.shed++
			shed |= bit
			continue
		}
		q.queued++
		if isWhole {
			e.push(&q.whole, q.limit, (*route).isWhole, bit, x)
			t.whole |= bit
			e.wake(i)
		} else {
			x.due = e.cfg.Now()
			if e.cascades.self&bit != 0 {
				e.wake(i)
			} else {
				x.due += int64(e.cfg.PartialDelay)
			}
			e.push(&q.part, q.limit, (*route).isPart, bit, x)
			t.part |= bit
		}
	}
	return shed
}

func (t *route) isWhole(bit uint8) bool { return t.whole&bit != 0 }

func (t *route) isPart(bit uint8) bool { return t.part&bit != 0 }

// push appends an entry. The queue holds at most limit valid entries and at most limit void ones.
// When it is full, push removes the void ones.
func (e *Engine) push(f *fifo, limit int, in func(*route, uint8) bool, bit uint8, x queued) {
	if len(f.entries) == cap(f.entries) && f.head > 0 || len(f.entries) >= 2*limit {
		n := 0
		for _, y := range f.entries[f.head:] {
			if t := e.queuedRoute(y); t != nil && in(t, bit) {
				f.entries[n] = y
				n++
			}
		}
		f.entries, f.head = f.entries[:n], 0
	}
	f.entries = append(f.entries, x)
}

// forget takes out what is queued of a slot.
func (f *fifo) forget(ref uint32) {
	left := slices.DeleteFunc(f.entries[f.head:], func(x queued) bool { return x.ref == ref })
	f.entries = f.entries[:f.head+len(left)]
}

// queuedRoute is the route of an entry's slot, nil if that is another chunk's by now.
func (a *arena) queuedRoute(x queued) *route {
	r, i := a.regions[x.ref>>recordBits], int(x.ref&recordMask)
	if i >= r.fresh || r.slots[i].gen != x.gen || r.slots[i].state != ready {
		return nil
	}
	return &r.routes[i]
}

func (e *Engine) wake(tier int) {
	if q := &e.cascades.queues[tier]; !q.awake && e.cfg.Wake != nil {
		q.awake = true
		e.cfg.Wake(Work(tier))
	}
}

// unqueue voids what is queued of a slot that leaves, and forgets what tiers have of it. What is
// evicted without having been written is shed: if no tier has it, unqueue returns the tiers, as
// bits, that it was meant for.
func (e *Engine) unqueue(ref uint32, evicted bool) (shed uint8) {
	t := e.route(ref)
	if t == nil {
		return 0
	}
	lost := t.whole | t.part
	for left := lost; left != 0; left &= left - 1 {
		e.cascades.queues[bits.TrailingZeros8(left)].queued--
	}
	if evicted {
		lost |= e.cascades.evicted &^ t.held &^ t.declined
		for left := lost; left != 0; left &= left - 1 {
			e.cascades.queues[bits.TrailingZeros8(left)].shed++
		}
	}
	if t.held == 0 {
		shed = lost &^ e.cascades.self
	}
	t.held, t.whole, t.part, t.declined, t.traits = 0, 0, 0, 0, traits{}
	return shed
}

// grown notes that a slot has pages that no tier has.
func (e *Engine) grown(ref uint32) {
	if t := e.route(ref); t != nil {
		_, s := e.slot(ref)
		t.held = 0
		s.flags &^= reused
		e.admit(ref, e.cascades.stored|t.part) // what is whole by now waits among the whole ones
	}
}

// reuse queues a slot that is hit for the first time.
func (e *Engine) reuse(ref uint32) {
	_, s := e.slot(ref)
	s.flags |= reused
	if e.admit(ref, e.cascades.reused) != 0 {
		s.flags &^= reused
	}
}

// admitPromoted queues a promoted chunk for three kinds of tiers: those above its source that admit
// what is stored, all that admit what is used again, and the arena itself unless another slot of it
// has the chunk.
func (e *Engine) admitPromoted(ref uint32, from int) {
	tiers := e.cascades.stored
	if t := e.route(ref); t != nil && from >= 0 && from < len(e.cfg.Tiers) {
		t.held |= 1 << from
		tiers &= 1<<from - 1 | e.cascades.self
	}
	if _, s := e.slot(ref); s.flags&twin != 0 {
		tiers &^= e.cascades.self
	}
	e.admit(ref, tiers)
	e.reuse(ref)
}

// NextCascades appends to out up to max chunks to write to a tier next. EndCascade ends each.
// Digests are copied into buf, which is returned for its reuse; the items are valid until its bytes
// change. Fewer than max: there are no more for now, and Config.Wake is called when there are.
func (e *Engine) NextCascades(tier, max int, buf []byte, out []CascadeItem) ([]CascadeItem,
	[]byte) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed || tier < 0 || tier >= len(e.cfg.Tiers) {
		return out, buf
	}
	buf = buf[:0]
	q, bit := &e.cascades.queues[tier], uint8(1)<<tier
	for n := 0; n < max; n++ {
		ref := e.pop(q, bit)
		if ref == 0 && e.cascades.evicted&bit != 0 {
			ref = e.chill(bit)
		}
		if ref == 0 {
			q.awake = false
			break
		}
		var item CascadeItem
		item, buf = e.startCascade(ref, bit, buf)
		out = append(out, item)
	}
	return out, buf
}

// pop removes the next slot to write to a tier from its queue, and returns it. 0: there is none
// now.
func (e *Engine) pop(q *cascadeQueue, bit uint8) uint32 {
	for q.whole.head < len(q.whole.entries) {
		x := q.whole.entries[q.whole.head]
		q.whole.head++
		if t := e.queuedRoute(x); t != nil && t.whole&bit != 0 {
			t.whole &^= bit
			q.queued--
			return x.ref
		}
	}
	for now := e.cfg.Now(); q.part.head < len(q.part.entries) &&
		q.part.entries[q.part.head].due <= now; {
		x := q.part.entries[q.part.head]
		q.part.head++
		t := e.queuedRoute(x)
		if t == nil || t.part&bit == 0 {
			continue
		}
		if _, s := e.slot(x.ref); s.pages != x.pages || s.granted > 0 {
			x.pages, x.due = s.pages, now+int64(e.cfg.PartialDelay)
			e.push(&q.part, q.limit, (*route).isPart, bit, x)
			continue
		}
		t.part &^= bit
		q.queued--
		return x.ref
	}
	return 0
}

// startCascade leases a slot to be written to a tier. It is not a use.
func (e *Engine) startCascade(ref uint32, bit uint8, buf []byte) (CascadeItem, []byte) {
	r, s := e.slot(ref)
	if s.idle() {
		r.lease()
		if s.flags&cold != 0 {
			if e.kin(ref).child == 0 {
				e.uncool(r, ref)
			}
		} else if s.children == 0 {
			e.hold(ref)
		}
	}
	s.pins++
	e.leases.pins++
	e.route(ref).busy |= bit
	o := &e.cascades.owner
	o.slots.add(ref, 1<<31)
	x := e.leases.add(cascadeLease, o, []uint32{ref})
	x.errand.tier, x.n = bit, int(s.pages)

	item := CascadeItem{
		Handle: x.handle(), Space: SpaceID(s.space), Region: r.id, Offset: r.offset(ref, 0),
		First: int(s.chunk) * r.ppc, Pages: int(s.pages),
		Unverified: s.unverified(), VerifyHandle: verifyHandle(ref, s),
		Tenant: r.tenants[ref&recordMask],
	}
	item.Prev, item.Hashes, buf = e.digests(ref, buf)
	return item, buf
}

// EndCascade ends the writing of a chunk; ok: the tier has it now. dropped reports that the chunk
// was cleared, or found bad, meanwhile, and that the tier should forget it. A handle that has ended
// changes nothing.
func (e *Engine) EndCascade(handle uint64, ok bool) (dropped bool) {
	e.mu.Lock()
	defer e.unlock()
	if e.closed {
		return false
	}
	x, err := e.leases.find(nil, cascadeLease, handle)
	if err != nil {
		return false
	}
	ref, bit := x.slots[0], x.errand.tier
	_, s := e.slot(ref)
	t := e.route(ref)
	t.busy &^= bit
	switch dropped = s.doomed(); {
	case dropped:
		e.gone(ref)
	case int(s.pages) != x.n:
		e.admit(ref, bit) // it has grown
	case ok:
		t.held |= bit
	default:
		s.flags &^= reused // its next use offers it again
	}
	e.endLease(x)
	return dropped
}

// hurriedDelay is PartialDelay after HurryPartials: a chunk that is just growing is looked at again
// after it.
const hurriedDelay = 10 * time.Millisecond

// HurryPartials makes partly filled chunks due now, and from now on, instead of after PartialDelay.
// It is for the end of the process.
func (e *Engine) HurryPartials() {
	e.mu.Lock()
	defer e.unlock()
	e.cfg.PartialDelay = min(e.cfg.PartialDelay, hurriedDelay)
	now := e.cfg.Now()
	for i := range e.cascades.queues {
		q := &e.cascades.queues[i].part
		for j := q.head; j < len(q.entries); j++ {
			q.entries[j].due = min(q.entries[j].due, now)
		}
		e.wake(i)
	}
}

// CascadeQueue returns how many chunks wait to be written to a tier. shed is how many were not
// written, because the queue was full or they were evicted first.
func (e *Engine) CascadeQueue(tier int) (queued int, shed uint64) {
	e.mu.Lock()
	defer e.unlock()
	if tier < 0 || tier >= len(e.cfg.Tiers) {
		return 0, 0
	}
	q := &e.cascades.queues[tier]
	return q.queued, q.shed
}

// Declined returns how many chunks were not worth writing to a tier that admits what is learned.
func (e *Engine) Declined(tier int) uint64 {
	e.mu.Lock()
	defer e.unlock()
	if tier < 0 || tier >= len(e.cfg.Tiers) {
		return 0
	}
	return e.cascades.queues[tier].declined
}

// duePartials wakes the tiers for which a partly filled chunk has waited long enough.
func (e *Engine) duePartials(now int64) {
	for i := range e.cfg.Tiers {
		if f := &e.cascades.queues[i].part; f.head < len(f.entries) &&
			f.entries[f.head].due <= now {
			e.wake(i)
		}
	}
}

// Cold slots. A class that has to evict soon (fewer than LowWater of its slots are free) chooses
// its victims ahead for the tiers that admit what is evicted. A victim leaves the policy's order
// and is written. Then it waits, oldest first, to be evicted; a use brings it back into the
// policy's order. A slot is tried once only: if a tier does not take it, it is lost when it is
// evicted, and counted.

// slack is how many slots more a class should have free or cold.
func (e *Engine) slack(c *class) int {
	return int(e.cfg.LowWater*float64(c.slots+c.uncarved)) - (c.free + c.uncarved) - c.cold
}

// chill chooses the next victim of some class to be written to a tier. 0: there is none to choose
// now.
func (e *Engine) chill(bit uint8) uint32 {
	for left := clearSlice; ; {
		var c *class
		for _, r := range e.regions[1 : e.nregion+1] {
			if r.class != nil && !r.foreign && !r.draining && e.slack(r.class) > 0 {
				if _, ok := e.nextVictim(r.class, chillOrder); ok {
					c = r.class
					break
				}
			}
		}
		if c == nil {
			return 0
		}
		ref, _ := e.nextVictim(c, chillOrder)
		e.hold(ref)
		r, _ := e.slot(ref)
		e.judge(r, ref)
		e.freeze(r, ref)
		t := e.route(ref)
		e.admit(ref, e.cascades.evicted&^t.declined&^bit)
		if (t.held|t.declined)&bit == 0 {
			if t.part&bit != 0 {
				// The slot was a victim before and waits as a partly filled chunk. Its old entry
				// goes: it would become valid again when the slot is queued next.
				q := &e.cascades.queues[bits.TrailingZeros8(bit)]
				q.part.forget(ref)
				t.part &^= bit
				q.queued--
			}
			return ref
		}
		if left--; left == 0 {
			e.wake(bits.TrailingZeros8(bit)) // the rest another time
			return 0
		}
	}
}

// wantVictims wakes the tiers that admit what is evicted if a class should choose victims.
func (e *Engine) wantVictims(c *class) {
	if e.cascades.evicted != 0 && !c.isForeign && e.slack(c) > 0 {
		for left := e.cascades.evicted; left != 0; left &= left - 1 {
			e.wake(bits.TrailingZeros8(left))
		}
	}
}

// countCold counts slots that are cold from now on, or with a negative number no longer.
func (e *Engine) countCold(r *region, ref uint32, n int) {
	r.class.cold += n
	r.class.parts[e.orderOf(r, ref)].cold += n
}

// cool appends an idle cold slot to those of its order that are evicted next.
func (e *Engine) cool(r *region, ref uint32) {
	t, p := e.route(ref), &r.class.parts[e.orderOf(r, ref)]
	t.next, t.prev = 0, p.coldLast
	if p.coldLast != 0 {
		e.route(p.coldLast).next = ref
	} else {
		p.coldFirst = ref
	}
	p.coldLast = ref
}

// uncool takes a slot out of the list of those that are evicted next.
func (e *Engine) uncool(r *region, ref uint32) {
	t, p := e.route(ref), &r.class.parts[e.orderOf(r, ref)]
	if t.prev != 0 {
		e.route(t.prev).next = t.next
	} else {
		p.coldFirst = t.next
	}
	if t.next != 0 {
		e.route(t.next).prev = t.prev
	} else {
		p.coldLast = t.prev
	}
	t.next, t.prev = 0, 0
}

// freeze makes an idle slot cold, all of whose continuations are. What it continues may be chosen
// next, as if the slot were gone.
func (e *Engine) freeze(r *region, ref uint32) {
	_, s := e.slot(ref)
	s.flags |= cold
	e.countCold(r, ref, 1)
	if e.kin(ref).child == 0 {
		e.cool(r, ref)
	}
	if e.orphan(ref) {
		return
	}
	parent := e.kin(ref).parent
	_, p := e.slot(parent)
	if p.state == ready && !p.doomed() {
		r.class.policy.Inherit(parent, ref)
	}
	p.stamp = max(p.stamp, s.stamp)
	p.children--
	e.offerEnd(parent)
}

// thaw ends a slot's being cold, because it is used, and that of all that it continues.
func (e *Engine) thaw(ref uint32) {
	r, s := e.slot(ref)
	if s.idle() && e.kin(ref).child == 0 {
		e.uncool(r, ref)
	}
	e.warm(r, ref)
}

// warm ends a slot's being cold. It is in no list any more.
func (e *Engine) warm(r *region, ref uint32) {
	_, s := e.slot(ref)
	s.flags &^= cold
	e.countCold(r, ref, -1)
	e.route(ref).declined = 0
	if e.orphan(ref) {
		return
	}
	parent := e.kin(ref).parent
	_, p := e.slot(parent)
	p.children++
	if p.state == ready && !p.doomed() {
		e.hold(parent)
	}
}

// discard ends a slot's being cold, because it leaves. What it continues stays as it is.
func (e *Engine) discard(r *region, ref uint32) {
	_, s := e.slot(ref)
	if s.idle() && e.kin(ref).child == 0 {
		e.uncool(r, ref)
	}
	s.flags &^= cold
	e.countCold(r, ref, -1)
	if !e.orphan(ref) {
		_, p := e.slot(e.kin(ref).parent)
		p.children++ // until disown
	}
}
