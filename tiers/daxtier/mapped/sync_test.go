package mapped

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"lookaside/dax/memcopy"
	"lookaside/tiers/vfs"
)

// medium stands in for what is below a regular file: a sync copies what the mapping has at that
// moment, and it is on the medium when the sync returns.
type medium struct {
	mu    sync.Mutex
	bytes []byte
}

// below puts a medium under a file system with one partition.
func below(f *FS, dir string) *medium {
	v := f.volumes[dir]
	m := &medium{bytes: make([]byte, v.dev.Size())}
	v.persist = func(off, n int64) error {
		b := make([]byte, n)
		memcopy.Copy(b, v.dev.Bytes()[off:off+n])
		for range 3 { // others go on between what is read and its being written
			runtime.Gosched()
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		copy(m.bytes[off:], b)
		return nil
	}
	return m
}

func (m *medium) has(at int64, p []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes.Equal(m.bytes[at:at+int64(len(p))], p)
}

// Several write to a file and sync it, all at once. Whatever a sync of another was doing, what
// somebody wrote is on the medium when his own sync returns.
func TestSyncedIsOnTheMedium(t *testing.T) {
	t.Parallel()
	const (
		writers = 4
		page    = memcopy.PieceBytes
		each    = 4 * page // others have turns between two pieces
		rounds  = 60
	)
	dir := filepath.Join(t.TempDir(), "dev")
	v := mounted(t, dir, 8*mib)
	m := below(v, dir)
	f := open(t, v, dir+"/f", vfs.Create)
	ok(t, f.Allocate(0, writers*each))
	piece, err := v.Piece(dir + "/f")
	ok(t, err)
	var missing atomic.Int64
	var running sync.WaitGroup
	for w := range int64(writers) {
		running.Go(func() {
			rnd := rand.New(rand.NewPCG(1, uint64(w)))
			p := make([]byte, each)
			seeds, sums := make([]uint64, each/page), make([]uint64, each/page)
			for round := range rounds {
				for i := range p {
					p[i] = byte(rnd.Uint32())
				}
				var err error
				if round%2 == 0 {
					_, err = f.WriteAt(p, w*each)
				} else {
					err = f.(vfs.Summing).WriteSums(p, w*each, seeds, sums)
				}
				runtime.Gosched() // a sync of another may take what this one has written
				if err = errors.Join(err, f.Datasync()); err != nil {
					t.Error(err)
					return
				}
				if !m.has(piece.At+w*each, p) {
					missing.Add(1)
				}
			}
		})
	}
	running.Wait()
	if n := missing.Load(); n > 0 {
		t.Errorf("after %d of %d syncs the medium does not have what was written before", n,
			writers*rounds)
	}
}

// A sync that fails leaves everything in doubt that was written before it: no later sync of the
// file succeeds, and none of another file that was written to before. A file that is made anew
// works.
func TestFailedSync(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "dev")
	v := mounted(t, dir, mib)
	f, g := open(t, v, dir+"/f", vfs.Create), open(t, v, dir+"/g", vfs.Create)
	write(t, f, 0, "one")
	write(t, g, 0, "two")
	real := v.volumes[dir].persist
	v.volumes[dir].persist = func(int64, int64) error { return syscall.EIO }
	is(t, f.Datasync(), syscall.EIO)
	v.volumes[dir].persist = real
	is(t, f.Datasync(), syscall.EIO)
	is(t, g.Datasync(), syscall.EIO)
	write(t, f, 0, "three")
	is(t, f.Datasync(), syscall.EIO)
	ok(t, v.Remove(dir+"/f"))
	h := open(t, v, dir+"/f", vfs.Create)
	write(t, h, 0, "four")
	ok(t, h.Datasync())
}
