"""Starts a sidecar on an endpoint where none answers.

vLLM ends by killing all descendants of its processes, even those that lead a session of their own.
A sidecar shall outlive vLLM, so that the next engine finds what this one stored. So ``lookaside
serve --detach`` starts it: a process that waits until the sidecar serves, then ends and leaves the
sidecar to the init process. The sidecar ends by itself when nobody has been connected for a while.

Two workers may start a sidecar at the same moment: the sidecar locks its directory, and the second
one ends.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Sequence

from lookaside.ratelog import RateLimitedLog

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

IDLE_EXIT_S = 600
_FIRST_PAUSE_S = 2.0
_LAST_PAUSE_S = 60.0
_TOLD_EVERY_S = 600.0
# Exit codes of `lookaside serve`; docs/operations.md lists them.
_OWNED = 75
_SETTINGS = 78
# A sidecar that is ending keeps its directory locked while it writes to its tiers.
_OWNED_PATIENCE_S = 60.0
_MAX_WORDS = 2000  # bytes
# Errors that keep a process from being started now, but perhaps not later.
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY}


class Autostart:
    """Keeps one endpoint served."""

    def __init__(self, binary: str, endpoint: str, arguments: Sequence[str] = ()) -> None:
        """arguments follow those that this module gives, and so override them."""
        self._binary = binary
        self._endpoint = endpoint
        self._arguments = tuple(arguments)
        self._log = RateLimitedLog(logger, _TOLD_EVERY_S)
        # Used by ensure, on its caller's thread.
        self._next = 0.0
        self._pause_s = _FIRST_PAUSE_S
        # Written by the thread that starts a sidecar; there is one such thread at a time.
        self._starting: threading.Thread | None = None
        self._owned_since: float | None = None
        self._given_up = False
        self.fault = ""
        """Why the last start failed; empty while none has, and after one that succeeded."""

    def ensure(self) -> None:
        """Begin to start a sidecar, unless one is being started, or was tried just now.

        After a start that failed for a lasting reason it does nothing. It does not wait, and logs
        what fails. Call it from one thread.
        """
        now = time.monotonic()
        if (
            self._given_up
            or now < self._next
            or (self._starting is not None and self._starting.is_alive())
        ):
            return
        if now > self._next + _LAST_PAUSE_S:  # the last one has served meanwhile
            self._pause_s = _FIRST_PAUSE_S
        self._next = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
        self._starting = threading.Thread(
            target=self._start, name="lookaside-autostart", daemon=True
        )
        self._starting.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the start that is under way to end.

        Returns whether a sidecar may answer now or later.
        """
        if self._starting is not None:
            self._starting.join(timeout_s)
        return not self._given_up

    def _start(self) -> None:
        try:
            status, said = self._run()
        except OSError as error:
            if error.errno in _PASSING:
                self._failed(str(error))
            else:
                self._give_up(
                    f"{self._binary}: {error.strerror}; set lookaside.binary to the program's path"
                )
            return
        if status == 0 and said.startswith("lookaside: serving"):
            self._owned_since = None
            self.fault = ""
            logger.info("lookaside: started a sidecar: %s", said.removeprefix("lookaside: "))
            return
        if not said.startswith("lookaside: "):
            words = f"said {said!r}" if said else "said nothing"
            self._give_up(
                f"{self._binary} ended with {status} and {words}; set lookaside.binary to the "
                f"sidecar's program"
            )
            return
        reason = said.removeprefix("lookaside: ")
        if status == _SETTINGS:
            self._give_up(reason)
        elif status == _OWNED:
            # Another worker's sidecar, or one that is ending, has the directory.
            now = time.monotonic()
            self._owned_since = self._owned_since or now
            if now - self._owned_since > _OWNED_PATIENCE_S:
                self._log.warning(
                    "owned",
                    "lookaside: no sidecar answers on %s, and none can be started: %s",
                    self._endpoint,
                    reason,
                )
        else:
            self._failed(reason)

    def _run(self) -> tuple[int, str]:
        """Return how `lookaside serve --detach` ended, and what it said, as one line."""
        # Beside this interpreter too, where pip puts programs: vLLM may run without that in PATH.
        program = shutil.which(self._binary) or shutil.which(
            self._binary, path=sysconfig.get_path("scripts")
        )
        if program is None:
            raise FileNotFoundError(errno.ENOENT, "no such program")
        # vLLM binds a worker's threads to single cores, which a child inherits from this one.
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        with subprocess.Popen(
            [
                os.path.abspath(program),
                "serve",
                "--detach",
                f"--runtime-dir={self._endpoint}",
                f"--lifecycle-idle-exit={IDLE_EXIT_S}s",
                *self._arguments,
            ],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/",
        ) as process:
            assert process.stdout is not None
            said = process.stdout.read(_MAX_WORDS)
            if len(said) == _MAX_WORDS:  # no sidecar's: it may never end
                process.kill()
        return process.returncode, " ".join(said.decode(errors="replace").split())

    def _failed(self, reason: str) -> None:
        self.fault = reason
        self._log.warning(
            "failed",
            "lookaside: starting a sidecar on %s failed: %s. vLLM serves without it, and tries "
            "again",
            self._endpoint,
            reason,
        )

    def _give_up(self, reason: str) -> None:
        self._given_up = True
        self.fault = reason
        logger.error(
            "lookaside: no sidecar can be started on %s: %s. vLLM serves without it, and does not "
            "try again",
            self._endpoint,
            reason,
        )


def _environment() -> dict[str, str]:
    """Return this process's environment without what vLLM put there for its own compute threads.

    On a CPU vLLM preloads an OpenMP runtime that binds any process that loads it to the worker's
    first core, and an allocator that the sidecar has no use for.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name != "LD_PRELOAD" and not name.startswith(("KMP_", "OMP_"))
    }
