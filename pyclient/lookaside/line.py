"""The socket and the claim of one session, and the messages on the socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any

from lookaside import wire

_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * struct.calcsize("i"))
# As numbers: enums are slow.
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)


class HandshakeError(RuntimeError):
    """The peer is not a sidecar that speaks this protocol."""


class Line:
    """One session's socket and a worker's claim. It is made held once.

    The socket closes when nobody holds the line: a sidecar that lives then gives what it granted
    us to others. The claim is a descriptor that says the same to a sidecar that comes after ours
    has died: it reuses no memory as long as a claim of an earlier run is open. So the claim closes
    when nobody holds the line and the next sidecar knows of us (end_claim).

    receive is for the session's thread alone, forget_after_fork for a forked child. The other
    methods are for any thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()
        self._holds = 1
        self._claim = -1
        self._wanted = True  # the claim, even if nobody holds the line

    def take_claim(self, fd: int) -> None:
        """Keep the session's claim; the line owns it."""
        with self._lock:
            self._claim = fd

    def hold(self) -> None:
        """Keep the socket and the claim open until a further release."""
        with self._lock:
            self._holds += 1

    def release(self) -> None:
        """End one hold."""
        with self._lock:
            self._holds -= 1
            last = not self._holds
            claim = self._spent_claim()
        if last:
            self.socket.close()
        if claim >= 0:
            os.close(claim)

    def end_claim(self) -> None:
        """Want the claim no longer than somebody holds the line. Safe to call again."""
        with self._lock:
            self._wanted = False
            claim = self._spent_claim()
        if claim >= 0:
            os.close(claim)

    def _spent_claim(self) -> int:
        """Return the claim if it is to be closed, -1 otherwise. The caller holds _lock."""
        if self._holds or self._wanted:
            return -1
        claim, self._claim = self._claim, -1
        return claim

    @property
    def is_open(self) -> bool:
        """Whether the socket or the claim is open."""
        return self.socket.fileno() >= 0 or self._claim >= 0

    def forget_after_fork(self) -> None:
        """Close the child's copies, without the lock, which must not be touched."""
        self.socket.close()
        claim, self._claim = self._claim, -1
        if claim >= 0:
            os.close(claim)

    def receive(self, buffer: bytearray) -> tuple[Any, list[int]] | None:
        """Return one message with its fds, or None if there is none now. The caller owns the fds.

        Raises ConnectionError at the end of the session, HandshakeError for bytes that are no
        message. buffer is used until the return, and must have room for the longest packet and one
        byte more.
        """
        try:
            size, ancillary, flags, _ = self._receive_packet(buffer)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:
            # It closed with something of ours unread. The kernel says so once, and gives what the
            # sidecar had sent after that.
            size, ancillary, flags, _ = self._receive_packet(buffer)
        fds: list[int] = []
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(data) // struct.calcsize("i")
                fds.extend(struct.unpack(f"{count}i", data[: count * struct.calcsize("i")]))
        try:
            if size == 0:
                raise ConnectionResetError("the sidecar has closed the session")
            if flags & _TRUNCATED:
                raise HandshakeError("a message longer than the protocol allows")
            return wire.decode(memoryview(buffer)[:size]), fds
        except wire.WireError as error:
            close_all(fds)
            raise HandshakeError(f"a message that cannot be read: {error}") from error
        except BaseException:
            close_all(fds)
            raise

    def _receive_packet(self, buffer: bytearray) -> tuple[int, list[Any], int, Any]:
        return self.socket.recvmsg_into(
            [buffer],
            _ANCILLARY_BYTES,
            _RECEIVE_FLAGS,
        )


def close_all(fds: list[int]) -> None:
    """Close fds, and empty the list."""
    while fds:
        os.close(fds.pop())
