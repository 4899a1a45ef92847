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

// A client of ours says something at least once a second: it sends a Ping when there is nothing
// else. One that holds parts of the arena and has said nothing for Config.FrozenAfter has frozen,
// whatever the reason: its process is stopped, or its threads are stuck. It lives, so it keeps what
// it holds. The engine is told, so that the others get along with the rest
// (engine.Engine.SetFrozen), and so is the operator. Sessions that linger count as well: their
// clients live, and hold what they held.

// defaultFrozenAfter is three of the heartbeats that a client sends.
const defaultFrozenAfter = 3 * time.Second

// handling is what session.heard is while a message is being handled: then the session waits for
// us.
const handling = math.MaxInt64

// frozenInfo is what is known of a session that has frozen.
type frozenInfo struct {
	since time.Time // when it was last heard of
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
	awake  time.Time // when we ourselves had not been standing still for long
	last   time.Time
	told   bool // the engine knows of some
}

// look finds out who has frozen by now.
func (w *frozenWatch) look(now time.Time) {
	s := w.server
	if now.Sub(w.last) > s.cfg.FrozenAfter/2 {
		// we may have been stopped, and not heard what they said
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

// silentSince is when the client was last heard of, but not before a time.
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

// hear notes that the client was heard of just now.
func (ses *session) hear() { ses.heard.Store(int64(time.Since(ses.since))) }

// processState says in words what the kernel says that a process does.
func processState(pid int32) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if i := bytes.LastIndexByte(b, ')'); err == nil && i >= 0 && i+2 < len(b) {
		// its name comes before, in parentheses
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
