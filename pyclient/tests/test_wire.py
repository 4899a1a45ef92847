"""The Python messages against the golden vectors that the Go side generates and reads."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - to see that it is refused
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from lookaside import wire

TESTDATA = Path(__file__).resolve().parents[2] / "ipc" / "wire" / "testdata"
VECTORS = json.loads((TESTDATA / "vectors.json").read_text(encoding="utf-8"))
LMCACHE = json.loads((TESTDATA / "lmcache.json").read_text(encoding="utf-8"))

GOOD = [v for v in VECTORS if v["valid"]]
RECEIVED = [v for v in VECTORS if v["to"] == "client"]


BYTES = ("hashes", "prev", "fingerprint", "secret", "ticket", "names", "hash")


def build(kind: type, fields: dict[str, Any]) -> Any:
    """A message from what the vectors hold: bytes in hex, extents as objects."""
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        value = fields[field.name]
        if field.name in BYTES or field.type is bytes:
            value = bytes.fromhex(value)
        elif field.name in ("grants", "extents"):
            value = tuple(build(wire.Extent, e) for e in value)
        elif isinstance(value, bool):
            value = int(value)
        elif field.name == "runs":
            value = tuple(build(wire.Run, e) for e in value)
        elif isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    assert values.keys() == fields.keys()
    return kind(**values)


@pytest.mark.parametrize("vector", GOOD, ids=lambda v: v["name"])
def test_encodes_as_go_does(vector: dict[str, Any]) -> None:
    message = build(getattr(wire, vector["type"]), vector["message"])
    if vector["canonical"]:
        assert wire.encode(message).hex() == vector["hex"]


@pytest.mark.parametrize("vector", RECEIVED, ids=lambda v: v["name"])
def test_decodes_or_refuses_as_go_does(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    if vector["valid"]:
        kind = getattr(wire, vector["type"])
        expected = build(kind, vector["message"])
        for view in (data, bytearray(data), memoryview(data)):
            message = wire.decode(view)
            assert type(message) is kind
            assert message == expected
        for cut in range(len(data)):
            with pytest.raises(wire.WireError):
                wire.decode(data[:cut])
    else:
        with pytest.raises(wire.WireError) as caught:
            wire.decode(data)
        assert isinstance(caught.value, wire.VersionError) == ("another version" in vector["why"])


def test_every_received_type_has_both_kinds_of_vector() -> None:
    for valid in (True, False):
        have = {v["type"] for v in RECEIVED if v["valid"] == valid}
        want = {
            "Welcome",
            "Refuse",
            "StoreGrant",
            "LoadGrant",
            "Contained",
            "Pong",
            "Cleared",
            "Events",
            "RegionAdded",
            "RegionRemoved",
            "RegionsReady",
            "Moved",
            "NameWeights",
            "Notice",
            "Error",
            "LookupResult",
            "LookupPending",
        }
        assert have == want


def test_what_only_the_sidecar_receives_is_refused() -> None:
    for vector in GOOD:
        if vector["to"] == "sidecar":
            with pytest.raises(wire.WireError):
                wire.decode(bytes.fromhex(vector["hex"]))


def test_refusing_allocates_little() -> None:
    for vector in VECTORS:
        data = bytes.fromhex(vector["hex"])
        tracemalloc.start()
        try:
            wire.decode(data)
        except wire.WireError:
            pass
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1 << 20, vector["name"]


def test_noise_is_refused_or_survives() -> None:
    rng = random.Random(1)
    seeds = [bytes.fromhex(v["hex"]) for v in RECEIVED]
    for _ in range(20_000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(1, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            message = wire.decode(data)
        except wire.WireError:
            continue
        assert wire.decode(wire.encode(message)) == message


def test_version_error_names_both() -> None:
    other = wire.VERSION + 1
    with pytest.raises(wire.VersionError, match=f"want {wire.VERSION}, got {other}") as caught:
        wire.decode(msgspec.msgpack.encode([2, other, {"what": "ever"}]))
    assert caught.value.got == other


def test_store_limit_fits_a_packet() -> None:
    for size in (8, 16, 32):
        pages = wire.max_store_pages(size)
        store = wire.PrepareStore(
            0xFFFFFFFF,
            0x80000000,
            b"p" * size,
            b"h" * (pages * size),
            0xFFFFFFFF,
            0,
            tenant="t" * wire.MAX_TENANT_BYTES,
            priority=wire.MAX_PRIORITY,
            retain_ms=0xFFFFFFFF,
            pin_ms=0xFFFFFFFF,
            from_use=0xFF,
        )
        assert len(wire.encode(store)) <= wire.MAX_PACKET_BYTES
        assert pages <= wire.MAX_EXTENTS
    extent = wire.Extent(0xFFFFFFFE, 1, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)
    grant = wire.StoreGrant(
        0xFFFFFFFF, (1 << 64) - 1, 0xFFFFFFFF, 0xFFFFFFFF, (extent,) * wire.MAX_EXTENTS
    )
    assert len(wire.encode(grant)) <= wire.MAX_PACKET_BYTES


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        wire.Ping(1).id = 2  # type: ignore[misc]


# LMCache's messages, spelled as its own clients type them: tagged msgspec maps.


class LookupRequestMsg(msgspec.Struct, tag=True):
    lookup_id: str
    hashes: list[int | bytes]
    offsets: list[int]
    request_configs: dict[str, Any] | None = None


class LookupCleanupMsg(msgspec.Struct, tag=True):
    lookup_id: str


class LookupResponseMsg(msgspec.Struct, tag=True):
    lookup_id: str
    num_hit_tokens: int


@pytest.mark.parametrize("vector", [v for v in LMCACHE if v["valid"]], ids=lambda v: v["name"])
def test_lmcache_vectors_are_what_msgspec_says(vector: dict[str, Any]) -> None:
    """The vectors were made in Go; msgspec, which LMCache uses, agrees with them."""
    request = vector["request"]
    frames = [bytes.fromhex(f) for f in vector["frames"]]
    if len(frames) == 1:
        message = msgspec.msgpack.decode(frames[0], type=LookupRequestMsg | LookupCleanupMsg)
        if vector["name"] != "fields in another order, no configs":
            assert msgspec.msgpack.encode(message) == frames[0]
        assert message.lookup_id == request["lookup_id"]
        assert isinstance(message, LookupCleanupMsg) == request["cleanup"]
        hashes = message.hashes if isinstance(message, LookupRequestMsg) else []
        if not request["cleanup"]:
            answer = msgspec.msgpack.decode(
                bytes.fromhex(vector["answer"][0]), type=LookupResponseMsg
            )
            assert answer == LookupResponseMsg(request["lookup_id"], 768)
    else:
        hashes = msgspec.msgpack.decode(frames[1], type=list[int | bytes])
        assert frames[0].decode() == request["lookup_id"]
        assert msgspec.msgpack.decode(frames[2]) == request["offsets"]
        assert [bytes.fromhex(f) for f in vector["answer"]] == [frames[0], (768).to_bytes(4, "big")]
    flat = [
        h.hex() if isinstance(h, bytes) else (h % (1 << 64)).to_bytes(8, "big").hex()
        for h in hashes
    ]
    assert flat == request["hashes"]


# What would evaluate bytes and ruff's rules (S, TID251 in ruff.toml), which see imports and
# builtins, do not know.
_EVALUATES = re.compile(
    r"\b(recv_pyobj|send_pyobj|allow_pickle|Unpickler|__import__|torch\.load|np\.load|multiprocessing)\b"
)


def test_nothing_evaluates_what_is_received() -> None:
    modules = sorted(Path(wire.__file__).parent.glob("**/*.py"))
    assert len(modules) > 15
    found = {
        m.name: each for m in modules if (each := _EVALUATES.findall(m.read_text(encoding="utf-8")))
    }
    assert not found


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_no_message(protocol: int, tmp_path: Path) -> None:
    proof = tmp_path / "evaluated"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return proof.touch, ()

    data = pickle.dumps(Evil(), protocol)
    inside = wire.encode(wire.Error(1, "stale", "m")).replace(b"m", b"")[
        :-1
    ] + msgspec.msgpack.encode(data)
    for each in (
        data,
        inside,
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data)),
        msgspec.msgpack.encode([50, 1, data, data]),
    ):
        with pytest.raises(wire.WireError):
            wire.decode(each)
    assert not proof.exists()
    pickle.loads(data)  # noqa: S301
    assert proof.exists(), "it would have been seen"
