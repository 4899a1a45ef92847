package peer

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Status is a snapshot of the other sidecars and of the traffic with them.
type Status struct {
	Dir       string           `json:"dir"`
	Off       string           `json:"off,omitempty"` // why sharing is off
	Lenders   []LenderStatus   `json:"lenders"`       // that we borrow from
	Borrowers []BorrowerStatus `json:"borrowers"`     // that borrow from us
	Unusable  []UnusableStatus `json:"unusable"`      // sidecars that cannot be used

	HintPages      int     `json:"hint_pages"` // pages that some other is said to hold
	HintBytes      int64   `json:"hint_bytes"` // of memory
	HintsDropped   uint64  `json:"hints_dropped"`
	HintsWrong     uint64  `json:"hints_wrong"` // hints found to be wrong
	HintsHeard     uint64  `json:"hints_heard"`
	HintsTold      uint64  `json:"hints_told"`
	HeardPerSecond float64 `json:"heard_per_second"`
	ToldPerSecond  float64 `json:"told_per_second"`
	Resyncs        uint64  `json:"resyncs"` // full retellings by lenders

	Borrows       uint64 `json:"borrows"`
	FailedBorrows uint64 `json:"failed_borrows"`
	BorrowedPages uint64 `json:"borrowed_pages"`
	Touches       uint64 `json:"touches"`
	Leases        uint64 `json:"leases"` // requested by others
	RefusedLeases uint64 `json:"refused_leases"`
	LentPages     uint64 `json:"lent_pages"`
	Malformed     uint64 `json:"malformed"`
}

// LenderStatus is a sidecar that we borrow from.
type LenderStatus struct {
	Peer     string `json:"peer"` // its generation
	PID      int32  `json:"pid"`
	Pages    int    `json:"pages"`    // said to be held
	Complete bool   `json:"complete"` // all that it holds has been told
	// it does not reply, and is skipped until it does
	Stalled bool `json:"stalled"`
	Gone    bool `json:"gone"` // its connection has ended, but loans are still out
	Regions int  `json:"regions"`
	// that its regions lie on, by path; none for memory
	Devices  []DeviceStatus `json:"devices"`
	Loans    int            `json:"loans"`          // chunks on loan now
	Borrowed uint64         `json:"borrowed_pages"` // since it connected
	Resyncs  uint64         `json:"resyncs"`
	Shared   int            `json:"shared_spaces"`
	// our spaces to which it has a similar, but not the same, space
	Unshared []UnsharedSpace `json:"unshared"`
}

// DeviceStatus is a device or file that a lender's regions lie on.
type DeviceStatus struct {
	Path      string `json:"path"` // as this process sees it
	Kind      string `json:"kind"` // a dax.DeviceKind, or file
	Regions   int    `json:"regions"`
	SizeBytes int64  `json:"size_bytes"` // of these regions
}

// UnsharedSpace says why a space is not shared.
type UnsharedSpace struct {
	Ours        string       `json:"ours"` // short fingerprints
	Peers       string       `json:"peers"`
	Differences []Difference `json:"differences"`
}

// Why returns the reason in one line.
func (u *UnsharedSpace) Why() string {
	parts := make([]string, 0, len(u.Differences))
	for _, d := range u.Differences {
		parts = append(parts, fmt.Sprintf("%s is %q here, %q there", d.Field, d.Ours, d.Theirs))
	}
	return strings.Join(parts, "; ")
}

// BorrowerStatus is a sidecar that borrows from us.
type BorrowerStatus struct {
	Peer    string `json:"peer"`
	PID     int32  `json:"pid"`
	Regions int    `json:"regions"` // that it knows
	Loads   int    `json:"loads"`   // grants not wholly returned
}

// UnusableStatus is a sidecar that cannot be used.
type UnusableStatus struct {
	Peer string `json:"peer"`
	PID  int32  `json:"pid,omitempty"`
	Why  string `json:"why"`
}

// Status returns a snapshot.
func (p *Peers) Status() Status {
	h := p.hints.stats()
	st := Status{
		Dir: p.cfg.Dir, Lenders: []LenderStatus{}, Borrowers: []BorrowerStatus{},
		Unusable:  []UnusableStatus{},
		HintPages: h.pages, HintBytes: h.bytes, HintsDropped: h.dropped,
		HintsWrong: p.wrongHints.Load(), HintsHeard: p.hintsHeard.Load(),
		HintsTold: p.hintsTold.Load(),
		Borrows:   p.borrows.Load(), FailedBorrows: p.failedBorrows.Load(),
		BorrowedPages: p.borrowedPages.Load(), Touches: p.touches.Load(),
		Leases: p.leases.Load(), RefusedLeases: p.refusedLeases.Load(),
		LentPages: p.lentPages.Load(), Malformed: p.malformed.Load(), Resyncs: p.resyncs.Load(),
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	st.Off, st.HeardPerSecond, st.ToldPerSecond = p.off, p.rates.heardPer, p.rates.toldPer
	for _, b := range p.allPeers() {
		l := b.status()
		st.Lenders = append(st.Lenders, l)
	}
	for l := range p.lenders {
		l.mu.Lock()
		if l.welcomed {
			st.Borrowers = append(st.Borrowers, BorrowerStatus{fmt.Sprintf("%016x", l.gen),
				l.conn.Peer().PID, len(l.regions), len(l.loans)})
		}
		l.mu.Unlock()
	}
	for gen, t := range p.troubles {
		st.Unusable = append(st.Unusable, UnusableStatus{fmt.Sprintf("%016x", gen), t.pid, t.why})
	}
	slices.SortFunc(st.Borrowers, func(a, b BorrowerStatus) int {
		return cmp.Compare(a.Peer,
			b.Peer)
	})
	slices.SortFunc(st.Unusable, func(a, b UnusableStatus) int {
		return cmp.Compare(a.Peer,
			b.Peer)
	})
	return st
}

// status returns a lender's status. The caller holds p.mu.
func (b *borrower) status() LenderStatus {
	b.mu.Lock()
	l := LenderStatus{
		Peer: fmt.Sprintf("%016x", b.gen), PID: b.conn.Peer().PID, Complete: b.bit >= 0,
		Stalled: b.stalled, Gone: b.ended, Regions: len(b.regions), Loans: b.out,
		Borrowed: b.borrowed, Resyncs: b.resyncs,
		Devices: []DeviceStatus{}, Unshared: []UnsharedSpace{},
	}
	for _, r := range b.regions {
		if r.path == "" {
			continue
		}
		i, ok := slices.BinarySearchFunc(l.Devices, r.path,
			func(d DeviceStatus, path string) int { return cmp.Compare(d.Path, path) })
		if !ok {
			l.Devices = slices.Insert(l.Devices, i, DeviceStatus{Path: r.path, Kind: r.Kind})
		}
		l.Devices[i].Regions++
		l.Devices[i].SizeBytes += r.SizeBytes
	}
	for _, bit := range []int{b.bit, b.filling} {
		if bit >= 0 {
			l.Pages = max(l.Pages, b.p.hints.held(bit))
		}
	}
	b.mu.Unlock()
	for fp, ours := range b.p.spaces {
		if b.spaces[fp] != nil {
			l.Shared++
		} else if theirs, diff := b.closest(ours); theirs != nil && len(diff) > 0 {
			l.Unshared = append(l.Unshared, UnsharedSpace{fp.Short(), theirs.fp.Short(), diff})
		}
	}
	slices.SortFunc(l.Unshared, func(a, b UnsharedSpace) int { return cmp.Compare(a.Ours, b.Ours) })
	return l
}
