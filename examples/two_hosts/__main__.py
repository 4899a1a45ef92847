"""Two hosts, each with a vLLM server and a sidecar, share every prefix through Mooncake Store.

The hosts are network namespaces with a cable between them, so this needs root. Mooncake's master
runs on the first; the program below each sidecar (lookaside.tiers.mooncake) gives the store a part
of its host's memory. Host A computes prompts; host B, which has never seen them, loads them over
the cable. Printed for each length: the time to the first token when all is computed on A, when B
loads it from Mooncake, and when B has it in vLLM's own cache; the hit tokens that vLLM reports;
whether the greedy outputs of the three are the same tokens.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from importlib import util
from pathlib import Path

from examples.stand import client, command, model
from examples.stand.hosts import OtherHost
from examples.stand.processes import Server, Sidecar, Stand, connector_config, eventually
from examples.stand.progress import step

LENGTHS = (1000, 2000, 4000)
MAX_TOKENS = 16
PORT = 50051
SEGMENT = "1G"
_MIB = 1 << 20


@dataclass
class Row:
    """One line of the table, and of the JSON. Times are medians over the rounds, in seconds."""

    prompt_tokens: int
    computed_ttft_s: float
    mooncake_ttft_s: float
    local_ttft_s: float
    hit_tokens: int
    outputs_equal: bool


COLUMNS = command.Columns[Row](
    ("prompt", 7, lambda row: row.prompt_tokens),
    ("computed", 10, lambda row: command.seconds(row.computed_ttft_s)),
    ("Mooncake", 10, lambda row: command.seconds(row.mooncake_ttft_s)),
    ("vLLM cache", 10, lambda row: command.seconds(row.local_ttft_s)),
    ("faster", 8, lambda row: command.faster(row.computed_ttft_s, row.mooncake_ttft_s)),
    ("hit tokens", 10, lambda row: row.hit_tokens),
    equal=lambda row: row.outputs_equal,
)


@dataclass
class Result:
    """What a run measured. ``loaded_bytes`` came to host B from Mooncake."""

    table: command.Table[Row]
    loaded_bytes: int = 0

    def json(self) -> dict[str, object]:
        return {
            "loaded_bytes": self.loaded_bytes,
            "rows": [asdict(row) for row in self.table.rows],
        }


def master_binary() -> Path:
    """Where mooncake_master is. Raises RuntimeError, with what to install."""
    spec = util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "Mooncake is not installed: pip install 'lookaside-kv[mooncake]', and on Debian "
            "apt-get install libibverbs1"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "mooncake_master"


def tier(sidecar: Sidecar) -> dict[str, object]:
    """The one tier of a sidecar."""
    (found,) = sidecar.tiers().values()
    return found


def measure(a: Server, b: Server, sidecar: Sidecar, length: int, rounds: int, seed: int) -> Row:
    """One length: A computes a prompt, Mooncake has it, B is asked twice."""
    times: dict[str, list[float]] = {"computed": [], "mooncake": [], "local": []}
    hits, equal = [], True
    (name,) = sidecar.tiers()
    for turn in range(rounds):
        prompt = model.prompt(length, seed * 1_000_003 + length * 101 + turn)
        client.settle()
        answers = {"computed": client.complete(a.base_url, prompt, max_tokens=MAX_TOKENS)}
        sidecar.wait_stored(name, 1)  # a program's pages are not known: until it is idle
        client.settle()
        for source in ("mooncake", "local"):
            answers[source] = client.complete(b.base_url, prompt, max_tokens=MAX_TOKENS)
        for source, answer in answers.items():
            times[source].append(answer.ttft_s)
        hits.append(answers["mooncake"].cached_tokens)
        outputs = {answer.tokens for answer in answers.values()}
        equal = equal and len(outputs) == 1 and len(answers["local"].tokens) == MAX_TOKENS
    medians = {source: round(statistics.median(each), 4) for source, each in times.items()}
    return Row(
        prompt_tokens=length,
        computed_ttft_s=medians["computed"],
        mooncake_ttft_s=medians["mooncake"],
        local_ttft_s=medians["local"],
        hit_tokens=min(hits),
        outputs_equal=equal,
    )


def run(result: Result, rounds: int, seed: int, keep_logs: Path | None) -> None:
    """Brings everything up, measures, takes everything down."""
    binary = master_binary()
    path = model.ensure()
    with Stand(path, keep_logs) as stand:
        other = OtherHost(stand.directory)
        try:
            with step("starting Mooncake's master, and a sidecar on each host"):
                stand.process(
                    "master",
                    [str(binary), f"--rpc_port={PORT}", f"--rpc_address={other.own_address}",
                     f"--metrics_host={other.own_address}"],
                )  # fmt: skip
                program = shlex.join(
                    [sys.executable, "-m", "lookaside.tiers.mooncake",
                     "--master", f"{other.own_address}:{PORT}", "--segment", SEGMENT]
                )  # fmt: skip
                # They are on one kernel, and would lend each other what is in their arenas.
                settings = {"peers_enabled": "false", "program": program}
                here = stand.sidecar(name="a", settings=settings)
                there = stand.sidecar(name="b", settings=settings, wrap=other.wrap)
                for each in (here, there):
                    eventually(
                        lambda each=each: not tier(each).get("down"), "Mooncake to be used", 60
                    )
            with step("starting a vLLM server on each host (half a minute)"):
                a = stand.server("a", connector=connector_config(stand.endpoint("a")))
                b = stand.server(
                    "b",
                    connector=connector_config(stand.endpoint("b")),
                    wrap=other.wrap,
                    address=other.address,
                )
                a.wait_ready()
                b.wait_ready()
            for server in (a, b):
                client.warm_up(server.base_url)
            for length in LENGTHS:
                result.table.add(measure(a, b, here, length, rounds, seed))
            result.loaded_bytes = int(str(tier(there)["loaded_bytes"]))
            print(f"{result.loaded_bytes / _MIB:.0f} MiB came to host B from Mooncake")
        finally:
            stand.close()
            other.close()


def main() -> int:
    parser = command.flags(
        "two_hosts",
        "Two hosts that share every prefix through Mooncake Store. Needs root.",
        "prompts of each length",
        3,
    )
    args = parser.parse_args()
    result = Result(COLUMNS.table("times to the first token, medians"))
    command.show(
        lambda: run(result, max(1, args.rounds), args.seed, args.keep_logs), args.json, result.json
    )
    rows = result.table.rows
    return 0 if all(row.outputs_equal and row.hit_tokens for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
