package promotionbench

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/dax"
	"lookaside/internal/prefixes"
	"lookaside/tiers/vfs"
)

// A bareReader reads a file as fast as it can. Each of its workers has one piece under way, and
// nothing is checked.
type bareReader struct {
	o      Options
	file   vfs.File
	mem    *dax.Region
	size   int64
	direct bool
}

func newBareReader(ctx context.Context, dir string, size int64, o Options,
	kind dax.Kind) (_ *bareReader, err error) {
	b := &bareReader{o: o, size: size}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.mem, err = dax.Create(ctx, dax.Options{Kind: kind, SizeBytes: size,
		NUMANode: dax.NoNUMANode, Populate: true, Threads: runtime.NumCPU()}); err != nil {
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
	prefixes.Content(-1, b.mem.Bytes()[:size])
	if err := errors.Join(b.file.Allocate(0, size), b.each(b.file.WriteAt),
		b.file.Datasync()); err != nil {
		return nil, err
	}
	return b, nil
}

// each calls move for each piece of the file.
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

// read reads the file once and returns how long that took.
func (b *bareReader) read() (time.Duration, error) {
	if !b.direct { // else the bytes would come from memory
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
