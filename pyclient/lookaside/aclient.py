"""lookaside.client for asyncio: the same spaces, with methods to await.

    async with AsyncClient(endpoint) as client:
        space = client.space("embeddings", value_bytes=1 << 20)
        await space.put(b"key", data)
        value = await space.retrieve(b"key")

A method runs on one of a few threads of the client, so the event loop never waits for the sidecar.
Cancelling a call does not undo it: what it was granted is given back when it returns. See
lookaside.client for what the methods do and raise. Values and Allocations are the same; their
methods do not wait, and are called without await.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lookaside.client import Allocation, Client, Key, Space, Value

_T = TypeVar("_T")
_THREADS = 4


class AsyncSpace:
    """A Space whose methods are awaited. Made by AsyncClient.space; for one event loop."""

    def __init__(self, space: Space, threads: ThreadPoolExecutor) -> None:
        self._space = space
        self._threads = threads

    @property
    def name(self) -> str:
        """See Space."""
        return self._space.name

    @property
    def value_bytes(self) -> int:
        """See Space."""
        return self._space.value_bytes

    async def alloc(self, key: Key, size: int | None = None) -> Allocation:
        """See Space.alloc. An Allocation that nobody takes is given back."""
        return await self._run(lambda: self._space.alloc(key, size))

    async def alloc_many(self, keys: Iterable[Key], size: int | None = None) -> list[Allocation]:
        """See Space.alloc_many."""
        return await self._run(lambda: self._space.alloc_many(keys, size))

    async def put(self, key: Key, data: Any) -> bool:
        """See Space.put."""
        return await self._run(lambda: self._space.put(key, data))

    async def put_many(self, items: Iterable[tuple[Key, Any]]) -> list[bool]:
        """See Space.put_many."""
        return await self._run(lambda: self._space.put_many(items))

    async def retrieve(self, key: Key) -> Value | None:
        """See Space.retrieve. A Value that nobody takes is given back."""
        return await self._run(lambda: self._space.retrieve(key))

    async def retrieve_many(self, keys: Iterable[Key]) -> list[Value | None]:
        """See Space.retrieve_many."""
        return await self._run(lambda: self._space.retrieve_many(keys))

    async def get(self, key: Key) -> bytes | None:
        """See Space.get."""
        return await self._run(lambda: self._space.get(key))

    async def exists(self, key: Key) -> bool:
        """See Space.exists."""
        return await self._run(lambda: self._space.exists(key))

    async def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """See Space.exists_many."""
        return await self._run(lambda: self._space.exists_many(keys))

    async def pin(self, keys: Iterable[Key], seconds: float) -> None:
        """See Space.pin."""
        await self._run(lambda: self._space.pin(keys, seconds))

    async def unpin(self, keys: Iterable[Key]) -> None:
        """See Space.unpin."""
        await self._run(lambda: self._space.unpin(keys))

    async def prefetch(self, keys: Iterable[Key]) -> None:
        """See Space.prefetch."""
        await self._run(lambda: self._space.prefetch(keys))

    async def clear(self) -> int:
        """See Space.clear."""
        return await self._run(self._space.clear)

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


class AsyncClient:
    """A Client whose spaces' methods are awaited. See Client for the arguments."""

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
        self._client = Client(
            endpoint,
            autostart=autostart,
            binary=binary,
            sidecar_arguments=sidecar_arguments,
            tenant=tenant,
            timeout_s=timeout_s,
        )
        self._threads = ThreadPoolExecutor(_THREADS, "lookaside-async")

    @property
    def endpoint(self) -> str:
        """See Client."""
        return self._client.endpoint

    def space(self, name: str, value_bytes: int) -> AsyncSpace:
        """See Client.space. It does not wait."""
        return AsyncSpace(self._client.space(name, value_bytes), self._threads)

    async def close(self) -> None:
        """Close all spaces. Safe to call again."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._client.close()
        self._threads.shutdown()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
