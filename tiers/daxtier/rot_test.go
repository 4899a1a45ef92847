package daxtier

import (
	"errors"
	"fmt"
	"path"
	"strings"
	"testing"

	"lookaside/tiers/slab/media"
	"lookaside/tiers/vfs"
)

// eachEntry calls f for every entry in use on a pool's devices.
func eachEntry(t testing.TB, p *devices, f func(file vfs.File, h *media.Header, slot int,
	e *media.Entry)) {
	t.Helper()
	fsys := p.fs
	for _, d := range p.o.Devices {
		names, err := fsys.ReadDir(d.Path)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if !strings.HasPrefix(name, "slab-") {
				continue
			}
			file, err := fsys.OpenFile(path.Join(d.Path, name), 0)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 2*media.BlockBytes)
			_, err = file.ReadAt(b, 0)
			var h media.Header
			if err == nil {
				h, err = media.DecodeHeader(b)
			}
			if err == nil && h.Carved() {
				l := &h.Layout
				err = l.Scan(file, h.Identity(), 0, l.Slots, make([]byte, l.ScanBytes(1)),
					func(slot int, st media.State, e *media.Entry) error {
						if st == media.Bad {
							return fmt.Errorf("%s: the entry of slot %d is damaged", name, slot)
						}
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
func rot(t testing.TB, p *devices) {
	t.Helper()
	eachEntry(t, p, func(file vfs.File, h *media.Header, slot int, e *media.Entry) {
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
