package mapped

import (
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"sync"
	"syscall"

	"lookaside/dax"
	"lookaside/dax/memcopy"
	"lookaside/tiers/vfs"
)

var (
	_ vfs.Summing  = (*file)(nil)
	_ vfs.Resident = (*file)(nil)
)

// yieldEvery is after how many pieces of a copy the processor is offered to others: some 60 µs.
const yieldEvery = 4

// yielders is a pool for copies.
var yielders = sync.Pool{New: func() any { return memcopy.NewYielder(yieldEvery) }}

// ReadSums implements vfs.Summing.
func (f *file) ReadSums(p []byte, off int64, seeds, sums []uint64) error {
	mem, err := f.span("read", off, int64(len(p)), len(sums))
	if err != nil {
		return err
	}
	defer f.n.v.life.RUnlock()
	y := yielders.Get().(*memcopy.Yielder)
	defer yielders.Put(y)
	if err := f.n.v.guard(func() {
		memcopy.CopySums(p, mem, len(p)/len(sums), seeds, sums,
			y.Yield)
	}, f.n.at+off, mem, p); err != nil {
		return f.fail("read", f.n.locate(err))
	}
	return nil
}

// WriteSums implements vfs.Summing.
func (f *file) WriteSums(p []byte, off int64, seeds, sums []uint64) error {
	if f.readOnly {
		return f.fail("write", syscall.EBADF)
	}
	mem, err := f.span("write", off, int64(len(p)), len(sums))
	if err != nil {
		return err
	}
	n := f.n
	defer n.v.life.RUnlock()
	page, failures := len(p)/len(sums), n.v.failures.Load()
	y := yielders.Get().(*memcopy.Yielder)
	defer yielders.Put(y)
	err = n.v.guard(func() { memcopy.CopySums(mem, p, page, seeds, sums, y.Yield) }, n.at+off, mem,
		p)
	if err == nil && n.v.dev.Direct() {
		err = n.v.persistSums(n.at+off, mem, page, len(sums))
	}
	if err != nil {
		return f.fail("write", n.locate(err))
	}
	n.written(off, off+int64(len(p)), failures)
	return nil
}

// span returns the memory of n bytes of pages, all of which must lie in the file. It returns with
// life held for reading.
func (f *file) span(op string, off, n int64, pages int) (mem []byte, err error) {
	if pages == 0 || n <= 0 || n%int64(pages) != 0 || off < 0 || off > math.MaxInt64-n {
		return nil, f.fail(op, syscall.EINVAL)
	}
	if err := f.n.v.enter(op); err != nil {
		return nil, err
	}
	if off+n > f.n.size.Load() {
		f.n.v.life.RUnlock()
		return nil, f.fail(op, io.ErrUnexpectedEOF)
	}
	at := f.n.at + off
	return f.n.v.dev.Bytes()[at : at+n], nil
}

// Sums implements vfs.Resident.
func (f *file) Sums(off, pageBytes int64, seeds, sums []uint64) error {
	mem, err := f.span("read", off, pageBytes*int64(len(sums)), len(sums))
	if err != nil {
		return err
	}
	defer f.n.v.life.RUnlock()
	y := yielders.Get().(*memcopy.Yielder)
	defer yielders.Put(y)
	if err := f.n.v.guard(func() { memcopy.Sums(mem, int(pageBytes), seeds, sums, y.Yield) },
		f.n.at+off, mem, nil); err != nil {
		return f.fail("read", f.n.locate(err))
	}
	return nil
}

// Persist implements vfs.Resident.
func (f *file) Persist(off, n int64) error {
	if _, err := f.span("sync", off, n, 1); err != nil {
		return err
	}
	v, at := f.n.v, f.n.at+off
	defer v.life.RUnlock()
	if !v.dev.Direct() { // one system call for the whole range
		if err := v.sync(at, n, v.failures.Load()); err != nil {
			return f.fail("sync", err)
		}
		return nil
	}
	for from := int64(0); from < n; from += memcopy.PieceBytes {
		size := min(n-from, memcopy.PieceBytes)
		err := v.dev.Persist(at+from, size)
		var fault *dax.FaultError
		if errors.As(err, &fault) {
			err = f.n.locate(&faultError{v.dev.Path(), at + from + fault.Offset})
		}
		if err != nil {
			return f.fail("sync", err)
		}
		runtime.Gosched()
	}
	return nil
}

// persistSums makes durable what CopySums wrote: it writes back what was not stored past the
// caches.
func (v *volume) persistSums(at int64, mem []byte, page, pages int) error {
	streamed := 0
	if memcopy.SumsStreamed(mem, page) {
		streamed = pages / memcopy.SumsGroup * memcopy.SumsGroup * page
	}
	if err := v.dev.Persist(at+int64(streamed), int64(len(mem)-streamed)); err != nil {
		return fmt.Errorf("%w: %w", syscall.EIO, err)
	}
	return nil
}
