"""The messages of tiers in other processes against the vectors that the Go side generates."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lookaside import tiermessages, wire

TESTDATA = Path(__file__).resolve().parents[2] / "ipc" / "wire" / "testdata"
VECTORS = json.loads((TESTDATA / "tier_vectors.json").read_text(encoding="utf-8"))
NESTED = {
    "pieces": tiermessages.TierPiece,
    "items": tiermessages.TierItem,
    "results": tiermessages.TierResult,
}
TO = {"program": "program", "tier": "sidecar"}


def build(kind: type, fields: dict[str, Any]) -> Any:
    """A message from what the vectors hold: bytes in hex, parts as objects."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        value = fields[field.name if field.name in fields else field.name + "_bytes"]
        if field.name in ("key", "prefix"):
            value = bytes.fromhex(value)
        elif field.name == "keys" and isinstance(value, list):
            value = tuple(bytes.fromhex(key) for key in value)
        elif field.name in NESTED:
            value = tuple(build(NESTED[field.name], part) for part in value)
        values[field.name] = value
    assert len(values) == len(fields)
    return kind(**values)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["name"])
def test_reads_and_writes_as_go_does(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    to = TO[vector["to"]]
    tracemalloc.start()
    try:
        if not vector["valid"]:
            with pytest.raises(wire.WireError) as caught:
                tiermessages.decode(data, to)
            other = "another version" in vector["why"]
            assert isinstance(caught.value, wire.VersionError) == other
            return
        message = build(getattr(tiermessages, vector["type"]), vector["message"])
        if vector["canonical"]:
            assert tiermessages.encode(message) == data
        for view in (data, bytearray(data), memoryview(data)):
            assert tiermessages.decode(view, to) == message
        for cut in range(len(data)):
            with pytest.raises(wire.WireError):
                tiermessages.decode(data[:cut], to)
        other_end = {"program": "sidecar", "sidecar": "program"}[to]
        with pytest.raises(wire.WireError):
            tiermessages.decode(data, other_end)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


def test_every_type_has_both_kinds_of_vector() -> None:
    types = {name for name in vars(tiermessages) if name.startswith("Tier")}
    types -= {"TierPiece", "TierItem", "TierResult"}
    for valid in (True, False):
        assert {v["type"] for v in VECTORS if v["valid"] == valid} == types


def test_noise_is_refused_or_survives() -> None:
    rng = random.Random(1)
    seeds = [v for v in VECTORS if v["valid"]]
    for _ in range(20_000):
        vector = rng.choice(seeds)
        data = bytearray.fromhex(vector["hex"])
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        to = TO[vector["to"]]
        try:
            message = tiermessages.decode(data, to)
        except wire.WireError:
            continue
        assert tiermessages.decode(tiermessages.encode(message), to) == message


def test_version_error_names_both() -> None:
    with pytest.raises(wire.VersionError, match="want 1, got 2") as caught:
        tiermessages.decode(msgspec.msgpack.encode([90, 2, {"what": "ever"}]))
    assert caught.value.got == 2
