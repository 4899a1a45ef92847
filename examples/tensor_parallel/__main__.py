"""One vLLM server of two tensor-parallel ranks shares prefixes with its past self.

First with a model of four KV heads: each rank holds two of them, and has a sidecar of its own. Then
with a model of one KV head, which both ranks hold: they have one sidecar, which keeps one copy that
both load, stored half by each.

Printed for each prompt: the time to the first token when it is computed, and when vLLM's own cache
was emptied and both ranks load it; the hit tokens that vLLM reports; the bytes that the two ranks
hold of the prompt, and those that the sidecars keep of it; whether the greedy outputs are the same
tokens.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.stand import client, command, model
from examples.stand.processes import Server, Sidecar, Stand, connector_config, eventually
from examples.stand.progress import step

RANKS = 2
PROMPTS = (1000, 2000, 4000)  # tokens
MAX_TOKENS = 16
MIB = 1 << 20


@dataclass
class Row:
    """One line of the table, and of the JSON. Times in seconds."""

    model: str
    prompt_tokens: int
    cold_ttft_s: float
    lookaside_ttft_s: float
    hit_tokens: int
    held_mib: float
    stored_mib: float
    outputs_equal: bool


def stored_bytes(sidecars: list[Sidecar]) -> int:
    """What all the sidecars have stored since they started."""
    lines = [line.split() for each in sidecars for line in each.get("/metrics").text.splitlines()]
    return sum(int(float(line[1])) for line in lines if line[0] == "lookaside_stored_bytes_total")


def settled_bytes(sidecars: list[Sidecar], before: int) -> int:
    """stored_bytes, once there is more than before and it grows no more."""
    seen = -1

    def settled() -> bool:
        nonlocal seen
        client.settle()
        last, seen = seen, stored_bytes(sidecars)
        return seen == last > before

    eventually(settled, "the prompt to be stored", 30)
    return seen


def held_bytes(sidecars: list[Sidecar], tokens: int) -> int:
    """What the ranks hold of a prompt's whole pages: each rank a page of its own, or the same
    one."""
    spaces = [space for each in sidecars for space in each.status()["spaces"]]
    pages = tokens // spaces[0]["page_tokens"]
    return RANKS * pages * spaces[0]["page_bytes"]


def measure(
    architecture: str, server: Server, sidecars: list[Sidecar], seed: int, tokens: int
) -> Row:
    """A prompt computed, and loaded after vLLM has forgotten it."""
    prompt = model.prompt(tokens, seed * 1_000_003 + tokens)
    client.settle()
    before = stored_bytes(sidecars)
    cold = client.complete(server.base_url, prompt, max_tokens=MAX_TOKENS)
    stored = settled_bytes(sidecars, before) - before
    client.reset_prefix_cache(server.base_url)
    client.settle()
    loaded = client.complete(server.base_url, prompt, max_tokens=MAX_TOKENS)
    return Row(
        model=architecture,
        prompt_tokens=tokens,
        cold_ttft_s=round(cold.ttft_s, 4),
        lookaside_ttft_s=round(loaded.ttft_s, 4),
        hit_tokens=loaded.cached_tokens,
        held_mib=round(held_bytes(sidecars, tokens) / MIB, 1),
        stored_mib=round(stored / MIB, 1),
        outputs_equal=cold.tokens == loaded.tokens and len(cold.tokens) == MAX_TOKENS,
    )


COLUMNS = command.Columns[Row](
    ("model", 6, lambda row: row.model),
    ("prompt", 7, lambda row: row.prompt_tokens),
    ("cold TTFT", 10, lambda row: command.seconds(row.cold_ttft_s)),
    ("Lookaside", 10, lambda row: command.seconds(row.lookaside_ttft_s)),
    ("faster", 8, lambda row: command.faster(row.cold_ttft_s, row.lookaside_ttft_s)),
    ("hit tokens", 10, lambda row: row.hit_tokens),
    ("ranks hold", 11, lambda row: f"{row.held_mib:.1f} MiB"),
    ("stored", 10, lambda row: f"{row.stored_mib:.1f} MiB"),
    equal=lambda row: row.outputs_equal,
)


def run(seed: int, keep_logs: Path | None, shown: command.Table[Row]) -> None:
    """Brings one model after the other up, and takes it down again."""
    cores = sorted(os.sched_getaffinity(0))
    for architecture, own in (("llama", True), ("mqa", False)):
        with Stand(model.ensure(architecture), keep_logs) as stand:
            with step(
                f"{architecture}: starting {RANKS if own else 1} sidecar(s) for {RANKS} ranks"
            ):
                sidecars = [stand.sidecar(rank) for rank in range(RANKS if own else 1)]
            # With {rank} in it every rank has the sidecar of its number, without it all have the
            # same.
            endpoint = stand.endpoint() if own else stand.endpoint().format(rank=0)
            with step(f"{architecture}: starting vLLM (half a minute)"):
                server = stand.server(
                    architecture,
                    connector=connector_config(endpoint),
                    arguments=["--tensor-parallel-size", str(RANKS)],
                    env={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
                )
                server.wait_ready()
            client.warm_up(server.base_url)
            for tokens in PROMPTS:
                shown.add(measure(architecture, server, sidecars, seed, tokens))


def main() -> int:
    args = command.flags(
        "tensor_parallel", "Two tensor-parallel ranks, and what is kept of them."
    ).parse_args()
    shown = COLUMNS.table()
    command.show(
        lambda: run(args.seed, args.keep_logs, shown),
        args.json,
        lambda: {"rows": [asdict(row) for row in shown.rows]},
    )
    return 0 if all(row.hit_tokens > 0 and row.outputs_equal for row in shown.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
