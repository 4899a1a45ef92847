package connector

import (
	"sync"
	"time"
)

const (
	// roomPatience is how long a session waits for Config.MakeRoom before it goes on with other
	// messages.
	roomPatience = time.Millisecond
	// maxWaitingStores bounds the PrepareStores of a session that wait for room. Each is at most a
	// packet long.
	maxWaitingStores = 64
)

// roomCall is a call of Config.MakeRoom for a session.
type roomCall struct {
	store bool          // the call is for the first store in session.waiting
	done  chan struct{} // closed when the call has returned

	mu   sync.Mutex
	over bool // the call has returned; guarded by mu
	left bool // the session no longer waits, and its Recv must be interrupted; guarded by mu
}

// mustWait starts to make room for a store of so many chunks, and reports whether the store must
// wait. It need not if there are enough free slots already.
func (ses *session) mustWait(chunks int) bool {
	if ses.server.draining.Load() {
		return false
	}
	if len(ses.waiting) > 0 {
		return true
	}
	first := ses.room == nil
	if first && ses.makeRoom(chunks) {
		return false
	}
	_, free := ses.server.engine.Room(ses.space.geometry)
	waits := free < chunks
	ses.room.store = first && waits
	return waits
}

// makeRoom calls Config.MakeRoom, waits for roomPatience, and reports whether the call has
// returned. If not, it sets ses.room, and the end of the call will interrupt the session's Recv. It
// does not wait longer because the call may itself wait until workers, this session's among them,
// have mapped or unmapped a region, and because loads must not wait for room.
func (ses *session) makeRoom(slots int) bool {
	s := ses.server
	if s.cfg.MakeRoom == nil {
		return true
	}
	c := &roomCall{done: make(chan struct{})}
	s.wg.Go(func() {
		s.cfg.MakeRoom(ses.space.geometry, slots)
		c.mu.Lock()
		c.over = true
		left := c.left
		c.mu.Unlock()
		close(c.done)
		if left {
			_ = ses.conn.SetRecvDeadline(time.Unix(1, 0)) // fails if the session has ended
		}
	})
	late := time.NewTimer(roomPatience)
	defer late.Stop()
	select {
	case <-c.done:
		return true
	case <-late.C:
	}
	c.mu.Lock()
	c.left = !c.over
	c.mu.Unlock()
	if c.left {
		ses.room = c
	}
	return !c.left
}

// resumeStores replies to the stores that wait, after the call of MakeRoom in ses.room has ended.
// It stops at a store for which another call takes long.
func (ses *session) resumeStores() error {
	made := ses.room.store
	ses.room = nil
	m := &ses.msg.prepareStore
	for len(ses.waiting) > 0 {
		if err := m.Decode(ses.waiting[0], &ses.server.limits); err != nil {
			return err
		}
		if !made && !ses.makeRoom(ses.chunksOf(m)) {
			ses.room.store = true
			return nil
		}
		ses.waiting[0] = nil
		ses.waiting = ses.waiting[1:]
		made = false
		if err := ses.reply(ses.grantStore()); err != nil {
			return err
		}
	}
	ses.waiting = nil
	return nil
}
