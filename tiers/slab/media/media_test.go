package media

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"lookaside/tiers"
)

func testHeader(t testing.TB, ppc, digest int, pageBytes, slab int64) Header {
	t.Helper()
	l, err := NewLayout(tiers.Geometry{PageBytes: pageBytes, PagesPerChunk: ppc, PageTokens: 16,
		DigestBytes: digest}, slab)
	if err != nil {
		t.Fatal(err)
	}
	return Header{Store: [16]byte{1, 2, 3}, Index: 7, Bytes: slab, Format: 0xABCDEF, Epoch: 5,
		Stable: 99, Layout: l}
}

func encode(h Header) []byte {
	b := make([]byte, 2*BlockBytes)
	h.Encode(b[HeaderOffset(h.Epoch):])
	return b
}

func TestLayoutFits(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		g := tiers.Geometry{PageBytes: 256 + rnd.Int64N(1<<20), PagesPerChunk: 1 + rnd.IntN(300),
			PageTokens: 16, DigestBytes: 8 << rnd.IntN(3)}
		size := rnd.Int64N(1 << 34)
		l, err := NewLayout(g, size)
		one := int64(directoryAt) + roundUp(g.PageBytes*int64(g.PagesPerChunk), BlockBytes) +
			roundUp(int64(entryHead+g.PagesPerChunk*(g.DigestBytes+8)), BlockBytes)
		if err != nil {
			if size >= one {
				t.Fatalf("%+v in %d: %v", g, size, err)
			}
			continue
		}
		end := l.SlotOffset(l.Slots-1) + l.StrideBytes
		if end > size || l.EntryOffset(l.Slots-1)+int64(l.EntryBytes) > l.DataOffset ||
			l.DataOffset%BlockBytes != 0 || l.StrideBytes%BlockBytes != 0 ||
			int64(g.PagesPerChunk)*g.PageBytes > l.StrideBytes {
			t.Fatalf("%+v in %d: %+v", g, size, l)
		}
		if room := size - end; room > 3*(l.StrideBytes+int64(l.EntryBytes)) &&
			l.Slots < (maxSlots-1)/g.PagesPerChunk {
			t.Fatalf("%+v in %d wastes %d", g, size, room)
		}
	}
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	h := testHeader(t, 16, 32, 4096, 1<<24)
	got, err := DecodeHeader(encode(h))
	if err != nil || got != h {
		t.Fatalf("%+v, %v", got, err)
	}
	bare := Header{Bytes: 1 << 20, Epoch: 2}
	if got, err := DecodeHeader(encode(bare)); err != nil || got != bare || got.Carved() {
		t.Fatalf("%+v, %v", got, err)
	}

	// The higher epoch counts, and the other one if that is torn.
	b := encode(h)
	next := h
	next.Epoch, next.Stable = h.Epoch+1, 200
	next.Encode(b[HeaderOffset(next.Epoch):])
	if got, _ := DecodeHeader(b); got != next {
		t.Fatalf("took epoch %d", got.Epoch)
	}
	b[HeaderOffset(next.Epoch)+700] ^= 1
	if got, _ := DecodeHeader(b); got != h {
		t.Fatalf("took epoch %d", got.Epoch)
	}

	for i := range BlockBytes {
		b := encode(h)
		b[HeaderOffset(h.Epoch)+int64(i)] ^= 0x10
		if _, err := DecodeHeader(b); err == nil {
			t.Fatalf("a flip at byte %d was not noticed", i)
		}
	}
	b = encode(h)
	b[HeaderOffset(h.Epoch)+8] ^= 2 // a flipped bit is damage, not another version
	if _, err := DecodeHeader(b); !errors.Is(err, ErrCorrupt) {
		t.Fatal(err)
	}
	b[HeaderOffset(h.Epoch)+20]++ // what another version writes has its own sum
	if _, err := DecodeHeader(b); !errors.Is(err, ErrVersion) {
		t.Fatal(err)
	}
	if _, err := DecodeHeader(make([]byte, 2*BlockBytes)); !errors.Is(err, ErrBlank) {
		t.Fatal(err)
	}
	// A copy in the other's place was misdirected.
	b = make([]byte, 2*BlockBytes)
	h.Encode(b[BlockBytes-HeaderOffset(h.Epoch):])
	if _, err := DecodeHeader(b); !errors.Is(err, ErrCorrupt) {
		t.Fatal(err)
	}
	for n := range 2 * BlockBytes {
		_, _ = DecodeHeader(b[:n])
	}
}

func testEntry(rnd *rand.Rand, l *Layout) Entry {
	g := l.Geometry
	e := Entry{Generation: rnd.Uint64(), Commit: rnd.Uint64(), Stable: rnd.Uint64(),
		First: rnd.IntN(100) * g.PagesPerChunk, Pages: 1 + rnd.IntN(g.PagesPerChunk)}
	fill := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		return b
	}
	copy(e.Space[:], fill(32))
	copy(e.Tenant[:], fill(16))
	e.Prev = []byte{}
	if e.First > 0 && rnd.IntN(2) == 0 {
		e.Prev = fill(g.DigestBytes)
	}
	e.Digests, e.Sums = fill(e.Pages*g.DigestBytes), fill(e.Pages*8)
	return e
}

func sameEntry(a, b *Entry) bool {
	return a.Generation == b.Generation && a.Commit == b.Commit && a.Stable == b.Stable &&
		a.Space == b.Space && a.First == b.First && a.Pages == b.Pages &&
		bytes.Equal(a.Prev, b.Prev) && bytes.Equal(a.Digests, b.Digests) &&
		bytes.Equal(a.Sums, b.Sums) && a.Tenant == b.Tenant
}

func TestEntries(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		h := testHeader(t, 1+rnd.IntN(40), 8<<rnd.IntN(3), 512, 1<<22)
		l, id := &h.Layout, h.Identity()
		e := testEntry(rnd, l)
		slot := rnd.IntN(l.Slots)
		b := make([]byte, l.EntryBytes)
		l.EncodeEntry(b, id, slot, &e)
		var got Entry
		if st := l.DecodeEntry(b, id, slot, &got); st != Used || !sameEntry(&got, &e) {
			t.Fatalf("state %d: %+v, want %+v", st, got, e)
		}
		if st := l.DecodeEntry(b, id, slot+1, &got); st != Bad {
			t.Fatalf("in another slot: state %d", st)
		}
		other := h
		other.Format++
		if st := l.DecodeEntry(b, other.Identity(), slot, &got); st != Bad {
			t.Fatalf("after another formatting: state %d", st)
		}
		for range 50 {
			i := rnd.IntN(len(b))
			b[i] ^= 4
			if st := l.DecodeEntry(b, id, slot, &got); st != Bad {
				t.Fatalf("with a flip at %d: state %d", i, st)
			}
			b[i] ^= 4
		}
		copy(b, FreeEntry())
		if st := l.DecodeEntry(b, id, slot, &got); st != Free {
			t.Fatalf("freed: state %d", st)
		}
	}
}

// TestPageSums: bytes in another place, of another page or of an earlier filling do not check out.
func TestPageSums(t *testing.T) {
	t.Parallel()
	h := testHeader(t, 16, 32, 4096, 1<<24)
	id := h.Identity()
	other := h
	other.Index++
	digest, page := make([]byte, 32), make([]byte, 4096)
	sum := id.PageSum(digest, 1, page)
	seen := map[uint64]bool{sum: true}
	for _, s := range []uint64{id.PageSum(digest, 2, page), other.Identity().PageSum(digest, 1,
		page), id.PageSum(append(digest[:31:31], 1), 1, page),
		id.PageSum(digest, 1, append(page[:4095:4095], 1))} {
		if seen[s] {
			t.Fatal("two sums are equal")
		}
		seen[s] = true
	}
}

func TestScan(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(5, 6))
	h := testHeader(t, 4, 16, 512, 3<<20)
	l, id := &h.Layout, h.Identity()
	file := make([]byte, l.DataOffset)
	want := map[int]Entry{}
	bad := map[int]bool{}
	for slot := range l.Slots {
		switch rnd.IntN(3) {
		case 0:
			e := testEntry(rnd, l)
			want[slot] = e
			l.EncodeEntry(file[l.EntryOffset(slot):], id, slot, &e)
		case 1:
			bad[slot] = true
			file[l.EntryOffset(slot)+20] = 1
		}
	}
	buf := make([]byte, l.ScanBytes(1))
	next := 0
	err := l.Scan(bytes.NewReader(file), id, 0, l.Slots, buf, func(slot int, st State,
		e *Entry) error {
		if slot != next {
			t.Fatalf("slot %d, want %d", slot, next)
		}
		next++
		w, used := want[slot]
		if used != (st == Used) || bad[slot] != (st == Bad) || used && !sameEntry(e, &w) {
			t.Fatalf("slot %d is in state %d: %+v", slot, st, e)
		}
		return nil
	}, nil)
	if err != nil || next != l.Slots {
		t.Fatal(next, err)
	}
	if err := l.Scan(bytes.NewReader(file[:len(file)-BlockBytes]), id, 0, l.Slots, buf,
		func(int, State, *Entry) error { return nil }, nil); err == nil {
		t.Fatal("a short directory was read whole")
	}
}

// FuzzHeader: no bytes make a header that lays anything out beyond its slab.
func FuzzHeader(f *testing.F) {
	h := testHeader(f, 16, 32, 4096, 1<<24)
	f.Add(encode(h), false)
	f.Add(encode(Header{Bytes: 1 << 20, Epoch: 3}), true)
	f.Add([]byte(headerForm.Magic), false)
	f.Fuzz(func(t *testing.T, b []byte, seal bool) {
		if seal && len(b) >= BlockBytes { // let more than noise through
			headerForm.Begin(b)
			headerForm.Seal(b[:BlockBytes])
		}
		h, err := DecodeHeader(b)
		if err != nil {
			return
		}
		l := h.Layout
		if h.Epoch >= EpochLimit || l.Slots < 0 ||
			h.Carved() && (l.SlotOffset(l.Slots-1)+l.StrideBytes > h.Bytes ||
				l.Slots*l.Geometry.PagesPerChunk >= maxSlots) {
			t.Fatalf("%+v", h)
		}
		again, err := DecodeHeader(encode(h))
		if err != nil || again != h {
			t.Fatalf("%+v, then %+v, %v", h, again, err)
		}
	})
}

// FuzzEntry: no bytes make an entry that is not one of its slot.
func FuzzEntry(f *testing.F) {
	h := testHeader(f, 16, 32, 4096, 1<<24)
	l, id := &h.Layout, h.Identity()
	e := testEntry(rand.New(rand.NewPCG(7, 8)), l)
	b := make([]byte, l.EntryBytes)
	l.EncodeEntry(b, id, 3, &e)
	f.Add(b, 3, false)
	f.Add(b, 4, true)
	f.Add(make([]byte, l.EntryBytes), 0, false)
	f.Fuzz(func(t *testing.T, b []byte, slot int, seal bool) {
		if seal && len(b) >= l.EntryBytes {
			sealEntry(l, id, slot, b)
		}
		var e Entry
		if l.DecodeEntry(b, id, slot, &e) != Used {
			return
		}
		g := l.Geometry
		if e.Pages < 1 || e.Pages > g.PagesPerChunk || e.First%g.PagesPerChunk != 0 ||
			len(e.Digests) != e.Pages*g.DigestBytes || len(e.Sums) != 8*e.Pages ||
			len(e.Prev) != 0 && len(e.Prev) != g.DigestBytes {
			t.Fatalf("%+v", e)
		}
		for i := range e.Pages {
			e.Sum(i)
		}
	})
}
