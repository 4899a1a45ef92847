package connector

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/stack"
)

const (
	// maxContains bounds the Contains of a session that are under way.
	maxContains = 256
	// containsPatience bounds how long a reply to Contains waits, whatever its client asks for.
	containsPatience = time.Second
	// tierPatience bounds how long it waits for a tier that must ask a server what it holds.
	tierPatience = time.Second
)

// contains has msg.contains answered on a goroutine of its own, because a tier may take its time.
// It returns a reply only if there is an error.
func (ses *session) contains() []byte {
	m, s := &ses.msg.contains, ses.server
	g := &ses.space.geometry
	if len(m.Hashes)%g.DigestBytes != 0 || len(m.Prev) != 0 && len(m.Prev) != g.DigestBytes {
		return ses.fail(m.ID, fmt.Errorf("%w: hashes are not of %d bytes each", tiers.ErrInvalid,
			g.DigestBytes))
	}
	if n := len(m.Hashes) / g.DigestBytes; n > s.cfg.MaxPages ||
		int(m.FirstPage)%g.PagesPerChunk != 0 {
		return ses.fail(m.ID, fmt.Errorf("%w: %d pages from page %d on, at most %d and from the "+
			"first of a chunk on", tiers.ErrInvalid, n, m.FirstPage, s.cfg.MaxPages))
	}
	if ses.asking.Add(1) > maxContains {
		ses.asking.Add(-1)
		return ses.fail(m.ID, fmt.Errorf("%w: %d Contains are under way", tiers.ErrBusy,
			maxContains))
	}
	q := *m
	q.Prev, q.Hashes = bytes.Clone(m.Prev), bytes.Clone(m.Hashes)
	s.mu.Lock()
	changed := s.modeChanged
	s.mu.Unlock()
	s.wg.Go(func() {
		defer ses.asking.Add(-1)
		reply := ses.contained(&q, changed)
		_ = ses.push(reply) // a client that is gone needs none
	})
	return nil
}

// contained returns the reply to q. It waits no longer once changed is closed.
func (ses *session) contained(q *wire.Contains, changed <-chan struct{}) []byte {
	s := ses.server
	wait, cancel := context.WithTimeout(context.Background(),
		min(time.Duration(q.WaitMs)*time.Millisecond, containsPatience))
	defer cancel()
	if q.WaitMs > 0 {
		s.wg.Go(func() {
			select {
			case <-changed:
			case <-s.drains:
			case <-wait.Done():
			}
			cancel()
		})
	}
	ctx, end := context.WithTimeout(context.Background(), containsPatience+tierPatience)
	defer end()
	h, err := s.stack.Held(ctx, wait, ses.space.id, int(q.FirstPage), q.Prev, q.Hashes)
	if err != nil {
		kind := kindOf(err)
		s.count.fail(kind)
		if kind == KindInternal {
			kind = KindBusy
		}
		e := wire.Error{ID: q.ID, Code: kind.String(), Message: err.Error()}
		return e.Append(nil)
	}
	reply := containedOf(q.ID, &h, len(s.stack.TierNames()))
	return reply.Append(nil)
}

func containedOf(id uint32, h *stack.Held, tiers int) *wire.Contained {
	m := &wire.Contained{ID: id, Held: make([]byte, 0, 2*len(h.Pages)),
		Below: make([]byte, 0, 2*len(h.Below)), Waiting: uint32(h.Waiting), Tiers: uint8(tiers)}
	for i := range h.Pages {
		m.Held = binary.LittleEndian.AppendUint16(m.Held, h.Pages[i])
		m.Below = binary.LittleEndian.AppendUint16(m.Below, h.Below[i])
	}
	return m
}
