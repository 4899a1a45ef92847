"""What each process of a vLLM server imports: imported once, by the process that they are forked
from (warm.py)."""

import ctypes
import gc
import importlib
import os
import signal

# Python's fork server starts this process without a way to say so: it is not to outlive who started
# it, nor to end with others of a group before the servers are ended.
os.setsid()
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG

MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.launchers.render.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.qwen3_next",
)
for name in MODULES:
    importlib.import_module(name)

# vLLM looks at a model's class in a process of its own, which would import all of this once more.
registry = importlib.import_module("vllm.model_executor.models.registry")
registry._run_in_subprocess = lambda look: look()  # pyright: ignore[reportAttributeAccessIssue]

# What is tested is what happens, not how fast: a sidecar that stands still for seconds, as all do
# on a busy machine, is not to be doubted for it, nor its answer to a load given up. How long that
# may take the settings of servers say.
PATIENCE_S = {
    "lookaside.scheduler.identification": {"_IDENTITY_PATIENCE_S": 60.0},
    "lookaside.heartbeat": {"_PONG_PATIENCE_S": 60.0},
    "lookaside.scheduler.epochs": {"_MOVE_PATIENCE_S": 60.0},
    "lookaside.connection": {"_CONNECT_PATIENCE_S": 60.0},
    "lookaside.worker.loads": {"_GRANT_PATIENCE_S": 60.0, "_IN_STEP_PATIENCE_S": 60.0},
    "lookaside.worker.role": {"_START_PATIENCE_S": 60.0},
}
for name, constants in PATIENCE_S.items():
    module = importlib.import_module(name)
    for constant, seconds in constants.items():
        assert hasattr(module, constant), constant
        setattr(module, constant, seconds)

# What all have in common stays common: a collection would write to every object of it.
gc.collect()
gc.freeze()
