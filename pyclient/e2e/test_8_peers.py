"""Two servers with a sidecar each: what one has stored the other's worker reads where it lies, with the same tokens."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.stand import client, model
from examples.stand.processes import Server, Sidecar, Stand, eventually

from .conftest import PAGE, ask, computed, configured, hits_of, sessions
from .test_2_sidecar_faults import Asking


@dataclass
class Apart:
    """Two servers, each on its own sidecar."""

    stand: Stand
    sidecars: list[Sidecar]
    servers: list[Server]
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(80_000))

    def prompt(self, tokens: int, shared: list[int] | None = None) -> list[int]:
        """A prompt that no test has used."""
        return model.prompt(tokens, next(self.seeds), shared)

    def restart(self, number: int) -> None:
        """A new sidecar where one has ended."""
        self.sidecars[number].end()
        self.sidecars[number] = self.stand.sidecar(name=f"s{number}")
        self.found()

    def found(self) -> None:
        """Waits until both servers are connected and both sidecars know each other."""

        def all_there() -> bool:
            for sidecar in self.sidecars:
                peers = sidecar.status()["peers"]
                there = [lender for lender in peers["lenders"] if lender["complete"] and not lender["gone"]]
                if len(there) != 1 or len(peers["borrowers"]) != 1 or sessions(sidecar) != 2:
                    return False
            return True

        eventually(all_there, "both sidecars to know each other", 30)

    def pages(self, number: int) -> int:
        """Pages that a sidecar knows of: its own and, as hints, the other's."""
        status = self.sidecars[number].status()
        return status["pages"] + status["peers"]["hint_pages"]

    def told(self, number: int, before: int, pages: int) -> None:
        """Waits until a sidecar has heard of so many pages more than before."""
        eventually(lambda: self.pages(number) >= before + pages, f"{pages} pages to be told of", 20)

    def answered(self, number: int, prompt: list[int]) -> client.Answer:
        """What a server answers, once the other sidecar has heard of what it stored meanwhile."""
        before = self.pages(1 - number)
        answer = ask(self.servers[number], prompt)
        self.told(1 - number, before, (len(prompt) - answer.cached_tokens) // PAGE)
        return answer


@pytest.fixture(scope="module")
def apart(small_model: Path, logs: Path | None) -> Iterator[Apart]:
    with Stand(small_model, logs) as stand:
        sidecars = [stand.sidecar(name=f"s{number}") for number in range(2)]
        servers = [
            stand.server(f"p{number}", connector=configured(stand.endpoint(f"s{number}"))) for number in range(2)
        ]
        for server in servers:
            server.wait_ready()
        for server in servers:
            ask(server, model.prompt(300, 1))
        out = Apart(stand, sidecars, servers)
        out.found()
        yield out


@pytest.mark.parametrize("first", [0, 1])
def test_each_loads_what_the_other_computed(apart: Apart, first: int) -> None:
    prompt = apart.prompt(4000)
    stored = [sidecar.status()["counters"]["stored_bytes"] for sidecar in apart.sidecars]
    truth = apart.answered(first, prompt)
    assert truth.cached_tokens == 0
    shared = ask(apart.servers[1 - first], prompt)
    assert (shared.tokens, shared.cached_tokens) == (truth.tokens, hits_of(4000))
    # One cache between them: what one stores the other does not.
    now = [sidecar.status()["counters"]["stored_bytes"] for sidecar in apart.sidecars]
    page_bytes = apart.sidecars[first].status()["spaces"][0]["page_bytes"]
    assert now[first] - stored[first] == 4000 // PAGE * page_bytes
    assert now[1 - first] - stored[1 - first] <= page_bytes
    eventually(lambda: all(s.status()["leases"] == 0 for s in apart.sidecars), "no leases")


def test_what_the_other_holds_is_not_stored(apart: Apart) -> None:
    prompt = apart.prompt(2000)
    truth = apart.answered(0, prompt)
    before = apart.sidecars[1].status()["counters"]
    # Computed there, too, as a lookup that was too late would have it.
    client.reset_prefix_cache(apart.servers[1].base_url)
    apart.sidecars[1].signal(signal.SIGSTOP)
    asking = Asking(apart.servers[1], prompt)
    time.sleep(2.5)
    apart.sidecars[1].signal(signal.SIGCONT)
    assert asking.answer().tokens == truth.tokens
    apart.found()
    client.reset_prefix_cache(apart.servers[1].base_url)
    again = ask(apart.servers[1], prompt)
    assert (again.tokens, again.cached_tokens) == (truth.tokens, hits_of(2000))
    after = apart.sidecars[1].status()["counters"]
    assert after["stored_pages"] - before["stored_pages"] <= 1


def test_turns_of_a_conversation_that_moves(apart: Apart) -> None:
    """Every turn is answered by the other server, which finds all of the turns before, in both arenas."""
    turn, held = apart.prompt(500), 0
    for number in range(4):
        server = apart.servers[number % 2]
        truth = computed(apart.servers[1 - number % 2], turn)
        answer = apart.answered(number % 2, turn)
        assert answer.tokens == truth.tokens
        assert answer.cached_tokens >= held, f"turn {number} on {server.name}"
        held = len(turn) // PAGE * PAGE
        turn = [*turn, *answer.tokens, *apart.prompt(600)]


@pytest.mark.parametrize("victim", [0, 1], ids=["lender", "borrower"])
@pytest.mark.parametrize("delay_s", [0.01, 0.025])
def test_killed_during_a_load(apart: Apart, victim: int, delay_s: float) -> None:
    prompt = apart.prompt(8000)
    truth = apart.answered(0, prompt)
    asking = Asking(apart.servers[1], prompt)
    time.sleep(delay_s)
    apart.sidecars[victim].signal(signal.SIGKILL)
    apart.sidecars[victim].wait(5)
    assert asking.answer().tokens == truth.tokens
    apart.restart(victim)
    later = apart.prompt(1000)
    want = apart.answered(0, later)

    def hit() -> bool:
        client.reset_prefix_cache(apart.servers[1].base_url)
        answer = ask(apart.servers[1], later)
        assert answer.tokens == want.tokens
        return answer.cached_tokens == hits_of(1000)

    eventually(hit, "hits once they know each other again", 30)


def test_other_seed_shares_nothing_and_is_told_why(apart: Apart) -> None:
    prompt = apart.prompt(1000)
    truth = apart.answered(0, prompt)
    apart.servers[1].end()
    other = apart.stand.server("seed", connector=configured(apart.stand.endpoint("s1")), env={"PYTHONHASHSEED": "7"})
    other.wait_ready()
    eventually(lambda: sessions(apart.sidecars[1]) == 2, "the new server's sessions", 20)
    alone = ask(other, prompt)
    assert (alone.tokens, alone.cached_tokens) == (truth.tokens, 0)

    def why() -> list[str]:
        (lender,) = apart.sidecars[1].status()["peers"]["lenders"]
        return [difference["field"] for space in lender["unshared"] for difference in space["differences"]]

    eventually(lambda: len(why()) == 1, "why nothing is shared", 20)
    assert "hash" in why()[0]
