package policy

// sieve is SIEVE (Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is Simpler than LRU, NSDI 2024). A
// hand goes round the slots from the oldest to the newest. It passes over slots used since its last
// visit and evicts the first that was not. A slot that enters is the newest and waits for the
// hand's whole round.
//
// Each group has a hand of its own.
//
// A slot's rank is the round in which the hand reaches it, then its order of entry. A slot that was
// held when its turn came is visited as soon as it is offered. Most such slots are prefixes whose
// last continuation just left.
type sieve struct {
	books
	rounds []uint64 // by group
}

// sieveRound is the lowest bit of the round in a rank. The bits below hold the order of entry.
const sieveRound = 40

func newSIEVE(Options) Policy { return &sieve{books: newBooks(1), rounds: make([]uint64, 1)} }

func (s *sieve) Name() string { return "sieve" }

func (s *sieve) Grow(region uint32, slots int) { s.grow(region, slots) }

func (s *sieve) Shrink(region uint32) { s.shrink(region) }

func (s *sieve) Enter(ref uint32, key uint64, _ uint32, group uint8) {
	s.need(group)
	round := &s.rounds[group]
	if q := &s.queues[group]; q.n > 0 { // the hand may have finished its round
		*round = max(*round, q.at(0).rank>>sieveRound)
	}
	s.enter(ref, key, group).rank = *round<<sieveRound | s.tick()&(1<<sieveRound-1)
}

func (s *sieve) need(group uint8) {
	if !s.has(group) {
		s.makeGroup(group)
		s.rounds = append(s.rounds, make([]uint64, len(s.of)-len(s.rounds))...)
	}
}

func (s *sieve) Use(ref uint32) { s.note(ref).uses = 1 }

func (s *sieve) Offer(ref uint32) {
	n := s.note(ref)
	s.queues[n.group].offer(&s.books, ref, n)
}

func (s *sieve) Hold(ref uint32) {
	n := s.note(ref)
	s.queues[n.group].hold(&s.books, n)
}

func (s *sieve) Leave(ref uint32, _ bool) {
	n := s.note(ref)
	s.queues[n.group].hold(&s.books, n)
	s.leave(n)
}

// Regroup has the new group's hand come to the slot in its present round, in its place among the
// others by the order of entry.
func (s *sieve) Regroup(ref uint32, group uint8) {
	s.need(group)
	n := s.note(ref)
	s.queues[n.group].rank(&s.books, ref, n,
		s.rounds[group]<<sieveRound|n.rank&(1<<sieveRound-1))
	s.regroup(ref, n, group, 0)
}

func (s *sieve) Copy(from, to uint32) { s.copy(from, to) }

// Inherit passes on a use that the hand has not seen.
func (s *sieve) Inherit(parent, child uint32) {
	p, c := s.note(parent), s.note(child)
	p.uses = max(p.uses, c.uses)
}

func (s *sieve) Victim(group uint8) (ref uint32, ok bool) {
	if !s.has(group) {
		return 0, false
	}
	q, round := &s.queues[group], &s.rounds[group]
	for {
		if ref, ok = q.first(); !ok {
			return 0, false
		}
		n := s.note(ref)
		*round = max(*round, n.rank>>sieveRound)
		if n.uses == 0 {
			return ref, true
		}
		n.uses = 0
		q.rank(&s.books, ref, n, (*round+1)<<sieveRound|n.rank&(1<<sieveRound-1))
	}
}

func (s *sieve) Work(int) {}
