"""Write a tier for the sidecar as a Python program.

A tier is somewhere below the sidecar's memory where chunks of KV cache can live. This module lets a
program be one: subclass Tier, give its put and get, and end with ``run(MyTier())``. The sidecar
starts the program (``--program 'python my_tier.py'``) or connects to it (``my_tier.py --listen
PATH``, ``--program unix:PATH``). docs/tiers-elsewhere.md has the protocol and the promises.

A program keeps values by keys. It never sees more of a value than bytes: the sidecar checks all
that comes back by checksums, so a program may forget, fail and even return wrong bytes, and that
costs misses only. What a program must keep is one promise about memory: it touches the memory of
an item only until it has said how the item went.

Values do not pass through the socket. The sidecar passes descriptors of its memory (regions) once,
and an item names pieces of them: put reads the pieces, get fills them.

    from lookaside.tier import Status, Tier, run

    class Memory(Tier):
        def __init__(self):
            self.values = {}

        def contains(self, keys):
            return [key in self.values for key in keys]

        def put(self, items, call):
            for item in items:
                self.values[item.key] = b"".join(item.views)
                yield Status.OK

        def get(self, items, call):
            for item in items:
                value = self.values.get(item.key)
                yield item.fill(value) if value is not None else Status.MISSING

        def drop(self, keys):
            for key in keys:
                self.values.pop(key, None)

        def clear(self, prefix):
            gone = [key for key in self.values if key.startswith(prefix)]
            self.drop(gone)
            return len(gone)

    run(Memory())

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import ctypes
import enum
import errno
import logging
import mmap
import os
import signal
import socket
import struct
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lookaside import tiermessages as messages
from lookaside.mapping import RegionError, map_region, populate, unmap
from lookaside.wire import VersionError, WireError

__all__ = ["Call", "Item", "Region", "Stats", "Status", "Tier", "connect", "listen", "run", "serve"]

_log = logging.getLogger("lookaside.tier")

FD_VARIABLE = "LOOKASIDE_TIER_FD"
"""The variable with the number of the socket's descriptor, in a program that a sidecar started."""

_HUGE_KINDS = ("thp", "hugetlb")


class Status(enum.IntEnum):
    """How one item or key went."""

    OK = 0
    MISSING = 1
    """There is no such key. Not for put."""
    NO_ROOM = 2
    """The value is not stored because there is no room. For put only."""
    FAILED = 3
    CANCELLED = 4
    """Nobody waits for it any more, and it was not done."""


@dataclass(frozen=True)
class Stats:
    """What a program says of itself. Sizes are in bytes."""

    capacity: int = 0
    """0: not known, or without a limit."""
    used: int = 0
    keys: int = 0
    evictions: int = 0
    """Values dropped for room since the program started."""
    problem: str = ""
    """Why it cannot be used now; "" if it can. The sidecar shows it and goes on asking."""
    detail: str = ""
    """For operators: a directory, a server's address. Never a secret."""


class Region:
    """Memory that items lie in, mapped in this process.

    It is valid from Tier.on_region until Tier.on_region_gone has returned. Nothing of it may be
    used after that. Its attributes do not change.
    """

    __slots__ = ("address", "fd", "id", "kind", "memory", "offset", "page_size", "size")

    def __init__(
        self, id: int, kind: str, fd: int, offset: int, size: int, page_size: int, address: int
    ) -> None:
        self.id = id
        """Its number, of one connection. Two sidecars may use the same number."""
        self.kind = kind
        """hugetlb, thp, memfd, file, devdax or fsdax."""
        self.fd = fd
        """The descriptor, owned by the connection; duplicate it to keep it."""
        self.offset = offset
        """Where in the descriptor the region begins, in bytes."""
        self.size = size
        """In bytes."""
        self.page_size = page_size
        self.address = address
        """Where it is mapped in this process, readable and writable."""
        self.memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        """The whole region, writable."""


@dataclass(frozen=True)
class Piece:
    """Part of a region."""

    region: Region
    offset: int
    """Of its first byte in the region."""
    size: int
    """In bytes, at least 1."""

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return self.region.address + self.offset

    @property
    def view(self) -> memoryview:
        """Its bytes, writable."""
        return self.region.memory[self.offset : self.offset + self.size]


@dataclass(frozen=True)
class Item:
    """A key, and the memory of its value.

    The value is the pieces' bytes, one behind the other. There are 1 to 8 pieces; a chunk of KV has
    two: a header of some KiB, and the pages. Each begins at a multiple of 4 KiB of its region if
    the page size of the cache allows it. A get may ask for less than what was put: for all of the
    first pieces, of the sizes they were put with, and at most for a beginning of the piece after
    them.
    """

    key: bytes
    """Opaque, at most 255 bytes. Keys of one space of the cache begin alike."""
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """The bytes of all pieces together."""
        return sum(piece.size for piece in self.pieces)

    @property
    def views(self) -> tuple[memoryview, ...]:
        """The bytes of the pieces, for a join, writev, preadv and the like."""
        return tuple(piece.view for piece in self.pieces)

    def fill(self, value: bytes | bytearray | memoryview | mmap.mmap) -> Status:
        """Copy the beginning of value into the pieces, and return OK; FAILED if it is too short.

        The GIL is not held during copies of more than 64 KiB.
        """
        source = memoryview(value).cast("B")
        if len(source) < self.size:
            return Status.FAILED
        at = 0
        for piece in self.pieces:
            copy_bytes(piece.view, source[at : at + piece.size])
            at += piece.size
        return Status.OK

    def copy_out(self, to: bytearray | memoryview | mmap.mmap) -> None:
        """Copy the pieces to the beginning of to, which must have room, likewise."""
        target = memoryview(to).cast("B")
        at = 0
        for piece in self.pieces:
            copy_bytes(target[at : at + piece.size], piece.view)
            at += piece.size


def copy_bytes(to: memoryview, source: memoryview) -> None:
    """Copy source to to, which are equally long and contiguous; to must be writable.

    The GIL is not held during copies of more than 64 KiB.
    """
    size = len(source)
    if size <= _COPY_WITH_GIL or source.readonly:
        to[:] = source
        return
    # from_buffer keeps both alive meanwhile.
    target = (ctypes.c_ubyte * size).from_buffer(to)
    origin = (ctypes.c_ubyte * size).from_buffer(source)
    ctypes.memmove(target, origin, size)


_COPY_WITH_GIL = 64 << 10


class Call:
    """One call of put or get. Its methods are for any thread."""

    __slots__ = ("_cancelled", "_done", "id")

    def __init__(self, id: int) -> None:
        self.id = id
        self._cancelled = threading.Event()
        self._done: Callable[[int, Status], None] | None = None

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the call any more.

        A long call should look at it between items, and end early. It must end before the sidecar's
        patience does (cancel_timeout, 1 s): the sidecar kills a program that it has started and
        that does not end a call, because memory of the call cannot be used until then.
        """
        return self._cancelled.is_set()

    def wait_cancelled(self, timeout_s: float) -> bool:
        """Wait until the call is cancelled, at most timeout_s; return whether it is."""
        return self._cancelled.wait(timeout_s)

    def done(self, index: int, status: Status) -> None:
        """Report one item before the others: its memory is not touched any more.

        An item may be reported once; what the method returns for it later is ignored.
        """
        if self._done is not None:
            self._done(index, status)


class Tier(ABC):
    """A program that is a tier.

    Every method may be called from several threads at a time, also with the same keys. An
    exception fails what was asked for, and its text is shown to operators. It never ends the
    program. A batch has at most max_items keys or items.

    put and get return one Status for each item, in their order: as a sequence, or as an iterator,
    of which each status is reported as it comes (so a generator function reports each item when it
    is done). Once a status is reported, the item's memory must not be touched any more, whatever
    the status: the sidecar uses it for something else.
    """

    name = "tier"
    """What the program is, for operators."""

    max_items = 256
    """The most keys or items of one call, 1 to 4096."""

    max_calls = 16
    """The most calls at a time, 1 to 1024, and so the most threads."""

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether it is held.

        It may be wrong: a get that misses costs time and nothing else. It is called often and
        should take microseconds to milliseconds. The sidecar waits for it at most lookup_timeout,
        500 ms.
        """

    @abstractmethod
    def put(self, items: Sequence[Item], call: Call) -> Iterable[Status]:
        """Store values: for each item its pieces' bytes under its key, in place of any old value.

        A value must be there whole or not at all. Report OK when it is as durable as it gets.
        """

    @abstractmethod
    def get(self, items: Sequence[Item], call: Call) -> Iterable[Status]:
        """Fill each item's pieces with the beginning of its value.

        Report OK when all pieces are filled, MISSING if there is no such key, FAILED if the value
        is shorter. The first items are wanted first.
        """

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget keys; missing ones are no error. Once it returns a get of them misses."""

    @abstractmethod
    def clear(self, prefix: bytes) -> int:
        """Forget all keys that begin with prefix, and return how many there were.

        b"" is the prefix of all keys.
        """

    def stats(self) -> Stats:
        """Return figures. It is called every second, and must not wait for I/O."""
        return Stats()

    def on_region(self, region: Region) -> None:  # noqa: B027 - optional
        """Learn of a region before any item lies in it.

        This is where an engine registers memory once, by address and size or by descriptor. An
        exception refuses the region: items then come in memory of the sidecar's that lies outside
        it, at the price of a copy. One region at a time of a connection is announced.
        """

    def on_region_gone(self, region: Region) -> None:  # noqa: B027 - optional
        """Undo on_region: no item lies in the region any more, and it is unmapped next.

        It is called for each region of a connection at its end, when no call is under way.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """End. It is called by run after the last connection, when no call is under way."""


class ConnectionEnded(Exception):
    """The sidecar has closed the connection, or it was lost."""


class _Connection:
    """One sidecar.

    Threads take turns to receive: the one that has received a message handles it, while the next
    one receives. So a call needs no hand-over, and a cancel is received while all calls go on.
    """

    def __init__(self, tier: Tier, sock: socket.socket) -> None:
        self._tier = tier
        self._socket = sock
        self._receiving = threading.Lock()  # held while a message is received and noted
        self._sending = threading.Lock()
        self._buffer = bytearray(messages.MAX_PACKET_BYTES + 1)  # of whoever receives
        self._holds: list[int] = []
        self._lock = threading.Lock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._regions: dict[int, Region] = {}
        self._calls: dict[int, Call] = {}
        self._threads = 0
        self._idle = 0  # threads that wait for their turn
        self._ended = False

    # The life of the connection.

    def serve(self) -> None:
        """Serve until the sidecar leaves. Then nothing of its memory is mapped any more."""
        try:
            self._welcome()
            self._begin_thread()
            with self._changed:
                while self._threads:
                    self._changed.wait()
        finally:
            self._leave()

    def end(self) -> None:
        """End the connection from another thread; calls under way are cancelled."""
        with self._lock:
            self._ended = True
            for call in self._calls.values():
                call._cancelled.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _welcome(self) -> None:
        try:
            message, fds = self._receive()
        except VersionError as error:
            self._send(messages.TierRefuse(messages.VERSION, str(error)))
            raise
        self._holds = fds
        if not isinstance(message, messages.TierHello):
            raise WireError(f"the first message is a {type(message).__name__}")
        _log.info("serving the tier %s of a sidecar", message.tier)
        self._send(
            messages.TierWelcome(
                messages.VERSION, self._tier.name[:1024], self._tier.max_items, self._tier.max_calls
            )
        )

    def _leave(self) -> None:
        self.end()
        for region in list(self._regions.values()):
            self._unmap(region)
        for fd in self._holds:
            os.close(fd)
        self._holds = []
        self._socket.close()

    # Threads.

    def _begin_thread(self) -> None:
        with self._lock:
            self._threads += 1
        threading.Thread(target=self._work, name="lookaside-tier", daemon=True).start()

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except Exception:
            _log.exception("a connection of the tier ends")
        finally:
            self.end()
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()

    def _step(self) -> bool:
        """Receive and handle one message; return False at the end."""
        with self._lock:
            self._idle += 1
        with self._receiving:
            with self._lock:
                self._idle -= 1
                if self._ended:
                    return False
            try:
                message, fds = self._receive()
            except ConnectionEnded:
                return False
            if isinstance(message, messages.TierCancel):
                call = self._calls.get(message.id)
                if call is not None:
                    call._cancelled.set()
                return True
            call = None
            if isinstance(message, (messages.TierPut, messages.TierGet)):
                call = Call(message.id)
                with self._lock:
                    self._calls[message.id] = call
            with self._lock:
                more = not self._idle and self._threads <= self._tier.max_calls
            if more:
                self._begin_thread()
        try:
            self._handle(message, fds, call)
        except ConnectionEnded:
            return False
        finally:
            if call is not None:
                with self._lock:
                    self._calls.pop(call.id, None)
        return True

    # The socket.

    def _receive(self) -> tuple[messages.Message, list[int]]:
        try:
            size, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._buffer], socket.CMSG_SPACE(messages.MAX_HOLDS * 4), socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise ConnectionEnded(str(error)) from error
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(data) // 4
                fds.extend(struct.unpack(f"{count}i", data[: count * 4]))
        try:
            if size == 0:
                raise ConnectionEnded("the sidecar has closed the connection")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise WireError("a message longer than the protocol allows")
            message = messages.decode(memoryview(self._buffer)[:size], "program")
            want = message.holds if isinstance(message, messages.TierHello) else 0
            if isinstance(message, messages.TierRegion):
                want = 1
            if len(fds) != want:
                raise WireError(f"{len(fds)} descriptors with a {type(message).__name__}")
            return message, fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _send(self, message: messages.Message) -> None:
        with self._sending:
            try:
                self._socket.sendall(messages.encode(message))
            except OSError as error:
                raise ConnectionEnded(str(error)) from error

    # Messages.

    def _handle(self, message: messages.Message, fds: list[int], call: Call | None) -> None:
        if call is not None:
            assert isinstance(message, (messages.TierPut, messages.TierGet))
            self._transfer(message, call)
        elif isinstance(message, messages.TierContains):
            self._ask(message)
        elif isinstance(message, messages.TierDrop):
            self._drop(message)
        elif isinstance(message, messages.TierClear):
            self._clear(message)
        elif isinstance(message, messages.TierStats):
            self._figures(message)
        elif isinstance(message, messages.TierRegion):
            self._map(message, fds[0])
        elif isinstance(message, messages.TierRegionGone):
            region = self._regions.get(message.region)
            if region is not None:
                self._unmap(region)
            self._send(messages.TierRegionLeft(message.region))
        else:
            raise WireError(f"a second {type(message).__name__}")

    def _map(self, message: messages.TierRegion, fd: int) -> None:
        error = ""
        address = 0
        try:
            huge = message.kind in _HUGE_KINDS
            address = map_region(fd, message.size, huge, message.offset, message.page_size)
            region = Region(
                message.region,
                message.kind,
                fd,
                message.offset,
                message.size,
                message.page_size,
                address,
            )
            populate(address, message.size, write=False)
            self._tier.on_region(region)
            with self._lock:
                self._regions[region.id] = region
        except Exception as failure:
            level = logging.WARNING if isinstance(failure, RegionError) else logging.ERROR
            _log.log(level, "region %d is refused", message.region, exc_info=True)
            error = _text(failure)
            if address:
                unmap(address, message.size)
            os.close(fd)
        self._send(messages.TierRegionReady(message.region, error))

    def _unmap(self, region: Region) -> None:
        try:
            self._tier.on_region_gone(region)
        except Exception:
            # The memory may still be registered somewhere. It stays mapped, and the descriptors
            # that say so stay open.
            _log.exception("region %d stays mapped until the program ends", region.id)
            self._holds = []
            return
        finally:
            with self._lock:
                del self._regions[region.id]
        unmap(region.address, region.size)
        os.close(region.fd)

    def _transfer(self, message: messages.TierPut | messages.TierGet, call: Call) -> None:
        reply = _Reply(self, message.id, len(message.items))
        call._done = reply.report
        try:
            items = [self._item(item) for item in message.items]
            method = self._tier.put if isinstance(message, messages.TierPut) else self._tier.get
            statuses = method(items, call)
            if isinstance(statuses, Sequence):
                if len(statuses) != len(items):
                    raise ValueError(f"{len(statuses)} statuses for {len(items)} items")
                reply.report_all(statuses)
            else:
                for index, status in enumerate(statuses):
                    reply.report(index, status)
                    if call.cancelled:
                        break
                if isinstance(statuses, Generator):
                    statuses.close()  # its finally clauses run now
        except ConnectionEnded:
            raise
        except Exception as error:
            _log.warning("a call fails", exc_info=True)
            reply.end(Status.FAILED, _text(error))
        else:
            if call.cancelled:
                reply.end(Status.CANCELLED, "")
            else:
                reply.end(Status.FAILED, "the program gave no status for this item")

    def _item(self, item: messages.TierItem) -> Item:
        pieces = []
        for piece in item.pieces:
            region = self._regions.get(piece.region)
            if region is None or piece.offset + piece.size > region.size:
                raise ValueError(f"a piece outside of region {piece.region}")
            pieces.append(Piece(region, piece.offset, piece.size))
        return Item(item.key, tuple(pieces))

    def _ask(self, message: messages.TierContains) -> None:
        reply = _Reply(self, message.id, len(message.keys))
        try:
            held = self._tier.contains(message.keys)
            if len(held) != len(message.keys):
                raise ValueError(f"{len(held)} answers for {len(message.keys)} keys")
            reply.report_all([Status.OK if yes else Status.MISSING for yes in held])
        except ConnectionEnded:
            raise
        except Exception as error:
            _log.warning("contains fails", exc_info=True)
            reply.end(Status.FAILED, _text(error))

    def _drop(self, message: messages.TierDrop) -> None:
        reply = _Reply(self, message.id, len(message.keys))
        try:
            self._tier.drop(message.keys)
            reply.report_all([Status.OK] * len(message.keys))
        except ConnectionEnded:
            raise
        except Exception as error:
            _log.warning("drop fails", exc_info=True)
            reply.end(Status.FAILED, _text(error))

    def _clear(self, message: messages.TierClear) -> None:
        keys, error = 0, ""
        try:
            keys = max(0, self._tier.clear(message.prefix))
        except Exception as failure:
            _log.warning("clear fails", exc_info=True)
            error = _text(failure)
        self._send(messages.TierCleared(message.id, keys, error))

    def _figures(self, message: messages.TierStats) -> None:
        try:
            stats = self._tier.stats()
        except Exception as error:
            _log.warning("stats fails", exc_info=True)
            stats = Stats(problem=_text(error))
        self._send(
            messages.TierFigures(
                message.id,
                stats.capacity,
                stats.used,
                stats.keys,
                stats.evictions,
                stats.problem[:1024],
                stats.detail[:1024],
            )
        )


class _Reply:
    """The results of one call. Any thread; each item is reported once."""

    def __init__(self, connection: _Connection, id: int, items: int) -> None:
        self._connection = connection
        self._id = id
        self._lock = threading.Lock()
        self._open = set(range(items))

    def report(self, index: int, status: Status) -> None:
        self._report([(index, status)], "")

    def report_all(self, statuses: Sequence[Status]) -> None:
        self._report(list(enumerate(statuses)), "")

    def end(self, status: Status, text: str) -> None:
        """Report the rest."""
        with self._lock:
            rest = sorted(self._open)
        self._report([(index, status) for index in rest], text)

    def _report(self, results: list[tuple[int, Status]], text: str) -> None:
        with self._lock:
            new = [(i, status) for i, status in results if i in self._open]
            self._open.difference_update(i for i, _ in new)
        if new:
            self._connection._send(
                messages.TierDone(
                    self._id,
                    tuple(messages.TierResult(i, int(status)) for i, status in new),
                    text,
                )
            )


def _text(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.encode("utf-8", "replace").decode()[:1024]


def serve(tier: Tier, sock: socket.socket) -> None:
    """Serve one sidecar over a connected Unix SOCK_SEQPACKET socket, until it leaves.

    It owns the socket. When it returns, no call is under way and no memory of the sidecar's is
    mapped. Raises WireError for a peer that is no sidecar, VersionError for one of another version.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    _Connection(tier, sock).serve()


def connect() -> socket.socket | None:
    """Return the socket that a sidecar gave this program at its start; None if none started it."""
    text = os.environ.pop(FD_VARIABLE, "")
    if not text:
        return None
    sock = socket.socket(fileno=int(text))
    os.set_inheritable(sock.fileno(), False)
    return sock


def listen(tier: Tier, path: str, stop: threading.Event | None = None) -> None:
    """Listen at a path, and serve any number of sidecars of this user, until stop is set.

    The socket has mode 0600. A file of the name that is no socket of a living process is replaced
    if it is a socket. Raises OSError, such as EADDRINUSE if another process listens there.
    """
    stop = stop or threading.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        _bind(listener, path)
        listener.listen(16)
        listener.settimeout(0.5)
        own = os.stat(path).st_ino
        open_ones: set[_Connection] = set()
        threads: list[threading.Thread] = []
        try:
            while not stop.is_set():
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                thread = threading.Thread(target=_serve_one, args=(tier, sock, open_ones))
                thread.start()
                threads = [t for t in threads if t.is_alive()] + [thread]
        finally:
            for connection in list(open_ones):
                connection.end()
            for thread in threads:
                thread.join()
            try:
                if os.stat(path).st_ino == own:
                    os.unlink(path)
            except FileNotFoundError:
                pass


def _bind(listener: socket.socket, path: str) -> None:
    old = os.umask(0o177)
    try:
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _stale(path):
                raise
            os.unlink(path)
            listener.bind(path)
    finally:
        os.umask(old)


def _stale(path: str) -> bool:
    """Return whether a path is a socket on which nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False


def _serve_one(tier: Tier, sock: socket.socket, open_ones: set[_Connection]) -> None:
    uid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if uid not in (0, os.geteuid()):
        _log.warning("a process of uid %d is refused", uid)
        sock.close()
        return
    sock.setblocking(True)
    connection = _Connection(tier, sock)
    open_ones.add(connection)
    try:
        connection.serve()
    except (ConnectionEnded, WireError) as error:
        _log.warning("a connection ends: %s", error)
    finally:
        open_ones.discard(connection)


def run(tier: Tier, arguments: Sequence[str] | None = None) -> None:
    """Be a program: serve the sidecar that started it, or listen at --listen PATH.

    It returns when the sidecar leaves, or at SIGTERM or SIGINT, after Tier.close. It must be called
    by the main thread. Give it the arguments that the program has not used itself; default:
    those of sys.argv.
    """
    parser = argparse.ArgumentParser(description=f"{tier.name}: a tier for lookaside")
    parser.add_argument(
        "--listen",
        metavar="PATH",
        help="listen on this Unix socket; default: serve the sidecar that starts the program",
    )
    args = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    sock = connect()
    if sock is None and args.listen is None:
        parser.error(
            "no sidecar has started this program: name it in the sidecar's settings "
            "(--program), or give it --listen PATH"
        )
    stop = threading.Event()
    connection = _Connection(tier, sock) if sock is not None else None

    def end(number: int, frame: Any) -> None:
        stop.set()
        if connection is not None:
            threading.Thread(target=connection.end, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        if connection is not None:
            assert sock is not None
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            connection.serve()
        else:
            listen(tier, args.listen, stop)
    except ConnectionEnded:
        pass
    finally:
        tier.close()
