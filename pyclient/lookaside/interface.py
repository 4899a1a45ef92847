"""What the connector needs of vLLM, and whether the vLLM that runs it has that.

vLLM's connector interface changes in most of its releases. This module holds, in tables, every
function, class and attribute of vLLM that the package uses without a substitute. It compares them
with the installed vLLM once, when the connector is made. A test compares the tables with the
package's code.

What is missing has one of two effects:

- Rows without a feature are needed for everything. If one is missing, the connector is idle, and
  the reason names what is missing.
- Rows with a feature are needed for that feature. If one is missing, the feature is off, and one
  line in the log says so.

Versions are compared for that log alone. What vLLM can do is always found by looking.

Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dis import get_instructions
from typing import Any, NamedTuple

TESTED = ("0.29", "0.33")
"""The oldest and the newest release of vLLM that the tests run on."""

FEATURES = {
    "groups": "models with a sliding window or several KV-cache groups are not served",
    "states": "models with layers that keep a state are not served",
    "adapters": "requests with LoRA adapters are not shared",
    "events": "KV events do not tell what the sidecars hold",
    "tails": "the incomplete last page of a prompt is not handed over",
    "in step": "no load happens within the step that asks for it",
}
"""What is off without each feature."""


class Call(NamedTuple):
    """A function, method or class that is called with so many positional arguments."""

    path: str
    """module:name, or module:class.method."""
    arguments: int
    feature: str = ""


class Has(NamedTuple):
    """Attributes of a module or class, or of a class's instances, that are used."""

    path: str
    """module, or module:class."""
    names: tuple[str, ...]
    feature: str = ""


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_UTILS = "vllm.v1.core.kv_cache_utils"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_SPECS = "vllm.v1.kv_cache_interface"
_SCHED = "vllm.v1.core.sched"

NEEDS: tuple[Call | Has, ...] = (
    # The connector's base class, and those vLLM's calls without which pages would be lost track of.
    Has(
        f"{_BASE}:KVConnectorBase_V1",
        (
            "bind_connector_metadata",
            "bind_gpu_block_pool",
            "build_connector_meta",
            "build_connector_worker_meta",
            "clear_connector_metadata",
            "get_block_ids_with_load_errors",
            "get_finished",
            "get_num_new_matched_tokens",
            "has_pending_push_work",
            "on_new_request",
            "register_kv_caches",
            "reset_cache",
            "start_load_kv",
            "update_connector_output",
            "update_state_after_alloc",
            "wait_for_save",
        ),
    ),
    Has(f"{_BASE}:SupportsHMA", ("request_finished_all_groups",)),
    # Requests and steps.
    Has(
        "vllm.v1.request:Request",
        (
            "all_token_ids",
            "block_hashes",
            "kv_transfer_params",
            "lora_request",
            "max_tokens",
            "mm_features",
            "num_computed_tokens",
            "num_in_flight_tokens",
            "num_preemptions",
            "num_prompt_tokens",
            "num_tokens",
            "pooling_params",
            "prompt_embeds",
            "request_id",
            "sampling_params",
            "skip_reading_prefix_cache",
            "status",
        ),
    ),
    Has("vllm.v1.request:RequestStatus", ("RUNNING", "FINISHED_ABORTED", "FINISHED_ERROR")),
    Has("vllm.sampling_params:SamplingParams", ("seed",)),
    Has("vllm.multimodal.inputs:MultiModalFeatureSpec", ("data", "mm_position", "modality")),
    Has(
        f"{_SCHED}.output:SchedulerOutput",
        (
            "finished_req_ids",
            "kv_connector_block_state",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "total_num_scheduled_tokens",
        ),
    ),
    Has(f"{_SCHED}.output:KVConnectorBlockState", ("boundary_state_offloads",), "states"),
    Has(f"{_SCHED}.scheduler:Scheduler", ()),
    Has(
        "vllm.v1.outputs:KVConnectorOutput",
        ("finished_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    ),
    Has("vllm.v1.outputs:KVConnectorOutput", ("failed_recving",), "groups"),
    Has(f"{_BASE}:KVConnectorTransferResults", ("finished_recving", "failed_recving"), "groups"),
    Call(f"{_BASE}:KVConnectorBase_V1.get_transfer_results", 1, "groups"),
    # Blocks.
    Has(_POOL, ("blocks", "cached_block_hash_to_block")),
    Call(f"{_POOL}.free_blocks", 1),
    Call(f"{_POOL}.get_cached_block", 2),
    Call(f"{_POOL}.touch", 1),
    Call(f"{_POOL}.evict_blocks", 1, "in step"),
    Has(f"{_UTILS}:KVCacheBlock", ("block_id", "ref_cnt")),
    Call("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", 0),
    # Names of pages.
    Call(f"{_UTILS}:resolve_kv_cache_block_sizes", 2),
    Call("vllm.utils.hashing:get_hash_fn_by_name", 1),
    Call(f"{_UTILS}:generate_block_hash_extra_keys", 4),
    Call(f"{_UTILS}:hash_block_tokens", 4, "tails"),
    Call(f"{_UTILS}:make_block_hash_with_group_id", 2, "states"),
    # The layout of the KV cache.
    Has(f"{_SPECS}:KVCacheConfig", ("kv_cache_groups", "kv_cache_tensors", "num_blocks")),
    Has(f"{_SPECS}:KVCacheGroupSpec", ("kv_cache_spec", "layer_names")),
    Has(f"{_SPECS}:FullAttentionSpec", ("block_size", "num_kv_heads", "unpadded_page_size_bytes")),
    Has(f"{_SPECS}:SlidingWindowSpec", ("sliding_window",), "groups"),
    Has(
        f"{_SPECS}:MambaSpec",
        (
            "dtypes",
            "mamba_cache_mode",
            "mamba_type",
            "num_speculative_blocks",
            "real_page_size_bytes",
            "shapes",
        ),
        "states",
    ),
    # Settings.
    Has("vllm", ("__version__",)),
    Has(
        "vllm.config:VllmConfig",
        (
            "cache_config",
            "device_config",
            "kv_transfer_config",
            "load_config",
            "model_config",
            "parallel_config",
            "speculative_config",
        ),
    ),
    Has(
        "vllm.config:CacheConfig",
        ("cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
    ),
    Has("vllm.config:DeviceConfig", ("device_type",)),
    Has(
        "vllm.config:KVTransferConfig",
        ("is_kv_consumer", "is_kv_producer", "kv_connector_extra_config"),
    ),
    Has(
        "vllm.config:ModelConfig",
        (
            "architecture",
            "dtype",
            "get_total_num_kv_heads",
            "hf_text_config",
            "model",
            "quantization",
            "revision",
            "use_mla",
        ),
    ),
    Has(
        "vllm.config:ParallelConfig",
        ("data_parallel_rank", "pipeline_parallel_size", "rank", "tensor_parallel_size"),
    ),
    Has("vllm.config:SpeculativeConfig", ("num_speculative_tokens", "use_eagle")),
    Call("vllm.distributed.parallel_state:get_pp_group", 0),
    Call("vllm.distributed.parallel_state:get_tensor_model_parallel_rank", 0),
    Call("vllm.distributed.parallel_state:model_parallel_is_initialized", 0),
    Call("vllm.distributed.kv_transfer:get_kv_transfer_group", 0),
    Call("vllm.distributed.kv_transfer:has_kv_transfer_group", 0),
    Call("vllm.utils.network_utils:get_ip", 0),
    # Adapters.
    Call("vllm.v1.engine.core:EngineCore.add_lora", 1, "adapters"),
    Call(f"{_UTILS}:_gen_lora_extra_hash_keys", 1, "adapters"),
    Call("vllm.lora.request:LoRARequest", 3, "adapters"),
    Has(
        "vllm.lora.request:LoRARequest",
        ("adapter_id", "lora_int_id", "lora_name", "lora_path", "name"),
        "adapters",
    ),
    # KV events.
    Has("vllm.distributed.kv_events", ("MEDIUM_CPU",), "events"),
    Has("vllm.distributed.kv_events:BlockRemoved", ("block_hashes",), "events"),
    Has(
        "vllm.distributed.kv_events:BlockStored",
        ("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        "events",
    ),
    Call(f"{_UTILS}:maybe_convert_block_hash", 1, "events"),
)


@functools.cache
def idle_reason(connector: type) -> str | None:
    """Return why the connector cannot work with this vLLM at all, or None if it can.

    connector is the class that vLLM calls.
    """
    lacks = [*_missing(""), *_unknown_calls(connector)]
    if not lacks:
        return None
    return (
        f"vLLM {_version()} is not as this connector needs it: {', '.join(lacks)}. It was tested "
        f"with vLLM {TESTED[0]} to {TESTED[1]}; install one of these, or a lookaside that was "
        "tested with yours"
    )


@functools.cache
def lacks(feature: str) -> str | None:
    """Return what this vLLM lacks of a feature, and so what is off; None if it lacks nothing."""
    missing = list(_missing(feature))
    if not missing:
        return None
    return f"vLLM {_version()} lacks {', '.join(missing)}: {FEATURES[feature]}"


def notes() -> Iterator[str]:
    """Yield what the user should know of this vLLM, a line each."""
    found, newest = (_release(version) for version in (_version(), TESTED[1]))
    if found > newest:
        yield (
            f"vLLM {_version()} is newer than any that lookaside was tested with ({TESTED[0]} to "
            f"{TESTED[1]}); all that it needs of vLLM is there"
        )
    yield from filter(None, map(lacks, FEATURES))


def _missing(feature: str) -> Iterator[str]:
    """Yield what the rows of a feature name and this vLLM does not have."""
    for need in NEEDS:
        if need.feature != feature:
            continue
        module, _, name = need.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split(".") if name else ():
                found = getattr(found, part)
        except (ImportError, AttributeError):
            yield name or module
            continue
        if isinstance(need, Has):
            known = _attributes(found) if need.names else need.names
            yield from (
                f"{name or module}.{each}"
                for each in need.names
                if each not in known and not hasattr(found, each)
            )
        elif not _takes(found, need.arguments + _takes_self(name)):
            yield f"{name} with {need.arguments} arguments"


def _takes_self(name: str) -> int:
    """Return 1 for the path of a method, whose first argument is its object."""
    return int("." in name)


def _takes(function: Any, arguments: int) -> bool:
    """Report whether a function can be called with so many positional arguments."""
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # it has no signature, as some classes of C
        return True
    return True


def _attributes(owner: Any) -> set[str]:
    """Return the attributes that a module has, or an instance of a class once it is made."""
    found = set(dir(owner))
    for cls in getattr(owner, "__mro__", ()):
        found.update(getattr(cls, "__dataclass_fields__", ()))
        code = getattr(cls.__dict__.get("__init__"), "__code__", None)
        if code is not None:
            found.update(
                each.argval for each in get_instructions(code) if each.opname == "STORE_ATTR"
            )
    return found


def _unknown_calls(connector: type) -> Iterator[str]:
    """Yield what vLLM may call of the connector otherwise than the connector expects."""
    for name in sorted(getattr(connector, "unknown_methods", ())):
        yield f"KVConnectorBase_V1.{name} is new and must be implemented"
    for name, ours in vars(connector).items():
        bases = (vars(base) for base in connector.__mro__[1:])
        theirs = next((base[name] for base in bases if name in base), None)
        if name.startswith("_") or not inspect.isfunction(ours) or not inspect.isfunction(theirs):
            continue
        parameters = inspect.signature(theirs).parameters
        if not _accepts(ours, list(parameters.values())):
            yield f"KVConnectorBase_V1.{name} has other parameters: {', '.join(parameters)}"


def _accepts(function: Any, parameters: Sequence[inspect.Parameter]) -> bool:
    """Report whether a function can be called with arguments for all of these parameters."""
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    try:
        inspect.signature(function).bind(*[None] * len(positional), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "of an unknown version"))


def _release(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers; a build without a release counts as 0."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (0, 0)
