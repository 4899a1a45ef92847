"""Starts vLLM servers out of a process that has imported vLLM: that takes each of a server's three
processes 8 s.

Python's fork server is that process. A server forked from it runs what `python -m MODULE` would
run, and where vLLM spawns its engine and its workers, these are forked from it too. Otherwise they
are as if spawned: their environment, process group and log are their starter's, what they are given
is pickled, and at their end runs what runs at an interpreter's end. Only what reads the environment
as it is imported sees that of the tests; OpenMP's settings are made up for here. In
test_3_shapes.py there is a server that starts as a user's does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_get_context = multiprocessing.get_context


class _Process(ForkServerProcess):
    """A process whose environment, directory, group and log are those of its starter, or as
    said."""

    said: tuple[dict[str, str], int, str] | None = None

    def start(self) -> None:
        self.directory = os.getcwd()
        self.said = self.said or (dict(os.environ), os.getpgrp(), os.readlink("/proc/self/fd/1"))
        super().start()

    def run(self) -> None:
        assert self.said is not None
        environment, group, log = self.said
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        os.setpgid(0, group)
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        with open(log, "ab") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        # It is there, and is not started anew by each who needs it.
        forkserver._forkserver.ensure_running = lambda: None
        multiprocessing.get_context = lambda method=None: (
            _Context() if method == "spawn" else _get_context(method)
        )
        _bind_threads()
        try:
            super().run()
        finally:
            atexit._run_exitfuncs()


class _Context(ForkServerContext):
    Process = _Process


def _bind_threads() -> None:
    """Binds a worker's threads to cores, as OpenMP does by what vLLM sets in the environment before
    it is loaded."""
    cores = [int(core) for core in os.environ.get("GOMP_CPU_AFFINITY", "").split()]
    if cores:
        import torch

        torch.set_num_threads(len(cores))
        before = set(os.listdir("/proc/self/task"))
        torch.zeros(1 << 20).add_(1)  # starts all but the first
        threads = [str(os.getpid()), *sorted(set(os.listdir("/proc/self/task")) - before, key=int)]
        for thread, core in zip(threads, cores, strict=True):
            os.sched_setaffinity(int(thread), {core})


def _run(module: str, arguments: list[str]) -> None:
    """What `python -m module arguments` does."""
    # The semaphores and the shared memory of a server that is killed are to go when it does, not
    # when the tests end.
    resource_tracker._resource_tracker.__init__()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class _Forked:
    """Such a process, used as a subprocess.Popen is."""

    def __init__(self, process: _Process) -> None:
        self.process = process
        assert process.pid is not None
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def start(command: list[str], log: Path, environment: dict[str, str]) -> _Forked:
    """Starts [python, "-m", module, argument, ...] as the leader of a process group, its output in
    the log."""
    _, flag, module, *arguments = command
    assert flag == "-m", command
    process = _Process(name="MainProcess", target=_run, args=(module, arguments))
    process.said = environment, 0, str(log)
    process.start()
    child = _Forked(process)
    with contextlib.suppress(ProcessLookupError):
        while os.getpgid(child.pid) != child.pid:
            time.sleep(0.001)
    return child


@contextlib.contextmanager
def vllm_imported() -> Iterator[None]:
    """While this lasts, `start` works."""
    before = dict(os.environ)
    os.environ.update(
        OPENBLAS_NUM_THREADS="1", PYTHONPATH=str(Path(__file__).parents[1]), HF_HUB_OFFLINE="1"
    )
    forkserver.set_forkserver_preload([f"{__package__}.imported"])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # pyright: ignore[reportAttributeAccessIssue]
