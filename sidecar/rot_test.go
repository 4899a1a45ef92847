package sidecar

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"lookaside/internal/prefixes"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
)

// What changes in the arena while the sidecar runs is dropped before the next restart: a hole
// punched into its memory, and a bit that flips.
func TestRotInTheArenaIsFound(t *testing.T) {
	const pages = 40
	for name, start := range map[string]func(*testing.T) (*Daemon, *logBuffer, *prefixRig){
		"memory": func(t *testing.T) (*Daemon, *logBuffer, *prefixRig) {
			d, log := startDaemon(t, func(c *settings.Config) {
				c.Arena.CheckEvery,
					c.Sessions.Share = time.Millisecond, 1
			})
			return d, log, storedPrefix(t, d, pages)
		},
		"DAX": func(t *testing.T) (*Daemon, *logBuffer, *prefixRig) {
			d, log := startDaemon(t, onDAX(t, t.TempDir(), "--arena-check-every=1ms"))
			b := storedOnAll(t, d, pages)
			untilKept(t, d)
			return d, log, b
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, log, b := start(t)
			walks := func(n uint64) {
				t.Helper()
				from := d.Status().Checks.Walks
				until(t, func() any { return d.Status().Checks },
					func() bool { return d.Status().Checks.Walks >= from+n })
			}
			walks(3)
			st := d.Status()
			if st.Checks.Checked < pages/4 || st.Checks.Rotten != 0 {
				t.Fatalf("%+v", st.Checks)
			}
			b.hits(t)
			b.cancel(t)
			page := func(n int) []byte {
				t.Helper()
				want := make([]byte, 4096)
				prefixes.Content(n, want)
				for _, r := range st.Arena.Regions {
					mem := d.arena.Bytes(r.Region)
					if at := bytes.Index(mem, want); at >= 0 {
						return mem[at : at+4096]
					}
				}
				t.Fatalf("page %d is nowhere in the arena", n)
				return nil
			}
			if last := page(pages - 1); name == "memory" {
				if err := unix.Madvise(last, unix.MADV_REMOVE); err != nil {
					t.Fatal(err)
				}
				if !bytes.Equal(last, make([]byte, 4096)) {
					t.Fatal("there is no hole")
				}
			} else {
				last[1000] ^= 4
			}
			page(21)[4095] ^= 1
			until(t, func() any { return d.Status().Checks },
				func() bool { return d.Status().Checks.Rotten == 2 })
			if _, err := b.Lookup(); err == nil || !strings.Contains(err.Error(), "hit 20 of 40") {
				t.Errorf("got %v", err)
			}
			b.cancel(t)
			var table bytes.Buffer
			if err := d.Status().WriteTable(&table); err != nil ||
				!strings.Contains(table.String(), "2 chunks had changed") {
				t.Errorf("%v: %s", err, &table)
			}
			if n := strings.Count(log.String(), "a chunk in the arena is bad"); n != 1 {
				// the next line is allowed some seconds later
				t.Errorf("%d lines in the log:\n%s", n, log)
			}
			if _, err := d.stack.Clear(t.Context(), tiers.Fingerprint{}, ""); err != nil {
				t.Fatal(err)
			}
			if err := b.Store(); err != nil {
				t.Fatal(err)
			}
			walks(3)
			b.hits(t)
			b.cancel(t)
			if c := d.Status().Checks; c.Rotten != 2 {
				t.Errorf("%+v", c)
			}
			if err := d.engine.Check(); err != nil {
				t.Error(err)
			}
			b.Close()
			if err := d.Shutdown(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}
