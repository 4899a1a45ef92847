"""One connection to a sidecar: its handshake, the requests on it, and its end.

The session's thread alone connects. submit and send write to the socket from the calling thread,
without blocking. (Handing a message to another thread would cost more than sending it.) The reply
appears in a Pending.

**Who reads.** The session's thread reads, and wakes who waits. Waking a thread takes as long as the
sidecar's answer. So Pending.wait_here reads on the calling thread: it borrows the socket, and the
session's thread leaves the socket alone until the loan ends. A borrower takes replies. At any other
message it gives the socket back, because that message must be handled before what follows it.

**Deadlines.** Nothing here waits for the sidecar without a deadline. A sidecar that is stopped
costs one deadline at most: after a missed one the connection is *suspect*. A suspect connection
refuses every submit at once, until the sidecar says anything at all; a Ping asks it to. An idle
connection is pinged too, so that most stops are noticed before anybody waits.

**Locks.** The session's lock guards all fields marked so, and is never held across anything that
can block. The audience is told on the session's thread, without it. Whoever reads holds _reading,
from before a message is received until it is dispatched; the session's lock is taken inside.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from lookaside import _native, notices, wire
from lookaside.control import Control
from lookaside.endpoint import HOSTS_SOCKET_NAME, SOCKET_NAME, open_endpoint
from lookaside.handshake import SessionOptions, greet, welcomed
from lookaside.heartbeat import Heartbeat
from lookaside.line import HandshakeError, Line, close_all
from lookaside.ratelog import RateLimitedLog
from lookaside.wakeup import Wakeup

_CONNECT_PATIENCE_S = 5.0
# A wait shorter than this since the request was sent says nothing about the sidecar.
_DOUBT_AFTER_S = 0.005
_MAX_OUTBOX = 4096
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # as a number: enums are slow
# Messages that wait for the next one, so that all are one system call and wake the sidecar once.
_MAX_LATER = 32
# How long a thread that has waited for a reply keeps the socket for its next one.
_LOAN_S = 0.1
# How often a borrower looks whether the session has ended on this side.
_LOOK_S = 0.05
_REPLIES = (
    wire.StoreGrant,
    wire.LoadGrant,
    wire.Contained,
    wire.Cleared,
    wire.Events,
    wire.Error,
)


def _slice_us(left_s: float) -> int:
    return max(0, round(min(left_s, _LOOK_S) * 1e6))


class SessionUnavailable(RuntimeError):
    """No session would answer now: there is none, or it is suspect."""


class Audience(Protocol):
    """What is told of a connection's life, on the session's thread."""

    def welcome(self, welcome: wire.Welcome) -> None:
        """The sidecar has welcomed the session."""
        ...

    def welcome_newcomers(self, welcome: wire.Welcome) -> None:
        """The connection goes on. Called between any two waits for messages."""
        ...

    def add_region(self, region: wire.RegionAdded, fd: int) -> None:
        """The sidecar has added a data region; fd is closed after the call."""
        ...

    def remove_region(self, region: int) -> None:
        """The sidecar wants a region unmapped."""
        ...

    def regions_ready(self) -> None:
        """The sidecar has added all regions that it begins with."""
        ...

    def name_weights(self, epoch: str) -> None:
        """An operator has named the engine's weights."""
        ...


class Pending:
    """One request that is out. Made by Connection.submit."""

    __slots__ = ("_answered", "_connection", "_given_up", "_on_late", "_reply", "_since")

    def __init__(self, connection: Connection, on_late: Callable[[Any], None] | None) -> None:
        self._connection = connection
        self._answered = threading.Event()
        self._reply: Any = None
        self._given_up = False
        self._on_late = on_late
        self._since = time.monotonic()

    @property
    def done(self) -> bool:
        """Whether wait would return at once."""
        return self._answered.is_set()

    @property
    def session_id(self) -> int:
        """The session that the request was sent in."""
        welcome = self._connection.welcome
        return welcome.session if welcome is not None else 0

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
        return self._connection._give_up(self)

    def wait_here(self, timeout_s: float) -> Any:
        """Return what wait returns, sooner: this thread reads the reply from the socket.

        It pays where one thread asks at a time. Others that wait are served by the session's
        thread.
        """
        if self._answered.is_set() or self._connection._read_for(self, timeout_s):
            return self._reply
        return self._connection._give_up(self)


class Connection:
    """One socket of a session, until it ends. The session's thread makes and ends it."""

    def __init__(
        self,
        options: SessionOptions,
        audience: Audience,
        lock: threading.Lock,
        wakeup: Wakeup,
        log: RateLimitedLog,
        held: Callable[[], list[int]],
    ) -> None:
        """Connect to the sidecar's socket. Raises EndpointError."""
        self._options = options
        self._held = held
        self._audience = audience
        self._wakeup = wakeup
        self._log = log
        self._reading = threading.Lock()
        # Guarded by _reading.
        self._buffer = bytearray(wire.MAX_PACKET_BYTES + 1)
        self._inbox: deque[tuple[Any, list[int]]] = deque()  # read by a borrower, for the thread
        # Written by borrowers, read by the session's thread; each is one value.
        self._lent_until = 0.0  # the moment until which borrowers read
        self._heard = 0.0  # when a borrower last received anything

        self._lock = lock
        # Guarded by _lock, all below.
        self.line: Line | None = Line(
            open_endpoint(options.endpoint, HOSTS_SOCKET_NAME if options.remote else SOCKET_NAME)
        )
        """None once the connection has ended."""
        self.welcome: wire.Welcome | None = None
        self.connected = False
        """The handshake is over, and the connection has not ended."""
        self.left = False
        """It ends because the session moves to another space."""
        self.suspect = False
        """The sidecar has missed a deadline and said nothing since."""
        self._control: Control | None = None
        self._direct: socket.socket | None = None  # until take_direct
        self._broken: str | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending] = {}
        self._outbox: deque[bytes] = deque()
        self._later: list[bytes] = []  # is sent with what is sent next; below _MAX_LATER
        self._followers = 0  # threads in wait_here that do not read

    def is_current(self, session_id: int) -> bool:
        """Report whether session_id is this session's and its sidecar lives.

        It asks the kernel. So it notices a sidecar killed an instant ago, even if the session's
        thread has not run since.
        """
        with self._lock:
            welcome = self.welcome
            if not self.connected or welcome is None or welcome.session != session_id:
                return False
            if self._broken is not None or self.line is None or self._control is None:
                return False
            if self._control.generation != welcome.generation:
                return False
            if self._control.state not in (Control.SERVING, Control.DRAINING):
                return False
            poller = select.poll()
            poller.register(self.line.socket, select.POLLRDHUP)
            return not poller.poll(0)

    def take_direct(self) -> socket.socket | None:
        """Return the direct socket, which is the caller's from then on; None if there is none."""
        with self._lock:
            direct, self._direct = self._direct, None
            return direct

    # ---- requests ----

    def submit(
        self,
        make: Callable[[int], Any],
        on_late: Callable[[Any], None] | None = None,
        session_id: int | None = None,
    ) -> Pending:
        """Send the request that make builds for a fresh id; see Session.submit."""
        pending = Pending(self, on_late)
        with self._lock:
            if not self.connected or self._broken is not None:
                raise SessionUnavailable("not connected")
            if session_id is not None and (
                self.welcome is None or self.welcome.session != session_id
            ):
                raise SessionUnavailable("another session")
            if self.suspect:
                raise SessionUnavailable("the sidecar does not answer")
            request_id = next(self._ids) & 0xFFFFFFFF
            self._pending[request_id] = pending
            if not self._transmit(wire.encode(make(request_id))):
                self._pending.pop(request_id, None)
                self.suspect = True
                self._wakeup.set()
                raise SessionUnavailable("the sidecar does not read")
        return pending

    def send(self, message: Any, session_id: int) -> bool:
        """Send a message without reply if session_id is this session's; see Session.send."""
        with self._lock:
            welcome = self.welcome
            if not self.connected or self._broken is not None or welcome is None:
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
                self._wakeup.set()
        return True

    def doubt(self) -> None:
        """Note a missed deadline: the connection is suspect until the sidecar speaks."""
        with self._lock:
            if not self.connected or self.suspect:
                return
            self.suspect = True
        self._wakeup.set()

    def leave(self) -> None:
        """End the connection soon, on its thread; it is not connected from now on.

        The caller holds _lock, and sets the wakeup afterwards.
        """
        self.left, self.connected = True, False

    def _give_up(self, pending: Pending) -> Any:
        with self._lock:
            if pending._answered.is_set():
                return pending._reply
            pending._given_up = True
        if time.monotonic() - pending._since >= _DOUBT_AFTER_S:
            self.doubt()
        return None

    def send_later(self, message: Any, session_id: int) -> bool:
        """Send a message with the next one, or by flush; see Session.send_later."""
        with self._lock:
            welcome = self.welcome
            if not self.connected or self._broken is not None or welcome is None:
                return False
            if welcome.session != session_id:
                return False
            self._later.append(wire.encode(message))
            if len(self._later) < _MAX_LATER:
                return True
        self.flush()
        return True

    def flush(self) -> None:
        """Send what send_later has left."""
        with self._lock:
            if self._later and not self._transmit():
                self._wakeup.set()

    def _transmit(self, *data: bytes) -> bool:
        """Send what waits for the next message, and then data, now if the socket takes it.

        Returns whether it took data. What waited and was not taken goes to the outbox. The caller
        holds _lock.
        """
        if self.line is None or self._outbox:
            return False
        packets, self._later = (*self._later, *data), []
        try:
            sent = _native.send_packets(self.line.socket.fileno(), packets)
        except OSError as error:
            self._broken = str(error)
            self._wakeup.set()
            return False
        if sent == len(packets):
            return True
        self._outbox.extend(packets[sent : len(packets) - len(data)])
        return not data and not self._outbox

    def _flush(self) -> None:
        """Send what waits in the outbox, as far as the socket takes it. The caller holds _lock."""
        assert self.line is not None
        self._outbox.extend(self._later)
        self._later.clear()
        while self._outbox:
            try:
                self.line.socket.send(self._outbox[0], _SEND_FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            self._outbox.popleft()

    # ---- borrowers ----

    def _read_for(self, pending: Pending, timeout_s: float) -> bool:
        """Wait for a reply, and read the socket meanwhile; return whether the reply is there."""
        now = time.monotonic()
        end = now + timeout_s
        line = self._borrow(now)
        try:
            while not pending._answered.is_set():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                if line is None or not self._reading.acquire(blocking=False):
                    return self._follow(pending, left)
                try:
                    if self._inbox:
                        line = self._give_back(line)
                    elif _native.wait_readable((line.socket.fileno(),), _slice_us(left)):
                        line = self._take_replies(line, pending)
                finally:
                    self._reading.release()
            return True
        finally:
            if line is not None:
                line.release()

    def _follow(self, pending: Pending, timeout_s: float) -> bool:
        """Wait for a reply that another thread reads."""
        with self._lock:
            self._followers += 1
        try:
            self._take_back()  # a borrower may end before our reply comes
            return pending._answered.wait(timeout_s)
        finally:
            with self._lock:
                self._followers -= 1

    def _borrow(self, now: float) -> Line | None:
        """Return the line, held, to read from; None if it is not to be had."""
        with self._lock:
            line = self.line
            if line is None or self._broken is not None or not self.connected or self._followers:
                return None
            line.hold()
        lent, self._lent_until = self._lent_until, now + _LOAN_S
        if lent < now:
            self._wakeup.set()  # the session's thread is to leave the socket alone
        return line

    def _take_back(self) -> None:
        """Have the session's thread read."""
        self._lent_until = 0.0
        self._wakeup.set()

    def _give_back(self, line: Line) -> None:
        line.release()
        self._take_back()

    def _take_replies(self, line: Line, pending: Pending) -> Line | None:
        """Take what the socket has, up to a reply; return the line, or None if it is given back.

        The caller holds _reading.
        """
        try:
            while not pending._answered.is_set():
                received = line.receive(self._buffer)
                if received is None:
                    break
                self._heard = time.monotonic()
                if not isinstance(received[0], _REPLIES):
                    self._inbox.append(received)
                    return self._give_back(line)
                close_all(received[1])
                if self.suspect:
                    with self._lock:
                        self.suspect = False
                self._answer(received[0])
        except (OSError, HandshakeError) as error:
            with self._lock:
                self._broken = str(error)
            return self._give_back(line)
        return line

    # ---- the session's thread ----

    def shake_hands(self) -> wire.Welcome:
        """Perform the handshake until all regions are mapped. The caller then sets connected."""
        assert self.line is not None
        deadline = time.monotonic() + _CONNECT_PATIENCE_S
        held = self._held()
        try:
            greet(self.line, self._options, held)
        finally:
            close_all(held)
        answer, fds = self._receive_by(deadline)
        welcome, control = welcomed(answer, fds, self._options)
        with self._lock:
            self._control = control
            if self._options.role == "scheduler":
                self._direct = socket.socket(fileno=fds.pop())
            else:
                self.line.take_claim(fds.pop())
            if control.generation != welcome.generation:
                raise HandshakeError("control region and welcome are of different sidecar runs")
            self.welcome = welcome
        self._audience.welcome(welcome)
        for _ in range(welcome.regions):
            added, fds = self._receive_by(deadline)
            if not isinstance(added, wire.RegionAdded):
                close_all(fds)
                raise HandshakeError(f"{type(added).__name__} for a RegionAdded")
            self._hand_over(added, fds)
        if not welcome.preparing:
            self._audience.regions_ready()
        return welcome

    def _hand_over(self, added: wire.RegionAdded, fds: list[int]) -> None:
        try:
            if len(fds) != 1:
                raise HandshakeError(f"RegionAdded with {len(fds)} fds")
            self._audience.add_region(added, fds[0])
        finally:
            close_all(fds)

    def _receive_by(self, deadline: float) -> tuple[Any, list[int]]:
        """Return the next message of the handshake with its fds.

        Raises HandshakeError at the deadline.
        """
        poller = select.poll()
        assert self.line is not None
        poller.register(self.line.socket, select.POLLIN)
        poller.register(self._wakeup.fd, select.POLLIN)
        while True:
            received = self.line.receive(self._buffer)
            if received is not None:
                return received
            left = deadline - time.monotonic()
            if left <= 0 or self._wakeup.ended:
                raise HandshakeError("no answer to the handshake")
            for fd, _ in poller.poll(left * 1000):
                if fd == self._wakeup.fd:
                    self._wakeup.clear()

    def serve(self) -> None:
        """Dispatch messages until the session ends; return or raise when it has."""
        assert self.line is not None and self.welcome is not None
        line, beat = self.line, Heartbeat(time.monotonic())
        poller = select.poll()
        poller.register(self._wakeup.fd, select.POLLIN)
        while True:
            with self._lock:
                if self._broken is not None:
                    raise ConnectionResetError(self._broken)
                if self.left:
                    return
                self._flush()
                suspect = self.suspect
                events = select.POLLOUT if self._outbox else 0
            if self._wakeup.ended:
                return
            self._audience.welcome_newcomers(self.welcome)

            now = time.monotonic()
            beat.heard = max(beat.heard, self._heard)
            lent_s = self._lent_until - now
            if lent_s <= 0:
                events |= select.POLLIN
            if beat.wants_ping(now, suspect):
                with self._lock:
                    if self._transmit(wire.encode(wire.Ping(next(self._ids) & 0xFFFFFFFF))):
                        beat.pinged = now
                    else:
                        # A sidecar that reads nothing is as suspect as one that does not answer.
                        self.suspect = suspect = True
            if beat.is_late(now):
                with self._lock:
                    self.suspect = True
            poller.register(line.socket, events)
            pause_s = max(0.0, beat.due(now, suspect) - now)
            woken = poller.poll((min(pause_s, lent_s) if lent_s > 0 else pause_s) * 1000)
            self._wakeup.clear()
            ended = any(got & ~(select.POLLIN | select.POLLOUT) for _, got in woken)
            if self._lent_until <= time.monotonic() or ended:
                self._take(line, beat)

    def _take(self, line: Line, beat: Heartbeat) -> None:
        """Take in what borrowers have left, and what the socket has."""
        with self._reading:
            while True:
                received = self._inbox.popleft() if self._inbox else line.receive(self._buffer)
                if received is None:
                    return
                beat.heard, message = time.monotonic(), received[0]
                if isinstance(message, wire.Pong):
                    beat.pinged = None
                with self._lock:
                    self.suspect = False
                self._dispatch(message, received[1])

    def _dispatch(self, message: Any, fds: list[int]) -> None:
        if isinstance(message, wire.RegionAdded):
            self._hand_over(message, fds)
            return
        if isinstance(message, wire.Moved):
            self._move(message, fds)
            return
        close_all(fds)
        if isinstance(message, wire.RegionRemoved):
            self._audience.remove_region(message.region)
        elif isinstance(message, wire.RegionsReady):
            self._audience.regions_ready()
        elif isinstance(message, wire.Notice):
            notices.show(message.text)
        elif isinstance(message, wire.NameWeights):
            self._audience.name_weights(message.epoch)
        elif isinstance(message, (*_REPLIES, wire.Pong)):
            self._answer(message)
        else:
            raise HandshakeError(f"unexpected {type(message).__name__}")

    def _move(self, message: wire.Moved, fds: list[int]) -> None:
        """Look at the control region of the process that serves the session from now on."""
        try:
            if len(fds) != 1:
                raise HandshakeError(f"Moved with {len(fds)} fds")
            control = Control(fds[0])
        finally:
            close_all(fds)
        with self._lock:
            if self._control is not None:
                self._control.close()
            self._control = control
            if control.generation != message.generation:
                raise HandshakeError("control region and Moved are of different sidecar runs")
            assert self.welcome is not None
            self.welcome = msgspec.structs.replace(
                self.welcome,
                generation=message.generation,
                lookup_endpoint=message.lookup_endpoint,
                reply_endpoint=message.reply_endpoint,
            )

    def _answer(self, message: Any) -> None:
        """Give a reply to who waits for its request, or to the request's on_late."""
        late = None
        with self._lock:
            pending = self._pending.pop(message.id, None)
            if pending is not None and pending._given_up:
                late = pending._on_late
            elif pending is not None:
                pending._reply = message
                pending._answered.set()
        if isinstance(message, wire.Error) and pending is None:
            self._log.warning(
                "error", "the sidecar complains: %s: %s", message.code, message.message
            )
        if late is not None:
            late(message)

    def end(self) -> None:
        """End the connection, and every wait for a reply. Safe to call again.

        The socket closes here, unless somebody holds it.
        """
        with self._lock:
            self.connected = False
            self.suspect = False
            self._lent_until = 0.0
            pending, self._pending = list(self._pending.values()), {}
            self._outbox.clear()
            self._later.clear()
            line, self.line = self.line, None
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
        with self._reading:  # a borrower whose reply is there leaves soon
            while self._inbox:
                close_all(self._inbox.popleft()[1])

    def forget_after_fork(self) -> None:
        """Give the connection up in a forked child, where its lock must not be touched."""
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self.connected = False
        self.line = None
