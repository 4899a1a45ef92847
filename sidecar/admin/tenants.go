package admin

import (
	"fmt"
	"io"

	"lookaside/internal/bytesize"
	"lookaside/tiers/engine"
	"lookaside/tiers/tenant"
)

// TenantStatus describes what is counted for one tenant: the name that requests carry. Counters are
// totals since the start, or since the name was last new.
type TenantStatus struct {
	Name string `json:"name" doc:"Empty: requests without a name. other: names beyond tenants.max, and what is no name. # and some digits: chunks of it were found at the start, and no request has named it so far."`

	AskedTokens uint64 `json:"asked_tokens" doc:"Tokens that its lookups asked for."`
	HitTokens   uint64 `json:"hit_tokens" doc:"Of those, tokens that they found."`
	ShedPages   uint64 `json:"shed_pages" doc:"Pages that it offered for storing, and for which there was no room."`

	Arena TenantStore   `json:"arena" doc:"What it has in the arena."`
	Tiers []TenantStore `json:"tiers" doc:"What it has in each tier, nearest first."`
}

// TenantStore is what a tenant has in the arena or in a tier.
type TenantStore struct {
	Name         string `json:"name" doc:"The tier's name in the settings; arena."`
	UsedBytes    int64  `json:"used_bytes" doc:"Of the slots of its chunks; -1 where it cannot be known."`
	ShareBytes   int64  `json:"share_bytes" doc:"What it keeps of them however much others store; 0 if nobody has a share, or nothing was stored there so far."`
	Evictions    uint64 `json:"evictions" doc:"Chunks of it that were dropped for room."`
	WrittenBytes uint64 `json:"written_bytes" doc:"Bytes of it that were written to the tier; 0 for the arena."`
}

// arenaStore is the name of the arena among stores.
const arenaStore = "arena"

// TenantList returns what is counted for tenants. It is empty while no request has had a name and
// nobody has a share.
func (o *Operations) TenantList() []TenantStatus {
	out := []TenantStatus{}
	arena := o.Engine.Tenants(nil)
	names, counts := o.Stack.Tenants()
	named := false
	for _, t := range o.Tenants.List() {
		a := statsOf(arena, t.ID)
		row := TenantStatus{Name: t.Name, AskedTokens: t.Asked, HitTokens: t.Hit,
			ShedPages: a.ShedPages, Tiers: []TenantStore{},
			Arena: TenantStore{Name: arenaStore, UsedBytes: a.Bytes, ShareBytes: a.QuotaBytes,
				Evictions: a.Evicted}}
		idle := t.Asked == 0 && a.Slots == 0 && a.Evicted == 0 && a.ShedPages == 0
		for i, name := range names {
			s := TenantStore{Name: name, UsedBytes: -1, WrittenBytes: t.Wrote[i]}
			if counts[i] != nil {
				b := statsOf(counts[i], t.ID)
				s.UsedBytes, s.ShareBytes, s.Evictions = b.Bytes, b.QuotaBytes, b.Evicted
				idle = idle && b.Slots == 0 && b.Evicted == 0
			}
			idle = idle && s.WrittenBytes == 0
			row.Tiers = append(row.Tiers, s)
		}
		if idle && (!t.Listed || t.ID == tenant.Other) {
			continue
		}
		named = named || t.ID != tenant.None
		out = append(out, row)
	}
	if !named && !o.Settings.Tenants.Divided() {
		return []TenantStatus{}
	}
	return out
}

// statsOf returns the entry of a tenant.
func statsOf(list []engine.TenantStats, id tenant.ID) engine.TenantStats {
	for _, s := range list {
		if s.ID == id {
			return s
		}
	}
	return engine.TenantStats{ID: id}
}

// writeTenants writes the table of tenants.
func writeTenants(w io.Writer, list []TenantStatus) {
	fmt.Fprintln(w, "TENANT\tASKED\tHIT\tIN\tUSED\tSHARE\tEVICTED\tWRITTEN\tSHED PAGES")
	for _, t := range list {
		name := t.Name
		if name == "" {
			name = "(none)"
		}
		a := &t.Arena
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\t%d\t-\t%d\n", name, t.AskedTokens, t.HitTokens,
			a.Name, bytesize.Format(a.UsedBytes), shownShare(a.ShareBytes), a.Evictions,
			t.ShedPages)
		for _, s := range t.Tiers {
			used := "?"
			if s.UsedBytes >= 0 {
				used = bytesize.Format(s.UsedBytes)
			}
			fmt.Fprintf(w, "\t\t\t%s\t%s\t%s\t%d\t%s\t\n", s.Name, used, shownShare(s.ShareBytes),
				s.Evictions, bytesize.Format(int64(s.WrittenBytes)))
		}
	}
}

func shownShare(bytes int64) string {
	if bytes == 0 {
		return "-"
	}
	return bytesize.Format(bytes)
}
