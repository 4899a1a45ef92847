package stack

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// lenders are peers in memory, for histories that are to be repeatable in a bubble: they hold some
// prefixes, lie in their hints, are slow, fail, and go. What is returned to them is overwritten at
// once.
type lenders struct {
	space *tiers.Space

	mu     sync.Mutex
	rnd    *rand.Rand
	held   map[string]bool // digests of pages
	list   []stored
	peer   uint64 // those before it are gone
	mem    []byte // of region lentRegion
	out    map[uint64]lentRun
	last   uint64
	faults bool
	calls  int
	wrong  error
	asks   sync.WaitGroup
}

// lentRun is where a loan lies in mem, and whose it is.
type lentRun struct {
	from, to int
	peer     uint64
}

const (
	lentRegion = 4000
	lentBy     = 7 // the number of whoever holds all of a run
)

func newLenders(space *tiers.Space, rnd *rand.Rand) *lenders {
	return &lenders{space: space, rnd: rnd, held: map[string]bool{}, peer: 1,
		out: map[uint64]lentRun{}}
}

// hold has some peer hold pages of a prefix.
func (l *lenders) hold(p tiertest.Prefix, n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at := range n {
		l.held[string(p.Digests(at, at+1, 32))] = true
	}
	l.list = append(l.list, stored{p, n})
}

// chance is whether one of n comes up, with faults only.
func (l *lenders) chance(n int) bool { return l.faults && l.rnd.IntN(n) == 0 }

func (l *lenders) of(c tiers.Run) (n int) {
	for n < c.Pages() && l.held[string(c.Hashes[n*32:(n+1)*32])] {
		n++
	}
	return n
}

func (l *lenders) Contains(run tiers.Run, held []uint16) (pages, by int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	whole := true
	for i := range held {
		c := run.Chunk(i)
		n := l.of(c)
		switch {
		case l.chance(10):
			n = c.Pages()
		case l.chance(10):
			n = 0
		}
		if n < c.Pages() && !whole {
			n = 0
		}
		if whole {
			pages += n
		}
		whole = whole && n == c.Pages()
		held[i] = uint16(n)
	}
	if pages == 0 || l.chance(5) {
		return pages, -1
	}
	return pages, lentBy
}

var errNobody = errors.New("nobody lends it")

func (l *lenders) Borrow(ctx context.Context, run tiers.Run,
	out func(chunk int, l engine.Loan)) (pages int, err error) {
	l.mu.Lock()
	l.calls++
	peer := l.peer // may be gone when it is heard
	wait, fail := time.Duration(0), false
	if l.chance(3) {
		wait = time.Duration(l.rnd.IntN(100)) * time.Millisecond
	}
	fail = l.chance(8)
	l.mu.Unlock()
	if err := tiertest.Wait(ctx, wait); err != nil && wait > 0 {
		return 0, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range run.Chunks() {
		c := run.Chunk(i)
		n := l.of(c)
		if l.chance(20) {
			n = l.rnd.IntN(n + 1)
		}
		if n == 0 || fail || l.chance(20) {
			break
		}
		c.Hashes = c.Hashes[:n*32]
		at := len(l.mem)
		l.mem = append(l.mem, make([]byte, n*pageBytes)...)
		tiertest.FillRun(l.mem[at:], c)
		l.last++
		l.out[l.last] = lentRun{at, len(l.mem), peer}
		out(i, engine.Loan{Peer: peer, Region: lentRegion, Offset: uint64(at), Pages: n,
			Handle: l.last})
		if pages += n; n < ppc {
			break
		}
	}
	if pages == 0 {
		err = errNobody
	}
	return pages, err
}

func (l *lenders) Ask(run tiers.Run, peer int, done func(loans []engine.Loan)) bool {
	l.mu.Lock()
	ok := !l.chance(3)
	if peer != lentBy {
		l.wrong = fmt.Errorf("peer %d is asked, and was not named", peer)
	}
	l.mu.Unlock()
	if ok {
		run.Hashes = slices.Clone(run.Hashes)
		l.asks.Go(func() {
			var loans []engine.Loan
			_, _ = l.Borrow(context.Background(), run,
				func(_ int, x engine.Loan) { loans = append(loans, x) })
			done(loans)
		})
	}
	return ok
}

func (l *lenders) Return(handles []uint64, _ bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range handles {
		at, ok := l.out[h]
		if !ok {
			l.wrong = fmt.Errorf("loan %d is returned twice, or was never lent", h)
			continue
		}
		delete(l.out, h)
		for i := at.from; i < at.to; i++ {
			l.mem[i] = 0xDD
		}
	}
}

// Memory is what is there now: what is lent stays as it is, and more comes behind it, or elsewhere.
func (l *lenders) Memory(region uint32) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	if region != lentRegion || l.chance(20) {
		return nil
	}
	return l.mem
}

// bytes are those of an extent that a load was given just now.
func (l *lenders) bytes(x engine.Extent) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	ok := false
	for _, o := range l.out {
		ok = ok || o.peer == l.peer && o.from <= int(x.Offset) && int(x.Offset) < o.to
	}
	if !ok {
		l.wrong = fmt.Errorf("%+v is read, and is not lent, or by a peer that is gone", x)
	}
	return slices.Clone(l.mem[x.Offset : x.Offset+uint64(x.Pages)*pageBytes])
}

// memoryOf is the bytes of an extent of a load.
func (r *rig) memoryOf(x engine.Extent) []byte {
	if x.Region == lentRegion {
		return r.lenders.bytes(x)
	}
	return r.arena[x.Offset : x.Offset+uint64(x.Pages)*pageBytes]
}
