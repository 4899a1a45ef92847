"""The secondary tier in vLLM's real Scheduler and OffloadingConnector, with real sidecars.

``Engine`` compares every block that a request has with what it would have computed, before it
computes on it. So each test that runs one is also a test that no wrong bytes come back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lookaside import tierspace
from lookaside.blocks import BlockStore, Buffer, Part
from lookaside.config import ConfigError
from lookaside.vllm_tier import LookasideTier, TierSettings, _fields_of, _settings
from offloading import Engine, prompt
from peer import until
from scheduling import make_config, make_kv_config, sliding_window, write_model
from test_client import Sidecar
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

PATIENCE_S = 60.0
# 64 KiB a block, so that an arena of 8 MiB has room for about 127.
BIG = FullAttentionSpec(block_size=16, num_kv_heads=32, head_size=16, dtype=torch.float32)
# Nothing in a test depends on the pace of the machine.
PATIENT = {"lookup_timeout_ms": 60_000, "timeout_ms": 60_000, "promotion_timeout_ms": 60_000}


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    it = Sidecar(tmp_path / "rank-0")
    try:
        yield it
    finally:
        it.process.send_signal(signal.SIGCONT)
        it.stop()


@pytest.fixture
def engines() -> Iterator[Any]:
    """Makes engines, and closes them."""
    with contextlib.ExitStack() as stack:

        def make(sidecar: Sidecar | Path, model: Path, **kwargs: Any) -> Engine:
            directory = sidecar.directory if isinstance(sidecar, Sidecar) else sidecar
            tier = {"endpoint": str(directory), **PATIENT, **kwargs.pop("tier", {})}
            engine = Engine(model, [tiered(tier)], **kwargs)
            stack.callback(engine.close)
            if isinstance(sidecar, Sidecar):
                until(lambda: store_of(engine).connected, PATIENCE_S)
            return engine

        yield make


def tiered(settings: dict[str, Any]) -> dict[str, Any]:
    return {"type": "LookasideTier", "module_path": "lookaside.vllm_tier", **settings}


def store_of(engine: Engine) -> BlockStore:
    return engine.tier._store


def test_blocks_come_back_from_the_sidecar(sidecar: Sidecar, model: Path, engines: Any) -> None:
    engine = engines(sidecar, model)
    tokens = prompt(1, 20)
    assert engine.ask(tokens) == 0
    assert engine.ask(tokens) == 0, "vLLM has it on the GPU"
    engine.forget(host=False)
    assert engine.ask(tokens) == 20, "vLLM has it in host memory"
    engine.forget()
    assert engine.ask(tokens) == 20
    engine.forget()
    assert engine.ask([*tokens[: 7 * 16], *prompt(2, 9)]) == 7
    assert engine.ask(prompt(3, 5)) == 0
    assert engine.tier._requests == {} and engine.tier._jobs == {}


def test_a_prompt_that_nobody_has_costs_no_step(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    """A miss in memory is known within the call that asks, unless the machine stands still."""
    engine = engines(
        sidecar, model, tier={"lookup_wait_us": 60_000_000, "lookup_wait_step_us": 60_000_000}
    )
    for seed in range(5):
        request_id = engine.add(prompt(seed, 6))
        engine.step()
        assert engine.computed[request_id] == 6 * 16 + 1
    engine.run()


def test_without_waiting_it_takes_one_step_more(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    engine = engines(sidecar, model, tier={"lookup_wait_us": 0, "lookup_wait_step_us": 0})
    assert engine.ask(prompt(1, 6)) == 0
    engine.forget()
    assert engine.ask(prompt(1, 6)) == 6


def test_engines_share_and_what_they_store_outlives_them(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    one, other = engines(sidecar, model), engines(sidecar, model)
    tokens = prompt(1, 12)
    assert one.ask(tokens) == 0
    assert other.ask(tokens) == 12
    one.close()
    again = engines(sidecar, model)
    assert again.ask([*tokens, *prompt(5, 3)]) == 12


def test_two_requests_at_once_ask_for_the_same_blocks(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    engine = engines(sidecar, model)
    tokens = prompt(1, 12)
    engine.ask(tokens)
    engine.forget()
    first, second = engine.add(tokens), engine.add([*tokens, *prompt(2, 4)])
    engine.run()
    assert {first, second} <= engine.done
    assert engine.loaded[first] + engine.loaded[second] >= 12


@pytest.mark.parametrize("cpu_blocks", [8, 24])
def test_host_memory_that_is_full_is_no_trouble(
    sidecar: Sidecar, model: Path, engines: Any, cpu_blocks: int
) -> None:
    """vLLM brings up no prompt that is longer than its host memory."""
    engine = engines(sidecar, model, cpu_blocks=cpu_blocks, batched_tokens=64)
    for _ in range(2):
        for seed in range(4):
            engine.ask(prompt(seed, 20))
            engine.forget()
    assert (engine.ask(prompt(0, 20)) > 0) == (cpu_blocks > 20)


def test_generated_blocks_are_stored_if_vllm_offers_them(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    engine = engines(sidecar, model, extra={"offload_prompt_only": False})
    tokens = prompt(1, 2)
    engine.ask(tokens, max_tokens=64)
    engine.forget()
    longer = [*tokens, *[7] * 64]
    assert engine.ask(longer) == 6


# ---- trouble with the sidecar ----


def test_without_a_sidecar_everything_is_a_miss(tmp_path: Path, model: Path, engines: Any) -> None:
    engine = engines(tmp_path / "nobody", model)
    until(lambda: not store_of(engine).starting, PATIENCE_S)
    for seed in range(3):
        assert engine.ask(prompt(seed, 10)) == 0
        engine.forget()
    assert store_of(engine).counts["stores_refused"] > 0


def test_a_sidecar_that_comes_later_is_used(
    tmp_path: Path, model: Path, engines: Any, ended: list[Any]
) -> None:
    engine = engines(tmp_path / "rank-0", model)
    engine.ask(prompt(1, 10))
    engine.forget()
    sidecar = Sidecar(tmp_path / "rank-0")
    try:
        until(lambda: store_of(engine).connected, PATIENCE_S)
        assert engine.ask(prompt(1, 10)) == 0
        engine.forget()
        assert engine.ask(prompt(1, 10)) == 10, store_of(engine).counts
    finally:
        sidecar.stop()


def test_a_killed_sidecar_is_a_miss_and_the_next_one_has_its_memory(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    engine = engines(sidecar, model)
    tokens = prompt(1, 12)
    engine.ask(tokens)
    engine.forget()
    sidecar.stop(signal.SIGKILL)
    until(lambda: not store_of(engine).connected, PATIENCE_S)
    assert engine.ask(tokens) == 0
    engine.forget()
    sidecar.start()
    until(lambda: store_of(engine).connected, PATIENCE_S)
    assert engine.ask(tokens) == 12, "the arena outlives the sidecar in its client's hands"


def test_a_killed_sidecar_between_lookup_and_load(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    """The load fails, vLLM hears of it by block, computes, and does not ask for ever."""
    engine = engines(sidecar, model)
    tokens = prompt(1, 12)
    engine.ask(tokens)
    engine.forget()
    load = engine.tier.submit_load

    def killed(job: Any) -> None:
        if sidecar.process.poll() is None:
            sidecar.stop(signal.SIGKILL)
            until(lambda: not store_of(engine).connected, PATIENCE_S)
        load(job)

    engine.tier.submit_load = killed
    assert engine.ask(tokens) == 0
    engine.tier.submit_load = load
    sidecar.start()


def test_a_stopped_sidecar_costs_its_deadlines_and_no_more(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    quick = {"lookup_timeout_ms": 50, "promotion_timeout_ms": 100, "timeout_ms": 100}
    engine = engines(sidecar, model, tier=quick)
    tokens = prompt(1, 12)
    until(lambda: engine.ask(tokens) == 0 or True)
    sidecar.process.send_signal(signal.SIGSTOP)
    engine.forget()
    for seed in (1, 2, 3):
        assert engine.ask(prompt(seed, 12)) == 0
        engine.forget()
    sidecar.process.send_signal(signal.SIGCONT)

    def found() -> bool:
        engine.forget()
        return engine.ask(tokens) == 12

    until(found, PATIENCE_S)


def test_stores_that_pile_up_are_refused(sidecar: Sidecar, model: Path, engines: Any) -> None:
    """What vLLM keeps for a store is let go at once when too much waits already."""
    engine = engines(sidecar, model, specs=[BIG], tier={"queue_bytes": 4 << 16})
    store = store_of(engine)
    with store._wake:  # the mover cannot begin
        for number in range(3):
            store._stores.append(None)  # type: ignore[arg-type]
            store._waiting += 4 << 16
            if number == 0:
                store._stores.clear()
                break
    store.store(1 << 40, 2, lambda: [])
    (done,) = until(store.finished, PATIENCE_S)
    assert done.job == 1 << 40 and not done.good
    assert store.counts["stores_refused"] == 1
    with store._wake:
        store._waiting -= 4 << 16
    assert engine.ask(prompt(1, 3)) == 0


def test_blocks_come_up_from_a_disk(tmp_path: Path, model: Path, engines: Any) -> None:
    config = tmp_path / "sidecar.yaml"
    config.write_text(f"tiers:\n  - kind: disk\n    paths: [{tmp_path}/disk]\n    capacity: 64M\n")
    sidecar = Sidecar(tmp_path / "rank-0", f"--config={config}")
    try:
        engine = engines(sidecar, model, specs=[BIG])
        for seed in range(10):  # 200 blocks, of which the arena has room for about 127
            engine.ask(prompt(seed, 20))
            engine.forget()
            time.sleep(0)
        loaded = [engine.ask(prompt(seed, 20)) for seed in range(10) if engine.forget() is None]
        assert sum(loaded) > 127
    finally:
        sidecar.stop()


# ---- what must not meet ----


def other_model(tmp_path: Path) -> Path:
    path = write_model(tmp_path / "other")
    (path / "config.json").write_text((path / "config.json").read_text() + " ")
    return path


@pytest.mark.parametrize(
    "change",
    ["model", "block", "hash", "seed", "chunk", "layers", "tp"],
)
def test_bytes_of_different_spaces_do_not_meet(
    sidecar: Sidecar,
    model: Path,
    engines: Any,
    change: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = engines(sidecar, model)
    tokens = prompt(1, 12)
    one.ask(tokens)
    other_path, kwargs = model, {}
    if change == "model":
        other_path = other_model(tmp_path)
    elif change == "block":
        # As many bytes a block.
        half = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
        kwargs = {"specs": [half], "block": 32}
    elif change == "hash":
        kwargs = {"hash_algo": "sha256"}
    elif change == "seed":
        monkeypatch.setenv("PYTHONHASHSEED", "17")
    elif change == "layers":
        two = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype=torch.float32)
        kwargs = {"specs": [two, two]}
    elif change == "chunk":
        kwargs = {"tier": {"identity": "another"}}
    elif change == "tp":
        fields = dict(one.tier._fields)
        config = make_config(model, tp=2)
        wide, _ = tierspace.tier_fields(
            build_offloading_config(config, make_kv_config(8)), config, 4096, "e", ""
        )
        assert wide["parallel"] != fields["parallel"] and wide["tp"] != fields["tp"]
        return
    other = engines(sidecar, other_path, **kwargs)
    assert {**other.tier._fields} != {**one.tier._fields}
    other.salt = b"other"
    assert other.ask(tokens) == 0
    other.forget()
    assert other.ask(tokens) > 0, "of its own"
    if change not in ("hash", "seed"):  # vLLM has one hash for a process
        one.forget()
        assert one.ask(tokens) == 12


def test_what_is_not_known_is_not_shared(model: Path) -> None:
    config = make_config(model)
    offloading = build_offloading_config(config, make_kv_config(8))
    known, own = tierspace.tier_fields(offloading, config, 4096, "engine-1", "")
    assert not own and "engine" not in known
    unknown, own = tierspace.tier_fields(offloading, None, 4096, "engine-1", "")
    assert own and unknown["engine"] == "engine-1"
    vouched, own = tierspace.tier_fields(offloading, None, 4096, "engine-1", "llama, v2")
    assert not own and "engine" not in vouched and vouched["identity"] == "llama, v2"
    adapters = make_config(model, adapters=True)
    fields, own = tierspace.tier_fields(offloading, adapters, 4096, "engine-1", "")
    assert fields["engine"] == "engine-1" and "adapters" in own[0]
    fields, own = tierspace.tier_fields(offloading, adapters, 4096, "engine-1", "x")
    assert not own and "engine" not in fields
    random_seed = make_config(model, hash_algo="xxhash_cbor")
    fields, own = tierspace.tier_fields(offloading, random_seed, 4096, "engine-1", "")
    assert fields["engine"] == "engine-1"


def test_every_field_of_vllms_configuration_tells_spaces_apart(model: Path) -> None:
    config = make_config(model)
    offloading = build_offloading_config(config, make_kv_config(8))
    plain = tierspace.tier_fields(offloading, config, 4096, "e", "")[0]
    changed = [
        (dataclasses.replace(offloading, kv_cache_layout="BLHNC"), 4096),
        (dataclasses.replace(offloading, replicated_layout=True), 4096),
        (dataclasses.replace(offloading, worker_kv_bytes_per_block=8192), 4096),
        (offloading, 8192),
        (
            dataclasses.replace(
                offloading, cache=dataclasses.replace(offloading.cache, blocks_per_chunk=2)
            ),
            4096,
        ),
        (
            dataclasses.replace(
                offloading, parallel=dataclasses.replace(offloading.parallel, pp_size=2)
            ),
            4096,
        ),
        (
            dataclasses.replace(
                offloading,
                groups=(dataclasses.replace(offloading.groups[0], layer_names=("x",) * 300),),
            ),
            4096,
        ),
    ]
    seen = [plain] + [tierspace.tier_fields(o, config, size, "e", "")[0] for o, size in changed]
    assert len({tuple(sorted(fields.items())) for fields in seen}) == len(seen)
    assert all(len(value.encode()) <= 512 for fields in seen for value in fields.values())


def test_after_a_reset_old_blocks_are_not_found(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    """vLLM resets its cache when weights change, and does not tell a tier why."""
    engine = engines(sidecar, model)
    tokens = prompt(1, 12)
    engine.ask(tokens)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.salt = b"new weights"
    until(lambda: store_of(engine).connected, PATIENCE_S)
    assert engine.ask(tokens) == 0
    engine.forget()
    assert engine.ask(tokens) == 12, "of the new weights"
    other = engines(sidecar, model)
    assert other.ask(tokens) == 12, "others go on with theirs"


def test_a_reset_can_be_for_vllm_alone(sidecar: Sidecar, model: Path, engines: Any) -> None:
    engine = engines(sidecar, model, tier={"on_reset": "keep"})
    tokens = prompt(1, 12)
    engine.ask(tokens)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.ask(tokens) == 12


# ---- models with several groups ----


def test_windows_and_full_attention_side_by_side(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    engine = engines(sidecar, model, specs=[full, sliding_window(48)])
    tokens = prompt(1, 20, more=5)
    assert engine.ask(tokens) == 0
    engine.forget()
    assert engine.ask(tokens) >= 20
    engine.forget()
    assert engine.ask([*tokens[: 10 * 16], *prompt(4, 6)]) >= 0


# ---- the interface ----


def test_settings_that_cannot_be_used_are_named(model: Path) -> None:
    for given, named in [
        ({"endpont": "/x"}, "endpont"),
        ({"lookup_wait_us": "soon"}, "lookup_wait_us"),
        ({"lookup_wait_us": -1}, "lookup_wait_us"),
        ({"autostart": 1}, "autostart"),
        ({"on_reset": "sometimes"}, "on_reset"),
        ({"copy_threads": 0}, "copy_threads"),
        ({"queue_bytes": "much"}, "size"),
    ]:
        with pytest.raises(ConfigError, match=named):
            _settings(given)
    made = _settings({"queue_bytes": "64M", "sidecar_args": "--arena-limit 1G"})
    assert made.queue_bytes == 64 << 20 and made.sidecar_args == ("--arena-limit", "1G")
    assert _settings({}) == TierSettings()
    with pytest.raises(ConfigError, match="endpont"):
        Engine(model, [tiered({"endpont": "/x"})])


def test_what_this_vllm_does_not_have_is_left_out() -> None:
    @dataclasses.dataclass
    class Older:
        job_id: int
        success: bool

    values = {"job_id": 1, "success": True, "transfer_time": 0.5, "successful_keys": None}
    assert Older(**_fields_of(Older, **values)) == Older(1, True)
    assert JobResult(**_fields_of(JobResult, **values)).transfer_time == 0.5


def test_a_block_whose_place_is_not_told_is_a_miss(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    """Other tiers ask on behalf of other hosts, without the prefix."""
    engine = engines(sidecar, model)
    engine.ask(prompt(1, 4))
    stranger = ReqContext(req_id="stranger")
    key = bytes(36)
    assert engine.tier.lookup(key, stranger) is LookupResult.MISS
    engine.tier.on_request_finished(stranger)
    assert engine.tier._requests == {}


def test_a_method_that_fails_does_not_end_the_engine(
    sidecar: Sidecar, model: Path, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(sidecar, model)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("broken")

    monkeypatch.setattr(store_of(engine), "find", broken)
    assert engine.ask(prompt(1, 6)) == 0


def test_events_are_published_where_they_are_asked_for(
    sidecar: Sidecar, model: Path, engines: Any
) -> None:
    engine = engines(sidecar, model)
    assert engine.tier._events is None and list(engine.tier.take_events()) == []
    engine.tier._events = []
    published: list[Any] = []
    take = engine.tier.take_events  # vLLM's scheduler calls it in each step
    engine.tier.take_events = lambda: published.extend(events := list(take())) or events
    engine.ask(prompt(1, 6))
    engine.tier.take_events()
    assert sum(len(event.keys) for event in published) == 6
    assert not any(event.removed for event in published)


def test_the_spec_makes_and_ends_the_tier(sidecar: Sidecar, model: Path) -> None:
    """As vLLM does, from its own classes, and without a scheduler."""
    config = make_config(
        model,
        connector={
            "kv_connector": "OffloadingConnector",
            "kv_connector_module_path": None,
            "engine_id": f"spec-{os.getpid()}",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 64 << 10,
                "secondary_tiers": [tiered({"endpoint": str(sidecar.directory)})],
            },
        },
    )
    spec = TieringOffloadingSpec(build_offloading_config(config, make_kv_config(8)))
    assert TieringOffloadingSpec.build_metric_definitions(dict(spec.extra_config))
    manager: Any = spec.get_manager()
    (tier,) = manager.secondary_tiers
    assert isinstance(tier, LookasideTier) and tier._fields["hash"] == "sha256_cbor"
    manager.shutdown()
    assert not tier._store._mover.is_alive()
    manager.shutdown()


# ---- the store of blocks by itself ----


def test_rows_go_there_and_back_through_a_store(sidecar: Sidecar) -> None:
    rows = np.zeros((32, 8192), dtype=np.uint8)
    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, dtype=np.uint8)
    names = [bytes([n]) * 32 for n in range(16)]
    store = BlockStore(
        str(sidecar.directory),
        "store",
        {"client": "test"},
        Buffer(rows.ctypes.data, 32, 8192, 5000),
    )
    store.start()
    try:
        until(lambda: store.connected, PATIENCE_S)
        store.store(1, 16, lambda: [Part(0, names, list(range(16)), list(range(16)))])
        (done,) = until(store.finished, PATIENCE_S)
        assert done.good == list(range(16)) and not done.bad and done.moved_bytes == 16 * 5000
        # Again: it is held, and nothing moves.
        store.store(2, 16, lambda: [Part(0, names, list(range(16)), list(range(16)))])
        (done,) = until(store.finished, PATIENCE_S)
        assert done.good == list(range(16)) and done.moved_bytes == 0
        found = store.find(4, names[3], names[4:])
        assert until(found.poll, PATIENCE_S) == 12
        wanted = [16, 17, -1, 19]  # of blocks 6 to 9
        before = rows[18].copy()
        store.load(3, [Part(6, names[6:10], wanted, ["a", "b", "c", "d"], found=found)])
        (done,) = until(store.finished, PATIENCE_S)
        assert done.good == ["a", "b", "d"] and not done.bad
        for row, block in ((16, 6), (17, 7), (19, 9)):
            assert (rows[row, :5000] == rows[block, :5000]).all()
            assert (rows[row, 5000:] != rows[block, 5000:]).any(), "beyond the block"
        assert (rows[18] == before).all()
        # An answer that was taken cannot be taken again.
        store.load(4, [Part(6, names[6:8], [20, 21], ["a", "b"], found=found)])
        (done,) = until(store.finished, PATIENCE_S)
        assert done.bad == ["a", "b"]
        # Rows that are not there.
        store.store(5, 1, lambda: [Part(0, [bytes([99]) * 32], [32], ["x"])])
        (done,) = until(store.finished, PATIENCE_S)
        assert done.bad == ["x"]
        missing = store.find(0, b"", [bytes([99]) * 32])
        assert until(lambda: missing.poll() is not None, PATIENCE_S) and missing.poll() == 0
    finally:
        store.close()
    with pytest.raises(ValueError):
        BlockStore("/x", "e", {}, Buffer(0, 0, 1, 1))


# ---- histories ----


@pytest.mark.parametrize("seed", range(3))
def test_random_history(tmp_path: Path, model: Path, engines: Any, seed: int) -> None:
    """Two engines, an arena that is too small, a sidecar that is killed, stopped and upgraded.

    The model: what a request loads is what it would have computed (Engine compares), and never
    more blocks than were computed by anybody before.
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    sidecar = Sidecar(tmp_path / "rank-0")
    quick = {"lookup_timeout_ms": 200, "timeout_ms": 500}
    pair = [
        engines(sidecar, model, specs=[BIG], cpu_blocks=48, blocks=64, tier=quick) for _ in range(2)
    ]
    trunks = [prompt(n, 24) for n in range(6)]
    known: set[bytes] = set()
    hits = 0
    try:
        for _ in range(60):
            engine = chance.choice(pair)
            action = chance.random()
            if action < 0.08:
                sidecar.stop(signal.SIGKILL)
                if chance.random() < 0.5:
                    engine.ask(chance.choice(trunks))
                sidecar.start()
            elif action < 0.14:
                sidecar.process.send_signal(signal.SIGSTOP)
                engine.ask(chance.choice(trunks))
                sidecar.process.send_signal(signal.SIGCONT)
            elif action < 0.4:
                engine.forget(host=chance.random() < 0.8)
            else:
                trunk = chance.choice(trunks)
                cut = chance.randint(1, 24)
                tokens = [*trunk[: cut * 16], *prompt(chance.randrange(3) + 100, 2)]
                names = [bytes(str(tokens[: i * 16]), "ascii") for i in range(1, cut + 3)]
                request_id = engine.add(tokens)
                if chance.random() < 0.1:
                    for _ in range(chance.randrange(3)):
                        engine.step()
                    engine.abort(request_id)
                    engine.run()
                else:
                    engine.run()
                    assert engine.loaded[request_id] <= sum(name in known for name in names)
                    hits += engine.loaded[request_id]
                known.update(names)
        for engine in pair:
            assert engine.tier._requests == {} and engine.tier._jobs == {}
        assert hits > 0
    finally:
        sidecar.process.send_signal(signal.SIGCONT)
        sidecar.stop()


def test_the_documented_command_is_vllms() -> None:
    text = (Path(__file__).parents[2] / "docs" / "vllm-tiering.md").read_text()
    given = json.loads(re.findall(r"--kv-transfer-config '(.*?)'", text, re.DOTALL)[0])
    transfer = KVTransferConfig(**given)
    (tier,) = transfer.kv_connector_extra_config["secondary_tiers"]
    assert SecondaryTierFactory.get_tier_class(tier) is LookasideTier
    assert _settings({k: v for k, v in tier.items() if k not in ("type", "module_path")}).endpoint
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (`[^|]*) \|", text))))
    assert set(TierSettings.__dataclass_fields__) <= table


def test_frames_without_a_configuration_find_none() -> None:
    """The search ends, and takes nothing that only looks like one."""
    vllm_config = SimpleNamespace()
    assert tierspace.vllm_config_of_callers() is None
    assert vllm_config is not None
