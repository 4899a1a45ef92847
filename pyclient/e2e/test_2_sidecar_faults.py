"""The sidecar killed, stopped or restarted at any moment: vLLM answers with the right tokens, and
finds it again."""

from __future__ import annotations

import signal
import threading
import time

import httpx
import pytest

from examples.stand import client
from examples.stand.client import Answer
from examples.stand.processes import Proxy, Server, eventually

from .conftest import Pair, ask, hits_of


class Asking(threading.Thread):
    """A request under way while the test does something else."""

    def __init__(self, server: Server | Proxy, prompt: list[int], max_tokens: int = 8) -> None:
        super().__init__()
        self._arguments = (server, prompt, max_tokens)
        self._answer: Answer | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = ask(*self._arguments)
        except BaseException as error:
            self._error = error

    def answer(self) -> Answer:
        """Waits for the answer; raises what the request raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        return self._answer


def hits_come_back(pair: Pair, prompt: list[int], truth: Answer) -> None:
    """Once connected again, what is stored is found again: a's cold computation is b's hit.

    The sidecar knows of a session before its client has mapped the regions, so the first try may
    come too early.
    """

    def hit() -> bool:
        fresh = pair.prompt(600)
        want = ask(pair.a, fresh)
        again = ask(pair.b, fresh)
        assert again.tokens == want.tokens
        return again.cached_tokens == hits_of(600)

    eventually(hit, "hits once connected again")
    assert ask(pair.b, prompt).tokens == truth.tokens


def test_killed_between_requests(pair: Pair) -> None:
    prompt = pair.prompt(1500)
    truth = ask(pair.a, prompt)
    pair.sidecar.signal(signal.SIGKILL)
    pair.sidecar.wait(30)
    missed = ask(pair.b, prompt)
    assert (missed.tokens, missed.cached_tokens) == (truth.tokens, 0)
    pair.restart_sidecar()
    hits_come_back(pair, prompt, truth)


@pytest.mark.parametrize("delay_s", [0.008, 0.024])
def test_killed_during_a_load(pair: Pair, delay_s: float) -> None:
    prompt = pair.prompt(4000)
    truth = ask(pair.a, prompt)
    asking = Asking(pair.b, prompt)
    time.sleep(delay_s)
    pair.sidecar.signal(signal.SIGKILL)
    pair.sidecar.wait(30)
    assert asking.answer().tokens == truth.tokens
    pair.restart_sidecar()
    hits_come_back(pair, prompt, truth)


def test_killed_during_a_store(pair: Pair) -> None:
    prompt = pair.prompt(3000)
    truth = ask(pair.plain, prompt)
    stored = lambda: pair.sidecar.status()["counters"]["stored_pages"]  # noqa: E731
    before = stored()
    asking = Asking(pair.a, prompt)
    eventually(lambda: stored() > before or not asking.is_alive(), "the first pages to be stored")
    pair.sidecar.signal(signal.SIGKILL)
    pair.sidecar.wait(30)
    assert asking.answer().tokens == truth.tokens
    pair.restart_sidecar()
    second = ask(pair.b, prompt)
    assert second.tokens == truth.tokens
    hits_come_back(pair, prompt, truth)


def test_stopped_between_requests(pair: Pair) -> None:
    prompt, other = pair.prompt(1500), pair.prompt(700)
    truth = ask(pair.a, prompt)
    want = ask(pair.plain, other)
    pair.sidecar.signal(signal.SIGSTOP)
    try:
        missed = ask(pair.b, prompt)
        also = ask(pair.b, other)
    finally:
        pair.sidecar.signal(signal.SIGCONT)
    assert (missed.tokens, missed.cached_tokens) == (truth.tokens, 0)
    assert also.tokens == want.tokens
    pair.connected()
    eventually(lambda: pair.sidecar.status()["leases"] == 0, "what was asked in vain to be freed")
    client.reset_prefix_cache(pair.b.base_url)

    def hit() -> bool:
        client.reset_prefix_cache(pair.b.base_url)
        return ask(pair.b, prompt).cached_tokens == hits_of(1500)

    eventually(hit, "hits once the sidecar goes on")
    hits_come_back(pair, prompt, truth)


@pytest.mark.parametrize("delay_s", [0.016])
def test_stopped_during_a_load(pair: Pair, delay_s: float) -> None:
    prompt = pair.prompt(4000)
    truth = ask(pair.a, prompt)
    asking = Asking(pair.b, prompt)
    time.sleep(delay_s)
    pair.sidecar.signal(signal.SIGSTOP)
    try:
        time.sleep(0.5)
        busy = ask(pair.b, pair.prompt(300))  # others are served meanwhile
        assert busy.prompt_tokens == 300
    finally:
        pair.sidecar.signal(signal.SIGCONT)
    assert asking.answer().tokens == truth.tokens
    pair.connected()
    eventually(lambda: pair.sidecar.status()["leases"] == 0, "no leases")


def test_restarted_under_load(pair: Pair) -> None:
    """Requests keep coming to both servers while the sidecar dies and returns three times."""
    prompts = [pair.prompt(tokens) for tokens in (300, 700, 1100)]
    truths = [ask(pair.plain, prompt).tokens for prompt in prompts]
    done = threading.Event()
    wrong: list[object] = []

    def stream(server: Server) -> None:
        try:
            while not done.is_set():
                client.reset_prefix_cache(server.base_url)
                for prompt, truth in zip(prompts, truths, strict=True):
                    got = ask(server, prompt).tokens
                    if got != truth:
                        wrong.append((server.name, len(prompt), got, truth))
        except BaseException as error:
            wrong.append(error)

    streams = [threading.Thread(target=stream, args=(server,)) for server in (pair.a, pair.b)]
    for thread in streams:
        thread.start()
    try:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            time.sleep(1.0)
            pair.sidecar.signal(number)
            pair.sidecar.wait(60)
            time.sleep(0.3)
            pair.restart_sidecar()
    finally:
        done.set()
        for thread in streams:
            thread.join()
    assert not wrong
    eventually(lambda: pair.sidecar.status()["leases"] == 0, "no leases")


def ids(pair: Pair) -> set[str]:
    """The ids of the sessions that are connected."""
    return {session["session"] for session in pair.sidecar.status()["sessions"]}


def mapped(*servers: Server) -> float:
    """Bytes that the servers' workers have mapped so far."""
    return sum(
        client.metric(server.base_url, "vllm:lookaside_mapped_bytes_total") for server in servers
    )


def test_taken_over_under_streams(pair: Pair) -> None:
    """Eight streams, four on each server, go on while another sidecar takes over: the same tokens,
    the same sessions, and every page is found that was there before."""
    prompts = [pair.prompt(600 + 100 * n) for n in range(8)]
    truths = [ask(pair.plain, prompt, 32).tokens for prompt in prompts]
    for number, prompt in enumerate(prompts):
        ask((pair.a, pair.b)[number % 2], prompt)
    before, had = ids(pair), mapped(pair.a, pair.b)
    for server in (pair.a, pair.b):
        client.reset_prefix_cache(server.base_url)
    streams = [
        Asking((pair.b, pair.a)[number % 2], prompt, 32) for number, prompt in enumerate(prompts)
    ]
    pair.take_over()
    answers = [stream.answer() for stream in streams]
    for prompt, truth, answer in zip(prompts, truths, answers, strict=True):
        assert answer.tokens == truth
        assert answer.cached_tokens == hits_of(len(prompt))
    assert ids(pair) == before
    for server in (pair.a, pair.b):
        client.reset_prefix_cache(server.base_url)
    for number, prompt in enumerate(prompts):
        again = ask((pair.a, pair.b)[number % 2], prompt, 32)
        assert (again.tokens, again.cached_tokens) == (truths[number], hits_of(len(prompt)))
    assert mapped(pair.a, pair.b) == had
    eventually(lambda: pair.sidecar.status()["leases"] == 0, "no leases")


def test_killed_and_started_keeps_its_memory(pair: Pair) -> None:
    """The workers give the arena back: all hits again, and nothing is mapped anew."""
    prompts = [pair.prompt(500 + 100 * n) for n in range(6)]
    truths = [ask(pair.a, prompt).tokens for prompt in prompts]
    pair.kept()
    had, chunks = mapped(pair.a, pair.b), pair.sidecar.status()["slots"]["ready"]
    generation = pair.sidecar.status()["generation"]
    pair.sidecar.signal(signal.SIGKILL)
    pair.sidecar.wait(30)
    pair.restart_sidecar()
    found = pair.sidecar.status()
    assert found["arena"]["recovered"]["chunks"] == chunks, found["arena"]
    assert int(found["generation"], 16) == int(generation, 16) + 1
    for prompt, truth in zip(prompts, truths, strict=True):
        again = ask(pair.b, prompt)
        assert (again.tokens, again.cached_tokens) == (truth, hits_of(len(prompt)))
    eventually(lambda: not pair.sidecar.status()["arena"]["recovered"]["frozen"], "stores again")
    assert mapped(pair.a, pair.b) == had


def test_a_graceful_end_is_a_miss_too(pair: Pair) -> None:
    prompt = pair.prompt(900)
    truth = ask(pair.a, prompt)
    pair.sidecar.signal(signal.SIGTERM)
    assert pair.sidecar.wait(60) == 0
    missed = ask(pair.b, prompt)
    assert (missed.tokens, missed.cached_tokens) == (truth.tokens, 0)
    pair.restart_sidecar()
    hits_come_back(pair, prompt, truth)


def post(server: Server, path: str) -> dict[str, object]:
    """What a server's route for operators answers; anything but 200 fails."""
    response = httpx.post(server.base_url + path, timeout=300, trust_env=False)
    assert response.status_code == 200, f"{path}: {response.text}"
    return response.json()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_pause_sleep_and_reset_succeed_without_the_sidecar(pair: Pair, how: str) -> None:
    """And nothing that was stored before is hit when it is back: the weights may be others by
    then."""
    prompt = pair.prompt(1500)
    truth = ask(pair.a, prompt)
    client.reset_prefix_cache(pair.b.base_url)
    assert ask(pair.b, prompt).tokens == truth.tokens
    pair.sidecar.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    try:
        for path, back in [("/pause", "/resume"), ("/sleep?level=1", "/wake_up")]:
            post(pair.b, path)
            post(pair.b, back)
            again = ask(pair.b, prompt)
            assert (again.tokens, again.cached_tokens) == (truth.tokens, 0), path
        client.reset_prefix_cache(pair.b.base_url, external=True)
    finally:
        if how == "stopped":
            pair.sidecar.signal(signal.SIGCONT)
    if how == "killed":
        pair.sidecar.wait(30)
        pair.restart_sidecar()
    pair.connected()
    again = ask(pair.b, prompt)
    assert (again.tokens, again.cached_tokens) == (truth.tokens, 0)
    hits_come_back(pair, prompt, truth)
