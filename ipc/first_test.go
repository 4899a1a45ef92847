package ipc

import (
	"sync"
	"testing"
	"time"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

// A client that asks as soon as it is connected gets its answer, also while others keep the loop
// busy: libzmq takes note of new peers at most once in some time while it sends.
func TestFirstLookupIsAnswered(t *testing.T) {
	s, _ := lookupSockets(t, LookupOptions{})
	if err := s.AddSession(1, secretOf(1)); err != nil {
		t.Fatal(err)
	}
	ask := func(l *client.Lookups, id, lookup uint64) error {
		_, err := l.Lookup(&wire.Lookup{Session: id, Secret: secretOf(id), Lookup: lookup,
			Hashes: make([]byte, 32)}, 5*time.Second)
		return err
	}
	busy, err := client.NewLookups(s.LookupEndpoint(), s.ReplyEndpoint(), secretOf(1))
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer busy.Close()
		for i := uint64(0); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if err := ask(busy, 1, i); err != nil {
				t.Error(err)
				return
			}
		}
	})
	defer wg.Wait()
	defer close(stop)
	for id := uint64(2); id < 200; id++ {
		if err := s.AddSession(id, secretOf(id)); err != nil {
			t.Fatal(err)
		}
		l, err := client.NewLookups(s.LookupEndpoint(), s.ReplyEndpoint(), secretOf(id))
		if err != nil {
			t.Fatal(err)
		}
		if err := ask(l, id, 1); err != nil {
			t.Errorf("client %d: %v, %+v", id, err, s.Stats())
		}
		l.Close()
		s.RemoveSession(id)
		if t.Failed() {
			return
		}
	}
}
