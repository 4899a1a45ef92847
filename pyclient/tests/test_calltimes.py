"""How the time in the connector's calls is recorded, and when a user is warned of it."""

from __future__ import annotations

import logging

import pytest
from lookaside.calltimes import CallTimes
from lookaside.stats import Collector


class Engine:
    """Steps of a clock that moves only as told."""

    def __init__(self) -> None:
        self.now = 5.0
        self.stats = Collector()
        self.times = CallTimes("worker", self.stats, lambda: self.now)

    def step(self, seconds: float, in_calls: float, computes: bool = True) -> None:
        self.times.add("wait_for_save", in_calls)
        self.now += seconds
        self.times.end_step(computes)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_every_call_is_recorded_by_its_name():
    engine = Engine()
    engine.times.add("start_load_kv", 0.25)
    engine.times.add("wait_for_save", 0.5)
    engine.times.add("wait_for_save", 0.75)
    stats = engine.stats.take()
    assert stats is not None and stats.data == {
        "call_seconds:start_load_kv": [0.25],
        "call_seconds:wait_for_save": [0.5, 0.75],
    }
    assert stats.reduce()["call_wait_for_save_max_ms"] == 750.0


def test_more_than_a_twentieth_of_the_steps_is_warned_of_once(caplog):
    caplog.set_level(logging.WARNING, "vllm.lookaside")
    engine = Engine()
    for _ in range(1000):
        engine.step(0.010, 0.0004)
    assert warnings(caplog) == []
    for _ in range(1000):
        engine.step(0.010, 0.0012)
    (warning,) = warnings(caplog)
    assert "12 %" in warning and "(worker)" in warning and "call_seconds" in warning


def test_steps_that_compute_nothing_do_not_count(caplog):
    caplog.set_level(logging.WARNING, "vllm.lookaside")
    engine = Engine()
    for _ in range(2000):
        engine.step(0.001, 0.0009, computes=False)
        engine.step(0.010, 0.0001)
    assert warnings(caplog) == []
