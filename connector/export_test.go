package connector

import (
	"context"
	"time"
)

// RetractRegionUntil is RetractRegion with patience until ctx is done.
func (s *Server) RetractRegionUntil(ctx context.Context, id uint32) { s.retractRegion(ctx, id) }

// Heard returns when the client of a session last sent something.
func (s *Server) Heard(session uint64) time.Time {
	return s.findSession(session).silentSince(time.Time{})
}

// Holding reports whether the Server holds changes back.
func (s *Server) Holding() bool { return s.mode.Load() != modeServing }
