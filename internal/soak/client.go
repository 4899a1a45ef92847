package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"github.com/spf13/pflag"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// counts holds the actions of clients since their last report.
type counts struct {
	Lookups     int `json:"lookups"`
	LookupPages int `json:"lookup_pages"`
	HitPages    int `json:"hit_pages"`
	// Late counts lookups without a reply some time after their deadline.
	Late         int `json:"late"`
	Loads        int `json:"loads"`
	CheckedPages int `json:"checked_pages"`
	Stores       int `json:"stores"`
	StoredPages  int `json:"stored_pages"`
	Connects     int `json:"connects"`
	// Refusals counts requests with an error as the reply, by its code.
	Refusals map[string]int `json:"refusals"`
}

func (c *counts) add(d counts) {
	c.Lookups += d.Lookups
	c.LookupPages += d.LookupPages
	c.HitPages += d.HitPages
	c.Late += d.Late
	c.Loads += d.Loads
	c.CheckedPages += d.CheckedPages
	c.Stores += d.Stores
	c.StoredPages += d.StoredPages
	c.Connects += d.Connects
	for code, n := range d.Refusals {
		if c.Refusals == nil {
			c.Refusals = map[string]int{}
		}
		c.Refusals[code] += n
	}
}

// report is one line of a client's output.
type report struct {
	Counts counts `json:"counts"`
	Wrong  string `json:"wrong,omitempty"` // a finding that must never happen
}

// patience is how long a sidecar has for a reply on the session socket. The soak stops it for up to
// two seconds now and then.
const patience = 10 * time.Second

// peer is one client process: a worker and its scheduler.
type peer struct {
	rnd    *rand.Rand
	dir    string
	engine string
	space  *tiers.Space // the content of pages depends on its name
	out    *json.Encoder
	n      counts
	said   time.Time

	worker, scheduler *client.Session
	lookups           *client.Lookups
	memory            *client.Memory // outlives the sessions
	settled           bool           // the memory has only what this session has announced
	next              uint64
}

// clientMain is a client process. It ends at the end of its standard input or by a signal. If the
// sidecar goes away, it waits for the next one.
func clientMain(args []string) error {
	p := &peer{out: json.NewEncoder(os.Stdout), said: time.Now(), memory: client.NewMemory()}
	var seed uint64
	var space int
	fs := pflag.NewFlagSet("client", pflag.ContinueOnError)
	fs.StringVar(&p.dir, "dir", "", "endpoint")
	fs.StringVar(&p.engine, "engine", "", "engine id")
	fs.Uint64Var(&seed, "seed", 0, "")
	fs.IntVar(&space, "space", 0, "")
	if err := fs.Parse(args); err != nil {
		return err
	}
	p.rnd = rand.New(rand.NewPCG(seed, 0x736f616b))
	p.space = spaces[space%len(spaces)]
	parent := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, bufio.NewReader(os.Stdin))
		close(parent)
	}()
	for {
		err := p.session(parent)
		p.disconnect()
		select {
		case <-parent:
			return p.say("")
		default:
		}
		var wrong *wrongError
		if errors.As(err, &wrong) {
			return errors.Join(p.say(wrong.Error()), err)
		}
		// The sidecar is gone, or refuses this client for now.
		time.Sleep(time.Duration(20+p.rnd.IntN(100)) * time.Millisecond)
	}
}

// wrongError is a finding that must never happen.
type wrongError struct{ text string }

func (e *wrongError) Error() string { return e.text }

func (p *peer) say(wrong string) error {
	err := p.out.Encode(report{p.n, wrong})
	p.n, p.said = counts{}, time.Now()
	return err
}

// spaces lists the geometries of clients, each with its own model.
var spaces = []*tiers.Space{
	tiertest.NewSpace("soak-0", tiers.Geometry{PageBytes: 16 << 10, PagesPerChunk: 8,
		PageTokens: 16, DigestBytes: 32}),
	tiertest.NewSpace("soak-1", tiers.Geometry{PageBytes: 10000, PagesPerChunk: 3, PageTokens: 16,
		DigestBytes: 16}),
	tiertest.NewSpace("soak-2", tiers.Geometry{PageBytes: 64 << 10, PagesPerChunk: 1,
		PageTokens: 256, DigestBytes: 8}),
}

func (p *peer) connect() (err error) {
	g := p.space.Geometry
	hello := wire.Hello{Role: wire.RoleWorker, EngineID: p.engine, PageTokens: uint32(g.PageTokens),
		PageBytes:     uint64(g.PageBytes),
		PagesPerChunk: uint32(g.PagesPerChunk), DigestBytes: uint8(g.DigestBytes),
		Fields: []wire.Field{{Key: "model", Value: p.space.Fingerprint.Short()}}}
	held := p.memory.Held()
	hello.Held, p.settled = uint32(len(held)), false
	if p.worker, err = client.Dial(p.dir, &hello, patience, held...); err != nil {
		return err
	}
	if err := p.memory.BeginSession(); err != nil {
		return err
	}
	for range p.worker.Welcome.Regions {
		if _, err := p.recv(true); err != nil {
			return err
		}
	}
	hello.Role, hello.PageBytes, hello.Held = wire.RoleScheduler, 0, 0
	if p.scheduler, err = client.Dial(p.dir, &hello, patience); err != nil {
		return err
	}
	if p.lookups, err = p.scheduler.Lookups(); err != nil {
		return err
	}
	p.n.Connects++
	return nil
}

func (p *peer) disconnect() {
	if p.lookups != nil {
		_ = p.lookups.Close()
		p.lookups = nil
	}
	if p.worker != nil {
		_ = p.memory.EndSession(p.worker)
	}
	for _, s := range []*client.Session{p.scheduler, p.worker} {
		if s != nil {
			_ = s.Close()
		}
	}
	p.scheduler, p.worker = nil, nil
}

// recv attaches new regions and detaches removed ones until another packet of the worker's session
// arrives, which it returns. With regions it also returns a RegionAdded.
func (p *peer) recv(regions bool) ([]byte, error) {
	for {
		b, files, err := p.worker.Recv(patience)
		if err != nil {
			return nil, err
		}
		t, _ := wire.Peek(b)
		switch t {
		case wire.TypeRegionAdded:
			var m wire.RegionAdded
			err = m.Decode(b, &wire.DefaultLimits)
			if err == nil && len(files) == 1 {
				err = p.attach(&m, files[0])
				files = nil
			}
		case wire.TypeRegionRemoved:
			err = p.detach(b)
		}
		for _, f := range files {
			f.Close()
		}
		if err == nil && p.worker.Ready && !p.settled {
			p.settled = true
			err = p.memory.Settle()
		}
		if err != nil {
			return nil, err
		}
		if t == wire.TypeRegionAdded && regions || t != wire.TypeRegionAdded &&
			t != wire.TypeRegionRemoved {
			return b, nil
		}
	}
}

// attach maps a region, unless an earlier session has.
func (p *peer) attach(m *wire.RegionAdded, file *os.File) error {
	if err := p.memory.Add(m, file); err != nil {
		return err
	}
	return p.worker.Send(&wire.RegionMapped{Region: m.Region})
}

// detach unmaps the region of a RegionRemoved. All copies run on this goroutine, so none is under
// way, and this client has no lease in the region.
func (p *peer) detach(b []byte) error {
	var m wire.RegionRemoved
	if err := m.Decode(b, &wire.DefaultLimits); err != nil {
		return err
	}
	return errors.Join(p.memory.Remove(m.Region),
		p.worker.Send(&wire.RegionUnmapped{Region: m.Region}))
}

// call sends a request and decodes its reply; granted is false if the sidecar refused it.
func (p *peer) call(request, reply wire.Message) (granted bool, err error) {
	if err := p.worker.Send(request); err != nil {
		return false, err
	}
	b, err := p.recv(false)
	if err != nil {
		return false, err
	}
	if t, _ := wire.Peek(b); t == wire.TypeError {
		var e wire.Error
		if err := e.Decode(b, &wire.DefaultLimits); err != nil {
			return false, err
		}
		if p.n.Refusals == nil {
			p.n.Refusals = map[string]int{}
		}
		p.n.Refusals[e.Code]++
		return false, nil
	}
	return true, reply.Decode(b, &wire.DefaultLimits)
}

// session connects and works until an error or until the parent ends it.
func (p *peer) session(parent <-chan struct{}) error {
	if err := p.connect(); err != nil {
		return err
	}
	for steps := 50 + p.rnd.IntN(1000); steps > 0; steps-- {
		select {
		case <-parent:
			return nil
		default:
		}
		if err := p.request(); err != nil {
			return err
		}
		if time.Since(p.said) > 200*time.Millisecond {
			if err := p.say(""); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *peer) chance(n int) bool { return p.rnd.IntN(n) == 0 }

// randomPrefix returns one of some hundreds of prefixes, of which dozens begin alike. They are more
// than the tiers hold together, and some are used much more often than others.
func randomPrefix(rnd *rand.Rand, space *tiers.Space) tiertest.Prefix {
	ppc := space.Geometry.PagesPerChunk
	t := make(tiertest.Prefix, 1+rnd.IntN(10*ppc))
	t[0] = byte(min(rnd.IntN(40), rnd.IntN(40)))
	if len(t) > ppc {
		t[ppc] = byte(rnd.IntN(4))
	}
	if len(t) > 2*ppc && rnd.IntN(2) == 0 {
		t[2*ppc+rnd.IntN(len(t)-2*ppc)] = byte(rnd.IntN(6))
	}
	return t
}

// request does what an engine does for one request: it looks the prefix up, loads the hits and
// stores the rest. Sometimes it misbehaves.
func (p *peer) request() error {
	t := randomPrefix(p.rnd, p.space)
	g := p.space.Geometry
	deadlineMs, recomputeUs := uint32(1000), uint32(0)
	if p.chance(10) {
		deadlineMs = uint32(1 + p.rnd.IntN(20))
	}
	if p.chance(3) {
		recomputeUs = uint32(1 + p.rnd.IntN(2000))
	}
	p.n.Lookups++
	p.n.LookupPages += len(t)
	hit, err := p.ask(t, deadlineMs, recomputeUs, 3*time.Second)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		// The sidecar is stopped or gone; the session socket will show which.
		p.n.Late++
		hit = 0
	} else if err != nil {
		return err
	}
	if hit > len(t) {
		return &wrongError{fmt.Sprintf("a hit of %d of %d pages", hit, len(t))}
	}
	p.n.HitPages += hit
	if hit > 0 {
		if err := p.load(t, hit); err != nil {
			return err
		}
	}
	if p.chance(300) {
		_, err := p.call(&wire.ClearSpace{ID: p.worker.NextID()}, &wire.Cleared{})
		return err
	}
	if hit < len(t) && !p.chance(5) {
		return p.store(t, hit/g.PagesPerChunk*g.PagesPerChunk)
	}
	return nil
}

// ask looks a prefix up and returns its hit pages.
func (p *peer) ask(t tiertest.Prefix, deadlineMs, recomputeUs uint32,
	patience time.Duration) (hit int, err error) {
	p.next++
	r, err := p.lookups.Lookup(&wire.Lookup{
		Session: p.scheduler.Welcome.Session, Secret: p.scheduler.Welcome.Secret, Lookup: p.next,
		Hashes:     t.Digests(0, len(t), p.space.Geometry.DigestBytes),
		DeadlineMs: deadlineMs, RecomputeUs: recomputeUs,
	}, patience)
	return int(r.HitPages), err
}

// sendLookup sends a lookup of any hashes and does not receive the reply.
func (p *peer) sendLookup(hashes []byte, deadlineMs uint32) error {
	p.next++
	w := &p.scheduler.Welcome
	return p.lookups.Send((&wire.Lookup{Session: w.Session, Secret: w.Secret, Lookup: p.next,
		Hashes: hashes, DeadlineMs: deadlineMs}).Append(nil))
}

// take makes the worker take over pages [first, hit) of the last lookup, which was for that prefix.
func (p *peer) take(t tiertest.Prefix, first, hit int) (g wire.LoadGrant, granted bool, err error) {
	geometry := p.space.Geometry
	names := wire.NamesOf(t.Digests(first, hit, geometry.DigestBytes), geometry.DigestBytes, first,
		geometry.PagesPerChunk)
	m := wire.PrepareLoad{
		ID: p.worker.NextID(), Session: p.scheduler.Welcome.Session, Lookup: p.next,
		Ticket:    p.scheduler.Ticket(p.next),
		FirstPage: uint32(first), Pages: uint32(hit - first), Names: names[:],
	}
	granted, err = p.call(&m, &g)
	return g, granted, err
}

// page returns page i of an extent in the arena, checked as a client must check it.
func (p *peer) page(e wire.Extent, i int) ([]byte, error) {
	size := uint64(p.space.Geometry.PageBytes)
	mem, off := p.memory.Bytes(e.Region), e.Offset+uint64(i)*size
	if mem == nil || off > uint64(len(mem)) || uint64(len(mem))-off < size {
		return nil, &wrongError{fmt.Sprintf("extent %+v is in no region that is mapped", e)}
	}
	return mem[off:][:size], nil
}

func (p *peer) load(t tiertest.Prefix, hit int) error {
	session := p.scheduler.Welcome.Session
	first := 0
	switch n := p.rnd.IntN(100); {
	case n < 8:
		return p.lookups.Send((&wire.Cancel{Session: session, Secret: p.scheduler.Welcome.Secret,
			Lookup: p.next}).Append(nil))
	case n < 11:
		return nil // forgotten: freed with its deadline
	case n < 20 && hit > 1:
		first = p.rnd.IntN(hit)
		if err := p.lookups.Send((&wire.Trim{Session: session, Secret: p.scheduler.Welcome.Secret,
			Lookup: p.next, FirstPage: uint32(first)}).Append(nil)); err != nil {
			return err
		}
	}
	g, granted, err := p.take(t, first, hit)
	if !granted || err != nil {
		return err
	}
	p.n.Loads++
	if err := p.verify(t, g.Extents, first, hit); err != nil {
		return err
	}
	if p.chance(10) { // a slow copy: nothing may change during the lease
		time.Sleep(time.Duration(p.rnd.IntN(30)) * time.Millisecond)
		if err := p.verify(t, g.Extents, first, hit); err != nil {
			return err
		}
	}
	if p.chance(50) {
		return nil // released with the session
	}
	release := wire.Release{Load: g.Load}
	if p.chance(50) {
		release.Bad = []uint32{0} // drops a good chunk
	}
	return p.worker.Send(&release)
}

func (p *peer) verify(t tiertest.Prefix, extents []wire.Extent, first, end int) error {
	at, d := first, p.space.Geometry.DigestBytes
	digests := t.Digests(0, len(t), d)
	want := make([]byte, p.space.Geometry.PageBytes)
	for _, e := range extents {
		if int(e.Page) != at {
			return &wrongError{fmt.Sprintf("extent of page %d, expected %d", e.Page, at)}
		}
		for i := range int(e.Pages) {
			src, err := p.page(e, i)
			if err != nil {
				return err
			}
			tiertest.Fill(want, p.space, digests[at*d:(at+1)*d])
			if string(src) != string(want) {
				return &wrongError{fmt.Sprintf(
					"WRONG BYTES: page %d of %d of prefix %v in space %s, extent %+v, digest %x",
					at, len(t), t, p.space.Fingerprint.Short(), e, digests[at*d:(at+1)*d])}
			}
			at++
			p.n.CheckedPages++
		}
	}
	if at != end {
		return &wrongError{fmt.Sprintf("extents end at page %d, asked for %d to %d", at, first,
			end)}
	}
	return nil
}

// prepare requests room for the pages of a prefix from first on; granted is false if nothing is to
// be stored.
func (p *peer) prepare(t tiertest.Prefix, first int) (g wire.StoreGrant, granted bool, err error) {
	d := p.space.Geometry.DigestBytes
	m := wire.PrepareStore{ID: p.worker.NextID(), FirstPage: uint32(first), Hashes: t.Digests(first,
		len(t), d)}
	if first > 0 {
		m.Prev = t.Digests(first-1, first, d)
	}
	granted, err = p.call(&m, &g)
	return g, granted && g.Store != 0, err
}

func (p *peer) store(t tiertest.Prefix, first int) error {
	g, granted, err := p.prepare(t, first)
	if !granted || err != nil {
		return err
	}
	d := p.space.Geometry.DigestBytes
	p.n.Stores++
	var failed []uint32
	abort := p.chance(20)
	digests := t.Digests(0, len(t), d)
	for n, e := range g.Grants {
		spoil := abort || p.chance(30)
		if spoil {
			failed = append(failed, uint32(n))
		}
		for i := range int(e.Pages) {
			dst, err := p.page(e, i)
			if err != nil {
				return err
			}
			at := int(e.Page) + i
			tiertest.Fill(dst, p.space, digests[at*d:(at+1)*d])
			if spoil {
				dst[p.rnd.IntN(len(dst))]++ // must never be visible to any client
			} else {
				p.n.StoredPages++
			}
		}
	}
	switch {
	case abort && p.chance(10):
		return errors.New("ending the session with a store open, on purpose")
	case abort:
		return p.worker.Send(&wire.AbortStore{Store: g.Store})
	default:
		return p.worker.Send(&wire.CommitStore{Store: g.Store, Failed: failed})
	}
}

func seedArg(seed uint64) string { return strconv.FormatUint(seed, 10) }
