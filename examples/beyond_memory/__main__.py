"""A working set ten times the sidecar's memory, and every prefix of it still hits.

One vLLM server on a sidecar whose arena holds a tenth of what is asked, with a disk, DAX memory or
a Redis server below it. Each prompt is computed, found in vLLM's own cache, and, that emptied, in
the arena. When all have gone by, the arena holds but the last ones, and the first is asked again:
what it hits comes up from the tier. Printed for each length: the time to the first token of the
four; the hit tokens that vLLM reports; whether the greedy outputs are the same tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.stand import client, command, model
from examples.stand.client import Answer
from examples.stand.processes import Server, Sidecar, Stand, connector_config, dax_arena
from examples.stand.progress import step

LENGTHS = (1000, 2000, 4000)
PAGE = 128  # vLLM's block on the CPU, in tokens
MAX_TOKENS = 16
TIERS = ("disk", "dax", "redis")
_MIB = 1 << 20


@dataclass
class Row:
    """One line of the table, and of the JSON. Times are medians over the rounds, in seconds."""

    prompt_tokens: int
    computed_ttft_s: float
    tier_ttft_s: float
    arena_ttft_s: float
    local_ttft_s: float
    hit_tokens: int
    outputs_equal: bool


@dataclass
class Result:
    """What a run measured, and its table. ``loaded_bytes`` came up from the tier while it was
    timed."""

    tier: str
    working_set_bytes: int = 0
    arena_bytes: int = 0
    loaded_bytes: int = 0
    table: command.Table[Row] | None = None

    def shown(self) -> command.Table[Row]:
        """The table, made once the sizes are known."""
        if self.table is None:
            title = (
                f"working set {self.working_set_bytes / _MIB:.0f} MiB, arena "
                f"{self.arena_bytes / _MIB:.0f} MiB; "
                "times to the first token, medians"
            )
            self.table = columns(self.tier).table(title)
        return self.table

    def json(self) -> dict[str, object]:
        return {
            "tier": self.tier,
            "working_set_bytes": self.working_set_bytes,
            "arena_bytes": self.arena_bytes,
            "loaded_bytes": self.loaded_bytes,
            "rows": [asdict(row) for row in self.shown().rows],
        }


class Rounds:
    """What was measured of each prompt, by its length."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._hits: dict[int, list[int]] = defaultdict(list)
        self._wrong: set[int] = set()
        self._first: dict[tuple[int, ...], tuple[int, ...]] = {}

    def ask(self, source: str, prompt: list[int], forget: bool = False) -> Answer:
        """Times a prompt. forget: vLLM's own cache is emptied before."""
        if forget:
            client.reset_prefix_cache(self._server.base_url)
        answer = client.complete(self._server.base_url, prompt, max_tokens=MAX_TOKENS)
        self._seconds[len(prompt), source].append(answer.ttft_s)
        if source != "computed":
            self._hits[len(prompt)].append(answer.cached_tokens)
        if (
            self._first.setdefault(tuple(prompt), answer.tokens) != answer.tokens
            or len(answer.tokens) != MAX_TOKENS
        ):
            self._wrong.add(len(prompt))
        return answer

    def known(self) -> list[int]:
        """The lengths that there is a row of."""
        return sorted({length for length, source in self._seconds if source == "tier"})

    def row(self, length: int) -> Row:
        """What was measured of this length so far."""

        def median(source: str) -> float:
            return round(statistics.median(self._seconds[length, source]), 4)

        return Row(
            prompt_tokens=length,
            computed_ttft_s=median("computed"),
            tier_ttft_s=median("tier"),
            arena_ttft_s=median("arena"),
            local_ttft_s=median("local"),
            hit_tokens=min(self._hits[length]),
            outputs_equal=length not in self._wrong,
        )


def working_set(path: Path, lengths: tuple[int, ...], rounds: int) -> tuple[int, int]:
    """Pages, and bytes of them, of so many prompts of each length."""
    pages = rounds * sum(length // PAGE for length in lengths)
    return pages, pages * PAGE * model.kv_bytes_per_token(path)


def measure(
    server: Server,
    sidecar: Sidecar,
    tier: str,
    lengths: tuple[int, ...],
    rounds: int,
    seed: int,
    shown: command.Table[Row],
) -> None:
    """All prompts, one length after the other in each round. A row is added as its last prompt is
    through.

    Where that fails, rows are added of what was measured.
    """
    # A seed for each: two prompts of one seed would begin alike.
    seeds = itertools.count(seed * 1_000_003)
    prompts = [[model.prompt(length, next(seeds)) for length in lengths] for _ in range(rounds)]
    before = sidecar.tiers()[tier]["pages"]
    measured = Rounds(server)
    for number, turn in enumerate(prompts, 1):
        with step(
            f"round {number} of {rounds}: {', '.join(map(str, lengths))} tokens, computed, then hit"
        ):
            for prompt in turn:
                measured.ask("computed", prompt)
                measured.ask("local", prompt)
                measured.ask("arena", prompt, forget=True)
    with step(f"writing what is left of it to the {tier}"):
        sidecar.wait_stored(tier, before + rounds * sum(length // PAGE for length in lengths), 120)
    try:
        for number, turn in enumerate(prompts, 1):
            with step(f"round {number} of {rounds}: again, out of the {tier}"):
                for prompt in turn:
                    measured.ask("tier", prompt, forget=True)
    finally:
        for length in measured.known():
            shown.add(measured.row(length))


def columns(tier: str) -> command.Columns[Row]:
    """The table's."""
    name = {"disk": "disk", "dax": "DAX", "redis": "Redis"}[tier]
    return command.Columns[Row](
        ("prompt", 7, lambda row: row.prompt_tokens),
        ("computed", 10, lambda row: command.seconds(row.computed_ttft_s)),
        (name, 10, lambda row: command.seconds(row.tier_ttft_s)),
        ("arena", 10, lambda row: command.seconds(row.arena_ttft_s)),
        ("vLLM cache", 10, lambda row: command.seconds(row.local_ttft_s)),
        (f"{name} faster", 12, lambda row: command.faster(row.computed_ttft_s, row.tier_ttft_s)),
        ("hit tokens", 10, lambda row: row.hit_tokens),
        equal=lambda row: row.outputs_equal,
    )


def run(
    result: Result,
    arena: str | None,
    directory: Path | None,
    rounds: int,
    seed: int,
    keep_logs: Path | None,
) -> None:
    """Brings everything up, measures, takes everything down."""
    path, tier = model.ensure(), result.tier
    _, set_bytes = working_set(path, LENGTHS, rounds)
    with Stand(path, keep_logs) as stand:
        size = f"{2 * set_bytes // _MIB + 512}M"
        if tier == "disk":
            below = f"{directory or stand.directory / 'disk'}:{size}"
        elif tier == "dax":  # a file stands in for the device
            below = f"{(directory or stand.directory) / 'dax0.0'}:{size}:allow_files=true"
        else:
            with step("starting a Redis server"):
                below = f"redis://127.0.0.1:{stand.redis().port}/0"
        # Few rounds need more than a tenth: one prompt comes in while another one goes to the tier.
        _, longest = working_set(path, LENGTHS[-1:], 1)
        room = f"{max(set_bytes // 10, 2 * longest) // _MIB}M"
        if arena == "dax":  # a file stands in for this device too
            settings = {
                **dax_arena(f"{(directory or stand.directory) / 'arena-dax0.0'}:{room}"),
                tier: below,
            }
        else:
            settings = {"arena_limit": arena or room, tier: below}
        with step("starting a sidecar"):
            sidecar = stand.sidecar(settings=settings)
        result.working_set_bytes = set_bytes
        result.arena_bytes = sidecar.status()["arena"]["limit_bytes"]
        with step("starting a vLLM server (half a minute)"):
            server = stand.server("a", connector=connector_config(stand.endpoint()))
            server.wait_ready()
        client.warm_up(server.base_url)
        measure(server, sidecar, tier, LENGTHS, rounds, seed, result.shown())
        result.loaded_bytes = sidecar.tiers()[tier]["loaded_bytes"]
        print(f"{result.loaded_bytes / _MIB:.0f} MiB came up from the {tier}")


def main() -> int:
    parser = command.flags(
        "beyond_memory",
        "A working set ten times the arena, with a tier below it.",
        "prompts of each length",
        14,
    )
    parser.add_argument(
        "--tier", choices=TIERS, default="disk", help="what lies below the arena (default disk)"
    )
    parser.add_argument(
        "--arena",
        help=(
            "size of the arena (default: a tenth of the working set, but room for two of the "
            "longest prompts), or dax: on a file in place of a device"
        ),
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="for the disk, or the file in place of a DAX device: where (default: a temporary one)",
    )
    args = parser.parse_args()
    result = Result(args.tier)
    command.show(
        lambda: run(
            result, args.arena, args.directory, max(1, args.rounds), args.seed, args.keep_logs
        ),
        args.json,
        result.json,
    )
    return 0 if all(row.outputs_equal for row in result.shown().rows) else 1


if __name__ == "__main__":
    sys.exit(main())
