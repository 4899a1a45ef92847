"""The sidecar's publisher of KV events, as vLLM's own classes read it.

Needs ``bin/lookaside`` (``make build``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from peer import until
from test_sidecar import BINARY, Engine, Sidecar
from test_worker import PPC, model
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

__all__ = ["model"]

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

PAGE_TOKENS = 16


class Subscriber:
    """A router: follows the publisher, asks for what it missed, and knows what is held."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self.sub.connect(endpoint)
        self.req = self.context.socket(zmq.DEALER)
        self.req.connect(replay)
        self.decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.held: dict[Any, BlockStored] = {}
        self.next = 0
        self.complete = True  # it has seen all batches from the first
        self.topics: set[bytes] = set()
        self.batches: list[KVEventBatch] = []

    def close(self) -> None:
        self.context.destroy(0)

    def poll(self) -> None:
        while self.sub.poll(20):
            topic, number, payload = self.sub.recv_multipart()
            self.take(topic, int.from_bytes(number, "big"), payload)

    def take(self, topic: bytes, number: int, payload: bytes) -> None:
        if number > self.next:
            self.catch_up(self.next)
        if number < self.next:
            return
        self.apply(topic, number, payload)

    def catch_up(self, start: int) -> list[int]:
        """Ask for what is kept from a number on, as vLLM's subscribers do."""
        self.req.send_multipart((b"", start.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self.req.poll(20_000)
            empty, topic, number, payload = self.req.recv_multipart()
            assert empty == b""
            if number == ZmqEventPublisher.END_SEQ:
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            if numbers[-1] >= self.next:
                self.apply(topic, numbers[-1], payload)

    def apply(self, topic: bytes, number: int, payload: bytes) -> None:
        self.next = number + 1
        self.topics.add(topic)
        batch = self.decoder.decode(payload)
        # What msgspec writes of it is what the sidecar wrote, byte for byte.
        assert msgspec.msgpack.encode(batch) == payload
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    assert (event.medium, event.locality, event.block_size) == (MEDIUM_CPU, "LOCAL", PAGE_TOKENS)
                    assert event.token_ids == []
                    self.held.update(dict.fromkeys(event.block_hashes, event))
                case BlockRemoved():
                    assert (event.medium, event.locality) == (MEDIUM_CPU, "LOCAL")
                    for block in event.block_hashes:
                        assert self.held.pop(block, None) or not self.complete
                case AllBlocksCleared():
                    self.held.clear()

    def knows(self, *names: int) -> bool:
        self.poll()
        return set(self.held) == set(names)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "events_endpoint": f"ipc://{tmp_path}/events",
        "events_replay_endpoint": f"ipc://{tmp_path}/replay",
        "events_interval": "1ms",
    }


@pytest.fixture
def router(settings: dict[str, Any]) -> Iterator[Subscriber]:
    each = Subscriber(settings["events_endpoint"], settings["events_replay_endpoint"])
    yield each
    each.close()


def metric(sidecar: Sidecar, name: str) -> float:
    import urllib.request

    address = (sidecar.directory / "admin.addr").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


def test_a_router_follows(model: Path, tmp_path: Path, settings: dict[str, Any], router: Subscriber) -> None:
    sidecar = Sidecar(tmp_path / "endpoint", **settings)
    engine = Engine(model, sidecar.directory).start()
    try:
        router.poll()
        engine.save_now(engine.save(0, list(range(1, 7)), list(range(101, 107))))
        until(lambda: router.knows(*range(101, 107)))
        # The first events of a topic void what anybody knew; a chunk that goes on is one event with the one before.
        first, stored = [event for batch in router.batches for event in batch.events][:2]
        assert isinstance(first, AllBlocksCleared) and stored.parent_block_hash is None
        (topic,) = router.topics
        assert (
            topic.startswith(b"kv@")
            and topic.endswith(str(model).encode())
            and router.batches[0].data_parallel_rank == 0
        )
        assert abs(router.batches[0].ts - time.time()) < 60
        # The partly filled chunk grows in place: only what is new is told of, with its parent.
        engine.save_now(engine.save(4, [7, 8, 9, 10], [105, 106, 107, 108], prev=104, new_from=6))
        until(lambda: router.knows(*range(101, 109)))
        assert router.held[107].block_hashes == [107, 108] and router.held[107].parent_block_hash == 106
        assert engine.sidecars.clear(5.0)
        until(lambda: router.knows())
        # Who comes later asks for what was before.
        late = Subscriber(settings["events_endpoint"], settings["events_replay_endpoint"])
        try:
            assert late.catch_up(0) == list(range(router.next))
            assert late.knows()
            assert late.catch_up(router.next - 1) == [router.next - 1]
            engine.save_now(engine.save(0, [1], [201]))
            until(lambda: late.knows(201) and router.knows(201))
        finally:
            late.close()
        assert metric(sidecar, "lookaside_event_batches_total") == router.next
        assert metric(sidecar, "lookaside_event_gaps_total") == 0
        assert metric(sidecar, "lookaside_event_subscribers") >= 1
        # A sidecar that ends takes what it holds with it.
        import signal

        sidecar.signal(signal.SIGTERM)
        until(lambda: router.knows())
    finally:
        engine.close()
        sidecar.kill()


def test_whole_hashes_and_topics(model: Path, tmp_path: Path, settings: dict[str, Any], router: Subscriber) -> None:
    settings |= {"events_hashes": "bytes", "events_topic": "kv@pod-{rank}@{dtype}", "events_data_parallel_rank": 3}
    sidecar = Sidecar(tmp_path / "endpoint", **settings)
    engine = Engine(model, sidecar.directory).start()
    try:
        engine.save_now(engine.save(0, [1, 2], [101, 102]))
        until(lambda: (router.catch_up(0), len(router.held) == 2)[1])
        assert set(router.held) == {name.to_bytes(32, "big") for name in (101, 102)}
        assert router.topics == {b"kv@pod-3@torch.float32"}
        assert router.batches[0].data_parallel_rank == 3
    finally:
        engine.close()
        sidecar.kill()


def test_evictions_and_gaps(model: Path, tmp_path: Path, settings: dict[str, Any], router: Subscriber) -> None:
    """What is evicted is told of; who asks for what is no longer kept gets everything anew."""
    settings |= {"events_buffer_steps": 3, "arena_limit": "1M", "arena_initial": "1M"}
    sidecar = Sidecar(tmp_path / "endpoint", **settings)
    engine = Engine(model, sidecar.directory, store_timeout_ms=5000).start()
    late = Subscriber(settings["events_endpoint"], settings["events_replay_endpoint"])
    late.complete = False
    try:
        router.poll()
        for number in range(1, 100):
            first = 1000 * number
            engine.save_now(engine.save(0, list(range(1, 2 * PPC + 1)), list(range(first, first + 2 * PPC))))
            router.poll()

        def settled() -> bool:
            router.poll()
            return metric(sidecar, "lookaside_event_batches_total") == router.next

        until(settled, 30)
        assert len(router.held) == sidecar.status()["pages"] <= 256
        for block in list(router.held)[::20]:
            first = block - block % 1000
            assert engine.held(0, *range(first, block + 1)) == block - first + 1
        assert late.catch_up(0)[0] > 0
        until(lambda: late.knows(*router.held), 30)
        assert metric(sidecar, "lookaside_event_gaps_total") == 1
        until(lambda: router.knows(*late.held), 30)
    finally:
        late.close()
        engine.close()
        sidecar.kill()
