package mapped

import (
	"fmt"
	"io"
	"sync"
	"syscall"

	"lookaside/dax/memcopy"
	"lookaside/tiers/vfs"
)

var _ vfs.Summing = (*file)(nil)

// yielders are those of copies that have ended.
var yielders = sync.Pool{New: func() any { return memcopy.NewYielder() }}

// ReadSums implements vfs.Summing.
func (f *file) ReadSums(p []byte, off int64, seeds, sums []uint64) error {
	mem, err := f.pages("read", p, off, sums)
	if err != nil {
		return err
	}
	defer f.n.v.life.RUnlock()
	y := yielders.Get().(*memcopy.Yielder)
	defer yielders.Put(y)
	if err := f.n.v.guard(func() { memcopy.CopySums(p, mem, len(p)/len(sums), seeds, sums, y.Yield) }, f.n.at+off, mem, p); err != nil {
		return f.fail("read", f.n.locate(err))
	}
	return nil
}

// WriteSums implements vfs.Summing.
func (f *file) WriteSums(p []byte, off int64, seeds, sums []uint64) error {
	if f.readOnly {
		return f.fail("write", syscall.EBADF)
	}
	mem, err := f.pages("write", p, off, sums)
	if err != nil {
		return err
	}
	n := f.n
	defer n.v.life.RUnlock()
	n.soil(off, off+int64(len(p)))
	page := len(p) / len(sums)
	y := yielders.Get().(*memcopy.Yielder)
	defer yielders.Put(y)
	err = n.v.guard(func() { memcopy.CopySums(mem, p, page, seeds, sums, y.Yield) }, n.at+off, mem, p)
	if err == nil && n.v.dev.Direct() {
		err = n.v.persistSums(n.at+off, mem, page, len(sums))
	}
	if err != nil {
		return f.fail("write", n.locate(err))
	}
	return nil
}

// pages answers the memory of pages, all of which must be in the file, with life held for reading.
func (f *file) pages(op string, p []byte, off int64, sums []uint64) (mem []byte, err error) {
	if len(sums) == 0 || len(p)%len(sums) != 0 || off < 0 {
		return nil, f.fail(op, syscall.EINVAL)
	}
	if err := f.n.v.enter(op); err != nil {
		return nil, err
	}
	if off+int64(len(p)) > f.n.size.Load() {
		f.n.v.life.RUnlock()
		return nil, f.fail(op, io.ErrUnexpectedEOF)
	}
	at := f.n.at + off
	return f.n.v.dev.Bytes()[at : at+int64(len(p))], nil
}

// persistSums makes what CopySums stored last: what it did not store past the caches is written back.
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
