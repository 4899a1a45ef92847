"""How a session begins: the Hello, the Welcome or refusal, and the control region."""

from __future__ import annotations

import contextlib
import os
import socket
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lookaside import wire
from lookaside.control import Control
from lookaside.line import HandshakeError, Line, close_all

_MAX_REGIONS = 4096


class RefusedError(RuntimeError):
    """The sidecar refused the handshake; ``refusal`` says why."""

    def __init__(self, refusal: wire.Refuse) -> None:
        self.refusal = refusal
        super().__init__(
            f"{refusal.code}: {refusal.message}"
            + (
                f" ({refusal.field}: sidecar has {refusal.want!r}, this engine {refusal.got!r})"
                if refusal.field
                else ""
            )
        )


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Which sidecar to connect to, and what to say. A scheduler may leave page_bytes 0."""

    endpoint: str
    """The sidecar's directory."""
    role: str
    """``"scheduler"`` or ``"worker"``."""
    engine_id: str
    rank: int
    page_tokens: int
    page_bytes: int
    pages_per_chunk: int
    digest_bytes: int
    ranks: int = 1
    """How many ranks a scheduler speaks for, from ``rank`` on. All of them hold the same pages."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What else must agree for bytes to be reusable; part of the fingerprint."""
    about: Mapping[str, str] = field(default_factory=dict)
    """What operators may want to know of the client (about.py)."""
    remote: str = ""
    """Of a scheduler: host:port of the sidecar of another host that the session is with. The one in
    the directory carries it. Empty: the session is with that one."""

    @property
    def where(self) -> str:
        """The sidecar that the session is with, for people."""
        return f"{self.remote} (through {self.endpoint})" if self.remote else self.endpoint


def greet(line: Line, options: SessionOptions, held: Sequence[int] = ()) -> None:
    """Send the Hello that opens a session, with the descriptors of memory that is held."""
    hello = wire.Hello(
        version=wire.VERSION,
        role=options.role,
        engine_id=options.engine_id,
        rank=options.rank,
        ranks=options.ranks,
        page_tokens=options.page_tokens,
        page_bytes=options.page_bytes,
        pages_per_chunk=options.pages_per_chunk,
        digest_bytes=options.digest_bytes,
        fields=dict(sorted(options.fields.items())),
        direct=int(options.role == "scheduler"),
        held=len(held),
        about=dict(sorted(options.about.items())),
    )
    # A sidecar without room for us may have refused and closed already.
    with contextlib.suppress(BrokenPipeError):
        if options.remote:
            line.socket.send(
                wire.encode(wire.Reach(wire.VERSION, options.remote)),
                socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
            )
        line.socket.sendmsg(
            [wire.encode(hello)],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", held))] if held else [],
            socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
        )


def welcomed(message: Any, fds: list[int], options: SessionOptions) -> tuple[wire.Welcome, Control]:
    """Check the answer to the Hello, and map the control region that travels with it.

    Leaves in fds the one of the role's own, a scheduler's direct socket or a worker's claim, and
    closes the others. Raises RefusedError for a refusal, HandshakeError for anything that is no
    welcome, and RegionError for a control region that cannot be used; it then closes all. The
    caller closes the control region.
    """
    try:
        if isinstance(message, wire.Refuse):
            raise RefusedError(message)
        if not isinstance(message, wire.Welcome) or len(fds) != 2:
            raise HandshakeError(f"{type(message).__name__} with {len(fds)} fds for a Welcome")
        if message.version != wire.VERSION or not message.session:
            raise HandshakeError(f"welcomed with version {message.version}")
        if message.regions > _MAX_REGIONS:
            raise HandshakeError(f"{message.regions} regions announced")
        control = Control(fds[0])
    except BaseException:
        close_all(fds)
        raise
    os.close(fds.pop(0))
    return message, control
