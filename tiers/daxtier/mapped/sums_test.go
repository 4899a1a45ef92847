package mapped

import (
	"bytes"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/zeebo/xxh3"

	"lookaside/dax"
	"lookaside/internal/fakedax"
	"lookaside/tiers/vfs"
)

// The same on a device, where what is written lasts at once, and on a file.
func TestDevices(t *testing.T) {
	t.Parallel()
	device, sysFS := fakedax.New(t)
	for name, o := range map[string]dax.DeviceOptions{
		"device": {Path: device, SysFS: sysFS},
		"file":   {Path: filepath.Join(t.TempDir(), "dev"), SizeBytes: 16 * mib, AllowFile: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := New(nil)
			ok(t, v.Mount("/dax0.0", o))
			t.Cleanup(func() { ok(t, v.Close()) })
			f := open(t, v, "/dax0.0/f", vfs.Create)
			ok(t, f.Allocate(0, 12*mib))
			rnd := rand.New(rand.NewPCG(1, 9))
			arena, err := dax.Create(t.Context(), dax.Options{Kind: dax.KindMemfd,
				SizeBytes: 8 * mib, NUMANode: dax.NoNUMANode})
			ok(t, err)
			t.Cleanup(func() { ok(t, arena.Close()) })
			for _, n := range []int{1, 63, 4096, 100_001, 3 * mib} { // in the common way
				p := arena.Bytes()[:n]
				for i := range p {
					p[i] = byte(rnd.Uint32())
				}
				off := int64(rnd.IntN(mib))
				_, err := f.WriteAt(p, off)
				ok(t, err)
				ok(t, f.Datasync())
				if got := read(t, f, off, n); got != string(p) {
					t.Errorf("%d bytes read back otherwise", n)
				}
			}
			sums := f.(vfs.Summing)
			for _, page := range []int{100, 4096, 5000, 128 << 10, 600 << 10} {
				for _, pages := range []int{1, 4, 7} {
					p := arena.Bytes()[:page*pages]
					for i := range p {
						p[i] = byte(rnd.Uint32())
					}
					want := bytes.Clone(p)
					seeds, wrote, back := make([]uint64, pages), make([]uint64, pages),
						make([]uint64, pages)
					for i := range seeds {
						seeds[i] = rnd.Uint64()
					}
					const off = 3 * 4096
					ok(t, sums.WriteSums(p, off, seeds, wrote))
					ok(t, f.Datasync())
					clear(p)
					ok(t, sums.ReadSums(p, off, seeds, back))
					if !bytes.Equal(p, want) {
						t.Errorf("%d pages of %d bytes read back otherwise", pages, page)
					}
					for i := range pages {
						if sum := xxh3.HashSeed(want[i*page:(i+1)*page],
							seeds[i]); wrote[i] != sum || back[i] != sum {
							t.Errorf("page %d of %d bytes: %x written, %x read, want %x", i, page,
								wrote[i], back[i], sum)
						}
					}
				}
			}
			one := make([]uint64, 1)
			if sums.ReadSums(arena.Bytes()[:4096], 12*mib-100, one, one) == nil ||
				sums.WriteSums(arena.Bytes()[:4096], 12*mib, one, one) == nil ||
				sums.ReadSums(arena.Bytes()[:4095], 0, make([]uint64, 2),
					make([]uint64, 2)) == nil || sums.ReadSums(nil, 0, nil, nil) == nil ||
				sums.ReadSums(arena.Bytes()[:10], -1, one, one) == nil {
				t.Error("moved what cannot be")
			}
			ro := open(t, v, "/dax0.0/f", vfs.ReadOnly)
			if ro.(vfs.Summing).WriteSums(arena.Bytes()[:4096], 0, one, one) == nil {
				t.Error("wrote to what is open for reading only")
			}
			ok(t, v.Unmount("/dax0.0"))
			is(t, sums.ReadSums(arena.Bytes()[:4096], 0, one, one), fs.ErrClosed)
		})
	}
}

func TestSumsCutShort(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dev")
	v := New(nil)
	ok(t, v.Mount("/d", dax.DeviceOptions{Path: path, SizeBytes: 4 * mib, AllowFile: true}))
	defer v.Close()
	f := open(t, v, "/d/f", vfs.Create)
	ok(t, f.Allocate(0, 3*mib))
	ok(t, os.Truncate(path, mib))
	p, n := make([]byte, 2*mib), make([]uint64, 8)
	var bad *vfs.BadPlaceError
	err := f.(vfs.Summing).ReadSums(p, 0, n, n)
	if !errors.As(err, &bad) || !errors.Is(err, syscall.EIO) || !behindCut(bad.Off) &&
		bad.Off%(256<<10) != 0 {
		t.Errorf("%v", err)
	}
	if err := f.(vfs.Summing).WriteSums(p, mib, n, n); !errors.Is(err, syscall.EIO) {
		t.Errorf("%v", err)
	}
}

// Where a file lies, others find it; what they write there is summed in place, and made to last.
func TestResident(t *testing.T) {
	t.Parallel()
	device, sysFS := fakedax.New(t)
	for name, o := range map[string]dax.DeviceOptions{
		"device": {Path: device, SysFS: sysFS},
		"file":   {Path: filepath.Join(t.TempDir(), "dev"), SizeBytes: 16 * mib, AllowFile: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := New(nil)
			ok(t, v.Mount("/dax0.0", o))
			t.Cleanup(func() { ok(t, v.Close()) })
			open(t, v, "/dax0.0/before", vfs.Create)
			f := open(t, v, "/dax0.0/f", vfs.Create)
			ok(t, f.Allocate(0, 5*mib))
			p, err := v.Piece("/dax0.0/f")
			ok(t, err)
			if p.Device != v.Device("/dax0.0") || p.Bytes != 5*mib {
				t.Fatalf("%+v", p)
			}
			mem := p.Device.Bytes()[p.At : p.At+p.Bytes]
			rnd := rand.New(rand.NewPCG(4, 4))
			for i := range mem {
				mem[i] = byte(rnd.Uint32())
			}
			r := f.(vfs.Resident)
			ok(t, r.Persist(4096, 3*mib))
			ok(t, r.Persist(4097, 1))
			const off, page, pages = 8192, 70_000, 30
			seeds, sums := make([]uint64, pages), make([]uint64, pages)
			for i := range seeds {
				seeds[i] = rnd.Uint64()
			}
			ok(t, r.Sums(off, page, seeds, sums))
			for i, sum := range sums {
				if want := xxh3.HashSeed(mem[off+i*page:off+(i+1)*page], seeds[i]); sum != want {
					t.Errorf("page %d has %x, want %x", i, sum, want)
				}
			}
			for what, err := range map[string]error{
				"sums behind the end":    r.Sums(5*mib-page, page, seeds, sums),
				"sums of nothing":        r.Sums(0, page, nil, nil),
				"sums from before":       r.Sums(-1, page, seeds, sums),
				"persisting behind that": r.Persist(5*mib-1, 2),
				"persisting nothing":     r.Persist(0, 0),
			} {
				if err == nil {
					t.Errorf("%s: no error", what)
				}
			}
			if _, err := v.Piece("/dax0.0/none"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a file that is not there lies somewhere: %v", err)
			}
		})
	}
}
