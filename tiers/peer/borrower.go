package peer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
)

// borrower is our side of a connection to a sidecar that lends to us. One goroutine receives, and
// another (tell) calls OnRegion and OnRegionGone.
type borrower struct {
	p    *Peers
	gen  uint64 // of the lender
	conn *ipc.Conn
	log  *zap.Logger
	done chan struct{} // closed when run has returned
	said atomic.Bool   // our PeerHello is sent: nothing else is sent before it

	// Guarded by p.mu.
	spaces map[tiers.Fingerprint]*declared
	// by our space: the lender's space that explain logged
	explained map[tiers.Fingerprint]tiers.Fingerprint

	// Used by the receiver only.
	seq   uint64
	pages wire.PeerPages
	grant wire.PeerGrant

	mu        sync.Mutex // guards all that follows
	welcomed  bool
	ended     bool
	broken    error // what was wrong with a grant; ends the connection
	maxPages  int
	bit       int // of the hint table, -1: none
	filling   int // the bit being filled anew, -1: none
	resyncs   uint64
	regions   map[uint32]*peerRegion
	news      []regionNews // for the teller
	newsBell  chan struct{}
	calls     map[uint32]*call
	nextCall  uint32
	waitSince time.Time // since when the next answer is due
	stalled   bool
	out       int          // loans that are out
	borrowed  uint64       // pages
	returns   []loanReturn // to be sent
}

// peerRegion is a region of the lender.
type peerRegion struct {
	Region
	path  string        // of the device or file; empty for memory
	lock  *dax.LentLock // keeps the lender's successor from reusing the region
	ready bool          // OnRegion has returned
}

type regionNews struct {
	id   uint32
	gone bool
}

type call struct {
	id        uint32
	grant     wire.PeerGrant
	err       error
	answered  chan struct{} // cap 1
	abandoned bool
	timer     *time.Timer
	loans     []Loan

	// Of calls from asks only.
	b    *borrower
	run  tiers.Run
	done func(loans []Loan)
}

type loanReturn struct {
	load  uint64
	index uint32
	bad   bool
}

func newBorrower(p *Peers, gen uint64, conn *ipc.Conn) *borrower {
	return &borrower{
		p: p, gen: gen, conn: conn, log: p.log.With(zap.Uint64("peer", gen),
			zap.Int32("pid", conn.Peer().PID)), done: make(chan struct{}),
		spaces:    map[tiers.Fingerprint]*declared{},
		explained: map[tiers.Fingerprint]tiers.Fingerprint{}, bit: -1, filling: -1,
		regions:  map[uint32]*peerRegion{},
		newsBell: make(chan struct{}, 1), calls: map[uint32]*call{},
	}
}

// run borrows from a lender until the connection ends and nothing is out.
func (b *borrower) run() {
	told := make(chan struct{})
	var teller sync.WaitGroup
	teller.Go(func() { b.tell(told) })
	err := b.converse()
	b.fail(err)
	close(told)
	teller.Wait() // OnRegionGone has been called for all
	// The lender keeps our loans while the connection is open. So it stays open until they are
	// back, even if the lender has given us up.
	for {
		b.mu.Lock()
		out := b.out
		b.mu.Unlock()
		if out == 0 || b.p.ctx.Err() != nil {
			break
		}
		select {
		case <-b.p.ctx.Done():
		case <-b.newsBell: // rung by the last return
		}
	}
	b.flush() // reports bad chunks
	b.bye()
	_ = b.conn.Close()
	b.mu.Lock()
	for _, r := range b.regions {
		r.drop()
	}
	clear(b.regions)
	b.mu.Unlock()
	b.p.mu.Lock()
	if b.p.peers[b.gen] == b {
		delete(b.p.peers, b.gen)
	}
	var r *refused
	if errors.As(err, &r) || errors.Is(err, wire.ErrMalformed) || errors.Is(err, ipc.ErrOversize) ||
		errors.Is(err, ipc.ErrEmpty) || errors.Is(err, wire.ErrVersion) ||
		errors.Is(err, errNotThePeer) {
		b.p.note(b.gen, trouble{why: err.Error(), pid: b.conn.Peer().PID})
	} else {
		delete(b.p.troubles, b.gen)
	}
	b.p.mu.Unlock()
	close(b.done)
}

func (r *peerRegion) drop() {
	if r.FD >= 0 {
		_ = unix.Close(r.FD)
		r.FD = -1
	}
	if r.lock != nil {
		_ = r.lock.Close()
		r.lock = nil
	}
}

// refused is a lender's refusal of our PeerHello.
type refused struct{ wire.Refuse }

func (r *refused) Error() string {
	if r.Field == "" {
		return fmt.Sprintf("it refuses (%s): %s", r.Code, r.Message)
	}
	return fmt.Sprintf("it refuses (%s): %s: it has %q, ours is %q: %s", r.Code, r.Field, r.Want,
		r.Got, r.Message)
}

var errNotThePeer = errors.New("it is another run than the one its socket is named after")

// converse receives messages until the connection ends.
func (b *borrower) converse() error {
	hello := wire.PeerHello{Generation: b.p.cfg.Generation}
	if err := b.conn.Send(hello.Append(nil)); err != nil {
		return err
	}
	b.said.Store(true)
	var fds []int
	for {
		m, got, err := b.conn.RecvFDs(fds[:0])
		if err == nil {
			fds, err = b.handle(m, got)
			for _, fd := range fds { // descriptors that no message used
				_ = unix.Close(fd)
			}
		} else {
			b.mu.Lock()
			if b.broken != nil {
				err = b.broken
			}
			b.mu.Unlock()
		}
		if errors.Is(err, wire.ErrMalformed) || errors.Is(err, ipc.ErrOversize) ||
			errors.Is(err, ipc.ErrEmpty) {
			b.p.malformed.Add(1)
		}
		if err != nil {
			return err
		}
	}
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{wire.ErrMalformed}, args...)...)
}

// handle handles one message. It returns the descriptors that it did not use.
func (b *borrower) handle(m []byte, fds []int) ([]int, error) {
	t, err := wire.Peek(m)
	if err != nil {
		return fds, err
	}
	lim := &wire.DefaultLimits
	if !b.welcomed { // written by this goroutine only
		return fds, b.welcome(t, m)
	}
	switch t {
	case wire.TypePeerPages:
		if err := b.pages.Decode(m, lim); err != nil {
			return fds, err
		}
		return fds, b.hear()
	case wire.TypePeerGrant:
		if err := b.grant.Decode(m, lim); err != nil {
			return fds, err
		}
		return fds, b.answer()
	case wire.TypeRegionAdded:
		var r wire.RegionAdded
		if err := r.Decode(m, lim); err != nil {
			return fds, err
		}
		if len(fds) != 1 {
			return fds, malformed("region %d came with %d descriptors", r.Region, len(fds))
		}
		return fds[:0], b.addRegion(&r, fds[0])
	case wire.TypeRegionRemoved:
		var r wire.RegionRemoved
		if err := r.Decode(m, lim); err != nil {
			return fds, err
		}
		return fds, b.removeRegion(r.Region)
	case wire.TypePeerSpace:
		var s wire.PeerSpace
		if err := s.Decode(m, lim); err != nil {
			return fds, err
		}
		return fds, b.addSpace(&s)
	}
	return fds, malformed("%v from a lender", t)
}

func (b *borrower) welcome(t wire.Type, m []byte) error {
	if t == wire.TypeRefuse {
		var r refused
		if err := r.Decode(m, &wire.DefaultLimits); err != nil {
			return err
		}
		return &r
	}
	var w wire.PeerWelcome
	if err := w.Decode(m, &wire.DefaultLimits); err != nil {
		return err
	}
	if w.Generation != b.gen {
		return fmt.Errorf("%w: %016x", errNotThePeer, w.Generation)
	}
	b.mu.Lock()
	b.welcomed, b.maxPages = true, int(w.MaxPages)
	b.mu.Unlock()
	b.log.Info("borrowing from a sidecar")
	return nil
}

// hear applies the hints of one PeerPages.
func (b *borrower) hear() error {
	m := &b.pages
	if m.Seq != b.seq+1 || b.seq == 0 && !m.Begin {
		return malformed("pages %d after %d", m.Seq, b.seq)
	}
	b.seq = m.Seq
	b.p.hintsHeard.Add(uint64(len(m.Hints) / 8))
	if m.Begin {
		if err := b.beginFilling(); err != nil {
			return err
		}
	}
	b.mu.Lock()
	bit := b.bit
	if b.filling >= 0 {
		bit = b.filling
	}
	b.mu.Unlock()
	if bit < 0 {
		return malformed("pages before all others")
	}
	b.p.hints.apply(bit, m.Hints)
	if m.End {
		b.mu.Lock()
		was := b.bit
		if b.filling >= 0 {
			b.bit, b.filling = b.filling, -1
		} else {
			was = -1
		}
		b.mu.Unlock()
		b.retire(was)
	}
	return nil
}

// beginFilling takes a new bit for a full retelling. If there are enough bits, the hints under the
// old bit stay in use until the retelling is complete.
func (b *borrower) beginFilling() error {
	b.mu.Lock()
	unfinished := b.filling
	b.filling = -1
	if b.bit >= 0 || unfinished >= 0 {
		b.resyncs++
		b.p.resyncs.Add(1)
	}
	b.mu.Unlock()
	b.retire(unfinished)
	for {
		bit, freed := b.p.hints.take()
		if bit >= 0 {
			b.mu.Lock()
			b.filling = bit
			answers := !b.stalled
			b.mu.Unlock()
			b.p.mu.Lock()
			b.p.byBit[bit] = b
			for fp := range b.spaces {
				b.p.hints.ask(bit, fp)
			}
			b.p.mu.Unlock()
			b.p.hints.answers(bit, answers)
			return nil
		}
		b.mu.Lock()
		was := b.bit
		b.bit = -1
		b.mu.Unlock()
		b.retire(was)
		select { // the lender waits meanwhile, as we do not read
		case <-freed:
		case <-b.conn.Closed():
			return ipc.ErrClosed
		}
	}
}

func (b *borrower) retire(bit int) {
	if bit < 0 {
		return
	}
	b.p.mu.Lock()
	b.p.byBit[bit] = nil
	b.p.mu.Unlock()
	b.p.hints.retire(bit)
	b.p.wake()
}

func (b *borrower) addSpace(m *wire.PeerSpace) error {
	d := &declared{fp: tiers.Fingerprint(m.Fingerprint), fields: slices.Clone(m.Fields),
		g: tiers.Geometry{
			PageBytes: int64(m.PageBytes), PagesPerChunk: int(m.PagesPerChunk),
			PageTokens: int(m.PageTokens), DigestBytes: int(m.DigestBytes),
		}}
	b.p.mu.Lock()
	defer b.p.mu.Unlock()
	if b.spaces[d.fp] == nil && len(b.spaces) == maxSpaces {
		return malformed("more than %d spaces", maxSpaces)
	}
	b.spaces[d.fp] = d
	b.mu.Lock()
	for _, bit := range []int{b.bit, b.filling} {
		if bit >= 0 {
			b.p.hints.ask(bit, d.fp)
		}
	}
	b.mu.Unlock()
	for _, ours := range b.p.spaces {
		b.explain(ours)
	}
	return nil
}

// addRegion adds a region of the lender. It takes ownership of fd.
func (b *borrower) addRegion(m *wire.RegionAdded, fd int) error {
	r := &peerRegion{Region: Region{
		Peer: b.gen, ID: m.Region, Kind: m.Kind, FD: fd, OffsetBytes: int64(m.Offset),
		SizeBytes: int64(m.SizeBytes), PageSize: int64(m.PageSize),
	}}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.regions[r.ID] != nil || len(b.regions) == maxRegions {
		r.drop()
		return malformed("region %d came again, or is one too many", m.Region)
	}
	b.regions[r.ID] = r
	b.tellLater(regionNews{id: r.ID})
	return nil
}

func (b *borrower) removeRegion(id uint32) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.regions[id]
	if r == nil {
		return malformed("region %d goes, and never came", id)
	}
	r.ready = false
	b.tellLater(regionNews{id: id, gone: true})
	return nil
}

// tellLater queues a call of OnRegion or OnRegionGone. The caller holds b.mu.
func (b *borrower) tellLater(n regionNews) {
	b.news = append(b.news, n)
	b.ring()
}

func (b *borrower) ring() {
	select {
	case b.newsBell <- struct{}{}:
	default:
	}
}

// tell makes the queued calls of OnRegion and OnRegionGone, one at a time. When ended is closed, it
// calls OnRegionGone for all remaining regions and returns.
func (b *borrower) tell(ended <-chan struct{}) {
	cfg := &b.p.cfg
	announced := map[uint32]bool{}
	over := false
	for {
		b.mu.Lock()
		news := b.news
		b.news = nil
		b.mu.Unlock()
		for _, n := range news {
			b.mu.Lock()
			r := b.regions[n.id]
			b.mu.Unlock()
			switch {
			case r == nil:
			case n.gone:
				if announced[n.id] && cfg.OnRegionGone != nil {
					cfg.OnRegionGone(b.gen, n.id)
				}
				delete(announced, n.id)
				if over {
					continue // run drops them once nothing is out
				}
				b.mu.Lock()
				r.drop()
				delete(b.regions, n.id)
				b.mu.Unlock()
				if err := b.conn.Send((&wire.RegionUnmapped{Region: n.id}).Append(
					nil)); err != nil {
					b.log.Debug("cannot report to the lender that a region is unmapped",
						zap.Error(err))
				}
			case !over:
				b.announce(r, announced)
			}
		}
		if over && len(news) == 0 {
			return
		}
		if over {
			continue
		}
		select {
		case <-b.newsBell:
		case <-ended:
			over = true
			b.mu.Lock()
			b.news = nil
			for id := range b.regions {
				b.news = append(b.news, regionNews{id: id, gone: true})
			}
			b.mu.Unlock()
		}
	}
}

// announce calls OnRegion for a region, and then allows borrowing from it.
func (b *borrower) announce(r *peerRegion, announced map[uint32]bool) {
	var st unix.Stat_t
	err := unix.Fstat(r.FD, &st)
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size < r.OffsetBytes+r.SizeBytes {
		// beyond the end of the file an access would be a bus error
		err = fmt.Errorf("%d bytes from %d on in a file of %d", r.SizeBytes, r.OffsetBytes, st.Size)
	}
	if err == nil {
		r.lock, err = dax.LockLent(r.FD, r.OffsetBytes, r.SizeBytes)
	}
	if !dax.IsMemory(r.FD) {
		path, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", r.FD)) // for people to read
		b.mu.Lock()
		r.path = path
		b.mu.Unlock()
	}
	if err == nil {
		announced[r.ID] = true
		if b.p.cfg.OnRegion != nil {
			err = b.p.cfg.OnRegion(r.Region)
		}
	}
	if err != nil {
		b.log.Warn("nothing is borrowed from a region", zap.Uint32("region", r.ID), zap.Error(err))
		return
	}
	b.mu.Lock()
	r.ready = !b.ended && !slices.ContainsFunc(b.news,
		func(n regionNews) bool { return n.id == r.ID && n.gone })
	b.mu.Unlock()
}

// fail ends borrowing: it fails all calls and makes all loans void.
func (b *borrower) fail(err error) {
	b.mu.Lock()
	b.ended = true
	bit, filling := b.bit, b.filling
	b.bit, b.filling = -1, -1
	var asks []*call
	for id, c := range b.calls {
		delete(b.calls, id)
		switch {
		case c.abandoned:
		case c.done != nil:
			asks = append(asks, c)
		default:
			c.err = ipc.ErrPeerGone
			c.answered <- struct{}{}
		}
	}
	welcomed := b.welcomed
	b.mu.Unlock()
	for _, c := range asks {
		c.answeredTo(ipc.ErrPeerGone)
	}
	b.retire(bit)
	b.retire(filling)
	if welcomed {
		if b.p.cfg.OnGone != nil {
			b.p.cfg.OnGone(b.gen)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, ipc.ErrPeerGone) ||
			errors.Is(err, ipc.ErrClosed) {
			b.log.Info("borrowing from a sidecar has ended", zap.Error(err))
		} else {
			b.log.Warn("borrowing from a sidecar has ended", zap.Error(err))
		}
	}
}

// close closes the connection without waiting for loans.
func (b *borrower) close() error { return b.conn.Close() }
