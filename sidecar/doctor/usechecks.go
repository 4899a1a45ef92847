package doctor

import (
	"fmt"
	"slices"
	"strings"

	"lookaside/internal/bytesize"
	"lookaside/sidecar/admin"
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

func missIDs() (ids []string) {
	for _, m := range admin.MissReasons() {
		ids = append(ids, missID(m.Reason))
	}
	return ids
}

func missID(reason string) string {
	return "miss-" + strings.ReplaceAll(reason, "_", "-")
}

// The share of all missed pages from which a reason is a note, and of what was lost a warning.
const missShare = 0.1

func misses(_ *Facts, s *Sidecar) (out []Finding) {
	total := uint64(0)
	for _, m := range admin.MissReasons() {
		if m.Reason != why.EngineHad.String() {
			total += s.Status.Misses[m.Reason].Pages
		}
	}
	for _, m := range admin.MissReasons() {
		n := s.Status.Misses[m.Reason]
		if n.Ends == 0 {
			continue
		}
		level := OK
		share := ""
		if m.Fix != "" && total > 0 {
			part := float64(n.Pages) / float64(total)
			share = fmt.Sprintf(" (%.0f %% of all that were missed)", 100*part)
			if part >= missShare {
				level = Note
			}
		}
		switch {
		case n.Pages == 0:
		case m.Reason == why.Lost.String(), m.Reason == why.OtherSeed.String():
			level = Warning
		}
		fix := m.Fix
		if level == OK {
			fix = ""
		}
		out = append(out, Finding{missID(m.Reason), level, s.Endpoint, fmt.Sprintf(
			"%d prefixes ended and %d pages%s %s", n.Ends, n.Pages, share, m.Means), fix})
	}
	return out
}
