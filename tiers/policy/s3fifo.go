package policy

// s3fifo is S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO Queues are All You Need for Cache
// Eviction, SOSP 2023). New chunks pass through a small queue of a tenth of the cache. Those not
// used again there are evicted before they reach the main queue. They are remembered for a while,
// and enter the main queue if they return.
type s3fifo struct {
	books
	queues [2]queue
	sizes  [2]int // resident, offered or not
	gone   ghosts
}

const (
	s3Small = iota
	s3Main
)

func newS3FIFO(o Options) Policy { return &s3fifo{gone: ghosts{seed: o.Seed}} }

func (s *s3fifo) Name() string { return "s3fifo" }

func (s *s3fifo) Grow(region uint32, slots int) {
	s.grow(region, slots, s.queues[:])
	s.gone.resize(s.capacity - s.capacity/10)
}

func (s *s3fifo) Shrink(region uint32) {
	s.shrink(region, s.queues[:])
	s.gone.resize(s.capacity - s.capacity/10)
}

func (s *s3fifo) Enter(ref uint32, key uint64, _ uint32) {
	n := s.enter(ref, key)
	if g := s.gone.find(key); g != 0 {
		s.gone.remove(g)
		n.queue = s3Main
	}
	n.rank = s.tick()
	s.sizes[n.queue]++
}

func (s *s3fifo) Use(ref uint32) {
	if n := s.note(ref); n.uses < 3 {
		n.uses++
	}
}

func (s *s3fifo) Offer(ref uint32) {
	n := s.note(ref)
	s.queues[n.queue].offer(&s.books, ref, n)
}

func (s *s3fifo) Hold(ref uint32) {
	n := s.note(ref)
	s.queues[n.queue].hold(&s.books, n)
}

func (s *s3fifo) Leave(ref uint32, evicted bool) {
	n := s.note(ref)
	s.queues[n.queue].hold(&s.books, n)
	s.sizes[n.queue]--
	if evicted && n.queue == s3Small && n.key != 0 {
		if s.gone.full() {
			s.gone.drop(0)
		}
		s.gone.add(0, n.key)
	}
	s.leave(n)
}

func (s *s3fifo) Copy(from, to uint32) { s.sizes[s.copy(from, to).queue]++ }

// Inherit passes on the uses that the continuation has not spent yet.
func (s *s3fifo) Inherit(parent, child uint32) {
	p, c := s.note(parent), s.note(child)
	p.uses = max(p.uses, c.uses)
}

func (s *s3fifo) Victim() (ref uint32, ok bool) {
	small, main := &s.queues[s3Small], &s.queues[s3Main]
	for {
		if small.n > 0 && (s.sizes[s3Small] >= max(s.capacity/10, 1) || main.n == 0) {
			ref, _ = small.first()
			n := s.note(ref)
			if n.uses <= 1 {
				return ref, true
			}
			s.sizes[s3Small]--
			s.sizes[s3Main]++
			s.move(s.queues[:], ref, n, s3Main, s.tick())
			continue
		}
		if ref, ok = main.first(); !ok {
			return 0, false
		}
		n := s.note(ref)
		if n.uses == 0 {
			return ref, true
		}
		n.uses--
		main.rank(&s.books, ref, n, s.tick())
	}
}

func (s *s3fifo) Work(int) {}
