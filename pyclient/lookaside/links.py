"""The lookup sockets of every rank's present session.

They are ZMQ over ``ipc://``, a PUSH and a DEALER for each session. A session's thread makes and
connects them. It waits until both are up before it lets the session count as connected: an answer
sent to a DEALER that is not up yet would be lost. From then on they belong to the scheduler's
thread. The lock between the two threads is the memory fence that ZMQ asks for when a socket changes
threads.

This module imports neither torch nor vLLM, and importing it opens nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from lookaside import wire
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session

_HANDSHAKE_PATIENCE_S = 1.0
_MAX_ANSWER_BYTES = 256
# Messages that the sidecar has not read yet. libzmq learns late of those that it has read, so this
# must be far above a burst of requests. A suspect session bounds what piles up.
_SEND_QUEUE = 4096
_RECEIVE_QUEUE = 4096


class Link:
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


class Links:
    """The links of all ranks, by rank. For the scheduler's thread, but for what is marked."""

    def __init__(self, sessions: Sequence[Session], log: RateLimitedLog) -> None:
        self._log = log
        self._pid = os.getpid()
        self.present: list[Link | None] = [None] * len(sessions)
        """None for a rank without a session."""

        self._lock = threading.Lock()
        # Guarded by _lock; filled on the sessions' threads.
        self._context: zmq.Context | None = None
        self._fresh: dict[int, Link | None] = {}
        self._closed = False
        self._stale = False  # read without the lock, as a hint that _fresh has something
        for rank, session in enumerate(sessions):
            session.subscribe(_Linker(self, rank))

    def adopt(self) -> None:
        """Take over the links that the sessions' threads have made or withdrawn."""
        if not self._stale:
            return
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            self._stale = False
        for rank, link in fresh.items():
            old, self.present[rank] = self.present[rank], link
            if old is not None:
                old.close()

    def close(self) -> None:
        """Close all sockets. The sessions stay."""
        with self._lock:
            self._closed = True
            fresh, self._fresh = self._fresh, {}
            context, self._context = self._context, None
        for link in [*self.present, *fresh.values()]:
            if link is not None:
                link.close()
        self.present = [None] * len(self.present)
        if context is not None and os.getpid() == self._pid:
            # Not term: it would wait for a session thread that is linking right now.
            context.destroy(0)

    # ---- the sessions' threads ----

    def link(self, rank: int, welcome: wire.Welcome) -> None:
        """Make and connect the sockets of a rank's new session."""
        with self._lock:
            if self._closed:
                return
            if self._context is None:
                self._context = zmq.Context()
                self._context.set(zmq.BLOCKY, 0)
            context = self._context
        push = context.socket(zmq.PUSH)
        pull = context.socket(zmq.DEALER)
        link = Link(push, pull, welcome.session, welcome.secret)
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
        self.post(rank, link)

    def post(self, rank: int, link: Link | None) -> None:
        """Hand a rank's link, or that it has none, to the scheduler's thread."""
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
    """Follows one rank's session for Links (session.Subscriber)."""

    def __init__(self, links: Links, rank: int) -> None:
        self._links = links
        self._rank = rank

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self._links.link(self._rank, welcome)

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        pass  # a scheduler is given no regions

    def on_region_removed(self, session: Session, region: int) -> None:
        pass

    def on_lost(self, session: Session) -> None:
        self._links.post(self._rank, None)


def _connect(sock: zmq.Socket, endpoint: str, deadline: float) -> bool:
    """Connect, and wait for the peer; return whether it is there by the deadline."""
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
