package peer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

const (
	// batchPages is how many pages are read from the journal at a time. It bounds how long the
	// engine's lock is held.
	batchPages = 1024
	// gather is how long changes are collected before they are sent.
	gather = 2 * time.Millisecond
	// ownerIdle is how long a space stays in use after its last loan is returned.
	ownerIdle = time.Second
)

// lender is our side of a connection to a sidecar that borrows from us. One goroutine receives and
// replies, another sends regions, spaces and hints.
type lender struct {
	p    *Peers
	conn *ipc.Conn
	gen  uint64        // of the borrower
	done chan struct{} // closed when run has returned
	bell chan struct{} // cap 1: there are regions or spaces to send

	ctx     context.Context // ends when the borrower is no longer served
	helpers sync.WaitGroup

	// visible is the set of regions sent to the borrower. The map is replaced, never changed.
	visible atomic.Pointer[map[uint32]struct{}]

	mu       sync.Mutex // guards what follows; the engine's lock may be taken under it
	welcomed bool
	regions  map[uint32]*toldRegion
	change   chan struct{} // closed, and made anew, when regions change
	owners   map[tiers.Fingerprint]*lentSpace
	loans    map[uint64]*lentSpace
	over     bool // nothing more is lent
	checking bool // pages that it asked for are being checked
	// told has the spaces as last sent. Used by the sender only.
	told map[tiers.Fingerprint]*declared

	// Used by the receiver only, and kept so that it allocates nothing.
	msg struct {
		lease    wire.PeerLease
		grant    wire.PeerGrant
		release  wire.PeerRelease
		unmapped wire.RegionUnmapped
	}
	extents []engine.Extent
	out     []byte
}

type toldRegion struct{ sent, going bool }

// lentSpace is a space that the borrower has asked about.
type lentSpace struct {
	owner engine.Owner
	sp    *tiers.Space
	g     tiers.Geometry
	loans int
	used  time.Time
}

func newLender(p *Peers, conn *ipc.Conn) *lender {
	l := &lender{
		p: p, conn: conn, done: make(chan struct{}), bell: make(chan struct{}, 1),
		regions: map[uint32]*toldRegion{}, change: make(chan struct{}),
		owners: map[tiers.Fingerprint]*lentSpace{}, loans: map[uint64]*lentSpace{},
		told: map[tiers.Fingerprint]*declared{},
	}
	l.visible.Store(&map[uint32]struct{}{})
	return l
}

func (l *lender) ring() {
	select {
	case l.bell <- struct{}{}:
	default:
	}
}

// run serves a borrower until its connection ends and nothing is lent.
func (l *lender) run() {
	err := l.welcome()
	log := l.p.log.With(zap.Uint64("peer", l.gen), zap.Int32("pid", l.conn.Peer().PID))
	if err == nil {
		log.Info("a sidecar borrows from this one")
		ended := make(chan struct{})
		var stop context.CancelFunc
		l.ctx, stop = context.WithCancel(l.p.ctx)
		l.helpers.Go(func() { l.send(ended) })
		err = l.serve()
		close(ended)
		stop()
		l.linger(err)
		_ = l.conn.Close() // wakes the sender
		l.helpers.Wait()
		log.Info("a sidecar has stopped borrowing from this one", zap.Error(err))
	}
	l.end()
	_ = l.conn.Close()
	close(l.done)
	l.p.mu.Lock()
	delete(l.p.lenders, l)
	l.p.mu.Unlock()
}

// welcome does the handshake.
func (l *lender) welcome() error {
	if err := l.conn.SetRecvDeadline(time.Now().Add(helloPatience)); err != nil {
		return err
	}
	b, err := l.conn.Recv()
	if err != nil {
		return err
	}
	if err := l.conn.SetRecvDeadline(time.Time{}); err != nil {
		return err
	}
	var h wire.PeerHello
	if err := h.Decode(b, &wire.DefaultLimits); err != nil {
		l.p.malformed.Add(1)
		refuse := wire.Refuse{Code: wire.RefuseMalformed, Message: err.Error()}
		var v *wire.VersionError
		if errors.As(err, &v) {
			refuse = wire.Refuse{Code: wire.RefuseVersion, Field: "version",
				Want: fmt.Sprint(wire.Version), Got: fmt.Sprint(v.Got),
				Message: "the two sidecars are of different releases"}
		}
		_ = l.conn.Send(refuse.Append(nil))
		return err
	}
	w := wire.PeerWelcome{Generation: l.p.cfg.Generation, MaxPages: uint32(l.p.cfg.MaxPages)}
	if err := l.conn.Send(w.Append(nil)); err != nil {
		return err
	}
	l.mu.Lock()
	l.gen, l.welcomed = h.Generation, true
	l.mu.Unlock()
	return nil
}

// serve handles messages until the borrower leaves or breaks the protocol.
func (l *lender) serve() error {
	for {
		b, err := l.conn.Recv()
		l.p.pause()
		if err == nil {
			err = l.handle(b)
		}
		if errors.Is(err, wire.ErrMalformed) || errors.Is(err, ipc.ErrOversize) ||
			errors.Is(err, ipc.ErrEmpty) {
			l.p.malformed.Add(1)
		}
		if err != nil {
			return err
		}
	}
}

func (l *lender) handle(b []byte) error {
	t, err := wire.Peek(b)
	if err != nil {
		return err
	}
	lim := &wire.DefaultLimits
	switch t {
	case wire.TypePeerLease:
		if err := l.msg.lease.Decode(b, lim); err != nil {
			return err
		}
		return l.lease()
	case wire.TypePeerRelease:
		if err := l.msg.release.Decode(b, lim); err != nil {
			return err
		}
		return l.release()
	case wire.TypeRegionUnmapped:
		if err := l.msg.unmapped.Decode(b, lim); err != nil {
			return err
		}
		return l.unmapped(l.msg.unmapped.Region)
	}
	return fmt.Errorf("%w: %v from a borrower", wire.ErrMalformed, t)
}

// lease handles a PeerLease.
func (l *lender) lease() error {
	m := &l.msg.lease
	g := &l.msg.grant
	*g = wire.PeerGrant{ID: m.ID, Extents: g.Extents[:0]}
	fp := tiers.Fingerprint(m.Fingerprint)
	if s := l.space(fp); s != nil {
		d := s.g.DigestBytes
		n := len(m.Hashes) / d
		if len(m.Hashes)%d != 0 || n > min(l.p.cfg.MaxPages, wire.MaxLeasePages(d)) ||
			int64(m.Pages) > int64(l.p.cfg.MaxPages) {
			return fmt.Errorf("%w: a lease on %d bytes of hashes of %d each", wire.ErrMalformed,
				len(m.Hashes), d)
		}
		var err error
		if m.Touch {
			var pages int
			pages, g.More, err = l.p.cfg.Engine.Touch(s.owner, int(m.FirstPage), m.Hashes)
			g.Pages = uint32(pages)
		} else {
			err = l.lend(s, m, g)
		}
		if errors.Is(err, tiers.ErrInvalid) {
			return fmt.Errorf("%w: %w", wire.ErrMalformed, err)
		}
		if err != nil { // busy, or closed
			g.More = true
		}
	}
	if !m.Touch {
		l.p.leases.Add(1)
		l.p.lentPages.Add(uint64(g.Pages))
		if g.Pages == 0 {
			l.p.refusedLeases.Add(1)
		}
	}
	l.out = g.Append(l.out[:0])
	// A borrower that does not read may still return loans. serve notices its end when it receives.
	_ = l.conn.SendWaiting(l.out)
	return nil
}

// lend leases what a PeerLease asks for.
func (l *lender) lend(s *lentSpace, m *wire.PeerLease, g *wire.PeerGrant) error {
	visible := *l.visible.Load()
	sees := func(r uint32) bool {
		_, ok := visible[r]
		return ok
	}
	var loan uint64
	var pages int
	var more bool
	var extents []engine.Extent
	var err error
	if m.Pages > 0 {
		loan, pages, more, extents, err = l.p.cfg.Engine.LendEnds(s.owner, int(m.FirstPage),
			int(m.Pages), m.Hashes, sees, l.extents[:0])
	} else {
		loan, pages, more, extents, err = l.p.cfg.Engine.Lend(s.owner, int(m.FirstPage), m.Hashes,
			sees, l.extents[:0])
	}
	l.extents = extents
	if err != nil {
		return err
	}
	g.Load, g.Pages, g.More = loan, uint32(pages), more
	g.Soon = more && m.Pages == 0 && l.check(s, int(m.FirstPage)+pages,
		m.Hashes[pages*s.g.DigestBytes:])
	if loan == 0 {
		return nil
	}
	for _, e := range extents {
		g.Extents = append(g.Extents, wire.Extent{Page: e.Page, Pages: e.Pages, Region: e.Region,
			Offset: e.Offset})
	}
	l.mu.Lock()
	s.loans++
	l.loans[loan] = s
	l.mu.Unlock()
	return nil
}

// check starts a check of restored pages that the borrower asked for, from first on. It returns
// true if the first page waits for a check and may be lent after it. Only one check for a borrower
// runs at a time.
func (l *lender) check(s *lentSpace, first int, hashes []byte) bool {
	p := l.p
	if p.cfg.Verify == nil || p.cfg.Engine.Unverified() == 0 {
		return false
	}
	list, _, err := p.cfg.Engine.NextVerify(s.owner, first, hashes[:s.g.DigestBytes], nil, nil)
	if err != nil || len(list) == 0 {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.checking || l.over {
		return !l.over
	}
	l.checking = true
	hashes = bytes.Clone(hashes)
	l.helpers.Go(func() {
		// the borrower sees the result when it asks again
		_ = p.cfg.Verify(l.ctx, s.owner, tiers.Run{Space: s.sp, First: first, Hashes: hashes})
		l.mu.Lock()
		l.checking = false
		l.mu.Unlock()
	})
	return true
}

// space returns the engine's view of a space, or nil if the engine does not have it or has no room
// for another owner.
func (l *lender) space(fp tiers.Fingerprint) *lentSpace {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.owners[fp]; s != nil {
		s.used = now
		return s
	}
	if len(l.owners) >= maxSpaces || l.over {
		return nil
	}
	s := &lentSpace{owner: engine.Owner(randomID()), used: now}
	var err error
	if s.g, err = l.p.cfg.Engine.AddLender(s.owner, fp); err != nil {
		return nil
	}
	s.sp = &tiers.Space{Fingerprint: fp, Geometry: s.g}
	l.owners[fp] = s
	return s
}

var errBye = errors.New("it has returned everything")

// release handles a PeerRelease.
func (l *lender) release() error {
	m := &l.msg.release
	if m.Load == 0 {
		l.end()
		return errBye
	}
	l.mu.Lock()
	s := l.loans[m.Load]
	l.mu.Unlock()
	if s == nil {
		return fmt.Errorf("%w: no loan %#x to return", wire.ErrMalformed, m.Load)
	}
	some := m.Extents
	if len(some) == 0 {
		some = nil
	}
	ended, err := l.p.cfg.Engine.EndLoan(s.owner, m.Load, some, m.Bad)
	if errors.Is(err, tiers.ErrClosed) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: %w", wire.ErrMalformed, err)
	}
	if ended {
		l.mu.Lock()
		delete(l.loans, m.Load)
		s.loans--
		s.used = time.Now()
		l.mu.Unlock()
	}
	return nil
}

// retireOwners releases spaces without loans, so that the engine can close them.
func (l *lender) retireOwners(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for fp, s := range l.owners {
		if s.loans == 0 && now.Sub(s.used) > ownerIdle {
			l.p.cfg.Engine.RemoveOwner(s.owner)
			delete(l.owners, fp)
		}
	}
}

// linger waits, after a connection has ended, until the loans that are out can be freed safely. A
// borrower that ends its side has returned all that its workers read. A dead borrower can no longer
// tell its workers. But each worker has a socket to its sidecar, which the kernel closes at the
// sidecar's death, and a worker trusts no copy that ends after that.
func (l *lender) linger(why error) {
	l.mu.Lock()
	left := len(l.loans)
	l.mu.Unlock()
	if left == 0 || l.p.ctx.Err() != nil {
		return
	}
	l.conn.EndSending()
	died := l.conn.Died()
	if died == nil { // the kernel has no pidfds of peers
		if errors.Is(why, wire.ErrMalformed) {
			l.conn.Linger()
			return
		}
		// The kernel closes a dead process's sockets one after the other, so its workers may see
		// the end of theirs a moment later than we do.
		select {
		case <-time.After(closingPatience):
		case <-l.p.ctx.Done():
		}
		return
	}
	l.p.log.Warn("a sidecar's connection has ended with loans that it has not returned; they stay its own until its process has ended",
		zap.Uint64("peer", l.gen), zap.Int32("pid", l.conn.Peer().PID), zap.Int("loans", left),
		zap.Error(why))
	select {
	case <-died:
	case <-l.p.ctx.Done():
	}
}

// end frees all that the borrower holds.
func (l *lender) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.owners {
		l.p.cfg.Engine.RemoveOwner(s.owner)
	}
	clear(l.owners)
	clear(l.loans)
	clear(l.regions)
	l.over = true
	l.changedLocked()
}

func (l *lender) changedLocked() {
	close(l.change)
	l.change = make(chan struct{})
}

// changed returns a channel that is closed when the result of without may have changed.
func (l *lender) changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.change
}

// without reports whether the borrower does not have a region.
func (l *lender) without(id uint32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.regions[id] == nil
}

// giveUp stops serving the borrower. The borrower keeps what it holds until it returns it or is
// dead.
func (l *lender) giveUp(why error) {
	l.p.log.Warn("ending the connection of a sidecar that borrows from this one", zap.Uint64("peer", l.gen),
		zap.Int32("pid", l.conn.Peer().PID), zap.Error(why))
	l.conn.EndSending()
}

func (l *lender) unmapped(id uint32) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.regions[id]; r == nil || !r.going {
		return fmt.Errorf("%w: region %d was not announced as going", wire.ErrMalformed, id)
	}
	delete(l.regions, id)
	l.changedLocked()
	return nil
}

// send sends regions, spaces and hints until the connection fails or ended is closed.
func (l *lender) send(ended <-chan struct{}) {
	feed, err := l.p.cfg.Engine.Follow(0)
	for errors.Is(err, tiers.ErrBusy) {
		select {
		case <-ended:
			return
		case <-time.After(gather):
		}
		feed, err = l.p.cfg.Engine.Follow(0)
	}
	if err != nil {
		l.p.log.Error("cannot report to other sidecars what is held", zap.Error(err))
		l.conn.EndSending()
		return
	}
	defer feed.Close()
	s := sender{l: l, feed: feed}
	if err := s.run(ended); err != nil {
		l.conn.EndSending() // if the reason could not be sent, the borrower connects again
	}
}

// sender is the state of send.
type sender struct {
	l      *lender
	feed   *engine.Feed
	seq    uint64
	begin  bool // to be set on the next pages
	all    bool // all held pages were sent once since begin
	hints  []byte
	digest []byte
	events []engine.Event
	out    []byte
}

func (s *sender) run(ended <-chan struct{}) error {
	l := s.l
	tick := time.NewTicker(ownerIdle)
	defer tick.Stop()
	pause := time.NewTimer(0)
	defer pause.Stop()
	<-pause.C
	for {
		l.p.pause()
		if err := s.tellRegions(); err != nil {
			return err
		}
		if err := s.tellSpaces(); err != nil {
			return err
		}
		more, err := s.tellPages()
		if err != nil {
			return err
		}
		if more {
			select {
			case <-ended:
				return nil
			default:
				continue
			}
		}
		select {
		case <-ended:
			return nil
		case <-l.bell:
		case now := <-tick.C:
			l.retireOwners(now)
		case <-s.feed.Ready():
			pause.Reset(gather)
			select {
			case <-ended:
				return nil
			case <-pause.C:
			}
		}
	}
}

// tellRegions sends new regions, and regions that go.
func (s *sender) tellRegions() error {
	l, p := s.l, s.l.p
	for {
		var add *ownRegion
		p.mu.Lock()
		l.mu.Lock()
		for _, id := range p.order {
			if l.regions[id] == nil {
				add = p.regions[id]
				l.regions[id] = &toldRegion{}
				break
			}
		}
		l.mu.Unlock()
		p.mu.Unlock()
		if add == nil {
			break
		}
		m := wire.RegionAdded{
			Region: add.ID, Generation: p.cfg.Generation, Kind: add.Kind,
			Offset: uint64(add.OffsetBytes), SizeBytes: uint64(add.SizeBytes),
			PageSize: uint64(add.PageSize), ReadOnly: true,
		}
		s.out = m.Append(s.out[:0])
		if err := l.conn.SendWaiting(s.out, add.ro); err != nil {
			return err
		}
		l.mu.Lock()
		if r := l.regions[add.ID]; r != nil {
			r.sent = true
		}
		l.mu.Unlock()
		l.see(add.ID, true)
	}
	var going []uint32
	p.mu.Lock()
	l.mu.Lock()
	for id, r := range l.regions {
		if own := p.regions[id]; r.sent && !r.going && (own == nil || own.going) {
			r.going = true
			going = append(going, id)
		}
	}
	l.mu.Unlock()
	p.mu.Unlock()
	for _, id := range going {
		l.see(id, false)
		s.out = (&wire.RegionRemoved{Region: id}).Append(s.out[:0])
		if err := l.conn.SendWaiting(s.out); err != nil {
			return err
		}
	}
	return nil
}

// see allows or forbids lending from a region.
func (l *lender) see(id uint32, does bool) {
	now := maps.Clone(*l.visible.Load())
	if does {
		now[id] = struct{}{}
	} else {
		delete(now, id)
	}
	l.visible.Store(&now)
}

// tellSpaces sends spaces that were declared since the last call.
func (s *sender) tellSpaces() error {
	p := s.l.p
	var news []*declared
	p.mu.Lock()
	for fp, d := range p.spaces {
		if s.l.told[fp] != d {
			news = append(news, d)
		}
	}
	p.mu.Unlock()
	for _, d := range news {
		if err := s.tellSpace(d); err != nil {
			return err
		}
	}
	return nil
}

var errManySpaces = errors.New("it was sent too many spaces")

func (s *sender) tellSpace(d *declared) error {
	if len(s.l.told) == maxSpaces {
		return errManySpaces // the borrower connects again and gets the spaces of that time
	}
	s.l.told[d.fp] = d
	m := wire.PeerSpace{
		Fingerprint: d.fp[:], PageTokens: uint32(d.g.PageTokens), PageBytes: uint64(d.g.PageBytes),
		PagesPerChunk: uint32(d.g.PagesPerChunk),
		DigestBytes:   uint8(d.g.DigestBytes), Fields: d.fields,
	}
	s.out = m.Append(s.out[:0])
	return s.l.conn.SendWaiting(s.out)
}

// tellPages sends the next part of the feed. more reports whether there is more now.
func (s *sender) tellPages() (more bool, err error) {
	batch, buf, err := s.feed.Next(batchPages, s.digest, s.events[:0])
	s.digest, s.events = buf, batch.Events
	if err != nil {
		return false, err
	}
	if batch.Reset {
		s.begin, s.all = true, false
	}
	s.hints = s.hints[:0]
	for i := range batch.Events {
		ev := &batch.Events[i]
		fp := &ev.Space.Fingerprint
		if s.l.told[*fp] == nil {
			if err := s.tellSpace(&declared{fp: *fp, g: ev.Space.Geometry}); err != nil {
				return false, err
			}
		}
		for d := ev.Space.Geometry.DigestBytes; len(ev.Hashes) >= d; ev.Hashes = ev.Hashes[d:] {
			h := hintKey(fp, ev.Hashes[:d])
			if ev.Kind == engine.PagesRemoved {
				h &^= 1
			}
			s.hints = binary.LittleEndian.AppendUint64(s.hints, h)
			if len(s.hints) == 8*wire.MaxBatchHints {
				if err := s.flush(false); err != nil {
					return false, err
				}
			}
		}
	}
	end := !batch.More && !s.all
	if len(s.hints) > 0 || end || batch.Reset {
		if err := s.flush(end); err != nil {
			return false, err
		}
	}
	s.all = s.all || end
	return batch.More, nil
}

func (s *sender) flush(end bool) error {
	s.seq++
	m := wire.PeerPages{Seq: s.seq, Begin: s.begin, End: end, Hints: s.hints}
	s.begin = false
	s.out = m.Append(s.out[:0])
	s.l.p.hintsTold.Add(uint64(len(s.hints) / 8))
	s.hints = s.hints[:0]
	return s.l.conn.SendWaiting(s.out)
}
