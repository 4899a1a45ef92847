"""vLLM goes to sleep and wakes up: no copy touches the KV cache in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from lookaside import sleeping, wire
from lookaside.connector import LookasideConnector
from lookaside.metadata import LookasideMetadata
from lookaside.worker import quiet
from peer import Peer, until
from test_worker import Shelf, SlowCopies, Stand, grant_load, load_spec, page
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

BLOCKS = 32


@pytest.fixture
def stand(model: Path, peer: Peer) -> Iterator[Stand]:
    each = Stand(model, str(peer.directory))
    each.register()
    yield each
    each.worker.shutdown()


@pytest.fixture
def slow(stand: Stand) -> SlowCopies:
    copies = SlowCopies(stand.worker.link.copies)
    stand.worker.link.copies = copies  # type: ignore[assignment]
    return copies


class Sleep(threading.Thread):
    """quiesce on a thread of its own, as long as it waits for copies."""

    def __init__(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.stand = stand
        self.waits: list[str] = []  # what it says that it waits for
        monkeypatch.setattr(quiet, "_TELL_EVERY_S", 0.01)
        monkeypatch.setattr(quiet.logger, "warning", lambda text, what: self.waits.append(what))
        self.start()

    def run(self) -> None:
        self.stand.worker.quiesce()


def test_sleep_waits_for_a_load_that_copies(
    stand: Stand, peer: Peer, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant_load(peer, (0, 1, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5])]))
    until(lambda: slow.tickets)
    sleep = Sleep(stand, monkeypatch)
    until(lambda: sleep.waits)
    assert sleep.is_alive() and set(sleep.waits) == {"loaded"}
    slow.finish()
    sleep.join()
    stand.step()
    assert stand.received == ["r"] and not stand.invalid, "it was carried out"


def test_sleep_waits_for_a_save_that_copies(
    stand: Stand, peer: Peer, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    Shelf(peer)
    stand.step(LookasideMetadata(saves=[stand.save(0, [3], [1])]))
    assert slow.tickets and not stand.acked
    sleep = Sleep(stand, monkeypatch)
    until(lambda: sleep.waits)
    assert sleep.is_alive() and set(sleep.waits) == {"saved"}
    slow.finish()
    sleep.join()
    peer.wait_for(wire.CommitStore)
    stand.step()
    assert stand.acked == [1]


def test_sleep_gives_up_what_has_not_begun(stand: Stand, peer: Peer, slow: SlowCopies) -> None:
    """A load whose grant is out, and a save whose room is: neither is waited for."""
    peer.script[wire.PrepareLoad] = lambda conn, message: None
    peer.script[wire.PrepareStore] = lambda conn, message: None
    worker = stand.worker
    worker.bind_connector_metadata(
        LookasideMetadata(
            loads=[load_spec("r", ((1, 1),), 0, [5])], saves=[stand.save(0, [3], [1])]
        )
    )
    peer.wait_for(wire.PrepareStore)
    peer.wait_for(wire.PrepareLoad)
    worker.quiesce()
    assert not slow.tickets
    stand.step()
    assert stand.received == ["r"] and stand.invalid == {5} and stand.acked == [1]


def test_nothing_is_copied_until_wake(stand: Stand, peer: Peer) -> None:
    shelf = Shelf(peer)
    grant_load(peer, (0, 1, 0, 0))
    worker = stand.worker
    worker.quiesce()
    worker.quiesce()
    stand.step(
        LookasideMetadata(
            loads=[load_spec("r", ((1, 1),), 0, [5])], saves=[stand.save(0, [3], [1])]
        )
    )
    assert stand.received == ["r"] and stand.invalid == {5} and stand.acked == [1]
    assert not peer.of(wire.PrepareLoad) and not peer.of(wire.PrepareStore)
    worker.resume()
    worker.resume()
    stand.save_now(stand.save(0, [3], [1]))
    peer.wait_for(wire.CommitStore)
    assert shelf.bytes_at(0) == page(stand.cache, 3)


class Worker:
    """vLLM's worker class, as far as sleep goes; notes what its connector is told, and when."""

    calls: ClassVar[list[str]] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake_up {tags}")

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(f"discard {tags}")


def test_sleep_is_followed_where_vllm_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import kv_transfer_state

    class Told:
        def unregister_kv_caches(self) -> None:
            Worker.calls.append("unregister")

        def restore_kv_caches(self) -> None:
            Worker.calls.append("restore")

    several = SimpleNamespace(_connectors=[SimpleNamespace(), Told()])
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", several)
    monkeypatch.setattr(Worker, "calls", [])
    for name in ("unregister_kv_caches", "restore_kv_caches"):
        monkeypatch.delattr(KVConnectorBase_V1, name, raising=False)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=f"{__name__}.{Worker.__qualname__}")
    )
    assert sleeping.follow(config) and sleeping.follow(config)
    worker = Worker()
    worker.sleep(2)
    worker.wake_up(tags=["weights"])
    worker.wake_up(["kv_cache"])
    worker.discard(("kv_cache",))
    worker.wake_up()
    assert Worker.calls == [
        *("unregister", "sleep 2", "wake_up ['weights']", "wake_up ['kv_cache']", "restore"),
        *("unregister", "discard ('kv_cache',)", "wake_up None", "restore"),
    ]
    config.parallel_config.worker_cls = "auto"
    assert not sleeping.follow(config), "nothing to wrap"


def test_connector_supports_sleep() -> None:
    assert LookasideConnector.supports_sleep_mode(None)
