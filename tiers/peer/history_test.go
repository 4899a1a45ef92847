package peer

import (
	"context"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"lookaside/tiers"
)

// history runs several sidecars against what must hold whatever happens: bytes that are lent are
// those of their pages for as long as they are, also when their owner has ended; whoever asks is
// answered soon, also beside lenders that do not answer; and when all is quiet each knows just what
// the others hold, and none has anything of another's.
type history struct {
	t      *testing.T
	rnd    *rand.Rand
	dir    string
	sides  []*side
	loans  map[*side][]loan
	spaces []*tiers.Space
	frozen map[*side]*sync.Mutex
	away   bool // the directory
	n      int
	log    []string

	borrowed, asked, voided, short int
}

func (h *history) step(format string, args ...any) {
	h.log = append(h.log, fmt.Sprintf(format, args...))
	if len(h.log) > 40 {
		h.log = h.log[1:]
	}
}

func (h *history) fatal(format string, args ...any) {
	h.t.Helper()
	for _, l := range h.log {
		h.t.Log(l)
	}
	h.t.Fatalf(format, args...)
}

func (h *history) add() {
	h.n++
	s := newSide(h.t, h.dir, fmt.Sprint("side-", h.n),
		sideOptions{regions: 2, bytes: int64(8+h.rnd.IntN(40)) * 4 * pageSize, share: 0.6,
			impatient: true})
	h.sides = append(h.sides, s)
	h.step("%s (%x) joins", s.name, s.gen)
}

func (h *history) pick() *side { return h.sides[h.rnd.IntN(len(h.sides))] }

// prefix is one of some hundred, many of which begin alike, from 1 to 40 pages long.
func (h *history) prefix() []byte {
	var tokens []byte
	for range 1 + h.rnd.IntN(5) {
		tokens = append(tokens, stretch(byte(h.rnd.IntN(3)), 1+h.rnd.IntN(8))...)
	}
	return prefix(tokens...)
}

func (h *history) borrow(s *side) {
	sp, hashes := h.spaces[h.rnd.IntN(len(h.spaces))], h.prefix()
	ctx, cancel := context.WithTimeout(context.Background(),
		time.Duration(1+h.rnd.IntN(300))*time.Millisecond)
	defer cancel()
	r := run(sp, hashes)
	var got []loan
	start := time.Now()
	var pages int
	var err error
	asked := false
	if h.rnd.IntN(2) == 0 {
		got, pages, asked = s.ask(r)
	}
	if !asked {
		pages, err = s.p.Borrow(ctx, r,
			func(chunk int, l Loan) { got = append(got, loan{l, chunk, r}) })
	} else if pages > 0 {
		h.asked++
	}
	if took := time.Since(start); took > patience/2 {
		h.fatal("%s waited %v", s.name, took)
	}
	h.step("%s borrows %d of %d pages in %d chunks: %v", s.name, pages, r.Pages(), len(got), err)
	next := 0
	for i, l := range got {
		if l.chunk != i || l.Pages < 1 || i < len(got)-1 && l.Pages != 4 {
			h.fatal("%s was lent %+v as number %d", s.name, l, i)
		}
		next += l.Pages
	}
	if next != pages || pages > 0 && err != nil {
		h.fatal("%s was lent %d pages, and told of %d: %v", s.name, next, pages, err)
	}
	h.borrowed += pages
	if pages < r.Pages() {
		h.short++
	}
	h.loans[s] = append(h.loans[s], got...)
	h.verify(s, got)
}

// verify reads what a sidecar has borrowed. What is void may be unmapped, but is never something
// else.
func (h *history) verify(s *side, loans []loan) {
	for _, l := range loans {
		if err := s.verify([]loan{l}); errorsIsUnmapped(err) {
			s.mu.Lock()
			gone := s.gone[l.Peer]
			s.mu.Unlock()
			if gone == 0 {
				h.fatal("%s: a region of a lender that is there is unmapped: %v", s.name, err)
			}
			h.voided++
		} else if err != nil {
			h.fatal("%s: %v", s.name, err)
		}
	}
}

func (h *history) give(s *side, n int) {
	l := h.loans[s]
	h.rnd.Shuffle(len(l), func(i, j int) { l[i], l[j] = l[j], l[i] })
	n = min(n, len(l))
	bad := h.rnd.IntN(20) == 0
	s.giveBack(l[:n], bad)
	h.step("%s returns %d loans, bad: %v", s.name, n, bad)
	h.loans[s] = l[n:]
}

// freeze stops a sidecar's replies.
func (h *history) freeze(s *side) {
	if h.frozen[s] != nil || len(h.frozen) > 1 {
		return
	}
	m := new(sync.Mutex)
	m.Lock()
	s.p.held.Store(m)
	h.frozen[s] = m
	h.step("%s freezes", s.name)
}

func (h *history) thaw(s *side) {
	if m := h.frozen[s]; m != nil {
		s.p.held.Store(nil)
		m.Unlock()
		delete(h.frozen, s)
	}
	h.step("%s thaws", s.name)
}

func (h *history) leave(i int) {
	s := h.sides[i]
	h.thaw(s)
	h.sides = append(h.sides[:i], h.sides[i+1:]...)
	delete(h.loans, s)
	h.step("%s leaves", s.name)
	s.close()
}

func (h *history) moveDir() {
	from, to := h.dir, h.dir+".away"
	if h.away {
		from, to = to, from
	}
	for err := os.ErrExist; err != nil; err = os.Rename(from, to) {
		// another sidecar may just make it, or a socket in it
		if h.away {
			_ = os.RemoveAll(to)
		}
	}
	h.away = !h.away
	h.step("the directory is away: %v", h.away)
}

func (h *history) act() {
	s := h.pick()
	switch op := h.rnd.IntN(100); {
	case op < 30:
		sp, hashes := h.spaces[h.rnd.IntN(len(h.spaces))], h.prefix()
		n := s.store(sp, hashes)
		h.step("%s stores %d of %d pages", s.name, n, len(hashes)/32)
	case op < 62:
		h.borrow(s)
	case op < 75:
		h.verify(s, h.loans[s])
	case op < 88:
		h.give(s, h.rnd.IntN(20))
	case op < 89:
		sp := h.spaces[h.rnd.IntN(len(h.spaces))]
		s.clear(sp)
		h.step("%s clears a space", s.name)
	case op < 91:
		h.freeze(s)
	case op < 94:
		for f := range h.frozen {
			h.thaw(f)
			break
		}
	case op < 95 && len(h.sides) > 2:
		h.leave(h.rnd.IntN(len(h.sides)))
	case op < 97 && len(h.sides) < 6:
		h.add()
	case op < 98:
		h.moveDir()
	case op < 99:
		_ = s.p.Touch(h.t.Context(), run(h.spaces[0], h.prefix()))
	default:
		s.p.Status()
	}
}

// settle has all quiet, and then each must know what the others hold.
func (h *history) settle() {
	for s := range h.frozen {
		h.thaw(s)
	}
	if h.away {
		h.moveDir()
	}
	for s := range h.loans {
		h.verify(s, h.loans[s])
		h.give(s, len(h.loans[s]))
	}
	for _, s := range h.sides {
		eventually(h.t, s.name+" knows all, and no others", func() bool {
			for _, o := range h.sides {
				if o != s && s.p.peersBit(o.gen) < 0 {
					return false
				}
			}
			return len(s.p.Status().Lenders) == len(h.sides)-1
		})
		for end := time.Now().Add(patience); s.e.Stats().OpenLoans > 0; time.Sleep(
			time.Millisecond) {
			if time.Now().After(end) {
				for _, o := range h.sides {
					h.t.Logf("%s %x: %+v", o.name, o.gen, o.p.Status())
				}
				h.fatal("%s has not got back what it lent: %+v", s.name, s.e.Stats())
			}
		}
		if err := s.e.Check(); err != nil {
			h.fatal("%s: %v", s.name, err)
		}
	}
	for _, s := range h.sides {
		var why string
		ok := func() bool {
			who := map[uint64]uint64{}
			for _, o := range h.sides {
				if bit := s.p.peersBit(o.gen); o != s && bit >= 0 {
					walkEngine(o, func(k uint64) { who[k] |= 1 << bit })
				}
			}
			for s.p.hints.sweep() {
			}
			missing := 0
			for k, want := range who {
				got := s.p.hints.who(k, ^uint64(0))
				if got&^want != 0 {
					why = fmt.Sprintf("page %x is said to be held by %b, it is by %b", k, got, want)
					return false
				}
				missing += bits.OnesCount64(want &^ got)
			}
			st := s.p.Status()
			why = fmt.Sprintf("%d pages in hints, %d are held, %d are not known, %d hints were wrong", st.HintPages, len(who), missing, st.HintsWrong)
			// what was forgotten may have come back just then
			return st.HintPages <= len(who) && missing <= int(st.HintsWrong)
		}
		for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				h.fatal("%s: %s", s.name, why)
			}
		}
		if st := s.p.Status(); st.Malformed != 0 {
			h.fatal("%s: %+v", s.name, st)
		}
	}
}

func TestHistories(t *testing.T) {
	for _, seed := range seeds() {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			parent := peerDir(t)
			h := &history{
				t: t, rnd: seeded(seed), dir: filepath.Join(parent, "peers"),
				loans: map[*side][]loan{}, frozen: map[*side]*sync.Mutex{},
				spaces: []*tiers.Space{space("one", 4), space("two", 4)},
			}
			defer func() { // so that all can be closed
				for s := range h.frozen {
					h.thaw(s)
				}
			}()
			for range 4 {
				h.add()
			}
			for i := range *stepsFlag {
				h.act()
				if i%(*stepsFlag/4) == *stepsFlag/4-1 {
					h.settle()
				}
			}
			t.Logf("%d pages borrowed, some of them %d times by one message, %d lookups cut short, %d loans found void, %d sidecars", h.borrowed, h.asked, h.short, h.voided, h.n)
			if h.borrowed == 0 || h.asked == 0 {
				t.Error("nothing was borrowed: the history tests nothing")
			}
			for len(h.sides) > 0 {
				h.leave(0)
			}
		})
	}
}
