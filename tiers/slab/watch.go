package slab

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"

	"go.uber.org/zap"

	"lookaside/tiers/vfs"
)

// errRemoved is why a slab is given up whose file was removed or replaced. The store could go on
// with the open file. But a restart would not find its chunks, and its room on the disk would stay
// taken.
var errRemoved = errors.New("another process removed or replaced its file")

// watch checks that the slabs' files and the directories' locks are still those that the store has
// open. A tier gives up slabs whose files are gone, and makes them anew. An arena keeps them,
// because they are in use where they are mapped. It logs that their chunks will not survive.
func (d *Disk) watch() {
	if d.arena != nil {
		d.watchArena()
		return
	}
	dirs, places := d.table()
	held := map[*directory]error{}
	for _, h := range dirs {
		held[h] = d.hold(h)
	}
	_ = d.eachSlab(func(s *slab) error { return errors.Join(held[s.place.home], s.there(d.o.FS)) })
	for _, p := range places {
		err := held[p.home]
		if _, statErr := d.o.FS.Stat(p.name()); errors.Is(statErr, fs.ErrNotExist) {
			err = errors.Join(err, errRemoved)
		}
		if err == nil {
			continue
		}
		d.shape.Lock()
		if p.blank() && !p.gone { // else eachSlab or a healer handles it
			d.off(p, err)
			d.heal(p, nil)
			d.countBlank()
		}
		d.shape.Unlock()
	}
}

func (d *Disk) watchArena() {
	var lost error
	d.regionsMu.RLock()
	for _, s := range d.byRegion {
		if err := s.there(d.o.FS); err != nil {
			lost = fmt.Errorf("%s: %w", s.place.name(), err)
		}
	}
	d.regionsMu.RUnlock()
	if was := d.arena.lost.Swap(&lost); lost != nil && (was == nil || *was == nil) {
		d.log.Error("the arena goes on in a file that is gone: a restart will not find what is in it", zap.Error(lost))
	}
}

// there returns errRemoved unless the slab's name still leads to its open file.
func (s *slab) there(fsys vfs.FS) error {
	if s.file == (vfs.FileID{}) {
		return nil
	}
	info, err := fsys.Stat(s.place.name())
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.ID != s.file {
		return errRemoved
	}
	return nil // an error of the medium is left to reads and writes
}

// setLock sets the directory's lock.
func (h *directory) setLock(fsys vfs.FS, l io.Closer) {
	h.lock, h.lockFile = l, vfs.FileID{}
	if info, err := fsys.Stat(path.Join(h.path, LockName)); err == nil {
		h.lockFile = info.ID
	}
}

// unlock releases the directory.
func (h *directory) unlock() error {
	h.lockMu.Lock()
	defer h.lockMu.Unlock()
	h.lockFile = vfs.FileID{}
	return h.lock.Close()
}

// hold retakes the directory's lock if its file was removed. It returns a *vfs.LockedError if
// another process took it first: the directory is then no longer ours.
func (d *Disk) hold(h *directory) error {
	h.lockMu.Lock()
	defer h.lockMu.Unlock()
	if h.lockFile == (vfs.FileID{}) {
		return nil
	}
	name := path.Join(h.path, LockName)
	info, err := d.o.FS.Stat(name)
	switch {
	case err == nil && info.ID == h.lockFile:
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := d.o.FS.MkdirAll(h.path); err != nil {
		return err
	}
	l, err := d.o.FS.Lock(name)
	if err != nil {
		return fmt.Errorf("the lock was removed: %w", err)
	}
	old := h.lock
	h.setLock(d.o.FS, l)
	d.log.Warn("another process removed the lock of a directory; it is taken again",
		zap.String("directory", h.path))
	return old.Close()
}
