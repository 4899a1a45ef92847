"""What `lookaside doctor` says of real servers: of two that share, and of one that is set wrongly.

The tests in sidecar/cmd/lookaside/doctor_test.go have all findings, with clients in the place of
vLLM.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from examples.stand import client
from examples.stand.processes import BINARY, Sidecar, eventually

from .conftest import HURRIED, Pair, ask, configured, sessions


def doctor(sidecar: Sidecar) -> dict[str, list[dict[str, Any]]]:
    """The findings by their ids."""
    done = subprocess.run(
        [BINARY, "doctor", "--json", "--timeout=60s", f"--runtime-dir={sidecar.endpoint}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)
    worst = {"ok": 0, "note": 0, "warning": 3, "error": 4}[report["worst"]]
    assert done.returncode == worst, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["id"], []).append(finding)
    return found


def test_servers_that_share_and_one_that_is_set_wrongly(pair: Pair) -> None:
    prompt = pair.prompt(2000)
    ask(pair.a, prompt)
    eventually(lambda: "use-idle" not in doctor(pair.sidecar), "a report of the request")
    well = doctor(pair.sidecar)
    assert len(well["engine-ok"]) == 2 and "sidecar-ok" in well
    for engine in well["engine-ok"]:
        assert "failure_policy recompute" in engine["seen"] and "device cpu" in engine["seen"]
        assert "vllm 0." in engine["seen"] and "blocks of 128 tokens" in engine["seen"]
    assert not [each for each in well if each.startswith("share-")]
    assert "engine-failure-policy" not in well

    config = {
        **configured(pair.stand.endpoint(), **{**HURRIED, "chunk_tokens": 400}),
        "kv_load_failure_policy": "fail",
    }
    wrong = pair.stand.server("wrong", connector=config, env={"PYTHONHASHSEED": "7"})
    try:
        wrong.wait_ready()
        eventually(lambda: sessions(pair.sidecar) == 6, "the wrong server's sessions")
        assert ask(wrong, prompt).cached_tokens == 0
        eventually(lambda: "share-seed" in doctor(pair.sidecar), "why nothing is shared")
        ill = doctor(pair.sidecar)
        assert ill["share-seed"][0]["level"] == "warning"
        assert "PYTHONHASHSEED=0" in ill["share-seed"][0]["fix"]
        assert "lookaside.chunk_tokens" in ill["share-chunk-tokens"][0]["fix"]
        assert "engine-failure-policy" not in ill, "the connector sees to it"
        (chunk,) = ill["engine-chunk"]
        assert "is 400" in chunk["seen"] and "chunks have 384" in chunk["seen"]
        assert len(ill["engine-ok"]) == 3
    finally:
        wrong.end()
    pair.connected()

    # What vLLM's own cache has is told too.
    before = pair.sidecar.status()["counters"]["tokens"]["own"]
    client.reset_prefix_cache(pair.b.base_url)
    ask(pair.b, prompt)
    ask(pair.b, prompt)
    eventually(
        lambda: pair.sidecar.status()["counters"]["tokens"]["own"] >= before + 1920,
        "the tokens of vLLM's own cache",
    )
