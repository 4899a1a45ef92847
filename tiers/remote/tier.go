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
	// maxVariants is how many of the chunks that begin with one page are looked at for one that has
	// more of it than the names say.
	maxVariants = 64
	// window is how many names are asked for at once.
	window = 512
	// patience bounds the calls whose context has no deadline.
	patience = time.Minute
)

// variant is a chunk that begins with a certain page.
type variant struct {
	name  name
	there bool // it was seen; else something only said so
}

// look says what of the chunks that begin with a page is wanted.
type look uint8

const (
	// all that are a beginning of the run, and of the others the newest maxVariants
	lookForPages look = iota
	lookForStore      // the run itself, and of the others the newest maxVariants
	lookForAll        // all
)

// objects is a service that keeps objects. Errors are tiers.ErrNotFound, ErrBusy or ErrCorrupt, or
// failures, on which explain has the last word.
type objects interface {
	// has sets there for the objects that are there, in their order, up to the first that is not.
	has(ctx context.Context, names []name, there []bool) error
	// variants lists for each run of one chunk objects that begin with its first page.
	variants(ctx context.Context, runs []tiers.Run, look look) ([][]variant, error)
	// headers reads headers and says for each what it read, which is valid during the call.
	headers(ctx context.Context, names []name, each func(i int, b []byte, err error))
	// fetch calls begin of each with its header and end when the bytes that begin returned were
	// read, or with an error.
	fetch(ctx context.Context, fetches []*fetch)
	// put calls begin of each, writes what it returns, and calls end.
	put(ctx context.Context, puts []*put)
	// remove removes objects, there or not.
	remove(ctx context.Context, names []name) error
	// clear removes all objects of a space, or with the zero Fingerprint all, and counts them.
	clear(ctx context.Context, fp tiers.Fingerprint) (int, error)
	check(ctx context.Context) error
	// explain makes of a failure what an operator can read: what to do about it, and no secrets.
	explain(err error) error
	// close ends what is under way.
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

// begin is the beginning of each call; end must be called if there is no error. The context it
// returns ends also when the tier is closed.
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

// failure is the error of a call that met err.
func (t *Tier) failure(ctx context.Context, err error) error {
	if err == nil || errors.Is(err, tiers.ErrNotFound) || errors.Is(err, tiers.ErrBusy) ||
		errors.Is(err, tiers.ErrCorrupt) {
		return err
	}
	var timeout net.Error
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.As(err, &timeout) && timeout.Timeout() {
		// Connections have the deadline of the context, and may be a moment ahead of it.
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

// found is the chunk that has the most of a run of one chunk.
type found struct {
	name  name
	pages int // 0: there is none
	// shorter are the chunks that a chunk of all the run makes needless: beginnings of it, unless
	// there are so many others that one that needs only the beginning might not be told that the
	// longer one has it.
	shorter []name
}

// find finds chunks for runs of one chunk each.
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
			continue // no other has it all
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
		// who loads it will remove it
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

// Contains implements tiers.Tier. It asks the server.
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

// valid refuses transfers that no caller may send.
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
	// Chunks that are not there as such, but perhaps as the beginning of others.
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

// loaded is the error of a load, after what was bad is removed.
func (t *Tier) loaded(ctx context.Context, n name, err error) error {
	if errors.Is(err, tiers.ErrCorrupt) {
		t.corrupt.Add(1)
		if rerr := t.objects.remove(ctx, []name{n}); rerr != nil {
			err = fmt.Errorf("%w; and it could not be removed: %w", err, t.failure(ctx, rerr))
		}
	}
	return t.failure(ctx, err)
}

// Store implements tiers.Tier. It is done when the server has said so; how durable that is, is the
// server's matter.
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
						// they are of no use, and do no harm
						_ = t.objects.remove(ctx, f[i].shorter)
					}
					done(at[i], t.failure(ctx, err))
				}})
		}
	}
	t.objects.put(ctx, puts)
}

// Drop implements tiers.Tier. Where the run's last chunk is partly filled it has to look through
// all that begins with the same page, in Redis through all keys.
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
		case errors.Is(herr, tiers.ErrCorrupt): // nobody can load it
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

// Check asks the server whether it lets us in. Its error says which setting to look at. A tier
// whose server is away works when it is back.
func (t *Tier) Check(ctx context.Context) error {
	ctx, end, err := t.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	return t.failure(ctx, t.objects.check(ctx))
}

// Stats implements tiers.Tier. What others keep on the server is not told from ours, so how much
// there is of it is not known.
func (t *Tier) Stats() tiers.TierStats {
	return tiers.TierStats{Kind: t.kind, Lossy: t.codec.Lossy(), CapacityBytes: -1, UsedBytes: -1,
		Chunks: -1, Pages: -1, Corrupt: t.corrupt.Load(), Detail: t.detail}
}

// Close implements tiers.Tier. Calls under way end with ErrClosed.
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

// secrets are what must not be shown.
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

// scrub is a text of a server's, or of a library's, as it may be shown: short, printable, and
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
