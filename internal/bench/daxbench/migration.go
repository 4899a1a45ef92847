package daxbench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
)

// Migration describes what moves during lookups.
type Migration struct {
	Dir       string // see Transfers
	SlotBytes int64
	Chunks    int // held by the pool; about half of them move each round
	Run       int // chunks of a lookup
	Rounds    int
}

// MigrationFigures has a value for each round.
type MigrationFigures struct {
	With, Without []float64 // 99th percentile of a lookup, in µs, from when it is due
	Speed         []float64 // of the migration, in GB/s
}

// every is the interval at which lookups are due.
const every = 500 * time.Microsecond

// Measure moves a device's chunks to another device during lookups, and runs lookups without that
// for as long.
func (o Migration) Measure(ctx context.Context) (f MigrationFigures, err error) {
	if o.SlotBytes < pagesPerSlot*256 || o.Chunks < 1 || o.Rounds < 1 || o.Run < 1 ||
		o.Run > o.Chunks {
		return f, fmt.Errorf("bench of %d chunks of %d bytes in runs of %d, %d rounds: want 1 or more", o.Chunks, o.SlotBytes, o.Run, o.Rounds)
	}
	dir, remove, err := makeDir(o.Dir)
	if err != nil {
		return f, err
	}
	defer func() { err = remove(err) }()
	size := (int64(o.Chunks)*(o.SlotBytes+64<<10) + 256<<20) / dax.HugePageSize * dax.HugePageSize
	if err := dax.CheckBudget(3*size, dax.KindMemfd, dax.BudgetReserve); err != nil {
		return f, err
	}
	devices := []daxtier.DeviceSpec{{Path: filepath.Join(dir, "dax0.0"), SizeBytes: size},
		{Path: filepath.Join(dir, "dax1.0"), SizeBytes: size}}
	p, err := daxtier.Open(daxtier.Options{Devices: devices, AllowFiles: true, HotPlug: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	g := tiers.Geometry{PageBytes: o.SlotBytes / pagesPerSlot, PagesPerChunk: pagesPerSlot,
		PageTokens: 16, DigestBytes: 32}
	space := &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g}
	whole := tiers.Run{Space: space}
	for i := range o.Chunks {
		whole.Hashes = digests(whole.Hashes, i)
	}
	bytes := make([]byte, o.SlotBytes)
	fill(bytes)
	var stored error
	for i := range o.Chunks {
		p.Store(ctx, []tiers.Transfer{{Run: whole.Chunk(i), Bytes: bytes}},
			func(_ int, err error) { stored = errors.Join(stored, err) })
	}
	if stored != nil {
		return f, stored
	}
	asked := tiers.Run{Space: space, Hashes: whole.Hashes[:o.Run*pagesPerSlot*g.DigestBytes]}
	for round := range o.Rounds + 1 {
		if ctx.Err() != nil {
			return f, context.Cause(ctx)
		}
		leaving := devices[round%2]
		before := p.Stats().UsedBytes
		var moved int64
		for _, d := range p.Status().Devices {
			if d.Path == leaving.Path {
				moved = d.UsedBytes
			}
		}
		var over atomic.Bool
		var failed error
		var took time.Duration
		var wait sync.WaitGroup
		wait.Go(func() {
			start := time.Now()
			failed = p.Remove(ctx, leaving.Path, daxtier.Migrate, false)
			took = time.Since(start)
			over.Store(true)
		})
		with, err := lookups(ctx, p, asked, over.Load)
		wait.Wait()
		if err = errors.Join(err, failed); err != nil {
			return f, err
		}
		end := time.Now().Add(max(took, 100*time.Millisecond))
		without, err := lookups(ctx, p, asked, func() bool { return time.Now().After(end) })
		if err == nil {
			err = p.Add(ctx, leaving.Path, leaving.SizeBytes)
		}
		if err != nil {
			return f, err
		}
		if after := p.Stats().UsedBytes; after != before {
			return f, fmt.Errorf("bench: %d bytes were held, and %d are after a migration", before,
				after)
		}
		if round > 0 { // in round 0 the memory was not touched yet
			f.With, f.Without, f.Speed = append(f.With, with), append(f.Without, without),
				append(f.Speed, float64(moved)/1e9/took.Seconds())
		}
	}
	return f, nil
}

// lookups looks a run up again and again until over. It returns the 99th percentile, in µs, of the
// times from when a lookup was due to its result.
func lookups(ctx context.Context, p *daxtier.Pool, run tiers.Run, over func() bool) (p99 float64,
	err error) {
	held := make([]uint16, run.Chunks())
	var all []float64
	for due := time.Now().Add(every); len(all) == 0 || !over(); due = due.Add(every) {
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
		}
		if err := p.Contains(ctx, run, held); err != nil {
			return 0, err
		}
		now := time.Now()
		all = append(all, float64(now.Sub(due).Nanoseconds())/1e3)
		if held[len(held)-1] == 0 {
			return 0, errors.New("bench: a chunk was not found")
		}
		if now.Sub(due) > every { // a client waits for the result before its next lookup
			due = now
		}
	}
	slices.Sort(all)
	return all[len(all)*99/100], nil
}
