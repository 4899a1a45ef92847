"""What two vLLM servers notice of a sidecar that is replaced, or killed and started again.

Two servers of the demo's small model share a sidecar. Each has room for 8 of the 24 prefixes of
2,048 tokens, which the arena holds all. Two requests at once ask each server for prefixes in random
order, in windows of so many seconds: WINDOW, 20 by default. In the middle of a window happens

  quiet      nothing
  takeover   `lookaside serve --takeover`
  kill       SIGKILL of the sidecar, which is started again at once

The cases of each window:

  found           of the prompt tokens that the arena holds, those that were not computed; the limit
                  is that of the quiet window of the same round
  ttft_max        seconds from sending a request to its first token, the longest; the same limit
  mapped          bytes that the servers' workers have mapped or pinned anew

An answer with other tokens than the first one to the same prompt is an error. `lookaside-bench
restart` then measures the sidecar alone, with 10,000 chunks and with 1,000,000 (CHUNKS): how long
after its start the first lookup is answered, what it finds, and the longest pause of lookups over a
takeover.

Goals: takeover.found 1 times that of the quiet window, kill.found_again 0.99, mapped 0, a pause of
at most 50 ms, the first lookup within 0.1 s (10,000 chunks) and 1 s (1,000,000).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from bench._report import REPO, Case, Report, arguments
from examples.stand import client, model
from examples.stand.command import ended
from examples.stand.processes import (
    Server,
    Sidecar,
    Stand,
    connector_config,
    eventually,
)
from examples.stand.progress import say

BLOCK = 128  # vLLM's block on the CPU, in tokens
CACHE_BLOCKS = 128
SHARED = 16 * BLOCK  # tokens of a prefix
PREFIXES = 24
QUESTIONS = 2  # prompts of a prefix
QUESTION = 64  # tokens that each has of its own
OUT = 8
AT_ONCE = 2  # requests that run on each server
NAMES = ("one", "two")
WINDOWS = ("quiet", "takeover", "kill")


class Window(NamedTuple):
    """What the requests of one window came to, on both servers."""

    found: float
    """Of the tokens of prefixes, those that were not computed."""
    ttft_max: float
    mapped: float
    requests: int


class Bench:
    """The sidecar, the servers, and the answers that they have given."""

    def __init__(self, stand: Stand, seconds: float) -> None:
        self._seconds = seconds
        self._random = random.Random(18)
        self._answers: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lock = threading.Lock()
        self._stand = stand
        self.settings = {"arena_limit": "2G"}
        self.sidecar = stand.sidecar(settings=self.settings)
        cache = ["--num-gpu-blocks-override", str(CACHE_BLOCKS + 1)]  # one is never used
        self.servers = [
            stand.server(name, connector=connector_config(stand.endpoint()), arguments=cache)
            for name in NAMES
        ]
        for server in self.servers:
            server.wait_ready()
        client.warm_up(*(server.base_url for server in self.servers))
        for prefix in range(PREFIXES):
            for question in range(QUESTIONS):
                self._ask(self.servers[prefix % 2], prefix, question)
        eventually(self._kept, "the chunks to be in the directory")

    def _kept(self) -> bool:
        return self.sidecar.status()["arena"]["waiting_chunks"] == 0

    def _ask(self, server: Server, prefix: int, question: int) -> client.Answer:
        """One request. Raises RuntimeError for another answer than the first one."""
        prompt = model.prompt(SHARED, prefix)
        prompt += model.prompt(QUESTION, 1000 + QUESTIONS * prefix + question)
        answer = client.complete(server.base_url, prompt, max_tokens=OUT)
        with self._lock:
            first = self._answers.setdefault((prefix, question), answer.tokens)
        if answer.tokens != first:
            raise RuntimeError(
                f"{server.name} answered prompt {prefix}.{question} with {answer.tokens}, "
                f"and first it was {first}"
            )
        return answer

    def window(self, act: Callable[[], None]) -> Window:
        """Requests for so many seconds, with something done in their middle."""
        mapped = self._mapped()
        ends = time.monotonic() + self._seconds
        answers: list[client.Answer] = []
        failures: list[BaseException] = []

        def ask(server: Server, seed: int) -> None:
            order = random.Random(seed)
            try:
                while time.monotonic() < ends and not failures:
                    prefix, question = order.randrange(PREFIXES), order.randrange(QUESTIONS)
                    answers.append(self._ask(server, prefix, question))
            except BaseException as error:
                failures.append(error)

        askers = [
            threading.Thread(target=ask, args=(server, self._random.getrandbits(32)), daemon=True)
            for server in self.servers
            for _ in range(AT_ONCE)
        ]
        for asker in askers:
            asker.start()
        time.sleep(self._seconds / 2)
        act()
        for asker in askers:
            asker.join()
        if failures:
            raise failures[0]
        return Window(
            found=sum(min(answer.cached_tokens, SHARED) for answer in answers)
            / (SHARED * len(answers)),
            ttft_max=max(answer.ttft_s for answer in answers),
            mapped=self._mapped() - mapped,
            requests=len(answers),
        )

    def _mapped(self) -> float:
        """Bytes that the servers' workers have mapped so far."""
        return sum(
            client.metric(server.base_url, "vllm:lookaside_mapped_bytes_total")
            for server in self.servers
        )

    def nothing(self) -> None:
        """The quiet window."""

    def takeover(self) -> None:
        """Another process takes over, and the one before ends."""
        self._replace(
            self._stand.sidecar(ready=False, settings={**self.settings, "takeover": "true"})
        )

    def kill(self) -> None:
        """The sidecar is killed, and started again at once."""
        self.sidecar.kill()
        self._replace(self._stand.sidecar(ready=False, settings=self.settings))

    def _replace(self, by: Sidecar) -> None:
        before, self.sidecar = self.sidecar, by
        if before.wait(60.0) > 0:  # it was killed, or has ended well
            raise RuntimeError(f"the sidecar before ended badly:\n{before.tail()}")
        by.wait_ready()


def figures(rounds: dict[str, list[Window]], report: Report) -> None:
    """Report what the windows came to."""
    for name in WINDOWS:
        for figure, unit in (("found", ""), ("ttft_max", "s")):
            report.rounds(
                f"{name}.{figure}",
                unit,
                [getattr(window, figure) for window in rounds[name]],
                [getattr(window, figure) for window in rounds["quiet"]]
                if name != "quiet"
                else None,
            )
        report.rounds(f"{name}.mapped", "bytes", [window.mapped for window in rounds[name]])


def alone(chunks: str, report: Report) -> None:
    """Measure the sidecar without vLLM, and report that too. Raises RuntimeError."""
    command = [str(REPO / "bin" / "lookaside-bench"), "restart", "--chunks", chunks]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"lookaside-bench restart ended with {done.returncode}: {done.stderr}")
    report.cases += [Case(**case) for case in json.loads(done.stdout.splitlines()[-1])["cases"]]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=int(os.environ.get("ROUNDS") or 3),
        help="windows of each kind (default 3, or ROUNDS of the environment)",
    )
    parser.add_argument("--window", type=float, default=20.0, help="seconds of a window")
    parser.add_argument(
        "--chunks",
        default="10000,1000000",
        help="what the sidecar alone holds, one after the other",
    )
    args = parser.parse_args()
    if args.rounds < 1 or args.window <= 0:
        parser.error("--rounds must be at least 1, and --window positive")
    report = Report("restart")
    windows: dict[str, list[Window]] = defaultdict(list)
    with ended("restart"):
        with Stand(model.ensure()) as stand:
            say("starting vLLM servers (about a minute) ...")
            bench = Bench(stand, args.window)
            acts = {"quiet": bench.nothing, "takeover": bench.takeover, "kill": bench.kill}
            for number in range(args.rounds):
                for name in WINDOWS:
                    window = bench.window(acts[name])
                    windows[name].append(window)
                    say(
                        f"  round {number + 1}, {name}: {window.requests} requests, "
                        f"{window.found:.2%} found, longest time to a first token "
                        f"{window.ttft_max:.3g} s, {window.mapped:.0f} bytes mapped anew"
                    )
        figures(windows, report)
        for chunks in args.chunks.split(","):
            if chunks:
                say(f"the sidecar alone, with {chunks} chunks ...")
                alone(chunks, report)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
