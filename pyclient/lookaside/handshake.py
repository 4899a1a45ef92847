"""How a session begins: the Hello, the Welcome or refusal, and the control region."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
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


def greet(line: Line, options: SessionOptions) -> None:
    """Send the Hello that opens a session."""
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
    )
    # A sidecar without room for us may have refused and closed already.
    with contextlib.suppress(BrokenPipeError):
        line.socket.send(wire.encode(hello), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def welcomed(
    message: Any, fds: list[int], options: SessionOptions
) -> tuple[wire.Welcome, Control, socket.socket | None]:
    """Check the answer to the Hello, and map the control region that travels with it.

    Returns a scheduler's direct socket as well, which the caller closes. Closes fds. Raises
    RefusedError for a refusal, HandshakeError for anything that is no welcome, and RegionError for
    a control region that cannot be used. The caller closes the control region.
    """
    try:
        if isinstance(message, wire.Refuse):
            raise RefusedError(message)
        wanted = 2 if options.role == "scheduler" else 1
        if not isinstance(message, wire.Welcome) or len(fds) != wanted:
            raise HandshakeError(f"{type(message).__name__} with {len(fds)} fds for a Welcome")
        if message.version != wire.VERSION or not message.session:
            raise HandshakeError(f"welcomed with version {message.version}")
        if message.regions > _MAX_REGIONS:
            raise HandshakeError(f"{message.regions} regions announced")
        control = Control(fds[0])
        return message, control, socket.socket(fileno=fds.pop()) if wanted == 2 else None
    finally:
        close_all(fds)
