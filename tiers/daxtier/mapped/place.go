package mapped

import (
	"io/fs"
	"path"

	"lookaside/dax"
)

// End is how many bytes a partition must have room for, in the sense of Capacity, so that a file in
// it can stay where it is.
func (f *FS) End(name string) (int64, error) {
	v, base, err := f.lookup("stat", name)
	if err != nil {
		return 0, err
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	i := v.head.find(base)
	if i < 0 {
		return 0, &fs.PathError{Op: "stat", Path: path.Clean(name), Err: fs.ErrNotExist}
	}
	e := &v.head.files[i]
	return max(e.at+e.capacity-headBytes, 0), nil
}

// Piece is where a file lies: in so many bytes of its device's from byte At on.
type Piece struct {
	Device    *dax.Device
	At, Bytes int64
}

// Piece answers where a file lies. It stays there until it is removed, or made longer.
func (f *FS) Piece(name string) (Piece, error) {
	v, base, err := f.lookup("stat", name)
	if err != nil {
		return Piece{}, err
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	i := v.head.find(base)
	if i < 0 {
		return Piece{}, &fs.PathError{Op: "stat", Path: path.Clean(name), Err: fs.ErrNotExist}
	}
	return Piece{Device: v.dev, At: v.head.files[i].at, Bytes: v.head.files[i].capacity}, nil
}

// Hole is the longest piece that a new file in a partition can get.
func (f *FS) Hole(dir string) (longest int64, err error) {
	v, _, err := f.lookup("statfs", dir)
	if err != nil {
		return 0, err
	}
	v.meta.Lock()
	defer v.meta.Unlock()
	v.holes(v.head, func(_, n int64) bool {
		longest = max(longest, n)
		return true
	})
	return longest, nil
}

// ResizeDir is Resize to a size in the sense of Capacity.
func (f *FS) ResizeDir(dir string, bytes int64) error { return f.Resize(dir, bytes+headBytes) }
