"""The messages between clients and the sidecar, as typed msgspec structs.

Every message is one msgpack array whose first element is its type. Decoding is strict: exact number
of fields, exact types (integers of any msgpack width), no trailing bytes. It never evaluates
anything. Encoding writes the shortest form of each value, so equal messages are equal bytes in
every language: the Go tests and ours read the same golden vectors in ``ipc/wire/testdata``.

Structs are immutable and safe to share between threads. Encoding does not check ranges: what is
sent is the caller's own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

VERSION = 14
"""Protocol version. Peers of different versions refuse each other."""

MAX_PACKET_BYTES = 256 << 10
"""The longest message on the session socket."""

SOCKET_BUFFER_BYTES = 1 << 20
"""The SO_SNDBUF with which a packet of MAX_PACKET_BYTES can be sent."""

MAX_HELD_FDS = 64
"""How many descriptors may travel with a Hello."""

MAX_DIGEST_BYTES = 32
"""The longest page hash."""

FINGERPRINT_BYTES = 32
"""The length of a space's fingerprint."""

SECRET_BYTES = 16
"""The length of a session's secret, and of a ticket."""

MAX_EPOCH_BYTES = 256
"""The longest name of an epoch of weights."""

NAMES_BYTES = 32
"""The length of the name of a load's pages."""

MAX_TENANT_BYTES = 64
"""The longest tenant, in UTF-8."""

MAX_REQUEST_BYTES = 96
"""The longest name of a request, in UTF-8."""

REASONS = (
    "end",
    "never_stored",
    "shed",
    "evicted",
    "expired",
    "cleared",
    "other_space",
    "other_seed",
    "late",
    "engine_had",
    "not_worth",
    "lost",
)
"""Why a prefix ends where it does, by number. end: all of it was found."""

DEFAULT_PRIORITY = 50
"""The priority of pages without hints. 1 is evicted first, MAX_PRIORITY last."""

MAX_PRIORITY = 100

ADVISE_RETAIN = 1
ADVISE_PIN = 2
ADVISE_PREFETCH = 3
ADVISE_DEMOTE = 4
"""The actions of Advise."""

_EXTENT_BYTES = 25
_OVERHEAD_BYTES = 160

MAX_EXTENTS = (MAX_PACKET_BYTES - _OVERHEAD_BYTES) // _EXTENT_BYTES
"""How many extents fit one packet, whatever their values."""


def max_store_pages(digest_bytes: int) -> int:
    """Return how many pages one PrepareStore may name.

    Their hashes must fit one packet, and so must their grants.
    """
    return min(MAX_EXTENTS, (MAX_PACKET_BYTES - _OVERHEAD_BYTES) // digest_bytes - 1)


def ticket(secret: bytes, lookup: int) -> bytes:
    """Return a lookup's ticket, by which a load proves that the lookup's session ordered it.

    It is the start of an HMAC-SHA256 of the lookup's number, keyed by its session's secret. The
    sidecar computes the same. Whoever knows one ticket can take over that lookup alone.
    """
    return hmac.digest(secret, lookup.to_bytes(8, "little"), "sha256")[:SECRET_BYTES]


def names(digests: Sequence[bytes], first_page: int, pages_per_chunk: int) -> bytes:
    """Return one name for the pages of a load, given their digests from page first_page on.

    It is the SHA-256 of the digests at which the chunks end, one behind the other; the last chunk
    ends where the load does. A digest names all of its prefix, so that no other is needed.
    """
    ends = digests[pages_per_chunk - 1 - first_page % pages_per_chunk :: pages_per_chunk]
    if (first_page + len(digests)) % pages_per_chunk:
        ends = [*ends, digests[-1]]
    return hashlib.sha256(b"".join(ends)).digest()


class LeaseRef(NamedTuple):
    """What lets a rank's worker take over what a lookup has leased there."""

    session: int
    """The scheduler's session; 0: nothing is leased there."""
    lookup: int
    ticket: bytes
    """Belongs into no log: whoever has it can take the leases."""

    def __repr__(self) -> str:
        return f"LeaseRef({self.session:x}, {self.lookup})"


class WireError(ValueError):
    """Bytes that are not a message of this protocol."""


class VersionError(WireError):
    """A message of another protocol version. Nothing else of it was looked at."""

    def __init__(self, got: int, want: int = VERSION) -> None:
        super().__init__(f"protocol version differs: want {want}, got {got}")
        self.got = got


_U8 = Annotated[int, Meta(ge=0, le=0xFF)]
_U16 = Annotated[int, Meta(ge=0, le=0xFFFF)]
_U32 = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
_U64 = Annotated[int, Meta(ge=0)]  # msgpack itself has nothing longer
_Flag = Annotated[int, Meta(ge=0, le=1)]
_Id = Annotated[int, Meta(ge=1)]
_Size = Annotated[int, Meta(ge=0, le=0x7FFFFFFFFFFFFFFF)]
_Text = Annotated[str, Meta(max_length=1024)]
_Digest = Annotated[bytes, Meta(max_length=MAX_DIGEST_BYTES)]
_Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_Names = Annotated[bytes, Meta(min_length=NAMES_BYTES, max_length=NAMES_BYTES)]
_Fingerprint = Annotated[bytes, Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
_Indices = Annotated[tuple[_U32, ...], Meta(max_length=MAX_EXTENTS)]


class Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Any message of this module."""


class Hello(Message, frozen=True, tag=1):
    """Opens a session. ``fields`` must be in rising order of keys.

    A scheduler's session is for ``ranks`` ranks from ``rank`` on, which share a space. A worker's
    is for one. With ``direct`` a scheduler asks for a direct socket to look up over. ``held``
    descriptors travel with a worker's: those of the memory that it still has from an earlier
    session, for a sidecar that has lost it. ``about`` has what an operator may want to know of the
    client (about.py), in rising order of keys.
    """

    version: _U16
    role: str
    engine_id: str
    rank: _U32
    ranks: _U32
    page_tokens: _U32
    page_bytes: _Size
    pages_per_chunk: _U32
    digest_bytes: int
    fields: dict[str, str]
    direct: _Flag = 0
    held: Annotated[int, Meta(ge=0, le=MAX_HELD_FDS)] = 0
    about: dict[str, str] = {}


class Welcome(Message, frozen=True, tag=2):
    """Accepts a session; the control region's fd travels with it, then one of the role's own.

    A worker gets its claim, which it keeps as long as line.Line does; a scheduler the direct
    socket.

    By ``secret`` lookup messages prove that they are this session's, and their answers are routed
    by it. The sidecar shows ``session`` in its status, but tells ``secret`` to nobody else. No log
    and no file may have it. ``max_pages`` is how many pages one message may name, ``lease_ms`` how
    long a lookup keeps its leases. ``peers`` is the number of this host's group of sidecars that
    lend to each other; 0 if this one is alone. With ``preparing`` the sidecar still finds or makes
    its memory: regions come later, and RegionsReady when all are there.
    """

    version: _U16
    session: _Id
    secret: _Secret
    generation: _U64
    fingerprint: _Fingerprint
    lookup_endpoint: _Text
    reply_endpoint: _Text
    regions: _U32
    max_pages: _U32
    lease_ms: _U32
    peers: _U64
    preparing: _Flag


class Refuse(Message, frozen=True, tag=3):
    """Refuses a session; the sidecar then closes the socket."""

    version: _U16
    code: _Text
    field: _Text
    want: _Text
    got: _Text
    message: _Text


class Reach(Message, frozen=True, tag=80):
    """Asks a sidecar to carry the session of the Hello that follows to another host's sidecar.

    Sent on ``hosts.sock``. ``address`` is host:port where that sidecar accepts schedulers of other
    hosts.
    """

    version: _U16
    address: Annotated[str, Meta(min_length=1, max_length=1024)]


class PrepareStore(Message, frozen=True, tag=10):
    """Asks for room for the pages from ``first_page`` on that are not held.

    Only chunks whose number in the prefix leaves ``which`` when divided by ``every`` count. The
    pages are counted to ``tenant``. The rest are hints: ``priority`` (0: none) orders evictions,
    for ``retain_ms`` the pages are kept before others, for ``pin_ms`` they are not evicted at all,
    and they are stored from their use number ``from_use`` on.
    """

    id: _U32
    first_page: _U32
    prev: _Digest
    hashes: bytes
    every: _U32
    which: _U32
    tenant: str = ""
    priority: _U8 = 0
    retain_ms: _U32 = 0
    pin_ms: _U32 = 0
    from_use: _U8 = 0


class Extent(Message, frozen=True):
    """A run of consecutive pages in a region.

    ``page`` is the index of the first one in the prefix, ``offset`` is in bytes.
    """

    page: _U32
    pages: _U32
    region: _U32
    offset: _Size

    def __post_init__(self) -> None:
        if not 0 < self.pages <= 0xFFFFFFFF - self.page:
            raise ValueError("pages out of range")


_Extents = Annotated[tuple[Extent, ...], Meta(max_length=MAX_EXTENTS)]


class StoreGrant(Message, frozen=True, tag=11):
    """Answers PrepareStore: where to copy what is not held.

    ``store`` is 0 if there is nothing to copy.
    """

    id: _U32
    store: _U64
    held: _U32
    shed: _U32
    grants: _Extents

    def __post_init__(self) -> None:
        if (self.store == 0) != (not self.grants):
            raise ValueError("grants without a store, or a store without grants")


class CommitStore(Message, frozen=True, tag=12):
    """Makes a store visible, except the grants (by rising index) whose copy failed."""

    store: _Id
    failed: _Indices = ()


class AbortStore(Message, frozen=True, tag=13):
    """Gives a store up."""

    store: _Id


class PrepareLoad(Message, frozen=True, tag=20):
    """Takes over what a scheduler's lookup has leased.

    ``session``, ``lookup`` and ``ticket`` are the scheduler's.
    """

    id: _U32
    session: _Id
    lookup: _U64
    ticket: _Secret
    first_page: _U32
    pages: _U32
    names: _Names


class Fetch(Message, frozen=True, tag=23):
    """Asks for what is held of the chunk whose first page is page 0 of a prefix.

    Answered by a LoadGrant, or the error not_found. Nothing waits for a tier.
    """

    id: _U32
    hash: bytes


class Contains(Message, frozen=True, tag=24):
    """Asks what is held of pages from ``first_page`` on, the first one of a chunk.

    Answered by a Contained: at once, or within ``wait_ms`` when none of the chunks is still to be
    written to a tier. Nothing is leased and nothing is brought up.
    """

    id: _U32
    first_page: _U32
    prev: _Digest
    hashes: bytes
    wait_ms: _U32 = 0


class Contained(Message, frozen=True, tag=25):
    """Answers Contains: how many pages of each chunk are held, from its first one on.

    ``held`` (anywhere) and ``below`` (in a tier below the memory) have two bytes a chunk, little-
    endian. ``waiting`` chunks are still to be written to a tier, of which there are ``tiers``.
    """

    id: _U32
    held: bytes
    below: bytes
    waiting: _U32
    tiers: _U8

    def __post_init__(self) -> None:
        if len(self.held) % 2 or len(self.held) != len(self.below):
            raise ValueError("counts of different chunks")


class LoadGrant(Message, frozen=True, tag=21):
    """Answers PrepareLoad and Fetch: where the pages are.

    ``names`` is made of the names that the sidecar's index has for the pages that lie there.
    """

    id: _U32
    load: _Id
    names: _Names
    extents: _Extents


class Release(Message, frozen=True, tag=22):
    """Ends a load. Chunks of bad extents (by rising index) are dropped."""

    load: _Id
    bad: _Indices = ()


class Ping(Message, frozen=True, tag=30):
    """Asks for a Pong."""

    id: _U32


class Pong(Message, frozen=True, tag=31):
    """Answers a Ping."""

    id: _U32
    generation: _U64


class ClearSpace(Message, frozen=True, tag=32):
    """Drops every chunk of the session's space."""

    id: _U32


class Cleared(Message, frozen=True, tag=33):
    """Answers ClearSpace with how many chunks were dropped."""

    id: _U32
    chunks: _U32


class ReadEvents(Message, frozen=True, tag=34):
    """Asks what has changed in the session's space since the last ReadEvents."""

    id: _U32


class Run(Message, frozen=True):
    """Hashes of pages that came (0) or went (1) together."""

    removed: _Flag
    hashes: Annotated[bytes, Meta(min_length=1, max_length=MAX_PACKET_BYTES)]


class Events(Message, frozen=True, tag=35):
    """Answers ReadEvents.

    ``reset``: what was reported before is void. ``more``: there is more to read at once.
    """

    id: _U32
    reset: _Flag
    more: _Flag
    runs: Annotated[tuple[Run, ...], Meta(max_length=65536)]


class Prefilled(Message, frozen=True, tag=36):
    """Reports what became of a request, for the sidecar to count; there is no reply.

    ``tokens`` are those that vLLM's own cache did not have. Of them, ``found`` and ``loaded``.
    ``own`` are the request's other tokens. ``lookup`` was its last one, 0: it had none, and
    ``reason`` is why not all that this found was taken: a number in REASONS, 0 where there is
    nothing to add to the lookup's own reason.
    """

    tokens: _U32
    found: _U32
    loaded: _U32
    own: _U32
    lookup: _U64 = 0
    reason: _U8 = 0


class RegionAdded(Message, frozen=True, tag=40):
    """Gives a worker a region to map: ``size`` bytes at ``offset`` of the fd that travels with it.

    The offset is a multiple of ``page_size``, and the address that the region is mapped at must be
    one too. A ``read_only`` region is another sidecar's, and is mapped for reading only.
    """

    region: _U32
    generation: _U64
    kind: _Text
    offset: _Size
    size: Annotated[int, Meta(ge=1, le=0x7FFFFFFFFFFFFFFF)]
    page_size: Annotated[int, Meta(ge=1, le=0x7FFFFFFFFFFFFFFF)]
    read_only: _Flag

    def __post_init__(self) -> None:
        if self.offset % self.page_size or self.offset + self.size > 0x7FFFFFFFFFFFFFFF:
            raise ValueError("offset out of range, or not a multiple of the page size")


class RegionRemoved(Message, frozen=True, tag=41):
    """Tells a worker to unmap a region once the copies that began before have ended.

    The worker reports it by a RegionUnmapped.
    """

    region: _U32


class RegionUnmapped(Message, frozen=True, tag=42):
    """Answers RegionRemoved."""

    region: _U32


class RegionMapped(Message, frozen=True, tag=43):
    """Reports that a worker can copy into a region that came after its handshake, or never will."""

    region: _U32


class Notice(Message, frozen=True, tag=44):
    """Tells a client what its user should know.

    May come at any time after the handshake; there is no reply.
    """

    text: _Text


class RegionsReady(Message, frozen=True, tag=45):
    """Tells a worker that it was sent all ``regions`` that the sidecar begins with.

    What it has kept of earlier sessions, and is none of them, is not wanted any more.
    """

    regions: _U32


class Moved(Message, frozen=True, tag=46):
    """Tells a client that another process serves its session, which goes on as it was.

    It replaces what the Welcome said. The new control region's fd travels with it.
    """

    generation: _U64
    lookup_endpoint: _Text
    reply_endpoint: _Text


class NameWeights(Message, frozen=True, tag=47):
    """Tells a scheduler what its weights are called: those that it has, or is about to have.

    Comes when an operator asks for it; there is no reply.
    """

    epoch: Annotated[str, Meta(max_length=MAX_EPOCH_BYTES)]


class Error(Message, frozen=True, tag=50):
    """Answers the request ``id`` instead of its grant."""

    id: _U32
    code: _Text
    message: _Text


class Lookup(Message, frozen=True, tag=60):
    """Asks how much of a prefix is held, and leases it.

    ``prev`` is the digest of page ``first_page - 1``, empty for page 0. The client waits for the
    answer for ``deadline_ms`` at most. ``recompute_us`` is how long computing one page takes
    instead; 0: not known. What is asked for and hit is counted to ``tenant``. ``request`` is its
    name, for people who ask how it ended.
    """

    session: _Id
    secret: _Secret
    lookup: _U64
    first_page: _U32
    prev: _Digest
    hashes: bytes
    deadline_ms: _U32
    recompute_us: _U32
    tenant: str = ""
    request: str = ""


class LookupResult(Message, frozen=True, tag=61):
    """Answers a Lookup: consecutive pages from its first one, and the same in tokens.

    ``in_memory``: all of them lie in the sidecar's own arena, and that is in memory alone: not on a
    device or in a file, and nothing of it is lent by a peer. ``reason`` is the number, in REASONS,
    of why the hit ends where it does. The lookup took ``took_us`` in the sidecar; loads from tiers
    or peers began after ``began_us``, 0: there were none. ``sources`` says where the pages lay if
    not all of them were in the arena, such as "arena 16, disk 48". ``hit_bytes`` are those of the
    pages, as they lie in the arena.
    """

    lookup: _U64
    hit_pages: _U32
    hit_tokens: _U32
    in_memory: _Flag = 0
    reason: _U8 = 0
    took_us: _U32 = 0
    began_us: _U32 = 0
    sources: Annotated[str, Meta(max_length=255)] = ""
    hit_bytes: _U64 = 0


class Trim(Message, frozen=True, tag=62):
    """Frees a lookup's leases on chunks wholly below ``first_page``."""

    session: _Id
    secret: _Secret
    lookup: _U64
    first_page: _U32


class Cancel(Message, frozen=True, tag=63):
    """Frees a lookup's leases."""

    session: _Id
    secret: _Secret
    lookup: _U64


class LookupPending(Message, frozen=True, tag=64):
    """Comes before the answer to a Lookup: it waits for a tier below the memory.

    ``pages`` are expected from the lookup's first page on, in ``eta_ms`` from now; 0: nothing is
    promised yet. A later message replaces an earlier one.
    """

    lookup: _U64
    pages: _U32
    eta_ms: _U32


class Advise(Message, frozen=True, tag=65):
    """Says how pages of a prefix that are held should be treated; there is no reply.

    ``action`` is one of ADVISE_RETAIN (keep before others for ``ms``, ordered by ``priority``),
    ADVISE_PIN (do not evict for ``ms``; 0 ends it), ADVISE_PREFETCH (bring up from the tiers) and
    ADVISE_DEMOTE (write to the tiers, then evict before others).
    """

    session: _Id
    secret: _Secret
    first_page: _U32
    prev: _Digest
    hashes: bytes
    action: _U8
    ms: _U32 = 0
    priority: _U8 = 0
    tenant: str = ""


AnyMessage = (
    Hello
    | Welcome
    | Refuse
    | PrepareStore
    | StoreGrant
    | CommitStore
    | AbortStore
    | PrepareLoad
    | Fetch
    | Contains
    | Contained
    | LoadGrant
    | Release
    | Ping
    | Pong
    | ClearSpace
    | Cleared
    | ReadEvents
    | Events
    | Prefilled
    | RegionAdded
    | RegionRemoved
    | RegionUnmapped
    | RegionMapped
    | RegionsReady
    | Moved
    | NameWeights
    | Notice
    | Error
    | Lookup
    | LookupResult
    | Trim
    | Cancel
    | LookupPending
    | Advise
)


class _Head(msgspec.Struct, array_like=True):
    """The start of every message that carries a version, whatever follows."""

    type: int
    version: int


# What a sidecar may send to a client. Nothing else is decoded at all.
_Received = (
    Welcome
    | Refuse
    | StoreGrant
    | LoadGrant
    | Contained
    | Pong
    | Cleared
    | Events
    | RegionAdded
    | RegionRemoved
    | RegionsReady
    | Moved
    | NameWeights
    | Notice
    | Error
    | LookupResult
    | LookupPending
)
_decoder = msgspec.msgpack.Decoder(_Received)
_head_decoder = msgspec.msgpack.Decoder(_Head)
_VERSIONED = (2, 3)
# Text that is not UTF-8 comes as a UnicodeDecodeError, past msgspec's own errors.
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)

encode = msgspec.msgpack.Encoder().encode
"""The bytes of a message."""


def decode(data: bytes | bytearray | memoryview) -> AnyMessage:
    """Return the message in data, which must be one that a sidecar sends.

    Raises VersionError for a message of another protocol version, WireError for any other bytes.
    """
    try:
        message = _decoder.decode(data)
    except _REFUSED as error:
        _check_version(data)
        raise WireError(str(error)) from None
    if isinstance(message, (Welcome, Refuse)) and message.version != VERSION:
        raise VersionError(message.version)
    return message


def _check_version(data: bytes | bytearray | memoryview) -> None:
    try:
        head = _head_decoder.decode(data)
    except _REFUSED:
        return
    if head.type in _VERSIONED and head.version >= 0 and head.version != VERSION:
        raise VersionError(head.version)
