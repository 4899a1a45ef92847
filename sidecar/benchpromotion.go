package sidecar

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
	"lookaside/tiers/vfs"
)

// PromotionBench says what `lookaside bench promotion` measures.
type PromotionBench struct {
	Dir           string // on the disk to be measured
	Bytes         int64  // of the prefix
	PageBytes     int64
	PagesPerChunk int
	Workers       int   // reads under way at a time
	PieceBytes    int64 // of one read of the bare loop
	Rounds        int
}

// PromotionFigures are what it found: one value a round.
type PromotionFigures struct {
	LookupSeconds []float64 // from asking to the answer, with the prefix on disk only
	BareSeconds   []float64 // that reading as many bytes takes with nothing around it
	ArenaSeconds  []float64 // from asking to the answer, with the prefix in the arena
	CPUSeconds    []float64 // of the sidecar's process during the lookup
	Bytes         int64     // that a round reads
	Direct        bool      // whether the bare loop went around the page cache
	Kind          dax.Kind  // of the memory that both read into
}

// BenchPromotion stores a prefix, lets it cascade to a disk tier, drops it from the arena and asks
// for it over the lookup socket, again and again; in between it reads as many bytes of a file on
// the same disk, in pieces of the same kind.
func BenchPromotion(ctx context.Context, o PromotionBench, log *zap.Logger) (f PromotionFigures,
	err error) {
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
	pages := int(chunks) * o.PagesPerChunk
	f.Bytes = chunks * chunkBytes

	cfg := Defaults()
	cfg.Runtime.Dir = dir
	cfg.Arena.Limit = f.Bytes + 2*chunkBytes + 64<<20
	cfg.Arena.Initial = cfg.Arena.Limit
	cfg.Sessions.Share, cfg.Promotion.Share = 1, 1
	cfg.Lookup.MaxPages = max(cfg.Lookup.MaxPages, pages)
	cfg.Lookup.Promote = "always"
	cfg.Lookup.Deadline = time.Minute
	disk := [][2]string{{"kind", tierDisk}, {"paths", filepath.Join(data, "store")},
		{"capacity", fmt.Sprint(2*f.Bytes + 512<<20)},
		{"workers", fmt.Sprint(o.Workers)}, {"load_timeout", "1m"},
		{"queue", fmt.Sprint(max(chunks, 64))}}
	tier, err := parseTier(tierEntry{source: "bench", keys: disk})
	if err != nil {
		return f, err
	}
	cfg.Tiers = []TierConfig{tier}
	if cfg, err = cfg.Complete(nil); err != nil {
		return f, err
	}
	d, err := Start(ctx, cfg, log)
	if err != nil {
		return f, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), rigPatience)
		defer cancel()
		err = errors.Join(err, d.Shutdown(ctx))
	}()
	f.Kind = d.arena.status(new(engine.Stats)).Kind

	b := &prefixRig{o: o, d: d, pages: pages}
	defer b.close()
	b.name()
	if err := b.connect(dir); err != nil {
		return f, err
	}
	if err := b.store(); err != nil {
		return f, err
	}
	if err := b.cascaded(ctx); err != nil {
		return f, err
	}
	bare, err := newBareReader(data, f.Bytes, o, f.Kind)
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, bare.close()) }()
	f.Direct = bare.direct
	if _, err := bare.read(); err != nil { // the first one finds the disk asleep
		return f, err
	}

	for round := range o.Rounds {
		if err := ctx.Err(); err != nil {
			return f, err
		}
		b.d.engine.ClearSpace(b.d.engine.Spaces()[0].ID)
		cpu := processTime()
		promoted, err := b.lookup()
		if err != nil {
			return f, fmt.Errorf("round %d: %w", round, err)
		}
		f.CPUSeconds = append(f.CPUSeconds, processTime()-cpu)
		f.LookupSeconds = append(f.LookupSeconds, promoted.Seconds())
		if round == 0 {
			if err := b.verify(); err != nil {
				return f, err
			}
		}
		again, err := b.lookup()
		if err != nil {
			return f, fmt.Errorf("round %d: %w", round, err)
		}
		f.ArenaSeconds = append(f.ArenaSeconds, again.Seconds())
		took, err := bare.read()
		if err != nil {
			return f, err
		}
		f.BareSeconds = append(f.BareSeconds, took.Seconds())
	}
	return f, nil
}

// rigPatience is what a sidecar has for an answer, however busy the machine.
const rigPatience = time.Minute

// prefixRig is a prefix with one engine's worker and scheduler on a sidecar of this process.
type prefixRig struct {
	o      PromotionBench
	d      *Daemon
	pages  int
	hashes []byte

	worker, scheduler *client.Session
	lookups           *client.Lookups
	id                uint64
	answers           chan []byte // to the worker's requests; closed when its session has ended
}

// receive takes in what the sidecar sends to the worker. Regions that go are let go of at once: the
// bytes are read and written in the sidecar's mapping.
func (b *prefixRig) receive(w *client.Session, answers chan<- []byte) {
	defer close(answers)
	for {
		m, files, err := w.Recv(time.Hour)
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			return
		}
		switch t, _ := wire.Peek(m); t {
		case wire.TypeRegionAdded:
			var r wire.RegionAdded
			if r.Decode(m, &wire.DefaultLimits) != nil ||
				w.Send(&wire.RegionMapped{Region: r.Region}) != nil {
				return
			}
		case wire.TypeRegionRemoved:
			var r wire.RegionRemoved
			if r.Decode(m, &wire.DefaultLimits) != nil ||
				w.Send(&wire.RegionUnmapped{Region: r.Region}) != nil {
				return
			}
		default:
			answers <- bytes.Clone(m)
		}
	}
}

// call sends a request of the worker's and waits for its answer.
func (b *prefixRig) call(request, reply wire.Message) error {
	if err := b.worker.Send(request); err != nil {
		return err
	}
	select {
	case m, ok := <-b.answers:
		if !ok {
			return io.ErrUnexpectedEOF
		}
		if t, _ := wire.Peek(m); t == wire.TypeError {
			var e wire.Error
			if err := e.Decode(m, &wire.DefaultLimits); err != nil {
				return err
			}
			return (*client.CallError)(&e)
		}
		return reply.Decode(m, &wire.DefaultLimits)
	case <-time.After(rigPatience):
		return fmt.Errorf("a worker's request: %w", os.ErrDeadlineExceeded)
	}
}

func (b *prefixRig) connect(dir string) (err error) {
	hello := wire.Hello{
		Role: wire.RoleWorker, EngineID: "bench", PageTokens: 16, PageBytes: uint64(b.o.PageBytes),
		PagesPerChunk: uint32(b.o.PagesPerChunk), DigestBytes: 32,
	}
	if b.worker, err = client.Dial(dir, &hello, rigPatience); err != nil {
		return err
	}
	b.answers = make(chan []byte, 1)
	go b.receive(b.worker, b.answers)
	hello.Role, hello.PageBytes = wire.RoleScheduler, 0
	if b.scheduler, err = client.Dial(dir, &hello, rigPatience); err != nil {
		return err
	}
	b.lookups, err = b.scheduler.Lookups()
	return err
}

func (b *prefixRig) close() {
	if b.lookups != nil {
		_ = b.lookups.Close()
	}
	for _, s := range []*client.Session{b.scheduler, b.worker} {
		if s != nil {
			_ = s.Close()
		}
	}
	if b.answers != nil {
		for range b.answers { // until the receiver has ended
			continue
		}
	}
}

// content is what page i holds from off on.
func content(page int, p []byte) {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(page))
	_, _ = rand.NewChaCha8(seed).Read(p) // never fails
}

// name makes up the prefix's hashes.
func (b *prefixRig) name() {
	for i := range b.pages {
		h := BenchDigest(0, i)
		b.hashes = append(b.hashes, h[:]...)
	}
}

// store writes the prefix into the arena.
func (b *prefixRig) store() error {
	step := min(wire.MaxStorePages(32), 1024) / b.o.PagesPerChunk * b.o.PagesPerChunk
	if step == 0 {
		return fmt.Errorf("%d pages a chunk are too many for one message", b.o.PagesPerChunk)
	}
	for from := 0; from < b.pages; from += step {
		to := min(from+step, b.pages)
		m := wire.PrepareStore{ID: b.worker.NextID(), FirstPage: uint32(from),
			Hashes: b.hashes[32*from : 32*to]}
		if from > 0 {
			m.Prev = b.hashes[32*(from-1) : 32*from]
		}
		var g wire.StoreGrant
		if err := b.call(&m, &g); err != nil {
			return err
		}
		if g.Shed > 0 || g.Held > 0 {
			return fmt.Errorf("of %d pages, %d found no room and %d were held", to-from, g.Shed,
				g.Held)
		}
		for _, e := range g.Grants {
			b.fill(e)
		}
		if err := b.worker.Send(&wire.CommitStore{Store: g.Store}); err != nil {
			return err
		}
	}
	return b.sync()
}

// sync returns when what the worker has sent before has been dealt with.
func (b *prefixRig) sync() error {
	return b.call(&wire.Ping{ID: b.worker.NextID()},
		new(wire.Pong))
}

// cascaded waits until all of the prefix is in the first tier.
func (b *prefixRig) cascaded(ctx context.Context) error {
	want := int64(b.pages)
	for {
		st := b.d.Tiers()[0]
		if st.Pages == want {
			return nil
		}
		if st.StoreFailures+st.Shed+st.NoRoom > 0 {
			return fmt.Errorf("the disk tier: %+v", st)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// fill writes what an extent's pages are to hold.
func (b *prefixRig) fill(e wire.Extent) {
	mem := b.d.arena.bytes(e.Region)
	for i := range int64(e.Pages) {
		at := int64(e.Offset) + i*b.o.PageBytes
		content(int(e.Page)+int(i), mem[at:at+b.o.PageBytes])
	}
}

// letGo frees what the last lookup leased.
func (b *prefixRig) letGo() error {
	if b.id == 0 {
		return nil
	}
	return b.lookups.Send((&wire.Cancel{Session: b.scheduler.Welcome.Session,
		Secret: b.scheduler.Welcome.Secret, Lookup: b.id}).Append(nil))
}

// lookup asks for the prefix, and frees what the one before it leased.
func (b *prefixRig) lookup() (time.Duration, error) {
	if err := b.letGo(); err != nil {
		return 0, err
	}
	b.id++
	m := wire.Lookup{Session: b.scheduler.Welcome.Session, Secret: b.scheduler.Welcome.Secret,
		Lookup: b.id, Hashes: b.hashes, DeadlineMs: uint32(rigPatience.Milliseconds())}
	start := time.Now()
	r, err := b.lookups.Lookup(&m, rigPatience+10*time.Second)
	took := time.Since(start)
	if err == nil && int(r.HitPages) != b.pages {
		err = fmt.Errorf("hit %d of %d pages", r.HitPages, b.pages)
	}
	return took, err
}

// verify loads what the last lookup found, compares every byte, and lets go of it.
func (b *prefixRig) verify() error {
	var g wire.LoadGrant
	names := wire.NamesOf(b.hashes, 32, 0, b.o.PagesPerChunk)
	m := wire.PrepareLoad{
		ID: b.worker.NextID(), Session: b.scheduler.Welcome.Session, Lookup: b.id,
		Ticket: b.scheduler.Ticket(b.id), Pages: uint32(b.pages), Names: names[:],
	}
	if err := b.call(&m, &g); err != nil {
		return err
	}
	want := make([]byte, b.o.PageBytes)
	loaded := 0
	for _, e := range g.Extents {
		mem := b.d.arena.bytes(e.Region)
		for i := range int64(e.Pages) {
			page, at := int(e.Page)+int(i), int64(e.Offset)+i*b.o.PageBytes
			if content(page, want); !bytes.Equal(want, mem[at:at+b.o.PageBytes]) {
				return fmt.Errorf("page %d came back wrong", page)
			}
			loaded++
		}
	}
	if loaded != b.pages {
		return fmt.Errorf("%d pages of %d were loaded", loaded, b.pages)
	}
	if err := b.worker.Send(&wire.Release{Load: g.Load}); err != nil {
		return err
	}
	return b.sync()
}

// A bareReader reads a file as fast as it can: workers, each with a piece under way, nothing
// checked.
type bareReader struct {
	o      PromotionBench
	file   vfs.File
	mem    *dax.Region
	size   int64
	direct bool
}

func newBareReader(dir string, size int64, o PromotionBench, kind dax.Kind) (_ *bareReader,
	err error) {
	b := &bareReader{o: o, size: size}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.mem, err = dax.Create(dax.Options{Kind: kind, SizeBytes: size, NUMANode: dax.NoNUMANode,
		Populate: true, Threads: runtime.NumCPU()}); err != nil {
		return nil, err
	}
	name := filepath.Join(dir, "bare")
	b.file, err = vfs.OS.OpenFile(name, vfs.Create|vfs.Direct)
	b.direct = err == nil
	if errors.Is(err, vfs.ErrNoDirect) {
		b.file, err = vfs.OS.OpenFile(name, vfs.Create)
	}
	if err != nil {
		return nil, err
	}
	content(-1, b.mem.Bytes()[:size])
	if err := errors.Join(b.file.Allocate(0, size), b.each(b.file.WriteAt),
		b.file.Datasync()); err != nil {
		return nil, err
	}
	return b, nil
}

// each moves the file in pieces.
func (b *bareReader) each(move func([]byte, int64) (int, error)) error {
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, b.o.Workers)
	for w := range b.o.Workers {
		wg.Go(func() {
			for {
				at := next.Add(b.o.PieceBytes) - b.o.PieceBytes
				if at >= b.size {
					return
				}
				end := min(at+b.o.PieceBytes, b.size)
				if _, err := move(b.mem.Bytes()[at:end], at); err != nil &&
					!(errors.Is(err, io.EOF) && end == b.size) {
					errs[w] = err
					return
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// read reads the file once, and says how long that took.
func (b *bareReader) read() (time.Duration, error) {
	if !b.direct { // or it would come from memory
		_ = b.file.Advise(0, 0, vfs.DontNeed)
	}
	start := time.Now()
	err := b.each(b.file.ReadAt)
	return time.Since(start), err
}

func (b *bareReader) close() error {
	var errs []error
	if b.file != nil {
		errs = append(errs, b.file.Close())
	}
	if b.mem != nil {
		errs = append(errs, b.mem.Close())
	}
	return errors.Join(errs...)
}

// processTime is the CPU time that this process has taken.
func processTime() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
