package demand

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"io"
	"sync"
	"time"

	"lookaside/internal/recording"
)

// MaxRecordings bounds the recordings at a time.
const MaxRecordings = 4

// recordingBytes bounds what a recording may have that was not read yet. Requests beyond it are
// dropped and counted.
const recordingBytes = 4 << 20

// ErrTooMany is returned by Record if there are MaxRecordings.
var ErrTooMany = errors.New("too many recordings are under way")

// ErrOff is returned by Record if nothing reads the requests any more.
var ErrOff = errors.New("the sidecar is shutting down")

// A Recording is a stream of the requests, in the form of package recording, from its beginning to
// its end. Read and Stop may be called from two goroutines.
type Recording struct {
	d   *Demand
	key cipher.Block // by which pages are named in it; nobody else has it

	mu       sync.Mutex
	cond     sync.Cond
	buf      []byte
	stopping bool // Stop was called
	ended    bool // nothing will be added

	// The reader's of the ring alone.
	spaces  map[shape]int
	last    time.Time
	dropped uint64 // requests that are not in buf, and of which it does not say so yet
	pages   []uint64
}

// Record begins a recording. Stop and then reading it to its end, or Abandon, must end it.
func (d *Demand) Record() (*Recording, error) {
	if d == nil {
		return nil, ErrOff
	}
	var key [16]byte
	_, _ = rand.Read(key[:]) // it never fails
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, err
	}
	r := &Recording{d: d, key: block, spaces: map[shape]int{}, buf: recording.AppendStart(nil)}
	r.cond.L = &r.mu
	d.books.Lock()
	defer d.books.Unlock()
	if d.ended {
		return nil, ErrOff
	}
	if len(d.books.recordings) >= MaxRecordings {
		return nil, ErrTooMany
	}
	if d.ring == nil {
		d.mu.Lock()
		d.ring = make([]uint64, ringWords)
		d.mu.Unlock()
	}
	d.books.recordings = append(d.books.recordings, r)
	d.on.Store(true)
	return r, nil
}

// Read implements io.Reader. It waits until there is something.
func (r *Recording) Read(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.buf) == 0 && !r.ended {
		r.cond.Wait()
	}
	if len(r.buf) == 0 {
		return 0, io.EOF
	}
	n := copy(b, r.buf)
	r.buf = append(r.buf[:0], r.buf[n:]...)
	return n, nil
}

// Stop has the recording end with what was noted before the call.
func (r *Recording) Stop() {
	r.mu.Lock()
	r.stopping = true
	r.mu.Unlock()
	r.d.ringBell()
}

// Abandon ends a recording at once. Read returns io.EOF.
func (r *Recording) Abandon() {
	r.d.books.Lock()
	defer r.d.books.Unlock()
	r.d.leave(r)
	r.finish(false)
}

// leave takes a recording from those that are under way. d.books is locked.
func (d *Demand) leave(r *Recording) {
	for i, other := range d.books.recordings {
		if other == r {
			d.books.recordings = append(d.books.recordings[:i:i], d.books.recordings[i+1:]...)
			break
		}
	}
	d.on.Store(len(d.books.recordings) > 0 || d.cfg.MemoryBytes > 0)
}

// finish ends the stream; whole: with the record that says so. d.books is locked.
func (r *Recording) finish(whole bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return
	}
	r.ended = true
	if whole {
		r.noteDropped()
		r.buf = recording.Append(r.buf, &recording.Record{Kind: recording.KindEnd})
	} else {
		r.buf = nil
	}
	r.cond.Broadcast()
}

// stopping returns the recordings that are to end.
func (d *Demand) stopping() (list []*Recording) {
	d.books.Lock()
	defer d.books.Unlock()
	for _, r := range d.books.recordings {
		r.mu.Lock()
		if r.stopping {
			list = append(list, r)
		}
		r.mu.Unlock()
	}
	return list
}

// end ends recordings, after everything noted before was added.
func (d *Demand) end(list []*Recording) {
	d.books.Lock()
	defer d.books.Unlock()
	if n := d.dropped.Load(); n > d.reported {
		for _, r := range d.books.recordings {
			r.dropped += n - d.reported
		}
		d.reported = n
	}
	for _, r := range list {
		d.leave(r)
		r.finish(true)
	}
}

// endAll ends all recordings, for good.
func (d *Demand) endAll() {
	d.books.Lock()
	defer d.books.Unlock()
	d.ended = true
	for len(d.books.recordings) > 0 {
		r := d.books.recordings[0]
		d.leave(r)
		r.finish(true)
	}
	d.on.Store(false)
}

// record adds a request to all recordings. d.books is locked.
func (d *Demand) record(q *request) {
	for _, r := range d.books.recordings {
		r.add(q, d.now, d.arenaBytes())
	}
}

func (d *Demand) arenaBytes() int64 {
	if d.cfg.ArenaBytes == nil {
		return 1
	}
	return max(d.cfg.ArenaBytes(), 1)
}

// noteDropped says in the stream how many requests are missing. r.mu is held.
func (r *Recording) noteDropped() {
	if r.dropped > 0 {
		r.buf = recording.Append(r.buf, &recording.Record{Kind: recording.KindDropped,
			Dropped: r.dropped})
		r.dropped = 0
	}
}

// add adds a request.
func (r *Recording) add(q *request, now time.Time, arena int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	number, known := r.spaces[q.shape]
	if len(r.buf)+8*len(q.pages)+256 > recordingBytes || len(q.pages) > recording.MaxPages ||
		!known && len(r.spaces) == recording.MaxSpaces {
		r.dropped++
		return
	}
	r.noteDropped()
	if !known {
		number = len(r.spaces)
		r.spaces[q.shape] = number
		r.buf = recording.Append(r.buf, &recording.Record{Kind: recording.KindSpace,
			Space: recording.Space{PageBytes: q.shape.pageBytes, ArenaBytes: arena,
				PageTokens: max(q.shape.pageTokens, 1), PagesPerChunk: q.shape.pagesPerChunk}})
	}
	if r.last.IsZero() {
		r.last = now
	}
	after := now.Sub(r.last).Milliseconds()
	r.last = r.last.Add(time.Duration(after) * time.Millisecond)
	rec := recording.Record{Kind: recording.KindStore, Number: number, AfterMs: after,
		First: q.first, Pages: r.pages[:0]}
	if q.kind != store {
		rec.Kind, rec.Held, rec.TierHeld = recording.KindLookup, q.held, q.held-q.arena
	}
	if q.prev != 0 {
		rec.Prev = r.name(q.prev)
	}
	for _, p := range q.pages {
		rec.Pages = append(rec.Pages, r.name(p))
	}
	r.pages = rec.Pages
	r.buf = recording.Append(r.buf, &rec)
	r.cond.Signal()
}

// name returns a page's name in the recording. AES is a permutation that nobody without the key can
// tell from a random one.
func (r *Recording) name(page uint64) uint64 {
	var block [aes.BlockSize]byte
	binary.LittleEndian.PutUint64(block[:], page)
	r.key.Encrypt(block[:], block[:])
	return binary.LittleEndian.Uint64(block[:])
}
