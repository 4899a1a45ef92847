"""One session with one sidecar, which connects anew whenever it ends.

A Session owns one daemon thread, which alone connects, reads and reconnects. All other threads only
send. connection.py has the requests, their deadlines and what makes a session suspect.

**The end.** The socket closes when the sidecar dies. Then every Pending ends without a reply, the
subscribers are told, and the thread connects anew, forever: at once and often in the first seconds,
then with a growing pause. Grants and leases of the old session are void from then on; is_current
reports this.

**Holds.** When our side of the socket closes, the sidecar may give what it granted to this process
to others. So whoever lets bytes move in the arena holds the socket (Session.hold). It closes when
the session has ended here, whoever ended it, and the last hold is released. A worker's claim says
the same to the sidecar that comes next (line.py): it stays open until that one has welcomed us.

**Locks.** Session._lock guards all fields marked so, also those of the connection, and is never
held across anything that can block. Subscribers are called on the session's thread without it.

This module imports neither torch nor vLLM, and importing it opens nothing.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lookaside import wire
from lookaside.connection import Connection, Pending, SessionUnavailable
from lookaside.handshake import RefusedError, SessionOptions
from lookaside.line import Line
from lookaside.ratelog import RateLimitedLog
from lookaside.retries import Retries
from lookaside.wakeup import Wakeup

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# How long what a session leaves is kept without another session. A sidecar that was stopped on
# purpose frees its memory, and workers must not have it for ever.
_KEEP_S = 300.0


class Subscriber:
    """What is told of a session's life, always on the session's thread.

    An exception is logged and ends the connection, never the thread. Subclasses take what they
    need; what they leave out does nothing.
    """

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        """The handshake is done; ``session.connected`` turns true after this call."""

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        """The sidecar has added a data region; fd is closed after the call."""

    def on_regions_ready(self, session: Session) -> None:
        """The sidecar has added all regions that it begins with. Others may still come."""

    def on_region_removed(self, session: Session, region: int) -> None:
        """The sidecar wants a region unmapped, and a RegionUnmapped once it is."""

    def on_weights_named(self, session: Session, epoch: str) -> None:
        """An operator has named the weights that the engine has, or is about to have."""

    def on_lost(self, session: Session) -> None:
        """The session that on_connected announced is over."""

    def on_given_up(self, session: Session) -> None:
        """There has been no session for so long that what the last one left is not worth keeping.

        Called once between two connections. The thread goes on connecting.
        """


class _Subscribers:
    """The subscribers of a session, as the audience of its connections."""

    def __init__(self, session: Session, lock: threading.Lock, log: RateLimitedLog) -> None:
        self._session = session
        self._log = log
        self._greeted: list[Subscriber] = []  # the thread's own: were told of the connection
        self._lock = lock
        # Guarded by _lock.
        self._all: list[Subscriber] = []
        self._newcomers: list[Subscriber] = []

    def add(self, subscriber: Subscriber, connected: bool) -> None:
        """Add a subscriber, which is told of the present connection. The caller holds _lock."""
        self._all.append(subscriber)
        if connected:
            self._newcomers.append(subscriber)

    def note_connected(self) -> None:
        """Who came during the handshake is a newcomer. The caller holds _lock."""
        self._newcomers = [s for s in self._all if s not in self._greeted]

    def welcome(self, welcome: wire.Welcome) -> None:
        self._greeted = list(self._all)
        for subscriber in self._greeted:
            subscriber.on_connected(self._session, welcome)

    def welcome_newcomers(self, welcome: wire.Welcome) -> None:
        with self._lock:
            newcomers, self._newcomers = self._newcomers, []
        for subscriber in newcomers:
            self._greeted.append(subscriber)
            subscriber.on_connected(self._session, welcome)

    def add_region(self, region: wire.RegionAdded, fd: int) -> None:
        for subscriber in self._greeted:
            subscriber.on_region(self._session, region, fd)

    def remove_region(self, region: int) -> None:
        for subscriber in self._greeted:
            subscriber.on_region_removed(self._session, region)

    def regions_ready(self) -> None:
        for subscriber in self._greeted:
            subscriber.on_regions_ready(self._session)

    def name_weights(self, epoch: str) -> None:
        for subscriber in self._greeted:
            subscriber.on_weights_named(self._session, epoch)

    def note_lost(self) -> None:
        """Tell those who were told of the connection that it is over."""
        with self._lock:
            self._newcomers.clear()
        lost, self._greeted = self._greeted, []
        self._tell(lost, "on_lost")

    def note_given_up(self) -> None:
        """Tell everybody that nothing of the last session is kept any more."""
        with self._lock:
            everybody = list(self._all)
        self._tell(everybody, "on_given_up")

    def _tell(self, whom: list[Subscriber], what: str) -> None:
        for subscriber in whom:
            try:
                getattr(subscriber, what)(self._session)
            except Exception:
                self._log.warning(what, "a subscriber failed", exc_info=True)


class Session:
    """See the module's comment. start connects, close ends the session for good.

    After a fork the child's copy is dead: it refuses everything, and holds nothing that would keep
    the parent's session alive.
    """

    def __init__(
        self,
        options: SessionOptions,
        on_absent: Callable[[], None] | None = None,
        held: Callable[[], list[int]] = list,
    ) -> None:
        """on_absent is called on the session's thread, in place of a warning, each time nothing
        listens. held returns the descriptors to send with a Hello, which the session closes."""
        self.options = options
        """Replaced, never changed; the next connection is of what it is then."""
        self._held = held
        self._log = RateLimitedLog(logger)
        # The thread's own.
        self._retries = Retries(lambda: self.options.where, self._log, on_absent)
        self._lost_at: float | None = None  # since when there is no session that was there before
        self._wakeup = Wakeup()
        # Written by start and close, on whatever thread.
        self._thread: threading.Thread | None = None
        self._settled = threading.Event()
        self._up = threading.Event()

        self._lock = threading.Lock()
        self._subscribers = _Subscribers(self, self._lock, self._log)
        # Guarded by _lock, all below.
        self._connection: Connection | None = None  # the last one; it may have ended
        self._lines: tuple[Line, ...] = ()  # all that may be open; replaced, never changed
        self._refused: wire.Refuse | None = None
        _live_sessions.add(self)

    # ---- life ----

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell subscriber of every later connection, and of the present one if there is one.

        A subscriber of a running session is not told of the regions that it has.
        """
        with self._lock:
            self._subscribers.add(subscriber, self.connected)
        self._wakeup.set()

    def start(self) -> None:
        """Begin connecting in the background. Call once."""
        with self._lock:
            if self._wakeup.ended or self._thread is not None:
                return
            self._wakeup.open()
            # Not closed earlier: any thread may be about to write to it. Not at the interpreter's
            # end either, when the session's thread may still poll it.
            weakref.finalize(self, os.close, self._wakeup.fd).atexit = False
            self._thread = threading.Thread(
                target=self._run, name=f"lookaside-{self.options.role}", daemon=True
            )
        self._thread.start()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait for the first attempt to connect to end in any way; return whether it succeeded."""
        self._settled.wait(timeout_s)
        return self.connected

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until the session is connected; return whether it is."""
        self._up.wait(timeout_s)
        return self.connected

    def close(self, timeout_s: float = 1.0) -> None:
        """End the session and its thread. Safe to call again."""
        with self._lock:
            self._wakeup.ended = True
            thread = self._thread
        self._wakeup.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def move(self, fields: Mapping[str, str]) -> None:
        """Connect anew with other fields, in another space. Any thread may call it.

        connected is false on return, and true again when a sidecar has welcomed the session there.
        """
        with self._lock:
            self.options = replace(self.options, fields=dict(fields))
            if self._connection is not None:
                self._connection.leave()
        self._wakeup.set()

    # ---- state ----

    @property
    def connected(self) -> bool:
        """Whether there is a session. It may be suspect."""
        connection = self._connection
        return connection is not None and connection.connected

    @property
    def settled(self) -> bool:
        """Whether the first attempt to connect has ended in any way."""
        return self._settled.is_set()

    @property
    def available(self) -> bool:
        """Whether submit would send: the session is connected and not suspect."""
        connection = self._connection
        return connection is not None and connection.connected and not connection.suspect

    @property
    def suspect(self) -> bool:
        """Whether the sidecar has missed a deadline and said nothing since."""
        connection = self._connection
        return connection is not None and connection.suspect

    @property
    def session_id(self) -> int:
        """The id of the present session, 0 when there is none."""
        welcome = self.welcome
        return welcome.session if welcome is not None else 0

    @property
    def generation(self) -> int:
        """The run of the sidecar that the present session belongs to, 0 when there is none."""
        welcome = self.welcome
        return welcome.generation if welcome is not None else 0

    @property
    def welcome(self) -> wire.Welcome | None:
        """The sidecar's answer to the handshake of the present session.

        Another one, with another endpoint, once another process has taken the session over.
        """
        connection = self._connection
        return connection.welcome if connection is not None and connection.connected else None

    @property
    def refused(self) -> wire.Refuse | None:
        """The last refusal, None once a handshake has succeeded."""
        return self._refused

    def is_current(self, session_id: int) -> bool:
        """Report whether session_id is the present session and its sidecar lives.

        It asks the kernel. So it notices a sidecar killed an instant ago, even if the session's
        thread has not run since.
        """
        connection = self._connection
        return connection is not None and connection.is_current(session_id)

    def take_direct(self) -> socket.socket | None:
        """Return the direct socket of the present session, which is the caller's from then on.

        None if it was taken before, or if there is none. For a subscriber in on_connected.
        """
        connection = self._connection
        return connection.take_direct() if connection is not None else None

    def hold(self) -> Callable[[], None]:
        """Keep the present session's socket open until the result is called, once, on any thread.

        The session may end meanwhile; its sidecar learns that only when the socket closes. For a
        subscriber in on_connected.
        """
        with self._lock:
            line = self._connection.line if self._connection is not None else None
            if line is None:
                raise SessionUnavailable("not connected")
            line.hold()

        def release() -> None:
            line.release()
            # This also keeps the session for as long: a fork has to find it.
            with self._lock:
                self._lines = tuple(each for each in self._lines if each.is_open)

        return release

    # ---- requests ----

    def submit(
        self,
        make: Callable[[int], Any],
        on_late: Callable[[Any], None] | None = None,
        session_id: int | None = None,
    ) -> Pending:
        """Send the request that make builds for a fresh id. Never blocks.

        on_late gets the reply if it comes after Pending.wait gave up; it runs on the thread that
        reads then. With session_id it is sent in that session or not at all. Raises
        SessionUnavailable.
        """
        connection = self._connection
        if connection is None:
            raise SessionUnavailable("not connected")
        return connection.submit(make, on_late, session_id)

    def send(self, message: Any, session_id: int) -> bool:
        """Send a message without reply if session_id is the present session. Never blocks.

        What the socket does not take now is sent later. Returns False if the message will not be
        sent: the session that it was meant for is over, and the sidecar has undone what the message
        was about.
        """
        connection = self._connection
        return connection is not None and connection.send(message, session_id)

    def send_later(self, message: Any, session_id: int) -> bool:
        """Send a message without reply with the next message of any kind, or by flush.

        So both are one system call, and wake the sidecar once. Returns as send does.
        """
        connection = self._connection
        return connection is not None and connection.send_later(message, session_id)

    def flush(self) -> None:
        """Send what send_later has left."""
        connection = self._connection
        if connection is not None:
            connection.flush()

    def doubt(self) -> None:
        """Note a missed deadline: the session is suspect until the sidecar speaks."""
        connection = self._connection
        if connection is not None:
            connection.doubt()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._wakeup.ended:
            pause_s = self._attempt()
            self._settled.set()
            self._give_up_if_late()
            self._pause(pause_s)
        self._end_claims()
        self._settled.set()

    def _attempt(self) -> float:
        """Connect and serve once; return how long to pause before the next attempt."""
        try:
            connection = self._connect()
            self._lost_at = None
            self._retries.note_connected()
            self._settled.set()
            connection.serve()
            return self._retries.pause_s(None) if not connection.left else self._retries.hurry()
        except Exception as error:
            if isinstance(error, RefusedError):
                with self._lock:
                    self._refused = error.refusal
            return self._retries.pause_s(error)
        finally:
            self._drop()

    def _connect(self) -> Connection:
        """Connect, and perform the handshake until all regions are mapped."""
        options = self.options
        connection = Connection(
            options, self._subscribers, self._lock, self._wakeup, self._log, self._held
        )
        with self._lock:
            assert connection.line is not None
            self._connection = connection
            self._lines = (*(each for each in self._lines if each.is_open), connection.line)
        welcome = connection.shake_hands()
        self._end_claims(but=connection.line)
        with self._lock:
            connection.connected = not connection.left
            self._refused = None
            self._subscribers.note_connected()
        self._up.set()
        logger.info(
            "session %x with the sidecar at %s: %d regions, generation %x",
            welcome.session,
            options.where,
            welcome.regions,
            welcome.generation,
        )
        return connection

    def _end_claims(self, but: Line | None = None) -> None:
        """End the claims of all sessions before that of a line: the next sidecar knows of us, or
        none is expected. Those with copies under way end with them."""
        for line in self._lines:
            if line is not but:
                line.end_claim()
        with self._lock:
            self._lines = tuple(each for each in self._lines if each.is_open)

    def _give_up_if_late(self) -> None:
        """Keep nothing of the last session if that ended long ago."""
        if self._lost_at is not None and time.monotonic() - self._lost_at >= _KEEP_S:
            self._lost_at = None
            self._subscribers.note_given_up()
            self._end_claims()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._wakeup.fd, select.POLLIN)
        while not self._wakeup.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if poller.poll(left * 1000):
                self._wakeup.clear()

    def _drop(self) -> None:
        """End the connection, and tell everybody who was told of it."""
        if self._up.is_set() and self._lost_at is None:
            self._lost_at = time.monotonic()
        self._up.clear()
        if self._connection is not None:
            self._connection.end()
        self._subscribers.note_lost()

    def _forget_after_fork(self) -> None:
        """Give the session up in a forked child, where its locks must not be touched."""
        self._lock = threading.Lock()
        self._wakeup.ended = True
        self._wakeup.fd = -1
        self._thread = None
        if self._connection is not None:
            self._connection.forget_after_fork()
        for line in self._lines:
            line.forget_after_fork()


_live_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_live_sessions):
        session._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
