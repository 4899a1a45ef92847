"""A second host, as far as networks go: a network namespace with one link to this process' own.

Needs root. Both namespaces end with their processes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from .processes import Process, eventually

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class OtherHost:
    """The second host. The calling thread becomes the first one, with all that it starts."""

    own_address = "10.99.0.1"
    address = "10.99.0.2"

    def __init__(self, directory: Path) -> None:
        """Must be called by the main thread. Raises RuntimeError, with what to do."""
        if os.geteuid() != 0:
            raise RuntimeError("two hosts are two network namespaces, which needs root: use sudo")
        for name in ("ip", "nsenter", "unshare"):
            if shutil.which(name) is None:
                raise RuntimeError(f"{name} is not installed: apt-get install iproute2 util-linux")
        if _libc.unshare(_CLONE_NEWNET) != 0:
            error = os.strerror(ctypes.get_errno())
            raise RuntimeError(f"no network namespace can be made here: {error}")
        own = os.readlink("/proc/thread-self/ns/net")
        self._holder = Process(
            "other host", ["unshare", "--net", "sleep", "infinity"], directory / "host.log"
        )
        pid = self._holder.pid
        self.wrap = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        """What begins a command that is to run there."""
        try:
            eventually(lambda: os.readlink(f"/proc/{pid}/ns/net") != own, "a network namespace", 30)
            self._ip("link", "add", "la0", "type", "veth", "peer", "name", "la0", "netns", str(pid))
            for wrap, address in (([], self.own_address), (self.wrap, self.address)):
                self._ip("addr", "add", f"{address}/24", "dev", "la0", wrap=wrap)
                for device in ("lo", "la0"):
                    self._ip("link", "set", device, "up", wrap=wrap)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it. Nothing of its network is left."""
        self._holder.kill()

    @staticmethod
    def _ip(*words: str, wrap: list[str] | None = None) -> None:
        done = subprocess.run([*(wrap or []), "ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
