package admin

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// A Query is one lookup from the command line.
type Query struct {
	EngineID    string
	Rank        uint32
	FirstPage   uint32
	Hashes      []byte // packed
	DigestBytes int
	Timeout     time.Duration // for the handshake, and again for the lookup
}

// An Answer is the result of a Query.
type Answer struct {
	Pages       int     `json:"pages"` // requested
	HitPages    uint32  `json:"hit_pages"`
	HitTokens   uint32  `json:"hit_tokens"`
	PageTokens  uint32  `json:"page_tokens"`
	Fingerprint string  `json:"fingerprint"`
	LatencyUs   float64 `json:"latency_us"` // of the lookup only
}

// Ask sends a query to the sidecar at the endpoint dir over the sidecar's own sockets, in a
// scheduler's session of its own. It releases the leases of the lookup at once.
func Ask(ctx context.Context, dir string, q Query) (Answer, error) {
	// A scheduler must send its engine's page geometry. The command line need not know it: the
	// refusal contains it.
	hello := wire.Hello{
		Role: wire.RoleScheduler, EngineID: q.EngineID, Rank: q.Rank,
		PageTokens: 1, PagesPerChunk: 1, DigestBytes: uint8(q.DigestBytes),
	}
	var ses *client.Session
	for ses == nil {
		if err := ctx.Err(); err != nil {
			return Answer{}, err
		}
		s, err := client.Dial(dir, &hello, q.Timeout)
		var refused *client.Refused
		if errors.As(err, &refused) && learn(&hello, refused) {
			continue
		}
		if err != nil {
			return Answer{}, err
		}
		ses = s
	}
	defer ses.Close()
	lookups, err := ses.Lookups()
	if err != nil {
		return Answer{}, err
	}
	defer lookups.Close()

	m := wire.Lookup{Session: ses.Welcome.Session, Secret: ses.Welcome.Secret, Lookup: 1,
		FirstPage: q.FirstPage, Hashes: q.Hashes,
		// leave some time for the reply to arrive
		DeadlineMs: uint32(q.Timeout.Milliseconds() * 9 / 10)}
	start := time.Now()
	r, err := lookups.Lookup(&m, q.Timeout)
	took := time.Since(start)
	if err != nil {
		return Answer{}, fmt.Errorf("lookup: %w", err)
	}
	return Answer{
		Pages:       len(q.Hashes) / q.DigestBytes,
		HitPages:    r.HitPages,
		HitTokens:   r.HitTokens,
		PageTokens:  hello.PageTokens,
		Fingerprint: hex.EncodeToString(ses.Welcome.Fingerprint),
		LatencyUs:   float64(took.Nanoseconds()) / 1e3,
	}, nil
}

// learn sets the geometry field that a refusal names to the sidecar's value. It reports whether
// another attempt makes sense.
func learn(h *wire.Hello, r *client.Refused) bool {
	if r.Code != wire.RefuseIncompatible {
		return false
	}
	n, err := strconv.ParseUint(r.Want, 10, 32)
	if err != nil {
		return false
	}
	switch {
	case r.Field == "page_tokens" && h.PageTokens == 1:
		h.PageTokens = uint32(n)
	case r.Field == "pages_per_chunk" && h.PagesPerChunk == 1:
		h.PagesPerChunk = uint32(n)
	default:
		return false
	}
	return true
}
