"""Whether a sidecar serves."""

from __future__ import annotations

from pathlib import Path

import httpx


def ready(endpoint: Path) -> bool:
    """Report whether the sidecar of a directory takes clients, and its arena has memory.

    The socket of one that was killed is still there, and refuses.
    """
    transport = httpx.HTTPTransport(uds=str(endpoint / "admin.sock"))
    with httpx.Client(transport=transport, timeout=30) as client:
        try:
            return client.get("http://localhost/readyz").text == "ok\n"
        except httpx.HTTPError:
            return False
