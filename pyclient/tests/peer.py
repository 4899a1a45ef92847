"""A peer that speaks the sidecar's side of the protocol over real sockets, and misbehaves on
request.

The real sidecar answers well or not at all. What it cannot be made to do, a late answer, garbage, a
grant outside its region, a refusal of one's choice, this can: ``script`` maps a message's type to
what answers it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from lookaside import wire
from lookaside.connection import Pending
from lookaside.session import Session

_decode = msgspec.msgpack.Decoder(wire.AnyMessage).decode
Answer = Any  # a message, bytes, a list of them, or None


class Conn:
    """One client of the peer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = 0
        self.hello: wire.Hello | None = None
        self.held: list[int] = []
        """The descriptors that came with its Hello."""
        self.claim = -1
        """The writing end of a pipe; its claim is the reading end."""
        self.closed = threading.Event()

    @property
    def claimed(self) -> bool:
        """Whether any process has its claim open."""
        poller = select.poll()
        poller.register(self.claim, 0)
        return not poller.poll(0)

    def send(self, message: Any, *fds: int) -> None:
        data = message if isinstance(message, bytes) else wire.encode(message)
        with contextlib.suppress(OSError):
            socket.send_fds(self.sock, [data], list(fds))


class Peer:
    """Listens in ``directory`` until closed. Its threads end with it."""

    def __init__(self, directory: Path, region_bytes: int = 1 << 20, regions: int = 1) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(directory, 0o700)
        self.generation = int.from_bytes(os.urandom(7), "little")
        self.control = os.memfd_create("control", os.MFD_CLOEXEC)
        self.set_state(1)
        self.peers = 0
        self.preparing = False
        """Regions are announced with ready, and not with the Welcome."""
        self.region_bytes = region_bytes
        self.regions = [self.make_region() for _ in range(regions)]
        self.script: dict[type, Callable[[Conn, Any], Answer]] = {}
        self.welcome: Callable[[Conn, wire.Hello], Answer] | None = None
        self.reading = threading.Event()
        self.reading.set()
        self.received: list[Any] = []
        self.conns: list[Conn] = []
        self.sessions = itertools.count(int.from_bytes(os.urandom(7), "little") + 1)
        self._stop = False
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = directory / "session.sock"
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(f"ipc://{directory}/lookup.sock")
        self._replies = self._context.socket(zmq.ROUTER)
        self._replies.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._replies.setsockopt(zmq.LINGER, 0)
        self._replies.bind(f"ipc://{directory}/reply.sock")
        self._secrets: dict[int, bytes] = {}
        self._directs: dict[int, socket.socket] = {}
        self._threads = [
            threading.Thread(target=self._accept, daemon=True),
            threading.Thread(target=self._lookups, daemon=True),
        ]
        # A copy: a client that comes at once adds a thread that is started already.
        for thread in tuple(self._threads):
            thread.start()

    def set_state(self, state: int) -> None:
        words = struct.pack("<8sIIQQQQ", b"LOOKASID", 1, state, self.generation, 0, 0, 0)
        os.ftruncate(self.control, 4096)
        os.pwrite(self.control, words, 0)

    def make_region(self) -> int:
        fd = os.memfd_create("region", os.MFD_CLOEXEC)
        os.ftruncate(fd, self.region_bytes)
        return fd

    def region_message(self, index: int) -> wire.RegionAdded:
        return wire.RegionAdded(index, self.generation, "memfd", 0, self.region_bytes, 4096, 0)

    def add_region(self, offset: int = 0, kind: str = "memfd", read_only: bool = False) -> int:
        """Tell every connected client of one more region, at an offset of its fd; its index."""
        fd = os.memfd_create("region", os.MFD_CLOEXEC)
        os.ftruncate(fd, offset + self.region_bytes)
        self.regions.append(fd)
        index = len(self.regions) - 1
        message = wire.RegionAdded(
            index, self.generation, kind, offset, self.region_bytes, 4096, int(read_only)
        )
        told = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) if read_only else fd
        for conn in self.conns:
            conn.send(message, told)
        if read_only:
            os.close(told)
        return index

    def ready(self) -> None:
        """Tell every connected worker of all regions, and that these are all."""
        self.preparing = False
        for conn in self.conns:
            for index, fd in enumerate(self.regions):
                conn.send(self.region_message(index), fd)
            conn.send(wire.RegionsReady(len(self.regions)))

    def remove_region(self, index: int) -> None:
        """Tell every connected client to unmap a region."""
        for conn in self.conns:
            conn.send(wire.RegionRemoved(index))

    def of(self, kind: type) -> list[Any]:
        """The messages of a type received so far."""
        with self._lock:
            return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 30.0) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while len(found := self.of(kind)) < count:
            assert time.monotonic() < deadline, f"{len(found)} {kind.__name__}, wanted {count}"
            time.sleep(0.002)
        return found

    def close(self) -> None:
        """As if killed: everything closes."""
        self._stop = True
        self.reading.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for conn in list(self.conns):
            with contextlib.suppress(OSError):
                conn.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for direct in self._directs.values():
            direct.close()
        for conn in self.conns:
            for fd in (*conn.held, conn.claim):
                if fd >= 0:
                    os.close(fd)
            conn.held, conn.claim = [], -1
        for fd in (self.control, *self.regions):
            os.close(fd)
        self._context.destroy(0)

    def answer_lookup(self, session: int, message: Any) -> None:
        """Answer from the lookup thread's own socket; only call from a script."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        if (direct := self._directs.get(session)) is not None:
            with contextlib.suppress(OSError):  # the client has gone
                direct.send(data)
            return
        with contextlib.suppress(zmq.ZMQError):  # the client has gone
            self._replies.send_multipart([self._secrets[session], data])

    def _answer(self, conn: Conn, answer: Answer) -> None:
        for each in answer if isinstance(answer, list) else [answer]:
            if each is not None:
                conn.send(each)

    def _accept(self) -> None:
        while not self._stop:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            conn = Conn(sock)
            self.conns.append(conn)
            thread = threading.Thread(target=self._serve, args=(conn,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, conn: Conn) -> None:
        try:
            while True:
                self.reading.wait()
                data, fds, _, _ = socket.recv_fds(
                    conn.sock, wire.MAX_PACKET_BYTES + 1, wire.MAX_HELD_FDS
                )
                conn.held += fds
                if not data:
                    return
                message = _decode(data)
                script = self.script.get(
                    type(message)
                )  # the one of now: who is told that it came may set another
                with self._lock:
                    self.received.append(message)
                if isinstance(message, wire.Hello):
                    conn.hello = message
                    self._greet(conn, message)
                elif script is not None:
                    self._answer(conn, script(conn, message))
                elif isinstance(message, wire.Ping):
                    conn.send(wire.Pong(message.id, self.generation))
        except OSError:
            return
        finally:
            conn.sock.close()
            conn.closed.set()

    def _greet(self, conn: Conn, hello: wire.Hello) -> None:
        if self.welcome is not None:
            answer = self.welcome(conn, hello)
            if answer is not None:
                self._answer(conn, answer)
                return
        conn.session = next(self.sessions)
        secret = self._secrets[conn.session] = os.urandom(wire.SECRET_BYTES)
        fds = [self.control]
        theirs: socket.socket | None = None
        claim: int | None = None
        if hello.direct:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            fds.append(theirs.fileno())
            self._directs[conn.session] = ours
        elif hello.role == "worker":
            claim, conn.claim = os.pipe()
            fds.append(claim)
        # Those of now: the client may be told of more at once.
        worker = hello.role == "worker"
        regions = list(self.regions) if worker and not self.preparing else []
        conn.send(
            wire.Welcome(
                version=wire.VERSION,
                session=conn.session,
                secret=secret,
                generation=self.generation,
                fingerprint=bytes(32),
                lookup_endpoint=f"ipc://{self.directory}/lookup.sock",
                reply_endpoint="",
                regions=len(regions),
                max_pages=4096,
                lease_ms=30000,
                peers=self.peers,
                preparing=int(self.preparing),
            ),
            *fds,
        )
        if theirs is not None:
            theirs.close()
        if claim is not None:
            os.close(claim)
        for index, fd in enumerate(regions):
            conn.send(self.region_message(index), fd)

    def _lookups(self) -> None:
        while not self._stop:
            try:
                self._replies.poll(0)  # so that it takes in who has connected
                poller = zmq.Poller()
                poller.register(self._pull, zmq.POLLIN)
                directs = {direct.fileno(): direct for direct in self._directs.values()}
                for fd in directs:
                    poller.register(fd, zmq.POLLIN)
                for ready, _ in poller.poll(20):
                    self._replies.poll(0)
                    if ready is self._pull:
                        self._handle_lookup(self._pull.recv())
                    elif data := directs[ready].recv(wire.MAX_PACKET_BYTES + 1):
                        self._handle_lookup(data)
                    else:
                        self._forget_direct(directs[ready])
            except (OSError, zmq.ZMQError):
                return

    def _forget_direct(self, direct: socket.socket) -> None:
        self._directs = {s: each for s, each in self._directs.items() if each is not direct}
        direct.close()

    def _handle_lookup(self, data: bytes) -> None:
        message = _decode(data)
        script = self.script.get(type(message))
        with self._lock:
            self.received.append(message)
        if script is not None:
            answer = script(None, message)  # type: ignore[arg-type]
            for each in answer if isinstance(answer, list) else [answer]:
                if each is not None:
                    self.answer_lookup(message.session, each)


@contextlib.contextmanager
def serving(directory: Path, **options: Any) -> Iterator[Peer]:
    """A Peer for the length of a block."""
    peer = Peer(directory, **options)
    try:
        yield peer
    finally:
        peer.close()


def waited_in_vain(session: Session) -> list[Pending]:
    """The requests of a session's present connection whose answer was waited for in vain, from now
    on: the list grows."""
    waits: list[Pending] = []
    connection = session._connection
    assert connection is not None
    give_up = connection._give_up

    def noted(pending: Pending) -> Any:
        waits.append(pending)
        return give_up(pending)

    connection._give_up = noted  # type: ignore[method-assign]
    return waits


def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait for a condition; fails the test if it does not come true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
    return value
