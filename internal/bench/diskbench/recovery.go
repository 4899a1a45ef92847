// Package diskbench measures the disk tier: how fast it moves chunks beside fio, and how fast it
// opens a store with many of them.
package diskbench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/zeebo/xxh3"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/slab"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// Recovery describes the store to open.
type Recovery struct {
	Dir           string // parent of a new directory. Default: that for temporary files
	Chunks        int    // held by the store
	PagesPerChunk int
	PageBytes     int64 // of pages without data: the slots are holes
	Rounds        int
}

// RecoveryFigures has a value for each round.
type RecoveryFigures struct {
	Seconds []float64 // to open the store, with its directories not in the page cache
	// BareS is for reading and hashing the same directories with as many goroutines.
	BareS     []float64
	MemoryB   []float64 // resident after opening, for each chunk
	EntryB    int       // of the directory, for each chunk
	SlabCount int
}

const recoverySlabs = 32

var recoverySpace = tiers.Space{Fingerprint: tiers.FingerprintOf([]byte("recovery"))}

// digests writes the digests of the pages of the n-th chunk, whose prefix has 64 chunks.
func digests(buf []byte, n, ppc int) []byte {
	for i := range ppc * 4 {
		buf = binary.LittleEndian.AppendUint64(buf, xxh3.HashSeed(nil, uint64(n*ppc*4+i)+1))
	}
	return buf
}

// Run makes the store and opens it once a round.
func (o Recovery) Run(ctx context.Context) (f RecoveryFigures, err error) {
	if o.Chunks < recoverySlabs || o.Rounds < 1 || o.PagesPerChunk < 1 {
		return f, fmt.Errorf("bench of %d chunks of %d pages, %d rounds: want %d or more, 1 and 1",
			o.Chunks, o.PagesPerChunk, o.Rounds, recoverySlabs)
	}
	dir, err := os.MkdirTemp(o.Dir, "lookaside-recovery-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	recoverySpace.Geometry = tiers.Geometry{PageBytes: o.PageBytes, PagesPerChunk: o.PagesPerChunk,
		PageTokens: 16, DigestBytes: 32}
	var capacity int64
	var layouts []media.Layout
	for i := range recoverySlabs {
		l, err := o.makeSlab(path.Join(dir, slab.SlabName(uint32(i))), i)
		if err != nil {
			return f, err
		}
		info, err := vfs.OS.Stat(path.Join(dir, slab.SlabName(uint32(i))))
		if err != nil {
			return f, err
		}
		capacity += info.Size
		layouts = append(layouts, l)
	}
	f.EntryB, f.SlabCount = layouts[0].EntryBytes, recoverySlabs
	for range o.Rounds {
		if ctx.Err() != nil {
			return f, context.Cause(ctx)
		}
		bare, err := readDirectories(dir, layouts)
		if err != nil {
			return f, err
		}
		f.BareS = append(f.BareS, bare.Seconds())
		if err := o.open(dir, capacity, &f); err != nil {
			return f, err
		}
	}
	return f, nil
}

// makeSlab makes a slab that holds every recoverySlabs-th chunk.
func (o Recovery) makeSlab(name string, index int) (l media.Layout, err error) {
	n := (o.Chunks - index + recoverySlabs - 1) / recoverySlabs
	g := recoverySpace.Geometry
	size := (2*media.BlockBytes + int64(n+1)*(g.PageBytes*int64(g.PagesPerChunk)+
		int64(g.PagesPerChunk*48)+4*media.BlockBytes)) / media.BlockBytes * media.BlockBytes
	if l, err = media.NewLayout(g, size); err != nil {
		return l, err
	}
	h := media.Header{Index: uint32(index), Bytes: size, Format: uint64(index) + 1, Epoch: 1,
		Stable: uint64(o.Chunks), Layout: l}
	file, err := vfs.OS.OpenFile(name, vfs.Create|vfs.Exclusive)
	if err != nil {
		return l, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := file.Truncate(size); err != nil {
		return l, err
	}
	block := make([]byte, media.BlockBytes)
	h.Encode(block)
	if _, err := file.WriteAt(block, media.HeaderOffset(h.Epoch)); err != nil {
		return l, err
	}
	const batch = 4096
	buf := make([]byte, batch*l.EntryBytes)
	sums := make([]byte, 8*g.PagesPerChunk)
	var hashes, before []byte
	for slot := 0; slot < n; slot += batch {
		m := min(batch, n-slot)
		for i := range m {
			c := (slot+i)*recoverySlabs + index
			hashes = digests(hashes[:0], c, g.PagesPerChunk)
			e := media.Entry{Generation: media.Generation(1, uint64(slot+i)), Commit: uint64(c) + 1,
				Space: recoverySpace.Fingerprint, Pages: g.PagesPerChunk, Digests: hashes,
				Sums: sums}
			if e.First = c % 64 * g.PagesPerChunk; e.First > 0 {
				before = digests(before[:0], c-1, g.PagesPerChunk)
				e.Prev = before[len(before)-g.DigestBytes:]
			}
			l.EncodeEntry(buf[i*l.EntryBytes:], h.Identity(), slot+i, &e)
		}
		if _, err := file.WriteAt(buf[:m*l.EntryBytes], l.EntryOffset(slot)); err != nil {
			return l, err
		}
	}
	return l, errors.Join(file.Datasync(), file.Advise(0, 0, vfs.DontNeed))
}

// readDirectories is the limit: it reads the bytes that a recovery must read, and hashes them.
func readDirectories(dir string, layouts []media.Layout) (time.Duration, error) {
	start := time.Now()
	errs := make([]error, 2)
	var wait sync.WaitGroup
	for w := range errs {
		wait.Go(func() {
			buf, err := dax.NewTable[byte](4 << 20)
			if err != nil {
				errs[w] = err
				return
			}
			defer buf.Close()
			for i := w; i < len(layouts); i += len(errs) {
				f, err := vfs.OS.OpenFile(path.Join(dir, slab.SlabName(uint32(i))),
					vfs.ReadOnly|vfs.Direct)
				if errors.Is(err, vfs.ErrNoDirect) {
					f, err = vfs.OS.OpenFile(path.Join(dir, slab.SlabName(uint32(i))), vfs.ReadOnly)
				}
				if err != nil {
					errs[w] = err
					return
				}
				for at := layouts[i].EntryOffset(0); at < layouts[i].DataOffset; at += int64(
					len(buf.Slice())) {
					p := buf.Slice()[:min(int64(len(buf.Slice())), layouts[i].DataOffset-at)]
					if _, err := f.ReadAt(p, at); err != nil {
						errs[w] = errors.Join(err, f.Close())
						return
					}
					_ = xxh3.Hash(p)
				}
				errs[w] = f.Close()
			}
		})
	}
	wait.Wait()
	return time.Since(start), errors.Join(errs...)
}

func (o Recovery) open(dir string, capacity int64, f *RecoveryFigures) (err error) {
	before, err := residentBytes()
	if err != nil {
		return err
	}
	start := time.Now()
	d, err := slab.Open(slab.Options{Dirs: []string{dir}, CapacityBytes: capacity})
	if err != nil {
		return err
	}
	f.Seconds = append(f.Seconds, time.Since(start).Seconds())
	after, err := residentBytes()
	defer func() { err = errors.Join(err, d.Close()) }()
	if err != nil {
		return err
	}
	f.MemoryB = append(f.MemoryB, float64(after-before)/float64(o.Chunks))
	if st := d.Stats(); st.Chunks != int64(o.Chunks) ||
		st.Pages != int64(o.Chunks*o.PagesPerChunk) {
		return fmt.Errorf("bench: %d chunks of %d were found: %+v", st.Chunks, o.Chunks, st)
	}
	return nil
}

// residentBytes returns the resident memory of this process.
func residentBytes() (int64, error) {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b))
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/self/statm: %q", b)
	}
	pages, err := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize()), err
}
