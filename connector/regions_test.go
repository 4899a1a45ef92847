package connector_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"lookaside/connector"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
)

// A device is a file whose parts are regions.
func device(t *testing.T, size int64) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "device"))
	check(t, err)
	t.Cleanup(func() { f.Close() })
	check(t, f.Truncate(size))
	return f
}

// part is page n of a device as a region.
func part(f *os.File, id uint32, n int64) connector.Region {
	return connector.Region{ID: id, Kind: "file", FD: int(f.Fd()), OffsetBytes: n << 12,
		SizeBytes: 4096, PageSize: 4096}
}

// retract retracts a region in the background.
func (r *rig) retract(id uint32, patience time.Duration) (done chan struct{}) {
	done = make(chan struct{})
	go func() {
		defer close(done)
		r.server.RetractRegion(id, patience)
	}()
	return done
}

// retractUntil does so with patience until giveUp.
func (r *rig) retractUntil(id uint32) (done chan struct{}, giveUp context.CancelFunc) {
	ctx, giveUp := context.WithCancel(context.Background())
	r.t.Cleanup(giveUp)
	done = make(chan struct{})
	go func() {
		defer close(done)
		r.server.RetractRegionUntil(ctx, id)
	}()
	return done, giveUp
}

func finished(done chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// readsRegion reads until a region has come or gone.
func (w *worker) readsRegion(typ wire.Type) {
	w.t.Helper()
	b, err := w.recv(true)
	check(w.t, err)
	if got, _ := wire.Peek(b); got != typ {
		w.t.Fatalf("got %v, want %v", got, typ)
	}
}

// A part of a device is announced where it lies, and its retraction is over when the last worker
// has unmapped it.
// TestInMemory: a hit is said to be in memory while no region of the arena is on a device. What is
// only for reading is a peer's, and no lookup here has leased any of it.
func TestInMemory(t *testing.T) {
	r := newRig(t, rigOptions{})
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	p := prefix{stretch: perChunk}
	looked := func(pages int, memory bool) {
		t.Helper()
		id, hit := s.lookup(p, 0, 2*perChunk)
		if hit != pages || s.memory != memory {
			t.Fatalf("%d pages, in memory: %v", hit, s.memory)
		}
		s.cancel(id)
	}
	looked(0, false)
	w.store(p, 0, perChunk)
	looked(perChunk, true)
	f := device(t, 16<<12)
	peers := part(f, 6, 2)
	peers.ReadOnly = true
	r.server.AnnounceRegion(peers)
	looked(perChunk, true)
	r.server.AnnounceRegion(part(f, 7, 3))
	w.readsRegion(wire.TypeRegionAdded)
	w.readsRegion(wire.TypeRegionAdded)
	looked(perChunk, false)
	done := r.retract(7, patience)
	w.readsRegion(wire.TypeRegionRemoved)
	<-done
	looked(perChunk, true)
}

func TestRegionsComeAndGo(t *testing.T) {
	r := newRig(t, rigOptions{})
	f := device(t, 16<<12)
	a, b := r.worker(workerHello("a")), r.worker(workerHello("b"))
	r.server.AnnounceRegion(part(f, 7, 3))
	r.server.AnnounceRegion(part(f, 8, 5))
	for _, w := range []*worker{a, b} {
		w.readsRegion(wire.TypeRegionAdded)
		w.readsRegion(wire.TypeRegionAdded)
	}
	late := r.worker(workerHello("late"))
	if len(late.regions) != 3 {
		t.Fatalf("%d regions at the handshake", len(late.regions))
	}
	a.regions[7][5], late.regions[8][6] = 1, 2
	got := make([]byte, 6<<12)
	_, err := f.ReadAt(got, 0)
	check(t, err)
	if b.regions[7][5] != 1 || got[3<<12+5] != 1 || got[5<<12+6] != 2 {
		t.Error("the regions are not the device's pages 3 and 5")
	}

	done := r.retract(7, time.Hour)
	a.readsRegion(wire.TypeRegionRemoved)
	late.readsRegion(wire.TypeRegionRemoved)
	a.sync()
	late.sync()
	if finished(done) {
		t.Error("retracted while a worker has it mapped")
	}
	after := r.worker(workerHello("after"))
	if after.regions[7] != nil || len(after.regions) != 2 {
		t.Error("a worker heard of a region that is being retracted")
	}
	b.store(onePrefix(1), 0, 4) // unmaps it meanwhile, if it has heard of it by then
	if b.regions[7] != nil {
		b.readsRegion(wire.TypeRegionRemoved)
	}
	<-done
	for _, w := range []*worker{a, b, late, after} {
		w.sync()
		if len(w.regions) != 2 || w.regions[8] == nil {
			t.Errorf("regions %v", w.regions)
		}
	}
	r.server.RetractRegion(7, time.Hour) // again, and what never was: no wait
	r.server.RetractRegion(99, time.Hour)

	func() {
		defer func() {
			if recover() == nil {
				t.Error("a region's id was used again")
			}
		}()
		r.server.AnnounceRegion(part(f, 7, 3))
	}()
	check(t, a.ses.Send(&wire.RegionUnmapped{Region: 7})) // once more
	a.readsEnd()
	r.eventually("it is given up", func() bool { return r.server.Sessions() == 3 })
	if n := r.errorCount("malformed"); n != 1 {
		t.Errorf("%d malformed messages", n)
	}
}

// A worker that never lets go of a region is given up when the patience is over, and what it has
// elsewhere stays its own.
func TestWorkerThatKeepsARegion(t *testing.T) {
	for _, stores := range []bool{true, false} {
		t.Run(fmt.Sprint(stores), func(t *testing.T) {
			r := newRig(t, rigOptions{})
			f := device(t, 1<<20)
			r.server.AnnounceRegion(part(f, 7, 0))
			good, bad := r.worker(workerHello("good")), r.worker(workerHello("bad"))
			var g wire.StoreGrant
			if stores {
				var err error
				g, err = bad.prepare(onePrefix(1), 0, 8)
				check(t, err)
			}
			// It reads, and asks for other things, but does not acknowledge the region.
			stop, stopped := make(chan struct{}), make(chan error, 1)
			go func() {
				for !finished(stop) {
					if err := bad.ses.Send(&wire.Ping{ID: 1}); err != nil {
						break
					}
					if _, _, err := bad.ses.Recv(patience); err != nil {
						stopped <- err
						return
					}
				}
				stopped <- nil
			}()
			done, giveUp := r.retractUntil(7)
			good.readsRegion(wire.TypeRegionRemoved)
			good.sync()
			if finished(done) {
				t.Error("retracted while a worker has it mapped")
			}
			giveUp()
			<-done
			r.eventually("it is given up", func() bool { return r.server.Sessions() == 1 })
			close(stop)
			<-stopped
			if n := r.errorCount("send"); n != 1 {
				t.Errorf("%d counted", n)
			}
			if !stores {
				bad.readsToTheEnd() // what is left unread keeps its place
				r.eventually("its session is closed",
					func() bool { return r.listener.Stats().Sessions == 1 })
				return
			}
			r.waitLingering(1)
			if why := r.lingering()[0].Why; why != "it does not unmap a region that is removed" {
				t.Errorf("it lingers because %s", why)
			}
			check(t, bad.fill(onePrefix(1), g.Grants))
			// One that lingers is not waited for.
			r.server.AnnounceRegion(part(f, 8, 1))
			done = r.retract(8, time.Hour)
			good.readsRegion(wire.TypeRegionAdded)
			good.readsRegion(wire.TypeRegionRemoved)
			<-done
		})
	}
}

// A worker that leaves, is given up for something else or does not read is not waited for any
// longer.
func TestWorkerThatGoesWhileARegionDoes(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(w *worker)
	}{
		{"leaves", func(w *worker) { w.close() }},
		{"breaks the protocol", func(w *worker) { check(w.t, w.ses.SendRaw([]byte{0xc1})) }},
		{"does not read", func(w *worker) { flood(w.ses) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{})
			r.server.AnnounceRegion(part(device(t, 4096), 7, 0))
			w := r.worker(workerHello("e"))
			_, err := w.prepare(onePrefix(1), 0, 8)
			check(t, err)
			done := r.retract(7, time.Hour)
			r.eventually("the region is retracted", func() bool { // for workers that come now
				probe, err := client.Dial(r.dir, workerHello("probe"), patience)
				check(t, err)
				n := probe.Welcome.Regions
				probe.Close()
				return n == 1
			})
			c.do(w)
			<-done
		})
	}
}

// A closed server lets go of everybody who waits for a worker.
func TestCloseWhileARegionGoes(t *testing.T) {
	r := newRig(t, rigOptions{})
	r.server.AnnounceRegion(part(device(t, 4096), 7, 0))
	w := r.worker(workerHello("e"))
	done := r.retract(7, time.Hour)
	if _, _, err := w.ses.Recv(patience); err != nil {
		// the end of the region, which is not answered
		t.Fatal(err)
	}
	r.cancel()
	check(t, <-r.served)
	r.served <- nil // for the rig
	r.server.Close()
	<-done
}

// Workers connect and leave while regions come and go: each gets a region once, every end of
// a region that it got, and no other end.
func TestRegionsChangeWhileWorkersConnect(t *testing.T) {
	const seed = 1
	r := newRig(t, rigOptions{})
	f := device(t, 8<<12)
	stop := make(chan struct{})
	failed := make(chan error, 4)
	for i := range 4 {
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		go func() {
			failed <- func() error {
				for n := 0; !finished(stop); n++ {
					w, err := dialWorker(r.dir, workerHello(fmt.Sprintf("engine-%d", i)))
					if err != nil {
						return err
					}
					for range rnd.IntN(20) { // mapRegion and unmapRegion check
						var pong wire.Pong
						if err := w.call(&wire.Ping{ID: 1}, &pong); err != nil {
							return fmt.Errorf("connection %d: %w", n, err)
						}
					}
					w.close()
				}
				return nil
			}()
		}()
	}
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			for n := range 60 {
				id := uint32(1 + i*60 + n)
				r.server.AnnounceRegion(part(f, id, int64(n%8)))
				r.server.RetractRegion(id, time.Minute)
			}
		})
	}
	wg.Wait()
	close(stop)
	for range 4 {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	if n := r.errorCount("send") + r.errorCount("malformed"); n != 0 {
		t.Errorf("%d workers were given up", n)
	}
	if w := r.worker(workerHello("last")); len(w.regions) != 1 {
		t.Errorf("%d regions are left", len(w.regions))
	}
}

// The engine's owner is called with a geometry before its worker stores, and with the chunks of a
// store for which there is no room before they are granted.
func TestMakeRoom(t *testing.T) {
	type call struct {
		g     tiers.Geometry
		slots int
	}
	var mu sync.Mutex
	var calls []call
	var r *rig
	const slots = 8
	r = newRig(t, rigOptions{regionBytes: slots * perChunk * pageBytes,
		makeRoom: func(g tiers.Geometry, slots int) {
			mu.Lock()
			calls = append(calls, call{g, slots})
			n := len(calls)
			mu.Unlock()
			if n > 1 {
				// the region comes before the store is granted, and its worker gets it before the
				// grant
				r.grow(int64(slots) * perChunk * pageBytes)
			}
		}})
	w := r.worker(workerHello("e"))
	r.scheduler(schedulerHello("e"))
	first := func(n int) []call {
		mu.Lock()
		defer mu.Unlock()
		return append([]call(nil), calls[:min(n, len(calls))]...)
	}
	r.eventually("its geometry is known", func() bool { return len(first(1)) == 1 })
	for i, pages := range []int{40 * perChunk, slots*perChunk + 1, (slots+1)*perChunk + 1} {
		// as many slots as at first are free after each
		g, err := w.prepare(onePrefix(uint8(i)), 0, pages)
		check(t, err)
		if g.Shed != 0 {
			t.Errorf("%d of %d pages shed", g.Shed, pages)
		}
		check(t, w.fill(onePrefix(uint8(i)), g.Grants))
	}
	var bad *client.CallError
	if _, err := w.prepare(onePrefix(9), 2, 4); !errors.As(err, &bad) {
		t.Errorf("a store from within a chunk: %v", err)
	}
	want := tiers.Geometry{PageBytes: pageBytes, PagesPerChunk: perChunk, PageTokens: pageTokens,
		DigestBytes: 32}
	got := first(100)
	if len(got) < 4 {
		t.Fatalf("calls %+v", got)
	}
	for i, n := range []int{1, 40, slots + 1, slots + 2} {
		if got[i].g != want || got[i].slots != n {
			t.Errorf("call %d: %+v, want %d slots of %+v", i, got[i], n, want)
		}
	}
}

// asksFor begins the store of the first chunks of a prefix, which granted goes on with.
func (w *worker) asksFor(id uint32, n uint8, chunks int) {
	w.t.Helper()
	check(w.t, w.ses.Send(&wire.PrepareStore{ID: id, Hashes: onePrefix(n).hashes(0,
		chunks*perChunk)}))
}

// granted waits for the room that was asked for, all of it.
func (w *worker) granted(id uint32) (store uint64) {
	w.t.Helper()
	b, err := w.recv(false)
	check(w.t, err)
	var g wire.StoreGrant
	check(w.t, g.Decode(b, &wire.DefaultLimits))
	if g.ID != id || g.Shed != 0 || g.Store == 0 {
		w.t.Fatalf("got %+v, want the grant for %d", g, id)
	}
	return g.Store
}

// Room may be long in coming, and may need what the very worker that waits for it is to do:
// meanwhile it is answered everything else.
func TestMakeRoomThatWaitsForTheWorker(t *testing.T) {
	const slots = 12
	var r *rig
	var mu sync.Mutex
	var asked []int
	gate := make(chan struct{})
	r = newRig(t, rigOptions{regionBytes: slots * perChunk * pageBytes,
		makeRoom: func(_ tiers.Geometry, n int) {
			mu.Lock()
			asked = append(asked, n)
			mu.Unlock()
			switch n {
			case 2:
				<-gate
			case 3:
				r.server.RetractRegion(7, time.Hour)
			}
		}})
	r.server.AnnounceRegion(part(device(t, 4096), 7, 0))
	w, s := r.worker(workerHello("e")), r.scheduler(schedulerHello("e"))
	w.store(onePrefix(20), 0, slots*perChunk) // then there is no room without more being made
	id, hit := s.lookup(onePrefix(20), 0, perChunk)
	if hit != perChunk {
		t.Fatalf("%d pages hit", hit)
	}
	w.asksFor(101, 2, 2) // waits for the gate
	w.asksFor(102, 3, 3) // waits for the one before, and then for this worker
	w.asksFor(103, 4, 4)
	lg, err := w.load(s, id, onePrefix(20), 0, perChunk)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: lg.Load}))
	w.sync()
	close(gate)
	for _, id := range []uint32{101, 102, 103} {
		// the wait for it unmaps the region
		check(t, w.ses.Send(&wire.AbortStore{Store: w.granted(id)}))
	}
	if !w.gone[7] {
		t.Error("the region is still there")
	}
	w.store(onePrefix(5), 0, perChunk) // as ever
	mu.Lock()
	defer mu.Unlock()
	// there was room for these
	asked = slices.DeleteFunc(asked, func(n int) bool { return n == 1 || n == slots })
	if !slices.Equal(asked, []int{2, 3, 4}) {
		t.Errorf("asked for %v", asked)
	}
}

// A store for which there is room does not wait for what is made ahead, but one for which there is
// not does, and what comes after that.
func TestStoresGoOnWhileRoomIsMade(t *testing.T) {
	const slots, ahead = 8, 3
	var mu sync.Mutex
	var asked []int
	gate := make(chan struct{})
	open := sync.OnceFunc(func() { close(gate) })
	r := newRig(t, rigOptions{regionBytes: slots * perChunk * pageBytes,
		makeRoom: func(_ tiers.Geometry, n int) {
			mu.Lock()
			asked = append(asked, n)
			mu.Unlock()
			if n == ahead {
				<-gate
			}
		}})
	defer open()
	w := r.worker(workerHello("e"))
	abort := func(store uint64) { check(t, w.ses.Send(&wire.AbortStore{Store: store})) }
	w.store(onePrefix(0), 0, slots*perChunk)
	w.asksFor(1, 1, slots) // waits, and no room is being made when it is granted
	abort(w.granted(1))
	w.sync()
	mu.Lock()
	asked = nil
	mu.Unlock()

	w.asksFor(2, 2, ahead)
	w.asksFor(3, 3, 1)
	stores := []uint64{w.granted(2), w.granted(3)}
	w.asksFor(4, 4, slots-ahead) // one less is left
	w.asksFor(5, 5, 1)
	w.sync()
	for _, store := range stores {
		abort(store)
	}
	w.sync()
	open()
	abort(w.granted(4))
	abort(w.granted(5))
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(asked, []int{ahead, slots - ahead, 1}) {
		// none for the one that was granted meanwhile
		t.Errorf("asked for %v", asked)
	}
}

// The caller that adds a region waits until the workers have mapped it, but neither for one that
// has gone or is late, nor once the server drains.
func TestAwaitRegion(t *testing.T) {
	r := newRig(t, rigOptions{})
	f := device(t, 16<<12)
	await := func(id uint32, patience time.Duration) (done chan struct{}) {
		r.server.AnnounceRegion(part(f, id, 0))
		done = make(chan struct{})
		go func() {
			defer close(done)
			r.server.AwaitRegion(id, patience)
		}()
		return done
	}
	<-await(10, time.Hour) // no worker is there
	a, b := r.worker(workerHello("a")), r.worker(workerHello("b"))

	done := await(11, time.Hour)
	a.readsRegion(wire.TypeRegionAdded) // and acknowledges that it is mapped
	a.sync()
	if finished(done) {
		t.Error("a worker was not waited for")
	}
	check(t, b.ses.Send(&wire.RegionMapped{Region: 10})) // not requested
	b.sync()
	if b.regions[11] == nil {
		t.Fatal("the other worker was not told of the region")
	}
	<-done

	<-await(12, time.Millisecond) // both are late
	<-await(13, time.Hour)        // and not waited for any more
	a.sync()                      // until they map one
	done = await(14, time.Hour)
	a.readsRegion(wire.TypeRegionAdded)
	<-done // b is late still
	b.sync()

	done = await(15, time.Hour)
	a.readsRegion(wire.TypeRegionAdded)
	b.close() // never maps it
	<-done
	r.eventually("it has gone", func() bool { return r.server.Sessions() == 1 })

	done = await(16, time.Hour)
	r.server.RetractRegion(16, 0) // it goes before it is mapped: a has no patience to lose
	<-done
	r.eventually("it is given up", func() bool { return r.server.Sessions() == 0 })

	c := r.worker(workerHello("c"))
	done = await(17, time.Hour)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(t, r.server.Drain(ctx))
	<-done
	c.sync()
}

// A worker for whom no room is made waits within limits, and its end, or the server's, waits for
// nothing.
func TestEndsWhileRoomIsMade(t *testing.T) {
	for _, how := range []string{"leaves", "breaks the protocol", "is given up", "server closes"} {
		t.Run(how, func(t *testing.T) {
			gate := make(chan struct{})
			r := newRig(t, rigOptions{regionBytes: perChunk * pageBytes,
				makeRoom: func(_ tiers.Geometry, n int) {
					if n == 2 {
						<-gate
					}
				}})
			r.server.AnnounceRegion(part(device(t, 4096), 7, 0))
			w := r.worker(workerHello("e"))
			for i := range uint32(65) { // one more than may wait
				check(t, w.ses.Send(&wire.PrepareStore{ID: i, Hashes: onePrefix(uint8(i)).hashes(0,
					2*perChunk)}))
			}
			b, err := w.recv(false)
			check(t, err)
			var e wire.Error
			check(t, e.Decode(b, &wire.DefaultLimits))
			if e.ID != 64 || e.Code != wire.CodeBusy {
				t.Errorf("got %+v", e)
			}
			switch how {
			case "leaves":
				w.close()
			case "breaks the protocol":
				check(t, w.ses.SendRaw([]byte{0xc1}))
				w.readsToTheEnd() // or it would keep its place
			case "is given up":
				r.server.RetractRegion(7, 10*time.Millisecond)
				w.readsToTheEnd()
			case "server closes":
				// it waits for calls of MakeRoom
				time.AfterFunc(10*time.Millisecond, func() { close(gate) })
				r.cancel()
				check(t, <-r.served)
				r.served <- nil // for the rig
				r.server.Close()
				return
			}
			r.eventually("it has ended", func() bool {
				return r.server.Sessions() == 0 &&
					r.listener.Stats().Sessions == 0
			})
			close(gate)
			r.worker(workerHello("e")).store(onePrefix(1), 0, perChunk)
		})
	}
}

// What waits for room when the sidecar drains is refused.
func TestDrainingWhileRoomIsMade(t *testing.T) {
	gate := make(chan struct{})
	r := newRig(t, rigOptions{regionBytes: perChunk * pageBytes, makeRoom: func(_ tiers.Geometry,
		n int) {
		if n == 2 {
			<-gate
		}
	}})
	w := r.worker(workerHello("e"))
	check(t, w.ses.Send(&wire.PrepareStore{ID: 5, Hashes: onePrefix(1).hashes(0, 2*perChunk)}))
	w.sync()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	check(t, r.server.Drain(ctx))
	close(gate)
	b, err := w.recv(false)
	check(t, err)
	var e wire.Error
	check(t, e.Decode(b, &wire.DefaultLimits))
	if e.ID != 5 || e.Code != wire.CodeClosed {
		t.Errorf("got %+v", e)
	}
}
