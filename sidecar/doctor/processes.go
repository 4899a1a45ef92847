package doctor

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Process is a process of vLLM whose command line names the connector. Those that a program starts
// with LLM(...) are not found this way; they are known once they are connected.
type Process struct {
	PID int
	UID int
	// The connector's configuration, as --kv-transfer-config gives it.
	// FailurePolicy is vLLM's; "" if it is not said. FailsRequests is set if requests whose loads
	// fail get an error: vLLM's default, which the connector changes unless it is one of several.
	FailurePolicy string
	FailsRequests bool
	Role          string
	Settings      map[string]any // lookaside.*
	NoCaching     bool           // --no-enable-prefix-caching
	TP, PP        int            // sizes of the parallel groups; 0: 1
	HashAlgorithm string         // "" if it is not said
	// Of its environment. Known is false where this user may not read it.
	Known   bool
	XDG     string
	Seed    string // PYTHONHASHSEED
	HasSeed bool
}

const (
	connectorName = "LookasideConnector"
	settingPrefix = "lookaside."
)

// EndpointOf returns the directory where the process looks for the sidecar of a rank, or "" if that
// cannot be known.
func (p *Process) EndpointOf(rank int) string {
	template, ok := p.Settings[settingPrefix+"endpoint"].(string)
	if !ok {
		if !p.Known {
			return ""
		}
		base := p.XDG
		if base == "" {
			base = "/tmp"
		}
		template = filepath.Join(base, fmt.Sprintf("lookaside-%d", p.UID), "rank-{rank}")
	}
	r := strings.NewReplacer("{rank}", strconv.Itoa(rank), "{dp_rank}", "0")
	return filepath.Clean(r.Replace(template))
}

// Ranks returns how many ranks the process has; each has an endpoint.
func (p *Process) Ranks() int { return min(max(1, p.TP)*max(1, p.PP), maxRanks) }

// maxRanks bounds what is looked at of a process.
const maxRanks = 1024

// Autostart reports whether the process starts a sidecar by itself.
func (p *Process) Autostart() bool {
	switch v := p.Settings[settingPrefix+"autostart"].(type) {
	case bool:
		return v
	case string:
		return strings.EqualFold(v, "true")
	}
	return false
}

// readProcesses returns the processes of vLLM with the connector, and the parents of all processes.
func readProcesses(root string) (engines []Process, parents map[int]int) {
	parents = map[int]int{}
	all, _ := filepath.Glob(filepath.Join(root, "proc", "[0-9]*"))
	for _, dir := range all {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil {
			continue
		}
		if b, err := os.ReadFile(filepath.Join(dir, "stat")); err == nil {
			// "pid (name) state ppid …", and the name may have anything in it.
			if i := strings.LastIndexByte(string(b), ')'); i >= 0 {
				if f := strings.Fields(string(b[i+1:])); len(f) > 1 {
					parents[pid], _ = strconv.Atoi(f[1])
				}
			}
		}
		args := readWords(filepath.Join(dir, "cmdline"))
		if p, ok := parseCommand(args); ok {
			p.PID = pid
			p.readEnvironment(dir)
			engines = append(engines, p)
		}
	}
	// Processes that were started by one of these, such as a shell's child, are the same server.
	engines = slices.DeleteFunc(engines, func(p Process) bool {
		return slices.ContainsFunc(engines, func(child Process) bool {
			return parents[child.PID] == p.PID
		})
	})
	return engines, parents
}

func (p *Process) readEnvironment(dir string) {
	environ := readWords(filepath.Join(dir, "environ"))
	p.Known = environ != nil
	for _, e := range environ {
		switch name, value, _ := strings.Cut(e, "="); name {
		case "XDG_RUNTIME_DIR":
			p.XDG = value
		case "PYTHONHASHSEED":
			p.Seed, p.HasSeed = value, true
		}
	}
	for line := range strings.SplitSeq(readText(filepath.Join(dir, "status")), "\n") {
		if v, ok := strings.CutPrefix(line, "Uid:"); ok {
			_, _ = fmt.Sscan(v, &p.UID)
		}
	}
}

func readText(name string) string {
	b, _ := os.ReadFile(name)
	return string(b)
}

// parseCommand reads the arguments of a process. It returns false if they do not name the connector
// in --kv-transfer-config.
func parseCommand(args []string) (p Process, ok bool) {
	for i, arg := range args {
		name, value, has := strings.Cut(arg, "=")
		if !has && i+1 < len(args) {
			value = args[i+1]
		}
		switch strings.ReplaceAll(name, "_", "-") {
		case "--kv-transfer-config":
			var config any
			if json.Unmarshal([]byte(value), &config) == nil {
				ok = p.configure(config) || ok
			}
		case "--no-enable-prefix-caching":
			p.NoCaching = true
		case "--prefix-caching-hash-algo":
			p.HashAlgorithm = value
		case "--tensor-parallel-size", "-tp":
			p.TP, _ = strconv.Atoi(value)
		case "--pipeline-parallel-size", "-pp":
			p.PP, _ = strconv.Atoi(value)
		}
	}
	return p, ok
}

// configure takes the connector's part of a configuration, which may be one of several connectors.
func (p *Process) configure(config any) bool {
	switch c := config.(type) {
	case []any:
		for _, each := range c {
			if p.configure(each) {
				return true
			}
		}
	case map[string]any:
		extra, _ := c["kv_connector_extra_config"].(map[string]any)
		if c["kv_connector"] == connectorName {
			p.FailurePolicy, _ = c["kv_load_failure_policy"].(string)
			p.Role, _ = c["kv_role"].(string)
			p.Settings = extra
			return true
		}
		if p.configure(extra["connectors"]) {
			// The policy is the outer connector's.
			p.FailurePolicy, _ = c["kv_load_failure_policy"].(string)
			p.FailsRequests = p.FailurePolicy != "recompute"
			return true
		}
	}
	return false
}
