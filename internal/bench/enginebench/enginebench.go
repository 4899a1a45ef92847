// Package enginebench measures the engine with many held pages: lookups and stores a second, the
// latency of a long hit, and memory a page. Beside each figure it measures its limit in the same
// run: a bare loop that touches as much random memory and does nothing else.
package enginebench

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"lookaside/dax"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// hitPages is the length of the stored prompts, and of the long hit.
const hitPages = 4096

// rounds is how often each hit is measured; tests measure less.
var rounds = 1001

// pageBytes is the size of a page. The bench touches no byte of a page.
const pageBytes = 256 << 10

// Figures are the figures of one engine.
type Figures struct {
	Pages         int // held
	PagesPerChunk int
	BytesPerPage  float64 // resident, of the whole process, for each page held

	// HitsUs is the microseconds of each round's lookup of 4,096 pages. All are held, and the
	// lookup leases each of its chunks. Each round uses another prompt, whose chunks are at random
	// places.
	HitsUs []float64
	// BareUs is the limit of HitsUs in the same round. For each chunk it reads the index entry of
	// the last page, and the slot's cache line with that page's digest, at random places of memory
	// of the same size.
	BareUs []float64

	LookupsPerSecond float64 // of 4,096 pages; the leases are released each time
	ShortPerSecond   float64 // of 64 pages
	// StorePagesPerSecond is for stores of 256 pages, prepared and committed, each with as many
	// evictions.
	StorePagesPerSecond float64
	// FillPagesPerSecond is for filling an empty engine chunk by chunk, in memory touched for the
	// first time.
	FillPagesPerSecond float64
}

// Result has the figures for vLLM's usual chunks (16 pages) and for clients that name only whole
// chunks (1 page).
type Result struct {
	Chunked, Single Figures
}

// Run measures engines that hold the given number of pages, at least 8,192. It takes seconds for
// each million pages, and some 200 bytes of memory a page.
func Run(pages int) (Result, error) {
	if pages < 2*hitPages {
		return Result{}, fmt.Errorf("bench of %d pages: want %d or more", pages, 2*hitPages)
	}
	var r Result
	var err error
	if r.Chunked, err = run(pages, 16); err != nil {
		return Result{}, err
	}
	r.Single, err = run(pages, 1)
	return r, err
}

// random is splitmix64. It is fast, and makes any digest again from its number.
func random(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}

// digests appends the digests of pages [from, to) of a prompt.
func digests(buf []byte, prompt, from, to int) []byte {
	for page := from; page < to; page++ {
		for i := range uint64(4) {
			buf = binary.LittleEndian.AppendUint64(buf,
				random(uint64(prompt)<<32|uint64(page)<<2|i))
		}
	}
	return buf
}

const session = engine.Owner(1)

func run(pages, ppc int) (f Figures, err error) {
	prompts := pages / hitPages
	f = Figures{Pages: prompts * hitPages, PagesPerChunk: ppc}
	before, err := residentBytes()
	if err != nil {
		return f, err
	}
	e, err := engine.New(engine.Config{OwnerShare: 1, ArenaLimitBytes: int64(f.Pages) * pageBytes,
		Seed: 1, Keep: true})
	if err != nil {
		return f, err
	}
	defer e.Close()
	// Regions have at most a quarter of the slots, as in an arena that has grown.
	chunks := f.Pages / ppc
	for i := range 4 {
		n := chunks*(i+1)/4 - chunks*i/4
		if err := e.AddRegion(uint32(i), int64(n)*int64(ppc)*pageBytes); err != nil {
			return f, err
		}
	}
	space, err := e.OpenSpace(tiers.Fingerprint{}, tiers.Geometry{PageBytes: pageBytes,
		PagesPerChunk: ppc, PageTokens: 16, DigestBytes: 32})
	if err != nil {
		return f, err
	}
	if err := e.AddOwner(session, space); err != nil {
		return f, err
	}

	// Fill: one chunk of each prompt after the other, with the prompts in another order each time,
	// so that a prompt's chunks are at random places.
	buf := make([]byte, 0, hitPages*32)
	var grants []engine.Grant
	order := make([]int, prompts)
	for i := range order {
		order[i] = i
	}
	seed := uint64(1)
	pick := func(n int) int {
		seed++
		return int(random(seed<<8) % uint64(n))
	}
	store := func(prompt, from, to int) error {
		buf = buf[:0]
		var prev []byte
		if from > 0 {
			buf = digests(buf, prompt, from-1, from)
			prev = buf[:32]
		}
		n := len(buf)
		buf = digests(buf, prompt, from, to)
		var res engine.StoreResult
		var err error
		res, grants, err = e.PrepareStore(session, from, prev, buf[n:], grants[:0])
		if err != nil {
			return err
		}
		if res.Held+res.Shed > 0 {
			return fmt.Errorf("bench: a store of new pages with room for them answers %+v", res)
		}
		return e.CommitStore(session, res.Store, nil)
	}
	start := time.Now()
	for from := 0; from < hitPages; from += ppc {
		for i := range order {
			j := i + pick(len(order)-i)
			order[i], order[j] = order[j], order[i]
			if err := store(order[i], from, from+ppc); err != nil {
				return f, err
			}
		}
	}
	f.FillPagesPerSecond = float64(f.Pages) / time.Since(start).Seconds()
	after, err := residentBytes()
	if err != nil {
		return f, err
	}
	f.BytesPerPage = float64(after-before) / float64(f.Pages)
	if st := e.Stats(); st.Pages != f.Pages || st.Evictions > 0 {
		return f, fmt.Errorf("bench: %d pages stored, %d held after %d evictions", f.Pages,
			st.Pages, st.Evictions)
	}

	bare, err := newBareLoop(chunks, ppc)
	if err != nil {
		return f, err
	}
	defer bare.close()
	var looking time.Duration
	lookup := func(n int) (time.Duration, error) {
		prompt := pick(prompts)
		// like a message that has just arrived: in the cache
		buf = digests(buf[:0], prompt, 0, n)
		start := time.Now()
		got, err := e.Lookup(session, 1, 0, buf)
		took := time.Since(start)
		if err != nil || got != n {
			return 0, fmt.Errorf("bench: %d of %d held pages found: %v", got, n, err)
		}
		err = e.Cancel(session, 1)
		for e.EndSome() {
		}
		looking += time.Since(start)
		return took, err
	}
	for range rounds {
		// By turns, so that both run under the same conditions.
		took, err := lookup(hitPages)
		if err != nil {
			return f, err
		}
		f.HitsUs = append(f.HitsUs, microseconds(took))
		f.BareUs = append(f.BareUs, microseconds(bare.run(hitPages/ppc, uint64(pick(1<<30)))))
	}
	f.LookupsPerSecond = float64(rounds) / looking.Seconds()

	const short = 64
	looking = 0
	for range 20 * rounds {
		if _, err := lookup(short); err != nil {
			return f, err
		}
	}
	f.ShortPerSecond = float64(20*rounds) / looking.Seconds()

	const storePages = 256
	stores := min(f.Pages/storePages/2, 2000)
	var storing time.Duration
	for i := range stores {
		start := time.Now()
		if err := store(prompts+i, 0, storePages); err != nil {
			return f, err
		}
		storing += time.Since(start)
	}
	f.StorePagesPerSecond = float64(stores*storePages) / storing.Seconds()
	if st := e.Stats(); st.EvictedPages < uint64(stores*storePages) {
		return f, fmt.Errorf("bench: %d pages stored into a full arena evicted %d",
			stores*storePages, st.EvictedPages)
	}
	return f, nil
}

func microseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// bareLoop has memory of the size of the engine's tables that a lookup of whole chunks reads.
type bareLoop struct {
	index *dax.Table[uint64]
	slots *dax.Table[[8]uint64] // a cache line each
	sink  uint64
}

func newBareLoop(chunks, ppc int) (*bareLoop, error) {
	b := &bareLoop{}
	var err error
	if b.index, err = dax.NewTable[uint64](chunks * ppc * 2); err == nil {
		b.slots, err = dax.NewTable[[8]uint64](chunks)
	}
	if err != nil {
		b.close()
		return nil, err
	}
	for i := range b.index.Slice() {
		b.index.Slice()[i] = 1
	}
	for i := range b.slots.Slice() {
		b.slots.Slice()[i][0] = 1
	}
	return b, nil
}

func (b *bareLoop) close() {
	if b.index != nil {
		b.index.Close()
	}
	if b.slots != nil {
		b.slots.Close()
	}
}

// run reads one entry and one slot's line n times, each at a random place that does not depend on
// earlier reads.
func (b *bareLoop) run(n int, seed uint64) time.Duration {
	index, slots := b.index.Slice(), b.slots.Slice()
	start := time.Now()
	sum := uint64(0)
	for i := range uint64(n) {
		x := random(seed + i)
		s := &slots[(x&0xFFFFFFFF)*uint64(len(slots))>>32]
		// the last four words are a digest
		sum += index[(x>>32)*uint64(len(index))>>32] + s[0] + s[4] + s[5] + s[6] + s[7]
	}
	took := time.Since(start)
	b.sink += sum
	return took
}

// residentBytes returns the process's anonymous resident memory, after the Go heap has returned
// what it can.
func residentBytes() (int64, error) {
	debug.FreeOSMemory()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kb, err := strconv.ParseInt(
				strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("no RssAnon in /proc/self/status")
}
