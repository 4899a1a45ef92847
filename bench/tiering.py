"""Bench `tiering`: the sidecar as a tier of vLLM's offloading, beside vLLM's own file system tier.

vLLM's TieringOffloadingSpec makes both tiers over one buffer of its CPU tier. Each is given the
jobs that vLLM gives: the blocks of a prompt to store, then to look up, then to load. A store or
load is timed from its submission until the tier reports it, in GB/s. Limits: the fs tier on a disk
(`--directory`; goal: above 1), and a plain memcpy of the same blocks by one thread.

A lookup is what vLLM's scheduler does: it asks for one block after the other, and again in later
steps as long as the answer is "retry". What counts is the time of its thread in these calls, in
microseconds, and how many steps it takes; beside the fs tier's. `found` is for a prompt that is
held, `missing` for one that is not. `submit` is the call that queues a store of all blocks.
"""

from __future__ import annotations

import ctypes
import hashlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench._report import Report, arguments

BINARY = Path(__file__).resolve().parents[1] / "bin" / "lookaside"
PATIENCE_S = 60.0
TOKENS = 16


def make_spec(block_bytes: int, blocks: int, tiers: Sequence[dict[str, Any]]) -> Any:
    """Return vLLM's spec with these tiers, over a buffer of so many blocks."""
    from vllm.v1.kv_offload import config
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    return TieringOffloadingSpec(
        config.OffloadingConfig(
            groups=(config.OffloadingGroupConfig(TOKENS, ("layer",), 0),),
            worker_kv_bytes_per_block=block_bytes,
            enable_kv_cache_events=False,
            extra_config={
                "cpu_bytes_to_use": blocks * block_bytes,
                "secondary_tiers": list(tiers),
            },
            engine_id=f"bench-{secrets.token_hex(4)}",
            model=config.OffloadingModelConfig("bench", "bfloat16"),
            cache=config.OffloadingCacheConfig(TOKENS, 1),
            parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        )
    )


class Prompt:
    """A request of vLLM's and the keys of its blocks."""

    def __init__(self, blocks: int) -> None:
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key

        self.context = ReqContext(req_id=secrets.token_hex(8))
        seed = secrets.token_bytes(16)
        self.keys = [
            make_offload_key(hashlib.sha256(seed + b"%d" % n).digest(), 0) for n in range(blocks)
        ]
        for index, key in enumerate(self.keys):
            self.context.set_offload_key_position(key, (index + 1) * TOKENS)


class Driver:
    """Gives a tier the jobs and the steps that vLLM gives it."""

    jobs = 0

    def __init__(self, tier: Any) -> None:
        self.tier = tier

    def end_step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.tier.on_schedule_end(ScheduleEndContext((), ()))

    def move(self, prompt: Prompt, rows: Sequence[int], load: bool) -> tuple[float, float]:
        """Run one job; return its seconds, and those of the call that submits it."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        Driver.jobs += 1
        job = TransferJob(
            job_id=Driver.jobs,
            keys=prompt.keys,
            chunk_ids=np.array(rows, dtype=np.int32),
            is_promotion=load,
            req_context=prompt.context,
        )
        begun = time.perf_counter()
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        submitted = time.perf_counter() - begun
        while not (results := list(self.tier.get_finished_jobs())):
            if time.perf_counter() - begun > PATIENCE_S:
                raise SystemExit("bench: a job did not end")
            time.sleep(0.0002)
        seconds = time.perf_counter() - begun
        if not all(result.success for result in results):
            raise SystemExit(f"bench: a job failed: {results}")
        return seconds, submitted

    def look_up(self, prompt: Prompt) -> tuple[bool, float, int]:
        """Ask for all blocks until each is known or one is missing.

        Returns whether all are held, the seconds of the scheduler's thread, and the steps.
        """
        from vllm.v1.kv_offload.base import LookupResult

        lookup, context = self.tier.lookup, prompt.context
        spent, steps = 0.0, 0
        while True:
            retry = missing = False
            begun = time.perf_counter()
            for key in prompt.keys:
                result = lookup(key, context)
                if result is LookupResult.RETRY:
                    retry = True
                elif result is LookupResult.MISS:
                    missing = True
                    break
            self.end_step()
            spent += time.perf_counter() - begun
            steps += 1
            if not retry:
                return not missing, spent, steps
            time.sleep(0.005)  # the rest of the engine's step


def copy_rate(view: np.ndarray, rows: Sequence[int]) -> float:
    """GB/s of a plain memcpy of rows into memory of its own, by one thread."""
    target = np.zeros((len(rows), view.shape[1]), dtype=np.uint8)
    begun = time.perf_counter()
    for at, row in enumerate(rows):
        ctypes.memmove(target[at].ctypes.data, view[row].ctypes.data, view.shape[1])
    return target.nbytes / (time.perf_counter() - begun) / 1e9


def measure(report: Report, tiers: dict[str, Driver], view: np.ndarray, args: Any) -> None:
    size = args.blocks * view.shape[1]
    rows, other = range(args.blocks), range(args.blocks, 2 * args.blocks)
    store: dict[str, list[float]] = {name: [] for name in tiers}
    load: dict[str, list[float]] = {name: [] for name in tiers}
    copies: list[float] = []
    for _ in range(args.rounds):
        view[: args.blocks] = np.random.default_rng().integers(0, 256, dtype=np.uint8, size=(
            args.blocks, view.shape[1]))  # fmt: skip
        copies.append(copy_rate(view, rows))
        for name, driver in tiers.items():
            prompt = Prompt(args.blocks)
            store[name].append(size / driver.move(prompt, rows, load=False)[0] / 1e9)
            if not driver.look_up(prompt)[0]:
                raise SystemExit(f"bench: {name} does not hold what it has stored")
            view[args.blocks : 2 * args.blocks] = 0
            load[name].append(size / driver.move(prompt, other, load=True)[0] / 1e9)
            if not (view[: args.blocks] == view[args.blocks : 2 * args.blocks]).all():
                raise SystemExit(f"bench: {name} returned other bytes")
            driver.tier.on_request_finished(prompt.context)
    for what, rates in (("store", store), ("load", load)):
        report.rounds(f"{what}.of_fs", "GB/s", rates["sidecar"], rates["fs"])
        report.rounds(f"{what}.of_memcpy", "GB/s", rates["sidecar"], copies)


def measure_lookups(report: Report, tiers: dict[str, Driver], args: Any) -> None:
    spent: dict[tuple[str, str], list[float]] = {}
    steps: dict[tuple[str, str], list[float]] = {}
    submits: dict[str, list[float]] = {name: [] for name in tiers}
    for _ in range(args.rounds):
        for name, driver in tiers.items():
            held = Prompt(args.lookup)
            _, submitted = driver.move(held, [0] * args.lookup, load=False)
            submits[name].append(submitted * 1e6)
            driver.tier.on_request_finished(held.context)
            for what in ("found", "missing"):
                times, counts = [], []
                for _ in range(args.calls):
                    prompt = Prompt(args.lookup) if what == "missing" else held
                    there, seconds, count = driver.look_up(prompt)
                    if there != (what == "found"):
                        raise SystemExit(f"bench: {name} says {there} for {what} blocks")
                    times.append(seconds * 1e6)
                    counts.append(count)
                    driver.tier.on_request_finished(prompt.context)
                spent.setdefault((what, name), []).append(statistics.median(times))
                steps.setdefault((what, name), []).append(statistics.mean(counts))
    for what in ("found", "missing"):
        name = f"lookup_{args.lookup}.{what}"
        report.rounds(f"{name}.thread", "us", spent[what, "sidecar"], spent[what, "fs"])
        report.rounds(f"{name}.steps", "steps", steps[what, "sidecar"], steps[what, "fs"])
    report.rounds(f"submit_{args.lookup}", "us", submits["sidecar"], submits["fs"])


def run(report: Report, args: Any, endpoint: str, root: str) -> None:
    ours = {
        "type": "LookasideTier",
        "module_path": "lookaside.vllm_tier",
        "endpoint": endpoint,
        "identity": "bench",
    }
    fs = {"type": "fs", "root_dir": root}
    for block_bytes, blocks, part in (
        (args.block_bytes, 2 * args.blocks, measure),
        (4096, 16, measure_lookups),
    ):
        spec = make_spec(block_bytes, blocks, [ours, fs])
        manager = spec.get_manager()
        try:
            sidecar, files = manager.secondary_tiers
            deadline = time.monotonic() + PATIENCE_S
            while not sidecar._store.connected:
                if time.monotonic() > deadline:
                    raise SystemExit("bench: the tier did not connect")
                time.sleep(0.01)
            tiers = {"sidecar": Driver(sidecar), "fs": Driver(files)}
            if part is measure:
                view = np.asarray(manager.primary_tier.get_kv_memoryview()).view(np.uint8)
                measure(report, tiers, view, args)
                del view
            else:
                measure_lookups(report, tiers, args)
        finally:
            manager.shutdown()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds (7)")
    parser.add_argument("--blocks", type=int, default=64, help="blocks of a store or load (64)")
    parser.add_argument("--block-bytes", type=int, default=2 << 20, help="bytes of each (2 MiB)")
    parser.add_argument("--lookup", type=int, default=256, help="blocks of a lookup (256)")
    parser.add_argument("--calls", type=int, default=20, help="lookups of a round (20)")
    parser.add_argument("--directory", help="where the fs tier keeps its files; default: here")
    args = parser.parse_args()
    report = Report("tiering")
    # Nothing is evicted, and a lookup may lease all that it finds.
    memory = (args.rounds + 2) * args.blocks * args.block_bytes + (256 << 20)
    with (
        tempfile.TemporaryDirectory(prefix="lookaside-tiering-") as endpoint,
        tempfile.TemporaryDirectory(prefix="tiering-", dir=args.directory or ".") as root,
    ):
        process = subprocess.Popen(
            [str(BINARY), "serve", f"--runtime-dir={endpoint}", f"--arena-limit={memory}",
             f"--arena-initial={memory}", "--log-level=error"],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            run(report, args, endpoint, root)
        finally:
            process.terminate()
            process.wait(15)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
