package daxbench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/zeebo/xxh3"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/daxtier"
	"lookaside/tiers/daxtier/mapped"
	"lookaside/tiers/slab"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// Recovery describes the pool to open.
type Recovery struct {
	Dir    string // see Transfers
	Chunks int    // held by the pool, of 16 pages of 256 bytes; their data is not read
	Rounds int
}

const (
	recoverySlabs = 32
	recoveryPage  = 256
)

// digests writes the digests of the pages of the n-th chunk, whose prefix has 64 chunks.
func digests(buf []byte, n int) []byte {
	for i := range pagesPerSlot * 4 {
		buf = binary.LittleEndian.AppendUint64(buf, xxh3.HashSeed(nil, uint64(n*pagesPerSlot*4+i)+
			1))
	}
	return buf
}

// Run makes the pool and opens it once a round. It returns the seconds of each round.
func (o Recovery) Run(ctx context.Context) (seconds []float64, err error) {
	if o.Chunks < recoverySlabs || o.Rounds < 1 {
		return nil, fmt.Errorf("bench of %d chunks, %d rounds: want %d or more, and 1", o.Chunks,
			o.Rounds, recoverySlabs)
	}
	dir, remove, err := makeDir(o.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = remove(err) }()
	space := tiers.Space{Fingerprint: tiers.FingerprintOf([]byte("recovery")),
		Geometry: tiers.Geometry{PageBytes: recoveryPage, PagesPerChunk: pagesPerSlot,
			PageTokens: 16, DigestBytes: 32}}
	each := (int64(o.Chunks/recoverySlabs+2)*(recoveryPage*pagesPerSlot+1024) +
		1<<20) / media.BlockBytes * media.BlockBytes
	device := dax.DeviceOptions{Path: filepath.Join(dir, "dax0.0"),
		SizeBytes: (recoverySlabs*each + 2*dax.HugePageSize) / dax.HugePageSize * dax.HugePageSize,
		AllowFile: true}
	if err := dax.CheckBudget(device.SizeBytes*5/4, dax.KindMemfd, dax.BudgetReserve); err != nil {
		return nil, err
	}
	fsys := mapped.New(nil)
	if err := fsys.Mount(device.Path, device); err != nil {
		return nil, err
	}
	for i := range recoverySlabs {
		if err := o.makeSlab(fsys, filepath.Join(device.Path, slab.SlabName(uint32(i))), i, each,
			&space); err != nil {
			return nil, errors.Join(err, fsys.Close())
		}
	}
	if err := fsys.Close(); err != nil {
		return nil, err
	}
	for range o.Rounds {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		start := time.Now()
		p, err := daxtier.Open(daxtier.Options{Devices: []daxtier.DeviceSpec{{Path: device.Path}},
			AllowFiles: true})
		if err != nil {
			return nil, err
		}
		seconds = append(seconds, time.Since(start).Seconds())
		st := p.Stats()
		if err := p.Close(); err != nil {
			return nil, err
		}
		if st.Chunks != int64(o.Chunks) || st.Pages != int64(o.Chunks*pagesPerSlot) {
			return nil, fmt.Errorf("bench: %d chunks of %d were found: %+v", st.Chunks, o.Chunks,
				st)
		}
	}
	return seconds, nil
}

// makeSlab makes a slab that holds every recoverySlabs-th chunk.
func (o Recovery) makeSlab(fsys *mapped.FS, name string, index int, size int64,
	space *tiers.Space) (err error) {
	n := (o.Chunks - index + recoverySlabs - 1) / recoverySlabs
	l, err := media.NewLayout(space.Geometry, size)
	if err != nil {
		return err
	}
	if l.Slots < n {
		return fmt.Errorf("bench: %d slots for %d chunks", l.Slots, n)
	}
	h := media.Header{Index: uint32(index), Bytes: size, Format: uint64(index) + 1, Epoch: 1,
		Stable: uint64(o.Chunks), Layout: l}
	file, err := fsys.OpenFile(name, vfs.Create|vfs.Exclusive)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := file.Allocate(0, size); err != nil {
		return err
	}
	block := make([]byte, media.BlockBytes)
	h.Encode(block)
	if _, err := file.WriteAt(block, media.HeaderOffset(h.Epoch)); err != nil {
		return err
	}
	const batch = 4096
	buf := make([]byte, batch*l.EntryBytes)
	sums := make([]byte, 8*pagesPerSlot)
	var hashes, before []byte
	for slot := 0; slot < n; slot += batch {
		m := min(batch, n-slot)
		for i := range m {
			c := (slot+i)*recoverySlabs + index
			hashes = digests(hashes[:0], c)
			e := media.Entry{Generation: media.Generation(1, uint64(slot+i)), Commit: uint64(c) + 1,
				Space: space.Fingerprint, Pages: pagesPerSlot, Digests: hashes, Sums: sums}
			if e.First = c % 64 * pagesPerSlot; e.First > 0 {
				before = digests(before[:0], c-1)
				e.Prev = before[len(before)-space.Geometry.DigestBytes:]
			}
			l.EncodeEntry(buf[i*l.EntryBytes:], h.Identity(), slot+i, &e)
		}
		if _, err := file.WriteAt(buf[:m*l.EntryBytes], l.EntryOffset(slot)); err != nil {
			return err
		}
	}
	return file.Datasync()
}
