package peer

import (
	"testing"

	"lookaside/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

func TestBorrow(t *testing.T) {
	dir := peerDir(t)
	a := newSide(t, dir, "a", sideOptions{})
	sp := space("m", 4)
	tokens := stretch(1, 22)
	hashes := prefix(tokens...)
	a.store(sp, hashes[:18*32])
	b := newSide(t, dir, "b", sideOptions{})
	b.learns(sp, hashes, 18)
	loans := b.borrows(sp, hashes, 18)
	check(t, b.verify(loans))
	if st := a.e.Stats(); st.OpenLoans != 1 || st.LeasedSlots != 5 {
		t.Fatalf("%+v", st)
	}
	// It may be given back chunk by chunk.
	b.giveBack(loans[:2], false)
	eventually(t, "two chunks are back", func() bool { return a.e.Stats().LeasedSlots == 3 })
	check(t, b.verify(loans[2:]))
	b.giveBack(loans, false)
	a.noLoans()

	// What comes and goes is heard.
	a.store(sp, hashes)
	b.learns(sp, hashes, 22)
	other := prefix(append(stretch(1, 8), stretch(2, 4)...)...)
	a.store(sp, other)
	b.learns(sp, other, 12)
	a.clear(sp)
	b.learns(sp, hashes, 0)
	if _, pages, err := b.borrow(sp, hashes); pages != 0 || err != nil {
		t.Fatalf("%d pages of what was cleared, %v", pages, err)
	}
	if st := b.p.Status(); st.HintPages != 0 || len(st.Lenders) != 1 || st.Lenders[0].Pages != 0 {
		t.Fatalf("%+v", st)
	}
}
