"""LightMem's interface, on a sidecar: a disk cache for the pages of one tensor.

    from lookaside.light_mem import PyLocalCacheService, PyState

    service = PyLocalCacheService(kvcache_tensor, "cache/file", storage_size=32 << 30)
    task = service.create(hashes, page_indexer, "w")
    while not task.ready(): ...
    assert all(state is PyState.Finished for state in task.state())

The tensor has the shape [pages, bytes of a page]. Each page has a hash of 128 bits that names all
pages up to it. Pages are grouped into blocks of at most LIGHTMEM_MAX_BLOCK_SIZE_MB; queries and
states are by the block, what is stored and found is by the page.

A sidecar that this module starts keeps the pages, in the directory FILE.lookaside. All processes
that name one file share it. It ends some time after the last of them, and the next one finds what
it wrote. With LOOKASIDE_LIGHT_MEM_ENDPOINT the sidecar in that directory is used instead.

docs/light-mem.md has the settings, and what differs from LightMem. torch is not imported here.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from lookaside.autostart import Autostart
from lookaside.config import default_endpoint, parse_size
from lookaside.pages import (
    DIGEST_BYTES,
    WINDOW_BYTES,
    Pages,
    Piece,
    chunk_pages,
    pages_per_chunk,
)

__all__ = ["PyLocalCacheService", "PyState", "PyTask"]

logger = logging.getLogger("lookaside.light_mem")

BLOCK_SIZE_ENV = "LIGHTMEM_MAX_BLOCK_SIZE_MB"
ENDPOINT_ENV = "LOOKASIDE_LIGHT_MEM_ENDPOINT"
BINARY_ENV = "LOOKASIDE_LIGHT_MEM_BINARY"
ARENA_ENV = "LOOKASIDE_LIGHT_MEM_ARENA"
ARGUMENTS_ENV = "LOOKASIDE_LIGHT_MEM_ARGUMENTS"

_DEFAULT_BLOCK_MB = 64
_DEFAULT_STORAGE = 32 << 30
_LEAST_PAGE_BYTES = 256  # as the sidecar demands
_START_PATIENCE_S = 60.0
_QUERY_PATIENCE_S = 2.0
_LONGEST_ENDPOINT = 80  # bytes: the sockets in it must fit the address of a Unix socket
# So many hashes take some 0.3 ms.
_SLICE = 2048
# A thread that sleeps lets another one have the GIL. One that only releases it does not.
_BREATH_S = 20e-6


class PyState(Enum):
    """How far a block of a task is."""

    Initial = 0
    """Nothing of it was begun."""
    Working = 1
    Finished = 2
    """Written: it is on disk. Read: all its pages are in the tensor."""
    Aborted = 3
    """Not written, or not read: the pages that it was to be read into are undefined."""


_STATES = tuple(PyState)
_INITIAL, _WORKING, _FINISHED, _ABORTED = range(4)


class PyTask:
    """Pages that are being written or read. Made by PyLocalCacheService.create.

    Its methods may be called from any thread; none waits.
    """

    def __init__(
        self, first: int, pages: int, per_block: int, store: bool, ended: Callable[[], None]
    ) -> None:
        """The task has pages from ``first`` on, the first one of a block."""
        self._first = first
        self._end = first + pages
        self._per_block = per_block
        self._store = store
        self._ended: Callable[[], None] | None = ended if pages else None
        blocks = math.ceil(pages / per_block)
        sizes = chunk_pages(pages, per_block).tolist()
        self._changed = threading.Condition()
        # Guarded by _changed, all below; written in one step each, so that a reader needs no lock.
        self._states = bytearray(blocks)
        self._left = sizes  # pages of each block that are not where they should be
        self._uncopied = list(sizes)  # pages of each block that the tensor still has to give
        self._open = blocks  # blocks that are neither finished nor aborted
        self._unsafe = blocks  # blocks of which the tensor still has to give something
        self._copying = 0
        self._already: list[int] = []

    def ready(self) -> bool:
        """Return whether each block is finished or aborted."""
        return not self._open

    def data_safe(self) -> bool:
        """Return whether the tensor is not read any more: its pages may be changed.

        For a read this is the same as ready.
        """
        return not self._open or (self._store and not self._unsafe)

    def state(self) -> list[PyState]:
        """Return the state of each block."""
        return [_STATES[state] for state in bytes(self._states)]

    @property
    def page_already_list(self) -> list[int]:
        """Of a write: the pages, as indices of the tensor, of the blocks that were held before."""
        return list(self._already)

    def _abort(self) -> None:
        """End all open blocks. Returns when the tensor is not touched any more."""
        with self._changed:
            self._fail(0, len(self._states))
            while self._copying:
                self._changed.wait()

    # ---- the pages' mover; see blocks.Job ----

    def _blocks(self, first: int, pages: int) -> tuple[int, int]:
        """Return the blocks that pages are of, as a range."""
        begin = (first - self._first) // self._per_block
        return begin, math.ceil((first + pages - self._first) / self._per_block)

    def _overlap(self, block: int, first: int, pages: int) -> int:
        begin = self._first + block * self._per_block
        return min(begin + self._per_block, first + pages) - max(begin, first)

    def begin(self, first: int, pages: int) -> bool:
        begin, end = self._blocks(first, pages)
        with self._changed:
            wanted = False
            for block in range(begin, end):
                if self._states[block] <= _WORKING:
                    self._states[block] = _WORKING
                    wanted = True
            return wanted

    def begin_copy(self, first: int, pages: int) -> bool:
        begin, end = self._blocks(first, pages)
        with self._changed:
            if all(state > _WORKING for state in self._states[begin:end]):
                return False
            self._copying += 1
            return True

    def end_copy(self) -> None:
        with self._changed:
            self._copying -= 1
            self._changed.notify_all()

    def copied(self, first: int, pages: int) -> None:
        begin, end = self._blocks(first, pages)
        with self._changed:
            for block in range(begin, end):
                if self._uncopied[block]:
                    self._uncopied[block] -= self._overlap(block, first, pages)
                    if not self._uncopied[block]:
                        self._unsafe -= 1

    def finished(self, first: int, pages: int) -> None:
        begin, end = self._blocks(first, pages)
        with self._changed:
            for block in range(begin, end):
                if self._states[block] <= _WORKING:
                    self._left[block] -= self._overlap(block, first, pages)
                    if not self._left[block]:
                        self._close(block, _FINISHED)

    def failed(self, first: int, pages: int) -> int:
        begin, end = self._blocks(first, pages)
        with self._changed:
            self._fail(begin, end)
        return self._first + end * self._per_block

    def _fail(self, begin: int, end: int) -> None:
        for block in range(begin, end):
            if self._states[block] <= _WORKING:
                self._close(block, _ABORTED)

    def _close(self, block: int, state: int) -> None:
        self._states[block] = state
        if self._uncopied[block]:
            self._uncopied[block] = 0
            self._unsafe -= 1
        if self._open == 1 and self._ended is not None:
            self._ended()  # before it is ready: nobody sees a task that is ready and counted
            self._ended = None  # which has the service
        self._open -= 1


class PyLocalCacheService:
    """Writes pages of a tensor to disk and reads them again, in the background."""

    def __init__(
        self,
        kvcache_tensor: Any,
        file: str | os.PathLike[str],
        storage_size: int = _DEFAULT_STORAGE,
        num_shard: int = 32,
        num_worker: int = 16,
        *,
        endpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Start the sidecar of a file, or connect to it if it serves.

        kvcache_tensor: a torch tensor on the CPU, uint8, contiguous, [pages, bytes of a page]. It
        is kept until the service is closed or collected.
        file: names the cache. The directory FILE.lookaside has it.
        storage_size: bytes on disk. num_worker: the most threads that copy. num_shard: without
        effect; it must be at least 1.
        endpoint: the directory of a sidecar to use instead, whose settings then hold; without it
        LOOKASIDE_LIGHT_MEM_ENDPOINT, if that is set.

        Raises ValueError for a tensor that cannot be used, RuntimeError if no sidecar serves.
        """
        address, pages, page_bytes = _memory_of(kvcache_tensor)
        if num_shard < 1:
            raise RuntimeError(f"num_shard is {num_shard}: it must be at least 1")
        if num_worker < 1:
            raise ValueError(f"num_worker is {num_worker}: it must be at least 1")
        self._page_size = page_bytes
        self._n = max(1, _block_bytes() // page_bytes)
        self._block_size = self._n * page_bytes
        if storage_size < self._block_size:
            raise RuntimeError(
                f"storage_size is {storage_size}, below the {self._block_size} bytes of one block: "
                f"set more, or {BLOCK_SIZE_ENV} to less"
            )
        per_chunk = pages_per_chunk(self._n, page_bytes)
        endpoint = endpoint or os.environ.get(ENDPOINT_ENV)
        start = None
        if endpoint is None:
            store = _store_of(file, storage_size)
            endpoint = _endpoint_in(store)
            start = _autostart(endpoint, store, storage_size, self._block_size)
        self._num_pages = pages
        self._active = {"w": 0, "r": 0}
        self._active_lock = threading.Lock()
        self._blocks = Pages(
            os.path.abspath(endpoint),
            address,
            pages,
            page_bytes,
            per_chunk,
            min(num_worker, os.cpu_count() or 1),
            name="light_mem",
            on_absent=start.ensure if start is not None else None,
        )
        # It has the tensor, which lives as long as its memory may be touched.
        self._collected = weakref.finalize(self, _close_later, self._blocks, kvcache_tensor)
        self._collected.atexit = False
        try:
            self._await_sidecar(start)
        except BaseException:
            self.close()
            raise

    def query(self, hash_128s: Sequence[int]) -> list[bool]:
        """Return for each block whether all its pages are held, each block by itself.

        hash_128s: the hash of each page, from the first one on. A block is held if a read would
        find it. No sidecar: nothing is held.
        """
        return self._held(0, b"", self._packed(hash_128s, 0), len(hash_128s)).tolist()

    def create(
        self,
        hash_128s: Sequence[int],
        kv_page_indexer: Any,
        mode: str,
        start_pos: int = 0,
    ) -> PyTask:
        """Begin to write ("w") pages to disk, or to read ("r") them.

        hash_128s: the hash of each page, from the first one on. kv_page_indexer: for each of them
        its row of the tensor; int32, on the CPU, one-dimensional, as long as hash_128s. start_pos:
        the blocks before the one with this page are left out.

        Raises ValueError for a row that the tensor does not have, and for hashes that are no
        numbers of 128 bits; RuntimeError for another mode, type or length.
        """
        _check_mode(mode)
        rows = self._rows(kv_page_indexer, len(hash_128s))
        if start_pos < 0:
            raise ValueError(f"start_pos is {start_pos}")
        first = start_pos // self._n * self._n
        store = mode == "w"
        begin = min(first, len(rows))
        prev = b"".join(_packed(hash_128s[begin - 1 : begin], 1)) if begin else b""
        parts = list(self._packed(hash_128s, begin))
        rows = rows[begin:]
        task = PyTask(first, len(rows), self._n, store, lambda: self._count(mode, -1))
        if not len(rows):
            return task
        if store:
            there = self._held(first, prev, parts, len(rows))
            task._already = rows[np.repeat(there, self._n)[: len(rows)]].tolist()
        self._count(mode, 1)
        pieces: list[Piece] = []
        step, at = self._blocks.piece_pages, 0
        for part in parts:
            pages = len(part) // DIGEST_BYTES
            whole = Piece(task, store, first + at, prev, part, rows[at : at + pages])
            pieces += [whole.part(a, min(a + step, pages)) for a in range(0, pages, step)]
            at, prev = at + pages, part[-DIGEST_BYTES:]
        self._blocks.add(pieces)
        return task

    def abort(self, t: PyTask) -> None:
        """End a task. Blocks that are finished stay so, the others are aborted.

        When it returns, the task touches the tensor no more.
        """
        t._abort()

    def active_threads(self, mode: str) -> int:
        """Return how many tasks of a mode, "w" or "r", are not ready."""
        _check_mode(mode)
        return self._active[mode]

    def close(self) -> None:
        """Abort all tasks and let go of the tensor. Safe to call again.

        The sidecar goes on for others, and ends by itself when nobody is connected.
        """
        self._blocks.close()
        self._collected.detach()

    # ---- parts ----

    def _await_sidecar(self, start: Autostart | None) -> None:
        deadline = time.monotonic() + _START_PATIENCE_S
        while not self._blocks.wait_ready(0.2):
            where = f"the sidecar in {self._blocks.endpoint}"
            refused = self._blocks.refused
            if refused is not None and refused.code in ("version", "incompatible", "limit"):
                raise RuntimeError(f"{where} refuses: {refused.message} ({refused.code})")
            if start is not None and start.fault:
                raise RuntimeError(f"{where} cannot be started: {start.fault}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{where} does not answer")

    def _packed(self, hash_128s: Sequence[int], begin: int) -> Iterator[bytes]:
        """Return the hashes from one on in parts, each of whole pieces but for the last."""
        step = self._blocks.piece_pages
        return _packed(hash_128s, max(1, _SLICE // step) * step, begin)

    def _held(self, first: int, prev: bytes, parts: Iterable[bytes], pages: int) -> np.ndarray:
        """Return for each block of pages from first on whether it is held."""
        if not pages:
            return np.zeros(0, bool)
        held = self._blocks.held(prev, first, parts, _QUERY_PATIENCE_S)
        if held is None:
            for _ in parts:
                pass  # what is no hash is refused in any case
            return np.zeros(math.ceil(pages / self._n), bool)
        per_chunk = self._blocks.per_chunk
        there = held.pages >= chunk_pages(pages, per_chunk)
        return np.logical_and.reduceat(there, np.arange(0, len(there), self._n // per_chunk))

    def _rows(self, kv_page_indexer: Any, want: int) -> np.ndarray:
        device = getattr(kv_page_indexer, "device", None)
        if device is not None and getattr(device, "type", device) != "cpu":
            raise RuntimeError(f"kv_page_indexer is on {device}: it must be on the CPU")
        rows = np.asarray(kv_page_indexer)
        if rows.dtype != np.int32:
            raise RuntimeError(f"kv_page_indexer is of {rows.dtype}: it must be int32")
        if rows.ndim != 1 or len(rows) != want:
            raise RuntimeError(
                f"kv_page_indexer has the shape {list(rows.shape)} for {want} hashes: it must have "
                "one row of the tensor for each"
            )
        if (
            want
            and not 0 <= (low := int(rows.min())) <= (high := int(rows.max())) < self._num_pages
        ):
            bad = low if low < 0 else high
            raise ValueError(
                f"kv_page_indexer has the page {bad}: the tensor has pages 0 to "
                f"{self._num_pages - 1}"
            )
        return rows.astype(np.int64)

    def _count(self, mode: str, change: int) -> None:
        with self._active_lock:
            self._active[mode] += change


def _close_later(blocks: Pages, tensor: Any) -> None:
    """Close what a service that was collected has left: elsewhere, for this thread may have any
    lock. The tensor is kept until then.

    The interpreter waits for the thread: one that it ends while torch frees the tensor aborts the
    process.
    """

    def close(_: Any) -> None:
        blocks.close()

    threading.Thread(target=close, args=(tensor,), name="lookaside-close").start()


def _check_mode(mode: str) -> None:
    if mode not in ("w", "r"):
        raise RuntimeError(f'mode is {mode!r}: it must be "w" to write or "r" to read')


def _memory_of(tensor: Any) -> tuple[int, int, int]:
    """Return a tensor's address, its pages, and the bytes of each. Raises ValueError."""
    shape = tuple(tensor.shape)
    if len(shape) != 2:
        raise ValueError(
            f"kvcache_tensor has the shape {list(shape)}: it must be [pages, bytes of a page]"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"kvcache_tensor is on {tensor.device}: it must be on the CPU")
    if tensor.element_size() != 1 or tensor.is_floating_point():
        raise ValueError(
            f"kvcache_tensor is of {tensor.dtype}: it must be uint8 (view(torch.uint8))"
        )
    if not tensor.is_contiguous():
        raise ValueError("kvcache_tensor is not contiguous")
    if not shape[0] or shape[1] < _LEAST_PAGE_BYTES:
        raise ValueError(
            f"kvcache_tensor has {shape[0]} pages of {shape[1]} bytes: it must have one at least, "
            f"of {_LEAST_PAGE_BYTES} bytes or more"
        )
    return tensor.data_ptr(), shape[0], shape[1]


def _block_bytes() -> int:
    text = os.environ.get(BLOCK_SIZE_ENV, "")
    try:
        megabytes = int(text or _DEFAULT_BLOCK_MB)
    except ValueError:
        megabytes = 0
    if megabytes < 1:
        logger.warning(
            "%s is %r: it must be a number of MiB; %d is used", BLOCK_SIZE_ENV, text,
            _DEFAULT_BLOCK_MB,
        )  # fmt: skip
        megabytes = _DEFAULT_BLOCK_MB
    return megabytes << 20


def _packed(hash_128s: Sequence[int], step: int, begin: int = 0) -> Iterator[bytes]:
    """Return the hashes from one on, 16 bytes each, in parts of ``step`` pages.

    Other threads get the GIL after each.
    """
    for at in range(begin, len(hash_128s), step):
        some = hash_128s[at : at + step]
        try:
            yield b"".join([each.to_bytes(DIGEST_BYTES, "big") for each in some])
        except (AttributeError, OverflowError) as error:
            raise ValueError(
                "hash_128s must have integers of 128 bits, from 0 to 2**128 - 1"
            ) from error
        if at + step < len(hash_128s):
            time.sleep(_BREATH_S)


# ---- the sidecar of a file ----


def _store_of(file: str | os.PathLike[str], storage_size: int) -> Path:
    """Make the directory that has a file's cache, and return it.

    Raises RuntimeError where it cannot be made, or the file system has too little room.
    """
    store = Path(f"{os.fspath(file).rstrip('/')}.lookaside").absolute()
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = store.resolve()
        taken = sum(entry.stat().st_blocks * 512 for entry in store.rglob("*") if entry.is_file())
        system = os.statvfs(store)
    except OSError as error:
        raise RuntimeError(f"{store}: {error.strerror}") from error
    free = system.f_bavail * system.f_frsize + taken
    if free < storage_size:
        raise RuntimeError(
            f"storage_size is {storage_size}, and {store} has room for {free} bytes: set less, or "
            "name a file on a larger disk"
        )
    return store


def _endpoint_in(store: Path) -> str:
    """Return the directory of the store's sidecar: the same for all processes.

    It is in the store, unless its path is too long for a socket's address.
    """
    endpoint = str(store / "run")
    if len(os.fsencode(endpoint)) <= _LONGEST_ENDPOINT:
        return endpoint
    status = store.stat()
    return default_endpoint().replace(
        "rank-{rank}", f"light-mem-{status.st_dev:x}-{status.st_ino:x}"
    )


def _autostart(endpoint: str, store: Path, storage_size: int, block_bytes: int) -> Autostart:
    """Return what starts the sidecar of a store."""
    arena = os.environ.get(ARENA_ENV, "")
    size = parse_size(arena) if arena else _arena_bytes(storage_size, block_bytes)
    return Autostart(
        os.environ.get(BINARY_ENV) or "lookaside",
        endpoint,
        [
            f"--arena-limit={size}",
            f"--arena-initial={size}",
            f"--disk={store / 'disk'}:{storage_size}:load_timeout=60s:store_timeout=60s",
            "--lookup-promote=always",
            "--lookup-deadline=60s",
            # What is asked for is durability, now: nothing is kept back because it may grow.
            "--cascade-partial-delay=1ms",
            "--peers-enabled=false",
            "--demand-memory=0",
            "--events-journal=0",
            "--lookup-remember=0",
            "--lifecycle-idle-exit=60s",
            *shlex.split(os.environ.get(ARGUMENTS_ENV, "")),
        ],
    )


def _arena_bytes(storage_size: int, block_bytes: int) -> int:
    """Return the sidecar's memory: room for what is under way both ways, twice over.

    LightMem takes two blocks for each worker, 2 GiB by default.
    """
    return min(max(4 * WINDOW_BYTES, 8 * block_bytes), max(storage_size, 8 * block_bytes, 64 << 20))
