package admin

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/tenant"
)

// arenaName is the arena's name in lists of tiers.
const arenaName = "arena"

// maxPins bounds the number of pins. The engine bounds what they hold to the share of one session.
const maxPins = 1024

// pins holds the pins made over the admin server. The engine knows them by handles.
type pins struct {
	mu   sync.Mutex
	list map[uint64]PinStatus
}

// findSpace returns the open space that a request names.
func (o *Operations) findSpace(name string) (engine.SpaceStats, error) {
	open := o.Engine.Spaces()
	var names []string
	var found []engine.SpaceStats
	for _, s := range open {
		names = append(names, s.Fingerprint.Short())
		if strings.HasPrefix(s.Fingerprint.String(), strings.ToLower(name)) {
			found = append(found, s)
		}
	}
	fix := "open are: " + strings.Join(names, ", ")
	if len(open) == 0 {
		fix = "let a worker connect first: it says what its pages are"
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1 && name == "":
		return engine.SpaceStats{}, apiError(http.StatusBadRequest, fix,
			"there are %d spaces: say which is meant", len(open))
	case len(found) > 1:
		return engine.SpaceStats{}, apiError(http.StatusBadRequest, fix, "%d spaces begin with %q",
			len(found), name)
	case name == "":
		return engine.SpaceStats{}, apiError(http.StatusNotFound, fix, "no space is open")
	}
	return engine.SpaceStats{}, apiError(http.StatusNotFound, fix,
		"no space that is open begins with %q", name)
}

// find returns the space and hashes of the prefix that a request names.
func (o *Operations) find(r PrefixRequest) (sp engine.SpaceStats, hashes []byte, err error) {
	if sp, err = o.findSpace(r.Space); err != nil {
		return sp, nil, err
	}
	hashes, n, err := ParseHashes(r.Hashes)
	if err != nil {
		return sp, nil, apiError(http.StatusBadRequest,
			"give every hash in hexadecimal, all of one length", "hashes: %v", err)
	}
	if n != sp.Geometry.DigestBytes {
		return sp, nil, apiError(http.StatusBadRequest,
			fmt.Sprintf("give %d hexadecimal digits a hash", 2*sp.Geometry.DigestBytes),
			"hashes have %d bytes, and those of space %s have %d", n, sp.Fingerprint.Short(),
			sp.Geometry.DigestBytes)
	}
	if len(r.Hashes) > o.Settings.Lookup.MaxPages {
		return sp, nil, apiError(http.StatusRequestEntityTooLarge,
			"name fewer pages, or raise lookup.max_pages",
			"%d hashes are more than lookup.max_pages, %d", len(r.Hashes),
			o.Settings.Lookup.MaxPages)
	}
	return sp, hashes, nil
}

// progress describes how far an operation got before it ended with err. Reaching its deadline is
// not a failure.
func progress(sp engine.SpaceStats, r PrefixRequest, pages int, start time.Time,
	err error) (ProgressResult, error) {
	out := ProgressResult{Space: sp.Fingerprint.String(), PagesAsked: len(r.Hashes), Pages: pages,
		Complete: err == nil, Seconds: time.Since(start).Seconds()}
	if errors.Is(err, context.DeadlineExceeded) {
		err = nil
	}
	return out, err
}

// Pin keeps the pages of a prefix that the arena holds.
func (o *Operations) Pin(ctx context.Context, r PinRequest) (PinStatus, error) {
	sp, hashes, err := o.find(r.PrefixRequest)
	if err != nil {
		return PinStatus{}, err
	}
	ctx, cancel := r.bound(ctx)
	defer cancel()
	if r.Prefetch {
		_, err = o.Stack.Prefetch(ctx, sp.ID, tenant.None, hashes)
	} else {
		err = o.Stack.Verify(ctx, sp.ID, hashes)
	}
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return PinStatus{}, err
	}
	o.pins.mu.Lock()
	defer o.pins.mu.Unlock()
	if len(o.pins.list) >= maxPins {
		return PinStatus{}, apiError(http.StatusServiceUnavailable, "unpin some",
			"there are %d pins, and there may be no more", maxPins)
	}
	handle, pages, err := o.Engine.Pin(sp.ID, hashes)
	if err != nil {
		return PinStatus{}, err
	}
	if pages == 0 {
		return PinStatus{}, apiError(http.StatusNotFound,
			"store it first; or set prefetch, if a tier has it",
			"nothing of the prefix is in the arena, or pins have their share of it")
	}
	p := PinStatus{
		Pin: fmt.Sprintf("%016x", handle), Space: sp.Fingerprint.String(),
		PagesAsked: len(r.Hashes), Pages: pages, Label: r.Label, Since: time.Now(),
	}
	if o.pins.list == nil {
		o.pins.list = make(map[uint64]PinStatus)
	}
	o.pins.list[handle] = p
	return p, nil
}

// Pins lists the pins, oldest first.
func (o *Operations) Pins() []PinStatus {
	o.pins.mu.Lock()
	defer o.pins.mu.Unlock()
	out := make([]PinStatus, 0, len(o.pins.list))
	for _, p := range o.pins.list {
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b PinStatus) int {
		return cmp.Or(a.Since.Compare(b.Since),
			strings.Compare(a.Pin, b.Pin))
	})
	return out
}

// AdoptPins takes over the pins of the process before, whose leases the engine has taken over.
// Those that it does not have are left out.
func (o *Operations) AdoptPins(pins []PinStatus) {
	o.pins.mu.Lock()
	defer o.pins.mu.Unlock()
	for _, p := range pins {
		handle, err := strconv.ParseUint(p.Pin, 16, 64)
		if err != nil || len(o.pins.list) >= maxPins || !o.Engine.Pinned(handle) {
			continue
		}
		if o.pins.list == nil {
			o.pins.list = make(map[uint64]PinStatus)
		}
		o.pins.list[handle] = p
	}
}

// Unpin ends one pin, or all.
func (o *Operations) Unpin(_ context.Context, r UnpinRequest) (UnpinResult, error) {
	if r.All == (r.Pin != "") {
		return UnpinResult{}, apiError(http.StatusBadRequest, "give the id of a pin, or all",
			"it does not say what to unpin")
	}
	n, err := o.unpin(func(p PinStatus) bool { return r.All || p.Pin == r.Pin })
	if n == 0 && err == nil && !r.All {
		err = apiError(http.StatusNotFound, "GET /v1/pins lists them", "there is no pin %q", r.Pin)
	}
	return UnpinResult{n}, err
}

// unpin ends the pins that match.
func (o *Operations) unpin(match func(PinStatus) bool) (n int, err error) {
	o.pins.mu.Lock()
	defer o.pins.mu.Unlock()
	for handle, p := range o.pins.list {
		if match(p) {
			delete(o.pins.list, handle)
			n++
			// A pin that the engine has already ended is fine.
			if e := o.Engine.Unpin(handle); e != nil && !errors.Is(e, tiers.ErrNotFound) &&
				!errors.Is(e, tiers.ErrStale) {
				err = errors.Join(err, e)
			}
		}
	}
	return n, err
}

// fingerprint returns the space that a request to clear names: an open one, or any by its whole
// fingerprint.
func (o *Operations) fingerprint(name string) (tiers.Fingerprint, error) {
	var fp tiers.Fingerprint
	if b, err := hex.DecodeString(name); err == nil && len(b) == len(fp) {
		return tiers.Fingerprint(b), nil
	}
	sp, err := o.findSpace(name)
	return sp.Fingerprint, err
}

// knownTier returns an error if no tier has the name.
func (o *Operations) knownTier(key, name string) error {
	names := []string{arenaName}
	for i := range o.Settings.Tiers {
		names = append(names, o.Settings.Tiers[i].Name)
	}
	if slices.Contains(names, name) {
		return nil
	}
	return apiError(http.StatusNotFound, fmt.Sprintf("the nearest is %q; there are: %s",
		settings.Nearest(name, names), strings.Join(names, ", ")), "%s: there is no tier %q", key,
		name)
}

// Tiers lists the tiers, nearest first.
func (o *Operations) Tiers() []TierStatus {
	out := []TierStatus{}
	for _, st := range o.Stack.Status() {
		out = append(out, tierStatus(&st))
	}
	return out
}

// Prefetch loads a prefix into the arena.
func (o *Operations) Prefetch(ctx context.Context, r PrefetchRequest) (ProgressResult, error) {
	start := time.Now()
	sp, hashes, err := o.find(r.PrefixRequest)
	if err != nil {
		return ProgressResult{}, err
	}
	ctx, cancel := r.bound(ctx)
	defer cancel()
	pages, err := o.Stack.Prefetch(ctx, sp.ID, tenant.None, hashes)
	return progress(sp, r.PrefixRequest, pages, start, err)
}

// Move moves or copies a prefix from one tier to another.
func (o *Operations) Move(ctx context.Context, r MoveRequest) (ProgressResult, error) {
	start := time.Now()
	if err := errors.Join(o.knownTier("from", r.From), o.knownTier("to", r.To)); err != nil {
		return ProgressResult{}, err
	}
	if r.From == r.To {
		return ProgressResult{}, apiError(http.StatusBadRequest, "name two tiers",
			"from and to are both %q", r.To)
	}
	sp, hashes, err := o.find(r.PrefixRequest)
	if err != nil {
		return ProgressResult{}, err
	}
	ctx, cancel := r.bound(ctx)
	defer cancel()
	pages, err := o.Stack.Move(ctx, sp.ID, hashes, r.From, r.To, r.Keep)
	return progress(sp, r.PrefixRequest, pages, start, err)
}

// Clear drops the chunks of a space, of all spaces, or of a prefix.
func (o *Operations) Clear(ctx context.Context, r ClearRequest) (ClearResult, error) {
	start := time.Now()
	if r.Tier != "" {
		if err := o.knownTier("tier", r.Tier); err != nil {
			return ClearResult{}, err
		}
	}
	ctx, cancel := r.bound(ctx)
	defer cancel()
	out := ClearResult{Cleared: []ClearedTier{}, Complete: true}
	clearing := o.clearSpace
	if len(r.Hashes) > 0 {
		clearing = o.clearPrefix
	}
	cleared, err := clearing(ctx, r, &out)
	if err != nil {
		return out, err
	}
	for _, c := range cleared {
		t := ClearedTier{Tier: c.Tier, Chunks: c.Chunks}
		if c.Err != nil {
			t.Error, out.Complete = c.Err.Error(), false
		}
		out.Cleared = append(out.Cleared, t)
	}
	out.Seconds = time.Since(start).Seconds()
	o.Log.Info("cleared", zap.Bool("all", r.All), zap.String("space", r.Space),
		zap.Int("pages", len(r.Hashes)), zap.String("tier", r.Tier),
		zap.Any("dropped", out.Cleared), zap.Int("pins", out.Pins))
	return out, nil
}

// clearSpace drops the chunks of a space, or of all spaces.
func (o *Operations) clearSpace(ctx context.Context, r ClearRequest,
	out *ClearResult) ([]stack.Cleared,
	error) {
	var fp tiers.Fingerprint // zero: everything
	if r.All == (r.Space != "") {
		return nil, apiError(http.StatusBadRequest, "give a space, hashes, or all",
			"it does not say what to clear")
	}
	if r.FirstPage > 0 {
		return nil, apiError(http.StatusBadRequest, "give hashes, too",
			"first_page counts the pages of a prefix, and no hashes are given")
	}
	if !r.All {
		var err error
		if fp, err = o.fingerprint(r.Space); err != nil {
			return nil, err
		}
	}
	if r.Tier == "" || r.Tier == arenaName {
		// Pins first: pinned chunks would stay in their slots.
		var err error
		if out.Pins, err = o.unpin(func(p PinStatus) bool {
			return r.All ||
				p.Space == fp.String()
		}); err != nil {
			return nil, err
		}
	}
	return o.Stack.Clear(ctx, fp, r.Tier)
}

// clearPrefix drops the chunks of a prefix.
func (o *Operations) clearPrefix(ctx context.Context, r ClearRequest,
	_ *ClearResult) ([]stack.Cleared,
	error) {
	if r.All {
		return nil, apiError(http.StatusBadRequest, "leave all or hashes out",
			"it says to clear all, and one prefix")
	}
	sp, hashes, err := o.find(PrefixRequest{Space: r.Space, Hashes: r.Hashes})
	if err != nil {
		return nil, err
	}
	if r.FirstPage >= len(r.Hashes) {
		return nil, apiError(http.StatusBadRequest, "give a smaller first_page",
			"first_page is %d, and there are %d hashes", r.FirstPage, len(r.Hashes))
	}
	return o.Stack.Drop(ctx, sp.ID, hashes, r.FirstPage, r.Tier)
}
