"""What names a space, from configurations of the real vLLM."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lookaside import space
from lookaside.config import parse
from scheduling import (
    BLOCK,
    full_attention,
    make_config,
    make_kv_config,
    needs_lookahead,
    needs_whole_failures,
    sliding_window,
    sliding_window_mla,
    state,
    use_lookahead,
    write_model,
)
from vllm.config.multimodal import MultiModalConfig

GEOMETRY = space.Geometry(BLOCK, 4, 32, 1)


def fields(config, tp_rank=0, pp_rank=0, engine_id="e"):
    return space.space_fields(
        config, tp_rank, pp_rank, heads=1, engine_id=engine_id, geometry=GEOMETRY
    )


def differing(one, other):
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def test_blocks_of_a_page_are_named_where_there_are_several(model):
    config = make_config(model)
    several = space.Geometry(4 * BLOCK, 4, 32, 4)
    named = space.space_fields(config, 0, 0, heads=1, engine_id="e", geometry=several)
    assert named == {**fields(config), "hash_tokens": str(BLOCK)}


def test_two_engines_of_one_model_agree(model):
    one, other = (
        fields(make_config(model), engine_id="a"),
        fields(make_config(model), engine_id="b"),
    )
    assert one == other
    assert len(one) <= 64
    assert all(key and len(key) <= 64 and len(value.encode()) <= 512 for key, value in one.items())


@pytest.mark.parametrize(
    "kwargs, changed",
    [
        ({"hash_algo": "sha256"}, {"hash", "none_hash", "hash_keys"}),
        ({"tp": 2}, {"tp", "tp_shard"}),
        ({"pp": 2}, {"pp"}),
    ],
)
def test_what_differs_is_named(model, kwargs, changed):
    assert differing(fields(make_config(model)), fields(make_config(model, **kwargs))) == changed


@pytest.mark.parametrize(
    "change, changed",
    [
        (lambda c: setattr(c.cache_config, "cache_dtype", "fp8"), {"kv_dtype"}),
        (lambda c: setattr(c.model_config, "dtype", "bfloat16"), {"dtype"}),
        (lambda c: setattr(c.model_config, "revision", "v2"), {"revision"}),
        (lambda c: setattr(c.model_config, "quantization", "fp8"), {"quantization"}),
        (lambda c: setattr(c.model_config, "hf_overrides", {"rope_theta": 1}), {"overrides"}),
        (lambda c: setattr(c.load_config, "load_format", "dummy"), {"weights"}),
    ],
)
def test_settings_that_change_the_bytes_change_the_space(model, change, changed):
    config = make_config(model)
    before = fields(config)
    change(config)
    assert differing(before, fields(config)) == changed


@needs_lookahead
def test_hashes_over_more_tokens_are_others(model, monkeypatch):
    config = make_config(model)
    seen = [fields(config)]
    assert space.lookahead_tokens(config) == 0  # what vLLM itself says beside a connector
    for lookahead in (1, 2):
        with monkeypatch.context() as patch:
            use_lookahead(patch, lookahead)
            seen.append(fields(config))
            assert differing(seen[0], seen[-1]) == {"hash_keys"}
    assert len({each["hash_keys"] for each in seen}) == 3


HANDLER = """
import torch
from vllm.v1.kv_cache_interface import KVQuantMode

class Handler:
    name = "int7"
    def torch_dtype(self): return torch.uint8
    def quant_mode(self): return KVQuantMode.CUSTOM
"""


def install(place: Path, version: str, source: str, editable: bool = False) -> None:
    """A package with a plug-in's type, as an installer leaves it."""
    (place / "int7").mkdir(parents=True)
    (place / "int7" / "__init__.py").write_text(source)
    info = place / f"int7_cache-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: int7-cache\nVersion: {version}\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(source.encode()).digest()).decode().rstrip("=")
    name = "int7_finder.py" if editable else "int7/__init__.py"
    (info / "RECORD").write_text(f"{name},sha256={digest},{len(source)}\n")
    (info / "top_level.txt").write_text("int7\n")


@pytest.fixture
def plug_in(monkeypatch, tmp_path):
    """Makes a plug-in's type known to vLLM, from a package that is installed anew each time."""
    pytest.importorskip("vllm.config.cache")
    from vllm.config import cache

    if not hasattr(cache, "get_kv_cache_dtype_handler"):
        pytest.skip("no types of plug-ins before vLLM 0.33")
    made = itertools.count()

    def use(version: str, source: str = HANDLER, editable: bool = False) -> None:
        place = tmp_path / str(next(made))
        install(place, version, source, editable)
        monkeypatch.syspath_prepend(str(place))
        sys.modules.pop("int7", None)
        importlib.invalidate_caches()
        handler = importlib.import_module("int7").Handler()
        monkeypatch.setitem(cache._KV_CACHE_DTYPE_HANDLERS, "int7", handler)

    yield use
    sys.modules.pop("int7", None)


def test_types_of_plug_ins_are_told_apart(model, plug_in):
    config = make_config(model)
    plain = fields(config)
    config.cache_config.cache_dtype = "int7"
    assert fields(config)["kv_dtype"] == "int7"  # nobody has brought it
    plug_in("1.0")
    first = fields(config)
    assert differing(plain, first) == {"kv_dtype"} and "int7-cache 1.0" in first["kv_dtype"]
    assert fields(config, engine_id="other") == first
    plug_in("1.0")
    assert fields(config) == first  # installed in another place
    plug_in("1.1")
    assert differing(first, fields(config)) == {"kv_dtype"}
    plug_in("1.0", HANDLER + "SCALE = 2")
    assert differing(first, fields(config)) == {"kv_dtype"}
    plug_in("1.0", editable=True)
    one, other = fields(config), fields(config, engine_id="other")
    assert differing(one, other) == {"kv_dtype"} and "engine:e" in one["kv_dtype"]


def test_how_images_and_videos_are_encoded_changes_the_space(model):
    config = make_config(model)
    assert fields(config)["multimodal"] == ""
    config.model_config.multimodal_config = MultiModalConfig()
    before = fields(config)
    config.model_config.multimodal_config = MultiModalConfig(
        mm_processor_cache_gb=1, mm_processor_kwargs={"size": 1}
    )
    assert fields(config) == before
    config.model_config.multimodal_config = MultiModalConfig(video_pruning_rate=0.5)
    assert differing(before, fields(config)) == {"multimodal"}


def test_ranks_do_not_meet(model):
    config = make_config(model, tp=2, pp=2)
    seen = {tuple(sorted(fields(config, t, p).items())) for t in range(2) for p in range(2)}
    assert len(seen) == 4


def one_head(spec: Any = None) -> Any:
    """What vLLM says of a layer whose KV heads are no more than the ranks."""
    return replace(spec or full_attention(), num_kv_heads=1)


def test_ranks_that_hold_the_same_bytes_do(model):
    """Two KV heads: with four ranks, the first two have the first."""
    config, kv_config = (
        make_config(model, tp=4),
        make_kv_config(4, [one_head(), one_head(sliding_window(64))]),
    )
    assert space.replicas(config, kv_config) == 2
    shards = [
        space.space_fields(config, rank, 0, heads=2, engine_id="e", geometry=GEOMETRY)
        for rank in range(4)
    ]
    assert [each["tp_shard"] for each in shards] == ["0/2", "0/2", "1/2", "1/2"]
    assert shards[0] == shards[1] and shards[2] == shards[3]
    # Where only one of the roles knew, they would not agree, and nothing would be shared.
    assert differing(shards[0], fields(config, 0)) == {"tp_shard"}


@pytest.mark.parametrize(("tp", "want"), [(1, 1), (2, 1), (4, 2), (8, 4), (3, 1), (6, 3)])
def test_how_many_ranks_have_a_head(model, tp, want):
    config = make_config(model)
    config.parallel_config.tensor_parallel_size = tp
    assert space.replicas(config, make_kv_config(4, [one_head()])) == want


def test_mla_is_the_same_on_every_rank(model):
    """As far as vLLM says so of all layers together."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    config = make_config(model, tp=4)
    mla = MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=full_attention().dtype
    )
    assert space.replicas(config, make_kv_config(4, [mla])) == 1  # nobody says so
    if not can_shard(mla):
        pytest.skip("this vLLM does not say")
    try:
        from vllm.v1.core.kv_cache_planning import kv_cache_groups_tp_replicas  # type: ignore[import-not-found]
    except ImportError:  # before 0.33
        from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas
    mla = replace(mla, max_tp_shards=1)
    for specs, want in (
        ([mla], 4),
        ([mla, replace(mla, max_tp_shards=2)], 2),
        ([mla, full_attention()], 1),
    ):
        kv_config = make_kv_config(4, specs)
        kv_config.kv_tp_replicas = kv_cache_groups_tp_replicas(kv_config.kv_cache_groups, 4)
        assert space.replicas(config, kv_config) == want


def can_shard(spec: Any) -> bool:
    """Whether vLLM says of a layer among how many ranks it can be divided: from 0.31 on."""
    return hasattr(spec, "max_tp_shards")


@pytest.mark.parametrize(
    "change",
    [
        lambda c, k: setattr(c.model_config, "_architecture", "MiMoV2ForCausalLM"),
        lambda c, k: setattr(
            c.model_config.hf_text_config, "num_key_value_heads", 1
        ),  # not what vLLM goes by
        lambda c, k: setattr(c.model_config.model_arch_config, "per_layer_overrides", [{}]),
        lambda c, k: setattr(c.model_config, "model_impl", "transformers"),
        lambda c, k: setattr(c.cache_config, "calculate_kv_scales", True),
        lambda c, k: setattr(c.parallel_config, "decode_context_parallel_size", 2),
        lambda c, k: setattr(c, "speculative_config", SimpleNamespace()),
        lambda c, k: k.kv_cache_groups.append(
            make_kv_config(4, [full_attention()]).kv_cache_groups[0]
        ),
        pytest.param(
            lambda c, k: setattr(
                k.kv_cache_groups[0], "kv_cache_spec", replace(one_head(), max_tp_shards=4)
            ),
            marks=pytest.mark.skipif(
                not can_shard(full_attention()), reason="this vLLM does not say"
            ),
        ),
    ],
)
def test_ranks_share_nothing_where_it_is_not_certain(model, change):
    config, kv_config = make_config(model, tp=4), make_kv_config(4, [one_head()])
    config.model_config.model_arch_config = copy.copy(config.model_config.model_arch_config)
    assert space.replicas(config, kv_config) == 2
    change(config, kv_config)
    assert space.replicas(config, kv_config) == 1


def test_new_weights_under_the_old_name(tmp_path):
    model = write_model(tmp_path / "m")
    weights = model / "model.safetensors"
    weights.write_bytes(b"one")
    before = fields(make_config(model))
    assert fields(make_config(model)) == before
    weights.write_bytes(b"two!")
    assert differing(before, fields(make_config(model))) == {"weights"}
    weights.write_bytes(b"one")
    os.utime(weights, ns=(1, 1))
    assert differing(before, fields(make_config(model))) == {"weights"}


def test_a_link_to_the_model_is_the_model(model, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(model)
    assert fields(make_config(link)) == fields(make_config(model))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_seed_is_vllms_own(model, algorithm, monkeypatch):
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    config = make_config(model, hash_algo=algorithm)
    for seed in (None, "7"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        assert fields(config)["none_hash"] == kv_cache_utils.NONE_HASH.hex()
        assert space.hash_warning(config) is None


def test_a_random_seed_is_the_engines_own_and_said(model, monkeypatch):
    config = make_config(model)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert "PYTHONHASHSEED" in str(space.hash_warning(config))
    assert differing(fields(config, engine_id="a"), fields(config, engine_id="b")) == {"none_hash"}
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert space.hash_warning(config) is None


def test_scales_measured_at_run_time_are_the_engines_own(model):
    config = SimpleNamespace(**vars(make_config(model)))
    cache = vars(config.cache_config)
    config.cache_config = SimpleNamespace(**{**cache, "calculate_kv_scales": True})
    assert differing(fields(config, engine_id="a"), fields(config, engine_id="b")) == {"kv_scales"}


def test_the_form_of_the_keys_is_part_of_it(model, monkeypatch):
    from vllm.v1.core import kv_cache_utils

    config = make_config(model)
    before = fields(config)
    monkeypatch.setattr(
        kv_cache_utils, "generate_block_hash_extra_keys", lambda *a: (("salt", "name"), 0)
    )
    assert differing(before, fields(config)) == {"hash_keys"}


def test_long_values_are_digested(model):
    config = make_config(model)
    config.model_config.revision = "r" * 600
    one = fields(config)["revision"]
    config.model_config.revision = "r" * 601
    assert len(one) == 32 and fields(config)["revision"] != one


def test_geometry(model):
    config = make_config(model)
    kv_config = make_kv_config(10)
    got, warning = space.geometry(parse({"lookaside.chunk_tokens": 100}), config, kv_config)
    assert got == (BLOCK, 6, 32, 1) and warning is not None


def test_world_names_the_data_parallel_engine(model):
    config = make_config(model, tp=2, pp=3)
    config.parallel_config.data_parallel_index = 4
    where = space.world(config)
    assert where == (2, 1, 3, 4) and where.ranks == 6


@needs_whole_failures
def test_models_that_can_be_served(model):
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

    config, dtype = make_config(model), full_attention().dtype
    mla = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=dtype)
    mixed = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"a": full_attention(), "b": full_attention()}
    )
    for specs in (
        [full_attention()],
        [mla],
        [mixed],
        [sliding_window(64)],
        [full_attention(), sliding_window(64)],
        [full_attention(64), sliding_window(64), sliding_window(200, 32)],
        [replace(sliding_window(64), extra_retained_tokens=3)],
        [mla, sliding_window_mla(64)],
        [state(), full_attention(), state()],
        [state(drafts=3), full_attention()],
    ):
        assert space.idle_reason(config, make_kv_config(4, specs)) is None


def test_drafts_without_kv_share_pages(model):
    """With those that do not speculate; a draft model has layers in the pages."""
    plain, found = fields(make_config(model)), fields(make_config(model, drafts="ngram"))
    assert plain == found
    drafted = fields(make_config(model, drafts="draft_model"))
    assert differing(plain, drafted) == {"draft"} and str(model) in drafted["draft"]


def test_what_draft_layers_read_ahead(model):
    for drafts, modules, lag, ahead in (
        ("", 1, 0, False),
        ("ngram", 1, 0, False),
        ("draft_model", 1, 0, False),
        ("eagle", 1, 0, True),
        ("mtp", 1, 0, True),
        ("mtp", 2, 2, True),  # as many modules as there are, but three tokens
    ):
        config = make_config(model, drafts=drafts, modules=modules)
        assert space.draft_lag(config) == lag
        assert space.uses_drafts(config, make_kv_config(4)) is ahead
    kept = make_config(model, drafts="eagle")
    kept.speculative_config.disable_eagle_block_drop = True
    if hasattr(kept.speculative_config, "use_eagle_block_drop"):
        assert not space.uses_drafts(kept, make_kv_config(4))
    assert space.uses_drafts(make_config(model), make_kv_config(4, eagle=True))


def test_ranks_with_states_are_not_replicas(model):
    """Each has heads of its own there, unless vLLM says that all layers are alike."""
    config, one = make_config(model, tp=4), replace(full_attention(), num_kv_heads=1)
    assert space.replicas(config, make_kv_config(4, [one])) == 2
    assert space.replicas(config, make_kv_config(4, [one, state()])) == 1


@pytest.mark.parametrize(
    "specs, want",
    [
        ([full_attention(), state()], (BLOCK, 1, 32, 1)),  # a state's page is a chunk
        ([sliding_window(40)], (BLOCK, 2, 32, 1)),  # a chunk is no longer than the window
        ([sliding_window(10)], (BLOCK, 1, 32, 1)),
        ([sliding_window(4096)], (BLOCK, 4, 32, 1)),
        ([full_attention(64), sliding_window(400), sliding_window(80, 32)], (64, 1, 32, 4)),
    ],
)
def test_geometry_of_windows(model, specs, want):
    config = make_config(model)
    got, _ = space.geometry(
        parse({"lookaside.chunk_tokens": 64}), config, make_kv_config(10, specs)
    )
    assert got == want


@needs_whole_failures
def test_models_that_cannot(model):
    from vllm.v1.kv_cache_interface import MambaSpec, RSWASpec

    config, dtype = make_config(model), full_attention().dtype
    rows: list[tuple[list[Any], str]] = [
        (
            [full_attention(), MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(dtype,))],
            "align only, not none",
        ),
        ([state()], "states alone"),
        (
            [RSWASpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=dtype, rswa_window=64)],
            "RSWASpec",
        ),
        ([sliding_window(1)], "one token only"),
        ([replace(sliding_window_mla(64), model_version="deepseek_v4")], "compresses"),
        ([replace(sliding_window_mla(64), tokens_per_state=4)], "compresses"),
        ([replace(full_attention(), non_causal=True), sliding_window(64)], "not causal"),
    ]
    for specs, word in rows:
        assert word in str(space.idle_reason(config, make_kv_config(4, specs)))
    host = make_kv_config(4, [full_attention(), sliding_window(64)])
    host.kv_cache_groups[1].host_resident = True
    assert "transferable" in str(space.idle_reason(config, host))
    assert space.idle_reason(config, make_kv_config(4, [])) is not None


def test_a_vllm_that_is_too_old_is_named(monkeypatch):
    from lookaside import connector
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    monkeypatch.delattr(base, "SupportsHMA")
    source = Path(connector.__file__).read_text()
    with pytest.raises(ImportError, match=r"needs vLLM 0\.29 to 0\.33; found vLLM"):
        exec(compile(source, connector.__file__, "exec"), {"__name__": "another"})  # noqa: S102 - our own
