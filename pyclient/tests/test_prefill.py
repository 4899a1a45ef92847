"""What computing a prompt's tokens takes, learnt from steps as an engine has them."""

from __future__ import annotations

import random

import pytest
from lookaside.prefill import PrefillRate

TRUE = 1e-4  # seconds a token
FIXED = 5e-3  # and a step


def took(tokens: int) -> float:
    return FIXED + TRUE * tokens


def learnt(*steps: tuple[int, float]) -> float:
    rate = PrefillRate()
    for tokens, seconds in steps:
        rate.add(tokens, seconds)
    return rate.seconds_per_token


def test_nothing_is_known_before_the_warm_up_is_over():
    assert learnt() == learnt((1000, 0.1), (1000, 0.1)) == 0


def test_the_first_steps_may_be_slow():
    assert learnt((1000, 30.0), (1000, 0.1), (1000, 2.0)) == pytest.approx(TRUE)


def test_steps_that_cannot_be_are_left_out():
    assert learnt((0, 0.1), (100, 0.0), (100, -1.0), (100, float("nan"))) == 0


@pytest.mark.parametrize("seed", range(3))
def test_long_steps_decide(seed: int):
    """What a step costs however short it is weighs on many short ones, and hardly on what is
    learnt."""
    rng = random.Random(seed)
    steps = [rng.choice([32, 60, 200, 2048, 4096]) for _ in range(200)]
    assert learnt(*((n, took(n) * rng.uniform(0.9, 1.1)) for n in steps)) == pytest.approx(
        TRUE, rel=0.1
    )


def test_a_step_that_was_held_up_changes_little():
    steps = [(2048, took(2048))] * 20
    usual = learnt(*steps)
    assert learnt(*steps, (2048, 60.0)) < 1.3 * usual
    assert learnt(*steps, (2048, 1e-6)) > 0.8 * usual


def test_a_rate_that_changes_is_followed():
    steps = [(2048, took(2048))] * 50
    assert learnt(*steps, *([(2048, 4 * took(2048))] * 100)) == pytest.approx(
        4 * took(2048) / 2048, rel=0.1
    )
    assert learnt(*steps, *([(2048, took(2048) / 4)] * 100)) == pytest.approx(
        took(2048) / 4 / 2048, rel=0.1
    )


@pytest.mark.parametrize(
    "prompt, everything, tells",
    [(15, 15, False), (16, 16, True), (100, 200, True), (100, 201, False), (0, 50, False)],
)
def test_steps_worth_timing(prompt: int, everything: int, tells: bool):
    assert PrefillRate.is_worth_timing(prompt, everything) is tells
