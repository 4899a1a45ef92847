"""Client of the Lookaside sidecar: vLLM's KV cache kept outside the engine.

``lookaside.Client`` and ``lookaside.AsyncClient`` are the cache for other programs (client.py).

Importing this package is cheap and reaches for nothing: vLLM imports the connector class also where
it is never used. The clients are imported when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookaside.aclient import AsyncClient as AsyncClient
    from lookaside.client import Client as Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from lookaside.client import Client

        return Client
    if name == "AsyncClient":
        from lookaside.aclient import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
