"""Where the tests find what they share with the examples, and the patience that a test machine
needs."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# What is tested is what happens, not how fast: a thread or a process may stand still for seconds,
# and what the other side would have said in time is to be heard all the same. The test of a
# deadline sets it by itself.
PATIENCE_S = {
    "lookaside.scheduler.identification._IDENTITY_PATIENCE_S": 60.0,
    "lookaside.connection._CONNECT_PATIENCE_S": 60.0,
    "lookaside.heartbeat._PONG_PATIENCE_S": 60.0,
    "lookaside.scheduler.epochs._MOVE_PATIENCE_S": 60.0,
    "lookaside.worker.link._UNMAP_PATIENCE_S": 60.0,
    "lookaside.worker.loads._GRANT_PATIENCE_S": 60.0,
    "lookaside.worker.loads._IN_STEP_PATIENCE_S": 60.0,
    "lookaside.worker.role._START_PATIENCE_S": 60.0,
}


@pytest.fixture(autouse=True)
def patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in PATIENCE_S.items():
            if name.rpartition(".")[0] in sys.modules:  # what nobody has imported nobody waits in
                patch.setattr(name, seconds)
        yield


# What these import is imported by the tests that use them: others do without vLLM.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model with two KV heads."""
    from scheduling import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Any]:
    """A peer whose region has the size of a worker's KV cache in test_worker."""
    from peer import Peer
    from test_worker import BLOCKS, PAGE

    each = Peer(tmp_path / "endpoint", region_bytes=BLOCKS * PAGE)
    yield each
    if not each._stop:
        each.close()


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    """Sidecars that a test appends; they are ended after it, stopped ones as well."""
    made: list[Any] = []
    yield made
    for each in made:
        with contextlib.suppress(ProcessLookupError):
            each.signal(signal.SIGCONT)
            each.kill()
