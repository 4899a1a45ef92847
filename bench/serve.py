"""Throughput and time to first token of a working set three times vLLM's cache.

Servers of the demo's small model with a cache of 16,384 tokens: one without the connector, one with
it, and one with vLLM's own offloading to memory where that starts. Only one of them computes at a
time, and every round asks each in turn. 4 requests run at once. The loads:

  prefix   `vllm bench serve --dataset-name prefix_repetition`: 24 prefixes of 2,064 tokens, each in
           4 prompts that end in 64 tokens of their own, in random order; 16 tokens out
  turns    24 conversations, which begin with 2,048 tokens. A turn sends the whole history and a new
           question of 224 tokens, and gets 32 tokens out. Whose turn is next is random.

The first run of the prefixes computes them all: cold.prefix. The others find them, for the arena
holds three gigabytes. Each round has conversations of its own: cold.turns are their first turns,
which nobody can have, and turns the three that follow. The cases of each load:

  throughput            requests a second
  ttft_p50, ttft_p99    seconds from sending a request to its first token
  *.over_offloading     the same figures against the server with vLLM's offloading
  hit_tokens.SIDE       prompt tokens that were not computed; the limit is what a cache that forgets
                        nothing finds

The limit of the others is the same round's on the server without the connector. The ratio of
throughput should be high, that of times low: the goals are 2 and, for ttft_p99, 0.5.

ROUNDS=1 in the environment, or --rounds 1, makes a quick run. The default takes about 12 minutes on
two cores.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench._report import Report, arguments
from examples.stand import client, model
from examples.stand.command import ended
from examples.stand.processes import (
    Process,
    Server,
    Stand,
    connector_config,
    server_env,
)
from examples.stand.progress import say

BLOCK = 128  # vLLM's block on the CPU, in tokens
CACHE_BLOCKS = 128
AT_ONCE = 4  # requests that run
SHARED = 16 * BLOCK  # tokens of a prefix in whole blocks, and of a conversation's beginning
SETS = 3 * CACHE_BLOCKS * BLOCK // SHARED  # prefixes, and conversations

# The prefix ends within a block, which no prompt fills: a tokenizer may join tokens where the
# prompt's own begin, and that block is then another one.
PREFIX_TOKENS = SHARED + 16
SUFFIX_TOKENS = 64
PREFIX_OUT = 16
PROMPTS_A_PREFIX = 4

QUESTION = 224
TURN_OUT = 32
TURNS = 3  # of a conversation, after the first

ARENA = "3G"
OFFLOADING_GIB = "3"
GOALS = {"throughput": (2.0, "at least"), "ttft_p99": (0.5, "at most")}
BENCH_PATIENCE_S = 900.0

# `vllm bench serve`. The command itself fails with the CPU build, whose distribution is not called
# vllm: it looks for the version under that name.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


class Load(NamedTuple):
    """What one run of a load came to on one server."""

    throughput: float
    ttft_p50: float
    ttft_p99: float
    hit_tokens: float
    most_hit_tokens: float
    """What a cache that forgets nothing would have found."""


UNITS = {"throughput": "1/s", "ttft_p50": "s", "ttft_p99": "s"}

Series = dict[str, dict[str, list[Load]]]
"""Runs by load and side, a run a round."""


class Conversation:
    """A history that grows by the answer and a new question each turn. Whoever takes its turn holds
    its lock."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.lock = threading.Lock()
        self.history = model.prompt(SHARED, seed)
        self.held = 0  # tokens of the history, in whole blocks, that a server has computed

    def grow(self, answer: Sequence[int]) -> None:
        """Adds what was answered to the history, and the next question."""
        # The last token out was sampled, but is computed only as a part of the next prompt.
        self.held = (len(self.history) + len(answer) - 1) // BLOCK * BLOCK
        self.history += answer
        self.history += model.prompt(QUESTION, self._seed + len(self.history))


class Bench:
    """The servers, and what was measured on them."""

    def __init__(self, stand: Stand) -> None:
        self.series: Series = defaultdict(lambda: defaultdict(list))
        self._stand = stand
        stand.sidecar(settings={"arena_limit": ARENA})
        cache = ["--num-gpu-blocks-override", str(CACHE_BLOCKS + 1)]  # one is never used
        offloading = ["--kv-offloading-size", OFFLOADING_GIB]
        self.servers: dict[str, Server] = {
            "plain": stand.server("plain", connector=None, arguments=cache),
            "connector": stand.server(
                "connector", connector=connector_config(stand.endpoint()), arguments=cache
            ),
            "offloading": stand.server(
                "offloading", connector=None, arguments=[*cache, *offloading]
            ),
        }
        for side in ("plain", "connector"):
            self.servers[side].wait_ready()
        self._try_offloading()
        say(f"{len(self.servers)} servers up; warming up ...")
        for server in self.servers.values():
            client.warm_up(server.base_url)

    def _try_offloading(self) -> None:
        """Leaves the server with vLLM's own offloading out where it does not start."""
        server = self.servers["offloading"]
        try:
            server.wait_ready()
        except RuntimeError:
            if server.alive():
                raise
            server.end()
            why = first_error(server.log.read_text(errors="replace"))
            say(f"vLLM's own offloading does not start here, so it is left out: {why}")
            del self.servers["offloading"]

    def round(self, number: int) -> None:
        """Both loads on every server. Which is first changes."""
        sides = list(self.servers)[:: 1 if number % 2 else -1]
        for side in sides:
            name = "prefix" if number else "cold.prefix"
            self.series[name][side].append(self._prefixes(self.servers[side]))
            say(f"  {name}, {side}: {told(self.series[name][side][-1])}")
        if number == 0:
            return
        for side in sides:
            for name, load in self._conversations(self.servers[side], number):
                self.series[name][side].append(load)
                say(f"  {name}, {side}: {told(load)}")

    def _prefixes(self, server: Server) -> Load:
        """`vllm bench serve` on a server: in every round with the same prompts."""
        count = SETS * PROMPTS_A_PREFIX
        client.settle()
        hits = hit_tokens(server)
        found = self._bench_serve(
            server,
            "--dataset-name", "prefix_repetition",
            "--prefix-repetition-num-prefixes", str(SETS),
            "--prefix-repetition-prefix-len", str(PREFIX_TOKENS),
            "--prefix-repetition-suffix-len", str(SUFFIX_TOKENS),
            "--prefix-repetition-output-len", str(PREFIX_OUT),
            "--num-prompts", str(count), "--max-concurrency", str(AT_ONCE),
        )  # fmt: skip
        if found["completed"] != count:
            raise RuntimeError(
                f"{server.name} has answered {found['completed']} of {count} requests of "
                f"`vllm bench serve`:\n{server.tail()}"
            )
        client.settle()
        cold = not self.series["cold.prefix"][server.name]
        return Load(
            throughput=found["request_throughput"],
            ttft_p50=found["p50_ttft_ms"] / 1e3,
            ttft_p99=found["p99_ttft_ms"] / 1e3,
            hit_tokens=hit_tokens(server) - hits,
            most_hit_tokens=float((count - SETS * cold) * SHARED),
        )

    def _bench_serve(self, server: Server, *load: str) -> dict[str, float]:
        """Runs `vllm bench serve`, and returns what it has saved. Raises RuntimeError."""
        result = self._stand.directory / "bench.json"
        result.unlink(missing_ok=True)
        command = [
            sys.executable, "-c", BENCH_SERVE, "--base-url", server.base_url,
            "--model", "small", "--tokenizer", str(self._stand.model), *load,
            "--temperature", "0", "--ignore-eos", "--disable-tqdm",
            "--percentile-metrics", "ttft", "--metric-percentiles", "50,99",
            "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name,
        ]  # fmt: skip
        process = Process(
            "vllm bench serve", command, self._stand.directory / "bench.log", server_env()
        )
        try:
            status = process.wait(BENCH_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"`vllm bench serve` has not ended in {BENCH_PATIENCE_S:.0f} s:\n{process.tail()}"
            ) from None
        finally:
            process.end()
        if status or not result.exists():
            raise RuntimeError(f"`vllm bench serve` ended with {status}:\n{process.tail()}")
        return json.loads(result.read_text())

    def _conversations(self, server: Server, number: int) -> list[tuple[str, Load]]:
        """Conversations with a server: their first turns, and those that follow."""
        client.settle()
        conversations = [Conversation(1_000_000 * number + 10_000 * n) for n in range(SETS)]
        following = conversations * TURNS
        random.Random(number).shuffle(following)
        return [
            ("cold.turns", take_turns(server, conversations)),
            ("turns", take_turns(server, following)),
        ]


def take_turns(server: Server, order: Sequence[Conversation]) -> Load:
    """One turn for each entry, in this order, AT_ONCE at a time.

    Interrupted, it does not wait for the requests that run: they fail as their server ends.
    """

    def take(conversation: Conversation) -> tuple[float, int]:
        with conversation.lock:
            held = conversation.held
            answer = client.complete(server.base_url, conversation.history, max_tokens=TURN_OUT)
            conversation.grow(answer.tokens)
            return answer.ttft_s, held

    hits = hit_tokens(server)
    started = time.perf_counter()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        turns = list(pool.map(take, order))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    seconds = time.perf_counter() - started
    client.settle()
    ttfts = [ttft for ttft, _ in turns]
    return Load(
        throughput=len(turns) / seconds,
        ttft_p50=statistics.median(ttfts),
        ttft_p99=statistics.quantiles(ttfts, n=100, method="inclusive")[98],
        hit_tokens=hit_tokens(server) - hits,
        most_hit_tokens=float(sum(held for _, held in turns)),
    )


def hit_tokens(server: Server) -> float:
    """Prompt tokens that a server has not computed so far: from its own cache or from outside."""
    return client.metric(server.base_url, "vllm:prompt_tokens_cached_total")


def first_error(log: str) -> str:
    """The first error that a server's log has a traceback of: the others follow from it."""
    found = re.search(r"^(?:.*\] )?((?:[\w.]*Error|Exception): .*)$", log, re.M)
    return found[1] if found else f"see its log:\n{log[-4000:]}"


def told(load: Load) -> str:
    """A run in a line of progress."""
    return (
        f"{load.throughput:.3g} requests/s, first token after {load.ttft_p50:.3g} s (p99 "
        f"{load.ttft_p99:.3g}), {load.hit_tokens:.0f} of {load.most_hit_tokens:.0f} tokens hit"
    )


def figures(series: Mapping[str, Mapping[str, Sequence[Load]]]) -> Report:
    """What is reported of the runs by load and side."""
    report = Report("serve")
    for name, sides in series.items():
        for figure, unit in UNITS.items():
            for side, suffix in (("plain", ""), ("offloading", ".over_offloading")):
                if side in sides:
                    report.rounds(
                        f"{name}.{figure}{suffix}",
                        unit,
                        [getattr(load, figure) for load in sides["connector"]],
                        [getattr(load, figure) for load in sides[side]],
                    )
        for side, loads in sides.items():
            most = [load.most_hit_tokens for load in loads]
            hits = [load.hit_tokens for load in loads]
            report.rounds(f"{name}.hit_tokens.{side}", "tokens", hits, most if all(most) else None)
    return report


def goals(report: Report) -> list[str]:
    """A line for each figure that has a goal: whether it was met."""
    lines = []
    ratios = {case.name: case.ratio for case in report.cases}
    for load in ("prefix", "turns"):
        for figure, (goal, sense) in GOALS.items():
            ratio = ratios[f"{load}.{figure}"]
            assert ratio is not None
            met = ratio >= goal if sense == "at least" else ratio <= goal
            lines.append(
                f"{load}.{figure}: {ratio:.3g} times that without the connector; the goal, "
                f"{sense} {goal:g}, is {'met' if met else 'missed'}"
            )
    return lines


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=int(os.environ.get("ROUNDS") or 3),
        help="runs of each load, beside the cold one (default 3, or ROUNDS of the environment)",
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    with ended("serve"), Stand(model.ensure()) as stand:
        say("starting vLLM servers (about a minute) ...")
        bench = Bench(stand)
        for number in range(args.rounds + 1):
            say(f"round {number} of {args.rounds}" if number else "cold:")
            bench.round(number)
    report = figures(bench.series)
    status = report.finish(args.json)
    for line in goals(report):
        say(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
