"""Tiers below the arena: a prefix outlives memory, restarts and machines; what fails in one is
never a wrong token.

The tests of the class build on each other, because every server takes half a minute to start: "one"
is a machine with a disk and a Redis server, whose arena holds a tenth of what is asked of it; "two"
is another machine, which comes later and has nothing but the same Redis server.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.beyond_memory import __main__ as beyond_memory
from examples.stand import client, model
from examples.stand.client import Answer
from examples.stand.processes import BINARY, Redis, Server, Sidecar, Stand, dax_arena, eventually

from .conftest import PAGE, Stands, ask, configured, counted, hits_of, sessions

LENGTHS = (300, 700, 1000)  # two, five and seven pages, two to a chunk
ROUNDS = 12
ARENA = "36M"  # a tenth of the 336 MiB that the prompts' pages take
PROMPTS = [model.prompt(LENGTHS[number % 3], 60_000 + number) for number in range(3 * ROUNDS)]
PAGES = sum(hits_of(len(prompt)) // PAGE for prompt in PROMPTS)
SOME = range(18)
SOME_PAGES = PAGES // 2
SEED = 20261120
DEVICE = "256M"  # of the arena on DAX
PATIENT_REDIS = "lookup_timeout=20s&load_timeout=60s&store_timeout=120s"

# In so small an arena a partly filled chunk would be evicted before the usual second is over. Each
# stands for a host of its own: what another has in its arena must come from a tier. A busy disk
# or Redis server may take longer than so small a model takes to compute a page.
PATIENT_SIDECAR = {
    "lookup_deadline": "60s",
    "lookup_promote": "always",
    "cascade_partial_delay": "50ms",
    "peers_enabled": "false",
}


@dataclass
class Machine:
    """A sidecar and a server on it. Either may be ended and started anew; what lies on the disk
    stays."""

    stand: Stand
    name: str
    settings: dict[str, str]
    disk: Path | None = None
    runs: int = 0
    seeds: Iterator[int] = field(
        default_factory=lambda: itertools.count(64_000)
    )  # of prompts that nobody else asks
    sidecar: Sidecar = field(init=False)
    server: Server = field(init=False)

    def start_sidecar(self, **settings: str) -> None:
        """settings: instead of those of before, where given.

        Its arena is empty: what the tests look for is in the tiers, and a sidecar without the
        directory of the one before does not find that one's memory with its workers.
        """
        self.settings = settings or self.settings
        directory = Path(self.stand.endpoint(self.name).format(rank=0)) / "directory"
        directory.unlink(missing_ok=True)
        self.sidecar = self.stand.sidecar(
            0, self.name, settings={**PATIENT_SIDECAR, **self.settings}
        )

    def device(self, number: int) -> str:
        """A file that stands in for a DAX device of the arena."""
        return str(self.stand.directory / f"arena-dax{number}.0")

    def start_arena(self, *devices: str, wait: bool = True) -> None:
        """A sidecar whose arena lies on these devices."""
        settings = dax_arena(
            ",".join(f"{device}:{DEVICE}" for device in devices), slab="64M", hotplug="true"
        )
        self.start_sidecar(**settings)
        if wait:
            self.wait_mapped()

    def arena(self) -> dict[str, Any]:
        """What the sidecar says of an arena on DAX."""
        return self.sidecar.status()["arena"]["dax"]

    def start_server(self) -> None:
        """Does not wait for it."""
        self.runs += 1
        name = f"{self.name}-{self.runs}"
        self.server = self.stand.server(name, connector=configured(self.stand.endpoint(self.name)))

    def kill_sidecar(self) -> None:
        self.sidecar.kill()

    def stored(self, pages: int) -> None:
        """Waits until the disk holds so many pages and nothing waits to be written to any tier."""
        self.sidecar.wait_stored("disk", pages)
        tiers = self.sidecar.tiers
        eventually(
            lambda: not any(t["store_queue_chunks"] for t in tiers().values()), "all to be written"
        )

    def ask(self, prompt: list[int]) -> Answer:
        """An answer for which vLLM's own cache has nothing."""
        client.reset_prefix_cache(self.server.base_url)
        return ask(self.server, prompt)

    def wait_mapped(self) -> None:
        """Waits until what is asked is found again: a worker maps the arena after its session has
        begun."""
        eventually(lambda: sessions(self.sidecar) == 2, "both roles' sessions")

        def hit() -> bool:
            prompt = model.prompt(300, next(self.seeds))
            self.ask(prompt)
            return self.ask(prompt).cached_tokens == hits_of(300)

        eventually(hit, "a first hit")

    def connected(self, truth: dict[int, Answer]) -> None:
        """Waits until both roles are connected and the first prompt hits: regions may be mapped a
        little later."""
        eventually(lambda: sessions(self.sidecar) == 2, "both roles' sessions")

        def hit() -> bool:
            answer = self.ask(PROMPTS[0])
            assert answer.tokens == truth[0].tokens
            return answer.cached_tokens == hits_of(len(PROMPTS[0]))

        eventually(hit, "a first hit")

    def all_hit(self, truth: dict[int, Answer], which: range) -> bool:
        """Asks all of these prompts and says whether they hit as far as they can; their answers are
        the right ones."""
        hits = []
        for number in which:
            answer = self.ask(PROMPTS[number])
            assert answer.tokens == truth[number].tokens, f"prompt {number}"
            hits.append(answer.cached_tokens == hits_of(len(PROMPTS[number])))
        return all(hits)

    def hits(self, truth: dict[int, Answer], which: range) -> None:
        """All of these prompts hit as far as they can, and their answers are the right ones."""
        for number in which:
            answer = self.ask(PROMPTS[number])
            assert answer.tokens == truth[number].tokens, f"prompt {number}"
            assert answer.cached_tokens == hits_of(len(PROMPTS[number])), f"prompt {number}"


@dataclass
class Tiered:
    """The machines, and what they share."""

    redis: Redis
    one: Machine
    two: Machine
    truth: dict[int, Answer] = field(default_factory=dict)  # by prompt


@pytest.fixture(scope="class")
def tiered(small_model: Path, stands: Stands) -> Iterator[Tiered]:
    with stands(small_model) as stand:
        redis = stand.redis()
        url = f"redis://127.0.0.1:{redis.port}/0"
        disk = stand.directory / "disk"
        one = Machine(
            stand,
            "one",
            {
                "arena_limit": ARENA,
                "disk": f"{disk}:1G:slab=128M:load_timeout=60s:store_timeout=120s",
                "redis": f"{url}?{PATIENT_REDIS}",
            },
            disk,
        )
        one.start_sidecar()
        one.start_server()
        one.server.wait_ready()
        # This one waits for a Redis server that is stopped, three times.
        two = {
            "arena_limit": "1G",
            "redis": f"{url}?lookup_timeout=2s&load_timeout=20s&store_timeout=120s",
        }
        yield Tiered(redis, one, Machine(stand, "two", two))


@dataclass
class Seen:
    """What came of prompts that were asked in the background."""

    asked: int = 0
    wrong: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)


@contextmanager
def traffic(tiered: Tiered, machine: Machine) -> Iterator[Seen]:
    """Asks one prompt after the other until the block ends, and each at least once."""
    seen, enough = Seen(), threading.Event()

    def ask_all() -> None:
        while not enough.is_set():
            for number in SOME:
                answer = machine.ask(PROMPTS[number])
                seen.asked += 1
                if answer.tokens != tiered.truth[number].tokens:
                    seen.wrong.append(number)
                if answer.cached_tokens != hits_of(len(PROMPTS[number])):
                    seen.missed.append(number)

    asking = threading.Thread(target=ask_all)
    asking.start()
    try:
        yield seen
    finally:
        enough.set()
        asking.join()


def dax(machine: Machine, *arguments: str) -> None:
    """`lookaside dax ...` of the machine's sidecar."""
    command = [
        str(BINARY),
        "dax",
        arguments[0],
        f"--runtime-dir={machine.sidecar.endpoint}",
        *arguments[1:],
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, f"{arguments}: {run.stderr}"


def flip_bits(path: Path, rng: random.Random) -> None:
    """One bit in every 16 MiB of a store's file, but for what it begins with: headers and a slab's
    directory."""
    with path.open("r+b") as slab:
        size = path.stat().st_size
        for _ in range(size >> 24):
            at = rng.randrange(1 << 20, size)
            slab.seek(at)
            byte = slab.read(1)
            slab.seek(at)
            slab.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))


class TestTiers:
    def test_a_tenth_of_the_memory_is_enough(self, tiered: Tiered) -> None:
        one = tiered.one
        stored = 0
        for number, prompt in enumerate(PROMPTS):
            answer = tiered.truth[number] = ask(one.server, prompt)
            assert answer.cached_tokens == 0, "computed, so that it is the truth"
            stored += hits_of(len(prompt)) // PAGE
            one.stored(stored)  # what is evicted before a slow disk has it would be shed
        assert one.sidecar.status()["pages"] <= PAGES // 8, "the arena was meant to be too small"
        one.hits(tiered.truth, range(len(PROMPTS)))
        status = one.sidecar.tiers()["disk"]
        assert status["loaded_chunks"] > ROUNDS * len(LENGTHS)
        assert status["corrupt_chunks"] == 0 and status["shed_chunks"] == 0
        assert counted(one.server, "vllm:lookaside_load_failures_total") == 0
        assert client.metric(one.server.base_url, "vllm:lookaside_prefill_tokens_per_second") > 0

    def test_what_the_demo_measures_and_prints(
        self, tiered: Tiered, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """examples/beyond_memory on this server: the rows that `make demo TIERS=disk` prints and
        writes."""
        one = tiered.one
        shown = beyond_memory.columns("disk").table()
        beyond_memory.measure(
            one.server, one.sidecar, "disk", (300, 1000), rounds=2, seed=78, shown=shown
        )
        rows = shown.rows
        assert [row.prompt_tokens for row in rows] == [300, 1000]
        assert [row.hit_tokens for row in rows] == [hits_of(300), hits_of(1000)]
        for row in rows:
            assert row.outputs_equal
            assert min(row.computed_ttft_s, row.tier_ttft_s, row.arena_ttft_s, row.local_ttft_s) > 0
        assert capsys.readouterr().out.count(" equal\n") == 2

    def test_local_hits_are_not_brought_up_again(self, tiered: Tiered) -> None:
        """vLLM has the first four of seven pages itself: they stay where they are."""
        one, number = tiered.one, len(LENGTHS) - 1
        prompt = PROMPTS[number]
        one.hits(tiered.truth, range(27, len(PROMPTS)))  # the arena forgets it
        client.reset_prefix_cache(one.server.base_url)
        ask(one.server, prompt[: 4 * PAGE + 1], max_tokens=1)
        before = counted(one.server, "vllm:lookaside_load_bytes_total")
        again = ask(one.server, prompt)
        assert again.tokens == tiered.truth[number].tokens
        assert again.cached_tokens == hits_of(len(prompt))
        loaded = counted(one.server, "vllm:lookaside_load_bytes_total") - before
        assert loaded == 3 * PAGE * model.kv_bytes_per_token(one.stand.model)

    def test_sidecar_is_killed_and_finds_its_disk_again(self, tiered: Tiered) -> None:
        one = tiered.one
        one.kill_sidecar()
        missed = one.ask(PROMPTS[1])
        assert (missed.tokens, missed.cached_tokens) == (tiered.truth[1].tokens, 0)
        one.start_sidecar()
        one.connected(tiered.truth)
        one.hits(tiered.truth, range(2, 12))
        assert one.sidecar.tiers()["disk"]["loaded_chunks"] > 0

    def test_everything_is_killed_and_started_anew(self, tiered: Tiered) -> None:
        one, two = tiered.one, tiered.two
        one.sidecar.wait_stored("redis", PAGES)
        one.sidecar.signal(signal.SIGKILL)
        one.server.end(patience_s=0)
        one.sidecar.end()
        one.start_sidecar()
        two.start_sidecar()
        one.start_server()
        two.start_server()
        one.server.wait_ready()
        two.server.wait_ready()
        one.hits(tiered.truth, range(12, 24))
        assert one.sidecar.tiers()["disk"]["loaded_chunks"] > 0

    def test_another_machine_finds_it_in_redis(self, tiered: Tiered) -> None:
        tiered.two.hits(tiered.truth, range(len(PROMPTS)))
        assert tiered.two.sidecar.tiers()["redis"]["loaded_chunks"] > len(PROMPTS)

    def test_salts_do_not_meet_in_redis(self, tiered: Tiered) -> None:
        """Two tenants ask the same, on two machines that share a Redis server."""
        one, two, prompt = tiered.one, tiered.two, model.prompt(700, 60_900)

        def salted(server: Server, salt: str) -> Answer:
            client.reset_prefix_cache(server.base_url)
            return ask(server, prompt, cache_salt=salt)

        before = one.sidecar.tiers()["redis"]["stored_chunks"]
        truth = salted(one.server, "alice")
        assert truth.cached_tokens == 0
        eventually(
            lambda: one.sidecar.tiers()["redis"]["stored_chunks"] >= before + 3,
            "alice's chunks to be written",
        )
        bob = salted(two.server, "bob")
        assert (bob.tokens, bob.cached_tokens) == (truth.tokens, 0)
        alice = salted(two.server, "alice")
        assert (alice.tokens, alice.cached_tokens) == (truth.tokens, hits_of(700))

    def test_an_emptied_disk_is_filled_from_redis(self, tiered: Tiered) -> None:
        one = tiered.one
        one.sidecar.end()
        assert one.disk is not None
        shutil.rmtree(one.disk)
        one.start_sidecar()
        one.connected(tiered.truth)
        one.hits(tiered.truth, SOME)
        assert one.sidecar.tiers()["redis"]["loaded_chunks"] > 0
        one.stored(SOME_PAGES)

    def test_redis_that_stops_answering_costs_nothing(self, tiered: Tiered) -> None:
        """Stopped, it is turned off; requests hit in the arena and compute what is new. Then it
        comes back."""
        two, seeds = tiered.two, iter(range(61_000, 62_000))

        def new_one() -> Answer:
            prompt = model.prompt(400, next(seeds))
            answer = two.ask(prompt)
            assert answer.cached_tokens == 0
            return answer

        new_one()
        tiered.redis.signal(signal.SIGSTOP)
        try:
            eventually(
                lambda: bool(new_one()) and two.sidecar.tiers()["redis"]["state"] != "closed",
                "it is off",
            )
            late = client.metric(two.server.base_url, "vllm:lookaside_lookup_timeouts_total")
            two.hits(tiered.truth, range(0, 6))
            for _ in range(3):
                new_one()
            assert (
                client.metric(two.server.base_url, "vllm:lookaside_lookup_timeouts_total") == late
            )
        finally:
            tiered.redis.signal(signal.SIGCONT)
        two.sidecar.end()
        two.start_sidecar()  # its arena is empty now
        two.connected(tiered.truth)
        eventually(lambda: two.sidecar.tiers()["redis"]["state"] == "closed", "it is in use again")
        two.hits(tiered.truth, range(6, 12))

    def test_redis_that_is_gone_costs_nothing(self, tiered: Tiered) -> None:
        two = tiered.two
        tiered.redis.signal(signal.SIGKILL)
        tiered.redis.wait(30)
        two.hits(tiered.truth, range(6, 12))
        for number in range(3):
            answer = two.ask(model.prompt(400, 62_000 + number))
            assert answer.cached_tokens == 0

    def test_a_corrupted_disk_is_never_a_wrong_token(self, tiered: Tiered) -> None:
        """Bytes flipped all over the store while nobody has it open; Redis is gone, so the disk is
        all there is."""
        one = tiered.one
        one.sidecar.end()
        rng = random.Random(SEED)
        assert one.disk is not None
        slabs = [
            path for path in one.disk.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20
        ]
        assert slabs
        for path in slabs:
            flip_bits(path, rng)
        one.start_sidecar()
        eventually(lambda: sessions(one.sidecar) == 2, "both roles' sessions")
        found = 0
        for number in SOME:
            prompt = PROMPTS[number]
            answer = one.ask(prompt)
            assert answer.tokens == tiered.truth[number].tokens, f"prompt {number}, seed {SEED}"
            assert answer.cached_tokens <= hits_of(len(prompt))
            found += answer.cached_tokens // PAGE
        print(f"\n{found} of {SOME_PAGES} pages were still found")
        assert found < SOME_PAGES
        assert one.sidecar.tiers()["disk"]["corrupt_chunks"] > 0

    def test_dax_devices_come_and_go_under_traffic(self, tiered: Tiered) -> None:
        """Devices are added, removed in each mode and resized; files stand in for them. Then the
        sidecar is killed."""
        one = tiered.one
        a, b, c = (str(one.stand.directory / f"dax{number}.0") for number in range(3))
        options = "256M:hotplug=true:allow_files=true:load_timeout=60s:store_timeout=120s"

        def restart(*devices: str) -> None:
            one.start_sidecar(arena_limit=ARENA, dax=f"{','.join(devices)}:{options}")
            eventually(lambda: sessions(one.sidecar) == 2, "both roles' sessions")

        def used(device: str) -> int:
            devices = one.sidecar.get("/reconfigure/dax/status").json()["devices"]
            return next((d["used_bytes"] for d in devices if d["device_path"] == device), -1)

        one.sidecar.end()
        restart(a, b)
        eventually(lambda: one.all_hit(tiered.truth, SOME), "all to be on the devices")
        assert used(a) > 0 and used(b) > 0
        with traffic(tiered, one) as seen:
            dax(one, "add", c, "256M")
            dax(one, "remove", a)
            dax(one, "resize", b, "128M")
            dax(one, "remove", b, "--mode", "drain")
            dax(one, "add", b, "128M")
            dax(one, "add", a, "256M")
            dax(one, "remove", b)
        assert seen.wrong == [] and seen.missed == [] and seen.asked > 0
        assert used(b) == -1 and used(a) + used(c) > 0
        one.kill_sidecar()
        restart(a, c)
        eventually(lambda: one.ask(PROMPTS[0]).cached_tokens > 0, "a first hit")
        one.hits(tiered.truth, SOME)
        with traffic(tiered, one) as seen:
            dax(one, "remove", c, "--mode", "evict")
        assert seen.wrong == [] and seen.asked > 0
        tier = one.sidecar.tiers()["dax"]
        assert tier["loaded_chunks"] > 0 and tier["corrupt_chunks"] == 0

    def test_an_arena_on_dax_changes_under_traffic(self, tiered: Tiered) -> None:
        """Workers map the devices. They are added, removed in each mode and resized, and nothing is
        missed."""
        one = tiered.one
        a, b, c = one.device(0), one.device(1), one.device(2)
        one.sidecar.end()
        one.start_arena(a, b)

        def gone(device: str) -> bool:
            return device not in [d["device_path"] for d in one.arena()["devices"]]

        for number in SOME:
            answer = one.ask(PROMPTS[number])
            assert (answer.tokens, answer.cached_tokens) == (tiered.truth[number].tokens, 0)
        one.hits(tiered.truth, SOME)
        with traffic(tiered, one) as seen:
            dax(one, "add", "--arena", c, DEVICE)
            dax(one, "remove", "--arena", a)  # drained, in the background
            eventually(lambda: gone(a), "the drained device to be gone")
            dax(one, "add", "--arena", a, DEVICE)
            dax(one, "remove", "--arena", b, "--mode=migrate", "--force")
            dax(one, "resize", "--arena", c, "192M", "--force")
            dax(one, "resize", "--arena", c, DEVICE)
        assert seen.wrong == [] and seen.missed == [] and seen.asked > 0
        assert gone(b) and not gone(a) and not gone(c)
        with traffic(tiered, one) as seen:
            dax(one, "remove", "--arena", c, "--mode=evict", "--force")
        assert seen.wrong == [] and seen.asked > 0
        for number in SOME:  # what was dropped is stored again
            assert one.ask(PROMPTS[number]).tokens == tiered.truth[number].tokens
        one.hits(tiered.truth, SOME)
        assert counted(one.server, "vllm:lookaside_load_failures_total") == 0
        assert one.arena()["corrupt_chunks"] == 0

    def test_an_arena_on_dax_outlives_everything(self, tiered: Tiered) -> None:
        """Killed, first the sidecar alone, then vLLM as well, it is found again."""
        one, a = tiered.one, tiered.one.device(0)
        one.sidecar.wait_kept()
        for everything in (False, True):
            if everything:
                one.server.kill()
            one.kill_sidecar()
            one.start_arena(a, wait=False)
            assert one.sidecar.status()["arena"]["recovered"]["chunks"] > 0
            if everything:
                one.start_server()
                one.server.wait_ready()
            eventually(lambda: sessions(one.sidecar) == 2, "both roles' sessions")
            eventually(lambda: one.ask(PROMPTS[0]).cached_tokens > 0, "a first hit")
            one.hits(tiered.truth, SOME)
            status = one.sidecar.status()["verifications"]
            assert status["verified"] > 0 and status["corrupt"] == 0

    def test_a_corrupted_arena_is_never_a_wrong_token(self, tiered: Tiered) -> None:
        one, a = tiered.one, tiered.one.device(0)
        one.sidecar.end()
        flip_bits(Path(a), random.Random(SEED))
        one.start_arena(a)
        found = 0
        for number in SOME:
            answer = one.ask(PROMPTS[number])
            assert answer.tokens == tiered.truth[number].tokens, f"prompt {number}, seed {SEED}"
            found += answer.cached_tokens // PAGE
        print(f"\n{found} of {SOME_PAGES} pages were still found")
        assert found < SOME_PAGES
        assert one.sidecar.status()["verifications"]["corrupt"] > 0
        # It is stored again. Behind a chunk that was bad, another one is found to be by the next
        # lookup only.
        eventually(lambda: one.all_hit(tiered.truth, SOME), "all to be found again")

    def test_an_arena_whose_file_is_cut_short(self, tiered: Tiered) -> None:
        """vLLM and the sidecar live on, and compute what is not there any more."""
        one, a = tiered.one, tiered.one.device(0)
        os.truncate(a, 32 << 20)
        for number in SOME:
            answer = one.ask(PROMPTS[number])
            assert answer.tokens == tiered.truth[number].tokens
        assert one.server.alive() and one.sidecar.alive()

    @pytest.mark.parametrize("serde", ["lossless", "fp8", "int8"])
    def test_encoded_pages_in_redis(self, tiered: Tiered, serde: str) -> None:
        """What it does to greedy tokens: nothing, or, where it may lose bits, what is reported but
        not judged."""
        two = tiered.two
        spaces = {space["fingerprint"] for space in tiered.one.sidecar.status()["spaces"]}
        redis = two.stand.redis(f"redis-{serde}")
        two.sidecar.end()
        two.start_sidecar(
            arena_limit="1G",
            redis=f"redis://127.0.0.1:{redis.port}/0?serde={serde}&{PATIENT_REDIS}",
        )
        two.wait_mapped()
        lossy = two.sidecar.tiers()["redis"]["lossy"]
        assert lossy == (serde != "lossless")
        encoded = {space["fingerprint"] for space in two.sidecar.status()["spaces"]}
        assert encoded.isdisjoint(spaces) if lossy else encoded == spaces, (
            "lost bits are for those who asked for it"
        )
        which, before = range(6), two.sidecar.tiers()["redis"]["stored_chunks"]
        for number in which:
            answer = two.ask(PROMPTS[number])
            assert (answer.tokens, answer.cached_tokens) == (tiered.truth[number].tokens, 0)
        # Where it has stalled for a while it is not done yet.
        chunks = sum(-(-hits_of(len(PROMPTS[number])) // (2 * PAGE)) for number in which)
        eventually(
            lambda: two.sidecar.tiers()["redis"]["stored_chunks"] >= before + chunks,
            "all to be written",
        )
        two.sidecar.wait_stored(
            "redis", sum(hits_of(len(PROMPTS[number])) // PAGE for number in which)
        )
        two.sidecar.end()
        two.start_sidecar()
        eventually(lambda: sessions(two.sidecar) == 2, "both roles' sessions")
        eventually(lambda: two.ask(PROMPTS[0]).cached_tokens > 0, "a first hit")
        same = total = 0
        for number in which:
            answer = two.ask(PROMPTS[number])
            assert answer.cached_tokens == hits_of(len(PROMPTS[number]))
            truth = tiered.truth[number].tokens
            same += sum(a == b for a, b in zip(answer.tokens, truth, strict=True))
            total += len(truth)
        print(
            f"\n{serde} in Redis: {same} of {total} greedy tokens are those of the lossless run "
            f"({same / total:.0%})"
        )
        assert same == total or lossy
