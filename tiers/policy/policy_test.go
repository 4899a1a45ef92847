package policy

import "testing"

func TestNames(t *testing.T) {
	t.Parallel()
	for _, name := range append(Names(), "") {
		p, err := New(name, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if want := name; want != "" && p.Name() != want {
			t.Errorf("New(%q) makes a %q", name, p.Name())
		}
	}
	if _, err := New("fifo", Options{}); err == nil || err.Error() == "" {
		t.Error("a policy that there is not")
	}
}

// TestPrefixInherits: a prefix is offered when its continuation leaves, with the later of both
// times of use.
func TestPrefixInherits(t *testing.T) {
	t.Parallel()
	p, _ := New("lru", Options{})
	p.Grow(1, 4)
	ref := func(i uint32) uint32 { return 1<<SlotBits | i }
	p.Enter(ref(0), 10, 0, 0)
	p.Enter(ref(1), 11, ref(0), 0) // continues 0
	p.Enter(ref(2), 12, 0, 0)
	p.Offer(ref(1))
	p.Offer(ref(2))
	p.Use(ref(1)) // later than 2
	for _, want := range []uint32{2, 1, 0} {
		got, ok := p.Victim(0)
		if !ok || got != ref(want) {
			t.Fatalf("victim %#x, not %#x", got, ref(want))
		}
		if want == 1 {
			p.Inherit(ref(0), ref(1))
		}
		p.Leave(got, true)
		if want == 1 {
			p.Enter(ref(3), 13, 0, 0)
			p.Offer(ref(3))
			p.Offer(ref(0))
		}
	}
}
