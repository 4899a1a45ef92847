package ipc

import (
	"bytes"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"lookaside/ipc/wire"
)

// Late answers come from any goroutine, each goes to its session, and none is lost while its reader
// keeps up.
func TestPost(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{Tick: time.Hour})
	a, b, other := session(t, s, 1), session(t, s, 2), session(t, s, 4)
	// fewer for each session than its socket holds: on a busy machine a reader may come late
	const goroutines, each = 8, 200
	var posters sync.WaitGroup
	for g := range goroutines {
		posters.Go(func() {
			for i := range each {
				id := uint64(g*each + i)
				m := wire.LookupResult{Lookup: id, HitPages: uint32(id), HitTokens: uint32(id)}
				buf := m.Append(nil)
				s.Post(1+id%2, buf)
				clear(buf) // it has been copied
				if i%50 == 0 {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	// Lookups are answered in between.
	other.ask(4, 1<<40, 5)
	for i, c := range []*zmqClient{a, b} {
		seen := map[uint64]bool{}
		for len(seen) < goroutines*each/2 {
			var r wire.LookupResult
			if err := r.Decode(c.recv()[0], &wire.DefaultLimits); err != nil {
				t.Fatal(err)
			}
			if seen[r.Lookup] || r.Lookup%2 != uint64(i) || r.HitPages != uint32(r.Lookup) {
				t.Fatalf("session %d was sent %+v", i+1, r)
			}
			seen[r.Lookup] = true
		}
	}
	posters.Wait()
	before := s.Stats()
	s.Post(3, []byte("to nobody"))
	eventually(t, "the post to nobody is counted",
		func() bool { return s.Stats().NoSession == before.NoSession+1 })
	if d := s.Stats().Dropped; d != before.Dropped {
		t.Fatalf("%d dropped", d-before.Dropped)
	}
}

// A session that does not read, or a loop that stands still, bounds what waits.
func TestPostIsBounded(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{Tick: time.Hour})
	session(t, s, 1)
	held, release := make(chan struct{}), make(chan struct{})
	go s.do(func() { close(held); <-release })
	<-held
	before := s.Stats().Dropped
	for range maxPosts + 100 {
		s.Post(1, []byte("x"))
	}
	if d := s.Stats().Dropped - before; d != 100 {
		t.Errorf("%d dropped, want 100", d)
	}
	close(release)
	eventually(t, "the queue is empty again", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.posts) == 0
	})
}

func TestPostAfterClose(t *testing.T) {
	l, err := Listen(runDir(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s, err := NewLookupSockets(l.Dir(), LookupOptions{}, new(testHandler))
	if err != nil {
		t.Fatal(err)
	}
	var posters sync.WaitGroup
	for range 4 {
		posters.Go(func() {
			for range 1000 {
				s.Post(1, []byte("x"))
			}
		})
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	posters.Wait()
	s.Post(1, []byte("x"))
	s.PostLMCache([]byte("id"), true, 1)
}

func TestPostLMCache(t *testing.T) {
	dir := filepath.Dir(runDir(t))
	opt := LookupOptions{LMCacheWorker: dir + "/worker", LMCacheScheduler: dir + "/scheduler",
		Tick: time.Hour}
	s, _ := lookupSockets(t, opt)
	c := newClient(t, "ipc://"+dir+"/worker", "ipc://"+dir+"/scheduler", true)
	eventually(t, "LMCache's socket is connected", func() bool {
		s.PostLMCache([]byte("warm"), false, 1)
		time.Sleep(5 * time.Millisecond)
		return c.drain() > 0
	})
	for i := range 20 {
		id := fmt.Appendf(nil, "id-%d", i)
		s.PostLMCache(id, i%2 == 0, uint32(i))
		m := c.recv()
		for bytes.Contains(m[0], []byte("warm")) { // of above
			m = c.recv()
		}
		want := [][]byte{wire.AppendLMCacheResponse(nil, id, uint32(i))}
		if i%2 == 0 {
			want = [][]byte{id, wire.AppendLMCacheTokens(nil, uint32(i))}
		}
		if len(m) != len(want) {
			t.Fatalf("%d frames, want %d", len(m), len(want))
		}
		for j := range m {
			if !bytes.Equal(m[j], want[j]) {
				t.Fatalf("frame %d is %x, want %x", j, m[j], want[j])
			}
		}
	}
}
