package connector

import (
	"errors"
	"sync/atomic"
	"time"

	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/why"
)

// ErrorKind classifies errors for the counters.
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
	KindForged         // a lookup message or a load without the secret of the session that it names
	KindHandshake      // a client that left or was too slow before it was welcomed
	KindSend           // a client that did not read in time
	KindInternal
	errorKinds
)

var kindNames = [errorKinds]string{"not_found", "stale", "incompatible", "busy", "malformed",
	"closed", "unknown_session", "forged", "handshake", "send", "internal"}

func (k ErrorKind) String() string { return kindNames[k] }

// kindOf returns the kind of an error of the engine.
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

// counters count since the start. Any goroutine may use them.
type counters struct {
	lookups        atomic.Uint64
	lookupPages    atomic.Uint64
	hitPages       atomic.Uint64
	hitTokens      atomic.Uint64
	requests       atomic.Uint64
	askedTokens    atomic.Uint64
	foundTokens    atomic.Uint64
	loadedTokens   atomic.Uint64
	ownTokens      atomic.Uint64
	unpricedTokens atomic.Uint64
	computeMicros  atomic.Uint64
	lookupNanos    atomic.Int64
	loadNanos      atomic.Int64
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
	froze          atomic.Uint64
	advice         adviceCounters
	misses         missCounters
	refused        [refusals]atomic.Uint64
	errors         [errorKinds]atomic.Uint64
}

func (c *counters) fail(k ErrorKind) { c.errors[k].Add(1) }

// prefilled counts one admitted request. perToken is what computing a token takes; 0: not known.
func (c *counters) prefilled(m *wire.Prefilled, perToken float64) {
	c.requests.Add(1)
	c.askedTokens.Add(uint64(m.Tokens))
	c.foundTokens.Add(uint64(m.Found))
	c.loadedTokens.Add(uint64(m.Loaded))
	c.ownTokens.Add(uint64(m.Own))
	if perToken == 0 {
		c.unpricedTokens.Add(uint64(m.Loaded))
	}
	c.computeMicros.Add(uint64(perToken * float64(m.Loaded) * 1e6))
}

// SavedTime estimates how much sooner requests got their first token, in seconds.
type SavedTime struct {
	TTFTS          float64 `json:"ttft_s" doc:"Estimate of the time to first token saved: compute_s less lookup_s and load_s. Below 0 where lookups and loads took longer than computing would have. It does not know of the engine's steps that a load waits for, nor of what a request gains because others compute less."`
	ComputeS       float64 `json:"compute_s" doc:"What vLLM would have computed the loaded tokens in, by the time that its recent prefill steps took for a token."`
	LookupS        float64 `json:"lookup_s" doc:"What lookups took in the sidecar, with what they waited for tiers, also those that found nothing; of an engine whose ranks ask separately, those of the lowest rank."`
	LoadS          float64 `json:"load_s" doc:"What loads took, from the grant of their places to their release, on the lowest rank of each engine."`
	UnpricedTokens uint64  `json:"unpriced_tokens" doc:"Of the loaded tokens, those that compute_s has nothing for: vLLM had not measured its prefills yet."`
}

// Since returns what was saved after an earlier moment.
func (t SavedTime) Since(was SavedTime) SavedTime {
	return SavedTime{TTFTS: t.TTFTS - was.TTFTS, ComputeS: t.ComputeS - was.ComputeS,
		LookupS: t.LookupS - was.LookupS, LoadS: t.LoadS - was.LoadS,
		UnpricedTokens: t.UnpricedTokens - was.UnpricedTokens}
}

func (c *counters) saved() SavedTime {
	t := SavedTime{ComputeS: float64(c.computeMicros.Load()) / 1e6,
		LookupS:        time.Duration(c.lookupNanos.Load()).Seconds(),
		LoadS:          time.Duration(c.loadNanos.Load()).Seconds(),
		UnpricedTokens: c.unpricedTokens.Load()}
	t.TTFTS = t.ComputeS - t.LookupS - t.LoadS
	return t
}

// TokenCount counts the tokens of vLLM's requests that vLLM's own cache did not have, by where they
// came from. Schedulers report them by wire.Prefilled, once each time that a request is admitted.
type TokenCount struct {
	Requests uint64 `json:"requests" doc:"Requests that vLLM admitted; one that was preempted is admitted again."`
	Asked    uint64 `json:"asked" doc:"Their tokens that vLLM's own cache did not have."`
	Found    uint64 `json:"found" doc:"Of the tokens asked for: held by the sidecars of all ranks when vLLM decided what to load."`
	Loaded   uint64 `json:"loaded" doc:"Of the tokens asked for: loaded. A load that failed counts as computed."`
	Computed uint64 `json:"computed" doc:"Of the tokens asked for: not loaded, so that vLLM computes them."`
	Own      uint64 `json:"own" doc:"The other tokens of these requests: vLLM's own cache had them."`
}

// LoadedRatio returns the part of the tokens asked for that were loaded; 0 if none were asked for.
func (c TokenCount) LoadedRatio() float64 { return ratio(c.Loaded, c.Asked) }

// FoundRatio returns the part of the tokens asked for that were held here; 0 if none were asked
// for.
func (c TokenCount) FoundRatio() float64 { return ratio(c.Found, c.Asked) }

func ratio(part, of uint64) float64 {
	if of == 0 {
		return 0
	}
	return float64(part) / float64(of)
}

// Counters are counts since the start.
type Counters struct {
	Tokens  TokenCount `json:"tokens"`
	Saved   SavedTime  `json:"saved" doc:"Time that the loaded tokens saved, estimated."`
	Lookups uint64     `json:"lookups"`
	// pages that lookups asked for, also those that vLLM has itself
	LookupPages uint64 `json:"lookup_pages"`
	// pages that lookups found, also those that nobody loads
	HitPages  uint64 `json:"hit_pages"`
	HitTokens uint64 `json:"hit_tokens"` // the same in tokens
	// LookupPending messages sent
	Promised    uint64 `json:"promised"`
	Stores      uint64 `json:"stores"` // committed
	StoredPages uint64 `json:"stored_pages"`
	StoredBytes uint64 `json:"stored_bytes"`
	// pages offered for storing that are held already
	HeldPages uint64 `json:"held_pages"`
	// the held pages that another sidecar holds
	ElsewherePages uint64 `json:"elsewhere_pages"`
	// pages offered for storing that found no free slot
	ShedPages   uint64 `json:"shed_pages"`
	Loads       uint64 `json:"loads"` // released
	LoadedPages uint64 `json:"loaded_pages"`
	LoadedBytes uint64 `json:"loaded_bytes"`
	// extents that a worker reported bad after loading them
	BadExtents     uint64 `json:"bad_extents"`
	SessionsOpened uint64 `json:"sessions_opened"`
	// sessions given up while their clients lived and held slots
	Lingered uint64 `json:"lingered"`
	// times that a session with slots froze
	Froze  uint64      `json:"froze"`
	Advice AdviceCount `json:"-"`
	// by the reason's name
	Misses  map[string]why.Count `json:"-"`
	Refused map[string]uint64    `json:"refused"`
	Errors  map[string]uint64    `json:"errors"`
}

func (c *counters) snapshot() Counters {
	s := Counters{
		Tokens: TokenCount{Requests: c.requests.Load(), Loaded: c.loadedTokens.Load(),
			Found: c.foundTokens.Load(), Asked: c.askedTokens.Load(),
			Own: c.ownTokens.Load()},
		Saved:          c.saved(),
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
		Froze:          c.froze.Load(),
		Advice:         c.advice.snapshot(),
		Misses:         c.misses.snapshot(),
		Refused:        make(map[string]uint64, refusals),
		Errors:         make(map[string]uint64, errorKinds),
	}
	// Asked is added to first and read last, so it is never less than Loaded.
	s.Tokens.Computed = s.Tokens.Asked - s.Tokens.Loaded
	for i := range c.refused {
		s.Refused[refusalNames[i]] = c.refused[i].Load()
	}
	for i := range c.errors {
		s.Errors[kindNames[i]] = c.errors[i].Load()
	}
	return s
}
