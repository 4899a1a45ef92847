package slab

import (
	"lookaside/dax/memcopy"
	"lookaside/tiers/vfs"
)

// summing lets a job's pieces be moved and checked in one pass, if its file can. A piece is then a
// whole number of pages, close to PieceBytes.
func (d *Disk) summing(j *job) {
	file, ok := j.file.(vfs.Summing)
	if !ok {
		return
	}
	page := j.s.layout.Geometry.PageBytes
	groups := max(int64(d.o.PieceBytes)/page/memcopy.SumsGroup, 1)
	j.summed, j.step = file, groups*memcopy.SumsGroup*page
}

// neighbours submits loads. It joins small chunks in neighbouring slots into one piece, because
// queueing each takes longer than moving it.
type neighbours struct {
	d    *Disk
	jobs []*job
	size int64
}

// submit queues a job, now or at the latest in flush.
func (n *neighbours) submit(j *job) {
	size := int64(len(j.t.Bytes))
	if len(n.jobs) > 0 {
		last := n.jobs[len(n.jobs)-1]
		if last.s != j.s || last.slot+1 != j.slot || n.size+size > int64(n.d.o.PieceBytes) {
			n.flush()
		}
	}
	if _, ok := j.s.buffed.(vfs.Summing); !ok || size > int64(n.d.o.PieceBytes)/2 {
		n.flush()
		n.d.submit(j)
		return
	}
	n.jobs, n.size = append(n.jobs, j), n.size+size
}

// flush queues what submit has held back.
func (n *neighbours) flush() {
	if len(n.jobs) == 0 {
		return
	}
	for _, j := range n.jobs {
		j.summed = j.s.buffed.(vfs.Summing)
		j.left.Store(1)
	}
	first, l := n.jobs[0], &n.d.loads
	l.room <- struct{}{}
	l.moves <- piece{j: first, to: int64(len(first.t.Bytes)), rest: n.jobs[1:]}
	n.jobs, n.size = nil, 0
}

// moveSummed moves and checks a piece and the jobs joined to it.
func (d *Disk) moveSummed(p piece) {
	one := func(p piece) {
		if p.wanted() {
			if err := p.moveSums(); err != nil {
				p.j.fail(err)
			}
		}
	}
	one(p)
	for _, j := range p.rest {
		one(piece{j: j, to: int64(len(j.t.Bytes))})
	}
	// End the first job last: with it the call may return.
	for _, j := range p.rest {
		d.finishOne(j)
	}
	d.finish(p)
}

// moveSums moves a piece of whole pages, and computes or compares their checksums on the way.
func (p *piece) moveSums() error {
	j, d := p.j, p.j.sp.g.DigestBytes
	first, end := int(p.from/j.s.layout.Geometry.PageBytes), int(p.to/j.s.layout.Geometry.PageBytes)
	seeds := make([]uint64, end-first)
	for i := range seeds {
		page := first + i
		seeds[i] = j.s.id.PageSeed(j.t.Hashes[page*d:(page+1)*d], j.gen)
	}
	buf, off := j.t.Bytes[p.from:p.to], j.s.layout.SlotOffset(j.slot)+p.from
	if j.store {
		return j.summed.WriteSums(buf, off, seeds, j.sums[first:end])
	}
	sums := make([]uint64, end-first)
	if err := j.summed.ReadSums(buf, off, seeds, sums); err != nil {
		return err
	}
	for i, sum := range sums {
		if sum != j.sums[first+i] {
			return j.s.corrupt(j.t.First+first+i, j.slot)
		}
	}
	return nil
}
