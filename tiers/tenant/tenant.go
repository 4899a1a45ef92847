// Package tenant has the tenants of one process: the names that requests carry, so that what they
// ask for and what is held of theirs is counted, and may have a share of a store.
//
// Names come from strangers. So a process knows a bounded number of them, each by a small ID; all
// others together are Other. A listed name (Config.Listed) always has its ID. Another name gets an
// ID when it first comes, and keeps it until it has been idle (idleAfter), no store holds anything
// of it, and a new name wants the place.
//
// On media that outlive the process, a chunk has its tenant's Key and not the name, which may be
// longer than there is room for. A tenant that was found there has no name until a request carries
// it.
package tenant

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"
)

// ID is a tenant's number in this process.
type ID uint8

const (
	None  ID = 0 // of requests without a name
	Other ID = 1 // of names for which there is no place, and of what is no name
	// first is the lowest ID of a name.
	first ID = 2
)

const (
	// MaxIDs is the number of IDs, None and Other among them.
	MaxIDs = 80
	// MaxName bounds the bytes of a name.
	MaxName = 64
	// MaxTiers bounds the tiers for which Wrote counts.
	MaxTiers = 8
)

// OtherName is the name of Other. A request that carries it is counted there.
const OtherName = "other"

// Key names a tenant on media: the beginning of the SHA-256 of its name. That of None is zero.
type Key [16]byte

func keyOf(name string) Key {
	if name == "" {
		return Key{}
	}
	sum := sha256.Sum256([]byte(name))
	return Key(sum[:])
}

// idleAfter is how long (ns) no request must have carried a name before its ID may be another's.
const idleAfter = int64(10 * time.Minute)

// Config configures a Registry.
type Config struct {
	// Listed are names that always have an ID, at most MaxIDs-2.
	Listed []string
	// Max bounds the other names that have an ID at one time. It is cut to what IDs are left.
	Max int
	// Now is a monotonic clock in nanoseconds. Default: time since the Registry was made.
	Now func() int64
}

// Registry is the tenants of one process. Its methods may be called from any goroutine.
type Registry struct {
	now func() int64
	top ID // IDs from here on are not used

	mu   sync.RWMutex
	ids  map[string]ID // by name
	keys map[Key]ID

	all [MaxIDs]entry
}

// entry is what is known of one ID.
type entry struct {
	// Guarded by Registry.mu.
	used   bool
	listed bool
	name   string // "": it is not known yet, or None
	key    Key

	life   atomic.Uint32 // rises when the ID gets another name
	stores atomic.Int32  // that hold something of it; see Registry.Hold
	seen   atomic.Int64  // when a request last carried the name

	asked, hit atomic.Uint64           // tokens
	wrote      [MaxTiers]atomic.Uint64 // bytes
}

// ValidName reports whether a request may carry a name: 1 to MaxName bytes of printable UTF-8.
func ValidName(name []byte) bool {
	if len(name) == 0 || len(name) > MaxName {
		return false
	}
	for len(name) > 0 {
		r, n := utf8.DecodeRune(name)
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return false
		}
		name = name[n:]
	}
	return true
}

// New makes a Registry. It fails if a listed name is invalid, or there are too many.
func New(c Config) (*Registry, error) {
	if c.Now == nil {
		start := time.Now()
		c.Now = func() int64 { return int64(time.Since(start)) }
	}
	r := &Registry{now: c.Now, ids: map[string]ID{}, keys: map[Key]ID{}}
	r.all[None].used = true
	r.take(Other, OtherName, keyOf(OtherName))
	r.all[Other].listed = true
	next := first
	for _, name := range c.Listed {
		if !ValidName([]byte(name)) {
			return nil, fmt.Errorf("%q is no name of a tenant: want 1 to %d bytes, printable", name,
				MaxName)
		}
		if _, there := r.ids[name]; there {
			continue
		}
		if next == MaxIDs {
			return nil, fmt.Errorf("%d tenants are listed, at most %d", len(c.Listed),
				MaxIDs-int(first))
		}
		r.take(next, name, keyOf(name))
		r.all[next].listed = true
		next++
	}
	r.top = ID(min(int(next)+max(c.Max, 0), MaxIDs))
	return r, nil
}

// take gives an ID to a name, which is "" if only its key is known. The caller holds mu.
func (r *Registry) take(id ID, name string, key Key) {
	e := &r.all[id]
	if e.used {
		delete(r.keys, e.key)
		if e.name != "" {
			delete(r.ids, e.name)
		}
		e.life.Add(1)
		e.asked.Store(0)
		e.hit.Store(0)
		for i := range e.wrote {
			e.wrote[i].Store(0)
		}
	}
	e.used, e.name, e.key = true, name, key
	e.seen.Store(r.now())
	r.keys[key] = id
	if name != "" {
		r.ids[name] = id
	}
}

// Find returns the ID of the name that a request carries. A name that is new gets one if there is a
// place. It returns None for "", and Other for what is no name. It allocates only for a new name.
func (r *Registry) Find(name []byte) ID {
	if len(name) == 0 {
		return None
	}
	r.mu.RLock()
	id, ok := r.ids[string(name)]
	r.mu.RUnlock()
	if ok {
		r.all[id].seen.Store(r.now())
		return id
	}
	if !ValidName(name) {
		return Other
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if id, ok := r.ids[string(name)]; ok {
		return id
	}
	key := keyOf(string(name))
	if id, ok := r.keys[key]; ok { // it was found on a medium
		e := &r.all[id]
		e.name = string(name)
		e.seen.Store(r.now())
		r.ids[e.name] = id
		return id
	}
	id, ok = r.place()
	if ok {
		r.take(id, string(name), key)
	}
	return id
}

// FindKey returns the ID of the tenant that a medium names by its key. One that is new gets an ID
// if there is a place.
func (r *Registry) FindKey(key Key) ID {
	if key == (Key{}) {
		return None
	}
	r.mu.RLock()
	id, ok := r.keys[key]
	r.mu.RUnlock()
	if ok {
		return id
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if id, ok := r.keys[key]; ok {
		return id
	}
	if id, ok = r.place(); ok {
		r.take(id, "", key)
	}
	return id
}

// place returns an ID for a new tenant: one that was never used, or else that of the tenant that
// has been idle for longest. If there is none it returns Other and false. The caller holds mu.
func (r *Registry) place() (ID, bool) {
	id, oldest := Other, r.now()-idleAfter
	for i := first; i < r.top; i++ {
		e := &r.all[i]
		if !e.used {
			return i, true
		}
		if seen := e.seen.Load(); !e.listed && e.stores.Load() == 0 && seen < oldest {
			id, oldest = i, seen
		}
	}
	return id, id != Other
}

// Key returns what names a tenant on media.
func (r *Registry) Key(id ID) Key {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.all[id].key
}

// Hold records that a store begins to hold something of a tenant, or with held false that it no
// longer holds anything. It returns which of the tenants that had this ID one after the other it
// is.
func (r *Registry) Hold(id ID, held bool) (life uint32) {
	e := &r.all[id]
	if held {
		e.stores.Add(1)
	} else {
		e.stores.Add(-1)
	}
	return e.life.Load()
}

// Life returns which of the tenants that had an ID one after the other has it now.
func (r *Registry) Life(id ID) uint32 { return r.all[id].life.Load() }

// Asked counts tokens that a request of a tenant asked for, and Hit those of them that were there.
func (r *Registry) Asked(id ID, tokens int) { r.all[id].asked.Add(uint64(tokens)) }

// Hit counts tokens that were there for a request of a tenant.
func (r *Registry) Hit(id ID, tokens int) { r.all[id].hit.Add(uint64(tokens)) }

// Wrote counts bytes of a tenant that were written to a tier below the arena.
func (r *Registry) Wrote(id ID, tier int, bytes int64) {
	if tier < MaxTiers {
		r.all[id].wrote[tier].Add(uint64(bytes))
	}
}

// Info is a tenant at one moment.
type Info struct {
	ID         ID
	Name       string // "": None
	Listed     bool
	Asked, Hit uint64           // tokens
	Wrote      [MaxTiers]uint64 // bytes, by tier
}

// List returns the tenants, None first.
func (r *Registry) List() []Info {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var out []Info
	for i := range r.all {
		e := &r.all[i]
		if !e.used {
			continue
		}
		info := Info{ID: ID(i), Name: e.name, Listed: e.listed, Asked: e.asked.Load(),
			Hit: e.hit.Load()}
		if i > 0 && e.name == "" { // '#' and what is on the medium, until a request carries it
			info.Name = "#" + hex.EncodeToString(e.key[:6])
		}
		for t := range e.wrote {
			info.Wrote[t] = e.wrote[t].Load()
		}
		out = append(out, info)
	}
	return out
}
