package main

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
)

// TestKilledAndStartedAgain: a sidecar that is killed while it stores is followed by one that has
// what was committed before, in the memory that a worker gives back: it maps nothing anew.
func TestKilledAndStartedAgain(t *testing.T) {
	const pages = 40
	args := []string{"--arena-limit=64M", "--arena-initial=16M", "--arena-kind=memfd",
		"--sessions-share=1", "--sessions-joint-share=1"}
	s := serveOnly(t, args...)
	shape := prefixes.Shape{PageBytes: 4096, PagesPerChunk: 4}
	p, err := prefixes.Dial(s.dir, shape, 0, pages)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	status := func() (st admin.Status) {
		t.Helper()
		if err := admin.NewClient(s.dir).Get(t.Context(), "/v1/status", &st); err != nil {
			t.Fatal(err)
		}
		return st
	}
	var generations []string
	for round := range 5 {
		// What is stored in this round must hit in the next one; the rest may.
		if err := p.Select(round, pages); err != nil {
			t.Fatal(err)
		}
		if err := p.Store(); err != nil {
			t.Fatal(err)
		}
		var st admin.Status
		want := (round + 1) * pages / 4
		for end := time.Now().Add(patience); st.Arena.KeptChunks < want; st = status() {
			if time.Now().After(end) {
				t.Fatalf("round %d: %+v", round, st.Arena)
			}
		}
		if slices.Contains(generations, st.Generation) {
			t.Errorf("round %d: generation %s again", round, st.Generation)
		}
		generations = append(generations, st.Generation)
		// The kill comes while more is stored.
		q, err := prefixes.Dial(s.dir, shape, 100+round, 1500)
		if err != nil {
			t.Fatal(err)
		}
		storing := make(chan error, 1)
		go func() { storing <- q.Store() }()
		s.signal(syscall.SIGKILL)
		<-s.exited
		<-storing
		if err := q.Close(); err != nil && !errors.Is(err, syscall.EPIPE) {
			t.Log(err)
		}
		again := make(chan error, 1)
		go func() {
			var err error
			for end := time.Now().Add(patience); time.Now().Before(end); {
				if err = p.Reconnect(s.dir); err == nil {
					break
				}
			}
			again <- err
		}()
		s = serveIn(t, s.dir, []string{binary}, args...)
		if err := <-again; err != nil {
			t.Fatalf("round %d: %v\n%s", round, err, s.text())
		}
		if st = status(); st.Arena.Recovered.Why != "" ||
			st.Arena.Recovered.Chunks < want {
			t.Fatalf("round %d: %+v\n%s", round, st.Arena, s.text())
		}
		for n := range round + 1 {
			if err := p.Select(n, pages); err != nil {
				t.Fatal(err)
			}
			if _, err := p.Lookup(); err != nil {
				t.Fatalf("round %d: prefix %d: %v\n%s", round, n, err, s.text())
			}
			if err := p.Verify(); err != nil {
				t.Fatalf("round %d: prefix %d: %v", round, n, err)
			}
		}
		if mapped, kept := p.Memory(); mapped != st.Arena.CapacityBytes || kept == 0 {
			t.Errorf("round %d: %d bytes were mapped, %d kept, of %d", round, mapped, kept,
				st.Arena.CapacityBytes)
		}
		for end := time.Now().Add(patience); status().Arena.Recovered.Frozen; {
			if time.Now().After(end) {
				t.Fatalf("round %d: %+v", round, status().Arena)
			}
		}
	}
	if text := s.text(); !strings.Contains(text, "found what the process before had left") {
		t.Error(text)
	}
}
