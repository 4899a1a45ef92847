"""What a session tells operators of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from lookaside import about
from lookaside.config import parse
from scheduling import BLOCK, make_config, make_kv_config


def test_an_engine_tells_its_releases_and_settings(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = parse(
        {
            "lookaside.chunk_tokens": 64,
            "lookaside.load_timeout_ms": 5000,
            "lookaside.sidecar_args": ["--redis", "redis://:password@host"],
        }
    )
    told = about.of_engine(config, make_config(model), make_kv_config(blocks=100))
    assert list(told) == sorted(told) and told.keys() <= about._FINDERS.keys()
    assert len(told) <= about.MAX_KEYS
    assert told["block_tokens"] == str(BLOCK) and told["own_tokens"] == str(100 * BLOCK)
    assert (
        told["chunk_tokens"] == "64" and told["settings"] == "chunk_tokens=64, load_timeout_ms=5000"
    )
    assert told["failure_policy"] and told["kv_role"] == "kv_both"
    assert told["hash_seed"] == "not set" and told["sleep_mode"] == "off"
    assert told["vllm"] and told["torch"] and told["python"].startswith("3.")
    assert "password" not in str(told)


def test_the_seed_itself_is_not_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "4711")
    told = about.of_engine(parse({}), make_config(model), make_kv_config(blocks=100))
    assert told["hash_seed"] == "set" and "4711" not in told.values()


def test_a_vllm_that_is_different_costs_nothing() -> None:
    told = about.of_engine(parse({}), object(), object())
    assert told["lookaside"] and "failure_policy" not in told
