"""A prefiller and a decoder meet in one sidecar, behind a small proxy.

The prefiller is a kv_producer, the decoder a kv_consumer; each has half of the cores. Prompts of
several lengths go to the decoder alone, which computes them, and through the proxy: the prefiller
computes and stores, the decoder loads and goes on. Printed for each: the time to the first token in
both ways, and of the second how much the prefiller took and how much was left to the decoder, which
is all that its other requests feel of the prompt; the hit tokens that vLLM reports; whether the
greedy outputs are the same tokens.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.stand import client, command, model
from examples.stand.processes import Proxy, Server, Stand, connector_config
from examples.stand.progress import step

LENGTHS = (100, 500, 1000, 2000, 4000)
MAX_TOKENS = 16


@dataclass
class Row:
    """One line of the table, and of the JSON. Times are medians over the rounds, in seconds."""

    prompt_tokens: int
    alone_ttft_s: float
    proxy_ttft_s: float
    prefill_s: float
    decoder_ttft_s: float
    hit_tokens: int
    outputs_equal: bool


def measure(proxy: Proxy, decoder: Server, prompt_tokens: int, rounds: int, seed: int) -> Row:
    """One length, over several rounds of fresh prompts."""
    alone_s, proxy_s, prefill_s, decoder_s, hits = [], [], [], [], []
    equal = True
    for turn in range(rounds):
        case = seed * 1_000_003 + prompt_tokens * 101 + turn
        prompt = model.prompt(prompt_tokens, case)
        client.settle()
        # A salt of its own shares nothing with anyone: the decoder computes it whole.
        alone = client.complete(
            decoder.base_url, prompt, max_tokens=MAX_TOKENS, cache_salt=f"alone-{case}"
        )
        client.settle()
        apart = client.complete(proxy.base_url, prompt, max_tokens=MAX_TOKENS)
        alone_s.append(alone.ttft_s)
        proxy_s.append(apart.ttft_s)
        prefill_s.append(apart.prefill_s)
        decoder_s.append(apart.ttft_s - apart.prefill_s)
        hits.append(apart.cached_tokens)
        equal = equal and alone.tokens == apart.tokens and len(apart.tokens) == MAX_TOKENS
    return Row(
        prompt_tokens=prompt_tokens,
        alone_ttft_s=round(statistics.median(alone_s), 4),
        proxy_ttft_s=round(statistics.median(proxy_s), 4),
        prefill_s=round(statistics.median(prefill_s), 4),
        decoder_ttft_s=round(statistics.median(decoder_s), 4),
        hit_tokens=min(hits),
        outputs_equal=equal,
    )


COLUMNS = command.Columns[Row](
    ("prompt", 7, lambda row: row.prompt_tokens),
    ("alone TTFT", 11, lambda row: command.seconds(row.alone_ttft_s)),
    ("proxy TTFT", 11, lambda row: command.seconds(row.proxy_ttft_s)),
    ("= prefill", 10, lambda row: command.seconds(row.prefill_s)),
    ("+ decoder", 10, lambda row: command.seconds(row.decoder_ttft_s)),
    ("hit tokens", 11, lambda row: row.hit_tokens),
    equal=lambda row: row.outputs_equal,
)


def on_cores(half: int) -> dict[str, str]:
    """The environment of a server that has the first (0) or second (1) half of the cores for
    itself."""
    cores = sorted(os.sched_getaffinity(0))
    middle = (len(cores) + 1) // 2
    mine = (cores[:middle], cores[middle:])[half] or cores
    return {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, mine))}


def run(rounds: int, seed: int, keep_logs: Path | None, shown: command.Table[Row]) -> None:
    """Brings everything up, measures every length, takes everything down."""
    path = model.ensure()
    with Stand(path, keep_logs) as stand:
        with step("starting a sidecar"):
            stand.sidecar()
        with step("starting a prefiller, a decoder and a proxy (about a minute)"):
            prefiller, decoder = (
                stand.server(
                    name, connector=connector_config(stand.endpoint(), role), env=on_cores(half)
                )
                for half, (name, role) in enumerate(
                    (("prefiller", "kv_producer"), ("decoder", "kv_consumer"))
                )
            )
            prefiller.wait_ready()
            decoder.wait_ready()
            proxy = stand.proxy(prefiller, decoder)
        client.warm_up(prefiller.base_url, decoder.base_url, proxy.base_url)
        for prompt_tokens in LENGTHS:
            shown.add(measure(proxy, decoder, prompt_tokens, rounds, seed))


def main() -> int:
    args = command.flags(
        "prefill_decode", "Prefill and decode on two vLLM servers.", "fresh prompts per length", 3
    ).parse_args()
    shown = COLUMNS.table()
    command.show(
        lambda: run(max(1, args.rounds), args.seed, args.keep_logs, shown),
        args.json,
        lambda: {"rows": [asdict(row) for row in shown.rows]},
    )
    return 0 if all(row.outputs_equal for row in shown.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
