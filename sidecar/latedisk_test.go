package sidecar

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"

	"lookaside/sidecar/settings"
	"lookaside/tiers"
)

// pointTo makes dir a link to target in one step. What tries dir all the time finds the old target
// or the new one, and never a free name, where it would make a directory of its own.
func pointTo(t *testing.T, dir, target string) {
	t.Helper()
	link := dir + ".new"
	if err := errors.Join(os.Symlink(target, link), os.Rename(link, dir)); err != nil {
		t.Fatal(err)
	}
}

// brokenDir makes a path in which nothing can be made, and returns what mends it. A link that leads
// nowhere stands in for a disk that is not mounted: root may do everything else.
func brokenDir(t *testing.T, dir string) (mend func()) {
	t.Helper()
	pointTo(t, dir, filepath.Join(t.TempDir(), "not", "mounted"))
	return func() {
		t.Helper()
		pointTo(t, dir, t.TempDir())
	}
}

func lateAtOnce(t *testing.T) {
	was := lateFirst
	lateFirst = 5 * time.Millisecond
	t.Cleanup(func() { lateFirst = was })
}

// A disk that fails at the start is a tier that is down: the sidecar serves without it, says so,
// and uses it once it is there.
func TestADiskThatFailsAtTheStart(t *testing.T) {
	lateAtOnce(t)
	dir := filepath.Join(t.TempDir(), "kv")
	mend := brokenDir(t, dir)
	d, log := startDaemon(t, withDisk(t, dir, ""))
	if text := log.String(); !strings.Contains(text, "a disk cannot be used now") ||
		!strings.Contains(text, dir) || strings.Contains(text, "a disk is there") {
		t.Errorf("the log:\n%s", text)
	}
	const pages = 42
	b := storedPrefix(t, d, pages)
	b.hits(t) // from the arena
	b.cancel(t)
	until(t, func() any { return d.operations.Tiers()[0] },
		func() bool { return d.operations.Tiers()[0].StoreFailures > 0 })
	st := d.operations.Tiers()[0]
	if st.State != "down" || !strings.Contains(st.Error, "no such file") ||
		st.Kind != settings.TierDisk ||
		!st.Local || st.CapacityBytes != 0 || !strings.Contains(st.Detail, dir) ||
		st.StoreFailures == 0 {
		t.Errorf("%+v", st)
	}
	var table bytes.Buffer
	if err := d.Status().WriteTable(&table); err != nil ||
		!strings.Contains(table.String(), "OFF") {
		t.Errorf("%v: %s", err, &table)
	}
	mend()
	until(t, func() any { return d.operations.Tiers()[0] },
		func() bool { return d.operations.Tiers()[0].CapacityBytes == 8<<20 })
	until(t, func() any { return log.String() }, func() bool {
		return strings.Contains(log.String(),
			"a disk is there")
	})
	if n := strings.Count(log.String(), "cannot be used now"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log)
	}
	until(t, func() any { return d.operations.Tiers()[0] }, func() bool {
		// the breaker tries, and what is stored then goes down
		if _, err := d.stack.Clear(t.Context(), tiers.Fingerprint{}, "arena"); err != nil {
			t.Fatal(err)
		}
		if err := b.Store(); err != nil {
			t.Fatal(err)
		}
		return d.operations.Tiers()[0].StoredChunks > 0
	})
	until(t, func() any { return d.operations.Tiers()[0] },
		func() bool { return !strings.Contains(d.operations.Tiers()[0].Detail, "missing") })
}

// One of two disks fails at the start: the tier is there with the other, and gets the rest of its
// room later.
func TestOneDiskOfTwoFailsAtTheStart(t *testing.T) {
	lateAtOnce(t)
	good, bad := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	mend := brokenDir(t, bad)
	two := withDisk(t, good, "")
	d, _ := startDaemon(t, func(c *settings.Config) {
		two(c)
		c.Tiers[0].Disk.Paths = []string{good, bad}
	})
	const pages = 42
	b := storedPrefix(t, d, pages)
	untilTierHas(t, d, 0, pages)
	if st := d.operations.Tiers()[0]; st.CapacityBytes != 4<<20 || st.State != "closed" ||
		!strings.Contains(st.Detail, "missing, and tried again") ||
		!strings.Contains(st.Detail, bad) {
		t.Errorf("%+v", st)
	}
	b.Close()
	mend()
	until(t, func() any { return d.operations.Tiers()[0] },
		func() bool { return !strings.Contains(d.operations.Tiers()[0].Detail, "missing") })
	if st := d.operations.Tiers()[0]; st.Pages != pages || st.CapacityBytes != 8<<20 {
		t.Errorf("%+v", st)
	}
}

// What is wrong with the settings is an error at the start, as it was.
func TestWrongDiskSettingsAreErrors(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	locked := filepath.Join(t.TempDir(), "kv")
	startDaemon(t, withDisk(t, locked, ""))
	for dir, want := range map[string]string{file: "not a directory",
		file + "/kv": "not a directory", locked: "locked by process"} {
		c := settings.Defaults()
		withDisk(t, dir, "")(&c)
		open, err := openTiers(c, nil, nil, nil, zap.NewNop())
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", dir, err, want)
		}
		if err := closeTiers(open); err != nil {
			t.Error(err)
		}
	}
	c := settings.Defaults()
	withTiers(t, "--disk="+filepath.Join(t.TempDir(), "kv")+":1000T")(&c)
	if _, err := openTiers(c, nil, nil, nil, zap.NewNop()); err == nil ||
		!strings.Contains(err.Error(), "capacity") {
		t.Errorf("more than there is: %v", err)
	}
}

// What was cleared while the disk was not there is not found when it is.
func TestClearedWhileADiskIsMissing(t *testing.T) {
	lateAtOnce(t)
	dir, disk := filepath.Join(t.TempDir(), "kv"), t.TempDir()
	pointTo(t, dir, disk)
	d, _ := startDaemon(t, withDisk(t, dir, ""))
	const pages = 40
	storedPrefix(t, d, pages).Close()
	untilTierHas(t, d, 0, pages)
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	for _, clear := range []bool{false, true} {
		brokenDir(t, dir)
		c := settings.Defaults()
		withDisk(t, dir, "")(&c)
		open, err := openTiers(c, nil, nil, nil, zap.NewNop())
		if err != nil {
			t.Fatal(err)
		}
		tier := open[0].Tier
		if err := tier.Contains(t.Context(), tiers.Run{}, nil); !errors.Is(err, syscall.EIO) {
			t.Errorf("Contains: %v", err)
		}
		if clear {
			if _, err := tier.Clear(t.Context(), tiers.Fingerprint{}); !errors.Is(err,
				syscall.EIO) {
				t.Errorf("Clear: %v", err)
			}
		}
		pointTo(t, dir, disk)
		until(t, func() any { return tier.Stats() },
			func() bool { return tier.Stats().CapacityBytes > 0 })
		if st := tier.Stats(); (st.Pages == 0) != clear {
			t.Errorf("cleared: %v; %+v", clear, st)
		}
		if err := closeTiers(open); err != nil {
			t.Error(err)
		}
	}
}
