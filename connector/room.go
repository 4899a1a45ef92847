package connector

import (
	"sync"
	"time"
)

const (
	// roomPatience is how long a session waits for Config.MakeRoom before it goes on with other
	// messages.
	roomPatience = time.Millisecond
	// maxWaitingStores bounds the PrepareStores of a session that wait for room, each at most a
	// packet.
	maxWaitingStores = 64
)

// A roomCall is one call of Config.MakeRoom that was made for a session.
type roomCall struct {
	store bool // it is for the first of the stores that wait
	done  chan struct{}

	mu   sync.Mutex
	over bool
	left bool // the session did not wait any longer, and is to be interrupted
}

// mustWait has room made for a store of so many chunks, and says whether the store waits for that:
// not if there is room for it already, and only what comes after it has to be made.
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

// makeRoom calls Config.MakeRoom, and says whether it is over. If not, then ses.room is the call,
// and the session's Recv ends when it is: room may not be made before workers have mapped a region,
// or unmapped another, this session's among them, and nobody's loads are to wait for that.
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
			_ = ses.conn.SetRecvDeadline(time.Unix(1, 0)) // an error: the session has ended
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

// resumeStores answers the stores that waited for the call of MakeRoom that is over, up to one for
// which more room is to be made.
func (ses *session) resumeStores() error {
	<-ses.room.done
	if err := ses.conn.SetRecvDeadline(time.Time{}); err != nil {
		return err
	}
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
