package directory

import (
	"os"
	"testing"

	"go.uber.org/zap"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/tiertest"
)

// someDirectory returns a directory's file with two regions, pieces of two geometries and chunks in
// them, and its machine.
func someDirectory(t testing.TB) ([]byte, *machine) {
	m := newMachine(t, small, tiers.Geometry{PageBytes: 512, PagesPerChunk: 2, PageTokens: 16,
		DigestBytes: 16})
	p := m.start(engine.Config{}, nil)
	p.addRegion(16 << 10)
	p.addRegion(8 << 10)
	for i := range m.spaces {
		p.store(i, tiertest.Prefix("some of this prefix"), 0, 11)
	}
	p.keepAll()
	p.close()
	b, err := os.ReadFile(m.path)
	if err != nil {
		t.Fatal(err)
	}
	return b, m
}

// FuzzHeader: any bytes decode to a header that this program may have written, or to an error.
func FuzzHeader(f *testing.F) {
	b, _ := someDirectory(f)
	f.Add(b[:headerBytes], false)
	f.Add(b[headerBytes:regionsAt], false)
	f.Add(b[headerBytes:regionsAt], true)
	f.Add([]byte{}, false)
	f.Fuzz(func(t *testing.T, block []byte, sealed bool) {
		if sealed && len(block) >= headerBytes { // as another program's would be
			block = append([]byte(nil), block[:headerBytes]...)
			headerForm.Begin(block)
			headerForm.Seal(block)
		}
		for _, b := range [][]byte{block, append(make([]byte, headerBytes), block...)} {
			h, err := decodeHeader(b)
			if err != nil {
				continue
			}
			again, err := decodeHeader(append(make([]byte, headerOffset(h.epoch)), h.encode()...))
			if err != nil || again != h {
				t.Fatalf("%+v, then %+v: %v", h, again, err)
			}
		}
	})
}

// fits checks that what was decoded lies in a file of this size.
func fits(t *testing.T, c *contents, size int64) {
	t.Helper()
	for i, r := range c.regions {
		if r == nil {
			continue
		}
		if r.SizeBytes <= 0 || r.at < entriesAt || r.at+r.SizeBytes > size || r.ID >= maxRegion {
			t.Fatalf("%+v in a file of %d bytes", r, size)
		}
		for _, o := range c.regions[:i] {
			if o != nil && (o.ID == r.ID || o.at < r.at+r.SizeBytes && r.at < o.at+o.SizeBytes) {
				t.Fatalf("%+v and %+v", o, r)
			}
		}
	}
	for _, p := range c.pieces {
		if p == nil {
			continue
		}
		var of *regionRecord
		for _, r := range c.regions {
			if r != nil && r.ID == p.Region {
				of = r
			}
		}
		l, err := p.layout()
		if err != nil || of == nil {
			t.Fatalf("%+v in %+v: %v", p, of, err)
		}
		from, n, ok := p.entries(l.EntryBytes, of.SizeBytes)
		if !ok || from < p.Offset || from+n > p.Offset+int64(p.Slots)*p.Stride ||
			p.Offset+int64(p.Slots)*p.Stride > of.SizeBytes {
			t.Fatalf("%+v: entries at %d, %d bytes", p, from, n)
		}
	}
}

// FuzzRecords: any tables decode to something that fits, or to an error. Their checksums are right,
// as another program's are: a random one is nearly never.
func FuzzRecords(f *testing.F) {
	b, _ := someDirectory(f)
	f.Add(b[regionsAt:regionsAt+2*recordBytes], b[piecesAt:piecesAt+3*recordBytes], int64(len(b)))
	f.Fuzz(func(t *testing.T, regions, pieces []byte, size int64) {
		c, err := decode(withRecords(b, regions, pieces), size)
		if err == nil {
			fits(t, c, size)
		}
	})
}

// withRecords returns a directory's first bytes with these records, sealed.
func withRecords(b, regions, pieces []byte) []byte {
	h, err := decodeHeader(b)
	if err != nil {
		panic(err)
	}
	b = append([]byte(nil), b[:entriesAt]...)
	copy(b[regionsAt:piecesAt], regions)
	copy(b[piecesAt:piecesAt+records*recordBytes], pieces)
	for at := int64(regionsAt); at < piecesAt+records*recordBytes; at += recordBytes {
		if rec := b[at : at+recordBytes]; [16]byte(rec[8:24]) != [16]byte{} {
			seal(rec, h.store, at)
		}
	}
	return b
}

// FuzzOpen: whatever a directory's file has, the next process starts, finds something or nothing,
// and works.
func FuzzOpen(f *testing.F) {
	b, m := someDirectory(f)
	f.Add([]byte{}, b[piecesAt:piecesAt+3*recordBytes], 0, []byte{1})
	f.Add([]byte{}, []byte{}, entriesAt+5, []byte("garbage in an entry"))
	f.Add(b[regionsAt:regionsAt+2*recordBytes], []byte{}, 17, []byte{0xff})
	f.Fuzz(func(t *testing.T, regions, pieces []byte, at int, over []byte) {
		file := append([]byte(nil), b...)
		if len(regions)+len(pieces) > 0 {
			if len(regions) == 0 {
				regions = b[regionsAt:piecesAt]
			}
			copy(file, withRecords(b, regions, pieces))
		}
		if at >= 0 && at < len(file) {
			copy(file[at:], over)
		}
		n := *m
		n.t = t
		n.path = t.TempDir() + "/directory"
		n.memory = map[uint32][]byte{}
		if err := os.WriteFile(n.path, file, 0o600); err != nil {
			t.Fatal(err)
		}
		d, err := Open(n.options(func(o *Options) { o.Log = zap.NewNop() }))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range d.Regions() {
			if r.SizeBytes > 1<<20 { // there is no such memory
				if err := d.Drop(r.ID); err != nil {
					t.Fatal(err)
				}
				continue
			}
			n.memory[r.ID] = append(m.memory[r.ID], make([]byte, 1<<20)...)[:r.SizeBytes]
		}
		p, err := n.tryStart(d, engine.Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer p.close()
		for i := range n.spaces {
			p.verifyAll(i, tiertest.Prefix("some of this prefix"))
			p.readable(i, tiertest.Prefix("some of this prefix"))
		}
		if err := p.e.Check(); err != nil {
			t.Fatal(err)
		}
	})
}
