package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
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
	dir      string // for all files of the soak
	duration time.Duration
	seed     uint64
	clients  int
	redis    string
	s3       string // a versitygw binary; without one there is no S3
}

// summary is the output at the end of the soak.
type summary struct {
	Seed     uint64         `json:"seed"`
	Seconds  float64        `json:"seconds"`
	Redis    bool           `json:"redis"`
	S3       bool           `json:"s3"`
	Events   map[string]int `json:"events"` // actions on the processes
	Checks   int            `json:"checks"` // of the stores, one after each end of a sidecar
	Audits   int            `json:"audits"` // of the leases, after all clients are gone
	Clients  counts         `json:"clients"`
	HitRatio float64        `json:"hit_ratio"`
	// Tiers holds the highest counts that any one sidecar reported of its tiers, at an audit or
	// before its end.
	Tiers    map[string]map[string]float64 `json:"tiers"`
	Problems []string                      `json:"problems"`
}

type soak struct {
	stand
	o   options
	rnd *rand.Rand // used only by the main goroutine

	nodes  []*node
	redis  server
	bucket server // S3
	peers  []*process

	// Guarded by mu:
	events  map[string]int
	checks  int
	audits  int
	counts  counts
	tiers   map[string]map[string]float64
	seconds float64
}

// A node is one sidecar and what it keeps across restarts. All nodes share what they hold.
type node struct {
	name     string
	endpoint string
	disk     string // directory of its disk tier; "": none
	device   string // file of its arena in place of a DAX device; "": memory
	lmcache  string // prefix of LMCache's two sockets; "": none
	process  *process
	// rotten says that some chunks may not match their checksums at the next check: bits of the
	// disk were flipped, or the arena's device was in use when its sidecar was killed. A slot that
	// was being filled then may have the entry of its old chunk.
	rotten bool
}

// A server is used by tiers. The soak kills and stops it now and then.
type server struct {
	port    int // 0: it is not installed
	process *process
}

func newSoak(o options) *soak {
	return &soak{stand: newStand("soak", o.dir, o.bin), o: o, rnd: rand.New(rand.NewPCG(o.seed, 0)),
		events: map[string]int{}, tiers: map[string]map[string]float64{}}
}

func (s *soak) event(name string) {
	s.mu.Lock()
	s.events[name]++
	s.mu.Unlock()
}

func pick[T any](rnd *rand.Rand, of ...T) T { return of[rnd.IntN(len(of))] }

// addNodes names the sidecars: one with an arena in memory above tiers of all kinds, and one whose
// arena outlives it.
func (s *soak) addNodes() {
	for i := range 2 {
		name := fmt.Sprintf("sidecar-%d", i)
		s.nodes = append(s.nodes, &node{name: name, endpoint: filepath.Join(s.dir,
			fmt.Sprintf("run-%d", i))})
	}
	s.nodes[0].disk, s.nodes[0].lmcache = filepath.Join(s.dir, "disk"), filepath.Join(s.dir, "lm")
	s.nodes[1].device = filepath.Join(s.dir, "device")
}

// startSidecar starts a node over the same media, each time with other settings.
func (s *soak) startSidecar(n *node) error {
	args, err := s.settings(n)
	if err != nil {
		return err
	}
	if n.process, err = s.spawn(n.name, nil, s.bin, args...); err != nil {
		return err
	}
	if err := s.waitServing(n.endpoint, n.process); err != nil {
		return fmt.Errorf("sidecar %q: %w", args, err)
	}
	return nil
}

// takeOver has another process take over from a node's, with other settings. It may be refused, as
// for a smaller limit; then the one before goes on.
func (s *soak) takeOver(n *node) {
	args, err := s.settings(n)
	var next *process
	n.process.wanted.Store(true)
	if err == nil {
		next, err = s.spawn(n.name, nil, s.bin, append(args, "--takeover")...)
	}
	if err != nil {
		s.problem("takeover: %v", err)
		return
	}
	next.wanted.Store(true) // it may be refused
	select {
	case <-next.ended:
		n.process.wanted.Store(false)
		if err := s.waitServing(n.endpoint, n.process); err != nil {
			s.problem("after a takeover that was refused: %v", err)
		}
		s.event(n.name + " refused a takeover")
		return
	case <-n.process.ended:
	case <-time.After(time.Minute):
		s.problem("%s has not been taken over in a minute", n.name)
	}
	n.process = next
	next.wanted.Store(false)
	if err := s.waitServing(n.endpoint, next); err != nil {
		s.problem("after a takeover: %v", err)
	}
}

// settings returns a command line for a node.
func (s *soak) settings(n *node) ([]string, error) {
	args := []string{
		"serve", "--runtime-dir", n.endpoint, "--lifecycle-drain", "1s", "--lifecycle-flush", "2s",
		"--peers-linger", "200ms",
		"--lookup-lease", "3s", "--log-level", "warn", "--arena-eviction",
		pick(s.rnd, "lru", "adaptive"), "--lookup-promote", pick(s.rnd, "auto", "always", "always"),
		"--peers-skip-stores=" + pick(s.rnd, "true", "false"), "--peers-copy-after",
		pick(s.rnd, "0", "1", "3"),
	}
	if n.device != "" {
		if err := s.makeDevice(n); err != nil {
			return nil, err
		}
		args = append(args, "--arena-kind", "dax", "--arena-dax-devices", n.device,
			"--arena-dax-allow-files=true")
	} else {
		args = append(args, "--arena-kind", "memfd", "--arena-limit", pick(s.rnd, "8M", "12M",
			"24M"))
	}
	if n.disk != "" {
		args = append(args, "--disk", n.disk+":"+pick(s.rnd, "48M", "64M", "64M", "64M")+":admit="+
			pick(s.rnd, "stored", "stored", "reused", "evicted")+
			":direct="+pick(s.rnd, "auto", "never")+":workers="+pick(s.rnd, "1", "4")+":slab="+
			pick(s.rnd, "4M", "8M", "16M"))
		if s.redis.port != 0 {
			args = append(args, "--redis", fmt.Sprintf("redis://127.0.0.1:%d/0?admit=%s",
				s.redis.port, pick(s.rnd, "stored", "reused", "evicted")))
		}
		if s.bucket.port != 0 {
			args = append(args, "--s3",
				fmt.Sprintf("s3://%s?region=us-east-1&endpoint=http://127.0.0.1:%d&admit=%s",
					bucketName, s.bucket.port, pick(s.rnd, "stored", "evicted")))
		}
	}
	if n.lmcache != "" {
		args = append(args, "--lmcache-worker-endpoint", "ipc://"+n.lmcache+"-worker",
			"--lmcache-scheduler-endpoint", "ipc://"+n.lmcache+"-scheduler")
	}
	return args, nil
}

// deviceBytes is the size of the file that stands in for a DAX device.
const deviceBytes = 24 << 20

func (s *soak) makeDevice(n *node) error {
	f, err := os.OpenFile(n.device, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(deviceBytes), f.Close())
}

// status is the part of /v1/status that the soak reads.
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

// check verifies a node's media offline. Nothing in them may be bad, however the sidecar ended,
// except bits flipped on purpose. Those are dropped.
func (s *soak) check(n *node) {
	for _, path := range []string{n.disk, n.device} {
		if _, err := os.Stat(path); path == "" || errors.Is(err, os.ErrNotExist) {
			continue
		}
		out, err := s.checkMedium(path)
		if err != nil && n.rotten {
			_, _ = s.checkMedium(path, "--repair")
			out, err = s.checkMedium(path)
		}
		s.mu.Lock()
		s.checks++
		s.mu.Unlock()
		if err != nil {
			s.problem("lookaside check: %v\n%s", err, out)
		}
	}
	n.rotten = false
}

// checkMedium checks a directory or device. It waits while clients still read lent bytes of a
// device: they notice the end of a sidecar between two requests.
func (s *soak) checkMedium(path string, args ...string) (out []byte, err error) {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		out, err = exec.CommandContext(ctx, s.bin, append([]string{"check", path},
			args...)...).CombinedOutput()
		cancel()
		if err == nil || !strings.Contains(string(out), "in use: another process still reads") ||
			time.Now().After(deadline) {
			return out, err
		}
	}
}

// rot flips bits in the middle of a slab of a node's disk tier.
func (s *soak) rot(n *node) {
	slabs, _ := filepath.Glob(filepath.Join(n.disk, "*"))
	for range 20 {
		if len(slabs) == 0 {
			return
		}
		f, err := os.OpenFile(slabs[s.rnd.IntN(len(slabs))], os.O_RDWR, 0)
		if err != nil {
			continue
		}
		info, err := f.Stat()
		if err != nil || info.Size() < 1<<20 {
			f.Close()
			continue
		}
		b, at := make([]byte, 1), info.Size()/2+s.rnd.Int64N(info.Size()/2)
		if _, err = f.ReadAt(b, at); err == nil {
			b[0] ^= 1 << s.rnd.IntN(8)
			_, err = f.WriteAt(b, at)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			s.problem("flip a bit: %v", err)
		}
		n.rotten = true
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
	}, self, "client", "--dir", s.nodes[n%len(s.nodes)].endpoint, "--engine",
		fmt.Sprintf("engine-%d", n), "--seed", seedArg(s.rnd.Uint64()), "--space",
		fmt.Sprint(s.rnd.IntN(len(spaces))))
}

// startServer starts a server and waits until it listens. Its port is free at the first start and
// stays the same.
func (s *soak) startServer(name string, v *server, command func(port int) []string,
	env ...string) (err error) {
	if v.port == 0 {
		if v.port, err = freeport.Find(); err != nil {
			return err
		}
	}
	args := command(v.port)
	// env sets the environment of this child only.
	if v.process, err = s.spawn(name, nil, "/usr/bin/env", append(env, args...)...); err != nil {
		return err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", v.port))
		if err == nil {
			return c.Close()
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

// startRedis starts a server without persistence, if one is installed.
func (s *soak) startRedis() error {
	program, err := exec.LookPath("redis-server")
	if err != nil || s.o.redis == "never" {
		return nil
	}
	return s.startServer("redis", &s.redis, func(port int) []string {
		return []string{program, "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--save", "",
			"--appendonly", "no", "--maxmemory", "96mb",
			"--maxmemory-policy", "allkeys-lru", "--dir", s.dir}
	})
}

const bucketName = "kv-cache"

// startBucket starts an S3 server over a directory, if one is installed.
func (s *soak) startBucket() error {
	if _, err := os.Stat(s.o.s3); err != nil {
		return nil
	}
	dir := filepath.Join(s.dir, "s3")
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, bucketName), 0o700),
		os.Setenv("AWS_ACCESS_KEY_ID", "soak"), os.Setenv("AWS_SECRET_ACCESS_KEY",
			"soaksoak")); err != nil {
		return err
	}
	return s.startServer("s3", &s.bucket, func(port int) []string {
		return []string{s.o.s3, "--port", fmt.Sprintf("127.0.0.1:%d", port), "--quiet", "posix",
			dir}
	}, "ROOT_ACCESS_KEY=soak", "ROOT_SECRET_KEY=soaksoak")
}

// run runs the whole soak. Every failure becomes a problem.
func (s *soak) run(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, s.o.duration)
	defer cancel()
	s.addNodes()
	if err := errors.Join(s.startRedis(), s.startBucket()); err != nil {
		s.problem("start: %v", err)
	}
	for _, n := range s.nodes {
		if err := s.startSidecar(n); err != nil {
			s.problem("start: %v", err)
			return
		}
	}
	var asking sync.WaitGroup
	defer asking.Wait()
	asking.Go(func() { s.askAsLMCache(ctx, s.nodes[0]) })
	for range s.o.clients {
		s.fill()
	}
	for said := time.Now(); ctx.Err() == nil && !s.broken(); {
		for until := time.Now().Add(
			time.Duration(s.rnd.ExpFloat64() * float64(700*time.Millisecond))); time.Now().Before(
			until) && ctx.Err() == nil; {
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

// broken reports whether the soak should stop.
func (s *soak) broken() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.problems) >= 5 ||
		slices.ContainsFunc(s.nodes, func(n *node) bool {
			return n.process == nil ||
				n.process.dead()
		})
}

func (s *soak) wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// fill starts clients up to the wanted number.
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

// kill kills a node's sidecar, as a crash would.
func (s *soak) kill(n *node) {
	s.end(n.process, syscall.SIGKILL, time.Minute)
	n.rotten = n.rotten || n.device != ""
}

// restart checks a node's media and starts its next sidecar. The sidecar before has ended.
func (s *soak) restart(n *node) {
	s.check(n)
	if err := s.startSidecar(n); err != nil {
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

// chaos does one random action that a deployment may meet.
func (s *soak) chaos(ctx context.Context) {
	var victim *process
	if len(s.peers) > 0 {
		victim = s.peers[s.rnd.IntN(len(s.peers))]
	}
	at := pick(s.rnd, s.nodes...)
	switch n := s.rnd.IntN(100); {
	case n < 28 && victim != nil:
		s.event("client killed")
		s.end(victim, syscall.SIGKILL, time.Minute)
	case n < 40:
		s.event(at.name + " killed")
		s.kill(at)
		s.restart(at)
	case n < 45 && victim != nil:
		// The client may be copying. Nobody else may get what it copies to or from.
		s.event("client stopped, " + at.name + " killed")
		victim.stopped = true
		_ = victim.cmd.Process.Signal(syscall.SIGSTOP)
		s.kill(at)
		s.restart(at)
		s.wait(ctx, time.Duration(s.rnd.Int64N(int64(3*time.Second))))
		_ = victim.cmd.Process.Signal(syscall.SIGCONT)
		victim.stopped = false
	case n < 50 && at.device == "":
		s.event(at.name + " taken over")
		s.takeOver(at)
	case n < 58:
		s.event(at.name + " ended")
		s.note()
		s.end(at.process, syscall.SIGTERM, time.Minute)
		s.restart(at)
	case n < 61:
		s.event("all killed")
		s.killPeers()
		for _, n := range s.nodes {
			s.kill(n)
		}
		for _, n := range s.nodes {
			s.restart(n)
		}
	case n < 69 && victim != nil:
		s.event("client stopped")
		s.freeze(ctx, victim, 3*time.Second)
	case n < 75:
		s.event(at.name + " stopped")
		s.freeze(ctx, at.process, 2*time.Second)
	case n < 84:
		name, v, start := "redis", &s.redis, s.startRedis
		if s.rnd.IntN(2) == 0 {
			name, v, start = "s3", &s.bucket, s.startBucket
		}
		switch {
		case v.port == 0:
		case n < 79:
			s.event(name + " stopped")
			s.freeze(ctx, v.process, 3*time.Second)
		default:
			s.event(name + " killed")
			s.end(v.process, syscall.SIGKILL, time.Minute)
			s.wait(ctx, time.Duration(s.rnd.Int64N(int64(2*time.Second))))
			if err := start(); err != nil {
				s.problem("%s: %v", name, err)
			}
		}
	case n < 90:
		s.event("bits of the disk flipped")
		s.rot(s.nodes[0])
	default:
		s.event("audit")
		s.audit()
	}
}

// operate does a random operator's action over HTTP, with prefixes like those of the clients. The
// sidecar may refuse it or be gone.
func (s *soak) operate() {
	type object = map[string]any
	n := pick(s.rnd, s.nodes...)
	var st status
	if s.get(n.endpoint, "/v1/status", &st) != nil || len(st.Spaces) == 0 {
		return
	}
	sp := st.Spaces[s.rnd.IntN(len(st.Spaces))]
	own := slices.IndexFunc(spaces,
		func(o *tiers.Space) bool { return o.Fingerprint.Short() == sp.Fields["model"] })
	if own < 0 {
		return
	}
	t := randomPrefix(s.rnd, spaces[own])
	var hashes []string
	for i := range t {
		hashes = append(hashes, hex.EncodeToString(t.Digests(i, i+1,
			spaces[own].Geometry.DigestBytes)))
	}
	do := func(path string, body object) {
		if s.ask(n.endpoint, http.MethodPost, path, body, new(object)) != nil {
			path += " refused"
		}
		s.event(path)
	}
	switch n := s.rnd.IntN(100); {
	case n < 40:
		do("/v1/prefetch", object{"space": sp.Fingerprint, "hashes": hashes, "timeout_s": 0.5})
	case n < 60:
		do("/v1/pin", object{"space": sp.Fingerprint, "hashes": hashes,
			"prefetch": s.rnd.IntN(2) == 0, "timeout_s": 0.5})
	case n < 75:
		do("/v1/unpin", object{"all": true})
	case n < 90:
		names := []string{"arena", "disk"}
		if s.redis.port != 0 {
			names = append(names, "redis")
		}
		where := s.rnd.Perm(len(names))
		do("/v1/move", object{"space": sp.Fingerprint, "hashes": hashes, "from": names[where[0]],
			"to": names[where[1]], "keep": s.rnd.IntN(2) == 0, "timeout_s": 0.5})
	case n < 92:
		do("/v1/clear", object{"space": sp.Fingerprint, "tier": pick(s.rnd, "", "arena", "disk"),
			"timeout_s": 2})
	case n < 93:
		do("/v1/clear", object{"all": true, "timeout_s": 2})
	}
}

func (s *soak) killPeers() {
	for _, p := range s.peers {
		p.wanted.Store(true)
		_ = p.cmd.Process.Kill()
	}
	for _, p := range s.peers {
		s.end(p, syscall.SIGKILL, time.Minute)
	}
	s.peers = nil
}

// audit ends all clients, in order or not, and waits until what they held is free. The promise is a
// second; a busy machine gets more.
func (s *soak) audit() {
	if s.rnd.IntN(2) == 0 {
		s.killPeers()
	}
	for _, p := range s.peers {
		p.wanted.Store(true)
		_ = p.stdin.Close()
	}
	for _, p := range s.peers {
		s.end(p, syscall.SIGCONT, time.Minute) // their standard input has ended
	}
	s.peers = nil
	for _, n := range s.nodes {
		if n.process != nil && !n.process.dead() {
			_ = s.ask(n.endpoint, http.MethodPost, "/v1/unpin", map[string]any{"all": true},
				new(any))
		}
	}
	for _, n := range s.nodes {
		if n.process != nil && !n.process.dead() {
			s.auditNode(n)
		}
	}
	s.note()
}

// auditNode waits until a node has no lease.
func (s *soak) auditNode(n *node) {
	var st status
	var err error
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(
		20 * time.Millisecond) {
		st = status{}
		if err = s.get(n.endpoint, "/v1/status", &st); err == nil && st.Leases == 0 &&
			st.StoresInFlight == 0 && st.LoadsInFlight == 0 && st.Lookups.InFlight == 0 &&
			st.Slots.Filling == 0 && st.Slots.Leased == 0 && len(st.Sessions) == 0 &&
			len(st.Lingering) == 0 && st.Slots.Free+st.Slots.Ready == st.Slots.Total {
			s.mu.Lock()
			s.audits++
			s.mu.Unlock()
			return
		}
	}
	s.problem("30 s after the last client ended something of %s is still held: %+v, %v", n.name, st,
		err)
}

// note records what the sidecars report of their tiers.
func (s *soak) note() {
	for _, n := range s.nodes {
		var answer struct {
			Tiers []map[string]any `json:"tiers"`
		}
		if err := s.get(n.endpoint, "/v1/tiers", &answer); err != nil {
			continue // it may have been stopped
		}
		s.mu.Lock()
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
		s.mu.Unlock()
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

// endAll ends everything in order and checks the media a last time.
func (s *soak) endAll() {
	s.killPeers()
	names := []string{"client"}
	for _, n := range s.nodes {
		if n.process != nil && !n.process.dead() {
			s.end(n.process, syscall.SIGTERM, time.Minute)
		}
		names = append(names, n.name)
	}
	s.end(s.redis.process, syscall.SIGKILL, time.Minute)
	s.end(s.bucket.process, syscall.SIGKILL, time.Minute)
	for _, n := range s.nodes {
		s.check(n)
	}
	s.readLogs(names...)
}

func (s *soak) say() {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(os.Stderr, "soak: %7.1fs %d lookups, %d of %d pages hit, %d pages checked, %d stored; %v\n", time.Since(s.start).Seconds(), s.counts.Lookups,
		s.counts.HitPages, s.counts.LookupPages, s.counts.CheckedPages, s.counts.StoredPages,
		s.events)
}

func (s *soak) summary() summary {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := summary{Seed: s.o.seed, Seconds: s.seconds, Redis: s.redis.port != 0,
		S3: s.bucket.port != 0, Events: s.events, Checks: s.checks, Audits: s.audits,
		Clients: s.counts,
		Tiers:   s.tiers, Problems: append([]string{}, s.problems...)}
	if n := s.counts.LookupPages; n > 0 {
		sum.HitRatio = float64(s.counts.HitPages) / float64(n)
	}
	if s.counts.CheckedPages == 0 {
		sum.Problems = append(sum.Problems, "not one loaded page was checked")
	}
	return sum
}
