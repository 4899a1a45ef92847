package arena

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/bytesize"
	"lookaside/tiers/directory"
)

const (
	// givePatience bounds how long the start waits for workers to give memory back. Starting empty
	// is always safe, as it takes new memory.
	givePatience = 10 * time.Second
	// claimsEvery is the interval of checks whether any such worker is left. Locks that end cannot
	// be waited for together with other events.
	claimsEvery = 10 * time.Millisecond
	// pidsEvery is how long the list of processes that are waited for stays as it is: it takes
	// milliseconds to make.
	pidsEvery = time.Second
)

// claimants are the processes with a claim on an earlier generation, as they were within pidsEvery.
// Any goroutine may use it.
type claimants struct {
	mu   sync.Mutex
	pids []int
	at   time.Time
}

// list returns the ids of the processes with a claim on another generation than except.
func (c *claimants) list(of Claims, except uint64) []int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.at) >= pidsEvery {
		c.pids, c.at = of.Claimants(except), time.Now()
	}
	return c.pids
}

// regionFiles matches the files of arenas of kind file.
const regionFiles = "lookaside-region-*"

func regionFile(id uint32) string { return fmt.Sprintf("lookaside-region-%04d", id) }

// offers are descriptors of memory that may be what the directory names. Each is owned by whoever
// takes it out.
type offers struct {
	fds    []int
	closed bool          // nothing is wanted any more
	came   chan struct{} // has an entry if there is something new
}

// Offer implements Arena.
func (a *memory) Offer(fds []int) {
	a.mu.Lock()
	if !a.offers.closed {
		a.offers.fds = append(a.offers.fds, fds...)
		fds = nil
		select {
		case a.offers.came <- struct{}{}:
		default:
		}
	}
	a.mu.Unlock()
	closeAll(fds)
}

// taken returns what was offered since the last call. last: nothing is wanted any more.
func (a *memory) taken(last bool) []int {
	a.mu.Lock()
	defer a.mu.Unlock()
	fds := a.offers.fds
	a.offers.fds, a.offers.closed = nil, a.offers.closed || last
	return fds
}

// wanted returns the regions of the directory that this arena can have. It drops the others, with
// the reason.
func (a *memory) wanted(regions []directory.Region) (wanted []directory.Region, err error) {
	var left, other []uint32
	was, size := dax.Kind(""), int64(0)
	for _, r := range regions {
		kind := dax.Kind(r.Kind)
		switch _, err := dax.ParseKind(r.Kind); {
		case err != nil || a.Kind != dax.KindAuto && a.Kind != kind || kind == dax.KindAuto ||
			a.Kind == dax.KindAuto && kind == dax.KindFile:
			other, was = append(other, r.ID), kind
		case len(left) > 0 || size+r.SizeBytes > roundTo(a.Limit, kind.PageSize()):
			left = append(left, r.ID)
		default:
			wanted, size = append(wanted, r), size+r.SizeBytes
		}
	}
	switch {
	case len(other) > 0:
		a.found.Why = fmt.Sprintf("arena.kind was %s, and is %s now", was, a.Kind)
	case len(left) > 0:
		a.found.Why = fmt.Sprintf("arena.limit is %s now, which has no room for %d of %d regions",
			bytesize.Format(a.Limit), len(left), len(regions))
	}
	if a.Trusted && len(wanted) < len(regions) {
		return nil, fmt.Errorf("the arena of the process before cannot be taken over: %s",
			a.found.Why)
	}
	return wanted, a.dir.Drop(append(other, left...)...)
}

// find finds the memory of the wanted regions, from whoever holds it, and drops the regions whose
// memory nobody gives back. In the end nothing is waited for any more.
func (a *memory) find(ctx context.Context) (map[uint32]*dax.Region, error) {
	found := map[uint32]*dax.Region{}
	defer func() { closeAll(a.taken(true)) }()
	if len(a.expected) == 0 {
		return found, nil
	}
	fail := func(err error) (map[uint32]*dax.Region, error) {
		for _, r := range found {
			err = errors.Join(err, r.Leave())
		}
		return nil, err
	}
	n := len(a.Inherited)
	a.match(a.Inherited, found)
	a.Inherited, a.inherited, a.useless = nil, len(found), len(found) < n
	a.openFiles(found)
	tick := time.NewTicker(claimsEvery)
	defer tick.Stop()
	for start, said := time.Now(), false; len(found) < len(a.expected) && !a.Trusted; {
		// A worker ends its claim after it has given back what it had. So what comes is there if no
		// claim is left.
		held, err := a.Claims.Claims(a.Generation())
		a.match(a.taken(false), found)
		if err != nil {
			a.Log.Warn("it is not known who may give memory back", zap.Error(err))
		}
		if len(found) == len(a.expected) || !held || a.kind == dax.KindFile {
			break
		}
		if time.Since(start) > givePatience {
			a.Log.Warn("a worker of the process before did not give memory back in time",
				zap.Duration("waited", givePatience),
				zap.Ints("pids", a.Claims.Claimants(a.Generation())))
			break
		}
		if !said {
			said = true
			a.Log.Info("waiting for workers to give memory back",
				zap.Ints("pids", a.Claims.Claimants(a.Generation())))
		}
		select {
		case <-a.offers.came:
		case <-tick.C:
		case <-ctx.Done():
			return fail(context.Cause(ctx))
		}
	}
	var missing []uint32
	for _, r := range a.expected {
		if found[r.ID] == nil {
			missing = append(missing, r.ID)
		}
	}
	if len(missing) > 0 {
		why := "no process gave its memory back"
		if len(found) > 0 {
			why = fmt.Sprintf("no process gave the memory of %d of %d regions back", len(missing),
				len(a.expected))
		}
		if a.Trusted {
			return fail(fmt.Errorf("the arena of the process before cannot be taken over: %s", why))
		}
		a.setWhy(why)
	}
	if err := a.dir.Drop(missing...); err != nil {
		return fail(err)
	}
	return found, nil
}

// match adopts those of the descriptors that are of memory that is wanted, and closes the others.
func (a *memory) match(fds []int, found map[uint32]*dax.Region) {
	for _, fd := range fds {
		r, err := a.adopt(fd, found)
		if err != nil {
			a.Log.Warn("what was given back is not memory of this arena", zap.Error(err))
		}
		if r == nil {
			_ = unix.Close(fd) // nothing was written through it
		}
	}
}

// adopt adopts the memory behind a descriptor. Without an error and a region it is there already.
func (a *memory) adopt(fd int, found map[uint32]*dax.Region) (*dax.Region, error) {
	dev, inode, size, seals, err := dax.Identity(fd)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(a.expected,
		func(r directory.Region) bool { return r.Dev == dev && r.Inode == inode })
	if i < 0 {
		return nil, fmt.Errorf("%w: the directory has no region of inode %d on device %d",
			dax.ErrForeign, inode, dev)
	}
	want := &a.expected[i]
	switch {
	case size != want.SizeBytes:
		return nil, fmt.Errorf("%w: it has %d bytes, region %d had %d", dax.ErrForeign, size,
			want.ID, want.SizeBytes)
	case seals != want.Seals:
		return nil, fmt.Errorf("%w: it has the seals %#x, region %d had %#x", dax.ErrForeign,
			seals, want.ID, want.Seals)
	case found[want.ID] != nil:
		return nil, nil
	}
	r, err := dax.Adopt(fd, dax.Kind(want.Kind), size, a.node)
	if err != nil {
		return nil, fmt.Errorf("region %d: %w", want.ID, err)
	}
	found[want.ID] = r
	return r, nil
}

// openFiles finds the regions of an arena of kind file by their names.
func (a *memory) openFiles(found map[uint32]*dax.Region) {
	if a.kind != dax.KindFile {
		return
	}
	for _, r := range a.expected {
		if found[r.ID] != nil {
			continue
		}
		fd, err := unix.Open(filepath.Join(a.Path, regionFile(r.ID)),
			unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err == nil {
			a.match([]int{fd}, found)
		}
	}
}

// removeStale removes files of regions that nobody looks for any more.
func (a *memory) removeStale(found map[uint32]*dax.Region) {
	if a.kind != dax.KindFile {
		return
	}
	names, err := filepath.Glob(filepath.Join(a.Path, regionFiles))
	if err != nil {
		return // the path is no pattern: what is there is replaced when its name is needed
	}
	for _, name := range names {
		mine := false
		for id := range found {
			mine = mine || filepath.Base(name) == regionFile(id)
		}
		if mine {
			continue
		}
		if err := dax.RemoveStale(name); err != nil {
			a.Log.Warn("a file that was left is not removed", zap.Error(err))
		}
	}
}

// undrain lets what was found be written to again, as far as nobody may copy there any more. It
// returns true if that is all of it.
func (a *memory) undrain(workers Workers) bool {
	a.mu.Lock()
	drained := slices.Clone(a.drained)
	a.mu.Unlock()
	if len(drained) == 0 {
		return true
	}
	// A process that hands over has passed its generation on, so its own workers do not count.
	if held, err := a.Claims.Claims(a.Generation()); held || err != nil {
		return false
	}
	for _, id := range drained {
		r := a.region(id)
		if lent, err := dax.Lent(r.FD()); lent || err != nil {
			continue // another sidecar's worker may read it
		}
		if err := a.engine.Undrain(id); err != nil {
			continue // some of it is being carved: next time
		}
		workers.LendRegion(announcedMemory(id, r))
		a.mu.Lock()
		a.drained = slices.DeleteFunc(a.drained, func(x uint32) bool { return x == id })
		a.mu.Unlock()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.drained) == 0
}
