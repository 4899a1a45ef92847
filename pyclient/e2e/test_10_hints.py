"""Hints of OpenAI requests: what they keep in a small arena, what they keep out of it, and that no
token depends on them.

The tests of the class share a server and a sidecar whose arena holds sixteen chunks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.stand import client, model
from examples.stand.client import Answer
from examples.stand.processes import eventually

from .conftest import PAGE, Stands, ask, counted, hits_of
from .test_4_tiers import Machine

ARENA = "64M"
CHUNKS = 16
SHARE = 0.5  # of them may be kept
LENGTH = 4 * PAGE + 20  # two chunks
seeds = itertools.count(70_000)


def hints(**values: Any) -> dict[str, Any]:
    """The body's field that has these hints."""
    return {"kv_transfer_params": {"lookaside": values}}


class Stage:
    """A machine, and what is asked of it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def prompt(self) -> list[int]:
        return model.prompt(LENGTH, next(seeds))

    def ask(self, prompt: list[int], **values: Any) -> Answer:
        """An answer for which vLLM's own cache has nothing, once all that it stores is stored."""
        client.reset_prefix_cache(self.machine.server.base_url)
        answer = ask(self.machine.server, prompt, **(hints(**values) if values else {}))
        # The next request's step carries out what this one's end has ordered.
        ask(self.machine.server, model.prompt(5, 1), 1)
        eventually(self.settled, "nothing to be on its way")
        return answer

    def settled(self) -> bool:
        status = self.status()
        return not status["stores_in_flight"] and not status["loads_in_flight"]

    def status(self) -> dict[str, Any]:
        return self.machine.sidecar.status()

    def hints(self) -> dict[str, Any]:
        return self.status()["hints"]

    def flood(self) -> None:
        """Asks so much that the arena is filled anew, whatever is kept of it."""
        before = self.status()["evictions"]["room"]
        while self.status()["evictions"]["room"] < before + CHUNKS:
            self.ask(self.prompt())

    def hits(self, prompt: list[int], truth: Answer) -> int:
        again = self.ask(prompt)
        assert again.tokens == truth.tokens
        return again.cached_tokens


@pytest.fixture(scope="class")
def stage(small_model: Path, stands: Stands) -> Iterator[Stage]:
    with stands(small_model) as stand:
        settings = {"arena_limit": ARENA, "arena_eviction": "lru", "hints_share": str(SHARE)}
        machine = Machine(stand, "hinted", settings)
        machine.start_sidecar()
        machine.start_server()
        machine.server.wait_ready()
        machine.wait_mapped()
        yield Stage(machine)


class TestHints:
    def test_what_is_retained_outlives_a_flood(self, stage: Stage) -> None:
        retained, pinned, plain = stage.prompt(), stage.prompt(), stage.prompt()
        truths = [
            stage.ask(retained, retain_s=600, tenant="alice"),
            stage.ask(pinned, pin_s=600),
            stage.ask(plain),
        ]
        assert [truth.cached_tokens for truth in truths] == [0, 0, 0]
        eventually(lambda: stage.hints()["retained_slots"] == 2, "two chunks to be retained")
        eventually(lambda: stage.hints()["pinned_slots"] == 2, "two chunks to be pinned")
        stage.flood()
        assert stage.hits(retained, truths[0]) == hits_of(LENGTH)
        assert stage.hits(pinned, truths[1]) == hits_of(LENGTH)
        assert stage.hits(plain, truths[2]) == 0
        assert counted(stage.machine.server, "vllm:lookaside_hints_total") == 3

    def test_the_tenant_is_counted(self, stage: Stage) -> None:
        metrics = stage.machine.sidecar.get("/metrics").text
        (line,) = [
            line
            for line in metrics.splitlines()
            if line.startswith("lookaside_tenant_asked_tokens_total") and '"alice"' in line
        ]
        assert float(line.rsplit(" ", 1)[1]) >= hits_of(LENGTH)

    def test_hints_have_a_share_and_no_more(self, stage: Stage) -> None:
        over = stage.hints()["over_share"]
        prompts = [stage.prompt() for _ in range(CHUNKS // 2)]
        for prompt in prompts:
            stage.ask(prompt, retain_s=600)
        kept = stage.hints()
        assert kept["retained_slots"] + kept["pinned_slots"] <= SHARE * CHUNKS
        assert kept["over_share"] > over
        # What is asked without hints still finds room.
        plain = stage.prompt()
        truth = stage.ask(plain)
        assert stage.hits(plain, truth) == hits_of(LENGTH)

    def test_what_is_not_to_be_stored_is_not(self, stage: Stage) -> None:
        prompt = stage.prompt()
        before = stage.status()["counters"]["stored_pages"]
        truth = stage.ask(prompt, store=False)
        assert stage.status()["counters"]["stored_pages"] == before
        assert stage.hits(prompt, truth) == 0  # and stores it
        assert stage.ask(prompt, store=False).cached_tokens == hits_of(LENGTH)

    def test_what_is_stored_from_the_second_use_on(self, stage: Stage) -> None:
        prompt = stage.prompt()
        truth = stage.ask(prompt, store_from_use=2)
        assert stage.hints()["deferred_pages"] > 0
        second = stage.ask(prompt, store_from_use=2)
        assert (second.tokens, second.cached_tokens) == (truth.tokens, 0)
        third = stage.ask(prompt, store_from_use=2)
        assert (third.tokens, third.cached_tokens) == (truth.tokens, hits_of(LENGTH))

    def test_hints_that_make_no_sense_change_nothing(self, stage: Stage) -> None:
        server, prompt = stage.machine.server, stage.prompt()
        ignored = counted(server, "vllm:lookaside_hints_ignored_total")
        truth = stage.ask(prompt, retain_s="long", priority=1000, keep=True, store_from_use=None)
        assert counted(server, "vllm:lookaside_hints_ignored_total") == ignored + 4
        assert stage.hits(prompt, truth) == hits_of(LENGTH)

    def test_an_envelope_of_hints(self, stage: Stage) -> None:
        """As vLLM 0.33's kv_hints are, before it has them."""
        action = {
            "action_id": "1",
            "action_type": "kv.store",
            "action_version": "1.0",
            "payload": {"enabled": False},
        }
        envelope = {"protocol_version": "1.0", "message_id": "1", "actions": [action]}
        prompt = stage.prompt()
        client.reset_prefix_cache(stage.machine.server.base_url)
        truth = ask(stage.machine.server, prompt, kv_transfer_params={"kv_hints": envelope})
        assert stage.hits(prompt, truth) == 0

    def test_what_is_demoted_goes_to_the_disk_and_leaves_first(self, stage: Stage) -> None:
        machine = stage.machine
        machine.kill_sidecar()
        machine.start_sidecar(
            arena_limit=ARENA,
            arena_eviction="lru",
            disk=f"{machine.stand.directory}/disk:1G:slab=128M:admit=evicted:load_timeout=60s",
        )
        machine.wait_mapped()
        demoted = stage.prompt()
        truth = stage.ask(demoted, demote=True)
        eventually(lambda: machine.sidecar.tiers()["disk"]["pages"] >= 4, "it to be written")
        eventually(lambda: stage.hints()["low_slots"] == 2, "it to leave first")
        disk = machine.sidecar.tiers()["disk"]["loaded_chunks"]
        stage.flood()
        assert stage.hits(demoted, truth) == hits_of(LENGTH)
        assert machine.sidecar.tiers()["disk"]["loaded_chunks"] > disk

    def test_a_prefetch_brings_a_prompt_up(self, stage: Stage) -> None:
        """All of it, beside the request's own lookup."""
        machine, prompt = stage.machine, stage.prompt()
        truth = stage.ask(prompt, demote=True)
        pages = machine.sidecar.tiers()["disk"]["pages"]
        eventually(lambda: machine.sidecar.tiers()["disk"]["pages"] >= pages, "it to be written")
        stage.flood()
        client.reset_prefix_cache(machine.server.base_url)
        before = stage.hints()["advice"]["prefetched_pages"]
        again = ask(machine.server, prompt, **hints(prefetch=True))
        assert again.tokens == truth.tokens
        eventually(
            lambda: stage.hints()["advice"]["prefetched_pages"] >= before + 4, "it to come up"
        )
