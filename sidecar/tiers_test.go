package sidecar

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"lookaside/dax"
	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
	"lookaside/tiers/slab/media"
)

// withDisk gives a sidecar a small disk tier in dir; more are further keys, as on the command line.
func withDisk(t *testing.T, dir, more string) func(*settings.Config) {
	t.Helper()
	return withTiers(t, "--disk="+dir+":8M:slab=1M"+more)
}

func withTiers(t *testing.T, flags ...string) func(*settings.Config) {
	t.Helper()
	from, err := load(t, "", nil, flags...)
	if err != nil {
		t.Fatal(err)
	}
	for i := range from.Tiers { // a busy machine is no slow tier
		tier := &from.Tiers[i]
		tier.LookupTimeout, tier.LoadTimeout, tier.StoreTimeout = patience, patience, patience
	}
	return func(c *settings.Config) {
		c.Tiers = from.Tiers
		c.Lookup.Deadline = patience
		c.Sessions.Share, c.Sessions.JointShare = 1, 1
		c.Lookup.Promote = "always" // what computing takes is not known here
		c.Cascade.PartialDelay = 5 * time.Millisecond
		c.Lifecycle.Flush = patience
	}
}

// A prefixRig is a prefix whose sessions end with the test.
type prefixRig struct{ *prefixes.Prefix }

// newPrefix is a prefix of pages, four a chunk, with a worker and a scheduler that are connected to
// d.
func newPrefix(t *testing.T, d *Daemon, pages int) *prefixRig {
	t.Helper()
	return namedPrefix(t, d, 0, pages)
}

func storedPrefix(t *testing.T, d *Daemon, pages int) *prefixRig {
	t.Helper()
	b := newPrefix(t, d, pages)
	if err := b.Store(); err != nil {
		t.Fatal(err)
	}
	return b
}

// hits asks for the prefix and wants all of it, and every byte right.
func (b *prefixRig) hits(t *testing.T) {
	t.Helper()
	if _, err := b.Lookup(); err != nil {
		t.Fatal(err)
	}
	if err := b.Verify(); err != nil {
		t.Fatal(err)
	}
}

// cancel frees what the last lookup leased.
func (b *prefixRig) cancel(t *testing.T) {
	t.Helper()
	if err := b.Cancel(); err != nil {
		t.Fatal(err)
	}
}

// until waits until ok; what it is about is shown otherwise.
func until(t *testing.T, what func() any, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%+v", what())
		}
	}
}

// untilTierHas waits until a tier has so many pages, and no tier is being given any: what is
// cleared meanwhile is dropped from it, too.
func untilTierHas(t *testing.T, d *Daemon, tier int, pages int64) {
	t.Helper()
	until(t, func() any { return d.operations.Tiers()[tier] },
		func() bool { return d.operations.Tiers()[tier].Pages == pages })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := d.stack.Flush(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestAPrefixOutlivesArenaAndSidecar(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "there", "yet")
	const pages = 42 // the last chunk is half full
	d, _ := startDaemon(t, withDisk(t, dir, ""))
	b := storedPrefix(t, d, pages)
	untilTierHas(t, d, 0, pages)
	r := newAdminRig(t, d.AdminAddr(), "")
	var cleared admin.ClearResult
	r.post("/v1/clear", admin.ClearRequest{All: true, Tier: "arena"}, &cleared)
	if d.Status().Pages != 0 || len(cleared.Cleared) != 1 || cleared.Cleared[0].Chunks != 11 {
		t.Errorf("%d pages; %+v", d.Status().Pages, cleared)
	}
	b.hits(t)
	if st := d.Status(); st.Promotions.Pages != pages || st.Tiers[0].HitPages != pages ||
		st.Tiers[0].LoadedBytes != pages*4096 || st.Tiers[0].Lookups != 1 {
		t.Errorf("%+v", st)
	}
	b.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}

	d, _ = startDaemon(t, withDisk(t, dir, ""))
	if st := d.operations.Tiers()[0]; st.Pages != pages {
		t.Errorf("%+v", st)
	}
	b = newPrefix(t, d, pages)
	b.hits(t)
	b.hits(t) // from the arena
	if st := d.Status(); st.Tiers[0].LoadedChunks != 11 || st.Lookups.Waiting != 0 {
		t.Errorf("%+v", st)
	}
	if err := d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// What waits to be written when the end begins is written before it.
func TestShutdownFlushesToTheTiers(t *testing.T) {
	dir := t.TempDir()
	const pages = 400
	d, log := startDaemon(t, withDisk(t, dir, ""))
	b := storedPrefix(t, d, pages)
	b.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(log.String(), "lifecycle.flush") {
		t.Errorf("it gave up:\n%s", log)
	}
	d, _ = startDaemon(t, withDisk(t, dir, ""))
	newPrefix(t, d, pages).hits(t)
}

func TestTierThatAdmitsNothingIsRead(t *testing.T) {
	dir := t.TempDir()
	const pages = 8
	d, _ := startDaemon(t, withDisk(t, dir, ""))
	storedPrefix(t, d, pages).Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	d, _ = startDaemon(t, withDisk(t, dir, ":admit=never"))
	b := newPrefix(t, d, pages)
	b.hits(t)
	if st := d.operations.Tiers()[0]; st.StoredChunks != 0 || st.Admit != "never" {
		t.Errorf("%+v", st)
	}
}

func TestNoPromotionWhereItIsOff(t *testing.T) {
	d, _ := startDaemon(t, func(c *settings.Config) {
		withDisk(t, t.TempDir(), "")(c)
		c.Lookup.Promote = "never"
	})
	b := storedPrefix(t, d, 8)
	untilTierHas(t, d, 0, 8)
	d.engine.ClearSpace(d.engine.Spaces()[0].ID)
	if _, err := b.Lookup(); err == nil || !strings.Contains(err.Error(), "hit 0 of 8") {
		t.Errorf("got %v", err)
	}
}

// A disk tier that cannot be opened is an error of the start that says which, why, and where.
func TestStartSaysWhyATierCannotBeOpened(t *testing.T) {
	dir := t.TempDir()
	startDaemon(t, withDisk(t, dir, ""))
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	old := t.TempDir()
	d, _ := startDaemon(t, withDisk(t, old, ""))
	storedPrefix(t, d, 4)
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}
	otherVersion(t, old)
	for _, tc := range []struct {
		name string
		flag string
		want []string
	}{
		{"locked", "--disk=" + dir + ":8M:slab=1M:name=fast", []string{`disk tier "fast"`, dir,
			fmt.Sprint(os.Getpid())}},
		{"no room", "--disk=" + t.TempDir() + "/x:4000T", []string{`disk tier "disk"`, "capacity",
			"/x", "4000TiB", "free", "smaller"}},
		{"no room for two together", "--disk=" + t.TempDir() + "," + t.TempDir() + ":4000T",
			[]string{"capacity", "4000TiB", "free"}},
		{"a file", "--disk=" + file + ":8M:slab=1M", []string{`disk tier "disk"`, file}},
		{"another version", "--disk=" + old + ":8M:slab=1M", []string{`disk tier "disk"`, old,
			"version"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := settings.Defaults()
			c.Runtime.Dir = testDir(t)
			c.Arena.Kind, c.Arena.Limit = dax.KindMemfd, 1<<20
			withTiers(t, tc.flag)(&c)
			c, err := c.Complete(nil)
			if err != nil {
				t.Fatal(err)
			}
			d, err := Start(context.Background(), c, zap.NewNop(), Origin{})
			if err == nil {
				_ = d.Shutdown(context.Background())
				t.Fatal("started")
			}
			t.Log(err)
			for _, w := range tc.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %s", err, w)
				}
			}
		})
	}
}

func TestControlOverHTTP(t *testing.T) {
	const pages = 40
	d, log := startDaemon(t, withTiers(t, "--disk="+t.TempDir()+":8M:slab=1M:name=near",
		"--disk="+t.TempDir()+":8M:slab=1M:name=far:admit=never"))
	b := storedPrefix(t, d, pages)
	untilTierHas(t, d, 0, pages)
	r := newAdminRig(t, d.AdminAddr(), "")
	words := b.Words()
	prefix := admin.PrefixRequest{Hashes: words}
	minute := admin.TimeoutRequest{TimeoutS: 60}

	var list admin.TiersResult
	r.get("/v1/tiers", &list)
	if len(list.Tiers) != 2 || list.Tiers[0].Name != "near" || list.Tiers[0].State != "closed" ||
		list.Tiers[0].Pages != pages || list.Tiers[0].CapacityBytes != 8<<20 ||
		list.Tiers[1].Name != "far" || list.Tiers[1].Admit != "never" || list.Tiers[1].Pages != 0 {
		t.Errorf("%+v", list)
	}
	// far is a copy, then the only one, then nowhere but in the arena.
	var p admin.ProgressResult
	r.post("/v1/move", admin.MoveRequest{PrefixRequest: prefix, TimeoutRequest: minute,
		From: "near", To: "far", Keep: true}, &p)
	if p.Pages != pages || p.PagesAsked != pages || !p.Complete ||
		d.operations.Tiers()[0].Pages != pages ||
		d.operations.Tiers()[1].Pages != pages {
		t.Errorf("%+v; %+v", p, d.operations.Tiers())
	}
	var c admin.ClearResult
	r.post("/v1/clear", admin.ClearRequest{Space: p.Space, Tier: "near"}, &c)
	if len(c.Cleared) != 1 || c.Cleared[0] != (admin.ClearedTier{Tier: "near", Chunks: 10}) ||
		!c.Complete {
		t.Errorf("%+v", c)
	}
	r.post("/v1/clear", admin.ClearRequest{All: true, Tier: "arena"}, &c)
	r.post("/v1/prefetch", admin.PrefetchRequest{PrefixRequest: prefix, TimeoutRequest: minute}, &p)
	if p.Pages != pages || !p.Complete || d.Status().Pages != pages ||
		d.operations.Tiers()[1].LoadedChunks != 10 {
		t.Errorf("%+v; %+v", p, d.Status())
	}
	untilTierHas(t, d, 0, pages) // which admits what comes up from below it
	free := func() bool { return d.Status().Leases == 0 }
	until(t, func() any { return d.Status() }, free)
	b.hits(t)
	b.cancel(t)
	// Beyond what anybody has.
	r.post("/v1/prefetch", admin.PrefetchRequest{PrefixRequest: admin.PrefixRequest{Hashes: append(
		b.Words(),
		strings.Repeat("0", 64))}, TimeoutRequest: minute}, &p)
	if p.Pages != pages || p.PagesAsked != pages+1 || !p.Complete {
		t.Errorf("%+v", p)
	}
	if _, err := d.stack.Clear(context.Background(), d.engine.Spaces()[0].Fingerprint,
		"near"); err != nil {
		t.Error(err)
	}
	r.post("/v1/move", admin.MoveRequest{PrefixRequest: prefix, TimeoutRequest: minute, From: "far",
		To: "near", Keep: false}, &p)
	if p.Pages != pages || d.operations.Tiers()[0].Pages != pages ||
		d.operations.Tiers()[1].Pages != 0 {
		t.Errorf("%+v; %+v", p, d.operations.Tiers())
	}

	// A pin brings it up, and stays over the pressure of others.
	r.post("/v1/clear", admin.ClearRequest{All: true, Tier: "arena"}, &c)
	r.fails("/v1/pin", admin.PinRequest{PrefixRequest: prefix}, 404, "prefetch")
	var pin admin.PinStatus
	r.post("/v1/pin", admin.PinRequest{PrefixRequest: prefix, Prefetch: true, Label: "x"}, &pin)
	if pin.Pages != pages || d.Status().Pins != 1 {
		t.Errorf("%+v", pin)
	}
	var un admin.UnpinResult
	r.post("/v1/unpin", admin.UnpinRequest{Pin: pin.Pin}, &un)
	until(t, func() any { return d.Status() }, free)

	r.fails("/v1/move", admin.MoveRequest{PrefixRequest: prefix, TimeoutRequest: minute,
		From: "near", To: "fra", Keep: false}, 404,
		`to: there is no tier "fra"`, `"far"`)
	r.fails("/v1/move", admin.MoveRequest{PrefixRequest: prefix, TimeoutRequest: minute,
		From: "near", To: "near", Keep: false}, 400, "near")
	r.fails("/v1/clear", admin.ClearRequest{All: true, Tier: "naer"}, 404, `"naer"`, `"near"`)
	r.fails("/v1/prefetch", admin.PrefetchRequest{PrefixRequest: admin.PrefixRequest{Space: "00",
		Hashes: words},
		TimeoutRequest: minute}, 404,
		"open are")

	// Everything, everywhere.
	r.post("/v1/clear", admin.ClearRequest{All: true}, &c)
	if len(c.Cleared) != 3 || c.Cleared[0].Tier != "arena" || c.Cleared[1].Tier != "near" ||
		c.Cleared[2].Tier != "far" || !c.Complete {
		t.Errorf("%+v", c)
	}
	if st := d.Status(); st.Pages != 0 || st.Tiers[0].Pages != 0 || st.Tiers[1].Pages != 0 {
		t.Errorf("%+v", st)
	}
	if !strings.Contains(log.String(), "cleared") {
		t.Error("the log does not say that the cache was cleared")
	}
	if err := d.engine.Check(); err != nil {
		t.Error(err)
	}
}

// What runs out of its time says how far it got.
func TestOperationsEndInTime(t *testing.T) {
	d, _ := startDaemon(t, withDisk(t, t.TempDir(), ""))
	b := storedPrefix(t, d, 1200)
	untilTierHas(t, d, 0, 1200)
	r := newAdminRig(t, d.AdminAddr(), "")
	d.engine.ClearSpace(d.engine.Spaces()[0].ID)
	// Over HTTP a millisecond is the least, and a busy machine may see its end only when all is
	// there.
	p, err := d.operations.Prefetch(context.Background(),
		admin.PrefetchRequest{PrefixRequest: admin.PrefixRequest{Hashes: b.Words()},
			TimeoutRequest: admin.TimeoutRequest{TimeoutS: 1e-9}})
	if err != nil {
		t.Fatal(err)
	}
	if p.Complete || p.Pages >= 1200 {
		t.Errorf("%+v", p)
	}
	r.post("/v1/prefetch", admin.PrefetchRequest{
		PrefixRequest:  admin.PrefixRequest{Hashes: b.Words()},
		TimeoutRequest: admin.TimeoutRequest{TimeoutS: 60},
	}, &p)
	if !p.Complete || p.Pages != 1200 {
		t.Errorf("%+v", p)
	}
}

func metricsOf(t *testing.T, d *Daemon) string {
	t.Helper()
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" +
		d.AdminAddr() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestMetricsOfTiers(t *testing.T) {
	d, _ := startDaemon(t, withDisk(t, t.TempDir(), ":name=nvme"))
	b := storedPrefix(t, d, 16)
	untilTierHas(t, d, 0, 16)
	d.engine.ClearSpace(d.engine.Spaces()[0].ID)
	b.hits(t)
	wanted := []string{
		`lookaside_tier_up{kind="disk",tier="nvme"} 1`,
		`lookaside_tier_lookups_total{tier="nvme"} 1`,
		`lookaside_tier_hit_pages_total{tier="nvme"} 16`,
		`lookaside_tier_seconds_count{op="load",tier="nvme"} 4`,
		`lookaside_tier_seconds_count{op="store",tier="nvme"} 4`,
		`lookaside_tier_chunk_bytes_sum{op="load",tier="nvme"} 65536`,
		`lookaside_tier_chunk_bytes_sum{op="store",tier="nvme"} 65536`,
		`lookaside_tier_store_queue_chunks{tier="nvme"} 0`,
		`lookaside_tier_capacity_bytes{tier="nvme"} 8.388608e+06`,
		`lookaside_tier_pages{tier="nvme"} 16`,
		`lookaside_tier_failures_total{op="load",tier="nvme"} 0`,
		`lookaside_promotions_total 4`,
		`lookaside_promoted_pages_total 16`,
		`lookaside_lookups_waiting 0`,
		`lookaside_pins 0`,
	}
	lacks := func() (list []string) {
		text := metricsOf(t, d)
		for _, want := range wanted {
			if !strings.Contains(text, want+"\n") {
				list = append(list, want)
			}
		}
		return list
	}
	// that a store is over is counted a moment after
	until(t, func() any { return lacks() }, func() bool { return len(lacks()) == 0 })
	var table bytes.Buffer
	if err := d.Status().WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"nvme", "promotions", "16 pages came", "64KiB", " on "} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &table)
		}
	}
}

// otherVersion makes the slabs of a store look as if a later release had written them.
func otherVersion(t *testing.T, dir string) {
	t.Helper()
	slabs, err := filepath.Glob(filepath.Join(dir, "slab-*"))
	if err != nil || len(slabs) == 0 {
		t.Fatal(slabs, err)
	}
	for _, name := range slabs {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{0, media.BlockBytes} {
			binary.LittleEndian.PutUint32(b[at+8:], media.Version+1)
			copy(b[at+media.BlockBytes/2:], "another form") // and so another checksum
		}
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
