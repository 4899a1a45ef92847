package diskbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/slab"
	"lookaside/tiers/vfs"
)

// Transfers selects what to move.
type Transfers struct {
	Dir       string // parent of a new directory. Default: that for temporary files
	SlotBytes int64
	Bytes     int64 // moved in each round and direction, through a store of that size
	Workers   int   // concurrent requests
	Piece     int64 // most bytes of a request
	Kind      dax.Kind
	Rounds    int
}

// Figures has a value for each round.
type Figures struct {
	Memory      string    // what the bytes and fio's are in
	Write, FioW []float64 // GB/s
	Read, FioR  []float64 // GB/s
	// BareW and BareR, in GB/s, are for a loop that moves the same requests between a file and all
	// of the tier's memory. fio uses only the memory of its concurrent requests. If that fits into
	// a cache of the processor, fio is faster than any memory that can keep the bytes.
	BareW, BareR   []float64
	WriteC, ReadC  []float64 // cores that this process kept busy, including time in the kernel
	CachedFraction float64   // part of the store's bytes in the page cache at the end
}

// batch is the most chunks of one call, and batchBytes the most bytes, like those of a tier's
// queue.
const (
	batch      = 64
	batchBytes = 256 << 20
)

// Run moves chunks up and down, and fio does the same in between.
func (o Transfers) Run(ctx context.Context) (f Figures, err error) {
	n := int(o.Bytes / o.SlotBytes)
	if n < 1 || o.Rounds < 1 {
		return f, fmt.Errorf("bench of %d slots of %d bytes, %d rounds: want 1 or more", n,
			o.SlotBytes, o.Rounds)
	}
	fio, err := exec.LookPath("fio")
	if err != nil {
		return f, fmt.Errorf("the limit is what fio does: %w", err)
	}
	dir, err := os.MkdirTemp(o.Dir, "lookaside-disk-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	arena, err := dax.Create(ctx, dax.Options{Kind: o.Kind, SizeBytes: min(batchBytes,
		int64(n)*o.SlotBytes), NUMANode: dax.NoNUMANode, Populate: true})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, arena.Close()) }()
	fill(arena.Bytes())
	d, err := slab.Open(slab.Options{
		Dirs: []string{path.Join(dir, "store")}, CapacityBytes: (int64(n)*(o.SlotBytes+64<<10) +
			64<<20) / 4096 * 4096, SlabBytes: int64(n)*(o.SlotBytes+64<<10) + 64<<20,
		// the chunks stored last stay
		Workers: o.Workers, PieceBytes: int(min(o.Piece, o.SlotBytes)), Policy: "lru",
	})
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	limit := fioJob{fio: fio, file: path.Join(dir, "fio"), bytes: o.Bytes,
		request: min(o.Piece, o.SlotBytes), depth: o.Workers}
	limit.memory(arena.Kind())
	f.Memory = fmt.Sprintf("%s, fio %s", arena.Kind(), limit.mem)
	// The files' blocks are allocated by the first round, which does not count.
	for round := range o.Rounds + 1 {
		if ctx.Err() != nil {
			return f, context.Cause(ctx)
		}
		for _, write := range []bool{true, false} {
			speed, cores, err := o.move(ctx, d, arena.Bytes(), n, round, write)
			if err != nil {
				return f, err
			}
			fast, err := limit.run(ctx, write)
			if err != nil {
				return f, err
			}
			loop, err := bareLoop(limit.file, arena.Bytes(), limit, write)
			if err != nil {
				return f, err
			}
			switch {
			case round == 0:
			case write:
				f.Write, f.WriteC, f.FioW, f.BareW = append(f.Write, speed),
					append(f.WriteC, cores), append(f.FioW, fast), append(f.BareW, loop)
			default:
				f.Read, f.ReadC, f.FioR, f.BareR = append(f.Read, speed), append(f.ReadC, cores),
					append(f.FioR, fast), append(f.BareR, loop)
			}
		}
	}
	cached, err := cachedBytes(path.Join(dir, "store", slab.SlabName(0)))
	f.CachedFraction = float64(cached) / float64(o.Bytes)
	return f, err
}

// fill writes bytes that no disk can compress.
func fill(p []byte) {
	x := uint64(88172645463325252)
	for i := 0; i+8 <= len(p); i += 8 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		for j := range 8 {
			p[i+j] = byte(x >> (8 * j))
		}
	}
}

const pagesPerSlot = 16

// move stores n new chunks, or loads those of the round. It returns GB/s, and the cores used.
func (o Transfers) move(ctx context.Context, d *slab.Disk, arena []byte, n, round int,
	write bool) (speed, cores float64, err error) {
	g := tiers.Geometry{PageBytes: o.SlotBytes / pagesPerSlot, PagesPerChunk: pagesPerSlot,
		PageTokens: 16, DigestBytes: 32}
	space := tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g}
	// With two, one caller's requests are under way while the other syncs, like the workers of a
	// tier's queue.
	const callers = 2
	per := max(1, min(batch, int(int64(len(arena))/o.SlotBytes))/callers)
	var failed atomic.Pointer[error]
	var next atomic.Int64
	var wait sync.WaitGroup
	cpu, start := cpuSeconds(), time.Now()
	for c := range callers {
		wait.Go(func() {
			at := arena[c*per*int(o.SlotBytes)%len(arena):]
			for failed.Load() == nil {
				from := int(next.Add(int64(per))) - per
				if from >= n {
					return
				}
				ts := make([]tiers.Transfer, min(per, n-from))
				for i := range ts {
					ts[i] = tiers.Transfer{
						Run: tiers.Run{Space: &space, Hashes: digests(nil, round*n+from+i,
							g.PagesPerChunk)},
						Bytes: at[int64(i)*o.SlotBytes : int64(i+1)*o.SlotBytes],
					}
				}
				done := func(_ int, err error) {
					if err != nil {
						failed.Store(&err)
					}
				}
				if write {
					d.Store(ctx, ts, done)
				} else {
					d.Load(ctx, ts, done)
				}
			}
		})
	}
	wait.Wait()
	if err := failed.Load(); err != nil {
		return 0, 0, *err
	}
	took := time.Since(start).Seconds()
	return float64(n) * float64(o.SlotBytes) / 1e9 / took, (cpuSeconds() - cpu) / took, nil
}

// bareLoop moves what fio's job moves, with the same requests and concurrency, from and to all of
// the memory. It returns GB/s.
func bareLoop(name string, memory []byte, j fioJob, write bool) (gbs float64, err error) {
	file, err := vfs.OS.OpenFile(name, vfs.Direct)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	requests := j.bytes / j.request
	errs := make([]error, j.depth)
	var next atomic.Int64
	var wait sync.WaitGroup
	start := time.Now()
	for w := range errs {
		wait.Go(func() {
			for errs[w] == nil {
				at := (next.Add(1) - 1) * j.request
				if at >= requests*j.request {
					return
				}
				p := memory[at%(int64(len(memory))/j.request*j.request):][:j.request]
				if write {
					_, errs[w] = file.WriteAt(p, at)
				} else {
					_, errs[w] = file.ReadAt(p, at)
				}
			}
		})
	}
	wait.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, err
	}
	if write {
		if err := file.Datasync(); err != nil {
			return 0, err
		}
	}
	return float64(requests*j.request) / 1e9 / time.Since(start).Seconds(), nil
}

func cpuSeconds() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// cachedBytes returns how much of a file is in the page cache, or 0 if the kernel cannot report it
// (before 6.5).
func cachedBytes(name string) (int64, error) {
	f, err := os.Open(name)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{}, &st, 0); err != nil {
		if errors.Is(err, unix.ENOSYS) {
			return 0, nil
		}
		return 0, fmt.Errorf("%s: cachestat: %w", name, err)
	}
	return int64(st.Cache) * int64(os.Getpagesize()), nil
}

// fioJob is the limit: as many requests of the same size, bypassing the page cache.
type fioJob struct {
	fio, file, mem string
	bytes, request int64
	depth          int
	env            []string
}

// memory makes fio use the arena's kind of memory, as far as it can.
func (j *fioJob) memory(k dax.Kind) {
	switch k {
	case dax.KindHugetlb:
		j.mem = "shmhuge" // a shared mapping of the same pool
	case dax.KindTHP: // by a setting of the C library, which makes malloc request them
		j.mem, j.env = "malloc", []string{"GLIBC_TUNABLES=glibc.malloc.hugetlb=1"}
	default:
		j.mem = "mmap"
	}
}

func (j *fioJob) run(ctx context.Context, write bool) (gbs float64, err error) {
	rw := "read"
	if write {
		rw = "write"
	}
	each := j.bytes / int64(j.depth) / j.request * j.request
	args := []string{
		"--name=limit", "--filename=" + j.file, "--rw=" + rw, "--bs=" + strconv.FormatInt(j.request,
			10), "--direct=1", "--ioengine=psync", "--thread",
		"--numjobs=" + strconv.Itoa(j.depth), "--size=" + strconv.FormatInt(each, 10),
		"--offset_increment=" + strconv.FormatInt(each, 10),
		"--filesize=" + strconv.FormatInt(each*int64(j.depth), 10), "--mem=" + j.mem,
		"--group_reporting", "--output-format=json", "--fallocate=posix", "--end_fsync=1",
		"--refill_buffers=0", "--iomem_align=2M",
	}
	cmd := exec.CommandContext(ctx, j.fio, args...)
	cmd.Env = append(os.Environ(), j.env...)
	var out, msg bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	if err := cmd.Run(); err != nil {
		return 0, fmt.Errorf("fio: %w: %s %s", err, msg.String(), out.String())
	}
	var r struct {
		Jobs []map[string]json.RawMessage `json:"jobs"`
	}
	text := out.Bytes()
	if i := bytes.IndexByte(text, '{'); i > 0 { // warnings come first
		text = text[i:]
	}
	if err := json.Unmarshal(text, &r); err != nil || len(r.Jobs) != 1 {
		return 0, fmt.Errorf("fio: %d jobs: %w", len(r.Jobs), err)
	}
	var side struct {
		BW float64 `json:"bw_bytes"`
	}
	if err := json.Unmarshal(r.Jobs[0][rw], &side); err != nil {
		return 0, fmt.Errorf("fio: %w", err)
	}
	return side.BW / 1e9, nil
}
