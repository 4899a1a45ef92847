package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/sidecar/settings"
)

// DiskTestBytes is what a test of a disk writes and reads.
const DiskTestBytes = 16 << 20

// pieceBytes is one write or read of it, as tiers do them.
const pieceBytes = 1 << 20

// Disk is one directory of a disk tier.
type Disk struct {
	Tier     string // its name
	Path     string
	Used     bool // a sidecar that runs has it
	Capacity int64
	Missing  bool  // it does not exist
	Store    bool  // a store is there: its capacity is taken already
	Err      error // why it cannot be used; nil if it can
	Free     int64 // bytes of the file system; -1 unknown
	Late     bool  // nothing was known in time
	Tested   bool
	Direct   bool    // around the page cache
	Write    float64 // bytes a second, with what it takes to be on the disk
	Read     float64
}

// readDisks looks at the directories of all disk tiers that are configured: of the sidecars that
// run, as far as their settings are known, and of the command's own settings.
func readDisks(o Options, f *Facts) []Disk {
	var all []Disk
	add := func(tiers []settings.TierConfig, used bool) {
		for i := range tiers {
			t := &tiers[i]
			for _, path := range t.Disk.Paths {
				if t.Kind == settings.TierDisk &&
					!slices.ContainsFunc(all, func(d Disk) bool { return d.Path == path }) {
					all = append(all, Disk{Tier: t.Name, Path: path, Used: used, Free: -1,
						Capacity: t.Disk.Capacity / int64(len(t.Disk.Paths))})
				}
			}
		}
	}
	for i := range f.Sidecars {
		if c := f.Sidecars[i].Config; c != nil {
			add(c.Tiers, true)
		}
	}
	add(o.Config.Tiers, false)
	for i := range all {
		d, found := all[i], all[i]
		d.Late = true
		within(o.Timeout, func(string) {}, d.Path, func() func() {
			found.look(o.DiskTest)
			return func() { d = found }
		})
		all[i] = d
	}
	return all
}

// look fills in what is to be known of the directory.
func (d *Disk) look(test bool) {
	at := d.Path
	info, err := os.Stat(at)
	if errors.Is(err, os.ErrNotExist) {
		d.Missing = true
		at = nearest(at)
	} else if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is a file", at)
	}
	if err != nil && !d.Missing {
		d.Err = err
		return
	}
	if err := unix.Access(at, unix.W_OK|unix.X_OK); err != nil {
		d.Err = fmt.Errorf("%s: %w", at, err)
	}
	slabs, _ := filepath.Glob(filepath.Join(d.Path, "slab-*"))
	d.Store = len(slabs) > 0
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err == nil {
		d.Free = int64(st.Bavail) * st.Bsize
	}
	if test && d.Err == nil && !d.Missing && d.Free > 4*DiskTestBytes {
		d.Err = d.test()
		d.Tested = d.Err == nil
	}
}

// nearest returns the nearest directory above a path that exists.
func nearest(path string) string {
	for {
		path = filepath.Dir(path)
		if _, err := os.Stat(path); err == nil || path == "/" {
			return path
		}
	}
}

// test measures the disk with a file that has no name, so that nothing of it is left however this
// process ends.
func (d *Disk) test() error {
	d.Direct = true
	fd, err := unix.Open(d.Path, unix.O_TMPFILE|unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.EINVAL) {
		d.Direct = false
		fd, err = unix.Open(d.Path, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EISDIR) {
		return nil // the file system has no such files: not measured, which is no fault
	}
	if err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	f := os.NewFile(uintptr(fd), d.Path)
	defer f.Close()
	// Go's allocator aligns slices of this size to pages, as direct I/O wants it.
	out, in := make([]byte, pieceBytes), make([]byte, pieceBytes)
	for i := range out {
		out[i] = byte(i*7 + i>>8)
	}
	begin := time.Now()
	for at := int64(0); at < DiskTestBytes; at += pieceBytes {
		if _, err := f.WriteAt(out, at); err != nil {
			return err
		}
	}
	if err := unix.Fdatasync(fd); err != nil {
		return fmt.Errorf("%s: %w", d.Path, err)
	}
	d.Write = DiskTestBytes / time.Since(begin).Seconds()
	if !d.Direct {
		_ = unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED)
	}
	begin = time.Now()
	for at := int64(0); at < DiskTestBytes; at += pieceBytes {
		if _, err := f.ReadAt(in, at); err != nil {
			return err
		}
		if !bytes.Equal(in, out) {
			return fmt.Errorf("%s returns other bytes than were written", d.Path)
		}
	}
	d.Read = DiskTestBytes / time.Since(begin).Seconds()
	return nil
}
