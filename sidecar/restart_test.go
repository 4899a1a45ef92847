package sidecar

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"lookaside/dax"
	"lookaside/internal/prefixes"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/arena"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
)

// restarts are the settings of sidecars that follow one another in a runtime directory.
func restarts(t *testing.T, edit func(*settings.Config)) func(*settings.Config) {
	dir := filepath.Join(testDir(t), "rank-0")
	return func(c *settings.Config) {
		c.Runtime.Dir, c.Sessions.Share, c.Sessions.JointShare = dir, 1, 1
		c.Arena.Initial = 4 << 20
		if edit != nil {
			edit(c)
		}
	}
}

// startFrom is startDaemon for a sidecar that gets something from the one before.
func startFrom(t *testing.T, edit func(*settings.Config), origin Origin) (*Daemon, *logBuffer,
	error) {
	t.Helper()
	c := settings.Defaults()
	c.Arena.Kind, c.Arena.Limit = dax.KindMemfd, 8<<20
	edit(&c)
	c, err := c.Complete(nil)
	if err != nil {
		t.Fatal(err)
	}
	log := new(logBuffer)
	d, err := Start(context.Background(), c, NewLogger(c.Log, log), origin)
	if err != nil {
		return nil, log, err
	}
	t.Cleanup(func() {
		d.cfg.Lifecycle.Drain = 0
		if err := d.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return d, log, nil
}

func mustStart(t *testing.T, edit func(*settings.Config), origin Origin) (*Daemon, *logBuffer) {
	t.Helper()
	d, log, err := startFrom(t, edit, origin)
	if err != nil {
		t.Fatal(err)
	}
	return d, log
}

// state is the status of the arena.
func state(d *Daemon) arena.Status {
	st := d.engine.Stats()
	return d.arena.Status(&st)
}

// untilAllKept waits until all that was committed would be found.
func untilAllKept(t *testing.T, d *Daemon) {
	t.Helper()
	until(t, func() any { return state(d) }, func() bool {
		return state(d).Waiting == 0 && state(d).Kept == d.engine.Stats().ReadySlots
	})
}

// memoryOf returns descriptors of the arena's memory, as others hold them.
func memoryOf(t *testing.T, d *Daemon) (fds []int) {
	t.Helper()
	all, err := d.arena.Handover()
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range all {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		fds = append(fds, own)
	}
	return fds
}

// TestAnArenaInMemoryOutlivesItsSidecar: what was committed hits again after a crash and after an
// orderly end, with the same bytes, in memory of each kind that somebody else holds meanwhile.
func TestAnArenaInMemoryOutlivesItsSidecar(t *testing.T) {
	const pages = 42 // the last chunk is half full
	for _, kind := range []dax.Kind{dax.KindMemfd, dax.KindTHP, dax.KindHugetlb, dax.KindFile} {
		t.Run(string(kind), func(t *testing.T) {
			if _, _, err := dax.Choose(kind, 8<<20); err != nil {
				t.Skip(err)
			}
			files := t.TempDir()
			edit := restarts(t, func(c *settings.Config) {
				if c.Arena.Kind = kind; kind == dax.KindFile {
					c.Arena.Path = files
				}
			})
			d, _ := mustStart(t, edit, Origin{})
			if st := state(d); st.State != arena.Ready || st.Found.Why == "" ||
				len(st.Regions) != 1 {
				t.Errorf("%+v", st)
			}
			b := storedPrefix(t, d, pages)
			untilAllKept(t, d)
			for round, end := range []func(*Daemon){
				func(d *Daemon) { crash(t, d) },
				func(d *Daemon) {
					if err := d.Shutdown(context.Background()); err != nil {
						t.Fatal(err)
					}
				},
			} {
				b.Close()
				fds, was, generation := []int(nil), state(d), d.generation
				if kind != dax.KindFile {
					fds = memoryOf(t, d)
				}
				end(d)
				d, _ = mustStart(t, edit, Origin{Inherited: fds})
				st := state(d)
				if d.generation != generation+1 || st.State != arena.Ready ||
					st.Found.Chunks != 11 || st.Found.Regions != 1 || st.Found.Why != "" ||
					st.Reuse.Waiting || st.Kept != 11 || !slices.Equal(st.Regions, was.Regions) ||
					st.CapacityBytes != was.CapacityBytes {
					t.Errorf("round %d: generation %d after %d, %+v, was %+v", round, d.generation,
						generation, st, was)
				}
				b = newPrefix(t, d, pages)
				b.hits(t)
				b.cancel(t)
				if n := d.engine.Stats(); n.Verified != 11 || n.Unverified != 0 {
					t.Errorf("round %d: %+v", round, n)
				}
				// It can be written to as before.
				o := otherPrefix(t, d, 1+round, 4*pages)
				o.hits(t)
				o.cancel(t)
				o.Close()
				untilAllKept(t, d)
				if _, err := d.stack.Clear(t.Context(), tiers.Fingerprint{}, ""); err != nil {
					t.Fatal(err)
				}
				if err := b.Store(); err != nil {
					t.Fatal(err)
				}
				untilAllKept(t, d)
				if err := d.engine.Check(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// rawWorker is a worker of the shape of the prefixes that does nothing by itself. It gives
// descriptors back.
func rawWorker(dir string, held ...int) (*client.Session, error) {
	return client.Dial(dir, &wire.Hello{Role: wire.RoleWorker, EngineID: "raw", PageTokens: 16,
		PageBytes: 4096, PagesPerChunk: 4, DigestBytes: prefixes.DigestBytes,
		Held: uint32(len(held))}, patience, held...)
}

// A worker that was connected to the sidecar before may still copy, so nothing that was found is
// granted, or dropped for something new, while it has its claim.
func TestNothingIsReusedWhileAWorkerMayCopy(t *testing.T) {
	const pages = 400
	edit := restarts(t, func(c *settings.Config) { c.Arena.Initial = 8 << 20 })
	d, _ := mustStart(t, edit, Origin{})
	b := storedPrefix(t, d, pages)
	untilAllKept(t, d)
	w, err := rawWorker(d.cfg.Runtime.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	claim, err := unix.FcntlInt(w.Claim.Fd(), unix.F_DUPFD_CLOEXEC, 0) // of one that copies
	if err != nil {
		t.Fatal(err)
	}
	b.Close()
	fds := memoryOf(t, d)
	crash(t, d)
	d, log := mustStart(t, edit, Origin{Inherited: fds})
	if st := state(d); !st.Reuse.Waiting || st.State != arena.Ready || st.Found.Chunks != 100 ||
		!slices.Equal(st.Reuse.PIDs, []int{os.Getpid()}) {
		t.Errorf("%+v", st)
	}
	b = newPrefix(t, d, pages)
	b.hits(t)
	b.cancel(t)
	before := bytes.Clone(d.arena.Bytes(0))
	o := namedPrefix(t, d, 1, 4*pages)
	if err := o.Store(); err == nil || !strings.Contains(err.Error(), "found no room") {
		t.Errorf("stored where another worker may copy: %v", err)
	}
	if _, err := o.Lookup(); err == nil || !strings.Contains(err.Error(), "hit 0 of") {
		t.Errorf("stored where another worker may copy: %v", err)
	}
	if !bytes.Equal(before, d.arena.Bytes(0)) {
		t.Error("what was found was written over")
	}
	b.hits(t)
	b.cancel(t)
	unix.Close(claim)
	w.Close()
	until(t, func() any { return state(d) }, func() bool { return !state(d).Reuse.Waiting })
	if err := o.Store(); err != nil {
		t.Fatal(err)
	}
	o.hits(t)
	o.cancel(t)
	if !strings.Contains(log.String(), "written over from now on") {
		t.Errorf("%s", log)
	}
}

// Memory that a sidecar of the host lent to another is not written to while that may read it.
func TestNothingIsReusedWhileItIsLent(t *testing.T) {
	edit := restarts(t, nil)
	d, _ := mustStart(t, edit, Origin{})
	storedPrefix(t, d, 40).Close()
	untilAllKept(t, d)
	fds := memoryOf(t, d)
	lent, err := dax.LockLent(fds[0], 4096, 4096)
	if err != nil {
		t.Fatal(err)
	}
	crash(t, d)
	d, _ = mustStart(t, edit, Origin{Inherited: fds})
	if st := state(d); !st.Reuse.Waiting {
		t.Errorf("%+v", st)
	}
	if err := lent.Close(); err != nil {
		t.Fatal(err)
	}
	until(t, func() any { return state(d) }, func() bool { return !state(d).Reuse.Waiting })
}

// giving returns the outcome of a worker that gives descriptors back to the next sidecar.
func giving(t *testing.T, dir string, held ...int) (wait func() *client.Session) {
	t.Helper()
	serve := func(w *client.Session) { // until it is closed
		for {
			b, files, err := w.Recv(patience)
			if err != nil {
				return
			}
			for _, f := range files {
				f.Close()
			}
			var r wire.RegionAdded
			if r.Decode(b, &wire.DefaultLimits) == nil {
				_ = w.Send(&wire.RegionMapped{Region: r.Region})
			}
		}
	}
	type result struct {
		w   *client.Session
		err error
	}
	done := make(chan result, 1)
	go func() {
		for { // until there is a socket
			w, err := rawWorker(dir, held...)
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ECONNREFUSED) {
				done <- result{w, err}
				if err == nil {
					serve(w)
				}
				return
			}
		}
	}()
	return func() *client.Session {
		r := <-done
		if r.err != nil {
			t.Fatal(r.err)
		}
		t.Cleanup(func() { r.w.Close() })
		return r.w
	}
}

// Workers hold the memory, and give it back when they connect to the next sidecar. It waits for
// them as long as one is left that may.
func TestWorkersGiveMemoryBack(t *testing.T) {
	const pages = 42
	edit := restarts(t, nil)
	d, _ := mustStart(t, edit, Origin{})
	b := storedPrefix(t, d, pages)
	untilAllKept(t, d)
	b.Close()
	w, err := rawWorker(d.cfg.Runtime.Dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	fds := memoryOf(t, d)
	defer closeFDs(fds)
	crash(t, d)
	wait := giving(t, d.cfg.Runtime.Dir, fds...)
	d, log := mustStart(t, edit, Origin{})
	again := wait()
	defer again.Close()
	if st := state(d); st.Found.Chunks != 11 || !st.Reuse.Waiting {
		t.Errorf("%+v\n%s", st, log)
	}
	w.Close() // its claim of the sidecar before
	b = newPrefix(t, d, pages)
	b.hits(t)
	b.cancel(t)
	until(t, func() any { return state(d) }, func() bool { return !state(d).Reuse.Waiting })
	// What comes later is not wanted.
	late, err := rawWorker(d.cfg.Runtime.Dir, fds...)
	if err != nil {
		t.Fatal(err)
	}
	late.Close()
}

func closeFDs(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// foreign returns memory that is not the arena's.
func foreign(t *testing.T, size int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("foreign", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, size)
	}
	if err == nil && seals != 0 {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// What is given back and is not the memory that the directory names is refused, with the reason,
// and the arena starts empty.
func TestForeignMemoryIsRefused(t *testing.T) {
	const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	edit := restarts(t, nil)
	d, _ := mustStart(t, edit, Origin{})
	storedPrefix(t, d, 42).Close()
	untilAllKept(t, d)
	dir := d.cfg.Runtime.Dir
	crash(t, d)
	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	d, log := mustStart(t, edit, Origin{Inherited: []int{foreign(t, 4<<20, seals), null,
		foreign(t, 8<<20, seals), foreign(t, 4<<20, 0)}})
	st := state(d)
	if st.Found.Chunks != 0 || st.Found.Regions != 0 || len(st.Regions) != 1 ||
		st.Found.Why != "no process gave its memory back" || st.State != arena.Ready ||
		st.Regions[0].ID != 1 {
		t.Errorf("%+v", st)
	}
	if n := strings.Count(log.String(), "not memory of this arena"); n != 4 ||
		!strings.Contains(log.String(), "the directory has no region of inode") ||
		!strings.Contains(log.String(), "no process gave its memory back") {
		t.Errorf("%d lines of four:\n%s", n, log)
	}
	b := storedPrefix(t, d, 42)
	b.hits(t)
	b.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, directoryName)); err != nil {
		t.Error(err)
	}
}

// Settings that no longer fit what was left say so, and files that nobody looks for are removed.
func TestOtherSettingsStartEmpty(t *testing.T) {
	files := t.TempDir()
	for name, tc := range map[string]struct {
		before, after func(*settings.Config)
		regions       int
		why           string
	}{
		"another kind": {nil, func(c *settings.Config) {
			c.Arena.Kind, c.Arena.Path = dax.KindFile, files
		}, 0, "arena.kind was memfd, and is file now"},
		"a smaller limit": {nil, func(c *settings.Config) { c.Arena.Limit = 5 << 20 }, 1,
			"arena.limit is 5MiB now, which has no room for 1 of 2 regions"},
		"a file is gone": {
			func(c *settings.Config) { c.Arena.Kind, c.Arena.Path = dax.KindFile, files },
			func(c *settings.Config) {
				c.Arena.Kind, c.Arena.Path = dax.KindFile, files
				if err := os.Remove(filepath.Join(files, "lookaside-region-0000")); err != nil {
					t.Fatal(err)
				}
			}, 1, "no process gave the memory of 1 of 2 regions back"},
	} {
		t.Run(name, func(t *testing.T) {
			first := restarts(t, tc.before)
			d, _ := mustStart(t, first, Origin{})
			var all []*prefixRig
			for n := range 3 { // which makes it grow
				all = append(all, otherPrefix(t, d, n, 400))
			}
			until(t, func() any { return state(d) },
				func() bool { return len(state(d).Regions) == 2 })
			all = append(all, otherPrefix(t, d, 3, 400))
			untilAllKept(t, d)
			for _, b := range all {
				b.Close()
			}
			fds := []int(nil)
			if d.cfg.Arena.Kind != dax.KindFile {
				fds = memoryOf(t, d)
			}
			crash(t, d)
			d, log := mustStart(t, func(c *settings.Config) {
				first(c)
				tc.after(c)
			}, Origin{Inherited: fds})
			if st := state(d); st.Found.Regions != tc.regions || st.Found.Why != tc.why ||
				(st.Found.Chunks > 0) != (tc.regions > 0) || st.State != arena.Ready {
				t.Errorf("%+v", st)
			}
			if !strings.Contains(log.String(), tc.why) {
				t.Errorf("%s", log)
			}
			b := otherPrefix(t, d, 9, 40)
			b.hits(t)
			if err := d.engine.Check(); err != nil {
				t.Error(err)
			}
			have, err := filepath.Glob(filepath.Join(files, "*"))
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			if d.cfg.Arena.Kind == dax.KindFile {
				for _, r := range state(d).Regions {
					want = append(want, filepath.Join(files, fmt.Sprintf("lookaside-region-%04d",
						r.ID)))
				}
			}
			if !slices.Equal(have, want) {
				t.Errorf("files %v, want %v", have, want)
			}
			for _, name := range have {
				os.Remove(name)
			}
		})
	}
}
