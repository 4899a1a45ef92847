package admin

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"lookaside/internal/bytesize"
	"lookaside/tiers/stack"
)

// TierStatus describes one tier at one moment. Counters are totals since the start.
type TierStatus struct {
	Name   string `json:"name" doc:"Its name in the settings."`
	Kind   string `json:"kind" doc:"dax, disk, redis or s3."`
	Admit  string `json:"admit" doc:"When a chunk is written to it: stored, reused, evicted or never."`
	State  string `json:"state" doc:"State of its breaker. closed: in use; open: off for a while, because it failed; probing: being tried. down: nothing of it is there, as after a disk has failed; it is tried again."`
	Error  string `json:"error" doc:"Its last failure; empty if there was none."`
	Detail string `json:"detail" doc:"Where it is."`
	Local  bool   `json:"local" doc:"Whether it knows from memory what it holds."`
	Lossy  bool   `json:"lossy" doc:"Whether what comes back may differ from what was stored (an opt-in)."`

	CapacityBytes int64  `json:"capacity_bytes" doc:"-1 where it cannot be known."`
	UsedBytes     int64  `json:"used_bytes" doc:"-1 where it cannot be known."`
	Chunks        int64  `json:"chunks" doc:"That it holds; -1 where it cannot be known."`
	Pages         int64  `json:"pages" doc:"That it holds; -1 where it cannot be known."`
	Evictions     uint64 `json:"evictions" doc:"Chunks that it dropped for room."`
	CorruptChunks uint64 `json:"corrupt_chunks" doc:"Chunks that did not match their checksum, and were dropped."`

	Lookups      uint64 `json:"lookups" doc:"Lookups that asked it."`
	LookupPages  uint64 `json:"lookup_pages" doc:"Pages that they asked it for."`
	HitPages     uint64 `json:"hit_pages" doc:"Pages that it had of those."`
	LoadedChunks uint64 `json:"loaded_chunks" doc:"Chunks brought up from it."`
	LoadedBytes  uint64 `json:"loaded_bytes" doc:"Bytes of those."`
	StoredChunks uint64 `json:"stored_chunks" doc:"Chunks written to it."`
	StoredBytes  uint64 `json:"stored_bytes" doc:"Bytes of those."`
	Demoted      uint64 `json:"demoted_chunks" doc:"Of the chunks written to it, those that the tier above was about to drop."`
	LoadQueue    int    `json:"load_queue_chunks" doc:"Chunks that wait to be loaded or are being."`
	StoreQueue   int    `json:"store_queue_chunks" doc:"Chunks that wait to be written."`
	Shed         uint64 `json:"shed_chunks" doc:"Chunks that were not written, because its queue was full or they were evicted before their turn."`
	Declined     uint64 `json:"declined_chunks" doc:"Chunks that were not written, because they were not worth it (admit: learned)."`
	NoRoom       uint64 `json:"no_room_chunks" doc:"Chunks for which it had no room."`
	Missed       uint64 `json:"missed_chunks" doc:"Chunks that it had said it has, and did not have when they were loaded."`

	LookupFailures uint64 `json:"lookup_failures" doc:"Lookups of it that failed or were late."`
	LoadFailures   uint64 `json:"load_failures" doc:"Chunks that could not be loaded, or not in time."`
	StoreFailures  uint64 `json:"store_failures" doc:"Chunks that could not be written, or not in time."`
	Late           uint64 `json:"late" doc:"Of all failures, those by time."`
	Opened         uint64 `json:"breaker_opened" doc:"Times that its breaker opened."`

	LookupS        float64 `json:"lookup_s" doc:"Estimate of a lookup's seconds; 0 where it is local, or not known."`
	LatencyS       float64 `json:"latency_s" doc:"Estimate of the seconds until a load's first byte."`
	BytesPerSecond float64 `json:"bytes_per_second" doc:"Estimate of how fast it loads; 0 before the first load."`
}

// tierStatus converts a stack's status of a tier to the form that operators see.
func tierStatus(st *stack.TierStatus) TierStatus {
	if st.Down != "" {
		st.Breaker, st.LastError = breakerDown, st.Down
	}
	return TierStatus{
		Name: st.Name, Kind: st.Kind, Admit: st.Admit, State: st.Breaker, Error: st.LastError,
		Detail: st.Detail, Local: st.Local, Lossy: st.Lossy,
		CapacityBytes: st.CapacityBytes, UsedBytes: st.UsedBytes, Chunks: st.Chunks,
		Pages: st.Pages, Evictions: st.Evictions, CorruptChunks: st.Corrupt,
		Lookups: st.Lookups, LookupPages: st.LookupPages, HitPages: st.HitPages,
		LoadedChunks: st.Loads, LoadedBytes: st.LoadBytes, StoredChunks: st.Stores,
		StoredBytes: st.StoreBytes, Demoted: st.Demoted,
		LoadQueue: st.LoadQueue, StoreQueue: st.StoreQueue, Shed: st.Shed,
		Declined: st.Declined, NoRoom: st.NoRoom,
		Missed:         st.Missed,
		LookupFailures: st.LookupFailures, LoadFailures: st.LoadFailures,
		StoreFailures: st.StoreFailures, Late: st.Late, Opened: st.Opened,
		LookupS: st.LookupSeconds, LatencyS: st.LatencySeconds, BytesPerSecond: st.BytesPerSecond,
	}
}

// TiersResult is the response of GET /v1/tiers.
type TiersResult struct {
	Tiers []TierStatus `json:"tiers" doc:"Nearest first."`
}

// WriteTable writes the tiers for people.
func (r TiersResult) WriteTable(w io.Writer) error {
	if len(r.Tiers) == 0 {
		_, err := fmt.Fprintln(w,
			"no tiers: the arena is all there is (see --dax, --disk, --redis, --s3 of lookaside serve)")
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	writeTiers(tw, r.Tiers)
	fmt.Fprintln(tw)
	for _, t := range r.Tiers {
		fmt.Fprintf(tw, "%s: %s\n", t.Name, t.Detail)
		if t.Error != "" {
			fmt.Fprintf(tw, "%s: last failure: %s\n", t.Name, t.Error)
		}
	}
	return tw.Flush()
}

// writeTiers writes the table of tiers.
func writeTiers(tw io.Writer, list []TierStatus) {
	fmt.Fprintln(tw, "TIER\tKIND\tSTATE\tADMITS\tUSED\tCHUNKS\tHIT PAGES\tLOADED\tSTORED\tQUEUED\tSHED\tFAILED\tCORRUPT\tLATENCY\tSPEED")
	for _, t := range list {
		used, chunks, latency, speed := "?", "?", "-", "-"
		if t.UsedBytes >= 0 {
			used = bytesize.Format(t.UsedBytes)
			if t.CapacityBytes > 0 {
				used += " of " + bytesize.Format(t.CapacityBytes)
			}
		}
		if t.Chunks >= 0 {
			chunks = fmt.Sprint(t.Chunks)
		}
		if t.BytesPerSecond > 0 {
			latency = time.Duration(t.LatencyS * float64(time.Second)).Round(
				time.Microsecond).String()
			speed = bytesize.Format(int64(t.BytesPerSecond)) + "/s"
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\t%d\t%d\t%d\t%d\t%s\t%s\n", t.Name,
			t.Kind, shownState(t.State), t.Admit, used, chunks, t.HitPages,
			bytesize.Format(int64(t.LoadedBytes)), bytesize.Format(int64(t.StoredBytes)),
			t.StoreQueue, t.Shed, t.LookupFailures+t.LoadFailures+t.StoreFailures, t.CorruptChunks,
			latency, speed)
	}
}

// breakerClosed is the State of a tier in use, breakerDown that of a tier of which nothing is open.
const (
	breakerClosed = "closed"
	breakerDown   = "down"
)

// shownState returns the word for a tier's state.
func shownState(breaker string) string {
	switch breaker {
	case breakerClosed:
		return "on"
	case "open", breakerDown:
		return "OFF"
	}
	return breaker
}
