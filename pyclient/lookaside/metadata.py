"""What the scheduler role tells every worker in a step, and what they report.

One ``LookasideMetadata`` travels in each step's ``SchedulerOutput`` to all ranks. Each rank returns
at most one ``LookasideWorkerMetadata``; vLLM folds them with ``aggregate`` before the scheduler
role sees the result. Both go over vLLM's own channels, so these are plain dataclasses of plain
values. The order of the lists is the order in which the scheduler decided. A worker may work
through them in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lookaside.places import Place
from lookaside.wire import LeaseRef


@dataclass(slots=True)
class LoadSpec:
    """Load consecutive pages of a prefix.

    The worker reports the request as received exactly once, whatever happens.

    Pages are counted from 0 at the start of the request's prefix. ``block_ids`` has a row for each
    page from ``first_page`` on, of as many blocks as a page has columns (layout.py); most models'
    pages have one. Block 0 is vLLM's null block and must not be written: the window of the tokens
    to come does not reach so far back.

    ``refs[rank]`` takes over the leases of the lookup that found the pages on that rank's sidecar.
    Without refs there is nothing to load from, and the load fails. ``names`` (wire.names) is what
    every rank must find there.

    The states of a model that keeps them are pages of their own, whose rows have nothing else. They
    are a second spec of the same request, as if they followed the page that they end.
    """

    request_id: str
    refs: tuple[LeaseRef, ...]
    first_page: int
    block_ids: list[int]
    names: bytes
    in_step: bool = False
    """To be loaded before this step's forward, which computes the request. It is not reported as
    received; if it fails, its blocks are invalid in the same step."""


@dataclass(slots=True)
class SaveSpec:
    """Store consecutive pages of a prefix.

    Every rank names ``save_id`` in its worker metadata exactly once, whether the pages could be
    stored or not. The blocks stay pinned until all ranks have.

    ``first_page`` is a multiple of pages_per_chunk, because a chunk that is extended may have to be
    written anew from its first page. ``hashes`` has the digest of each page from ``first_page`` on,
    back to back; ``prev`` is that of the page before, empty for page 0. ``block_ids`` has a row for
    each page, as in LoadSpec. Where a block of a row is 0, vLLM does not have it any more. Such a
    page is only named: it may be held, but cannot be written. (A page of attention has no states,
    and a state's page nothing else.)

    With ``divided`` the ranks that hold the same pages (space.replicas) store every n-th chunk
    each, by the chunk's number in the prefix. Otherwise each rank stores all. ``hints`` are the
    fields of the PrepareStore that the request's hints fill (hints.py).
    """

    save_id: int
    request_id: str
    first_page: int
    prev: bytes
    hashes: bytes
    block_ids: list[int]
    divided: bool = False
    hints: dict[str, Any] = field(default_factory=dict)


@dataclass
class LookasideMetadata(KVConnectorMetadata):
    """The work of one step.

    There is nothing to fence before the forward: the source blocks of a save are pinned, so that
    preemption cannot hand them to anybody else.

    ``aborted`` names requests that vLLM finished while their load was out. The worker need not
    finish the copy, but must still report them as received. If ``timed`` is not 0, the workers
    report under this number how long the step's forward took. ``idle`` is true if vLLM computes
    nothing, in this step or in one that is under way: then a worker may wait for a load to end.
    """

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    timed: int = 0
    idle: bool = False
    epoch: str | None = None
    """The epoch of weights that all of this is of (scheduler/epochs.py). A worker whose session is
    of another one moves. None: as before."""

    def is_empty(self) -> bool:
        """Report whether the step has nothing for the workers to do."""
        return not (self.loads or self.saves or self.aborted or self.timed)


@dataclass
class LookasideHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler before the engine serves: where its rank's sidecar is."""

    places: dict[int, Place]


@dataclass
class LookasideWorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks finished since their last report.

    ``saves_done`` maps a save id to how many ranks are done with its blocks. ``loads_failed`` maps
    a request id to how many ranks could not load it; the scheduler offers it no hit again.
    ``forward_seconds`` maps the number of a timed step to how long the slowest rank's forward took.
    ``copies`` maps a request id to how many pages were copied in for it, and to the seconds that
    this took on the slowest rank. ``places`` maps a rank to where its sidecar is, if that is not
    what it reported before.
    """

    saves_done: dict[int, int] = field(default_factory=dict)
    loads_failed: dict[str, int] = field(default_factory=dict)
    forward_seconds: dict[int, float] = field(default_factory=dict)
    copies: dict[str, tuple[int, float]] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LookasideWorkerMetadata:
        """Return the reports of both together; neither operand changes."""
        if not isinstance(other, LookasideWorkerMetadata):
            return self
        done = dict(self.saves_done)
        for save_id, ranks in other.saves_done.items():
            done[save_id] = done.get(save_id, 0) + ranks
        failed = dict(self.loads_failed)
        for request_id, ranks in other.loads_failed.items():
            failed[request_id] = failed.get(request_id, 0) + ranks
        seconds = dict(self.forward_seconds)
        for step, took in other.forward_seconds.items():
            seconds[step] = max(seconds.get(step, 0.0), took)
        copies = dict(self.copies)
        for request_id, (pages, took) in other.copies.items():
            had = copies.get(request_id, (pages, 0.0))
            copies[request_id] = (min(pages, had[0]), max(took, had[1]))
        places = {**self.places, **other.places}
        return LookasideWorkerMetadata(done, failed, seconds, copies, places)

    def is_empty(self) -> bool:
        """Report whether there is nothing to tell the scheduler."""
        return not (
            self.saves_done
            or self.loads_failed
            or self.forward_seconds
            or self.copies
            or self.places
        )
