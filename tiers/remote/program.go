package remote

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/zeebo/xxh3"

	"lookaside/tiers"
	"lookaside/tiers/elsewhere"
)

// A chunk is one value of a program: the header of the object, filled up with 0 to a multiple of
// programUnit, and the pages as they are. So the pages are put and got straight from and to the
// arena, and a program may use O_DIRECT. Keys are binary:
//
//	'c', fingerprint of the space, digest of the last page, number of pages (2 bytes, big-endian)
//	'i', fingerprint of the space, digest of the first page
//
// The second is an index record: the names of the chunks that begin with this page, newest first.
// It is written where a chunk may have several pages. It has programUnit bytes:
//
//	 0  "LAIX"
//	 4  number of names, 4 bytes
//	 8  for each: digest of the last page, number of pages (2 bytes)
//	…   0
//	-8  XXH3-64 of everything before it and of the key, 8 bytes
const (
	programUnit = 4096
	chunkKey    = 'c'
	indexKey    = 'i'
	// indexStripes is how many locks the index records share.
	indexStripes = 64
)

var indexMagic = []byte("LAIX")

// ProgramTier is a tier that a program of another process keeps.
type ProgramTier struct {
	*Tier
	// Program is given the arena's regions by the caller (Program.AddRegion). Close closes it.
	Program *elsewhere.Program
}

// OpenProgram returns the tier of a program. It does not wait for the program.
func OpenProgram(o elsewhere.Options) (*ProgramTier, error) {
	p, err := elsewhere.Open(o)
	if err != nil {
		return nil, err
	}
	return &ProgramTier{newTier("program", "", "raw", &programObjects{program: p}), p}, nil
}

// Stats implements tiers.Tier.
func (t *ProgramTier) Stats() tiers.TierStats {
	st, own := t.Program.Stats(), t.Tier.Stats()
	own.CapacityBytes, own.UsedBytes, own.Evictions = st.CapacityBytes, st.UsedBytes, st.Evictions
	own.Down, own.Detail = st.Down, st.Detail
	return own
}

// programObjects keeps objects in a program.
type programObjects struct {
	program *elsewhere.Program
	// stripes are held while index records are read, changed and written.
	stripes [indexStripes]sync.Mutex
}

func programKey(kind byte, space *tiers.Space) []byte {
	b := make([]byte, 0, 1+len(space.Fingerprint)+34)
	return append(append(b, kind), space.Fingerprint[:]...)
}

func keyOfName(n name) []byte {
	b := append(programKey(chunkKey, n.space), n.last...)
	return binary.BigEndian.AppendUint16(b, uint16(n.pages))
}

func keyOfIndex(space *tiers.Space, first string) []byte {
	return append(programKey(indexKey, space), first...)
}

// padded returns the length of a header in a value.
func padded(n name) int {
	h := headerBytes(n.pages, n.space.Geometry.DigestBytes)
	return (h + programUnit - 1) / programUnit * programUnit
}

// has implements objects.
func (p *programObjects) has(ctx context.Context, names []name, there []bool) error {
	keys := make([][]byte, len(names))
	for i, n := range names {
		keys[i] = keyOfName(n)
	}
	return p.program.Contains(ctx, keys, there)
}

// variants implements objects. The index names at most as many as fit a record.
func (p *programObjects) variants(ctx context.Context, runs []tiers.Run,
	look look) ([][]variant, error) {
	out := make([][]variant, len(runs))
	switch look {
	case lookForStore: // the run itself
		names, there := make([]name, len(runs)), make([]bool, len(runs))
		for i, run := range runs {
			names[i] = nameOf(run, run.Pages())
		}
		if err := p.has(ctx, names, there); err != nil {
			return nil, err
		}
		for i := range runs {
			if there[i] {
				out[i] = append(out[i], variant{names[i], true})
			}
		}
	case lookForAll: // what the index has lost may still be found by its name
		for i, run := range runs {
			for pages := 1; pages <= run.Pages(); pages++ {
				out[i] = append(out[i], variant{nameOf(run, pages), false})
			}
		}
	}
	var at []int
	var records []*record
	for i, run := range runs {
		if run.Space.Geometry.PagesPerChunk > 1 {
			at = append(at, i)
			records = append(records, newRecord(run))
		}
	}
	if err := p.readRecords(ctx, records); err != nil {
		return nil, err
	}
	for i, r := range records {
		for _, n := range r.names {
			out[at[i]] = append(out[at[i]], variant{n, false})
		}
	}
	return out, nil
}

// record is an index record.
type record struct {
	space *tiers.Space
	first string // digest
	names []name // newest first
}

func newRecord(run tiers.Run) *record {
	return &record{space: run.Space, first: string(run.Hashes[:run.Space.Geometry.DigestBytes])}
}

// most returns how many names a record may have.
func (r *record) most() int {
	return (programUnit - 8 - sumBytes) / (r.space.Geometry.DigestBytes + 2)
}

func (r *record) sum(b []byte) uint64 {
	h := xxh3.New()
	_, _ = h.Write(b[:programUnit-sumBytes])
	_, _ = h.Write(keyOfIndex(r.space, r.first))
	return h.Sum64()
}

// encode returns the record's bytes.
func (r *record) encode() []byte {
	b := append(make([]byte, 0, programUnit), indexMagic...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.names)))
	for _, n := range r.names {
		b = append(b, n.last...)
		b = binary.LittleEndian.AppendUint16(b, uint16(n.pages))
	}
	b = b[:programUnit]
	binary.LittleEndian.PutUint64(b[programUnit-sumBytes:], r.sum(b))
	return b
}

// decode reads a record. b is not trusted: a record that is not intact has no names.
func (r *record) decode(b []byte) {
	r.names = r.names[:0]
	d := r.space.Geometry.DigestBytes
	if len(b) != programUnit || !bytes.Equal(b[:4], indexMagic) ||
		binary.LittleEndian.Uint64(b[programUnit-sumBytes:]) != r.sum(b) {
		return
	}
	n := binary.LittleEndian.Uint32(b[4:])
	if n > uint32(r.most()) {
		return
	}
	for at := 8; n > 0; n-- {
		e := name{space: r.space, first: r.first, last: string(b[at : at+d]),
			pages: int(binary.LittleEndian.Uint16(b[at+d:]))}
		if e.pages >= 1 && e.pages <= r.space.Geometry.PagesPerChunk {
			r.names = append(r.names, e)
		}
		at += d + 2
	}
}

// change removes some names and then adds others, and returns the names for which there is no room
// any more. changed reports whether the record is another one now.
func (r *record) change(add, remove []name) (lost []name, changed bool) {
	same := func(a, b name) bool { return a.last == b.last && a.pages == b.pages }
	in := func(list []name, n name) bool {
		return slices.ContainsFunc(list, func(o name) bool { return same(o, n) })
	}
	before := r.names
	r.names = nil
	for _, n := range add {
		if !in(r.names, n) {
			r.names = append(r.names, n)
		}
	}
	for _, n := range before {
		if !in(add, n) && !in(remove, n) {
			r.names = append(r.names, n)
		}
	}
	if most := r.most(); len(r.names) > most {
		lost, r.names = slices.Clone(r.names[most:]), r.names[:most]
	}
	return lost, !slices.EqualFunc(before, r.names, same)
}

// readRecords reads index records. One that is missing or damaged has no names.
func (p *programObjects) readRecords(ctx context.Context, records []*record) error {
	if len(records) == 0 {
		return nil
	}
	items := make([]elsewhere.Item, len(records))
	mem := make([]byte, len(records)*programUnit)
	for i, r := range records {
		items[i] = elsewhere.Item{Key: keyOfIndex(r.space, r.first),
			Mem: [][]byte{mem[i*programUnit : (i+1)*programUnit]}}
	}
	var failed error
	p.program.Get(ctx, items, func(i int, err error) {
		switch {
		case err == nil:
			records[i].decode(items[i].Mem[0])
		case !errors.Is(err, tiers.ErrNotFound):
			failed = err
		}
	})
	return failed
}

// reindex changes the index records of chunks that were stored or removed. It removes chunks for
// which a record has no room any more: nobody but who knows their names could find or drop them.
func (p *programObjects) reindex(ctx context.Context, add, remove []name) error {
	type change struct {
		*record
		add, remove []name
	}
	var changes []*change
	of := map[string]*change{}
	each := func(names []name, list func(c *change) *[]name) {
		for _, n := range names {
			if n.space.Geometry.PagesPerChunk == 1 {
				continue
			}
			key := string(keyOfIndex(n.space, n.first))
			c := of[key]
			if c == nil {
				c = &change{record: &record{space: n.space, first: n.first}}
				of[key] = c
				changes = append(changes, c)
			}
			*list(c) = append(*list(c), n)
		}
	}
	each(add, func(c *change) *[]name { return &c.add })
	each(remove, func(c *change) *[]name { return &c.remove })
	if len(changes) == 0 {
		return nil
	}
	var stripes []int
	for key := range of {
		stripes = append(stripes, int(xxh3.HashString(key)%indexStripes))
	}
	slices.Sort(stripes)
	for _, s := range slices.Compact(stripes) {
		p.stripes[s].Lock()
		defer p.stripes[s].Unlock()
	}
	records := make([]*record, len(changes))
	for i, c := range changes {
		records[i] = c.record
	}
	if err := p.readRecords(ctx, records); err != nil {
		return err
	}
	var items []elsewhere.Item
	var lost, empty [][]byte
	for _, c := range changes {
		over, changed := c.change(c.add, c.remove)
		for _, n := range over {
			lost = append(lost, keyOfName(n))
		}
		switch {
		case !changed:
		case len(c.names) == 0:
			empty = append(empty, keyOfIndex(c.space, c.first))
		default:
			items = append(items, elsewhere.Item{Key: keyOfIndex(c.space, c.first),
				Mem: [][]byte{c.encode()}})
		}
	}
	var failed error
	p.program.Put(ctx, items, func(_ int, err error) {
		if err != nil {
			failed = err
		}
	})
	if gone := append(lost, empty...); failed == nil && len(gone) > 0 {
		failed = p.program.Drop(ctx, gone)
	}
	return failed
}

// headers implements objects.
func (p *programObjects) headers(ctx context.Context, names []name,
	each func(i int, b []byte, err error)) {
	items := make([]elsewhere.Item, len(names))
	for i, n := range names {
		items[i] = elsewhere.Item{Key: keyOfName(n), Mem: [][]byte{make([]byte, padded(n))}}
	}
	p.program.Get(ctx, items, func(i int, err error) {
		n := names[i]
		each(i, items[i].Mem[0][:headerBytes(n.pages, n.space.Geometry.DigestBytes)], err)
	})
}

// fetch implements objects.
func (p *programObjects) fetch(ctx context.Context, fetches []*fetch) {
	if len(fetches) == 0 {
		return
	}
	items := make([]elsewhere.Item, len(fetches))
	for i, f := range fetches {
		items[i] = elsewhere.Item{Key: keyOfName(f.name),
			Mem: [][]byte{make([]byte, padded(f.name)), f.dst}}
	}
	p.program.Get(ctx, items, func(i int, err error) {
		f := fetches[i]
		if err == nil {
			// Only now, because header and pages come together.
			h := items[i].Mem[0][:headerBytes(f.name.pages, f.name.space.Geometry.DigestBytes)]
			var dst []byte
			if dst, err = f.begin(h); err == nil && f.buffer != nil {
				err = fmt.Errorf("%w: pages encoded by %q, and %d bytes of them", tiers.ErrCorrupt,
					f.h.codec, len(dst))
			}
		}
		f.end(err)
	})
}

// put implements objects.
func (p *programObjects) put(ctx context.Context, puts []*put) {
	if len(puts) == 0 {
		return
	}
	items, errs := make([]elsewhere.Item, 0, len(puts)), make([]error, len(puts))
	at := make([]int, 0, len(puts))
	for i, w := range puts {
		var src []byte
		if src, errs[i] = w.begin(); errs[i] != nil {
			continue
		}
		h := make([]byte, padded(w.name))
		copy(h, w.header(0))
		at = append(at, i)
		items = append(items, elsewhere.Item{Key: keyOfName(w.name), Mem: [][]byte{h, src}})
	}
	p.program.Put(ctx, items, func(i int, err error) { errs[at[i]] = err })
	var stored []name
	for i, w := range puts {
		if errs[i] == nil {
			stored = append(stored, w.name)
		}
	}
	err := p.reindex(ctx, stored, nil)
	for i, w := range puts {
		if errs[i] == nil {
			errs[i] = err
		}
		w.end(errs[i])
	}
}

// remove implements objects.
func (p *programObjects) remove(ctx context.Context, names []name) error {
	keys := make([][]byte, len(names))
	for i, n := range names {
		keys[i] = keyOfName(n)
	}
	return errors.Join(p.program.Drop(ctx, keys), p.reindex(ctx, nil, names))
}

// clear implements objects.
func (p *programObjects) clear(ctx context.Context, fp tiers.Fingerprint) (int, error) {
	prefix := func(kind byte) []byte {
		if fp == (tiers.Fingerprint{}) {
			return []byte{kind}
		}
		return append([]byte{kind}, fp[:]...)
	}
	n, err := p.program.Clear(ctx, prefix(chunkKey))
	if err == nil {
		_, err = p.program.Clear(ctx, prefix(indexKey))
	}
	return min(n, math.MaxInt32), err
}

// check implements objects.
func (p *programObjects) check(ctx context.Context) error { return p.program.Check(ctx) }

// explain implements objects.
func (p *programObjects) explain(err error) error { return err }

// close implements objects.
func (p *programObjects) close() { _ = p.program.Close() }
