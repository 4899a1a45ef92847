package sidecar

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"lookaside/connector"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/slab"
	"lookaside/tiers/vfs"
)

// lateFirst is the first pause before a disk that failed at the start is tried again. The pause
// doubles each time up to a limit. A test changes it.
var lateFirst = time.Second

const lateLast = time.Minute

// openDisk opens a disk tier. Wrong settings are an error. A broken disk is not: the tier starts
// with its other directories, or with none, and the missing ones are tried again, like a server
// that cannot be reached.
func openDisk(c *settings.TierConfig, who tenantry, log *zap.Logger) (tiers.Tier, error) {
	l := &lateDisk{c: c, who: who, log: log, down: map[string]error{},
		clears: map[tiers.Fingerprint]bool{}, opened: make(chan struct{})}
	if err := l.open(); err != nil {
		return nil, err
	}
	if len(l.down) == 0 {
		return l.disk, nil
	}
	for _, dir := range slices.Sorted(maps.Keys(l.down)) {
		log.Warn("a disk cannot be used now; serving without it until it can",
			zap.String("directory", dir), zap.Error(l.down[dir]))
	}
	var ctx context.Context
	ctx, l.stop = context.WithCancel(context.Background())
	l.trying.Go(func() { l.retry(ctx) })
	return l, nil
}

// A lateDisk is a disk tier that could not be opened, or not completely, at the start. While no
// directory is open each call fails, so that the tier's breaker opens.
type lateDisk struct {
	c      *settings.TierConfig
	who    tenantry
	log    *zap.Logger
	stop   context.CancelFunc
	trying sync.WaitGroup
	opened chan struct{} // closed once the disk is open

	// mu guards the fields below. It is not held during calls of the disk.
	mu   sync.RWMutex
	disk *slab.Disk       // nil: no directory is open yet
	down map[string]error // the reason, by directory
	// clears holds the spaces to clear before any lookup; the zero Fingerprint stands for all
	// spaces.
	clears map[tiers.Fingerprint]bool
}

var _ tiers.Victims = (*lateDisk)(nil)

// mediumFailed lists the errors of disks that are broken, not mounted, or not ours at the moment.
var mediumFailed = []error{
	syscall.EIO, syscall.ENXIO, syscall.ENODEV, syscall.ENOENT, syscall.EACCES, syscall.EPERM,
	syscall.EROFS, syscall.ESTALE, syscall.ETIMEDOUT, syscall.ENOTCONN, syscall.EHOSTDOWN,
	syscall.EREMOTEIO, syscall.EUCLEAN, syscall.ESHUTDOWN,
}

func isMediumFailure(err error) bool {
	return slices.ContainsFunc(mediumFailed, func(e error) bool { return errors.Is(err, e) })
}

// share returns each directory's part of the capacity.
func (l *lateDisk) share() int64 { return l.c.Disk.Capacity / int64(len(l.c.Disk.Paths)) }

// open opens the tier in those directories that can be used. It returns an error only for wrong
// settings.
func (l *lateDisk) open() error {
	down := map[string]error{}
	for _, dir := range l.c.Disk.Paths {
		if err := slab.Usable(vfs.OS, dir); isMediumFailure(err) {
			down[dir] = err
		} else if err != nil {
			return err
		}
	}
	for {
		good := slices.DeleteFunc(slices.Clone(l.c.Disk.Paths),
			func(dir string) bool { return down[dir] != nil })
		var d *slab.Disk
		var err error
		if len(good) > 0 {
			d, err = l.openIn(good)
		}
		if err == nil {
			err = l.begin(d, down)
		}
		if err == nil {
			return nil
		}
		if !isMediumFailure(err) {
			return err
		}
		blamed := blame(err, good)
		for _, dir := range blamed {
			down[dir] = err
		}
	}
}

// begin starts to use a disk after the pending clears are done. d is nil if there is none. If begin
// returns an error, it has closed d.
func (l *lateDisk) begin(d *slab.Disk, down map[string]error) error {
	for {
		l.mu.Lock()
		clears := slices.Collect(maps.Keys(l.clears))
		if d == nil || len(clears) == 0 {
			l.disk, l.down = d, down
			l.mu.Unlock()
			return nil
		}
		l.mu.Unlock()
		for _, fp := range clears {
			if _, err := d.Clear(context.Background(), fp); err != nil {
				return errors.Join(err, d.Close())
			}
			l.mu.Lock()
			delete(l.clears, fp)
			l.mu.Unlock()
		}
	}
}

// openIn opens the tier in some of its directories.
func (l *lateDisk) openIn(dirs []string) (*slab.Disk, error) {
	c := l.c.Disk
	c.Paths = dirs
	c.Capacity = l.share() * int64(len(dirs))
	if len(dirs) == len(l.c.Disk.Paths) {
		c.Capacity = l.c.Disk.Capacity
	}
	if err := checkRoom(c); err != nil {
		return nil, err
	}
	return slab.Open(slab.Options{
		Dirs: c.Paths, CapacityBytes: c.Capacity, SlabBytes: c.Slab, Policy: c.Eviction,
		Workers: l.c.Workers, Direct: slab.Direct(c.Direct), Seed: connector.RandomID(), Log: l.log,
		Tenants: l.who.registry, Shares: l.who.shares,
		Gone: l.who.gone, GoneTier: l.who.tier,
	})
}

// blame returns the directories that an error is about, or all if it names none.
func blame(err error, dirs []string) []string {
	var at *fs.PathError
	if errors.As(err, &at) {
		for _, dir := range dirs {
			if at.Path == dir || strings.HasPrefix(at.Path, strings.TrimSuffix(dir, "/")+"/") {
				return []string{dir}
			}
		}
	}
	return dirs
}

// retry tries the missing directories again until all are open.
func (l *lateDisk) retry(ctx context.Context) {
	for wait := lateFirst; ; wait = min(2*wait, lateLast) {
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		before := l.missing()
		if l.tier() == nil {
			l.tryOpen()
		} else {
			l.tryDirs(ctx)
		}
		after := l.missing()
		for _, dir := range before {
			if !slices.Contains(after, dir) {
				l.log.Info("a disk is there", zap.String("directory", dir))
				wait = lateFirst / 2
			}
		}
		if len(after) == 0 {
			return
		}
	}
}

// tryOpen tries to open the tier while no directory is open.
func (l *lateDisk) tryOpen() {
	if err := l.open(); err != nil { // the settings are valid, so this is unexpected
		l.mu.Lock()
		for dir := range l.down {
			l.down[dir] = err
		}
		l.mu.Unlock()
	}
	if l.tier() != nil {
		close(l.opened)
	}
}

// tryDirs tries to add the missing directories. Their old content is dropped.
func (l *lateDisk) tryDirs(ctx context.Context) {
	for _, dir := range l.missing() {
		err := slab.Usable(vfs.OS, dir)
		if err == nil {
			c := l.c.Disk
			c.Paths, c.Capacity = []string{dir}, l.share()
			err = checkRoom(c)
		}
		if err == nil {
			err = l.tier().AddDir(ctx, dir, l.share())
		}
		l.mu.Lock()
		if l.down[dir] = err; err == nil {
			delete(l.down, dir)
		}
		l.mu.Unlock()
	}
}

// tier returns the disk, or nil if no directory is open yet.
func (l *lateDisk) tier() *slab.Disk {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.disk
}

// missing returns the directories that cannot be used.
func (l *lateDisk) missing() []string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.Sorted(maps.Keys(l.down))
}

// why returns what is wrong with the missing directories.
func (l *lateDisk) why() error {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var all []string
	for _, dir := range slices.Sorted(maps.Keys(l.down)) {
		text := l.down[dir].Error()
		if !strings.Contains(text, dir) {
			text = dir + ": " + text
		}
		all = append(all, text)
	}
	return fmt.Errorf("%w: %s", syscall.EIO, strings.Join(all, "; "))
}

// Contains implements tiers.Tier.
func (l *lateDisk) Contains(ctx context.Context, run tiers.Run, held []uint16) error {
	if d := l.tier(); d != nil {
		return d.Contains(ctx, run, held)
	}
	clear(held)
	return l.why()
}

// TenantStats appends what the disk counts for each tenant to out; nothing while it is not open.
func (l *lateDisk) TenantStats(out []engine.TenantStats) []engine.TenantStats {
	if d := l.tier(); d != nil {
		return d.TenantStats(out)
	}
	return out
}

// Load implements tiers.Tier.
func (l *lateDisk) Load(ctx context.Context, transfers []tiers.Transfer,
	done func(i int, err error)) {
	if d := l.tier(); d != nil {
		d.Load(ctx, transfers, done)
		return
	}
	l.fail(transfers, done)
}

// Store implements tiers.Tier.
func (l *lateDisk) Store(ctx context.Context, transfers []tiers.Transfer,
	done func(i int, err error)) {
	if d := l.tier(); d != nil {
		d.Store(ctx, transfers, done)
		return
	}
	l.fail(transfers, done)
}

func (l *lateDisk) fail(transfers []tiers.Transfer, done func(i int, err error)) {
	err := l.why()
	for i := range transfers {
		done(i, err)
	}
}

// maxClears bounds the remembered spaces; beyond it everything is cleared.
const maxClears = 64

// clear remembers to clear a space when the disk opens. If the disk has opened in the meantime,
// clear returns it.
func (l *lateDisk) clear(fp tiers.Fingerprint) *slab.Disk {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.disk == nil {
		if len(l.clears) >= maxClears {
			fp = tiers.Fingerprint{}
		}
		l.clears[fp] = true
	}
	return l.disk
}

// Drop implements tiers.Tier. While no directory is open it returns an error, because a restart
// would find the chunks. It also remembers to clear the space when the disk opens.
func (l *lateDisk) Drop(ctx context.Context, run tiers.Run) error {
	if d := l.clear(run.Space.Fingerprint); d != nil {
		return d.Drop(ctx, run)
	}
	return l.why()
}

// Clear implements tiers.Tier; see Drop.
func (l *lateDisk) Clear(ctx context.Context, fp tiers.Fingerprint) (chunks int, err error) {
	if d := l.clear(fp); d != nil {
		return d.Clear(ctx, fp)
	}
	return -1, l.why()
}

// Stats implements tiers.Tier.
func (l *lateDisk) Stats() tiers.TierStats {
	d := l.tier()
	if d == nil {
		return tiers.TierStats{Kind: settings.TierDisk, Local: true, Down: l.why().Error(),
			Detail: strings.Join(l.c.Disk.Paths, ", ")}
	}
	st := d.Stats()
	if len(l.missing()) > 0 {
		st.Detail += "; missing, and tried again: " + l.why().Error()
	}
	return st
}

// NextVictims implements tiers.Victims.
func (l *lateDisk) NextVictims(max int, out []tiers.Victim) []tiers.Victim {
	if d := l.tier(); d != nil {
		return d.NextVictims(max, out)
	}
	return out
}

// EndVictim implements tiers.Victims.
func (l *lateDisk) EndVictim(handle uint64, ok bool) {
	if d := l.tier(); d != nil {
		d.EndVictim(handle, ok)
	}
}

// VictimsReady implements tiers.Victims.
func (l *lateDisk) VictimsReady() <-chan struct{} {
	if d := l.tier(); d != nil {
		return d.VictimsReady()
	}
	return l.opened
}

// Close implements tiers.Tier.
func (l *lateDisk) Close() error {
	l.stop()
	l.trying.Wait()
	if d := l.tier(); d != nil {
		return d.Close()
	}
	return nil
}
