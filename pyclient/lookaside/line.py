"""The socket of one session, and the messages on it."""

from __future__ import annotations

import os
import socket
import struct
import threading
from typing import Any

from lookaside import wire


class HandshakeError(RuntimeError):
    """The peer is not a sidecar that speaks this protocol."""


class Line:
    """One session's socket. It closes when nobody holds it; it is made held once.

    hold and release are for any thread. receive is for the session's thread alone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()
        self._holds = 1

    def hold(self) -> None:
        """Keep the socket open until a further release."""
        with self._lock:
            self._holds += 1

    def release(self) -> None:
        """End one hold."""
        with self._lock:
            self._holds -= 1
            last = not self._holds
        if last:
            self.socket.close()

    @property
    def is_open(self) -> bool:
        """Whether the socket is open."""
        return self.socket.fileno() >= 0

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
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
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
            socket.CMSG_SPACE(8 * struct.calcsize("i")),
            socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC,
        )


def close_all(fds: list[int]) -> None:
    """Close fds, and empty the list."""
    while fds:
        os.close(fds.pop())
