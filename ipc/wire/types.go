package wire

import "strconv"

// Message is any message of this package.
type Message interface {
	// Type returns the message's first element.
	Type() Type
	// Append appends the encoded message to dst.
	Append(dst []byte) []byte
	// Decode replaces the message by the one in b. After an error, which wraps [ErrMalformed] or
	// [ErrVersion], the content of the message is undefined.
	Decode(b []byte, lim *Limits) error
}

// Type is the first element of a message.
type Type uint8

// The types: below 60 on the session socket, from 60 on the lookup sockets, from 70 between the
// sidecars of a host, from 80 for sessions with a sidecar of another host, from 90 with a program
// that is a tier. Sidecars also send each other RegionAdded, RegionRemoved, RegionUnmapped and
// Refuse.
const (
	TypeHello          Type = 1
	TypeWelcome        Type = 2
	TypeRefuse         Type = 3
	TypePrepareStore   Type = 10
	TypeStoreGrant     Type = 11
	TypeCommitStore    Type = 12
	TypeAbortStore     Type = 13
	TypePrepareLoad    Type = 20
	TypeLoadGrant      Type = 21
	TypeRelease        Type = 22
	TypeFetch          Type = 23
	TypeContains       Type = 24
	TypeContained      Type = 25
	TypePing           Type = 30
	TypePong           Type = 31
	TypeClearSpace     Type = 32
	TypeCleared        Type = 33
	TypeReadEvents     Type = 34
	TypeEvents         Type = 35
	TypePrefilled      Type = 36
	TypeRegionAdded    Type = 40
	TypeRegionRemoved  Type = 41
	TypeRegionUnmapped Type = 42
	TypeRegionMapped   Type = 43
	TypeNotice         Type = 44
	TypeRegionsReady   Type = 45
	TypeMoved          Type = 46
	TypeNameWeights    Type = 47
	TypeError          Type = 50
	TypeLookup         Type = 60
	TypeLookupResult   Type = 61
	TypeTrim           Type = 62
	TypeCancel         Type = 63
	TypeLookupPending  Type = 64
	TypeAdvise         Type = 65

	TypePeerHello   Type = 70
	TypePeerWelcome Type = 71
	TypePeerSpace   Type = 72
	TypePeerPages   Type = 73
	TypePeerLease   Type = 74
	TypePeerGrant   Type = 75
	TypePeerRelease Type = 76

	TypeReach          Type = 80
	TypeHostsChallenge Type = 81
	TypeHostsProof     Type = 82
	TypeHostsAccept    Type = 83

	TypeTierHello       Type = 90
	TypeTierWelcome     Type = 91
	TypeTierRefuse      Type = 92
	TypeTierRegion      Type = 93
	TypeTierRegionReady Type = 94
	TypeTierRegionGone  Type = 95
	TypeTierRegionLeft  Type = 96
	TypeTierContains    Type = 97
	TypeTierPut         Type = 98
	TypeTierGet         Type = 99
	TypeTierDrop        Type = 100
	TypeTierClear       Type = 101
	TypeTierStats       Type = 102
	TypeTierCancel      Type = 103
	TypeTierDone        Type = 104
	TypeTierCleared     Type = 105
	TypeTierFigures     Type = 106
)

// kinds has the name of each type, which is its struct's name, and makes an empty message of it.
var kinds = map[Type]struct {
	name  string
	empty func() Message
}{
	TypeHello:           {"Hello", empty[Hello]},
	TypeWelcome:         {"Welcome", empty[Welcome]},
	TypeRefuse:          {"Refuse", empty[Refuse]},
	TypePrepareStore:    {"PrepareStore", empty[PrepareStore]},
	TypeStoreGrant:      {"StoreGrant", empty[StoreGrant]},
	TypeCommitStore:     {"CommitStore", empty[CommitStore]},
	TypeAbortStore:      {"AbortStore", empty[AbortStore]},
	TypePrepareLoad:     {"PrepareLoad", empty[PrepareLoad]},
	TypeLoadGrant:       {"LoadGrant", empty[LoadGrant]},
	TypeRelease:         {"Release", empty[Release]},
	TypeFetch:           {"Fetch", empty[Fetch]},
	TypeContains:        {"Contains", empty[Contains]},
	TypeContained:       {"Contained", empty[Contained]},
	TypePing:            {"Ping", empty[Ping]},
	TypePong:            {"Pong", empty[Pong]},
	TypeClearSpace:      {"ClearSpace", empty[ClearSpace]},
	TypeCleared:         {"Cleared", empty[Cleared]},
	TypeReadEvents:      {"ReadEvents", empty[ReadEvents]},
	TypeEvents:          {"Events", empty[Events]},
	TypePrefilled:       {"Prefilled", empty[Prefilled]},
	TypeRegionAdded:     {"RegionAdded", empty[RegionAdded]},
	TypeRegionRemoved:   {"RegionRemoved", empty[RegionRemoved]},
	TypeRegionUnmapped:  {"RegionUnmapped", empty[RegionUnmapped]},
	TypeRegionMapped:    {"RegionMapped", empty[RegionMapped]},
	TypeNotice:          {"Notice", empty[Notice]},
	TypeRegionsReady:    {"RegionsReady", empty[RegionsReady]},
	TypeMoved:           {"Moved", empty[Moved]},
	TypeNameWeights:     {"NameWeights", empty[NameWeights]},
	TypeError:           {"Error", empty[Error]},
	TypeLookup:          {"Lookup", empty[Lookup]},
	TypeLookupResult:    {"LookupResult", empty[LookupResult]},
	TypeTrim:            {"Trim", empty[Trim]},
	TypeCancel:          {"Cancel", empty[Cancel]},
	TypeLookupPending:   {"LookupPending", empty[LookupPending]},
	TypeAdvise:          {"Advise", empty[Advise]},
	TypePeerHello:       {"PeerHello", empty[PeerHello]},
	TypePeerWelcome:     {"PeerWelcome", empty[PeerWelcome]},
	TypePeerSpace:       {"PeerSpace", empty[PeerSpace]},
	TypePeerPages:       {"PeerPages", empty[PeerPages]},
	TypePeerLease:       {"PeerLease", empty[PeerLease]},
	TypePeerGrant:       {"PeerGrant", empty[PeerGrant]},
	TypePeerRelease:     {"PeerRelease", empty[PeerRelease]},
	TypeReach:           {"Reach", empty[Reach]},
	TypeHostsChallenge:  {"HostsChallenge", empty[HostsChallenge]},
	TypeHostsProof:      {"HostsProof", empty[HostsProof]},
	TypeHostsAccept:     {"HostsAccept", empty[HostsAccept]},
	TypeTierHello:       {"TierHello", empty[TierHello]},
	TypeTierWelcome:     {"TierWelcome", empty[TierWelcome]},
	TypeTierRefuse:      {"TierRefuse", empty[TierRefuse]},
	TypeTierRegion:      {"TierRegion", empty[TierRegion]},
	TypeTierRegionReady: {"TierRegionReady", empty[TierRegionReady]},
	TypeTierRegionGone:  {"TierRegionGone", empty[TierRegionGone]},
	TypeTierRegionLeft:  {"TierRegionLeft", empty[TierRegionLeft]},
	TypeTierContains:    {"TierContains", empty[TierContains]},
	TypeTierPut:         {"TierPut", empty[TierPut]},
	TypeTierGet:         {"TierGet", empty[TierGet]},
	TypeTierDrop:        {"TierDrop", empty[TierDrop]},
	TypeTierClear:       {"TierClear", empty[TierClear]},
	TypeTierStats:       {"TierStats", empty[TierStats]},
	TypeTierCancel:      {"TierCancel", empty[TierCancel]},
	TypeTierDone:        {"TierDone", empty[TierDone]},
	TypeTierCleared:     {"TierCleared", empty[TierCleared]},
	TypeTierFigures:     {"TierFigures", empty[TierFigures]},
}

func empty[M any, P interface {
	*M
	Message
}]() Message {
	return P(new(M))
}

// New returns an empty message of a type, or nil if there is no such type.
func New(t Type) Message {
	if k, ok := kinds[t]; ok {
		return k.empty()
	}
	return nil
}

// String returns the name of the type's struct.
func (t Type) String() string {
	if k, ok := kinds[t]; ok {
		return k.name
	}
	return "Type(" + strconv.Itoa(int(t)) + ")"
}

// The methods of [Message]. They are the same for all messages but for the list of fields. Each
// calls its own list directly, because a call through an interface would move the visitor to the
// heap.

func (*Hello) Type() Type           { return TypeHello }
func (*Welcome) Type() Type         { return TypeWelcome }
func (*Refuse) Type() Type          { return TypeRefuse }
func (*PrepareStore) Type() Type    { return TypePrepareStore }
func (*StoreGrant) Type() Type      { return TypeStoreGrant }
func (*CommitStore) Type() Type     { return TypeCommitStore }
func (*AbortStore) Type() Type      { return TypeAbortStore }
func (*PrepareLoad) Type() Type     { return TypePrepareLoad }
func (*LoadGrant) Type() Type       { return TypeLoadGrant }
func (*Release) Type() Type         { return TypeRelease }
func (*Fetch) Type() Type           { return TypeFetch }
func (*Contains) Type() Type        { return TypeContains }
func (*Contained) Type() Type       { return TypeContained }
func (*Ping) Type() Type            { return TypePing }
func (*Pong) Type() Type            { return TypePong }
func (*ClearSpace) Type() Type      { return TypeClearSpace }
func (*Cleared) Type() Type         { return TypeCleared }
func (*ReadEvents) Type() Type      { return TypeReadEvents }
func (*Events) Type() Type          { return TypeEvents }
func (*Prefilled) Type() Type       { return TypePrefilled }
func (*RegionAdded) Type() Type     { return TypeRegionAdded }
func (*RegionRemoved) Type() Type   { return TypeRegionRemoved }
func (*RegionUnmapped) Type() Type  { return TypeRegionUnmapped }
func (*RegionMapped) Type() Type    { return TypeRegionMapped }
func (*Notice) Type() Type          { return TypeNotice }
func (*RegionsReady) Type() Type    { return TypeRegionsReady }
func (*Moved) Type() Type           { return TypeMoved }
func (*NameWeights) Type() Type     { return TypeNameWeights }
func (*Error) Type() Type           { return TypeError }
func (*Lookup) Type() Type          { return TypeLookup }
func (*LookupResult) Type() Type    { return TypeLookupResult }
func (*Trim) Type() Type            { return TypeTrim }
func (*Cancel) Type() Type          { return TypeCancel }
func (*LookupPending) Type() Type   { return TypeLookupPending }
func (*Advise) Type() Type          { return TypeAdvise }
func (*PeerHello) Type() Type       { return TypePeerHello }
func (*PeerWelcome) Type() Type     { return TypePeerWelcome }
func (*PeerSpace) Type() Type       { return TypePeerSpace }
func (*PeerPages) Type() Type       { return TypePeerPages }
func (*PeerLease) Type() Type       { return TypePeerLease }
func (*PeerGrant) Type() Type       { return TypePeerGrant }
func (*PeerRelease) Type() Type     { return TypePeerRelease }
func (*Reach) Type() Type           { return TypeReach }
func (*HostsChallenge) Type() Type  { return TypeHostsChallenge }
func (*HostsProof) Type() Type      { return TypeHostsProof }
func (*HostsAccept) Type() Type     { return TypeHostsAccept }
func (*TierHello) Type() Type       { return TypeTierHello }
func (*TierWelcome) Type() Type     { return TypeTierWelcome }
func (*TierRefuse) Type() Type      { return TypeTierRefuse }
func (*TierRegion) Type() Type      { return TypeTierRegion }
func (*TierRegionReady) Type() Type { return TypeTierRegionReady }
func (*TierRegionGone) Type() Type  { return TypeTierRegionGone }
func (*TierRegionLeft) Type() Type  { return TypeTierRegionLeft }
func (*TierContains) Type() Type    { return TypeTierContains }
func (*TierPut) Type() Type         { return TypeTierPut }
func (*TierGet) Type() Type         { return TypeTierGet }
func (*TierDrop) Type() Type        { return TypeTierDrop }
func (*TierClear) Type() Type       { return TypeTierClear }
func (*TierStats) Type() Type       { return TypeTierStats }
func (*TierCancel) Type() Type      { return TypeTierCancel }
func (*TierDone) Type() Type        { return TypeTierDone }
func (*TierCleared) Type() Type     { return TypeTierCleared }
func (*TierFigures) Type() Type     { return TypeTierFigures }

func (m *Hello) Append(dst []byte) []byte           { return m.fields(write(dst)).bytes() }
func (m *Welcome) Append(dst []byte) []byte         { return m.fields(write(dst)).bytes() }
func (m *Refuse) Append(dst []byte) []byte          { return m.fields(write(dst)).bytes() }
func (m *PrepareStore) Append(dst []byte) []byte    { return m.fields(write(dst)).bytes() }
func (m *StoreGrant) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *CommitStore) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *AbortStore) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *PrepareLoad) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *LoadGrant) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *Release) Append(dst []byte) []byte         { return m.fields(write(dst)).bytes() }
func (m *Fetch) Append(dst []byte) []byte           { return m.fields(write(dst)).bytes() }
func (m *Contains) Append(dst []byte) []byte        { return m.fields(write(dst)).bytes() }
func (m *Contained) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *Ping) Append(dst []byte) []byte            { return m.fields(write(dst)).bytes() }
func (m *Pong) Append(dst []byte) []byte            { return m.fields(write(dst)).bytes() }
func (m *ClearSpace) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *Cleared) Append(dst []byte) []byte         { return m.fields(write(dst)).bytes() }
func (m *ReadEvents) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *Events) Append(dst []byte) []byte          { return m.fields(write(dst)).bytes() }
func (m *Prefilled) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *RegionAdded) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *RegionRemoved) Append(dst []byte) []byte   { return m.fields(write(dst)).bytes() }
func (m *RegionUnmapped) Append(dst []byte) []byte  { return m.fields(write(dst)).bytes() }
func (m *RegionMapped) Append(dst []byte) []byte    { return m.fields(write(dst)).bytes() }
func (m *Notice) Append(dst []byte) []byte          { return m.fields(write(dst)).bytes() }
func (m *RegionsReady) Append(dst []byte) []byte    { return m.fields(write(dst)).bytes() }
func (m *Moved) Append(dst []byte) []byte           { return m.fields(write(dst)).bytes() }
func (m *NameWeights) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *Error) Append(dst []byte) []byte           { return m.fields(write(dst)).bytes() }
func (m *Lookup) Append(dst []byte) []byte          { return m.fields(write(dst)).bytes() }
func (m *LookupResult) Append(dst []byte) []byte    { return m.fields(write(dst)).bytes() }
func (m *Trim) Append(dst []byte) []byte            { return m.fields(write(dst)).bytes() }
func (m *Cancel) Append(dst []byte) []byte          { return m.fields(write(dst)).bytes() }
func (m *LookupPending) Append(dst []byte) []byte   { return m.fields(write(dst)).bytes() }
func (m *Advise) Append(dst []byte) []byte          { return m.fields(write(dst)).bytes() }
func (m *PeerHello) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *PeerWelcome) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *PeerSpace) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *PeerPages) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *PeerLease) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *PeerGrant) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *PeerRelease) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *Reach) Append(dst []byte) []byte           { return m.fields(write(dst)).bytes() }
func (m *HostsChallenge) Append(dst []byte) []byte  { return m.fields(write(dst)).bytes() }
func (m *HostsProof) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *HostsAccept) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *TierHello) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *TierWelcome) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *TierRefuse) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *TierRegion) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *TierRegionReady) Append(dst []byte) []byte { return m.fields(write(dst)).bytes() }
func (m *TierRegionGone) Append(dst []byte) []byte  { return m.fields(write(dst)).bytes() }
func (m *TierRegionLeft) Append(dst []byte) []byte  { return m.fields(write(dst)).bytes() }
func (m *TierContains) Append(dst []byte) []byte    { return m.fields(write(dst)).bytes() }
func (m *TierPut) Append(dst []byte) []byte         { return m.fields(write(dst)).bytes() }
func (m *TierGet) Append(dst []byte) []byte         { return m.fields(write(dst)).bytes() }
func (m *TierDrop) Append(dst []byte) []byte        { return m.fields(write(dst)).bytes() }
func (m *TierClear) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *TierStats) Append(dst []byte) []byte       { return m.fields(write(dst)).bytes() }
func (m *TierCancel) Append(dst []byte) []byte      { return m.fields(write(dst)).bytes() }
func (m *TierDone) Append(dst []byte) []byte        { return m.fields(write(dst)).bytes() }
func (m *TierCleared) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }
func (m *TierFigures) Append(dst []byte) []byte     { return m.fields(write(dst)).bytes() }

func (m *Hello) Decode(b []byte, l *Limits) error           { return m.fields(read(b, l)).done() }
func (m *Welcome) Decode(b []byte, l *Limits) error         { return m.fields(read(b, l)).done() }
func (m *Refuse) Decode(b []byte, l *Limits) error          { return m.fields(read(b, l)).done() }
func (m *PrepareStore) Decode(b []byte, l *Limits) error    { return m.fields(read(b, l)).done() }
func (m *StoreGrant) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *CommitStore) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *AbortStore) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *PrepareLoad) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *LoadGrant) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *Release) Decode(b []byte, l *Limits) error         { return m.fields(read(b, l)).done() }
func (m *Fetch) Decode(b []byte, l *Limits) error           { return m.fields(read(b, l)).done() }
func (m *Contains) Decode(b []byte, l *Limits) error        { return m.fields(read(b, l)).done() }
func (m *Contained) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *Ping) Decode(b []byte, l *Limits) error            { return m.fields(read(b, l)).done() }
func (m *Pong) Decode(b []byte, l *Limits) error            { return m.fields(read(b, l)).done() }
func (m *ClearSpace) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *Cleared) Decode(b []byte, l *Limits) error         { return m.fields(read(b, l)).done() }
func (m *ReadEvents) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *Events) Decode(b []byte, l *Limits) error          { return m.fields(read(b, l)).done() }
func (m *Prefilled) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *RegionAdded) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *RegionRemoved) Decode(b []byte, l *Limits) error   { return m.fields(read(b, l)).done() }
func (m *RegionUnmapped) Decode(b []byte, l *Limits) error  { return m.fields(read(b, l)).done() }
func (m *RegionMapped) Decode(b []byte, l *Limits) error    { return m.fields(read(b, l)).done() }
func (m *Notice) Decode(b []byte, l *Limits) error          { return m.fields(read(b, l)).done() }
func (m *RegionsReady) Decode(b []byte, l *Limits) error    { return m.fields(read(b, l)).done() }
func (m *Moved) Decode(b []byte, l *Limits) error           { return m.fields(read(b, l)).done() }
func (m *NameWeights) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *Error) Decode(b []byte, l *Limits) error           { return m.fields(read(b, l)).done() }
func (m *Lookup) Decode(b []byte, l *Limits) error          { return m.fields(read(b, l)).done() }
func (m *LookupResult) Decode(b []byte, l *Limits) error    { return m.fields(read(b, l)).done() }
func (m *Trim) Decode(b []byte, l *Limits) error            { return m.fields(read(b, l)).done() }
func (m *Cancel) Decode(b []byte, l *Limits) error          { return m.fields(read(b, l)).done() }
func (m *LookupPending) Decode(b []byte, l *Limits) error   { return m.fields(read(b, l)).done() }
func (m *Advise) Decode(b []byte, l *Limits) error          { return m.fields(read(b, l)).done() }
func (m *PeerHello) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *PeerWelcome) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *PeerSpace) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *PeerPages) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *PeerLease) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *PeerGrant) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *PeerRelease) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *Reach) Decode(b []byte, l *Limits) error           { return m.fields(read(b, l)).done() }
func (m *HostsChallenge) Decode(b []byte, l *Limits) error  { return m.fields(read(b, l)).done() }
func (m *HostsProof) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *HostsAccept) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *TierHello) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *TierWelcome) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *TierRefuse) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *TierRegion) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *TierRegionReady) Decode(b []byte, l *Limits) error { return m.fields(read(b, l)).done() }
func (m *TierRegionGone) Decode(b []byte, l *Limits) error  { return m.fields(read(b, l)).done() }
func (m *TierRegionLeft) Decode(b []byte, l *Limits) error  { return m.fields(read(b, l)).done() }
func (m *TierContains) Decode(b []byte, l *Limits) error    { return m.fields(read(b, l)).done() }
func (m *TierPut) Decode(b []byte, l *Limits) error         { return m.fields(read(b, l)).done() }
func (m *TierGet) Decode(b []byte, l *Limits) error         { return m.fields(read(b, l)).done() }
func (m *TierDrop) Decode(b []byte, l *Limits) error        { return m.fields(read(b, l)).done() }
func (m *TierClear) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *TierStats) Decode(b []byte, l *Limits) error       { return m.fields(read(b, l)).done() }
func (m *TierCancel) Decode(b []byte, l *Limits) error      { return m.fields(read(b, l)).done() }
func (m *TierDone) Decode(b []byte, l *Limits) error        { return m.fields(read(b, l)).done() }
func (m *TierCleared) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
func (m *TierFigures) Decode(b []byte, l *Limits) error     { return m.fields(read(b, l)).done() }
