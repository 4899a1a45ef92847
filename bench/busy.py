"""Time to first token while vLLM decodes for others: hits, misses, steps, the others' speed.

Two servers of the demo's small model, one with the connector and one without it. Only one of them
computes at a time, on the last core. On two cores, two OpenMP threads of a worker wait for each
other whenever anything else runs: the same server had 30 or 140 tokens a second.

An episode, on each of the two in turn, goes so:

  1. The prompts of its hits are computed on an idle engine. With the connector, vLLM's own cache is
     then emptied, so that the hits come from the arena. Without it they stay in vLLM's cache.
  2. 4 (in other episodes 8) requests decode until the episode ends.
  3. Prompts arrive one by one, at the same pace on both servers: misses of 24, 500 and 2,000
     tokens, and hits of 500 and 2,000.

Cases, with N for the number of decoding requests:

  miss.N.TOKENS   seconds to the first token of a fresh prompt; 24 tokens are less than a block
  hit.N.TOKENS    the same of a prompt that the arena holds
  steps.*         engine steps from a request's arrival to its first token, means. A decoding
                  request gets one token a step, so its tokens are counted. A step that runs as the
                  request arrives counts.
  streams.N       tokens a second of the decoding requests while prompts arrive
  alone.N         the same while nothing arrives
  calls.N         percent of an episode's time that vLLM spends in the connector's calls, copies
                  included: by the connector's own histogram, vllm:lookaside_call_seconds
  in_step.N       hits of an episode that were loaded within the step that computes them
  idle.*          8,000 tokens on an idle engine
  left_out        hits that were left out because not all their tokens were found, on either side
  unequal         prompts whose outputs differ between the servers. Batches differ, and with them
                  the rounding, so a few are expected.

The limit of each is the same round's on the server without the connector; of a hit, the same prompt
in vLLM's own cache. Ratios of times should be low, those of streams.N and alone.N high.

ROUNDS=2 in the environment, or --rounds 2, makes a quick run. The default takes about 13 minutes
on two cores.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import aiohttp

from bench._report import Report, arguments, spread
from examples.stand import client, model
from examples.stand.client import Answer
from examples.stand.command import ended
from examples.stand.processes import Server, Stand, connector_config, eventually
from examples.stand.progress import say

# Of the connector's metrics.
CALLS, LOADS_IN_STEP = "vllm:lookaside_call_seconds_sum", "vllm:lookaside_loads_in_step_total"
BLOCK = 128  # vLLM's block on the CPU, in tokens
MISSES = (24, 500, 2000)
HITS = (500, 2000)
IDLE_TOKENS = 8000
EACH = 4  # samples of a kind in one episode
# Windows in which nothing arrives, for each episode, and their seconds. The streams settle first:
# their prompts are computed one after the other.
ALONE, ALONE_S, SETTLE_S = 4, 1.0, 1.0
# Seconds from one arrival to the next. They leave time for the answer, so that both servers do the
# same work in the same time.
PACE_S = {("miss", 24): 0.3, ("miss", 500): 0.8, ("miss", 2000): 2.4}
HIT_PACE_S = 0.4
STREAM_TOKENS = 4000
SIDES = ("plain", "connector")

Series = dict[str, dict[str, list[float]]]
"""Samples by case and side."""


class Streams:
    """Requests that decode on a server until closed: each is issued again when it ends.

    A context manager. The times of their tokens may be read while they run.
    """

    def __init__(self, server: Server, count: int, seed: int) -> None:
        self._url = f"{server.base_url}/v1/completions"
        self._seed = seed
        self.times: list[list[float]] = [[] for _ in range(count)]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._running: Future[None] | None = None

    def __enter__(self) -> Streams:
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        try:
            eventually(self._decoding, "the streams to decode", 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._running is not None
        self._running.cancel()
        # The loop ends the tasks before it stops, which closes their connections.
        asyncio.run_coroutine_threadsafe(self._drain(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def check(self) -> None:
        """Raises RuntimeError where a stream has failed."""
        if self._running is not None and self._running.done():
            raise RuntimeError(f"a decoding stream ended: {self._running.exception()!r}")

    def tokens(self, start: float, end: float) -> int:
        """Tokens that all streams received between two moments."""
        return sum(
            bisect.bisect_right(times, end) - bisect.bisect_right(times, start)
            for times in self.times
        )

    def steps(self, sent: float, first: float) -> float:
        """The median over the streams of the steps that a request took."""
        return statistics.median(steps_between(times, sent, first) for times in self.times)

    def _decoding(self) -> bool:
        self.check()
        return all(len(times) >= 8 for times in self.times)

    async def _drain(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=client.PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
            await asyncio.gather(*(self._stream(session, n) for n in range(len(self.times))))

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        again = 0
        while True:
            body = {
                "model": "small",
                "prompt": model.prompt(64, self._seed + 100 * again + number),
                "max_tokens": STREAM_TOKENS,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            async with session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {await response.text()}")
                async for line in response.content:
                    self.times[number].extend([time.perf_counter()] * tokens_in(line))
            again += 1


def tokens_in(line: bytes) -> int:
    """The tokens that a line of a streamed completion carries. Raises RuntimeError for an error."""
    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
        return 0
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        raise RuntimeError(f"the server answered: {event['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))


def steps_between(times: Sequence[float], sent: float, first: float) -> int:
    """The engine's steps from a request's sending to its first token, that token's step included.

    ``times`` are the arrivals of a stream's tokens, one a step. The token nearest to ``first`` is
    of the step that made it: both are sent together and may arrive in either order.
    """
    index = bisect.bisect_left(times, first)
    if index == len(times) or (index > 0 and first - times[index - 1] <= times[index] - first):
        index -= 1
    return max(1, index + 1 - bisect.bisect_right(times, sent))


class Bench:
    """The servers, and what was measured on them."""

    def __init__(self, stand: Stand, seconds: Series) -> None:
        self.series = seconds
        self.ours: dict[str, list[float]] = defaultdict(list)
        """By case, of each episode: what only the server with the connector has."""
        self.left_out = 0
        self.unequal = 0
        stand.sidecar(settings={"arena_limit": "3G"})
        env = {"VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0)))}
        connectors = {"plain": None, "connector": connector_config(stand.endpoint())}
        self.servers: dict[str, Server] = {
            side: stand.server(side, connector=connectors[side], env=env) for side in SIDES
        }
        for server in self.servers.values():
            server.wait_ready()
        say("two servers up; warming up ...")
        for server in self.servers.values():
            for tokens in (*MISSES, IDLE_TOKENS):
                client.complete(server.base_url, model.prompt(tokens, 900 + tokens), max_tokens=4)

    def round(self, number: int, streams: int, each: int) -> None:
        """An episode on each of the two servers, with the same prompts. Which is first changes."""
        found = {
            side: self._episode(side, number, streams, each)
            for side in (SIDES if number % 2 else SIDES[::-1])
        }
        plain, ours = found["plain"], found["connector"]
        for name in plain:
            for (mine, my_steps), (its, its_steps) in zip(ours[name], plain[name], strict=True):
                self.unequal += mine.tokens != its.tokens
                if name.startswith("hit") and not (
                    mine.cached_tokens == its.cached_tokens >= its.prompt_tokens // BLOCK * BLOCK
                ):
                    self.left_out += 1
                    continue
                self._add(name, mine.ttft_s, its.ttft_s)
                self._add(f"steps.{name}", my_steps, its_steps)

    def idle(self, number: int) -> None:
        """A cold prompt and a hit of it on each of the two servers, idle."""
        prompt = model.prompt(IDLE_TOKENS, 50_000_000 + number)
        cold: dict[str, Answer] = {}
        hit: dict[str, Answer] = {}
        for side in SIDES if number % 2 else SIDES[::-1]:
            url = self.servers[side].base_url
            client.settle()
            cold[side] = client.complete(url, prompt)
            if side == "connector":
                client.reset_prefix_cache(url)
            client.settle()
            hit[side] = client.complete(url, prompt)
        self._add("idle.cold", cold["connector"].ttft_s, cold["plain"].ttft_s)
        if hit["connector"].cached_tokens != hit["plain"].cached_tokens:
            self.left_out += 1
            return
        self._add("idle.hit", hit["connector"].ttft_s, hit["plain"].ttft_s)

    def _add(self, name: str, mine: float, its: float) -> None:
        self.series[name]["connector"].append(mine)
        self.series[name]["plain"].append(its)

    @contextlib.contextmanager
    def _speed(self, name: str, side: str, streams: Streams) -> Iterator[None]:
        """Adds the tokens a second of the streams while the block runs."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self.series[name][side].append(streams.tokens(start, end) / (end - start))

    def _episode(
        self, side: str, number: int, streams: int, each: int
    ) -> dict[str, list[tuple[Answer, float]]]:
        """The answers by case of one episode on one server, each with its steps."""
        url = self.servers[side].base_url
        base = (number * 16 + streams) * 100_000
        hits = {
            tokens: [model.prompt(tokens, base + tokens * 10 + n) for n in range(each)]
            for tokens in HITS
        }
        client.settle()
        for prompts in hits.values():
            for prompt in prompts:
                client.complete(url, prompt, max_tokens=1)
        if side == "connector":
            client.reset_prefix_cache(url)
        found: dict[str, list[tuple[Answer, float]]] = defaultdict(list)
        with Streams(self.servers[side], streams, base + 50_000) as running:
            time.sleep(SETTLE_S)
            counted = {name: client.metric(url, name) for name in (CALLS, LOADS_IN_STEP)}
            started = time.perf_counter()
            for _ in range(ALONE):
                with self._speed(f"alone.{streams}", side, running):
                    time.sleep(ALONE_S)
            for n in range(each):
                with self._speed(f"streams.{streams}", side, running):
                    for tokens in MISSES:
                        prompt = model.prompt(tokens, base + 70_000 + tokens * 10 + n)
                        name = f"miss.{streams}.{tokens}"
                        found[name].append(arrive(running, url, prompt, PACE_S["miss", tokens]))
                    for tokens in HITS:
                        name = f"hit.{streams}.{tokens}"
                        found[name].append(arrive(running, url, hits[tokens][n], HIT_PACE_S))
            seconds = time.perf_counter() - started
            if side == "connector":
                spent = {name: client.metric(url, name) - counted[name] for name in counted}
                self.ours[f"calls.{streams}"].append(100 * spent[CALLS] / seconds)
                self.ours[f"in_step.{streams}"].append(spent[LOADS_IN_STEP])
        return found


def arrive(streams: Streams, url: str, prompt: list[int], pace_s: float) -> tuple[Answer, float]:
    """Sends a prompt, and returns once the next may be sent: its answer, and the steps to its first
    token."""
    sent = time.perf_counter()
    answer = client.complete(url, prompt, max_tokens=2)
    # The tokens of the first token's step have arrived by then: the answer ended a step later.
    time.sleep(max(0.02, sent + pace_s - time.perf_counter()))
    streams.check()
    return answer, streams.steps(sent, sent + answer.ttft_s)


def latest(series: Series, *prefixes: str) -> str:
    """The medians so far of the cases whose names begin so, with the connector and without."""
    return ", ".join(
        f"{name} {statistics.median(sides['connector']):.4g}/"
        f"{statistics.median(sides['plain']):.4g}"
        for name, sides in series.items()
        if name.startswith(prefixes) and sides["plain"] and sides["connector"]
    )


def figures(
    series: Mapping[str, Mapping[str, Sequence[float]]],
    ours: Mapping[str, Sequence[float]],
    left_out: int,
    unequal: int,
) -> Report:
    """What is reported of the samples by case and side, and of those that have one side only."""
    report = Report("busy")
    for name, sides in series.items():
        mine, its = sides["connector"], sides["plain"]
        if name.startswith("steps."):
            ratios = [a / b for a, b in zip(mine, its, strict=True)]
            value, limit = statistics.mean(mine), statistics.mean(its)
            report.add(name, value, "steps", limit, value / limit, spread(ratios))
        else:
            unit = "1/s" if name.startswith(("streams.", "alone.")) else "s"
            report.rounds(name, unit, mine, its)
    for name, values in ours.items():
        report.rounds(name, "%" if name.startswith("calls.") else "hits", values)
    report.add("left_out", float(left_out), "hits")
    report.add("unequal", float(unequal), "prompts")
    return report


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=int(os.environ.get("ROUNDS") or 20),
        help="samples of each case (default 20, or ROUNDS of the environment)",
    )
    parser.add_argument(
        "--idle", type=int, help="samples of the idle cases (default 7, at most --rounds)"
    )
    parser.add_argument(
        "--streams", type=int, nargs="*", default=[4, 8], help="decoding requests (default 4 8)"
    )
    args = parser.parse_args()
    if args.rounds < 1 or not all(0 < count <= 15 for count in args.streams):
        parser.error("--rounds must be at least 1, and --streams 1 to 15 (servers run 16 requests)")
    idle = min(7, args.rounds) if args.idle is None else args.idle
    series: Series = defaultdict(lambda: {side: [] for side in SIDES})
    with ended("busy"), Stand(model.ensure()) as stand:
        say("starting two vLLM servers (about a minute) ...")
        bench = Bench(stand, series)
        for number, done in enumerate(range(0, args.rounds, EACH)):
            each = min(EACH, args.rounds - done)
            for streams in args.streams:
                bench.round(number, streams, each)
                say(
                    f"{done + each} of {args.rounds} samples beside {streams} streams, with "
                    f"and without the connector: "
                    f"{latest(series, f'miss.{streams}', f'hit.{streams}', 'streams')}"
                )
        for number in range(idle):
            bench.idle(number)
            say(f"idle {number + 1} of {idle}: {latest(series, 'idle')}")
        if not all(sides["plain"] for sides in series.values()):
            raise RuntimeError(
                "a case has no sample: see the log of the server with the connector; a "
                "longer run (--rounds) may help where the machine is loaded"
            )
    return figures(series, bench.ours, bench.left_out, bench.unequal).finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
