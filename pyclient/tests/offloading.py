"""Drives vLLM's real Scheduler and OffloadingConnector, with real tiers; only the GPU is a model.

An ``Engine`` is vLLM's Scheduler with the connector, the spec, the tiering manager, the CPU tier
and its memory as vLLM makes them. Real offloading does not start on a CPU: what copies between GPU
and host memory is not there. So the engine here has an array for a GPU. It computes blocks, of
which the bytes are made of the whole prefix, and copies by the connector's own orders. Before
anything is computed it looks whether what the request has already is what it would have computed.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scheduling import BLOCK, make_config, make_kv_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

ids = itertools.count()


class Engine:
    """One vLLM. close it."""

    def __init__(
        self,
        model: Path,
        tiers: Sequence[dict[str, Any]],
        *,
        blocks: int = 200,
        cpu_blocks: int = 64,
        specs: Sequence[KVCacheSpec] | None = None,
        extra: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        kv_config = make_kv_config(blocks, specs)
        page = kv_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        self.config = make_config(
            model,
            connector={
                "kv_connector": "OffloadingConnector",
                "kv_connector_module_path": None,
                "engine_id": f"test-{os.getpid()}-{next(ids)}",
                "kv_connector_extra_config": {
                    "spec_name": "TieringOffloadingSpec",
                    "cpu_bytes_to_use": cpu_blocks * page,
                    "secondary_tiers": [dict(tier) for tier in tiers],
                    **(extra or {}),
                },
            },
            **config,
        )
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        block, hash_block = resolve_kv_cache_block_sizes(kv_config, self.config)
        self.hasher = get_request_block_hasher(hash_block, hash_fn)
        self.config.cache_config.num_gpu_blocks = blocks
        self.group_tokens = [g.kv_cache_spec.block_size for g in kv_config.kv_cache_groups]
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self.manager = self.connector.connector_scheduler.manager
        self.gpu = np.zeros((blocks, page), dtype=np.uint8)
        self.cpu = self.manager.primary_tier.get_kv_memoryview()
        self.requests: dict[str, Request] = {}
        self.loaded: dict[str, int] = {}  # blocks, by request
        self.computed: dict[str, int] = {}  # tokens, by request
        self.steps: dict[str, int] = {}
        self.done: set[str] = set()
        self.salt = b""
        """Of the weights: what is computed depends on it."""

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **kwargs: Any) -> str:
        request_id = f"r{next(ids)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self.hasher,
            **kwargs,
        )
        self.requests[request_id] = request
        self.loaded[request_id] = self.computed[request_id] = 0
        self.scheduler.add_request(request)
        return request_id

    def expected(self, request: Request, group: int, index: int) -> np.ndarray:
        """What a block of a request has once it is computed."""
        tokens = self.group_tokens[group]
        seen = hashlib.sha256(self.salt + b"%d" % group)
        seen.update(np.array(request.all_token_ids[: (index + 1) * tokens], dtype="<i8").tobytes())
        seed = int.from_bytes(seen.digest()[:8], "little")
        return np.frombuffer(np.random.default_rng(seed).bytes(self.gpu.shape[1]), dtype=np.uint8)

    def step(self) -> None:
        """One step of the engine: schedule, copy, compute, report."""
        scheduled = self.scheduler.schedule()
        meta: Any = scheduled.kv_connector_metadata
        assert isinstance(meta, OffloadingConnectorMetadata)
        report = OffloadingWorkerMetadata()
        received = set()
        for job_id, job in meta.load_jobs.items():
            src, dst = list(job.src_spec.chunk_ids), list(job.dst_spec.block_ids)  # type: ignore[attr-defined]
            assert len(src) == len(dst)
            for chunk, block in zip(src, dst, strict=True):
                self.gpu[block] = np.asarray(self.cpu)[chunk]
            self.loaded[job.req_id] += len(src)
            report.mark_completed(job_id)
            received.add(job.req_id)
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self._compute(request_id, count)
        for job_id, job in meta.store_jobs.items():
            src, dst = list(job.src_spec.block_ids), list(job.dst_spec.chunk_ids)  # type: ignore[attr-defined]
            assert len(src) == len(dst)
            for block, chunk in zip(src, dst, strict=True):
                np.asarray(self.cpu)[chunk] = self.gpu[block]
            report.mark_completed(job_id)
        self._update(scheduled, report, received)

    def _compute(self, request_id: str, count: int) -> None:
        request = self.requests[request_id]
        before = request.num_computed_tokens - count
        self.computed[request_id] += count
        self.steps.setdefault(request_id, 0)
        self.steps[request_id] += 1
        for group, table in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request_id)):
            tokens = self.group_tokens[group]
            for index, block in enumerate(table[: (before + count) // tokens]):
                if not block:
                    continue  # outside of the window
                expected = self.expected(request, group, index)
                if (index + 1) * tokens <= before:
                    assert (self.gpu[block] == expected).all(), (request_id, group, index)
                else:
                    self.gpu[block] = expected

    def _update(self, scheduled: Any, report: Any, received: set[str]) -> None:
        request_ids = list(scheduled.num_scheduled_tokens)
        output = KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=report if report.completed_jobs else None,
        )
        if not request_ids:
            result = ModelRunnerOutput.with_kv_conn_output_only(output)
        else:
            result = ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={r: i for i, r in enumerate(request_ids)},
                sampled_token_ids=[
                    [] if self.requests[r].is_prefill_chunk else [7] for r in request_ids
                ],
                kv_connector_output=output,
            )
        for outputs in self.scheduler.update_from_output(scheduled, result).values():
            self.done |= {o.request_id for o in outputs.outputs if o.finish_reason is not None}

    def run(self, limit: int = 100_000) -> None:
        """Step until there is nothing to do, not even for the connector."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.manager.has_pending_work():
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def ask(self, prompt: Sequence[int], **kwargs: Any) -> int:
        """Run one request; return how many of its blocks came from the tiers."""
        request_id = self.add(prompt, **kwargs)
        self.run()
        assert request_id in self.done
        return self.loaded[request_id]

    def forget(self, host: bool = True) -> None:
        """Forget what is on the GPU, and in vLLM's host memory."""
        assert self.scheduler.reset_prefix_cache()
        if host:
            self.manager.primary_tier.reset_cache()

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def close(self) -> None:
        self.cpu = memoryview(b"")
        self.connector.shutdown()


def prompt(seed: int, blocks: int, more: int = 1) -> list[int]:
    """Tokens of so many blocks, and some more."""
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK + more)]
