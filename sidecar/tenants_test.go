package sidecar

import (
	"bytes"
	"context"
	"path/filepath"
	"strings"
	"testing"

	"lookaside/internal/prefixes"
	"lookaside/sidecar/admin"
	"lookaside/sidecar/settings"
)

// tenantPrefix is a prefix whose requests carry a tenant's name.
func tenantPrefix(t *testing.T, d *Daemon, name string, n, pages int) *prefixRig {
	t.Helper()
	p, err := prefixes.Dial(d.cfg.Runtime.Dir, prefixes.Shape{PageBytes: 4096, PagesPerChunk: 4,
		Tenant: name}, n, pages)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return &prefixRig{p}
}

// flood stores prefixes of 100 pages: twice what the arena has room for, or a tier.
func (b *prefixRig) flood(t *testing.T, d *Daemon, from, prefixes int) {
	t.Helper()
	for i := range prefixes {
		if err := b.Select(from+i, 100); err != nil {
			t.Fatal(err)
		}
		if err := b.Store(); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		err := d.stack.Flush(ctx)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
	}
}

// tenantOf returns what is counted for a tenant.
func tenantOf(t *testing.T, d *Daemon, name string) admin.TenantStatus {
	t.Helper()
	list := d.Status().Tenants
	for _, row := range list {
		if row.Name == name {
			return row
		}
	}
	t.Fatalf("there is no tenant %q in %+v", name, list)
	return admin.TenantStatus{}
}

// TestFloodOfATenant: two clients whose requests have names, an arena and a disk that are both too
// small for what one of them stores. The other keeps its share of both, and of the disk also over a
// restart.
func TestFloodOfATenant(t *testing.T) {
	const mine = 40 // chunks of 16 KiB
	dir := t.TempDir()
	start := func() *Daemon {
		d, _ := startDaemon(t, func(c *settings.Config) {
			withDisk(t, filepath.Join(dir, "disk"), "")(c)
			c.Arena.Limit = 2 << 20 // 128 chunks
			c.Tenants.Max = 8
			c.Tenants.Arena = map[string]float64{"team a": 0.4}
			c.Tenants.Tiers = map[string]float64{"team a": 0.2}
			c.Runtime.Dir = filepath.Join(t.TempDir(), "r")
		})
		return d
	}
	d := start()
	a, b := tenantPrefix(t, d, "team a", 0, 4*mine), tenantPrefix(t, d, "b", 0, 1)
	if err := a.Store(); err != nil {
		t.Fatal(err)
	}
	b.flood(t, d, 1, 40) // 1,000 chunks; the disk has room for some 500
	a.hits(t)
	row, other := tenantOf(t, d, "team a"), tenantOf(t, d, "b")
	if s := row.Arena; s.UsedBytes != mine*16<<10 || s.Evictions != 0 ||
		s.ShareBytes != 51*16<<10 {
		t.Errorf("in the arena a has %+v", s)
	}
	if s := row.Tiers[0]; s.UsedBytes != mine*16<<10 || s.Evictions != 0 || s.ShareBytes == 0 ||
		s.WrittenBytes != mine*16<<10 {
		t.Errorf("on the disk a has %+v", s)
	}
	if row.AskedTokens != 4*mine*prefixes.PageTokens || row.HitTokens != row.AskedTokens {
		t.Errorf("a asked for %d tokens, and hit %d", row.AskedTokens, row.HitTokens)
	}
	if other.Arena.Evictions == 0 || other.Tiers[0].Evictions == 0 || other.AskedTokens != 0 {
		t.Errorf("b has %+v", other)
	}
	text := metricsOf(t, d)
	for _, want := range []string{
		`lookaside_tenant_hit_tokens_total{tenant="team a"} 2560`,
		`lookaside_tenant_used_bytes{tenant="team a",tier="arena"} 655360`,
		`lookaside_tenant_used_bytes{tenant="team a",tier="disk"} 655360`,
		`lookaside_tenant_evictions_total{tenant="team a",tier="disk"} 0`,
		`lookaside_tenant_written_bytes_total{tenant="team a",tier="disk"} 655360`,
		`lookaside_tenant_shed_pages_total{tenant="b"} 0`,
	} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("the metrics lack %s", want)
		}
	}
	var table bytes.Buffer
	if err := d.Status().WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"TENANT", "team a", "640KiB"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &table)
		}
	}
	// The arena's chunks go. They come up again from the disk, for whom they are looked up.
	a.cancel(t)
	d.engine.ClearSpace(d.engine.Spaces()[0].ID)
	if row := tenantOf(t, d, "team a"); row.Arena.UsedBytes != 0 {
		t.Fatalf("a has %+v of an empty arena", row.Arena)
	}
	a.hits(t)
	if row := tenantOf(t, d, "team a"); row.Arena.UsedBytes != mine*16<<10 {
		t.Fatalf("a has %+v after it was promoted", row.Arena)
	}
	a.Close()
	b.Close()
	if err := d.Shutdown(context.Background()); err != nil {
		t.Fatal(err)
	}

	// The disk still knows whose its chunks are, also those of a tenant that is in no setting.
	d = start()
	if row := tenantOf(t, d, "team a"); row.Tiers[0].UsedBytes != mine*16<<10 {
		t.Fatalf("after a restart a has %+v", row.Tiers)
	}
	if list := d.Status().Tenants; len(list) != 2 || !strings.HasPrefix(list[1].Name, "#") ||
		list[1].Tiers[0].UsedBytes < 5<<20 {
		t.Fatalf("after a restart there are %+v", list)
	}
	b = tenantPrefix(t, d, "b", 0, 1)
	b.flood(t, d, 101, 40)
	a = tenantPrefix(t, d, "team a", 0, 4*mine)
	a.hits(t)
	if row := tenantOf(t, d, "team a"); row.Tiers[0].UsedBytes != mine*16<<10 ||
		row.Tiers[0].Evictions != 0 {
		t.Fatalf("after a restart and a flood a has %+v", row.Tiers)
	}
	if row := tenantOf(t, d, "b"); row.Tiers[0].Evictions == 0 {
		t.Fatalf("b has %+v", row)
	}
}

// TestNoTenants: without names and shares nothing is shown of tenants.
func TestNoTenants(t *testing.T) {
	d, _ := startDaemon(t, nil)
	b := storedPrefix(t, d, 16)
	b.hits(t)
	if st := d.Status(); len(st.Tenants) != 0 {
		t.Fatalf("%+v", st.Tenants)
	}
	if text := metricsOf(t, d); strings.Contains(text, "lookaside_tenant_") {
		t.Fatal("there are metrics of tenants")
	}
	x := tenantPrefix(t, d, "x\n", 0, 16) // no name: other
	x.hits(t)
	if row := tenantOf(t, d, "other"); row.HitTokens != 16*prefixes.PageTokens ||
		row.Arena.UsedBytes != 0 || tenantOf(t, d, "").Arena.UsedBytes != 4*16<<10 {
		t.Fatalf("other has %+v", row)
	}
}
