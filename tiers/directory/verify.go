package directory

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
)

var scratches = sync.Pool{New: func() any { return newScratch() }}

// Verify checks chunks that were found, several at a time and roughly in order, and reports each
// result to the engine. Chunks that were not checked when ctx ends stay unverified. No two calls at
// a time may name the same chunk.
func (d *Directory) Verify(ctx context.Context, list []engine.Verification) {
	var next atomic.Int64
	work := func() {
		k := scratches.Get().(*scratch)
		defer scratches.Put(k)
		for i := next.Add(1) - 1; i < int64(len(list)) && ctx.Err() == nil; i = next.Add(1) - 1 {
			select {
			case d.checks <- struct{}{}:
			case <-ctx.Done():
				return
			}
			d.verify(&list[i], k)
			<-d.checks
		}
	}
	var wait sync.WaitGroup
	for range min(len(list), cap(d.checks)) - 1 {
		wait.Go(work)
	}
	work()
	wait.Wait()
}

// verify checks a chunk without a lease. The chunk may be gone at any moment and its slot reused.
// Then the result means nothing, and the old handle changes nothing in the engine.
func (d *Directory) verify(v *engine.Verification, k *scratch) {
	known, err := d.compare(v, k)
	if err == nil && !known {
		err = fmt.Errorf("%w: the directory of the arena does not have it", tiers.ErrCorrupt)
	}
	if !d.engine.EndVerify(v.Handle, err == nil) {
		return
	}
	if err != nil {
		d.log.Warn("a chunk that was found is bad; dropped", zap.Error(err),
			zap.Uint32("region", v.Region), zap.Uint64("offset", v.Offset))
		return
	}
	d.confirm(v, k)
}

// confirm notes in the entry of a chunk that this process has checked it.
func (d *Directory) confirm(v *engine.Verification, k *scratch) {
	p, turn := d.using(v)
	if p == nil {
		return
	}
	defer p.life.RUnlock()
	turn.Lock()
	defer turn.Unlock()
	if e, ok := d.read(p, v.Slot, k); ok && sameChunk(&e, v) && e.Stable < d.header.trusted {
		e.Stable = d.header.epoch
		d.write(p, v.Handle, v.Slot, &e, k)
	}
}

// Recheck compares a chunk, which may be in use, with the checksums that it was kept with. known
// reports whether it has any; if not, it is kept. The caller needs no lease; if the chunk goes
// meanwhile, the result means nothing. The error wraps tiers.ErrCorrupt if the bytes have changed.
// Any other error means that they cannot be read.
func (d *Directory) Recheck(v *engine.Verification) (known bool, err error) {
	k := scratches.Get().(*scratch)
	defer scratches.Put(k)
	known, err = d.compare(v, k)
	if known || err != nil {
		return known, err
	}
	return false, d.keep(v, d.commits.Add(1), k)
}

// compare compares the pages of a chunk that have checksums with these. known is false if none has.
func (d *Directory) compare(v *engine.Verification, k *scratch) (known bool, err error) {
	p, turn := d.using(v)
	if p == nil {
		return false, nil
	}
	defer p.life.RUnlock()
	turn.Lock()
	e, ok := d.read(p, v.Slot, k)
	turn.Unlock()
	if !ok || !sameChunk(&e, v) {
		return false, nil
	}
	n := min(e.Pages, v.Pages)
	if err := d.sum(p, v, 0, n, e.Generation, k); err != nil {
		return false, err
	}
	for i, sum := range k.sums {
		if want := binary.LittleEndian.Uint64(e.Sums[8*i:]); sum != want {
			return true, fmt.Errorf("%w: page %d at byte %d of region %d is not what was stored",
				tiers.ErrCorrupt, v.First+i, v.Offset, v.Region)
		}
	}
	return true, nil
}

// errTakeover means that the process before has something that this one cannot restore.
var errTakeover = errors.New("not all that the process before holds can be taken over")
