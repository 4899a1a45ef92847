package connector

import "context"

// RetractRegionUntil is RetractRegion with patience until ctx is done.
func (s *Server) RetractRegionUntil(ctx context.Context, id uint32) { s.retractRegion(ctx, id) }
