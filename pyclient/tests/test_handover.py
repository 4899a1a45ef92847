"""Prefill and decode apart: what a producer hands over and a consumer takes, in vLLM's real
Schedulers."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
from lookaside import handover
from scheduling import (
    BLOCK,
    ScriptedSidecars,
    Stand,
    make_config,
    tokens,
    write_adapter,
)
from vllm.lora.request import LoRARequest

CHUNK = 4  # pages


def put(role: str, model, sidecars: ScriptedSidecars, blocks: int = 200, **config: Any) -> Stand:
    """An instance of this role on the sidecars."""
    extra = {"lookaside.handover_timeout_ms": 100}
    stand = Stand(make_config(model, extra, connector={"kv_role": role}, **config), blocks=blocks)
    stand.sidecars = stand.workers.sidecars = sidecars
    stand.role.setup.sidecars = sidecars
    return stand


class Pair:
    """A prefiller and a decoder on the same sidecars."""

    def __init__(
        self, model, prefiller: str = "kv_producer", decoder: str = "kv_consumer", **config: Any
    ) -> None:
        self.sidecars = ScriptedSidecars()
        self.p = put(prefiller, model, self.sidecars, **config)
        self.d = put(decoder, model, self.sidecars, **config)

    def prefill(self, prompt: list[int], **kwargs: Any) -> dict[str, Any] | None:
        """The kv_transfer_params of the prefiller's answer."""
        request_id = ask(self.p, prompt, {"do_remote_decode": True}, max_tokens=1, **kwargs)
        self.p.run()
        return self.p.transfer_params[request_id]

    def check_idle(self) -> None:
        self.p.check_idle(self.d)
        self.d.check_idle(self.p)


def ask(
    stand: Stand, prompt: list[int], params: dict[str, Any] | None = None, **kwargs: Any
) -> str:
    """Add a request with these kv_transfer_params."""
    extra = {"extra_args": {"kv_transfer_params": params}} if params is not None else {}
    return stand.add(prompt, params=extra, **kwargs)


def computed(stand: Stand, request_id: str) -> int:
    """Run; the tokens of the request that were computed before its first answer."""
    count = 0
    while not stand.outputs[request_id]:
        batch = stand.step()
        count += batch.scheduled.num_scheduled_tokens.get(request_id, 0)
    stand.run()
    return count


LENGTHS = [
    1,
    2,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    BLOCK + 2,
    4 * BLOCK,
    4 * BLOCK + 1,
    4 * BLOCK + 9,
    10 * BLOCK + 7,
]


@pytest.mark.parametrize("passed_on", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_is_handed_over_to_its_last_token(model, length, passed_on):
    pair = Pair(model)
    prompt = tokens(length)
    params = pair.prefill(prompt)
    again = ask(pair.d, prompt, params if passed_on else None)
    # Of a last page with one token nothing is stored: it is computed anyway.
    handed = length - (length % BLOCK == 1)
    assert computed(pair.d, again) == max(1, length - handed)
    assert pair.d.counts.get("hit_tokens", 0) == handed
    if handed:
        assert (params is not None and handover.read(pair.d.requests[again]) is None) or passed_on
        assert params["lookaside"]["tokens"] == handed
    else:
        assert params is None
    assert len(pair.d.outputs[again]) == 4
    assert not pair.d.workers.saves and not pair.p.workers.loads
    pair.check_idle()


def test_a_producer_never_asks_and_a_consumer_never_stores(model):
    pair = Pair(model)
    prompt = tokens(9 * BLOCK + 3)
    pair.prefill(prompt)
    pair.p.forget_local()
    pair.prefill(prompt)
    assert not pair.sidecars.lookups and not pair.p.workers.loads
    request_id = pair.d.add(prompt, max_tokens=3 * BLOCK)
    pair.d.run()
    other = pair.d.add(tokens(5 * BLOCK, seed=2))
    pair.d.run()
    assert not pair.d.workers.saves and not pair.d.role.saves.pins
    assert len(pair.d.outputs[request_id]) == 3 * BLOCK and len(pair.d.outputs[other]) == 4
    pair.check_idle()


@pytest.mark.parametrize("params", [None, {"do_remote_decode": False}, {}])
def test_kv_both_hands_over_only_what_it_is_asked_to(model, params):
    pair = Pair(model, "kv_both", "kv_both")
    prompt = tokens(6 * BLOCK + 5)
    request_id = ask(pair.p, prompt, params, max_tokens=1)
    pair.p.run()
    assert pair.p.transfer_params[request_id] is None
    again = pair.d.add(prompt)
    assert computed(pair.d, again) == 5
    asked = pair.prefill(prompt)
    pair.d.forget_local()
    again = ask(pair.d, prompt, asked)
    assert computed(pair.d, again) == 1
    pair.check_idle()


@pytest.mark.parametrize("is_async", [False, True])
def test_chunked_prefill_with_slow_copies(model, is_async):
    pair = Pair(model, batched_tokens=3 * BLOCK + 5, async_scheduling=is_async)
    pair.p.workers.copy_steps = 3
    pair.d.workers.load_steps = 2
    prompts = [tokens(length, seed=i) for i, length in enumerate((70, 100, 161, 163, 256))]
    for prompt in prompts:
        again = ask(pair.d, prompt, pair.prefill(prompt))
        pair.d.run()
        assert len(pair.d.outputs[again]) == 4
    assert pair.d.counts["hit_tokens"] == sum(
        len(prompt) - (len(prompt) % BLOCK == 1) for prompt in prompts
    )
    pair.check_idle()


@pytest.mark.parametrize("more", [0, 1, 5, BLOCK, 3 * BLOCK])
def test_a_prompt_that_goes_on(model, more):
    """With the first token, or the next turn, behind it: hit to where the prefiller's prompt
    ended."""
    pair = Pair(model)
    prompt = tokens(6 * BLOCK + 9)
    params = pair.prefill(prompt)
    longer = prompt + tokens(more, seed=4)
    again = ask(pair.d, longer, params)
    # Where the page goes on to be whole it has another name.
    handed = len(prompt) if 9 + more <= BLOCK else 6 * BLOCK
    assert computed(pair.d, again) == max(1, len(longer) - handed)
    pair.check_idle()


def test_the_next_turn_replaces_the_incomplete_page(model):
    pair = Pair(model, "kv_both", "kv_both")
    prompt = tokens(6 * BLOCK + 9)
    first = ask(pair.p, prompt, {"do_remote_decode": True}, max_tokens=2 * BLOCK)
    pair.p.run()
    assert pair.p.transfer_params[first]["lookaside"]["tokens"] == len(prompt)
    whole = prompt + pair.p.outputs[first]
    assert pair.p.holds(whole) == (len(whole) - 1) // BLOCK
    again = ask(pair.d, whole, pair.p.transfer_params[first])
    assert computed(pair.d, again) == len(whole) - (len(whole) - 1) // BLOCK * BLOCK
    pair.check_idle()


# ---- the promise ----


def test_a_decoder_waits_for_stores_under_way_and_nobody_else_does(model):
    pair = Pair(model)
    pair.p.workers.copy_steps = 10**9  # the answer is out before the copies have begun
    prompt = tokens(7 * BLOCK + 4)
    request_id = ask(pair.p, prompt, {"do_remote_decode": True}, max_tokens=1)
    while not pair.p.outputs[request_id]:
        pair.p.step()
    params = pair.p.transfer_params[request_id]
    assert params is not None and not pair.sidecars.held
    again = ask(pair.d, prompt, params)
    other = pair.d.add(tokens(5 * BLOCK, seed=3))
    for _ in range(40):
        pair.d.step()
    assert len(pair.d.outputs[other]) == 4 and not pair.d.outputs[again]
    asked = len(pair.sidecars.lookups)
    assert 4 < asked < 14, "asked again now and then, not in every step"
    pair.p.workers.copying = [(0, save) for _, save in pair.p.workers.copying]
    pair.p.workers.copy_steps = 0
    pair.p.run()
    assert computed(pair.d, again) == 1
    assert pair.d.counts["hit_tokens"] == len(prompt)
    assert "promises_broken" not in pair.d.counts
    pair.check_idle()


def test_what_is_not_there_in_time_is_computed(model):
    pair = Pair(model)
    prompt = tokens(7 * BLOCK + 4)
    params = pair.prefill(prompt)
    digests = pair.p.digests(prompt)
    del pair.sidecars.held[digests[5]]
    again = ask(pair.d, prompt, params)
    started = pair.d.clock
    assert computed(pair.d, again) == 2 * BLOCK + 4
    assert 0.1 < pair.d.clock - started < 0.13
    assert pair.d.counts["hit_tokens"] == 5 * BLOCK
    assert pair.d.counts["promises_broken"] == 1
    pair.check_idle()


def test_an_early_answer_does_not_outlive_the_wait_for_other_things(model):
    """A lookup that fell short while the request could not be scheduled is repeated even after its
    deadline."""
    pair = Pair(model, max_seqs=1)
    pair.p.workers.copy_steps = 10**9
    prompt = tokens(7 * BLOCK + 4)
    request_id = ask(pair.p, prompt, {"do_remote_decode": True}, max_tokens=1)
    while not pair.p.outputs[request_id]:
        pair.p.step()
    pair.d.add(tokens(BLOCK, seed=8), max_tokens=150)
    pair.d.step()
    again = ask(pair.d, prompt, pair.p.transfer_params[request_id])
    for _ in range(120):  # the deadline is at 100
        pair.d.step()
    pair.p.workers.copying = [(0, save) for _, save in pair.p.workers.copying]
    pair.p.run()
    assert computed(pair.d, again) == 1
    pair.check_idle()


def test_a_sidecar_that_leaves_ends_the_wait(model):
    pair = Pair(model)
    prompt = tokens(7 * BLOCK + 4)
    params = pair.prefill(prompt)
    pair.sidecars.held.clear()
    again = ask(pair.d, prompt, params)
    for _ in range(5):
        pair.d.step()
    assert not pair.d.outputs[again]
    pair.sidecars.available = False
    started = pair.d.clock
    assert computed(pair.d, again) == len(prompt)
    assert pair.d.clock - started < 0.02
    pair.check_idle()


def test_a_promise_of_another_prompt_is_said_once_and_not_waited_for(model, caplog):
    pair = Pair(model)
    prompt = tokens(6 * BLOCK + 9)
    params = pair.prefill(tokens(6 * BLOCK + 9, seed=1))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            again = ask(pair.d, prompt, params)
            started = pair.d.clock
            assert computed(pair.d, again) in (
                len(prompt),
                9,
            )  # the second time it is vLLM's own hit
            assert pair.d.clock - started < 0.05
    assert caplog.text.count("names the pages of a prompt otherwise") == 1
    pair.check_idle()


@pytest.mark.parametrize(
    "ours",
    [
        None,
        [],
        "x",
        {},
        {"tokens": 8},
        {"tokens": "8", "digest": "00"},
        {"tokens": True, "digest": "00"},
        {"tokens": -1, "digest": "00"},
        {"tokens": 2**63, "digest": "00"},
        {"tokens": 8, "digest": 5},
        {"tokens": 8, "digest": "zz"},
        {"tokens": 8, "digest": "00" * 10**6},
        {"tokens": 6 * BLOCK, "digest": ""},
    ],
)
def test_what_is_no_promise_changes_nothing(model, ours):
    pair = Pair(model, decoder="kv_both")
    prompt = tokens(6 * BLOCK + 9)
    pair.prefill(prompt)
    again = ask(pair.d, prompt, {"lookaside": ours, "remote_host": "elsewhere"})
    assert computed(pair.d, again) == 9
    assert not pair.d.counts.get("errors")
    pair.check_idle()


def test_a_promise_is_read_only_from_a_dictionary():
    for params in (None, 7, "lookaside", ["lookaside"]):
        request: Any = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=100)
        assert handover.read(request) is None and not handover.is_asked(request)


def test_without_a_sidecar_nothing_is_promised(model):
    pair = Pair(model)
    pair.sidecars.available = False
    assert pair.prefill(tokens(6 * BLOCK + 9)) is None
    pair.check_idle()


# ---- names ----


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "alice"}, {"cache_salt": "bob"}),
        ({"cache_salt": "alice"}, {}),
        ({"adapter": "a"}, {"adapter": "b"}),
        ({"adapter": "a"}, {"adapter": "a", "weights": b"other"}),
        ({}, {"adapter": "a"}),
    ],
)
@pytest.mark.parametrize("length", [BLOCK - 3, 5 * BLOCK + 6])
def test_salts_and_adapters_do_not_share_an_incomplete_page(model, tmp_path, one, other, length):
    def keywords(adapter: str | None = None, weights: bytes = b"", **rest: Any) -> dict[str, Any]:
        if adapter is not None:
            path = write_adapter(tmp_path / adapter / weights.decode(), weights)
            rest["lora_request"] = LoRARequest(adapter, 1, str(path))
        return rest

    pair = Pair(model, adapters=True)
    prompt = tokens(length)
    params = pair.prefill(prompt, **keywords(**one))
    foreign = ask(pair.d, prompt, **keywords(**other))
    assert computed(pair.d, foreign) == length
    # Another instance: in this one adapter number 1 is another by now.
    pair.d.check_idle(pair.p)
    pair.d = put("kv_consumer", model, pair.sidecars, adapters=True)
    same = ask(pair.d, prompt, params, **keywords(**one))
    assert computed(pair.d, same) == 1
    pair.p.check_idle(pair.d)


def test_names_of_incomplete_pages_differ_by_every_token(model):
    stand = put("kv_both", model, ScriptedSidecars())
    prompt = tokens(3 * BLOCK)
    request = stand.requests[stand.add(prompt)]
    names = [stand.role.names.ends.digest(request, count) for count in range(1, len(prompt) + 1)]
    assert len(set(names)) == len(names) and all(len(name) == 32 for name in names)
    assert [names[i * BLOCK - 1] for i in (1, 2, 3)] == stand.digests(prompt)
    assert (
        stand.role.names.ends.digest(request, 0)
        == stand.role.names.ends.digest(request, len(prompt) + 1)
        == b""
    )
    stand.run()


# ---- failures ----


@pytest.mark.parametrize("fail_requests", [False, True])
@pytest.mark.parametrize("bad", [[0], [6], [7], range(8)])
def test_failed_loads_of_what_was_handed_over(model, bad, fail_requests):
    pair = Pair(model)
    prompt = tokens(7 * BLOCK + 4)
    params = pair.prefill(prompt)
    pair.d.workers.fail_pages = lambda load: bad
    pair.d.workers.fail_requests = fail_requests
    again = ask(pair.d, prompt, params)
    pair.d.run()
    assert len(pair.d.outputs[again]) == 4 and len(pair.d.workers.loads) == 1
    pair.check_idle()


@pytest.mark.parametrize("seed", range(4))
def test_random_handovers(model, seed):
    """Prompts of any length, some of one prefix; preemption, aborts, failures, slow copies and
    answers."""
    rng = random.Random(seed)
    roles = rng.choice(
        [("kv_producer", "kv_consumer"), ("kv_both", "kv_both"), ("kv_producer", "kv_both")]
    )
    pair = Pair(
        model,
        *roles,
        blocks=rng.choice([25, 40]),
        batched_tokens=rng.choice([48, 100, 512]),
        max_seqs=6,
        async_scheduling=seed % 2 == 1,
    )
    pair.d.workers.fail_pages = lambda load: (
        [rng.randrange(len(load.block_ids))] if rng.random() < 0.1 else ()
    )
    prefilling: dict[str, list[int]] = {}
    decoding: list[str] = []
    for _ in range(500):
        roll = rng.random()
        if roll < 0.15:
            prompt = tokens(rng.randrange(1, 9 * BLOCK), seed=rng.randrange(8))
            request_id = ask(pair.p, prompt, {"do_remote_decode": True}, max_tokens=1)
            prefilling[request_id] = prompt
        elif roll < 0.17 and decoding:
            pair.d.abort(decoding.pop(rng.randrange(len(decoding))))
        elif roll < 0.2:
            pair.p.workers.copy_steps = rng.randrange(30)
            pair.d.workers.load_steps = rng.randrange(4)
            pair.d.workers.fail_requests = rng.random() < 0.5
            pair.sidecars.hold_answers = rng.random() < 0.3
            pair.sidecars.available = rng.random() < 0.9
        for lookup in pair.sidecars.lookups:
            if lookup.answer is None and not lookup.cancelled and rng.random() < 0.4:
                pair.sidecars.answer(lookup)
        for request_id in [each for each in prefilling if each in pair.p.finish_reasons]:
            prompt, params = prefilling.pop(request_id), pair.p.transfer_params[request_id]
            decoding.append(
                ask(
                    pair.d,
                    prompt,
                    params if rng.random() < 0.8 else None,
                    max_tokens=rng.randrange(1, 40),
                )
            )
        pair.p.step()
        pair.d.step()
    pair.sidecars.hold_answers, pair.sidecars.available = False, True
    for lookup in pair.sidecars.lookups:
        if lookup.answer is None:
            pair.sidecars.answer(lookup)
    pair.p.run(5000)
    pair.d.run(5000)
    assert len(pair.d.workers.loads) > 5
    assert not pair.p.counts.get("errors") and not pair.d.counts.get("errors")
    pair.check_idle()
