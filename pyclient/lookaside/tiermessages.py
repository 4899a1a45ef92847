"""The messages between a sidecar and a program that is a tier (docs/tiers-elsewhere.md).

They are written like those of sessions (wire.py): a msgpack array whose first element is the type,
decoded strictly. The Go tests and ours read the same golden vectors,
``ipc/wire/testdata/tier_vectors.json``. Structs are immutable.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from lookaside.wire import _U8, _U16, _U32, _U64, Message, VersionError, WireError, _Id, _Size

VERSION = 1
"""Version of this protocol. Both ends refuse any other."""

MAX_PACKET_BYTES = 256 << 10
"""The longest message."""

MAX_KEY_BYTES = 255
"""The longest key."""

MAX_PIECES = 8
"""The most pieces of memory that one item has."""

MAX_ITEMS = 4096
"""The most keys or items of one call."""

MAX_HOLDS = 8
"""The most descriptors that come with a TierHello."""

_Text = Annotated[str, Meta(max_length=1024)]
_Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
_Prefix = Annotated[bytes, Meta(max_length=MAX_KEY_BYTES)]
_Keys = Annotated[tuple[_Key, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
_Length = Annotated[int, Meta(ge=1, le=0x7FFFFFFFFFFFFFFF)]


class TierHello(Message, frozen=True, tag=90):
    """The sidecar's first message. ``holds`` descriptors travel with it.

    ``tier`` is the tier's name in the sidecar. The descriptors mean nothing to the program, but it
    keeps them open as long as any region of the connection is mapped.
    """

    version: _U16
    tier: _Text
    holds: Annotated[int, Meta(ge=0, le=MAX_HOLDS)]


class TierWelcome(Message, frozen=True, tag=91):
    """The program's first message.

    ``program`` says to operators what it is. A call has at most ``max_items`` keys or items, and at
    most ``max_calls`` calls are unanswered.
    """

    version: _U16
    program: _Text
    max_items: Annotated[int, Meta(ge=1, le=MAX_ITEMS)]
    max_calls: Annotated[int, Meta(ge=1, le=1024)]


class TierRefuse(Message, frozen=True, tag=92):
    """The program's first message if it cannot serve; it then closes the socket."""

    version: _U16
    message: _Text


class TierRegion(Message, frozen=True, tag=93):
    """Names memory that items may lie in; its descriptor travels with it.

    The region is ``size`` bytes at ``offset`` of the descriptor, in pages of ``page_size``.
    ``kind`` says what it is (hugetlb, thp, memfd, file, devdax, fsdax). Answered by
    TierRegionReady.
    """

    region: _U32
    kind: _Text
    size: _Length
    offset: _Size
    page_size: _Length


class TierRegionReady(Message, frozen=True, tag=94):
    """A region is mapped and registered, or cannot be: then ``error`` says why."""

    region: _U32
    error: _Text


class TierRegionGone(Message, frozen=True, tag=95):
    """No item lies in the region any more. Answered by TierRegionLeft once it is unmapped."""

    region: _U32


class TierRegionLeft(Message, frozen=True, tag=96):
    """A region is unmapped, and its descriptor closed."""

    region: _U32


class TierContains(Message, frozen=True, tag=97):
    """Asks which keys are held. A TierDone answers: OK or MISSING for each."""

    id: _Id
    keys: _Keys


class TierPiece(Message, frozen=True):
    """Part of a region: ``size`` bytes at ``offset``."""

    region: _U32
    offset: _Size
    size: _Length


class TierItem(Message, frozen=True):
    """A key, and the memory of its value: the pieces, one behind the other."""

    key: _Key
    pieces: Annotated[tuple[TierPiece, ...], Meta(min_length=1, max_length=MAX_PIECES)]


_Items = Annotated[tuple[TierItem, ...], Meta(min_length=1, max_length=MAX_ITEMS)]


class TierPut(Message, frozen=True, tag=98):
    """Stores values. A TierDone answers: OK, NO_ROOM, FAILED or CANCELLED for each."""

    id: _Id
    items: _Items


class TierGet(Message, frozen=True, tag=99):
    """Fills memory with the beginnings of values.

    A TierDone answers: OK, MISSING, FAILED or CANCELLED for each.
    """

    id: _Id
    items: _Items


class TierDrop(Message, frozen=True, tag=100):
    """Forgets keys. A TierDone answers: OK, MISSING or FAILED for each."""

    id: _Id
    keys: _Keys


class TierClear(Message, frozen=True, tag=101):
    """Forgets all keys that begin with a prefix. Answered by a TierCleared."""

    id: _Id
    prefix: _Prefix


class TierStats(Message, frozen=True, tag=102):
    """Asks for a TierFigures. It is also how the sidecar sees that the program lives."""

    id: _Id


class TierCancel(Message, frozen=True, tag=103):
    """Nobody waits for a call any more. It is still answered, and as soon as possible."""

    id: _Id


class TierResult(Message, frozen=True):
    """How one item or key of a call went; ``index`` is its place in the call."""

    index: _U32
    status: Annotated[int, Meta(ge=0, le=4)]


class TierDone(Message, frozen=True, tag=104):
    """Results of a call, each once. The call ends when all have come.

    Once the result of an item is sent the program touches the item's memory no more. ``text``
    explains what failed; "" if nothing did.
    """

    id: _Id
    results: Annotated[tuple[TierResult, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    text: _Text


class TierCleared(Message, frozen=True, tag=105):
    """Answers a TierClear: how many keys there were, or why it failed."""

    id: _Id
    keys: _U64
    error: _Text


class TierFigures(Message, frozen=True, tag=106):
    """Answers a TierStats. ``capacity`` is 0 if it is not known; sizes are in bytes.

    ``problem`` says why the program cannot be used now; "" if it can. ``detail`` is for operators.
    """

    id: _Id
    capacity: _Size
    used: _Size
    keys: _U64
    evictions: _U64
    problem: _Text
    detail: _Text


_ToProgram = (
    TierHello
    | TierRegion
    | TierRegionGone
    | TierContains
    | TierPut
    | TierGet
    | TierDrop
    | TierClear
    | TierStats
    | TierCancel
)
_ToSidecar = (
    TierWelcome
    | TierRefuse
    | TierRegionReady
    | TierRegionLeft
    | TierDone
    | TierCleared
    | TierFigures
)


class _Head(msgspec.Struct, array_like=True):
    """The start of every message that carries a version, whatever follows."""

    type: _U8
    version: _U64


_decoders = {
    "program": msgspec.msgpack.Decoder(_ToProgram),
    "sidecar": msgspec.msgpack.Decoder(_ToSidecar),
}
_head_decoder = msgspec.msgpack.Decoder(_Head)
_VERSIONED = (90, 91, 92)
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)

encode = msgspec.msgpack.Encoder().encode
"""The bytes of a message."""


def decode(data: bytes | bytearray | memoryview, to: str = "program") -> Message:
    """Return the message in data that is sent to "program" or to "sidecar".

    Raises VersionError for a message of another protocol version, WireError for any other bytes.
    """
    try:
        message = _decoders[to].decode(data)
    except _REFUSED as error:
        _check_version(data)
        raise WireError(str(error)) from None
    if getattr(message, "version", VERSION) != VERSION:
        raise VersionError(message.version, VERSION)
    return message


def _check_version(data: bytes | bytearray | memoryview) -> None:
    try:
        head = _head_decoder.decode(data)
    except _REFUSED:
        return
    if head.type in _VERSIONED and head.version != VERSION:
        raise VersionError(head.version, VERSION)
