"""Two servers with a sidecar each: what one has stored the other's worker reads where it lies, with
the same tokens."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.stand import client, model
from examples.stand.processes import Server, Sidecar, Stand, dax_arena, eventually

from .conftest import PAGE, Stands, ask, computed, configured, hit, hits_of, missed_again, sessions
from .test_2_sidecar_faults import Asking


def lenders(sidecar: Sidecar) -> list[dict[str, Any]]:
    """The sidecars that lend to this one: of one that was killed something may be in use yet."""
    return [lender for lender in sidecar.status()["peers"]["lenders"] if not lender["gone"]]


@dataclass
class Apart:
    """Two servers, each on its own sidecar."""

    stand: Stand
    sidecars: list[Sidecar]
    servers: list[Server]
    settings: list[dict[str, str]] = field(default_factory=lambda: [{}, {}])  # of the sidecars
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(80_000))

    def prompt(self, tokens: int, shared: list[int] | None = None) -> list[int]:
        """A prompt that no test has used."""
        return model.prompt(tokens, next(self.seeds), shared)

    def restart(self, number: int) -> None:
        """A new sidecar where one has ended."""
        self.sidecars[number].end()
        self.sidecars[number] = self.stand.sidecar(
            name=f"s{number}", settings=self.settings[number]
        )

    def found(self) -> None:
        """Waits until both servers are connected and both sidecars know each other."""

        def all_there() -> bool:
            for sidecar in self.sidecars:
                there = [lender for lender in lenders(sidecar) if lender["complete"]]
                if (
                    len(there) != 1
                    or len(sidecar.status()["peers"]["borrowers"]) != 1
                    or sessions(sidecar) != 2
                ):
                    return False
            return True

        eventually(all_there, "both sidecars to know each other")

    def share(self) -> None:
        """Waits until what one computes is a hit for the other, after one of the sidecars was
        restarted."""
        self.found()

        def hit() -> bool:
            """A sidecar knows of a session before its client has mapped the regions: the first try
            may be too early."""
            fresh = self.prompt(600)
            want = ask(self.servers[0], fresh)
            again = ask(self.servers[1], fresh)
            assert again.tokens == want.tokens
            return again.cached_tokens == hits_of(600)

        eventually(hit, "hits once they know each other again")

    def answered(self, number: int, prompt: list[int]) -> client.Answer:
        """What a server answers, once what is new of it is stored and the other sidecar knows of
        all that is held."""
        sidecar, other = self.sidecars[number], self.sidecars[1 - number]
        before = sidecar.status()["counters"]["stored_pages"]
        answer = ask(self.servers[number], prompt)
        new = len(prompt) // PAGE - answer.cached_tokens // PAGE

        def told() -> bool:
            status = sidecar.status()
            told_of = [lender["pages"] for lender in lenders(other)]
            stored = status["counters"]["stored_pages"] - before
            return stored >= new and not status["stores_in_flight"] and told_of == [status["pages"]]

        eventually(told, f"{new} pages to be stored and told of")
        return answer


@pytest.fixture(scope="module")
def apart(small_model: Path, stands: Stands) -> Iterator[Apart]:
    with stands(small_model) as stand:
        sidecars = [stand.sidecar(name=f"s{number}") for number in range(2)]
        servers = [
            stand.server(f"p{number}", connector=configured(stand.endpoint(f"s{number}")))
            for number in range(2)
        ]
        for server in servers:
            server.wait_ready()
        for server in servers:
            ask(server, model.prompt(300, 1))
        out = Apart(stand, sidecars, servers)
        out.found()
        yield out


@pytest.mark.parametrize("first", [0, 1])
@missed_again
def test_each_loads_what_the_other_computed(apart: Apart, first: int) -> None:
    prompt = apart.prompt(4000)
    stored = [sidecar.status()["counters"]["stored_bytes"] for sidecar in apart.sidecars]
    truth = apart.answered(first, prompt)
    assert truth.cached_tokens == 0
    shared = ask(apart.servers[1 - first], prompt)
    assert shared.tokens == truth.tokens
    hit(shared.cached_tokens, hits_of(4000))
    # One cache between them: what one stores the other does not.
    now = [sidecar.status()["counters"]["stored_bytes"] for sidecar in apart.sidecars]
    page_bytes = apart.sidecars[first].status()["spaces"][0]["page_bytes"]
    assert now[first] - stored[first] == 4000 // PAGE * page_bytes
    assert now[1 - first] - stored[1 - first] <= page_bytes
    eventually(lambda: all(s.status()["leases"] == 0 for s in apart.sidecars), "no leases")


@missed_again
def test_turns_of_a_conversation_that_moves(apart: Apart) -> None:
    """Every turn is answered by the other server, which finds all of the turns before, in both
    arenas."""
    turn, held = apart.prompt(500), 0
    for number in range(4):
        truth = computed(apart.servers[1 - number % 2], turn)
        answer = apart.answered(number % 2, turn)
        assert answer.tokens == truth.tokens
        hit(min(answer.cached_tokens, held), held)
        held = len(turn) // PAGE * PAGE
        turn = [*turn, *answer.tokens, *apart.prompt(600)]


@pytest.mark.parametrize("victim", [0, 1], ids=["lender", "borrower"])
def test_killed_during_a_load(apart: Apart, victim: int) -> None:
    prompt = apart.prompt(6000)
    truth = apart.answered(0, prompt)
    asking = Asking(apart.servers[1], prompt)
    time.sleep(0.02)
    apart.sidecars[victim].signal(signal.SIGKILL)
    apart.sidecars[victim].wait(30)
    assert asking.answer().tokens == truth.tokens
    apart.restart(victim)
    apart.share()


@missed_again
def test_arenas_on_one_device(apart: Apart) -> None:
    """Each has its part of it, and reads the other's there: also what the other had stored before
    it was killed."""
    device = apart.stand.directory / "dax0.0"
    for number in range(2):
        apart.settings[number] = dax_arena(f"{device}:1G", slab="64M", ranks="2", rank=str(number))
        apart.restart(number)
    apart.share()
    prompts = [apart.prompt(4000) for _ in range(2)]
    truths = [apart.answered(number, prompts[number]) for number in range(2)]
    shared = [ask(apart.servers[1 - number], prompts[number]) for number in range(2)]
    assert [answer.tokens for answer in shared] == [truth.tokens for truth in truths]
    for answer in shared:
        hit(answer.cached_tokens, hits_of(4000))
    for sidecar in apart.sidecars:
        (lender,) = lenders(sidecar)
        assert [there["path"] for there in lender["devices"]] == [str(device)]
        assert lender["borrowed_pages"] >= hits_of(4000) // PAGE

    later, prompt = apart.prompt(4000), apart.prompt(6000)
    held, truth = apart.answered(0, later), apart.answered(0, prompt)
    apart.sidecars[0].wait_kept()
    asking = Asking(apart.servers[1], prompt)
    time.sleep(0.02)
    apart.sidecars[0].signal(signal.SIGKILL)
    apart.sidecars[0].wait(30)
    assert asking.answer().tokens == truth.tokens
    apart.restart(0)
    apart.share()
    again = ask(apart.servers[1], later)  # nobody has asked sidecar 0 for it
    assert again.tokens == held.tokens
    hit(again.cached_tokens, hits_of(4000))
    checked = apart.sidecars[0].status()["verifications"]
    assert checked["verified"] > 0 and checked["corrupt"] == 0


def test_other_seed_shares_nothing_and_is_told_why(apart: Apart) -> None:
    prompt = apart.prompt(1000)
    truth = apart.answered(0, prompt)
    apart.servers[1].end()
    other = apart.stand.server(
        "seed", connector=configured(apart.stand.endpoint("s1")), env={"PYTHONHASHSEED": "7"}
    )
    other.wait_ready()
    eventually(lambda: sessions(apart.sidecars[1]) == 2, "the new server's sessions")
    alone = ask(other, prompt)
    assert (alone.tokens, alone.cached_tokens) == (truth.tokens, 0)

    def why() -> list[str]:
        unshared = [space for lender in lenders(apart.sidecars[1]) for space in lender["unshared"]]
        return [difference["field"] for space in unshared for difference in space["differences"]]

    eventually(lambda: len(why()) == 1, "why nothing is shared")
    assert "hash" in why()[0]
