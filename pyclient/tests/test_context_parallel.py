"""Context parallelism: blocks whose tokens are divided among ranks, and ranks that all have them.

vLLM's CPU build runs neither. So its real Scheduler and KV-cache manager run here with such
configurations, with the workers of ``scheduling``, and with the connector's own on real sidecars
and made tensors, into which each rank writes the tokens that are its own in vLLM.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lookaside import kvgroups, space
from scheduling import (
    BLOCK,
    Batch,
    Stand,
    contents,
    full_attention,
    make_config,
    make_kv_config,
    mla,
    needs_whole_failures,
    sliding_window_mla,
    state,
    tokens,
    write_model,
)
from test_engine import BINARY, Engine, Ranks, Sidecar, until
from test_replicas import counted
from test_scheduler import random_history
from test_space import GEOMETRY

BYTES = full_attention().page_size_bytes
STATE = replace(state(2 * BLOCK), page_size_padded=BYTES)
SHAPES: dict[str, list[Any]] = {
    "full": [full_attention()],
    "mla": [mla()],
    "states": [full_attention(), STATE],
    "states-alike": [full_attention(), state()],
}
every_shape = pytest.mark.parametrize("shape", SHAPES)
needs_binary = pytest.mark.skipif(not BINARY.exists(), reason="bin/lookaside is not built")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), kv_heads=1)


# ---- the scheduler ----


def make(model: Path, shape: str, blocks: int = 300, **kwargs: Any) -> Stand:
    states = any(kvgroups.is_state(spec) for spec in SHAPES[shape])
    config = make_config(model, tp=2, dcp=2, states=states, **kwargs)
    stand = Stand(config, kv_config=make_kv_config(blocks, SHAPES[shape]))
    assert stand.roles() and stand.role.setup.page == 2 * BLOCK and stand.role.setup.ranks == 2
    return stand


@needs_whole_failures
@every_shape
def test_a_page_is_a_block_of_all_ranks(model: Path, shape: str) -> None:
    stand = make(model, shape)
    page = 2 * BLOCK
    prompt = tokens(10 * page + 3)
    stand.add(prompt)
    stand.run(2000)
    assert stand.holds(prompt) == 10 and stand.local_hit(prompt) == 10 * page
    stand.check_idle()
    stand.forget_local()
    stand.add(prompt)
    stand.run(2000)
    load = stand.workers.loads[0]
    assert (load.first_page, len(stand.workers.rows(load.block_ids))) == (0, 10)
    assert len(load.refs) == 2, "a hit is every rank's"
    assert stand.counts["hit_tokens"] == 10 * page and not stand.counts.get("errors")
    stand.check_idle()


@needs_whole_failures
@every_shape
@pytest.mark.parametrize("seed", range(2))
def test_random_histories(model: Path, shape: str, seed: int) -> None:
    rng = random.Random(f"{shape}{seed}")
    stand = make(
        model,
        shape,
        rng.choice([20, 40]) * len(SHAPES[shape]),
        batched_tokens=rng.choice([64, 512]),
        max_seqs=6,
        async_scheduling=seed % 2 == 1,
    )
    random_history(stand, rng, steps=200)


@needs_whole_failures
def test_a_draft_that_all_ranks_have(model: Path) -> None:
    """vLLM does not divide the blocks of a draft head that runs without DCP."""
    draft = sliding_window_mla(40)
    if not hasattr(draft, "dcp_sharded"):
        pytest.skip("this vLLM divides all blocks")
    specs = [mla(), replace(draft, dcp_sharded=False)]
    config = make_config(model, tp=2, dcp=2, drafts="mtp")
    stand = Stand(config, kv_config=make_kv_config(300, specs, eagles=[1]))
    prompt = tokens(20 * BLOCK + 3)
    stand.add(prompt)
    stand.run()
    assert stand.role.setup.page == 2 * BLOCK and stand.holds(prompt) == 10
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    (load,) = stand.workers.loads
    assert len(stand.workers.rows(load.block_ids)) == 9
    assert [bool(block) for block in stand.workers.rows(load.block_ids)[-1]] == [1, 1, 1]
    stand.check_idle()


# ---- what names a rank's pages ----


def fields_of(config: Any, kv_config: Any) -> list[dict[str, str]]:
    """Of each rank."""
    where, heads = space.world(config), space.same_heads(config, kv_config)
    return [
        space.space_fields(
            config,
            rank % where.stage_size,
            rank // where.stage_size,
            heads=heads,
            engine_id="e",
            geometry=GEOMETRY,
        )
        for rank in range(where.ranks)
    ]


def shards_of(config: Any, kv_config: Any) -> list[tuple[str, str | None]]:
    return [(each["tp_shard"], each.get("dcp_shard")) for each in fields_of(config, kv_config)]


def test_ranks_are_named_by_their_heads_and_their_tokens(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_head = make_kv_config(4, [replace(full_attention(), num_kv_heads=1)])
    latent = make_kv_config(4, [mla()])
    divided = make_config(model, tp=4, dcp=2)
    want = [("0/1", "0/2"), ("0/1", "1/2"), ("0/1", "0/2"), ("0/1", "1/2")]
    assert shards_of(divided, one_head) == want, "one head, which all ranks have"
    assert space.replicas(divided, one_head) == 1
    monkeypatch.setattr(type(divided.model_config), "use_mla", True)
    assert shards_of(divided, latent) == want
    assert shards_of(divided, make_kv_config(4, [mla(), state()])) == [
        (f"{rank}/4", f"{rank % 2}/2") for rank in range(4)
    ], "a rank's states are its own"
    divided.speculative_config = object()  # type: ignore[assignment]
    assert shards_of(divided, latent)[1] == ("1/4", "1/2"), "a draft may have other heads"


def test_groups_go_along_prefill_ranks_first(model: Path) -> None:
    """As vLLM builds them: rank = (pp * pcp + pcp rank) * tp + tp rank."""
    kv_config = make_kv_config(4, [replace(full_attention(), num_kv_heads=2)])
    config = make_config(model, tp=2, pp=2, pcp=2, dcp=4)
    assert space.world(config)[:3] == (2, 2, 2) and space.world(config).ranks == 8
    assert shards_of(config, kv_config) == 2 * [
        ("0/2", "0/4"),
        ("1/2", "2/4"),
        ("0/2", "1/4"),
        ("1/2", "3/4"),
    ]
    assert [each["pp_rank"] for each in fields_of(config, kv_config)] == ["0"] * 4 + ["1"] * 4
    config = make_config(model, tp=2, pcp=2, dcp=2)
    assert [dcp for _, dcp in shards_of(config, kv_config)] == ["0/2", "0/2", "1/2", "1/2"]


def test_prefill_ranks_alone_have_all_tokens(model: Path) -> None:
    config, kv_config = make_config(model, tp=2, pcp=2), make_kv_config(4, [mla()])
    assert shards_of(config, kv_config) == 2 * [("0/2", None), ("1/2", None)]
    assert space.replicas(config, kv_config) == 1
    kv_config.kv_tp_replicas = 2
    assert shards_of(config, kv_config) == 4 * [("0/1", None)]
    assert space.replicas(config, kv_config) == 4
    assert fields_of(config, kv_config)[0]["pcp"] == "2"
    assert "pcp" not in fields_of(make_config(model, tp=2), kv_config)[0]


# ---- the workers, on real sidecars ----


class Divided(Ranks):
    """Workers whose ranks have the tokens that are theirs in vLLM, in blocks of their own."""

    def __init__(self, config: Any, requests: dict[str, Any], kv_config: Any) -> None:
        super().__init__(config, requests, kv_config)
        self.where, self.dcp = space.world(config), kvgroups.dcp_size(config)
        self.interleave = config.parallel_config.cp_kv_cache_interleave_size

    def slot(self, rank: int, position: int) -> tuple[int, int] | None:
        """(index in the table, offset) of a token in a rank's block; None if another has it."""
        pcp_rank, tp_rank = divmod(rank, self.where.tp_size)
        index, offset = divmod(position, BLOCK * self.dcp)
        run, within = divmod(offset, self.interleave)
        turn, owner = divmod(run, self.dcp)
        if owner != (tp_rank * self.where.pcp_size + pcp_rank) % self.dcp:
            return None
        return index, turn * self.interleave + within

    def forward(self, batch: Batch, rank: int) -> None:
        cache = self.caches[rank][0]
        for request_id, count in batch.scheduled.num_scheduled_tokens.items():
            before, (table,) = batch.before[request_id], batch.tables[request_id]
            values = [float(hash(v) % (1 << 20)) for v in contents(self.requests[request_id])]
            for position in range(before + count):
                slot = self.slot(rank, position)
                if slot is None:
                    continue
                index, offset = slot
                if position >= before:
                    cache[table[index], :, offset] = values[position]
                assert bool((cache[table[index], :, offset] == values[position]).all()), (
                    f"rank {rank}: wrong KV at {position} of {before}"
                )


@pytest.fixture
def sidecars(tmp_path: Path, ended: list[Sidecar]) -> list[Sidecar]:
    tmp_path.chmod(0o700)
    ended += [Sidecar(tmp_path / f"rank-{rank}", "--peers-enabled=false") for rank in range(2)]
    for each in ended:
        each.wait_serving()
    return ended


@pytest.fixture
def engines(model: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def start(endpoint: Path | str, **kwargs: Any) -> Engine:
        extra = {"lookaside.endpoint": str(endpoint), "lookaside.load_in_step_ms": 0} | {
            f"lookaside.{each}_timeout_ms": 60_000 for each in ("lookup", "store", "load")
        }
        specs = [replace(full_attention(), num_kv_heads=1)]
        made.append(Engine(make_config(model, extra, **kwargs), specs, Divided))
        return made[-1]

    yield start
    for engine in made:
        engine.shutdown()


@needs_binary
@pytest.mark.parametrize("interleave", [1, 4, BLOCK])
def test_every_rank_loads_its_own_tokens(
    engines: Any, sidecars: list[Sidecar], interleave: int
) -> None:
    endpoint = sidecars[0].endpoint.parent / "rank-{rank}"
    one, other = (engines(endpoint, tp=2, dcp=2, interleave=interleave) for _ in range(2))
    prompt = tokens(26 * BLOCK + 5)
    assert one.ask(prompt, max_tokens=3 * BLOCK)[1] == 0
    assert other.ask(prompt)[1] == 13
    whole = prompt + next(iter(one.outputs.values()))
    other.forget_local()
    assert other.ask(whole)[1] == (len(whole) - 1) // (2 * BLOCK)
    for engine in (one, other):
        assert engine.workers.invalid == 0
        engine.settle()


@needs_binary
def test_what_one_rank_lacks_is_no_hit(engines: Any, sidecars: list[Sidecar]) -> None:
    engine = engines(sidecars[0].endpoint.parent / "rank-{rank}", tp=2, dcp=2)
    prompt = tokens(10 * BLOCK + 5)
    engine.ask(prompt)
    engine.forget_local()
    assert engine.ask(prompt)[1] == 5
    sidecars[1].kill()
    assert sidecars[1].process is not None
    sidecars[1].process.wait(30)
    (sidecars[1].endpoint / "directory").unlink(missing_ok=True)  # or it finds its pages again
    sidecars[1].start()
    sidecars[1].wait_serving()
    engine.connect()
    engine.forget_local()
    assert engine.ask(prompt)[1] == 0
    until(lambda: engine.forget_local() or engine.ask(prompt)[1] == 5)
    engine.settle()


@needs_binary
def test_other_divisions_share_nothing(engines: Any, sidecars: list[Sidecar]) -> None:
    endpoint = sidecars[0].endpoint.parent / "rank-{rank}"
    prompt = tokens(16 * BLOCK + 5)
    for kwargs in ({"dcp": 2}, {"dcp": 2, "interleave": 4}, {"dcp": 1}):
        assert engines(endpoint, tp=2, **kwargs).ask(prompt)[1] == 0


@needs_binary
def test_ranks_with_the_same_tokens_store_them_once(engines: Any, sidecars: list[Sidecar]) -> None:
    """Four ranks, one head, two divisions of the tokens, one sidecar."""
    engine = engines(sidecars[0].endpoint, tp=4, dcp=2)
    prompt = tokens(16 * BLOCK + 5)
    engine.ask(prompt)
    engine.forget_local()
    assert engine.ask(prompt)[1] == 8
    until(lambda: counted(sidecars[0], "pages")["pages"] == 2 * 8)
    engine.settle()


@needs_binary
def test_prefill_ranks_store_once_and_load_all(engines: Any, sidecars: list[Sidecar]) -> None:
    engine = engines(sidecars[0].endpoint, tp=1, pcp=2)
    prompt = tokens(16 * BLOCK + 5)
    assert engine.workers.replicas == 2
    engine.ask(prompt)
    engine.forget_local()
    assert engine.ask(prompt)[1] == 16
    until(lambda: counted(sidecars[0], "pages")["pages"] == 16)
    engine.settle()
