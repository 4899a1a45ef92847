"""Looks up on every rank's sidecar how much of a prefix it holds.

A LookupClient belongs to the scheduler role and is used by its thread alone: start sends, and poll
takes in answers that are there. Only Lookup.wait waits, for as long as it is told to at most. An
instance with N ranks has N sidecars. A page counts as held only if every rank has it, so the answer
is the smallest of N. If one rank cannot be asked, the answer is 0 at once. Ranks that hold the same
pages in the same sidecar have one session, which is asked once for all of them; below, these are
one rank.

**Deadlines.** A sidecar answers within a fraction of a millisecond for what lies in its memory. A
rank that says nothing for timeout_s is given up. Where computing the prefix would take long, the
rank gets a share of this time instead, up to longest_s: on a busy machine a sidecar may stand still
for a while, and its answer is still worth more than the wait costs. A rank whose session is suspect
gets no more than timeout_s. A rank that brings pages up from a tier below announces this first,
with the time that it expects to take; it then gets twice that time, within promotion_timeout_s. The
end of a sidecar is noticed at once, because its session ends.

**Leases.** A hit holds leases on the sidecar. They end in one of four ways: a worker's load takes
them over, cancel, trim, or the deadline that the sidecar puts on every lookup. A lookup that this
side gives up is cancelled. If its answer comes later, it is cancelled once more, because a full
queue may have dropped the first cancel.

**Secrets.** A message proves by the secret of its session's handshake that it is that session's.
Answers come over the session's direct socket, which no other process has. A worker that is to load
what a lookup has leased is given the lookup's ticket, which only the secret makes.

This module imports neither torch nor vLLM, and importing it opens nothing.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from lookaside import _native, wire
from lookaside.links import Link, Links
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# How often LookupClient.wait looks whether a session was lost.
_WAIT_SLICE_S = 0.05
# A rank that promotes may be late by this, beyond twice the time that it announced.
_PROMOTION_GRACE_S = 0.1
# The share of the time to compute a prefix that its lookup may take. An answer saves nearly all of
# that time. So a wait in vain, after which the rank is not asked again until it speaks, may cost a
# tenth more.
_PREFILL_SHARE = 0.1


class Lookup:
    """One question to all ranks. Made by LookupClient.start; scheduler thread only."""

    __slots__ = (
        *(
            "_asked",
            "_client",
            "_end_page",
            "_hits",
            "_in_memory",
            "_later",
            "_out",
            "_page_s",
            "_promised",
            "_result",
            "_since",
        ),
        *("began_us", "first_page", "id", "late", "page_bytes", "reason", "sources", "took_us"),
    )

    def __init__(
        self,
        client: LookupClient,
        lookup_id: int,
        first_page: int,
        pages: int,
        asked: tuple[tuple[int, bytes], ...],
        prefill_s: float,
    ) -> None:
        self._client = client
        self.id = lookup_id
        self.first_page = first_page
        """The page from which hits are counted."""
        self._asked = asked
        """The session's id and secret at each rank; id 0 where there was no session."""
        self._since = client._clock()
        self._end_page = first_page + pages
        self._page_s = prefill_s / max(1, pages)
        self._out = dict.fromkeys(range(len(asked)), self._since + client._patience_s(prefill_s))
        """When each rank that has not answered is given up."""
        self._promised: dict[int, float] = {}
        """Until when each rank that promotes pages may take at most."""
        self._hits: int | None = None
        self._in_memory = True
        self._later = False
        """A rank waits for a tier below its memory."""
        self._result: int | None = None
        self.late = False
        """It was given up at a rank's deadline."""
        # Of the rank that found the least; valid with the result.
        self.reason = 0
        """Why the hit ends where it does: a number in wire.REASONS."""
        self.took_us = 0
        self.began_us = 0
        """How long the lookup took in the sidecar, and when its loads from tiers began; 0: none."""
        self.sources = ""
        self.page_bytes = 0
        """Of a page at all ranks that have answered; 0 where nothing was found."""
        """Where pages lay, if not all of them in the arena."""

    @property
    def refs(self) -> tuple[wire.LeaseRef, ...]:
        """What the worker of each rank needs to load, by rank."""
        return tuple(
            ref
            for (session, secret), ranks in zip(self._asked, self._client._ranks, strict=True)
            for ref in (wire.LeaseRef(session, self.id, wire.ticket(secret, self.id)),) * ranks
        )

    @property
    def in_memory(self) -> bool:
        """Whether every rank's pages lie in its sidecar's own memory. Valid with the result."""
        return self._in_memory

    def poll(self) -> int | None:
        """Return the hit pages from first_page on; None while the answer of any rank is out.

        0 after a rank's deadline, and when its sidecar is gone.
        """
        if self._result is None:
            self._client._advance(self)
        return self._result

    @property
    def is_due(self) -> bool:
        """Whether the answer may come within a moment.

        It may not if a rank waits for a tier, or if the last wait for a rank was in vain and it has
        said nothing since.
        """
        return not self._later and not any(link.mute for link in self._client._links_out(self))

    def wait(self, timeout_s: float) -> int | None:
        """Poll until the answer is known, for so long at most and while it is due, without the
        GIL."""
        return self._client._wait_in_step(self, timeout_s)

    def trim(self, first_page: int) -> None:
        """Free the leases on chunks wholly below first_page.

        From here on the lookup waits no longer than the rest is worth.
        """
        self._client._send_all(
            self, lambda session, secret, lookup: wire.Trim(session, secret, lookup, first_page)
        )
        deadline = self._since + self._client._patience_s(
            (self._end_page - first_page) * self._page_s
        )
        for rank in self._out.keys() - self._promised.keys():
            self._out[rank] = min(self._out[rank], deadline)

    def cancel(self) -> None:
        """Free all leases; the result is 0 unless it was known. Safe to call again.

        Not for a lookup that a worker was told to load: the load would fail.
        """
        self._client._give_up(self, known=self._result)


class LookupClient:
    """See the module's comment."""

    def __init__(
        self,
        sessions: Sequence[Session],
        timeout_s: float,
        promotion_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        longest_s: float = 0.0,
        count: Callable[[str], None] = lambda name: None,
    ) -> None:
        """sessions, in the order of their ranks, are the caller's to start and close.

        With promotion_timeout_s 0 nothing is promoted for these lookups. longest_s is the most that
        a lookup may take if its prefix takes long to compute; without effect up to timeout_s.

        count is called for each lookup that is given up at its deadline (lookup_timeouts), that
        waits for a tier below the memory of a rank (lookups_promoted), and that misses because a
        rank was absent, suspect or lost, or did not read (lookups_unasked).
        """
        if not sessions:
            raise ValueError("a lookup needs at least one rank")
        self._sessions = tuple(sessions)
        self._ranks = tuple(session.options.ranks for session in sessions)
        self._digest_bytes = sessions[0].options.digest_bytes
        self._timeout_s = timeout_s
        self._longest_s = longest_s
        self._promotion_timeout_s = promotion_timeout_s
        self._deadline_ms = max(1, round(max(timeout_s, promotion_timeout_s) * 1000))
        self._clock = clock
        self._log = RateLimitedLog(logger)
        # Random start: ids from before a restart of this process do not come again.
        self._ids = itertools.count(secrets.randbits(48))
        self._pending: dict[int, Lookup] = {}
        self._links = Links(self._sessions, self._log)
        self._count = count
        self.late_answers = 0
        """Answers to lookups that had been given up."""

    def start(
        self,
        first_page: int,
        prev: bytes,
        hashes: bytes,
        recompute_us: int = 0,
        prefill_s: float = 0.0,
        tenant: str = "",
        request: str = "",
    ) -> Lookup:
        """Look up the pages with these digests, of which the first is page first_page.

        prev is the digest of the page before it. recompute_us is how long vLLM takes to compute a
        page, 0 if that is not known. prefill_s is what computing all that a hit can save would
        take. What is asked and hit is counted to tenant. request is the name, cut to
        wire.MAX_REQUEST_BYTES, by which people ask how the lookup ended.
        """
        self._links.adopt()
        lookup_id = next(self._ids) & 0xFFFFFFFFFFFFFFFF
        links = self._links.present
        asked = tuple(
            (link.session_id, link.secret) if link is not None else (0, b"") for link in links
        )
        pages = len(hashes) // self._digest_bytes
        lookup = Lookup(self, lookup_id, first_page, pages, asked, prefill_s)
        if not hashes:
            lookup._result = 0
            return lookup
        if not all(self._usable(rank) for rank in range(len(links))):
            self._count("lookups_unasked")
            lookup._result = 0
            return lookup
        self._pending[lookup_id] = lookup
        name = request.encode()[: wire.MAX_REQUEST_BYTES].decode(errors="ignore")
        for rank, link in enumerate(links):
            assert link is not None
            question = wire.Lookup(
                link.session_id,
                link.secret,
                lookup_id,
                first_page,
                prev,
                hashes,
                self._deadline_ms,
                recompute_us,
                tenant,
                name,
            )
            if not link.send(wire.encode(question)):
                self._count("lookups_unasked")
                self._log.warning(
                    "queue", "a lookup could not be sent: its rank reads nothing; a miss"
                )
                self._sessions[rank].doubt()
                self._give_up(lookup, known=None)
                break
        return lookup

    def advise(self, hashes: bytes, action: int, ms: int, priority: int, tenant: str) -> bool:
        """Advise every rank about the pages with these digests, from a prefix's first one on.

        action is one of wire.ADVISE_*. A rank that is absent, or does not read, is passed over.
        Returns whether all were told.
        """
        self._links.adopt()
        sent = bool(hashes)
        for link in self._links.present:
            if link is None:
                sent = False
                continue
            advice = wire.Advise(
                link.session_id, link.secret, 0, b"", hashes, action, ms, priority, tenant
            )
            sent = link.send(wire.encode(advice)) and sent
        return sent

    def wait(self, lookup: Lookup, timeout_s: float) -> int | None:
        """Poll until the answer is in, for timeout_s at most. For tools: a scheduler must not
        wait."""
        end = self._clock() + timeout_s
        while (hits := lookup.poll()) is None:
            left = min(end, *lookup._out.values()) - self._clock()
            if self._clock() >= end:
                return None
            self._wait_readable(lookup, min(_WAIT_SLICE_S, left))
        return hits

    def wait_readable(self, timeout_s: float, *others: int) -> None:
        """Wait until a rank has sent something or one of the other descriptors is readable, without
        the GIL. poll then takes in what is there."""
        fds = [link.fileno() for link in self._links.present if link is not None]
        _native.wait_readable([*fds, *others], max(0, round(timeout_s * 1e6)))

    def close(self) -> None:
        """Cancel what is out and close all sockets. The sessions stay."""
        for lookup in list(self._pending.values()):
            self._give_up(lookup, known=None)
        self._links.close()

    # ---- the scheduler's thread ----

    def _wait_in_step(self, lookup: Lookup, timeout_s: float) -> int | None:
        end = time.perf_counter() + timeout_s
        while (hits := lookup.poll()) is None:
            if not lookup.is_due:
                return None
            left = end - time.perf_counter()
            if left <= 0:
                for link in self._links_out(lookup):
                    link.mute = True
                return None
            self._wait_readable(lookup, left)
        return hits

    def _wait_readable(self, lookup: Lookup, timeout_s: float) -> None:
        """Wait until a rank whose answer is out has sent something."""
        fds = [link.fileno() for link in self._links_out(lookup)]
        _native.wait_readable(fds, max(0, round(timeout_s * 1e6)))

    def _links_out(self, lookup: Lookup) -> list[Link]:
        """Return the links to the ranks whose answers are out."""
        links = (self._links.present[rank] for rank in lookup._out)
        return [link for link in links if link is not None]

    def _patience_s(self, prefill_s: float) -> float:
        return max(self._timeout_s, min(_PREFILL_SHARE * prefill_s, self._longest_s))

    def _is_late(self, lookup: Lookup, rank: int, now: float) -> bool:
        """Report whether to give a rank up: it is past its time, or suspect and past timeout_s."""
        if now >= lookup._out[rank]:
            return True
        doubted = rank not in lookup._promised and self._sessions[rank].suspect
        return doubted and now >= lookup._since + self._timeout_s

    def _usable(self, rank: int) -> bool:
        link, session = self._links.present[rank], self._sessions[rank]
        return link is not None and session.available and session.session_id == link.session_id

    def _advance(self, lookup: Lookup) -> None:
        self._links.adopt()
        for rank in tuple(lookup._out):
            self._receive(rank, lookup)
        if lookup._result is not None:
            return
        for rank in lookup._out:
            link = self._links.present[rank]
            gone = link is None or link.session_id != lookup._asked[rank][0]
            if gone or not self._sessions[rank].connected:
                self._count("lookups_unasked")
                self._give_up(lookup, known=None)
                return
        now = self._clock()
        late = [rank for rank in lookup._out if self._is_late(lookup, rank, now)]
        if not late:
            return
        self._count("lookup_timeouts")
        lookup.late = True
        for rank in late:
            self._sessions[rank].doubt()
        if lookup._promised.keys().isdisjoint(late):
            waited_ms = (now - lookup._since) * 1000
            self._log.warning("timeout", "a lookup was not answered in %.0f ms; a miss", waited_ms)
        else:
            self._log.warning(
                "promotion", "pages promised to a lookup did not arrive in time; a miss"
            )
        self._give_up(lookup, known=None)

    def _receive(self, rank: int, wanted: Lookup) -> None:
        """Take in a rank's answers to any lookups, up to that to the wanted one."""
        link = self._links.present[rank]
        if link is None:
            return
        while rank in wanted._out and (data := link.receive()) is not None:
            link.mute = False
            try:
                answer = wire.decode(data)
            except wire.WireError as error:
                self._log.warning("garbage", "an answer that cannot be read: %s", error)
                continue
            if isinstance(answer, wire.LookupResult):
                self._answer(rank, link, answer)
            elif isinstance(answer, wire.LookupPending):
                self._promise(rank, link, answer)

    def _promise(self, rank: int, link: Link, promise: wire.LookupPending) -> None:
        """Give a rank that promotes the time that it asks for, promotion_timeout_s in all at
        most."""
        lookup = self._pending.get(promise.lookup)
        if lookup is None or lookup._asked[rank][0] != link.session_id:
            return
        lookup._later = True
        if rank not in lookup._out or not self._promotion_timeout_s or not promise.pages:
            return
        if not lookup._promised:
            self._count("lookups_promoted")
        now = self._clock()
        latest = lookup._promised.setdefault(rank, now + self._promotion_timeout_s)
        wanted = now + 2 * promise.eta_ms / 1000 + _PROMOTION_GRACE_S
        lookup._out[rank] = max(lookup._out[rank], min(latest, wanted))

    def _answer(self, rank: int, link: Link, answer: wire.LookupResult) -> None:
        lookup = self._pending.get(answer.lookup)
        if lookup is None or lookup._asked[rank][0] != link.session_id:
            self.late_answers += 1
            if answer.hit_pages:
                link.send(wire.encode(wire.Cancel(link.session_id, link.secret, answer.lookup)))
            return
        if rank not in lookup._out:
            return
        del lookup._out[rank]
        hits = answer.hit_pages
        lookup._in_memory = lookup._in_memory and bool(answer.in_memory)
        lookup.page_bytes += answer.hit_bytes // hits if hits else 0
        if lookup._hits is None or hits < lookup._hits or not lookup.took_us:
            lookup.reason, lookup.sources = answer.reason, answer.sources
            lookup.took_us, lookup.began_us = answer.took_us, answer.began_us
        lookup._hits = hits if lookup._hits is None else min(lookup._hits, hits)
        if not lookup._out:
            lookup._result = lookup._hits
            del self._pending[lookup.id]

    def _send_all(self, lookup: Lookup, make: Callable[[int, bytes, int], object]) -> None:
        """Send what make builds to every rank that may hold leases for the lookup."""
        for rank, (session_id, secret) in enumerate(lookup._asked):
            link = self._links.present[rank]
            if session_id and link is not None and link.session_id == session_id:
                link.send(wire.encode(make(session_id, secret, lookup.id)))

    def _give_up(self, lookup: Lookup, known: int | None) -> None:
        self._pending.pop(lookup.id, None)
        lookup._result = known or 0
        self._send_all(lookup, wire.Cancel)
