"""KV events of the scheduler role: which blocks the sidecars of all ranks hold.

vLLM publishes them together with those of its own cache, for routers. All of this exists only while
kv_events_config enables them.

Each step every rank's sidecar is asked, over its session, what came and went in this engine's
space. The answer is taken in when it is there, at a later step. Nothing here waits.

A block is announced when two things are true: this engine knows its tokens, because it saved the
block or found it held, and the sidecars of all ranks have reported that they hold it. It is taken
back when the first of them reports that it is gone, and when a session is lost or has missed
something. So a router may believe too little. It believes too much only until this engine's next
step.

For the scheduler's thread alone.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lookaside import wire
from lookaside.connection import Pending, SessionUnavailable
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lookaside")

# Blocks of which it is noted which ranks hold them. Further ones are never announced.
MAX_HELD = 1 << 20
# Blocks whose tokens are known and that are not held by all ranks yet.
MAX_WANTED = 1 << 14
# How long the engine is kept stepping after a save, to learn what became of it.
_HURRY_S = 0.25
# How long a sidecar that reports no events is not asked again.
_PAUSE_S = 10.0


class Feed(Protocol):
    """What one rank's sidecar reports. No method blocks."""

    def poll(self) -> wire.Events | None:
        """Return the next report, None if there is none yet.

        A reset without runs: all that was reported before is void.
        """
        ...


class SessionFeed:
    """A Feed over the scheduler's session with a rank."""

    def __init__(self, session: Session, clock: Callable[[], float]) -> None:
        self._session = session
        self._clock = clock
        self._log = RateLimitedLog(logger)
        self._of = 0  # the session that reported last
        self._pending: Pending | None = None
        self._not_before = 0.0

    def poll(self) -> wire.Events | None:
        session = self._session
        if self._of and (not session.connected or session.session_id != self._of):
            self._of, self._pending = 0, None
            return wire.Events(0, 1, 0, ())
        answer = None
        if self._pending is not None:
            if not self._pending.done:
                return None
            answer = self._pending.wait(0)
            self._pending = None
            if answer is None:  # the session was lost
                self._of = 0
                return wire.Events(0, 1, 0, ())
            if not isinstance(answer, wire.Events):
                self._not_before = self._clock() + _PAUSE_S
                self._log.warning(
                    "events", "the sidecar tells no events: %s", getattr(answer, "message", answer)
                )
                return None
        if self._clock() >= self._not_before and session.connected:
            try:
                self._pending = session.submit(lambda request_id: wire.ReadEvents(request_id))
                self._of = session.session_id or 0
            except SessionUnavailable:
                pass  # the sidecar is slow, or the session is lost: the next call sees that
        return answer


class Block(NamedTuple):
    """What an announcement has of a block."""

    hash: bytes
    """vLLM's hash, which routers know. The sidecars may hold the block by another name
    (identity.py)."""
    parent: bytes | None
    """vLLM's hash of the block before."""
    token_ids: Sequence[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    lookahead: list[int]
    """Tokens after the block that its hash covers too; none where vLLM's hashes cover none."""


class EventBook:
    """See the module's comment."""

    def __init__(
        self,
        feeds: Sequence[Feed],
        page_tokens: int,
        digest_bytes: int,
        clock: Callable[[], float],
        lookahead: int = 0,
        max_held: int = MAX_HELD,
        max_wanted: int = MAX_WANTED,
    ) -> None:
        """feeds has one for each rank. A hash covers lookahead tokens after its page, too."""
        self._feeds = tuple(feeds)
        self._all = (1 << len(self._feeds)) - 1
        self._page = page_tokens
        self._digest = digest_bytes
        self._clock = clock
        self._lookahead = lookahead
        self._max_held, self._max_wanted = max_held, max_wanted
        self._held: dict[bytes, int] = {}  # by digest: a bit for each rank that holds it
        self._announced: dict[bytes, bytes] = {}  # held by all: name -> vLLM's hash
        self._wanted: OrderedDict[bytes, Block] = OrderedDict()
        self._out: list[tuple[bytes, Block | None]] = []  # hashes, in their order; None: removed
        self._hurry_until = 0.0

    def note(
        self,
        request: Request,
        first_page: int,
        names: Iterable[bytes],
        hashes: Iterable[bytes],
        parent: bytes | None,
    ) -> None:
        """Have pages of a request, from first_page on, announced once all ranks hold them.

        names are what the sidecars hold them by, hashes vLLM's. parent is vLLM's hash of the page
        before. To be called when the pages are being saved, or were found held.
        """
        lora = request.lora_request
        for page, (digest, block_hash) in enumerate(zip(names, hashes, strict=True), first_page):
            if digest not in self._announced:
                start, end = page * self._page, (page + 1) * self._page
                block = Block(
                    bytes(block_hash),
                    parent,
                    list(request.all_token_ids[start:end]),
                    lora.adapter_id if lora is not None else None,
                    lora.name if lora is not None else None,
                    _extra_keys(request, start, end, self._lookahead),
                    list(request.all_token_ids[end : end + self._lookahead]),
                )
                if self._held.get(digest) == self._all:
                    self._announce(digest, block)
                else:
                    self._wanted[digest] = block
                    self._wanted.move_to_end(digest)
                    if len(self._wanted) > self._max_wanted:
                        self._wanted.popitem(last=False)
            parent = bytes(block_hash)

    def hurry(self) -> None:
        """A save has ended: the sidecars will report soon what became of it."""
        self._hurry_until = self._clock() + _HURRY_S

    def void(self) -> None:
        """Take back all that was announced, and forget what was noted: the cache is reset."""
        self._reset(self._all)
        self._wanted.clear()

    def has_pending(self) -> bool:
        """Report whether the engine shall step on to learn what became of its saves."""
        return bool(self._out) or (bool(self._wanted) and self._clock() < self._hurry_until)

    def poll(self) -> None:
        """Take in what the ranks have reported, and ask them again."""
        for rank, feed in enumerate(self._feeds):
            answer = feed.poll()
            if answer is None:
                continue
            if answer.reset:
                self._reset(1 << rank)
            for run in answer.runs:
                step = self._digest
                for at in range(0, len(run.hashes), step):
                    digest = run.hashes[at : at + step]
                    if run.removed:
                        self._remove(digest, 1 << rank)
                    else:
                        self._store(digest, 1 << rank)

    def take(self) -> list[Any]:
        """Return the events since the last call, in vLLM's form."""
        self.poll()
        if not self._out:
            return []
        out, self._out = self._out, []
        return _events(out, self._page)

    def _store(self, digest: bytes, bit: int) -> None:
        before = self._held.get(digest, 0)
        if not before and len(self._held) >= self._max_held:
            return
        self._held[digest] = before | bit
        if before | bit == self._all and digest in self._wanted:
            self._announce(digest, self._wanted.pop(digest))

    def _remove(self, digest: bytes, bit: int) -> None:
        left = self._held.get(digest, 0) & ~bit
        if left:
            self._held[digest] = left
        else:
            self._held.pop(digest, None)
        self._retract(digest)

    def _reset(self, bit: int) -> None:
        for block_hash in self._announced.values():
            self._out.append((block_hash, None))
        self._announced.clear()
        held = {digest: ranks & ~bit for digest, ranks in self._held.items()}
        self._held = {digest: ranks for digest, ranks in held.items() if ranks}

    def _announce(self, digest: bytes, block: Block) -> None:
        self._announced[digest] = block.hash
        self._out.append((block.hash, block))

    def _retract(self, digest: bytes) -> None:
        block_hash = self._announced.pop(digest, None)
        if block_hash is not None:
            self._out.append((block_hash, None))


def _extra_keys(request: Request, start: int, end: int, lookahead: int) -> tuple[Any, ...] | None:
    """Return what made a block's hash besides tokens; None if nothing did.

    That of the lookahead tokens after the block counts, as the hash covers them.
    """
    if not (
        request.lora_request
        or getattr(request, "mm_features", None)
        or getattr(request, "cache_salt", None)
    ):
        return None
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    return generate_block_hash_extra_keys(request, start, end + lookahead, 0)[0]


def _events(changes: list[tuple[bytes, Block | None]], page_tokens: int) -> list[Any]:
    """Return vLLM's events for changes, in their order; runs of one prefix are one event."""
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core import kv_cache_utils

    name: Any = kv_cache_utils.maybe_convert_block_hash
    events: list[Any] = []
    for run in _runs(changes):
        hashes = [name(each) for each, _ in run]
        blocks = [each for _, each in run if each is not None]
        if blocks:
            events.append(_stored(hashes, blocks, page_tokens))
        else:
            events.append(_event(BlockRemoved, block_hashes=hashes))
    return events


def _runs(
    changes: list[tuple[bytes, Block | None]],
) -> Iterator[list[tuple[bytes, Block | None]]]:
    """Divide changes into removals in a row, and blocks of which each continues the one before."""
    run: list[tuple[bytes, Block | None]] = []
    for change in changes:
        if run and not _continues(change[1], run[-1]):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _continues(block: Block | None, before: tuple[bytes, Block | None]) -> bool:
    """Report whether a change belongs to the run of the one before."""
    block_hash, parent = before
    if block is None or parent is None:
        return block is parent
    return (block.parent, block.lora_id) == (block_hash, parent.lora_id)


def _stored(hashes: list[Any], blocks: list[Block], page_tokens: int) -> Any:
    """Return the event of blocks that continue one another."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core import kv_cache_utils

    name: Any = kv_cache_utils.maybe_convert_block_hash
    # vLLM before 0.31 publishes extra keys as they are.
    plain = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)
    first, keys = blocks[0], [each.extra_keys for each in blocks]
    return _event(
        BlockStored,
        block_hashes=hashes,
        parent_block_hash=None if first.parent is None else name(first.parent),
        token_ids=[token for each in blocks for token in each.token_ids],
        block_size=page_tokens,
        lora_id=first.lora_id,
        lora_name=first.lora_name,
        extra_keys=plain(keys) if any(key is not None for key in keys) else None,
        lookahead_token_ids=(
            [each.lookahead for each in blocks] if any(each.lookahead for each in blocks) else None
        ),
    )


def _event(kind: Any, **fields: Any) -> Any:
    """Return an event of blocks in the host's memory; vLLM's version decides which fields it
    has."""
    from vllm.distributed.kv_events import MEDIUM_CPU

    fields |= {"medium": MEDIUM_CPU, "group_idx": 0, "locality": "LOCAL"}
    return kind(**{key: value for key, value in fields.items() if key in kind.__struct_fields__})
