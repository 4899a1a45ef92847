"""Two vLLM servers share every prefix through one sidecar, or each has its own and these share
(--sidecars 2).

Server A computes prompts of several lengths. Server B, which has never seen them, gets the same
prompts, and prompts that share only their beginning with one of A's. Printed for each: the time to
the first token when all of it is computed, when B loads what A computed, and when B has it in
vLLM's own cache; the hit tokens that vLLM reports; whether the greedy outputs of the three are the
same tokens.

With a sidecar each, what A has stored lies in the arena of A's, where B's worker reads it, and B
stores nothing of it.

With the arena on DAX (--arena dax; a file stands in for the device) the sidecar and both servers
are then killed, and a sidecar and a server started anew: what was computed before is found on the
device, and hits.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.stand import client, command, model
from examples.stand.processes import (
    Server,
    Sidecar,
    Stand,
    connector_config,
    dax_arena,
    eventually,
)
from examples.stand.progress import say, step

# (prompt tokens, tokens shared with a prompt that A has computed)
CASES = (
    (500, 500),
    (1000, 1000),
    (2000, 2000),
    (4000, 4000),
    (8000, 8000),
    (4000, 1000),
    (4000, 3000),
    (8000, 6500),
)
MAX_TOKENS = 16
DEVICE = "3G"  # in place of the device: all of the prompts' pages


@dataclass
class Row:
    """One line of the table, and of the JSON. Times are medians over the rounds, in seconds."""

    prompt_tokens: int
    shared_tokens: int
    cold_ttft_s: float
    lookaside_ttft_s: float
    local_ttft_s: float
    hit_tokens: int
    outputs_equal: bool


@dataclass
class Asked:
    """A prompt that was computed, and its greedy output."""

    prompt: list[int]
    tokens: tuple[int, ...]
    cold_ttft_s: float


@dataclass
class Stored:
    """What a sidecar stored and loaded in the end, in bytes, and in tokens what it left to the
    other."""

    sidecar: str
    stored_bytes: int
    loaded_bytes: int
    borrowed_tokens: int
    not_stored_tokens: int


@dataclass
class Restarted:
    """A prompt after everything was killed and started anew. Times in seconds."""

    prompt_tokens: int
    cold_ttft_s: float
    restarted_ttft_s: float
    hit_tokens: int
    outputs_equal: bool


def measure(
    a: Server,
    b: Server,
    prompt_tokens: int,
    shared_tokens: int,
    rounds: int,
    seed: int,
    asked: list[Asked] | None = None,
) -> Row:
    """One case, over several rounds of fresh prompts; the last one is added to ``asked``."""
    cold_s, lookaside_s, local_s, hits = [], [], [], []
    equal = True
    for turn in range(rounds):
        case = seed * 1_000_003 + prompt_tokens * 101 + shared_tokens * 10_007 + turn
        whole = shared_tokens == prompt_tokens
        first = model.prompt(prompt_tokens, case)
        prompt = (
            first if whole else model.prompt(prompt_tokens, case + 500_000, first[:shared_tokens])
        )
        client.settle()
        cold = client.complete(a.base_url, first, max_tokens=MAX_TOKENS)
        if not whole:
            # A salt of its own shares nothing with anyone: computed whole, and stored under other
            # names.
            cold = client.complete(
                a.base_url, prompt, max_tokens=MAX_TOKENS, cache_salt=f"cold-{case}"
            )
        client.settle()
        shared = client.complete(b.base_url, prompt, max_tokens=MAX_TOKENS)
        local = client.complete(b.base_url, prompt, max_tokens=MAX_TOKENS)
        cold_s.append(cold.ttft_s)
        lookaside_s.append(shared.ttft_s)
        local_s.append(local.ttft_s)
        hits.append(shared.cached_tokens)
        equal = (
            equal
            and cold.tokens == shared.tokens == local.tokens
            and len(cold.tokens) == MAX_TOKENS
        )
        if asked is not None and turn == rounds - 1:
            asked.append(Asked(prompt, cold.tokens, cold.ttft_s))
    return Row(
        prompt_tokens=prompt_tokens,
        shared_tokens=shared_tokens,
        cold_ttft_s=round(statistics.median(cold_s), 4),
        lookaside_ttft_s=round(statistics.median(lookaside_s), 4),
        local_ttft_s=round(statistics.median(local_s), 4),
        hit_tokens=min(hits),
        outputs_equal=equal,
    )


COLUMNS = command.Columns[Row](
    ("prompt", 7, lambda row: row.prompt_tokens),
    ("shared", 7, lambda row: row.shared_tokens),
    ("cold TTFT", 10, lambda row: command.seconds(row.cold_ttft_s)),
    ("Lookaside", 10, lambda row: command.seconds(row.lookaside_ttft_s)),
    ("vLLM cache", 10, lambda row: command.seconds(row.local_ttft_s)),
    ("faster", 8, lambda row: command.faster(row.cold_ttft_s, row.lookaside_ttft_s)),
    ("hit tokens", 10, lambda row: row.hit_tokens),
    equal=lambda row: row.outputs_equal,
)

RESTARTED = command.Columns[Restarted](
    ("prompt", 7, lambda row: row.prompt_tokens),
    ("cold TTFT", 10, lambda row: command.seconds(row.cold_ttft_s)),
    ("restarted", 10, lambda row: command.seconds(row.restarted_ttft_s)),
    ("faster", 8, lambda row: command.faster(row.cold_ttft_s, row.restarted_ttft_s)),
    ("hit tokens", 10, lambda row: row.hit_tokens),
    equal=lambda row: row.outputs_equal,
)

STORED = command.Columns[Stored](
    ("sidecar", 7, lambda row: row.sidecar),
    ("stored", 10, lambda row: f"{row.stored_bytes >> 20} MiB"),
    ("loaded", 10, lambda row: f"{row.loaded_bytes >> 20} MiB"),
    ("borrowed", 14, lambda row: f"{row.borrowed_tokens} tokens"),
    ("not stored, as the other holds it", 34, lambda row: f"{row.not_stored_tokens} tokens"),
)


def stored(name: str, sidecar: Sidecar) -> Stored:
    """What a sidecar did so far."""
    status = sidecar.status()
    counters, tokens = status["counters"], status["spaces"][0]["page_tokens"]
    return Stored(
        name,
        counters["stored_bytes"],
        counters["loaded_bytes"],
        status["peers"]["borrowed_pages"] * tokens,
        counters["elsewhere_pages"] * tokens,
    )


class Shown:
    """What is printed, and written as JSON."""

    def __init__(self) -> None:
        self.rows = COLUMNS.table()
        self.stored = STORED.table("\nwhat each sidecar did:")
        self.restarted = RESTARTED.table(
            "\nafter the sidecar and both servers were killed and started anew:"
        )

    def result(self) -> dict[str, object]:
        out: dict[str, object] = {"rows": [asdict(row) for row in self.rows.rows]}
        if self.stored.rows:
            out["sidecars"] = [asdict(row) for row in self.stored.rows]
        if self.restarted.rows:
            out["restarted"] = [asdict(row) for row in self.restarted.rows]
        return out


def again(server: Server, before: Asked) -> Restarted:
    """Asks for what was computed before the server was started."""
    answer = client.complete(server.base_url, before.prompt, max_tokens=MAX_TOKENS)
    return Restarted(
        prompt_tokens=len(before.prompt),
        cold_ttft_s=round(before.cold_ttft_s, 4),
        restarted_ttft_s=round(answer.ttft_s, 4),
        hit_tokens=answer.cached_tokens,
        outputs_equal=answer.tokens == before.tokens,
    )


def settings_of(arena: str | None, stand: Stand) -> dict[str, str]:
    """The sidecar's settings for an arena of dax, of a size, or as it comes."""
    if arena == "dax":
        return dax_arena(f"{stand.directory / 'dax0.0'}:{DEVICE}")
    return {} if arena is None else {"arena_limit": arena}


def restart(
    stand: Stand, sidecar: Sidecar, servers: tuple[Server, Server], asked: list[Asked], shown: Shown
) -> None:
    """Kills everything, starts a sidecar and a server, and asks again."""
    with step("writing what the arena holds to the device"):
        sidecar.wait_kept()
    with step("killing the sidecar and both servers"):
        for process in (sidecar, *servers):
            process.kill()
    with step("starting a sidecar and a server"):
        new = stand.sidecar(settings=settings_of("dax", stand))
        found = new.status()["arena"]["recovered"]["chunks"]
        server = stand.server("c", connector=connector_config(stand.endpoint()))
        server.wait_ready()
        eventually(lambda: len(new.status()["sessions"]) == 2, "the server's sessions")
    say(f"{found} chunks were found on the device")
    client.warm_up(server.base_url)
    for before in asked:
        shown.restarted.add(again(server, before))


def run(
    rounds: int, seed: int, arena: str | None, sidecars: int, keep_logs: Path | None, shown: Shown
) -> None:
    """Brings everything up, measures every case, takes everything down."""
    path = model.ensure()
    with Stand(path, keep_logs) as stand:
        with step("starting a sidecar" if sidecars == 1 else "starting two sidecars"):
            sidecar = stand.sidecar(settings=settings_of(arena, stand))
            other, endpoint = sidecar, stand.endpoint()
            if sidecars == 2:
                other, endpoint = (
                    stand.sidecar(name="other", settings=settings_of(arena, stand)),
                    stand.endpoint("other"),
                )
        with step("starting two vLLM servers (about a minute)"):
            a = stand.server("a", connector=connector_config(stand.endpoint()))
            b = stand.server("b", connector=connector_config(endpoint))
            a.wait_ready()
            b.wait_ready()
        client.warm_up(a.base_url, b.base_url)
        asked: list[Asked] = []
        for case in CASES:
            shown.rows.add(measure(a, b, *case, rounds, seed, asked))
        if sidecars == 2:
            for name, each in (("A", sidecar), ("B", other)):
                shown.stored.add(stored(name, each))
        if arena == "dax":
            restart(stand, sidecar, (a, b), asked, shown)


def main() -> int:
    parser = command.flags(
        "two_instances", "Two vLLM servers share every prefix.", "fresh prompts per case", 3
    )
    parser.add_argument(
        "--arena",
        help=(
            "what it is: a size, or dax: on a file in place of a DAX device; then all is killed "
            "and restarted"
        ),
    )
    parser.add_argument(
        "--sidecars",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: each server has its own (default 1)",
    )
    args = parser.parse_args()
    if args.sidecars == 2 and args.arena == "dax":
        parser.error("--arena dax is shown with one sidecar")
    shown = Shown()
    command.show(
        lambda: run(
            max(1, args.rounds), args.seed, args.arena, args.sidecars, args.keep_logs, shown
        ),
        args.json,
        shown.result,
    )
    found = all(row.hit_tokens > 0 for row in shown.restarted.rows)
    return (
        0
        if found and all(row.outputs_equal for row in [*shown.rows.rows, *shown.restarted.rows])
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
