package connector

import (
	"hash/maphash"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"lookaside/ipc/wire"
	"lookaside/tiers/engine"
	"lookaside/tiers/stack"
	"lookaside/tiers/why"
)

// endsKept is how many lookups are remembered.
const endsKept = 4096

// ends remembers how the last lookups ended, so that people can ask why a request missed. Its
// memory is fixed, 1.5 MiB, and it allocates nothing.
type ends struct {
	mu sync.Mutex // guards all of it
	// The ring. The numbers of the lookups lie apart, so that a search by number reads little, and
	// so do hashes of the requests whose end was counted with this lookup; 0: none.
	lookups []uint64
	counted []uint64
	list    []end
	next    int
	seed    maphash.Seed
}

// end is one lookup.
type end struct {
	session  uint64
	name     uint64 // a hash of the engine and the request; 0: the request has no name
	space    engine.SpaceID
	request  [wire.MaxRequestBytes]byte
	length   uint8 // of request
	answered bool
	again    bool // the end of its request was counted before
	admitted bool
	reason   why.Reason // the client's own; End: none
	at       time.Time
	took     time.Duration
	first    int
	asked    int
	pages    int
	absence  engine.Absence
	from     stack.Sources

	tokens, found, loaded, own uint32 // as wire.Prefilled has them, once admitted
}

// begin notes a lookup. It replaces the oldest.
func (e *ends) begin(ses *session, m *wire.Lookup, asked int, at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.list == nil {
		e.lookups, e.list = make([]uint64, endsKept), make([]end, endsKept)
		e.counted, e.seed = make([]uint64, endsKept), maphash.MakeSeed()
	}
	e.lookups[e.next], e.counted[e.next] = m.Lookup, 0
	x := &e.list[e.next]
	*x = end{session: ses.id, space: ses.space.id, at: at, first: int(m.FirstPage), asked: asked,
		length: uint8(len(m.Request))}
	copy(x.request[:], m.Request)
	if len(m.Request) > 0 {
		x.name = max(1, maphash.String(e.seed, ses.key.id)^maphash.Bytes(e.seed, m.Request))
	}
	e.next = (e.next + 1) % endsKept
}

// find returns the last lookup of a session that has this number, or nil. The caller holds e.mu.
func (e *ends) find(session, lookup uint64) *end {
	if i := e.index(session, lookup); i >= 0 {
		return &e.list[i]
	}
	return nil
}

// index returns where find's lookup is; -1: nowhere.
func (e *ends) index(session, lookup uint64) int {
	for k := range e.lookups {
		i := (e.next - 1 - k + 2*endsKept) % endsKept
		if e.lookups[i] == lookup && e.list[i].session == session {
			return i
		}
	}
	return -1
}

// answer notes how a lookup ended. It returns false if the end of its request was counted before,
// and otherwise takes it as counted now.
func (e *ends) answer(session, lookup uint64, pages int, a engine.Absence, from stack.Sources,
	took time.Duration) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	i := e.index(session, lookup)
	if i < 0 {
		return true
	}
	x := &e.list[i]
	x.answered, x.pages, x.absence, x.from, x.took = true, pages, a, from, took
	if x.name == 0 {
		return true
	}
	if x.again = slices.Contains(e.counted, x.name); x.again {
		return false
	}
	e.counted[i] = x.name
	return true
}

// admit notes what became of the request that a lookup was for.
func (e *ends) admit(session uint64, m *wire.Prefilled) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if x := e.find(session, m.Lookup); x != nil {
		x.admitted, x.reason = true, why.Reason(m.Reason)
		x.tokens, x.found, x.loaded, x.own = m.Tokens, m.Found, m.Loaded, m.Own
	}
}

// End is how one lookup ended.
type End struct {
	Request  string
	Session  uint64
	Space    engine.SpaceID
	At       time.Time
	Took     time.Duration
	Answered bool // false: it still waits for a tier, or was given up
	First    int  // page
	Asked    int  // pages from there on
	Pages    int  // of these, found
	Why      engine.Absence
	From     stack.Sources
	// Admitted is set once the engine has begun with the request. Of its Tokens that the engine's
	// own cache did not have it found and loaded some; it had Own others. Reason is why it did not
	// take what was found; why.End: it did.
	Admitted                   bool
	Reason                     why.Reason
	Tokens, Found, Loaded, Own int
}

// Ends returns the last lookups for requests whose name begins with a text, newest first, at most
// limit. Of those that were not their request's first, such as those of states, it returns a few.
func (s *Server) Ends(request string, limit int) (out []End) {
	e := &s.ends
	e.mu.Lock()
	defer e.mu.Unlock()
	again := map[string]int{} // by request
	for k := range e.list {
		x := &e.list[(e.next-1-k+2*endsKept)%endsKept]
		name := string(x.request[:x.length])
		if x.at.IsZero() || name == "" || !strings.HasPrefix(name, request) {
			continue
		}
		if x.again && !x.admitted {
			if again[name]++; again[name] > max(1, limit/4) {
				continue
			}
		}
		if len(out) == limit {
			break
		}
		out = append(out, End{Request: name, Session: x.session, Space: x.space, At: x.at,
			Took: x.took, Answered: x.answered, First: x.first, Asked: x.asked, Pages: x.pages,
			Why: x.absence, From: x.from, Admitted: x.admitted, Reason: x.reason,
			Tokens: int(x.tokens), Found: int(x.found), Loaded: int(x.loaded), Own: int(x.own)})
	}
	return out
}

// noteAdmission counts what became of a request, and why its engine did not take what was found.
func (s *Server) noteAdmission(ses *session, m *wire.Prefilled) {
	s.count.prefilled(m, ses.secondsPerToken())
	if m.Reason != 0 && int(m.Reason) < why.Reasons {
		tokens := m.Tokens - m.Loaded
		if r := why.Reason(m.Reason); r == why.EngineHad {
			tokens = m.Own
		}
		s.count.misses.add(why.Reason(m.Reason), int(tokens)/ses.space.geometry.PageTokens)
	}
	if m.Lookup != 0 {
		s.ends.admit(ses.id, m)
	}
}

// appendSources writes where pages lay, if not all of them were in the arena.
func (s *Server) appendSources(f *stack.Sources, buf []byte) []byte {
	below := f.Peers
	for _, n := range f.Tiers {
		below += n
	}
	if below == 0 {
		return buf
	}
	add := func(name string, n int) {
		if n == 0 || len(buf)+len(name)+22 > wire.MaxSourcesBytes {
			return
		}
		if len(buf) > 0 {
			buf = append(buf, ", "...)
		}
		buf = append(append(buf, name...), ' ')
		buf = strconv.AppendInt(buf, int64(n), 10)
	}
	add("arena", f.Arena)
	add("peers", f.Peers)
	for i, name := range s.stack.TierNames() {
		add(name, f.Tiers[i])
	}
	return buf
}

// Sources writes where pages lay, if not all of them were in the arena.
func (s *Server) Sources(f stack.Sources) string { return string(s.appendSources(&f, nil)) }
