package admin

import (
	"fmt"
	"io"
	"strings"

	"lookaside/internal/bytesize"
	"lookaside/tiers/peer"
)

// PeersStatus describes the sharing with other sidecars of the host.
type PeersStatus struct {
	Enabled bool `json:"enabled" doc:"Whether anything is shared: peers.enabled, and events.journal is not 0."`
	peer.Status
	Borrowing BorrowingStatus `json:"borrowing"`
}

// BorrowingStatus describes what this sidecar has borrowed. Counters are totals since the start.
type BorrowingStatus struct {
	Slots       int    `json:"slots" doc:"Chunks for which there are tables so far, at most 65,536 of a geometry."`
	Used        int    `json:"used" doc:"Chunks that are borrowed."`
	Leased      int    `json:"leased" doc:"Of these, those in use by lookups and loads."`
	Pages       int    `json:"pages" doc:"Pages that can be found in what is borrowed."`
	Lookups     uint64 `json:"lookups" doc:"Lookups that wanted chunks of others."`
	Chunks      uint64 `json:"chunks" doc:"Chunks borrowed."`
	Joined      uint64 `json:"joined" doc:"Chunks that were being borrowed for another lookup already."`
	Failed      uint64 `json:"failed" doc:"Times that nothing could be borrowed."`
	Short       uint64 `json:"short" doc:"Times that less could be borrowed than was asked for."`
	Late        uint64 `json:"late" doc:"Chunks borrowed for lookups that had ended meanwhile."`
	Void        uint64 `json:"void" doc:"Chunks whose sidecar went before they were used."`
	Retried     uint64 `json:"retried" doc:"Lookups that went on with the tiers after others had failed."`
	Copied      uint64 `json:"copied" doc:"Chunks copied into the own arena, being read often (peers.copy_after)."`
	CopiedPages uint64 `json:"copied_pages" doc:"Pages in them."`
	NotCopied   uint64 `json:"not_copied" doc:"Times that a chunk was to be copied, and was not: there was no room for it, its bytes could not be read, or its sidecar went."`
	Returned    uint64 `json:"returned" doc:"Chunks given back."`
	Bad         uint64 `json:"bad" doc:"Of these, those whose bytes did not check out."`
}

// write writes the status for people. It writes nothing if there is nothing to report.
func (st *PeersStatus) write(w io.Writer, skipped uint64) {
	if !st.Enabled {
		fmt.Fprintf(w, "peers\toff\n")
		return
	}
	if st.Off != "" {
		fmt.Fprintf(w, "peers\toff: %s\n", st.Off)
		return
	}
	b := &st.Borrowing
	fmt.Fprintf(w, "peers\t%d, which hold %d pages (%s of hints); %d pages borrowed, %d chunks of others here now; %d pages copied; %d pages lent; %d pages not stored, being there\n",
		len(st.Lenders), st.HintPages, bytesize.Format(st.HintBytes), st.BorrowedPages, b.Used,
		b.CopiedPages, st.LentPages, skipped)
	for _, l := range st.Lenders {
		if len(l.Devices) > 0 {
			var on []string
			for _, d := range l.Devices {
				on = append(on, fmt.Sprintf("%s (%s, %s)", d.Path, d.Kind,
					bytesize.Format(d.SizeBytes)))
			}
			fmt.Fprintf(w, "peer\tpid %d holds %d pages on %s; %d borrowed, %d of its chunks here now\n", l.PID, l.Pages, strings.Join(on, ", "), l.Borrowed, l.Loans)
		}
		for _, u := range l.Unshared {
			fmt.Fprintf(w, "not shared\tspace %s with pid %d, whose %s is much like it: %s\n",
				u.Ours, l.PID, u.Peers, u.Why())
		}
	}
	for _, u := range st.Unusable {
		fmt.Fprintf(w, "not shared\twith sidecar %s, pid %d: %s\n", u.Peer, u.PID, u.Why)
	}
}
