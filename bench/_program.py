"""The sidecar's end of a tier in another process, as far as tests and benches of a program need it.

It starts the program as the sidecar does, gives it one region of memory, and asks it one thing
after the other, or many at once from threads.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lookaside import tiermessages as messages

PATIENCE_S = 60.0
HEADER = 4096

Pieces = Sequence[tuple[int, int]]
"""Offset and size of each, in the region."""


class Program:
    """A running program, and memory that it shares with us. Any thread may call it."""

    def __init__(
        self,
        command: Sequence[str],
        region_bytes: int,
        wrap: Sequence[str] = (),
        stderr: Path | None = None,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        log = stderr.open("ab") if stderr is not None else None
        with theirs:
            self.process = subprocess.Popen(
                [*wrap, *command],
                env={**os.environ, "LOOKASIDE_TIER_FD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        if log is not None:
            log.close()
        self._socket = ours
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # guards _open and sending
        self._open: dict[int, tuple[Future[Any], list[int], int]] = {}
        self._fd = os.memfd_create("arena", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, region_bytes)
        self.memory = mmap.mmap(self._fd, region_bytes)
        self._ready: Future[str] = Future()
        hold = os.memfd_create("hold", os.MFD_CLOEXEC)
        socket.send_fds(
            ours, [messages.encode(messages.TierHello(messages.VERSION, "t", 1))], [hold]
        )
        os.close(hold)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        region = messages.TierRegion(0, "memfd", region_bytes, 0, 4096)
        socket.send_fds(ours, [messages.encode(region)], [self._fd])
        error = self._ready.result(PATIENCE_S)
        if error:
            raise RuntimeError(error)

    # Calls.

    def contains(self, *keys: bytes) -> list[int]:
        return self._call(messages.TierContains, keys, len(keys))[0]

    def put(self, *items: tuple[bytes, Pieces]) -> tuple[list[int], str]:
        return self._call(messages.TierPut, self._items(items), len(items))

    def get(self, *items: tuple[bytes, Pieces]) -> tuple[list[int], str]:
        return self._call(messages.TierGet, self._items(items), len(items))

    def begin_put(self, *items: tuple[bytes, Pieces]) -> tuple[int, Future[Any]]:
        """A put that is not waited for: its id, and what it will return."""
        return self._begin(messages.TierPut, self._items(items), len(items))

    def begin_get(self, *items: tuple[bytes, Pieces]) -> tuple[int, Future[Any]]:
        """Likewise a get."""
        return self._begin(messages.TierGet, self._items(items), len(items))

    def cancel(self, number: int) -> None:
        with self._lock:
            self._socket.send(messages.encode(messages.TierCancel(number)))

    def drop(self, *keys: bytes) -> list[int]:
        return self._call(messages.TierDrop, keys, len(keys))[0]

    def clear(self, prefix: bytes = b"") -> messages.TierCleared:
        return self._call(messages.TierClear, prefix, 0)

    def stats(self) -> messages.TierFigures:
        return self._begin(messages.TierStats, None, 0)[1].result(PATIENCE_S)

    # Its end.

    def close(self) -> int:
        """End the connection, as a sidecar that leaves; return how the program has ended."""
        self._socket.shutdown(socket.SHUT_RDWR)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._thread.join()
        self._socket.close()
        if not self.memory.closed:
            self.memory.close()
            os.close(self._fd)

    # Its parts.

    @staticmethod
    def _items(items: Sequence[tuple[bytes, Pieces]]) -> tuple[messages.TierItem, ...]:
        return tuple(
            messages.TierItem(key, tuple(messages.TierPiece(0, at, size) for at, size in pieces))
            for key, pieces in items
        )

    def _begin(self, kind: type, what: Any, count: int) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._open[number] = (future, [-1] * count, count)
            message = kind(number) if what is None else kind(number, what)
            self._socket.sendall(messages.encode(message))
        return number, future

    def _call(self, kind: type, what: Any, count: int) -> Any:
        return self._begin(kind, what, count)[1].result(PATIENCE_S)

    def _receive(self) -> None:
        buffer = bytearray(messages.MAX_PACKET_BYTES)
        texts: dict[int, str] = {}
        while True:
            try:
                size = self._socket.recv_into(buffer)
            except OSError:
                size = 0
            if not size:
                break
            message: Any = messages.decode(memoryview(buffer)[:size], "sidecar")
            if isinstance(message, messages.TierRegionReady):
                self._ready.set_result(message.error)
            elif isinstance(message, messages.TierDone):
                future, statuses, left = self._open[message.id]
                for result in message.results:
                    assert statuses[result.index] == -1, "reported twice"
                    statuses[result.index] = result.status
                texts[message.id] = texts.get(message.id, "") + message.text
                left -= len(message.results)
                self._open[message.id] = (future, statuses, left)
                if not left:
                    del self._open[message.id]
                    future.set_result((statuses, texts.pop(message.id)))
            elif isinstance(message, (messages.TierCleared, messages.TierFigures)):
                self._open.pop(message.id)[0].set_result(message)
        gone = ConnectionError("the program has left")
        if not self._ready.done():
            self._ready.set_exception(gone)
        with self._lock:
            for future, _, _ in self._open.values():
                future.set_exception(gone)
