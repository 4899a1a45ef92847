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
	Timeout     time.Duration // for the handshake, and again for the answer
}

// An Answer is what the sidecar says to a Query.
type Answer struct {
	Pages       int     `json:"pages"` // asked for
	HitPages    uint32  `json:"hit_pages"`
	HitTokens   uint32  `json:"hit_tokens"`
	PageTokens  uint32  `json:"page_tokens"`
	Fingerprint string  `json:"fingerprint"`
	LatencyUs   float64 `json:"latency_us"` // of the lookup alone
}

// Ask asks the sidecar at the endpoint dir over its own sockets, in a scheduler's session of its
// own, and gives back at once what the lookup leased.
func Ask(ctx context.Context, dir string, q Query) (Answer, error) {
	// A scheduler must know its engine's page geometry; who asks from the command line need not:
	// the refusal says it.
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
		// an answer at the deadline needs a moment to arrive
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

// learn takes over the sidecar's value of a geometry field that the refusal names. It reports
// whether asking again makes sense.
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
