package connector

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers/engine"
)

// A client sends something at least once a second, on its session or on a lookup socket: a Ping if
// there is nothing else. A client that holds slots and has sent nothing for Config.FrozenAfter is
// frozen: its process is stopped, or its threads are stuck. It lives, so it keeps what it holds.
// engine.Engine.SetFrozen has the other clients share the rest, and the log warns the operator.
// Sessions that linger count as frozen, because their clients live and hold what they held.

// defaultFrozenAfter is three heartbeats of a client.
const defaultFrozenAfter = 3 * time.Second

// handling is the value of session.heard while a message is handled. The client then waits for the
// sidecar, so it is not silent.
const handling = math.MaxInt64

// frozenInfo describes a frozen session.
type frozenInfo struct {
	since time.Time // when its client last sent something
	held  engine.OwnerStats
}

// watchFrozen finds sessions that freeze and thaw, until ctx is done.
func (s *Server) watchFrozen(ctx context.Context) {
	tick := time.NewTicker(s.cfg.FrozenAfter / 4)
	defer tick.Stop()
	w := frozenWatch{server: s, awake: time.Now()}
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			w.look(now)
		}
	}
}

// frozenWatch is owned by one goroutine.
type frozenWatch struct {
	server *Server
	awake  time.Time // silence before this time does not count: this process may have been stopped
	last   time.Time // of the last look
	told   bool      // the engine has been told of frozen owners
}

// look finds the sessions that are frozen now, and tells the engine and the log of changes.
func (w *frozenWatch) look(now time.Time) {
	s := w.server
	if now.Sub(w.last) > s.cfg.FrozenAfter/2 {
		// This process may have been stopped, with messages of clients unread.
		w.awake = now
	}
	w.last = now
	s.mu.Lock()
	silent := map[*session]time.Time{}
	for _, ses := range s.sessions {
		if since := ses.silentSince(w.awake); now.Sub(since) >= s.cfg.FrozenAfter {
			silent[ses] = since
		}
	}
	owners := make([]engine.Owner, 0, len(s.lingering))
	for ses := range s.lingering {
		owners = append(owners, ses.owner)
	}
	was := s.frozen
	s.mu.Unlock()

	frozen := map[*session]frozenInfo{}
	for ses, since := range silent {
		if held, ok := s.engine.Owner(ses.owner); ok && held.Slots > 0 {
			frozen[ses] = frozenInfo{since, held}
			owners = append(owners, ses.owner)
		}
	}
	if len(owners) > 0 || w.told {
		slices.Sort(owners)
		s.engine.SetFrozen(owners)
		w.told = len(owners) > 0
	}
	for ses := range frozen {
		if _, known := was[ses]; !known {
			s.count.froze.Add(1)
		}
	}
	s.mu.Lock()
	s.frozen = frozen
	s.mu.Unlock()
	for ses, f := range frozen {
		if _, known := was[ses]; !known {
			ses.log.Warn("a client that holds parts of the arena has frozen; they stay its own while it lives, and others get less: end or continue its process",
				zap.String("process", processState(ses.conn.Peer().PID)), zap.Duration("silent_for",
					now.Sub(f.since).Round(time.Millisecond)), zap.Int("slots", f.held.Slots),
				zap.Int("stores", f.held.Stores), zap.Int("loads", f.held.Loads),
				zap.Int("lookups", f.held.Lookups))
		}
	}
	for ses, f := range was {
		if _, still := frozen[ses]; !still {
			ses.log.Info("a client that had frozen goes on, has left, or holds nothing any more",
				zap.Duration("after", now.Sub(f.since).Round(time.Millisecond)))
		}
	}
}

// silentSince returns when the client last sent something, but not a time before the given one.
func (ses *session) silentSince(before time.Time) time.Time {
	heard := ses.heard.Load()
	if heard == handling {
		return time.Now()
	}
	if t := ses.since.Add(time.Duration(heard)); t.After(before) {
		return t
	}
	return before
}

// hear notes that the client has sent something now. The session's goroutine calls it.
func (ses *session) hear() { ses.heard.Store(int64(time.Since(ses.since))) }

// hearLookup is hear for the goroutine that owns the lookup sockets. It has no effect while the
// session's goroutine handles a message.
func (ses *session) hearLookup() {
	if heard := ses.heard.Load(); heard != handling {
		// If it fails, the session's goroutine has heard something newer.
		ses.heard.CompareAndSwap(heard, int64(time.Since(ses.since)))
	}
}

// processState returns, in words for people, the state that the kernel reports of a process.
func processState(pid int32) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if i := bytes.LastIndexByte(b, ')'); err == nil && i >= 0 && i+2 < len(b) {
		// The state follows the name, which is in parentheses.
		switch b[i+2] {
		case 'T':
			return "stopped"
		case 't':
			return "stopped by a debugger"
		case 'D':
			return "waits in the kernel, or its cgroup is frozen"
		case 'Z', 'X':
			return "dead"
		}
		return "runs, and says nothing"
	}
	return "unknown"
}
