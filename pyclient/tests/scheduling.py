"""Drives vLLM's real Scheduler without weights, against a scripted sidecar.

``Stand`` holds one Scheduler whose connector is the real LookasideConnector in
its scheduler role; only the sidecars are replaced. It plays the workers: a step
schedules, hands the metadata to a model of them and feeds the output back.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from lookaside import kvgroups, space, wire
from lookaside.identity import PLAIN, Identity
from lookaside.metadata import LookasideMetadata, LookasideWorkerMetadata
from lookaside.sidecars import RankSidecars
from lookaside.stats import GAUGES
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
ids = itertools.count()

# vLLM takes a request whose load failed as a whole from 0.30 on. Before, it knows of bad blocks
# alone, and models with several groups are not served.
WHOLE_FAILURES = hasattr(KVConnectorOutput(), "failed_recving")
needs_whole_failures = pytest.mark.skipif(
    not WHOLE_FAILURES, reason="idle for such models before vLLM 0.30"
)


def skip_if_idle(specs: Sequence[KVCacheSpec] | None) -> None:
    """Skip a test of a model with such groups where vLLM's version leaves the connector idle."""
    if specs and not WHOLE_FAILURES and (len(specs) > 1 or isinstance(specs[0], SlidingWindowSpec)):
        pytest.skip("idle for such models before vLLM 0.30")


def write_model(directory: Path, kv_heads: int = 2) -> Path:
    """A model directory that is enough for a ModelConfig."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def full_attention(block: int = BLOCK) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=16, dtype=torch.float32)


def sliding_window(tokens: int, block: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=2, head_size=16, dtype=torch.float32, sliding_window=tokens
    )


def mla(block: int = BLOCK) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.float32)


def sliding_window_mla(tokens: int, block: int = BLOCK) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=tokens
    )


def state(block: int = BLOCK, checkpoints: int = 0, drafts: int = 0) -> MambaSpec:
    """checkpoints: 1 if the model can leave a state behind in the middle of a forward. drafts: so
    many are made in a step."""
    spec = MambaSpec(
        block_size=block,
        shapes=((4, 128),),
        dtypes=(torch.float32,),
        page_size_padded=full_attention(block).page_size_bytes,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=checkpoints,
        num_speculative_blocks=drafts,
    )
    if checkpoints and hasattr(spec, "prefill_checkpoint_alignment"):  # from vLLM 0.30 on
        spec = dataclasses.replace(spec, prefill_checkpoint_alignment=checkpoints)
    return spec


def make_config(
    model: Path,
    extra: dict[str, Any] | None = None,
    *,
    connector: dict[str, Any] | None = None,
    block: int = BLOCK,
    batched_tokens: int = 4096,
    max_seqs: int = 16,
    tp: int = 1,
    pp: int = 1,
    policy: str = "recompute",
    prefix_caching: bool = True,
    hash_algo: str = "sha256_cbor",
    async_scheduling: bool = False,
    states: bool = False,
    adapters: bool = False,
    drafts: str = "",
    modules: int = 1,
    dcp: int = 1,
    pcp: int = 1,
    interleave: int = 1,
) -> VllmConfig:
    """drafts: a method of speculation, three tokens at a time. modules: so many does MTP have."""
    transfer: dict[str, Any] = {
        "kv_connector": "LookasideConnector",
        "kv_connector_module_path": "lookaside.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "lookaside.endpoint": "/nonexistent/rank-{rank}",
            "lookaside.chunk_tokens": 4 * block,
            **(extra or {}),
        },
    } | (connector or {})
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=4096
    )
    cache = CacheConfig(
        block_size=block,
        enable_prefix_caching=prefix_caching,
        prefix_caching_hash_algo=hash_algo,  # type: ignore[arg-type]
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        load_config=LoadConfig(),
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            distributed_executor_backend="mp" if tp * pp > 1 else None,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=batched_tokens,
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=async_scheduling,
        ),
        kv_transfer_config=KVTransferConfig(**transfer),
    )
    # CPU platforms replace the block size; the test's own must hold.
    config.cache_config.block_size = block
    config.scheduler_config.async_scheduling = async_scheduling  # which vLLM turns off on CPUs
    if states:  # which vLLM learns from the model
        config.cache_config.mamba_cache_mode = "align"
    if adapters:
        config.lora_config = LoRAConfig()
    # Which vLLM's CPU build has not.
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.prefill_context_parallel_size = pcp
    config.parallel_config.cp_kv_cache_interleave_size = interleave
    if drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=3,
            prompt_lookup_max=3,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        # Other methods want a draft model's weights to be configured; the scheduler does not.
        config.speculative_config.method = drafts  # type: ignore[assignment]
        config.model_config.hf_config.num_nextn_predict_layers = modules
    return config


def write_adapter(directory: Path, weights: bytes) -> Path:
    """An adapter's directory, as far as a scheduler's process reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return directory


def image(place: PlaceholderRange, identifier: str, pixels: int | None) -> MultiModalFeatureSpec:
    """An image of these pixels that the client, or vLLM, names so; None: its data are not in this
    process."""
    data = None
    if pixels is not None:
        field = MultiModalSharedField(batch_size=1)
        data = MultiModalKwargsItem(
            {"pixels": MultiModalFieldElem(data=torch.full((4, 4), float(pixels)), field=field)}
        )
    return MultiModalFeatureSpec(
        data=data, modality="image", identifier=identifier, mm_position=place
    )


class AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def make_kv_config(
    blocks: int,
    specs: Iterable[KVCacheSpec] | None = None,
    eagle: bool = False,
    eagles: Iterable[int] = (),
) -> KVCacheConfig:
    """eagle: all groups have layers of a draft head; eagles: those with these numbers do."""
    groups = [
        KVCacheGroupSpec([f"layer{i}"], spec, is_eagle_group=eagle or i in set(eagles))
        for i, spec in enumerate([full_attention()] if specs is None else specs)
    ]
    if not groups:
        return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[])
    size = blocks * groups[0].kv_cache_spec.page_size_bytes
    # Groups lie over one another: a block is one group's at a time.
    tensors = [
        KVCacheTensor(
            size=size,
            layers=group.layer_names,
            layer_stride=size,
            block_stride=groups[0].kv_cache_spec.page_size_bytes,
        )
        for group in groups
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


class ScriptedLookup:
    """A lookup whose answer the test decides, now or later."""

    def __init__(
        self,
        book: ScriptedSidecars,
        first_page: int,
        prev: bytes,
        hashes: bytes,
        recompute_us: int,
        prefill_s: float,
        tenant: str,
        request: str,
    ) -> None:
        self.tenant = tenant
        self.first_page = first_page
        self.prev = prev
        self.hashes = hashes
        self.recompute_us = recompute_us
        self.prefill_s = prefill_s
        self.cancelled = False
        self.trims: list[int] = []
        self.polls = 0
        self.in_memory = book.in_memory
        self.id = next(ids)
        self.late = False
        self.reason = self.took_us = self.began_us = 0
        self.sources = ""
        self.page_bytes = 0
        self.request = request
        self.answer: int | None = None
        self.refs = tuple(wire.LeaseRef(rank + 1, next(ids), b"") for rank in range(book.ranks))

    @property
    def digests(self) -> list[bytes]:
        return [self.hashes[i : i + 32] for i in range(0, len(self.hashes), 32)]

    def poll(self) -> int | None:
        assert not self.cancelled, "a cancelled lookup was polled"
        self.polls += 1
        return self.answer

    @property
    def is_due(self) -> bool:
        return self.answer is not None

    def wait(self, timeout_s: float) -> int | None:
        assert not self.cancelled and timeout_s > 0
        return self.answer

    def trim(self, first_page: int) -> None:
        assert not self.cancelled
        self.trims.append(first_page)

    def cancel(self) -> None:
        self.cancelled = True


class Advised(NamedTuple):
    """An advice about the pages with these digests."""

    action: int
    ms: int
    priority: int
    tenant: str
    digests: list[bytes]


class ScriptedSidecars:
    """Keeps pages by digest, as all the ranks' sidecars together would."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.reachable = True
        self.in_memory = False  # all hits are
        self.divided = False
        self.lease_s = 30.0
        self.max_pages = 65536
        self.held: dict[bytes, Page] = {}
        self.lookups: list[ScriptedLookup] = []
        self.advices: list[Advised] = []
        self.reads_advice = True
        # Of each request: tokens, found, loaded, own.
        self.prefilled: list[tuple[int, int, int, int]] = []
        self.reasons: list[str] = []  # likewise: why not all that was found was loaded
        self.hold_answers = False
        self.voids = 0  # resets so far
        self.is_void = False  # one of them is not cleared yet
        self.clears = 0
        self.clear_answer = True
        self.stored_after: dict[
            bytes, int
        ] = {}  # how many resets there had been when a page's save was ordered
        self.ordered_after: dict[int, int] = {}  # the same by save
        self.closed = 0
        self.raises: Exception | None = None
        self.held_back = False
        self.epoch = ""
        self.others: dict[str, dict[bytes, Page]] = {}  # what is held in other epochs
        self.named: str | None = None

    @property
    def available(self) -> bool:
        return self.reachable and not self.is_void and not self.held_back

    @available.setter
    def available(self, value: bool) -> None:
        self.reachable = value

    def start(
        self,
        first_page: int,
        prev: bytes,
        hashes: bytes,
        recompute_us: int,
        prefill_s: float,
        tenant: str = "",
        request: str = "",
    ) -> ScriptedLookup:
        if self.raises is not None:
            raise self.raises
        assert not self.is_void, "asked about what is void"
        assert not self.held_back, "asked while it is not known which weights there are"
        assert len(prev) == (32 if first_page else 0)
        lookup = ScriptedLookup(
            self, first_page, prev, hashes, recompute_us, prefill_s, tenant, request
        )
        self.lookups.append(lookup)
        if not self.hold_answers:
            self.answer(lookup)
        return lookup

    def advise(self, hashes: bytes, action: int, ms: int, priority: int, tenant: str) -> bool:
        if self.raises is not None:
            raise self.raises
        assert not self.is_void, "advised about what is void"
        digests = [hashes[i : i + 32] for i in range(0, len(hashes), 32)]
        self.advices.append(Advised(action, ms, priority, tenant, digests))
        return self.reads_advice

    def answer(self, lookup: ScriptedLookup) -> None:
        missing = (i for i, digest in enumerate(lookup.digests) if digest not in self.held)
        lookup.answer = next(missing, len(lookup.digests))
        if not lookup.cancelled:
            for digest in lookup.digests[: lookup.answer]:
                assert self.stored_after.get(digest, self.voids) == self.voids, (
                    "a hit from before a reset"
                )

    def store(self, digest: bytes, page: Page, voids: int) -> None:
        """Keep a page of a save that was ordered after so many resets."""
        held = self.held.setdefault(digest, page)
        assert list(map(of_prefix, held)) == list(map(of_prefix, page))
        self.stored_after.setdefault(digest, voids)

    def void(self) -> None:
        self.voids += 1
        self.is_void = True
        self.may_clear = False

    @property
    def is_clean(self) -> bool:
        return not self.is_void

    def hold_back(self) -> None:
        self.held_back = True

    def go_on(self) -> None:
        self.held_back = False

    def move(self, epoch: str) -> None:
        assert not self.is_void and epoch != self.epoch
        self.others[self.epoch] = self.held
        self.epoch, self.held, self.held_back = epoch, self.others.pop(epoch, {}), False

    def take_named(self) -> str | None:
        named, self.named = self.named, None
        return named

    def report_prefilled(
        self, tokens: int, found: int, loaded: int, own: int, lookup: int = 0, reason: int = 0
    ) -> None:
        assert 0 <= found <= tokens and 0 <= loaded <= tokens and own >= 0
        assert not lookup or any(each.id == lookup for each in self.lookups)
        self.prefilled.append((tokens, found, loaded, own))
        self.reasons.append(wire.REASONS[reason])

    def clear(self, timeout_s: float) -> bool:
        assert timeout_s >= 0 and self.is_void
        self.clears += 1
        self.may_clear = True
        if self.clear_answer:
            self.recover()
        return not self.is_void

    def recover(self) -> None:
        """The sidecars are back: they are told to clear what is void."""
        if self.is_void and self.may_clear:
            self.is_void = False
            self.held.clear()
            self.stored_after.clear()

    def close(self) -> None:
        self.closed += 1


Page = tuple[int, ...]
"""What a page holds: for each token, a digest of the tokens up to it; where it has several blocks,
for each of them."""


class Group(NamedTuple):
    """A KV-cache group, as the oracle sees it."""

    number: int
    block: int  # tokens
    window: int  # 0: it attends to all
    state: bool = False  # a block has what is left of all tokens before its end
    ahead: int = 0  # so many tokens further on is read by layers of a draft head; 0: it has none

    def value(self, value: int) -> int:
        """What the group's KV of a token must be, which is no other group's."""
        return hash((self.number, value)) if self.number else value

    def drafted(self, value: int, following: Sequence[int]) -> int:
        """The same with layers of a draft head, which has read the tokens that follow, or guessed
        them."""
        if not self.ahead:
            return self.value(value)
        following = [*following[: self.ahead]]
        following += [GUESS] * (self.ahead - len(following))
        drafted = hash(("drafted", self.value(value), *following))
        DRAFTED[drafted] = self.value(value), tuple(following)
        return drafted


GUESS = -2
DRAFTED: dict[int, tuple[int, tuple[int, ...]]] = {}
"""Of what Group.drafted has made: the value without the draft head, and the tokens it has read."""


def of_prefix(value: int | None) -> int | None:
    """What a page's name tells of a value: it depends on the tokens up to its own."""
    return value if value is None or value not in DRAFTED else DRAFTED[value][0]


def contents(request: Request, drafts: list[int] | None = None) -> list[int]:
    """What the KV of each of a request's tokens (then drafts) must be."""
    lora = request.lora_request
    value = hash((request.cache_salt, weights_of(lora.lora_path) if lora else None))
    features = {feature.mm_position.offset: feature for feature in request.mm_features}
    out = []
    for at, token in enumerate([*request.all_token_ids, *(drafts or ())]):
        feature = features.get(at)
        if feature is not None and feature.data is not None:
            value = hash((value, str(feature.data.get_data())))
        if request.prompt_embeds is not None and at < request.num_prompt_tokens:
            value = hash((value, str(request.prompt_embeds[at])))
        value = hash((value, token))
        out.append(value)
    return out


# Hashes that cover tokens after their block, as vLLM has them from 0.33 on.
HAS_LOOKAHEAD = hasattr(kv_cache_utils, "generate_lookahead_block_hash_extra_keys")
needs_lookahead = pytest.mark.skipif(not HAS_LOOKAHEAD, reason="no such hashes before vLLM 0.33")


def use_lookahead(patch: pytest.MonkeyPatch, tokens: int) -> None:
    """Have vLLM's hashes cover this many tokens after their block.

    vLLM 0.33 itself has none of them where there is a connector.
    """
    if tokens:
        patch.setattr(VllmConfig, "num_hash_lookahead_tokens", tokens)


@functools.cache
def weights_of(path: str) -> bytes:
    """The weights of an adapter, as a worker has them that loads it now, for good: one test's paths
    are no other's."""
    return (Path(path) / "adapter_model.safetensors").read_bytes()


@dataclass
class Batch:
    """A step on its way: what the model runner needs to carry it out."""

    scheduled: SchedulerOutput
    meta: LookasideMetadata
    tables: dict[str, tuple[list[int], ...]]
    before: dict[str, int]
    samples: dict[str, bool]
    checkpoints: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By request and group: the tokens of a state that the middle of the forward leaves behind, and
    the index in the table where it does."""
    sampled: dict[str, list[int]] = field(default_factory=dict)
    """What the step makes of each request that samples: accepted drafts, and a token."""
    wrap: Callable[[Any], Any] | None = None  # into a MultiConnector's answer


@dataclass
class Workers:
    """The ranks: a KV cache whose every token is known, and what the role asks of it.

    Each forward checks that all it attends to is what it must be, and each save
    that the block still holds the page when its bytes are read. That is the
    oracle of all tests here.
    """

    sidecars: ScriptedSidecars
    requests: dict[str, Request]
    block: int  # tokens of a page
    hash_block: int
    groups: list[Group]
    columns: list[
        tuple[Group, int]
    ]  # what a page has: a group's block, and its first token in the page
    memory: dict[int, list[int | None]] = field(default_factory=dict)
    chunk: int = 0  # pages of one; 0: not known
    lookahead: int = 0  # tokens after a page that its name covers
    load_steps: int = 0  # until a load is reported
    copy_steps: int = 0  # until a save's blocks are read, and it is acknowledged
    ack: bool = True
    second_per_token: float = 0.0  # what a forward takes; 0: it is not told
    forward_steps: int = 0  # until that is told
    fail_pages: Callable[[Any], Iterable[int]] = lambda load: ()  # indices into a load
    fail_requests: bool = False  # report the request, not blocks
    out: list[tuple[int, Any]] = field(default_factory=list)
    copying: list[tuple[int, Any]] = field(default_factory=list)
    loads: list[Any] = field(default_factory=list)
    saves: list[Any] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    unacked: list[int] = field(default_factory=list)
    timed: list[tuple[int, tuple[int, float]]] = field(default_factory=list)
    identities: dict[str, Identity] = field(
        default_factory=dict
    )  # by request: what its pages' names must have in them
    running: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By request and group: the tokens of its running state, and the index in the table where that
    lies."""

    def run(self, batch: Batch) -> KVConnectorOutput:
        """Carry out a step: the loads that end with it, its forward, its saves."""
        meta = copy.deepcopy(batch.meta)  # vLLM sends a copy
        self.aborted += meta.aborted
        self.loads += meta.loads
        self.saves += meta.saves
        self.out += [(self.load_steps, load) for load in meta.loads]
        self.copying += [(self.copy_steps, save) for save in meta.saves]
        output = KVConnectorOutput(finished_recving=set())
        for each in batch.scheduled.kv_cache_block_copies or ():
            self.memory[each.dst_block_id] = list(self.memory[each.src_block_id])
        self.forward(batch)
        due, self.out = self._due(self.out)
        for load in due:
            self.load(load, output)
        due, self.copying = self._due(self.copying)
        for save in due:
            self.save(save)
        if meta.timed and self.second_per_token:
            took = self.second_per_token * batch.scheduled.total_num_scheduled_tokens
            self.timed.append((self.forward_steps, (meta.timed, took)))
        told, self.timed = self._due(self.timed)
        if told or (self.ack and self.unacked):
            done = self.unacked if self.ack else []
            one = LookasideWorkerMetadata(dict.fromkeys(done, 1), forward_seconds=dict(told))
            folded = one
            for _ in range(self.sidecars.ranks - 1):
                folded = folded.aggregate(one)
            output.kv_connector_worker_meta = folded
            self.unacked = [] if self.ack else self.unacked
        return output

    @staticmethod
    def _due(waiting: list[tuple[int, Any]]) -> tuple[list[Any], list[tuple[int, Any]]]:
        return (
            [each for steps, each in waiting if steps <= 0],
            [(steps - 1, each) for steps, each in waiting if steps > 0],
        )

    def forward(self, batch: Batch) -> None:
        for request_id, count in batch.scheduled.num_scheduled_tokens.items():
            request = self.requests[request_id]
            before = batch.before[request_id]
            drafts = batch.scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            known = request.all_token_ids[: before + count - len(drafts)]
            value = contents(request)[: len(known)]
            for token in drafts:
                value.append(hash((value[-1], token)))
            accepted = max(0, len(batch.sampled.get(request_id, ())) - 1)
            # What a draft head can read when the step is over.
            text = [*known, *batch.sampled.get(request_id, ())]
            if len(text) < request.num_tokens:
                text = list(request.all_token_ids)
            for group in self.groups:
                table = batch.tables[request_id][group.number]
                if group.state:
                    self.forward_state(
                        request_id, group, table, value, before, len(known), len(drafts), accepted
                    )
                    inner = batch.checkpoints.get((request_id, group.number))
                    if inner is not None:
                        self.memory[table[inner[1]]] = [group.value(value[inner[0] - 1])]
                    continue
                for position in range(max(0, before - group.ahead + 1), before):
                    # What a draft head has guessed, it now knows.
                    page, offset = divmod(position, group.block)
                    slots = self.memory[table[page]]
                    if of_prefix(slots[offset]) == group.value(value[position]):
                        slots[offset] = group.drafted(value[position], text[position + 1 :])
                for position in range(
                    max(0, before - group.window + 1) if group.window else 0, before
                ):
                    page, offset = divmod(position, group.block)
                    assert table[page] and self._is(
                        group, self.memory[table[page]][offset], position, value, text
                    ), (
                        f"{request_id} attends to wrong KV of group {group.number} at {position} "
                        f"of {before}"
                    )
                for position in range(before, before + count):
                    page, offset = divmod(position, group.block)
                    assert table[page], "the null block was written"
                    slots = self.memory.setdefault(table[page], [None] * group.block)
                    if len(slots) != group.block:  # it was another group's
                        slots = self.memory[table[page]] = [None] * group.block
                    slots[offset] = (
                        group.drafted(value[position], text[position + 1 :])
                        if position < len(value)
                        else None
                    )

    def _is(
        self, group: Group, found: int | None, position: int, value: list[int], text: list[int]
    ) -> bool:
        """Whether KV is what it must be. The last tokens of a page may have been computed before
        others than those that follow them here: its name does not tell."""
        if found is None or found not in DRAFTED:
            return not group.ahead and found == group.value(value[position])
        had, following = DRAFTED[found]
        unit = self.hash_block if self.states else self.block  # that vLLM's own hits end at
        left = unit - 1 - position % unit
        sure = min(left, group.ahead, len(text) - position - 1)
        return had == group.value(value[position]) and (
            list(following[:sure]) == list(text[position + 1 : position + 1 + sure])
        )

    def forward_state(
        self,
        request_id: str,
        group: Group,
        table: list[int],
        value: list[int],
        before: int,
        known: int,
        drafts: int,
        accepted: int,
    ) -> None:
        """Go on from the state at before, and leave one in each block that ends in the step or is
        the last.

        The tokens up to known are no drafts. The state after each draft gets a block of its own,
        behind the last one. Once it is known how many are accepted, the state at a page's end goes
        where it belongs, and that after all of them is the running one, wherever it lies.
        """
        after = known + drafts
        if before:
            had, at = self.running.get((request_id, group.number), (0, 0))
            if had != before:  # it was not running
                at = (before - 1) // group.block
            assert table[at] and self.memory[table[at]] == [group.value(value[before - 1])], (
                f"a wrong state of group {group.number} at {before}"
            )
        last = (after - 1) // group.block
        assert all(table[last : last + 1 + drafts]), "the null block was written"
        if not drafts:
            for index in range(before // group.block, last):
                if table[index]:
                    self.memory[table[index]] = [group.value(value[(index + 1) * group.block - 1])]
        for draft in range(drafts + 1):
            self.memory[table[last + draft]] = [group.value(value[known + draft - 1])]
        end = (known + accepted) // group.block * group.block
        if drafts and end >= known and table[end // group.block - 1]:
            self.memory[table[end // group.block - 1]] = [group.value(value[end - 1])]
        reached = known + accepted
        at = last if reached == end and end // group.block - 1 == last else last + accepted
        self.running[request_id, group.number] = reached, at

    def load(self, load: Any, output: KVConnectorOutput) -> None:
        assert len(load.refs) in (0, self.sidecars.ranks)
        assert output.finished_recving is not None
        output.finished_recving.add(load.request_id)
        asked = next((each for each in self.sidecars.lookups if each.refs == load.refs), None)
        digests = asked.digests[load.first_page - asked.first_page :] if asked is not None else []
        rows = self.rows(load.block_ids)
        if load.refs and self.chunk:
            assert load.names == wire.names(digests[: len(rows)], load.first_page, self.chunk), (
                "other pages"
            )
        bad = set(self.fail_pages(load)) if load.refs else set(range(len(rows)))
        for i, row in enumerate(rows):
            page = self.sidecars.held.get(digests[i]) if i < len(digests) else None
            if i in bad or page is None:
                bad.add(i)
                page = (-1,) * sum(group.block for group, _ in self.columns)
            states = [
                block_id
                for (group, _), block_id in zip(self.columns, row, strict=True)
                if group.state
            ]
            if any(states):
                (block_id,) = [block_id for block_id in row if block_id]
                self.memory[block_id] = list(page[:1])
                continue
            row = row[: len(row) - len(states)]
            at = 0
            for (group, _), block_id in zip(self.columns, row, strict=False):
                if block_id:
                    # Behind the last token of an incomplete page lies what the block had before.
                    part = page[at : at + group.block]
                    self.memory[block_id] = [*part, *(-2,) * (group.block - len(part))]
                at += group.block
        if bad and self.fail_requests and WHOLE_FAILURES:
            output.failed_recving.add(load.request_id)
        else:
            output.invalid_block_ids |= {block_id for i in bad for block_id in rows[i]}

    def rows(self, block_ids: list[int]) -> list[list[int]]:
        assert len(block_ids) % len(self.columns) == 0
        return [
            block_ids[i : i + len(self.columns)]
            for i in range(0, len(block_ids), len(self.columns))
        ]

    def save(self, save: Any) -> None:
        rows = self.rows(save.block_ids)
        pages = len(rows)
        assert len(save.hashes) == 32 * pages
        assert pages
        request = self.requests[save.request_id]
        expected = contents(request)
        identity = self.identities.get(save.request_id, PLAIN)
        names = [
            identity.name(each, page * self.block + self.lookahead)
            for page, each in enumerate(
                request.block_hashes[self.hashes_per_page - 1 :: self.hashes_per_page], 1
            )
        ]
        for i, row in enumerate(rows):
            start = (save.first_page + i) * self.block
            digest = save.hashes[32 * i : 32 * i + 32]
            if any(
                block_id
                for (group, _), block_id in zip(self.columns, row, strict=True)
                if group.state
            ):
                self.save_state(
                    save,
                    i,
                    row,
                    names[save.first_page - 1],
                    expected[save.first_page * self.block - 1],
                )
                continue
            row = row[: len(row) - self.states]
            page = tuple(
                group.value(value)
                for group, first in self.columns
                if not group.state
                for value in expected[start + first : start + first + group.block]
            )
            if digest not in names:
                # The end of a prompt that is handed over; what is behind may be generated by now.
                page = page[: request.num_prompt_tokens - start]
                assert 1 < len(page) < self.block and i == pages - 1
            else:
                assert digest == names[save.first_page + i]
            if 0 in row:  # named, and not to be copied
                assert len(self.groups) > 1 or self.groups[0].window
                if digest not in self.sidecars.held:
                    break
                continue
            had = [
                value
                for (group, _), block_id in zip(self.columns, row, strict=False)
                for value in self.memory[block_id]
            ][: len(page)]
            assert tuple(map(of_prefix, had)) == page, (
                f"save {save.save_id} of {save.request_id} reads what is not page "
                f"{save.first_page + i} of {save.first_page}+{pages}"
            )
            assert not any(GUESS in DRAFTED[value][1] for value in had if value in DRAFTED), (
                f"save {save.save_id} of {save.request_id} reads what a draft head has guessed"
            )
            self.sidecars.store(digest, tuple(had), self.sidecars.ordered_after[save.save_id])
        self.unacked.append(save.save_id)

    def save_state(self, save: Any, number: int, row: list[int], digest: bytes, value: int) -> None:
        """The state of one group at the end of the page before the save's first."""
        assert save.prev == digest and len(save.hashes) == 32 * self.states
        name = kvgroups.state_names(digest, self.states)[number]
        assert save.hashes[32 * number : 32 * number + 32] == name
        ((group, block_id),) = [
            (group, block_id)
            for (group, _), block_id in zip(self.columns, row, strict=True)
            if block_id
        ]
        assert group == [each for each in self.groups if each.state][number]
        page = (group.value(value),)
        assert tuple(self.memory[block_id]) == page, (
            f"save {save.save_id} reads what is not the state at {save}"
        )
        self.sidecars.store(name, page, self.sidecars.ordered_after[save.save_id])

    @property
    def states(self) -> int:
        return sum(group.state for group, _ in self.columns)

    @property
    def hashes_per_page(self) -> int:
        return self.block // self.hash_block


class Stand:
    """A Scheduler, its connector and the workers; ``step`` until it is done."""

    def __init__(
        self,
        config: VllmConfig,
        blocks: int = 200,
        kv_config: KVCacheConfig | None = None,
        real: bool = False,
    ) -> None:
        """real: the connector keeps its own sidecars, and workers are for the caller to set."""
        self.config = config
        ranks, dcp = space.world(config).ranks, kvgroups.dcp_size(config)
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        kv_config = kv_config or make_kv_config(blocks)
        block, hash_block = resolve_kv_cache_block_sizes(kv_config, config)
        lookahead = space.lookahead_tokens(config)
        self.hasher = get_request_block_hasher(
            hash_block, hash_fn, *([lookahead] * (lookahead > 0))
        )
        config.cache_config.num_gpu_blocks = kv_config.num_blocks
        is_async = config.scheduler_config.async_scheduling
        with contextlib.nullcontext() if real else mock.patch.object(RankSidecars, "connect"):
            self.scheduler = (AsyncScheduler if is_async else Scheduler)(
                vllm_config=config,
                kv_cache_config=kv_config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=block,
                hash_block_size=hash_block,
                log_stats=True,
            )
        self.connector: Any = self.scheduler.connector
        self.sidecars = ScriptedSidecars(ranks)
        self.requests: dict[str, Request] = {}
        specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
        eagles = [group.is_eagle_group for group in kv_config.kv_cache_groups]
        if space.uses_drafts(config, kv_config) and not any(eagles):
            eagles = [True] * len(eagles)
        groups = [
            Group(
                number,
                kvgroups.block_tokens(kv_config.kv_cache_groups[number], dcp),
                getattr(spec, "sliding_window", 0) or 0,
                isinstance(spec, MambaSpec),
                1 + space.draft_lag(config)
                if eagles[number] and not isinstance(spec, MambaSpec)
                else 0,
            )
            for number, spec in enumerate(specs)
        ]
        columns = [
            (group, block - (share.kept - i) * group.block)
            for group, share in zip(
                groups, kvgroups.shares(kv_config.kv_cache_groups, block, dcp), strict=True
            )
            for i in range(share.kept)
        ] + [(group, 0) for group in groups if group.state]
        assert block == math.lcm(*(group.block for group in groups))
        self.workers = Workers(self.sidecars, self.requests, block, hash_block, groups, columns)
        self.workers.lookahead = lookahead
        self.workers.fail_requests = len(groups) > 1 or groups[0].window > 0
        self.clock = 0.0
        for each in self.roles() if not real else ():
            self.workers.chunk = each.setup.chunk
            each.setup.sidecars = self.sidecars
            each.setup.clock = lambda: self.clock
            self._follow(each.identities)
        self.depth = 2 if is_async else 1
        self.under_way: list[Batch] = []
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, Any] = {}
        self.transfer_params: dict[str, Any] = {}  # of each answer
        self.counts: dict[str, int] = {}  # as vLLM's front end gets them
        self.gauges: dict[str, float] = {}
        self.token = itertools.count(1)
        self.accept: Callable[[str, list[int]], int] = lambda request_id, drafts: 0
        self.draft: Callable[[Request], list[int]] | None = None

    def _follow(self, identities: Any) -> None:
        """Identities are known at once, and the workers know them."""
        identities._pool = AtOnce()
        found = identities.of

        def of(request: Request) -> Any:
            identity = found(request)
            if isinstance(identity, Identity):
                self.workers.identities[request.request_id] = identity
            return identity

        identities.of = of

    def roles(self) -> list[Any]:
        """The scheduler roles of ours, inside a MultiConnector too."""
        found = getattr(self.connector, "_connectors", [self.connector])
        found = [getattr(each, "_scheduler", None) for each in found]
        return [each for each in found if each is not None]

    @property
    def role(self) -> Any:
        return self.roles()[0]

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        request_id: str | None = None,
        transfer_params: Any = None,
        **kwargs: Any,
    ) -> str:
        """Add a request. transfer_params are its kv_transfer_params, as its sender wrote them."""
        request_id = request_id or f"r{next(ids)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kwargs.pop("params", {}))
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            **kwargs,
        )
        if transfer_params is not None:
            request.kv_transfer_params = transfer_params
        self.requests.setdefault(request_id, request)
        self.outputs.setdefault(request_id, [])
        self.scheduler.add_request(request)
        return request_id

    def schedule(self) -> Batch:
        scheduled = self.scheduler.schedule()
        meta: Any = scheduled.kv_connector_metadata
        wrap = None
        if isinstance(meta, MultiKVConnectorMetadata):
            parts = meta.metadata
            (ours,) = [i for i, part in enumerate(parts) if isinstance(part, LookasideMetadata)]
            meta = parts[ours]

            def wrap(answer: Any) -> Any:
                answers = [answer if i == ours else None for i in range(len(parts))]
                return MultiKVConnectorWorkerMetadata(metadata=tuple(answers))

        assert isinstance(meta, LookasideMetadata)
        self.sidecars.ordered_after |= {save.save_id: self.sidecars.voids for save in meta.saves}
        batch = Batch(scheduled, meta, {}, {}, {}, wrap=wrap)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests[request_id]
            tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            batch.tables[request_id] = tuple(list(table) for table in tables)
            batch.before[request_id] = request.num_computed_tokens - count
            batch.samples[request_id] = not request.is_prefill_chunk
            managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
            for number, manager in enumerate(managers):
                inner = getattr(manager, "_checkpoints", {}).get(request_id)
                if inner is not None:
                    batch.checkpoints[request_id, number] = inner
        return batch

    def complete(self, batch: Batch) -> None:
        """Carry a batch out and feed its output back."""
        scheduled = batch.scheduled
        request_ids = list(scheduled.num_scheduled_tokens)
        for request_id in request_ids:
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            new = next(self.token) % 1000
            if batch.samples[request_id]:
                # Where vLLM only pads a request to the others' length, there is nothing to accept.
                accepted = [] if -1 in drafts else drafts[: self.accept(request_id, drafts)]
                batch.sampled[request_id] = [*accepted, new]
        connector = self.workers.run(batch)
        if connector.kv_connector_worker_meta is not None and batch.wrap is not None:
            connector.kv_connector_worker_meta = batch.wrap(connector.kv_connector_worker_meta)
        if not request_ids:
            result = ModelRunnerOutput.with_kv_conn_output_only(connector)
        else:
            result = ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={r: i for i, r in enumerate(request_ids)},
                sampled_token_ids=[batch.sampled.get(r, []) for r in request_ids],
                kv_connector_output=None if connector.is_empty() else connector,
            )
        for outputs in self.scheduler.update_from_output(scheduled, result).values():
            stats = outputs.scheduler_stats
            for name, value in ((stats and stats.kv_connector_stats) or {}).items():
                if name in GAUGES:
                    self.gauges[name] = value
                elif isinstance(value, int):
                    self.counts[name] = self.counts.get(name, 0) + value
            for each in outputs.outputs:
                self.outputs[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finish_reasons[each.request_id] = each.finish_reason
                    self.transfer_params[each.request_id] = each.kv_transfer_params
        if self.draft is not None:
            running = self.scheduler.running
            drafts = DraftTokenIds(
                [r.request_id for r in running], [self.draft(r) for r in running]
            )
            self.scheduler.update_draft_token_ids(drafts)

    def step(self) -> Batch:
        """Schedule, and complete the oldest batch under way if the pipe is full."""
        batch = self.schedule()
        self.under_way.append(batch)
        computed = {
            request for each in self.under_way for request in each.scheduled.num_scheduled_tokens
        }
        assert not (batch.meta.idle and computed & self.scheduler.requests.keys()), (
            "a worker would wait in its stead"
        )
        if len(self.under_way) >= self.depth:
            self.complete(self.under_way.pop(0))
        self.clock += 0.001
        return batch

    def run(self, limit: int = 500) -> int:
        """Step until the scheduler has nothing to do; the steps taken."""
        for steps in range(limit):
            if not self.scheduler.has_requests():
                self.drain()
                if not self.scheduler.has_requests():
                    return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def drain(self) -> None:
        """Complete everything under way."""
        while self.under_way:
            self.complete(self.under_way.pop(0))

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def forget_local(self) -> None:
        """Empty vLLM's own prefix cache; the sidecars keep theirs."""
        assert self.scheduler.reset_prefix_cache()

    def local_hit(self, prompt: list[int]) -> int:
        """The tokens of a prompt that vLLM's own cache has."""
        manager = self.scheduler.kv_cache_manager
        return manager.get_computed_blocks(self._made(prompt))[1]

    def digests(self, prompt: list[int], **kwargs: Any) -> list[bytes]:
        """The page digests of a prompt."""
        step = self.workers.hashes_per_page
        return list(self._made(prompt, **kwargs).block_hashes[step - 1 :: step])

    def _made(self, prompt: list[int], **kwargs: Any) -> Request:
        """A request that is not added."""
        return Request(
            request_id="made",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self.hasher,
            **kwargs,
        )

    def holds(self, prompt: list[int], **kwargs: Any) -> int:
        """How many of a prompt's pages the sidecars hold, from its start."""
        digests = self.digests(prompt, **kwargs)
        missing = (i for i, digest in enumerate(digests) if digest not in self.sidecars.held)
        return next(missing, len(digests))

    def check_idle(self, *others: Stand) -> None:
        """Nothing is held: no pins, leases, requests or blocks. others are on the same sidecars."""
        for role in self.roles():
            assert (
                not role.saves.pins
                and not role.requests
                and not role.loads.blocks
                and not role.loads.prefills
            )
            assert not role.loads.ordered and not role.saves.of_ended and role.hits.holding == 0
            assert not role.has_pending_push_work()
        owned = {load.refs for stand in (self, *others) for load in stand.workers.loads}
        assert all(
            each.cancelled or each.answer == 0 or each.refs in owned
            for each in self.sidecars.lookups
        )
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1
        assert not self.scheduler.has_requests()


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt; prompts of one seed share their prefix."""
    return [(i * 7 + seed * 131 + 1) % 1000 + 1 for i in range(count)]
