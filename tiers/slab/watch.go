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

// errRemoved is why a slab is given up whose file somebody else has removed or replaced. The store
// could go on with the open file, but nothing in it would be found again, and its room on the disk
// would not be free.
var errRemoved = errors.New("its file was removed or replaced by somebody else")

// watch looks whether the files of the slabs and the locks of the directories are still those that
// the store has open. Slabs of a tier that are not are given up, and made anew by their healers. An
// arena's are in use where they are mapped, and go on, but the operator is told that they will not
// be found again.
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
		if p.blank() && !p.gone { // else eachSlab has seen to it, or a healer is at it
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

// there returns errRemoved if the slab's name stands for another file than the slab's, or for none.
func (s *slab) there(fsys vfs.FS) error {
	if s.file == (vfs.FileID{}) {
		return nil
	}
	info, err := fsys.Stat(s.place.name())
	if errors.Is(err, fs.ErrNotExist) || err == nil && info.ID != s.file {
		return errRemoved
	}
	return nil // an error of the medium is for whoever reads or writes
}

// setLock makes a lock the directory's.
func (h *directory) setLock(fsys vfs.FS, l io.Closer) {
	h.lock, h.lockFile = l, vfs.FileID{}
	if info, err := fsys.Stat(path.Join(h.path, LockName)); err == nil {
		h.lockFile = info.ID
	}
}

// unlock gives up the directory.
func (h *directory) unlock() error {
	h.lockMu.Lock()
	defer h.lockMu.Unlock()
	h.lockFile = vfs.FileID{}
	return h.lock.Close()
}

// hold takes the directory's lock again if somebody has removed its file. The error is a
// *vfs.LockedError if another process was faster: then the directory is no longer ours.
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
	d.log.Warn("the lock of a directory was removed by somebody else; it is taken again",
		zap.String("directory", h.path))
	return old.Close()
}
