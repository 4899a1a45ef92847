// Package peerbench measures the knowledge of sidecars about each other: how long a joining one
// takes to know everything that the others hold, how much memory that takes, how many changes a
// second it follows, and how long lookups and leases take meanwhile.
package peerbench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/engine"
	"lookaside/tiers/peer"
)

// Options selects what to measure.
type Options struct {
	Sidecars int           // including the joining one; all are in this process. Default 16
	Pages    int           // held by each of the others, a multiple of 16. Default 1,000,000
	Rounds   int           // joins. Default 3
	Events   time.Duration // how long changes are followed for at each rate. Default 1 s
	Lookups  int           // lookups and leases of each round. Default 200
}

// Figures have a value for each round, or for each lookup or lease.
type Figures struct {
	Held         int       // held by the others together
	JoinSeconds  []float64 // from its start until it knows all of them
	BytesPerHint []float64 // memory for each page that it knows of
	// EventsPerSec is the highest tried rate of page changes at the others that was followed; 0:
	// none was.
	EventsPerSec   []float64
	ContainsUs     []float64 // a lookup of 4,096 pages in chunks of 16, by hints
	LeaseUs        []float64 // a lease on leasePages pages, and its return
	ContainsBusyUs []float64 // a lookup while changes are followed
}

const (
	pagesPerChunk = 16
	hitPages      = 4096
	leasePages    = 256
	pageBytes     = 4096 // no byte of a page is touched
	prompt        = 256  // pages that are stored at a time
)

func (o *Options) ensureDefaults() error {
	for _, d := range []struct {
		v *int
		d int
	}{{&o.Sidecars, 16}, {&o.Pages, 1_000_000}, {&o.Rounds, 3}, {&o.Lookups, 200}} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	if o.Events == 0 {
		o.Events = time.Second
	}
	if o.Sidecars < 2 || o.Sidecars > 64 || o.Pages < 2*hitPages || o.Pages%pagesPerChunk != 0 ||
		o.Rounds < 1 || o.Lookups < 1 || o.Events < 0 {
		return fmt.Errorf("bench of %d sidecars with %d pages each, %d rounds: want 2 to 64, a multiple of %d from %d on, and 1 or more", o.Sidecars, o.Pages, o.Rounds, pagesPerChunk, 2*hitPages)
	}
	return nil
}

// sidecar is one of the others.
type sidecar struct {
	engine *engine.Engine
	peers  *peer.Peers
	region *os.File
	stored uint64 // labels of prompts
	number uint64
}

// Run measures. It takes some 150 bytes of memory for each page that is held.
func (o Options) Run(ctx context.Context) (f Figures, err error) {
	if err := o.ensureDefaults(); err != nil {
		return f, err
	}
	dir, err := os.MkdirTemp("", "lookaside-peers-")
	if err != nil {
		return f, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	g := tiers.Geometry{PageBytes: pageBytes, PagesPerChunk: pagesPerChunk, PageTokens: 16,
		DigestBytes: 32}
	space := &tiers.Space{Fingerprint: tiers.FingerprintOf(fmt.Append(nil, g)), Geometry: g}
	var others []*sidecar
	defer func() {
		for _, s := range others {
			s.close()
		}
	}()
	for i := range o.Sidecars - 1 {
		s, err := newSidecar(dir, space, uint64(i+1), o.Pages)
		if err != nil {
			return f, err
		}
		others = append(others, s)
		if err := s.fill(o.Pages); err != nil {
			return f, err
		}
		f.Held += o.Pages
		if ctx.Err() != nil {
			return f, context.Cause(ctx)
		}
	}
	for range o.Rounds {
		if err := o.round(ctx, dir, space, others, &f); err != nil {
			return f, err
		}
	}
	return f, nil
}

func newSidecar(dir string, space *tiers.Space, number uint64, pages int) (s *sidecar, err error) {
	s = &sidecar{number: number}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.engine, err = engine.New(engine.Config{OwnerShare: 1,
		JournalBytes: 16 << 20}); err != nil {
		return s, err
	}
	// The others know little of each other: only the joining one is measured.
	if s.peers, err = peer.Start(peer.Config{Dir: dir, Generation: number << 32, Engine: s.engine,
		HintsLimitBytes: 1}); err != nil {
		return s, err
	}
	id, err := s.engine.OpenSpace(space.Fingerprint, space.Geometry)
	if err != nil {
		return s, err
	}
	size := int64(pages) * pageBytes
	if err := errors.Join(s.engine.AddOwner(1, id), s.engine.AddRegion(1, size)); err != nil {
		return s, err
	}
	// A region needs a descriptor to be lent. No process reads it.
	if s.region, err = os.Create(filepath.Join(dir, fmt.Sprint("region-", number))); err != nil {
		return s, err
	}
	if err := s.region.Truncate(size); err != nil {
		return s, err
	}
	return s, s.peers.AddRegion(peer.Region{ID: 1, Kind: "file", FD: int(s.region.Fd()),
		SizeBytes: size, PageSize: int64(os.Getpagesize())})
}

func (s *sidecar) close() {
	if s.peers != nil {
		_ = s.peers.Close()
	}
	if s.engine != nil {
		s.engine.Close()
	}
	if s.region != nil {
		_ = s.region.Close()
	}
}

// digests appends the digests of a prompt's pages: random numbers that depend only on the
// arguments.
func digests(out []byte, sidecar, label uint64, pages int) []byte {
	for i := range pages {
		for w := range uint64(4) {
			hi, lo := bits.Mul64(sidecar<<56^label<<20^uint64(i)<<2^w^0xD6E8FEB86659FD93,
				0x9E3779B97F4A7C15)
			hi, lo = bits.Mul64(hi^lo, 0xA0761D6478BD642F)
			out = binary.LittleEndian.AppendUint64(out, hi^lo)
		}
	}
	return out
}

// store stores prompts, evicting as many where the engine is full.
func (s *sidecar) store(prompts int, buf []byte) ([]byte, error) {
	for range prompts {
		buf = digests(buf[:0], s.number, s.stored, prompt)
		s.stored++
		res, _, err := s.engine.PrepareStore(1, 0, nil, buf, nil)
		if err == nil && res.Store != 0 {
			err = s.engine.CommitStore(1, res.Store, nil)
		}
		if err != nil {
			return buf, err
		}
	}
	return buf, nil
}

func (s *sidecar) fill(pages int) error {
	_, err := s.store((pages+prompt-1)/prompt, nil)
	return err
}

// run returns pages that a sidecar has stored recently.
func (s *sidecar) run(space *tiers.Space, pages int) tiers.Run {
	r := tiers.Run{Space: space}
	for label := s.stored - uint64((pages+prompt-1)/prompt); label < s.stored; label++ {
		r.Hashes = digests(r.Hashes, s.number, label, prompt)
	}
	r.Hashes = r.Hashes[:pages*space.Geometry.DigestBytes]
	return r
}

func (o *Options) round(ctx context.Context, dir string, space *tiers.Space, others []*sidecar,
	f *Figures) error {
	engine, err := engine.New(engine.Config{JournalBytes: 1 << 20})
	if err != nil {
		return err
	}
	defer engine.Close()
	start := time.Now()
	p, err := peer.Start(peer.Config{Dir: dir, Generation: 1, Engine: engine,
		HintsLimitBytes: 4 << 30})
	if err != nil {
		return err
	}
	defer p.Close()
	for !complete(p, len(others)) {
		if err := wait(ctx, time.Millisecond); err != nil {
			return err
		}
	}
	f.JoinSeconds = append(f.JoinSeconds, time.Since(start).Seconds())
	st := p.Status()
	if st.HintPages < f.Held*9/10 || st.HintsDropped > 0 {
		return fmt.Errorf("bench: %d pages are known of %d, %d were dropped", st.HintPages, f.Held,
			st.HintsDropped)
	}
	if err := errors.Join(o.lookups(ctx, p, space, others, f), o.events(ctx, p, space, others,
		f)); err != nil {
		return err
	}
	st = p.Status() // its table does not grow any more
	f.BytesPerHint = append(f.BytesPerHint, float64(st.HintBytes)/float64(st.HintPages))
	return nil
}

// complete reports whether all the others have sent everything that they hold.
func complete(p *peer.Peers, others int) bool {
	n := 0
	for _, l := range p.Status().Lenders {
		if l.Complete {
			n++
		}
	}
	return n == others
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

func (o *Options) lookups(ctx context.Context, p *peer.Peers, space *tiers.Space, others []*sidecar,
	f *Figures) error {
	held := make([]uint16, hitPages/pagesPerChunk)
	for i := range o.Lookups {
		r := others[i%len(others)].run(space, hitPages)
		start := time.Now()
		p.Contains(r, held)
		f.ContainsUs = append(f.ContainsUs, us(start))
		if slices.Contains(held, 0) {
			return errors.New("bench: what is held is not known")
		}
	}
	for i := 0; i < o.Lookups; {
		r := others[i%len(others)].run(space, leasePages)
		var handles []uint64
		start := time.Now()
		pages, err := p.Borrow(ctx, r, func(_ int, l peer.Loan) {
			handles = append(handles,
				l.Handle)
		})
		took := us(start)
		p.Return(handles, false)
		if err != nil && ctx.Err() != nil {
			return err
		}
		if pages == leasePages {
			f.LeaseUs = append(f.LeaseUs, took)
			i++
		} else if err := wait(ctx, time.Millisecond); err != nil { // its region has not arrived yet
			return err
		}
	}
	return nil
}

// events makes the others change faster and faster, each rate for a while, until the joining one
// does not follow any more.
func (o *Options) events(ctx context.Context, p *peer.Peers, space *tiers.Space, others []*sidecar,
	f *Figures) error {
	if o.Events == 0 {
		return nil
	}
	asked := others[0].run(space, hitPages)
	held := make([]uint16, hitPages/pagesPerChunk)
	best := 0.0
	for rate := firstRate; ; rate *= 2 {
		before, changed := p.Status(), changes(others)
		start := time.Now()
		end := start.Add(o.Events)
		// each stores a prompt that evicts another
		every := time.Duration(float64(time.Second) * 2 * prompt * float64(len(others)) / rate)
		errs := make([]error, len(others))
		var wg sync.WaitGroup
		for i, s := range others {
			wg.Go(func() {
				var buf []byte
				for due := start.Add(every * time.Duration(i) / time.Duration(
					len(others))); errs[i] == nil && due.Before(end) &&
					wait(ctx, time.Until(due)) == nil; due = due.Add(every) {
					buf, errs[i] = s.store(1, buf)
				}
			})
		}
		for more := true; more; more = time.Now().Before(end) &&
			wait(ctx, time.Millisecond) == nil {
			at := time.Now()
			p.Contains(asked, held)
			f.ContainsBusyUs = append(f.ContainsBusyUs, us(at))
		}
		wg.Wait()
		made := changes(others) - changed
		took := time.Since(start)
		if err := errors.Join(append(errs, wait(ctx, grace))...); err != nil {
			return err
		}
		after := p.Status()
		if took > 3*o.Events/2 || after.Resyncs > before.Resyncs ||
			after.HintsHeard-before.HintsHeard < made*99/100 {
			break // not followed, or not even produced in time
		}
		best = float64(made) / took.Seconds()
	}
	f.EventsPerSec = append(f.EventsPerSec, best)
	return nil
}

const (
	firstRate = 10_000.0 // changes a second
	// grace is how far a follower may be behind.
	grace = 100 * time.Millisecond
)

func changes(others []*sidecar) (n uint64) {
	for _, s := range others {
		st := s.engine.Journal()
		n += st.StoredPages + st.RemovedPages
	}
	return n
}

func us(start time.Time) float64 { return float64(time.Since(start).Nanoseconds()) / 1e3 }
