"""KV events of a real engine: its own publisher and the sidecar's say the same of the arena."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from examples.stand import client
from examples.stand.processes import eventually

from .conftest import PAGE, Missed, Pair, ask, missed_again


class Router:
    """Follows a publisher, by vLLM's own classes."""

    def __init__(self, endpoint: str) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.connect(endpoint)
        self.held: dict[Any, dict[Any, Any]] = {}
        """By medium: the blocks, and the events that told of them."""
        self.batches = 0

    def poll(self) -> None:
        while self.sub.poll(10):
            _, _, payload = self.sub.recv_multipart()
            self.batches += 1
            events: list[Any] = list(self.decoder.decode(payload).events)
            for event in events:
                kind = type(event).__name__
                if kind == "AllBlocksCleared":
                    self.held.clear()
                    continue
                blocks = self.held.setdefault(event.medium, {})
                for block in event.block_hashes:
                    if kind == "BlockStored":
                        blocks[block] = event
                    else:
                        blocks.pop(block, None)

    def knows(self, medium: str) -> set[Any]:
        self.poll()
        return set(self.held.get(medium, ()))

    def close(self) -> None:
        self.context.destroy(0)


@pytest.fixture
def routers() -> Iterator[list[Router]]:
    made: list[Router] = []
    yield made
    for each in made:
        each.close()


@missed_again
def test_engine_and_sidecar_tell_the_same(pair: Pair, routers: list[Router]) -> None:
    engine, arena = Router(pair.events), Router(pair.settings["events_endpoint"])
    routers += [engine, arena]

    def told() -> bool:
        ask(pair.a, pair.prompt(PAGE + 2), 1)
        return bool(engine.knows("CPU") and arena.knows("CPU"))

    eventually(told, "the subscriptions to come through")
    client.reset_prefix_cache(pair.a.base_url, external=True)
    for each, who in ((engine, "engine"), (arena, "sidecar")):
        eventually(
            lambda each=each: bool(ask(pair.a, pair.prompt(20), 2)) and not each.knows("CPU"),
            f"the {who} forgets",
        )
    prompt = pair.prompt(5 * PAGE + 5)  # one step of its prefill, and one event
    ask(pair.a, prompt, 4)
    # The same five blocks, by the same names, in the engine's own cache and in the arena.
    try:
        eventually(lambda: len(engine.knows("CPU")) == 5, "the engine tells of five blocks", 60)
    except TimeoutError as error:
        raise Missed(str(error)) from error  # not stored
    eventually(lambda: engine.knows("CPU") == arena.knows("CPU"), "the sidecar tells of the same")
    assert engine.knows("CPU") <= engine.knows("GPU")
    for block, event in engine.held["CPU"].items():
        assert event.block_size == PAGE and event.token_ids == prompt[: len(event.token_ids)]
        assert arena.held["CPU"][block].block_size == PAGE
    # What is dropped is taken back by both: by the engine in its next steps.
    client.reset_prefix_cache(pair.a.base_url, external=True)
    eventually(lambda: not arena.knows("CPU"), "the sidecar takes back all")
    eventually(
        lambda: bool(ask(pair.a, pair.prompt(20), 2)) and not engine.knows("CPU"),
        "the engine takes back all",
    )
