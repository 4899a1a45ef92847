package policy

// sieve is SIEVE (Zhang, Yang, Yue, Vigfusson, Rashmi: SIEVE is Simpler than LRU, NSDI 2024). A
// hand goes round the slots from the oldest to the newest. It passes over slots used since its last
// visit and evicts the first that was not. A slot that enters is the newest and waits for the
// hand's whole round.
//
// A slot's rank is the round in which the hand reaches it, then its order of entry. A slot that was
// held when its turn came is visited as soon as it is offered. Most such slots are prefixes whose
// last continuation just left.
type sieve struct {
	books
	queues [1]queue
	round  uint64
}

// sieveRound is the lowest bit of the round in a rank. The bits below hold the order of entry.
const sieveRound = 40

func newSIEVE(Options) Policy { return &sieve{} }

func (s *sieve) Name() string { return "sieve" }

func (s *sieve) Grow(region uint32, slots int) { s.grow(region, slots, s.queues[:]) }

func (s *sieve) Shrink(region uint32) { s.shrink(region, s.queues[:]) }

func (s *sieve) Enter(ref uint32, key uint64, _ uint32) {
	if q := &s.queues[0]; q.n > 0 { // the hand may have finished its round
		s.round = max(s.round, q.at(0).rank>>sieveRound)
	}
	s.enter(ref, key).rank = s.round<<sieveRound | s.tick()&(1<<sieveRound-1)
}

func (s *sieve) Use(ref uint32) { s.note(ref).uses = 1 }

func (s *sieve) Offer(ref uint32) { s.queues[0].offer(&s.books, ref, s.note(ref)) }

func (s *sieve) Hold(ref uint32) { s.queues[0].hold(&s.books, s.note(ref)) }

func (s *sieve) Leave(ref uint32, _ bool) {
	n := s.note(ref)
	s.queues[0].hold(&s.books, n)
	s.leave(n)
}

func (s *sieve) Copy(from, to uint32) { s.copy(from, to) }

// Inherit passes on a use that the hand has not seen.
func (s *sieve) Inherit(parent, child uint32) {
	p, c := s.note(parent), s.note(child)
	p.uses = max(p.uses, c.uses)
}

func (s *sieve) Victim() (ref uint32, ok bool) {
	for {
		if ref, ok = s.queues[0].first(); !ok {
			return 0, false
		}
		n := s.note(ref)
		s.round = max(s.round, n.rank>>sieveRound)
		if n.uses == 0 {
			return ref, true
		}
		n.uses = 0
		s.queues[0].rank(&s.books, ref, n, (s.round+1)<<sieveRound|n.rank&(1<<sieveRound-1))
	}
}

func (s *sieve) Work(int) {}
