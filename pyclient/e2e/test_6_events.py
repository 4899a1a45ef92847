"""KV events of a real engine: its own publisher and the sidecar's say the same of the arena."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from examples.stand import model
from examples.stand.processes import Stand, eventually

from .conftest import PAGE, ask, configured


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


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


def test_engine_and_sidecar_tell_the_same(small_model: Path, logs: Path | None, routers: list[Router]) -> None:
    with Stand(small_model, logs) as stand:
        theirs = f"ipc://{stand.directory}/events"
        sidecar = stand.sidecar(settings={"events_endpoint": theirs, "events_interval": "1ms"})
        port = free_port()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "topic": "kv@here@m",
        }
        server = stand.server(
            "events", connector=configured(stand.endpoint()), arguments=["--kv-events-config", json.dumps(events)]
        )
        engine, arena = Router(f"tcp://127.0.0.1:{port}"), Router(theirs)
        routers += [engine, arena]
        server.wait_ready()
        eventually(lambda: len(sidecar.status()["sessions"]) == 2, "both sessions", 20)
        for seed in range(50):  # until the subscription has come through
            ask(server, model.prompt(PAGE + 2, 7000 + seed), 1)
            engine.poll()
            if engine.batches:
                break
        prompt = model.prompt(6 * PAGE + 5, 8000)
        engine.held.clear()
        before = arena.knows("CPU")
        ask(server, prompt, 4)
        # The same six blocks, by the same names, in the engine's own cache and in the arena.
        eventually(lambda: len(engine.knows("CPU")) == 6, "the engine tells of six blocks", 20)
        eventually(lambda: engine.knows("CPU") == arena.knows("CPU") - before, "the sidecar tells of the same", 20)
        assert engine.knows("CPU") <= engine.knows("GPU")
        for block, event in engine.held["CPU"].items():
            assert event.block_size == PAGE and event.token_ids == prompt[: len(event.token_ids)]
            assert arena.held["CPU"][block].block_size == PAGE
        # What is dropped is taken back by both: by the engine in its next steps.
        httpx.post(f"{server.base_url}/reset_prefix_cache?reset_external=true", timeout=30, trust_env=False)
        eventually(lambda: not arena.knows("CPU"), "the sidecar takes back all", 20)

        def engine_forgets() -> bool:
            ask(server, model.prompt(20, 9000), 2)
            return not engine.knows("CPU")

        eventually(engine_forgets, "the engine takes back all", 20)
