package admin

import (
	"fmt"
	"slices"
	"strings"

	"lookaside/connector"
	"lookaside/internal/unshared"
	"lookaside/sidecar/arena"
)

// verdict returns a sentence on the sidecar's state: the worst problem, or that it is healthy and
// what it is used for. The order of the cases is the order of importance, so they stay in one
// function.
func (st *Status) verdict() string {
	var down []string
	why := ""
	for _, t := range st.Tiers {
		if t.State != breakerClosed {
			if down = append(down, t.Name); why == "" {
				why = t.Error
			}
		}
	}
	engines := make(map[string]bool)
	for _, s := range st.Sessions {
		engines[s.EngineID] = true
	}
	last := &st.LastMinute
	unlike := slices.IndexFunc(st.Unshared, func(u UnsharedStatus) bool { return u.Connected })
	switch x := st.Arena.DAX; {
	case st.State == stateDraining:
		return "draining: no new client is taken"
	case len(down) == 1:
		return fmt.Sprintf("tier %s is down: %s", down[0], why)
	case len(down) > 1:
		return fmt.Sprintf("tiers %s are down: %s", strings.Join(down, ", "), why)
	case x != nil && x.SlabsGivenUp > 0:
		return fmt.Sprintf("the arena's devices fail: %d of %d slabs are given up: %s",
			x.SlabsGivenUp, x.Slabs, x.Error)
	case st.Arena.State != string(arena.Ready):
		return fmt.Sprintf("starting, the arena is %s: engines are connected, and find nothing yet", st.Arena.State)
	case st.Arena.Recovered.Frozen:
		return fmt.Sprintf("nothing is stored in what was found at the start, because clients of the sidecar before may still copy there: %s", pidText(st.Arena.Recovered.PIDs))
	case len(st.Lingering) > 0:
		return fmt.Sprintf("%s slots: %s", counted(len(st.Lingering),
			"client was given up while it lives and holds",
			"clients were given up while they live and hold"),
			processes(st.Lingering, func(l connector.LingeringStatus) int32 { return l.PID }))
	case len(st.Frozen) > 0:
		return fmt.Sprintf("%s slots: %s", counted(len(st.Frozen), "client is frozen and holds",
			"clients are frozen and hold"),
			processes(st.Frozen, func(f connector.FrozenStatus) int32 { return f.PID }))
	case len(engines) == 0 && st.Counters.SessionsOpened == 0:
		return "no engine has connected"
	case len(engines) == 0:
		return "no engine is connected now"
	case unlike >= 0:
		return "instances of one model share nothing: " + unshared.Text(st.Unshared[unlike].Causes)
	case last.ShedPages*20 > last.StoredPages+last.ShedPages:
		return fmt.Sprintf("the arena is too small: %d pages found no room in the last minute, and %d were stored", last.ShedPages, last.StoredPages)
	case last.Tokens.Found > 0 && last.Tokens.Loaded == 0:
		return fmt.Sprintf("nothing is loaded: %d tokens were found in the last minute, and none loaded; the log of vLLM says why", last.Tokens.Found)
	case last.Tokens.Asked == 0:
		return fmt.Sprintf("healthy: %s connected, no tokens were asked for in the last minute",
			counted(len(engines), "engine", "engines"))
	}
	return fmt.Sprintf("healthy: %s connected, %s of the tokens asked for were loaded in the last minute",
		counted(len(engines), "engine", "engines"), percent(last.LoadedRatio))
}

// processes lists the processes of clients, each once.
func processes[T any](list []T, pid func(T) int32) string {
	var pids []int32
	for _, c := range list {
		pids = append(pids, pid(c))
	}
	slices.Sort(pids)
	return pidText(slices.Compact(pids))
}

// pidText names processes.
func pidText[T int | int32](pids []T) string {
	if len(pids) == 0 {
		return "unknown processes"
	}
	return "process " + strings.Trim(strings.ReplaceAll(fmt.Sprint(pids), " ", ", "), "[]")
}

func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprint(n, " ", many)
}

func percent(ratio float64) string { return fmt.Sprintf("%.0f %%", 100*ratio) }
