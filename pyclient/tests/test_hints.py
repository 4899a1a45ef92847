"""Hints of requests: how they are read, and what the scheduler role makes of them."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from lookaside import wire
from lookaside.config import ConfigError, parse
from lookaside.hints import HintReader, Hints
from scheduling import BLOCK, Stand, make_config, tokens

try:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
except ImportError:  # before 0.33
    KvHintAction = KvHintsEnvelope = None


@pytest.fixture
def stand(model):
    return Stand(make_config(model))


def ours(**hints: Any) -> dict[str, Any]:
    return {"lookaside": hints}


def envelope(*actions: tuple[str, Any], version: str = "1.0") -> dict[str, Any]:
    return {
        "protocol_version": "1.0",
        "message_id": "m",
        "actions": [
            {
                "action_id": str(number),
                "action_type": kind,
                "action_version": version,
                "payload": payload,
            }
            for number, (kind, payload) in enumerate(actions)
        ],
    }


def read(
    params: Any = None, kv_hints: Any = None, tenant: str = ""
) -> tuple[Hints, dict[str, int]]:
    """The hints that are read, and what was counted."""
    counted: Counter[str] = Counter()
    request = SimpleNamespace(kv_transfer_params=params, kv_hints=kv_hints)
    found = HintReader(tenant, lambda name: counted.update([name])).read(request)
    return found, dict(counted)


# ---- reading ----


@pytest.mark.parametrize(
    ("hints", "want"),
    [
        ({"tenant": "a"}, Hints(tenant="a")),
        ({"tenant": "größer/モデル"}, Hints(tenant="größer/モデル")),
        ({"retain_s": 60}, Hints(retain_ms=60_000)),
        ({"retain_s": 0.0001}, Hints(retain_ms=1)),
        ({"retain_s": 0}, Hints(retain_ms=0)),
        ({"retain_s": 1e300}, Hints(retain_ms=0xFFFFFFFF)),
        ({"pin_s": 1.5}, Hints(pin_ms=1500)),
        ({"priority": 0}, Hints(priority=1)),
        ({"priority": 100}, Hints(priority=100)),
        ({"priority": 35.0}, Hints(priority=35)),
        ({"store": False}, Hints(store=False)),
        ({"store_from_use": 2}, Hints(store_from_use=2)),
        ({"prefetch": True}, Hints(prefetch=True)),
        ({"prefetch": ["00" * 32, "ff" * 32]}, Hints(named=(bytes(32), b"\xff" * 32))),
        ({"demote": True}, Hints(demote=True)),
        ({"tokens": 5, "digest": "00"}, Hints()),
    ],
)
def test_each_hint(hints, want):
    found, counted = read(ours(**hints))
    assert found == want
    names = [name for name in hints if name not in ("tokens", "digest")]
    assert counted == {f"hints:{name}": 1 for name in names}


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        ({"tenant": ""}, "malformed"),
        ({"tenant": "t" * 65}, "malformed"),
        ({"tenant": "ü" * 33}, "malformed"),
        ({"tenant": "a\nb"}, "malformed"),
        ({"tenant": "\ud800"}, "malformed"),
        ({"tenant": 5}, "malformed"),
        ({"retain_s": -1}, "malformed"),
        ({"retain_s": "60"}, "malformed"),
        ({"retain_s": True}, "malformed"),
        ({"retain_s": float("nan")}, "malformed"),
        ({"retain_s": None}, "malformed"),
        ({"pin_s": float("inf")}, "malformed"),
        ({"pin_s": [1]}, "malformed"),
        ({"priority": 101}, "malformed"),
        ({"priority": 0.5}, "malformed"),
        ({"priority": -1}, "malformed"),
        ({"store": 0}, "malformed"),
        ({"store": "false"}, "malformed"),
        ({"store_from_use": 0}, "malformed"),
        ({"store_from_use": 256}, "malformed"),
        ({"prefetch": []}, "malformed"),
        ({"prefetch": ["00", "0000"]}, "malformed"),
        ({"prefetch": ["zz"]}, "malformed"),
        ({"prefetch": [5]}, "malformed"),
        ({"prefetch": [""]}, "malformed"),
        ({"prefetch": ["00" * 33]}, "malformed"),
        ({"prefetch": ["00" * 32] * 8193}, "malformed"),
        ({"prefetch": 1}, "malformed"),
        ({"demote": {}}, "malformed"),
        ({"retain": 5}, "unknown"),
        ({5: 5}, "unknown"),
    ],
)
def test_what_makes_no_sense_is_left_out_and_counted(hints, reason, caplog):
    caplog.set_level(logging.WARNING)
    found, counted = read({"lookaside": {**hints, "retain_s": hints.get("retain_s", 1)}})
    assert found == (Hints() if "retain_s" in hints else Hints(retain_ms=1000))
    assert counted.pop(f"hints_ignored:{reason}") == 1
    assert counted == ({} if "retain_s" in hints else {"hints:retain_s": 1})
    assert "a hint is ignored" in caplog.text


@pytest.mark.parametrize("params", ["x", 5, [], {"lookaside": 5}, {"lookaside": []}])
def test_parameters_that_are_no_dictionary(params):
    found, counted = read(params)
    assert found == Hints()
    assert counted.get("hints_ignored:malformed", 0) == isinstance(params, dict)


def test_a_flood_of_bad_hints_is_logged_at_a_bounded_rate(caplog):
    caplog.set_level(logging.WARNING)
    counted: Counter[str] = Counter()
    reader = HintReader("", lambda name: counted.update([name]))
    for number in range(1000):
        request = SimpleNamespace(kv_transfer_params=ours(priority=1000 + number))
        assert reader.read(request) == Hints()
    assert counted == {"hints_ignored:malformed": 1000}
    assert len(caplog.records) == 1


def test_the_default_tenant():
    assert read(tenant="mine")[0] == Hints(tenant="mine")
    assert read(ours(retain_s=1), tenant="mine")[0] == Hints(tenant="mine", retain_ms=1000)
    assert read(ours(tenant="other"), tenant="mine")[0] == Hints(tenant="other")
    assert parse({"lookaside.tenant": "a"}).tenant == "a"
    with pytest.raises(ConfigError, match="tenant"):
        parse({"lookaside.tenant": "t" * 65})


# ---- envelopes ----


@pytest.mark.parametrize(
    ("kind", "payload", "want"),
    [
        ("retain", {"ttl_s": 60}, Hints(retain_ms=60_000)),
        ("kv.retain", {"ttl_s": 60, "priority": 90}, Hints(retain_ms=60_000, priority=90)),
        ("lookaside.retain", {"priority": 10}, Hints(priority=10)),
        ("kv.pin", {"ttl_s": 5}, Hints(pin_ms=5000)),
        ("prefetch", {}, Hints(prefetch=True)),
        ("prefetch", None, Hints(prefetch=True)),
        ("kv.prefetch", {"hashes": ["00" * 32]}, Hints(named=(bytes(32),))),
        ("kv.demote", {}, Hints(demote=True)),
        ("kv.store", {"enabled": False}, Hints(store=False)),
        ("kv.store", {"from_use": 3}, Hints(store_from_use=3)),
        ("lookaside.hints", {"tenant": "a", "pin_s": 1}, Hints(tenant="a", pin_ms=1000)),
    ],
)
def test_actions_of_an_envelope(kind, payload, want):
    for params, hints in (
        (None, envelope((kind, payload))),
        ({"kv_hints": envelope((kind, payload))}, None),
        ({"kv_hint": envelope((kind, payload))}, None),
    ):
        found, counted = read(params, hints)
        assert found == want
        assert counted and all(name.startswith("hints:") for name in counted)


def test_a_request_may_have_both():
    found, _ = read(ours(retain_s=1), envelope(("kv.retain", {"ttl_s": 60, "priority": 70})))
    assert found == Hints(retain_ms=1000, priority=70)


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        (envelope(("kv.fetch", {"from": "somebody"})), "unknown"),
        (envelope(("kv.retain", {"ttl_s": 60}), version="2.0"), "unknown"),
        (envelope(("kv.retain", {"session": "s"})), "unknown"),
        (envelope(("kv.retain", "x")), "malformed"),
        (envelope(("kv.retain", {"ttl_s": "x"})), "malformed"),
        ({"actions": [{}]}, "malformed"),
        ({"actions": [5]}, "malformed"),
        ({"actions": 5}, "malformed"),
        ("x", "malformed"),
        (5, "malformed"),
    ],
)
def test_envelopes_that_are_not_for_us_or_make_no_sense(hints, reason):
    found, counted = read(None, hints)
    assert found == Hints()
    assert counted == {f"hints_ignored:{reason}": 1}


def test_an_envelope_of_many_actions():
    found, counted = read(None, envelope(*[("kv.retain", {"ttl_s": n}) for n in range(1, 100)]))
    assert found == Hints(retain_ms=64_000)
    assert counted == {"hints:retain_s": 1, "hints_ignored:malformed": 1}


class Hostile:
    @property
    def actions(self) -> Any:
        raise RuntimeError("boom")


def test_nothing_of_a_hint_fails_a_request():
    found, counted = read(ours(), Hostile())
    assert found == Hints()
    assert counted == {"hints_ignored:malformed": 1}


# ---- the scheduler role ----


def of(stand: Stand, action: int) -> list[Any]:
    return [each for each in stand.sidecars.advices if each.action == action]


def test_requests_without_hints_advise_nothing(stand):
    stand.add(tokens(8 * BLOCK))
    stand.run()
    assert not stand.sidecars.advices
    (lookup,) = stand.sidecars.lookups
    assert lookup.tenant == ""
    for save in stand.workers.saves:
        assert save.hints == Hints().of_store()
    stand.check_idle()


def test_the_tenant_goes_with_lookups_and_saves(model):
    stand = Stand(make_config(model, {"lookaside.tenant": "mine"}))
    stand.add(tokens(8 * BLOCK, seed=1))
    stand.add(tokens(8 * BLOCK, seed=2), transfer_params=ours(tenant="other"))
    stand.run()
    assert [each.tenant for each in stand.sidecars.lookups] == ["mine", "other"]
    assert {save.hints["tenant"] for save in stand.workers.saves} == {"mine", "other"}
    stand.check_idle()


def test_retain_and_pin(stand):
    prompt = tokens(8 * BLOCK)
    params = ours(retain_s=60, priority=80, pin_s=5, tenant="a")
    stand.add(prompt, max_tokens=BLOCK + 1, transfer_params=params)
    retained, pinned = of(stand, wire.ADVISE_RETAIN), of(stand, wire.ADVISE_PIN)
    assert [each[1:4] for each in retained] == [(60_000, 80, "a")]
    assert [each[1:4] for each in pinned] == [(5000, 0, "a")]
    assert retained[0].digests == pinned[0].digests == stand.digests(prompt)
    stand.run()
    # Again at the end, with what was generated.
    retained, pinned = of(stand, wire.ADVISE_RETAIN), of(stand, wire.ADVISE_PIN)
    assert len(retained) == len(pinned) == 2
    assert len(retained[1].digests) == len(pinned[1].digests) == 9
    assert retained[1].digests[:8] == stand.digests(prompt)
    assert stand.workers.saves
    for save in stand.workers.saves:
        assert save.hints == {
            "tenant": "a",
            "priority": 80,
            "retain_ms": 60_000,
            "pin_ms": 5000,
            "from_use": 0,
        }
    stand.check_idle()


def test_demote(stand):
    prompt = tokens(8 * BLOCK)
    stand.add(prompt, transfer_params=ours(demote=True))
    assert not stand.sidecars.advices
    stand.run()
    (demoted,) = of(stand, wire.ADVISE_DEMOTE)
    assert demoted.digests == stand.digests(prompt)
    assert {save.hints["priority"] for save in stand.workers.saves} == {1}
    stand.check_idle()


def test_prefetch(stand):
    prompt, other = tokens(8 * BLOCK), [b"%032d" % i for i in range(5)]
    stand.add(prompt, transfer_params=ours(prefetch=True))
    stand.add(prompt, transfer_params=ours(prefetch=[each.hex() for each in other]))
    assert [each.digests for each in of(stand, wire.ADVISE_PREFETCH)] == [
        stand.digests(prompt),
        other,
    ]
    stand.add(prompt, transfer_params=ours(prefetch=["00" * 8]))  # no digests of this model
    stand.run()
    assert len(stand.sidecars.advices) == 2
    assert stand.counts["hints:prefetch"] == 3
    assert stand.counts["hints_ignored:malformed"] == 1
    stand.check_idle()


def test_what_is_not_to_be_stored_is_not_sent(stand):
    prompt = tokens(8 * BLOCK)
    stand.add(prompt, max_tokens=3 * BLOCK, transfer_params=ours(store=False))
    stand.run()
    assert not stand.workers.saves
    assert stand.holds(prompt) == 0
    stand.check_idle()
    # It still hits what others have stored.
    stand.forget_local()
    stand.add(prompt, max_tokens=1)
    stand.run()
    stand.forget_local()
    stand.add(prompt, max_tokens=1, transfer_params=ours(store=False))
    stand.run()
    assert len(stand.workers.loads) == 1
    stand.check_idle()


def test_uses_before_a_store_are_the_sidecars_to_count(stand):
    stand.add(tokens(8 * BLOCK), transfer_params=ours(store_from_use=2))
    stand.run()
    assert {save.hints["from_use"] for save in stand.workers.saves} == {2}
    stand.check_idle()


def test_a_request_that_is_handed_over_may_have_hints(model):
    """Hints stand beside the promise of a prefiller, in both directions."""
    stand = Stand(make_config(model))
    prompt = tokens(8 * BLOCK + 5)
    params = {"do_remote_decode": True, **ours(retain_s=60)}
    first = stand.add(prompt, max_tokens=1, transfer_params=params)
    stand.run()
    promise = stand.transfer_params[first]["lookaside"]
    assert promise["tokens"] == len(prompt)
    stand.forget_local()
    stand.workers.loads.clear()
    stand.sidecars.advices.clear()
    stand.add(prompt, transfer_params=ours(**promise, pin_s=5))
    stand.run()
    (load,) = stand.workers.loads
    assert len(load.block_ids) == 9
    assert {each.action for each in stand.sidecars.advices} == {wire.ADVISE_PIN}
    stand.check_idle()


def test_advice_that_cannot_be_sent_is_counted(stand):
    stand.sidecars.reads_advice = False
    stand.add(tokens(8 * BLOCK), transfer_params=ours(retain_s=60))
    stand.run()
    assert stand.counts["hints_ignored:unsent"] == 2
    stand.sidecars.available = False
    stand.sidecars.advices.clear()
    stand.add(tokens(8 * BLOCK), transfer_params=ours(retain_s=60))
    stand.run()
    assert not stand.sidecars.advices
    assert stand.counts["hints_ignored:unsent"] == 4
    stand.check_idle()


@pytest.mark.parametrize(
    "params", [{"lookaside": "x"}, {"lookaside": {"retain_s": object()}}, ours(prefetch=[{}])]
)
def test_malformed_hints_do_not_fail_a_request(stand, params):
    request = stand.add(tokens(8 * BLOCK), transfer_params=params)
    stand.run()
    assert len(stand.outputs[request]) == 4
    stand.check_idle()


@pytest.mark.skipif(KvHintsEnvelope is None, reason="this vLLM has no Request.kv_hints")
def test_vllms_own_envelope(stand):
    actions = [
        KvHintAction("1", "kv.retain", "1.0", {"ttl_s": 60, "priority": 90}),
        KvHintAction("2", "kv.fetch", "1.0", {}),
    ]
    prompt = tokens(8 * BLOCK)
    stand.add(prompt, kv_hints=KvHintsEnvelope("1.0", "m", actions))
    (retained,) = of(stand, wire.ADVISE_RETAIN)
    assert retained[1:] == (60_000, 90, "", stand.digests(prompt))
    stand.run()
    assert stand.counts["hints:retain_s"] == stand.counts["hints:priority"] == 1
    assert stand.counts["hints_ignored:unknown"] == 1
    stand.check_idle()
