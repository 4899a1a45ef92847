package policy

// s3fifo is S3-FIFO (Yang, Zhang, Qiu, Yue, Vigfusson: FIFO Queues are All You Need for Cache
// Eviction, SOSP 2023). New chunks pass through a small queue of a tenth of the cache. Those not
// used again there are evicted before they reach the main queue. They are remembered for a while,
// and enter the main queue if they return.
type s3fifo struct {
	books
	sizes [][2]int // by group: resident, offered or not
	gone  ghosts
}

const (
	s3Small = iota
	s3Main
)

func newS3FIFO(o Options) Policy {
	return &s3fifo{books: newBooks(2), sizes: make([][2]int, 1), gone: ghosts{seed: o.Seed}}
}

func (s *s3fifo) Name() string { return "s3fifo" }

func (s *s3fifo) Grow(region uint32, slots int) {
	s.grow(region, slots)
	s.gone.resize(s.capacity - s.capacity/10)
}

func (s *s3fifo) Shrink(region uint32) {
	s.shrink(region)
	s.gone.resize(s.capacity - s.capacity/10)
}

func (s *s3fifo) Enter(ref uint32, key uint64, _ uint32, group uint8) {
	s.need(group)
	n := s.enter(ref, key, group)
	if g := s.gone.find(key); g != 0 {
		s.gone.remove(g)
		n.queue = s3Main
	}
	n.rank = s.tick()
	s.sizes[group][n.queue]++
}

func (s *s3fifo) need(group uint8) {
	if !s.has(group) {
		s.makeGroup(group)
		s.sizes = append(s.sizes, make([][2]int, len(s.of)-len(s.sizes))...)
	}
}

func (s *s3fifo) Use(ref uint32) {
	if n := s.note(ref); n.uses < 3 {
		n.uses++
	}
}

func (s *s3fifo) Offer(ref uint32) {
	n := s.note(ref)
	s.home(n).offer(&s.books, ref, n)
}

func (s *s3fifo) Hold(ref uint32) {
	n := s.note(ref)
	s.home(n).hold(&s.books, n)
}

func (s *s3fifo) Leave(ref uint32, evicted bool) {
	n := s.note(ref)
	s.home(n).hold(&s.books, n)
	s.sizes[n.group][n.queue]--
	if evicted && n.queue == s3Small && n.key != 0 {
		if s.gone.full() {
			s.gone.drop(0)
		}
		s.gone.add(0, n.key)
	}
	s.leave(n)
}

func (s *s3fifo) Regroup(ref uint32, group uint8) {
	s.need(group)
	n := s.note(ref)
	s.sizes[n.group][n.queue]--
	s.sizes[group][n.queue]++
	s.regroup(ref, n, group, n.queue)
}

func (s *s3fifo) Copy(from, to uint32) {
	n := s.copy(from, to)
	s.sizes[n.group][n.queue]++
}

// Inherit passes on the uses that the continuation has not spent yet.
func (s *s3fifo) Inherit(parent, child uint32) {
	p, c := s.note(parent), s.note(child)
	p.uses = max(p.uses, c.uses)
}

func (s *s3fifo) Victim(group uint8) (ref uint32, ok bool) {
	if !s.has(group) {
		return 0, false
	}
	small, main, sizes := s.queue(group, s3Small), s.queue(group, s3Main), &s.sizes[group]
	for {
		if small.n > 0 && (sizes[s3Small] >= max(s.room(group)/10, 1) || main.n == 0) {
			ref, _ = small.first()
			n := s.note(ref)
			if n.uses <= 1 {
				return ref, true
			}
			sizes[s3Small]--
			sizes[s3Main]++
			s.move(ref, n, s3Main, s.tick())
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
