"""A working set ten times the sidecar's memory, and every prefix of it still hits.

One vLLM server on a sidecar whose arena holds a tenth of what is asked, with a disk, DAX memory or a Redis server
below it. Each prompt is computed, found in vLLM's own cache, and, that emptied, in the arena. When all have gone by,
the arena holds but the last ones, and the first is asked again: what it hits comes up from the tier. Printed for each
length: the time to the first token of the four; the hit tokens that vLLM reports; whether the greedy outputs are the
same tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.stand import client, command, model
from examples.stand.client import Answer
from examples.stand.processes import Server, Sidecar, Stand, connector_config, dax_arena, say

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
    """What a run measured. ``loaded_bytes`` came up from the tier while it was timed."""

    tier: str
    working_set_bytes: int
    arena_bytes: int
    loaded_bytes: int
    rows: list[Row]


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
        if self._first.setdefault(tuple(prompt), answer.tokens) != answer.tokens or len(answer.tokens) != MAX_TOKENS:
            self._wrong.add(len(prompt))
        return answer

    def rows(self) -> list[Row]:
        """One for each length."""

        def median(length: int, source: str) -> float:
            return round(statistics.median(self._seconds[length, source]), 4)

        return [
            Row(
                prompt_tokens=length,
                computed_ttft_s=median(length, "computed"),
                tier_ttft_s=median(length, "tier"),
                arena_ttft_s=median(length, "arena"),
                local_ttft_s=median(length, "local"),
                hit_tokens=min(self._hits[length]),
                outputs_equal=length not in self._wrong,
            )
            for length in sorted(self._hits)
        ]


def working_set(path: Path, lengths: tuple[int, ...], rounds: int) -> tuple[int, int]:
    """Pages, and bytes of them, of so many prompts of each length."""
    pages = rounds * sum(length // PAGE for length in lengths)
    return pages, pages * PAGE * model.kv_bytes_per_token(path)


def measure(server: Server, sidecar: Sidecar, tier: str, lengths: tuple[int, ...], rounds: int, seed: int) -> list[Row]:
    """All prompts, one length after the other in each round."""
    # A seed for each: two prompts of one seed would begin alike.
    seeds = itertools.count(seed * 1_000_003)
    prompts = [model.prompt(length, next(seeds)) for _ in range(rounds) for length in lengths]
    before = sidecar.tiers()[tier]["pages"]
    measured = Rounds(server)
    for prompt in prompts:
        measured.ask("computed", prompt)
        measured.ask("local", prompt)
        measured.ask("arena", prompt, forget=True)
    sidecar.wait_stored(tier, before + sum(len(prompt) // PAGE for prompt in prompts), 120)
    say(f"all is in the {tier}; asking everything again, from the first on ...")
    for prompt in prompts:
        measured.ask("tier", prompt, forget=True)
    return measured.rows()


def table(result: Result) -> str:
    """The rows as text."""
    tier = {"disk": "disk", "dax": "DAX", "redis": "Redis"}[result.tier]
    head = (
        f"{'prompt':>7} {'computed':>10} {tier:>10} {'arena':>10} {'vLLM cache':>10} {f'{tier} faster':>12} "
        f"{'hit tokens':>10}  outputs"
    )
    lines = [
        f"working set {result.working_set_bytes / _MIB:.0f} MiB, arena {result.arena_bytes / _MIB:.0f} MiB; "
        f"{result.loaded_bytes / _MIB:.0f} MiB came up from {tier}; times to the first token, medians",
        head,
        "-" * len(head),
    ]
    for row in result.rows:
        faster = row.computed_ttft_s / row.tier_ttft_s if row.tier_ttft_s else 0.0
        outputs = "equal" if row.outputs_equal else "DIFFER"
        lines.append(
            f"{row.prompt_tokens:>7} {row.computed_ttft_s:>8.3f} s {row.tier_ttft_s:>8.3f} s "
            f"{row.arena_ttft_s:>8.3f} s {row.local_ttft_s:>8.3f} s {faster:>11.1f}x {row.hit_tokens:>10}  {outputs}"
        )
    return "\n".join(lines)


def run(tier: str, arena: str | None, directory: Path | None, rounds: int, seed: int, keep_logs: Path | None) -> Result:
    """Brings everything up, measures, takes everything down."""
    path = model.ensure()
    _, set_bytes = working_set(path, LENGTHS, rounds)
    with Stand(path, keep_logs) as stand:
        started = time.monotonic()
        size = f"{2 * set_bytes // _MIB + 512}M"
        if tier == "disk":
            below = f"{directory or stand.directory / 'disk'}:{size}"
        elif tier == "dax":  # a file stands in for the device
            below = f"{(directory or stand.directory) / 'dax0.0'}:{size}:allow_files=true"
        else:
            below = f"redis://127.0.0.1:{stand.redis().port}/0"
        # Few rounds need more than a tenth: one prompt comes in while another one goes to the tier.
        _, longest = working_set(path, LENGTHS[-1:], 1)
        room = f"{max(set_bytes // 10, 2 * longest) // _MIB}M"
        if arena == "dax":  # a file stands in for this device too
            settings = {**dax_arena(f"{(directory or stand.directory) / 'arena-dax0.0'}:{room}"), tier: below}
        else:
            settings = {"arena_limit": arena or room, tier: below}
        sidecar = stand.sidecar(settings=settings)
        arena_bytes = sidecar.status()["arena"]["limit_bytes"]
        say(f"sidecar up, with {arena_bytes / _MIB:.0f} MiB of arena; starting a vLLM server (half a minute) ...")
        server = stand.server("a", connector=connector_config(stand.endpoint()))
        server.wait_ready()
        say(f"up after {time.monotonic() - started:.0f} s; warming up ...")
        for tokens in (300, 2000):
            client.complete(server.base_url, model.prompt(tokens, tokens), max_tokens=4)
        say(f"asking {rounds} prompts each of {', '.join(map(str, LENGTHS))} tokens ...")
        rows = measure(server, sidecar, tier, LENGTHS, rounds, seed)
        return Result(tier, set_bytes, arena_bytes, sidecar.tiers()[tier]["loaded_bytes"], rows)


def main() -> int:
    parser = command.flags(
        "beyond_memory", "A working set ten times the arena, with a tier below it.", "prompts of each length", 14
    )
    parser.add_argument("--tier", choices=TIERS, default="disk", help="what lies below the arena (default disk)")
    parser.add_argument(
        "--arena",
        help="size of the arena (default: a tenth of the working set, but room for two of the longest prompts), "
        "or dax: on a file in place of a device",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="for the disk, or the file in place of a DAX device: where (default: a temporary one)",
    )
    args = parser.parse_args()
    result = command.show(
        lambda: run(args.tier, args.arena, args.directory, max(1, args.rounds), args.seed, args.keep_logs)
    )
    print(table(result))
    command.keep(args.json, asdict(result))
    return 0 if all(row.outputs_equal for row in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
