"""Page layouts, against tensors that vLLM's own code allocates where vLLM is installed."""

import importlib.util
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lookaside.copies import ABSENT, Plans  # noqa: E402
from lookaside.devices import make_copies  # noqa: E402
from lookaside.layout import PageLayout, Segment, UnsupportedLayout, build_layout  # noqa: E402

SEED = int(os.environ.get("LOOKASIDE_TEST_SEED", "77"))
BLOCKS = 11

HAS_VLLM = importlib.util.find_spec("vllm") is not None
if HAS_VLLM:
    try:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
    except ImportError:  # before vLLM 0.33
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

needs_vllm = pytest.mark.skipif(
    not HAS_VLLM, reason="vLLM is not installed: its allocation cannot be checked"
)


class Cache:
    """A KV cache as vLLM places and allocates it for one group of layers."""

    def __init__(
        self,
        layout: str,
        *groups: dict[str, Any],
        kernel_tokens: int | None = None,
        blocks: int = BLOCKS,
    ) -> None:
        made = []
        for specs in groups:
            distinct = set(specs.values())
            spec = (
                distinct.pop() if len(distinct) == 1 else UniformTypeKVCacheSpecs.from_specs(specs)
            )
            made.append(KVCacheGroupSpec(list(specs), spec))
        self.vllm = SimpleNamespace(
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
                num_gpu_blocks_override=blocks,
                prefix_cache_retention_interval=None,
                kv_cache_layout=layout,
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
        )
        memory = 1 << 34
        self.config = get_kv_cache_config_from_groups(self.vllm, made, memory)
        self.config.kv_cache_layout = layout
        sizes = None if kernel_tokens is None else [kernel_tokens]
        self.tensors = allocate_kv_cache(
            self.config, torch.device("cpu"), KVCacheLayout[layout], sizes
        )
        self.names = [name for specs in groups for name in specs]

    def build(self) -> PageLayout:
        return build_layout(self.config, self.tensors, self.vllm)

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, padding included."""
        storage = next(iter(self.tensors.values())).untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8).set_(storage)
        raw.copy_(
            torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(raw), np.uint8))
        )

    def block(self, name: str, block: int) -> Any:
        """One layer's part of one block, by torch indexing alone, as bytes in logical order."""
        tensor = self.tensors[name]
        ratio = tensor.shape[0] // self.config.num_blocks
        return tensor[block * ratio : (block + 1) * ratio].clone().view(torch.uint8)


def full(
    tokens: int, heads: int = 3, size: int = 32, dtype: Any = torch.bfloat16, **more: Any
) -> Any:
    return FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=size, dtype=dtype, **more
    )


def mla(tokens: int, size: int = 576, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=size, dtype=dtype, **more)


def state(tokens: int, **more: Any) -> Any:
    return MambaSpec(
        block_size=tokens,
        shapes=((3, 5), (4, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=full(tokens).page_size_bytes,
        mamba_cache_mode="align",
        **more,
    )


def layers(spec: Any, count: int = 4) -> dict[str, Any]:
    return {f"model.layers.{i}.attn": spec for i in range(count)}


def cases() -> list[Any]:
    if allocate_kv_cache is None:
        return []
    # name, layout, specs, tokens of a kernel block, runs a block
    made = []
    for layout, runs in (
        ("LBHNC", 4),
        ("LBNHC", 4),
        ("BLHNC", 1),
        ("BLNHC", 1),
        ("LHBNC", 12),
        ("BHLNC", 1),
    ):
        made.append((f"full-{layout}", layout, layers(full(16)), None, runs))
        made.append((f"full128-{layout}", layout, layers(full(128)), None, runs))
    for layout, runs in (("LBHNC", 4), ("LBNHC", 4), ("BLHNC", 1), ("LHBNC", 4)):
        made.append((f"mla-{layout}", layout, layers(mla(64)), None, runs))
    for layout in ("LBHNC", "LBNHC"):
        made.append((f"split-{layout}", layout, layers(full(128)), 32, 4))
        made.append((f"split-mla-{layout}", layout, layers(mla(128)), 64, 4))
        made.append((f"padded-{layout}", layout, layers(full(16, page_size_padded=8192)), None, 4))
        made.append((f"fp8-{layout}", layout, layers(full(16, dtype=torch.uint8)), None, 4))
        made.append((f"one-head-{layout}", layout, layers(full(16, heads=1)), None, 4))
    made.append(
        ("float32", "LBHNC", layers(full(128, heads=4, size=64, dtype=torch.float32)), None, 4)
    )
    made.append(("odd-head", "LBHNC", layers(full(16, heads=5, size=40)), None, 4))
    made.append(("padded-BLHNC", "BLHNC", layers(full(16, page_size_padded=8192)), None, 4))
    made.append(("mla-padded", "LBHNC", layers(mla(16, size=100, alignment=576)), None, 4))
    two = {
        "a.attn": mla(64),
        "b.attn": mla(64, size=128),
        "c.attn": mla(64),
        "d.attn": mla(64, size=128),
    }
    made.append(("two-sizes-LBHNC", "LBHNC", two, None, 4))
    made.append(("two-sizes-BLHNC", "BLHNC", two, None, 1))
    wide = {"a.attn": full(16, 2), "b.attn": full(16, 2), "c.attn": full(16, 6)}
    made.append(("two-heads-LBNHC", "LBNHC", wide, None, 3))
    return [pytest.param(*case[1:], id=case[0]) for case in made]


@needs_vllm
@pytest.mark.parametrize(("layout", "specs", "kernel_tokens", "runs"), cases())
def test_pages_round_trip(
    layout: str, specs: dict[str, Any], kernel_tokens: int | None, runs: int
) -> None:
    """Gather random blocks, scatter them to others: torch sees there what it saw here, and nothing
    else moved."""
    cache = Cache(layout, specs, kernel_tokens=kernel_tokens)
    page = cache.build()
    assert len(page.segments) == runs
    assert page.num_blocks == BLOCKS
    assert page.page_tokens == next(iter(specs.values())).block_size
    assert page.page_bytes == sum(spec.unpadded_page_size_bytes for spec in specs.values())
    assert sum(page.column_bytes) == page.page_bytes and Plans(page)

    cache.fill(SEED)
    # In one process and the next: the layout must not depend on where the allocation lies.
    again = Cache(layout, specs, kernel_tokens=kernel_tokens)
    again.fill(SEED + 1)
    assert again.build().description == page.description
    assert [s[1:] for s in again.build().segments] == [s[1:] for s in page.segments]

    rng = np.random.default_rng(SEED)
    order = rng.permutation(BLOCKS)
    source, target = order[:5], rng.permutation(BLOCKS)[:5]
    arena = np.zeros((5, page.page_bytes), np.uint8)
    addresses = np.uint64(arena.ctypes.data) + np.arange(5, dtype=np.uint64) * np.uint64(
        page.page_bytes
    )
    was = {(name, b): cache.block(name, b) for name in cache.names for b in range(BLOCKS)}
    theirs = {(name, b): again.block(name, b) for name in cache.names for b in range(BLOCKS)}
    out, back = make_copies(page, "cpu"), make_copies(again.build(), torch.device("cpu"))
    for copies in (out, back):
        copies.attach(0, arena.ctypes.data, arena.nbytes)
    assert out.gather(source, addresses).error is None
    ticket = back.scatter(target, addresses)
    assert ticket.wait(60) and ticket.error is None
    moved = dict(zip(target.tolist(), source.tolist(), strict=True))
    for name in cache.names:
        for b in range(BLOCKS):
            assert torch.equal(cache.block(name, b), was[name, b])
            want = was[name, moved[b]] if b in moved else theirs[name, b]
            assert torch.equal(again.block(name, b), want), f"{name} block {b}, seed {SEED}"
    for copies in (out, back):
        copies.close()


@needs_vllm
def test_layouts_that_differ_say_so() -> None:
    variants = [
        ("LBHNC", layers(full(16)), None),
        ("LBNHC", layers(full(16)), None),
        ("BLHNC", layers(full(16)), None),
        ("LBHNC", layers(full(32)), None),
        ("LBHNC", layers(full(32)), 16),
        ("LBHNC", layers(full(16), 5), None),
        ("LBHNC", layers(full(16, heads=6, size=16)), None),
        ("LBHNC", layers(full(16, dtype=torch.float16)), None),
        ("LBHNC", layers(full(16, size=64, dtype=torch.uint8)), None),
        ("LBHNC", layers(mla(16, size=192)), None),
    ]
    descriptions = [
        tuple(sorted(Cache(*variant, kernel_tokens=kernel).build().description.items()))
        for *variant, kernel in variants
    ]
    assert len(set(descriptions)) == len(variants)
    for description in descriptions:
        assert all(len(key) <= 64 and len(value) <= 512 for key, value in description)
    # How many blocks an instance has does not change what is in one.
    assert Cache(*variants[0][:2], blocks=3).build().description == dict(descriptions[0])


@needs_vllm
def test_backend_and_instruction_set_are_told_apart() -> None:
    cache = Cache("LBHNC", layers(full(16)))

    def described(isa: str) -> dict[str, str]:
        backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        layer = SimpleNamespace(isa=isa, get_attn_backend=lambda: backend)
        cache.vllm.compilation_config = SimpleNamespace(
            static_forward_context={name: layer for name in cache.names}
        )
        return cache.build().description

    assert described("amx")["isa"] == "amx" and described("amx")["attention"] == "CPU_ATTN"
    assert described("amx") != described("vec16")


def window(tokens: int, reach: int, heads: int = 3, **more: Any) -> Any:
    return SlidingWindowSpec(
        block_size=tokens,
        num_kv_heads=heads,
        head_size=32,
        dtype=torch.bfloat16,
        sliding_window=reach,
        **more,
    )


def named(prefix: str, spec: Any, count: int = 2) -> dict[str, Any]:
    return {f"{prefix}.{i}.attn": spec for i in range(count)}


def hybrids() -> list[Any]:
    """name, layout, groups, (group, block of the page) of each column, pages in columns."""
    if allocate_kv_cache is None:
        return []
    pair = (named("f", full(16)), named("w", window(16, 40)), named("v", window(16, 40)))
    unlike = (
        named("f", full(64, heads=3)),
        named("w", window(16, 20, heads=12)),
        named("v", window(32, 90, heads=6)),
    )
    rows = []
    for layout in ("LBHNC", "LBNHC", "BLHNC"):
        rows.append((f"pair-{layout}", layout, pair, [(0, 0), (1, 0), (2, 0)]))
        rows.append((f"unlike-{layout}", layout, unlike, [(0, 0), (1, 2), (1, 3), (2, 0), (2, 1)]))
    rows.append(("window-LHBNC", "LHBNC", (named("w", window(16, 40)),), [(0, 0)]))
    rows.append(
        (
            "mla",
            "LBHNC",
            (named("f", mla(64)), named("g", mla(32, size=1152))),
            [(0, 0), (1, 0), (1, 1)],
        )
    )
    return [pytest.param(*row[1:], id=row[0]) for row in rows]


@needs_vllm
@pytest.mark.parametrize(("layout", "groups", "columns"), hybrids())
def test_pages_of_several_groups_round_trip(
    layout: str, groups: Any, columns: list[tuple[int, int]]
) -> None:
    """Each column of a page goes to and comes from blocks of its own group, and what is absent is
    left alone."""
    cache, again = Cache(layout, *groups), Cache(layout, *groups)
    page = cache.build()
    assert page.page_tokens == max(next(iter(specs.values())).block_size for specs in groups)
    sizes = [sum(spec.unpadded_page_size_bytes for spec in specs.values()) for specs in groups]
    assert list(page.column_bytes) == [sizes[group] for group, _ in columns]
    assert page.page_bytes == sum(page.column_bytes)
    assert again.build().description == page.description and "groups" in page.description

    cache.fill(SEED)
    again.fill(SEED + 1)
    rng = np.random.default_rng(SEED)
    pages = BLOCKS // len(columns)
    source = rng.permutation(BLOCKS)[: pages * len(columns)].reshape(pages, len(columns))
    target = rng.permutation(BLOCKS)[: pages * len(columns)].reshape(pages, len(columns))
    arena = np.zeros((pages, page.page_bytes), np.uint8)
    addresses = np.uint64(arena.ctypes.data) + np.arange(pages, dtype=np.uint64) * np.uint64(
        page.page_bytes
    )
    storage = next(iter(again.tensors.values())).untyped_storage()
    theirs = {(name, b): again.block(name, b) for name in again.names for b in range(BLOCKS)}
    out, back = make_copies(page, "cpu"), make_copies(again.build(), "cpu")
    for copies in (out, back):
        copies.attach(0, arena.ctypes.data, arena.nbytes)
    assert out.gather(source, addresses).error is None
    at = 0
    for column, (group, _) in enumerate(columns):
        for row in range(pages):
            part = arena[row, at : at + sizes[group]]
            # Each layer's bytes are there, in some order of runs; the block's own view says which.
            want = np.concatenate(
                [
                    cache.block(name, int(source[row, column])).numpy().ravel()
                    for name in groups[group]
                ]
            )
            assert sorted(part.tolist()) == sorted(want.tolist())
        at += sizes[group]
    partly = target.copy()
    partly[0, 0] = ABSENT
    assert back.scatter(partly, addresses).wait(60)
    written = {int(b): columns[c][0] for (_, c), b in np.ndenumerate(partly) if b != ABSENT}
    came_from = {
        int(t): int(s) for t, s in zip(partly.ravel(), source.ravel(), strict=True) if t != ABSENT
    }
    for group, specs in enumerate(groups):
        for name in specs:
            for b in range(BLOCKS):
                if written.get(b) == group:
                    assert torch.equal(again.block(name, b), cache.block(name, came_from[b])), (
                        f"{name} block {b}"
                    )
                elif b not in written:
                    assert torch.equal(again.block(name, b), theirs[name, b]), (
                        f"{name} block {b} was touched"
                    )
    assert storage.nbytes() > 0
    for wrong in (source[:, :-1], source[:-1], np.zeros((pages, len(columns) + 1), np.int64)):
        assert out.gather(wrong, addresses).error
    for copies in (out, back):
        assert copies.detach(0).wait(60)
        assert copies.gather(source, addresses).error
        copies.close()


@needs_vllm
def test_groups_that_differ_say_so() -> None:
    variants = [
        (named("f", full(16)), named("w", window(16, 40))),
        (named("f", full(16)), named("w", window(16, 41))),
        (named("w", window(16, 40)), named("f", full(16))),
        (named("w", full(16)), named("f", window(16, 40))),
        (named("f", full(16)), named("w", full(16))),
        (named("f", full(16)), named("w", window(16, 40)), named("v", window(16, 40))),
        (named("w", window(16, 40)),),
        (named("w", full(16)),),
    ]
    found = {
        tuple(sorted(Cache("LBHNC", *groups).build().description.items())) for groups in variants
    }
    assert len(found) == len(variants)
    assert all(len(value) <= 512 for description in found for _, value in description)


@needs_vllm
@pytest.mark.skipif(
    HAS_VLLM and not hasattr(MambaSpec, "real_page_size_bytes"),
    reason="idle for such models before vLLM 0.30",
)
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LHBNC"])
def test_states_are_pages_of_their_own(layout: str) -> None:
    """The columns of states come last, and each begins where the page does."""
    cache = Cache(
        layout,
        named("s", state(16)),
        named("f", full(16)),
        named("t", state(16)),
        named("w", window(16, 40)),
    )
    page = cache.build()
    attention = 2 * full(16).page_size_bytes
    kept = 2 * state(16).real_page_size_bytes
    assert page.column_bytes == (attention, attention, kept, kept) and page.states == 2
    assert page.page_bytes == 2 * attention
    first = {s.column: s.page_offset for s in reversed(page.segments)}
    assert first == {0: 0, 1: attention, 2: 0, 3: 0}
    assert page.description["state_isa"] and "MambaSpec" in page.description["groups"]
    small = Cache(layout, named("s", state(16)), named("f", full(16)), named("t", state(16)))
    assert small.build().description != cache.build().description

    copies = make_copies(page, "cpu")
    arena = np.zeros(4 * page.page_bytes, np.uint8)
    copies.attach(1, arena.ctypes.data, arena.nbytes)
    rows = np.array(
        [[1, 2, ABSENT, ABSENT], [ABSENT, ABSENT, 3, ABSENT], [ABSENT, ABSENT, ABSENT, 4]]
    )
    where = arena.ctypes.data + np.arange(3, dtype=np.uint64) * np.uint64(page.page_bytes)
    cache.fill(1)
    before = {
        name: cache.block(name, block)
        for name, block in (("s.0.attn", 3), ("t.1.attn", 4), ("f.1.attn", 1), ("w.0.attn", 2))
    }
    assert copies.gather(rows, where).error is None
    assert not arena[page.page_bytes + kept : 2 * page.page_bytes].any(), (
        "a state's page has nothing else"
    )
    cache.fill(2)
    rows = np.where(rows == ABSENT, ABSENT, rows + 4)
    ticket = copies.scatter(rows, where)
    assert ticket.wait(30) and ticket.error is None
    for name, block in (("s.0.attn", 3), ("t.1.attn", 4), ("f.1.attn", 1), ("w.0.attn", 2)):
        assert torch.equal(cache.block(name, block + 4), before[name]), name
    copies.close()


@needs_vllm
def test_what_is_not_attention_to_a_prefix_is_unsupported() -> None:
    mamba = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.bfloat16,))
    tensor = KVCacheTensor(size=1, layers=["a"], layer_stride=1, block_stride=1)
    host = KVCacheGroupSpec(["a"], full(16))
    host.host_resident = True  # a field of it from vLLM 0.30 on
    for groups, kind, word in (
        (
            [KVCacheGroupSpec(["a"], full(16)), KVCacheGroupSpec(["b"], mamba)],
            "attention",
            "align only, not none",
        ),
        ([KVCacheGroupSpec(["b"], state(16))], "attention", "states alone"),
        ([KVCacheGroupSpec(["b"], window(16, 1))], "attention", "one token"),
        ([host], "attention", "transferable"),
        ([], "attention", "no KV cache"),
        ([KVCacheGroupSpec(["a"], full(16))], "layout", "not registered"),
    ):
        with pytest.raises(UnsupportedLayout, match=f"unsupported: {kind}: .*{word}") as caught:
            build_layout(KVCacheConfig(1, [tensor], groups), {})
        assert caught.value.kind == kind


@needs_vllm
def test_a_rank_without_a_group_is_refused() -> None:
    """A rank of a pipeline may have no layer of a group that others have."""
    cache = Cache("LBHNC", named("f", full(16)), named("w", window(16, 40)))
    groups = [cache.config.kv_cache_groups[0], KVCacheGroupSpec([], window(16, 40))]
    config = replace(
        cache.config, kv_cache_groups=groups, kv_cache_tensors=cache.config.kv_cache_tensors[:1]
    )
    with pytest.raises(UnsupportedLayout, match="no layer of one"):
        build_layout(config, cache.tensors, cache.vllm)


@needs_vllm
def test_a_placement_that_disagrees_is_refused() -> None:
    cache = Cache("LBHNC", layers(full(16)))
    placement = cache.config.kv_cache_tensors[0]
    for wrong in (
        replace(placement, offset=placement.offset + 64),
        replace(placement, layer_stride=placement.layer_stride + 64),
        replace(placement, block_stride=placement.block_stride + 64),
        replace(placement, layers=placement.layers[:-1]),
        replace(placement, layers=[*placement.layers, "another"]),
        replace(placement, layers=placement.layers[::-1]),
    ):
        with pytest.raises(UnsupportedLayout, match="layout"):
            build_layout(replace(cache.config, kv_cache_tensors=[wrong]), cache.tensors, cache.vllm)
    name = cache.names[1]
    for tensor in (
        cache.tensors[name][:-1],
        cache.tensors[name][:, :, :, ::2],
        cache.tensors[name][:, 1:],
    ):
        with pytest.raises(UnsupportedLayout, match="layout"):
            build_layout(cache.config, cache.tensors | {name: tensor}, cache.vllm)
    with pytest.raises(UnsupportedLayout, match="not registered"):
        build_layout(cache.config, {}, cache.vllm)
    build_layout(cache.config, cache.tensors, cache.vllm)


def test_old_configs_are_refused() -> None:
    """vLLM before 0.29: tensors with shared_by and no strides."""
    spec = type("FullAttentionSpec", (), {"block_size": 16})()
    group = SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)
    config = SimpleNamespace(
        kv_cache_groups=[group],
        kv_cache_tensors=[SimpleNamespace(size=1, shared_by=["a"])],
        num_blocks=1,
    )
    with pytest.raises(UnsupportedLayout, match=r"layout: vLLM before 0\.29"):
        build_layout(config, {})


def test_runs_of_a_hand_made_view() -> None:
    """Without vLLM: two layers [B, H, N, C] with heads outermost, as LHBNC has them."""
    backing = torch.zeros(2, 3, 5, 4, 8, dtype=torch.int8)  # L H B N C
    spec = type("FullAttentionSpec", (), {"block_size": 4, "unpadded_page_size_bytes": 96})()
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec)],
        kv_cache_tensors=[
            SimpleNamespace(layers=["a", "b"], offset=0, layer_stride=480, block_stride=32)
        ],
        num_blocks=5,
    )
    views = {name: backing[i].permute(1, 0, 2, 3) for i, name in enumerate("ab")}
    page = build_layout(config, views)
    base = backing.data_ptr()
    assert page.segments == tuple(Segment(base + i * 160, 32, 32, i * 32) for i in range(6))
    assert page.page_bytes == 192 and page.spans == ((base, backing.nbytes),)
