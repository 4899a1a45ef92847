"""What the examples' commands have in common: flags, and how they end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .processes import say, stop_on_signals

T = TypeVar("T")


def flags(example: str, description: str, rounds: str = "", default: int = 0) -> argparse.ArgumentParser:
    """The flags that all have; ``rounds``: what --rounds counts, where there is such a flag."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{example}", description=description)
    parser.add_argument("--json", type=Path, help="also write the table to this file as JSON")
    if rounds:
        parser.add_argument(
            "--rounds", type=int, default=default, help=f"{rounds}; times are medians (default {default})"
        )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    parser.add_argument("--keep-logs", type=Path, help="copy the logs of all processes to this directory")
    return parser


def show(run: Callable[[], T]) -> T:
    """What run answers. Exits with 130 if it was told to stop, and with 1 and a line if it has failed."""
    stop_on_signals()
    try:
        return run()
    except KeyboardInterrupt:
        say("stopped; everything that was started is ended")
        sys.exit(130)
    except (RuntimeError, TimeoutError) as error:
        say(f"demo: {error}")
        sys.exit(1)


def keep(path: Path | None, result: dict[str, object]) -> None:
    """Writes what came out to the file of --json, if there is one."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")
