package connector

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"go.uber.org/zap"

	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/tiers"
)

// A Server can pass its sessions to a Server in another process, which has the same memory and has
// restored what it holds. The clients keep their sockets, and what they hold.
//
//	serving ── Hold ──▶ holding ── Quiet ──▶ quiet ── Freeze ──▶ frozen, then Export
//	   ▲                   │                   │
//	   └────── Resume ─────┴─────── Resume ────┘
//
// holding: nobody new is welcomed, no store begins, and no space is cleared. Messages that ask for
// this wait in their session (session.held), in their order. Stores that are open end.
//
// quiet: nothing changes in the index any more, so that the other process can read it from the
// directory of the arena. A load that reports bad extents waits, too. Lookups are looked up in the
// arena alone. One that a tier could continue waits (Server.heldLookups).
//
// frozen: the goroutines of all connections have ended, each between two messages. What clients
// send stays in their sockets. The other process receives it, after what was held back.
//
// Nothing is replied to twice and no message is lost: each is handled here before Freeze, or it is
// handed over, or it is still in its socket.

// The modes of a Server.
const (
	modeServing = iota
	modeHolding
	modeQuiet
	modeFrozen
)

// errFrozen ends a connection's goroutine without ending the connection.
var errFrozen = errors.New("the server is frozen")

// maxHeld bounds the messages that one session has waiting while the Server holds changes back, and
// maxHeldBytes their bytes. More are replied to as if the sidecar were busy.
const (
	maxHeld      = 4096
	maxHeldBytes = 64 << 20
	// maxHeldLookups bounds the lookups that wait, of all sessions. More are replied to with what
	// the arena holds.
	maxHeldLookups = 4096
)

// parked is a connection without a goroutine, once the Server is frozen.
type parked struct {
	conn  *ipc.Conn
	ses   *session // nil: it was not welcomed yet
	hello []byte   // of one that was not welcomed: what it has sent, or nil
	held  []int    // the descriptors that came with that
}

// heldLookups are the messages about lookups that wait for the next process. The goroutine that
// owns the lookup sockets uses them; after that has ended, Export does.
type heldLookups struct {
	of map[uint64][][]byte // by session
	is map[heldLookup]bool
}

type heldLookup struct{ session, lookup uint64 }

// setMode changes the mode, and wakes whoever waits for a change.
func (s *Server) setMode(mode int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mode.Store(mode)
	close(s.modeChanged)
	s.modeChanged = make(chan struct{})
	if mode != modeServing && s.stopAccept != nil {
		s.stopAccept()
	}
	for c := range s.conns {
		// An error means that the connection has ended, or lingers.
		if c.SetRecvDeadline(time.Unix(1, 0)) != nil && mode == modeFrozen {
			c.EndLinger()
		}
	}
}

// Hold begins to hold back what changes the arena, and waits until what is under way has ended, at
// most until ctx is done. It then returns an error that names who has not ended, and Resume must be
// called.
func (s *Server) Hold(ctx context.Context) error {
	if s.cfg.MakeRoom != nil {
		return fmt.Errorf("%w: stores that wait for room cannot be handed over", tiers.ErrInvalid)
	}
	s.setMode(modeHolding)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		busy := s.holdsUp()
		if busy == "" {
			return nil
		}
		select {
		case <-s.drains:
			return fmt.Errorf("%w: the sidecar is shutting down", tiers.ErrClosed)
		case <-ctx.Done():
			return fmt.Errorf("%w: %s", context.Cause(ctx), busy)
		case <-tick.C:
		}
	}
}

// holdsUp returns what Hold has to wait for, in words for people, or "".
func (s *Server) holdsUp() string {
	stores, _ := s.underWay()
	s.mu.Lock()
	defer s.mu.Unlock()
	var of []string
	for _, ses := range s.sessions {
		if held, ok := s.engine.Owner(ses.owner); ok && held.Stores > 0 {
			of = append(of, fmt.Sprintf("%d of pid %d (engine %q)", held.Stores,
				ses.conn.Peer().PID, ses.key.id))
		}
	}
	switch {
	case len(of) > 0:
		return "open stores: " + strings.Join(of, ", ")
	case stores > 0: // of a session that ends at this moment
		return "open stores of a client that leaves"
	case s.shaking > 0:
		return fmt.Sprintf("%d clients that connect", s.shaking)
	case s.changing.Load() > 0:
		return "a request that stores or clears"
	}
	return ""
}

// Resume ends Hold or Quiet: what was held back is handled now, and everything goes on.
func (s *Server) Resume() {
	s.setMode(modeServing)
	s.lookups.Handle(func() (msgs [][]byte) {
		for _, held := range s.held.of {
			msgs = append(msgs, held...)
		}
		s.held = heldLookups{}
		return msgs
	})
}

// Quiet follows Hold: from now on the index does not change through the Server, once AwaitChanges
// has returned. With partial, lookups that the arena does not hold whole wait for the next process,
// because it has tiers or peers that may continue them.
func (s *Server) Quiet(partial bool) {
	s.holdPartial.Store(partial)
	s.setMode(modeQuiet)
}

// AwaitChanges waits until requests that began before Quiet have ended, and until no lookup of
// before is about to begin to wait for a tier.
func (s *Server) AwaitChanges(ctx context.Context) error {
	s.lookups.Handle(func() [][]byte { return nil }) // comes after a message that is being handled
	for s.changing.Load() > 0 {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		time.Sleep(100 * time.Microsecond)
	}
	return nil
}

// Freeze ends the goroutines of all connections, each between two messages, and keeps the
// connections. Serve must have returned, and the lookup sockets must be detached before Export. It
// fails if a goroutine does not end before ctx is done.
func (s *Server) Freeze(ctx context.Context) error {
	s.setMode(modeFrozen)
	gone := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(gone)
	}()
	select {
	case <-gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("a session has not stopped: %w", context.Cause(ctx))
	}
}

// park keeps a connection whose goroutine ends because the Server is frozen.
func (s *Server) park(p parked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, p.conn)
	s.parked = append(s.parked, p)
}

// acceptTurn waits while nobody new is welcomed. It returns a context that ends when that begins
// again, or with ctx. The caller must call cancel.
func (s *Server) acceptTurn(ctx context.Context) (turn context.Context, cancel context.CancelFunc,
	err error) {
	for {
		s.mu.Lock()
		changed := s.modeChanged
		if s.mode.Load() == modeServing || s.draining.Load() {
			turn, cancel = context.WithCancel(ctx)
			s.stopAccept = cancel
			s.mu.Unlock()
			return turn, cancel, nil
		}
		s.mu.Unlock()
		select {
		case <-changed:
		case <-s.drains:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// beginHandshake waits while nobody new is welcomed. It returns errFrozen if the Server is frozen.
// Otherwise endHandshake must follow.
func (s *Server) beginHandshake() error {
	for {
		s.mu.Lock()
		mode, changed := s.mode.Load(), s.modeChanged
		if mode == modeServing || s.draining.Load() {
			s.shaking++
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		if mode == modeFrozen {
			return errFrozen
		}
		select {
		case <-changed:
		case <-s.drains:
		}
	}
}

func (s *Server) endHandshake() {
	s.mu.Lock()
	s.shaking--
	s.mu.Unlock()
}

// receiveHello receives what a client sends first. While nobody new is welcomed it does not
// receive. It returns errFrozen if the Server is frozen.
func (s *Server) receiveHello(conn *ipc.Conn) (hello []byte, held []int, err error) {
	for {
		if err := conn.SetRecvDeadline(time.Now().Add(handshakePatience)); err != nil {
			return nil, nil, err
		}
		// setMode may have come before the deadline above
		if s.mode.Load() != modeServing && !s.draining.Load() {
			if err := s.beginHandshake(); err != nil {
				return nil, nil, err
			}
			s.endHandshake()
			continue
		}
		hello, held, err = conn.RecvFDs(nil)
		if errors.Is(err, os.ErrDeadlineExceeded) && s.mode.Load() != modeServing {
			continue
		}
		if err != nil {
			return nil, nil, err
		}
		if err := conn.SetRecvDeadline(time.Time{}); err != nil {
			closeAll(held)
			return nil, nil, err
		}
		return hello, held, nil
	}
}

// begin is called before a message is handled that changes the arena. If it returns true, the
// caller handles the message now and then calls end. Otherwise the message b waits, and late is the
// error to reply with if too many do.
func (ses *session) begin(b []byte) (now bool, late error) {
	s := ses.server
	s.changing.Add(1)
	if s.mode.Load() == modeServing || s.draining.Load() {
		return true, nil
	}
	s.changing.Add(-1)
	return false, ses.hold(b)
}

func (ses *session) end() { ses.server.changing.Add(-1) }

// hold keeps a message for Resume or for the next process.
func (ses *session) hold(b []byte) error {
	if len(ses.held) >= maxHeld || ses.heldBytes+len(b) > maxHeldBytes {
		return fmt.Errorf("%w: the sidecar is being replaced", tiers.ErrBusy)
	}
	ses.held = append(ses.held, bytes.Clone(b))
	ses.heldBytes += len(b)
	return nil
}

// prepareNowOrLater returns the reply to msg.prepareStore, whose encoding is b, or nil if it waits.
func (ses *session) prepareNowOrLater(b []byte) []byte {
	now, late := ses.begin(b)
	if now {
		defer ses.end()
		return ses.prepareStore(b)
	}
	if late != nil {
		return ses.fail(ses.msg.prepareStore.ID, late)
	}
	return nil
}

// clearNowOrLater returns the reply to msg.clear, whose encoding is b, or nil if it waits.
func (ses *session) clearNowOrLater(b []byte) []byte {
	now, late := ses.begin(b)
	if now {
		defer ses.end()
		return ses.clearSpace()
	}
	if late != nil {
		return ses.fail(ses.msg.clear.ID, late)
	}
	return nil
}

// releaseNowOrLater ends the load in msg.release, whose encoding is b. Bad extents leave the index,
// so their load waits once the index must not change.
func (ses *session) releaseNowOrLater(b []byte) {
	s := ses.server
	if len(ses.msg.release.Bad) == 0 {
		ses.release()
		return
	}
	s.changing.Add(1)
	defer s.changing.Add(-1)
	if s.mode.Load() < modeQuiet {
		ses.release()
	} else if late := ses.hold(b); late != nil {
		ses.note(late) // the load stays until the session ends
	}
}

// interrupted is called when a Recv was interrupted: by a change of the mode, or because a call of
// MakeRoom has ended.
func (ses *session) interrupted() error {
	// First, so that no later interruption is missed.
	if err := ses.conn.SetRecvDeadline(time.Time{}); err != nil {
		return err
	}
	if ses.server.mode.Load() == modeFrozen {
		return errFrozen
	}
	if ses.room != nil {
		select {
		case <-ses.room.done:
			return ses.resumeStores()
		default:
		}
	}
	return ses.replay()
}

// replay handles the messages that were held back, unless they still must wait.
func (ses *session) replay() error {
	if len(ses.held) == 0 || ses.server.mode.Load() != modeServing {
		return nil
	}
	held := ses.held
	ses.held, ses.heldBytes = nil, 0
	for _, b := range held {
		if err := ses.respond(b); err != nil {
			return err
		}
	}
	return nil
}

// holdLookup keeps a message about a lookup for the next process, and reports whether it has. Only
// the goroutine that owns the lookup sockets may call it.
func (s *Server) holdLookup(session, lookup uint64, msg []byte, first bool) bool {
	h := &s.held
	key := heldLookup{session, lookup}
	if first == h.is[key] || len(h.is) >= maxHeldLookups && first ||
		len(h.of[session]) >= maxHeldLookups {
		return h.is[key]
	}
	if h.of == nil {
		h.of, h.is = map[uint64][][]byte{}, map[heldLookup]bool{}
	}
	h.is[key] = true
	h.of[session] = append(h.of[session], bytes.Clone(msg))
	return true
}

// lookupQuiet looks a lookup up in the arena alone. It returns held if the lookup waits for the
// next process.
func (s *Server) lookupQuiet(ses *session, m *wire.Lookup, asked int, msg []byte) (pages int,
	held bool, err error) {
	if s.holdLookup(ses.id, m.Lookup, msg, false) {
		return 0, true, nil
	}
	_ = s.stack.Cancel(ses.owner, m.Lookup) // an earlier one of the same number
	digest := ses.space.geometry.DigestBytes
	pages, err = s.engine.Lookup(ses.owner, m.Lookup, int(m.FirstPage), m.Hashes[:asked*digest])
	if err != nil || pages == asked || !s.holdPartial.Load() ||
		!s.holdLookup(ses.id, m.Lookup, msg, true) {
		return pages, false, err
	}
	_ = s.stack.Cancel(ses.owner, m.Lookup)
	return 0, true, nil
}

// adopted is a session of the process before.
type adopted struct {
	ses     *session
	direct  *os.File    // its direct socket, or nil
	replies bool        // it looks up
	router  bool        // its replies go by the ROUTER
	lookups [][]byte    // messages about lookups that waited
	lingers *lingerInfo // nil: it goes on
	regions []Region    // that its worker does not have

	unlocked bool // the session's sendMu is
}

// errEarlier is the cause for giving up a connection that the process before had given up.
var errEarlier = errors.New("the sidecar before had given it up")

// goOn runs a session that was another process's before.
func (a *adopted) goOn() (kept bool) {
	ses := a.ses
	if a.lingers != nil {
		ses.conn.GiveUp(errEarlier)
		ses.conn.Linger()
		return ses.over(errEarlier)
	}
	ses.log.Info("session taken over", zap.Int("messages_that_waited", len(ses.held)))
	err := a.welcome()
	if err == nil {
		err = ses.replay()
	}
	if err == nil {
		err = ses.run()
	}
	return ses.finish(err)
}
