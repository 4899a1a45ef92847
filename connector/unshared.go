package connector

import (
	"context"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"lookaside/internal/unshared"
	"lookaside/ipc/wire"
	"lookaside/tiers"
)

const (
	// unsharedEvery is the time between two checks for instances that share nothing.
	unsharedEvery = time.Second
	// maxNotices bounds the notices that one session is sent in its life.
	maxNotices = 16
	// maxWarned bounds the warnings of this kind in a sidecar's life.
	maxWarned = 256
)

// Unshared is a pair of spaces with only such differences as users make by accident.
type Unshared struct {
	Ours, Theirs tiers.Fingerprint
	Whose        string // the instance that has Theirs, for people
	// Connected is set if both have sessions now. The space of another sidecar always counts as one
	// that has.
	Connected bool
	Causes    []unshared.Cause
}

// declaration returns what the space's first worker declared.
func (sp *space) declaration() *unshared.Space {
	h := &sp.hello
	return &unshared.Space{
		PageTokens: int64(h.PageTokens), PageBytes: int64(h.PageBytes),
		PagesPerChunk: int64(h.PagesPerChunk), DigestBytes: int64(h.DigestBytes), Fields: h.Fields,
	}
}

// Unshared returns the pairs of spaces that differ by accident, of those with sessions or pages.
// Each pair of this sidecar's spaces is returned in both orders. Theirs may be a space of another
// sidecar.
func (s *Server) Unshared() []Unshared {
	var out []Unshared
	if s.cfg.UnsharedPeers != nil {
		out = s.cfg.UnsharedPeers()
	}
	pages := map[tiers.Fingerprint]int{}
	for _, sp := range s.engine.Spaces() {
		pages[sp.Fingerprint] = sp.Pages
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ours := range s.spaces {
		for _, theirs := range s.spaces {
			if ours == theirs || ours.sessions == 0 && pages[ours.fingerprint] == 0 ||
				theirs.sessions == 0 && pages[theirs.fingerprint] == 0 {
				continue
			}
			if causes := unshared.Accident(unshared.Differences(ours.declaration(),
				theirs.declaration())); causes != nil {
				out = append(out, Unshared{ours.fingerprint, theirs.fingerprint, s.whose(theirs),
					ours.sessions > 0 && theirs.sessions > 0, causes})
			}
		}
	}
	return out
}

// whose returns a name, for people, of an instance that has a space. It names the instance by its
// scheduler, which is the same for all ranks. The caller holds s.mu.
func (s *Server) whose(sp *space) string {
	var first *session
	for _, ses := range s.sessions {
		if ses.space == sp && ses.role == wire.RoleScheduler && (first == nil ||
			ses.since.Before(first.since)) {
			first = ses
		}
	}
	if first == nil {
		return "an instance that is not connected now"
	}
	return fmt.Sprintf("the instance of pid %d", first.conn.Peer().PID)
}

// tellUnshared warns of instances that share nothing by accident, in the log and by notices to the
// instances, until ctx is done. Serve runs it on its own goroutine.
func (s *Server) tellUnshared(ctx context.Context) {
	warned := map[string]bool{}
	tick := time.NewTicker(unsharedEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		pairs := s.Unshared()
		s.noteNames(pairs)
		for _, u := range pairs {
			text := unshared.Text(u.Causes)
			if what := u.Ours.Short() + u.Theirs.Short() + text; !warned[what] &&
				len(warned) < maxWarned {
				warned[what] = true
				s.log.Warn("instances of one model share nothing: "+text,
					zap.String("here", u.Ours.Short()), zap.String("there", u.Theirs.Short()),
					zap.String("whose", u.Whose))
			}
			s.notify(u.Ours, fmt.Sprintf("nothing is shared with %s: %s", u.Whose, text))
		}
	}
}

// notify sends a notice to the schedulers of a space that have not been sent it before.
func (s *Server) notify(fp tiers.Fingerprint, text string) {
	var to []*session
	s.mu.Lock()
	for _, ses := range s.sessions {
		if ses.role == wire.RoleScheduler && ses.space.fingerprint == fp &&
			len(ses.notices) < maxNotices && !slices.Contains(ses.notices, text) {
			ses.notices = append(ses.notices, text)
			to = append(to, ses)
		}
	}
	s.mu.Unlock()
	message := (&wire.Notice{Text: text}).Append(nil)
	for _, ses := range to {
		if err := ses.push(message); err != nil {
			ses.log.Debug("notice not delivered", zap.Error(err))
		}
	}
}
