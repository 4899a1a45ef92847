package connector_test

import (
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// lmHash is the hash of chunk i of a prompt as LMCache has it: a 64-bit number, often negative.
func lmHash(prompt, i int) int64 {
	return int64(uint64(prompt+1)*0x9E3779B97F4A7C15 + uint64(i)*0xBF58476D1CE4E5B9)
}

// storeLM stores chunks of a prompt under LMCache's hashes through a worker whose space has 8-byte
// digests and a page a chunk.
func storeLM(t *testing.T, w *worker, prompt, chunks int) {
	t.Helper()
	var hashes []byte
	for i := range chunks {
		hashes = binary.BigEndian.AppendUint64(hashes, uint64(lmHash(prompt, i)))
	}
	var g wire.StoreGrant
	check(t, w.call(&wire.PrepareStore{ID: w.ses.NextID(), Hashes: hashes}, &g))
	if g.Shed != 0 {
		t.Fatalf("%d shed", g.Shed)
	}
	check(t, w.ses.Send(&wire.CommitStore{Store: g.Store}))
	w.sync()
}

func lmHello(engine string) *wire.Hello {
	h := workerHello(engine)
	h.DigestBytes, h.PagesPerChunk, h.PageTokens = 8, 1, 256
	return h
}

func TestLMCacheLookups(t *testing.T) {
	r := newRig(t, rigOptions{lmcache: true, maxPages: 6})
	r.worker(workerHello("native")) // another space, that must not be asked
	w := r.worker(lmHello("lm"))
	storeLM(t, w, 1, 5)
	storeLM(t, w, 3, 6)
	l, err := client.NewLookups(r.lmcache[0], r.lmcache[1], nil)
	check(t, err)
	defer func() {
		check(t, l.Close())
		_ = os.Remove(strings.TrimPrefix(r.lmcache[1], "ipc://")) // libzmq leaves it
	}()

	request := func(id string, prompt, chunks int, configs any) []byte {
		hashes, offsets := make([]int64, chunks), make([]uint32, chunks)
		for i := range chunks {
			hashes[i], offsets[i] = lmHash(prompt, i), 256
		}
		if chunks > 0 {
			offsets[chunks-1] = 100 // the last chunk is not full
		}
		b, err := msgpack.Marshal(map[string]any{"type": "LookupRequestMsg", "lookup_id": id,
			"hashes": hashes, "offsets": offsets, "request_configs": configs})
		check(t, err)
		return b
	}
	answer := func(wantID string, wantTokens int) {
		t.Helper()
		frames, err := l.Recv(patience)
		check(t, err)
		var m map[string]any
		check(t, msgpack.Unmarshal(frames[0], &m))
		var tokens int64
		switch v := m["num_hit_tokens"].(type) {
		case int8:
			tokens = int64(v)
		case uint16:
			tokens = int64(v)
		case uint8:
			tokens = int64(v)
		}
		if len(frames) != 1 || m["type"] != "LookupResponseMsg" || m["lookup_id"] != wantID ||
			tokens != int64(wantTokens) || len(m) != 3 {
			t.Errorf("answer %v, want %d tokens for %s", m, wantTokens, wantID)
		}
	}
	check(t, l.Send(request("req-1", 1, 5, nil)))
	answer("req-1", 4*256+100)
	check(t, l.Send(request("req-2", 1, 7, map[string]any{"a": 1}))) // more than is held
	answer("req-2", 5*256)
	check(t, l.Send(request("req-3", 2, 3, nil)))
	answer("req-3", 0)
	check(t, l.Send(request("long", 3, 9, nil))) // more than may be asked: as many are answered for
	answer("long", 6*256)
	long, err := msgpack.Marshal(map[string]any{"type": "LookupCleanupMsg", "lookup_id": "long"})
	check(t, err)
	check(t, l.Send(long))
	check(t, l.Send(request("req-4", 1, 0, nil)))
	answer("req-4", 0)
	// a tag is part of the key there
	check(t, l.Send(request("req-5", 1, 5, map[string]any{"lmcache.tag.user": "x"})))
	answer("req-5", 0)
	if st := r.engine.Stats(); st.OpenLookups != 2 || st.Leases != 10 {
		t.Errorf("%d lookups with %d leases", st.OpenLookups, st.Leases)
	}
	cleanup, err := msgpack.Marshal(map[string]any{"type": "LookupCleanupMsg",
		"lookup_id": "req-1"})
	check(t, err)
	check(t, l.Send(cleanup))
	r.eventually("cleanup", func() bool { return r.engine.Stats().OpenLookups == 1 })

	// The form in frames.
	hashes, err := msgpack.Marshal([]int64{lmHash(1, 0), lmHash(1, 1)})
	check(t, err)
	offsets, err := msgpack.Marshal([]int{256, 256})
	check(t, err)
	check(t, l.Send([]byte("req-6"), hashes, offsets, []byte("a%1@b%2")))
	frames, err := l.Recv(patience)
	check(t, err)
	if len(frames) != 2 || string(frames[0]) != "req-6" ||
		binary.BigEndian.Uint32(frames[1]) != 512 {
		t.Errorf("answer %q", frames)
	}
	// What is malformed has no answer, and the next one has.
	check(t, l.Send([]byte("req-7"), []byte{0xdd, 0xff, 0xff, 0xff, 0xff}, offsets, nil))
	check(t, l.Send([]byte{0xc1}))
	if _, err := l.Recv(100 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	check(t, l.Send(request("req-8", 1, 5, nil)))
	answer("req-8", 4*256+100)

	// With a second space of that kind, the question is ambiguous unless lmcache.engine_id says
	// which; the one in use stays.
	h := lmHello("lm2")
	h.Fields[1].Value = "other"
	w2 := r.worker(h)
	storeLM(t, w2, 2, 3)
	check(t, l.Send(request("req-9", 1, 5, nil)))
	answer("req-9", 4*256+100)
	w.close()
	r.eventually("the worker is gone", func() bool { return r.server.Sessions() == 2 })
	check(t, l.Send(request("req-10", 2, 3, nil)))
	answer("req-10", 0)
}
