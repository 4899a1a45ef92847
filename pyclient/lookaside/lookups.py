"""Asks every rank's sidecar how much of a prefix it holds, without ever waiting.

A LookupClient belongs to the scheduler role and is used by its thread alone:
start sends, poll looks whether the answers are in. An instance with N ranks has
N sidecars; a page counts as held only if every rank has it, so the answer is the
smallest of N, and if one rank cannot be asked the answer is 0 at once. Ranks that
hold the same pages in the same sidecar have one session, which is asked once for
all of them; below, that is one rank.

What lies in a sidecar's memory is answered within a fraction of a millisecond, and
a rank that says nothing for timeout_s is given up. Where computing the prefix would take
long, that is a share of this time instead, up to longest_s: on a busy machine a sidecar may
stand still for a while, and its answer is still worth more than what the wait costs. A rank
whose session is suspect gets no more than timeout_s. One that has to bring pages up
from a tier below says so first, and when it expects them; it is then given twice
that time, within promotion_timeout_s. A sidecar that ends meanwhile is noticed at
once, because its session ends.

An answer means leases on the sidecar, which end in one of four ways: a worker
loads them (the sidecar hands the lease over), cancel, trim, or the deadline that
the sidecar puts on every lookup. A lookup that this side has given up is cancelled
when it is given up, and once more if its answer still comes, because the first
cancel may have been dropped with a full queue.

Messages prove that they are a session's by the secret that its handshake gave it,
and answers are sent to whoever listens under that secret as its routing id: other
processes of the user can connect to both sockets. A worker that is to load what a
lookup has leased is given the lookup's ticket, which only the secret makes.

The sockets are ZMQ over ``ipc://``, a PUSH and a DEALER per session. They are made
and connected on the session's thread, which waits until both are up before it
lets the session count as connected (an answer sent to a DEALER that is not up yet
would be lost), and then belong to the scheduler's thread; the lock between the
two is the memory fence that ZMQ asks for when a socket changes threads.

This module imports neither torch nor vLLM, and importing it opens nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from lookaside import wire
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

_HANDSHAKE_PATIENCE_S = 1.0
_MAX_ANSWER_BYTES = 256
# Messages that the sidecar has not read yet. libzmq counts those late that it has, so
# that this must be far above a burst of requests; the breaker bounds what piles up.
_SEND_QUEUE = 4096
_RECEIVE_QUEUE = 4096
# How long wait goes without looking whether a session was lost.
_WAIT_SLICE_MS = 50
# What a rank that promotes may be late by, beside twice the time that it named.
_PROMOTION_GRACE_S = 0.1
# Of the time that computing a prefix takes, what its lookup may. An answer saves nearly all of that
# time, so that a wait in vain, after which the rank is not asked again until it speaks, may well
# cost a tenth more.
_PREFILL_SHARE = 0.1


class _Link:
    """The two sockets of one rank's present session. The scheduler thread's own."""

    __slots__ = ("pull", "push", "secret", "session_id")

    def __init__(self, push: zmq.Socket, pull: zmq.Socket, session_id: int, secret: bytes) -> None:
        self.push = push
        self.pull = pull
        self.session_id = session_id
        self.secret = secret

    def send(self, data: bytes) -> bool:
        """Queue a message; False if the queue is full."""
        try:
            self.push.send(data, zmq.DONTWAIT)
            return True
        except zmq.ZMQError:
            return False

    def close(self) -> None:
        self.push.close(0)
        self.pull.close(0)


class Lookup:
    """One question to all ranks. Made by LookupClient.start; scheduler thread only."""

    __slots__ = (
        *(
            "_asked",
            "_client",
            "_end_page",
            "_hits",
            "_out",
            "_page_s",
            "_promised",
            "_result",
            "_since",
        ),
        *("first_page", "id"),
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
        """The page that the hits are counted from."""
        self._asked = asked
        """The scheduler's id and secret in every session; 0 where there was none."""
        self._since = client._clock()
        self._end_page = first_page + pages
        self._page_s = prefill_s / max(1, pages)
        self._out = dict.fromkeys(range(len(asked)), self._since + client._patience_s(prefill_s))
        """The ranks that have not answered, and when each is given up."""
        self._promised: dict[int, float] = {}
        """The ranks that promote pages, and until when they may at most."""
        self._hits: int | None = None
        self._result: int | None = None

    @property
    def refs(self) -> tuple[wire.LeaseRef, ...]:
        """Of every rank: what its worker needs to load."""
        return tuple(
            ref
            for (session, secret), ranks in zip(self._asked, self._client._ranks, strict=True)
            for ref in (wire.LeaseRef(session, self.id, wire.ticket(secret, self.id)),) * ranks
        )

    def poll(self) -> int | None:
        """Hit pages from first_page on, or None while the answer of any rank is out.

        0 at a rank's deadline, and when its sidecar is gone.
        """
        if self._result is None:
            self._client._advance(self)
        return self._result

    def trim(self, first_page: int) -> None:
        """Free the leases on chunks wholly below first_page, and wait no longer than for what is
        left."""
        self._client._tell(
            self, lambda session, secret, lookup: wire.Trim(session, secret, lookup, first_page)
        )
        deadline = self._since + self._client._patience_s(
            (self._end_page - first_page) * self._page_s
        )
        for rank in self._out.keys() - self._promised.keys():
            self._out[rank] = min(self._out[rank], deadline)

    def cancel(self) -> None:
        """Free everything; the result is 0 unless it was known. Safe to repeat.

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
    ) -> None:
        """sessions, in the order of their ranks, are the caller's to start and close.

        With promotion_timeout_s 0 nothing is promoted for these lookups. longest_s is what a
        lookup may take at most whose prefix takes long to compute; not above timeout_s: no longer.
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
        self._pid = os.getpid()
        # Random start: after a restart of this process no id of before returns.
        self._ids = itertools.count(secrets.randbits(48))
        self._pending: dict[int, Lookup] = {}
        self._links: list[_Link | None] = [None] * len(self._sessions)
        self.timeouts = 0
        """Lookups that were given up at their deadline."""
        self.promotions = 0
        """Lookups that had to wait for a tier below the memory of a rank."""
        self.late_answers = 0
        """Answers that came after that."""
        self.unasked = 0
        """Lookups that were a miss because a rank was not there, suspect, lost, or did not read."""

        self._lock = threading.Lock()
        # Guarded by _lock; filled on the sessions' threads.
        self._context: zmq.Context | None = None
        self._fresh: dict[int, _Link | None] = {}
        self._closed = False
        self._stale = False  # read without the lock, as a hint that _fresh has something
        for rank, session in enumerate(self._sessions):
            session.subscribe(_Linker(self, rank))

    def start(
        self,
        first_page: int,
        prev: bytes,
        hashes: bytes,
        recompute_us: int = 0,
        prefill_s: float = 0.0,
    ) -> Lookup:
        """Ask about the pages whose digests are given, the first being first_page.

        prev is the digest of the page before it, recompute_us how long vLLM takes
        to compute a page (0: not known), prefill_s what it would take to compute all
        that a hit can save.
        """
        self._adopt()
        lookup_id = next(self._ids) & 0xFFFFFFFFFFFFFFFF
        links = self._links
        asked = tuple(
            (link.session_id, link.secret) if link is not None else (0, b"") for link in links
        )
        pages = len(hashes) // self._digest_bytes
        lookup = Lookup(self, lookup_id, first_page, pages, asked, prefill_s)
        if not hashes:
            lookup._result = 0
            return lookup
        if not all(self._usable(rank) for rank in range(len(links))):
            self.unasked += 1
            lookup._result = 0
            return lookup
        self._pending[lookup_id] = lookup
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
            )
            if not link.send(wire.encode(question)):
                self.unasked += 1
                self._log.warning(
                    "queue", "a lookup could not be sent: its rank reads nothing; a miss"
                )
                self._sessions[rank].doubt()
                self._give_up(lookup, known=None)
                break
        return lookup

    def wait(self, lookup: Lookup, timeout_s: float) -> int | None:
        """poll, but waiting up to timeout_s. For tools; a scheduler must not wait."""
        end = self._clock() + timeout_s
        while (hits := lookup.poll()) is None:
            left = min(end, *lookup._out.values()) - self._clock()
            if self._clock() >= end:
                return None
            links = [self._links[rank] for rank in lookup._out]
            zmq.zmq_poll(
                [(link.pull, zmq.POLLIN) for link in links if link is not None],
                max(0, min(_WAIT_SLICE_MS, int(left * 1000) + 1)),
            )
        return hits

    def close(self) -> None:
        """Cancel what is out and close all sockets. The sessions stay."""
        for lookup in list(self._pending.values()):
            self._give_up(lookup, known=None)
        with self._lock:
            self._closed = True
            fresh, self._fresh = self._fresh, {}
            context, self._context = self._context, None
        for link in [*self._links, *fresh.values()]:
            if link is not None:
                link.close()
        self._links = [None] * len(self._sessions)
        if context is not None and os.getpid() == self._pid:
            # Not term: it would wait for a session thread that is linking right now.
            context.destroy(0)

    # ---- the scheduler's thread ----

    def _patience_s(self, prefill_s: float) -> float:
        return max(self._timeout_s, min(_PREFILL_SHARE * prefill_s, self._longest_s))

    def _is_late(self, lookup: Lookup, rank: int, now: float) -> bool:
        """Whether a rank is to be given up: past its time, or suspect and past what every rank
        has."""
        if now >= lookup._out[rank]:
            return True
        doubted = rank not in lookup._promised and self._sessions[rank].suspect
        return doubted and now >= lookup._since + self._timeout_s

    def _usable(self, rank: int) -> bool:
        link, session = self._links[rank], self._sessions[rank]
        return link is not None and session.available and session.session_id == link.session_id

    def _adopt(self) -> None:
        """Take over the links that the sessions' threads have made or withdrawn."""
        if not self._stale:
            return
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            self._stale = False
        for rank, link in fresh.items():
            old, self._links[rank] = self._links[rank], link
            if old is not None:
                old.close()

    def _advance(self, lookup: Lookup) -> None:
        self._adopt()
        for rank in tuple(lookup._out):
            self._receive(rank, lookup)
        if lookup._result is not None:
            return
        for rank in lookup._out:
            link = self._links[rank]
            gone = link is None or link.session_id != lookup._asked[rank][0]
            if gone or not self._sessions[rank].connected:
                self.unasked += 1
                self._give_up(lookup, known=None)
                return
        now = self._clock()
        late = [rank for rank in lookup._out if self._is_late(lookup, rank, now)]
        if not late:
            return
        self.timeouts += 1
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
        """Take in a rank's answers, of whichever lookup, up to the wanted one."""
        link = self._links[rank]
        if link is None:
            return
        # Asking for the socket's state first: an exception for "nothing there" costs more.
        while rank in wanted._out and int(link.pull.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                data = link.pull.recv(zmq.DONTWAIT)
            except zmq.ZMQError as error:
                self._log.warning("receive", "lookup socket: %s", error)
                return
            try:
                answer = wire.decode(data)
            except wire.WireError as error:
                self._log.warning("garbage", "an answer that cannot be read: %s", error)
                continue
            if isinstance(answer, wire.LookupResult):
                self._answer(rank, link, answer)
            elif isinstance(answer, wire.LookupPending):
                self._promise(rank, link, answer)

    def _promise(self, rank: int, link: _Link, promise: wire.LookupPending) -> None:
        """Give a rank that promotes the time that it asks for: in all no longer than
        promotion_timeout_s."""
        lookup = self._pending.get(promise.lookup)
        if lookup is None or lookup._asked[rank][0] != link.session_id:
            return
        if rank not in lookup._out or not self._promotion_timeout_s:
            return
        if not lookup._promised:
            self.promotions += 1
        now = self._clock()
        latest = lookup._promised.setdefault(rank, now + self._promotion_timeout_s)
        wanted = now + 2 * promise.eta_ms / 1000 + _PROMOTION_GRACE_S
        lookup._out[rank] = max(lookup._out[rank], min(latest, wanted))

    def _answer(self, rank: int, link: _Link, answer: wire.LookupResult) -> None:
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
        lookup._hits = hits if lookup._hits is None else min(lookup._hits, hits)
        if not lookup._out:
            lookup._result = lookup._hits
            del self._pending[lookup.id]

    def _tell(self, lookup: Lookup, make: Callable[[int, bytes, int], object]) -> None:
        """Send every rank that may hold leases for the lookup what make builds."""
        for rank, (session_id, secret) in enumerate(lookup._asked):
            link = self._links[rank]
            if session_id and link is not None and link.session_id == session_id:
                link.send(wire.encode(make(session_id, secret, lookup.id)))

    def _give_up(self, lookup: Lookup, known: int | None) -> None:
        self._pending.pop(lookup.id, None)
        lookup._result = known or 0
        self._tell(lookup, wire.Cancel)

    # ---- the sessions' threads ----

    def _link(self, rank: int, welcome: wire.Welcome) -> None:
        with self._lock:
            if self._closed:
                return
            if self._context is None:
                self._context = zmq.Context()
                self._context.set(zmq.BLOCKY, 0)
            context = self._context
        push = context.socket(zmq.PUSH)
        pull = context.socket(zmq.DEALER)
        link = _Link(push, pull, welcome.session, welcome.secret)
        try:
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
            pull.setsockopt(zmq.LINGER, 0)
            pull.setsockopt(zmq.ROUTING_ID, welcome.secret)
            pull.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
            pull.setsockopt(zmq.MAXMSGSIZE, _MAX_ANSWER_BYTES)
            deadline = time.monotonic() + _HANDSHAKE_PATIENCE_S
            up = _connect(pull, welcome.reply_endpoint, deadline)
            up = _connect(push, welcome.lookup_endpoint, deadline) and up
        except BaseException:
            link.close()
            raise
        if not up:
            self._log.warning("link", "the lookup sockets of rank %d are slow to connect", rank)
        self._post(rank, link)

    def _post(self, rank: int, link: _Link | None) -> None:
        with self._lock:
            old = self._fresh.get(rank)
            if self._closed:
                old, link = link, None
            else:
                self._fresh[rank] = link
                self._stale = True
        if old is not None:
            old.close()


class _Linker:
    """Follows one rank's session for a LookupClient (session.Subscriber)."""

    def __init__(self, client: LookupClient, rank: int) -> None:
        self._client = client
        self._rank = rank

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self._client._link(self._rank, welcome)

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        pass  # a scheduler is given no regions

    def on_region_removed(self, session: Session, region: int) -> None:
        pass

    def on_lost(self, session: Session) -> None:
        self._client._post(self._rank, None)


def _connect(sock: zmq.Socket, endpoint: str, deadline: float) -> bool:
    """Connect, and wait until the peer is there; False if it is not by the deadline."""
    monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        sock.connect(endpoint)
        left = deadline - time.monotonic()
        if not monitor.poll(max(0, int(left * 1000))):
            return False
        recv_monitor_message(monitor)
        return True
    finally:
        sock.disable_monitor()
        monitor.close(0)
