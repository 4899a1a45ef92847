package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"lookaside/internal/freeport"
	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// attacks lists the suite in the order of its runs.
var attacks = []*attack{
	{name: "connections", does: "opens session sockets, says nothing and holds them",
		run: attackConnections},
	{name: "reconnects", does: "opens and closes whole sessions as fast as it can, below a memory limit", run: attackReconnects, memory: 240 << 20, arena: "128M"},
	{name: "sessions-garbage", does: "sends random and nearly right messages over session sockets",
		run: attackSessionGarbage},
	{name: "sessions-foreign",
		does: "commits, aborts, loads and releases by numbers that are not its own",
		run:  attackForeignNumbers},
	{name: "sessions-silent", does: "sends requests over session sockets and reads no answer",
		run: attackSilentSessions},
	{name: "spaces", does: "brings one model after the other", run: attackSpaces,
		after: admitsAnother},
	{name: "two-models", does: "has two honest models with pages of different sizes take turns in one small arena", run: attackTwoModels, noVictim: true},
	{name: "frozen", does: "stops clients that hold slots", run: attackFrozen,
		patience: 2 * time.Second},
	{name: "lookups-long", does: "asks for 65,536 pages at a time, dozens of questions at once",
		run: attackLongLookups, anonBytes: socketLimit},
	{name: "lookups-raw", does: "speaks ZMTP badly to the lookup socket: stalls, endless messages, 300 connections", run: attackRawLookups, anonBytes: socketLimit, loses: true},
	{name: "lookups-files", does: "the same where few files may be open", run: attackRawLookups,
		files: 640, anonBytes: socketLimit, loses: true},
	{name: "lookups-forged", does: "looks up, trims and cancels by the victim's session number",
		run: attackForgedLookups},
	{name: "answers-stolen", does: "connects to the sockets on which others get their answers",
		run: attackAnswers},
	{name: "lmcache", does: "sends good and bad messages to LMCache's socket", run: attackLMCache,
		args: lmcacheArgs, anonBytes: socketLimit, loses: true},
	{name: "events", does: "subscribes without end, sends endless messages and reads nothing on the events' sockets", run: attackEvents, args: eventsArgs},
	{name: "admin", does: "holds connections to the admin server, sends headers and bodies slowly or without end, under foreign names", run: attackAdmin},
	{name: "redis-lies", does: "is a Redis that announces gigabytes, sends garbage, wrong values and nothing", run: attackNothing, args: lyingRedis},
	{name: "s3-lies", does: "is an S3 server whose answers never end or are wrong",
		run: attackNothing, args: lyingS3},
	{name: "disk-full", does: "has a disk tier where files may not grow", run: attackNothing,
		args: fullDisk, after: checkDisk},
	{name: "signals", does: "sends signals at every moment of a sidecar's life", run: attackSignals,
		args: diskArgs, after: checkDisk, ownEnd: true, noVictim: true},
}

// repeat calls f on n goroutines until ctx ends. The pause keeps one goroutine from using a whole
// core.
func repeat(ctx context.Context, n int, pause time.Duration, f func(rnd *mathrand.Rand)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			rnd := mathrand.New(mathrand.NewPCG(uint64(i), 0x61747461636b))
			for ctx.Err() == nil {
				f(rnd)
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
			}
		})
	}
	wg.Wait()
}

// attackNothing does nothing by itself. The servers in its arguments attack when the victim makes
// the sidecar use them.
func attackNothing(ctx context.Context, _ *siege) error {
	<-ctx.Done()
	return nil
}

func attackConnections(ctx context.Context, s *siege) error {
	var held []*client.Session
	defer func() {
		for _, c := range held {
			c.Close()
		}
	}()
	repeat(ctx, 1, time.Millisecond, func(rnd *mathrand.Rand) {
		if c, err := client.Connect(s.endpoint()); err == nil {
			held = append(held, c)
		}
		if len(held) >= 200 {
			for range 100 {
				i := rnd.IntN(len(held))
				held[i].Close()
				held[i] = held[len(held)-1]
				held = held[:len(held)-1]
			}
		}
	})
	return nil
}

// hello returns the first message of a worker of a model.
func hello(engine string, model string) *wire.Hello {
	return &wire.Hello{
		Role: wire.RoleWorker, EngineID: engine, PageTokens: 16, PageBytes: 16 << 10,
		PagesPerChunk: 4, DigestBytes: 32,
		Fields: []wire.Field{{Key: "model", Value: model}},
	}
}

func attackReconnects(ctx context.Context, s *siege) error {
	var mu sync.Mutex
	opened := 0
	repeat(ctx, 3, time.Millisecond, func(*mathrand.Rand) {
		// The kernel keeps what the sidecar sends until the socket is closed, so nothing is read.
		if c, err := client.Dial(s.endpoint(), hello("again", "again"), time.Second); err == nil {
			c.Close()
			mu.Lock()
			opened++
			mu.Unlock()
		}
	})
	s.note("%d sessions", opened)
	return nil
}

// randomMessage returns a message with random fields, often nearly right, sometimes malformed.
func randomMessage(rnd *mathrand.Rand) []byte {
	number := func() uint64 {
		switch rnd.IntN(4) {
		case 0:
			return uint64(rnd.IntN(8))
		case 1:
			return ^uint64(0) - uint64(rnd.IntN(4))
		default:
			return rnd.Uint64()
		}
	}
	data := make([]byte, rnd.IntN(4096))
	_, _ = rand.Read(data)
	digests := data[:len(data)/32*32]
	list := make([]uint32, rnd.IntN(40))
	for i := range list {
		list[i] = uint32(number())
	}
	secret, names := make([]byte, wire.SecretBytes), make([]byte, wire.NamesBytes)
	_, _ = rand.Read(secret)
	messages := []wire.Message{
		&wire.PrepareStore{ID: uint32(number()), FirstPage: uint32(number()),
			Prev: digests[:min(len(digests), 32)], Hashes: digests},
		&wire.CommitStore{Store: number(), Failed: list},
		&wire.AbortStore{Store: number()},
		&wire.PrepareLoad{ID: uint32(number()), Session: number(), Lookup: number(), Ticket: secret,
			FirstPage: uint32(number()), Pages: uint32(number()), Names: names},
		&wire.Release{Load: number(), Bad: list},
		&wire.Ping{ID: uint32(number())},
		&wire.ReadEvents{ID: uint32(number())},
		&wire.RegionMapped{Region: uint32(number())},
		&wire.RegionUnmapped{Region: uint32(number())},
		&wire.Lookup{Session: number(), Secret: secret, Lookup: number(),
			FirstPage: uint32(number()), Hashes: digests, DeadlineMs: uint32(number()),
			RecomputeUs: uint32(number())},
	}
	b := messages[rnd.IntN(len(messages))].Append(nil)
	switch rnd.IntN(6) {
	case 0:
		b = b[:rnd.IntN(len(b))+1]
	case 1:
		b[rnd.IntN(len(b))] ^= byte(1 << rnd.IntN(8))
	case 2:
		// an array of four billion elements in a few bytes
		b = []byte{0xdd, 0xff, 0xff, 0xff, 0xff, byte(rnd.Uint32())}
	case 3:
		b = append(b, data...)
	}
	return b
}

func attackSessionGarbage(ctx context.Context, s *siege) error {
	repeat(ctx, 2, time.Millisecond, func(rnd *mathrand.Rand) {
		c, err := client.Connect(s.endpoint())
		if err != nil {
			return
		}
		defer c.Close()
		if rnd.IntN(3) > 0 && c.Hello(hello("garbage", "garbage"), time.Second) != nil {
			return
		}
		for range 1 + rnd.IntN(30) {
			if c.SendRaw(randomMessage(rnd)) != nil {
				return
			}
		}
	})
	return nil
}

// victimSession returns the id of the victim's scheduler session. Any client with access to the
// status can read it there.
func (s *siege) victimSession(role string) uint64 {
	var st struct {
		Sessions []struct {
			Session string `json:"session"`
			Engine  string `json:"engine_id"`
			Role    string `json:"role"`
		} `json:"sessions"`
	}
	if err := s.get(s.endpoint(), "/v1/status", &st); err != nil {
		return 0
	}
	for _, ses := range st.Sessions {
		if ses.Engine == "victim" && ses.Role == role {
			id, _ := strconv.ParseUint(ses.Session, 16, 64)
			return id
		}
	}
	return 0
}

func attackForeignNumbers(ctx context.Context, s *siege) error {
	// /v1/status contains the model and the engine's name.
	c, err := client.Dial(s.endpoint(), hello("victim", victimSpace.Fingerprint.Short()),
		10*time.Second)
	if err != nil {
		return err
	}
	defer c.Close()
	session := s.victimSession(wire.RoleScheduler)
	if session == 0 {
		return errors.New("the victim has no session")
	}
	next := uint64(0)
	repeat(ctx, 1, 200*time.Microsecond, func(rnd *mathrand.Rand) {
		next++
		number := uint64(rnd.IntN(2000))
		for _, m := range []wire.Message{
			&wire.PrepareLoad{ID: c.NextID(), Session: session, Lookup: number,
				Ticket: c.Ticket(number), Pages: 16, Names: make([]byte, wire.NamesBytes)},
			&wire.CommitStore{Store: number},
			&wire.AbortStore{Store: number},
			&wire.Release{Load: number, Bad: []uint32{0, 1}},
		} {
			if c.Send(m) != nil {
				return
			}
		}
		for {
			if _, files, err := c.Recv(time.Millisecond); err != nil {
				return
			} else {
				for _, f := range files {
					f.Close()
				}
			}
		}
	})
	return nil
}

func attackSilentSessions(ctx context.Context, s *siege) error {
	repeat(ctx, 3, time.Millisecond, func(rnd *mathrand.Rand) {
		c, err := client.Dial(s.endpoint(), hello("silent", "silent"), time.Second)
		if err != nil {
			return
		}
		defer c.Close()
		_ = c.Conn().SetWriteDeadline(time.Now().Add(3 * time.Second))
		prefix := make(tiertest.Prefix, 64)
		for ctx.Err() == nil {
			prefix[0] = byte(rnd.IntN(256))
			m := wire.PrepareStore{ID: c.NextID(), Hashes: prefix.Digests(0, len(prefix), 32)}
			if c.Send(&m) != nil {
				return
			}
		}
	})
	return nil
}

func attackSpaces(ctx context.Context, s *siege) error {
	n := 0
	repeat(ctx, 1, 20*time.Millisecond, func(*mathrand.Rand) {
		n++
		p, err := s.ownSession(fmt.Sprintf("model-%d", n))
		if err != nil {
			return
		}
		defer p.disconnect()
		_ = (&victim{peer: p}).keep(make(tiertest.Prefix, 4), 0)
	})
	s.note("%d models", n)
	return nil
}

// admitsAnother checks that one more model is served after the attack.
func admitsAnother(s *siege) {
	var err error
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(
		100 * time.Millisecond) {
		var c *client.Session
		if c, err = client.Dial(s.endpoint(), hello("new", "a new model"),
			time.Second); err == nil {
			c.Close()
			return
		}
	}
	s.problem("a new model is refused after many that are gone: %v", err)
}

// attackTwoModels looks up two working sets by turns. Together they fit the arena, so nearly all of
// both must be held after each was stored once.
func attackTwoModels(ctx context.Context, s *siege) error {
	const prefixes = 40
	sets := []struct {
		pages    int
		geometry tiers.Geometry
	}{
		// 10 MiB
		{16, tiers.Geometry{PageBytes: 16 << 10, PagesPerChunk: 4, PageTokens: 16,
			DigestBytes: 32}},
		// 9.4 MiB
		{6, tiers.Geometry{PageBytes: 40 << 10, PagesPerChunk: 2, PageTokens: 32, DigestBytes: 32}},
	}
	for round := 0; ctx.Err() == nil; round++ {
		for i, set := range sets {
			p := &peer{memory: client.NewMemory(), dir: s.endpoint(), engine: fmt.Sprintf("model-%d", i),
				space: tiertest.NewSpace(fmt.Sprintf("model-%d", i), set.geometry)}
			err := p.connect()
			v := &victim{peer: p}
			for n := 0; n < prefixes && err == nil; n++ {
				prefix := make(tiertest.Prefix, set.pages)
				prefix[0] = byte(n)
				err = v.request(prefix)
			}
			p.disconnect()
			if err != nil {
				return err
			}
			if hits := float64(v.report.HitPages) / float64(v.report.Pages); round > 1 &&
				hits < 0.9 {
				s.problem("model %d of two that fit the arena together: %.2f of its pages hit", i,
					hits)
				return nil
			}
		}
		if round == 2 {
			s.note("both hit")
		}
	}
	return nil
}

func attackFrozen(ctx context.Context, s *siege) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var frozen []*process
	defer func() {
		for _, p := range frozen {
			p.wanted.Store(true)
			s.end(p, syscall.SIGKILL, time.Minute)
		}
	}()
	for i := range 4 {
		p, err := s.spawn(fmt.Sprintf("frozen-%d", i), func([]byte) {}, self, "client", "--dir",
			s.endpoint(), "--engine", fmt.Sprintf("frozen-%d", i), "--seed", strconv.Itoa(i+1),
			"--space", strconv.Itoa(i))
		if err != nil {
			return err
		}
		frozen = append(frozen, p)
	}
	repeat(ctx, 1, 100*time.Millisecond, func(rnd *mathrand.Rand) {
		p := frozen[rnd.IntN(len(frozen))]
		signal := syscall.SIGSTOP
		if rnd.IntN(4) == 0 {
			signal = syscall.SIGCONT
		}
		p.stopped = signal == syscall.SIGSTOP
		_ = p.cmd.Process.Signal(signal)
	})
	return nil
}

// ownSession starts a scheduler's session with its worker, with a model of the attacker's own.
func (s *siege) ownSession(engine string) (*peer, error) {
	p := &peer{memory: client.NewMemory(), dir: s.endpoint(), engine: engine,
		space: tiertest.NewSpace(engine,
			tiers.Geometry{PageBytes: 4096, PagesPerChunk: 1, PageTokens: 16, DigestBytes: 32})}
	if err := p.connect(); err != nil {
		p.disconnect()
		return nil, err
	}
	return p, nil
}

func attackLongLookups(ctx context.Context, s *siege) error {
	p, err := s.ownSession("long")
	if err != nil {
		return err
	}
	defer p.disconnect()
	prefix := make(tiertest.Prefix, 8)
	if err := (&victim{peer: p}).keep(prefix, 0); err != nil {
		return err
	}
	hashes := make([]byte, 32*int(p.scheduler.Welcome.MaxPages))
	_, _ = rand.Read(hashes)
	copy(hashes, prefix.Digests(0, len(prefix), 32))
	asked, answered := 0, 0
	defer func() {
		s.note("%d lookups of %d pages, %d answered", asked, len(hashes)/32,
			answered)
	}()
	for ctx.Err() == nil {
		for asked-answered < 64 && ctx.Err() == nil {
			if p.sendLookup(hashes, 10_000) != nil {
				break
			}
			asked++
		}
		if _, err := p.lookups.Recv(100 * time.Millisecond); err == nil {
			answered++
		}
	}
	return nil
}

func attackRawLookups(ctx context.Context, s *siege) error {
	path := filepath.Join(s.endpoint(), "lookup.sock")
	repeat(ctx, 4, time.Millisecond, func(rnd *mathrand.Rand) {
		attackZMTP(ctx, rnd, "unix", path, "PUSH", 80)
	})
	return nil
}

// attackZMTP holds up to n connections to one ZMQ socket for a moment. Each violates the protocol
// in its own way.
func attackZMTP(ctx context.Context, rnd *mathrand.Rand, network, address, socketType string,
	n int) {
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	junk := make([]byte, 64<<10)
	_, _ = rand.Read(junk)
	for range n {
		if ctx.Err() != nil {
			return
		}
		if rnd.IntN(3) == 0 {
			c, err := net.DialTimeout(network, address, time.Second)
			if err != nil {
				return
			}
			conns = append(conns, c)
			_ = c.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = c.Write(junk[:rnd.IntN(200)])
			continue
		}
		z, err := dialZMTP(network, address, socketType)
		if err != nil {
			continue
		}
		conns = append(conns, z)
		switch rnd.IntN(4) {
		case 0:
			_ = z.announce(1 << (10 + rnd.IntN(50)))
			_, _ = z.Write(junk)
		case 1: // a message without its last frame
			for range 200 {
				if z.frame(junk, true) != nil {
					break
				}
			}
		case 2:
			for range 50 {
				if z.frame(randomMessage(rnd), false) != nil {
					break
				}
			}
		}
	}
}

func attackForgedLookups(ctx context.Context, s *siege) error {
	// The attacker knows a session's id and the possible ids of its lookups, but nothing of its
	// memory.
	sessions := []uint64{s.victimSession(wire.RoleScheduler), s.victimSession(wire.RoleWorker)}
	push, err := dialZMTP("unix", filepath.Join(s.endpoint(), "lookup.sock"), "PUSH")
	if err != nil {
		return err
	}
	defer push.Close()
	own, err := client.Dial(s.endpoint(), hello("attacker", victimSpace.Fingerprint.Short()),
		10*time.Second)
	if err != nil {
		return err
	}
	defer own.Close()
	other := make(tiertest.Prefix, 16)
	other[0] = 200
	repeat(ctx, 1, 200*time.Microsecond, func(rnd *mathrand.Rand) {
		for _, b := range forgeries(sessions[rnd.IntN(2)], own.Welcome.Secret,
			uint64(rnd.IntN(4000)), other.Digests(0, len(other), 32)) {
			_ = push.frame(b, false)
		}
	})
	return nil
}

// forgeries returns messages of the lookup socket in the name of another session, whose secret is
// not known.
func forgeries(session uint64, secret []byte, lookup uint64, hashes []byte) [][]byte {
	return [][]byte{
		(&wire.Lookup{Session: session, Secret: secret, Lookup: lookup, Hashes: hashes,
			DeadlineMs: 1000}).Append(nil),
		(&wire.Trim{Session: session, Secret: secret, Lookup: lookup, FirstPage: 1 << 20}).Append(
			nil),
		(&wire.Cancel{Session: session, Secret: secret, Lookup: lookup}).Append(nil),
		(&wire.Cancel{Session: ^uint64(0), Secret: secret, Lookup: lookup}).Append(nil),
	}
}

func attackAnswers(ctx context.Context, s *siege) error {
	stolen := 0
	repeat(ctx, 1, 10*time.Millisecond, func(*mathrand.Rand) {
		paths, _ := filepath.Glob(filepath.Join(s.endpoint(), "*.sock"))
		var conns []*zmtp
		for _, path := range paths {
			if filepath.Base(path) == "session.sock" || filepath.Base(path) == "lookup.sock" {
				continue
			}
			if z, err := dialZMTP("unix", path, "DEALER"); err == nil {
				conns = append(conns, z)
			}
		}
		for _, z := range conns {
			_ = z.SetReadDeadline(time.Now().Add(100 * time.Millisecond / time.Duration(
				len(conns))))
			if n, _ := z.Read(make([]byte, 4096)); n > 0 {
				stolen++
			}
			z.Close()
		}
	})
	if stolen > 0 {
		return fmt.Errorf("%d reads got somebody's answers", stolen)
	}
	return nil
}

func lmcacheArgs(s *siege) ([]string, error) {
	return []string{
		"--lmcache-worker-endpoint", "ipc://" + filepath.Join(s.dir, "lm-worker"),
		"--lmcache-scheduler-endpoint", "ipc://" + filepath.Join(s.dir, "lm-scheduler"),
	}, nil
}

func attackLMCache(ctx context.Context, s *siege) error {
	path := filepath.Join(s.dir, "lm-worker")
	repeat(ctx, 3, time.Millisecond, func(rnd *mathrand.Rand) {
		if rnd.IntN(2) == 0 {
			attackZMTP(ctx, rnd, "unix", path, "PUSH", 20)
			return
		}
		z, err := dialZMTP("unix", path, "PUSH")
		if err != nil {
			return
		}
		defer z.Close()
		for range 200 {
			id := fmt.Sprintf("%d", rnd.IntN(1000))
			// [lookup_id, hashes, offsets, configs], the hashes and offsets as msgpack arrays; see
			// docs/protocol.md.
			n := rnd.IntN(1000)
			hashes, offsets := binary.BigEndian.AppendUint16([]byte{0xdc}, uint16(n)),
				binary.BigEndian.AppendUint16([]byte{0xdc}, uint16(n))
			for range n {
				hashes = binary.BigEndian.AppendUint64(append(hashes, 0xcf), rnd.Uint64())
				offsets = append(offsets, 0xcd, 1, 0)
			}
			if rnd.IntN(4) == 0 {
				hashes = []byte{0xdd, 0xff, 0xff, 0xff, 0xff}
			}
			if z.frame([]byte(id), true) != nil || z.frame(hashes, true) != nil ||
				z.frame(offsets, true) != nil || z.frame(nil, false) != nil {
				return
			}
		}
	})
	return nil
}

func eventsArgs(s *siege) ([]string, error) {
	pub, err := freeport.Find()
	if err != nil {
		return nil, err
	}
	replay, err := freeport.Find()
	if err != nil {
		return nil, err
	}
	s.eventPorts = [2]int{pub, replay}
	return []string{"--events-endpoint", fmt.Sprintf("tcp://127.0.0.1:%d", pub),
		"--events-bind=true", "--events-replay-endpoint", fmt.Sprintf("tcp://127.0.0.1:%d",
			replay)}, nil
}

func attackEvents(ctx context.Context, s *siege) error {
	pub, replay := fmt.Sprintf("127.0.0.1:%d", s.eventPorts[0]), fmt.Sprintf("127.0.0.1:%d",
		s.eventPorts[1])
	// Events are published all the time.
	storing, err := s.ownSession("storing")
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		defer storing.disconnect()
		repeat(ctx, 1, time.Millisecond, func(rnd *mathrand.Rand) {
			_ = (&victim{peer: storing}).keep(tiertest.Prefix{byte(rnd.Uint32()),
				byte(rnd.Uint32())}, 0)
		})
	})
	defer wg.Wait()
	repeat(ctx, 4, time.Millisecond, func(rnd *mathrand.Rand) {
		switch rnd.IntN(6) {
		default: // subscriptions to topics of its own, without end
			z, err := dialZMTP("tcp", pub, "SUB")
			if err != nil {
				return
			}
			defer z.Close()
			const topic = 24 // bytes; short topics cost the most for each byte sent
			batch := make([]byte, 0, 1000*(topic+3))
			for range 400 {
				batch = batch[:0]
				for range 1000 {
					batch = append(batch, 0, topic+1, 1)
					at := len(batch)
					batch = batch[:at+topic]
					_, _ = rand.Read(batch[at:])
				}
				if _, err := z.Write(batch); ctx.Err() != nil || err != nil {
					return
				}
			}
		case 1:
			attackZMTP(ctx, rnd, "tcp", pub, "SUB", 20)
		case 2:
			attackZMTP(ctx, rnd, "tcp", replay, "DEALER", 20)
		case 3: // replays of everything, which it never reads
			z, err := dialZMTP("tcp", replay, "DEALER")
			if err != nil {
				return
			}
			defer z.Close()
			for range 200 {
				if z.frame(nil, true) != nil || z.frame(make([]byte, 8), false) != nil {
					return
				}
			}
		}
	})
	return nil
}

func attackAdmin(ctx context.Context, s *siege) error {
	addr, err := s.adminAddr()
	if err != nil {
		return err
	}
	foreign := 0
	var mu sync.Mutex
	repeat(ctx, 4, time.Millisecond, func(rnd *mathrand.Rand) {
		var conns []net.Conn
		defer func() {
			for _, c := range conns {
				c.Close()
			}
		}()
		for range 40 {
			c, err := net.DialTimeout("tcp", addr, time.Second)
			if err != nil {
				return
			}
			conns = append(conns, c)
			_ = c.SetDeadline(time.Now().Add(time.Second))
			switch rnd.IntN(5) {
			case 0:
			case 1:
				_, _ = io.WriteString(c, "GET /v1/status HTTP/1.1\r\nHost: x\r\nA")
			case 2:
				_, _ = io.WriteString(c, "POST /v1/clear HTTP/1.1\r\nHost: "+addr+
					"\r\nContent-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n{")
			case 3:
				_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: "+addr+"\r\nX: "+
					strings.Repeat("a", 64<<10))
			case 4: // a page of another site whose name was bound to this address
				const body = `{"all":true}`
				_, _ = fmt.Fprintf(c, "POST /v1/clear HTTP/1.1\r\nHost: rebound.example:80\r\nOrigin: http://rebound.example:80\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
				answer := make([]byte, 64)
				if n, _ := c.Read(answer); strings.HasPrefix(string(answer[:n]), "HTTP/1.1 200") {
					mu.Lock()
					foreign++
					mu.Unlock()
				}
			}
		}
		time.Sleep(time.Duration(rnd.IntN(1000)) * time.Millisecond)
	})
	if foreign > 0 {
		s.problem("another site's name cleared the cache %d times", foreign)
	}
	return nil
}

// serve accepts connections until the suite ends and calls handle for each.
func (s *siege) serve(handle func(net.Conn)) (port int, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				handle(c)
			}()
		}
	}()
	return ln.Addr().(*net.TCPAddr).Port, nil
}

func lyingRedis(s *siege) ([]string, error) {
	lies := []func(c net.Conn){
		func(c net.Conn) { _, _ = io.WriteString(c, "$4000000000\r\nabc") },
		func(c net.Conn) { _, _ = io.WriteString(c, "*2000000000\r\n") },
		func(c net.Conn) {
			_, _ = io.WriteString(c, "$100000000\r\n")
			_, _ = copyLimited(c, zeros{}, 100<<20)
		},
		func(c net.Conn) { _, _ = io.WriteString(c, ":12345\r\n$3\r\nabc\r\n+OK\r\n") },
		func(c net.Conn) { _, _ = io.WriteString(c, strings.Repeat("*1\r\n", 100_000)) },
		func(c net.Conn) { _, _ = copyLimited(c, zeros{}, 10<<20) },
		func(c net.Conn) { time.Sleep(5 * time.Second) },
	}
	port, err := s.serve(func(c net.Conn) {
		b := make([]byte, 64<<10)
		// Reply correctly to a few commands, so that the connection is used for more.
		for range 3 {
			if _, err := c.Read(b); err != nil {
				return
			}
			_, _ = io.WriteString(c, "+OK\r\n")
		}
		_, _ = c.Read(b)
		lies[mathrand.IntN(len(lies))](c)
	})
	return []string{"--redis", fmt.Sprintf("redis://127.0.0.1:%d/0", port), "--arena-eviction",
		"lru"}, err
}

// zeros is an endless Reader.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func lyingS3(s *siege) ([]string, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = copyLimited(io.Discard, r.Body, 64<<20)
			switch mathrand.IntN(5) {
			case 0: // a reply that does not end
				_, _ = copyLimited(w, zeros{}, 2<<30)
			case 1:
				w.Header().Set("Content-Length", "4000000000")
				_, _ = copyLimited(w, zeros{}, 64<<20)
			case 2: // an error whose text does not end
				w.WriteHeader(http.StatusInternalServerError)
				_, _ = io.WriteString(w, "<Error><Code>")
				_, _ = copyLimited(w, zeros{}, 2<<30)
			case 3:
				w.Header().Set("Content-Type", "application/xml")
				_, _ = io.WriteString(w, "<ListBucketResult>")
				for range 1_000_000 {
					if _, err := io.WriteString(w,
						"<Contents><Key>a</Key></Contents>"); err != nil {
						return
					}
				}
			case 4:
				w.WriteHeader(http.StatusOK)
			}
		})}
	go func() { _ = server.Serve(ln) }()
	if err := errors.Join(os.Setenv("AWS_ACCESS_KEY_ID", "a"), os.Setenv("AWS_SECRET_ACCESS_KEY",
		"b")); err != nil {
		return nil, err
	}
	return []string{"--s3", fmt.Sprintf("s3://bucket?endpoint=http://%s&region=us-east-1",
		ln.Addr())}, nil
}

func diskArgs(s *siege) ([]string, error) {
	return []string{"--disk", filepath.Join(s.dir, "disk") + ":48M:slab=8M"}, nil
}

// fullDisk puts the tier's slabs on a file system that other files have filled, if this machine
// allows making one.
func fullDisk(s *siege) ([]string, error) {
	dir := filepath.Join(s.dir, "small")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=24m"); err != nil {
		s.note("no small file system here (%v)", err)
	} else {
		s.mounted = dir
	}
	return []string{"--disk", filepath.Join(dir, "disk") + ":16M:slab=4M"}, nil
}

func checkDisk(s *siege) {
	if !s.attack.ownEnd {
		s.endChild(s.victim)
		s.victim = nil
	}
	for _, dir := range []string{filepath.Join(s.dir, "disk"), filepath.Join(s.dir, "small",
		"disk")} {
		if _, err := os.Stat(dir); err == nil && s.sidecar.dead() {
			s.checkStore(dir)
		}
	}
}

// attackSignals ends one sidecar after another with signals at random moments: at its start, while
// it serves, while it stores and at its end.
func attackSignals(ctx context.Context, s *siege) error {
	rnd := mathrand.New(mathrand.NewPCG(1, 3))
	rounds := 0
	defer func() { s.note("%d sidecars", rounds) }()
	serving := true
	for ; ctx.Err() == nil; rounds++ {
		p := s.sidecar
		if serving && rnd.IntN(2) == 0 {
			if w, err := s.ownSession("signals"); err == nil {
				for i := range 20 {
					prefix := make(tiertest.Prefix, 16)
					prefix[0], prefix[1] = byte(rounds), byte(i)
					if (&victim{peer: w}).keep(prefix, 0) != nil {
						break
					}
				}
				w.disconnect()
			}
		}
		time.Sleep(time.Duration(rnd.IntN(50)) * time.Millisecond)
		p.wanted.Store(true)
		kinds := []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGTERM}
		sent := kinds[rnd.IntN(len(kinds))]
		_ = p.cmd.Process.Signal(sent)
		if rnd.IntN(2) == 0 {
			_ = p.cmd.Process.Signal(sent) // like timeout: to the process and to its group
		}
		select {
		case <-p.ended:
		case <-time.After(30 * time.Second):
			s.problem("the sidecar has not ended 30 s after %v", sent)
			_ = p.cmd.Process.Kill()
			<-p.ended
		}
		// Before it serves there is nothing to drain, and in its first moments there is no handler
		// yet.
		if state := p.cmd.ProcessState; serving && !state.Success() {
			s.problem("the sidecar ended with %v after %v", state, sent)
		}
		s.checkStore(filepath.Join(s.dir, "disk"))
		args, err := s.serveArgs()
		if err != nil {
			return err
		}
		if s.sidecar, err = s.spawn("sidecar", nil, s.bin, args...); err != nil {
			return err
		}
		if serving = rnd.IntN(3) > 0; serving {
			if err := s.waitServing(s.endpoint(), s.sidecar); err != nil {
				return err
			}
		} else {
			time.Sleep(time.Duration(rnd.IntN(150)) * time.Millisecond)
		}
	}
	s.end(s.sidecar, syscall.SIGKILL, time.Minute)
	return nil
}
