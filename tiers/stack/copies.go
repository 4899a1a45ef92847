package stack

import (
	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/tiers/engine"
)

// copier copies into the arena what is often read from peers, one chunk at a time (see
// engine.Engine.NextCopy). It works in the background: no request waits for it.
func (s *Stack) copier() {
	y := memcopy.NewYielder(1) // yields most often, as no request waits
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.cfg.Bell.copies:
		}
		for s.ctx.Err() == nil {
			c, ok := s.engine.NextCopy()
			if !ok {
				break
			}
			s.engine.EndCopy(c.Handle, s.copyIn(&c, y))
		}
	}
}

// copyIn copies the bytes of a chunk. It returns false if they cannot be read or the Stack is being
// closed.
func (s *Stack) copyIn(c *engine.Copy, y *memcopy.Yielder) (ok bool) {
	from, to := s.cfg.Peers.Memory(c.From.Region), s.cfg.Arena(c.To.Region)
	if c.From.Offset > uint64(len(from)) || c.Bytes > uint64(len(from))-c.From.Offset {
		return false
	}
	from, to = from[c.From.Offset:c.From.Offset+c.Bytes], to[c.To.Offset:c.To.Offset+c.Bytes]
	err := dax.Guard(func() {
		for at := 0; at < len(to) && s.ctx.Err() == nil; at += memcopy.PieceBytes {
			memcopy.Copy(to[at:min(at+memcopy.PieceBytes, len(to))], from[at:])
			y.Yield()
		}
	}, from, to)
	return err == nil && s.ctx.Err() == nil
}
