"""Starts a sidecar on an endpoint where none answers.

The sidecar is its own process group and outlives the engine that started it, so
that the next engine finds what this one stored; it ends by itself when nobody
has been connected for a while. Two engines that start one at the same moment do
no harm: the sidecar locks its directory, and the second one exits.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

from lookaside.session import EndpointAbsent, check_directory

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

LOG_NAME = "sidecar.log"
IDLE_EXIT_S = 600
_FIRST_PAUSE_S = 2.0
_LAST_PAUSE_S = 60.0


class Autostart:
    """Keeps one endpoint served. Used by one thread, the session's."""

    def __init__(self, binary: str, endpoint: str, arguments: Sequence[str] = ()) -> None:
        """arguments come behind those that this module gives, and so override them."""
        self._binary = binary
        self._endpoint = endpoint
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def ensure(self) -> None:
        """Start a sidecar unless the last one is starting still, or was tried just now.

        Returns without waiting for it to answer. Raises OSError, EndpointError
        or RuntimeError when it cannot be started.
        """
        now = time.monotonic()
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            logger.warning(
                "the sidecar that was started on %s has exited with %d: %s",
                self._endpoint,
                code,
                self._last_words() or "it said nothing",
            )
        if now < self._next:
            return
        self._next = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        self._start()

    def _start(self) -> None:
        program = shutil.which(self._binary)
        if program is None:
            raise FileNotFoundError(
                f"lookaside.autostart: no program {self._binary!r} (set lookaside.binary to its path)"
            )
        make_directory(self._endpoint)
        log = os.open(
            os.path.join(self._endpoint, LOG_NAME),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        # vLLM binds a worker's threads to single cores, which a child would inherit.
        bound = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            self._process = subprocess.Popen(
                [
                    program,
                    "serve",
                    f"--runtime-dir={self._endpoint}",
                    f"--lifecycle-idle-exit={IDLE_EXIT_S}s",
                    *self._arguments,
                ],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.sched_setaffinity(0, bound)
            os.close(log)
        logger.info("started a sidecar on %s: pid %d", self._endpoint, self._process.pid)

    def _last_words(self) -> str:
        """The last line that the sidecar logged, for the message about its end."""
        try:
            with open(os.path.join(self._endpoint, LOG_NAME), "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""


def _environment() -> dict[str, str]:
    """This process's, without what vLLM put there for its own compute threads.

    On a CPU it preloads an OpenMP runtime that binds whatever process loads it to
    the worker's first core, and an allocator that the sidecar has no use for.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name != "LD_PRELOAD" and not name.startswith(("KMP_", "OMP_"))
    }


def make_directory(path: str) -> None:
    """Make an endpoint's directory and what is missing above it, all of mode 0700.

    Raises EndpointError for a directory that exists and cannot be trusted.
    """
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_directory(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    try:
        check_directory(path)
    except EndpointAbsent as gone:
        raise RuntimeError(f"{path} vanished while a sidecar was being started") from gone
