package remote

import (
	"errors"
	"fmt"
	"sync"

	"github.com/zeebo/xxh3"

	"lookaside/tiers"
	"lookaside/tiers/serde"
)

// buffers is a pool for encoded pages: one for each chunk that is being moved.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// fetch loads a chunk's first pages. One goroutine at a time uses it.
type fetch struct {
	tier *Tier
	name name      // of the object, which may have more pages
	run  tiers.Run // the pages that are wanted
	dst  []byte    // where to
	done func(error)

	codec  serde.Codec
	h      *header
	buffer *[]byte // nil where the codec is raw
}

// begin takes the object's header. It returns the memory to read the encoded pages into.
func (f *fetch) begin(b []byte) (stream []byte, err error) {
	h, err := parseHeader(b)
	if err == nil {
		err = f.name.verify(h)
	}
	if err != nil {
		return nil, err
	}
	n := f.run.Pages()
	if h.agree(f.run) != n {
		return nil, tiers.ErrNotFound
	}
	if f.codec = f.tier.codec; h.codec != f.codec.Name() {
		// Another sidecar wrote it. A codec that returns the same bytes can be used; the others
		// cannot.
		if f.codec, err = serde.New(h.codec); err != nil || f.codec.Lossy() {
			return nil, tiers.ErrNotFound
		}
	}
	f.h = h
	if _, raw := f.codec.(serde.Raw); raw {
		for i := range n {
			if h.length(i) != h.pageBytes {
				return nil, fmt.Errorf("%w: page of %d bytes, encoded raw to %d", tiers.ErrCorrupt,
					h.pageBytes, h.length(i))
			}
		}
		return f.dst, nil
	}
	f.buffer = buffers.Get().(*[]byte)
	if size := h.bytes(n); int64(cap(*f.buffer)) < size {
		*f.buffer = make([]byte, size)
	}
	return (*f.buffer)[:h.bytes(n)], nil
}

// end takes the error of reading what begin returned, or of not reading it.
func (f *fetch) end(err error) {
	if err == nil {
		err = f.decode()
	}
	if f.buffer != nil {
		buffers.Put(f.buffer)
		f.buffer = nil
	}
	f.done(err)
}

func (f *fetch) decode() error {
	page := f.h.pageBytes
	at := int64(0)
	for i := range f.run.Pages() {
		dst := f.dst[int64(i)*page : int64(i+1)*page]
		if f.buffer != nil {
			n := f.h.length(i)
			if err := f.codec.Decode(dst, (*f.buffer)[at:at+n], f.run.Space.Element); err != nil {
				return fmt.Errorf("%w: page %d: %w", tiers.ErrCorrupt, f.run.First+i, err)
			}
			at += n
		}
		if sumOf(dst, f.h.digest(i)) != f.h.sum(i) {
			return fmt.Errorf("%w: checksum of page %d", tiers.ErrCorrupt, f.run.First+i)
		}
	}
	return nil
}

// put stores a chunk. One goroutine at a time uses it.
type put struct {
	tier *Tier
	name name
	run  tiers.Run
	src  []byte
	done func(error)

	buffer  *[]byte // the encoded pages; nil if the codec is raw
	lengths []int64
	sums    []uint64
	summed  int64 // bytes of a raw chunk whose sums were begun
	hash    *xxh3.Hasher
}

func (p *put) digest(i int) []byte {
	d := p.run.Space.Geometry.DigestBytes
	return p.run.Hashes[i*d : (i+1)*d]
}

// begin encodes the chunk. Its result is valid until end.
func (p *put) begin() (stream []byte, err error) {
	g, n := p.run.Space.Geometry, p.run.Pages()
	codec := p.tier.codec
	p.lengths, p.sums = make([]int64, n), make([]uint64, n)
	if _, raw := codec.(serde.Raw); raw {
		for i := range p.lengths {
			p.lengths[i] = g.PageBytes
		}
		return p.src, nil
	}
	p.summed = int64(len(p.src))
	p.buffer = buffers.Get().(*[]byte)
	stream = (*p.buffer)[:0]
	if most := int64(n) * serde.Bound(g.PageBytes); int64(cap(stream)) < most {
		stream = make([]byte, 0, most)
	}
	var scratch []byte
	if codec.Lossy() {
		scratch = make([]byte, g.PageBytes)
	}
	for i := range n {
		page := p.src[int64(i)*g.PageBytes : int64(i+1)*g.PageBytes]
		at := len(stream)
		if stream, err = codec.Encode(stream, page, p.run.Space.Element); err != nil {
			return nil, err
		}
		if p.lengths[i] = int64(len(stream) - at); p.lengths[i] < 1 ||
			p.lengths[i] > serde.Bound(g.PageBytes) {
			return nil, errors.New("remote: " + codec.Name() + " keeps no bounds")
		}
		if codec.Lossy() {
			if err := codec.Decode(scratch, stream[at:], p.run.Space.Element); err != nil {
				return nil, err
			}
			page = scratch
		}
		p.sums[i] = sumOf(page, p.digest(i))
	}
	*p.buffer = stream
	return stream, nil
}

// sum computes the checksums of a raw chunk up to a byte. It is called just before each part is
// sent, so that the bytes are in the processor's cache for the kernel's copy.
func (p *put) sum(to int64) {
	page := p.run.Space.Geometry.PageBytes
	for p.summed < to {
		i := int(p.summed / page)
		end := min(int64(i+1)*page, to)
		if p.summed%page == 0 {
			if end == int64(i+1)*page { // a whole one
				p.sums[i] = sumOf(p.src[p.summed:end], p.digest(i))
				p.summed = end
				continue
			}
			p.hash = xxh3.NewSeed(seedOf(p.digest(i)))
		}
		_, _ = p.hash.Write(p.src[p.summed:end])
		if p.summed = end; end == int64(i+1)*page {
			p.sums[i] = p.hash.Sum64()
		}
	}
}

// header returns the header of the chunk, in parts of a size.
func (p *put) header(partBytes int64) []byte {
	p.sum(int64(len(p.src)))
	return appendHeader(nil, p.run, p.tier.codec.Name(), partBytes, p.lengths, p.sums)
}

// end takes the result.
func (p *put) end(err error) {
	if p.buffer != nil {
		buffers.Put(p.buffer)
		p.buffer = nil
	}
	p.done(err)
}

// inParallel calls do for 0 … n-1 from up to workers goroutines, and returns when all calls have.
func inParallel(n, workers int, do func(i int)) {
	if n <= 1 || workers <= 1 {
		for i := range n {
			do(i)
		}
		return
	}
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	var running sync.WaitGroup
	for range min(n, workers) {
		running.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	running.Wait()
}
