package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"lookaside/connector"
	"lookaside/ipc/wire"
)

var engineChecks = []check{
	{[]string{"engine-none", "engine-left"}, eachSidecar(engineNone)},
	{[]string{"engine-elsewhere", "engine-unconnected", "engine-no-caching"}, engineProcesses},
	{[]string{"engine-rank"}, engineRanks},
	{[]string{"engine-failure-policy"}, engineFailurePolicy},
	{[]string{"engine-ok", "engine-no-scheduler"}, eachSidecar(engineSessions)},
	{[]string{"engine-random-seed", "engine-pickled-hashes"}, eachSidecar(engineHashes)},
	{[]string{"engine-chunk"}, eachSidecar(engineChunk)},
	{[]string{"engine-notes"}, eachSidecar(engineNotes)},
	{[]string{"engine-version"}, eachSidecar(engineVersion)},
	{[]string{"engine-no-promotion", "engine-unwatched-weights"}, eachSidecar(engineSettings)},
}

// engine is one vLLM instance, as one sidecar sees it.
type engine struct {
	id       string
	sessions []connector.SessionStatus
}

// engines returns the instances that are connected to a sidecar, by their oldest session.
func (s *Sidecar) engines() (out []engine) {
	for _, ses := range s.Status.Sessions {
		i := slices.IndexFunc(out, func(e engine) bool { return e.id == ses.EngineID })
		if i < 0 {
			i, out = len(out), append(out, engine{id: ses.EngineID})
		}
		out[i].sessions = append(out[i].sessions, ses)
	}
	return out
}

// about returns what the engine says of itself under a name: what its first session says that says
// anything.
func (e *engine) about(name string) string {
	for _, ses := range e.sessions {
		if v := ses.About[name]; v != "" {
			return v
		}
	}
	return ""
}

func (e *engine) has(role string) bool { return hasRole(e.sessions, role) }

// subject names the engine: people know it by a process.
func (e *engine) subject() string {
	ses := e.sessions[0]
	for _, each := range e.sessions {
		if each.Role == wire.RoleScheduler {
			ses = each
		}
	}
	return fmt.Sprintf("vLLM, process %d (engine %s)", ses.PID, e.id)
}

// fields returns what the engine's space is made of.
func (s *Sidecar) fields(e *engine) (map[string]string, int, int) {
	for _, sp := range s.Status.Spaces {
		if strings.HasPrefix(sp.Fingerprint, strings.TrimSuffix(e.sessions[0].Space, "…")) {
			return sp.Fields, sp.PageTokens, sp.PagesPerChunk
		}
	}
	return nil, 0, 0
}

// eachEngine makes a check of all engines of one of an engine.
func eachEngine(s *Sidecar, run func(e *engine) []Finding) (out []Finding) {
	all := s.engines()
	for i := range all {
		out = append(out, run(&all[i])...)
	}
	return out
}

const connectorHint = `start vLLM as the sidecar's user with --kv-transfer-config '{"kv_connector":"LookasideConnector","kv_role":"kv_both"}', with lookaside-kv installed beside it`

func engineNone(f *Facts, s *Sidecar) []Finding {
	switch {
	case len(s.Status.Sessions) > 0:
		return nil
	case s.Status.Counters.SessionsOpened > 0:
		return one("engine-left", Note, s.Endpoint, "no vLLM is connected now; some were",
			"start vLLM again: what is stored is found")
	case len(f.Engines) > 0:
		return nil // see engineProcesses
	}
	fix := connectorHint
	if s.Endpoint != f.Default {
		fix += fmt.Sprintf(`, and "kv_connector_extra_config": {"lookaside.endpoint": %q} in it`,
			s.Endpoint)
	}
	level := Warning
	if s.Endpoint != f.Endpoint && f.At(f.Endpoint).Serves() {
		level = Note // it is not the one that was asked about
	}
	return one("engine-none", level, s.Endpoint, "no vLLM has connected", fix+
		". If it is started already, its log says why it does not connect (look for lookaside)")
}

func (p *Process) subject() string { return fmt.Sprintf("vLLM, process %d", p.PID) }

// engineProcesses looks at servers that are not connected, or not where they look for a sidecar.
func engineProcesses(f *Facts) (out []Finding) {
	for i := range f.Engines {
		p := &f.Engines[i]
		if p.NoCaching {
			out = append(out, Finding{"engine-no-caching", Error, p.subject(),
				"prefix caching is off, so that the connector is idle",
				"start vLLM without --no-enable-prefix-caching"})
			continue
		}
		if f.isConnected(p.PID) {
			continue
		}
		dir := p.EndpointOf(0)
		if slices.Contains(f.Others, dir) {
			continue // it is another sidecar's
		}
		at := f.At(dir)
		if dir == "" || at != nil && at.Serves() {
			out = append(out, Finding{"engine-unconnected", Warning, p.subject(),
				"the server is started with the connector, and is not connected",
				"wait until its model is loaded; if it serves already, its log says why it does not connect (look for lookaside)"})
			continue
		}
		if p.Autostart() {
			out = append(out, Finding{"engine-unconnected", Warning, p.subject(),
				"the server starts a sidecar by itself, and none serves at " + dir,
				"wait until its model is loaded; then its log, and sidecar.log in that directory, say why there is none"})
			continue
		}
		fix := "start a sidecar there: lookaside serve --runtime-dir " + dir
		others := f.serveElsewhere()
		if at := f.At(f.Endpoint); at != nil && at.Serves() {
			others = slices.Insert(others, 0, f.Endpoint)
		}
		if len(others) > 0 {
			fix = fmt.Sprintf("name the directory of one that serves (%s) to vLLM: \"kv_connector_extra_config\": {\"lookaside.endpoint\": %q}; or %s",
				strings.Join(others, ", "), others[0], fix)
		}
		seen := "the server looks for its sidecar at " + dir + ", where none serves"
		if p.Known && p.XDG == "" {
			seen += "; it has no XDG_RUNTIME_DIR"
		}
		out = append(out, Finding{"engine-elsewhere", Error, p.subject(), seen, fix})
	}
	return out
}

// engineRanks looks for ranks without a sidecar, where another rank has one.
func engineRanks(f *Facts) (out []Finding) {
	for i := range f.Engines {
		p := &f.Engines[i]
		if p.NoCaching || p.Autostart() || p.EndpointOf(0) == "" {
			continue
		}
		var lack []string
		for rank := range p.Ranks() {
			dir := p.EndpointOf(rank)
			if at := f.At(dir); (at == nil || !at.Serves()) && !slices.Contains(f.Others, dir) {
				lack = append(lack, dir)
			}
		}
		if len(lack) == 0 || len(lack) == p.Ranks() { // of the latter see engineProcesses
			continue
		}
		out = append(out, Finding{"engine-rank", Error, p.subject(), fmt.Sprintf(
			"the server has %d ranks, and no sidecar serves at %s: a prefix hits where all ranks have it, so nothing does",
			p.Ranks(), strings.Join(lack, ", ")),
			"start a sidecar for each rank: lookaside serve --runtime-dir " + lack[0]})
	}
	return out
}

// isConnected reports whether a process, or one that it has started, has a session anywhere.
func (f *Facts) isConnected(pid int) bool {
	for _, s := range f.Serving() {
		for _, ses := range s.Status.Sessions {
			for p, n := int(ses.PID), 0; p > 1 && n < 64; p, n = f.Parents[p], n+1 {
				if p == pid {
					return true
				}
			}
		}
	}
	return false
}

const policyFix = `add "kv_load_failure_policy": "recompute" to --kv-transfer-config, beside the outermost "kv_connector", and restart vLLM: what cannot be loaded is then computed`

func engineFailurePolicy(f *Facts) (out []Finding) {
	say := func(subject, policy string) {
		out = append(out, Finding{"engine-failure-policy", Warning, subject, fmt.Sprintf(
			"kv_load_failure_policy is %s: a request whose load fails gets an error", policy),
			policyFix})
	}
	for _, s := range f.Serving() {
		eachEngine(s, func(e *engine) []Finding {
			if policy := e.about("failure_policy"); policy != "" && policy != "recompute" {
				say(e.subject(), policy)
			}
			return nil
		})
	}
	for i := range f.Engines {
		p := &f.Engines[i]
		if f.isConnected(p.PID) {
			continue // it was asked itself
		}
		if p.FailsRequests {
			say(p.subject(), cmp.Or(p.FailurePolicy, "fail, vLLM's default"))
		}
	}
	return out
}

func engineSessions(_ *Facts, s *Sidecar) []Finding {
	return eachEngine(s, func(e *engine) []Finding {
		fields, tokens, pages := s.fields(e)
		if !e.has(wire.RoleScheduler) && e.about("kv_role") != "" {
			return one("engine-no-scheduler", Warning, e.subject(),
				"its worker is connected and its scheduler is not: nothing is looked up",
				"wait a few seconds; then vLLM's log says why (look for lookaside). A scheduler on another host needs hosts.listen (docs/deployment.md)")
		}
		seen := fmt.Sprintf("%d sessions; blocks of %d tokens, chunks of %d, hashes by %s",
			len(e.sessions), tokens, tokens*pages, fields["hash"])
		for _, name := range []string{"vllm", "lookaside", "device", "kv_role", "failure_policy",
			"hash_seed", "sleep_mode", "settings"} {
			if v := e.about(name); v != "" {
				seen += fmt.Sprintf(", %s %s", name, v)
			}
		}
		return one("engine-ok", OK, e.subject(), seen, "")
	})
}

func engineHashes(_ *Facts, s *Sidecar) []Finding {
	return eachEngine(s, func(e *engine) []Finding {
		fields, _, _ := s.fields(e)
		switch {
		case strings.HasPrefix(fields["none_hash"], "engine:"):
			return one("engine-random-seed", Error, e.subject(), fmt.Sprintf(
				"the hashes (%s) begin with a random seed: no other instance, and not this one after a restart, finds what it stores",
				fields["hash"]),
				"start all instances with the same PYTHONHASHSEED, such as PYTHONHASHSEED=0, or with --prefix-caching-hash-algo sha256_cbor")
		case fields["hash"] == "sha256" || fields["hash"] == "xxhash":
			return one("engine-pickled-hashes", Note, e.subject(), fmt.Sprintf(
				"the hashes (%s) depend on the release of Python (%s)", fields["hash"],
				e.about("python")),
				"where instances with other releases of Python share, start all with --prefix-caching-hash-algo sha256_cbor")
		}
		return nil
	})
}

func engineChunk(_ *Facts, s *Sidecar) []Finding {
	return eachEngine(s, func(e *engine) []Finding {
		_, tokens, pages := s.fields(e)
		want, err := strconv.Atoi(e.about("chunk_tokens"))
		if err != nil || tokens == 0 || want%tokens == 0 {
			return nil
		}
		return one("engine-chunk", Note, e.subject(), fmt.Sprintf(
			"lookaside.chunk_tokens is %d, which blocks of %d tokens do not divide: chunks have %d",
			want, tokens, tokens*pages),
			fmt.Sprintf("set lookaside.chunk_tokens to a multiple of %d, the same everywhere", tokens))
	})
}

func engineNotes(_ *Facts, s *Sidecar) []Finding {
	return eachEngine(s, func(e *engine) []Finding {
		if notes := e.about("notes"); notes != "" {
			return one("engine-notes", Note, e.subject(), notes,
				"docs/connector.md has the releases of vLLM that are tested")
		}
		return nil
	})
}

func engineVersion(_ *Facts, s *Sidecar) []Finding {
	return eachEngine(s, func(e *engine) []Finding {
		v := e.about("lookaside")
		if v == "" || s.Status.Version == "" || sameRelease(v, s.Status.Version) {
			return nil
		}
		return one("engine-version", Note, e.subject(), fmt.Sprintf(
			"the connector is of version %s, the sidecar of %s; they understand each other", v,
			s.Status.Version), "install the same release of both")
	})
}

// sameRelease compares versions without what follows a "-" or "+".
func sameRelease(a, b string) bool {
	cut := func(v string) string {
		v, _, _ = strings.Cut(v, "+")
		v, _, _ = strings.Cut(v, "-")
		return strings.TrimPrefix(v, "v")
	}
	return cut(a) == cut(b)
}

func engineSettings(_ *Facts, s *Sidecar) []Finding {
	return eachEngine(s, func(e *engine) (out []Finding) {
		set := strings.Split(e.about("settings"), ", ")
		if slices.Contains(set, "promotion_timeout_ms=0") && len(s.Status.Tiers) > 0 {
			out = append(out, Finding{"engine-no-promotion", Warning, e.subject(),
				"lookaside.promotion_timeout_ms is 0: what the tiers hold is never a hit",
				"leave lookaside.promotion_timeout_ms out"})
		}
		if slices.Contains(set, "watch_weights=False") {
			out = append(out, Finding{"engine-unwatched-weights", Note, e.subject(),
				"lookaside.watch_weights is false: each pause clears what is stored",
				"leave lookaside.watch_weights out, or name new weights (lookaside weights NAME)"})
		}
		return out
	})
}
