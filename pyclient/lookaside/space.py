"""Names the space: everything that must agree for KV bytes to be reusable.

vLLM's block hashes name token prefixes (with LoRA, cache salt, multimodal content and prompt
embeddings), but neither the model nor how its KV is laid out. ``space_fields`` adds what both roles
of an engine can tell from their configuration. The worker adds the page layout, which only it
knows. The sidecar compares the fields one by one, so that a refusal can name the one that differs.

Some values cannot be known, or differ from run to run without being visible here. Their field is
made unique to the engine: any doubt is a miss.

This module imports neither torch nor vLLM until a function needs them, and reads only attributes of
the objects that it is given.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lookaside import interface
from lookaside.config import Config
from lookaside.kvgroups import config_fault, dcp_size, keeps_state, specs_of, window_tokens

_FIELD_BYTES = 512
_NON_CRYPTOGRAPHIC = ("xxhash", "xxhash_cbor")
_DIGEST_BYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


# Settings of multimodal inputs that do not matter here. They do not change the model, and page
# names cover what they change (identity.py).
_HARMLESS_INPUTS = frozenset({
    "allow_missing_mm_embeddings",
    "enable_mm_embeds",
    "limit_per_prompt",
    "media_io_kwargs",
    "mm_ipc_gpu_memory_gb",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_processor_kwargs",
    "mm_shm_cache_max_object_size_mb",
    "mm_tensor_ipc",
    "skip_mm_profiling",
})  # fmt: skip

# Models all of whose layers have the config's num_key_value_heads, which vLLM lays out by
# QKVParallelLinear: with fewer of them than TP ranks, rank r has head r // (tp_size // heads).
_PLAIN_HEADS = frozenset({
    "CohereForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
})  # fmt: skip


# Methods of speculation that look for drafts in the text, and keep no KV.
_DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})


class World(NamedTuple):
    """The ranks of one engine: ``rank = (pp_rank * pcp_size + pcp_rank) * tp_size + tp_rank``.

    The ranks of one stage of the pipeline are its *places*: ``place = rank % stage_size``.
    """

    tp_size: int
    pcp_size: int
    pp_size: int
    dp_rank: int

    @property
    def stage_size(self) -> int:
        """Workers of one stage of the pipeline."""
        return self.tp_size * self.pcp_size

    @property
    def ranks(self) -> int:
        """Workers of one engine."""
        return self.stage_size * self.pp_size


class Geometry(NamedTuple):
    """The units of a space that both roles know; page bytes come from the worker."""

    page_tokens: int
    pages_per_chunk: int
    digest_bytes: int
    hashes_per_page: int
    """Block hashes of vLLM in one page; a page is named by its last one."""


def world(vllm_config: Any) -> World:
    """Return the sizes of one engine, and which of the data-parallel engines it is."""
    parallel = vllm_config.parallel_config
    dp_rank = getattr(parallel, "data_parallel_index", None)
    if dp_rank is None:
        dp_rank = parallel.data_parallel_rank
    return World(
        parallel.tensor_parallel_size,
        getattr(parallel, "prefill_context_parallel_size", 1),
        parallel.pipeline_parallel_size,
        dp_rank,
    )


def may_span_hosts(vllm_config: Any) -> bool:
    """Report whether ranks of one engine may be on several hosts."""
    parallel = vllm_config.parallel_config
    if world(vllm_config).ranks == 1:
        return False
    backend = getattr(parallel, "distributed_executor_backend", None)
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "")
    return hosts(vllm_config) > 1 or "ray" in name.lower()


def hosts(vllm_config: Any) -> int:
    """Return on how many hosts the ranks of one engine are, as far as its configuration says."""
    parallel = vllm_config.parallel_config
    return getattr(parallel, "nnodes_within_dp", None) or getattr(parallel, "nnodes", None) or 1


def idle_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Return why the connector must stay idle for this model, or None if it need not.

    Pages are stored of layers that keep the whole prefix or a sliding window of it and, beside
    these, of layers that keep a state. A model with other layers runs without hits.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is disabled; start vLLM with --enable-prefix-caching"
    fault = config_fault(kv_cache_config)
    if fault is not None or not is_hybrid(kv_cache_config):
        return fault
    fault = interface.lacks("groups")
    if fault is None and has_states(kv_cache_config):
        fault = interface.lacks("states")
    return fault


def is_hybrid(kv_cache_config: Any) -> bool:
    """Report whether a page is more than one block, or may be without some of its blocks."""
    groups = kv_cache_config.kv_cache_groups
    return len(groups) > 1 or any(window_tokens(group) for group in groups)


def has_states(kv_cache_config: Any) -> bool:
    """Report whether some layers keep a state, which a hit needs at its end."""
    return any(keeps_state(group) for group in kv_cache_config.kv_cache_groups)


def uses_drafts(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Report whether pages have layers of a draft head that reads ahead (EAGLE, MTP).

    What such a layer keeps for a token depends on the token after it. A draft model of its own
    reads no further than its token, so that its layers are like all others.
    """
    if any(getattr(group, "is_eagle_group", False) for group in kv_cache_config.kv_cache_groups):
        return True
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", None) or speculative.use_eagle
    return drops()


def draft_lag(vllm_config: Any) -> int:
    """Return for how many computed tokens, the last ones, draft layers are not final yet.

    Of several MTP modules in a row, each reads one token further ahead than the one before it. What
    it reads beyond the sampled token is a guess, which the next step replaces.
    """
    ahead = getattr(vllm_config, "num_prefill_lookahead_tokens", None)
    if ahead is None:  # before vLLM 0.32
        speculative = vllm_config.speculative_config
        several = getattr(speculative, "use_multi_module_mtp", None)
        ahead = speculative.num_speculative_tokens if several is not None and several() else 0
    return max(0, ahead - 1)


def lookahead_tokens(vllm_config: Any) -> int:
    """Return how many tokens after its block vLLM's block hash covers, for draft layers.

    vLLM before 0.33 has no such hashes. A block has no hash before these tokens are known.
    """
    return getattr(vllm_config, "num_hash_lookahead_tokens", 0)


def geometry(config: Config, vllm_config: Any, kv_cache_config: Any) -> tuple[Geometry, str | None]:
    """Page and chunk sizes, and a warning if chunk_tokens had to give way.

    A chunk is no longer than the shortest sliding window: when its last page is full, vLLM still
    has the blocks of its first, so that it can be stored whole. With states a chunk is one page: a
    state's page is a chunk of its own, at any place.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    page_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    if page_tokens % hash_tokens:
        raise ValueError(f"block of {page_tokens} tokens, but hashes of {hash_tokens}")
    pages, warning = config.pages_per_chunk(page_tokens)
    windows = [
        tokens for group in kv_cache_config.kv_cache_groups if (tokens := window_tokens(group))
    ]
    if windows:
        pages = max(1, min(pages, (min(windows) - 1) // page_tokens))
    if has_states(kv_cache_config):
        pages, warning = 1, None
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return (
        Geometry(page_tokens, pages, _DIGEST_BYTES[algorithm], page_tokens // hash_tokens),
        warning,
    )


def hash_warning(vllm_config: Any) -> str | None:
    """Return a warning if no other process, not even this one restarted, can hash alike."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm in _NON_CRYPTOGRAPHIC and os.environ.get("PYTHONHASHSEED") is None:
        return (
            f"prefix_caching_hash_algo={algorithm} starts from a random seed in every process, so"
            " nothing stored can be found by another instance or after a restart; use"
            " --prefix-caching-hash-algo sha256_cbor, or set PYTHONHASHSEED to the same value"
            " everywhere"
        )
    return None


def replicas(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many consecutive ranks hold the very same pages; 1 where that is not certain.

    Both roles of one engine compute the same. With decode context parallelism, ranks in a row have
    different tokens. With prefill context parallelism alone, each has all of them.
    """
    where, heads = world(vllm_config), same_heads(vllm_config, kv_cache_config)
    if dcp_size(vllm_config) > 1:
        return 1
    if heads == where.tp_size and vllm_config.speculative_config is None:
        return where.stage_size
    return heads


def same_heads(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many consecutive TP ranks have the same KV heads; 1 where that is not certain.

    Both roles of one engine compute the same. For layers that are not split by heads (MLA) vLLM
    itself knows, for all layers together, but not with decode context parallelism. For KV heads
    that are too few for the ranks it does not. These cases are found here, for models whose layers
    are known to be all alike.
    """
    tp = vllm_config.parallel_config.tensor_parallel_size
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return 1
    told = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if (
        dcp_size(vllm_config) > 1
        and vllm_config.model_config.use_mla
        and vllm_config.speculative_config is None
        and not has_states(kv_cache_config)
    ):
        told = tp
    if told == 1 and (heads := _plain_heads(vllm_config, kv_cache_config)):
        told = tp // heads if tp % heads == 0 else 1
    return told if told > 1 and tp % told == 0 else 1


def _plain_heads(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many KV heads every layer has in all; 0 where that is not certain."""
    model = vllm_config.model_config
    if getattr(model, "use_mla", True) or vllm_config.speculative_config is not None:
        return 0  # a draft model has heads of its own
    if model.architecture not in _PLAIN_HEADS or _plain(getattr(model, "model_impl", "")) not in (
        "auto",
        "vllm",
    ):
        return 0
    if getattr(model, "using_transformers_backend", lambda: True)():
        return 0
    if getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", {}) is not None:
        return 0
    heads = getattr(model.hf_text_config, "num_key_value_heads", None)
    if not isinstance(heads, int) or heads < 1 or heads != model.get_total_num_kv_heads():
        return 0
    for group in kv_cache_config.kv_cache_groups:
        for spec in specs_of(group):
            if (
                type(spec).__name__ not in ("FullAttentionSpec", "SlidingWindowSpec")
                or spec.num_kv_heads != 1
            ):
                return 0
            if getattr(spec, "max_tp_shards", None) not in (None, heads):
                return 0
    return heads


def space_fields(
    vllm_config: Any,
    place: int,
    pp_rank: int,
    *,
    heads: int,
    engine_id: str,
    geometry: Geometry,
) -> dict[str, str]:
    """Return the fields that either role of ``engine_id`` declares for one rank: that with this
    place in its stage of the pipeline.

    heads is what same_heads returns. Both roles of one engine compute equal fields, and so do ranks
    that hold the same pages. Keys and values are short strings (values at most 512 bytes; longer
    ones are replaced by a digest).
    """
    from vllm import __version__ as vllm_version

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    where, dcp = world(vllm_config), dcp_size(vllm_config)
    pcp_rank, tp_rank = divmod(place, where.tp_size)
    load = vllm_config.load_config
    load_format = _plain(getattr(load, "load_format", "auto"))

    fields = {
        "model": _model_name(model.model),
        "revision": str(model.revision),
        "weights": _weights_identity(model, load_format),
        "overrides": _digest_of(getattr(model, "hf_overrides", None)),
        "multimodal": _inputs(model),
        "runner": _plain(getattr(model, "runner_type", "")),
        "implementation": _plain(getattr(model, "model_impl", "auto")),
        "disable_sliding_window": str(getattr(model, "disable_sliding_window", False)),
        "rope_length": _rope_length(model),
        "dtype": str(model.dtype),
        "kv_dtype": _kv_dtype(str(cache.cache_dtype), engine_id),
        "kv_dtype_skip_layers": ",".join(
            map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ())
        ),
        "quantization": str(model.quantization),
        "kv_scales": "checkpoint",
        "draft": _draft(vllm_config),
        "tp": str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
        "tp_shard": f"{tp_rank // heads}/{where.tp_size // heads}",
        "pp_rank": str(pp_rank),
        "hash": cache.prefix_caching_hash_algo,
        "none_hash": _none_hash(cache.prefix_caching_hash_algo, engine_id),
        "hash_keys": _key_format(cache.prefix_caching_hash_algo, lookahead_tokens(vllm_config)),
        "vllm": ".".join(vllm_version.split(".")[:2]),
    }
    if where.pcp_size > 1:
        fields["pcp"] = str(where.pcp_size)
    if dcp > 1:  # its groups go along the ranks of PCP, then along those of TP
        fields["dcp_shard"] = f"{(tp_rank * where.pcp_size + pcp_rank) % dcp}/{dcp}"
    if geometry.hashes_per_page > 1:  # else one block, of as many tokens as the page
        fields["hash_tokens"] = str(geometry.page_tokens // geometry.hashes_per_page)
    if getattr(cache, "calculate_kv_scales", False):
        # Scales measured on the first batch differ from run to run.
        fields["kv_scales"] = f"engine:{engine_id}"
    return {
        key: value if len(value.encode()) <= _FIELD_BYTES else _digest_of(value)
        for key, value in fields.items()
    }


def with_epoch(fields: Mapping[str, str], epoch: str) -> dict[str, str]:
    """Return the fields of a space with those of an epoch of its weights.

    Without a name the epoch is that of the weights that the field "weights" names.
    """
    return {**fields, "weights_epoch": epoch} if epoch else dict(fields)


def _plain(value: object) -> str:
    """Return an enum's value, else the value, as text without addresses."""
    return str(getattr(value, "value", value))


def _model_name(model: str) -> str:
    return os.path.realpath(model) if os.path.isdir(model) else str(model)


def _weights_identity(model: Any, load_format: str) -> str:
    """Return what tells two sets of weights under one name apart, as far as that is cheap.

    Of a local directory, the names, sizes and times of its weight files and the bytes of its
    configurations. Of a hub model, the commit that was resolved.
    """
    if load_format == "dummy":
        return f"dummy:{getattr(model, 'seed', None)}"
    path = Path(model.model)
    if path.is_dir():
        seen = hashlib.sha256()
        for entry in sorted(path.iterdir()):
            if entry.name.endswith(_WEIGHT_SUFFIXES):
                status = entry.stat()
                seen.update(f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            elif entry.name in ("config.json", "params.json", "hf_quant_config.json"):
                seen.update(f"{entry.name}\0".encode() + entry.read_bytes())
        return f"files:{seen.hexdigest()[:32]}"
    if path.is_file():
        status = path.stat()
        return f"file:{status.st_size}:{status.st_mtime_ns}"
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    return f"commit:{commit}"


def _kv_dtype(name: str, engine_id: str) -> str:
    """Return the data type of the KV cache, and of a plug-in's type, which plug-in that is.

    From 0.33 on plug-ins may bring types of their own, or replace vLLM's. Their name does not tell
    two of them apart, nor two releases of one.
    """
    settings = importlib.import_module("vllm.config.cache")
    find = getattr(settings, "get_kv_cache_dtype_handler", None)
    handler = find(name) if find is not None else None
    if handler is None:
        return name
    return f"{name} {_release_of(type(handler)) or f'engine:{engine_id}'}"


def _release_of(cls: type) -> str:
    """Return a class with the release of the package that it is from.

    That is a digest of all that the package has installed. Empty if the class is from no package,
    or from one that is installed as editable: its files change without a trace.
    """
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    names = importlib.metadata.packages_distributions().get(cls.__module__.partition(".")[0], ())
    for name in names:
        package = importlib.metadata.distribution(name)
        files = [file for file in package.files or () if file.hash is not None]
        places = {os.path.realpath(file.locate()) for file in files}
        if path is None or os.path.realpath(path) not in places:
            continue
        # Scripts have the path of the interpreter in them, and lie outside of the package's place.
        known = sorted(f"{file} {file.hash}" for file in files if not str(file).startswith(".."))
        digest = hashlib.sha256("\n".join(known).encode()).hexdigest()[:32]
        return f"{cls.__module__}.{cls.__qualname__} of {name} {package.version} {digest}"
    return ""


def _rope_length(model: Any) -> str:
    """Return the context length where a rope that depends on it is used, else empty."""
    text = getattr(model, "hf_text_config", None)
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(text, name, None)
        if isinstance(rope, Mapping) and "longrope" in json.dumps(rope, default=str):
            return str(model.max_model_len)
    return ""


def _inputs(model: Any) -> str:
    """Return what changes how a multimodal model encodes its inputs; empty for other models."""
    config = getattr(model, "multimodal_config", None)
    if config is None:
        return ""
    return _digest_of(
        {
            name: _plain(value)
            for name, value in vars(config).items()
            if name not in _HARMLESS_INPUTS
        }
    )


def _draft(vllm_config: Any) -> str:
    """Return the draft model whose layers lie in the same pages; empty if there is none."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return ""
    method = _plain(getattr(speculative, "method", ""))
    if method in _DRAFTS_WITHOUT_KV:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    parts = [method]
    if draft is not None:
        parts += [_model_name(draft.model), str(draft.revision), _weights_identity(draft, "auto")]
    return "|".join(parts)


def _none_hash(algorithm: str, engine_id: str) -> str:
    """Return a digest of the seed that all block hashes start from.

    vLLM sets its NONE_HASH in the scheduler's process only, after the connector is made. So it is
    derived here the way vLLM derives it.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    function = get_hash_fn_by_name(algorithm)
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    fixed = os.environ.get("PYTHONHASHSEED") is not None or algorithm not in _NON_CRYPTOGRAPHIC
    if resolve is None or not fixed:
        return f"engine:{engine_id}"
    return function(resolve(function)).hex()


def _key_format(algorithm: str, lookahead: int) -> str:
    """Return how vLLM feeds a block to the hash: the form of its extra keys, found by a trial.

    The form changed between versions without a name of its own. Algorithms that hash pickles depend
    on Python's version as well. lookahead is how many tokens after its block a hash covers.
    """
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    class Lora:
        lora_name = "name"
        lora_path = "path"
        adapter_id = lora_int_id = 1
        name = "name"

    class Probe:
        request_id = "probe"
        lora_request = Lora()
        cache_salt = "salt"
        mm_features = ()
        prompt_embeds = None

    try:
        keys = repr(generate_block_hash_extra_keys(Probe(), 0, 1, 0)[0])  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        from vllm import __version__

        keys = f"vllm {__version__}"
    if lookahead:
        keys += f" lookahead {lookahead}"
    if not algorithm.endswith("_cbor"):
        keys += f" python {sys.version_info.major}.{sys.version_info.minor}"
    return hashlib.sha256(keys.encode()).hexdigest()[:32]


def _digest_of(value: object) -> str:
    """Return a digest of plain data; a function counts by its name. Empty for nothing."""
    if not value:
        return ""
    text = json.dumps(
        value, sort_keys=True, default=lambda o: getattr(o, "__qualname__", type(o).__qualname__)
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]
