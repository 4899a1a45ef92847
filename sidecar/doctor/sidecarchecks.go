package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"lookaside/connector"
	"lookaside/internal/bytesize"
	"lookaside/ipc/wire"
	"lookaside/sidecar/arena"
)

var sidecarChecks = []check{
	{[]string{"sidecar-directory"}, sidecarDirectory},
	{[]string{"sidecar-none", "sidecar-elsewhere", "sidecar-killed"}, sidecarNone},
	{[]string{"sidecar-other-user", "sidecar-hidden", "sidecar-silent"}, sidecarSilent},
	{[]string{"sidecar-ok", "sidecar-draining", "sidecar-starting"}, eachSidecar(sidecarState)},
	{[]string{"sidecar-version"}, eachSidecar(sidecarVersion)},
	{[]string{"sidecar-growth"}, eachSidecar(sidecarGrowth)},
	{[]string{"sidecar-tier", "sidecar-tier-ok", "sidecar-tier-sheds"}, eachSidecar(sidecarTiers)},
	{[]string{"sidecar-dax"}, eachSidecar(sidecarDAX)},
	{[]string{"sidecar-rotten"}, eachSidecar(sidecarRotten)},
	{[]string{"sidecar-frozen", "sidecar-lingering", "sidecar-restored"}, eachSidecar(sidecarHeld)},
	{[]string{"sidecar-refused-version", "sidecar-refused-space", "sidecar-refused-limit",
		"sidecar-refused-other"}, eachSidecar(sidecarRefused)},
	{[]string{"sidecar-peers"}, eachSidecar(sidecarPeers)},
	{[]string{"sidecar-hosts"}, eachSidecar(sidecarHosts)},
}

// At returns the sidecar of a directory, or nil.
func (f *Facts) At(dir string) *Sidecar {
	for i := range f.Sidecars {
		if f.Sidecars[i].Endpoint == dir {
			return &f.Sidecars[i]
		}
	}
	return nil
}

// Serving returns the sidecars that answer.
func (f *Facts) Serving() (out []*Sidecar) {
	for i := range f.Sidecars {
		if f.Sidecars[i].Serves() {
			out = append(out, &f.Sidecars[i])
		}
	}
	return out
}

// serveElsewhere returns the directories of sidecars other than the one at the endpoint.
func (f *Facts) serveElsewhere() []string {
	others := slices.Clone(f.Others)
	for _, s := range f.Serving() {
		if s.Endpoint != f.Endpoint {
			others = append(others, s.Endpoint)
		}
	}
	return others
}

// eachSidecar makes a check of all sidecars of one of a sidecar that answers.
func eachSidecar(run func(*Facts, *Sidecar) []Finding) func(*Facts) []Finding {
	return func(f *Facts) (out []Finding) {
		for _, s := range f.Serving() {
			out = append(out, run(f, s)...)
		}
		return out
	}
}

func sidecarDirectory(f *Facts) []Finding {
	d, subject := &f.Directory, f.Endpoint
	const id = "sidecar-directory"
	switch {
	case d.Entered != nil:
		return one(id, Error, subject, d.Entered.Error(),
			"run the command as the sidecar's user, or name another directory with --runtime-dir")
	case d.Link:
		return one(id, Error, subject, "the directory is a symbolic link, which a sidecar refuses",
			"name the directory itself with --runtime-dir")
	case d.Exists && d.UID != f.UID && f.UID != 0:
		return one(id, Error, subject,
			fmt.Sprintf("the directory is of uid %d, and this is uid %d", d.UID, f.UID),
			"sidecar and vLLM run as one user: run both as that user, or give each user a directory of its own (--runtime-dir, lookaside.endpoint)")
	case d.Exists && d.Mode.Perm()&0o077 != 0:
		return one(id, Error, subject,
			fmt.Sprintf("others may enter the directory (mode %#o), which a sidecar refuses", d.Mode.Perm()),
			"chmod 700 "+f.Endpoint)
	case f.XDG == "" && f.Endpoint == f.Default:
		return one(id, Note, subject,
			"XDG_RUNTIME_DIR is not set here, so the default directory is below /tmp",
			"a process that has XDG_RUNTIME_DIR looks elsewhere: where vLLM and the sidecar do not both have it (containers, systemd, ssh), name one directory for both (--runtime-dir DIR, \"lookaside.endpoint\": \"DIR\")")
	}
	return one(id, OK, subject, "the directory can be used", "")
}

func sidecarNone(f *Facts) []Finding {
	at := f.At(f.Endpoint)
	if at == nil || at.Serves() || !isAbsent(at.Err) {
		return nil
	}
	start := "lookaside serve --arena-limit 16G"
	if f.Endpoint != f.Default {
		start += " --runtime-dir " + f.Endpoint
	}
	if errors.Is(at.Err, syscall.ECONNREFUSED) {
		return one("sidecar-killed", Error, f.Endpoint,
			fmt.Sprintf("no sidecar serves here: the last one, process %d, was killed", at.PID),
			"look at its log, at dmesg for the out-of-memory killer, and start it again: "+start)
	}
	if others := f.serveElsewhere(); len(others) > 0 {
		level := Note // nobody said that one must be here
		if f.Named {
			level = Error
		}
		return one("sidecar-elsewhere", level, f.Endpoint,
			"no sidecar serves here; others of this host serve at "+strings.Join(others, ", "),
			"name one with --runtime-dir, and the same directory as lookaside.endpoint for vLLM; or start one here: "+start)
	}
	return one("sidecar-none", Error, f.Endpoint, "no sidecar runs on this host",
		"start one: "+start+"; vLLM connects to it within a second, whichever was first")
}

func sidecarSilent(f *Facts) (out []Finding) {
	for i := range f.Sidecars {
		s := &f.Sidecars[i]
		switch {
		case s.Serves() || isAbsent(s.Err) && !s.listed(f):
		case errors.Is(s.Err, os.ErrPermission):
			out = append(out, Finding{"sidecar-other-user", s.mattering(f), s.Endpoint,
				"the sidecar is another user's", "run the command as that user or as root"})
		case isAbsent(s.Err):
			out = append(out, Finding{"sidecar-hidden", Note, s.Endpoint,
				"a sidecar listens there, and its directory is not visible here",
				"run the command in that sidecar's container"})
		case errors.Is(s.Err, context.DeadlineExceeded):
			out = append(out, Finding{"sidecar-silent", Error, s.Endpoint, fmt.Sprintf(
				"the sidecar, process %d, does not answer in time", s.PID),
				"it is stopped (kill -CONT), or the machine has no processor for it: look at top; restart it if it stays so"})
		default:
			out = append(out, Finding{"sidecar-silent", Error, s.Endpoint, s.Err.Error(),
				"look at the sidecar's log; restart it if it stays so"})
		}
	}
	return out
}

// listed reports whether a sidecar is known otherwise than by the command's or an engine's setting.
func (s *Sidecar) listed(f *Facts) bool {
	return s.Endpoint != f.Endpoint && s.PID == 0
}

// mattering returns how much it matters that the sidecar cannot be asked.
func (s *Sidecar) mattering(f *Facts) Level {
	if s.Endpoint == f.Endpoint {
		return Error
	}
	return Note
}

func sidecarState(_ *Facts, s *Sidecar) []Finding {
	st := &s.Status
	switch {
	case st.State != "serving":
		return one("sidecar-draining", Warning, s.Endpoint, st.Verdict,
			"it was told to end; start another one, or wait for the one that takes over")
	case st.Arena.State != string(arena.Ready):
		return one("sidecar-starting", Note, s.Endpoint, st.Verdict,
			"wait: engines are connected, and find nothing yet")
	}
	used := fmt.Sprintf("%s of %s used (%s), %d sessions, %d spaces, %d other sidecars",
		bytesize.Format(st.Arena.UsedBytes), bytesize.Format(st.Arena.LimitBytes), st.Arena.Kind,
		len(st.Sessions), len(st.Spaces), len(st.Peers.Lenders))
	return one("sidecar-ok", OK, s.Endpoint, fmt.Sprintf("process %d, version %s: %s", st.PID,
		st.Version, used), "")
}

func sidecarVersion(f *Facts, s *Sidecar) []Finding {
	if s.Status.Version == f.Release {
		return nil
	}
	return one("sidecar-version", Note, s.Endpoint,
		fmt.Sprintf("the sidecar is of version %s, this command of %s", s.Status.Version,
			f.Release), "upgrade it under traffic: lookaside serve --takeover, with its settings")
}

func sidecarGrowth(_ *Facts, s *Sidecar) []Finding {
	a := &s.Status.Arena
	if a.GrowthFailures == 0 || a.CapacityBytes >= a.LimitBytes {
		return nil
	}
	return one("sidecar-growth", Warning, s.Endpoint,
		fmt.Sprintf("the arena could not grow %d times: it has %s of arena.limit %s",
			a.GrowthFailures, bytesize.Format(a.CapacityBytes), bytesize.Format(a.LimitBytes)),
		"give the host or the control group more free memory, or set arena.limit to what there is; the log has the limit's name")
}

func sidecarTiers(_ *Facts, s *Sidecar) (out []Finding) {
	for _, t := range s.Status.Tiers {
		subject := fmt.Sprintf("%s, tier %s", s.Endpoint, t.Name)
		if t.State != "closed" {
			fix := "see that the directories are mounted and writable by the sidecar's user; it is tried again by itself"
			switch t.Kind {
			case "redis", "s3":
				fix = "see that the server can be reached from here with these credentials; it is tried again by itself"
			case "program":
				fix = "see what the program prints, in the sidecar's log, and that the tier's command or socket is right (docs/tiers-elsewhere.md); it is tried again by itself"
			case "dax":
				fix = "see that the devices are there, in devdax mode, and may be opened by the sidecar's user (docs/dax.md); it is tried again by itself"
			}
			out = append(out, Finding{"sidecar-tier", Error, subject, fmt.Sprintf(
				"the tier is not in use (%s): %s", t.State, t.Error), fix})
			continue
		}
		if t.Shed*10 > t.StoredChunks+t.Shed && t.Shed > 10 {
			out = append(out, Finding{"sidecar-tier-sheds", Warning, subject, fmt.Sprintf(
				"%d chunks were not written and %d were: the tier is slower than what is stored",
				t.Shed, t.StoredChunks),
				"set admit: reused or evicted for this tier, so that less is written; more workers, or a faster device"})
		}
		seen := fmt.Sprintf("%s, %s", t.Kind, t.Detail)
		if t.BytesPerSecond > 0 {
			seen += fmt.Sprintf("; loads %s/s", bytesize.Format(int64(t.BytesPerSecond)))
		}
		out = append(out, Finding{"sidecar-tier-ok", OK, subject, seen, ""})
	}
	return out
}

func sidecarDAX(_ *Facts, s *Sidecar) []Finding {
	x := s.Status.Arena.DAX
	if x == nil || x.SlabsGivenUp == 0 {
		return nil
	}
	return one("sidecar-dax", Error, s.Endpoint, fmt.Sprintf(
		"%d of %d slabs of the arena's devices are given up: %s", x.SlabsGivenUp, x.Slabs, x.Error),
		"look at dmesg for the device; remove it with lookaside dax remove --arena (docs/hotplug.md)")
}

func sidecarRotten(_ *Facts, s *Sidecar) []Finding {
	rotten, corrupt := s.Status.Checks.Rotten, uint64(0)
	for _, t := range s.Status.Tiers {
		corrupt += t.CorruptChunks
	}
	if rotten+corrupt == 0 {
		return nil
	}
	return one("sidecar-rotten", Error, s.Endpoint, fmt.Sprintf(
		"%d chunks had changed in memory and %d in tiers; they were dropped, not served", rotten,
		corrupt), "look at the log for the places, and at the machine's memory (edac, mcelog) or the device")
}

func sidecarHeld(_ *Facts, s *Sidecar) (out []Finding) {
	st := &s.Status
	for _, z := range st.Frozen {
		out = append(out, Finding{"sidecar-frozen", Warning, s.Endpoint, fmt.Sprintf(
			"process %d (%s of engine %s) says nothing and holds %d slots: %s", z.PID, z.Role,
			z.EngineID, z.Slots, z.Process), fmt.Sprintf(
			"continue the process (kill -CONT %d) or end it: its slots are free at once", z.PID)})
	}
	for _, l := range st.Lingering {
		out = append(out, Finding{"sidecar-lingering", Warning, s.Endpoint, fmt.Sprintf(
			"process %d (%s of engine %s) was given up and still holds slots: %s", l.PID, l.Role,
			l.EngineID, l.Why), "end the process, or wait until it closes its session"})
	}
	if r := st.Arena.Recovered; r.Frozen {
		out = append(out, Finding{"sidecar-restored", Note, s.Endpoint, fmt.Sprintf(
			"nothing is stored in what was found at the start: clients of the sidecar before may still copy there (%v)",
			r.PIDs), "it ends by itself when these processes have connected anew or ended"})
	}
	return out
}

// refusals says what follows from refused sessions, by their code. Codes that end by themselves
// (no_worker, draining) are left out.
var refusals = map[string]struct{ id, fix string }{
	wire.RefuseVersion: {"sidecar-refused-version",
		"sidecar and connector are of different releases: install the connector of the sidecar's release beside vLLM (pip install), or upgrade the sidecar (lookaside serve --takeover)"},
	wire.RefuseIncompatible: {"sidecar-refused-space",
		"the roles or ranks of one engine disagree: the logs of the sidecar and of vLLM name the field with both values; start all ranks of an engine with the same command"},
	wire.RefuseLimit: {"sidecar-refused-limit",
		"a limit is reached, which the log names: a chunk must fit the arena (a smaller lookaside.chunk_tokens, a larger arena.limit), or raise spaces.limit"},
	wire.RefuseBusy: {"sidecar-refused-limit",
		"there are too many sessions: raise sessions.limit, or end clients that are not used"},
	wire.RefuseMalformed: {"sidecar-refused-other",
		"something that is no connector of this release connects to session.sock: find it in the log by its pid"},
}

func sidecarRefused(_ *Facts, s *Sidecar) (out []Finding) {
	var codes []string
	for code := range s.Status.Counters.Refused {
		codes = append(codes, code)
	}
	slices.Sort(codes)
	for _, code := range codes {
		r, ok := refusals[code]
		n := s.Status.Counters.Refused[code]
		if !ok || n == 0 {
			continue
		}
		level := Warning
		if code == wire.RefuseVersion && !hasRole(s.Status.Sessions, wire.RoleWorker) {
			level = Error // nobody else is served
		}
		out = append(out, Finding{r.id, level, s.Endpoint,
			fmt.Sprintf("%d sessions were refused since the start (%s)", n, code), r.fix})
	}
	return out
}

func sidecarPeers(_ *Facts, s *Sidecar) (out []Finding) {
	for _, u := range s.Status.Peers.Unusable {
		out = append(out, Finding{"sidecar-peers", Warning, s.Endpoint, fmt.Sprintf(
			"the sidecar at %s cannot be shared with: %s", u.Peer, u.Why),
			"run sidecars that share with the same release, below one directory that is private to their user (docs/peers.md)"})
	}
	return out
}

func sidecarHosts(_ *Facts, s *Sidecar) []Finding {
	h := &s.Status.Hosts
	if h.Failed == 0 && h.Refused == 0 {
		return nil
	}
	return one("sidecar-hosts", Warning, s.Endpoint, fmt.Sprintf(
		"of sidecars of other hosts, %d connections were refused here, and %d attempts to reach one failed",
		h.Refused, h.Failed),
		"the logs of both sidecars have the reason: the same hosts.token_file on all hosts, certificates of one authority, hosts.listen and the firewall there (docs/deployment.md)")
}

func hasRole(sessions []connector.SessionStatus, role string) bool {
	return slices.ContainsFunc(sessions,
		func(s connector.SessionStatus) bool { return s.Role == role })
}
