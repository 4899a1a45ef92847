"""Tells apart requests whose block hashes agree although their KV does not.

vLLM's block hash names an adapter by its name (by its path too, from 0.31 on), an image by whatever
identifier the client gave it, and embeddings by their bytes. Within one engine that is enough most
of the time. Between engines it is not: two of them may serve different weights under one name.

An ``Identity`` adds what the hash leaves out:

- of an adapter, a digest of its configuration and weights and of vLLM's settings that change what
  it computes;
- of an image, a video or a sound, a digest of what the processor made of it;
- of embeddings, their type and where they lie in the prompt.

A page's name is its block hash where nothing is added, else a digest of both. The same request has
the same names in every engine, and pages before an image keep the names that they have without it.

**What is not known is not shared**: an adapter that is not made of files, inputs whose data are not
in this process.

**An adapter whose files change** is not shared any more. vLLM reads the files when the adapter is
loaded, and again when it had to make room for others. Its own cache keeps what the old weights
computed. So the files are compared with what they were at the load, when they are first read and
every second from then on. If they changed, the adapter's requests are only shared again when it has
been loaded anew and vLLM's cache and the sidecars' have been reset together.

Files and tensors are read by threads of their own, for both may take long; the scheduler's thread
never waits for them. All methods but ``check`` are for that thread.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from lookaside import interface

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lookaside")

_PERSON = b"lookaside page"
# Prefixes of the files that vLLM reads of an adapter. Its directory may have more, such as the
# state of an optimizer.
_ADAPTER_FILES = ("adapter_", "new_embeddings")
# Settings of adapters that do not change what adapters compute. A harmless setting that is missing
# here costs hits, not wrong tokens.
_HARMLESS = frozenset({
    "max_lora_rank", "max_loras", "max_cpu_loras", "default_mm_loras", "specialize_active_lora",
    "max_lora_cls_labels",
})  # fmt: skip
_CHECK_S = 1.0
_MAX_WARNED = 1000


class Unshared(Enum):
    """Why a request has no identity."""

    PENDING = "pending"
    """The identity is being found: ask again."""
    UNKNOWN = "unknown"
    """The identity cannot be known: share nothing of the request."""


PENDING, UNKNOWN = Unshared.PENDING, Unshared.UNKNOWN


class Identity(NamedTuple):
    """What is added to the block hashes of a request.

    ``keys[i]`` is added to the hashes of blocks with tokens from ``starts[i]`` on.
    """

    starts: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    adapter: Adapter | None = None
    features: int = 0
    """Multimodal inputs of the request when this was made. A streaming session may add more."""

    def name(self, block_hash: bytes, end_token: int) -> bytes:
        """Return the name of the page that has this hash and ends before this token."""
        at = bisect_left(self.starts, end_token)
        if not at:
            return block_hash
        return hashlib.blake2b(
            block_hash, key=self.keys[at - 1], digest_size=len(block_hash), person=_PERSON
        ).digest()


PLAIN = Identity()


class _Files(NamedTuple):
    """The files of an adapter, and what tells when one of them is replaced."""

    paths: tuple[str, ...]
    status: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(eq=False)
class Adapter:
    """An adapter while its files do not change."""

    lora: LoRARequest
    read: Future[tuple[_Files, bytes] | None]
    """Its files and their digest; None if they cannot be read."""
    changed: bool = False


def _find_adapter(path: str) -> str | None:
    """Return the directory where vLLM finds an adapter, or None. Nothing is downloaded."""
    if os.path.isabs(path):
        return path
    if path.startswith("~"):
        return os.path.expanduser(path)
    if os.path.exists(path):
        return os.path.abspath(path)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "adapter_config.json")
    except Exception:  # not the name of a repository
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def _files_of(path: str) -> _Files | None:
    """Return the files of an adapter as they are now; None if it is not made of files."""
    directory = _find_adapter(path)
    if directory is None:
        return None
    try:
        paths = sorted(
            entry.path
            for entry in os.scandir(directory)
            if entry.name.startswith(_ADAPTER_FILES) and entry.is_file()
        )
        found = [os.stat(each) for each in paths]
    except OSError:
        return None
    if not any(each.endswith("/adapter_config.json") for each in paths):
        return None
    status = tuple(
        (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for each in found
    )
    return _Files(tuple(paths), status)


def _read(path: str, settings: bytes) -> tuple[_Files, bytes] | None:
    """Return the files of an adapter and their digest.

    None if there are none, or if they change meanwhile.
    """
    files = _files_of(path)
    if files is None:
        return None
    seen = hashlib.sha256(settings)
    for each in files.paths:
        content = hashlib.sha256()
        with open(each, "rb") as file:
            while piece := file.read(1 << 20):
                content.update(piece)
        seen.update(os.path.basename(each).encode() + b"\0" + content.digest())
    return (files, seen.digest()) if _files_of(path) == files else None


# vLLM tells its engine that a client loads an adapter, but not its connector. So the engine's
# method is wrapped, in the process of the scheduler role, and all followers here are told.
_followers: weakref.WeakSet[Identities] = weakref.WeakSet()
_wrapped = threading.Lock()


def _follow_loads(follower: Identities) -> None:
    """Have the follower told of each adapter that is loaded from now on."""
    from vllm.v1.engine.core import EngineCore

    with _wrapped:
        _followers.add(follower)
        original = EngineCore.add_lora
        if hasattr(original, "lookaside"):
            return

        @functools.wraps(original)
        def add_lora(engine: Any, lora_request: LoRARequest, *args: Any, **kwargs: Any) -> Any:
            before = _files_of(lora_request.lora_path)
            try:
                return original(engine, lora_request, *args, **kwargs)
            finally:
                after = _files_of(lora_request.lora_path)
                # The files of a repository may come with the load.
                files = after if before in (None, after) else None
                for each in list(_followers):
                    each.note_load(lora_request, files)

        add_lora.lookaside = True  # type: ignore[attr-defined]
        EngineCore.add_lora = add_lora  # type: ignore[method-assign]


class Identities:
    """See the module's comment."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = getattr(vllm_config, "lora_config", None)
        self._settings = _settings_of(config)
        self._follows = config is not None and interface.lacks("adapters") is None
        if self._follows:
            _follow_loads(self)
        self._path_in_hash = self._follows and _path_in_hash()
        # By the adapter's number: the files that it was loaded from.
        self._loaded: dict[int, tuple[str, _Files | None]] = {}
        # By what vLLM's hash has of the adapter.
        self._adapters: dict[tuple[str, ...], Adapter] = {}
        # By request: identities that are being read.
        self._inputs: dict[str, Future[Identity | Unshared]] = {}
        self._warned: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = threading.Event()

    def of(self, request: Request) -> Identity | Unshared:
        """Return what is added to a request's block hashes. Call again while it is PENDING."""
        features = len(request.mm_features or ())
        if not (request.lora_request or features or request.prompt_embeds is not None):
            return PLAIN
        adapter, key = None, b""
        if request.lora_request:
            adapter = self._adapter(request.lora_request)
            if adapter is None:
                return UNKNOWN
            if not adapter.read.done():
                return PENDING
            key = self._digest(adapter)
            if not key:
                return UNKNOWN
        if not features and request.prompt_embeds is None:
            return Identity((0,), (key,), adapter)
        reading = self._inputs.get(request.request_id)
        if reading is None:
            reading = self._inputs[request.request_id] = self._submit(
                _identify, request, features, key, adapter
            )
        if not reading.done():
            return PENDING
        del self._inputs[request.request_id]
        found = UNKNOWN if reading.exception() is not None else reading.result()
        if found is UNKNOWN:
            self._warn(
                "inputs",
                "the data of some multimodal inputs are not in the scheduler's process: such "
                "requests are not shared;"
                " leave --mm-processor-cache-type at lru, and --mm-tensor-ipc at direct_rpc",
            )
        return found

    def drop(self, request_id: str) -> None:
        """Stop reading for a request that is over."""
        reading = self._inputs.pop(request_id, None)
        if reading is not None:
            reading.cancel()

    def hold(self, identity: Identity) -> bool:
        """Report whether what is computed now still has this identity.

        It has if vLLM has the very weights of the adapter that the identity was made of.
        """
        return identity.adapter is None or bool(self._digest(identity.adapter))

    def forget(self) -> None:
        """Forget how adapters were: vLLM's cache was reset together with the sidecars'."""
        self._adapters.clear()

    def check(self) -> None:
        """Compare the files of all adapters with what they were. A thread calls it every second."""
        for adapter in list(self._adapters.values()):
            if adapter.read.done() and not adapter.changed and adapter.read.exception() is None:
                read = adapter.read.result()
                adapter.changed = read is not None and _files_of(adapter.lora.lora_path) != read[0]

    def note_load(self, lora: LoRARequest, files: _Files | None) -> None:
        """vLLM has loaded an adapter from these files; None if they are not known."""
        self._loaded[lora.lora_int_id] = (lora.lora_path, files)

    def close(self) -> None:
        """End the threads. Safe to call again."""
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _adapter(self, lora: LoRARequest) -> Adapter | None:
        """Return the adapter that a request names; None if it is not made of files."""
        if not self._follows:
            self._warn(
                "",
                "this vLLM does not tell when adapters are loaded: their requests are not shared",
            )
            return None
        if type(lora).__name__ != "LoRARequest" or getattr(lora, "tensorizer_config_dict", None):
            self._warn(
                lora.lora_name,
                "adapter %s is not made of files: its requests are not shared",
                lora.lora_name,
            )
            return None
        key = (lora.lora_name, lora.lora_path) if self._path_in_hash else (lora.lora_name,)
        adapter = self._adapters.get(key)
        if adapter is None:
            settings = self._settings + b" %d" % getattr(lora, "is_3d_lora_weight", False)
            adapter = self._adapters[key] = Adapter(
                lora, self._submit(_read, lora.lora_path, settings)
            )
        elif adapter.lora.lora_path != lora.lora_path:
            adapter.changed = True
        adapter.lora = lora  # loaded anew, it has another number
        return adapter

    def _digest(self, adapter: Adapter) -> bytes:
        """Return the digest of an adapter's files; empty if vLLM has loaded it from others."""
        lora = adapter.lora
        read = None if adapter.read.exception() is not None else adapter.read.result()
        if read is None:
            adapter.changed = True
            for key in [key for key, each in self._adapters.items() if each is adapter]:
                del self._adapters[key]  # to be read again for the next request
            self._warn(
                lora.lora_name,
                "the files of adapter %s cannot be read in %s: its requests are not shared",
                lora.lora_name,
                lora.lora_path,
            )
            return b""
        files, digest = read
        # An adapter that no client has loaded is loaded by its first request.
        loaded = self._loaded.setdefault(lora.lora_int_id, (lora.lora_path, files))
        if loaded != (lora.lora_path, files):
            adapter.changed = True
        if adapter.changed:
            self._warn(
                f"{lora.lora_name} {loaded}",
                "the files of adapter %s changed while it was in use: its requests are not shared "
                "until it is loaded"
                " anew and then all caches are reset (POST "
                "/reset_prefix_cache?reset_external=true). Better give new"
                " weights a new name and path",
                lora.lora_name,
            )
            return b""
        return digest

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="lookaside-identity")
            if self._follows:
                threading.Thread(
                    target=_watch, args=(weakref.ref(self), self._closed), daemon=True
                ).start()
        return self._pool.submit(function, *args)

    def _warn(self, about: str, message: str, *args: object) -> None:
        if about not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(about)
            logger.warning("lookaside: " + message, *args)


def _watch(of: weakref.ref[Identities], closed: threading.Event) -> None:
    while not closed.wait(_CHECK_S):
        identities = of()
        if identities is None:
            return
        identities.check()
        del identities


def _path_in_hash() -> bool:
    """Report whether vLLM's block hashes depend on the path of an adapter."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    class Probe:
        def __init__(self, path: str) -> None:
            self.lora_request = LoRARequest("name", 1, path)

    one, other = Probe("/one"), Probe("/other")
    return _gen_lora_extra_hash_keys(one) != _gen_lora_extra_hash_keys(other)  # type: ignore[arg-type]


def _identify(
    request: Request, features: int, key: bytes, adapter: Adapter | None
) -> Identity | Unshared:
    """Return the identity of a request with multimodal inputs or embeddings.

    key is what its adapter adds.
    """
    parts: list[tuple[int, bytes]] = []
    for feature in (request.mm_features or ())[:features]:
        seen = hashlib.sha256(feature.modality.encode())
        if feature.data is None or not _feed(seen, dict(feature.data.get_data())):
            return UNKNOWN
        parts.append((feature.mm_position.offset, seen.digest()))
    if request.prompt_embeds is not None:
        kind = f"{request.prompt_embeds.dtype} {tuple(request.prompt_embeds.shape[1:])}".encode()
        parts += [(start, b"%d %d %s" % (start, end, kind)) for start, end in _embedded(request)]
    starts, keys = [], []
    if key:
        starts.append(0)
        keys.append(key)
    for start, part in sorted(parts):
        key = hashlib.sha256(b"%d %s%s" % (len(key), key, part)).digest()
        starts.append(start)
        keys.append(key)
    return Identity(tuple(starts), tuple(keys), adapter, features)


def _embedded(request: Request) -> list[tuple[int, int]]:
    """Return the runs of a prompt that are given as embeddings, as [start, end)."""
    mask: Sequence[bool] | None = getattr(request, "prompt_is_token_ids", None)
    if mask is None:
        return [(0, request.num_prompt_tokens)]
    runs, start = [], 0
    for at in range(1, len(mask) + 1):
        if at == len(mask) or bool(mask[at]) != bool(mask[start]):
            if not mask[start]:
                runs.append((start, at))
            start = at
    return runs


def _feed(seen: Any, value: Any) -> bool:
    """Add what a processor made to a digest; return False if it is of an unknown kind."""
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            return False
        seen.update(f"tensor {value.dtype} {tuple(value.shape)}\0".encode())
        if value.numel():
            seen.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        return True
    if isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            return False
        seen.update(f"array {value.dtype.str} {value.shape}\0".encode() + value.tobytes())
        return True
    if isinstance(value, dict):
        seen.update(b"dict %d\0" % len(value))
        return all(
            _feed(seen, str(key)) and _feed(seen, value[key]) for key in sorted(value, key=str)
        )
    if isinstance(value, list | tuple):
        seen.update(b"list %d\0" % len(value))
        return all(_feed(seen, each) for each in value)
    if isinstance(value, bool | int | float | str | bytes):
        text = repr(value).encode()
        seen.update(f"{type(value).__name__} {len(text)}\0".encode() + text)
        return True
    return False


def _settings_of(config: Any) -> bytes:
    """Return vLLM's settings of adapters that change what adapters compute.

    The text is the same in every process.
    """
    if config is None:
        return b""
    values = {
        name: value
        for name, value in vars(config).items()
        if name not in _HARMLESS and name[0] != "_"
    }
    return json.dumps(values, sort_keys=True, default=str).encode()
