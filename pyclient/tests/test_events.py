"""KV events: the sidecar's publisher, as vLLM's own classes read it, and the scheduler role's
announcements.

The first needs ``bin/lookaside`` (``make build``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from lookaside import wire
from lookaside.events import EventBook
from peer import until
from scheduling import (
    BLOCK,
    Stand,
    make_config,
    needs_lookahead,
    use_lookahead,
    write_adapter,
)
from test_sidecar import BINARY, Engine, Sidecar
from test_worker import PPC
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.lora.request import LoRARequest

with_sidecar = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

PAGE_TOKENS = 16
# Fields of BlockStored up to vLLM 0.32. A sidecar leaves out what later versions add, and readers
# take the default.
FIELDS = 14


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
        if len(BlockStored.__struct_fields__) <= FIELDS:
            # What msgspec writes of it is what the sidecar wrote, byte for byte.
            assert msgspec.msgpack.encode(batch) == payload
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case BlockStored():
                    assert (event.medium, event.locality, event.block_size) == (
                        MEDIUM_CPU,
                        "LOCAL",
                        PAGE_TOKENS,
                    )
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
        if set(self.held) != set(names):
            self.catch_up(self.next)  # its subscription may have come after what there was to tell
        return set(self.held) == set(names)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {
        "events_endpoint": f"ipc://{tmp_path}/events",
        "events_replay_endpoint": f"ipc://{tmp_path}/replay",
    }


@pytest.fixture
def router(settings: dict[str, Any]) -> Iterator[Subscriber]:
    each = Subscriber(settings["events_endpoint"], settings["events_replay_endpoint"])
    yield each
    each.close()


def metric(sidecar: Sidecar, name: str) -> float:
    import urllib.request

    address = (sidecar.directory / "admin.addr").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    raise AssertionError(f"no metric {name}")


@with_sidecar
def test_a_router_follows(
    model: Path, tmp_path: Path, settings: dict[str, Any], router: Subscriber
) -> None:
    sidecar = Sidecar(tmp_path / "endpoint", **settings)
    engine = Engine(model, sidecar.directory).start()
    try:
        router.poll()
        engine.save_now(engine.save(0, list(range(1, 7)), list(range(101, 107))))
        until(lambda: router.knows(*range(101, 107)))
        # The first events of a topic void what anybody knew; a chunk that goes on is one event with
        # the one before.
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
        engine.save_now(engine.save(4, [7, 8, 9, 10], [105, 106, 107, 108], prev=104))
        until(lambda: router.knows(*range(101, 109)))
        assert (
            router.held[107].block_hashes == [107, 108]
            and router.held[107].parent_block_hash == 106
        )
        engine.sidecars.void()
        assert engine.sidecars.clear(60.0)
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
        until(lambda: (router.poll(), not router.held)[1])
    finally:
        engine.close()
        sidecar.kill()


@with_sidecar
def test_whole_hashes_and_topics(
    model: Path, tmp_path: Path, settings: dict[str, Any], router: Subscriber
) -> None:
    settings |= {
        "events_hashes": "bytes",
        "events_topic": "kv@pod-{rank}@{dtype}",
        "events_data_parallel_rank": 3,
    }
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


@with_sidecar
def test_evictions_and_gaps(
    model: Path, tmp_path: Path, settings: dict[str, Any], router: Subscriber
) -> None:
    """What is evicted is told of; who asks for what is no longer kept gets everything anew."""
    settings |= {"events_buffer_steps": 3, "arena_limit": "1M", "arena_initial": "1M"}
    sidecar = Sidecar(tmp_path / "endpoint", **settings)
    engine = Engine(model, sidecar.directory).start()
    late = Subscriber(settings["events_endpoint"], settings["events_replay_endpoint"])
    late.complete = False
    numbers = iter(range(1, 10_000))

    def store() -> None:
        first = 1000 * next(numbers)
        engine.save_now(
            engine.save(0, list(range(1, 2 * PPC + 1)), list(range(first, first + 2 * PPC)))
        )

    def subscribed() -> bool:
        """Whether the router is told: what it misses until then must be within what is kept."""
        store()
        deadline = time.monotonic() + 2
        while not router.batches and time.monotonic() < deadline:
            router.poll()
        return bool(router.batches)

    try:
        until(lambda: metric(sidecar, "lookaside_event_subscribers") >= 2, 60)
        until(subscribed, 60)
        for _ in range(100):
            store()
            router.poll()
        until(lambda: (store(), router.poll(), late.sub.poll(0))[2], 60)

        def settled() -> bool:
            router.poll()
            return metric(sidecar, "lookaside_event_batches_total") == router.next

        until(settled, 60)
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


# ---- the scheduler role ----


class ScriptedFeed:
    """What one rank would tell of a set of digests that it holds."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.told: set[bytes] = set()
        self.cleared: set[bytes] = (
            set()
        )  # told of, and to be told of as gone, whether they came again or not
        self.reset = False
        self.silent = False

    def clear(self) -> None:
        self.cleared |= self.told
        self.told = set()
        self.held.clear()

    def poll(self) -> wire.Events | None:
        if self.silent:
            return None
        if self.reset:
            self.told, self.cleared, self.reset = set(), set(), False
            return wire.Events(0, 1, 0, ())
        gone, new = self.cleared | self.told - set(self.held), set(self.held) - self.told
        self.told, self.cleared = set(self.held), set()
        runs = [wire.Run(1, b"".join(gone))] if gone else []
        runs += [wire.Run(0, b"".join(new))] if new else []
        return wire.Events(0, 0, 0, tuple(runs))


def block_name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def fake_request(pages: int) -> Any:
    return SimpleNamespace(all_token_ids=list(range(pages * PAGE_TOKENS)), lora_request=None)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_announced_is_held_by_all_ranks(seed: int) -> None:
    """Random histories: a router is never left believing too much, and believes all that was noted
    since it is held."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 3)
    pages = 40
    feeds = [ScriptedFeed(set()) for _ in range(ranks)]
    book = EventBook(
        feeds,
        PAGE_TOKENS,
        32,
        lambda: 0.0,
        max_held=rng.choice([20, 1000]),
        max_wanted=rng.choice([5, 1000]),
    )
    bounded = book._max_held < pages or book._max_wanted < pages
    request = fake_request(pages)
    router: dict[int, BlockStored] = {}
    noted: set[int] = set()  # since they were last not known to be held by all
    announced = 0
    for _ in range(1000):
        what = rng.random()
        if what < 0.4:
            first = rng.randrange(pages)
            end = rng.randint(first + 1, pages)
            parent = block_name(first - 1) if first else None
            names = [block_name(page) for page in range(first, end)]
            book.note(request, first, names, names, parent)
            noted.update(range(first, end))
        elif what < 0.8:
            first = rng.randrange(pages)
            for feed in feeds:
                if rng.random() < 0.8:
                    change = {block_name(page) for page in range(first, rng.randint(first, pages))}
                    if rng.random() < 0.5:
                        feed.held |= change
                    else:
                        feed.held -= change
        elif what < 0.83:
            feed = rng.choice(feeds)
            feed.reset = True
        elif what < 0.84:  # a reset: it is cleared everywhere, sooner or later
            book.void()
            noted.clear()
            for feed in feeds:
                feed.clear()
        for feed in feeds:
            feed.silent = rng.random() < 0.2
        resetting = any(feed.reset and not feed.silent for feed in feeds)
        for event in book.take():
            if isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del router[int(block)]
                    noted.discard(int(block))
                continue
            assert isinstance(event, BlockStored)
            announced += len(event.block_hashes)
            parent = event.parent_block_hash
            for at, block in enumerate(map(int, event.block_hashes)):
                assert block not in router
                assert parent == (block - 1 if block else None)
                assert (
                    event.token_ids[at * PAGE_TOKENS : (at + 1) * PAGE_TOKENS]
                    == request.all_token_ids[block * PAGE_TOKENS :][:PAGE_TOKENS]
                )
                router[block] = event
                parent = block
            assert len(event.token_ids) == len(event.block_hashes) * PAGE_TOKENS
        told = {
            int.from_bytes(each, "big") for each in set.intersection(*(feed.told for feed in feeds))
        }
        assert router.keys() <= told & set(range(pages))
        if resetting:
            assert not router
            noted.clear()
        if not bounded:
            assert noted & told <= router.keys()
    assert announced


@pytest.mark.parametrize(
    "lookahead",
    [0, pytest.param(1, marks=needs_lookahead), pytest.param(3, marks=needs_lookahead)],
)
def test_announcements_say_what_the_engine_says_of_its_own(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    """In vLLM's scheduler: for each block both events agree, in all but the medium.

    Also where the sidecars know a block by another name, as those of an adapter's requests, and
    where hashes cover tokens after their block.
    """
    use_lookahead(monkeypatch, lookahead)
    config = make_config(model, adapters=True)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    stand = Stand(config)
    feed = ScriptedFeed(stand.sidecars.held)
    stand.role.announcements.book._feeds = (feed,)
    events: list[Any] = []
    stand.scheduler.kv_event_publisher.publish = lambda batch: events.extend(batch.events)
    prompt = list(range(5, 5 + 10 * BLOCK + 3))
    lora = LoRARequest("l", 1, str(write_adapter(tmp_path / "l", b"weights")))
    for rest in ({}, {"cache_salt": "salt"}, {"lora_request": lora}):
        stand.add(prompt, max_tokens=2 * BLOCK, **rest)
        stand.run()
    stand.clock += 1.0
    of: dict[str, dict[Any, Any]] = {"GPU": {}, MEDIUM_CPU: {}}
    for event in events:
        assert isinstance(event, BlockStored)
        parent = event.parent_block_hash
        for at, block in enumerate(event.block_hashes):
            keys = event.extra_keys[at] if event.extra_keys else None
            tokens = tuple(event.token_ids[at * BLOCK : (at + 1) * BLOCK])
            of[event.medium or "GPU"][block] = (
                parent,
                tokens,
                event.block_size,
                event.lora_id,
                event.lora_name,
                keys,
                event.group_idx,
                event.lookahead_token_ids[at] if lookahead else None,
            )
            parent = block
    assert len(of[MEDIUM_CPU]) == 3 * 12
    # vLLM leaves out of its own cache a block that gets its hash in a request's last step.
    late = of[MEDIUM_CPU].keys() - of["GPU"].keys()
    assert len(late) <= (3 if lookahead > 1 else 0)
    for block in of[MEDIUM_CPU].keys() - late:
        assert of["GPU"][block] == of[MEDIUM_CPU][block]
    for block in stand.digests(prompt, lora_request=lora):
        assert block not in stand.sidecars.held
    # What one rank drops is taken back; what a request finds held is announced again.
    events.clear()
    dropped = dict(stand.sidecars.held)
    stand.sidecars.held.clear()
    stand.add([1, 2, 3], max_tokens=3)
    stand.run()
    removed = {
        block
        for event in events
        if isinstance(event, BlockRemoved) and event.medium == MEDIUM_CPU
        for block in event.block_hashes
    }
    assert removed == set(of[MEDIUM_CPU])
    stand.sidecars.held.update(dropped)
    stand.forget_local()
    events.clear()
    stand.add(prompt, max_tokens=2, lora_request=lora)
    stand.run()
    again = {
        block
        for event in events
        if isinstance(event, BlockStored) and event.medium == MEDIUM_CPU
        for block in event.block_hashes
    }
    assert again < removed and len(again) == 10
    assert not stand.connector.has_pending_push_work()


def test_without_kv_events_nothing_is_followed(model: Path) -> None:
    stand = Stand(make_config(model))
    assert stand.role.announcements.book is None
    assert list(stand.connector.take_events()) == []


@with_sidecar
def test_a_scheduler_follows_its_sidecar(model: Path, tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path / "endpoint")
    engine = Engine(model, sidecar.directory).start()
    request = fake_request(8)
    book = EventBook(engine.sidecars.feeds(), PAGE_TOKENS, 32, time.monotonic)
    router: set[int] = set()

    def knows(*names: int) -> bool:
        for event in book.take():
            if isinstance(event, BlockStored):
                router.update(map(int, event.block_hashes))
            else:
                router.difference_update(map(int, event.block_hashes))
        return router == set(names)

    try:
        engine.save_now(engine.save(0, list(range(1, 7)), list(range(101, 107))))
        names = [block_name(name) for name in range(101, 109)]
        book.note(request, 0, names, names, None)
        until(lambda: knows(*range(101, 107)))
        engine.save_now(engine.save(4, [7, 8, 9, 10], [105, 106, 107, 108], prev=104))
        until(lambda: knows(*range(101, 109)))
        engine.sidecars.void()
        assert engine.sidecars.clear(60.0)
        until(knows)
        engine.save_now(engine.save(0, [1], [101]))
        book.note(request, 0, names[:1], names[:1], None)
        until(lambda: knows(101))
        sidecar.kill()
        until(knows)
        sidecar.start()
        engine.wait_up()
        engine.save_now(engine.save(0, [1], [101]))
        book.note(request, 0, names[:1], names[:1], None)
        until(lambda: knows(101))
    finally:
        engine.close()
        sidecar.kill()


@with_sidecar
def test_a_sidecar_without_a_journal_tells_nothing(model: Path, tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path / "endpoint", events_journal=0)
    engine = Engine(model, sidecar.directory).start()
    try:
        (feed,) = engine.sidecars.feeds()
        assert feed.poll() is None
        until(lambda: (feed.poll(), feed._not_before > 0)[1])
        assert feed.poll() is None and feed._pending is None
        engine.save_now(engine.save(0, [1], [101]))
        assert engine.held(0, 101) == 1
    finally:
        engine.close()
        sidecar.kill()
