package connector_test

import (
	"errors"
	"os"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
)

func claimed(t *testing.T, r *rig, except uint64) bool {
	t.Helper()
	held, err := r.listener.Claims(except)
	check(t, err)
	return held
}

// A worker's claim is on the generation, and lasts until the worker closes it: not until its
// session ends. Schedulers have none.
func TestWorkersHaveClaims(t *testing.T) {
	r := newRig(t, rigOptions{})
	w := r.worker(workerHello("e"))
	if !claimed(t, r, 76) || claimed(t, r, 77) {
		t.Fatal("a worker's claim is not on the generation")
	}
	claim, err := unix.FcntlInt(w.ses.Claim.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	check(t, err)
	s := r.scheduler(schedulerHello("e"))
	if s.ses.Claim != nil {
		t.Error("a scheduler got a claim")
	}
	w.close()
	r.eventually("the end of the session", func() bool { return r.server.Sessions() == 1 })
	if !claimed(t, r, 76) {
		t.Error("the claim has ended with the session")
	}
	check(t, unix.Close(claim))
	if claimed(t, r, 76) {
		t.Error("a claim is left")
	}
}

// The sidecar gets what a worker holds once the worker is accepted, and not before.
func TestHeldDescriptorsAreHandedOver(t *testing.T) {
	var mu sync.Mutex
	var got [][]int
	r := newRig(t, rigOptions{onHeld: func(fds []int) {
		mu.Lock()
		defer mu.Unlock()
		got = append(got, fds)
	}})
	region, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd, SizeBytes: 1 << 20,
		NUMANode: dax.NoNUMANode})
	check(t, err)
	defer region.Close()
	pipe, other, err := os.Pipe() // anything may come
	check(t, err)
	defer pipe.Close()
	defer other.Close()
	fds := []int{region.FD(), int(pipe.Fd())}
	many := slices.Repeat([]int{region.FD()}, wire.MaxHeldFDs)

	refused := func(what string, hello *wire.Hello, code string, fds ...int) {
		t.Helper()
		ses, err := client.Dial(r.dir, hello, patience, fds...)
		var refusal *client.Refused
		if !errors.As(err, &refusal) || refusal.Code != code {
			t.Errorf("%s: %v", what, err)
		}
		if ses != nil {
			ses.Close()
		}
	}
	hello := workerHello("e")
	refused("descriptors that are not named", hello, wire.RefuseMalformed, fds...)
	hello.Held = 3
	refused("fewer than named", hello, wire.RefuseMalformed, fds...)
	hello.Held = 1
	refused("more than named", hello, wire.RefuseMalformed, fds...)
	hello.Held = 2
	hello.PagesPerChunk = 1 << 20
	refused("a worker that is refused", hello, wire.RefuseLimit, fds...)
	scheduler := schedulerHello("e")
	scheduler.Held = 2
	refused("a scheduler", scheduler, wire.RefuseMalformed, fds...)
	// More than may come end the connection before the Hello is read.
	hello = workerHello("e")
	hello.Held = wire.MaxHeldFDs
	if ses, err := client.Dial(r.dir, hello, patience, append(many, many[0])...); err == nil {
		ses.Close()
		t.Error("too many descriptors were accepted")
	}
	mu.Lock()
	if len(got) != 0 {
		t.Fatalf("handed over %v", got)
	}
	mu.Unlock()

	for _, fds := range [][]int{fds, many} {
		hello := workerHello("e")
		hello.Held = uint32(len(fds))
		ses, err := client.Dial(r.dir, hello, patience, fds...)
		check(t, err)
		defer ses.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	if len(got) != 2 || len(got[0]) != 2 || len(got[1]) != wire.MaxHeldFDs {
		t.Fatalf("handed over %v", got)
	}
	var here, there unix.Stat_t
	check(t, unix.Fstat(region.FD(), &here))
	check(t, unix.Fstat(got[0][0], &there))
	if here.Ino != there.Ino || here.Dev != there.Dev {
		t.Error("another descriptor")
	}
	for _, fds := range got {
		for _, fd := range fds {
			check(t, unix.Close(fd))
		}
	}
}

// Without anybody who wants them, descriptors are closed: the leak check looks.
func TestHeldDescriptorsThatNobodyWants(t *testing.T) {
	r := newRig(t, rigOptions{})
	hello := workerHello("e")
	hello.Held = 1
	ses, err := client.Dial(r.dir, hello, patience, r.regions[0].FD())
	check(t, err)
	check(t, ses.Close())
}

// A sidecar serves before its memory is there: stores are shed, lookups miss, and workers are told
// when all regions are there.
func TestServesBeforeItsMemoryIsThere(t *testing.T) {
	r := newRig(t, rigOptions{preparing: true})
	w := r.worker(workerHello("e"))
	s := r.scheduler(schedulerHello("e"))
	if !w.ses.Welcome.Preparing || w.ses.Ready || w.ses.Welcome.Regions != 0 {
		t.Fatalf("welcome %+v", w.ses.Welcome)
	}
	p := onePrefix(1)
	g, err := w.prepare(p, 0, 6)
	check(t, err)
	if g.Store != 0 || g.Shed != 6 || len(g.Grants) != 0 {
		t.Fatalf("granted %+v without memory", g)
	}
	if id, hit := s.lookup(p, 0, 6); hit != 0 {
		t.Fatalf("lookup %d hits %d pages", id, hit)
	}
	if _, err := w.load(s, 1, p, 0, 6); err == nil {
		t.Fatal("loaded what is not there")
	}
	r.server.AwaitRegion(0, patience) // there is none to wait for
	r.grow(1 << 20)
	w.sync()
	if w.ses.Ready {
		t.Fatal("ready before the end")
	}
	// One that comes now has the region with its handshake, and is told of the end like the first.
	late := r.worker(workerHello("f"))
	if len(late.regions) != 1 || late.ses.Ready {
		t.Fatalf("%d regions, ready %v", len(late.regions), late.ses.Ready)
	}
	r.grow(1 << 20)
	r.server.RegionsReady()
	for _, w := range []*worker{w, late} {
		w.sync()
		if !w.ses.Ready || len(w.regions) != 2 {
			t.Fatalf("%d regions, ready %v", len(w.regions), w.ses.Ready)
		}
	}
	after := r.worker(workerHello("g"))
	if after.ses.Welcome.Preparing || !after.ses.Ready || len(after.regions) != 2 {
		t.Fatalf("welcome %+v", after.ses.Welcome)
	}
	w.store(p, 0, 6)
	id, hit := s.lookup(p, 0, 6)
	if hit != 6 {
		t.Fatalf("%d pages hit", hit)
	}
	load, err := w.load(s, id, p, 0, 6)
	check(t, err)
	check(t, w.ses.Send(&wire.Release{Load: load.Load}))
	w.sync()
}
