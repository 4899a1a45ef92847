package sidecar

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
	"lookaside/tiers/daxtier"
)

// withDAX gives a sidecar a small tier on two files that stand in for devices; more are further
// keys, as on the command line.
func withDAX(t *testing.T, dir, more string) func(*settings.Config) {
	t.Helper()
	return withTiers(t, fmt.Sprintf("--dax=%s,%s:4M:slab=1M:allow_files=true%s",
		filepath.Join(dir, "dax0.0"), filepath.Join(dir, "dax1.0"), more))
}

func TestAPrefixOutlivesASidecarOnDAX(t *testing.T) {
	dir := t.TempDir()
	const pages = 42 // the last chunk is half full
	d, _ := startDaemon(t, withDAX(t, dir, ""))
	b := storedPrefix(t, d, pages)
	untilTierHas(t, d, 0, pages)
	newAdminRig(t, d.AdminAddr(), "").post("/v1/clear", admin.ClearRequest{All: true,
		Tier: "arena"},
		new(admin.ClearResult))
	b.hits(t)
	if st := d.operations.Tiers()[0]; st.Kind != "dax" || st.Name != "dax" || !st.Local ||
		st.LoadedBytes != pages*4096 || st.CapacityBytes < 7<<20 {
		t.Errorf("%+v", st)
	}
	b.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	d, _ = startDaemon(t, withDAX(t, dir, ""))
	if st := d.operations.Tiers()[0]; st.Pages != pages {
		t.Errorf("%+v", st)
	}
	b = newPrefix(t, d, pages)
	b.hits(t)
	if st := d.Status(); st.Tiers[0].LoadedChunks != 11 {
		t.Errorf("%+v", st)
	}
	if err := d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// The ranks of an instance have a part each of the same devices, at the same time.
func TestRanksShareDevices(t *testing.T) {
	dir := t.TempDir()
	const pages = 20
	for round := range 2 {
		var all []*Daemon
		for rank := range 2 {
			d, _ := startDaemon(t, withDAX(t, dir, fmt.Sprintf(":ranks=2:rank=%d", rank)))
			all = append(all, d)
		}
		for rank, d := range all {
			if round == 0 && rank == 0 {
				storedPrefix(t, d, pages).Close()
				untilTierHas(t, d, 0, pages)
			}
			if got := d.operations.Tiers()[0].Pages; got != int64(pages*(1-rank)) {
				t.Errorf("round %d: rank %d has %d pages", round, rank, got)
			}
		}
		for _, d := range all {
			if err := d.Shutdown(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A device that cannot be used is an error of the start that says which tier, which device, and
// what to do.
func TestStartSaysWhyADeviceCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	startDaemon(t, withDAX(t, dir, ""))
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte(strings.Repeat("precious", 1<<20)), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		flag string
		want []string
	}{
		"in use": {filepath.Join(dir, "dax0.0") + ":4M:allow_files=true",
			[]string{"in use", fmt.Sprintf("process %d ", os.Getpid())}},
		"not there": {"/dev/dax77.0", []string{"/dev/dax77.0", "no such file", "daxctl"}},
		"no device": {"/dev/null", []string{"/dev/null", "DAX subsystem"}},
		"file":      {file, []string{file, "allow_files"}},
		"not ours":  {file + ":allow_files=true", []string{file, "something else"}},
		"misaligned": {filepath.Join(dir, "new") + ":4097:allow_files=true",
			[]string{"not aligned", "4KiB"}},
		"slab": {filepath.Join(dir, "other") + ":4M:slab=2K:allow_files=true",
			[]string{"slabs of 2048 bytes"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := settings.Defaults()
			c.Runtime.Dir = filepath.Join(testDir(t), "rank-0") // what is beside it are its peers
			c.Arena.Kind, c.Arena.Limit = dax.KindMemfd, 8<<20
			withTiers(t, "--dax="+tc.flag)(&c)
			c, err := c.Complete(nil)
			if err != nil {
				t.Fatal(err)
			}
			d, err := Start(context.Background(), c, zap.NewNop(), Origin{})
			if err == nil {
				_ = d.Shutdown(context.Background())
				t.Fatal("started")
			}
			for _, w := range append(tc.want, `dax tier "dax"`) {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
}

// A device without a size of its own has that of its tier.
func TestSizeOfDAXDevices(t *testing.T) {
	c, err := load(t, "", nil, "--dax=/dev/dax0.0:2M")
	if err != nil {
		t.Fatal(err)
	}
	if o := daxOptions(&c.Tiers[0].DAX, nil); !reflect.DeepEqual(o.Devices,
		[]daxtier.DeviceSpec{{Path: "/dev/dax0.0", SizeBytes: 2 << 20}}) {
		t.Errorf("%+v", o)
	}
}
