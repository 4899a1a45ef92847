package main

import (
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"lookaside/sidecar/admin"
)

// Fault 47: a sidecar whose monotonic clock is far from its clients', as after a checkpoint that is
// restored elsewhere, or in a container with a time namespace. Nobody compares clocks of two
// processes, and what is on disk is found by a sidecar with another clock.
func TestClocksThatDiffer(t *testing.T) {
	if out, err := exec.Command("unshare", "--time", "--monotonic", "1000",
		"true").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: no time namespace: %v: %s", err, out)
	}
	flags := []string{"--arena-limit", "8M", "--arena-kind", "memfd", "--disk",
		t.TempDir() + ":8M:slab=1M", "--lookup-deadline=1m", "--arena-check-every=10ms"}
	const pages = 10
	for i, ahead := range []string{"8640000", "-60", "0"} {
		// seconds: 100 days; a minute behind; this machine's
		s := serveBy(t, []string{"unshare", "--time", "--monotonic", ahead, "--boottime", ahead,
			binary}, flags...)
		c := commander{t, s.dir}
		lookup := []string{"lookup", "--timeout=1m", "--engine-id=engine"}
		if i > 0 {
			s.worker()
			_, words := hashes(pages)
			c.says(append(lookup, words...), nil, "hit: 10 of 10 pages")
		}
		words := storePages(t, s, pages) // after the first time it is all held
		c.says(append(lookup, words...), nil, "hit: 10 of 10 pages")
		var st admin.Status
		c.says([]string{"status", "--json"}, &st)
		if st.UptimeS < 0 || st.UptimeS > patience.Seconds()*3 || st.Lookups.Expired != 0 ||
			st.State != "serving" || st.Checks.Rotten != 0 {
			t.Errorf("%s s ahead: %+v", ahead, st)
		}
		c.untilStored(pages)
		s.signal(syscall.SIGTERM)
		if code := s.exit(patience); code != 0 || strings.Contains(s.text(), "for as long as") {
			t.Errorf("%s s ahead: exit code %d:\n%s", ahead, code, s.text())
		}
	}
}
