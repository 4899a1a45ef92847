"""One session with one sidecar: requests with deadlines, and reconnecting.

A Session owns one daemon thread, which alone connects, reads and reconnects. All other threads only
send: submit and send write to the socket from the calling thread, without blocking. (Handing a
message to another thread would cost more than sending it.) The reply appears in a Pending.

**Deadlines.** Nothing here waits for the sidecar without a deadline. A sidecar that is stopped
costs one deadline at most: after a missed one the session is *suspect*. A suspect session refuses
every submit at once, until the sidecar says anything at all; a Ping asks it to. An idle session is
pinged too, so that most stops are noticed before anybody waits.

**The end.** The socket closes when the sidecar dies. Then every Pending ends without a reply, the
subscribers are told, and the thread connects anew, forever, with a growing pause. Grants, leases
and addresses of the old session are void from then on; is_current reports this.

**Holds.** When our side of the socket closes, the sidecar may give what it granted to this process
to others. So whoever lets bytes move in the arena holds the socket (Session.hold). It closes when
the session has ended here, whoever ended it, and the last hold is released.

**Locks.** Session._lock guards all fields marked so, and is never held across anything that can
block. Subscribers are called on the session's thread without it.

This module imports neither torch nor vLLM, and importing it opens nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lookaside import wire
from lookaside.control import Control
from lookaside.endpoint import EndpointAbsent, EndpointError, open_endpoint
from lookaside.handshake import RefusedError, SessionOptions, greet, welcomed
from lookaside.heartbeat import Heartbeat
from lookaside.line import HandshakeError, Line, close_all
from lookaside.mapping import RegionError
from lookaside.ratelog import RateLimitedLog

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

_BACKOFF_FIRST_S = 0.1
_BACKOFF_LAST_S = 1.0
_REFUSED_BACKOFF_S = 5.0
_CONNECT_PATIENCE_S = 5.0
# A wait shorter than this since the request was sent says nothing about the sidecar.
_DOUBT_AFTER_S = 0.005
_MAX_OUTBOX = 4096


class SessionUnavailable(RuntimeError):
    """No session would answer now: there is none, or it is suspect."""


# What sidecars want users to know, logged once an hour for all ranks: their sidecars say the same.
_notices = RateLimitedLog(logger, every_s=3600.0)
_MAX_NOTICES = 256


class Subscriber(Protocol):
    """What is told of a session's life, always on the session's thread.

    An exception is logged and ends the connection, never the thread.
    """

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        """The handshake is done; ``session.connected`` turns true after this call."""
        ...

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        """The sidecar has added a data region; fd is closed after the call."""
        ...

    def on_region_removed(self, session: Session, region: int) -> None:
        """The sidecar wants a region unmapped, and a RegionUnmapped once it is."""
        ...

    def on_lost(self, session: Session) -> None:
        """The session that on_connected announced is over."""
        ...


class Pending:
    """One request that is out. Made by Session.submit."""

    __slots__ = ("_answered", "_given_up", "_on_late", "_reply", "_session", "_since")

    def __init__(self, session: Session, on_late: Callable[[Any], None] | None) -> None:
        self._session = session
        self._answered = threading.Event()
        self._reply: Any = None
        self._given_up = False
        self._on_late = on_late
        self._since = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether wait would return at once."""
        return self._answered.is_set()

    def wait_done(self, timeout_s: float) -> bool:
        """Wait for the reply or the session's end, without giving the request up.

        Returns whether one of them has come.
        """
        return self._answered.wait(timeout_s)

    def wait(self, timeout_s: float) -> Any:
        """Return the reply; None if none came in time or the session was lost.

        After a missed deadline the request is given up and the session is suspect. If the reply
        comes later, on_late gets it.
        """
        if self._answered.is_set() or (timeout_s > 0 and self._answered.wait(timeout_s)):
            return self._reply
        return self._session._give_up(self)


class Session:
    """See the module's comment. start connects, close ends the session for good.

    After a fork the child's copy is dead: it refuses everything, and holds nothing that would keep
    the parent's session alive.
    """

    def __init__(
        self,
        options: SessionOptions,
        on_absent: Callable[[], None] | None = None,
    ) -> None:
        """on_absent is called on the session's thread, in place of a warning, each time nothing
        listens."""
        self.options = options
        self._on_absent = on_absent
        self._log = RateLimitedLog(logger)
        self._subscribers: list[Subscriber] = []
        # Written by start and close, on whatever thread.
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._settled = threading.Event()
        self._up = threading.Event()
        # The thread's own.
        self._backoff = _BACKOFF_FIRST_S
        self._greeted: list[Subscriber] = []  # were told of the present session
        self._buffer = bytearray(wire.MAX_PACKET_BYTES + 1)

        self._lock = threading.Lock()
        # Guarded by _lock, all below.
        self._socket: socket.socket | None = None
        self._line: Line | None = None  # of _socket
        self._lines: tuple[Line, ...] = ()  # all that may be open; replaced, never changed
        self._control: Control | None = None
        self._direct: socket.socket | None = None  # until take_direct
        self._welcome: wire.Welcome | None = None
        self._connected = False
        self._suspect = False
        self._closed = False
        self._broken: str | None = None
        self._refused: wire.Refuse | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._outbox: deque[bytes] = deque()
        self._newcomers: list[Subscriber] = []
        _live_sessions.add(self)

    # ---- life ----

    def subscribe(self, subscriber: Subscriber) -> None:
        """Tell subscriber of every later connection, and of the present one if there is one.

        A subscriber of a running session is not told of the regions that it has.
        """
        with self._lock:
            self._subscribers.append(subscriber)
            if self._connected:
                self._newcomers.append(subscriber)
        self._wake()

    def start(self) -> None:
        """Begin connecting in the background. Call once."""
        with self._lock:
            if self._closed or self._thread is not None:
                return
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            # Not closed earlier: any thread may be about to write to it.
            weakref.finalize(self, os.close, self._wake_fd)
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
            self._closed = True
            thread = self._thread
        self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    # ---- state ----

    @property
    def connected(self) -> bool:
        """Whether there is a session. It may be suspect."""
        return self._connected

    @property
    def available(self) -> bool:
        """Whether submit would send: the session is connected and not suspect."""
        return self._connected and not self._suspect

    @property
    def suspect(self) -> bool:
        """Whether the sidecar has missed a deadline and said nothing since."""
        return self._suspect

    @property
    def session_id(self) -> int:
        """The id of the present session, 0 when there is none."""
        welcome = self._welcome
        return welcome.session if welcome is not None and self._connected else 0

    @property
    def generation(self) -> int:
        """The run of the sidecar that the present session belongs to, 0 when there is none."""
        welcome = self._welcome
        return welcome.generation if welcome is not None and self._connected else 0

    @property
    def welcome(self) -> wire.Welcome | None:
        """The sidecar's answer to the handshake of the present session."""
        return self._welcome if self._connected else None

    @property
    def refused(self) -> wire.Refuse | None:
        """The last refusal, None once a handshake has succeeded."""
        return self._refused

    def is_current(self, session_id: int) -> bool:
        """Report whether session_id is the present session and its sidecar lives.

        It asks the kernel. So it notices a sidecar killed an instant ago, even if the session's
        thread has not run since.
        """
        with self._lock:
            welcome = self._welcome
            if not self._connected or welcome is None or welcome.session != session_id:
                return False
            if self._broken is not None or self._socket is None or self._control is None:
                return False
            if self._control.generation != welcome.generation:
                return False
            if self._control.state not in (Control.SERVING, Control.DRAINING):
                return False
            poller = select.poll()
            poller.register(self._socket, select.POLLRDHUP)
            return not poller.poll(0)

    def take_direct(self) -> socket.socket | None:
        """Return the direct socket of the present session, which is the caller's from then on.

        None if it was taken before, or if there is none. For a subscriber in on_connected.
        """
        with self._lock:
            direct, self._direct = self._direct, None
            return direct

    def hold(self) -> Callable[[], None]:
        """Keep the present session's socket open until the result is called, once, on any thread.

        The session may end meanwhile; its sidecar learns that only when the socket closes. For a
        subscriber in on_connected.
        """
        with self._lock:
            line = self._line
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
    ) -> Pending:
        """Send the request that make builds for a fresh id. Never blocks.

        on_late gets the reply if it comes after Pending.wait gave up; it runs on the session's
        thread. Raises SessionUnavailable.
        """
        pending = Pending(self, on_late)
        with self._lock:
            if not self._connected or self._broken is not None:
                raise SessionUnavailable("not connected")
            if self._suspect:
                raise SessionUnavailable("the sidecar does not answer")
            request_id = next(self._ids) & 0xFFFFFFFF
            self._pending[request_id] = pending
            if not self._transmit(wire.encode(make(request_id))):
                self._pending.pop(request_id, None)
                self._suspect = True
                self._wake()
                raise SessionUnavailable("the sidecar does not read")
        return pending

    def send(self, message: Any, session_id: int) -> bool:
        """Send a message without reply if session_id is the present session. Never blocks.

        What the socket does not take now is sent later. Returns False if the message will not be
        sent: the session that it was meant for is over, and the sidecar has undone what the message
        was about.
        """
        with self._lock:
            welcome = self._welcome
            if not self._connected or self._broken is not None or welcome is None:
                return False
            if welcome.session != session_id:
                return False
            data = wire.encode(message)
            if self._outbox or not self._transmit(data):
                if self._broken is not None:
                    return False
                self._outbox.append(data)
                if len(self._outbox) > _MAX_OUTBOX:
                    # Dropping one message would leak what it frees. Ending the session frees
                    # everything.
                    self._broken = "the sidecar has not read for too long"
                self._wake()
        return True

    def doubt(self) -> None:
        """Note a missed deadline: the session is suspect until the sidecar speaks."""
        with self._lock:
            if not self._connected or self._suspect:
                return
            self._suspect = True
        self._wake()

    def _give_up(self, pending: Pending) -> Any:
        with self._lock:
            if pending._answered.is_set():
                return pending._reply
            pending._given_up = True
        if time.monotonic() - pending._since >= _DOUBT_AFTER_S:
            self.doubt()
        return None

    def _transmit(self, data: bytes) -> bool:
        """Send now if the socket takes it; return whether it did. The caller holds _lock."""
        if self._socket is None or self._outbox:
            return False
        try:
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            return True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._broken = str(error)
            self._wake()
            return False

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            try:
                os.eventfd_write(self._wake_fd, 1)
            except OSError:
                pass  # already signalled, or closed

    # ---- the thread ----

    def _run(self) -> None:
        while not self._closed:
            pause = self._attempt()
            self._settled.set()
            self._backoff = min(self._backoff * 2, _BACKOFF_LAST_S)
            self._pause(pause)
        self._settled.set()

    def _attempt(self) -> float:
        """Connect and serve once; return how long to pause before the next attempt."""
        try:
            self._connect()
            self._backoff = _BACKOFF_FIRST_S
            self._settled.set()
            self._serve()
            return self._backoff
        except EndpointAbsent as error:
            if self._on_absent is None:
                self._log.warning("absent", "no sidecar answers: %s; serving without it", error)
                return self._backoff
            try:
                self._on_absent()
            except Exception:
                self._log.warning("autostart", "starting a sidecar failed", exc_info=True)
            return self._backoff
        except RefusedError as error:
            with self._lock:
                self._refused = error.refusal
            if error.refusal.code == "no_worker":
                # Its worker has not connected yet. That is an order of arrival, no fault.
                logger.debug("sidecar at %s: %s", self.options.endpoint, error)
                return self._backoff
            self._log.warning(
                f"refused {error.refusal.code} {error.refusal.field}",
                "the sidecar at %s refused this engine: %s",
                self.options.endpoint,
                error,
            )
            return (
                self._backoff if error.refusal.code in ("busy", "draining") else _REFUSED_BACKOFF_S
            )
        except (EndpointError, HandshakeError, RegionError, OSError) as error:
            self._log.warning(
                type(error).__name__, "session with %s: %s", self.options.endpoint, error
            )
            return _BACKOFF_LAST_S if isinstance(error, EndpointError) else self._backoff
        except Exception:
            self._log.warning("bug", "session with %s", self.options.endpoint, exc_info=True)
            return _BACKOFF_LAST_S
        finally:
            self._drop()

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        while not self._closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if poller.poll(left * 1000):
                self._drain_wake()

    def _drain_wake(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def _connect(self) -> None:
        """Connect, and perform the handshake until all regions are mapped."""
        options = self.options
        line = Line(open_endpoint(options.endpoint))
        with self._lock:
            self._socket = line.socket
            self._line = line
            self._lines = (*(each for each in self._lines if each.is_open), line)
            self._broken = None
        deadline = time.monotonic() + _CONNECT_PATIENCE_S
        greet(line, options)
        message, control, direct = welcomed(*self._receive_by(deadline), options)
        with self._lock:
            self._control = control
            self._direct = direct
            if control.generation != message.generation:
                raise HandshakeError("control region and welcome are of different sidecar runs")
            self._welcome = message
        self._greeted = list(self._subscribers)
        for subscriber in self._greeted:
            subscriber.on_connected(self, message)
        for _ in range(message.regions):
            added, fds = self._receive_by(deadline)
            if not isinstance(added, wire.RegionAdded):
                close_all(fds)
                raise HandshakeError(f"{type(added).__name__} for a RegionAdded")
            self._hand_over(added, fds)
        with self._lock:
            self._connected = True
            self._suspect = False
            self._refused = None
            self._newcomers = [s for s in self._subscribers if s not in self._greeted]
        self._up.set()
        logger.info(
            "session %x with the sidecar at %s: %d regions, generation %x",
            message.session,
            options.endpoint,
            message.regions,
            message.generation,
        )

    def _hand_over(self, added: wire.RegionAdded, fds: list[int]) -> None:
        try:
            if len(fds) != 1:
                raise HandshakeError(f"RegionAdded with {len(fds)} fds")
            for subscriber in self._greeted:
                subscriber.on_region(self, added, fds[0])
        finally:
            close_all(fds)

    def _receive_by(self, deadline: float) -> tuple[Any, list[int]]:
        """Return the next message of the handshake with its fds.

        Raises HandshakeError at the deadline.
        """
        poller = select.poll()
        assert self._line is not None
        poller.register(self._line.socket, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        while True:
            received = self._line.receive(self._buffer)
            if received is not None:
                return received
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                raise HandshakeError("no answer to the handshake")
            for fd, _ in poller.poll(left * 1000):
                if fd == self._wake_fd:
                    self._drain_wake()

    def _serve(self) -> None:
        """Dispatch messages until the session ends; return or raise when it has."""
        assert self._line is not None
        line, beat = self._line, Heartbeat(time.monotonic())
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        while True:
            with self._lock:
                if self._broken is not None:
                    raise ConnectionResetError(self._broken)
                self._flush()
                newcomers, self._newcomers = self._newcomers, []
                suspect = self._suspect
                events = select.POLLIN | (select.POLLOUT if self._outbox else 0)
            if self._closed:
                return
            for subscriber in newcomers:
                assert self._welcome is not None
                self._greeted.append(subscriber)
                subscriber.on_connected(self, self._welcome)

            now = time.monotonic()
            if beat.wants_ping(now, suspect):
                with self._lock:
                    if self._transmit(wire.encode(wire.Ping(next(self._ids) & 0xFFFFFFFF))):
                        beat.pinged = now
                    else:
                        # A sidecar that reads nothing is as suspect as one that does not answer.
                        self._suspect = suspect = True
            if beat.is_late(now):
                with self._lock:
                    self._suspect = True
            poller.register(line.socket, events)
            poller.poll(max(0.0, beat.due(now, suspect) - now) * 1000)
            self._drain_wake()

            while (received := line.receive(self._buffer)) is not None:
                beat.heard, message = time.monotonic(), received[0]
                if isinstance(message, wire.Pong):
                    beat.pinged = None
                with self._lock:
                    self._suspect = False
                self._dispatch(message, received[1])

    def _flush(self) -> None:
        """Send what waits in the outbox, as far as the socket takes it. The caller holds _lock."""
        assert self._socket is not None
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            self._outbox.popleft()

    def _dispatch(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, wire.RegionAdded):
            self._hand_over(message, fds)
            return
        close_all(fds)
        if isinstance(message, wire.RegionRemoved):
            for subscriber in self._greeted:
                subscriber.on_region_removed(self, message.region)
            return
        if isinstance(message, wire.Pong):
            return
        if isinstance(message, wire.Notice):
            if message.text in _notices.counts or len(_notices.counts) < _MAX_NOTICES:
                _notices.warning(message.text, "lookaside: %s", message.text)
            return
        request_id = getattr(message, "id", None)
        if not isinstance(
            message, (wire.StoreGrant, wire.LoadGrant, wire.Cleared, wire.Events, wire.Error)
        ):
            raise HandshakeError(f"unexpected {type(message).__name__}")
        with self._lock:
            pending = self._pending.pop(request_id, None) if request_id is not None else None
            if pending is None:
                late = None
            elif pending._given_up:
                late = pending._on_late
            else:
                late = None
                pending._reply = message
                pending._answered.set()
        if isinstance(message, wire.Error) and pending is None:
            self._log.warning(
                "error", "the sidecar complains: %s: %s", message.code, message.message
            )
        if late is not None:
            late(message)

    def _drop(self) -> None:
        """Forget the session that was, and tell everybody who waits for it.

        Its socket closes here, unless somebody holds it.
        """
        with self._lock:
            was = self._greeted
            self._greeted = []
            self._connected = False
            self._suspect = False
            self._up.clear()
            pending, self._pending = list(self._pending.values()), {}
            self._outbox.clear()
            self._newcomers.clear()
            self._socket = None
            line, self._line = self._line, None
            control, self._control = self._control, None
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        if line is not None:
            line.release()
        if control is not None:
            control.close()
        for each in pending:
            each._answered.set()
        for subscriber in was:
            try:
                subscriber.on_lost(self)
            except Exception:
                self._log.warning("on_lost", "a subscriber failed", exc_info=True)

    def _forget_after_fork(self) -> None:
        """Give the session up in a forked child, where its locks must not be touched."""
        self._lock = threading.Lock()
        self._closed = True
        self._connected = False
        self._thread = None
        self._socket = None
        for line in self._lines:
            line.socket.close()  # closes the child's descriptor only
        self._wake_fd = -1


_live_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_live_sessions):
        session._forget_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
