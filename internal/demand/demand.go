// Package demand watches what clients ask of a sidecar: which prefixes they look up and store. From
// that it knows, at any time, what share of it an arena of another size would have hit (Curve), how
// soon and over how much else prefixes are asked for again (Reuse), and it can have the requests
// recorded (Record).
//
// # What it costs those who ask
//
// Lookup and Store copy 8 bytes a page into a ring, under a lock that is held for nothing else, and
// return. They allocate nothing, wake nobody and wait for nothing: if the ring is full, the request
// is dropped and counted. One goroutine reads the ring, some 20 times a second. It rests after
// every 0.1 ms of work, three times as long. So it takes no more than a quarter of a processor, and
// those who ask do not wait for it. What it cannot keep up with is dropped as whole requests.
//
// With Config.MemoryBytes 0 and without a recording, a request costs one atomic load.
package demand

import (
	"context"
	"encoding/binary"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/policy"
)

// Config configures a Demand.
type Config struct {
	// MemoryBytes bounds the memory of the curve: at least MinMemory. 0: there is no curve.
	MemoryBytes int64
	// ArenaBytes returns the size of the arena that the curve's sizes are multiples of. It may
	// change; then the curve begins anew.
	ArenaBytes func() int64
	// Policy names the arena's order of eviction, "" for the default.
	Policy string
	// Seed makes the sample and the policies hard to predict.
	Seed uint64
	// Now is the time. Default: time.Now.
	Now func() time.Time
}

const (
	// ringWords is the size of the ring: a megabyte. It holds the longest request.
	ringWords = 1 << 17
	// pause is how long the reader waits between two looks at the ring.
	pause = 50 * time.Millisecond
	// slice is how long the reader works at a time, or for one request. Then it rests, so that
	// those who ask meanwhile do not wait for a processor.
	slice = 100 * time.Microsecond
	// rest is how many times as long as its work the reader rests at least.
	rest = 3
	// maxWaiting bounds the lookups whose answer is not known yet, and maxWaitingPages their pages.
	maxWaiting      = 1024
	maxWaitingPages = 1 << 18
)

// Demand is what clients ask for. Its methods may be called from any goroutine, also on nil, which
// watches nothing.
type Demand struct {
	cfg     Config
	on      atomic.Bool // somebody reads the ring
	bell    chan struct{}
	dropped atomic.Uint64 // requests

	mu   sync.Mutex // guards the ring's indices, and those of its words that are free
	ring []uint64
	head uint64 // words read, ever
	tail uint64 // words written, ever

	// The reader's alone.
	now     time.Time
	waiting map[waitKey]*request
	order   []waitKey // of waiting, the oldest first; some may be gone
	pages   int       // of waiting
	req     request

	books struct { // what the reader has found
		sync.Mutex
		curve      *curve
		reuse      *reuse
		recordings []*Recording
	}
	reported uint64 // of dropped, to recordings; guarded by books
	ended    bool   // nothing is read any more; guarded by books
}

// kind of an event in the ring.
type kind uint64

const (
	lookup   kind = iota
	waits         // a lookup whose answer comes later
	answered      // that answer
	store
)

// An event in the ring is these words, and then a word for each page.
const (
	wKind  = iota // the kind, and the pages above
	wOwner        // of a lookup that waits, or is answered
	wLookup
	wFirst // the first page, and the pages held above
	wPrev
	wSalt
	wPageBytes
	wGeometry // pages a chunk, and tokens a page above
	eventWords
)

type waitKey struct{ owner, lookup uint64 }

// request is an event.
type request struct {
	kind  kind
	key   waitKey
	first int
	held  int // of a lookup: pages found
	arena int // of them, in the arena
	prev  uint64
	salt  uint64
	shape shape
	pages []uint64
}

// shape is the geometry of pages.
type shape struct {
	pageBytes     int64
	pagesPerChunk int
	pageTokens    int
}

func (s shape) chunkBytes() int64 { return s.pageBytes * int64(s.pagesPerChunk) }

// New returns a Demand. Run must be called for it to watch.
func New(cfg Config) *Demand {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Policy == "" {
		cfg.Policy = policy.Default
	}
	d := &Demand{cfg: cfg, bell: make(chan struct{}, 1), waiting: map[waitKey]*request{}}
	if cfg.MemoryBytes > 0 {
		d.ring = make([]uint64, ringWords)
		d.books.reuse = newReuse(cfg.Seed)
		d.on.Store(true)
	}
	return d
}

// Lookup notes a lookup of the pages with the given digests, end to end, from page first on. prev
// is the digest of the page before, if it is known. held pages were found in the arena. If more may
// come from tiers, done is false, and Answered follows unless the lookup is given up.
func (d *Demand) Lookup(s tiers.Fingerprint, g *tiers.Geometry, owner, id uint64, first int, prev,
	hashes []byte, held int, done bool) {
	if d == nil || !d.on.Load() {
		return
	}
	k := lookup
	if !done {
		k = waits
	}
	d.put(k, s, g, owner, id, first, prev, hashes, held)
}

// Answered notes the answer to a lookup that was not done: how many pages were found in all.
func (d *Demand) Answered(owner, id uint64, held int) {
	if d == nil || !d.on.Load() {
		return
	}
	d.put(answered, tiers.Fingerprint{}, &none, owner, id, 0, nil, nil, held)
}

// Store notes that the pages with the given digests are stored.
func (d *Demand) Store(s tiers.Fingerprint, g *tiers.Geometry, first int, prev, hashes []byte) {
	if d == nil || !d.on.Load() {
		return
	}
	d.put(store, s, g, 0, 0, first, prev, hashes, 0)
}

var none = tiers.Geometry{PagesPerChunk: 1, DigestBytes: 8}

// put writes an event into the ring, or drops it.
func (d *Demand) put(k kind, s tiers.Fingerprint, g *tiers.Geometry, owner, id uint64, first int,
	prev, hashes []byte, held int) {
	n := len(hashes) / g.DigestBytes
	need := uint64(eventWords + n)
	d.mu.Lock()
	if uint64(len(d.ring))-(d.tail-d.head) < need {
		d.mu.Unlock()
		d.dropped.Add(1)
		d.ringBell()
		return
	}
	at := d.tail
	head := [eventWords]uint64{wKind: uint64(k) | uint64(n)<<8, wOwner: owner, wLookup: id,
		wFirst: uint64(uint32(first)) | uint64(held)<<32,
		wSalt:  binary.LittleEndian.Uint64(s[:]), wPageBytes: uint64(g.PageBytes),
		wGeometry: uint64(uint32(g.PagesPerChunk)) | uint64(g.PageTokens)<<32}
	if len(prev) >= 8 {
		head[wPrev] = binary.LittleEndian.Uint64(prev)
	}
	for _, w := range head {
		d.ring[at%ringWords] = w
		at++
	}
	for i := range n {
		d.ring[at%ringWords] = binary.LittleEndian.Uint64(hashes[i*g.DigestBytes:])
		at++
	}
	was := d.tail - d.head
	d.tail = at
	d.mu.Unlock()
	if was < ringWords/2 && was+need >= ringWords/2 {
		d.ringBell()
	}
}

func (d *Demand) ringBell() {
	select {
	case d.bell <- struct{}{}:
	default:
	}
}

// Run reads what is noted, until ctx is done. It ends all recordings.
func (d *Demand) Run(ctx context.Context) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			d.Sync()
			d.endAll()
			return
		case <-timer.C:
		case <-d.bell:
		}
		begun := time.Now()
		d.read(func() {
			took := time.Since(begun)
			if took < slice {
				return
			}
			timer.Reset(rest * took)
			select { // whatever comes meanwhile is dropped if the ring is full
			case <-ctx.Done():
			case <-timer.C:
			}
			begun = time.Now()
		})
		timer.Reset(pause)
	}
}

// Sync reads what has been noted so far, without a rest. Only one goroutine may call it: Run's, or
// a test's that has not called Run.
func (d *Demand) Sync() { d.read(func() {}) }

// read reads what has been noted so far. It calls breathe after each request.
func (d *Demand) read(breathe func()) {
	d.now = d.cfg.Now()
	stopping := d.stopping()
	d.mu.Lock()
	tail := d.tail
	d.mu.Unlock()
	for head := d.head; head != tail; {
		used := d.next(head, &d.req)
		head += used
		d.handle(&d.req)
		d.mu.Lock() // the words that were read are free
		d.head = head
		d.mu.Unlock()
		breathe()
	}
	d.end(stopping)
	d.books.Lock()
	if c := d.books.curve; c != nil {
		c.decay(d.now)
	}
	d.books.Unlock()
}

// next decodes the event at a place of the ring, and returns its words. Nobody writes to them.
func (d *Demand) next(at uint64, r *request) uint64 {
	word := func(i uint64) uint64 { return d.ring[(at+i)%ringWords] }
	n := word(wKind) >> 8
	*r = request{kind: kind(word(wKind) & 0xff), key: waitKey{word(wOwner), word(wLookup)},
		first: int(uint32(word(wFirst))), held: int(word(wFirst) >> 32),
		salt: word(wSalt), pages: r.pages[:0],
		shape: shape{int64(word(wPageBytes)), int(uint32(word(wGeometry))),
			int(word(wGeometry) >> 32)}}
	r.arena = r.held
	if p := word(wPrev); p != 0 {
		r.prev = d.name(p, r.salt)
	}
	for i := range n {
		r.pages = append(r.pages, d.name(word(eventWords+i), r.salt))
	}
	return eventWords + n
}

// name returns a page's name here: it depends on its space, and cannot be chosen.
func (d *Demand) name(digest, salt uint64) uint64 {
	x := digest ^ salt ^ d.cfg.Seed
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	x ^= x >> 32
	x *= 0xd6e8feb86659fd93
	return x ^ x>>32
}

// handle deals with an event, or puts it off until its answer is known.
func (d *Demand) handle(r *request) {
	switch r.kind {
	case waits:
		if was := d.waiting[r.key]; was != nil {
			d.settle(r.key, was, was.arena)
		}
		for len(d.waiting) >= maxWaiting || d.pages+len(r.pages) > maxWaitingPages &&
			len(d.waiting) > 0 {
			d.settleOldest()
		}
		kept := *r
		kept.pages = append([]uint64(nil), r.pages...)
		d.waiting[r.key] = &kept
		d.order = append(d.order, r.key)
		d.pages += len(kept.pages)
	case answered:
		if was := d.waiting[r.key]; was != nil {
			d.settle(r.key, was, r.held)
		}
	default:
		d.count(r)
	}
}

// settle counts a lookup that waited.
func (d *Demand) settle(key waitKey, r *request, held int) {
	delete(d.waiting, key)
	d.pages -= len(r.pages)
	r.kind, r.held = lookup, min(held, len(r.pages))
	r.arena = min(r.arena, r.held)
	d.count(r)
	for len(d.order) > 0 && d.waiting[d.order[0]] == nil {
		d.order = d.order[1:]
	}
}

// settleOldest counts the lookup that waits longest: it was probably given up.
func (d *Demand) settleOldest() {
	for len(d.order) > 0 {
		key := d.order[0]
		d.order = d.order[1:]
		if r := d.waiting[key]; r != nil {
			d.settle(key, r, r.arena)
			return
		}
	}
}

// count counts a lookup or a store.
func (d *Demand) count(r *request) {
	if len(r.pages) == 0 || r.shape.pagesPerChunk < 1 || r.shape.pageBytes < 1 {
		return
	}
	d.books.Lock()
	defer d.books.Unlock()
	if d.books.reuse != nil {
		d.books.reuse.note(r, d.now)
		d.draw(r)
	}
	d.record(r)
}

// draw counts a request in the curve, and begins it anew when the arena has another size or
// another kind of pages is asked for more. d.books is locked.
func (d *Demand) draw(r *request) {
	c := d.books.curve
	if c != nil && c.outdated(d.cfg.ArenaBytes(), d.now) {
		c = nil
	}
	if c == nil {
		var err error
		if c, err = newCurve(&d.cfg, r.shape, d.now); err != nil {
			return
		}
		d.books.curve = c
	}
	c.count(r)
}

// Dropped returns how many requests were not watched, because the reader had no time for them.
func (d *Demand) Dropped() uint64 {
	if d == nil {
		return 0
	}
	return d.dropped.Load()
}

// Reuse returns how chunks were used again. ok is false if that is not watched.
func (d *Demand) Reuse() (r Reuse, ok bool) {
	if d == nil || d.cfg.MemoryBytes == 0 {
		return Reuse{}, false
	}
	d.books.Lock()
	defer d.books.Unlock()
	return d.books.reuse.report(), true
}

// Curve returns what arenas of other sizes would have hit. ok is false if that is not watched.
func (d *Demand) Curve() (c Curve, ok bool) {
	if d == nil || d.cfg.MemoryBytes == 0 {
		return Curve{}, false
	}
	d.books.Lock()
	defer d.books.Unlock()
	if d.books.curve == nil {
		return Curve{Points: []Point{}}, true
	}
	return d.books.curve.report(), true
}
