// Package promotionbench measures how long a lookup takes whose prefix is only on disk. The limit
// is reading as many bytes of the same disk.
package promotionbench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/prefixes"
	"lookaside/sidecar"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// Options selects what to measure.
type Options struct {
	Dir           string // on the disk to be measured
	Bytes         int64  // of the prefix
	PageBytes     int64
	PagesPerChunk int
	Workers       int   // concurrent reads
	PieceBytes    int64 // of one read of the bare loop
	Rounds        int
}

// Figures holds the measurements, one value a round.
type Figures struct {
	LookupSeconds []float64 // from request to reply, with the prefix only on disk
	BareSeconds   []float64 // reading as many bytes with nothing around it
	ArenaSeconds  []float64 // from request to reply, with the prefix in the arena
	CPUSeconds    []float64 // of the sidecar's process during the lookup
	Bytes         int64     // read in a round
	Direct        bool      // whether the bare loop bypassed the page cache
	Kind          dax.Kind  // of the memory that both read into
}

// Run stores a prefix and waits until it is on a disk tier. Then, in each round, it clears the
// arena and looks the prefix up over the lookup socket. In between it reads as many bytes of a file
// on the same disk, in pieces of the same size.
func Run(ctx context.Context, o Options, log *zap.Logger) (f Figures, err error) {
	dir, err := os.MkdirTemp("", "la-bench-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	data, err := os.MkdirTemp(o.Dir, "lookaside-bench-promotion-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(data)) }()

	chunkBytes := o.PageBytes * int64(o.PagesPerChunk)
	chunks := o.Bytes / chunkBytes
	if chunks < 1 || o.Rounds < 1 || o.Workers < 1 || o.PieceBytes < 4096 {
		return f, errors.New("the prefix must have a chunk at least, and rounds, workers and piece must be positive")
	}
	f.Bytes = chunks * chunkBytes
	cfg, err := config(dir, data, o, chunks)
	if err != nil {
		return f, err
	}
	d, err := sidecar.Start(ctx, cfg, log, sidecar.Origin{})
	if err != nil {
		return f, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), prefixes.Patience)
		defer cancel()
		err = errors.Join(err, d.Shutdown(ctx))
	}()
	st, err := admin.FetchStatus(ctx, dir)
	if err != nil {
		return f, err
	}
	f.Kind = st.Arena.Kind

	p, err := prefixes.Dial(dir, prefixes.Shape{PageBytes: o.PageBytes,
		PagesPerChunk: o.PagesPerChunk}, 0, int(chunks)*o.PagesPerChunk)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, p.Close()) }()
	if err := p.Store(); err != nil {
		return f, err
	}
	if err := untilOnDisk(ctx, dir, p.Pages()); err != nil {
		return f, err
	}
	bare, err := newBareReader(ctx, data, f.Bytes, o, f.Kind)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, bare.close()) }()
	f.Direct = bare.direct
	if _, err := bare.read(); err != nil { // the first read may find the disk asleep
		return f, err
	}
	for round := range o.Rounds {
		if err := ctx.Err(); err != nil {
			return f, err
		}
		if err := f.round(ctx, dir, p, bare); err != nil {
			return f, fmt.Errorf("round %d: %w", round, err)
		}
	}
	return f, nil
}

// config returns the configuration of a sidecar with one disk tier below an arena that holds the
// whole prefix.
func config(dir, data string, o Options, chunks int64) (settings.Config, error) {
	chunkBytes := o.PageBytes * int64(o.PagesPerChunk)
	bytes := chunks * chunkBytes
	limit := 2*bytes + 4*chunkBytes + 64<<20 // promotions fill at most half of it
	return settings.Parse("bench", fmt.Appendf(nil, `
runtime: {dir: %q}
arena: {limit: %d, initial: %d}
lookup: {max_pages: %d, promote: always, deadline: 1m}
sessions: {share: 1}
tiers:
  - kind: disk
    paths: %q
    capacity: %d
    workers: %d
    load_timeout: 1m
    queue: %d
`, dir, limit, limit, max(settings.Defaults().Lookup.MaxPages, int(chunks)*o.PagesPerChunk),
		filepath.Join(data, "store"), 2*bytes+512<<20, o.Workers, max(chunks, 64)), nil)
}

// untilOnDisk waits until the disk tier holds all pages.
func untilOnDisk(ctx context.Context, dir string, pages int) error {
	for {
		st, err := admin.FetchStatus(ctx, dir)
		if err != nil {
			return err
		}
		tier := st.Tiers[0]
		if tier.Pages == int64(pages) {
			return nil
		}
		if tier.StoreFailures+tier.Shed+tier.NoRoom > 0 {
			return fmt.Errorf("the disk tier: %+v", tier)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// round measures a lookup from disk, one from the arena and the bare reads, and adds the figures.
func (f *Figures) round(ctx context.Context, dir string, p *prefixes.Prefix,
	bare *bareReader) error {
	var cleared admin.ClearResult
	if err := admin.NewClient(dir).Post(ctx, "/v1/clear",
		map[string]any{"all": true, "tier": "arena"}, &cleared); err != nil {
		return err
	}
	cpu := processTime()
	promoted, err := p.Lookup()
	if err != nil {
		return err
	}
	f.CPUSeconds = append(f.CPUSeconds, processTime()-cpu)
	f.LookupSeconds = append(f.LookupSeconds, promoted.Seconds())
	if len(f.LookupSeconds) == 1 {
		if err := p.Verify(); err != nil {
			return err
		}
	}
	again, err := p.Lookup()
	if err != nil {
		return err
	}
	f.ArenaSeconds = append(f.ArenaSeconds, again.Seconds())
	took, err := bare.read()
	if err != nil {
		return err
	}
	f.BareSeconds = append(f.BareSeconds, took.Seconds())
	return nil
}

// processTime returns the CPU time that this process has used.
func processTime() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
