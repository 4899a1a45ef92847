"""The facade that vLLM loads: what it refuses while vLLM still validates its configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lookaside import about
from lookaside.config import ConfigError, parse
from lookaside.connector import LookasideConnector
from scheduling import Stand, make_config, make_kv_config, write_model

MISSPELT = {"lookaside.chunk_token": 64}
MEANT = "unknown setting 'lookaside.chunk_token'; did you mean 'lookaside.chunk_tokens'?"
INSIDE: dict[str, Any] = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": None,
    "kv_connector_extra_config": {
        "connectors": [
            {
                "kv_connector": "LookasideConnector",
                "kv_connector_module_path": "lookaside.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": MISSPELT,
            }
        ]
    },
}


@pytest.mark.parametrize("connector", [None, INSIDE], ids=["alone", "in MultiConnector"])
def test_bad_settings_are_refused_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connector: dict[str, Any] | None
) -> None:
    """Before any process is started and any model loaded."""
    model = write_model(tmp_path / "model")
    monkeypatch.delitem(
        sys.modules, "lookaside.connector"
    )  # as in a server, where vLLM is the first to import it
    with pytest.raises(ValueError) as refused:
        make_config(model, MISSPELT, connector=connector)
    assert MEANT in str(refused.value)
    # In vLLM's own command it is the last line, and there is no traceback before it.
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve", "MODEL"])
    with pytest.raises(SystemExit) as ended:
        make_config(model, MISSPELT, connector=connector)
    assert ended.value.code == f"lookaside: kv_connector_extra_config: {MEANT}"


def test_bad_settings_are_refused_where_vllm_asks() -> None:
    """With whole CUDA graphs vLLM shows a connector its settings, whoever imported it."""
    assert (
        LookasideConnector.requires_piecewise_for_cudagraph({"lookaside.chunk_tokens": 64}) is False
    )
    with pytest.raises(ConfigError, match="did you mean"):
        LookasideConnector.requires_piecewise_for_cudagraph(MISSPELT)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("several", [False, True], ids=["alone", "in MultiConnector"])
def test_the_failure_policy_that_counts(tmp_path: Path, several: bool, policy: str) -> None:
    """Alone it is always recompute. Among several it is everybody's, and the sidecar is told that
    one, whatever the child's own says."""
    model = write_model(tmp_path / "model")
    other = {"recompute": "fail", "fail": "recompute"}[policy]
    multi = {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": None,
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "LookasideConnector",
                    "kv_connector_module_path": "lookaside.connector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": other,
                    "kv_connector_extra_config": {
                        "lookaside.endpoint": str(tmp_path / "rank-{rank}")
                    },
                }
            ]
        },
    }
    config = make_config(model, connector=multi if several else None, policy=policy)
    stand = Stand(config)
    (ours,) = getattr(stand.connector, "_connectors", [stand.connector])
    told = about.of_engine(parse({}), ours._vllm_config, make_kv_config(blocks=100))
    assert told["failure_policy"] == (policy if several else "recompute")
    stand.connector.shutdown()
