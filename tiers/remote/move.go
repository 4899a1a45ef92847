package remote

import (
	"errors"
	"fmt"
	"sync"

	"lookaside/tiers"
	"lookaside/tiers/serde"
)

// buffers are for encoded pages on their way. There are as many as chunks that are moved at once.
var buffers = sync.Pool{New: func() any { return new([]byte) }}

// fetch is a chunk's first pages on their way from a server. It is used by one goroutine at a time.
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

// begin takes the object's header. It returns where the beginning of the encoded pages is to be read to.
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
		// Somebody else's. Anything that gives the bytes back will do; the rest is for others.
		if f.codec, err = serde.New(h.codec); err != nil || f.codec.Lossy() {
			return nil, tiers.ErrNotFound
		}
	}
	f.h = h
	if _, raw := f.codec.(serde.Raw); raw {
		for i := range n {
			if h.length(i) != h.pageBytes {
				return nil, fmt.Errorf("%w: page of %d bytes, encoded raw to %d", tiers.ErrCorrupt, h.pageBytes, h.length(i))
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

// end takes the outcome of reading what begin returned, or the error for which it was not read.
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

// put is a chunk on its way to a server. It is used by one goroutine at a time.
type put struct {
	tier *Tier
	name name
	run  tiers.Run
	src  []byte
	done func(error)

	buffer *[]byte
}

// begin encodes the chunk for parts of a size. What it returns is valid until end.
func (p *put) begin(partBytes int64) (head, stream []byte, err error) {
	g, n := p.run.Space.Geometry, p.run.Pages()
	codec := p.tier.codec
	lengths, sums := make([]int64, n), make([]uint64, n)
	_, raw := codec.(serde.Raw)
	stream = p.src
	var scratch []byte
	if !raw {
		p.buffer = buffers.Get().(*[]byte)
		stream = (*p.buffer)[:0]
		if most := int64(n) * serde.Bound(g.PageBytes); int64(cap(stream)) < most {
			stream = make([]byte, 0, most)
		}
		if codec.Lossy() {
			scratch = make([]byte, g.PageBytes)
		}
	}
	for i := range n {
		page := p.src[int64(i)*g.PageBytes : int64(i+1)*g.PageBytes]
		lengths[i] = g.PageBytes
		if !raw {
			at := len(stream)
			if stream, err = codec.Encode(stream, page, p.run.Space.Element); err != nil {
				return nil, nil, err
			}
			if lengths[i] = int64(len(stream) - at); lengths[i] < 1 || lengths[i] > serde.Bound(g.PageBytes) {
				return nil, nil, errors.New("remote: " + codec.Name() + " keeps no bounds")
			}
			if codec.Lossy() {
				if err := codec.Decode(scratch, stream[at:], p.run.Space.Element); err != nil {
					return nil, nil, err
				}
				page = scratch
			}
		}
		sums[i] = sumOf(page, p.run.Hashes[i*g.DigestBytes:(i+1)*g.DigestBytes])
	}
	if p.buffer != nil {
		*p.buffer = stream
	}
	return appendHeader(nil, p.run, codec.Name(), partBytes, lengths, sums), stream, nil
}

// end takes the outcome.
func (p *put) end(err error) {
	if p.buffer != nil {
		buffers.Put(p.buffer)
		p.buffer = nil
	}
	p.done(err)
}

// inParallel calls do for 0 … n-1 from up to workers goroutines and returns when all have.
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
