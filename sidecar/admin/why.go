package admin

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"lookaside/connector"
	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/why"
)

// WhyRequest is the body of POST /v1/why: a request, or a prefix.
type WhyRequest struct {
	TimeoutRequest
	Request string   `json:"request,omitempty" maxLength:"96" doc:"Name of a request of vLLM, or its beginning. Its last lookups are returned."`
	Space   string   `json:"space,omitempty" maxLength:"64" doc:"As for other operations; for hashes."`
	Hashes  []string `json:"hashes,omitempty" doc:"Page hashes in hexadecimal, of the whole prefix from its first page on: what is held of it now."`
}

// WhyResult is the response of POST /v1/why.
type WhyResult struct {
	Lookups []WhyLookup `json:"lookups" doc:"Of the request, newest first."`
	Prefix  *WhyPrefix  `json:"prefix,omitempty" doc:"Of the hashes, as things are now."`
}

// WhyEnd is why a prefix ends where it does.
type WhyEnd struct {
	Reason string     `json:"reason" doc:"One of the reasons of misses; end: all was found."`
	At     *time.Time `json:"at,omitempty" doc:"When the page went, to the second."`
	From   string     `json:"from,omitempty" doc:"Where it was or is: arena, or a tier's name."`
	Space  string     `json:"by_space,omitempty" doc:"Short fingerprint of the space whose store or load took its room."`
	Tenant string     `json:"by_tenant,omitempty" doc:"The tenant whose store or load took its room."`
	Other  string     `json:"other_space,omitempty" doc:"Short fingerprint of the space that has pages of the same hashes, or other names for them."`
	Fields []string   `json:"fields,omitempty" doc:"In which fields that space differs."`
	What   string     `json:"what" doc:"The same in a sentence."`
	Fix    string     `json:"fix" doc:"What to do; empty: nothing."`
}

// WhyLookup is one lookup of a request.
type WhyLookup struct {
	Request    string    `json:"request" doc:"Its whole name."`
	Session    string    `json:"session"`
	Space      string    `json:"space" doc:"Short fingerprint."`
	At         time.Time `json:"at"`
	Answered   bool      `json:"answered" doc:"False while it waits for a tier, or if it was given up."`
	TookS      float64   `json:"took_s"`
	FirstPage  int       `json:"first_page"`
	PagesAsked int       `json:"pages_asked"`
	Pages      int       `json:"pages" doc:"Found, from the first on."`
	PageTokens int       `json:"page_tokens"`
	Sources    string    `json:"sources,omitempty" doc:"Where these lay, in pages."`
	End        WhyEnd    `json:"end"`
	Admitted   bool      `json:"admitted" doc:"vLLM has begun with the request."`
	Own        int       `json:"own_tokens" doc:"Tokens that vLLM's own cache had, once admitted."`
	Loaded     int       `json:"loaded_tokens" doc:"Tokens that were loaded, once admitted."`
	Computed   int       `json:"computed_tokens" doc:"Tokens that vLLM computes, once admitted."`
	NotTaken   string    `json:"not_taken,omitempty" doc:"The engine's reason not to load what was found."`
}

// WhyPrefix is what is held of a prefix now.
type WhyPrefix struct {
	Space      string         `json:"space" doc:"Fingerprint of the space."`
	PagesAsked int            `json:"pages_asked"`
	Pages      int            `json:"pages" doc:"Held without a gap, from the first on."`
	Arena      int            `json:"arena_pages" doc:"Of these, from the first on, in the arena."`
	Tiers      map[string]int `json:"tier_pages" doc:"Of these, by tier; -1 where a tier did not answer."`
	PageTokens int            `json:"page_tokens"`
	End        WhyEnd         `json:"end"`
}

// maxWhyLookups is how many lookups of a request are returned.
const maxWhyLookups = 16

// Why returns why a request's lookups ended where they did, or why a prefix does now.
func (o *Operations) Why(ctx context.Context, r WhyRequest) (WhyResult, error) {
	out := WhyResult{Lookups: []WhyLookup{}}
	switch {
	case (r.Request == "") == (len(r.Hashes) == 0):
		return out, apiError(http.StatusBadRequest, "give one of them",
			"either the name of a request or hashes are needed")
	case r.Request != "":
		for _, e := range o.Server.Ends(r.Request, maxWhyLookups) {
			out.Lookups = append(out.Lookups, o.whyLookup(&e))
		}
		if len(out.Lookups) == 0 {
			return out, apiError(http.StatusNotFound,
				"name it as vLLM's log and response do, or give the prompt's hashes instead",
				"no lookup of a request that begins with %q is among the last ones", r.Request)
		}
		return out, nil
	}
	sp, hashes, err := o.find(PrefixRequest{r.Space, r.Hashes})
	if err != nil {
		return out, err
	}
	ctx, cancel := r.bound(ctx)
	defer cancel()
	w, err := o.Stack.Where(ctx, sp.ID, hashes)
	if err != nil {
		return out, err
	}
	p := &WhyPrefix{Space: sp.Fingerprint.String(), PagesAsked: len(r.Hashes), Pages: w.Pages,
		Arena: w.Arena, Tiers: map[string]int{}, PageTokens: sp.Geometry.PageTokens}
	for i, name := range o.Stack.TierNames() {
		p.Tiers[name] = w.Tiers[i]
	}
	a := w.Why
	if w.Pages == 0 && a.Reason == why.NeverStored && len(o.renamed(sp.Fingerprint)) > 0 {
		a.Reason = why.OtherSeed
	}
	p.End = o.whyEnd(sp.Fingerprint, a)
	out.Prefix = p
	return out, nil
}

func (o *Operations) whyLookup(e *connector.End) WhyLookup {
	l := WhyLookup{Request: e.Request, Session: fmt.Sprintf("%016x", e.Session), At: e.At,
		Answered: e.Answered, TookS: e.Took.Seconds(), FirstPage: e.First, PagesAsked: e.Asked,
		Pages: e.Pages, Admitted: e.Admitted, Own: e.Own, Loaded: e.Loaded,
		Computed: e.Tokens - e.Loaded, Sources: o.Server.Sources(e.From)}
	if e.Reason != why.End {
		l.NotTaken = e.Reason.String()
	}
	var fp tiers.Fingerprint
	if sp, ok := o.Engine.Space(e.Space); ok {
		fp, l.PageTokens = sp.Fingerprint, sp.Geometry.PageTokens
		l.Space = fp.Short()
	}
	l.End = o.whyEnd(fp, e.Why)
	return l
}

// renamed returns the short fingerprints of spaces that name the pages of one differently, each
// with the fields.
func (o *Operations) renamed(fp tiers.Fingerprint) map[string][]string {
	out := map[string][]string{}
	for _, u := range o.Server.Renamed(fp) {
		for _, c := range u.Causes {
			out[u.Theirs.Short()] = append(out[u.Theirs.Short()], c.Field)
		}
	}
	return out
}

// whyEnd describes the end of a prefix in a space.
func (o *Operations) whyEnd(fp tiers.Fingerprint, a engine.Absence) WhyEnd {
	e := WhyEnd{Reason: a.Reason.String()}
	if names := append([]string{arenaStore}, o.Stack.TierNames()...); int(a.Tier) < len(names) {
		e.From = names[a.Tier]
	}
	if !a.At.IsZero() {
		at := a.At
		e.At = &at
	}
	for _, sp := range o.Engine.Spaces() {
		if a.Space != 0 && why.Mark(sp.Fingerprint) == a.Space {
			e.Space = sp.Fingerprint.Short()
		}
		if a.Other != 0 && sp.ID == a.Other {
			e.Other = sp.Fingerprint.Short()
			e.Fields = o.differing(fp, sp.Fingerprint)
		}
	}
	for _, t := range o.Tenants.List() {
		if a.Tenant != 0 && t.ID == a.Tenant {
			e.Tenant = t.Name
		}
	}
	if a.Reason == why.OtherSeed {
		for other, fields := range o.renamed(fp) {
			e.Other, e.Fields = other, fields
		}
	}
	e.What, e.Fix = e.words(a.Reason), missFix(a.Reason)
	if a.Reason == why.Shed && e.From != arenaStore {
		e.Fix = "give the tier more workers or a longer queue"
	}
	return e
}

// differing returns the names of the fields in which two spaces differ.
func (o *Operations) differing(one, other tiers.Fingerprint) (fields []string) {
	f, ok := o.Server.SpaceFields(one)
	g, also := o.Server.SpaceFields(other)
	if !ok || !also {
		return nil
	}
	for key, value := range f {
		if has, ok := g[key]; !ok || has != value {
			fields = append(fields, key)
		}
	}
	for key := range g {
		if _, ok := f[key]; !ok {
			fields = append(fields, key)
		}
	}
	slices.Sort(fields)
	return fields
}

// words returns a reason as a sentence.
func (e *WhyEnd) words(r why.Reason) string {
	when := ""
	if e.At != nil {
		when = " at " + e.At.Format(time.DateTime)
	}
	by := ""
	if e.Space != "" {
		by = " by a store or load of space " + e.Space
		if e.Tenant != "" {
			by += " for tenant " + e.Tenant
		}
	}
	fields := strings.Join(e.Fields, ", ")
	switch r {
	case why.End:
		return "the prompt ends there: all of it was found"
	case why.NeverStored:
		return "the next page was never stored here, as far as is remembered"
	case why.Evicted:
		return "the next page was evicted from " + e.From + when + by
	case why.Shed:
		if e.From != arenaStore {
			return "the next page was evicted from the arena" + when + by + " before " + e.From +
				" had taken it"
		}
		return "the next page was computed and not stored" + when +
			": there was no room, or the worker gave it up"
	case why.Expired:
		return "it was found, and its lease ended before vLLM could load it"
	case why.Cleared:
		return "the next page was cleared" + when
	case why.OtherSpace:
		return "space " + e.Other + " has the next page; it differs in " + fields
	case why.OtherSeed:
		return "space " + e.Other + " has pages of the same model under other names; it differs in " +
			fields
	case why.Late:
		return "the next page is held, but was not there in time, or there was no room to bring it up"
	case why.EngineHad:
		return "vLLM's own cache had the rest"
	case why.NotWorth:
		return "a tier has the next page, and vLLM computes it sooner"
	case why.Lost:
		return "the next page was lost" + when + ": its bytes were bad, or " + e.From + " failed"
	}
	return r.String()
}

// WriteTable writes the result for people.
func (r WhyResult) WriteTable(w io.Writer) error {
	for i := range r.Lookups {
		l := &r.Lookups[i]
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "request %s, looked up at %s in space %s, session %s\n", l.Request,
			l.At.Format(time.DateTime), l.Space, l.Session)
		if !l.Answered {
			fmt.Fprintf(w, "  not answered: %d pages were asked for, and it waits or was given up\n",
				l.PagesAsked)
			continue
		}
		fmt.Fprintf(w, "  found: %d of %d pages from page %d on (%d tokens) in %s\n", l.Pages,
			l.PagesAsked, l.FirstPage, l.Pages*l.PageTokens,
			time.Duration(l.TookS*float64(time.Second)).Round(time.Microsecond))
		if l.Sources != "" {
			fmt.Fprintf(w, "  from: %s (pages)\n", l.Sources)
		}
		l.End.write(w)
		if l.Admitted {
			fmt.Fprintf(w, "  vLLM: had %d tokens itself, loaded %d, computed %d\n", l.Own, l.Loaded,
				l.Computed)
		}
		if l.NotTaken != "" {
			fmt.Fprintf(w, "  not loaded: %s\n", l.NotTaken)
		}
	}
	if p := r.Prefix; p != nil {
		fmt.Fprintf(w, "held now: %d of %d pages (%d tokens), %d of them in the arena\n", p.Pages,
			p.PagesAsked, p.Pages*p.PageTokens, p.Arena)
		for name, n := range p.Tiers {
			if n < 0 {
				fmt.Fprintf(w, "  %s: does not answer\n", name)
			} else {
				fmt.Fprintf(w, "  %s: %d pages\n", name, n)
			}
		}
		p.End.write(w)
	}
	return nil
}

func (e *WhyEnd) write(w io.Writer) {
	fmt.Fprintf(w, "  ends: %s: %s\n", e.Reason, e.What)
	if e.Fix != "" {
		fmt.Fprintf(w, "  to do: %s\n", e.Fix)
	}
}
