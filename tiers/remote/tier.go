package remote

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/serde"
)

const (
	// maxVariants bounds the headers that one lookup reads to find a chunk whose first pages match
	// although its name does not show it.
	maxVariants = 64
	// window is how many names one request asks for.
	window = 512
	// patience is the deadline of calls whose context has none.
	patience = time.Minute
)

// variant is a chunk that begins with a given page.
type variant struct {
	name  name
	there bool // it was seen; otherwise an index named it
}

// look says which of the chunks that begin with a page are wanted.
type look uint8

const (
	// all beginnings of the run, and the newest maxVariants of the others
	lookForPages look = iota
	lookForStore      // the run itself, and the newest maxVariants of the others
	lookForAll        // all
)

// objects is a service that keeps objects. It returns tiers.ErrNotFound, ErrBusy, ErrCorrupt, or a
// failure, which explain turns into text.
type objects interface {
	// has sets there for the objects that exist, in order, up to the first that does not.
	has(ctx context.Context, names []name, there []bool) error
	// variants returns, for each run of one chunk, objects that begin with its first page.
	variants(ctx context.Context, runs []tiers.Run, look look) ([][]variant, error)
	// headers reads headers and calls each with every one. b is valid during the call.
	headers(ctx context.Context, names []name, each func(i int, b []byte, err error))
	// fetch calls begin of each fetch with its header. It calls end when the bytes that begin
	// returned are read, or with an error.
	fetch(ctx context.Context, fetches []*fetch)
	// put calls begin of each put, writes what begin returns, and calls end.
	put(ctx context.Context, puts []*put)
	// remove removes objects; missing ones are no error.
	remove(ctx context.Context, names []name) error
	// clear removes and counts all objects of a space, or of all spaces for the zero Fingerprint.
	clear(ctx context.Context, fp tiers.Fingerprint) (int, error)
	check(ctx context.Context) error
	// explain returns an error that an operator can act on, without secrets.
	explain(err error) error
	// close ends the calls under way.
	close()
}

// Tier is a tiers.Tier on another machine.
type Tier struct {
	kind    string
	detail  string
	codec   serde.Codec
	objects objects

	closed  context.Context // ends when Close begins
	end     context.CancelCauseFunc
	corrupt atomic.Uint64

	mu      sync.Mutex // guards closing, and calls.Add against calls.Wait
	closing bool
	calls   sync.WaitGroup
}

func newTier(kind, detail, codec string, o objects) *Tier {
	t := &Tier{kind: kind, detail: detail, objects: o}
	t.codec, _ = serde.New(codec) // the options were validated
	t.closed, t.end = context.WithCancelCause(context.Background())
	return t
}

// begin starts a call. Without an error the caller must call end. The context ends also when the
// tier is closed.
func (t *Tier) begin(ctx context.Context) (both context.Context, end func(), err error) {
	t.mu.Lock()
	if t.closing {
		t.mu.Unlock()
		return nil, nil, tiers.ErrClosed
	}
	t.calls.Add(1)
	t.mu.Unlock()
	both, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(t.closed, func() { cancel(tiers.ErrClosed) })
	release := context.CancelFunc(func() {})
	if _, ok := ctx.Deadline(); !ok {
		both, release = context.WithTimeoutCause(both, patience,
			fmt.Errorf("the server took longer than %v", patience))
	}
	end = func() {
		stop()
		release()
		cancel(nil)
		t.calls.Done()
	}
	if ctx.Err() != nil {
		end()
		return nil, nil, context.Cause(ctx)
	}
	return both, end, nil
}

// failure returns the error of a call that failed with err.
func (t *Tier) failure(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, tiers.ErrNotFound) || errors.Is(err, tiers.ErrBusy) ||
		errors.Is(err, tiers.ErrCorrupt) {
		return err
	}
	var timeout net.Error
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &timeout) && timeout.Timeout() {
		// A connection's deadline is that of the context, and may fire a moment earlier.
		if d, ok := ctx.Deadline(); ok && time.Until(d) < 100*time.Millisecond {
			<-ctx.Done()
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if t.closed.Err() != nil { // the context is about to end
		return tiers.ErrClosed
	}
	return t.objects.explain(err)
}

// found is the chunk with the most pages of a run of one chunk.
type found struct {
	name  name
	pages int // 0: there is none
	// shorter are chunks that a chunk of the whole run makes needless: its beginnings. It is empty
	// if there are so many variants that a reader of the beginning might not find the longer chunk.
	shorter []name
}

// find finds the best chunk for each run of one chunk.
func (t *Tier) find(ctx context.Context, runs []tiers.Run, look look) ([]found, error) {
	lists, err := t.objects.variants(ctx, runs, look)
	if err != nil {
		return nil, err
	}
	out := make([]found, len(runs))
	type doubt struct{ run, pages int }
	var unsure []name
	var of []doubt
	for i, list := range lists {
		run, f := runs[i], &out[i]
		for _, v := range list {
			n, sure := v.name.agrees(run)
			if sure && v.there && n > f.pages {
				f.name, f.pages = v.name, n
			}
			if sure && v.name.pages == n && n < run.Pages() {
				f.shorter = append(f.shorter, v.name)
			}
		}
		if len(list) >= maxVariants {
			f.shorter = nil
		}
		if look == lookForStore && run.Pages() == run.Space.Geometry.PagesPerChunk {
			continue // no other has the whole run
		}
		looks := 0
		for _, v := range list {
			_, sure := v.name.agrees(run)
			if most := min(v.name.pages, run.Pages()); (!v.there || !sure) && most > f.pages &&
				looks < maxVariants {
				looks++
				unsure, of = append(unsure, v.name), append(of, doubt{i, most})
			}
		}
	}
	if len(unsure) == 0 {
		return out, nil
	}
	var failed error
	t.objects.headers(ctx, unsure, func(i int, b []byte, err error) {
		f := &out[of[i].run]
		var h *header
		if err == nil {
			h, err = parseHeader(b)
		}
		switch {
		// the caller's load will remove it
		case errors.Is(err, tiers.ErrNotFound), errors.Is(err, tiers.ErrCorrupt):
		case err != nil:
			failed = err
		case unsure[i].verify(h) == nil:
			if n := h.agree(runs[of[i].run]); n > f.pages {
				f.name, f.pages = unsure[i], n
			}
		}
	})
	return out, failed
}

// Contains implements tiers.Tier. It sends a request to the server.
func (t *Tier) Contains(ctx context.Context, run tiers.Run, held []uint16) error {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	if len(held) != run.Chunks() {
		return fmt.Errorf("%w: %d chunks, room for the answers of %d", tiers.ErrInvalid,
			run.Chunks(), len(held))
	}
	clear(held)
	for from := 0; from < len(held); from += window {
		n := min(window, len(held)-from)
		names, there := make([]name, n), make([]bool, n)
		for i := range names {
			c := run.Chunk(from + i)
			names[i] = nameOf(c, c.Pages())
		}
		if err := t.objects.has(ctx, names, there); err != nil {
			return t.failure(ctx, err)
		}
		for i, yes := range there {
			if yes {
				held[from+i] = uint16(names[i].pages)
				continue
			}
			if run.Space.Geometry.PagesPerChunk == 1 {
				return nil
			}
			f, err := t.find(ctx, []tiers.Run{run.Chunk(from + i)}, lookForPages)
			if err == nil {
				held[from+i] = uint16(f[0].pages)
			}
			return t.failure(ctx, err)
		}
	}
	return nil
}

// valid returns an error for a transfer that no caller may send.
func valid(t tiers.Transfer) error {
	g := t.Space.Geometry
	if n := t.Pages(); len(t.Hashes) != n*g.DigestBytes || n < 1 || n > g.PagesPerChunk ||
		t.First%g.PagesPerChunk != 0 || int64(len(t.Bytes)) != int64(n)*g.PageBytes {
		return fmt.Errorf("%w: transfer of %d bytes for %d pages from %d on", tiers.ErrInvalid,
			len(t.Bytes), n, t.First)
	}
	return nil
}

// Load implements tiers.Tier.
func (t *Tier) Load(ctx context.Context, transfers []tiers.Transfer, done func(i int, err error)) {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		for i := range transfers {
			done(i, err)
		}
		return
	}
	defer end()
	var mu sync.Mutex // guards again
	var again []int
	var fetches []*fetch
	for i, tr := range transfers {
		if err := valid(tr); err != nil {
			done(i, err)
			continue
		}
		fetches = append(fetches, &fetch{tier: t, name: nameOf(tr.Run, tr.Pages()), run: tr.Run,
			dst: tr.Bytes, done: func(err error) {
				if errors.Is(err, tiers.ErrNotFound) &&
					tr.Pages() < tr.Space.Geometry.PagesPerChunk {
					mu.Lock()
					again = append(again, i)
					mu.Unlock()
					return
				}
				done(i, t.loaded(ctx, nameOf(tr.Run, tr.Pages()), err))
			}})
	}
	t.objects.fetch(ctx, fetches)
	if len(again) == 0 {
		return
	}
	// These do not exist under their names, but perhaps as the beginning of others.
	runs := make([]tiers.Run, len(again))
	for i, at := range again {
		runs[i] = transfers[at].Run
	}
	f, err := t.find(ctx, runs, lookForPages)
	fetches = fetches[:0]
	for i, at := range again {
		tr := transfers[at]
		switch {
		case err != nil:
			done(at, t.failure(ctx, err))
		case f[i].pages < tr.Pages():
			done(at, tiers.ErrNotFound)
		default:
			fetches = append(fetches, &fetch{tier: t, name: f[i].name, run: tr.Run, dst: tr.Bytes,
				done: func(err error) {
					done(at, t.loaded(ctx, f[i].name, err))
				}})
		}
	}
	t.objects.fetch(ctx, fetches)
}

// loaded returns the error of a load. It removes a bad object.
func (t *Tier) loaded(ctx context.Context, n name, err error) error {
	if errors.Is(err, tiers.ErrCorrupt) {
		t.corrupt.Add(1)
		if rerr := t.objects.remove(ctx, []name{n}); rerr != nil {
			err = fmt.Errorf("%w; and it could not be removed: %w", err, t.failure(ctx, rerr))
		}
	}
	return t.failure(ctx, err)
}

// Store implements tiers.Tier. A chunk is stored once the server says so; its durability is the
// server's.
func (t *Tier) Store(ctx context.Context, transfers []tiers.Transfer, done func(i int, err error)) {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		for i := range transfers {
			done(i, err)
		}
		return
	}
	defer end()
	for from := 0; from < len(transfers); from += window {
		t.store(ctx, transfers[from:min(from+window, len(transfers))],
			func(i int, err error) { done(from+i, err) })
	}
}

func (t *Tier) store(ctx context.Context, transfers []tiers.Transfer, done func(i int, err error)) {
	var at []int
	var runs []tiers.Run
	for i, tr := range transfers {
		if err := valid(tr); err != nil {
			done(i, err)
			continue
		}
		at, runs = append(at, i), append(runs, tr.Run)
	}
	f, err := t.find(ctx, runs, lookForStore)
	var puts []*put
	for i, run := range runs {
		switch {
		case err != nil:
			done(at[i], t.failure(ctx, err))
		case f[i].pages == run.Pages():
			done(at[i], nil)
		default:
			puts = append(puts, &put{tier: t, name: nameOf(run, run.Pages()), run: run,
				src: transfers[at[i]].Bytes, done: func(err error) {
					if err == nil && len(f[i].shorter) > 0 {
						// they are needless but harmless
						_ = t.objects.remove(ctx, f[i].shorter)
					}
					done(at[i], t.failure(ctx, err))
				}})
		}
	}
	t.objects.put(ctx, puts)
}

// Drop implements tiers.Tier. If the run's last chunk is partly filled, Drop searches all objects
// that begin with the same page; in Redis it searches all keys.
func (t *Tier) Drop(ctx context.Context, run tiers.Run) error {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	for i := range run.Chunks() {
		if err := t.drop(ctx, run.Chunk(i)); err != nil {
			return t.failure(ctx, err)
		}
	}
	return nil
}

func (t *Tier) drop(ctx context.Context, run tiers.Run) error {
	lists, err := t.objects.variants(ctx, []tiers.Run{run}, lookForAll)
	if err != nil {
		return err
	}
	var gone, longer []name
	for _, v := range lists[0] {
		switch n, sure := v.name.agrees(run); {
		case sure && n == min(v.name.pages, run.Pages()):
			gone = append(gone, v.name)
		case !sure && v.name.pages > run.Pages():
			longer = append(longer, v.name)
		}
	}
	t.objects.headers(ctx, longer, func(i int, b []byte, herr error) {
		var h *header
		if herr == nil {
			h, herr = parseHeader(b)
		}
		switch {
		case errors.Is(herr, tiers.ErrNotFound):
		case errors.Is(herr, tiers.ErrCorrupt): // it cannot be loaded
		case herr != nil:
			err = herr
		case longer[i].verify(h) == nil && h.agree(run) == run.Pages():
			gone = append(gone, longer[i])
		}
	})
	if err != nil || len(gone) == 0 {
		return err
	}
	return t.objects.remove(ctx, gone)
}

// Clear implements tiers.Tier.
func (t *Tier) Clear(ctx context.Context, fp tiers.Fingerprint) (int, error) {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	n, err := t.objects.clear(ctx, fp)
	return n, t.failure(ctx, err)
}

// Check verifies that the server accepts us. Its error names the setting to look at. A tier whose
// server is down works when the server is back.
func (t *Tier) Check(ctx context.Context) error {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	return t.failure(ctx, t.objects.check(ctx))
}

// Stats implements tiers.Tier. Sizes are unknown, because others keep objects on the server too.
func (t *Tier) Stats() tiers.TierStats {
	return tiers.TierStats{Kind: t.kind, Lossy: t.codec.Lossy(), CapacityBytes: -1, UsedBytes: -1,
		Chunks: -1, Pages: -1, Corrupt: t.corrupt.Load(), Detail: t.detail}
}

// Close implements tiers.Tier. Calls under way return ErrClosed.
func (t *Tier) Close() error {
	t.mu.Lock()
	first := !t.closing
	t.closing = true
	t.mu.Unlock()
	if first {
		t.end(tiers.ErrClosed)
		t.objects.close()
	}
	t.calls.Wait()
	return nil
}

// secrets are strings that must not be shown.
type secrets struct {
	mu  sync.Mutex
	all []string
}

func (s *secrets) add(secret string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, old := range s.all {
		if old == secret {
			return
		}
	}
	if secret != "" {
		s.all = append(s.all, secret)
		s.all = s.all[max(0, len(s.all)-16):]
	}
}

// scrub returns a server's or library's text in a form that may be shown: short, printable, and
// without secrets.
func (s *secrets) scrub(text string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, secret := range s.all {
		text = strings.ReplaceAll(text, secret, "***")
	}
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == 0xfffd {
			return '.'
		}
		return r
	}, text)
	if len(text) > 300 {
		text = strings.ToValidUTF8(text[:300], "") + "…"
	}
	return text
}
