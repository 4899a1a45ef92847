package connector

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"lookaside/tiers"
)

// SessionStatus describes one session.
type SessionStatus struct {
	Session  string    `json:"session"` // hexadecimal
	Role     string    `json:"role"`
	EngineID string    `json:"engine_id"`
	Rank     uint32    `json:"rank"`
	PID      int32     `json:"pid"`
	Space    string    `json:"space"` // short fingerprint
	Since    time.Time `json:"since"`

	About map[string]string `json:"about" doc:"What the client says of itself: releases, settings."`
}

// LingeringStatus describes a session that was given up while its client lives. It keeps what it
// holds until the client leaves.
type LingeringStatus struct {
	SessionStatus
	Why       string    `json:"why"`
	GivenUpAt time.Time `json:"given_up_at"`
	Stores    int       `json:"stores"`
	Loads     int       `json:"loads"`
}

// FrozenStatus describes a session whose client holds slots and lives, but sends nothing. It keeps
// the slots.
type FrozenStatus struct {
	SessionStatus
	SilentSince time.Time `json:"silent_since"`
	Process     string    `json:"process" doc:"What the kernel says of it."`
	Slots       int       `json:"slots"`
	Stores      int       `json:"stores"`
	Loads       int       `json:"loads"`
	Lookups     int       `json:"lookups"`
}

// SpaceStatus describes one space.
type SpaceStatus struct {
	Fingerprint   string            `json:"fingerprint"`
	PageTokens    int               `json:"page_tokens"`
	PageBytes     int64             `json:"page_bytes"`
	PagesPerChunk int               `json:"pages_per_chunk"`
	DigestBytes   int               `json:"digest_bytes"`
	Sessions      int               `json:"sessions"`
	Fields        map[string]string `json:"fields"`
}

// Status has the connected sessions, the spaces and the counters.
type Status struct {
	Draining  bool              `json:"draining"`
	Sessions  []SessionStatus   `json:"sessions"`  // oldest first
	Lingering []LingeringStatus `json:"lingering"` // likewise; these are not in Sessions
	Frozen    []FrozenStatus    `json:"frozen"`    // likewise; these are in Sessions
	Spaces    []SpaceStatus     `json:"spaces"`    // in the order of their opening
	Counters  Counters          `json:"counters"`
}

// Status returns a snapshot.
func (s *Server) Status() Status {
	st := Status{
		Draining: s.draining.Load(), Sessions: []SessionStatus{}, Lingering: []LingeringStatus{},
		Frozen: []FrozenStatus{}, Spaces: []SpaceStatus{}, Counters: s.count.snapshot(),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ses := range s.sessions {
		st.Sessions = append(st.Sessions, ses.status())
	}
	for ses, l := range s.lingering {
		st.Lingering = append(st.Lingering, LingeringStatus{ses.status(), l.why.Error(), l.since,
			l.stores, l.loads})
	}
	for ses, f := range s.frozen {
		if s.sessions[ses.id] != ses { // it has left since
			continue
		}
		st.Frozen = append(st.Frozen, FrozenStatus{ses.status(), f.since,
			processState(ses.conn.Peer().PID), f.held.Slots, f.held.Stores, f.held.Loads,
			f.held.Lookups})
	}
	older := func(a, b SessionStatus) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Session, b.Session))
	}
	slices.SortFunc(st.Sessions, older)
	slices.SortFunc(st.Frozen, func(a, b FrozenStatus) int {
		return older(a.SessionStatus,
			b.SessionStatus)
	})
	slices.SortFunc(st.Lingering, func(a, b LingeringStatus) int {
		return older(a.SessionStatus,
			b.SessionStatus)
	})
	for _, sp := range s.spaces {
		st.Spaces = append(st.Spaces, SpaceStatus{
			Fingerprint:   sp.fingerprint.String(),
			PageTokens:    sp.geometry.PageTokens,
			PageBytes:     sp.geometry.PageBytes,
			PagesPerChunk: sp.geometry.PagesPerChunk,
			DigestBytes:   sp.geometry.DigestBytes,
			Sessions:      sp.sessions,
			Fields:        fieldsOf(&sp.hello),
		})
	}
	return st
}

func (ses *session) status() SessionStatus {
	return SessionStatus{
		Session:  fmt.Sprintf("%016x", ses.id),
		Role:     ses.role,
		EngineID: ses.key.id,
		Rank:     ses.key.rank,
		PID:      ses.conn.Peer().PID,
		Space:    ses.space.fingerprint.Short(),
		Since:    ses.since,
		About:    mapOf(ses.about),
	}
}

// Counters returns what has happened since the start.
func (s *Server) Counters() Counters { return s.count.snapshot() }

// SpaceFields returns the fields of the first worker that declared a space, or false if the space
// is not open. The caller must not change them.
func (s *Server) SpaceFields(fp tiers.Fingerprint) (map[string]string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sp := range s.spaces {
		if sp.fingerprint == fp {
			return fieldsOf(&sp.hello), true
		}
	}
	return nil, false
}
