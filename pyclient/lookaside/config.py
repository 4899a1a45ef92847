"""The connector's settings, as ``kv_connector_extra_config`` gives them.

Every key begins with ``lookaside.``. An unknown or malformed key is an error when the engine
starts: a setting that is silently ignored is worse than one that is refused. Keys of other
connectors may share the dictionary, and are not read. One exception: a key of ours without its
prefix, or in another spelling (``endpoint``, ``lookaside_endpoint``), is refused, because no
connector of vLLM uses these names and its writer meant us.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lookaside import hints
from lookaside.wire import MAX_EPOCH_BYTES

PREFIX = "lookaside."

# sun_path holds 108 bytes with its terminator.
_SUN_PATH_BYTES = 107
# The longest name that the sidecar puts into an endpoint.
_LONGEST_SOCKET_NAME = "session.sock"

_SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*$", re.IGNORECASE)


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and the remedy."""


def default_endpoint() -> str:
    """Return the endpoint template used when none is set: a directory of this user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return f"{base}/lookaside-{os.getuid()}/rank-{{rank}}"


def parse_size(value: object) -> int:
    """Return the bytes that ``"4G"``, ``"500MiB"``, ``"1048576"`` or a number mean.

    K, M, G and T are binary, written with "iB" or not. Raises ConfigError.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a size")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.match(value) if isinstance(value, str) else None
        if match is None:
            raise ConfigError(f'{value!r} is not a size such as "4G" or "500MiB"')
        size = int(float(match[1]) * _SIZE_UNITS[match[2].upper()])
    if not 0 < size < 1 << 62:
        raise ConfigError(f"{value!r} is not a size above 0")
    return size


@dataclass(frozen=True, slots=True)
class Config:
    """All settings with their defaults; ``parse`` makes one from a mapping."""

    endpoint: str
    """Directory of the sidecar. ``{rank}`` (pp_rank * tp_size + tp_rank) and ``{dp_rank}`` are
    filled in."""
    remote_endpoint: str | tuple[str, ...] | None = None
    """Where sidecars of other hosts accept this engine's scheduler: host:port with ``{host}`` and
    the ranks, or one for each rank, empty for a rank of this host. None: as the workers say."""
    chunk_tokens: int = 256
    """Tokens stored and moved as one unit; adjusted down to a multiple of the block, at least one
    block."""
    compress: str = "none"
    """How pages are encoded in the arena: "none", "fp8", "int8" or "lossless"."""
    tenant: str = ""
    """The tenant of requests that name none; empty: nobody."""
    save_decode: bool = True
    """Whether pages that generated tokens filled are stored too."""
    lookup_wait_ms: int = 1
    """How long vLLM's scheduler waits in one call for a lookup that memory can answer; 0: never."""
    lookup_wait_step_ms: int = 2
    """How long it waits in one step for all of them; 0: never."""
    lookup_timeout_ms: int = 100
    """How long a lookup may be out before it counts as a miss."""
    lookup_timeout_max_ms: int = 2_000
    """The longest that a lookup may be out whose prefix takes long to compute. It may be out for a
    tenth of that time, up to this."""
    promotion_timeout_ms: int = 3_000
    """How long a lookup may be out whose pages a sidecar is bringing up from a tier below its
    memory; 0: none are brought up."""
    handover_timeout_ms: int = 500
    """How long a decoder waits for pages that a prefiller said it is storing."""
    store_timeout_ms: int = 15
    """How long a worker waits, beyond its forward, for the room to store into."""
    load_timeout_ms: int = 10_000
    """How long a load may take before it is reported as failed."""
    reset_timeout_ms: int = 2_000
    """How long reset_cache waits for every rank to clear its space; it succeeds in any case."""
    weights_epoch: str = ""
    """The name of the weights that the engine starts with, where it has one."""
    watch_weights: bool = True
    """Whether the weights are compared when they may have changed."""
    autostart: bool = False
    """Start a sidecar on the endpoint if none answers."""
    arena_limit: int | None = None
    """Arena limit of an autostarted sidecar, in bytes; None: the sidecar's own."""
    sidecar_config: str | None = None
    """Settings file of an autostarted sidecar; ranks as in ``endpoint``."""
    sidecar_args: tuple[str, ...] = ()
    """More arguments of an autostarted sidecar; ranks as in ``endpoint``."""
    binary: str = "lookaside"
    """Program that autostart runs; looked up in PATH and beside Python unless it has a slash."""
    load_threads: int = 2
    """Threads that copy loaded pages into the KV cache, on a CPU."""
    load_in_step_share: float = 0.5
    """The share of the median step that loads within one step may take together."""
    load_in_step_ms: int = 10
    """The longest that they may take; 0: no load happens within a step."""

    def endpoint_for(self, rank: int, dp_rank: int) -> str:
        """Return the directory of one rank's sidecar."""
        return self.endpoint.format(rank=rank, dp_rank=dp_rank)

    def listed_endpoints(self, dp_rank: int) -> tuple[str, ...] | None:
        """Return remote_endpoint by rank, empty for a rank of this host; None if it lists none."""
        if not isinstance(self.remote_endpoint, tuple):
            return None
        return tuple(
            each.format(host="", rank=rank, dp_rank=dp_rank)
            for rank, each in enumerate(self.remote_endpoint)
        )

    def address_for(self, rank: int, dp_rank: int, host: str) -> str:
        """Return host:port of the sidecar of a rank of another host; empty if not configured."""
        if not isinstance(self.remote_endpoint, str):
            return ""
        host = f"[{host}]" if ":" in host else host
        return self.remote_endpoint.format(host=host, rank=rank, dp_rank=dp_rank)

    @property
    def one_sidecar(self) -> bool:
        """Whether all ranks of an engine have the same sidecar."""
        return self.endpoint_for(0, 0) == self.endpoint_for(1, 0)

    def sidecar_arguments(self, rank: int, dp_rank: int) -> list[str]:
        """Return the arguments of one rank's autostarted sidecar beside its directory.

        They are rank 0's where all ranks have the same sidecar.
        """
        rank = 0 if self.one_sidecar else rank
        arguments = [] if self.arena_limit is None else [f"--arena-limit={self.arena_limit}"]
        if self.sidecar_config is not None:
            arguments.append(f"--config={self.sidecar_config}")
        arguments += self.sidecar_args
        names = {"{rank}": str(rank), "{dp_rank}": str(dp_rank)}
        for name, value in names.items():
            arguments = [argument.replace(name, value) for argument in arguments]
        return arguments

    def pages_per_chunk(self, page_tokens: int) -> tuple[int, str | None]:
        """Return the pages in a chunk, and a warning if ``chunk_tokens`` had to give way."""
        pages = max(1, self.chunk_tokens // page_tokens)
        if pages * page_tokens == self.chunk_tokens:
            return pages, None
        return pages, (
            f"{PREFIX}chunk_tokens={self.chunk_tokens} is not a multiple of the"
            f" block of {page_tokens} tokens; using {pages * page_tokens}"
        )


def _tenant(value: object) -> str:
    try:
        return hints.tenant(value) if value != "" else ""
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _compress(value: object) -> str:
    names = ("none", "fp8", "int8", "lossless")
    if value not in names:
        raise ConfigError(f"{value!r} is none of {', '.join(names)}")
    return str(value)


def _boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"{value!r} is not true or false")


def _integer(low: int, high: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\d{1,12}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{value!r} is not a whole number")
        if not low <= value <= high:
            raise ConfigError(f"{value} is not between {low} and {high}")
        return value

    return check


def _share(value: object) -> float:
    try:
        share = float(value) if isinstance(value, (int, float, str)) else -1.0
    except ValueError:
        share = -1.0
    if isinstance(value, bool) or not 0 <= share <= 1:
        raise ConfigError(f"{value!r} is not a number between 0 and 1")
    return share


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"{value!r} is not a non-empty string")
    return value


def _path(value: object) -> str:
    path = os.path.expanduser(_text(value))
    if not os.path.isabs(path):
        raise ConfigError(f"{value!r} is not an absolute path")
    return path


def _epoch(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ConfigError(f"{value!r} is not a printable string")
    if len(value.encode()) > MAX_EPOCH_BYTES:
        raise ConfigError(f"{value!r} is longer than {MAX_EPOCH_BYTES} bytes")
    return value


def _arguments(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"{value!r}: {error}") from None
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{value!r} is not a list of strings")
    for each in value:
        if re.match("--runtime-dir($|=)", each):
            raise ConfigError(f"{each!r}: {PREFIX}endpoint says where the sidecar runs")
    return tuple(_text(each) for each in value)


def _endpoint(value: object) -> str:
    template = os.path.expanduser(_text(value))
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if not names <= {"rank", "dp_rank"}:
            raise ValueError
        longest = template.format(rank=9999, dp_rank=99)
    except (ValueError, LookupError):
        raise ConfigError(f"{value!r}: only {{rank}} and {{dp_rank}} may stand in braces") from None
    if not os.path.isabs(template):
        raise ConfigError(f"{value!r} is not an absolute path")
    room = _SUN_PATH_BYTES - len(_LONGEST_SOCKET_NAME) - 1
    if len(os.fsencode(longest)) > room:
        raise ConfigError(
            f"{value!r} is too long: with the ranks filled in it must fit {room} bytes, "
            "the room that a Unix socket's path leaves"
        )
    return template


def _remote_endpoint(value: object) -> str | tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        if not value:
            raise ConfigError("an empty list: leave the setting out")
        return tuple(each if each == "" else _address(each, {"rank", "dp_rank"}) for each in value)
    return _address(value, {"host", "rank", "dp_rank"})


def _address(value: object, allowed: set[str]) -> str:
    """Return a template of host:port, in which only the allowed names stand in braces."""
    template = _text(value)
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        if not names <= allowed:
            raise ValueError
        host, colon, port = template.format(host="host", rank=9, dp_rank=9).rpartition(":")
    except (ValueError, LookupError):
        braces = ", ".join(f"{{{name}}}" for name in sorted(allowed))
        raise ConfigError(f"{value!r}: only {braces} may stand in braces") from None
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{value!r} is not HOST:PORT")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{value!r}: an IPv6 address stands in brackets")
    return template


@dataclass(frozen=True, slots=True)
class Setting:
    """How one setting is read, and the text of its line in the docs."""

    read: Callable[[object], Any]
    unit: str
    default: str
    meaning: str


SETTINGS: dict[str, Setting] = {
    "endpoint": Setting(
        _endpoint,
        "directory",
        "${XDG_RUNTIME_DIR:-/tmp}/lookaside-$UID/rank-{rank}",
        "The sidecar's directory, an absolute path. `{rank}` becomes `pp_rank * tp_size + "
        "tp_rank`, `{dp_rank}` the data-parallel rank. With `{rank}` in it every rank has its own "
        "sidecar, "
        "else all ranks of an instance have the same one.",
    ),
    "remote_endpoint": Setting(
        _remote_endpoint,
        "host:port, or a list",
        "as the workers say",
        "For an engine whose ranks are on several hosts: where the sidecars of other hosts accept "
        "this engine's scheduler (`hosts.listen` there). `{host}` becomes the address that vLLM "
        "has for the rank's host, `{rank}` and `{dp_rank}` are filled in. A list has one address "
        'for each rank, and `""` for a rank of the scheduler\'s host. See '
        "[deployment.md](deployment.md#ranks-on-several-hosts).",
    ),
    "chunk_tokens": Setting(
        _integer(1, 1 << 20),
        "tokens",
        "256",
        "Tokens stored and moved as one unit. Not a multiple of vLLM's block: adjusted down, to "
        "at least one block, with a warning. Instances that share must agree on it.",
    ),
    "compress": Setting(
        _compress,
        "none, fp8, int8 or lossless",
        "none",
        "How pages are kept: as they are, or encoded by the copies, so that the arena and all "
        "tiers hold more of them. `fp8` and `int8` round. For a KV cache in host memory; "
        "elsewhere a warning says that pages are kept as they are. Instances that share must "
        "agree on it. See [compression.md](compression.md).",
    ),
    "tenant": Setting(
        _tenant,
        "name",
        "none",
        "The tenant to whom requests are counted that name none in their "
        "[hints](#hints-and-tenants).",
    ),
    "save_decode": Setting(
        _boolean,
        "true/false",
        "true",
        "Also store the pages that generated tokens fill, so that the next turn of a "
        "conversation finds the answer too.",
    ),
    "lookup_wait_ms": Setting(
        _integer(0, 1000),
        "ms",
        "1",
        "How long vLLM's scheduler waits in one call for the answer to a lookup, so that a hit "
        "costs no step more than in vLLM's own cache. Memory answers in a fraction of it. What "
        "waits for a tier is not waited for; after a wait in vain, none follows until the sidecar "
        "has answered. 0: never.",
    ),
    "lookup_wait_step_ms": Setting(
        _integer(0, 1000),
        "ms",
        "2",
        "How long it waits for all lookups of one step together. 0: never.",
    ),
    "lookup_timeout_ms": Setting(
        _integer(1, 60_000),
        "ms",
        "100",
        "A lookup that is not answered by then is a miss, unless the sidecar says that it is "
        "bringing "
        "pages up from a tier below its memory. After one such lookup none is sent until the "
        "sidecar speaks again.",
    ),
    "lookup_timeout_max_ms": Setting(
        _integer(0, 60_000),
        "ms",
        "2000",
        "A prefix that would take long to compute may be waited for longer than "
        "`lookup_timeout_ms`: a tenth "
        "of that time, learnt from vLLM's steps, up to this. Not above `lookup_timeout_ms`: no "
        "longer.",
    ),
    "promotion_timeout_ms": Setting(
        _integer(0, 600_000),
        "ms",
        "3000",
        "How long a request may wait for pages that a sidecar brings up from a disk or another "
        "tier; "
        "other requests run meanwhile. What is not there then is computed. 0: only what lies in "
        "the "
        "sidecars' memory is a hit.",
    ),
    "handover_timeout_ms": Setting(
        _integer(0, 60_000),
        "ms",
        "500",
        "How long a request that a prefiller handed over, with `kv_transfer_params`, may wait for "
        "pages that "
        "it said it is storing; other requests run meanwhile. What is not there then is computed.",
    ),
    "store_timeout_ms": Setting(
        _integer(0, 60_000),
        "ms",
        "15",
        "How long a worker waits, beyond its forward pass, to learn where to store. Past it the "
        "pages are not stored.",
    ),
    "load_timeout_ms": Setting(
        _integer(1, 600_000),
        "ms",
        "10000",
        "A load that is not done by then is reported as failed and vLLM computes the prefix.",
    ),
    "reset_timeout_ms": Setting(
        _integer(1, 60_000),
        "ms",
        "2000",
        "How long resetting the cache waits for every rank's sidecar to clear its space. The reset "
        "succeeds "
        "in any case: until a sidecar has cleared the space, nothing of it is hit.",
    ),
    "weights_epoch": Setting(
        _epoch,
        "name",
        "none",
        "What the weights that vLLM starts with are called, if they are not those that the model's "
        "path names. Instances share only with the same name; see [below](#sleep-and-new-weights).",
    ),
    "watch_weights": Setting(
        _boolean,
        "true/false",
        "true",
        "Compare the weights when vLLM starts, pauses or is called in a way that may change them. "
        "false: every pause clears what is stored, and new weights must be named or the cache "
        "reset.",
    ),
    "autostart": Setting(
        _boolean,
        "true/false",
        "false",
        "Start a sidecar on the endpoint if none answers there.",
    ),
    "arena_limit": Setting(
        parse_size,
        "size",
        "the sidecar's: 4G",
        "Arena limit of an autostarted sidecar; `4G`, `500MiB` or bytes.",
    ),
    "sidecar_config": Setting(
        _path,
        "file",
        "none",
        "Settings file (YAML) of an autostarted sidecar, an absolute path; `{rank}` and "
        "`{dp_rank}` in "
        "it are filled in. What is set here beside it overrides it.",
    ),
    "sidecar_args": Setting(
        _arguments,
        "list",
        "[]",
        "More arguments of an autostarted sidecar, such as its tiers; `{rank}` and `{dp_rank}` in "
        "them "
        "are filled in. A string is split as a shell would.",
    ),
    "binary": Setting(
        _text,
        "program",
        "lookaside",
        "The program that autostart runs; found in `PATH`, then beside Python, unless it contains "
        "a slash.",
    ),
    "load_threads": Setting(
        _integer(1, 64),
        "threads",
        "2",
        "Threads that copy loaded pages into the KV cache when it lies in host memory.",
    ),
    "load_in_step_share": Setting(
        _share,
        "share",
        "0.5",
        "A hit whose copy is predicted to take less than this share of vLLM's median step is "
        "loaded within the step that asks; see [in-step.md](in-step.md).",
    ),
    "load_in_step_ms": Setting(
        _integer(0, 1000),
        "ms",
        "10",
        "The longest that such loads may take of one step, together. 0: all loads are "
        "asynchronous.",
    ),
}

_RENAMED = {"arena_size": "arena_limit"}
"""Names that settings had before, and their names now."""

assert set(SETTINGS) == {field.name for field in fields(Config)}


def _misspelt(key: str) -> str | None:
    """Return the setting that a key without our prefix obviously means, if any."""
    folded = key.lower().replace("-", "_")
    bare = re.sub(r"^lookaside[._]?", "", folded)
    if folded.startswith("lookaside"):
        return _nearest(bare)
    return _nearest(bare) if bare in SETTINGS or bare in _RENAMED else None


def _nearest(name: str) -> str:
    folded = name.lower().replace("-", "_")
    if folded in _RENAMED:
        return _RENAMED[folded]
    return max(SETTINGS, key=lambda known: difflib.SequenceMatcher(None, folded, known).ratio())


def parse(extra: Mapping[str, object] | None) -> Config:
    """Return the settings in ``kv_connector_extra_config``.

    Raises ConfigError, which names every bad key with the nearest right one, and every bad value
    with what it should be.
    """
    values: dict[str, Any] = {"endpoint": default_endpoint()}
    errors: list[str] = []
    for key, value in (extra or {}).items():
        name = key.removeprefix(PREFIX)
        if key.startswith(PREFIX) and name in SETTINGS:
            try:
                values[name] = SETTINGS[name].read(value)
            except ConfigError as error:
                errors.append(f"{key}: {error}")
            continue
        if key.startswith(PREFIX) and name in _RENAMED:
            errors.append(f"{key} is named {PREFIX}{_RENAMED[name]} now")
            continue
        meant = _nearest(name) if key.startswith(PREFIX) else _misspelt(key)
        if meant is not None:
            errors.append(f"unknown setting {key!r}; did you mean {PREFIX + meant!r}?")
    if errors:
        raise ConfigError("kv_connector_extra_config: " + "; ".join(errors))
    return Config(**values)


def markdown_table() -> str:
    """Return the settings as the Markdown table that ``docs/connector.md`` holds."""
    lines = ["| setting | unit | default | meaning |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{PREFIX}{name}` | {s.unit} | `{s.default}` | {s.meaning} |"
        for name, s in SETTINGS.items()
    ]
    return "\n".join(lines) + "\n"
