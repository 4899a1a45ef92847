"""What commands call pages (sidecar/vllm) against vLLM's own hasher. LOOKASIDE_UPDATE=1 writes the
golden names."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lookaside import space
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

GOLDEN = Path(__file__).parents[2] / "sidecar" / "vllm" / "testdata" / "names.json"
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
LENGTHS = (1, 2, 3, 4, 16, 128)  # of a block
# Ids of every width that is encoded in a way of its own.
TOKENS = [0, 23, 24, 255, 256, 65535, 65536, 151_643, 2**31 - 1] * 45
SALTS = ("", "s", "tenant-7", "ä" * 200)


def cases(algorithms: Sequence[str]) -> list[dict[str, Any]]:
    out = []
    for algorithm in algorithms:
        for block in LENGTHS:
            for salt in SALTS:
                tokens = TOKENS[: 3 * block + block // 2]
                fields = {
                    "hash": algorithm,
                    "none_hash": space._none_hash(algorithm, "engine"),
                    "hash_keys": space._key_format(algorithm, 0),
                }
                names = hashes(algorithm, tokens, block, salt)
                out.append(case(fields, block, tokens, salt, names))
                if block == 16:  # pages of two blocks
                    pages = [names[i] for i in range(1, len(names), 2)]
                    out.append(
                        case({**fields, "hash_tokens": str(block)}, 2 * block, tokens, salt, pages)
                    )
    return out


def case(
    fields: dict[str, str], page: int, tokens: list[int], salt: str, names: list[str]
) -> dict[str, Any]:
    return {
        "fields": fields,
        "page_tokens": page,
        "tokens": tokens,
        "cache_salt": salt,
        "names": names,
    }


def hashes(algorithm: str, tokens: list[int], block: int, salt: str) -> list[str]:
    """vLLM's block hashes of a request."""
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    request: Any = SimpleNamespace(
        request_id="r",
        lora_request=None,
        mm_features=[],
        cache_salt=salt or None,
        prompt_embeds=None,
        num_tokens=len(tokens),
        all_token_ids=tokens,
        block_hashes=[],
    )
    return [
        bytes(each).hex()
        for each in kv_cache_utils.get_request_block_hasher(block, function)(request)
    ]


def test_names_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.version_info[:2] != (3, 11) and not os.environ.get("LOOKASIDE_UPDATE"):
        pytest.skip(
            "names of pickles have Python's version in hash_keys; the golden ones are of 3.11"
        )
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    if os.environ.get("LOOKASIDE_UPDATE"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(
            "[\n" + ",\n".join(json.dumps(each) for each in cases(ALGORITHMS)) + "\n]\n"
        )
        return
    # vLLM does without the package xxhash until somebody chooses it.
    here = [
        each for each in ALGORITHMS if "xxhash" not in each or importlib.util.find_spec("xxhash")
    ]
    golden = json.loads(GOLDEN.read_text())
    assert {each["fields"]["hash"] for each in golden} == set(ALGORITHMS)
    golden, found = [each for each in golden if each["fields"]["hash"] in here], cases(here)
    if [each["fields"]["hash_keys"] for each in golden] != [
        each["fields"]["hash_keys"] for each in found
    ]:
        # Before 0.31 a salt is hashed in another way; sidecar/vllm has a test of that.
        golden, found = (
            [plain(each) for each in cases if not each["cache_salt"]] for cases in (golden, found)
        )
    assert golden == found


def plain(case: dict[str, Any]) -> dict[str, Any]:
    """A case whose names do not depend on the form of the extra keys."""
    return {
        **case,
        "fields": {name: value for name, value in case["fields"].items() if name != "hash_keys"},
    }
