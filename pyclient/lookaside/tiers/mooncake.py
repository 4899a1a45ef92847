"""A tier in Mooncake Store, the distributed memory of Mooncake: one pool of many hosts.

    python -m lookaside.tiers.mooncake --master 10.0.0.1:50051 --segment 16G

Each host runs the program below its sidecar. All programs of one master share what they keep, so a
prefix that one host computed is loaded by the others. Values go from the arena to the store's
memory and back by Mooncake's own transfers (TCP, or RDMA with ``--protocol rdma``), without a copy
in this process: the arena is registered once, as it is announced.

A value is one object. Its key is the namespace and the key of the sidecar in hexadecimal digits.
Mooncake evicts objects by itself when its memory is full.

What Mooncake leaves open is done here. Its client takes seconds to notice that the master is gone,
so a watcher holds a connection to the master, and calls fail at once while there is none. Its
timeouts are 30 s unless the environment has others; here they are ``--timeout``, so that memory of
a call that is given up is free again before the sidecar loses patience with the program.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import os
import re
import select
import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lookaside.config import parse_size
from lookaside.ratelog import RateLimitedLog
from lookaside.tier import Call, Item, Piece, Region, Stats, Status, Tier, run

__all__ = ["Mooncake", "Settings", "main"]

_log = logging.getLogger("lookaside.tiers.mooncake")

_PART_ITEMS = 32
_PART_BYTES = 64 << 20
"""The most of one transfer. Each is reported as it ends, and a cancelled call ends between two."""

_WATCH_S = 1.0
"""How often the watcher looks at the master's figures, and tries to reach one that is gone."""

# Mooncake's results.
_NO_ROOM = -200
_NOT_READY = -703  # it is being written
_NOT_FOUND = -704
_EXISTS = -705
_NAMES = {
    -200: "no room",
    -600: "invalid parameters",
    -703: "not written yet",
    -704: "no such object",
    -705: "exists already",
    -706: "in use",
    -707: "the lease ended during the transfer",
    -800: "the transfer failed",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}


class Unavailable(Exception):
    """Mooncake cannot be used now."""


@dataclass(frozen=True)
class Settings:
    """What the flags say. Each field is the flag of its name."""

    master: str
    """HOST:PORT, or the URL of what Mooncake finds its master with (etcd://…)."""
    segment: int = 0
    """Bytes of this process' memory that the store may use."""
    host: str = ""
    """This host's address for the others; "": the one that reaches the master."""
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    replicas: int = 1
    namespace: str = "lookaside"
    metrics: str | None = None
    """HOST:PORT of the master's figures; None: port 9003 of the master; "": none."""
    timeout: int = 1
    """In seconds."""

    def __post_init__(self) -> None:
        if "://" not in self.master:
            _address("--master", self.master)
        if self.metrics:
            _address("--metrics", self.metrics)
        if self.segment < 0:
            raise ValueError(f"--segment {self.segment}: it is a size")
        if self.timeout < 1:
            raise ValueError(f"--timeout {self.timeout}: at least 1 (second)")
        if self.replicas < 1:
            raise ValueError(f"--replicas {self.replicas}: at least 1")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self.namespace):
            raise ValueError(
                f"--namespace {self.namespace!r}: up to 64 letters, digits, '-' and '_'"
            )

    @property
    def master_address(self) -> tuple[str, int] | None:
        """Where the master listens; None if Mooncake finds it by itself."""
        return None if "://" in self.master else _address("--master", self.master)

    @property
    def figures_url(self) -> str:
        """Where the master's figures are; "" if nowhere."""
        if self.metrics is None:
            address = self.master_address
            return f"http://{_joined(address[0], 9003)}/metrics" if address else ""
        return f"http://{self.metrics}/metrics" if self.metrics else ""


class Mooncake(Tier):
    """The tier. start begins to connect, and goes on in the background until close."""

    name = "mooncake"
    max_calls = 8

    def __init__(self, settings: Settings) -> None:
        """Raises ImportError, with what to do, if Mooncake is not installed or cannot load."""
        self._settings = settings
        self._client, replicate = _load(settings.timeout)
        self._warn = RateLimitedLog(_log)
        self._lock = threading.Lock()  # guards what follows
        self._store: Any = None
        self._regions: dict[int, Region] = {}  # by address
        self._refused: dict[int, str] = {}  # regions that could not be registered, and why
        self._problem = f"not connected to Mooncake's master at {settings.master} yet"
        self._figures: dict[str, int] = {}
        self._evicted_before: int | None = None
        self._writing = threading.Condition()
        self._being_put: set[bytes] = set()  # guarded by _writing
        self._stop, self._wake = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="mooncake-watcher", daemon=True)
        self._replicate = replicate()
        self._replicate.replica_num = settings.replicas

    def start(self) -> None:
        """Begin to connect. Once."""
        self._watcher.start()

    def close(self) -> None:
        os.close(self._wake)
        if self._watcher.ident is not None:
            self._watcher.join()
        os.close(self._stop)
        with self._lock:
            store, self._store = self._store, None
            reachable, self._problem = not self._problem, "closed"
        # It says good-bye to the master, and waits long for one that is gone.
        if store is not None and reachable:
            store.close()

    # The tier.

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        found = self._ready().batch_is_exist([self._name(key) for key in keys])
        for code in found:
            if code < 0:
                raise self._failure("a lookup", code)
        return [code == 1 for code in found]

    def put(self, items: Sequence[Item], call: Call) -> Iterator[Status]:
        for part in _parts(items):
            if call.cancelled:
                return
            with self._alone(part):
                yield from (self._status("a put", code) for code in self._put(part))

    def get(self, items: Sequence[Item], call: Call) -> Iterator[Status]:
        for part in _parts(items):
            if call.cancelled:
                return
            # A range of the object for each piece: a get of a beginning is like any other.
            addresses, names, sources, sizes = [], [], [], []
            for item in part:
                name = self._name(item.key)
                for piece, at in zip(item.pieces, _offsets(item.pieces), strict=True):
                    addresses.append(piece.address)
                    names.append([name])
                    sources.append([[at]])
                    sizes.append([[piece.size]])
            read = iter(
                self._ready().get_into_ranges(
                    addresses, names, [[[0]]] * len(names), sources, sizes
                )
            )
            for item in part:
                codes = [next(read)[0][0] for _ in item.pieces]
                short = (n for n, piece in zip(codes, item.pieces, strict=True) if n != piece.size)
                yield self._status("a get", min(0, next(short, 0)))

    def drop(self, keys: Sequence[bytes]) -> None:
        for code in self._ready().batch_remove([self._name(key) for key in keys], True):
            if code not in (0, _NOT_FOUND):
                raise self._failure("a removal", code)

    def clear(self, prefix: bytes) -> int:
        count = self._ready().remove_by_regex(f"^{self._name(prefix)}", True)
        if count < 0:
            raise self._failure("a removal", count)
        return count

    def stats(self) -> Stats:
        with self._lock:
            figures, problem = self._figures, self._problem
            if not problem and self._refused:
                problem = next(iter(self._refused.values()))
        settings = self._settings
        detail = f"master {settings.master}, {settings.protocol}"
        if settings.segment:
            detail += f", {settings.segment >> 20} MiB of this host"
        if not problem and figures and not figures["capacity"]:
            problem = (
                "the store has no memory: give --segment SIZE to this program or another one, or "
                "run mooncake_client on a host"
            )
        return Stats(**figures, problem=problem, detail=detail)

    def on_region(self, region: Region) -> None:
        with self._lock:
            if self._store is not None:
                self._register(self._store, region)
            self._regions[region.address] = region

    def on_region_gone(self, region: Region) -> None:
        with self._lock:
            del self._regions[region.address]
            refused = self._refused.pop(region.address, None)
            if self._store is None or refused:
                return
            code = self._store.unregister_buffer(region.address)
            if code:
                raise self._failure("unregistering a region", code)

    # Its parts.

    @contextlib.contextmanager
    def _alone(self, items: Sequence[Item]) -> Iterator[None]:
        """Keep other threads from putting the same keys: Mooncake's client has one put of a key."""
        keys = {item.key for item in items}
        with self._writing:
            self._writing.wait_for(lambda: not keys & self._being_put)
            self._being_put |= keys
        try:
            yield
        finally:
            with self._writing:
                self._being_put -= keys
                self._writing.notify_all()

    def _put(self, items: Sequence[Item]) -> list[int]:
        """Put values under different keys; return Mooncake's result for each.

        A put session says which keys have values. A plain put would keep these, and say that it has
        stored the new ones.
        """
        store = self._ready()
        sizes = {self._name(item.key): item.size for item in items}
        codes = dict.fromkeys(sizes, 0)

        def begin(names: list[str]) -> None:
            wanted = [sizes[name] for name in names]
            begun = store.batch_put_session_start(names, wanted, self._replicate)
            codes.update(zip(names, begun, strict=True))

        begin(list(sizes))
        if old := [name for name, code in codes.items() if code == _EXISTS]:
            store.batch_remove(old, True)
            begin(old)
        open_ones = [name for name, code in codes.items() if code == 0]
        try:
            parts = [item.pieces for item in items if codes[self._name(item.key)] == 0]
            if open_ones:
                written = store.batch_put_from_multi_buffer_ranges(
                    open_ones,
                    [[piece.address for piece in pieces] for pieces in parts],
                    [[piece.size for piece in pieces] for pieces in parts],
                    [_offsets(pieces) for pieces in parts],
                )
                for name, count in zip(open_ones, written, strict=True):
                    if count != sizes[name]:
                        codes[name] = min(count, -1)
            if whole := [name for name in open_ones if codes[name] == 0]:
                codes.update(zip(whole, store.batch_put_session_end(whole), strict=True))
                open_ones = [name for name in open_ones if codes[name] != 0]
        finally:
            if open_ones:
                store.batch_put_session_revoke(open_ones)
        # Another host has put a value since we removed the old one: that is the newer one.
        return [0 if code == _EXISTS else code for code in codes.values()]

    def _name(self, key: bytes) -> str:
        return f"{self._settings.namespace}/{key.hex()}"

    def _ready(self) -> Any:
        with self._lock:
            if self._problem:
                raise Unavailable(self._problem)
            return self._store

    def _status(self, what: str, code: int) -> Status:
        if code == 0:
            return Status.OK
        if code == _NO_ROOM:
            return Status.NO_ROOM
        if code in (_NOT_FOUND, _NOT_READY):
            return Status.MISSING
        self._warn.warning(what, "%s", self._failure(what, code))
        return Status.FAILED

    def _failure(self, what: str, code: int) -> Unavailable:
        name = _NAMES.get(code, "it failed")
        return Unavailable(f"{what} in Mooncake: {name} ({code}; master {self._settings.master})")

    def _register(self, store: Any, region: Region) -> None:
        """The caller holds the lock."""
        code = store.register_buffer(region.address, region.size)
        if code:
            raise self._failure(f"registering {region.size >> 20} MiB of the arena", code)

    # The watcher.

    def _watch(self) -> None:
        link: socket.socket | None = None
        try:
            while True:
                try:
                    link = link or self._dial()
                    with self._lock:
                        connected = self._store is not None
                    if not connected:
                        self._connect(link)
                    self._read_figures()
                    self._set_problem("")
                except Unavailable as error:
                    self._set_problem(str(error))
                except Exception as error:
                    _log.exception("the watcher of Mooncake goes on")
                    self._set_problem(f"Mooncake: {error}")
                ready, _, _ = select.select(
                    [self._stop, *([link] if link else [])], [], [], _WATCH_S
                )
                if self._stop in ready:
                    return
                if link is not None and link in ready and self._ended(link):
                    link.close()
                    link = None
                    self._set_problem(f"Mooncake's master at {self._settings.master} is gone")
        finally:
            if link is not None:
                link.close()

    def _set_problem(self, problem: str) -> None:
        with self._lock:
            if problem == self._problem:
                return
            self._problem = problem
        if problem:
            _log.warning("%s", problem)
        else:
            _log.info("connected to Mooncake's master at %s", self._settings.master)

    def _dial(self) -> socket.socket | None:
        """Return a connection to the master that ends when it does; None if it has no address."""
        address = self._settings.master_address
        if address is None:
            return None
        try:
            return socket.create_connection(address, self._settings.timeout)
        except OSError as error:
            raise Unavailable(
                f"no Mooncake master at {self._settings.master} (--master): {error}; start one "
                f"with mooncake_master --rpc_port={address[1]}"
            ) from None

    @staticmethod
    def _ended(link: socket.socket) -> bool:
        try:
            return not link.recv(4096)
        except OSError:
            return True

    def _connect(self, link: socket.socket | None) -> None:
        settings = self._settings
        host = settings.host or (link.getsockname()[0] if link is not None else _own_address())
        store = self._client()
        code = store.setup(
            host, settings.metadata, settings.segment, 0, settings.protocol, settings.devices,
            settings.master,
        )  # fmt: skip
        if code:
            raise Unavailable(
                f"Mooncake does not start ({code}) with --master {settings.master}, --protocol "
                f"{settings.protocol}, --segment {settings.segment} and --host {host}: its log "
                "above has the reason"
            )
        with self._lock:
            for region in self._regions.values():
                try:
                    self._register(store, region)
                except Unavailable as error:
                    self._refused[region.address] = str(error)
            self._store = store

    def _read_figures(self) -> None:
        url = self._settings.figures_url
        if not url:
            return
        try:
            with urllib.request.urlopen(url, timeout=self._settings.timeout) as answer:
                text = answer.read(4 << 20).decode("utf-8", "replace")
            found = dict(re.findall(r"^(master_\w+) (\d+)$", text, re.M))
            evicted = int(found["master_evicted_key_count"])
            figures = {
                "capacity": int(found["master_total_capacity_bytes"]),
                "used": int(found["master_allocated_bytes"]),
                "keys": int(found["master_key_count"]),
            }
        except (OSError, KeyError) as error:
            self._warn.warning(
                "figures", "no figures of Mooncake's master at %s (--metrics): %r", url, error
            )
            figures = {}
        else:
            # A master that came back counts from 0.
            if self._evicted_before is None or evicted < self._evicted_before:
                self._evicted_before = evicted
            figures["evictions"] = evicted - self._evicted_before
        with self._lock:
            self._figures = figures


def _parts(items: Sequence[Item]) -> Iterator[list[Item]]:
    """The items, some at a time, each with a key of its own."""
    part: list[Item] = []
    keys: set[bytes] = set()
    size = 0
    for item in items:
        full = len(part) == _PART_ITEMS or size + item.size > _PART_BYTES
        if part and (full or item.key in keys):
            yield part
            part, keys, size = [], set(), 0
        part.append(item)
        keys.add(item.key)
        size += item.size
    yield part


def _offsets(pieces: Sequence[Piece]) -> list[int]:
    """Where each piece begins in the value."""
    return [0, *itertools.accumulate(piece.size for piece in pieces[:-1])]


def _address(flag: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(f"{flag} {text!r}: it is not HOST:PORT")
    return host.strip("[]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_address() -> str:
    """The address of this host's default route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _load(timeout: int) -> tuple[Any, Any]:
    """Import Mooncake, with timeouts that a tier can live with; return its two classes."""
    defaults = {
        "MC_RPC_TIMEOUT_MS": f"{timeout}000",
        "MC_RPC_CONNECT_TIMEOUT_MS": f"{timeout}000",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": f"{timeout}",
        "MC_TCP_STATUS_TIMEOUT_SEC": f"{timeout}",
        "MC_SLICE_TIMEOUT": f"{timeout}",  # RDMA's
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    try:
        store = import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error}: install Mooncake: pip install 'lookaside-kv[mooncake]', or on hosts with "
            "CUDA mooncake-transfer-engine"
        ) from None
    except ImportError as error:
        package = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
        missing = next((deb for lib, deb in package.items() if lib in str(error)), "")
        hint = f"; install it with apt-get install {missing}" if missing else ""
        raise ImportError(f"Mooncake cannot be loaded: {error}{hint}") from None
    return store.MooncakeDistributedStore, store.ReplicateConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Be the program. Never returns but at its end; exits with 2 for wrong settings."""
    parser = argparse.ArgumentParser(
        prog="python -m lookaside.tiers.mooncake",
        description="A tier of the sidecar in Mooncake Store. All programs of one master share.",
    )
    add = parser.add_argument
    master = os.environ.get("MOONCAKE_MASTER")
    add("--master", metavar="HOST:PORT", default=master, required=master is None,
        help="Mooncake's master (mooncake_master); default: $MOONCAKE_MASTER")  # fmt: skip
    add("--segment", metavar="SIZE", type=_size, default=0,
        help="memory of this host that the store may use, such as 16G (default 0: it uses other "
        "hosts' memory only)")  # fmt: skip
    add("--host", default="",
        help="this host's address for other hosts (default: the one that reaches the master)",
        )  # fmt: skip
    add("--protocol", default="tcp", help="Mooncake's transport: tcp (default), rdma, …")
    add("--devices", default="", help="for rdma: names of the network devices, with commas between")
    add("--metadata", default="P2PHANDSHAKE",
        help="Mooncake's metadata server (default: P2PHANDSHAKE, which needs none)")  # fmt: skip
    add("--replicas", type=int, default=1, help="copies of each value, on as many hosts (1)")
    add("--namespace", default="lookaside", help="how keys begin in the store (lookaside)")
    add("--metrics", metavar="HOST:PORT", default=None,
        help="the master's figures (default: port 9003 of its host; '': none)")  # fmt: skip
    add("--timeout", type=int, default=1,
        help="seconds that the master or a transfer may stand still (1); values below the "
        "sidecar's cancel timeout keep it from restarting this program")  # fmt: skip
    add("--listen", metavar="PATH",
        help="listen on this Unix socket; default: serve the sidecar that starts the program",
        )  # fmt: skip
    args = vars(parser.parse_args(arguments))
    listen = args.pop("listen")
    try:
        tier = Mooncake(Settings(**args))
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    tier.start()
    run(tier, ["--listen", listen] if listen else [])
    # Mooncake's destructors say good-bye as well, for seconds where the master is gone.
    logging.shutdown()
    os._exit(0)


def _size(text: str) -> int:
    with contextlib.suppress(ValueError):
        return parse_size(text) if text != "0" else 0
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: bytes, or a number and K, M, G or T")


if __name__ == "__main__":
    main()
