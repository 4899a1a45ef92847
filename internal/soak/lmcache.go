package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"lookaside/ipc/client"
	"lookaside/tiers"
)

// lmcacheSpace is the one of the clients' spaces whose pages LMCache's lookups can name: its hashes
// have 8 bytes, and a chunk has one page.
var lmcacheSpace = spaces[2]

// askAsLMCache sends LMCache's lookups for the clients' prefixes to a node until ctx ends. It
// checks that no reply reports more than was requested. The node is killed and stopped in the
// meantime, so replies may be missing.
func (s *soak) askAsLMCache(ctx context.Context, n *node) {
	if lmcacheSpace.Geometry != (tiers.Geometry{PageBytes: 64 << 10, PagesPerChunk: 1,
		PageTokens: 256, DigestBytes: 8}) {
		s.problem("LMCache's lookups need a space of 8-byte hashes with one page a chunk")
		return
	}
	rnd := rand.New(rand.NewPCG(s.o.seed, 0x6c6d))
	for ctx.Err() == nil {
		if err := s.lmcacheSession(ctx, rnd, n); err != nil {
			s.wait(ctx, 100*time.Millisecond) // it is gone for now
		}
	}
}

func (s *soak) lmcacheSession(ctx context.Context, rnd *rand.Rand, n *node) error {
	l, err := client.NewLookups("ipc://"+n.lmcache+"-worker", "ipc://"+n.lmcache+"-scheduler", nil)
	if err != nil {
		return err
	}
	defer l.Close()
	for i := 0; ctx.Err() == nil && i < 500; i++ {
		t := randomPrefix(rnd, lmcacheSpace)
		digests := t.Digests(0, len(t), 8)
		hashes, offsets := make([]uint64, len(t)), make([]int, len(t))
		for i := range t {
			hashes[i], offsets[i] = binary.BigEndian.Uint64(digests[8*i:]), 256
		}
		id := fmt.Sprintf("soak-%d", i)
		message, err := msgpack.Marshal(map[string]any{"type": "LookupRequestMsg", "lookup_id": id,
			"hashes": hashes, "offsets": offsets, "request_configs": nil})
		if err != nil {
			return err
		}
		if err := l.Send(message); err != nil {
			return err
		}
		for {
			frames, err := l.Recv(time.Second)
			if err != nil {
				return err
			}
			var answer struct {
				Type   string `msgpack:"type"`
				ID     string `msgpack:"lookup_id"`
				Tokens int    `msgpack:"num_hit_tokens"`
			}
			if err := msgpack.Unmarshal(frames[0], &answer); err != nil {
				s.problem("an answer to LMCache that is none: %v", err)
				return err
			}
			if answer.ID != id && strings.HasPrefix(answer.ID, "soak-") {
				continue // the reply to an earlier lookup
			}
			if answer.Type != "LookupResponseMsg" || answer.Tokens < 0 ||
				answer.Tokens > 256*len(t) || answer.Tokens%256 != 0 {
				s.problem("LMCache asked for %d tokens and was answered %+v", 256*len(t), answer)
			}
			s.event("lmcache lookup")
			if answer.Tokens > 0 {
				s.event("lmcache hit")
			}
			break
		}
		if message, err = msgpack.Marshal(map[string]any{"type": "LookupCleanupMsg",
			"lookup_id": id}); err != nil {
			return err
		}
		if err := l.Send(message); err != nil {
			return err
		}
		s.wait(ctx, time.Duration(rnd.IntN(20))*time.Millisecond)
	}
	return nil
}
