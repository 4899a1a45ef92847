"""The direct sockets over which every rank's present session looks up.

The sidecar passes one with its Welcome (SOCK_SEQPACKET, one message a packet, both ways). A
session's thread takes it and hands it to the scheduler's thread, whose own it is from then on. A
message that it does not take now, because it is longer than a packet may be or because too many
wait, goes to the sidecar's ZMQ socket instead. All answers come over the direct socket.

This module imports neither torch nor vLLM, and importing it opens nothing.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Sequence

import zmq

from lookaside import wire
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session, Subscriber

_MAX_ANSWER_BYTES = 256
# Messages over ZMQ that the sidecar has not read yet. libzmq learns late of those that it has read,
# so this must be far above a burst of requests. A suspect session bounds what piles up.
_SEND_QUEUE = 4096


class Link:
    """The lookup sockets of one rank's present session. The scheduler thread's own."""

    __slots__ = (
        "_context",
        "_direct",
        "_endpoint",
        "_pid",
        "_push",
        "_session",
        "mute",
        "secret",
        "session_id",
    )

    def __init__(self, direct: socket.socket, session: Session, welcome: wire.Welcome) -> None:
        """welcome is the session's present one."""
        self._direct = direct
        self._session = session
        self._endpoint = ""  # the ZMQ endpoint that _push is connected to
        self._context: zmq.Context | None = None
        self._push: zmq.Socket | None = None
        self._pid = os.getpid()
        self.session_id = welcome.session
        self.secret = welcome.secret
        self.mute = False
        """An answer was waited for in vain, and nothing has come since."""

    def fileno(self) -> int:
        """Return the descriptor that is readable when an answer is there."""
        return self._direct.fileno()

    def send(self, data: bytes) -> bool:
        """Send or queue a message without waiting; False if neither is possible."""
        try:
            self._direct.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                return False
        return self._queue(data)

    def receive(self) -> bytes | None:
        """Return the next answer, or None if there is none now. Never waits."""
        try:
            return self._direct.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT) or None
        except OSError:
            return None

    def close(self) -> None:
        self._direct.close()
        if self._push is not None and self._context is not None and os.getpid() == self._pid:
            self._push.close(0)
            self._context.term()

    def _queue(self, data: bytes) -> bool:
        """Send over ZMQ. Its socket is made when the first message needs it.

        The endpoint changes when another process takes the session over.
        """
        welcome = self._session.welcome
        if welcome is None or welcome.session != self.session_id or not welcome.lookup_endpoint:
            return False
        try:
            push = self._push
            if push is not None and self._endpoint != welcome.lookup_endpoint:
                push.disconnect(self._endpoint)
                self._endpoint = welcome.lookup_endpoint
                push.connect(self._endpoint)
            if push is None:
                self._context = zmq.Context()
                self._context.set(zmq.BLOCKY, 0)
                push = self._push = self._context.socket(zmq.PUSH)
                push.setsockopt(zmq.LINGER, 0)
                push.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
                self._endpoint = welcome.lookup_endpoint
                push.connect(self._endpoint)
            push.send(data, zmq.DONTWAIT)
            return True
        except zmq.ZMQError:
            return False


class Links:
    """The links of all ranks, by rank. For the scheduler's thread, but for what is marked."""

    def __init__(self, sessions: Sequence[Session], log: RateLimitedLog) -> None:
        self._log = log
        self.present: list[Link | None] = [None] * len(sessions)
        """None for a rank without a session."""

        self._lock = threading.Lock()
        # Guarded by _lock; filled on the sessions' threads.
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
        for link in [*self.present, *fresh.values()]:
            if link is not None:
                link.close()
        self.present = [None] * len(self.present)

    # ---- the sessions' threads ----

    def link(self, rank: int, session: Session, welcome: wire.Welcome) -> None:
        """Take the direct socket of a rank's new session."""
        direct = session.take_direct()
        if direct is None:
            self._log.warning("link", "rank %d has no direct socket: its lookups miss", rank)
            return
        self.post(rank, Link(direct, session, welcome))

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


class _Linker(Subscriber):
    """Follows one rank's session for Links."""

    def __init__(self, links: Links, rank: int) -> None:
        self._links = links
        self._rank = rank

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self._links.link(self._rank, session, welcome)

    def on_lost(self, session: Session) -> None:
        self._links.post(self._rank, None)
