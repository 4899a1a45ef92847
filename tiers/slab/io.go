package slab

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/vfs"
)

// job is one chunk on its way between memory and a slot.
type job struct {
	ctx   context.Context
	i     int // its index in the call's transfers
	t     *tiers.Transfer
	s     *slab
	sp    *space
	slot  int
	gen   uint64
	sums  []uint64 // of the slot's pages: a store fills them, a load compares them
	store bool
	lease uint64 // the engine's handle
	// of a store: the slot's old entry was freed; that must be synced before the data is
	// overwritten
	freed bool

	file   vfs.File
	direct bool
	summed vfs.Summing  // nil: pieces are moved and checked in two steps
	step   int64        // bytes of a piece
	left   atomic.Int32 // pieces that are not done

	mu  sync.Mutex
	err error // the first; guarded by mu until left is 0
	// done is called by the goroutine that finishes the last piece.
	done func(*job)
}

// piece is one request: bytes [from, to) of a job, or one whole job and the jobs in rest, whose
// slots follow its own.
type piece struct {
	j        *job
	from, to int64
	rest     []*job
}

func (j *job) fail(err error) {
	j.mu.Lock()
	if j.err == nil {
		j.err = err
	}
	j.mu.Unlock()
}

func (j *job) failure() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err
}

// line is the queues of one direction. Pieces of loads are moved and then checked; pieces of stores
// are checked and then moved. Every queue has room for all submitted pieces, so passing one on
// never blocks.
type line struct {
	room   chan struct{} // has an entry for each submitted piece
	moves  chan piece
	checks chan piece
}

// newLine makes queues for the given number of pieces, or for most if that is fewer and not 0.
func newLine(pieces, most int) line {
	if most > 0 {
		pieces = min(pieces, most)
	}
	return line{room: make(chan struct{}, pieces), moves: make(chan piece, pieces),
		checks: make(chan piece, pieces)}
}

// startWorkers starts the workers, which run until the tier is closed. Movers only move pieces, one
// after another, so that the medium always has as many requests as it may have. Checkers compute
// checksums; two are enough at several GB/s each. Workers that did both were slower at writing. One
// request for neighbouring slots, and longer queues, made no difference.
func (d *Disk) startWorkers() {
	checkers := min(2, runtime.GOMAXPROCS(0))
	pieces := max(2*(d.o.Workers+checkers), d.o.Queue)
	d.loads, d.stores = newLine(pieces, d.o.MaxLoads), newLine(pieces, d.o.MaxStores)
	for range d.o.Workers {
		d.helpers.Go(d.moveWorker)
	}
	for range checkers {
		d.helpers.Go(func() { d.work(d.loads.checks, d.stores.checks, d.check) })
	}
}

// submit queues a job's pieces for the workers. It waits while too many are submitted.
func (d *Disk) submit(j *job) {
	j.file, j.direct = j.s.buffed, false
	if j.s.takes(j.t.Bytes) {
		j.file, j.direct = j.s.direct, true
	}
	size := int64(len(j.t.Bytes))
	j.step = int64(d.o.PieceBytes)
	d.summing(j)
	j.left.Store(int32((size + j.step - 1) / j.step))
	l := d.line(j)
	first := l.moves
	if j.store && j.summed == nil {
		first = l.checks
	}
	for from := int64(0); from < size; from += j.step {
		l.room <- struct{}{}
		first <- piece{j: j, from: from, to: min(from+j.step, size)}
	}
}

// line returns the queues for a job's pieces.
func (d *Disk) line(j *job) *line {
	if j.store {
		return &d.stores
	}
	return &d.loads
}

// work handles pieces until the tier is closed. Loads go first, because a request waits for them;
// every few loads one store goes first.
func (d *Disk) work(loads, stores chan piece, do func(piece)) {
	for n := 0; ; n++ {
		first, second := loads, stores
		if n%8 == 7 {
			first, second = second, first
		}
		var p piece
		select {
		case p = <-first:
		default:
			select {
			case p = <-first:
			case p = <-second:
			case <-d.stop:
				return
			}
		}
		yields := p.j.summed != nil
		do(p)
		if !yields { // a Yielder yields by itself, and only if needed: see memcopy.Yielder
			runtime.Gosched() // without it lookups wait for copies
		}
	}
}

// moveWorker moves pieces.
func (d *Disk) moveWorker() {
	bounce, err := dax.NewTable[byte](block)
	var tail []byte
	if err == nil {
		tail = bounce.Slice()
		defer bounce.Close()
	} else {
		tail = make([]byte, block) // may be misaligned; then the file returns an error
	}
	d.work(d.loads.moves, d.stores.moves, func(p piece) {
		if p.j.summed != nil {
			d.moveSummed(p)
			return
		}
		if p.wanted() {
			if err := d.move(&p, tail); err != nil {
				p.j.fail(err)
			}
		}
		if p.j.store {
			d.finish(p)
		} else {
			d.loads.checks <- p
		}
	})
}

// check computes the checksums that the piece allows.
func (d *Disk) check(p piece) {
	if p.wanted() {
		if err := p.check(); err != nil {
			p.j.fail(err)
		}
	}
	if p.j.store {
		d.stores.moves <- p
	} else {
		d.finish(p)
	}
}

// wanted reports whether a piece's job can still succeed.
func (p *piece) wanted() bool {
	if p.j.ctx.Err() != nil {
		p.j.fail(context.Cause(p.j.ctx))
	}
	return p.j.failure() == nil
}

// finish ends a piece.
func (d *Disk) finish(p piece) {
	<-d.line(p.j).room
	d.finishOne(p.j)
}

// finishOne ends one piece of a job, and the job if it was the last piece.
func (d *Disk) finishOne(j *job) {
	if j.left.Add(-1) > 0 {
		return
	}
	if j.failure() == nil {
		if err := j.checkSplit(); err != nil {
			j.fail(err)
		}
	}
	j.done(j)
}

// move reads or writes the piece. With O_DIRECT, the part of a block at the end of the data goes
// through tail.
func (d *Disk) move(p *piece, tail []byte) error {
	j := p.j
	off := j.s.layout.SlotOffset(j.slot)
	buf := j.t.Bytes[p.from:p.to]
	whole := len(buf)
	if j.direct {
		whole -= len(buf) % j.s.align
	}
	if whole > 0 {
		if err := d.transfer(p, buf[:whole], off+p.from); err != nil {
			return err
		}
	}
	if rest := buf[whole:]; len(rest) > 0 {
		at := off + p.from + int64(whole)
		t := tail[:j.s.align]
		if j.store {
			var err error
			clear(t)
			if err = dax.Guard(func() { copy(t, rest) }, rest); err != nil {
				return err
			}
			return d.transfer(p, t, at)
		}
		if err := d.transfer(p, t, at); err != nil {
			return err
		}
		return dax.Guard(func() { copy(rest, t) }, rest)
	}
	return nil
}

// transfer makes one request.
func (d *Disk) transfer(p *piece, buf []byte, at int64) error {
	if p.j.store {
		_, err := p.j.file.WriteAt(buf, at)
		return err
	}
	_, err := p.j.file.ReadAt(buf, at)
	if err == nil && !p.j.direct {
		_ = p.j.file.Advise(at, int64(len(buf)), vfs.DontNeed)
	}
	return err
}

// check computes or compares the checksums of the pages that lie wholly in the piece.
func (p *piece) check() error {
	size := p.j.s.layout.Geometry.PageBytes
	first, end := int((p.from+size-1)/size), int(p.to/size)
	return p.j.checkPages(first, end)
}

// checkSplit computes or compares the checksums of the pages that lie in several pieces.
func (j *job) checkSplit() error {
	size, step := j.s.layout.Geometry.PageBytes, j.step
	if step%size == 0 {
		return nil
	}
	for i := range j.t.Pages() {
		if from := int64(i) * size; from/step != (from+size-1)/step {
			if err := j.checkPages(i, i+1); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkPages computes or compares the checksums of pages [from, end).
func (j *job) checkPages(from, end int) error {
	size, d := j.s.layout.Geometry.PageBytes, j.sp.g.DigestBytes
	wrong := -1
	err := dax.Guard(func() {
		for i := from; i < end; i++ {
			sum := j.s.id.PageSum(j.t.Hashes[i*d:(i+1)*d], j.gen,
				j.t.Bytes[int64(i)*size:int64(i+1)*size])
			switch {
			case j.store:
				j.sums[i] = sum
			case j.sums[i] != sum:
				wrong = i
				return
			}
		}
	}, j.t.Bytes)
	if err == nil && wrong >= 0 {
		err = j.s.corrupt(j.t.First+wrong, j.slot)
	}
	return err
}
