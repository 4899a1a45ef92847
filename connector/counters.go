package connector

import (
	"errors"
	"sync/atomic"

	"lookaside/tiers"
)

// An ErrorKind classifies what went wrong, for the counters.
type ErrorKind int

// The kinds. The first six are those of the engine's sentinels and of the wire's Error codes.
const (
	KindNotFound ErrorKind = iota
	KindStale
	KindIncompatible
	KindBusy
	KindMalformed
	KindClosed
	KindUnknownSession // a lookup for a session that is not connected
	KindHandshake      // a client that left or was too slow before it was welcomed
	KindSend           // a client that did not read in time
	KindInternal
	errorKinds
)

var kindNames = [errorKinds]string{"not_found", "stale", "incompatible", "busy", "malformed", "closed", "unknown_session", "handshake", "send", "internal"}

func (k ErrorKind) String() string { return kindNames[k] }

// kindOf classifies an engine's error.
func kindOf(err error) ErrorKind {
	switch {
	case errors.Is(err, tiers.ErrNotFound):
		return KindNotFound
	case errors.Is(err, tiers.ErrStale):
		return KindStale
	case errors.Is(err, tiers.ErrIncompatible):
		return KindIncompatible
	case errors.Is(err, tiers.ErrBusy):
		return KindBusy
	case errors.Is(err, tiers.ErrInvalid):
		return KindMalformed
	case errors.Is(err, tiers.ErrClosed):
		return KindClosed
	}
	return KindInternal
}

// counters count since the start. Any goroutine.
type counters struct {
	lookups        atomic.Uint64
	lookupPages    atomic.Uint64
	hitPages       atomic.Uint64
	hitTokens      atomic.Uint64
	promised       atomic.Uint64
	stores         atomic.Uint64
	storedPages    atomic.Uint64
	storedBytes    atomic.Uint64
	heldPages      atomic.Uint64
	elsewherePages atomic.Uint64
	shedPages      atomic.Uint64
	loads          atomic.Uint64
	loadedPages    atomic.Uint64
	loadedBytes    atomic.Uint64
	badExtents     atomic.Uint64
	sessionsOpened atomic.Uint64
	lingered       atomic.Uint64
	refused        [refusals]atomic.Uint64
	errors         [errorKinds]atomic.Uint64
}

func (c *counters) fail(k ErrorKind) { c.errors[k].Add(1) }

// Counters is what happened since the start.
type Counters struct {
	Lookups        uint64            `json:"lookups"`
	LookupPages    uint64            `json:"lookup_pages"` // asked for
	HitPages       uint64            `json:"hit_pages"`
	HitTokens      uint64            `json:"hit_tokens"`
	Promised       uint64            `json:"promised"` // times that a scheduler was told that its pages are on their way
	Stores         uint64            `json:"stores"`   // committed
	StoredPages    uint64            `json:"stored_pages"`
	StoredBytes    uint64            `json:"stored_bytes"`
	HeldPages      uint64            `json:"held_pages"`      // offered for storing, but held already
	ElsewherePages uint64            `json:"elsewhere_pages"` // of these, those that another sidecar holds
	ShedPages      uint64            `json:"shed_pages"`      // offered for storing, but there was no room
	Loads          uint64            `json:"loads"`           // released
	LoadedPages    uint64            `json:"loaded_pages"`
	LoadedBytes    uint64            `json:"loaded_bytes"`
	BadExtents     uint64            `json:"bad_extents"` // reported bad by a worker that loaded them
	SessionsOpened uint64            `json:"sessions_opened"`
	Lingered       uint64            `json:"lingered"` // sessions that were given up while their clients lived and held something
	Refused        map[string]uint64 `json:"refused"`
	Errors         map[string]uint64 `json:"errors"`
}

func (c *counters) snapshot() Counters {
	s := Counters{
		Lookups:        c.lookups.Load(),
		LookupPages:    c.lookupPages.Load(),
		HitPages:       c.hitPages.Load(),
		HitTokens:      c.hitTokens.Load(),
		Promised:       c.promised.Load(),
		Stores:         c.stores.Load(),
		StoredPages:    c.storedPages.Load(),
		StoredBytes:    c.storedBytes.Load(),
		HeldPages:      c.heldPages.Load(),
		ElsewherePages: c.elsewherePages.Load(),
		ShedPages:      c.shedPages.Load(),
		Loads:          c.loads.Load(),
		LoadedPages:    c.loadedPages.Load(),
		LoadedBytes:    c.loadedBytes.Load(),
		BadExtents:     c.badExtents.Load(),
		SessionsOpened: c.sessionsOpened.Load(),
		Lingered:       c.lingered.Load(),
		Refused:        make(map[string]uint64, refusals),
		Errors:         make(map[string]uint64, errorKinds),
	}
	for i := range c.refused {
		s.Refused[refusalNames[i]] = c.refused[i].Load()
	}
	for i := range c.errors {
		s.Errors[kindNames[i]] = c.errors[i].Load()
	}
	return s
}
