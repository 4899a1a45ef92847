package wire

import "math"

// Roles of a session.
const (
	RoleScheduler = "scheduler"
	RoleWorker    = "worker"
)

// Field is one named property of a space, or of a client.
type Field struct{ Key, Value string }

// Label is a short name that a message carries as a string. It aliases the input, so that a message
// is decoded without allocating.
type Label []byte

// Hello opens a session. A worker declares its space. A scheduler may leave PageBytes 0 and give
// fewer fields, but those that it gives must equal its worker's.
type Hello struct {
	Version  uint16 // written as [Version] when 0
	Role     string // RoleScheduler or RoleWorker
	EngineID string
	Rank     uint32
	// Ranks is how many ranks, from Rank on, a scheduler asks for at once because they share a
	// space. It is 1 for workers, and written as 1 when 0.
	Ranks         uint32
	PageTokens    uint32  // tokens of a page, at least 1
	PageBytes     uint64  // KV bytes of a page
	PagesPerChunk uint32  // at least 1
	DigestBytes   uint8   // length of a page hash, 1 to MaxDigestBytes
	Fields        []Field // by rising Key, unique
	// Direct asks for a direct socket: its fd then travels with the Welcome, after that of the
	// control region. For schedulers.
	Direct bool
	// Held is how many descriptors travel with the message, at most MaxHeldFDs: those of the memory
	// that a worker still has from an earlier session, for a sidecar that has lost it. For workers.
	Held uint32
	// About has what an operator may want to know about the client, such as its release, at most
	// MaxAbout properties by rising Key, unique. The sidecar shows them, and decides nothing by
	// them.
	About []Field
}

func (m *Hello) fields(v *visitor) *visitor {
	v.begin(TypeHello)
	v.version(&m.Version)
	v.str("role", &m.Role, len(RoleScheduler))
	v.str("engine_id", &m.EngineID, v.lim.EngineIDBytes)
	v.u32("rank", &m.Rank)
	v.atLeastOne("ranks", &m.Ranks)
	v.count("page_tokens", &m.PageTokens)
	v.size("page_bytes", &m.PageBytes)
	v.count("pages_per_chunk", &m.PagesPerChunk)
	v.digest(&m.DigestBytes)
	worker := m.Role == RoleWorker
	v.check(worker || m.Role == RoleScheduler, "role", "neither scheduler nor worker")
	v.check(!worker || m.Ranks == 1, "ranks", "a worker is one rank")
	v.check(uint64(m.Rank)+uint64(m.Ranks) <= math.MaxUint32+1, "ranks", "out of range")
	v.check(!worker || m.PageBytes != 0, "page_bytes", "zero")
	v.named("fields", &m.Fields, v.lim.Fields)
	v.flag("direct", &m.Direct)
	v.check(!worker || !m.Direct, "direct", "a worker looks nothing up")
	v.u32("held", &m.Held)
	v.check(m.Held <= MaxHeldFDs, "held", "above the limit")
	v.check(worker || m.Held == 0, "held", "a scheduler has no memory")
	v.named("about", &m.About, min(v.lim.Fields, MaxAbout))
	return v
}

// Welcome accepts a session. The control region's fd travels with it. For a worker the fd of its
// claim follows. The worker keeps it until the session has ended, none of its copies goes on and
// the next sidecar has welcomed it; until then no sidecar reuses what the worker may be copying.
// For a scheduler the fd of the direct socket follows if the Hello asked for one. A direct socket
// is of type SOCK_SEQPACKET and carries the lookup messages of the session, one a packet, both
// ways. A message that it does not take may be sent to LookupEndpoint. All answers come over the
// direct socket.
type Welcome struct {
	Version uint16 // written as [Version] when 0
	Session uint64 // never 0; not a secret: the status page shows it
	// Secret has SecretBytes. The client sends it on the lookup socket and uses it as the routing
	// id of its reply socket.
	Secret         []byte
	Generation     uint64 // of this run of the sidecar
	Fingerprint    []byte // of the space, FingerprintBytes long
	LookupEndpoint string // ZMQ endpoint that the sidecar's PULL is bound to
	// ReplyEndpoint is the ZMQ endpoint that the sidecar's ROUTER is bound to. "" for workers, and
	// for schedulers with a direct socket.
	ReplyEndpoint string
	Regions       uint32 // how many RegionAdded follow at once, 0 for schedulers
	MaxPages      uint32 // pages a Lookup or PrepareStore may name; see also MaxStorePages
	LeaseMs       uint32 // how long an answered lookup keeps its lease, ms
	// Peers is the id of the group of sidecars of this host that lend to each other, 0 if this one
	// is alone.
	Peers uint64
	// Preparing says that the sidecar still finds or makes its memory: regions come later, and
	// RegionsReady when all are there. Without it, all are there with the handshake.
	Preparing bool
}

func (m *Welcome) fields(v *visitor) *visitor {
	v.begin(TypeWelcome)
	v.version(&m.Version)
	v.id("session", &m.Session)
	v.exactly("secret", &m.Secret, SecretBytes)
	v.u64("generation", &m.Generation)
	v.exactly("fingerprint", &m.Fingerprint, FingerprintBytes)
	v.str("lookup_endpoint", &m.LookupEndpoint, v.lim.TextBytes)
	v.str("reply_endpoint", &m.ReplyEndpoint, v.lim.TextBytes)
	v.u32("regions", &m.Regions)
	v.u32("max_pages", &m.MaxPages)
	v.u32("lease_ms", &m.LeaseMs)
	v.u64("peers", &m.Peers)
	v.flag("preparing", &m.Preparing)
	return v
}

// Codes of a Refuse.
const (
	RefuseVersion      = "version"      // another protocol version
	RefuseIncompatible = "incompatible" // the space disagrees with one that it must agree with
	RefuseNoWorker     = "no_worker"    // a scheduler came before its worker: try again
	RefuseBusy         = "busy"         // too many sessions: try again
	RefuseDraining     = "draining"     // the sidecar is shutting down
	RefuseLimit        = "limit"        // a configured limit is exceeded
	RefuseMalformed    = "malformed"    // the Hello could not be decoded
	RefuseUnreachable  = "unreachable"  // a sidecar of another host cannot be reached: try again
	RefuseDenied       = "denied"       // a sidecar of another host does not trust this one
)

// Refuse refuses a session. The sidecar closes the socket after it. Texts are cut to their limit
// when written.
type Refuse struct {
	Version uint16 // written as [Version] when 0
	Code    string // Refuse…
	Field   string // the field that disagrees, or ""
	Want    string // the sidecar's value of it
	Got     string // the client's value of it
	Message string // for people
}

func (m *Refuse) fields(v *visitor) *visitor {
	v.begin(TypeRefuse)
	v.version(&m.Version)
	v.clipped("code", &m.Code)
	v.clipped("field", &m.Field)
	v.clipped("want", &m.Want)
	v.clipped("got", &m.Got)
	v.clipped("message", &m.Message)
	return v
}

// PrepareStore asks for slots for those pages from FirstPage on that are not held. Several workers
// that hold the same pages each ask for every nth chunk: chunk i of the prefix is asked for if
// i % Every == Which.
type PrepareStore struct {
	ID        uint32
	FirstPage uint32 // index of the first page in its prefix, a multiple of PagesPerChunk
	Prev      []byte // hash of the page before, empty when FirstPage is 0; aliases the input
	Hashes    []byte // packed page hashes, at least one byte; aliases the input
	Every     uint32 // written as 1, all chunks, when 0
	Which     uint32 // below Every
	Tenant    Label  // whose pages they are, at most MaxTenantBytes; empty: nobody's
	Hints
}

// Hints say how pages that are being stored should be treated. All of it is advisory, and the zero
// value asks for nothing.
type Hints struct {
	// Priority orders evictions: 1 goes first, MaxPriority last. 0 means DefaultPriority.
	Priority uint8
	RetainMs uint32 // how long the pages are kept before others, ms; 0: not
	PinMs    uint32 // how long the pages may not be evicted at all, ms; 0: not
	FromUse  uint8  // the pages are stored from this use on; 0 and 1: from the first
}

// Priorities of Hints and Advise.
const (
	DefaultPriority = 50
	MaxPriority     = 100
)

func (m *Hints) fields(v *visitor) {
	v.u8("priority", &m.Priority, MaxPriority)
	v.u32("retain_ms", &m.RetainMs)
	v.u32("pin_ms", &m.PinMs)
	v.u8("from_use", &m.FromUse, math.MaxUint8)
}

func (m *PrepareStore) fields(v *visitor) *visitor {
	v.begin(TypePrepareStore)
	v.u32("id", &m.ID)
	v.pages(&m.FirstPage, &m.Prev, &m.Hashes)
	v.check(m.FirstPage == 0 || len(m.Prev) != 0, "prev", "empty")
	v.atLeastOne("every", &m.Every)
	v.u32("which", &m.Which)
	v.check(m.Which < m.Every, "which", "not below every")
	v.tenant(&m.Tenant)
	m.Hints.fields(v)
	return v
}

// Extent is a run of consecutive pages in a region.
type Extent struct {
	Page   uint32 // index, in its prefix, of the first page
	Pages  uint32 // how many, at least 1
	Region uint32
	Offset uint64 // of the first page in the region, bytes
}

// StoreGrant is the reply to PrepareStore. It says where to copy what is not held.
type StoreGrant struct {
	ID     uint32
	Store  uint64 // handle for CommitStore, 0 if there is nothing to store
	Held   uint32 // pages asked for that are held already
	Shed   uint32 // pages refused because no slot is free
	Grants []Extent
}

func (m *StoreGrant) fields(v *visitor) *visitor {
	v.begin(TypeStoreGrant)
	v.u32("id", &m.ID)
	v.u64("store", &m.Store)
	v.u32("held", &m.Held)
	v.u32("shed", &m.Shed)
	v.extents("grants", &m.Grants)
	v.check((m.Store == 0) == (len(m.Grants) == 0), "grants",
		"must be empty without a store, and only then")
	return v
}

// CommitStore makes a store visible, except the grants whose copy failed. There is no reply.
type CommitStore struct {
	Store  uint64
	Failed []uint32 // indices into StoreGrant.Grants, rising
}

func (m *CommitStore) fields(v *visitor) *visitor {
	v.begin(TypeCommitStore)
	v.id("store", &m.Store)
	v.indices("failed", &m.Failed)
	return v
}

// AbortStore ends a store without making anything visible. There is no reply.
type AbortStore struct{ Store uint64 }

func (m *AbortStore) fields(v *visitor) *visitor {
	v.begin(TypeAbortStore)
	v.id("store", &m.Store)
	return v
}

// PrepareLoad takes over what a scheduler's lookup has leased.
type PrepareLoad struct {
	ID        uint32
	Session   uint64 // the scheduler's
	Lookup    uint64 // the scheduler's
	Ticket    []byte // the lookup's, see [Ticket]; aliases the input
	FirstPage uint32
	Pages     uint32 // at least 1
	Names     []byte // of the pages, see [Names]; aliases the input
}

func (m *PrepareLoad) fields(v *visitor) *visitor {
	v.begin(TypePrepareLoad)
	v.u32("id", &m.ID)
	v.id("session", &m.Session)
	v.u64("lookup", &m.Lookup)
	v.exactly("ticket", &m.Ticket, TicketBytes)
	v.u32("first_page", &m.FirstPage)
	v.count("pages", &m.Pages)
	v.exactly("names", &m.Names, NamesBytes)
	v.check(uint64(m.Pages) <= uint64(v.lim.Pages), "pages", "out of range")
	v.check(uint64(m.FirstPage)+uint64(m.Pages) <= math.MaxUint32, "pages", "out of range")
	return v
}

// Fetch asks for page 0 of a prefix, without a lookup: one round trip finds it, leases its chunk
// and says where it is. The reply is a LoadGrant, or the error not_found.
type Fetch struct {
	ID   uint32
	Hash []byte // of page 0; aliases the input
}

func (m *Fetch) fields(v *visitor) *visitor {
	v.begin(TypeFetch)
	v.u32("id", &m.ID)
	v.bin("hash", &m.Hash, MaxDigestBytes)
	v.check(len(m.Hash) > 0, "hash", "is empty")
	return v
}

// Contains asks what is held of consecutive pages, chunk by chunk: a chunk counts also behind one
// that is missing. Nothing is leased and nothing is brought up.
type Contains struct {
	ID        uint32
	FirstPage uint32 // a multiple of the pages of a chunk
	Prev      []byte // digest of page FirstPage-1, empty for page 0; aliases the input
	Hashes    []byte // aliases the input
	// WaitMs is how long the reply may wait until none of the chunks is still to be written to a
	// tier, ms. 0: it does not wait.
	WaitMs uint32
}

func (m *Contains) fields(v *visitor) *visitor {
	v.begin(TypeContains)
	v.u32("id", &m.ID)
	v.pages(&m.FirstPage, &m.Prev, &m.Hashes)
	v.u32("wait_ms", &m.WaitMs)
	return v
}

// Contained is the reply to Contains. Of each chunk it has how many of the pages that were asked
// for are held, from the chunk's first one on: a u16, little-endian.
type Contained struct {
	ID      uint32
	Held    []byte // by the arena or a tier; aliases the input
	Below   []byte // by a tier; aliases the input
	Waiting uint32 // chunks that are still to be written to a tier
	Tiers   uint8  // how many tiers there are
}

func (m *Contained) fields(v *visitor) *visitor {
	v.begin(TypeContained)
	v.u32("id", &m.ID)
	v.bin("held", &m.Held, MaxPacketBytes)
	v.bin("below", &m.Below, MaxPacketBytes)
	v.check(len(m.Held)%2 == 0 && len(m.Below) == len(m.Held), "below", "not as long as held")
	v.u32("waiting", &m.Waiting)
	v.u8("tiers", &m.Tiers, math.MaxUint8)
	return v
}

// LoadGrant is the reply to PrepareLoad and Fetch. It says where the pages are.
type LoadGrant struct {
	ID      uint32
	Load    uint64 // handle for Release, never 0
	Names   []byte // of the pages there by the sidecar's index, see [Names]; aliases the input
	Extents []Extent
}

func (m *LoadGrant) fields(v *visitor) *visitor {
	v.begin(TypeLoadGrant)
	v.u32("id", &m.ID)
	v.id("load", &m.Load)
	v.exactly("names", &m.Names, NamesBytes)
	v.extents("extents", &m.Extents)
	return v
}

// Release ends a load. Chunks of bad extents are dropped. There is no reply.
type Release struct {
	Load uint64
	Bad  []uint32 // indices into LoadGrant.Extents, rising
}

func (m *Release) fields(v *visitor) *visitor {
	v.begin(TypeRelease)
	v.id("load", &m.Load)
	v.indices("bad", &m.Bad)
	return v
}

// Ping asks for a Pong.
type Ping struct{ ID uint32 }

func (m *Ping) fields(v *visitor) *visitor {
	v.begin(TypePing)
	v.u32("id", &m.ID)
	return v
}

// Pong is the reply to a Ping.
type Pong struct {
	ID         uint32
	Generation uint64
}

func (m *Pong) fields(v *visitor) *visitor {
	v.begin(TypePong)
	v.u32("id", &m.ID)
	v.u64("generation", &m.Generation)
	return v
}

// ClearSpace drops every chunk of the session's space.
type ClearSpace struct{ ID uint32 }

func (m *ClearSpace) fields(v *visitor) *visitor {
	v.begin(TypeClearSpace)
	v.u32("id", &m.ID)
	return v
}

// Cleared is the reply to ClearSpace.
type Cleared struct {
	ID     uint32
	Chunks uint32 // how many were dropped
}

func (m *Cleared) fields(v *visitor) *visitor {
	v.begin(TypeCleared)
	v.u32("id", &m.ID)
	v.u32("chunks", &m.Chunks)
	return v
}

// ReadEvents asks for what has changed in the session's space since the session's last ReadEvents.
type ReadEvents struct{ ID uint32 }

func (m *ReadEvents) fields(v *visitor) *visitor {
	v.begin(TypeReadEvents)
	v.u32("id", &m.ID)
	return v
}

// Run is pages that came or went together.
type Run struct {
	Removed bool   // the pages cannot be found any more; otherwise they now can
	Hashes  []byte // packed page hashes, at least one byte; aliases the input
}

// Events is the reply to ReadEvents.
type Events struct {
	ID    uint32
	Reset bool // all earlier events are void
	More  bool // more events are ready to be read
	Runs  []Run
}

func (m *Events) fields(v *visitor) *visitor {
	v.begin(TypeEvents)
	v.u32("id", &m.ID)
	v.flag("reset", &m.Reset)
	v.flag("more", &m.More)
	v.runs("runs", &m.Runs)
	return v
}

// Prefilled reports where the tokens of one request came from that vLLM's own cache did not have. A
// scheduler sends it each time that vLLM admits a request, to one session of each sidecar. The
// sidecar only counts. There is no reply.
type Prefilled struct {
	Tokens uint32 // not in vLLM's own cache
	Found  uint32 // of these, from the first on: held by the sidecars of all ranks
	Loaded uint32 // of these, from the first on: loaded; vLLM computes the rest
	Own    uint32 // the request's other tokens: in vLLM's own cache
	Lookup uint64 // the request's last lookup; 0: it had none
	// Reason is why the client did not take what that lookup found: a number of package why, such
	// as that vLLM's own cache had it. 0: it took it, or the lookup's own reason says all.
	Reason uint8
}

func (m *Prefilled) fields(v *visitor) *visitor {
	v.begin(TypePrefilled)
	v.u32("tokens", &m.Tokens)
	v.u32("found", &m.Found)
	v.u32("loaded", &m.Loaded)
	v.u32("own", &m.Own)
	v.u64("lookup", &m.Lookup)
	v.u8("reason", &m.Reason, math.MaxUint8)
	v.check(m.Found <= m.Tokens && m.Loaded <= m.Tokens, "tokens", "less than a part of them")
	return v
}

// RegionAdded tells a worker to map a region, whose fd travels with it.
type RegionAdded struct {
	Region     uint32 // never used before in this run of the sidecar
	Generation uint64
	Kind       string // such as "memfd"
	Offset     uint64 // of the region in its fd, bytes: a multiple of PageSize
	SizeBytes  uint64 // at least 1
	// PageSize is the bytes of the memory pages behind the region, at least 1. The address that the
	// region is mapped at must be a multiple of it.
	PageSize uint64
	// ReadOnly is set for the region of another sidecar, whose fd may not allow writing. It must be
	// mapped for reading only.
	ReadOnly bool
}

func (m *RegionAdded) fields(v *visitor) *visitor {
	v.begin(TypeRegionAdded)
	v.u32("region", &m.Region)
	v.u64("generation", &m.Generation)
	v.str("kind", &m.Kind, v.lim.TextBytes)
	v.size("offset", &m.Offset)
	v.size("size", &m.SizeBytes)
	v.size("page_size", &m.PageSize)
	v.flag("read_only", &m.ReadOnly)
	v.check(m.SizeBytes != 0, "size", "zero")
	v.check(m.PageSize != 0, "page_size", "zero")
	v.check(m.PageSize == 0 || m.Offset%m.PageSize == 0, "offset",
		"not a multiple of the page size")
	v.check(m.Offset+m.SizeBytes <= math.MaxInt64, "offset", "out of range")
	return v
}

// RegionRemoved tells a worker to unmap a region. The worker first ends the copies that it has
// begun, unmaps, and sends RegionUnmapped. No open grant or lease names the region.
type RegionRemoved struct{ Region uint32 }

func (m *RegionRemoved) fields(v *visitor) *visitor {
	v.begin(TypeRegionRemoved)
	v.u32("region", &m.Region)
	return v
}

// RegionUnmapped reports that the worker has unmapped a region after RegionRemoved. There is no
// reply.
type RegionUnmapped struct{ Region uint32 }

func (m *RegionUnmapped) fields(v *visitor) *visitor {
	v.begin(TypeRegionUnmapped)
	v.u32("region", &m.Region)
	return v
}

// RegionMapped reports that a worker has dealt with a region added after its handshake: it can copy
// into the region, or has found that it never will. There is no reply.
type RegionMapped struct{ Region uint32 }

func (m *RegionMapped) fields(v *visitor) *visitor {
	v.begin(TypeRegionMapped)
	v.u32("region", &m.Region)
	return v
}

// RegionsReady tells a worker whose Welcome said Preparing that it has been sent all regions that
// the sidecar has found or made at its start. Memory of earlier sessions that is none of them is
// not wanted any more. Other regions may still come, as the arena grows. There is no reply.
type RegionsReady struct {
	Regions uint32 // how many there are
}

func (m *RegionsReady) fields(v *visitor) *visitor {
	v.begin(TypeRegionsReady)
	v.u32("regions", &m.Regions)
	return v
}

// Moved tells a client that another process serves its session from now on, which goes on as it
// was: handles, leases, regions and the direct socket stay. It replaces what the Welcome said. The
// fd of the new control region travels with it. There is no reply.
type Moved struct {
	Generation     uint64 // of the new control region
	LookupEndpoint string // as in Welcome
	ReplyEndpoint  string // as in Welcome
}

func (m *Moved) fields(v *visitor) *visitor {
	v.begin(TypeMoved)
	v.u64("generation", &m.Generation)
	v.str("lookup_endpoint", &m.LookupEndpoint, v.lim.TextBytes)
	v.str("reply_endpoint", &m.ReplyEndpoint, v.lim.TextBytes)
	return v
}

// Notice tells a client something for its user. It may come at any time after the handshake. There
// is no reply. The text is cut to its limit when written.
type Notice struct{ Text string }

func (m *Notice) fields(v *visitor) *visitor {
	v.begin(TypeNotice)
	v.clipped("text", &m.Text)
	return v
}

// MaxEpochBytes is the longest name of an epoch of weights.
const MaxEpochBytes = 256

// NameWeights tells a scheduler what the weights of its engine are called: those that it has, or is
// about to have. The client then goes on in the space whose field weights_epoch has that name; ""
// stands for the space without the field. It may come at any time after the handshake. There is no
// reply.
type NameWeights struct{ Epoch string }

func (m *NameWeights) fields(v *visitor) *visitor {
	v.begin(TypeNameWeights)
	v.str("epoch", &m.Epoch, MaxEpochBytes)
	return v
}

// Codes of an Error.
const (
	CodeNotFound     = "not_found"    // no such lookup, store or load, or its lease has ended
	CodeStale        = "stale"        // of an earlier generation
	CodeIncompatible = "incompatible" // the two sessions are not of one space
	CodeBusy         = "busy"         // a limit is reached: try later
	CodeMalformed    = "malformed"    // the request makes no sense
	CodeClosed       = "closed"       // the sidecar is shutting down
)

// Error is the reply to a request that failed, instead of its grant. Texts are cut to their limit
// when written.
type Error struct {
	ID      uint32 // of the request
	Code    string // Code…
	Message string // for people
}

func (m *Error) fields(v *visitor) *visitor {
	v.begin(TypeError)
	v.u32("id", &m.ID)
	v.clipped("code", &m.Code)
	v.clipped("message", &m.Message)
	return v
}

// Lookup asks how much of a prefix is held, and leases it. A second Lookup with the same session
// and number frees the leases of the first one before it starts. Slower tiers know a chunk only by
// all of its pages: a first page within a chunk hits in them only if memory holds the rest of the
// chunk. So ask from a chunk's first page.
type Lookup struct {
	Session   uint64 // the asking scheduler's session
	Secret    []byte // that session's; aliases the input
	Lookup    uint64 // chosen by the client, unique in its session
	FirstPage uint32 // index of the first page asked for
	// Prev is the hash of the page before. It is empty when FirstPage is 0 or the hash is not
	// known. It aliases the input.
	Prev   []byte
	Hashes []byte // packed page hashes, at least one byte; aliases the input
	// DeadlineMs is how long an answer is of use, ms, the wait after a LookupPending included. 0
	// means no deadline.
	DeadlineMs  uint32
	RecomputeUs uint32 // what computing one page anew takes, µs, 0 when it is not known
	Tenant      Label  // who asks, at most MaxTenantBytes; empty: nobody
	// Request is the client's name of what the lookup is for, at most MaxRequestBytes, by which
	// people ask how it ended. Empty: none.
	Request Label
}

func (m *Lookup) fields(v *visitor) *visitor {
	v.begin(TypeLookup)
	v.id("session", &m.Session)
	v.exactly("secret", &m.Secret, SecretBytes)
	v.u64("lookup", &m.Lookup)
	v.pages(&m.FirstPage, &m.Prev, &m.Hashes)
	v.u32("deadline_ms", &m.DeadlineMs)
	v.u32("recompute_us", &m.RecomputeUs)
	v.tenant(&m.Tenant)
	v.label("request", &m.Request, MaxRequestBytes)
	return v
}

// LookupResult is the reply to a Lookup.
type LookupResult struct {
	Lookup    uint64
	HitPages  uint32 // consecutive, from the lookup's first page
	HitTokens uint32 // the same in tokens
	// InMemory is set if all of these pages lie in the sidecar's own arena, and that is in memory
	// alone: not on a device or in a file, and nothing of it is lent by a peer.
	InMemory bool
	Reason   uint8 // why the hit ends where it does: a number of package why, 0 if all was found
	// TookUs is how long the lookup took in the sidecar, µs, and BeganUs when, from its beginning
	// on, loads from a tier or a peer began; 0: none did. Sources says where pages lay if not all
	// of them were in the arena, such as "arena 16, disk 48", at most MaxSourcesBytes.
	TookUs, BeganUs uint32
	Sources         Label
	HitBytes        uint64 // of the pages, as they lie in the arena
}

func (m *LookupResult) fields(v *visitor) *visitor {
	v.begin(TypeLookupResult)
	v.u64("lookup", &m.Lookup)
	v.u32("hit_pages", &m.HitPages)
	v.u32("hit_tokens", &m.HitTokens)
	v.flag("in_memory", &m.InMemory)
	v.u8("reason", &m.Reason, math.MaxUint8)
	v.u32("took_us", &m.TookUs)
	v.u32("began_us", &m.BeganUs)
	v.label("sources", &m.Sources, MaxSourcesBytes)
	v.u64("hit_bytes", &m.HitBytes)
	return v
}

// LookupPending tells a client, before the result of its Lookup, that the lookup waits for a tier
// below the arena. A later one replaces an earlier one.
type LookupPending struct {
	Lookup uint64
	Pages  uint32 // the hit to expect, from the lookup's first page; 0: nothing is promised yet
	EtaMs  uint32 // when to expect it, ms from now
}

func (m *LookupPending) fields(v *visitor) *visitor {
	v.begin(TypeLookupPending)
	v.u64("lookup", &m.Lookup)
	v.u32("pages", &m.Pages)
	v.u32("eta_ms", &m.EtaMs)
	return v
}

// Trim frees a lookup's leases on chunks wholly below FirstPage.
type Trim struct {
	Session   uint64
	Secret    []byte // the session's; aliases the input
	Lookup    uint64
	FirstPage uint32
}

func (m *Trim) fields(v *visitor) *visitor {
	v.begin(TypeTrim)
	v.id("session", &m.Session)
	v.exactly("secret", &m.Secret, SecretBytes)
	v.u64("lookup", &m.Lookup)
	v.u32("first_page", &m.FirstPage)
	return v
}

// Cancel frees a lookup's leases.
type Cancel struct {
	Session uint64
	Secret  []byte // the session's; aliases the input
	Lookup  uint64
}

func (m *Cancel) fields(v *visitor) *visitor {
	v.begin(TypeCancel)
	v.id("session", &m.Session)
	v.exactly("secret", &m.Secret, SecretBytes)
	v.u64("lookup", &m.Lookup)
	return v
}

// Action is what an Advise asks for.
type Action uint8

// The actions of an Advise.
const (
	AdviseRetain   Action = 1 // keep before others, for Ms; 0 ends it
	AdvisePin      Action = 2 // do not evict, for Ms; 0 ends it
	AdvisePrefetch Action = 3 // bring up from the tiers below the arena
	AdviseDemote   Action = 4 // write to the tiers below the arena, then evict before others
)

// Advise says how pages of a prefix that are held should be treated. It is advisory: the sidecar
// counts what became of it, and there is no reply.
type Advise struct {
	Session   uint64 // the asking scheduler's session
	Secret    []byte // that session's; aliases the input
	FirstPage uint32 // index of the first page in its prefix
	// Prev is the hash of the page before. It is empty when FirstPage is 0 or the hash is not
	// known. It aliases the input.
	Prev   []byte
	Hashes []byte // packed page hashes, at least one byte; aliases the input
	Action Action
	Ms     uint32 // a duration from now, ms
	// Priority orders evictions among retained pages, as in Hints.
	Priority uint8
	Tenant   Label // who advises, at most MaxTenantBytes; empty: nobody
}

func (m *Advise) fields(v *visitor) *visitor {
	v.begin(TypeAdvise)
	v.id("session", &m.Session)
	v.exactly("secret", &m.Secret, SecretBytes)
	v.pages(&m.FirstPage, &m.Prev, &m.Hashes)
	v.u8("action", (*uint8)(&m.Action), uint8(AdviseDemote))
	v.check(m.Action != 0, "action", "zero")
	v.u32("ms", &m.Ms)
	v.u8("priority", &m.Priority, MaxPriority)
	v.tenant(&m.Tenant)
	return v
}
