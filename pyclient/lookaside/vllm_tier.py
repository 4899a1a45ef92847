"""A secondary tier for vLLM's OffloadingConnector that keeps its blocks in a sidecar.

vLLM copies blocks between the GPU and host memory; this tier copies them between that memory and a
sidecar's arena. So vLLM's own copies get what the sidecar has: an arena that all engines of the
host share and that outlives them, disks and Redis under it, eviction, limits. In
``kv_connector_extra_config``::

    {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
     "secondary_tiers": [{"type": "LookasideTier", "module_path": "lookaside.vllm_tier"}]}

docs/vllm-tiering.md has the settings.

**In the scheduler.** vLLM calls all methods in its scheduler's process. None of them copies, and
none waits for the sidecar but lookup, which waits ``lookup_wait_us`` for an answer that memory can
give, and no longer than ``lookup_wait_step_us`` for all that a step asks. vLLM asks for one block
after the other. The first that is not known asks the sidecar for all that follow it in its prefix,
so that a prompt needs one question. What is not answered in time is RETRY: vLLM asks again in the
next step.

**Failures.** Nothing raises. Without a sidecar all blocks are misses and stores fail. A load that
fails is reported by block, and those blocks are misses for the request from then on.

**A reset of vLLM's cache** can mean that the weights have changed, which vLLM does not tell a tier.
From then on the tier's blocks are in a space of this engine's own (setting ``on_reset``).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.kv_offload import base as offload
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from lookaside import __version__, tierspace
from lookaside.autostart import Autostart
from lookaside.blocks import NAME_BYTES, BlockStore, Buffer, Done, Found, Part, Settings
from lookaside.config import ConfigError, default_endpoint, parse_size
from lookaside.ratelog import RateLimitedLog

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# An offload key ends with the number of its KV-cache group.
_GROUP_BYTES = 4
# Lookups that one step begins at most; a step with more goes on in the next.
_MAX_BEGUN = 64
_PERSON = b"lookaside group"


@dataclass(frozen=True)
class TierSettings:
    """The settings of the tier in ``secondary_tiers``. Times are as their names say."""

    endpoint: str = ""
    """Directory of the sidecar; ``{dp_rank}`` is filled in. Default: vLLM's rank 0."""
    lookup_wait_us: int = 200
    """How long one lookup waits for an answer that memory can give; 0: never."""
    lookup_wait_step_us: int = 500
    """How long all lookups of one step wait together."""
    lookup_timeout_ms: int = 100
    """How long a lookup may be out before it is a miss."""
    promotion_timeout_ms: int = 3_000
    """How long it may be out for blocks on a disk or in Redis; 0: these are not looked for."""
    timeout_ms: int = 2_000
    """How long a store or load waits for each answer of the sidecar."""
    queue_bytes: int = 1 << 30
    """Stores beyond this are refused, so that they do not keep vLLM's host memory."""
    copy_threads: int = 2
    """Threads that copy."""
    tenant: str = ""
    """To whom the sidecar counts the blocks."""
    identity: str = ""
    """What you vouch for that is the same in all engines with this text: see the docs."""
    on_reset: str = "private"
    """After a reset of vLLM's cache: ``private``, blocks of this engine only; ``keep``, go on."""
    enable_kv_events: bool = False
    """Publish an event for each block stored, if vLLM publishes events."""
    locality: str | None = None
    """``LOCAL`` or ``REMOTE``: what events and filters of requests call this tier."""
    autostart: bool = False
    """Start a sidecar if none answers."""
    binary: str = "lookaside"
    """The program that autostart runs."""
    sidecar_args: tuple[str, ...] = ()
    """More arguments of ``lookaside serve`` for autostart."""


def _settings(given: Mapping[str, Any]) -> TierSettings:
    """Return checked settings. Raises ConfigError, whose message names the setting."""
    known = {name: each.default for name, each in TierSettings.__dataclass_fields__.items()}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"secondary_tiers: the tier LookasideTier has no setting {name!r}; it has "
                f"{', '.join(known)}"
            )
        default = known[name]
        if name == "queue_bytes":
            value = parse_size(value)
        elif name == "sidecar_args":
            value = tuple(value.split() if isinstance(value, str) else map(str, value))
        elif name == "locality" and value is None:
            pass
        elif isinstance(default, bool) or not isinstance(default, int):
            wanted = type(default) if default is not None else str
            if not isinstance(value, wanted):
                raise ConfigError(f"secondary_tiers: {name}={value!r} is not a {wanted.__name__}")
        elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 31:
            raise ConfigError(f"secondary_tiers: {name}={value!r} is not a number from 0 on")
        values[name] = value
    made = TierSettings(**values)
    if made.on_reset not in ("private", "keep"):
        raise ConfigError(f'secondary_tiers: on_reset={made.on_reset!r}: "private" or "keep"')
    if made.copy_threads < 1:
        raise ConfigError("secondary_tiers: copy_threads is at least 1")
    return made


@dataclass(slots=True, eq=False)
class _Ask:
    """One question: the blocks from a key on, in the order of their prefix."""

    keys: list[Any]
    found: Found
    pending: bool = False
    """It was not answered within the call that asked; its keys are in asked."""


@dataclass(slots=True)
class _Request:
    verdicts: dict[Any, LookupResult] = field(default_factory=dict)
    """By key, what is known of it."""
    asked: dict[Any, _Ask] = field(default_factory=dict)
    """By key, questions that are not answered."""
    leased: dict[Any, _Ask] = field(default_factory=dict)
    """By key that is a hit, the answer that leases it."""
    asks: list[_Ask] = field(default_factory=list)
    """All questions."""
    chains: dict[bytes, list[Any]] = field(default_factory=dict)
    """By group, all keys by their index in the prefix."""
    known: int = -1
    """How many keys vLLM had told when chains was made."""


def _safe(default: Callable[[], Any]) -> Callable[[Any], Any]:
    """Have a method return default() instead of raising: an exception would end vLLM's engine."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def guarded(self: LookasideTier, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                self._log.warning(method.__name__, "%s failed", method.__name__, exc_info=True)
                return default()

        return guarded

    return decorate


class LookasideTier(SecondaryTierManager):
    """See the module's comment. Made by vLLM; one thread at a time calls its methods."""

    medium = offload.Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """settings are those of TierSettings. Raises ConfigError for one that cannot be used."""
        given = {"backpressure_detector": backpressure_detector}
        takes = inspect.signature(SecondaryTierManager.__init__).parameters
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            **{name: value for name, value in given.items() if name in takes},
        )
        self._log = RateLimitedLog(logger)
        self._tier_settings = use = _settings(settings)
        if use.locality is not None:
            self.locality = offload.Locality(use.locality)
        if not hasattr(offload.ReqContext, "get_offload_key_position"):
            raise ConfigError(
                "LookasideTier needs a vLLM whose requests tell the positions of their blocks "
                "(ReqContext.get_offload_key_position, as of vLLM 0.32): upgrade vLLM, or use the "
                "connector lookaside.connector instead"
            )
        config = offloading_spec.config
        # By group: tokens of a block of this tier, which vLLM calls a chunk.
        self._tokens = {
            group.group_id.to_bytes(_GROUP_BYTES, "big"): group.tokens_per_block
            * config.cache.blocks_per_chunk
            for group in config.groups
        }
        # The group whose block hashes are the names as they are.
        self._plain = min(self._tokens)
        events = use.enable_kv_events
        events = events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] | None = [] if events else None
        self._requests: dict[str, _Request] = {}
        self._jobs: dict[int, tuple[str, list[Any], bool]] = {}  # request, keys, is a load
        self._begun = 0  # lookups, in this step
        self._budget_s = self._step_s = use.lookup_wait_step_us / 1e6
        self._wait_s = use.lookup_wait_us / 1e6
        self._resets = 0
        self._engine_id = f"{config.engine_id}-tier-{secrets.token_hex(4)}"
        buffer = _buffer_of(primary_kv_view)
        vllm_config = tierspace.vllm_config_of_callers()
        self._fields, own = tierspace.tier_fields(
            config, vllm_config, buffer.block_bytes, self._engine_id, use.identity
        )
        if own:
            logger.warning(
                "lookaside: the blocks of this engine are not shared, and not found after a "
                "restart: %s. If they are the same in all engines, set the same identity in the "
                "tier's settings (docs/vllm-tiering.md)",
                "; ".join(own),
            )
        endpoint = (use.endpoint or default_endpoint()).format(
            rank=0, dp_rank=config.parallel.data_parallel_index
        )
        start = None
        if use.autostart:
            start = Autostart(use.binary, endpoint, use.sidecar_args).ensure
        self._store = BlockStore(
            endpoint,
            self._engine_id,
            self._fields,
            buffer,
            block_tokens=self._tokens[self._plain],
            settings=Settings(
                timeout_s=use.timeout_ms / 1000,
                find_s=use.lookup_timeout_ms / 1000,
                promotion_s=use.promotion_timeout_ms / 1000,
                queue_bytes=use.queue_bytes,
                threads=use.copy_threads,
                tenant=use.tenant,
            ),
            about={"client": f"lookaside.vllm_tier {__version__}", "model": config.model.name},
            on_absent=start,
        )
        self._store.start()

    # ---- lookups ----

    @_safe(lambda: offload.RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> Any:
        return offload.RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        request = self._requests.get(req_context.req_id)
        if request is not None:
            verdict = request.verdicts.get(key)
            if verdict is not None:
                return verdict
        return self._resolve(key, req_context)

    @_safe(lambda: LookupResult.MISS)
    def _resolve(self, key: Any, req_context: Any) -> LookupResult:
        """Find out what is known of a block, or ask."""
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._requests[req_context.req_id] = _Request()
        ask = request.asked.get(key)
        if ask is None:
            if self._store.starting or self._begun >= _MAX_BEGUN:
                return LookupResult.RETRY
            ask = self._ask(key, req_context, request)
            if ask is None:
                return LookupResult.MISS
        hits = ask.found.poll()
        if hits is None and self._budget_s > 0:
            begun = time.perf_counter()
            hits = ask.found.wait(min(self._wait_s, self._budget_s))
            self._budget_s -= time.perf_counter() - begun
        if hits is None:
            if not ask.pending:
                ask.pending = True
                request.asked = dict.fromkeys(ask.keys, ask) | request.asked
            return LookupResult.RETRY
        if ask.pending:
            request.asked = {k: each for k, each in request.asked.items() if each is not ask}
        request.verdicts |= dict.fromkeys(ask.keys[:hits], LookupResult.HIT)
        request.leased |= dict.fromkeys(ask.keys[:hits], ask)
        if hits < len(ask.keys):
            request.verdicts[ask.keys[hits]] = LookupResult.MISS
        return request.verdicts.get(key, LookupResult.MISS)

    def _ask(self, key: Any, req_context: Any, request: _Request) -> _Ask | None:
        """Ask for a block and those that follow it; None if its place in the prefix is not told."""
        position = req_context.get_offload_key_position(key)
        if position is None:
            return None
        self._begun += 1
        tokens = self._tokens.get(key[-_GROUP_BYTES:], 0)
        index, rest = divmod(position, tokens) if tokens else (0, 1)
        before = b""
        if rest:  # the last, partial block of a prompt: it stands alone
            first, keys = 0, [key]
        else:
            first = index - 1
            chain = self._chain(key, req_context, request)
            if first < len(chain) and chain[first] == key:
                # A key that was asked for before this one: vLLM goes backwards, for a window.
                backwards = first + 1 < len(chain) and chain[first + 1] in request.verdicts
                keys = [key] if backwards or first + 1 == len(chain) else chain[first:]
                before = self._name(chain[first - 1]) if first else b""
            else:
                keys = [key]
        found = self._store.find(first, before, self._names(keys), req_context.req_id)
        del keys[len(found.names) :]
        ask = _Ask(keys, found)
        request.asks.append(ask)
        return ask

    def _chain(self, key: Any, req_context: Any, request: _Request) -> list[Any]:
        """Return the request's keys of the key's group, by their index."""
        positions = getattr(req_context, "_offload_key_positions", None)
        if positions is None:
            return []
        if request.known != len(positions):
            request.known, request.chains = len(positions), _chains(positions, self._tokens)
        return request.chains.get(key[-_GROUP_BYTES:], [])

    def _name(self, key: Any) -> bytes:
        return self._names([key])[0]

    def _names(self, keys: list[Any]) -> list[bytes]:
        """Return the names of blocks. A name has all of its block's hash."""
        if len(self._tokens) == 1 and len(keys[0]) == NAME_BYTES + _GROUP_BYTES:
            return [key[:NAME_BYTES] for key in keys]  # all hashes are of one length
        names = []
        plain, length = self._plain, NAME_BYTES + _GROUP_BYTES
        for key in keys:
            if len(key) == length and key.endswith(plain):
                names.append(key[:NAME_BYTES])
            else:
                names.append(hashlib.blake2b(key, digest_size=NAME_BYTES, person=_PERSON).digest())
        return names

    # ---- jobs ----

    @_safe(lambda: None)
    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._jobs[job_metadata.job_id] = (job_metadata.req_context.req_id, keys, False)
        self._store.store(
            job_metadata.job_id,
            len(keys),
            functools.partial(
                self._store_parts, keys, job_metadata.chunk_ids, job_metadata.req_context
            ),
        )

    def _store_parts(self, keys: list[Any], rows: Any, req_context: Any) -> list[Part]:
        """Return a store's blocks in runs of their prefixes. Runs on the mover's thread."""
        places: list[tuple[bytes, int, Any, int]] = []
        alone: list[Part] = []
        for key, row in zip(keys, np.asarray(rows).tolist(), strict=True):
            position = req_context.get_offload_key_position(key)
            tokens = self._tokens.get(key[-_GROUP_BYTES:], 0)
            if position is None:
                self._log.warning("position", "a block without a place is not stored")
            elif not tokens or position % tokens:
                alone.append(Part(0, [self._name(key)], [row], [key]))
            else:
                places.append((key[-_GROUP_BYTES:], position // tokens - 1, key, row))
        places.sort(key=lambda place: place[:2])
        parts: list[Part] = []
        last: tuple[bytes, int] | None = None
        for group, index, key, row in places:
            if last != (group, index - 1):
                parts.append(Part(index, [], [], []))
            last = group, index
            parts[-1].tags.append(key)
            parts[-1].rows.append(row)
        for part in parts:
            part.names = self._names(part.tags)
            if part.first:
                part.before = self._before(part, req_context)
        return parts + alone

    def _before(self, part: Part, req_context: Any) -> bytes:
        """Return the name of the block before a run; empty if it is not known."""
        positions = getattr(req_context, "_offload_key_positions", {})
        group = part.tags[0][-_GROUP_BYTES:]
        end = part.first * self._tokens[group]
        for key, position in list(positions.items()):  # the scheduler's thread may add to it
            if position == end and key.endswith(group):
                return self._name(key)
        return b""

    @_safe(lambda: None)
    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._jobs[job_metadata.job_id] = (job_metadata.req_context.req_id, keys, True)
        request = self._requests.get(job_metadata.req_context.req_id) or _Request()
        rows = np.asarray(job_metadata.chunk_ids).tolist()
        of: dict[int, tuple[_Ask, dict[Any, int]]] = {}
        for key, row in zip(keys, rows, strict=True):
            ask = request.leased.get(key)
            if ask is not None:
                of.setdefault(id(ask), (ask, {}))[1][key] = row
        parts: list[Part] = []
        for ask, wanted in of.values():
            at = [i for i, key in enumerate(ask.keys) if key in wanted]
            begin, end = at[0], at[-1] + 1
            tags = ask.keys[begin:end]
            parts.append(
                Part(
                    ask.found.first + begin,
                    ask.found.names[begin:end],
                    [wanted.get(key, -1) for key in tags],
                    tags,
                    found=ask.found,
                )
            )
            # The answer is used up: what else it found is asked for again.
            for key in ask.keys:
                if request.leased.pop(key, None) is not None:
                    request.verdicts.pop(key, None)
        self._store.load(job_metadata.job_id, parts)

    @_safe(lambda: [])
    def get_finished_jobs(self) -> Iterable[Any]:
        return [self._result(done) for done in self._store.finished()]

    def _result(self, done: Done) -> Any:
        request_id, keys, is_load = self._jobs.pop(done.job)
        whole = len(done.good) == len(keys)
        if is_load and not whole:
            request = self._requests.get(request_id)
            good = set(done.good)
            if request is not None:
                request.verdicts |= {k: LookupResult.MISS for k in keys if k not in good}
        if self._events is not None and not is_load and done.good:
            self._events.append(
                offload.OffloadingEvent(
                    keys=list(done.good),
                    medium=offload.Medium.CPU,
                    removed=False,
                    locality=self.locality,
                )
            )
        return tiering.JobResult(
            **_fields_of(
                tiering.JobResult,
                job_id=done.job,
                success=whole,
                successful_keys=tuple(done.good) if is_load and not whole and done.good else None,
                transfer_time=done.seconds,
                transfer_bytes=done.moved_bytes,
            )
        )

    @_safe(lambda: ())
    def take_events(self) -> Iterable[Any]:
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    # ---- steps, requests, the end ----

    @_safe(lambda: None)
    def on_request_finished(self, req_context: Any) -> None:
        request = self._requests.pop(req_context.req_id, None)
        if request is not None:
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        for ask in request.asks:
            ask.found.cancel()

    @_safe(lambda: None)
    def on_schedule_end(self, context: Any) -> None:
        self._begun, self._budget_s = 0, self._step_s

    @_safe(lambda: None)
    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Do nothing: what vLLM has in its own memory is not asked for here."""

    @_safe(lambda: None)
    def drain_jobs(self) -> None:
        """Wait for all jobs. vLLM calls it when it resets its cache, see the module's comment."""
        self._store.drain()
        for request in self._requests.values():
            self._forget(request)
        self._requests.clear()
        if self._tier_settings.on_reset == "private":
            self._resets += 1
            self._store.move(tierspace.with_reset(self._fields, self._engine_id, self._resets))

    @_safe(lambda: None)
    def shutdown(self) -> None:
        self._store.close()


def _buffer_of(view: memoryview) -> Buffer:
    """Return where the rows of vLLM's CPU tier are. Keeps nothing that would keep the view."""
    if view.ndim != 2 or view.strides is None or view.shape is None or not view.c_contiguous:
        raise ConfigError(f"LookasideTier: vLLM's buffer has the shape {view.shape}, want rows")
    array = np.asarray(view)
    stride = view.strides[0]
    return Buffer(int(array.ctypes.data), view.shape[0], stride, stride)


def _chains(positions: Mapping[Any, int], tokens: Mapping[bytes, int]) -> dict[bytes, list[Any]]:
    """Return the keys of each group that are whole blocks, by their index and without a gap."""
    if len(tokens) == 1:
        ((group, size),) = tokens.items()
        chain = [key for key, end in positions.items() if not end % size]
        if all(positions[key] == (index + 1) * size for index, key in enumerate(chain)):
            return {group: chain}
    chains: dict[bytes, list[Any]] = {group: [] for group in tokens}
    for end, key in sorted((end, key) for key, end in positions.items()):
        chain = chains.get(key[-_GROUP_BYTES:])
        if chain is not None and end == (len(chain) + 1) * tokens[key[-_GROUP_BYTES:]]:
            chain.append(key)
    return chains


def _fields_of(of: Any, **values: Any) -> dict[str, Any]:
    """Return those of the values that a dataclass of this vLLM has."""
    return {name: value for name, value in values.items() if name in of.__dataclass_fields__}
