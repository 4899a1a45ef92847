package slab

import (
	"context"
	"errors"
	"fmt"
	"path"
	"runtime"
	"sync"
	"sync/atomic"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// CheckOptions says what to check, and how.
type CheckOptions struct {
	FS   vfs.FS // default vfs.OS
	Dirs []string
	// Repair drops damaged entries, chunks that do not match their checksums or cannot be read, and
	// slabs without an intact header.
	Repair bool
	// Progress, if set, is called now and then with the bytes read and the bytes to read, as far as
	// they are known. Calls do not overlap.
	Progress func(done, total int64)
}

// Report is what a check found.
type Report struct {
	Slabs []SlabReport `json:"slabs"`
}

// SlabReport is what a check found in one slab.
type SlabReport struct {
	File     string          `json:"file"`
	Bytes    int64           `json:"bytes"`
	Geometry *tiers.Geometry `json:"geometry,omitempty"` // nil: it is not carved
	Slots    int             `json:"slots"`
	Spaces   int             `json:"spaces"`
	Chunks   int             `json:"chunks"` // that are whole
	Pages    int             `json:"pages"`  // of them
	// DamagedEntries of the directory did not match their checksums: torn, or written elsewhere.
	DamagedEntries int `json:"damaged_entries"`
	// CorruptChunks have a page that does not match its checksum. UnreadableChunks have a page that
	// could not be read.
	CorruptChunks    int `json:"corrupt_chunks"`
	UnreadableChunks int `json:"unreadable_chunks"`
	// Dropped is the number of damaged entries and bad chunks that were dropped.
	Dropped int `json:"dropped"`
	// Error is the fault of the slab as a whole. Removed: the slab's file was removed; opening the
	// store makes it anew.
	Error   string `json:"error,omitempty"`
	Removed bool   `json:"removed,omitempty"`
}

// Bad returns the number of faults in the slab.
func (s *SlabReport) Bad() int {
	n := s.DamagedEntries + s.CorruptChunks + s.UnreadableChunks
	if s.Error != "" {
		n++
	}
	return n
}

// Bad returns the number of faults in all slabs.
func (r *Report) Bad() (n int) {
	for i := range r.Slabs {
		n += r.Slabs[i].Bad()
	}
	return n
}

// Check reads and verifies a whole store that no process has open. Its error says why it could not
// read the store, or why it stopped early. The report has what it found until then.
func Check(ctx context.Context, o CheckOptions) (Report, error) {
	if o.FS == nil {
		o.FS = vfs.OS
	}
	var files []string
	for _, dir := range o.Dirs {
		numbers, err := slabNumbers(o.FS, dir)
		if err != nil {
			return Report{}, err
		}
		if len(numbers) == 0 {
			return Report{}, fmt.Errorf("%s: %w: there are no slabs in it", dir, tiers.ErrNotFound)
		}
		for _, n := range numbers {
			files = append(files, path.Join(dir, SlabName(n)))
		}
	}
	locks, err := lockAll(o.FS, o.Dirs, false)
	if err != nil {
		return Report{}, err
	}
	c := checker{ctx: ctx, o: o}
	r := Report{Slabs: make([]SlabReport, len(files))}
	for i := range files {
		r.Slabs[i].File = files[i]
		if info, err := o.FS.Stat(files[i]); err == nil {
			c.total.Add(min(info.Size, info.Allocated))
		}
	}
	var wait sync.WaitGroup
	next := make(chan int)
	for range min(len(files), runtime.GOMAXPROCS(0)) {
		wait.Go(func() {
			for i := range next {
				c.slab(&r.Slabs[i])
			}
		})
	}
	for i := range files {
		next <- i
	}
	close(next)
	wait.Wait()
	for _, l := range locks {
		err = errors.Join(err, l.Close())
	}
	if ctx.Err() != nil {
		err = errors.Join(context.Cause(ctx), err)
	}
	return r, err
}

type checker struct {
	ctx   context.Context
	o     CheckOptions
	total atomic.Int64

	mu   sync.Mutex // guards done, and is held while Progress is called
	done int64
}

func (c *checker) progress(n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done += n
	if c.o.Progress != nil {
		c.o.Progress(c.done, max(c.done, c.total.Load()))
	}
}

// slab checks one file.
func (c *checker) slab(r *SlabReport) {
	if c.ctx.Err() != nil {
		return
	}
	err := c.open(r)
	if err == nil || c.ctx.Err() != nil {
		return
	}
	r.Error = err.Error()
	if c.o.Repair && (errors.Is(err, media.ErrBlank) || errors.Is(err, media.ErrCorrupt)) {
		if err := errors.Join(c.o.FS.Remove(r.File), c.o.FS.SyncDir(path.Dir(r.File))); err != nil {
			r.Error += "; removing it: " + err.Error()
			return
		}
		r.Removed = true
	}
}

func (c *checker) open(r *SlabReport) (err error) {
	var flags vfs.Flag
	if !c.o.Repair {
		flags = vfs.ReadOnly
	}
	f, err := c.o.FS.OpenFile(r.File, flags)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if r.Bytes, err = f.Size(); err != nil || r.Bytes == 0 {
		// an empty file was about to become a slab when its process ended: it holds nothing
		return err
	}
	h, err := readHeader(f)
	if err != nil {
		return err
	}
	if !h.Carved() {
		return nil
	}
	reader := f
	if direct, err := c.o.FS.OpenFile(r.File, flags|vfs.Direct); err == nil {
		defer direct.Close()
		if mem, offset := direct.DirectAlign(); max(mem, offset) <= block {
			reader = direct
		}
	}
	return c.entries(r, f, reader, &h)
}

// entries checks a slab's directory and the chunks that it names. It reads through one descriptor
// of the file and writes through the other.
func (c *checker) entries(r *SlabReport, f, reader vfs.File, h *media.Header) error {
	l, id := &h.Layout, h.Identity()
	r.Geometry, r.Slots = &l.Geometry, l.Slots
	directory, err := dax.NewTable[byte](l.ScanBytes(1 << 20)) // aligned
	if err != nil {
		return err
	}
	defer directory.Close()
	data, err := dax.NewTable[byte](verifyBytes)
	if err != nil {
		return err
	}
	defer data.Close()
	spaces := map[[32]byte]bool{}
	drop := func(slot int) error {
		if !c.o.Repair {
			return nil
		}
		r.Dropped++
		_, err := f.WriteAt(freeEntry, l.EntryOffset(slot))
		return err
	}
	err = l.Scan(reader, id, 0, l.Slots, directory.Slice(), func(slot int, state media.State,
		e *media.Entry) error {
		if c.ctx.Err() != nil {
			return context.Cause(c.ctx)
		}
		switch state {
		case media.Free:
			return nil
		case media.Bad:
			r.DamagedEntries++
			return drop(slot)
		}
		spaces[e.Space] = true
		n, err := verify(reader, l, id, slot, e, data.Slice())
		c.progress(int64(e.Pages) * l.Geometry.PageBytes)
		switch {
		case err != nil:
			r.UnreadableChunks++
			return drop(slot)
		case n < e.Pages:
			r.CorruptChunks++
			return drop(slot)
		}
		r.Chunks++
		r.Pages += n
		return nil
	}, func() error {
		c.progress(int64(len(directory.Slice())))
		return nil
	})
	r.Spaces = len(spaces)
	if r.Dropped > 0 {
		err = errors.Join(err, f.Datasync())
	}
	return err
}
