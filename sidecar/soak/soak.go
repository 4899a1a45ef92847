package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"lookaside/internal/freeport"
	"lookaside/tiers"
)

type options struct {
	bin      string
	dir      string // for everything that the soak makes
	duration time.Duration
	seed     uint64
	clients  int
	redis    string
}

// summary is what the soak prints at its end.
type summary struct {
	Seed     uint64         `json:"seed"`
	Seconds  float64        `json:"seconds"`
	Redis    bool           `json:"redis"`
	Events   map[string]int `json:"events"` // what was done to the processes
	Checks   int            `json:"checks"` // of the store, after each end of a sidecar
	Audits   int            `json:"audits"` // of the leases, with all clients gone
	Clients  counts         `json:"clients"`
	HitRatio float64        `json:"hit_ratio"`
	// Tiers are the highest counts that any one sidecar named of its tiers, when it was asked at an audit or before its end.
	Tiers    map[string]map[string]float64 `json:"tiers"`
	Problems []string                      `json:"problems"`
}

type soak struct {
	o     options
	rnd   *rand.Rand // the main goroutine's only
	start time.Time
	http  *http.Client

	sidecar *process
	redis   *process
	port    int // redis's
	peers   []*process

	mu       sync.Mutex
	events   map[string]int
	checks   int
	audits   int
	counts   counts
	tiers    map[string]map[string]float64
	problems []string
	seconds  float64
}

func newSoak(o options) *soak {
	return &soak{o: o, rnd: rand.New(rand.NewPCG(o.seed, 0)), http: &http.Client{Timeout: 5 * time.Second}, events: map[string]int{}, tiers: map[string]map[string]float64{}}
}

// process is a child. What ends it without our doing is a problem.
type process struct {
	name    string
	cmd     *exec.Cmd
	stdin   io.Closer
	ended   chan struct{} // closed when it has been waited for
	wanted  chan struct{} // closed when we end it
	ending  sync.Once
	stopped bool
}

func (p *process) dead() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// end sends a signal, if it has not ended yet, and waits; one that does not end in time is killed, which is a problem.
func (s *soak) end(p *process, sig os.Signal, patience time.Duration) {
	if p == nil {
		return
	}
	p.ending.Do(func() { close(p.wanted) })
	_ = p.cmd.Process.Signal(sig)
	if p.stopped {
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
	}
	select {
	case <-p.ended:
	case <-time.After(patience):
		s.problem("%s has not ended %v after %v", p.name, patience, sig)
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// spawn starts a child in a process group of its own, so that Ctrl-C is ours to act on. each is called for each line that it prints.
func (s *soak) spawn(name string, each func(line []byte), program string, args ...string) (*process, error) {
	p := &process{name: name, cmd: exec.Command(program, args...), ended: make(chan struct{}), wanted: make(chan struct{})}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	log, err := os.OpenFile(filepath.Join(s.o.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p.cmd.Stderr = log
	var lines io.Reader
	if each != nil {
		if lines, err = p.cmd.StdoutPipe(); err != nil {
			return nil, err
		}
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.ended)
		if each != nil {
			for scan := bufio.NewScanner(lines); scan.Scan(); {
				each(scan.Bytes())
			}
		}
		err := p.cmd.Wait()
		select {
		case <-p.wanted:
		default:
			s.problem("%s ended by itself: %v\n%s", name, err, tail(log.Name(), 4000))
		}
	}()
	return p, nil
}

func (s *soak) problem(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := fmt.Sprintf(format, args...)
	if len(s.problems) < 50 {
		s.problems = append(s.problems, text)
	}
	fmt.Fprintf(os.Stderr, "soak: %7.1fs PROBLEM: %s\n", time.Since(s.start).Seconds(), text)
}

func (s *soak) event(name string) {
	s.mu.Lock()
	s.events[name]++
	s.mu.Unlock()
}

func (s *soak) endpoint() string { return filepath.Join(s.o.dir, "run") }
func (s *soak) store() string    { return filepath.Join(s.o.dir, "disk") }

func pick[T any](rnd *rand.Rand, of ...T) T { return of[rnd.IntN(len(of))] }

// startSidecar starts one with other settings each time, over the same store.
func (s *soak) startSidecar() error {
	args := []string{
		"serve", "--runtime-dir", s.endpoint(), "--arena-limit", pick(s.rnd, "8M", "12M", "24M"), "--arena-kind", "memfd", "--lifecycle-drain", "1s", "--lifecycle-flush", "2s",
		"--lookup-lease", "3s", "--log-level", "warn", "--arena-eviction", pick(s.rnd, "lru", "adaptive"), "--lookup-promote", pick(s.rnd, "auto", "always", "always"),
		"--disk", s.store() + ":" + pick(s.rnd, "48M", "64M", "64M", "64M") + ":admit=" + pick(s.rnd, "stored", "stored", "reused", "evicted") +
			":direct=" + pick(s.rnd, "auto", "never") + ":workers=" + pick(s.rnd, "1", "4") + ":slab=" + pick(s.rnd, "4M", "8M", "16M"),
	}
	if s.redis != nil {
		args = append(args, "--redis", fmt.Sprintf("redis://127.0.0.1:%d/0?admit=%s", s.port, pick(s.rnd, "stored", "reused", "evicted")))
	}
	var err error
	if s.sidecar, err = s.spawn("sidecar", nil, s.o.bin, args...); err != nil {
		return err
	}
	// Serving when its admin server says so.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		var st status
		if err = s.get("/v1/status", &st); err == nil && st.PID == s.sidecar.cmd.Process.Pid {
			return nil
		}
		if s.sidecar.dead() {
			return fmt.Errorf("sidecar %q does not start:\n%s", args, tail(filepath.Join(s.o.dir, "sidecar.log"), 4000))
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("sidecar %q does not serve after a minute: %w", args, err)
		}
	}
}

// status is what the soak reads of /v1/status.
type status struct {
	PID            int `json:"pid"`
	Leases         int `json:"leases"`
	StoresInFlight int `json:"stores_in_flight"`
	LoadsInFlight  int `json:"loads_in_flight"`
	Slots          struct {
		Total   int `json:"total"`
		Free    int `json:"free"`
		Filling int `json:"filling"`
		Ready   int `json:"ready"`
		Leased  int `json:"leased"`
	} `json:"slots"`
	Lookups struct {
		InFlight int `json:"in_flight"`
	} `json:"lookups"`
	Sessions  []any `json:"sessions"`
	Lingering []any `json:"lingering"`
	Spaces    []struct {
		Fingerprint string            `json:"fingerprint"`
		Fields      map[string]string `json:"fields"`
	} `json:"spaces"`
}

func (s *soak) get(path string, into any) error { return s.ask(http.MethodGet, path, nil, into) }

// ask asks the admin server. What it refuses is an error; that it has failed is a problem.
func (s *soak) ask(method, path string, body, into any) error {
	addr, err := os.ReadFile(filepath.Join(s.endpoint(), "admin.addr"))
	if err != nil {
		return err
	}
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	q, err := http.NewRequest(method, "http://"+strings.TrimSpace(string(addr))+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/json")
	r, err := s.http.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if b, err = io.ReadAll(io.LimitReader(r.Body, 16<<20)); err != nil {
		return err
	}
	if r.StatusCode == http.StatusInternalServerError {
		s.problem("%s %s: %s", method, path, b)
	}
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", path, r.Status, b)
	}
	return json.Unmarshal(b, into)
}

// check verifies the store offline: whatever has happened to the sidecar, nothing in it may be bad.
func (s *soak) check() {
	if _, err := os.Stat(s.store()); errors.Is(err, os.ErrNotExist) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, s.o.bin, "check", s.store()).CombinedOutput()
	s.mu.Lock()
	s.checks++
	s.mu.Unlock()
	if err != nil {
		s.problem("lookaside check: %v\n%s", err, out)
	}
}

func (s *soak) startPeer() (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	n := s.rnd.IntN(1 << 30)
	return s.spawn("client", func(line []byte) {
		var r report
		if err := json.Unmarshal(line, &r); err != nil {
			s.problem("a client said %q", line)
			return
		}
		s.mu.Lock()
		s.counts.add(r.Counts)
		s.mu.Unlock()
		if r.Wrong != "" {
			s.problem("%s", r.Wrong)
		}
	}, self, "client", "--dir", s.endpoint(), "--engine", fmt.Sprintf("engine-%d", n), "--seed", seedArg(s.rnd.Uint64()), "--space", fmt.Sprint(n%len(spaces)))
}

// startRedis starts a server without persistence on a free port, if there is one to start.
func (s *soak) startRedis() error {
	program, err := exec.LookPath("redis-server")
	if err != nil || s.o.redis == "never" {
		return nil
	}
	if s.port == 0 {
		if s.port, err = freeport.Find(); err != nil {
			return err
		}
	}
	s.redis, err = s.spawn("redis", nil, program, "--port", fmt.Sprint(s.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "96mb",
		"--maxmemory-policy", "allkeys-lru", "--dir", s.o.dir)
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", s.port))
		if err == nil {
			return c.Close()
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

// run does it all; what goes wrong becomes a problem.
func (s *soak) run(ctx context.Context) {
	s.start = time.Now()
	ctx, cancel := context.WithTimeout(ctx, s.o.duration)
	defer cancel()
	if err := errors.Join(s.startRedis(), s.startSidecar()); err != nil {
		s.problem("start: %v", err)
	}
	for range s.o.clients {
		s.fill()
	}
	for said := time.Now(); ctx.Err() == nil && !s.broken(); {
		for until := time.Now().Add(time.Duration(s.rnd.ExpFloat64() * float64(700*time.Millisecond))); time.Now().Before(until) && ctx.Err() == nil; {
			s.operate()
			s.wait(ctx, min(time.Until(until), 100*time.Millisecond))
		}
		s.chaos(ctx)
		s.fill()
		if time.Since(said) > 15*time.Second {
			said = time.Now()
			s.say()
		}
	}
	s.audit()
	s.endAll()
	s.seconds = time.Since(s.start).Seconds()
}

// broken says whether there is no sense in going on.
func (s *soak) broken() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.problems) >= 5 || s.sidecar == nil || s.sidecar.dead()
}

func (s *soak) wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// fill starts clients until there are enough.
func (s *soak) fill() {
	alive := s.peers[:0]
	for _, p := range s.peers {
		if !p.dead() {
			alive = append(alive, p)
		}
	}
	s.peers = alive
	if len(s.peers) < s.o.clients {
		p, err := s.startPeer()
		if err != nil {
			s.problem("client: %v", err)
			return
		}
		s.peers = append(s.peers, p)
	}
}

// restart has the store checked and another sidecar started; the one before has ended.
func (s *soak) restart() {
	s.check()
	if err := s.startSidecar(); err != nil {
		s.problem("restart: %v", err)
	}
}

// freeze stops a process for a while.
func (s *soak) freeze(ctx context.Context, p *process, most time.Duration) {
	p.stopped = true
	_ = p.cmd.Process.Signal(syscall.SIGSTOP)
	s.wait(ctx, time.Duration(s.rnd.Int64N(int64(most))))
	_ = p.cmd.Process.Signal(syscall.SIGCONT)
	p.stopped = false
}

// chaos does one thing that a deployment may meet.
func (s *soak) chaos(ctx context.Context) {
	var victim *process
	if len(s.peers) > 0 {
		victim = s.peers[s.rnd.IntN(len(s.peers))]
	}
	switch n := s.rnd.IntN(100); {
	case n < 30 && victim != nil:
		s.event("client killed")
		s.end(victim, syscall.SIGKILL, time.Minute)
	case n < 55:
		s.event("sidecar killed")
		s.end(s.sidecar, syscall.SIGKILL, time.Minute)
		s.restart()
	case n < 63:
		s.event("sidecar ended")
		s.note()
		s.end(s.sidecar, syscall.SIGTERM, time.Minute)
		s.restart()
	case n < 66:
		s.event("all killed")
		s.killPeers()
		s.end(s.sidecar, syscall.SIGKILL, time.Minute)
		s.restart()
	case n < 74 && victim != nil:
		s.event("client stopped")
		s.freeze(ctx, victim, 3*time.Second)
	case n < 80:
		s.event("sidecar stopped")
		s.freeze(ctx, s.sidecar, 2*time.Second)
	case n < 84 && s.redis != nil:
		s.event("redis stopped")
		s.freeze(ctx, s.redis, 3*time.Second)
	case n < 90 && s.redis != nil:
		s.event("redis killed")
		s.end(s.redis, syscall.SIGKILL, time.Minute)
		s.wait(ctx, time.Duration(s.rnd.Int64N(int64(2*time.Second))))
		if err := s.startRedis(); err != nil {
			s.problem("redis: %v", err)
		}
	default:
		s.event("audit")
		s.audit()
	}
}

// operate does what an operator may, over HTTP, with prefixes such as the clients have. It may be refused; the sidecar may be gone.
func (s *soak) operate() {
	type object = map[string]any
	var st status
	if s.get("/v1/status", &st) != nil || len(st.Spaces) == 0 {
		return
	}
	sp := st.Spaces[s.rnd.IntN(len(st.Spaces))]
	own := slices.IndexFunc(spaces, func(o *tiers.Space) bool { return o.Fingerprint.Short() == sp.Fields["model"] })
	if own < 0 {
		return
	}
	t := randomPrefix(s.rnd, spaces[own])
	var hashes []string
	for i := range t {
		hashes = append(hashes, hex.EncodeToString(t.Digests(i, i+1, spaces[own].Geometry.DigestBytes)))
	}
	do := func(path string, body object) {
		if s.ask(http.MethodPost, path, body, new(object)) != nil {
			path += " refused"
		}
		s.event(path)
	}
	switch n := s.rnd.IntN(100); {
	case n < 40:
		do("/v1/prefetch", object{"space": sp.Fingerprint, "hashes": hashes, "timeout_s": 0.5})
	case n < 60:
		do("/v1/pin", object{"space": sp.Fingerprint, "hashes": hashes, "prefetch": s.rnd.IntN(2) == 0, "timeout_s": 0.5})
	case n < 75:
		do("/v1/unpin", object{"all": true})
	case n < 90:
		names := []string{"arena", "disk"}
		if s.redis != nil {
			names = append(names, "redis")
		}
		where := s.rnd.Perm(len(names))
		do("/v1/move", object{"space": sp.Fingerprint, "hashes": hashes, "from": names[where[0]], "to": names[where[1]], "keep": s.rnd.IntN(2) == 0, "timeout_s": 0.5})
	case n < 92:
		do("/v1/clear", object{"space": sp.Fingerprint, "tier": pick(s.rnd, "", "arena", "disk"), "timeout_s": 2})
	case n < 93:
		do("/v1/clear", object{"all": true, "timeout_s": 2})
	}
}

func (s *soak) killPeers() {
	for _, p := range s.peers {
		p.ending.Do(func() { close(p.wanted) })
		_ = p.cmd.Process.Kill()
	}
	for _, p := range s.peers {
		s.end(p, syscall.SIGKILL, time.Minute)
	}
	s.peers = nil
}

// audit ends all clients, in order or not, and waits for what they held to become free: a second by promise, and more for a busy machine.
func (s *soak) audit() {
	if s.sidecar == nil || s.sidecar.dead() {
		return
	}
	if s.rnd.IntN(2) == 0 {
		s.killPeers()
	}
	for _, p := range s.peers {
		p.ending.Do(func() { close(p.wanted) })
		_ = p.stdin.Close()
	}
	for _, p := range s.peers {
		s.end(p, syscall.SIGCONT, time.Minute) // their standard input has ended
	}
	s.peers = nil
	_ = s.ask(http.MethodPost, "/v1/unpin", map[string]any{"all": true}, new(any))
	var st status
	var err error
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		st = status{}
		if err = s.get("/v1/status", &st); err == nil && st.Leases == 0 && st.StoresInFlight == 0 && st.LoadsInFlight == 0 && st.Lookups.InFlight == 0 &&
			st.Slots.Filling == 0 && st.Slots.Leased == 0 && len(st.Sessions) == 0 && len(st.Lingering) == 0 && st.Slots.Free+st.Slots.Ready == st.Slots.Total {
			s.mu.Lock()
			s.audits++
			s.mu.Unlock()
			s.note()
			return
		}
	}
	s.problem("30 s after the last client ended something is still held: %+v, %v", st, err)
}

// note keeps what the sidecar says of its tiers.
func (s *soak) note() {
	var answer struct {
		Tiers []map[string]any `json:"tiers"`
	}
	if err := s.get("/v1/tiers", &answer); err != nil {
		return // it may just have been stopped
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range answer.Tiers {
		name, _ := t["name"].(string)
		flat := map[string]float64{}
		flatten(flat, "", t)
		for k, v := range flat {
			if s.tiers[name] == nil {
				s.tiers[name] = map[string]float64{}
			}
			s.tiers[name][k] = max(s.tiers[name][k], v)
		}
	}
}

func flatten(out map[string]float64, prefix string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, w := range v {
			flatten(out, strings.TrimPrefix(prefix+"."+k, "."), w)
		}
	case float64:
		out[prefix] = v
	}
}

// endAll ends everything in order, and checks the store a last time.
func (s *soak) endAll() {
	s.killPeers()
	if s.sidecar != nil && !s.sidecar.dead() {
		s.end(s.sidecar, syscall.SIGTERM, time.Minute)
	}
	if s.redis != nil {
		s.end(s.redis, syscall.SIGKILL, time.Minute)
	}
	s.check()
	s.readLogs()
}

// readLogs looks for what no process may ever say. A race is reported by binaries that were built with the race detector.
func (s *soak) readLogs() {
	for _, name := range []string{"sidecar", "client"} {
		b, err := os.ReadFile(filepath.Join(s.o.dir, name+".log"))
		if err != nil {
			s.problem("%v", err)
			continue
		}
		for _, never := range []string{"WARNING: DATA RACE", "panic: ", "fatal error: ", "DPANIC"} {
			if at := strings.Index(string(b), never); at >= 0 {
				s.problem("in %s.log: %s", name, b[at:min(at+4000, len(b))])
			}
		}
	}
}

func (s *soak) say() {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(os.Stderr, "soak: %7.1fs %d lookups, %d of %d pages hit, %d pages checked, %d stored; %v\n", time.Since(s.start).Seconds(), s.counts.Lookups,
		s.counts.HitPages, s.counts.LookupPages, s.counts.CheckedPages, s.counts.StoredPages, s.events)
}

func (s *soak) summary() summary {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := summary{Seed: s.o.seed, Seconds: s.seconds, Redis: s.port != 0, Events: s.events, Checks: s.checks, Audits: s.audits, Clients: s.counts,
		Tiers: s.tiers, Problems: append([]string{}, s.problems...)}
	if n := s.counts.LookupPages; n > 0 {
		sum.HitRatio = float64(s.counts.HitPages) / float64(n)
	}
	if s.counts.CheckedPages == 0 {
		sum.Problems = append(sum.Problems, "not one loaded page was checked")
	}
	return sum
}
