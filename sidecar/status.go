package sidecar

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"lookaside/connector"
	"lookaside/dax"
	"lookaside/tiers"
)

const (
	stateServing  = "serving"
	stateDraining = "draining"
)

// Status is one sidecar at one moment: what /v1/status answers and `lookaside status` shows.
type Status struct {
	Version        string                    `json:"version"`
	PID            int                       `json:"pid"`
	State          string                    `json:"state"` // serving or draining
	Generation     string                    `json:"generation"`
	Endpoint       string                    `json:"endpoint"`
	UptimeS        float64                   `json:"uptime_s"`
	Arena          ArenaStatus               `json:"arena"`
	Slots          SlotStatus                `json:"slots"`
	Leases         int                       `json:"leases"`
	Pages          int                       `json:"pages"` // that can be found
	MetadataBytes  int64                     `json:"metadata_bytes"`
	StoresInFlight int                       `json:"stores_in_flight"`
	LoadsInFlight  int                       `json:"loads_in_flight"`
	Lookups        LookupStatus              `json:"lookups"`
	Promotions     PromotionStatus           `json:"promotions"`
	Verifications  VerificationStatus        `json:"verifications"`
	Pins           int                       `json:"pins"`
	Tiers          []TierStatus              `json:"tiers"`     // nearest first
	Peers          PeersStatus               `json:"peers"`     // other sidecars of the host
	HitRatio       float64                   `json:"hit_ratio"` // pages found of pages asked for; 0 before the first lookup
	Limited        uint64                    `json:"limited"`   // lookups and stores cut short by their session's share or its leases
	Evictions      map[string]uint64         `json:"evictions"` // chunks, by cause
	Spaces         []SpaceStatus             `json:"spaces"`
	Sessions       []connector.SessionStatus `json:"sessions"`
	// Lingering sessions were given up while their clients live. They hold what they held, and count for sessions.limit.
	Lingering []connector.LingeringStatus `json:"lingering"`
	Counters  connector.Counters          `json:"counters"`
}

// SlotStatus counts the slots of regions in use. Leased ones are ready ones as well.
type SlotStatus struct {
	Total   int `json:"total"`
	Free    int `json:"free"`
	Filling int `json:"filling"`
	Ready   int `json:"ready"`
	Leased  int `json:"leased"`
}

// LookupStatus describes the lookups.
type LookupStatus struct {
	InFlight       int    `json:"in_flight"` // answered, and holding leases
	Expired        uint64 `json:"expired"`
	AnswersDropped uint64 `json:"answers_dropped"`
	Floods         uint64 `json:"floods"`
	Waiting        int    `json:"waiting"`  // for tiers, or for restored chunks to be verified
	Refused        uint64 `json:"refused"`  // answered by the arena alone, because too many waited
	Late           uint64 `json:"late"`     // answered with what there was at their deadline
	Cut            uint64 `json:"cut"`      // a part was left to be computed, being faster
	Verified       uint64 `json:"verified"` // waited for restored chunks to be verified
}

// PromotionStatus describes what comes up from the tiers.
type PromotionStatus struct {
	InFlight int    `json:"in_flight"` // chunks
	Chunks   uint64 `json:"chunks"`    // for which room was made
	Joined   uint64 `json:"joined"`    // chunks that were on their way for another lookup
	Failed   uint64 `json:"failed"`    // chunks that no tier could load
	Late     uint64 `json:"late"`      // chunks that came when a store had been first
	Pages    uint64 `json:"pages"`     // that came
}

// VerificationStatus describes the chunks that were restored with the arena, which are verified before their first use.
type VerificationStatus struct {
	Unverified int    `json:"unverified"` // that are still to be
	Verified   uint64 `json:"verified"`
	Corrupt    uint64 `json:"corrupt"` // dropped, for they did not match their checksums
}

// SpaceStatus is one space and what it holds.
type SpaceStatus struct {
	connector.SpaceStatus
	Chunks int `json:"chunks"`
	Pages  int `json:"pages"`
}

// Status returns a snapshot. Its parts are of slightly different moments.
func (d *Daemon) Status() Status {
	e, c, l, w := d.engine.Stats(), d.server.Status(), d.lookups.Stats(), d.stack.LookupStats()
	st := Status{
		Version:    Version,
		PID:        os.Getpid(),
		State:      stateServing,
		Generation: fmt.Sprintf("%016x", d.generation),
		Endpoint:   d.cfg.Runtime.Dir,
		UptimeS:    time.Since(d.start).Seconds(),
		Arena:      d.arena.status(&e),
		Slots: SlotStatus{
			Total: e.Slots, Free: e.FreeSlots, Filling: e.FillingSlots, Ready: e.ReadySlots, Leased: e.LeasedSlots,
		},
		Leases:         e.Leases,
		Pages:          e.Pages,
		MetadataBytes:  e.MetadataBytes,
		StoresInFlight: e.OpenStores,
		LoadsInFlight:  e.OpenLoads,
		Lookups: LookupStatus{
			InFlight: e.OpenLookups, Expired: e.Expired, AnswersDropped: l.Dropped + l.NoSession, Floods: l.FloodBreaks,
			Waiting: w.Pending, Refused: w.Refused, Late: w.Late, Cut: w.Cut, Verified: w.Verified,
		},
		Promotions: PromotionStatus{
			InFlight: e.Promoting, Chunks: e.Promotions, Joined: e.PromotionsJoined, Failed: e.PromotionsFailed, Late: e.PromotionsLate, Pages: e.PromotedPages,
		},
		Verifications: VerificationStatus{Unverified: e.Unverified, Verified: e.Verified, Corrupt: e.VerifyFailed},
		Pins:          len(d.Pins()),
		Tiers:         d.Tiers(),
		Peers:         d.peers.status(),
		Evictions: map[string]uint64{
			"room": e.Evictions, "cleared": e.Cleared, "bad": e.Bad, "duplicate": e.Duplicates, "replaced": e.Replaced,
		},
		Spaces:    []SpaceStatus{},
		Sessions:  c.Sessions,
		Lingering: c.Lingering,
		Limited:   e.Limited,
		Counters:  c.Counters,
	}
	if c.Draining {
		st.State = stateDraining
	}
	if n := c.Counters.LookupPages; n > 0 {
		st.HitRatio = float64(c.Counters.HitPages) / float64(n)
	}
	held := d.engine.Spaces()
	for _, sp := range c.Spaces {
		s := SpaceStatus{SpaceStatus: sp}
		if i := slices.IndexFunc(held, func(h tiers.SpaceStats) bool { return h.Fingerprint.String() == sp.Fingerprint }); i >= 0 {
			s.Chunks, s.Pages = held[i].Chunks, held[i].Pages
		}
		st.Spaces = append(st.Spaces, s)
	}
	return st
}

// WriteTable writes the status for people.
func (st Status) WriteTable(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(tw, name+"\t"+format+"\n", args...) }
	a, n := st.Arena, st.Counters
	row("sidecar", "%s, pid %d, %s for %s, version %s", st.Endpoint, st.PID, st.State, time.Duration(st.UptimeS*float64(time.Second)).Round(time.Second), st.Version)
	if x := a.DAX; x != nil {
		row("arena", "%s used of %s on %d DAX devices, in %d regions", dax.FormatSize(a.UsedBytes), dax.FormatSize(a.CapacityBytes), len(x.Devices), len(a.Regions))
		row("kept", "%d chunks, %d wait; %d were found at the start; %d were corrupt, %d unreadable", x.KeptChunks, x.WaitingChunks, x.RecoveredChunks, x.CorruptChunks, x.UnreadableChunks)
		if x.SlabsGivenUp > 0 {
			row("failing", "%d of %d slabs are given up: %s", x.SlabsGivenUp, x.Slabs, x.Error)
		}
	} else {
		row("arena", "%s used of %s in %d regions (%s), limit %s", dax.FormatSize(a.UsedBytes), dax.FormatSize(a.CapacityBytes), len(a.Regions), a.Kind, dax.FormatSize(a.LimitBytes))
	}
	row("slots", "%d free, %d ready (%d leased), %d filling; %d leases", st.Slots.Free, st.Slots.Ready, st.Slots.Leased, st.Slots.Filling, st.Leases)
	row("pages", "%d held, %d stored (%s), %d loaded (%s), %d shed", st.Pages, n.StoredPages, dax.FormatSize(int64(n.StoredBytes)), n.LoadedPages, dax.FormatSize(int64(n.LoadedBytes)), n.ShedPages)
	row("lookups", "%d, %d holding leases, %d waiting for tiers; hit ratio %.3f, %d tokens hit", n.Lookups, st.Lookups.InFlight, st.Lookups.Waiting, st.HitRatio, n.HitTokens)
	if p := st.Promotions; len(st.Tiers) > 0 {
		row("promotions", "%d chunks, %d under way, %d failed; %d pages came; %d lookups late, %d cut for computing is faster", p.Chunks, p.InFlight, p.Failed, p.Pages, st.Lookups.Late, st.Lookups.Cut)
	}
	if v := st.Verifications; v != (VerificationStatus{}) {
		row("restored", "%d chunks verified, %d corrupt, %d not used so far; %d lookups waited for it", v.Verified, v.Corrupt, v.Unverified, st.Lookups.Verified)
	}
	st.Peers.write(tw, n.ElsewherePages)
	if st.Pins > 0 {
		row("pins", "%d", st.Pins)
	}
	row("under way", "%d stores, %d loads", st.StoresInFlight, st.LoadsInFlight)
	row("evictions", "%s", counts(st.Evictions))
	row("errors", "%s", counts(n.Errors))
	if err := tw.Flush(); err != nil {
		return err
	}
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
	if len(st.Spaces) > 0 {
		fmt.Fprintln(tw, "\nSPACE\tPAGES\tCHUNKS\tSESSIONS\tPAGE\tTOKENS/PAGE\tPAGES/CHUNK\tMODEL")
		for _, s := range st.Spaces {
			fmt.Fprintf(tw, "%.12s\t%d\t%d\t%d\t%s\t%d\t%d\t%s\n", s.Fingerprint, s.Pages, s.Chunks, s.SpaceStatus.Sessions, dax.FormatSize(s.PageBytes), s.PageTokens, s.PagesPerChunk, s.Fields["model"])
		}
	}
	if len(st.Sessions) > 0 {
		fmt.Fprintln(tw, "\nSESSION\tROLE\tENGINE\tRANK\tPID\tSPACE\tSINCE")
		for _, s := range st.Sessions {
			fmt.Fprintf(tw, "%s\t%s\t%s\t%d\t%d\t%s\t%s\n", s.Session, s.Role, s.EngineID, s.Rank, s.PID, s.Space, s.Since.Format(time.DateTime))
		}
	}
	if len(st.Lingering) > 0 {
		fmt.Fprintln(tw, "\nLINGERING\tENGINE\tRANK\tPID\tSTORES\tLOADS\tSINCE\tWHY")
		for _, s := range st.Lingering {
			fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\n", s.Session, s.EngineID, s.Rank, s.PID, s.Stores, s.Loads, s.GivenUpAt.Format(time.DateTime), s.Why)
		}
	}
	return tw.Flush()
}

// counts writes the counts that are not 0, in the order of their names.
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
