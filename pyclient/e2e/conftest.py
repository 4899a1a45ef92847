"""The servers that the tests share. Each is started once and used by many tests, for it takes
seconds (see warm.py).

``pair`` is the main stage: a sidecar, two servers on it, and one without the connector, whose
answers are the truth that all others are held to. Tests on it may kill and restart the sidecar;
each leaves it running, with all sessions connected. Servers of other shapes are their tests' own
(test_3_shapes.py).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from examples.stand import client, model  # noqa: E402
from examples.stand.client import Answer  # noqa: E402
from examples.stand.processes import (  # noqa: E402
    Child,
    Proxy,
    Server,
    Sidecar,
    Stand,
    connector_config,
    eventually,
    free_port,
    stop_on_signals,
)

from . import warm  # noqa: E402

Stands = Callable[[Path], Stand]

PAGE = 128  # vLLM's block on the CPU, in tokens
_salts = itertools.count()


def pytest_configure() -> None:
    """A run that is told to end ends its servers first."""
    stop_on_signals()


# What is tested here is what happens, not how fast: on a machine that is busy with other things,
# the default patience of 100 ms with a lookup turns a hit into a miss now and then, as it should.
# See imported.py, too.
PATIENT = {
    "lookup_timeout_ms": 60_000,
    "promotion_timeout_ms": 60_000,
    "store_timeout_ms": 60_000,
    "load_timeout_ms": 60_000,
    "reset_timeout_ms": 60_000,
}
# Where a sidecar is stopped, all of this is waited for. It is enough for the odd stall; see
# missed_again.
HURRIED = {
    **PATIENT,
    "lookup_timeout_ms": 2000,
    "store_timeout_ms": 2000,
    "load_timeout_ms": 3000,
    "reset_timeout_ms": 2000,
}


def configured(endpoint: str, **extra: Any) -> dict[str, Any]:
    """The connector on this endpoint, patient."""
    return connector_config(endpoint, **{**PATIENT, **extra})


class Missed(AssertionError):
    """Less was hit than could be."""


def hit(cached_tokens: int, tokens: int) -> None:
    """So much was hit. Raises Missed if it was less."""
    assert cached_tokens <= tokens
    if cached_tokens < tokens:
        raise Missed(f"{cached_tokens} of {tokens} tokens were hit")


def missed_again(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test of HURRIED servers once more where something was missed, for two minutes; with
    prompts of its own.

    A sidecar that stands still for as long as these wait, and that is what a busy machine does, has
    it missed or not stored, as it should. Nothing else is tried twice.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        deadline = time.monotonic() + 120
        while True:
            try:
                return test(*arguments, **fixtures)
            except Missed as missed:
                if time.monotonic() > deadline:
                    raise
                warnings.warn(f"{test.__name__}: {missed}; once more", stacklevel=1)

    return run


def hits_of(prompt_tokens: int, page: int = PAGE) -> int:
    """The tokens of a prompt that a cache can serve: whole pages, without the last token."""
    return (prompt_tokens - 1) // page * page


def ask(server: Server | Proxy, prompt: list[int], max_tokens: int = 8, **extra: Any) -> Answer:
    """A greedy completion that must end by its length."""
    answer = client.complete(server.base_url, prompt, max_tokens=max_tokens, **extra)
    assert answer.finish_reason == "length", answer
    assert len(answer.tokens) == max_tokens
    return answer


def computed(server: Server, prompt: list[int], max_tokens: int = 8, **extra: Any) -> Answer:
    """The answer when nothing is cached: a salt of its own shares nothing."""
    answer = ask(server, prompt, max_tokens, cache_salt=f"alone-{next(_salts)}", **extra)
    assert answer.cached_tokens == 0
    return answer


def hits_again(server: Server, prompt: list[int], truth: Answer, what: str, **extra: Any) -> None:
    """Waits until all that can be of a prompt is hit in the sidecars. Every answer must be the
    right one."""

    def found() -> bool:
        client.reset_prefix_cache(server.base_url)
        again = ask(server, prompt, **extra)
        assert again.tokens == truth.tokens
        return again.cached_tokens == hits_of(len(prompt))

    eventually(found, what)


def counted(server: Server, name: str) -> float:
    """A counter of the server's, with all that its requests so far have added."""
    ask(
        server, model.prompt(5, 1), 1
    )  # what a step has counted is told before what the next one has to say
    return client.metric(server.base_url, name)


def together(server: Server | Proxy, prompts: list[list[int]], max_tokens: int = 8) -> list[Answer]:
    """The answers to prompts sent at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, max_tokens), prompts))


@dataclass
class Pair:
    """Two servers on one sidecar, and one without."""

    stand: Stand
    settings: dict[str, str]  # of the sidecar, which tells of its events
    sidecar: Sidecar
    plain: Server  # no connector
    a: Server  # chunked prefill, in steps that no page boundary divides; tells of its events
    b: Server
    events: str  # where a publishes them
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1000))

    def prompt(self, tokens: int, shared: list[int] | None = None) -> list[int]:
        """A prompt that no test has used."""
        return model.prompt(tokens, next(self.seeds), shared)

    def connected(self) -> None:
        """Waits until both servers' sessions are there: a scheduler and a worker each."""
        eventually(lambda: sessions(self.sidecar) == 4, "four sessions")

    def restart_sidecar(self) -> None:
        """A new sidecar on the same endpoint; the old one must have ended."""
        self.sidecar.end()
        self.sidecar = self.stand.sidecar(settings=self.settings)
        self.connected()

    def take_over(self) -> None:
        """Another process takes over from the sidecar, which ends by itself."""
        before = self.sidecar
        self.sidecar = self.stand.sidecar(
            ready=False, settings={**self.settings, "takeover": "true"}
        )
        assert before.wait(60) == 0, before.tail()
        self.sidecar.wait_ready()

    def kept(self) -> None:
        """Waits until the next sidecar would find all that this one holds."""
        self.sidecar.wait_kept()


def sessions(sidecar: Sidecar) -> int:
    """Sessions connected to the sidecar now."""
    try:
        return len(sidecar.status()["sessions"])
    except (OSError, KeyError):
        return -1


@pytest.fixture(scope="session")
def logs() -> Path | None:
    """Where LOOKASIDE_E2E_LOGS asks for the logs of all processes to be kept."""
    where = os.environ.get("LOOKASIDE_E2E_LOGS")
    return Path(where) if where else None


@pytest.fixture(scope="session")
def small_model() -> Path:
    return model.ensure("thin")


@pytest.fixture(scope="session")
def stands(logs: Path | None) -> Iterator[Stands]:
    """Makes stands whose servers start quickly."""
    cores = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def start(command: list[str], log: Path, environment: dict[str, str]) -> Child:
        """A worker gets one core: between two, most steps of so small a model would wait for each
        other."""
        bound = environment["VLLM_CPU_OMP_THREADS_BIND"]
        if "|" not in bound:  # a core for each rank
            bound = str(next(cores))
        return warm.start(command, log, {**environment, "VLLM_CPU_OMP_THREADS_BIND": bound})

    with warm.vllm_imported():
        yield lambda model: Stand(model, logs, start)


@pytest.fixture(scope="session")
def pair(small_model: Path, stands: Stands) -> Iterator[Pair]:
    with stands(small_model) as stand:
        settings = {"events_endpoint": f"ipc://{stand.directory}/events"}
        sidecar = stand.sidecar(settings=settings)
        config = configured(stand.endpoint(), **HURRIED)
        port = free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "topic": "kv@here@m",
        }
        plain = stand.server("plain", connector=None)
        a = stand.server(
            "a",
            connector=config,
            arguments=["--max-num-batched-tokens", "700", "--kv-events-config", json.dumps(events)],
        )
        b = stand.server("b", connector=config)
        for server in (plain, a, b):
            server.wait_ready()
        for server in (plain, a, b):
            ask(server, model.prompt(300, 1))
        out = Pair(stand, settings, sidecar, plain, a, b, f"tcp://127.0.0.1:{port}")
        out.connected()
        yield out
