"""What the scheduler role tells every worker in a step, and what they answer.

One ``LookasideMetadata`` travels in each step's ``SchedulerOutput`` to all
ranks; each rank returns at most one ``LookasideWorkerMetadata``, which vLLM
folds with ``aggregate`` before the scheduler role sees it. Both go over vLLM's
own channels, so these are plain dataclasses of plain values. The order of the
lists is the order in which the scheduler decided; a worker may work through
them in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lookaside.wire import LeaseRef


@dataclass(slots=True)
class LoadSpec:
    """Load consecutive pages of a prefix.

    Pages are counted from 0 at the start of the request's prefix. ``block_ids``
    has a row of as many blocks as a page has (its columns, layout.py) for each
    page from ``first_page`` on; most models' pages have one. The states of a model
    that keeps them are pages of their own, whose rows have nothing else: they are
    another spec of the same request, as if they followed the page that they end.
    ``refs[rank]`` is what takes over the leases of the lookup that found the pages
    on that rank's sidecar, and ``names`` (wire.names) what every rank must find there.
    Without refs the scheduler has nothing to load from: the load fails.
    A block id 0 is vLLM's null block and must not be written: the window of the
    tokens to come does not reach so far back. The worker reports
    the request as received exactly once, whatever happens.
    """

    request_id: str
    refs: tuple[LeaseRef, ...]
    first_page: int
    block_ids: list[int]
    names: bytes


@dataclass(slots=True)
class SaveSpec:
    """Store pages [new_from, first_page + len(hashes)) of a prefix.

    ``first_page`` is where the chunk of ``new_from`` starts (a multiple of
    pages_per_chunk), because a chunk that is extended may have to be written
    anew from its first page. ``hashes`` (digests back to back) has one entry a
    page from ``first_page`` on, ``block_ids`` a row, as in LoadSpec; where a block
    of a row is 0, vLLM does not have it any more, and the page is only named: it
    may be held, but cannot be written. (A page of attention has no states, and a
    state's page nothing else.) ``prev`` is the
    digest of page ``first_page - 1``, empty when there is none. The blocks stay
    pinned until every rank has named ``save_id`` in its worker metadata, which
    each rank does exactly once, whether the pages could be stored or not. With
    ``divided`` the ranks that hold the same pages (space.replicas) store every
    n-th chunk each, by the chunk's number in the prefix; else each stores all.
    """

    save_id: int
    request_id: str
    first_page: int
    prev: bytes
    hashes: bytes
    block_ids: list[int]
    divided: bool = False


@dataclass
class LookasideMetadata(KVConnectorMetadata):
    """The work of one step.

    There is nothing to fence before the forward: the source blocks of a save
    are pinned, so that preemption cannot hand them to anybody else.
    ``aborted`` names requests that vLLM finished while their load was out: the
    worker need not finish the copy but must still report them as received.
    ``timed`` is not 0 if the workers shall tell how long the step's forward took,
    under this number. ``idle`` says that vLLM computes nothing, in this step or in one
    that is under way: then a worker may wait for a load to end.
    """

    loads: list[LoadSpec] = field(default_factory=list)
    saves: list[SaveSpec] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    timed: int = 0
    idle: bool = False

    def is_empty(self) -> bool:
        """Whether the step has nothing for the workers to do."""
        return not (self.loads or self.saves or self.aborted or self.timed)


@dataclass
class LookasideWorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks finished since they last answered.

    ``saves_done`` maps a save id to how many ranks are done with its blocks;
    ``loads_failed`` maps a request id to how many ranks could not load it, so
    that the scheduler does not offer the same hit again. ``forward_seconds`` maps
    the number of a timed step to how long the slowest rank's forward took.
    """

    saves_done: dict[int, int] = field(default_factory=dict)
    loads_failed: dict[str, int] = field(default_factory=dict)
    forward_seconds: dict[int, float] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LookasideWorkerMetadata:
        """Put two ranks' answers together; neither operand changes."""
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
        return LookasideWorkerMetadata(done, failed, seconds)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell the scheduler."""
        return not (self.saves_done or self.loads_failed or self.forward_seconds)
