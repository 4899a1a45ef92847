"""What the documents show of vLLM and of the connector is there. The sidecar's commands, JSON and
YAML are checked by sidecar/cmd/lookaside/docs_test.go."""

from __future__ import annotations

import re
from pathlib import Path

from lookaside import config
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # before it moved
    from vllm.entrypoints.openai.cli_args import make_arg_parser

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md")]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
# One command: up to the end of a line that neither continues nor is within quotes.
SERVE = re.compile(r"vllm serve ((?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\\n|[^\n'\"\\])*)")
QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"")


def test_flags_of_vllm() -> None:
    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    commands = [
        (document.name, command)
        for document in DOCUMENTS
        for block in FENCED.findall(document.read_text())
        for command in SERVE.findall(block)
    ]
    assert len(commands) >= 8
    wrong = [
        (name, flag)
        for name, command in commands
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", QUOTED.sub("", command))
        if flag not in known
    ]
    assert not wrong


def test_settings_of_the_connector() -> None:
    named = [
        (document.name, name)
        for document in DOCUMENTS
        for block in FENCED.findall(document.read_text())
        for name in re.findall(r"\"lookaside\.(\w+)\":", block)
    ]
    assert len(named) >= 8
    known = {name.removeprefix("lookaside.") for name in config.SETTINGS}
    assert not [(document, name) for document, name in named if name not in known]


def test_pictures() -> None:
    """All that documents show is there, all that is there is shown, and none is large."""
    shown = {
        (document.parent / path).resolve()
        for document in DOCUMENTS
        for path in re.findall(r"[(\"]((?:docs/)?images/[\w.-]+)[)\"]", document.read_text())
    }
    there = set((ROOT / "docs" / "images").iterdir())
    assert shown == there and len(there) >= 6
    assert not {path.name: size for path in there if (size := path.stat().st_size) > 200_000}
