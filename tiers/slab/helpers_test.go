package slab

import (
	"errors"
	"path"
	"sync"
	"testing"

	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

var errInjected = errors.New("injected")

// gate holds operations up while it is closed.
type gate struct {
	mu   sync.Mutex
	shut chan struct{} // nil: open
}

func newGate() *gate { return &gate{} }

func (g *gate) wait() {
	g.mu.Lock()
	c := g.shut
	g.mu.Unlock()
	if c != nil {
		<-c
	}
}

func (g *gate) close() (open func()) {
	c := make(chan struct{})
	g.mu.Lock()
	g.shut = c
	g.mu.Unlock()
	return func() {
		g.mu.Lock()
		g.shut = nil
		g.mu.Unlock()
		close(c)
	}
}

// eachEntry calls f for every entry in use, with the slab's file open.
func eachEntry(t testing.TB, fsys vfs.FS, dirs []string, f func(file vfs.File, h *media.Header,
	slot int, e *media.Entry)) {
	t.Helper()
	for _, dir := range dirs {
		numbers, err := slabNumbers(fsys, dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range numbers {
			file, err := fsys.OpenFile(path.Join(dir, SlabName(n)), 0)
			if err != nil {
				t.Fatal(err)
			}
			h, err := readHeader(file)
			if err == nil && h.Carved() {
				l := &h.Layout
				err = l.Scan(file, h.Identity(), 0, l.Slots, make([]byte, l.ScanBytes(1)),
					func(slot int, st media.State, e *media.Entry) error {
						if st == media.Used {
							f(file, &h, slot, e)
						}
						return nil
					}, nil)
			}
			if err := errors.Join(err, file.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// rot flips a bit in every page.
func rot(t testing.TB, fsys vfs.FS, dirs []string) {
	t.Helper()
	eachEntry(t, fsys, dirs, func(file vfs.File, h *media.Header, slot int, e *media.Entry) {
		var b [1]byte
		size := h.Layout.Geometry.PageBytes
		for i := range int64(e.Pages) {
			at := h.Layout.SlotOffset(slot) + i*size + (i*977+int64(slot)*31)%size
			_, err := file.ReadAt(b[:], at)
			if err == nil {
				b[0] ^= 0x20
				_, err = file.WriteAt(b[:], at)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}
