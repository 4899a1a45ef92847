package wire

import "math"

// The messages between a sidecar and a program that is a tier; see docs/tiers-elsewhere.md. The
// sidecar calls, the program replies. They have a version of their own.

// TierVersion is the version of the protocol of tiers in other processes.
const TierVersion = 1

// Limits of the messages.
const (
	MaxTierKeyBytes = 255  // the longest key
	MaxTierPieces   = 8    // of one item
	MaxTierItems    = 4096 // keys or items of one call
	MaxTierCalls    = 1024 // unanswered calls
	MaxTierHolds    = 8    // descriptors that travel with a TierHello
)

// Statuses of a [TierResult].
const (
	TierOK uint8 = iota
	TierMissing
	TierNoRoom
	TierFailed
	TierCancelled
)

func (v *visitor) tierVersion(p *uint16) { v.versionOf(p, TierVersion) }

// TierHello is the sidecar's first message. Holds descriptors travel with it. The program keeps
// them open as long as any region of the connection is mapped.
type TierHello struct {
	Version uint16 // written as [TierVersion] when 0
	Tier    string // the tier's name
	Holds   uint8
}

func (m *TierHello) fields(v *visitor) *visitor {
	v.begin(TypeTierHello)
	v.tierVersion(&m.Version)
	v.str("tier", &m.Tier, v.lim.TextBytes)
	v.u8("holds", &m.Holds, MaxTierHolds)
	return v
}

// TierWelcome is the program's first message.
type TierWelcome struct {
	Version  uint16 // written as [TierVersion] when 0
	Program  string // what it is, for operators
	MaxItems uint32 // keys or items of one call, at least 1
	MaxCalls uint32 // unanswered calls, at least 1
}

func (m *TierWelcome) fields(v *visitor) *visitor {
	v.begin(TypeTierWelcome)
	v.tierVersion(&m.Version)
	v.clipped("program", &m.Program)
	v.count("max_items", &m.MaxItems)
	v.check(m.MaxItems <= MaxTierItems, "max_items", "out of range")
	v.count("max_calls", &m.MaxCalls)
	v.check(m.MaxCalls <= MaxTierCalls, "max_calls", "out of range")
	return v
}

// TierRefuse is the program's first message if it cannot serve.
type TierRefuse struct {
	Version uint16 // written as [TierVersion] when 0
	Message string
}

func (m *TierRefuse) fields(v *visitor) *visitor {
	v.begin(TypeTierRefuse)
	v.tierVersion(&m.Version)
	v.clipped("message", &m.Message)
	return v
}

// TierRegion names memory that items may lie in. Its descriptor travels with it.
type TierRegion struct {
	Region    uint32
	Kind      string
	SizeBytes uint64 // at least 1
	Offset    uint64 // in the descriptor, bytes
	PageSize  uint64 // bytes, at least 1
}

func (m *TierRegion) fields(v *visitor) *visitor {
	v.begin(TypeTierRegion)
	v.u32("region", &m.Region)
	v.str("kind", &m.Kind, v.lim.TextBytes)
	v.size("size", &m.SizeBytes)
	v.check(m.SizeBytes != 0, "size", "zero")
	v.size("offset", &m.Offset)
	v.size("page_size", &m.PageSize)
	v.check(m.PageSize != 0, "page_size", "zero")
	return v
}

// TierRegionReady is the reply to a TierRegion.
type TierRegionReady struct {
	Region uint32
	Error  string // why it cannot be mapped; empty: it is
}

func (m *TierRegionReady) fields(v *visitor) *visitor {
	v.begin(TypeTierRegionReady)
	v.u32("region", &m.Region)
	v.clipped("error", &m.Error)
	return v
}

// TierRegionGone asks the program to unmap a region, in which no item lies any more.
type TierRegionGone struct{ Region uint32 }

func (m *TierRegionGone) fields(v *visitor) *visitor {
	v.begin(TypeTierRegionGone)
	v.u32("region", &m.Region)
	return v
}

// TierRegionLeft is the reply to a TierRegionGone.
type TierRegionLeft struct{ Region uint32 }

func (m *TierRegionLeft) fields(v *visitor) *visitor {
	v.begin(TypeTierRegionLeft)
	v.u32("region", &m.Region)
	return v
}

// TierContains asks which keys are held. The reply is a TierDone, as it is for the messages that
// follow, up to TierDrop.
type TierContains struct {
	ID   uint64   // of the call, never 0
	Keys [][]byte // each 1 to MaxTierKeyBytes; alias the input
}

func (m *TierContains) fields(v *visitor) *visitor {
	v.begin(TypeTierContains)
	v.id("id", &m.ID)
	v.keys(&m.Keys)
	return v
}

// TierPiece is part of a region.
type TierPiece struct {
	Region    uint32
	Offset    uint64
	SizeBytes uint64 // at least 1
}

// TierItem is a key and the memory of its value: the pieces, one behind the other.
type TierItem struct {
	Key    []byte      // 1 to MaxTierKeyBytes; aliases the input
	Pieces []TierPiece // 1 to MaxTierPieces
}

// TierPut stores values.
type TierPut struct {
	ID    uint64 // of the call, never 0
	Items []TierItem
}

func (m *TierPut) fields(v *visitor) *visitor {
	v.begin(TypeTierPut)
	v.id("id", &m.ID)
	v.items(&m.Items)
	return v
}

// TierGet fills memory with the beginnings of values.
type TierGet struct {
	ID    uint64 // of the call, never 0
	Items []TierItem
}

func (m *TierGet) fields(v *visitor) *visitor {
	v.begin(TypeTierGet)
	v.id("id", &m.ID)
	v.items(&m.Items)
	return v
}

// TierDrop forgets keys.
type TierDrop struct {
	ID   uint64   // of the call, never 0
	Keys [][]byte // each 1 to MaxTierKeyBytes; alias the input
}

func (m *TierDrop) fields(v *visitor) *visitor {
	v.begin(TypeTierDrop)
	v.id("id", &m.ID)
	v.keys(&m.Keys)
	return v
}

// TierClear forgets all keys that begin with a prefix. The reply is a TierCleared.
type TierClear struct {
	ID     uint64 // of the call, never 0
	Prefix []byte // at most MaxTierKeyBytes; empty: of all keys; aliases the input
}

func (m *TierClear) fields(v *visitor) *visitor {
	v.begin(TypeTierClear)
	v.id("id", &m.ID)
	v.bin("prefix", &m.Prefix, MaxTierKeyBytes)
	return v
}

// TierStats asks for a TierFigures.
type TierStats struct {
	ID uint64 // of the call, never 0
}

func (m *TierStats) fields(v *visitor) *visitor {
	v.begin(TypeTierStats)
	v.id("id", &m.ID)
	return v
}

// TierCancel says that nobody waits for a call any more. The call is still replied to.
type TierCancel struct {
	ID uint64 // of the call, never 0
}

func (m *TierCancel) fields(v *visitor) *visitor {
	v.begin(TypeTierCancel)
	v.id("id", &m.ID)
	return v
}

// TierResult is how one item or key of a call went.
type TierResult struct {
	Index  uint32 // its place in the call
	Status uint8  // TierOK, …
}

// TierDone has results of a call. A call ends when all its results have come. From an item's result
// on the program does not touch the item's memory any more.
type TierDone struct {
	ID      uint64 // of the call, never 0
	Results []TierResult
	Text    string // explains what failed; empty: nothing did
}

func (m *TierDone) fields(v *visitor) *visitor {
	v.begin(TypeTierDone)
	v.id("id", &m.ID)
	n := list(v, "results", &m.Results, MaxTierItems)
	v.check(n != 0, "results", "empty")
	for i := 0; i < n && v.err == nil; i++ {
		r := element(v, &m.Results, i)
		v.tuple("results", 2)
		v.number("results", &r.Index)
		status := uint32(r.Status)
		v.number("results", &status)
		v.check(status <= uint32(TierCancelled), "results", "unknown status")
		r.Status = uint8(status)
	}
	v.clipped("text", &m.Text)
	return v
}

// TierCleared is the reply to a TierClear.
type TierCleared struct {
	ID    uint64 // of the call, never 0
	Keys  uint64 // that there were
	Error string // why it failed; empty: it did not
}

func (m *TierCleared) fields(v *visitor) *visitor {
	v.begin(TypeTierCleared)
	v.id("id", &m.ID)
	v.u64("keys", &m.Keys)
	v.clipped("error", &m.Error)
	return v
}

// TierFigures is the reply to a TierStats.
type TierFigures struct {
	ID            uint64 // of the call, never 0
	CapacityBytes uint64 // 0: not known
	UsedBytes     uint64
	Keys          uint64
	Evictions     uint64 // values dropped for room
	Problem       string // why the program cannot be used now; empty: it can
	Detail        string // for operators
}

func (m *TierFigures) fields(v *visitor) *visitor {
	v.begin(TypeTierFigures)
	v.id("id", &m.ID)
	v.size("capacity_bytes", &m.CapacityBytes)
	v.size("used_bytes", &m.UsedBytes)
	v.u64("keys", &m.Keys)
	v.u64("evictions", &m.Evictions)
	v.clipped("problem", &m.Problem)
	v.clipped("detail", &m.Detail)
	return v
}

// keys visits a list of keys, at least one.
func (v *visitor) keys(p *[][]byte) {
	n := list(v, "keys", p, MaxTierItems)
	v.check(n != 0, "keys", "empty")
	for i := 0; i < n && v.err == nil; i++ {
		v.key("keys", element(v, p, i))
	}
}

func (v *visitor) key(field string, p *[]byte) {
	v.run(field, p, MaxTierKeyBytes)
	v.check(len(*p) != 0, field, "an empty key")
}

// items visits a list of items, at least one.
func (v *visitor) items(p *[]TierItem) {
	n := list(v, "items", p, MaxTierItems)
	v.check(n != 0, "items", "empty")
	for i := 0; i < n && v.err == nil; i++ {
		item := element(v, p, i)
		v.tuple("items", 2)
		v.key("items", &item.Key)
		v.pieces(&item.Pieces)
	}
}

func (v *visitor) pieces(p *[]TierPiece) {
	n := list(v, "items", p, MaxTierPieces)
	v.fields-- // it is no field of its own
	v.check(n != 0, "items", "an item without memory")
	for i := 0; i < n && v.err == nil; i++ {
		piece := element(v, p, i)
		v.tuple("items", 3)
		v.number("items", &piece.Region)
		v.part(&piece.Offset)
		v.part(&piece.SizeBytes)
		v.check(piece.SizeBytes != 0, "items", "a piece of no bytes")
	}
}

// part visits a 63-bit integer that is not a field of its own.
func (v *visitor) part(p *uint64) {
	v.upTo(math.MaxInt64, "items", p)
	v.fields--
}
