package mapped

import (
	"io/fs"
	"path"

	"lookaside/dax"
)

// End returns the Capacity that a partition must have for a file to stay in place.
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

// Piece is where a file lies on its device.
type Piece struct {
	Device    *dax.Device
	At, Bytes int64
}

// Piece returns where a file lies. It stays there until it is removed or made longer.
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

// Hole returns the largest piece that a new file can get.
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

// ResizeDir resizes a partition to a Capacity.
func (f *FS) ResizeDir(dir string, bytes int64) error { return f.Resize(dir, bytes+headBytes) }
