"""The scheduler role inside vLLM's real Scheduler, weights and sidecar left out."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lookaside import identity
from scheduling import (
    BLOCK,
    Stand,
    full_attention,
    image,
    make_config,
    make_kv_config,
    needs_lookahead,
    tokens,
    use_lookahead,
    weights_of,
    write_adapter,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCore

CHUNK = 4  # pages


@pytest.fixture
def stand(model):
    return Stand(make_config(model))


def warm(stand: Stand, prompt: list[int], **kwargs) -> None:
    """Have the sidecars hold a prompt, and vLLM not."""
    stand.add(prompt, max_tokens=1, **kwargs)
    stand.run()
    stand.forget_local()
    stand.workers.saves.clear()
    stand.sidecars.lookups.clear()


# ---- hits ----


def test_a_cold_prompt_is_saved_and_hit_after_a_reset(stand):
    prompt = tokens(10 * BLOCK + 3)
    stand.add(prompt)
    stand.run()
    assert stand.holds(prompt) == 10
    stand.check_idle()
    stand.forget_local()
    again = stand.add(prompt)
    stand.run()
    (load,) = stand.workers.loads
    assert (load.request_id, load.first_page, len(load.block_ids)) == (again, 0, 10)
    assert len(stand.outputs[again]) == 4
    stand.check_idle()


@pytest.mark.parametrize("extra", [0, 1, BLOCK - 1])
def test_a_hit_ends_before_the_last_token(stand, extra):
    prompt = tokens(8 * BLOCK + extra)
    warm(stand, prompt)
    stand.add(prompt)
    stand.run()
    (load,) = stand.workers.loads
    assert len(load.block_ids) == (8 if extra else 7)
    stand.check_idle()


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_short_prompts(stand, length):
    prompt = tokens(length)
    warm(stand, prompt)
    stand.add(prompt)
    stand.run()
    assert len(stand.workers.loads) == (length > BLOCK)
    stand.check_idle()


def test_a_part_of_a_prefix_is_hit_and_the_rest_saved(stand):
    shared = tokens(6 * BLOCK)
    warm(stand, shared + tokens(40, seed=1))
    prompt = shared + tokens(6 * BLOCK, seed=2)
    stand.add(prompt)
    stand.run()
    (load,) = stand.workers.loads
    assert len(load.block_ids) == 6
    assert stand.holds(prompt) == 12
    first = stand.workers.saves[0]
    # The chunk that the hit ends in is offered from its first page.
    assert (first.first_page, len(first.block_ids)) == (4, 8)
    assert first.prev == stand.digests(prompt)[3]
    stand.check_idle()


def test_only_what_vllm_lacks_is_loaded(stand):
    prompt = tokens(12 * BLOCK + 1)
    warm(stand, prompt)
    stand.add(prompt[: 5 * BLOCK + 1], max_tokens=1)
    stand.run()
    stand.workers.loads.clear()
    stand.sidecars.lookups.clear()
    stand.add(prompt)
    stand.run()
    (lookup,) = stand.sidecars.lookups
    assert lookup.first_page == 0 and lookup.trims == [5]
    (load,) = stand.workers.loads
    assert load.first_page == 5 and len(load.block_ids) == 7
    assert load.refs == lookup.refs
    stand.check_idle()


def test_a_local_hit_as_long_as_ours_loads_nothing(stand):
    prompt = tokens(6 * BLOCK + 1)
    stand.add(prompt, max_tokens=1)
    stand.run()
    stand.add(prompt)
    stand.run()
    assert not stand.workers.loads
    stand.check_idle()


def test_sidecars_are_told_what_was_found_loaded_and_computed(stand):
    """One of each: computed, in vLLM's own cache, loaded, loaded in part, not loaded although it
    was found."""
    told = stand.sidecars.prefilled
    prompt = tokens(6 * BLOCK + 1)
    stand.add(prompt, max_tokens=1)
    stand.run()
    assert told == [(6 * BLOCK + 1, 0, 0, 0)]
    stand.add(prompt)
    stand.run()
    # The lookup found all six pages. vLLM needed none of them.
    assert stand.sidecars.lookups[-1].answer == 6 and told[1:] == [(1, 0, 0, 6 * BLOCK)]
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert told[2:] == [(6 * BLOCK + 1, 6 * BLOCK, 6 * BLOCK, 0)]
    stand.add(prompt + tokens(2 * BLOCK, seed=3))
    stand.run()
    assert told[3:] == [(2 * BLOCK + 1, 0, 0, 6 * BLOCK)]
    stand.forget_local()
    stand.workers.fail_pages = lambda load: [0]
    stand.add(prompt)
    stand.run()
    assert told[4:] == [(6 * BLOCK + 1, 6 * BLOCK, 0, 0)]
    # The fourth hit ended where vLLM's own did.
    assert stand.sidecars.reasons == ["end", "engine_had", "end", "engine_had", "lost"]
    assert all(each.request for each in stand.sidecars.lookups)
    stand.check_idle()


def test_sidecars_are_not_told_of_a_request_that_ends_while_it_loads(stand):
    prompt = tokens(6 * BLOCK + 1)
    warm(stand, prompt)
    stand.workers.load_steps = 5
    stand.sidecars.prefilled.clear()
    loading = stand.add(prompt)
    while not stand.workers.loads:
        stand.step()
    stand.abort(loading)
    stand.run()
    assert not stand.sidecars.prefilled
    stand.check_idle()


def test_sidecars_are_told_of_a_request_that_comes_back(model):
    """What a preempted request computes or loads again counts again."""
    stand = Stand(make_config(model), blocks=20)
    requests = [stand.add(tokens(6 * BLOCK, seed=seed), max_tokens=80) for seed in range(2)]
    stand.run()
    again = sum(stand.requests[each].num_preemptions for each in requests)
    assert again and len(stand.sidecars.prefilled) == 2 + again
    stand.check_idle()


def test_the_lookup_starts_when_the_request_is_added(stand):
    prompt = tokens(6 * BLOCK)
    warm(stand, prompt)
    stand.add(prompt)
    (lookup,) = stand.sidecars.lookups
    assert lookup.digests == stand.digests(prompt)[:5]
    stand.run()
    assert len(stand.sidecars.lookups) == 1


def test_vllm_asks_again_while_the_answer_is_out(stand):
    prompt = tokens(6 * BLOCK + 1)
    warm(stand, prompt)
    stand.sidecars.hold_answers = True
    waiting = stand.add(prompt)
    (lookup,) = stand.sidecars.lookups
    stand.sidecars.hold_answers = False
    other = stand.add(tokens(5 * BLOCK, seed=9))
    for _ in range(8):
        stand.step()
    assert len(stand.outputs[other]) == 4, "others must not wait"
    assert not stand.outputs[waiting] and lookup.polls == 8
    stand.sidecars.answer(lookup)
    stand.run()
    assert len(stand.outputs[waiting]) == 4
    (load,) = stand.workers.loads
    assert load.refs == lookup.refs
    stand.check_idle()


def test_asking_again_and_again_asks_the_sidecar_once(model):
    stand = Stand(make_config(model), blocks=20)
    prompt = tokens(10 * BLOCK + 1)
    warm(stand, prompt)
    hog = stand.add(tokens(12 * BLOCK, seed=5), max_tokens=90)
    stand.step()
    stand.sidecars.lookups.clear()
    late = stand.add(prompt, max_tokens=1)
    for _ in range(50):
        stand.step()
    assert not stand.outputs[late], "it cannot be allocated yet"
    (lookup,) = stand.sidecars.lookups
    assert lookup.polls == 1 and not lookup.cancelled
    stand.abort(hog)
    stand.run()
    assert [load.refs for load in stand.workers.loads] == [lookup.refs]
    stand.check_idle()


def test_an_old_answer_is_asked_for_again(model):
    stand = Stand(make_config(model), blocks=20)
    prompt = tokens(10 * BLOCK + 1)
    warm(stand, prompt)
    hog = stand.add(tokens(12 * BLOCK, seed=5), max_tokens=90)
    stand.step()
    stand.sidecars.lookups.clear()
    stand.add(prompt, max_tokens=1)
    missing = stand.add(tokens(10 * BLOCK, seed=6), max_tokens=1)
    stand.step()
    hit, miss = stand.sidecars.lookups
    stand.clock += 5
    stand.step()
    assert stand.sidecars.lookups[:2] == [hit, miss] and not hit.cancelled
    stand.clock += 11
    stand.step()
    assert hit.cancelled
    stand.abort(missing)
    stand.abort(hog)
    stand.run()
    (load,) = stand.workers.loads
    assert load.refs == stand.sidecars.lookups[-1].refs != hit.refs
    stand.check_idle()


@pytest.mark.parametrize("abort", [False, True])
def test_what_has_loaded_is_not_stuck_behind_what_has_no_room(model, abort):
    """vLLM 0.30 goes through those that wait in order, up to the first without blocks, though
    others hold them."""
    stand = Stand(make_config(model), blocks=14)
    prompt = tokens(6 * BLOCK + 1, seed=1)
    warm(stand, prompt)
    stand.workers.load_steps = 2
    stand.sidecars.hold_answers = True
    large = stand.add(tokens(9 * BLOCK, seed=2))
    (waiting,) = stand.sidecars.lookups
    stand.sidecars.hold_answers = False
    small = stand.add(prompt)
    stand.step()
    assert len(stand.workers.loads) == 1
    stand.sidecars.answer(waiting)
    if abort:
        stand.abort(small)
    stand.run()
    assert len(stand.outputs[large]) == 4 and len(stand.outputs[small]) == (0 if abort else 4)
    stand.check_idle()


def test_a_shrinking_local_hit_is_looked_up_anew(stand):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.add(prompt)
    request = list(stand.requests.values())[-1]
    connector = stand.connector
    assert connector.get_num_new_matched_tokens(request, 6 * BLOCK) == (2 * BLOCK, True)
    assert connector.get_num_new_matched_tokens(request, 6 * BLOCK) == (2 * BLOCK, True)
    assert connector.get_num_new_matched_tokens(request, 5 * BLOCK) == (3 * BLOCK, True)
    old, new = stand.sidecars.lookups
    assert (
        old.cancelled and new.first_page == 4
    )  # the chunk's first, as tiers know whole chunks only
    assert connector.get_num_new_matched_tokens(request, 5 * BLOCK + 1) == (0, False)
    assert new.cancelled
    assert connector.get_num_new_matched_tokens(request, 8 * BLOCK) == (0, False)
    stand.run()
    stand.check_idle()


def test_a_request_may_refuse_cached_prefixes(stand):
    prompt = tokens(6 * BLOCK + 1)
    warm(stand, prompt)
    stand.add(prompt, params={"skip_reading_prefix_cache": True})
    stand.run()
    assert not stand.workers.loads and not stand.sidecars.lookups
    stand.check_idle()


@pytest.mark.parametrize("salt", ["b", None])
def test_salts_do_not_share(stand, salt):
    prompt = tokens(6 * BLOCK + 1)
    warm(stand, prompt, cache_salt="a")
    stand.add(prompt, cache_salt=salt)
    stand.run()
    assert not stand.workers.loads
    stand.forget_local()
    stand.add(prompt, cache_salt="a")
    stand.run()
    assert len(stand.workers.loads) == 1
    stand.check_idle()


def lora(path: Path, name: str = "l", number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, str(path))


@pytest.fixture
def pair(model):
    """Two instances on the same sidecars."""
    one, other = (Stand(make_config(model, adapters=True)) for _ in range(2))
    other.sidecars = other.workers.sidecars = other.role.setup.sidecars = one.sidecars
    for stand in (one, other):
        stand.scheduler.max_num_encoder_input_tokens = 4096
        stand.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
    return one, other


def loaded(stand: Stand, prompt: list[int], **kwargs) -> int:
    """The pages that a request loads."""
    before = len(stand.workers.loads)
    stand.add(prompt, **kwargs)
    stand.run()
    return sum(len(load.block_ids) for load in stand.workers.loads[before:])


def test_adapters_of_one_name_do_not_share(pair, tmp_path):
    """Whatever vLLM's own hash covers: until 0.31 that was the name alone."""
    here, there = pair
    prompt = tokens(6 * BLOCK + 1)
    one, other = write_adapter(tmp_path / "one", b"1"), write_adapter(tmp_path / "other", b"2")
    warm(here, prompt, lora_request=lora(one))
    assert loaded(there, prompt, lora_request=lora(other)) == 0
    assert loaded(there, tokens(6 * BLOCK + 1)) == 0  # without an adapter
    here.forget_local()
    assert loaded(here, prompt, lora_request=lora(one)) == 6
    here.check_idle(there)


def test_an_adapter_is_shared_by_what_it_is(pair, tmp_path):
    """Under another number, and from files that are others' copies."""
    here, there = pair
    prompt = tokens(6 * BLOCK + 1)
    path = write_adapter(tmp_path / "l", b"1")
    warm(here, prompt, lora_request=lora(path))
    path.rename(tmp_path / "moved")
    write_adapter(path, b"1")
    assert loaded(there, prompt, lora_request=lora(path, number=7)) == 6
    here.check_idle(there)


def test_weights_that_are_replaced_under_their_path_do_not_share(pair, tmp_path):
    here, there = pair
    prompt = tokens(6 * BLOCK + 1)
    path = write_adapter(tmp_path / "l", b"1")
    warm(here, prompt, lora_request=lora(path))
    write_adapter(path, b"2")  # of the same size
    weights_of.cache_clear()
    assert loaded(there, prompt, lora_request=lora(path)) == 0
    here.check_idle(there)


def test_an_adapter_whose_files_change_is_shared_no_more(pair, tmp_path, caplog):
    """What this instance computes with, its old weights or new ones, and what its own cache has,
    cannot be told."""
    here, _ = pair
    prompt = tokens(6 * BLOCK + 1)
    path = write_adapter(tmp_path / "l", b"1")
    warm(here, prompt, lora_request=lora(path))
    running = here.add(tokens(3 * BLOCK, seed=3), max_tokens=3 * BLOCK, lora_request=lora(path))
    for _ in range(4):
        here.step()
    held = set(here.sidecars.held)
    (path / "adapter_model.safetensors").write_bytes(b"2!")
    here.role.identities.check()
    with caplog.at_level(logging.WARNING, "vllm.lookaside"):
        assert loaded(here, prompt, lora_request=lora(path)) == 0
    assert len(here.outputs[running]) == 3 * BLOCK
    assert set(here.sidecars.held) == held
    assert [each.message for each in caplog.records if "reset_external=true" in each.message]
    # Not loaded anew, it stays so even when all caches are empty.
    assert here.scheduler.reset_prefix_cache(reset_connector=True)
    assert loaded(here, prompt, lora_request=lora(path)) == 0 and not here.sidecars.held
    # Loaded anew it is shared, as soon as nothing is left of what it was.
    weights_of.cache_clear()
    load_adapter(lora(path, number=2))
    assert loaded(here, tokens(6 * BLOCK + 1, seed=8), lora_request=lora(path, number=2)) == 0
    assert not here.sidecars.held
    assert here.scheduler.reset_prefix_cache(reset_connector=True)
    warm(here, prompt, lora_request=lora(path, number=2))
    assert loaded(here, prompt, lora_request=lora(path, number=2)) == 6
    here.check_idle()


def load_adapter(request: LoRARequest, meanwhile: Callable[[], object] = lambda: None) -> None:
    """What vLLM's engine does when a client loads an adapter."""
    executor = SimpleNamespace(add_lora=lambda request: meanwhile() or True)
    assert EngineCore.add_lora(SimpleNamespace(model_executor=executor), request)  # type: ignore[arg-type]


def test_files_that_changed_between_their_load_and_the_first_request(pair, tmp_path):
    here, there = pair
    prompt = tokens(6 * BLOCK + 1)
    path = write_adapter(tmp_path / "l", b"1")
    load_adapter(lora(path))
    write_adapter(path, b"2!")
    for stand in (here, there):
        assert loaded(stand, prompt, lora_request=lora(path)) == 0
    assert not here.sidecars.held
    other = write_adapter(tmp_path / "m", b"1")
    load_adapter(lora(other, "m", 2), lambda: write_adapter(other, b"2!"))
    assert loaded(here, prompt, lora_request=lora(other, "m", 2)) == 0
    assert not here.sidecars.held


def test_an_adapter_that_is_loaded_in_place(pair, tmp_path):
    """Under its name and number, from elsewhere: vLLM may have pages of the old one under the same
    hashes."""
    here, _ = pair
    prompt = tokens(6 * BLOCK + 1)
    one, other = write_adapter(tmp_path / "one", b"1"), write_adapter(tmp_path / "other", b"2")
    load_adapter(lora(one))
    warm(here, prompt, lora_request=lora(one))
    held = set(here.sidecars.held)
    running = here.add(tokens(3 * BLOCK, seed=3), max_tokens=3 * BLOCK, lora_request=lora(one))
    load_adapter(lora(other))
    here.run()
    assert len(here.outputs[running]) == 3 * BLOCK
    assert set(here.sidecars.held) == held, "it ran with the new weights"
    assert here.scheduler.reset_prefix_cache(reset_connector=True)
    warm(here, prompt, lora_request=lora(other))
    assert loaded(here, prompt, lora_request=lora(other)) == 6
    here.check_idle()


@pytest.mark.parametrize("what", ["no files", "tensorized", "unfollowed"])
def test_adapters_that_cannot_be_told_are_not_shared(pair, tmp_path, what):
    here, _ = pair
    path, more = tmp_path / "l", {}
    if what != "no files":
        write_adapter(path, b"1")
    else:
        path.mkdir()
        (path / "adapter_model.safetensors").write_bytes(b"1")
    request = lora(path)
    if what == "tensorized":
        if not hasattr(request, "tensorizer_config_dict"):
            pytest.skip("this vLLM has no such adapters")
        request.tensorizer_config_dict = {"uri": "s3://there"}
    if what == "unfollowed":  # a vLLM without EngineCore.add_lora
        here.role.identities._follows = False
    prompt = tokens(6 * BLOCK + 1)
    warm(here, prompt, lora_request=request, **more)
    assert loaded(here, prompt, lora_request=request) == 0
    assert not here.sidecars.held and not here.counts.get("errors")
    here.check_idle()


def test_images_and_their_places_do_not_share(stand):
    """The same placeholder tokens stand for other content; pages before the first of them are
    shared."""
    prompt = tokens(6 * BLOCK + 1)
    asked = []
    for name, offset, pixels in [
        ("a", 2 * BLOCK, 1), ("a", 2 * BLOCK, 1), ("b", 2 * BLOCK, 1), ("a", 2 * BLOCK + 1, 1),
        ("a", 2 * BLOCK, 2),
    ]:  # fmt: skip
        features = [image(PlaceholderRange(offset=offset, length=BLOCK), name, pixels)]
        request_id = stand.add(prompt, mm_features=features)
        asked.append(stand.sidecars.lookups[-1].digests)
        stand.abort(request_id)
    first, again, *others = asked
    assert len(first) == 6 and first == again
    for other in others:
        assert other[:2] == first[:2] == stand.digests(prompt)[:2]
        assert not set(other[2:]) & set(first[2:])


def test_images_of_one_name_do_not_share(pair):
    """Their client names them, and may name two alike."""
    here, there = pair
    prompt = tokens(6 * BLOCK + 1)
    place = PlaceholderRange(offset=BLOCK + 3, length=BLOCK)
    warm(here, prompt, mm_features=[image(place, "cat", 1)])
    # Before it the two are alike.
    assert loaded(there, prompt, mm_features=[image(place, "cat", 2)]) == 1
    there.forget_local()
    assert loaded(there, prompt, mm_features=[image(place, "cat", 1)]) == 6
    here.check_idle(there)


def test_images_whose_data_are_elsewhere_are_not_shared(pair):
    here, _ = pair
    prompt = tokens(6 * BLOCK + 1)
    place = PlaceholderRange(offset=2 * BLOCK, length=BLOCK)
    warm(here, prompt, mm_features=[image(place, "cat", None)])
    assert loaded(here, prompt, mm_features=[image(place, "cat", None)]) == 0
    assert not here.sidecars.held
    here.check_idle()


def test_embeddings_do_not_share_with_others(pair):
    here, there = pair
    size = 6 * BLOCK + 1

    def embedded(
        value: float, dtype: torch.dtype = torch.bfloat16, mask: list[bool] | None = None
    ) -> dict:
        rows = torch.full((size, 8), value, dtype=dtype)
        return {"prompt_embeds": rows, "prompt_is_token_ids": mask}

    prompt = [0] * size
    warm(here, prompt, **embedded(1))
    assert loaded(there, prompt, **embedded(2)) == 0
    there.forget_local()
    # The bytes of bfloat16's 1 are those of another number in float16.
    other = torch.full((1,), 1, dtype=torch.bfloat16).view(torch.float16).item()
    assert loaded(there, prompt, **embedded(other, torch.float16)) == 0
    there.forget_local()
    assert loaded(there, prompt, **embedded(1, mask=[True] * BLOCK + [False] * (size - BLOCK))) == 0
    there.forget_local()
    assert loaded(there, prompt) == 0
    there.forget_local()
    assert loaded(there, prompt, **embedded(1)) == 6
    here.check_idle(there)


def test_what_takes_long_to_tell_apart_holds_up_no_step(pair, tmp_path, monkeypatch):
    """Its request waits for a while, others go on; then it is computed, and saved once it is
    known."""
    here, _ = pair
    path = write_adapter(tmp_path / "l", b"1")
    here.role.identities._pool = None  # a thread of its own
    done = threading.Event()
    read = identity._read
    monkeypatch.setattr(identity, "_read", lambda *args: done.wait(60) and read(*args))
    prompt = tokens(6 * BLOCK + 1)
    slow = here.add(prompt, max_tokens=40, lora_request=lora(path))
    other = here.add(tokens(3 * BLOCK, seed=5))
    for _ in range(8):
        here.step()
    assert len(here.outputs[other]) == 4 and not here.outputs[slow]
    here.clock += 100
    for _ in range(4):
        here.step()
    assert here.outputs[slow] and here.holds(prompt, lora_request=lora(path)) == 0
    held = len(here.sidecars.held)
    done.set()
    (adapter,) = here.role.identities._adapters.values()
    adapter.read.result(60)
    here.run()
    assert len(here.outputs[slow]) == 40
    assert len(here.sidecars.held) == held + 8
    here.forget_local()
    assert loaded(here, prompt, lora_request=lora(path)) == 6
    here.check_idle()


# ---- answers that take long: pages on their way from a tier below ----


def waiting(stand: Stand, prompt: list[int], **kwargs) -> tuple[str, object]:
    """A request whose lookup is out, and stays so."""
    stand.sidecars.hold_answers = True
    request_id = stand.add(prompt, **kwargs)
    stand.sidecars.hold_answers = False
    return request_id, stand.sidecars.lookups[-1]


@pytest.mark.parametrize("seconds", [1, 40])
def test_an_answer_may_take_longer_than_hits_and_misses_live(stand, seconds):
    """A lookup does not grow old while it is out, and its answer not from when it was asked."""
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    request_id, lookup = waiting(stand, prompt)
    for _ in range(10):
        stand.clock += seconds / 10
        stand.step()
    assert not lookup.cancelled and stand.sidecars.lookups == [lookup]
    stand.sidecars.answer(lookup)
    stand.run()
    assert [load.refs for load in stand.workers.loads] == [lookup.refs]
    assert len(stand.outputs[request_id]) == 4
    stand.check_idle()


def test_the_answer_grows_old_from_when_it_came(model):
    stand = Stand(make_config(model), blocks=20)
    prompt = tokens(10 * BLOCK + 1)
    warm(stand, prompt)
    hog = stand.add(tokens(12 * BLOCK, seed=5), max_tokens=90)
    stand.step()
    _, lookup = waiting(stand, prompt, max_tokens=1)
    stand.step()
    stand.clock += 30
    stand.step()
    stand.sidecars.answer(lookup)
    stand.step()
    stand.clock += 14
    stand.step()
    assert not lookup.cancelled and stand.sidecars.lookups[-1] is lookup
    stand.clock += 2
    stand.step()
    assert lookup.cancelled and stand.sidecars.lookups[-1] is not lookup
    stand.abort(hog)
    stand.run()
    stand.check_idle()


def test_no_more_is_asked_for_than_the_sidecars_answer(stand):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.sidecars.max_pages = 5
    stand.add(prompt)
    assert [len(lookup.digests) for lookup in stand.sidecars.lookups] == [5]
    stand.run()
    assert [len(load.block_ids) for load in stand.workers.loads] == [5]
    stand.check_idle()


def queued(stand: Stand, prompt: list[int]) -> tuple[str, str]:
    """A request in the queue behind one that runs, its lookup answered, and not yet looked at."""
    warm(stand, prompt)
    hog = stand.add(tokens(BLOCK, seed=5), max_tokens=1000)
    stand.step()
    request_id = stand.add(prompt, max_tokens=1)
    for _ in range(3):
        stand.step()
    assert stand.sidecars.lookups[-1].answer == 8 and stand.sidecars.lookups[-1].polls == 0
    return hog, request_id


@pytest.mark.parametrize("lease_s", [30.0, 2.0])
def test_a_lease_that_ended_in_the_queue_is_asked_for_again(model, lease_s):
    """The sidecar's clock runs from its answer, whenever that is looked at."""
    stand = Stand(make_config(model, max_seqs=1))
    stand.sidecars.lease_s = lease_s
    prompt = tokens(8 * BLOCK + 1)
    hog, request_id = queued(stand, prompt)
    old = stand.sidecars.lookups[-1]
    stand.clock += lease_s / 2
    stand.abort(hog)
    stand.run()
    new = stand.sidecars.lookups[-1]
    assert new is not old and old.cancelled
    assert [load.refs for load in stand.workers.loads] == [
        new.refs
    ] and request_id in stand.finish_reasons
    assert not stand.counts.get("hits_expired")
    stand.check_idle()


def test_a_hit_that_is_always_too_old_is_a_miss(model):
    """Steps that take longer than a lease let no hit be used; the request does not wait for
    ever."""
    stand = Stand(make_config(model, max_seqs=1))
    stand.sidecars.lease_s = 2.0
    hog, request_id = queued(stand, tokens(8 * BLOCK + 1))
    stand.abort(hog)
    for _ in range(5):
        stand.clock += 3
        stand.step()
    stand.run()
    assert request_id in stand.finish_reasons and not stand.workers.loads
    assert stand.counts["hits_expired"] == 1
    stand.check_idle()


def test_steps_ahead_of_a_load_count_against_its_lease(model):
    """With async scheduling a load's order waits for the step before; without, the worker sees it
    at once."""
    for is_async, asked in [(False, 1), (True, 2)]:
        stand = Stand(make_config(model, async_scheduling=is_async))
        stand.sidecars.lease_s = 10.0
        prompt = tokens(8 * BLOCK + 1)
        warm(stand, prompt)
        hog = stand.add(tokens(BLOCK, seed=5), max_tokens=1000)
        for _ in range(4):
            stand.clock += 7
            stand.step()
        stand.sidecars.lookups.clear()
        stand.add(prompt, max_tokens=1)
        stand.clock += 4.5
        stand.step()
        assert len(stand.sidecars.lookups) == asked
        stand.abort(hog)
        stand.run()
        assert len(stand.workers.loads) == 1
        stand.check_idle()


def test_what_vllm_has_itself_is_not_brought_up(stand):
    prompt = tokens(12 * BLOCK + 1)
    warm(stand, prompt)
    stand.add(prompt[: 5 * BLOCK + 1], max_tokens=1)
    stand.run()
    stand.workers.loads.clear()
    stand.sidecars.lookups.clear()
    _, lookup = waiting(stand, prompt)
    assert lookup.trims == [] and lookup.first_page == 0 and lookup.prev == b""
    stand.step()
    stand.step()
    assert lookup.trims == [5], "once, when vLLM knows"
    stand.sidecars.answer(lookup)
    stand.run()
    (load,) = stand.workers.loads
    assert (load.first_page, len(load.block_ids)) == (5, 7)
    stand.check_idle()


def test_a_lookup_that_is_out_ends_when_vllm_has_all_of_it(stand):
    prompt = tokens(6 * BLOCK + 1)
    stand.add(prompt, max_tokens=1)
    stand.run()
    request_id, lookup = waiting(stand, prompt)
    stand.run()
    assert lookup.cancelled and len(stand.outputs[request_id]) == 4 and not stand.workers.loads
    stand.check_idle()


def test_another_request_that_computes_the_prefix_meanwhile(stand):
    """Two with one prefix, of which one waits: what the other has computed is trimmed from its
    lookup."""
    prompt = tokens(10 * BLOCK + 1)
    warm(stand, prompt)
    slow, lookup = waiting(stand, prompt)
    stand.step()
    stand.sidecars.available = False  # the other one is not looked up
    stand.add(prompt[: 6 * BLOCK + 3], max_tokens=1)
    for _ in range(3):
        stand.step()
    stand.sidecars.available = True
    stand.step()
    assert lookup.trims == [6]
    stand.sidecars.answer(lookup)
    stand.run()
    assert stand.workers.loads[-1].first_page == 6 and len(stand.outputs[slow]) == 4
    stand.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_abort_while_pages_are_on_their_way(stand, steps):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    request_id, lookup = waiting(stand, prompt)
    for _ in range(steps):
        stand.step()
    stand.abort(request_id)
    stand.run()
    assert lookup.cancelled and not stand.workers.loads
    stand.check_idle()


def test_preemption_while_pages_are_on_their_way(stand):
    """A request that comes back after a preemption waits for a lookup of its own, not for that of
    before."""
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    request_id, lookup = waiting(stand, prompt)
    stand.step()
    stand.requests[request_id].num_preemptions += 1
    stand.step()
    assert lookup.cancelled and stand.sidecars.lookups[-1] is not lookup
    stand.run()
    assert len(stand.outputs[request_id]) == 4
    stand.check_idle()


def test_a_later_lookup_names_the_page_before_it(stand):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.add(prompt)
    request = list(stand.requests.values())[-1]
    assert stand.connector.get_num_new_matched_tokens(request, 6 * BLOCK) == (2 * BLOCK, True)
    assert stand.connector.get_num_new_matched_tokens(request, 5 * BLOCK) == (3 * BLOCK, True)
    assert [lookup.prev for lookup in stand.sidecars.lookups] == [b"", stand.digests(prompt)[3]]
    stand.run()
    stand.check_idle()


# ---- load or recompute ----


@pytest.mark.parametrize("is_async, forward_steps", [(False, 0), (False, 3), (True, 0), (True, 3)])
def test_sidecars_are_told_what_computing_a_page_takes(model, is_async, forward_steps):
    stand = Stand(make_config(model, batched_tokens=512, async_scheduling=is_async))
    stand.workers.second_per_token = 0.001
    stand.workers.forward_steps = forward_steps
    for seed in range(4):
        stand.add(tokens(20 * BLOCK, seed=seed), max_tokens=12)
        stand.run()
    assert [lookup.recompute_us for lookup in stand.sidecars.lookups[:3]] == [0, 0, 0]
    assert stand.sidecars.lookups[3].recompute_us == 1000 * BLOCK
    assert [lookup.prefill_s for lookup in stand.sidecars.lookups[:3]] == [0, 0, 0]
    last = stand.sidecars.lookups[3]
    assert last.prefill_s == pytest.approx(0.001 * BLOCK * len(last.digests))
    assert stand.gauges["prefill_tokens_per_second"] == 1000
    assert not stand.role.pace.timed
    stand.check_idle()


def test_only_steps_that_mostly_compute_prompts_are_timed(model):
    stand = Stand(make_config(model, batched_tokens=64))
    made = [stand.add(tokens(BLOCK, seed=i), max_tokens=40) for i in range(3)]
    timed = []
    while stand.scheduler.has_requests():
        batch = stand.step()
        generating = sum(len(stand.outputs[r]) > 1 for r in made)
        timed.append(bool(batch.meta.timed))
        assert not (timed[-1] and generating), "nothing but generated tokens"
    assert timed[0]
    late = stand.add(tokens(10 * BLOCK, seed=7), max_tokens=1)
    assert stand.step().meta.timed
    stand.abort(late)
    stand.run()
    stand.check_idle()


def test_times_that_never_come_do_not_pile_up(model):
    stand = Stand(make_config(model, batched_tokens=BLOCK))
    for seed in range(10):
        stand.add(tokens(12 * BLOCK, seed=seed), max_tokens=1)
    stand.run()
    assert len(stand.role.pace.timed) == 64
    assert stand.role.pace.recompute_us() == 0
    stand.role.pace.note_forwards({5: 0.1, 10**9: 0.1})  # of steps that are not known any more
    assert stand.role.pace.recompute_us() == 0


# ---- saves ----


def test_a_long_prefill_is_saved_as_its_chunks_fill(model):
    stand = Stand(make_config(model, batched_tokens=3 * BLOCK + 5))
    prompt = tokens(14 * BLOCK + 2)
    request_id = stand.add(prompt, max_tokens=1)
    marks = []
    while not stand.outputs[request_id]:
        stand.step()
        marks.append(max((s.first_page + len(s.block_ids) for s in stand.workers.saves), default=0))
    assert marks[:-1] == [m - m % CHUNK for m in marks[:-1]] and marks[-1] == 14
    assert sorted(set(marks)) == [0, 4, 8, 12, 14]
    spans = [(s.first_page, s.first_page + len(s.block_ids)) for s in stand.workers.saves]
    assert [a for a, _ in spans] == [0, *[b for _, b in spans[:-1]]], "no page twice, none left out"
    stand.run()
    stand.check_idle()


@pytest.mark.parametrize("save_decode", [True, False])
def test_generated_pages(model, save_decode):
    stand = Stand(make_config(model, {"lookaside.save_decode": save_decode}))
    prompt = tokens(2 * BLOCK + 5)
    request_id = stand.add(prompt, max_tokens=5 * BLOCK)
    stand.run()
    whole = prompt + stand.outputs[request_id]
    # The last token was sampled, never computed.
    assert stand.holds(whole) == ((len(whole) - 1) // BLOCK if save_decode else 2)
    stand.check_idle()


def test_the_next_turn_finds_the_answer_too(stand):
    prompt = tokens(3 * BLOCK + 5)
    request_id = stand.add(prompt, max_tokens=3 * BLOCK)
    stand.run()
    stand.forget_local()
    turn = prompt + stand.outputs[request_id] + tokens(20, seed=3)
    stand.add(turn)
    stand.run()
    (load,) = stand.workers.loads
    assert len(load.block_ids) == (len(prompt) + 3 * BLOCK - 1) // BLOCK
    stand.check_idle()


@pytest.mark.parametrize("copy_steps", [1, 4])
def test_blocks_are_pinned_until_all_ranks_are_done(model, copy_steps):
    """Slow copies, a small pool and preemption: the oracle reads the blocks late."""
    stand = Stand(make_config(model, batched_tokens=64), blocks=16)
    stand.workers.copy_steps = copy_steps
    rng = random.Random(copy_steps)
    for i in range(12):
        stand.add(tokens(rng.randrange(20, 9 * BLOCK), seed=i % 5), max_tokens=rng.randrange(1, 40))
        stand.step()
    stand.run(3000)
    assert all(len(out) for out in stand.outputs.values())
    stand.check_idle()


def test_without_a_sidecar_nothing_is_asked_pinned_or_saved(stand):
    stand.sidecars.available = False
    stand.add(tokens(8 * BLOCK))
    stand.run()
    assert not stand.workers.saves and not stand.sidecars.lookups
    stand.check_idle()


def test_a_sidecar_that_comes_back_gets_the_whole_prefix(model):
    stand = Stand(make_config(model, batched_tokens=4 * BLOCK))
    stand.sidecars.available = False
    prompt = tokens(10 * BLOCK)
    stand.add(prompt)
    stand.step()
    stand.sidecars.available = True
    stand.run()
    assert stand.workers.saves[0].first_page == 0 and stand.holds(prompt) == 10
    stand.check_idle()


def test_saves_that_are_never_acknowledged_do_not_keep_the_engine_awake(stand):
    stand.workers.ack = False
    stand.add(tokens(8 * BLOCK), max_tokens=1)
    for _ in range(5):
        stand.step()
    assert stand.scheduler.has_requests() and stand.connector.has_pending_push_work()
    assert stand.connector.has_pending_block_frees()
    stand.clock += 61
    assert not stand.connector.has_pending_push_work()
    assert not stand.scheduler.has_requests()
    stand.workers.ack = True
    stand.step()
    stand.check_idle()


# ---- ends ----


def test_abort_while_waiting(stand):
    stand.sidecars.hold_answers = True
    request_id = stand.add(tokens(8 * BLOCK))
    stand.step()
    stand.abort(request_id)
    stand.run()
    assert stand.sidecars.lookups[0].cancelled and not stand.workers.loads
    stand.check_idle()


def test_abort_before_the_first_schedule(stand):
    prompt = tokens(8 * BLOCK)
    warm(stand, prompt)
    stand.abort(stand.add(prompt))
    stand.run()
    assert stand.sidecars.lookups[0].cancelled and not stand.workers.loads
    stand.check_idle()


@pytest.mark.parametrize("fails", [False, True])
def test_abort_while_loading(stand, fails):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.workers.load_steps = 5
    if fails:
        stand.workers.fail_pages = lambda load: [2]
    request_id = stand.add(prompt)
    stand.step()
    assert stand.workers.loads
    stand.abort(request_id)
    stand.step()
    assert stand.workers.aborted == [request_id]
    assert stand.pool.get_num_free_blocks() < len(stand.pool.blocks) - 1, "vLLM holds its blocks"
    stand.run()
    assert not stand.workers.saves
    stand.check_idle()


def test_abort_after_the_load_and_before_it_runs(stand):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    request_id = stand.add(prompt)
    stand.step()
    stand.abort(request_id)
    stand.run()
    assert not stand.workers.saves, "what was just loaded is held already"
    stand.check_idle()


def test_abort_while_running_saves_what_was_computed(model):
    stand = Stand(make_config(model, batched_tokens=6 * BLOCK))
    prompt = tokens(20 * BLOCK)
    request_id = stand.add(prompt)
    stand.step()
    stand.abort(request_id)
    stand.run()
    assert stand.holds(prompt) == 6
    stand.check_idle()


# ---- preemption ----


def test_preempted_requests_come_back_through_lookup(model):
    stand = Stand(make_config(model), blocks=13)
    prompts = [tokens(2 * BLOCK + 7, seed=i) for i in range(4)]
    made = [stand.add(prompt, max_tokens=4 * BLOCK) for prompt in prompts]
    stand.run(2000)
    assert sum(stand.requests[r].num_preemptions for r in made), (
        "the pool was meant to be too small"
    )
    assert all(len(stand.outputs[r]) == 4 * BLOCK for r in made)
    assert stand.workers.loads, "what was computed before the preemption is not computed again"
    stand.check_idle()


def test_a_reset_of_running_requests(stand):
    prompt = tokens(8 * BLOCK + 1)
    request_id = stand.add(prompt, max_tokens=3 * BLOCK)
    for _ in range(5):
        stand.step()
    assert stand.scheduler.reset_prefix_cache(reset_running_requests=True)
    stand.run()
    assert len(stand.outputs[request_id]) == 3 * BLOCK
    assert stand.holds(prompt + stand.outputs[request_id]) == (len(prompt) + 3 * BLOCK - 1) // BLOCK
    stand.check_idle()


# ---- failures ----


@pytest.mark.parametrize("fail_requests", [False, True])
@pytest.mark.parametrize("bad", [[0], [3], [7], [2, 5], range(8)])
def test_failed_loads_are_computed_and_not_offered_again(stand, bad, fail_requests):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.workers.fail_pages = lambda load: bad
    stand.workers.fail_requests = fail_requests
    request_id = stand.add(prompt)
    stand.run()
    assert len(stand.outputs[request_id]) == 4
    assert len(stand.workers.loads) == 1 and len(stand.sidecars.lookups) == 1
    assert {s.first_page for s in stand.workers.saves} >= {0}, (
        "it may have been dropped: saved anew"
    )
    stand.check_idle()
    stand.workers.fail_pages = lambda load: ()
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert len(stand.workers.loads) == 2, "other requests may hit again"
    stand.check_idle()


@pytest.mark.parametrize("fail_requests", [False, True])
def test_failed_loads_are_computed_whatever_vllms_default_is(model, fail_requests):
    stand = Stand(make_config(model, policy="fail"))
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.workers.fail_pages = lambda load: [3]
    stand.workers.fail_requests = fail_requests
    request_id = stand.add(prompt)
    stand.run()
    assert stand.scheduler.recompute_kv_load_failures is True
    assert stand.finish_reasons[request_id] == FinishReason.LENGTH
    assert len(stand.outputs[request_id]) == 4
    stand.check_idle()


def test_what_the_workers_cannot_have_loaded_is_computed(stand):
    """A hit whose lookup is gone by the time of the allocation: the load fails."""
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    request_id = stand.add(prompt)
    role, take = stand.role, stand.role.update_state_after_alloc

    def lose(request, blocks, ext):
        if ext:
            role.hits.drop(role.requests[request_id])
        return take(request, blocks, ext)

    role.update_state_after_alloc = lose
    stand.run()
    (load,) = stand.workers.loads
    assert load.refs == () and len(stand.outputs[request_id]) == 4
    stand.check_idle()


@pytest.mark.parametrize(
    "method",
    [
        "on_new_request",
        "get_num_new_matched_tokens",
        "build_connector_meta",
        "_add_saves",
        "update_connector_output",
        "request_finished",
        "has_pending_push_work",
        "has_pending_block_frees",
        "reset_cache",
        "shutdown",
    ],
)
def test_no_exception_reaches_the_engine(stand, method, caplog):
    def broken(*args):
        raise RuntimeError("broken on purpose")

    setattr(stand.role, method, broken)
    stand.sidecars.available = method in (
        "on_new_request",
        "get_num_new_matched_tokens",
        "_add_saves",
    )
    made = [stand.add(tokens(4 * BLOCK, seed=i)) for i in range(3)]
    with caplog.at_level(logging.ERROR):
        for _ in range(10):
            stand.step()
        stand.connector.reset_cache()
        stand.connector.has_pending_block_frees()
        stand.connector.shutdown()
    assert all(len(stand.outputs[r]) == 4 for r in made)


def test_each_kind_of_failure_is_logged_once_and_counted(stand, caplog):
    stand.sidecars.raises = RuntimeError("no memory")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.ERROR, logger="vllm.lookaside"):
        made = [stand.add(tokens(4 * BLOCK, seed=i)) for i in range(3)]
        stand.run()
    assert all(len(stand.outputs[r]) == 4 for r in made)
    # The same record may be caught twice, on its way up.
    logged = {id(r): r for r in caplog.records if "failed" in r.message}
    assert len(logged) == 2  # on_new_request, get_num_new_matched_tokens
    stand.sidecars.raises = None
    stand.check_idle()


# ---- reset ----


def test_reset_clears_every_rank(stand):
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    assert stand.scheduler.reset_prefix_cache(reset_connector=True)
    assert stand.sidecars.clears == 1 and stand.holds(prompt) == 0
    stand.check_idle()


def test_reset_succeeds_without_the_sidecars_and_nothing_from_before_is_hit(stand):
    """vLLM's /pause and /sleep fail with it otherwise, and leave the engine paused."""
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.sidecars.clear_answer = False
    for _ in range(2):
        assert stand.scheduler.reset_prefix_cache(reset_connector=True)
        stand.add(prompt)
        stand.run()
    assert not stand.sidecars.lookups and not stand.workers.loads and not stand.workers.saves
    assert stand.holds(prompt) == 8, "they could not be told yet"
    stand.sidecars.recover()
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert stand.sidecars.lookups and not stand.workers.loads and stand.workers.saves
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert stand.workers.loads, "what was stored after it is hit"
    stand.check_idle()


def test_reset_drops_saves_that_have_not_begun(stand):
    stand.add(tokens(2 * BLOCK + 1), max_tokens=BLOCK + 2)
    while stand.scheduler.running or stand.scheduler.waiting:
        stand.step()
    assert stand.connector.has_pending_push_work(), "the last chunk waits for the next step"
    assert stand.connector.reset_cache() is True
    stand.run()
    assert not stand.sidecars.held
    stand.check_idle()


def test_reset_during_a_load(stand):
    """The load is good, as what a running request has computed is; what it brought is not stored
    again."""
    prompt = tokens(8 * BLOCK + 1)
    warm(stand, prompt)
    stand.workers.load_steps = 3
    request_id = stand.add(prompt, max_tokens=5 * BLOCK)
    stand.step()
    assert stand.role.loads.blocks
    assert not stand.scheduler.reset_prefix_cache(reset_connector=True), (
        "vLLM's own: its blocks are in use"
    )
    assert stand.sidecars.is_void and not stand.sidecars.clears, "the load would fail"
    stand.add(prompt)
    stand.run()
    assert stand.sidecars.clears == 1
    assert stand.finish_reasons[request_id] == FinishReason.LENGTH and not stand.counts.get(
        "load_failures"
    )
    assert not any(save.request_id == request_id for save in stand.workers.saves)
    stand.check_idle()


def test_reset_during_a_save(stand):
    """It is cleared behind the save, which may still be committed."""
    prompt = tokens(8 * BLOCK + 1)
    stand.workers.copy_steps = 5
    stand.add(prompt, max_tokens=1)
    stand.step()
    assert stand.role.saves.pins
    assert stand.connector.reset_cache() is True
    assert stand.sidecars.is_void and not stand.sidecars.clears
    stand.run()
    assert stand.workers.saves and stand.sidecars.clears == 1 and not stand.sidecars.held
    stand.check_idle()


def test_what_was_computed_before_a_reset_is_not_saved_after_it(model):
    stand = Stand(make_config(model, batched_tokens=4 * BLOCK))
    prompt = tokens(12 * BLOCK)
    stand.add(prompt)
    stand.step()
    stand.connector.reset_cache()
    stand.run()
    assert not stand.sidecars.held
    stand.check_idle()


# ---- ranks, overlapping batches ----


def test_two_ranks_must_both_acknowledge(model):
    stand = Stand(make_config(model, tp=2))
    assert stand.role.setup.ranks == 2
    prompt = tokens(8 * BLOCK + 1)
    stand.workers.ack = False
    stand.add(prompt, max_tokens=1)
    for _ in range(3):
        stand.step()
    pinned = list(stand.role.saves.pins)
    assert pinned
    from lookaside.metadata import LookasideWorkerMetadata
    from vllm.v1.outputs import KVConnectorOutput

    one = KVConnectorOutput(
        kv_connector_worker_meta=LookasideWorkerMetadata(dict.fromkeys(pinned, 1))
    )
    stand.connector.update_connector_output(one)
    assert list(stand.role.saves.pins) == pinned
    stand.connector.update_connector_output(one)
    assert not stand.role.saves.pins
    stand.connector.update_connector_output(one)  # stale: ignored
    stand.workers.unacked.clear()
    stand.workers.ack = True
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert len(stand.workers.loads[0].refs) == 2
    stand.check_idle()


@needs_lookahead
@pytest.mark.parametrize("lookahead", [1, 3])
def test_hashes_that_cover_the_tokens_after_their_block(model, monkeypatch, lookahead):
    """Pages have names once these tokens are known; what the tokens depend on is in the names."""
    use_lookahead(monkeypatch, lookahead)
    kv_config = make_kv_config(200, eagle=True)
    stand = Stand(make_config(model), kv_config=kv_config)
    prompt = tokens(9 * BLOCK)
    request_id = stand.add(prompt, max_tokens=2 * BLOCK)
    stand.run()
    whole = prompt + stand.outputs[request_id]
    # A block that ends less than the lookahead before the last token has no name.
    assert stand.holds(whole) == len(stand.digests(whole)) == (len(whole) - lookahead) // BLOCK
    stand.forget_local()
    stand.add(whole[: 9 * BLOCK] + tokens(2 * BLOCK, seed=7), max_tokens=1)
    stand.run()
    # Another token follows the ninth page, so that page is another; and with draft layers the last
    # hit page only proves the one before.
    assert len(stand.workers.loads[0].block_ids) == 7
    # An image that begins within the lookahead of a page makes another name of it.
    names = []
    for pixels in (1, 2):
        feature = image(PlaceholderRange(offset=3 * BLOCK, length=4), "same", pixels)
        request_id = stand.add(prompt, mm_features=[feature])
        names.append(stand.sidecars.lookups[-1].digests)
        stand.abort(request_id)
    plain = stand.digests(prompt)
    assert len(names[0]) == len(plain) == 8
    assert names[0][:2] == names[1][:2] == plain[:2]
    assert not set(names[0][2:]) & set(names[1][2:])
    stand.run()
    stand.check_idle()


@needs_lookahead
def test_a_promise_is_of_pages_that_the_decoder_can_name(model, monkeypatch):
    use_lookahead(monkeypatch, 1)
    kv_config = make_kv_config(200, eagle=True)
    stand = Stand(make_config(model), kv_config=kv_config)
    for length, promised in ((4 * BLOCK, 3 * BLOCK), (4 * BLOCK + 1, 4 * BLOCK)):
        prompt = tokens(length, seed=length)
        made = stand.add(prompt, max_tokens=1, transfer_params={"do_remote_decode": True})
        stand.run()
        params = stand.transfer_params[made]
        assert params["lookaside"]["tokens"] == promised
        digest = bytes.fromhex(params["lookaside"]["digest"])
        assert digest == stand.digests(prompt)[promised // BLOCK - 1]


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(model, seed):
    """Arrivals, aborts, failures, resets and slow copies; overlapping batches too."""
    rng = random.Random(seed)
    config = make_config(
        model,
        batched_tokens=rng.choice([48, 100, 512]),
        max_seqs=6,
        async_scheduling=seed % 2 == 1,
    )
    stand = Stand(config, blocks=rng.choice([20, 30, 60]))
    random_history(stand, rng, steps=400)
    assert stand.workers.loads


def random_history(stand: Stand, rng: random.Random, steps: int) -> None:
    """As much as can happen to a Stand, at random; in the end nothing of it is left."""
    by_request = stand.workers.fail_requests  # where blocks cannot be told
    page = stand.workers.block

    def fail(load) -> list[int]:
        return (
            [rng.randrange(len(stand.workers.rows(load.block_ids)))] if rng.random() < 0.2 else []
        )

    stand.workers.fail_pages = fail
    alive: list[str] = []
    for _ in range(steps):
        roll = rng.random()
        if roll < 0.12:
            length = rng.randrange(1, 14 * page)
            kwargs = {"cache_salt": "s"} if rng.random() < 0.2 else {}
            prompt = tokens(length, seed=rng.randrange(6))
            alive.append(stand.add(prompt, max_tokens=rng.randrange(1, 40), **kwargs))
        elif roll < 0.15 and alive:
            stand.abort(alive.pop(rng.randrange(len(alive))))
        elif roll < 0.17:
            stand.drain()
            with contextlib.suppress(RuntimeError):  # vLLM's, while loads or saves are out
                stand.scheduler.reset_prefix_cache(
                    reset_running_requests=rng.random() < 0.7, reset_connector=rng.random() < 0.2
                )
        elif roll < 0.18:
            assert stand.connector.reset_cache() is True
            stand.sidecars.clear_answer = rng.random() < 0.5
        elif roll < 0.2:
            stand.workers.fail_requests = by_request or rng.random() < 0.5
            stand.workers.load_steps = rng.randrange(4)
            stand.workers.copy_steps = rng.randrange(4)
            stand.sidecars.hold_answers = rng.random() < 0.3
            stand.sidecars.available = rng.random() < 0.8
        for lookup in stand.sidecars.lookups:
            if lookup.answer is None and not lookup.cancelled and rng.random() < 0.4:
                stand.sidecars.answer(lookup)
        if rng.random() < 0.1:
            stand.sidecars.recover()
        stand.step()
    stand.sidecars.hold_answers = False
    stand.sidecars.clear_answer = True
    for lookup in stand.sidecars.lookups:
        if lookup.answer is None:
            stand.sidecars.answer(lookup)
    stand.run(5000)
    assert stand.workers.saves and not stand.counts.get("errors")
    stand.check_idle()


# ---- sessions ----


def test_streaming_sessions(stand):
    """A turn that takes back its last token shortens the hashes."""
    session = stand.add(tokens(3 * BLOCK + 2), max_tokens=BLOCK, request_id="s", resumable=True)
    for turn in range(3):
        for _ in range(BLOCK + 2):
            stand.step()
        stand.add(
            tokens(2 * BLOCK + 3, seed=turn), max_tokens=BLOCK, request_id="s", resumable=True
        )
    for _ in range(BLOCK + 2):
        stand.step()
    stand.abort(session)
    stand.run()
    assert not stand.counts.get("errors")
    assert stand.workers.saves
    stand.check_idle()


@pytest.mark.parametrize("grown", [0, 4 * BLOCK])
def test_hashes_that_change_under_saved_pages_are_saved_anew(model, grown):
    stand = Stand(make_config(model, batched_tokens=4 * BLOCK))
    stand.workers.forward = lambda batch: None  # type: ignore[method-assign]
    stand.workers.save = lambda save: stand.workers.unacked.append(save.save_id)  # type: ignore[method-assign]
    request_id = stand.add(tokens(12 * BLOCK))
    stand.step()
    stand.step()
    request = stand.requests[request_id]
    request._all_token_ids[2 * BLOCK :] = tokens(10 * BLOCK + grown, seed=3)
    del request.block_hashes[2:]
    request.update_block_hashes()
    stand.workers.saves.clear()
    stand.step()
    first = stand.workers.saves[0]
    assert first.first_page == 0
    assert first.hashes == b"".join(request.block_hashes[: len(first.block_ids)])
    stand.run()
    stand.check_idle()


# ---- models and settings it cannot serve ----


@pytest.mark.parametrize("others", [[], [full_attention()]])
def test_other_models_run_without_hits_and_say_so_once(model, others, caplog):
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    chunked = ChunkedLocalAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=2,
        head_size=16,
        dtype=full_attention().dtype,
        attention_chunk_size=64,
    )
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.lookaside"):
        stand = Stand(make_config(model), kv_config=make_kv_config(200, [*others, chunked]))
    assert len([r for r in caplog.records if "idle" in r.message]) == 1
    assert not stand.roles()
    idle_run(stand)


def test_without_prefix_caching_it_is_idle(model, caplog):
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.lookaside"):
        stand = Stand(make_config(model, prefix_caching=False))
    assert [r for r in caplog.records if "--enable-prefix-caching" in r.message]
    idle_run(stand)


def idle_run(stand: Stand) -> None:
    """The connector has no role object: only the scheduler's own run counts."""
    stand.workers.forward = lambda batch: None  # type: ignore[method-assign]
    made = stand.add(tokens(6 * BLOCK))
    stand.run()
    assert len(stand.outputs[made]) == 4 and not stand.workers.saves
    assert stand.connector.reset_cache() is True
    stand.connector.shutdown()


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"hash_algo": "xxhash_cbor"}, ["xxhash_cbor", "PYTHONHASHSEED"]),
        ({"extra": {"lookaside.chunk_tokens": 100}}, ["chunk_tokens=100", "96"]),
        ({"extra": {"lookaside.chunk_tokens": 5}}, ["chunk_tokens=5", "16"]),
    ],
)
def test_what_the_user_should_change_is_said_once(model, kwargs, words, caplog, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if "xxhash" in kwargs.get("hash_algo", ""):
        pytest.importorskip("xxhash")
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.lookaside"):
        stand = Stand(make_config(model, **kwargs))
    said = [r.message for r in caplog.records if r.name == "vllm.lookaside"]
    assert len(said) == 1 and all(word in said[0] for word in words)
    stand.connector.shutdown()


def test_the_policy_of_multi_connector_is_the_users(model, caplog):
    child = make_config(model).kv_transfer_config
    assert child is not None
    config = make_config(
        model,
        policy="fail",
        connector={
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {
                "connectors": [
                    {
                        "kv_connector": "LookasideConnector",
                        "kv_connector_module_path": "lookaside.connector",
                        "kv_role": "kv_both",
                        "kv_connector_extra_config": child.kv_connector_extra_config,
                    }
                ]
            },
        },
    )
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.lookaside"):
        stand = Stand(config)
    assert stand.scheduler.recompute_kv_load_failures is False
    said = [r.message for r in caplog.records if r.name == "vllm.lookaside"]
    assert len(said) == 1 and "MultiConnector" in said[0] and "recompute" in said[0]
    stand.connector.shutdown()


def test_unknown_settings_stop_the_start(model):
    with pytest.raises(ValueError, match=r"did you mean 'lookaside\.chunk_tokens'"):
        Stand(make_config(model, {"lookaside.chunk_token": 1}))


# ---- MultiConnector ----


def multi(model, winner_first: bool, **kwargs):
    ours = {
        "kv_connector": "LookasideConnector",
        "kv_connector_module_path": "lookaside.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lookaside.endpoint": "/nonexistent/{rank}",
            "lookaside.chunk_tokens": CHUNK * BLOCK,
        },
    }
    other = {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "other_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": kwargs,
    }
    return make_config(
        model,
        connector={
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {
                "connectors": [ours, other] if winner_first else [other, ours]
            },
        },
    )


def test_as_the_winner_of_a_multiconnector(model):
    stand = Stand(multi(model, True, tokens=2 * BLOCK))
    prompt = tokens(8 * BLOCK + 1)
    stand.add(prompt, max_tokens=1)  # the other one wins, and fills blocks
    stand.workers.forward = lambda batch: None  # type: ignore[method-assign]
    stand.workers.save = lambda save: stand.workers.unacked.append(save.save_id)  # type: ignore[method-assign]
    stand.run()
    stand.sidecars.held = dict.fromkeys(stand.digests(prompt), (0,) * BLOCK)
    stand.forget_local()
    stand.add(prompt)
    stand.run()
    assert len(stand.workers.loads) == 1
    stand.check_idle()


@pytest.mark.parametrize("in_memory", [False, True])
def test_as_the_loser_of_a_multiconnector(model, in_memory):
    """Also with a hit that it would load within the step."""
    stand = Stand(multi(model, False, tokens=2 * BLOCK))
    stand.sidecars.in_memory = in_memory
    stand.role.pace.note_copies({"r": (1000, 1e-6)})
    stand.workers.forward = lambda batch: None  # type: ignore[method-assign]
    stand.workers.save = lambda save: stand.workers.unacked.append(save.save_id)  # type: ignore[method-assign]
    prompt = tokens(8 * BLOCK + 1)
    stand.sidecars.held = dict.fromkeys(stand.digests(prompt), (0,) * BLOCK)
    stand.add(prompt)
    stand.run()
    assert not stand.workers.loads and stand.sidecars.lookups[0].cancelled
    stand.check_idle()


def test_the_front_end_rebuilds_statistics_by_name(model):
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    stand = Stand(multi(model, True, tokens=0))
    stand.add(tokens(4 * BLOCK))
    stand.run()
    stand.connector._connectors[0]._stats.add("saves")
    stats = stand.connector.get_kv_connector_stats()
    # As vLLM sends them: what its own class of several connectors writes, or before 0.30 its data.
    payload = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    rebuilt = MultiConnector.build_kv_connector_stats(payload)
    assert rebuilt is not None and rebuilt.reduce()["LookasideConnector"]["saves"] >= 1


def test_shutdown_may_come_twice(stand):
    stand.connector.shutdown()
    stand.connector.shutdown()
    assert stand.sidecars.closed == 2
