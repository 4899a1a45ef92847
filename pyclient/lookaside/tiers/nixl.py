"""A tier on what NIXL has a plug-in for: files by POSIX, GPUDirect Storage, 3FS.

    python -m lookaside.tiers.nixl --directory /mnt/kv --capacity 500G

A value is a file of the directory, written under a temporary name and renamed, so that it is there
whole or not at all. NIXL moves the bytes between the file and the arena, which is registered once,
without a copy in this process. The plug-in is POSIX unless ``--plugin`` names another one that
works with files (GDS, GDS_MT, HF3FS); ``--param`` sets its parameters.

Nothing else bounds the directory, so this program does: it never uses more than ``--capacity``, and
removes the values that were not used for the longest time. Values stay at a restart. The directory
belongs to one program at a time; several sidecars of a host may share that program (``--listen``).

Files are not synced: a crash of the machine may lose or spoil the newest, which the sidecar finds
by their checksums.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import shutil
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from lookaside.config import parse_size
from lookaside.ratelog import RateLimitedLog
from lookaside.tier import Call, Item, Region, Stats, Status, Tier, run

__all__ = ["Files", "Nixl", "Settings", "main"]

_log = logging.getLogger("lookaside.tiers.nixl")

_AT_A_TIME = 8
"""Transfers of one call under way."""

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 20e-6, 1e-3
"""Between two looks at a transfer."""

_BLOCK = 4096
"""O_DIRECT needs memory, offsets and sizes in multiples of it."""

_NAME_BYTES = 200
"""The longest part of a path. A key has up to 510 digits."""


@dataclass(frozen=True)
class Settings:
    """What the flags say. Each field is the flag of its name."""

    directory: Path
    capacity: int
    """In bytes."""
    plugin: str = "POSIX"
    params: Mapping[str, str] = field(default_factory=dict)
    """Of the plug-in."""
    direct: bool = True
    """Past the page cache (O_DIRECT), for values that allow it."""


class Files:
    """Which files there are, the least recently used first. Safe for use by several threads.

    It makes names of keys, counts bytes and removes files; it reads and writes none.
    """

    def __init__(self, directory: Path, capacity: int) -> None:
        """Take over a directory. Raises ValueError, with what to do, if that cannot be."""
        self.directory = directory
        self.capacity = capacity
        self.evictions = 0
        self._temporary = directory / "tmp"
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards all below, and the names in the directory
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0
        self._reserved = 0  # of files that are being written
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._owner = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(f"--directory {directory}: {error.strerror}") from None
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._owner)
            raise ValueError(
                f"--directory {directory}: another program uses it; give each program one of its "
                "own, or let the sidecars share one program (--listen)"
            ) from None
        try:
            total = shutil.disk_usage(directory).total
            if capacity > total:
                raise ValueError(
                    f"--capacity {capacity}: the file system of {directory} has {total} bytes"
                )
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(mode=0o700)
            self._recover()
        except BaseException:
            os.close(self._owner)
            raise

    def close(self) -> None:
        """Leave the directory to the next program."""
        os.close(self._owner)

    @property
    def used(self) -> int:
        return self._used

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def path(self, key: bytes) -> Path:
        """Where a key's file is, or would be."""
        name = key.hex()
        parts = [name[at : at + _NAME_BYTES] for at in range(0, len(name), _NAME_BYTES)]
        return self.directory.joinpath(
            f"{zlib.crc32(key) & 0xFF:02x}", *parts[:-1], f"{parts[-1]}.kv"
        )

    def used_now(self, key: bytes) -> None:
        """Note that a key is used."""
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def reserve(self, size: int) -> Path | None:
        """Make room, and return a temporary name for a file; None if there is too little room.

        The caller calls keep or discard with it, once.
        """
        with self._lock:
            if size + self._reserved > self.capacity:
                return None
            while self._used + self._reserved + size > self.capacity:
                key = next(iter(self._sizes))
                self._remove(key)
                self.evictions += 1
            self._reserved += size
            return self._temporary / str(next(self._numbers))

    def keep(self, temporary: Path, key: bytes, size: int) -> None:
        """Let a written file be the key's."""
        path = self.path(key)
        with self._lock:
            self._reserved -= size
            self._used -= self._sizes.pop(key, 0)
            try:
                try:
                    temporary.rename(path)
                except FileNotFoundError:
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise
            self._sizes[key] = size
            self._used += size

    def discard(self, temporary: Path, size: int) -> None:
        """Give up a file that was not written whole."""
        with self._lock:
            self._reserved -= size
        temporary.unlink(missing_ok=True)

    def remove(self, key: bytes) -> bool:
        """Remove a key; return whether it was there."""
        with self._lock:
            return self._remove(key)

    def clear(self, prefix: bytes) -> int:
        """Remove all keys that begin with prefix; return how many there were."""
        with self._lock:
            gone = [key for key in self._sizes if key.startswith(prefix)]
            for key in gone:
                self._remove(key)
        return len(gone)

    def _remove(self, key: bytes) -> bool:
        """The caller holds the lock."""
        self.path(key).unlink(missing_ok=True)
        size = self._sizes.pop(key, None)
        self._used -= size or 0
        return size is not None

    def _recover(self) -> None:
        found: list[tuple[float, bytes, int]] = []
        for shard in self.directory.iterdir():
            if len(shard.name) != 2 or not shard.is_dir():
                continue
            for path in shard.rglob("*.kv"):
                try:
                    key = bytes.fromhex("".join(path.relative_to(shard).with_suffix("").parts))
                    state = path.lstat()
                except (ValueError, OSError):
                    continue
                if path == self.path(key):
                    found.append((state.st_mtime, key, state.st_size))
        for _, key, size in sorted(found):
            self._sizes[key] = size
            self._used += size
        while self._used > self.capacity:
            self._remove(next(iter(self._sizes)))
            self.evictions += 1


class _Transfer:
    """A file's bytes on their way."""

    def __init__(self, index: int, item: Item) -> None:
        self.index = index
        self.item = item
        self.temporary: Path | None = None
        self.fd = -1
        self.registered: Any = None
        self.handle: Any = None
        self.failure: Exception | None = None


class Nixl(Tier):
    """The tier."""

    name = "nixl"

    def __init__(self, settings: Settings) -> None:
        """Raises ImportError or ValueError, with what to do, if it cannot be used."""
        self._settings = settings
        self._agent = make_agent(settings)
        self._warn = RateLimitedLog(_log)
        self._registered: dict[int, Any] = {}  # regions, by address
        self.files = Files(settings.directory, settings.capacity)

    def close(self) -> None:
        self.files.close()

    # The tier.

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [key in self.files for key in keys]

    def put(self, items: Sequence[Item], call: Call) -> Sequence[Status]:
        return self._move(items, call, self._begin_put, self._end_put)

    def get(self, items: Sequence[Item], call: Call) -> Sequence[Status]:
        return self._move(items, call, self._begin_get, self._end_get)

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.files.remove(key)

    def clear(self, prefix: bytes) -> int:
        return self.files.clear(prefix)

    def stats(self) -> Stats:
        return Stats(
            capacity=self.files.capacity,
            used=self.files.used,
            keys=len(self.files),
            evictions=self.files.evictions,
            detail=f"{self._settings.plugin} in {self.files.directory}",
        )

    def on_region(self, region: Region) -> None:
        memory = [(region.address, region.size, 0, "")]
        self._registered[region.address] = self._agent.register_memory(
            memory, "DRAM", backends=[self._settings.plugin]
        )

    def on_region_gone(self, region: Region) -> None:
        registered = self._registered.pop(region.address)
        self._agent.deregister_memory(registered, backends=[self._settings.plugin])

    # Transfers.

    def _move(self, items: Sequence[Item], call: Call, begin: Any, end: Any) -> Sequence[Status]:
        """Do items, some at a time, in their order; report each as it ends."""
        statuses = [Status.CANCELLED] * len(items)
        waiting = iter(enumerate(items))
        under_way: list[_Transfer] = []
        wait = _SHORTEST_WAIT_S
        more = True
        while True:
            while more and len(under_way) < _AT_A_TIME:
                index, item = next(waiting, (-1, None))
                if item is None or call.cancelled:
                    more = False
                    break
                begun = begin(index, item)
                if isinstance(begun, _Transfer):
                    under_way.append(begun)
                    wait = _SHORTEST_WAIT_S
                else:
                    statuses[index] = begun
                    call.done(index, begun)
            if not under_way:
                return statuses
            ended = [each for each in under_way if self._has_ended(each)]
            for each in ended:
                under_way.remove(each)
                self._release(each)
                statuses[each.index] = end(each)
                call.done(each.index, statuses[each.index])
            if ended:
                wait = _SHORTEST_WAIT_S
            else:
                time.sleep(wait)
                wait = min(wait * 1.5, _LONGEST_WAIT_S)

    def _begin_put(self, index: int, item: Item) -> _Transfer | Status:
        transfer = _Transfer(index, item)
        transfer.temporary = self.files.reserve(item.size)
        if transfer.temporary is None:
            return Status.NO_ROOM
        try:
            transfer.fd = self._open(transfer.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, item)
            self._post(transfer, "WRITE")
        except Exception as error:
            transfer.failure = error
            self._release(transfer)
            return self._end_put(transfer)
        return transfer

    def _end_put(self, transfer: _Transfer) -> Status:
        assert transfer.temporary is not None
        item, temporary = transfer.item, transfer.temporary
        try:
            if transfer.failure is not None:
                raise transfer.failure
            if temporary.stat().st_size != item.size:
                raise OSError(errno.EIO, f"{temporary} is {temporary.stat().st_size} bytes long")
        except Exception as error:
            full = shutil.disk_usage(self.files.directory).free < item.size
            self.files.discard(temporary, item.size)
            self._warn.warning("put", "a put to %s fails: %s", self.files.directory, error)
            return Status.NO_ROOM if full else Status.FAILED
        self.files.keep(temporary, item.key, item.size)
        return Status.OK

    def _begin_get(self, index: int, item: Item) -> _Transfer | Status:
        transfer = _Transfer(index, item)
        try:
            transfer.fd = self._open(self.files.path(item.key), os.O_RDONLY, item)
            # A plug-in may call a short read a success.
            if os.fstat(transfer.fd).st_size < item.size:
                raise OSError(errno.EIO, f"the file of {item.key.hex()} is too short")
            self._post(transfer, "READ")
        except FileNotFoundError:
            self.files.remove(item.key)
            return Status.MISSING
        except Exception as error:
            transfer.failure = error
            self._release(transfer)
            return self._end_get(transfer)
        return transfer

    def _end_get(self, transfer: _Transfer) -> Status:
        if transfer.failure is not None:
            self._warn.warning(
                "get", "a get from %s fails: %s", self.files.directory, transfer.failure
            )
            return Status.FAILED
        self.files.used_now(transfer.item.key)
        return Status.OK

    def _open(self, path: Path, flags: int, item: Item) -> int:
        sizes = (piece.size | piece.address for piece in item.pieces)
        if self._settings.direct and not any(each % _BLOCK for each in sizes):
            try:
                return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without it
                    raise
                flags &= ~os.O_EXCL  # Linux makes the file before it refuses
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def _post(self, transfer: _Transfer, operation: str) -> None:
        agent, plugin, fd = self._agent, [self._settings.plugin], transfer.fd
        item = transfer.item
        memory = [(piece.address, piece.size, 0) for piece in item.pieces]
        ends = itertools.accumulate(piece.size for piece in item.pieces)
        file = [
            (end - piece.size, piece.size, fd) for end, piece in zip(ends, item.pieces, strict=True)
        ]
        transfer.registered = agent.register_memory(
            [(0, item.size, fd, "")], "FILE", backends=plugin
        )
        transfer.handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(file, "FILE"),
            agent.name,
            backends=plugin,
        )
        if agent.transfer(transfer.handle) == "ERR":
            raise OSError(errno.EIO, "NIXL's transfer fails")

    def _has_ended(self, transfer: _Transfer) -> bool:
        try:
            state = self._agent.check_xfer_state(transfer.handle)
            if state == "ERR":
                raise OSError(errno.EIO, "NIXL's transfer fails")
            return state == "DONE"
        except Exception as error:
            transfer.failure = error
            return True

    def _release(self, transfer: _Transfer) -> None:
        """Release what a transfer has of NIXL and of the system. Its memory is not used any more.

        A transfer of several pieces can have failed with one while others are under way. NIXL
        refuses to release it until they have ended. If they never do, nor does this: the sidecar
        then ends the program, which is the only way to get the memory back.
        """
        while transfer.handle is not None:
            try:
                self._agent.release_xfer_handle(transfer.handle)
                break
            except Exception as error:
                self._warn.warning("release", "NIXL does not release a transfer yet: %s", error)
                time.sleep(_LONGEST_WAIT_S)
        try:
            if transfer.registered is not None:
                self._agent.deregister_memory(transfer.registered, backends=[self._settings.plugin])
        except Exception as error:
            transfer.failure = transfer.failure or error
        finally:
            if transfer.fd >= 0:
                os.close(transfer.fd)


def make_agent(settings: Settings) -> Any:
    """Return a NIXL agent with the plug-in. Raises ImportError or ValueError, with what to do."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    for name in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            api = import_module(f"{name}._api")
            break
        except ModuleNotFoundError:
            continue
    else:
        raise ImportError("NIXL is not installed: pip install 'lookaside-kv[nixl]'")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = api.nixl_agent_config(
        backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    agent = api.nixl_agent(f"lookaside-{os.getpid()}", config)
    known = agent.get_plugin_list()
    if settings.plugin not in known:
        raise ValueError(f"--plugin {settings.plugin}: this NIXL has {', '.join(sorted(known))}")
    try:
        agent.create_backend(settings.plugin, dict(settings.params))
        memories = set(agent.get_backend_mem_types(settings.plugin))
    except Exception as error:
        raise ValueError(
            f"--plugin {settings.plugin} cannot be used ({error}) with --param "
            f"{dict(settings.params)}; its parameters: {agent.get_plugin_params(settings.plugin)}"
        ) from None
    if not {"FILE_SEG", "DRAM_SEG"} <= memories:
        raise ValueError(
            f"--plugin {settings.plugin} moves {', '.join(sorted(memories))}, and not between "
            "memory (DRAM_SEG) and files (FILE_SEG)"
        )
    return agent


def main(arguments: Sequence[str] | None = None) -> None:
    """Be the program. Exits with 2 for wrong settings."""
    parser = argparse.ArgumentParser(
        prog="python -m lookaside.tiers.nixl",
        description="A tier of the sidecar in files, which NIXL reads and writes.",
    )
    add = parser.add_argument
    add("--directory", type=Path, required=True, help="where the files are; made if missing")
    add("--capacity", metavar="SIZE", type=_size, required=True,
        help="the most bytes of files (500G); the least recently used are removed")  # fmt: skip
    add("--plugin", default="POSIX", help="POSIX (default), GDS, GDS_MT, HF3FS, …")
    add("--param", metavar="NAME=VALUE", type=_param, action="append", default=[],
        help="a parameter of the plug-in, such as use_uring=true; may be given several times",
        )  # fmt: skip
    add("--direct", action=argparse.BooleanOptionalAction, default=True,
        help="read and write past the page cache (O_DIRECT) where values allow it (default: yes)",
        )  # fmt: skip
    add("--listen", metavar="PATH",
        help="listen on this Unix socket; default: serve the sidecar that starts the program",
        )  # fmt: skip
    args = parser.parse_args(arguments)
    try:
        settings = Settings(
            args.directory, args.capacity, args.plugin, dict(args.param), args.direct
        )
        tier = Nixl(settings)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    run(tier, ["--listen", args.listen] if args.listen else [])


def _size(text: str) -> int:
    with contextlib.suppress(ValueError):
        return parse_size(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: bytes, or a number and K, M, G or T")


def _param(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


if __name__ == "__main__":
    main()
