"""Settings and their documentation; needs neither torch nor vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lookaside import config as settings
from lookaside.config import Config, ConfigError, parse, parse_size

DOCS = Path(__file__).parents[2] / "docs" / "connector.md"
BEGIN, END = "<!-- settings: generated -->\n", "<!-- end of settings -->\n"


def test_defaults(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    config = parse({})
    assert (
        config
        == parse(None)
        == Config(endpoint=f"/run/user/7/lookaside-{os.getuid()}/rank-{{rank}}")
    )
    assert config.endpoint_for(3, 1) == f"/run/user/7/lookaside-{os.getuid()}/rank-3"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert parse({}).endpoint.startswith("/tmp/lookaside-")


def test_every_setting_is_read():
    config = parse(
        {
            "lookaside.endpoint": "/run/x/{dp_rank}/{rank}",
            "lookaside.chunk_tokens": 512,
            "lookaside.save_decode": False,
            "lookaside.lookup_timeout_ms": "30",
            "lookaside.promotion_timeout_ms": 0,
            "lookaside.store_timeout_ms": 0,
            "lookaside.load_timeout_ms": 1000,
            "lookaside.reset_timeout_ms": 500,
            "lookaside.autostart": "true",
            "lookaside.arena_limit": "500MiB",
            "lookaside.sidecar_config": "/etc/lookaside/{rank}.yaml",
            "lookaside.sidecar_args": ["--disk", "/mnt/{dp_rank}/{rank}:200G"],
            "lookaside.binary": "/opt/bin/lookaside",
            "lookaside.load_threads": 4,
        }
    )
    assert config == Config(
        endpoint="/run/x/{dp_rank}/{rank}",
        chunk_tokens=512,
        save_decode=False,
        lookup_timeout_ms=30,
        promotion_timeout_ms=0,
        store_timeout_ms=0,
        load_timeout_ms=1000,
        reset_timeout_ms=500,
        autostart=True,
        arena_limit=500 << 20,
        sidecar_config="/etc/lookaside/{rank}.yaml",
        sidecar_args=("--disk", "/mnt/{dp_rank}/{rank}:200G"),
        binary="/opt/bin/lookaside",
        load_threads=4,
    )
    assert config.endpoint_for(2, 1) == "/run/x/1/2"
    assert config.sidecar_arguments(2, 1) == [
        "--arena-limit=524288000",
        "--config=/etc/lookaside/2.yaml",
        "--disk",
        "/mnt/1/2:200G",
    ]


def test_arguments_of_a_started_sidecar():
    assert parse({}).sidecar_arguments(0, 0) == []
    config = parse(
        {"lookaside.sidecar_args": "--disk '/mnt/a b/{rank}:1G' --redis=redis://h/0?x={y}"}
    )
    assert config.sidecar_arguments(3, 0) == [
        "--disk",
        "/mnt/a b/3:1G",
        "--redis=redis://h/0?x={y}",
    ]


@pytest.mark.parametrize(
    "key, meant",
    [
        ("lookaside.chunk_token", "lookaside.chunk_tokens"),
        ("lookaside.chunkTokens", "lookaside.chunk_tokens"),
        ("lookaside.end_point", "lookaside.endpoint"),
        ("lookaside.auto_start", "lookaside.autostart"),
        ("lookaside.save-decode", "lookaside.save_decode"),
        ("lookaside.", "lookaside."),
        ("endpoint", "lookaside.endpoint"),
        ("arena-limit", "lookaside.arena_limit"),
        ("arena_size", "lookaside.arena_limit"),
        ("lookaside_arena_size", "lookaside.arena_limit"),
        ("lookaside_lookup_timeout_ms", "lookaside.lookup_timeout_ms"),
        ("LOOKASIDE.ENDPOINT", "lookaside.endpoint"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(key, meant):
    with pytest.raises(ConfigError) as error:
        parse({key: 1})
    assert repr(key) in str(error.value) and f"did you mean '{meant}" in str(error.value)


def test_a_name_of_before_is_refused_with_the_one_of_now():
    with pytest.raises(
        ConfigError, match=r"lookaside\.arena_size is named lookaside\.arena_limit now"
    ):
        parse({"lookaside.arena_size": "4G"})


def test_keys_of_others_pass():
    assert parse({"connectors": [], "shared_storage_path": "/x", "spec_name": "y"}) == parse({})


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("endpoint", "", "non-empty"),
        ("endpoint", 5, "non-empty"),
        ("endpoint", "relative/rank-{rank}", "absolute"),
        ("endpoint", "/run/{engine}", "{rank}"),
        ("endpoint", "/run/{rank", "{rank}"),
        ("endpoint", "/run/{}", "{rank}"),
        ("endpoint", "/run/{rank!r}/{rank.x}", "{rank}"),
        ("endpoint", "/" + "x" * 100, "too long"),
        ("chunk_tokens", 0, "between 1"),
        ("chunk_tokens", 1.5, "whole number"),
        ("chunk_tokens", True, "whole number"),
        ("chunk_tokens", "many", "whole number"),
        ("save_decode", 1, "true or false"),
        ("save_decode", "yes", "true or false"),
        ("lookup_timeout_ms", 0, "between 1"),
        ("lookup_timeout_ms", 10**9, "between 1"),
        ("arena_limit", "lots", "size"),
        ("arena_limit", "-4G", "size"),
        ("arena_limit", 0, "size"),
        ("arena_limit", "4X", "size"),
        ("load_threads", 65, "between 1"),
        ("binary", None, "non-empty"),
        ("promotion_timeout_ms", -1, "between 0"),
        ("sidecar_config", "lookaside.yaml", "absolute"),
        ("sidecar_args", 5, "list of strings"),
        ("sidecar_args", ["--disk", 5], "list of strings"),
        ("sidecar_args", "--disk 'x", "No closing quotation"),
        ("sidecar_args", ["--runtime-dir=/x"], "endpoint"),
        ("sidecar_args", ["--runtime-dir", "/x"], "endpoint"),
    ],
)
def test_bad_values_name_the_key(key, value, words):
    with pytest.raises(ConfigError) as error:
        parse({f"lookaside.{key}": value})
    assert f"lookaside.{key}: " in str(error.value) and words in str(error.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        parse({"lookaside.endpoint": 1, "lookaside.chunks": 2})
    assert "endpoint" in str(error.value) and "'lookaside.chunk_tokens'" in str(error.value)


@pytest.mark.parametrize(
    "text, size",
    [
        ("4G", 4 << 30),
        ("4GiB", 4 << 30),
        ("500MiB", 500 << 20),
        ("1.5k", 1536),
        ("1048576", 1 << 20),
        (7, 7),
        ("2 TB", 2 << 40),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "chunk, block, pages, adjusted",
    [
        (256, 16, 16, None),
        (256, 128, 2, None),
        (256, 256, 1, None),
        (256, 48, 5, "240"),
        (100, 128, 1, "128"),
        (256, 300, 1, "300"),
    ],
)
def test_chunks_are_whole_blocks(chunk, block, pages, adjusted):
    got, warning = parse({"lookaside.chunk_tokens": chunk}).pages_per_chunk(block)
    assert got == pages
    assert warning is None if adjusted is None else f"using {adjusted}" in str(warning)


@pytest.mark.parametrize(
    ("endpoint", "one"), [("/run/one", True), ("/run/{rank}", False), ("/run/{dp_rank}", True)]
)
def test_ranks_have_their_own_sidecars_or_one(endpoint, one):
    config = parse(
        {"lookaside.endpoint": endpoint, "lookaside.sidecar_args": ["--disk=/mnt/{rank}:1G"]}
    )
    assert config.one_sidecar == one
    # Whichever rank starts it.
    assert config.sidecar_arguments(3, 0) == [f"--disk=/mnt/{0 if one else 3}:1G"]


def test_the_docs_hold_the_settings_as_they_are():
    """LOOKASIDE_UPDATE=1 writes the table."""
    text = DOCS.read_text()
    head, rest = text.split(BEGIN)
    table, tail = rest.split(END)
    if os.environ.get("LOOKASIDE_UPDATE"):
        DOCS.write_text(head + BEGIN + settings.markdown_table() + END + tail)
        return
    assert table == settings.markdown_table()


def test_it_imports_neither_torch_nor_vllm():
    code = (
        "import sys, lookaside.config, lookaside.space; "
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
