"""Where the tests find what they share with the examples, and the patience that a test machine
needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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
