"""The cache for programs that are not vLLM: values of bytes, by keys, in a sidecar's arena.

    with Client(endpoint) as client:
        space = client.space("embeddings", value_bytes=1 << 20)
        with space.alloc(b"key", 4096) as room:
            if room.view is not None:       # None: the value is held already
                room.view[:] = data         # straight into the arena
        with space.retrieve(b"key") as value:
            use(value.view)                 # straight from the arena

**Spaces.** A space has a name and a size. Every process that names both alike shares it. A value
has up to ``value_bytes`` bytes; it takes so many and 64 more, whatever its length. A key is any
bytes; its SHA-256 names it. A value never changes: the first one that is stored under a key stays
until it is evicted or the space is cleared. So a key should name what the value was computed from.

**No copies.** ``alloc`` gives room in the arena as a writable memoryview, which numpy.frombuffer
and torch.frombuffer take. ``store``, or leaving the ``with``, makes the value visible; nothing is
copied. ``retrieve`` gives a read-only view under a lease. As long as the Value, or anything that
was made of its view, is alive, the bytes are neither evicted nor written to. That also holds while
the sidecar is killed, started again or upgraded; one that was killed writes nothing new to the
memory that it finds until such values are closed.

**It may forget.** A value that nobody has leased can be evicted at any time. A retrieve that
returns None is a miss, not an error. What lies in a tier below the memory is brought up first.

**Failures.** SidecarUnavailable: there is no session, and none came within ``timeout_s``. NoRoom:
all of the arena is leased or pinned, or this process has leased its share of it. ValueError: an
argument that can never work. A process that dies leaves nothing behind: its leases and its
unfinished stores end with it.

All methods may be called from any thread. A forked child must make a Client of its own. This module
imports neither torch nor vLLM.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import queue
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from lookaside import __version__, wire
from lookaside.arena import Arena, Live
from lookaside.autostart import Autostart
from lookaside.config import default_endpoint
from lookaside.connection import Pending, SessionUnavailable
from lookaside.handshake import SessionOptions
from lookaside.lookups import LookupClient
from lookaside.mapping import RegionError
from lookaside.mappings import Attachable
from lookaside.regions import Hold
from lookaside.session import Session

Key = bytes | bytearray | memoryview
"""Any bytes. Its SHA-256 is the name under which the value is held."""

# Each slot ends with what its value is: magic, length, key. The view of a value is made of it.
_TRAILER = struct.Struct("<8sQ32s16x")
_MAGIC = b"LKVALUE1"
_ALIGN = 64
_LEAST_SLOT_BYTES = 256  # as the sidecar demands
_MAX_VALUE_BYTES = 1 << 32
# A lease that exists has left is there for the retrieve that follows, for so long and so many.
_KEPT_S = 1.0
_MAX_KEPT = 16
# How soon the sidecar learns that a lease has ended, if nothing is asked before.
_LOOK_S = 0.1
# Requests of one batch that are out at a time.
_WINDOW = 256


class SidecarUnavailable(RuntimeError):
    """There is no session with the sidecar. The message names its directory, and what to do."""


class NoRoom(RuntimeError):
    """What fills the arena is leased, pinned or in use, or as much as one may is this process's."""


class _Lease:
    """What is granted to this process in the arena: a store's slot, or a load's.

    It has two ends. ``tell`` says to the sidecar, once, how the grant ended. The mapping is let go
    when nothing refers to the buffer any more.
    """

    __slots__ = ("__weakref__", "_told", "address", "handle", "hold", "last", "session_id")

    def __init__(self, hold: Hold, session_id: int, handle: int, address: int, last: Any) -> None:
        self.hold = hold
        self.session_id = session_id
        self.handle = handle
        """Of the load, or of the store."""
        self.address = address
        self.last = last
        """The message for the sidecar if nobody has told it anything before the buffer goes."""
        self._told = threading.Lock()

    def tell(self, session: Session, message: Any) -> bool:
        """Send a message for the grant's end; return whether it was the first and will arrive."""
        return self._told.acquire(blocking=False) and session.send(message, self.session_id)

    def end(self, session: Session) -> bool:
        """Let go of everything. Call once, when nothing refers to the buffer.

        Returns whether the session has a message that it sends later.
        """
        later = isinstance(self.last, wire.Release)
        first = self._told.acquire(blocking=False)
        if first:
            (session.send_later if later else session.send)(self.last, self.session_id)
        self.hold.release()
        return first and later


class _Buffer:
    """The bytes of a lease. The lease ends when nothing refers to them any more.

    An array or a tensor that is made of the view refers to them.
    """

    __slots__ = ("_finalizer", "_in", "address", "view")

    def __init__(
        self,
        lease: _Lease,
        size: int,
        later: Callable[[_Lease], None],
        now: Callable[[_Lease], None],
    ) -> None:
        self.address = lease.address
        raw = (ctypes.c_char * size).from_address(lease.address)
        self.view = memoryview(raw).cast("B")
        self._in = threading.local()
        inside = self._in

        def gone() -> None:
            # A collection of garbage calls this inside any lock that this thread may hold.
            (now if getattr(inside, "release", False) else later)(lease)

        self._finalizer = weakref.finalize(raw, gone)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Let go of the view; end the lease at once if nothing else uses its bytes."""
        self._in.release = True
        try:
            self.view.release()
        finally:
            self._in.release = False


class Value:
    """A value that is held, under a lease. Made by Space.retrieve.

    The lease lasts as long as the Value, or an array or tensor that was made of its view, is alive.
    """

    def __init__(self, buffer: _Buffer) -> None:
        self._buffer = buffer
        self._view = buffer.view.toreadonly()

    @property
    def view(self) -> memoryview:
        """The value, in the arena. Raises ValueError after close."""
        self._view.nbytes  # noqa: B018  # raises where it was released
        return self._view

    @property
    def address(self) -> int:
        """Where the view begins, for native code. Valid as long as the view."""
        return self._buffer.address

    def __len__(self) -> int:
        return self.view.nbytes

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    def close(self) -> None:
        """Let go of the view. Safe to call again.

        The lease ends now, or with the last array that was made of the view. The sidecar learns it
        with this process's next request, or within a tenth of a second.
        """
        self._view.release()
        self._buffer.release()

    def __enter__(self) -> Value:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Allocation:
    """Room in the arena for one value. Made by Space.alloc.

    As a context manager it stores the value on leaving, and gives the room back after an exception.
    """

    def __init__(
        self, space: Space, key: bytes, size: int, lease: _Lease | None, buffer: _Buffer | None
    ) -> None:
        self.key = key
        """The SHA-256 of the key."""
        self.size = size
        self._space = space
        self._lease = lease
        self._buffer = buffer

    @property
    def held(self) -> bool:
        """Whether the value was there already, so that nothing needs to be written."""
        return self._lease is None

    @property
    def view(self) -> memoryview | None:
        """Where to write the value, of ``size`` bytes; None if it is held already.

        It begins with whatever was there before. After store nothing may be written to it, also not
        through an array that was made of it. Raises ValueError after store and abort.
        """
        if self._buffer is None:
            return None
        self._buffer.view.nbytes  # noqa: B018  # raises where it was released
        return self._buffer.view

    @property
    def address(self) -> int:
        """Where the view begins, for native code; 0 if there is none. Valid as long as the view."""
        return self._buffer.address if self._buffer is not None else 0

    def store(self) -> None:
        """Make the value visible. Nothing is copied. Does nothing if the value was held.

        Raises SidecarUnavailable if the session that gave the room has ended, or abort was called:
        then the value is not stored.
        """
        if self._lease is None or self._buffer is None:
            return
        self._space._trail(self._lease, self.key, self.size)
        stored = self._space._tell(self._lease, wire.CommitStore(self._lease.handle, ()))
        self._buffer.release()
        if not stored:
            raise SidecarUnavailable(
                f"the room for the value was given back, or the session with the sidecar in "
                f"{self._space._endpoint} has ended: allocate and store it again"
            )

    def abort(self) -> None:
        """Give the room back; nothing is stored. Safe to call again, and after store."""
        if self._lease is not None and self._buffer is not None:
            self._space._tell(self._lease, self._lease.last)
            self._buffer.release()

    def __enter__(self) -> Allocation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.store()
        else:
            self.abort()


class Space:
    """Values of one kind. Made by Client.space. Any thread may call its methods."""

    def __init__(
        self, client: Client, name: str, value_bytes: int, copies: Attachable | None = None
    ) -> None:
        self.name = name
        self.value_bytes = value_bytes
        """The most that a value of this space may have."""
        self._client = client
        self._endpoint = client.endpoint
        padded = -(-value_bytes // _ALIGN) * _ALIGN
        self._slot_bytes = max(_LEAST_SLOT_BYTES, padded + _TRAILER.size)
        self._arena = Arena(copies)
        self._lock = threading.Lock()
        self._kept: dict[bytes, tuple[float, _Lease]] = {}  # guarded by _lock
        self._looks = False  # the janitor looks around within _LOOK_S; guarded by _lock
        # Leases that end later, or why the janitor wakes.
        self._waiting: queue.SimpleQueue[_Lease | str] = queue.SimpleQueue()
        self._leases = 0  # that have not ended; guarded by _lock
        self._closed = False
        options = {
            "endpoint": client.endpoint,
            "engine_id": f"client-{os.getpid()}-{secrets.token_hex(8)}",
            "rank": 0,
            "page_tokens": 1,
            "page_bytes": self._slot_bytes,
            "pages_per_chunk": 1,
            "digest_bytes": 32,
            "fields": {"client": "lookaside.Client 1", "name": name},
            "about": {"client": f"lookaside.Client {__version__}", "space": name},
        }
        self._worker = Session(
            SessionOptions(role="worker", **options), client._on_absent, self._arena.mappings.held
        )
        self._worker.subscribe(self._arena)
        # Lookups bring values up from the tiers. One thread at a time may use them.
        self._scheduler = Session(SessionOptions(role="scheduler", **options), client._on_absent)
        self._lookups = LookupClient([self._scheduler], client.timeout_s, client.timeout_s)
        self._looking = threading.Lock()
        self._worker.start()
        self._scheduler.start()
        self._janitor = threading.Thread(target=self._clean, name="lookaside-client", daemon=True)
        self._janitor.start()

    # ---- storing ----

    def alloc(self, key: Key, size: int | None = None) -> Allocation:
        """Return room for the value of a key, of ``size`` bytes; without it, of value_bytes.

        Its view is None if the value is held already. Raises NoRoom, SidecarUnavailable, and
        ValueError for a size above value_bytes.
        """
        return self.alloc_many([key], size)[0]

    def alloc_many(self, keys: Iterable[Key], size: int | None = None) -> list[Allocation]:
        """Return room for each of the keys, in their order: all of them, or an error and none."""
        size = self.value_bytes if size is None else size
        if not 0 <= size <= self.value_bytes:
            raise ValueError(
                f"a value of {size} bytes: the space {self.name!r} is for up to "
                f"{self.value_bytes} (value_bytes of Client.space)"
            )
        names = [_name(key) for key in keys]
        made: list[Allocation] = []
        try:
            while len(made) < len(names):
                rest = names[len(made) :]
                try:
                    for name, reply in zip(rest, self._ask(rest, self._prepare_store), strict=True):
                        made.append(self._allocation(name, size, reply))
                except NoRoom:
                    if not self._free_some():
                        raise
        except BaseException:
            for each in made:
                each.abort()
            raise
        return made

    def put(self, key: Key, data: Any) -> bool:
        """Copy a value into the arena; return whether it was stored now: not if it was held.

        data has the buffer protocol: bytes, an array, a memoryview. Raises as alloc does.
        """
        return self.put_many([(key, data)])[0]

    def put_many(self, items: Iterable[tuple[Key, Any]]) -> list[bool]:
        """Copy values into the arena; return for each whether it was stored now."""
        stored = []
        for key, data in items:
            source = memoryview(data).cast("B")
            with self.alloc(key, source.nbytes) as room:
                stored.append(not room.held)
                if room.view is not None:
                    room.view[:] = source
        return stored

    # ---- reading ----

    def retrieve(self, key: Key) -> Value | None:
        """Return the value of a key under a lease, or None if it is not held."""
        return self.retrieve_many([key])[0]

    def retrieve_many(self, keys: Iterable[Key]) -> list[Value | None]:
        """Return the value of each key under a lease of its own, None where it is not held.

        Raises NoRoom beyond the share of the arena that one process may lease.
        """
        leases = self._find([_name(key) for key in keys], self._unkeep)
        return [
            Value(self._buffer(lease, size)) if lease is not None else None
            for lease, size in leases
        ]

    def get(self, key: Key) -> bytes | None:
        """Return a copy of the value of a key, or None if it is not held."""
        value = self.retrieve(key)
        if value is None:
            return None
        with value:
            return bytes(value)

    def exists(self, key: Key) -> bool:
        """Return whether a value is held. A retrieve within a second needs not ask again."""
        return self.exists_many([key])[0]

    def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Return for each key whether its value is held."""
        names = [_name(key) for key in keys]
        there: list[bool] = []
        for begin in range(0, len(names), _MAX_KEPT):  # a lease is a share of the arena
            some = names[begin : begin + _MAX_KEPT]
            for name, (lease, _) in zip(some, self._find(some, self._unkeep), strict=True):
                there.append(lease is not None)
                if lease is not None:
                    self._keep(name, lease)
        return there

    # ---- advice ----

    def pin(self, keys: Iterable[Key], seconds: float) -> None:
        """Have the values of these keys that are held not evicted for so long.

        The sidecar bounds the time and the share of the arena (hints of its settings).
        """
        if seconds <= 0:
            raise ValueError(f"{seconds} seconds: unpin ends a pin")
        self._advise(keys, wire.ADVISE_PIN, max(1, round(seconds * 1000)))

    def unpin(self, keys: Iterable[Key]) -> None:
        """End what pin has begun."""
        self._advise(keys, wire.ADVISE_PIN, 0)

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Have values brought up from the tiers below the memory. Does not wait."""
        self._advise(keys, wire.ADVISE_PREFETCH, 0)

    def clear(self) -> int:
        """Drop all values of the space, in the arena and in the tiers; return how many there were
        in the arena. What is leased stays readable until it is not."""
        self._drop_kept()
        reply = self._wait(self._submit(lambda i: wire.ClearSpace(i)))
        if not isinstance(reply, wire.Cleared):
            raise SidecarUnavailable(self._explained(reply))
        return reply.chunks

    def close(self) -> None:
        """End the sessions. Values that are leased stay readable until they are closed."""
        if self._closed:
            return
        self._closed = True
        self._drop_kept()
        self._waiting.put("look")
        with self._looking:
            self._lookups.close()
        self._scheduler.close()
        self._worker.close()
        self._arena.mappings.close()

    def __enter__(self) -> Space:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the session ----

    def _connected(self) -> Live:
        """Return the present session, or wait timeout_s for one."""
        with self._arena.changed:
            live = self._arena.live
        if live is not None and live.ready.is_set() and self._worker.connected:
            return live
        if self._closed:
            raise SidecarUnavailable(f"the space {self.name!r} is closed")
        end = time.monotonic() + self._client.timeout_s
        while (left := end - time.monotonic()) > 0:
            refused = self._worker.refused
            if refused is not None and refused.code in ("version", "incompatible", "limit"):
                break
            if self._worker.wait_connected(min(left, 0.05)):
                with self._arena.changed:
                    live = self._arena.live
                if live is not None and live.ready.wait(max(0.0, end - time.monotonic())):
                    return live
        raise SidecarUnavailable(self._explained(None))

    def _explained(self, reply: object) -> str:
        where = f"the sidecar in {self._endpoint}"
        refused = self._worker.refused
        if isinstance(reply, wire.Error):
            return f"{where} says: {reply.message} ({reply.code})"
        if refused is not None:
            return (
                f"{where} refuses the space {self.name!r}: {refused.message} ({refused.code}; "
                f"{refused.field}: it wants {refused.want}, and got {refused.got})"
            )
        return (
            f"{where} does not answer: start it (lookaside serve --runtime-dir {self._endpoint}), "
            "or use Client(autostart=True)"
        )

    def _submit(
        self, make: Callable[[int], Any], late: Callable[[Any], None] | None = None
    ) -> Pending:
        for last in (False, True):
            self._connected()
            try:
                return self._worker.submit(make, late)
            except SessionUnavailable as error:
                if last:
                    raise SidecarUnavailable(f"{self._explained(None)}: {error}") from error
        raise AssertionError

    def _wait(self, pending: Pending) -> Any:
        return pending.wait_here(self._client.timeout_s)

    def _ask(
        self,
        names: Sequence[bytes],
        make: Callable[[bytes], tuple[Callable[[int], Any], Callable[[Any], None]]],
    ) -> Iterable[Any]:
        """Ask one thing for each name, many at a time; yield the replies in their order.

        Replies that nobody takes, because the caller has stopped, are undone.
        """
        out: list[tuple[Pending, Callable[[Any], None]]] = []
        sent = taken = 0
        try:
            while taken < len(names):
                while sent < len(names) and sent - taken < _WINDOW:
                    message, undo = make(names[sent])
                    out.append((self._submit(message, undo), undo))
                    sent += 1
                pending, undo = out[taken]
                taken += 1
                yield self._wait(pending)
        finally:
            for pending, undo in out[taken:]:
                reply = self._wait(pending)
                if reply is not None:
                    undo(reply)

    # ---- requests ----

    def _prepare_store(self, name: bytes) -> tuple[Callable[[int], Any], Callable[[Any], None]]:
        session_id = self._worker.session_id

        def undo(reply: Any) -> None:
            if isinstance(reply, wire.StoreGrant) and reply.store:
                self._worker.send(wire.AbortStore(reply.store), session_id)

        return lambda i: wire.PrepareStore(i, 0, b"", name, 1, 0, self._client.tenant), undo

    def _fetch(self, name: bytes) -> tuple[Callable[[int], Any], Callable[[Any], None]]:
        session_id = self._worker.session_id

        def undo(reply: Any) -> None:
            if isinstance(reply, wire.LoadGrant):
                self._worker.send(wire.Release(reply.load, ()), session_id)

        return lambda i: wire.Fetch(i, name), undo

    def _allocation(self, name: bytes, size: int, reply: Any) -> Allocation:
        if isinstance(reply, wire.StoreGrant):
            if reply.held:
                return Allocation(self, name, size, None, None)
            if not reply.grants:
                raise NoRoom(
                    f"{self._endpoint}: no room for a value of {self._slot_bytes} bytes: what "
                    "fills the arena is leased, pinned or in use; close values, or give it more "
                    "memory (arena.limit)"
                )
            lease = self._located(reply.grants[0], reply.store, wire.AbortStore(reply.store))
            if lease is not None:
                return Allocation(self, name, size, lease, self._buffer(lease, size))
        raise SidecarUnavailable(self._explained(reply))

    def _located(self, extent: Any, handle: int, last: Any) -> _Lease | None:
        """Return the lease of a grant, or None if its session has ended or cannot map it."""
        with self._arena.changed:
            live = self._arena.live
        hold = live.regions.acquire() if live is not None else None
        if live is None or hold is None:
            return None
        write = isinstance(last, wire.AbortStore)
        try:
            address = hold.locate(
                extent.region, extent.offset, self._slot_bytes, self._client.timeout_s, write
            )
        except RegionError:
            hold.release()
            self._worker.send(last, live.session_id)
            return None
        with self._lock:
            self._leases += 1
        return _Lease(hold, live.session_id, handle, address, last)

    def _buffer(self, lease: _Lease, size: int) -> _Buffer:
        return _Buffer(lease, size, self._waiting.put, self._end)

    def _find(
        self, names: list[bytes], known: Callable[[bytes], _Lease | None]
    ) -> list[tuple[_Lease | None, int]]:
        """Lease what is held of the names, with its length; bring up what lies in a tier."""
        leases: list[_Lease | None] = [known(name) for name in names]
        try:
            missing = [i for i, lease in enumerate(leases) if lease is None]
            missing = self._fetch_some(names, missing, leases)
            if missing and self._bring_up([names[i] for i in missing]):
                self._fetch_some(names, missing, leases)
            return [
                self._checked(name, lease) if lease is not None else (None, 0)
                for name, lease in zip(names, leases, strict=True)
            ]
        except BaseException:
            for lease in leases:
                if lease is not None:
                    self._end(lease)
            raise

    def _fetch_some(
        self, names: list[bytes], which: list[int], leases: list[_Lease | None]
    ) -> list[int]:
        """Fetch some of the names; return those that are not held."""
        missing: list[int] = []
        again: list[int] = []
        for i, reply in zip(which, self._ask([names[i] for i in which], self._fetch), strict=True):
            if isinstance(reply, wire.LoadGrant):
                leases[i] = self._located(
                    reply.extents[0], reply.load, wire.Release(reply.load, ())
                )
                if leases[i] is None:
                    missing.append(i)
            elif isinstance(reply, wire.Error) and reply.code == "not_found":
                missing.append(i)
            elif isinstance(reply, wire.Error) and reply.code == "busy":
                again.append(i)
            else:
                raise SidecarUnavailable(self._explained(reply))
        if again:
            if not self._free_some():
                raise NoRoom(
                    f"{self._endpoint}: this process has leased as much of the arena as one may: "
                    "close values, or give the arena more memory (arena.limit)"
                )
            missing += self._fetch_some(names, again, leases)
        return missing

    def _bring_up(self, names: list[bytes]) -> bool:
        """Have the tiers bring values up; return whether any has come."""
        came = False
        with self._looking:
            if not self._scheduler.wait_connected(self._client.timeout_s):
                return False
            lookups = [self._lookups.start(0, b"", n, tenant=self._client.tenant) for n in names]
            for lookup in lookups:
                came = bool(self._lookups.wait(lookup, self._client.timeout_s)) or came
            # Their leases are not needed: a fetch takes its own, and a value that has just come is
            # the last to go.
            for lookup in lookups:
                lookup.cancel()
        return came

    def _advise(self, keys: Iterable[Key], action: int, ms: int) -> None:
        names = [_name(key) for key in keys]
        self._connected()
        if names and action != wire.ADVISE_PREFETCH:
            # Stores went over the other session. What is answered there comes after them.
            message, undo = self._fetch(names[-1])
            undo(self._wait(self._submit(message, undo)))
        with self._looking:
            if not self._scheduler.wait_connected(self._client.timeout_s):
                raise SidecarUnavailable(self._explained(None))
            for name in names:
                self._lookups.advise(name, action, ms, 0, self._client.tenant)
            if names and action != wire.ADVISE_PREFETCH:
                # Advice is not answered. What is asked behind it on the same socket is.
                lookup = self._lookups.start(0, b"", names[-1], tenant=self._client.tenant)
                self._lookups.wait(lookup, self._client.timeout_s)
                lookup.cancel()

    # ---- leases ----

    def _trail(self, lease: _Lease, name: bytes, size: int) -> None:
        trailer = _TRAILER.pack(_MAGIC, size, name)
        ctypes.memmove(lease.address + self._slot_bytes - _TRAILER.size, trailer, _TRAILER.size)

    def _checked(self, name: bytes, lease: _Lease) -> tuple[_Lease | None, int]:
        """Return the lease and its value's length; no lease if the slot does not hold it."""
        trailer = ctypes.string_at(lease.address + self._slot_bytes - _TRAILER.size, _TRAILER.size)
        magic, size, key = _TRAILER.unpack(trailer)
        if magic == _MAGIC and key == name and size <= self.value_bytes:
            return lease, size
        self._tell(lease, wire.Release(lease.handle, (0,)))
        self._end(lease)
        return None, 0

    def _keep(self, name: bytes, lease: _Lease) -> None:
        with self._lock:
            old = self._kept.pop(name, None)
            if old is None and len(self._kept) >= _MAX_KEPT:
                old = self._kept.pop(next(iter(self._kept)))
            self._kept[name] = (time.monotonic() + _KEPT_S, lease)
            wake, self._looks = not self._looks, True
        if wake:
            self._waiting.put("look")
        if old is not None:
            self._end(old[1])

    def _unkeep(self, name: bytes) -> _Lease | None:
        with self._lock:
            kept = self._kept.pop(name, None)
        if kept is None:
            return None
        # A lease of a session that has ended is as good: its memory is not reused before its end.
        return kept[1]

    def _drop_kept(self, until: float = math.inf) -> bool:
        """End what exists has kept up to a time; return whether there was any."""
        with self._lock:
            late = [name for name, (end, _) in self._kept.items() if end <= until]
            leases = [self._kept.pop(name)[1] for name in late]
        for lease in leases:
            self._end(lease)
        return bool(leases)

    def _tell(self, lease: _Lease, message: Any) -> bool:
        return lease.tell(self._worker, message)

    def _end(self, lease: _Lease) -> None:
        later = lease.end(self._worker)
        with self._lock:
            self._leases -= 1
            wake = self._closed and not self._leases
            if later and not self._looks:
                wake = self._looks = True
        if wake:
            self._waiting.put("look")

    def _free_some(self) -> bool:
        """End what nobody uses any more, and what exists has kept; return whether there was any."""
        ended = self._drop_kept()
        while True:
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return ended
            if isinstance(item, _Lease):
                self._end(item)
                ended = True
            else:
                self._waiting.put(item)
                return ended

    def _clean(self) -> None:
        """The janitor: ends leases of finalizers and of exists, until the last one after close."""
        late = True
        while True:
            with self._lock:
                # As long as there is something to do again and again, nobody need wake this thread.
                self._looks = bool(self._kept) or (self._looks and not late)
                pause = _LOOK_S if self._looks else None
                if self._closed and not self._leases:
                    return
            late = False
            try:
                item = self._waiting.get(timeout=pause)
            except queue.Empty:
                self._drop_kept(time.monotonic())
                self._worker.flush()
                late = True
                continue
            if isinstance(item, _Lease):
                self._end(item)


class Client:
    """A sidecar, as a cache of values by keys. See the module's comment.

    endpoint is the sidecar's directory; without it the one that vLLM's connector uses for rank 0.
    With autostart a sidecar is started there if none answers, with ``sidecar_arguments`` of
    ``lookaside serve``; it ends by itself when nobody has been connected for ten minutes. tenant
    names to whom values are counted. timeout_s bounds every wait.
    """

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        autostart: bool = False,
        binary: str = "lookaside",
        sidecar_arguments: Sequence[str] = (),
        tenant: str = "",
        timeout_s: float = 10.0,
    ) -> None:
        self.endpoint = os.path.abspath(
            endpoint if endpoint is not None else default_endpoint().format(rank=0)
        )
        self.tenant = tenant
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._spaces: dict[str, Space] = {}  # guarded by _lock
        self._autostart: Callable[[], None] | None = None
        if autostart:
            self._autostart = Autostart(binary, self.endpoint, sidecar_arguments).ensure

    def space(self, name: str, value_bytes: int, copies: Attachable | None = None) -> Space:
        """Return the space of this name, for values of up to value_bytes.

        It connects in the background; the first request waits for that. A second call returns the
        same Space. Raises ValueError for a name of over 200 bytes, and if this Client has a space
        of this name for values of another size. Processes that name another size have another
        space. copies, given with the first call, are told of the memory in which values lie, before
        there are any (copies.Copies).
        """
        if not 0 < len(name.encode()) <= 200:
            raise ValueError(f"a space's name has 1 to 200 bytes, not {len(name.encode())}")
        if not 0 < value_bytes <= _MAX_VALUE_BYTES:
            raise ValueError(f"value_bytes is {value_bytes}, want 1 to {_MAX_VALUE_BYTES}")
        with self._lock:
            space = self._spaces.get(name)
            if space is None or space._closed:
                space = self._spaces[name] = Space(self, name, value_bytes, copies)
        if space.value_bytes != value_bytes:
            raise ValueError(
                f"the space {name!r} is for values of {space.value_bytes} bytes here, not of "
                f"{value_bytes}: give it another name"
            )
        return space

    def close(self) -> None:
        """Close all spaces. Safe to call again."""
        with self._lock:
            spaces, self._spaces = list(self._spaces.values()), {}
        for space in spaces:
            space.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_absent(self) -> None:
        if self._autostart is not None:
            with self._lock:
                self._autostart()


def _name(key: Key) -> bytes:
    return hashlib.sha256(key).digest()
