package doctor

import (
	"fmt"
	"slices"
	"strings"

	"lookaside/internal/bytesize"
	"lookaside/tiers/why"
)

// shareIDs are the ids of findings about instances that share nothing, by the field that differs.
var shareIDs = map[string]string{
	"vllm": "share-vllm", "hash": "share-hash", "none_hash": "share-seed",
	"hash_keys": "share-python", "page_tokens": "share-block-size",
	"pages_per_chunk": "share-chunk-tokens", "dtype": "share-dtype", "kv_dtype": "share-kv-dtype",
	"revision": "share-revision", "weights": "share-weights",
}

var shareChecks = []check{{[]string{"share-vllm", "share-hash", "share-seed", "share-python",
	"share-block-size", "share-chunk-tokens", "share-dtype", "share-kv-dtype", "share-revision",
	"share-weights"}, eachSidecar(share)}}

// share reports spaces that differ by accident, each pair and field once.
func share(_ *Facts, s *Sidecar) (out []Finding) {
	pairs := map[string]bool{}
	for _, u := range s.Status.Unshared {
		pair := []string{u.Space, u.Other}
		if slices.Sort(pair); pairs[strings.Join(pair, " ")] {
			continue
		}
		pairs[strings.Join(pair, " ")] = true
		level := Note // what is there of an instance that has gone
		if u.Connected {
			level = Warning
		}
		for i := range u.Causes {
			c := &u.Causes[i]
			id, ok := shareIDs[c.Field]
			if !ok {
				continue
			}
			seen := fmt.Sprintf("space %s and that of %s (%s) share nothing: %s differs, %q and %q",
				u.Space, u.Whose, u.Other, c.What, short(c.Ours), short(c.Theirs))
			if n := &s.Status.Counters; n.Tokens.Loaded == 0 && n.StoredBytes > 0 {
				seen = fmt.Sprintf("stored %s, 0 hits: %s",
					bytesize.Format(int64(n.StoredBytes)), seen)
			}
			out = append(out, Finding{id, level, s.Endpoint, seen, c.Fix})
		}
	}
	return out
}

func short(v string) string {
	if r := []rune(v); len(r) > 24 {
		return string(r[:12]) + "…" + string(r[len(r)-8:])
	}
	return v
}

var useChecks = []check{
	{[]string{"use-ok", "use-idle", "use-own-cache", "use-no-hits", "use-loads-fail", "use-few-hits"},
		eachSidecar(use)},
	{[]string{"use-shed"}, eachSidecar(useShed)},
	{missIDs(), eachSidecar(misses)},
}

// These bound what is said of use: of fewer requests nothing follows.
const (
	fewRequests = 10
	ownShare    = 0.9  // of all tokens that were not computed, those that vLLM's own cache had
	fewHits     = 0.05 // of the tokens asked for, those that were loaded
)

func use(_ *Facts, s *Sidecar) []Finding {
	n := &s.Status.Counters
	t := n.Tokens
	stored := bytesize.Format(int64(n.StoredBytes))
	reused := t.Own + t.Loaded
	own := 0.0
	if reused > 0 {
		own = float64(t.Own) / float64(reused)
	}
	told := fmt.Sprintf("stored %s; %d requests asked for %d tokens that vLLM's own cache did not have, and %d (%.0f %%) were loaded; its own cache had %d",
		stored, t.Requests, t.Asked, t.Loaded, 100*t.LoadedRatio(), t.Own)
	say := func(id string, level Level, seen, fix string) []Finding {
		return one(id, level, s.Endpoint, seen, fix)
	}
	switch {
	case t.Requests == 0:
		if len(s.Status.Sessions) == 0 {
			return nil // said already
		}
		return say("use-idle", Note, "no request has come since the sidecar's start",
			"send one: after a second one with the same prefix, on another instance or after a restart, there is a hit")
	case t.Loaded == 0 && t.Found > 0:
		return say("use-loads-fail", Error, fmt.Sprintf(
			"%d tokens were found and none was loaded; %s", t.Found, told),
			"vLLM's log says why loads fail (look for lookaside)")
	case t.Found > 2*t.Loaded && t.Found-t.Loaded > t.Asked/10:
		return say("use-loads-fail", Warning, fmt.Sprintf(
			"%d tokens were found and only %d loaded; %s", t.Found, t.Loaded, told),
			"vLLM's log says why loads fail (look for lookaside)")
	case t.Requests >= fewRequests && own >= ownShare:
		return say("use-own-cache", Note, fmt.Sprintf(
			"vLLM's own cache served %.0f %% of the hits: the working set fits the GPU; %s",
			100*own, told),
			"nothing is wrong: the sidecar helps after restarts, and other instances. It would help more with more users or longer prompts than the GPU holds")
	case t.Loaded == 0 && n.StoredBytes > 0 && t.Requests >= fewRequests:
		return say("use-no-hits", Warning, fmt.Sprintf("stored %s, 0 hits; %s", stored, told),
			"see the findings share-… and miss-… for the reason; prompts that have nothing in common have no hits")
	case t.Requests >= fewRequests && t.LoadedRatio() < fewHits:
		return say("use-few-hits", Note, told,
			"see the findings miss-… for the reason; prompts that have little in common have few hits")
	}
	return say("use-ok", OK, told, "")
}

func useShed(_ *Facts, s *Sidecar) []Finding {
	n := &s.Status.Counters
	if n.ShedPages == 0 || n.ShedPages*20 <= n.StoredPages+n.ShedPages {
		return nil
	}
	return one("use-shed", Warning, s.Endpoint, fmt.Sprintf(
		"%d pages found no room, and %d were stored: all that could be evicted was in use",
		n.ShedPages, n.StoredPages),
		"raise arena.limit; or sessions.share, if one engine is alone on the sidecar")
}

// missFixes has, for each reason why a prefix ended without being whole, what it means and what to
// do. A reason without a fix is as it should be.
var missFixes = []struct {
	reason     why.Reason
	means, fix string
}{
	{why.NeverStored, "were never stored here", "new prompts are computed once; if prompts do repeat, see that the instances share (findings share-…), and that requests do not differ in salt, adapter or system prompt"},
	{why.Shed, "were to be stored, and were not for want of room", "raise arena.limit, or sessions.share if one engine is alone on the sidecar"},
	{why.Evicted, "were evicted for room", "raise arena.limit, or add a disk tier (--disk DIR:SIZE); lookaside simulate says how much would help"},
	{why.Expired, "were found, and vLLM loaded them too late", "requests wait long in vLLM's queue: raise lookup.lease, or give vLLM fewer at a time"},
	{why.Cleared, "were cleared", "see who clears: lookaside clear, resets of vLLM with reset_external, new weights"},
	{why.OtherSpace, "are there in another space", "the instances differ in a setting: findings share-… and lookaside status name it"},
	{why.OtherSeed, "are named otherwise by other instances", "start all with the same PYTHONHASHSEED, such as PYTHONHASHSEED=0, and the same --prefix-caching-hash-algo"},
	{why.Late, "were in a tier, and not up in time", "use a faster tier, or raise lookaside.promotion_timeout_ms and the tier's load_timeout"},
	{why.EngineHad, "were in vLLM's own cache", ""},
	{why.NotWorth, "are computed faster than they are loaded", "nothing is wrong; a faster tier would change it (lookup.promote)"},
	{why.Lost, "were lost: a wrong checksum, or a tier that failed", "look at the sidecar's log and at lookaside tiers for the device that fails"},
}

func missIDs() (ids []string) {
	for _, m := range missFixes {
		ids = append(ids, missID(m.reason))
	}
	return ids
}

func missID(reason why.Reason) string {
	return "miss-" + strings.ReplaceAll(reason.String(), "_", "-")
}

// The share of all missed pages from which a reason is a note, and of what was lost a warning.
const missShare = 0.1

func misses(_ *Facts, s *Sidecar) (out []Finding) {
	total := uint64(0)
	for _, m := range missFixes {
		if m.reason != why.EngineHad {
			total += s.Status.Misses[m.reason.String()].Pages
		}
	}
	for _, m := range missFixes {
		n := s.Status.Misses[m.reason.String()]
		if n.Ends == 0 {
			continue
		}
		level := OK
		share := ""
		if m.fix != "" && total > 0 {
			part := float64(n.Pages) / float64(total)
			share = fmt.Sprintf(" (%.0f %% of all that were missed)", 100*part)
			if part >= missShare {
				level = Note
			}
		}
		switch {
		case n.Pages == 0:
		case m.reason == why.Lost, m.reason == why.OtherSeed:
			level = Warning
		}
		fix := m.fix
		if level == OK {
			fix = ""
		}
		out = append(out, Finding{missID(m.reason), level, s.Endpoint, fmt.Sprintf(
			"%d prefixes ended and %d pages%s %s", n.Ends, n.Pages, share, m.means), fix})
	}
	return out
}
