package admin

import (
	"context"
	"time"
)

// maxTimeoutS bounds the timeout of a request, and so how long it can take one of the places.
const maxTimeoutS = 600

// A PrefixRequest names a prefix.
type PrefixRequest struct {
	Space  string   `json:"space,omitempty" maxLength:"64" doc:"Fingerprint of the space in hexadecimal, or enough of its beginning to name one of those that are open. May be left out while only one is."`
	Hashes []string `json:"hashes" minItems:"1" doc:"Page hashes in hexadecimal, of the whole prefix from its first page on."`
}

// A TimeoutRequest bounds an operation.
type TimeoutRequest struct {
	TimeoutS float64 `json:"timeout_s,omitempty" minimum:"0.001" maximum:"600" default:"60" doc:"Seconds after which the answer tells how far it got."`
}

func (r TimeoutRequest) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, time.Duration(r.TimeoutS*float64(time.Second)))
}

// PrefetchRequest is the body of POST /v1/prefetch.
type PrefetchRequest struct {
	PrefixRequest
	TimeoutRequest
}

// ProgressResult describes how far an operation on a prefix got.
type ProgressResult struct {
	Space      string  `json:"space" doc:"Fingerprint of the space."`
	PagesAsked int     `json:"pages_asked" doc:"Pages that the request names."`
	Pages      int     `json:"pages" doc:"Pages, from the first on, that are where they were wanted."`
	Complete   bool    `json:"complete" doc:"False when the time ran out before the end."`
	Seconds    float64 `json:"seconds" doc:"How long it took."`
}

// PinRequest is the body of POST /v1/pin.
type PinRequest struct {
	PrefixRequest
	TimeoutRequest
	Prefetch bool   `json:"prefetch,omitempty" doc:"Bring what the tiers have into the arena first."`
	Label    string `json:"label,omitempty" maxLength:"200" doc:"What the pin is for; shown with it."`
}

// PinStatus is one pin.
type PinStatus struct {
	Pin        string    `json:"pin" doc:"Its id, for unpinning."`
	Space      string    `json:"space" doc:"Fingerprint of the space."`
	PagesAsked int       `json:"pages_asked" doc:"Pages that the request named."`
	Pages      int       `json:"pages" doc:"Pages, from the first on, that are pinned."`
	Label      string    `json:"label" doc:"As given."`
	Since      time.Time `json:"since" doc:"When it was made."`
}

// PinsResult is the response of GET /v1/pins.
type PinsResult struct {
	Pins []PinStatus `json:"pins" doc:"Oldest first."`
}

// UnpinRequest is the body of POST /v1/unpin.
type UnpinRequest struct {
	Pin string `json:"pin,omitempty" maxLength:"16" doc:"The id of one pin."`
	All bool   `json:"all,omitempty" doc:"All pins."`
}

// UnpinResult is the response of POST /v1/unpin.
type UnpinResult struct {
	Unpinned int `json:"unpinned" doc:"Pins that were ended."`
}

// ClearRequest is the body of POST /v1/clear.
type ClearRequest struct {
	TimeoutRequest
	Space     string   `json:"space,omitempty" maxLength:"64" doc:"Fingerprint of the space in hexadecimal; enough of its beginning if it is open."`
	All       bool     `json:"all,omitempty" doc:"All spaces, also those that are not open. This, space or hashes are needed."`
	Hashes    []string `json:"hashes,omitempty" doc:"Page hashes in hexadecimal, of a whole prefix from its first page on: only that is forgotten, and what continues it is not found any more."`
	FirstPage int      `json:"first_page,omitempty" minimum:"0" doc:"With hashes: the first page that is forgotten. Those before it stay, but for what is in one chunk with it."`
	Tier      string   `json:"tier,omitempty" maxLength:"32" doc:"Name of a tier, or arena. Left out: the arena and all tiers."`
}

// ClearResult is the response of POST /v1/clear.
type ClearResult struct {
	Cleared  []ClearedTier `json:"cleared" doc:"In the order of the tiers, the arena first."`
	Pins     int           `json:"pins" doc:"Pins that ended because what they held was cleared."`
	Complete bool          `json:"complete" doc:"False when the time ran out or a tier failed."`
	Seconds  float64       `json:"seconds" doc:"How long it took."`
}

// ClearedTier describes what was cleared in one tier.
type ClearedTier struct {
	Tier   string `json:"tier" doc:"Name of the tier, or arena."`
	Chunks int    `json:"chunks" doc:"Chunks that were dropped; -1 where that cannot be known."`
	Error  string `json:"error" doc:"Why it was not cleared; empty if it was."`
}

// MoveRequest is the body of POST /v1/move.
type MoveRequest struct {
	PrefixRequest
	TimeoutRequest
	From string `json:"from" minLength:"1" maxLength:"32" doc:"Name of the tier to move from."`
	To   string `json:"to" minLength:"1" maxLength:"32" doc:"Name of the tier to move to."`
	Keep bool   `json:"keep,omitempty" doc:"Copy: leave the chunks where they were as well."`
}
