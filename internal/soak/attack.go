package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"
)

// An attack is one kind of misuse of a sidecar by processes and servers that it must not trust.
type attack struct {
	name string
	does string // description for --list
	// args returns arguments beyond those of every attacked sidecar. It may be nil.
	args func(s *siege) ([]string, error)
	// run attacks until ctx ends. It does not judge the sidecar's replies; an error is a fault of
	// the attack itself.
	run func(ctx context.Context, s *siege) error
	// after checks what is left of the attack at its end. It may be nil.
	after func(s *siege)

	memory    int64 // bytes of a memory cgroup, if one can be made; 0: none
	arena     string
	files     int   // limit of open files; 0: fileLimit
	anonBytes int64 // how much the sidecar's own memory may grow; 0: anonLimit
	// loses allows the loss of other clients' lookups with connections that are cut off. Such
	// lookups are misses after their deadline.
	loses    bool
	ownEnd   bool          // the attack ends the sidecar by itself
	noVictim bool          // no other client is connected
	patience time.Duration // of the victim's slowest lookup; 0: lookupLimit
}

// These bound an attacked sidecar. They are wide, because a machine that is busy with the attack is
// slow by itself.
const (
	fileLimit = 1024
	// Without a control group Go collects at some nine times the 12 MiB that it keeps.
	anonLimit = 128 << 20
	// socketLimit is for lookup messages in libzmq: the sidecar's own limit, and what arrives
	// between two checks of it.
	socketLimit = 384 << 20
	logLimit    = 128 << 10 // bytes that one attack may cause in the log
	lookupLimit = time.Second
	idleLimit   = 0.2 // of one core, after the attack, without any request
	leftLimit   = 16  // file descriptors and goroutines that may be left by an attack
)

// A sample is one reading of the sidecar's process.
type sample struct {
	AnonBytes  int64 `json:"anon_bytes"` // the sidecar's own memory, without the arena
	Files      int   `json:"files"`
	Goroutines int   `json:"goroutines"` // 0 during an attack: reading it takes a request
}

// outcome is the suite's output for one attack.
type outcome struct {
	Attack    string   `json:"attack"`
	Seconds   float64  `json:"seconds"`
	Before    sample   `json:"before"`
	Peak      sample   `json:"peak"`
	After     sample   `json:"after"`
	LogBytes  int64    `json:"log_bytes"`
	IdleCPU   float64  `json:"idle_cpu"` // of one core
	Lookups   int      `json:"lookups"`  // the victim's
	HitRatio  float64  `json:"hit_ratio"`
	P50Ms     float64  `json:"p50_ms"`
	P99Ms     float64  `json:"p99_ms"`
	MaxMs     float64  `json:"max_ms"`
	SelfMs    float64  `json:"self_waited_ms"` // longest time that the victim did not run
	Late      int      `json:"late"`
	Health    int      `json:"health"`        // probes of /healthz during the attack
	HealthBad int      `json:"health_failed"` // probes without a reply
	Notes     []string `json:"notes"`
	Problems  []string `json:"problems"`
}

// A siege is one attack under way.
type siege struct {
	stand
	attack  *attack
	sidecar *process
	victim  *process
	cgroup  string
	mounted string // the attack's own file system

	eventPorts [2]int // of the publisher, and of the replays

	// Guarded by stand.mu:
	out       outcome
	latencies []float64
	pages     int
	hits      int
}

// endpoint returns the runtime directory of the sidecar under attack.
func (s *siege) endpoint() string { return filepath.Join(s.dir, "run") }

func (s *siege) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.out.Notes) < 20 {
		s.out.Notes = append(s.out.Notes, fmt.Sprintf(format, args...))
	}
}

// attackMain runs the suite.
func attackMain(args []string) error {
	var bin, only, jsonFile string
	var each time.Duration
	var list bool
	fs := pflag.NewFlagSet("attack", pflag.ContinueOnError)
	fs.StringVar(&bin, "bin", "bin/lookaside", "the binary to attack")
	fs.DurationVar(&each, "each", 6*time.Second, "how long each attack goes on")
	fs.StringVar(&only, "only", "", "names of attacks, separated by commas; default all")
	fs.StringVar(&jsonFile, "json", "", "also write what was seen here")
	fs.BoolVar(&list, "list", false, "list the attacks")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if list {
		for _, a := range attacks {
			fmt.Printf("%-20s %s\n", a.name, a.does)
		}
		return nil
	}
	chosen := attacks
	if only != "" {
		chosen = nil
		for name := range strings.SplitSeq(only, ",") {
			i := slices.IndexFunc(attacks, func(a *attack) bool { return a.name == name })
			if i < 0 {
				return fmt.Errorf("--only: there is no attack %q; --list names them", name)
			}
			chosen = append(chosen, attacks[i])
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var outcomes []outcome
	bad := 0
	for _, a := range chosen {
		if ctx.Err() != nil {
			break
		}
		o := besiege(ctx, a, bin, each)
		verdict := "held"
		if len(o.Problems) > 0 {
			bad++
			verdict = "FAILED"
		}
		fmt.Fprintf(os.Stderr, "attack: %-20s %-6s memory +%d MiB, files %d (%d left), log %d KiB, lookups p50 %.2f p99 %.1f max %.0f ms, %d late, %.2f hit, idle %.2f; %s\n",
			a.name, verdict, (o.Peak.AnonBytes-o.Before.AnonBytes)>>20, o.Peak.Files,
			o.After.Files-o.Before.Files, o.LogBytes>>10,
			o.P50Ms, o.P99Ms, o.MaxMs, o.Late, o.HitRatio, o.IdleCPU, strings.Join(o.Notes, "; "))
		outcomes = append(outcomes, o)
	}
	out, err := json.MarshalIndent(outcomes, "", "  ")
	if err != nil {
		return err
	}
	fmt.Println(string(out))
	if jsonFile != "" {
		if err := os.WriteFile(jsonFile, append(out, '\n'), 0o644); err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d attacks did what they must not", bad, len(outcomes))
	}
	return ctx.Err()
}

// besiege runs one attack on a sidecar of its own, observed from outside.
func besiege(ctx context.Context, a *attack, bin string, each time.Duration) outcome {
	dir, err := os.MkdirTemp("", "atk")
	if err != nil {
		return outcome{Attack: a.name, Problems: []string{err.Error()}}
	}
	s := &siege{stand: newStand("attack", dir, bin), attack: a}
	s.out.Attack = a.name
	if err = s.all(ctx, each); err != nil {
		s.problem("the attack itself failed: %v", err)
	}
	s.endChild(s.victim)
	if s.sidecar != nil && !s.sidecar.dead() {
		s.end(s.sidecar, syscall.SIGTERM, time.Minute)
	}
	s.removeCgroup()
	if s.mounted != "" {
		_ = syscall.Unmount(s.mounted, syscall.MNT_DETACH)
	}
	s.http.CloseIdleConnections()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.Problems = s.problems
	s.out.Seconds = time.Since(s.start).Seconds()
	s.out.P50Ms, s.out.P99Ms, s.out.MaxMs = quantile(s.latencies, 0.5), quantile(s.latencies, 0.99),
		quantile(s.latencies, 1)
	if s.pages > 0 {
		s.out.HitRatio = float64(s.hits) / float64(s.pages)
	}
	if len(s.problems) == 0 {
		_ = os.RemoveAll(dir)
	} else {
		fmt.Fprintf(os.Stderr, "attack: logs are left in %s\n", dir)
	}
	return s.out
}

func (s *siege) all(ctx context.Context, each time.Duration) error {
	if err := s.startSidecar(); err != nil {
		return err
	}
	if !s.attack.noVictim {
		if err := s.startVictim(ctx); err != nil {
			return err
		}
	}
	var err error
	if s.out.Before, err = s.look(true); err != nil {
		return err
	}
	logged := s.logBytes()

	attacking, cancel := context.WithTimeout(ctx, each)
	defer cancel()
	var watching sync.WaitGroup
	watching.Go(func() { s.watch(attacking) })
	if !s.attack.ownEnd {
		watching.Go(func() { s.probe(attacking) })
	}
	err = s.attack.run(attacking, s)
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		err = nil
		<-attacking.Done()
	}
	cancel()
	watching.Wait()
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.out.LogBytes = s.logBytes() - logged
	s.mu.Unlock()
	if s.attack.after != nil {
		s.attack.after(s)
	}
	if !s.attack.ownEnd {
		s.settle()
	}
	s.judge()
	if !s.attack.ownEnd {
		s.endSidecar()
	}
	s.readLogs("sidecar")
	return nil
}

// startSidecar starts the sidecar under attack with the attack's limits.
func (s *siege) startSidecar() error {
	args, err := s.serveArgs()
	if err != nil {
		return err
	}
	files := s.attack.files
	if files == 0 {
		files = fileLimit
	}
	script := fmt.Sprintf("ulimit -n %d; exec \"$@\"", files)
	if s.makeCgroup() {
		script = fmt.Sprintf("echo $$ >%s/cgroup.procs; %s", s.cgroup, script)
	}
	if s.sidecar, err = s.spawn("sidecar", nil, "/bin/sh",
		append([]string{"-c", script, "sh", s.bin}, args...)...); err != nil {
		return err
	}
	return s.waitServing(s.endpoint(), s.sidecar)
}

func (s *siege) serveArgs() ([]string, error) {
	arena := s.attack.arena
	if arena == "" {
		arena = "32M"
	}
	args := []string{
		"serve", "--runtime-dir", s.endpoint(), "--arena-limit", arena, "--arena-kind", "memfd",
		"--sessions-limit", "24",
		"--lookup-lease", "3s", "--lifecycle-drain", "2s", "--lifecycle-flush", "5s",
	}
	if s.attack.args == nil {
		return args, nil
	}
	more, err := s.attack.args(s)
	return append(args, more...), err
}

// startVictim starts the victim and returns when its prefixes hit.
func (s *siege) startVictim(ctx context.Context) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	warm := make(chan struct{})
	var once sync.Once
	isWarm := func() bool {
		select {
		case <-warm:
			return true
		default:
			return false
		}
	}
	s.victim, err = s.spawn("victim", func(line []byte) {
		var r victimReport
		if err := json.Unmarshal(line, &r); err != nil {
			s.problem("the victim said %q", line)
			return
		}
		if r.Wrong != "" {
			s.problem("%s", r.Wrong)
		}
		if !isWarm() {
			if r.Pages > 0 && r.HitPages == r.Pages {
				once.Do(func() { close(warm) })
			}
			return
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.out.Lookups += r.Lookups
		s.out.Late += r.Late
		s.pages += r.Pages
		s.hits += r.HitPages
		s.latencies = append(s.latencies, r.LatencyMs...)
		s.out.SelfMs = max(s.out.SelfMs, r.SelfWaitMs)
		if r.Reconnects > 0 {
			s.problems = append(s.problems, fmt.Sprintf("the victim lost its session %d times",
				r.Reconnects))
		}
	}, self, "victim", "--dir", s.endpoint())
	if err != nil {
		return err
	}
	select {
	case <-warm:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Minute):
		return fmt.Errorf("the victim's prefixes do not hit:\n%s",
			tail(filepath.Join(s.dir, "victim.log"), 4000))
	}
}

// endChild ends a child by closing its standard input.
func (s *siege) endChild(p *process) {
	if p == nil {
		return
	}
	p.wanted.Store(true)
	_ = p.stdin.Close()
	s.end(p, syscall.SIGCONT, time.Minute)
}

// look samples the sidecar's process. goroutines adds their number, which takes a request over
// HTTP.
func (s *siege) look(goroutines bool) (sample, error) {
	pid := s.sidecar.cmd.Process.Pid
	var r sample
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return r, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.ParseInt(
				strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			if err != nil {
				return r, err
			}
			r.AnonBytes = kib << 10
		}
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return r, err
	}
	r.Files = len(entries)
	if goroutines {
		r.Goroutines, err = s.goroutines()
	}
	return r, err
}

func (s *siege) adminAddr() (string, error) {
	b, err := os.ReadFile(filepath.Join(s.endpoint(), "admin.addr"))
	return strings.TrimSpace(string(b)), err
}

func (s *siege) goroutines() (int, error) {
	addr, err := s.adminAddr()
	if err != nil {
		return 0, err
	}
	r, err := s.http.Get("http://" + addr + "/metrics")
	if err != nil {
		return 0, err
	}
	defer r.Body.Close()
	var b strings.Builder
	if _, err := copyLimited(&b, r.Body, 16<<20); err != nil {
		return 0, err
	}
	for line := range strings.Lines(b.String()) {
		if rest, ok := strings.CutPrefix(line, "go_goroutines "); ok {
			return strconv.Atoi(strings.TrimSpace(rest))
		}
	}
	return 0, errors.New("/metrics has no go_goroutines")
}

// watch keeps the highest samples until ctx ends.
func (s *siege) watch(ctx context.Context) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if r, err := s.look(false); err == nil {
			s.mu.Lock()
			s.out.Peak.AnonBytes = max(s.out.Peak.AnonBytes, r.AnonBytes)
			s.out.Peak.Files = max(s.out.Peak.Files, r.Files)
			s.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// probe requests /healthz as a supervisor does: with a new connection each time.
func (s *siege) probe(ctx context.Context) {
	probes := &http.Client{Timeout: 2 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true}}
	for ctx.Err() == nil {
		addr, err := s.adminAddr()
		if err == nil {
			var r *http.Response
			if r, err = probes.Get("http://" + addr + "/healthz"); err == nil {
				r.Body.Close()
				if r.StatusCode != http.StatusOK {
					err = errors.New(r.Status)
				}
			}
		}
		s.mu.Lock()
		s.out.Health++
		if err != nil {
			s.out.HealthBad++
		}
		s.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (s *siege) logBytes() int64 {
	info, err := os.Stat(filepath.Join(s.dir, "sidecar.log"))
	if err != nil {
		return 0
	}
	return info.Size()
}

// settle waits until the resources of the attack are free again, and measures what the sidecar does
// without requests.
func (s *siege) settle() {
	var now sample
	var err error
	for deadline := time.Now().Add(30 * time.Second); !s.sidecar.dead(); time.Sleep(
		100 * time.Millisecond) {
		now, err = s.look(true)
		if err == nil && now.Files <= s.out.Before.Files+leftLimit &&
			now.Goroutines <= s.out.Before.Goroutines+leftLimit {
			break
		}
		if time.Now().After(deadline) {
			s.problem("30 s after the attack something is left: %+v, before it %+v, %v", now,
				s.out.Before, err)
			break
		}
	}
	s.endChild(s.victim)
	s.victim = nil
	used, start := s.cpu(), time.Now()
	time.Sleep(2 * time.Second)
	idle := (s.cpu() - used).Seconds() / time.Since(start).Seconds()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.After, s.out.IdleCPU = now, idle
}

// cpu returns the processor time that the sidecar has used.
func (s *siege) cpu() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.sidecar.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0
	}
	user, _ := strconv.ParseInt(fields[11], 10, 64)
	system, _ := strconv.ParseInt(fields[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond // a tick is a hundredth of a second
}

// judge compares the measurements with the bounds.
func (s *siege) judge() {
	s.mu.Lock()
	o := s.out
	slowest := quantile(s.latencies, 0.99)
	s.mu.Unlock()
	anon, patience := s.attack.anonBytes, s.attack.patience
	if anon == 0 {
		anon = anonLimit
	}
	if patience == 0 {
		patience = lookupLimit
	}
	if grown := o.Peak.AnonBytes - o.Before.AnonBytes; grown > anon {
		s.problem("its own memory grew by %d MiB; allowed are %d", grown>>20, anon>>20)
	}
	if o.LogBytes > logLimit {
		s.problem("%d KiB were logged; allowed are %d", o.LogBytes>>10, int64(logLimit)>>10)
	}
	if o.IdleCPU > idleLimit {
		s.problem("idle, it uses %.2f of a core; allowed are %.2f", o.IdleCPU, idleLimit)
	}
	if o.HealthBad*10 > o.Health {
		s.problem("%d of %d probes of /healthz had no answer", o.HealthBad, o.Health)
	}
	if s.attack.noVictim {
		return
	}
	if o.Lookups == 0 {
		s.problem("the victim asked for nothing")
	}
	if o.Late > 0 && !s.attack.loses || o.Late > 10 {
		s.problem("%d of the victim's %d lookups had no answer within %v", o.Late, o.Lookups,
			victimPatience)
	}
	if slowest > milliseconds(patience) {
		s.problem("the victim's lookups took %.0f ms at the 99th percentile; allowed are %v",
			slowest, patience)
	}
}

// endSidecar ends the sidecar as a supervisor does.
func (s *siege) endSidecar() {
	s.end(s.sidecar, syscall.SIGTERM, time.Minute)
	if state := s.sidecar.cmd.ProcessState; state != nil && !state.Success() {
		s.problem("the sidecar ended with %v after SIGTERM", state)
	}
}

// makeCgroup makes a memory cgroup for the attack, if it has a limit and this machine allows it. It
// needs cgroup v1 and root, as on the machines that run these tests.
func (s *siege) makeCgroup() bool {
	if s.attack.memory == 0 {
		return false
	}
	dir := filepath.Join("/sys/fs/cgroup/memory", filepath.Base(s.dir))
	if err := os.Mkdir(dir, 0o755); err != nil {
		s.note("no memory cgroup here (%v)", err)
		return false
	}
	s.cgroup = dir
	if err := os.WriteFile(filepath.Join(dir, "memory.limit_in_bytes"),
		[]byte(strconv.FormatInt(s.attack.memory, 10)), 0); err != nil {
		s.note("no memory limit here (%v)", err)
		s.removeCgroup()
		return false
	}
	return true
}

func (s *siege) removeCgroup() {
	if s.cgroup != "" {
		for deadline := time.Now().Add(10 * time.Second); os.Remove(s.cgroup) != nil &&
			time.Now().Before(deadline); {
			time.Sleep(50 * time.Millisecond)
		}
		s.cgroup = ""
	}
}

// checkStore verifies a disk tier's directory offline.
func (s *siege) checkStore(dir string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if out, err := exec.CommandContext(ctx, s.bin, "check", dir).CombinedOutput(); err != nil {
		s.problem("lookaside check: %v\n%s", err, out)
	}
}
