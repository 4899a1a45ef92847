package admin

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"lookaside/connector"
	"lookaside/internal/bytesize"
	"lookaside/internal/unshared"
	"lookaside/ipc/hosts"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

const (
	stateServing  = "serving"
	stateDraining = "draining"
)

// Status describes one sidecar at one moment. /v1/status returns it and `lookaside status` shows
// it.
type Status struct {
	Verdict        string             `json:"verdict" doc:"A sentence: what is wrong, the worst first, or that it is healthy and of what use."`
	Version        string             `json:"version"`
	Commit         string             `json:"commit" doc:"That it was built from; unknown where it was built outside of a git repository."`
	PID            int                `json:"pid"`
	State          string             `json:"state"` // serving or draining
	Generation     string             `json:"generation"`
	Endpoint       string             `json:"endpoint"`
	UptimeS        float64            `json:"uptime_s"`
	Arena          ArenaStatus        `json:"arena"`
	Slots          SlotStatus         `json:"slots"`
	Leases         int                `json:"leases"`
	Pages          int                `json:"pages"` // that can be found
	ArenaHits      HitStatus          `json:"arena_hits" doc:"What the arena had of the pages that lookups asked it for, first of all; its like for a tier is in tiers."`
	MetadataBytes  int64              `json:"metadata_bytes"`
	StoresInFlight int                `json:"stores_in_flight"`
	LoadsInFlight  int                `json:"loads_in_flight"`
	Lookups        LookupStatus       `json:"lookups"`
	Promotions     PromotionStatus    `json:"promotions"`
	Verifications  VerificationStatus `json:"verifications"`
	Checks         CheckStatus        `json:"checks" doc:"Of what is in the arena, while it is in use: arena.check_rate."`
	Hints          HintStatus         `json:"hints" doc:"What hints of requests have done to the arena."`
	Pins           int                `json:"pins"`
	Tiers          []TierStatus       `json:"tiers"` // nearest first
	Peers          PeersStatus        `json:"peers"` // other sidecars of the host
	Hosts          HostsStatus        `json:"hosts"`
	LoadedRatio    float64            `json:"loaded_ratio" doc:"Tokens loaded of those asked for, since the start; 0 if there were none."`
	LastMinute     LastMinute         `json:"last_minute"`
	Demand         DemandStatus       `json:"demand" doc:"What clients ask for, and what an arena of another size would do for them."`
	// Limited counts lookups and stores cut short by the share or the leases of their session.
	Limited   uint64            `json:"limited"`
	Evictions map[string]uint64 `json:"evictions"` // chunks, by cause
	// Misses counts where prefixes ended, by reason.
	Misses  map[string]why.Count `json:"misses" doc:"Where the prefixes of lookups ended, by reason: end (no miss: all was found), never_stored, shed, evicted, expired, cleared, other_space, other_seed, late, engine_had, not_worth, lost."`
	Spaces  []SpaceStatus        `json:"spaces"`
	Tenants []TenantStatus       `json:"tenants" doc:"Empty while no request has had a tenant's name and nobody has a share."`
	// Unshared lists pairs of spaces that differ by accident.
	Unshared []UnsharedStatus          `json:"unshared"`
	Sessions []connector.SessionStatus `json:"sessions"`
	// Lingering sessions were given up while their clients live. They keep what they held, and
	// count toward sessions.limit.
	Lingering []connector.LingeringStatus `json:"lingering"`
	// Frozen sessions have clients that live but do not respond, and hold slots. FrozenSlots counts
	// their slots in the arena, and those of lingering sessions.
	Frozen      []connector.FrozenStatus `json:"frozen"`
	FrozenSlots int                      `json:"frozen_slots"`
	Counters    connector.Counters       `json:"counters"`
}

// HitStatus counts pages that lookups asked for.
type HitStatus struct {
	LookupPages uint64 `json:"lookup_pages" doc:"Pages that lookups asked for."`
	HitPages    uint64 `json:"hit_pages" doc:"Pages that were there at once, in the own arena or borrowed before."`
}

// SlotStatus counts the slots of the carved parts of the arena. Leased slots are ready ones as
// well.
type SlotStatus struct {
	Total   int `json:"total"`
	Free    int `json:"free"`
	Filling int `json:"filling"`
	Ready   int `json:"ready"`
	Leased  int `json:"leased"`
}

// HintStatus describes what hints of requests have done to the arena, in chunks. One that gets the
// same hint again counts again.
type HintStatus struct {
	RetainedSlots int    `json:"retained_slots" doc:"Slots that are evicted after all others, for a time."`
	PinnedSlots   int    `json:"pinned_slots" doc:"Slots that are not evicted, for a time."`
	LowSlots      int    `json:"low_slots" doc:"Slots that are evicted before all others, until their next use."`
	Retained      uint64 `json:"retained" doc:"Chunks retained."`
	Pinned        uint64 `json:"pinned" doc:"Chunks pinned."`
	Low           uint64 `json:"low" doc:"Chunks to be evicted before others."`
	Demoted       uint64 `json:"demoted" doc:"Chunks of these that were written to tiers first."`
	OverShare     uint64 `json:"over_share" doc:"Hints for chunks that were ignored: hints.share was reached."`
	OfOthers      uint64 `json:"of_others" doc:"Hints for chunks that were ignored: they are another tenant's."`
	Expired       uint64 `json:"expired" doc:"Times to retain or pin a chunk that are over."`
	DeferredPages uint64 `json:"deferred_pages" doc:"Pages not stored, because a request wants them stored from a later use on."`

	Advice connector.AdviceCount `json:"advice"`
}

// LookupStatus describes the lookups.
type LookupStatus struct {
	InFlight       int    `json:"in_flight"` // finished, with leases
	Expired        uint64 `json:"expired"`
	AnswersDropped uint64 `json:"answers_dropped"`
	Floods         uint64 `json:"floods"`
	Waiting        int    `json:"waiting"`  // for tiers, or for checks of restored chunks
	Refused        uint64 `json:"refused"`  // limited to the arena, because too many waited
	Late           uint64 `json:"late"`     // ended at their deadline with what there was
	Cut            uint64 `json:"cut"`      // a part is computed instead, because that is faster
	Verified       uint64 `json:"verified"` // waited for checks of restored chunks
}

// PromotionStatus describes the chunks that are loaded from tiers.
type PromotionStatus struct {
	InFlight int    `json:"in_flight"` // chunks
	Chunks   uint64 `json:"chunks"`    // that got room in the arena
	Joined   uint64 `json:"joined"`    // chunks already loading for another lookup
	Failed   uint64 `json:"failed"`    // chunks that no tier could load
	Late     uint64 `json:"late"`      // chunks that a store committed first
	Pages    uint64 `json:"pages"`     // loaded
}

// HostsStatus describes the sessions with other hosts.
type HostsStatus struct{ hosts.Status }

// VerificationStatus describes the chunks that were restored with the arena. Each is verified
// before its first use.
type VerificationStatus struct {
	Unverified int    `json:"unverified"` // not verified yet
	Verified   uint64 `json:"verified"`
	Corrupt    uint64 `json:"corrupt"` // dropped because of a wrong checksum
}

// CheckStatus describes the search for bytes of the arena that have changed since they were stored.
type CheckStatus struct {
	Checked uint64 `json:"checked" doc:"Chunks that were compared with the checksum that they had before."`
	Walks   uint64 `json:"walks" doc:"Times that the whole arena was walked over."`
	Rotten  uint64 `json:"rotten" doc:"Chunks that had changed, or could not be read, and were dropped."`
}

// SpaceStatus describes one space and what it holds.
type SpaceStatus struct {
	connector.SpaceStatus
	Chunks int `json:"chunks"`
	Pages  int `json:"pages"`
}

// UnsharedStatus gives the reasons why instances of one model share nothing, although their users
// probably want it.
type UnsharedStatus struct {
	Space  string           `json:"space"` // short fingerprints
	Other  string           `json:"other"`
	Whose  string           `json:"whose"` // which sidecar has the other space
	Causes []unshared.Cause `json:"causes"`
	// Connected is true if instances of both spaces are connected, or the other space is another
	// sidecar's.
	Connected bool `json:"connected"`
}

// Status returns a snapshot. Its parts are from slightly different moments.
func (o *Operations) Status() Status {
	e, c, l, w := o.Engine.Stats(), o.Server.Status(), o.Lookups.Stats(), o.Stack.LookupStats()
	arena := o.Arena.Status(&e)
	st := Status{
		Version:    o.Version,
		Commit:     o.Commit,
		PID:        os.Getpid(),
		State:      stateServing,
		Generation: fmt.Sprintf("%016x", o.Generation),
		Endpoint:   o.Settings.Runtime.Dir,
		UptimeS:    time.Since(o.Started).Seconds(),
		Arena:      arenaStatus(&arena),
		Slots: SlotStatus{
			Total: e.Slots, Free: e.FreeSlots, Filling: e.FillingSlots, Ready: e.ReadySlots,
			Leased: e.LeasedSlots,
		},
		Leases:         e.Leases,
		Pages:          e.Pages,
		ArenaHits:      HitStatus{e.LookupPages, e.HitPages},
		MetadataBytes:  e.MetadataBytes,
		StoresInFlight: e.OpenStores,
		LoadsInFlight:  e.OpenLoads,
		Lookups: LookupStatus{
			InFlight: e.OpenLookups, Expired: e.Expired, AnswersDropped: l.Dropped + l.NoSession,
			Floods:  l.FloodBreaks,
			Waiting: w.Pending, Refused: w.Refused, Late: w.Late, Cut: w.Cut, Verified: w.Verified,
		},
		Promotions: PromotionStatus{
			InFlight: e.Promoting, Chunks: e.Promotions, Joined: e.PromotionsJoined,
			Failed: e.PromotionsFailed, Late: e.PromotionsLate, Pages: e.PromotedPages,
		},
		Verifications: VerificationStatus{Unverified: e.Unverified, Verified: e.Verified,
			Corrupt: e.VerifyFailed},
		Hints: HintStatus{
			RetainedSlots: e.RetainedSlots, PinnedSlots: e.PinnedSlots, LowSlots: e.LowSlots,
			Retained: e.HintsRetained, Pinned: e.HintsPinned, Low: e.HintsLow,
			Demoted: e.HintsDemoted, OverShare: e.HintsOver, OfOthers: e.HintsOfOthers,
			Expired: e.HintsExpired, DeferredPages: e.DeferredPages, Advice: c.Counters.Advice,
		},
		Checks: CheckStatus{Checked: w.Checked, Walks: w.Walks, Rotten: e.Rotten},
		Pins:   len(o.Pins()),
		Tiers:  o.Tiers(),
		Peers:  o.Peers.Status(),
		Hosts:  HostsStatus{o.Hosts.Status()},
		Evictions: map[string]uint64{
			"room": e.Evictions, "cleared": e.Cleared, "bad": e.Bad, "duplicate": e.Duplicates,
			"replaced": e.Replaced,
		},
		Spaces:    []SpaceStatus{},
		Tenants:   o.TenantList(),
		Unshared:  []UnsharedStatus{},
		Sessions:  c.Sessions,
		Lingering: c.Lingering,
		Frozen:    c.Frozen, FrozenSlots: e.FrozenSlots,
		Limited:  e.Limited,
		Counters: c.Counters,
		Misses:   c.Counters.Misses,
	}
	if c.Draining {
		st.State = stateDraining
	}
	st.LoadedRatio = c.Counters.Tokens.LoadedRatio()
	st.Demand = o.demandStatus()
	st.LastMinute = o.rates.last(time.Now(), c.Counters)
	for _, u := range o.Server.Unshared() {
		st.Unshared = append(st.Unshared, UnsharedStatus{u.Ours.Short(), u.Theirs.Short(), u.Whose,
			u.Causes, u.Connected})
	}
	held := o.Engine.Spaces()
	for _, sp := range c.Spaces {
		s := SpaceStatus{SpaceStatus: sp}
		if i := slices.IndexFunc(held,
			func(h engine.SpaceStats) bool {
				return h.Fingerprint.String() ==
					sp.Fingerprint
			}); i >= 0 {
			s.Chunks, s.Pages = held[i].Chunks, held[i].Pages
		}
		st.Spaces = append(st.Spaces, s)
	}
	st.Verdict = st.verdict()
	return st
}

// WriteTable writes the status for people. It is one list in the order of the table, which is why
// it is long.
func (st Status) WriteTable(w io.Writer) error {
	if _, err := fmt.Fprintln(w, st.Verdict); err != nil {
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(tw, name+"\t"+format+"\n",
			args...)
	}
	a, n := st.Arena, st.Counters
	row("sidecar", "%s, pid %d, %s for %s, version %s (%s)", st.Endpoint, st.PID, st.State,
		time.Duration(st.UptimeS*float64(time.Second)).Round(time.Second), st.Version, st.Commit)
	if x := a.DAX; x != nil {
		row("arena", "%s used of %s on %d DAX devices, in %d regions", bytesize.Format(a.UsedBytes),
			bytesize.Format(a.CapacityBytes), len(x.Devices), len(a.Regions))
		row("damaged", "%d chunks were corrupt, %d unreadable", x.CorruptChunks, x.UnreadableChunks)
		if x.SlabsGivenUp > 0 {
			row("failing", "%d of %d slabs are given up: %s", x.SlabsGivenUp, x.Slabs, x.Error)
		}
	} else {
		row("arena", "%s used of %s in %d regions (%s), limit %s", bytesize.Format(a.UsedBytes),
			bytesize.Format(a.CapacityBytes), len(a.Regions), a.Kind, bytesize.Format(a.LimitBytes))
	}
	row("kept", "%d chunks, %d wait; %d were found at the start", a.KeptChunks, a.WaitingChunks,
		a.Recovered.Chunks)
	if a.Recovered.Why != "" {
		row("not found", "%s", a.Recovered.Why)
	}
	row("slots", "%d free, %d ready (%d leased), %d filling; %d leases", st.Slots.Free,
		st.Slots.Ready, st.Slots.Leased, st.Slots.Filling, st.Leases)
	row("pages", "%d held, %d stored (%s), %d loaded (%s), %d shed", st.Pages, n.StoredPages,
		bytesize.Format(int64(n.StoredBytes)), n.LoadedPages, bytesize.Format(int64(n.LoadedBytes)),
		n.ShedPages)
	t, last := n.Tokens, st.LastMinute
	row("tokens", "%d asked for in %d requests: %d found (%s), %d loaded (%s), %d computed",
		t.Asked, t.Requests, t.Found, percent(t.FoundRatio()), t.Loaded, percent(t.LoadedRatio()),
		t.Computed)
	if s := n.Saved; t.Loaded > 0 {
		row("saved", "%.1f s of time to first token, estimated: %.1f s of computing, less %.1f s of lookups and %.1f s of loads; without %d tokens, as vLLM had not measured its prefills",
			s.TTFTS, s.ComputeS, s.LookupS, s.LoadS, s.UnpricedTokens)
	}
	if s := max(last.Seconds, 1); last.Seconds > 0 {
		each := func(n uint64) float64 { return float64(n) / s }
		row("last minute", "%d requests, %.0f tokens/s asked for: %.0f found (%s), %.0f loaded (%s), %.0f computed; %s/s stored, %s/s loaded",
			last.Tokens.Requests, each(last.Tokens.Asked), each(last.Tokens.Found),
			percent(last.Tokens.FoundRatio()), each(last.Tokens.Loaded), percent(last.LoadedRatio),
			each(last.Tokens.Computed),
			bytesize.Format(int64(each(last.StoredBytes))),
			bytesize.Format(int64(each(last.LoadedBytes))))
	}
	row("lookups", "%d for %d pages, of which they found %d; %d hold leases, %d wait for tiers",
		n.Lookups, n.LookupPages, n.HitPages, st.Lookups.InFlight, st.Lookups.Waiting)
	row("misses", "%s", misses(st.Misses))
	if p := st.Promotions; len(st.Tiers) > 0 {
		row("promotions", "%d chunks, %d under way, %d failed; %d pages came; %d lookups late, %d cut for computing is faster", p.Chunks, p.InFlight, p.Failed, p.Pages, st.Lookups.Late, st.Lookups.Cut)
	}
	if v := st.Verifications; v != (VerificationStatus{}) {
		row("restored", "%d chunks verified, %d corrupt, %d not used so far; %d lookups waited for it", v.Verified, v.Corrupt, v.Unverified, st.Lookups.Verified)
	}
	if c := st.Checks; c.Rotten > 0 {
		row("rotten", "%d chunks had changed in the arena and were dropped: look at the log, and at the machine's memory", c.Rotten)
	}
	st.Peers.write(tw, n.ElsewherePages)
	writeHosts(tw, &st.Hosts)
	for _, u := range st.Unshared {
		row("not shared", "space %s with %s (%s): %s", u.Space, u.Whose, u.Other,
			unshared.Text(u.Causes))
	}
	if st.Pins > 0 {
		row("pins", "%d", st.Pins)
	}
	row("under way", "%d stores, %d loads", st.StoresInFlight, st.LoadsInFlight)
	row("evictions", "%s", counts(st.Evictions))
	st.Demand.write(row)
	row("errors", "%s", counts(n.Errors))
	if err := tw.Flush(); err != nil {
		return err
	}
	st.Demand.writeCurve(tw)
	if a.DAX != nil && len(a.DAX.Devices) > 0 {
		fmt.Fprintln(tw)
		writeArenaDevices(tw, a.DAX.Devices)
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	if len(st.Tiers) > 0 {
		fmt.Fprintln(tw)
		writeTiers(tw, st.Tiers)
	}
	if len(st.Tenants) > 0 {
		fmt.Fprintln(tw)
		writeTenants(tw, st.Tenants)
	}
	if len(st.Spaces) > 0 {
		fmt.Fprintln(tw, "\nSPACE\tPAGES\tCHUNKS\tSESSIONS\tPAGE\tTOKENS/PAGE\tPAGES/CHUNK\tMODEL")
		for _, s := range st.Spaces {
			fmt.Fprintf(tw, "%.12s\t%d\t%d\t%d\t%s\t%d\t%d\t%s\n", s.Fingerprint, s.Pages, s.Chunks,
				s.SpaceStatus.Sessions, bytesize.Format(s.PageBytes), s.PageTokens, s.PagesPerChunk,
				s.Fields["model"])
		}
	}
	if len(st.Sessions) > 0 {
		fmt.Fprintln(tw, "\nSESSION\tROLE\tENGINE\tRANK\tPID\tSPACE\tSINCE")
		for _, s := range st.Sessions {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%d\t%d\t%s\t%s\n", s.Session, s.Role, s.EngineID, s.Rank,
				s.PID, s.Space, s.Since.Format(time.DateTime))
		}
	}
	if len(st.Hosts.Carried) > 0 {
		fmt.Fprintln(tw, "\nOTHER HOST\tDIRECTION\tSESSION\tENGINE\tRANK\tSINCE")
		for _, s := range st.Hosts.Carried {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%d\t%s\n", s.Address, s.Direction, s.Session,
				s.EngineID, s.Rank, s.Since.Format(time.DateTime))
		}
	}
	if len(st.Frozen) > 0 {
		fmt.Fprintln(tw, "\nFROZEN\tENGINE\tRANK\tPID\tSLOTS\tSTORES\tLOADS\tSILENT SINCE\tPROCESS")
		for _, s := range st.Frozen {
			fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%s\t%s\n", s.Session, s.EngineID, s.Rank,
				s.PID, s.Slots, s.Stores, s.Loads, s.SilentSince.Format(time.DateTime), s.Process)
		}
	}
	if len(st.Lingering) > 0 {
		fmt.Fprintln(tw, "\nLINGERING\tENGINE\tRANK\tPID\tSTORES\tLOADS\tSINCE\tWHY")
		for _, s := range st.Lingering {
			fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\n", s.Session, s.EngineID, s.Rank,
				s.PID, s.Stores, s.Loads, s.GivenUpAt.Format(time.DateTime), s.Why)
		}
	}
	return tw.Flush()
}

// writeHosts writes the sessions with other hosts. It writes nothing if there is nothing to report.
func writeHosts(w io.Writer, st *HostsStatus) {
	in, out := 0, 0
	for i := range st.Carried {
		if st.Carried[i].Direction == hosts.In {
			in++
		} else {
			out++
		}
	}
	if st.Listen != "" {
		fmt.Fprintf(w, "other hosts\taccepted at %s: %d sessions; %d connections refused\n",
			st.Listen, in, st.Refused)
	}
	if out > 0 || st.Failed > 0 {
		fmt.Fprintf(w, "other hosts\t%d sessions carried to them; %d attempts failed\n", out,
			st.Failed)
	}
}

// misses writes the pages that lookups did not find, by reason, the most frequent first.
func misses(m map[string]why.Count) string {
	type row struct {
		name  string
		pages uint64
	}
	var rows []row
	for name, n := range m {
		if n.Pages > 0 {
			rows = append(rows, row{name, n.Pages})
		}
	}
	if len(rows) == 0 {
		return "none"
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(b.pages, a.pages), strings.Compare(a.name, b.name))
	})
	parts := make([]string, 0, len(rows))
	for _, r := range rows {
		parts = append(parts, fmt.Sprintf("%d pages %s", r.pages, r.name))
	}
	return strings.Join(parts, ", ")
}

// counts writes the counts that are not 0, sorted by name.
func counts(m map[string]uint64) string {
	var parts []string
	for name, n := range m {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, name))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	slices.SortFunc(parts, func(a, b string) int {
		_, a, _ = strings.Cut(a, " ")
		_, b, _ = strings.Cut(b, " ")
		return strings.Compare(a, b)
	})
	return strings.Join(parts, ", ")
}
