"""Models with sliding windows and several KV-cache groups, inside vLLM's real Scheduler.

The workers of ``scheduling`` check every token of every group that a forward attends to, and all
that is saved.
"""

from __future__ import annotations

import random

import pytest
from lookaside import kvgroups
from scheduling import (
    BLOCK,
    Stand,
    full_attention,
    make_config,
    make_kv_config,
    needs_whole_failures,
    sliding_window,
    tokens,
)
from test_scheduler import random_history, warm
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

pytestmark = needs_whole_failures

SHAPES = {
    "window": [full_attention(), sliding_window(40)],
    "windows": [full_attention(), sliding_window(40), sliding_window(100), sliding_window(40)],
    "all-windows": [sliding_window(50)],
    "narrow": [full_attention(), sliding_window(5)],
    "wide": [full_attention(), sliding_window(1000)],
    "unlike": [full_attention(64), sliding_window(20), sliding_window(90, 32)],
    "two-full": [full_attention(), full_attention(32)],
}
every_shape = pytest.mark.parametrize("shape", SHAPES)


def make(model, shape: str, blocks: int = 400, **kwargs) -> Stand:
    stand = Stand(make_config(model, **kwargs), kv_config=make_kv_config(blocks, SHAPES[shape]))
    assert stand.roles(), "it is idle"
    return stand


def loaded(stand: Stand, group: int) -> list[int]:
    """How many of a group's blocks each load wrote."""
    columns = [
        number for number, (each, _) in enumerate(stand.workers.columns) if each.number == group
    ]
    rows = [stand.workers.rows(load.block_ids) for load in stand.workers.loads]
    return [sum(bool(row[column]) for row in of for column in columns) for of in rows]


@every_shape
@pytest.mark.parametrize("batched_tokens", [48, 4096])
def test_a_prompt_is_saved_and_hit(model, shape, batched_tokens):
    stand = make(model, shape, batched_tokens=batched_tokens)
    page = stand.workers.block
    prompt = tokens(10 * page + 3)
    first = stand.add(prompt)
    stand.run(2000)
    assert stand.holds(prompt) == 10
    stand.check_idle()
    stand.forget_local()
    again = stand.add(prompt)
    stand.run(2000)
    (load,) = stand.workers.loads
    assert (load.request_id, load.first_page, len(stand.workers.rows(load.block_ids))) == (
        again,
        0,
        10,
    )
    for group in stand.workers.groups:
        blocks = 10 * page // group.block
        assert loaded(stand, group.number) == [
            min(blocks, -(-(group.window - 1) // group.block)) if group.window else blocks
        ]
    assert len(stand.outputs[first]) == len(stand.outputs[again]) == 4
    assert stand.counts["hit_tokens"] == 10 * page and not stand.counts.get("errors")
    stand.check_idle()


@every_shape
def test_the_next_turn_finds_prompt_and_answer(model, shape):
    """Generated pages are stored while their windows are there; another instance goes on with the
    conversation."""
    stand = make(model, shape)
    page = stand.workers.block
    prompt = tokens(3 * page + 5)
    request_id = stand.add(prompt, max_tokens=5 * page)
    stand.run(3000)
    whole = prompt + stand.outputs[request_id]
    assert stand.holds(whole) == (len(whole) - 1) // page
    stand.forget_local()
    stand.add(whole + tokens(page, seed=2))
    stand.run(2000)
    (load,) = stand.workers.loads
    assert len(stand.workers.rows(load.block_ids)) == (len(whole) - 1) // page
    stand.check_idle()


@every_shape
def test_only_what_vllm_lacks_is_loaded(model, shape):
    """vLLM's own hit ends in the middle; it has the windows before that, and nulls where they have
    passed."""
    stand = make(model, shape)
    page = stand.workers.block
    prompt = tokens(12 * page + 1)
    warm(stand, prompt)
    stand.add(prompt[: 5 * page + 1], max_tokens=1)
    stand.run()
    stand.workers.loads.clear()
    stand.sidecars.lookups.clear()
    stand.add(prompt + tokens(3 * page, seed=9))
    stand.run(2000)
    (load,) = stand.workers.loads
    assert load.first_page == 5 and len(stand.workers.rows(load.block_ids)) == 7
    assert stand.holds(prompt + tokens(3 * page, seed=9)) == 15
    stand.check_idle()


@every_shape
@pytest.mark.parametrize("bad", [[0], [7], [2, 5], range(8)])
def test_failed_loads_are_computed_and_not_offered_again(model, shape, bad):
    stand = make(model, shape)
    page = stand.workers.block
    prompt = tokens(8 * page + 1)
    warm(stand, prompt)
    stand.workers.fail_pages = lambda load: bad
    request_id = stand.add(prompt)
    stand.run()
    assert len(stand.outputs[request_id]) == 4
    assert len(stand.workers.loads) == 1
    stand.check_idle()
    stand.workers.fail_pages = lambda load: ()
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert len(stand.workers.loads) == 2, "other requests may hit again"
    stand.check_idle()


def test_a_page_is_named_by_its_last_hash(model):
    """Prompts that leave each other within a page, at a hash that is not its last, do not share the
    page."""
    stand = make(model, "unlike")
    page = stand.workers.block
    assert stand.workers.hashes_per_page == 4
    one = tokens(8 * page + 1)
    warm(stand, one)
    other = one[: 4 * page + BLOCK] + tokens(4 * page, seed=5)
    stand.add(other)
    stand.run()
    (load,) = stand.workers.loads
    assert len(stand.workers.rows(load.block_ids)) == 4
    stand.check_idle()


@every_shape
@pytest.mark.parametrize("evicted", [False, True])
def test_what_only_vllm_has(model, shape, evicted):
    """The sidecars forgot. vLLM's hit takes no more than the windows; the rest is in its cache, or
    gone."""
    stand = make(model, shape)
    page = stand.workers.block
    prompt = tokens(9 * page + 1)
    stand.add(prompt, max_tokens=1)
    stand.run()
    stand.sidecars.held.clear()
    windows = {group.number for group in stand.workers.groups if group.window}
    first_page = stand.digests(prompt)[0]
    for block in stand.pool.blocks[1:] if evicted else ():
        key = block.block_hash
        if key is not None and get_group_id(key) in windows and get_block_hash(key) == first_page:
            stand.pool._maybe_evict_cached_block(block)
    longer = prompt + tokens(4 * page, seed=3)
    stand.add(longer)
    stand.run()
    assert not stand.workers.loads
    assert stand.holds(longer) == (0 if evicted and windows and shape != "wide" else 13)
    stand.check_idle()
    stand.forget_local()
    stand.add(longer)  # computed anew, it is stored again
    stand.run()
    assert stand.holds(longer) == 13
    stand.check_idle()


@every_shape
def test_preempted_requests_come_back_through_lookup(model, shape):
    page = make(model, shape).workers.block
    groups = len(SHAPES[shape])
    stand = make(model, shape, blocks=30 * groups * (page // BLOCK), batched_tokens=96, max_seqs=6)
    for seed in range(6):
        stand.add(tokens(8 * page, seed=seed), max_tokens=4 * page)
    stand.run(5000)
    assert all(len(output) == 4 * page for output in stand.outputs.values())
    stand.check_idle()


def test_tables_that_do_not_fit_a_hit_are_no_load(model):
    stand = make(model, "unlike")
    role, shares = (
        stand.role,
        kvgroups.shares(make_kv_config(4, SHAPES["unlike"]).kv_cache_groups, 64),
    )
    assert [(share.blocks, share.kept, share.reach) for share in shares] == [
        (1, 1, 0),
        (4, 2, 2),
        (2, 2, 3),
    ]

    def tables():
        return [[*range(1, 5)], [0] * 14 + [5, 6], [0] * 5 + [7, 8, 9]]

    assert role.rows.is_loadable(tables(), 1, 4)
    assert role.rows.is_loadable(tables(), 3, 4)
    for group, index, block in (
        (0, 2, 0),
        (1, 14, 0),
        (2, 5, 0),
        (2, 7, 0),
        (1, 13, 10),
        (1, 9, 10),
    ):
        wrong = tables()
        wrong[group][index] = block
        assert not role.rows.is_loadable(wrong, 1, 4), (group, index)
    before = tables()
    before[0][0] = 0  # below what is loaded: vLLM's own affair
    assert role.rows.is_loadable(before, 1, 4)
    assert not role.rows.is_loadable(tables(), 1, 5)
    assert not role.rows.is_loadable(tables()[:2], 1, 4)

    prompt = tokens(8 * 64 + 1)
    warm(stand, prompt)
    role.rows.is_loadable = lambda *_: False
    request_id = stand.add(prompt)
    stand.run()
    (load,) = stand.workers.loads
    assert load.refs == () and len(stand.outputs[request_id]) == 4
    stand.check_idle()


def test_incomplete_pages_are_not_handed_over(model):
    stand = make(model, "window")
    prompt = tokens(4 * BLOCK + 9)
    request_id = stand.add(
        prompt,
        max_tokens=1,
        params={"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}},
    )
    stand.run()
    params = stand.transfer_params[request_id]
    assert params is not None and params["lookaside"]["tokens"] == 4 * BLOCK
    assert stand.holds(prompt) == 4 and len(stand.sidecars.held) == 4
    stand.forget_local()
    stand.add(prompt, params={"extra_args": {"kv_transfer_params": params}})
    stand.run()
    (load,) = stand.workers.loads
    assert len(stand.workers.rows(load.block_ids)) == 4
    stand.check_idle()


@every_shape
@pytest.mark.parametrize("seed", range(4))
def test_random_histories(model, shape, seed):
    rng = random.Random(f"{shape}{seed}")
    config = make_config(
        model, batched_tokens=rng.choice([48, 100, 512]), max_seqs=6, async_scheduling=seed % 2 == 1
    )
    page = max(spec.block_size for spec in SHAPES[shape])
    blocks = rng.choice([20, 40, 80]) * len(SHAPES[shape]) * (page // BLOCK)
    stand = Stand(config, kv_config=make_kv_config(blocks, SHAPES[shape]))
    random_history(stand, rng, steps=250)
