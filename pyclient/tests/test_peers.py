"""Sidecars that share, with real workers: each engine has a sidecar of its own, and loads what any
of them holds.

A page's bytes are its name, so that every page that was loaded tells whether it is the right one.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lookaside.metadata import LookasideMetadata
from peer import until
from test_sidecar import BINARY, Engine, Sidecar
from test_worker import PAGE, PPC, SlowCopies

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


class Host:
    """Sidecars below one private directory, each with an engine. A setting that differs is a
    function of the number."""

    def __init__(self, model: Path, directory: Path, count: int, **settings: Any) -> None:
        directory.chmod(0o700)
        self.requests = itertools.count()

        def mine(number: int) -> dict[str, Any]:
            return {
                key: value(number) if callable(value) else value for key, value in settings.items()
            }

        self.sidecars = [
            Sidecar(directory / f"s{number}", **mine(number)) for number in range(count)
        ]
        self.engines = [
            Engine(model, sidecar.directory, seed=number)
            for number, sidecar in enumerate(self.sidecars)
        ]
        for engine in self.engines:
            engine.start()
        self.found_each_other()

    def found_each_other(self) -> None:
        """Wait until each sidecar borrows from all others and lends to them, and knows all that
        they hold."""
        others = len(self.sidecars) - 1

        def found(sidecar: Sidecar) -> bool:
            peers = sidecar.status()["peers"]
            there = [
                lender for lender in peers["lenders"] if lender["complete"] and not lender["gone"]
            ]
            return len(there) == others and len(peers["borrowers"]) == others

        until(lambda: all(found(sidecar) for sidecar in self.sidecars))

    def know(self, names: list[int]) -> None:
        """Wait until every engine finds the whole prefix."""
        until(lambda: all(engine.held(0, *names) == len(names) for engine in self.engines))

    def store(self, number: int, first_page: int, names: list[int]) -> None:
        """Have one of the engines store pages, in pieces of what its cache has room for."""
        engine = self.engines[number]
        for start in range(0, len(names), 4 * PPC):
            some = names[start : start + 4 * PPC]
            blocks = list(range(1, 1 + len(some)))
            engine.cache[blocks] = torch.tensor(some, dtype=torch.float32).view(-1, 1, 1, 1)
            engine.save_now(
                engine.save(
                    first_page + start,
                    blocks,
                    some,
                    prev=names[start - 1] if start else names[0] - 1,
                )
            )

    def fetch(self, number: int, names: list[int], name: str | None = None) -> int:
        """Have one of the engines load what is held of a prefix; what it loads must be right, or
        reported as failed.

        Answers how many pages were loaded, 0 where that failed. The request's name is one that was
        not used before.
        """
        name = name or f"r{next(self.requests)}"
        engine = self.engines[number]
        blocks = list(range(1, 1 + len(names)))
        engine.cache[:] = -1.0
        engine.invalid.clear()
        got = engine.fetch(name, names, blocks)
        if engine.failed.pop(name, 0):
            assert engine.invalid == set(blocks[:got]), "blocks that failed and are not reported"
            return 0
        assert not engine.invalid
        self.right(number, names[:got])
        assert (engine.cache[blocks[got:]] == -1.0).all(), "more was written than was hit"
        return got

    def right(self, number: int, names: list[int]) -> None:
        """The first blocks have the bytes of these pages."""
        cache = self.engines[number].cache[1 : 1 + len(names)]
        want = torch.tensor(names, dtype=torch.float32).view(-1, 1, 1, 1)
        wrong = [
            name
            for name, page, right in zip(names, cache, want, strict=True)
            if not (page == right).all()
        ]
        assert not wrong, f"pages {wrong} of {names} have other bytes"

    def nothing_is_held_back(self) -> None:
        """Every lease ends, and every loan is given back when nobody uses it."""

        def idle(sidecar: Sidecar) -> bool:
            status = sidecar.status()
            loans = sum(borrower["loads"] for borrower in status["peers"]["borrowers"])
            return (
                status["leases"] == 0 and status["peers"]["borrowing"]["used"] == 0 and loans == 0
            )

        until(lambda: all(idle(sidecar) for sidecar in self.sidecars))

    def close(self) -> None:
        for sidecar in self.sidecars:
            if sidecar.process is not None:
                sidecar.signal(signal.SIGCONT)
        for engine in self.engines:
            engine.close()
        for sidecar in self.sidecars:
            sidecar.kill()


@pytest.fixture
def two(model: Path, tmp_path: Path) -> Iterator[Host]:
    host = Host(model, tmp_path, 2, peers_linger="100ms")
    yield host
    host.close()


def prefix(number: int, pages: int) -> list[int]:
    """Names of a prefix's pages; they are exact as floats."""
    return [1000 * (number + 1) + page + 1 for page in range(pages)]


def test_what_one_stored_the_other_loads(two: Host) -> None:
    names = prefix(1, 10)  # two chunks and a half
    two.store(0, 0, names)
    two.know(names)
    assert two.fetch(1, names) == 10
    assert two.fetch(1, names, "again") == 10, "of what is borrowed already"
    assert two.fetch(1, names[:5], "a part") == 5
    assert two.fetch(0, names) == 10
    a, b = (sidecar.status() for sidecar in two.sidecars)
    assert b["pages"] == 0 and b["counters"]["loaded_pages"] == 25
    assert b["peers"]["borrowed_pages"] == a["peers"]["lent_pages"] >= 10
    two.nothing_is_held_back()


def test_what_the_other_holds_is_not_stored(two: Host) -> None:
    """A store waits 5 ms for the other sidecar to say what it holds, and else stores all: prefixes
    are tried until both stores of one were answered in time."""

    def stored(names: list[int]) -> tuple[int, int]:
        """Pages that engine 1 stored of a prefix, and those that it left to the other."""
        moved = two.engines[1].count("save_bytes")
        left = two.sidecars[1].status()["counters"]["elsewhere_pages"]
        two.store(1, 0, names)
        saved = (two.engines[1].count("save_bytes") - moved) // PAGE
        left = two.sidecars[1].status()["counters"]["elsewhere_pages"] - left
        assert saved + left == len(names)
        return saved, left

    for number in itertools.count(1):
        two.store(0, 0, prefix(number, 8))
        two.know(prefix(number, 8))
        if stored(prefix(number, 8)) != (0, 8):
            continue
        if stored(prefix(number, 12)) == (4, 8):  # the new part alone
            break
    two.know(prefix(number, 12))
    assert [two.fetch(engine, prefix(number, 12)) for engine in (0, 1)] == [12, 12], (
        "each has a part of it"
    )


def test_turns_of_a_conversation_that_moves(model: Path, tmp_path: Path) -> None:
    """Each turn is answered by another engine, which stores what is new of it: a whole prefix lies
    in three arenas."""
    host = Host(model, tmp_path, 3, peers_linger="100ms")
    try:
        lengths = [
            3,
            7,
            8,
            13,
            16,
            18,
            23,
            27,
            30,
        ]  # pages after each turn: often in the middle of a chunk
        held = 0
        for turn, pages in enumerate(lengths):
            names = prefix(5, pages)
            number = turn % 3
            got = host.fetch(number, names, f"turn {turn}")
            assert got == held, f"turn {turn}: {got} of {held} pages"
            start = got // PPC * PPC
            host.store(number, start, names[start:])
            held = pages
            host.know(names)
        for number in range(3):
            assert host.fetch(number, prefix(5, held), "all") == held
        host.nothing_is_held_back()
    finally:
        host.close()


def test_what_is_read_often_is_copied_and_outlives_its_lender(model: Path, tmp_path: Path) -> None:
    host = Host(model, tmp_path, 3, peers_linger="100ms", peers_copy_after="3")
    try:
        names = prefix(7, 10)  # two chunks and a half
        host.store(0, 0, names)
        host.know(names)
        assert [host.fetch(1, names, f"read {turn}") for turn in range(2)] == [10, 10]
        host.nothing_is_held_back()  # returned, and counted on when it is borrowed again
        assert host.sidecars[1].status()["pages"] == 0
        assert host.fetch(1, names, "due") == 10

        def borrowing(number: int) -> dict[str, Any]:
            return host.sidecars[number].status()["peers"]["borrowing"]

        until(lambda: borrowing(1)["copied"] == 3)
        assert borrowing(1)["copied_pages"] == 10 == host.sidecars[1].status()["pages"]
        assert borrowing(1)["not_copied"] == 0
        host.nothing_is_held_back()
        host.sidecars[0].kill()
        until(lambda: not host.sidecars[1].status()["peers"]["lenders"][1:])
        assert host.fetch(1, names, "own") == 10
        assert borrowing(1)["used"] == 0, "what is held is borrowed"
        until(lambda: host.engines[2].held(0, *names) == 10)
        assert host.fetch(2, names, "from the copy") == 10
        host.sidecars[1].signal(signal.SIGSTOP)  # it is needed for that
        until(lambda: borrowing(2)["used"] == 0)
        assert host.engines[2].held(0, *names) == 0
    finally:
        host.close()


class Delayed(SlowCopies):
    """Copies that begin when the test says so."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked: list[tuple[Any, ...]] = []

    def _later(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return self._slow()

    scatter = _later

    def finish(self) -> None:
        for ticket, arguments in zip(self.tickets, self.asked, strict=True):
            copy = self.inner.scatter(*arguments)
            assert copy.wait(30)
            ticket._finish(copy.error)


@pytest.fixture
def under_way(two: Host) -> Callable[[], Delayed]:
    """Begins a load by engine 1 of what sidecar 0 holds; its copy ends when the test says so."""

    def begin() -> Delayed:
        two.store(0, 0, prefix(2, 8))
        two.know(prefix(2, 8))
        engine = two.engines[1]
        engine.cache[:] = -1.0
        lookup = engine.lookup(0, *prefix(2, 8))
        assert lookup.poll() == 8
        slow = Delayed(engine.worker.link.copies)
        engine.worker.link.copies = slow  # type: ignore[assignment]
        engine.step(LookasideMetadata(loads=[engine.spec("r", lookup, list(range(1, 9)))]))
        until(lambda: slow.tickets)
        return slow

    return begin


def end(engine: Engine, slow: Delayed) -> None:
    slow.finish()
    until(lambda: engine.step() or "r" in engine.received)
    engine.worker.link.copies = slow.inner


def test_load_under_way_when_its_lender_dies_is_good(
    two: Host, under_way: Callable[[], Delayed]
) -> None:
    """Nobody can have changed the memory."""
    slow = under_way()
    two.sidecars[0].kill()
    until(lambda: two.sidecars[1].status()["peers"]["borrowing"]["pages"] == 0)
    assert two.engines[1].held(0, *prefix(2, 8)) == 0, "what a dead one lent is found"
    end(two.engines[1], slow)
    assert not two.engines[1].failed and not two.engines[1].invalid
    two.right(1, prefix(2, 8))
    until(lambda: not two.sidecars[1].status()["peers"]["lenders"])
    two.sidecars[0].start()
    two.engines[0].wait_up()
    two.found_each_other()
    two.store(0, 0, prefix(3, 4))
    two.know(prefix(3, 4))
    assert two.fetch(1, prefix(3, 4), "later") == 4


def test_load_under_way_when_the_own_sidecar_dies_fails(
    two: Host, under_way: Callable[[], Delayed]
) -> None:
    """What was lent to it is free when it is dead: its workers cannot know what they have read."""
    slow = under_way()
    two.sidecars[1].kill()
    until(lambda: not any(b["loads"] for b in two.sidecars[0].status()["peers"]["borrowers"]))
    end(two.engines[1], slow)
    assert two.engines[1].failed == {"r": 1} and two.engines[1].invalid == set(range(1, 9))


def test_lender_that_does_not_answer_is_passed_over(two: Host) -> None:
    two.store(0, 0, prefix(4, 8))
    two.know(prefix(4, 8))
    two.sidecars[0].signal(signal.SIGSTOP)
    until(lambda: two.sidecars[1].status()["peers"]["borrowing"]["used"] == 0)
    began = time.monotonic()
    assert two.engines[1].held(0, *prefix(4, 8)) == 0
    assert time.monotonic() - began < 5, "a lookup waited for one that is stopped"
    two.store(1, 0, prefix(4, 8))
    until(lambda: two.sidecars[1].status()["pages"] == 8)
    assert two.fetch(1, prefix(4, 8)) == 8
    two.sidecars[0].signal(signal.SIGCONT)
    two.store(1, 0, prefix(6, 8))
    two.know(prefix(6, 8))
    assert two.fetch(0, prefix(6, 8)) == 8


@pytest.mark.parametrize("seed", range(3))
def test_history(model: Path, tmp_path: Path, seed: int) -> None:
    """Stores, loads, kills, stalls and restarts of three sidecars with small arenas: no page is
    ever another's."""
    host = Host(
        model,
        tmp_path,
        3,
        arena_limit="1M",
        arena_initial="1M",
        peers_linger="50ms",
        peers_skip_stores=str(seed % 2 == 0).lower(),
    )
    history(host, random.Random(seed))


def history(host: Host, rng: random.Random, beside_stopped: bool = True) -> None:
    """Random things happen to three sidecars, which are closed in the end.

    With ``beside_stopped`` one is restarted while another is stopped, too.
    """
    stopped: set[int] = set()
    loaded = borrowed = 0
    try:
        for turn in range(150):
            number = rng.randrange(3)
            names = prefix(rng.randrange(10), rng.randrange(1, 29))
            what = rng.random()
            if number in stopped:
                if what < 0.5:
                    host.sidecars[number].signal(signal.SIGCONT)
                    stopped.discard(number)
                    host.engines[number].wait_up()
            elif what < 0.4:
                host.store(number, 0, names)
            elif what < 0.9:
                loaded += host.fetch(number, names, f"{turn}")
            elif what < 0.95 and (beside_stopped or not stopped):
                borrowed += host.sidecars[number].status()["peers"]["borrowed_pages"]
                host.sidecars[number].restart()
                host.engines[number].wait_up()
            elif not stopped:
                host.sidecars[number].signal(signal.SIGSTOP)
                stopped.add(number)
        for number in stopped:
            host.sidecars[number].signal(signal.SIGCONT)
        for number in range(3):
            host.engines[number].wait_up()
        host.found_each_other()
        names = prefix(77, 8)
        host.store(0, 0, names)
        host.know(names)
        assert [host.fetch(number, names, f"end {number}") for number in range(3)] == [8, 8, 8]
        borrowed += sum(sidecar.status()["peers"]["borrowed_pages"] for sidecar in host.sidecars)
        assert loaded > 100 and borrowed > 20, (
            f"{loaded} pages loaded, {borrowed} borrowed: it says nothing"
        )
        host.nothing_is_held_back()
    finally:
        host.close()
