"""Time to first token in real vLLM: hits in the arena and on disk, vLLM's own cache, prefill, a
dead sidecar.

Three servers of the demo's small model: one without the connector, two on a sidecar. In every round
each is asked in turn, so that a machine that slows down slows all of them:

  cold      a fresh prompt, without the connector and with it (the second computes and stores)
  hit       that prompt on the other server, which loads it; again there, and again without the
            connector: vLLM's cache
  killed    the first request after the sidecar got SIGKILL, against the same prompt without the
            connector
  stopped   the same after SIGSTOP

The limit of a hit is the same round's with vLLM's own cache and no connector, that of a cold prompt
the same round's without the connector, and of the first request after a fault 50 ms on top of the
one without the connector.

These ended, one server runs on a sidecar with a disk tier, whose arena has room for three of the
prompts:

  disk      a fresh prompt, computed; again with vLLM's own cache emptied, from the arena; and one
            of three rounds ago, which only the disk has still

The limit of a hit on disk is computing in the same round, and that of disk.over_arena the hit in
the arena. disk.missed counts rounds in which a lookup was given up, which are left out. Times are
seconds; the outputs of every round must be the same tokens.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence

from bench._report import Report, arguments
from examples.stand import client, model
from examples.stand.client import Answer
from examples.stand.command import ended
from examples.stand.processes import (
    Server,
    Sidecar,
    Stand,
    connector_config,
    eventually,
)
from examples.stand.progress import say

EXTRA_LIMIT_S = 0.050
# Rounds that a prompt of the disk's lies back; the arena has room for as many.
BEHIND = 3
PAGE = 128  # vLLM's block on the CPU, in tokens


class Bench:
    """The servers, and what was measured on them."""

    def __init__(self, stand: Stand, tokens: int) -> None:
        self.tokens = tokens
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.stand = stand
        self.sidecar: Sidecar = stand.sidecar()
        config = connector_config(stand.endpoint())
        self.plain: Server = stand.server("plain", connector=None)
        self.a: Server = stand.server("a", connector=config)
        self.b: Server = stand.server("b", connector=config)
        for server in (self.plain, self.a, self.b):
            server.wait_ready()
        say("three servers up; warming up ...")
        for server in (self.plain, self.a, self.b):
            for number in range(2):
                client.complete(server.base_url, model.prompt(tokens, 900 + number))
        self._connected()

    def _connected(self) -> None:
        eventually(
            lambda: len(self.sidecar.status()["sessions"]) == 4, "both servers' sessions", 20
        )

    def _timed(self, name: str, server: Server, prompt: list[int]) -> Answer:
        client.settle()
        answer = client.complete(server.base_url, prompt)
        self.seconds[name].append(answer.ttft_s)
        return answer

    def sharing(self, number: int) -> None:
        """One round of cold, hit and local cache."""
        prompt = model.prompt(self.tokens, 10_000 + number)
        order = [("cold.plain", self.plain), ("cold.connector", self.a)]
        answers = [
            self._timed(name, server, prompt)
            for name, server in (order if number % 2 else order[::-1])
        ]
        hit = self._timed("hit.lookaside", self.b, prompt)
        local = self._timed("hit.local_connector", self.b, prompt)
        plain = self._timed("hit.local_plain", self.plain, prompt)
        if hit.cached_tokens != plain.cached_tokens:
            raise RuntimeError(
                f"hits differ: {hit.cached_tokens} from Lookaside, {plain.cached_tokens} from vLLM"
            )
        check([*answers, hit, local, plain])

    def dead(self, name: str, number: int, how: signal.Signals) -> None:
        """One first request after the sidecar was killed or stopped, against one without the
        connector."""
        prompt = model.prompt(self.tokens, 20_000 + number)
        client.settle()
        plain = client.complete(self.plain.base_url, prompt)
        client.settle()
        self.sidecar.signal(how)
        try:
            after = client.complete(self.a.base_url, prompt)
        finally:
            if how == signal.SIGSTOP:
                self.sidecar.signal(signal.SIGCONT)
        check([plain, after])
        self.seconds[f"{name}.plain"].append(plain.ttft_s)
        self.seconds[f"{name}.connector"].append(after.ttft_s)
        self.seconds[f"{name}.extra"].append(after.ttft_s - plain.ttft_s)
        if how == signal.SIGKILL:
            self.sidecar.end()
            self.sidecar = self.stand.sidecar()
        self._connected()
        # Back in order before the next: what one stores, the other finds.
        seeds = itertools.count(30_000 + 1000 * number)

        def found() -> bool:
            small = model.prompt(600, next(seeds))
            client.complete(self.a.base_url, small)
            return client.complete(self.b.base_url, small).cached_tokens > 0

        eventually(found, "hits once the sidecar is back", 30)


class DiskBench:
    """A server on a sidecar with a small arena and a disk tier, and what was measured on it."""

    def __init__(self, stand: Stand, tokens: int, rounds: int) -> None:
        self.tokens = tokens
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._answers: list[Answer] = []
        self._bytes = tokens * model.kv_bytes_per_token(stand.model)
        settings = {
            "arena_limit": str(BEHIND * self._bytes),
            "disk": f"{stand.directory / 'disk'}:"
            f"{((rounds + BEHIND + 2) * self._bytes >> 20) + 512}M",
        }
        self._sidecar = stand.sidecar(settings=settings)
        self._server = stand.server("disk", connector=connector_config(stand.endpoint()))
        self._server.wait_ready()
        for number in range(2):
            client.complete(self._server.base_url, model.prompt(tokens, 900 + number))

    def round(self, number: int) -> None:
        """A fresh prompt, and one of before. The first rounds have none of before, and are not
        counted."""
        prompt = model.prompt(self.tokens, 40_000 + number)
        client.settle()
        computed = client.complete(self._server.base_url, prompt)
        arena = self._again(prompt)
        self._answers.append(computed)
        check([computed, arena])
        # Writing goes on behind vLLM's back: it is not to disturb what is timed next.
        eventually(
            lambda: self._sidecar.tiers()["disk"]["store_queue_chunks"] == 0,
            "the disk to be written",
            60,
        )
        if number < BEHIND:
            return
        before = self._sidecar.tiers()["disk"]["loaded_bytes"]
        disk = self._again(model.prompt(self.tokens, 40_000 + number - BEHIND))
        check([self._answers[number - BEHIND], disk])
        # A lookup that was given up is counted, and its round left out: it would say nothing of a
        # hit.
        missed = (
            disk.cached_tokens < arena.cached_tokens
            or arena.cached_tokens < (self.tokens - 1) // PAGE * PAGE
        )
        self.seconds["disk.missed"].append(float(missed))
        if missed:
            return
        if self._sidecar.tiers()["disk"]["loaded_bytes"] - before < 0.9 * self._bytes:
            raise RuntimeError("what was meant to lie on the disk alone was in the arena")
        for name, answer in (
            ("disk.computed", computed),
            ("disk.arena", arena),
            ("disk.disk", disk),
        ):
            self.seconds[name].append(answer.ttft_s)

    def _again(self, prompt: list[int]) -> Answer:
        client.reset_prefix_cache(self._server.base_url)
        client.settle()
        return client.complete(self._server.base_url, prompt)


def latest(seconds: Mapping[str, Sequence[float]], *prefixes: str) -> str:
    """The newest seconds of the figures whose names begin so."""
    return ", ".join(
        f"{name} {each[-1]:.4f}" for name, each in seconds.items() if name.startswith(prefixes)
    )


def check(answers: list[Answer]) -> None:
    """Raises where outputs differ."""
    if len({answer.tokens for answer in answers}) != 1:
        raise RuntimeError(f"outputs differ: {[answer.tokens for answer in answers]}")


def figures(seconds: Mapping[str, Sequence[float]]) -> Report:
    """What is reported of the rounds' seconds, by name; without faults, or a disk, there are none
    of theirs."""
    report = Report("ttft")
    report.rounds("cold.plain", "s", seconds["cold.plain"])
    report.rounds("cold.connector", "s", seconds["cold.connector"], seconds["cold.plain"])
    report.rounds("hit.local_plain", "s", seconds["hit.local_plain"])
    for name in ("hit.local_connector", "hit.lookaside"):
        report.rounds(name, "s", seconds[name], seconds["hit.local_plain"])
    for fault in ("killed", "stopped"):
        if f"{fault}.extra" in seconds:
            report.rounds(f"{fault}.plain", "s", seconds[f"{fault}.plain"])
            report.rounds(f"{fault}.connector", "s", seconds[f"{fault}.connector"])
            report.rounds(f"{fault}.extra", "s", seconds[f"{fault}.extra"], EXTRA_LIMIT_S)
    if "disk.disk" in seconds:
        report.add("disk.missed", sum(seconds["disk.missed"]), "rounds")
        report.rounds("disk.computed", "s", seconds["disk.computed"])
        for name in ("disk.arena", "disk.disk"):
            report.rounds(name, "s", seconds[name], seconds["disk.computed"])
        report.rounds("disk.over_arena", "s", seconds["disk.disk"], seconds["disk.arena"])
    return report


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="fresh prompts for cold and hit (default 7)"
    )
    parser.add_argument(
        "--faults", type=int, default=5, help="times the sidecar is killed, and stopped (default 5)"
    )
    parser.add_argument(
        "--disk", type=int, default=7, help="fresh prompts for the hits on disk (default 7)"
    )
    parser.add_argument("--tokens", type=int, default=8000, help="of each prompt (default 8000)")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with ended("ttft"):
        with Stand(model.ensure()) as stand:
            say("starting three vLLM servers (about a minute) ...")
            bench = Bench(stand, args.tokens)
            for number in range(args.rounds):
                bench.sharing(number)
                say(
                    f"round {number + 1} of {args.rounds}, seconds: "
                    f"{latest(bench.seconds, 'cold.', 'hit.')}"
                )
            for number in range(args.faults):
                bench.dead("killed", 2 * number, signal.SIGKILL)
                bench.dead("stopped", 2 * number + 1, signal.SIGSTOP)
                say(
                    f"fault {number + 1} of {args.faults}, seconds: "
                    f"{latest(bench.seconds, 'killed.', 'stopped.')}"
                )
            seconds |= bench.seconds
        if args.disk:
            with Stand(model.ensure()) as stand:
                say("starting a vLLM server on a sidecar with a disk ...")
                disk = DiskBench(stand, args.tokens, args.disk)
                for number in range(args.disk + BEHIND):
                    disk.round(number)
                    say(
                        f"round {number + 1 - BEHIND} of {args.disk}, seconds: "
                        f"{latest(disk.seconds, 'disk.')}"
                    )
                if not disk.seconds["disk.disk"]:
                    raise RuntimeError("no round had hits both in the arena and on disk")
                seconds |= disk.seconds

    return figures(seconds).finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
