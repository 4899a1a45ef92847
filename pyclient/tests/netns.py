"""Two hosts, as far as networks go: network namespaces with one link between them.

Needs root. Nothing of it is in the namespace of the tests, and it ends with its processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from peer import until


def missing() -> str | None:
    """Return why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "SKIPPED: needs root, to make network namespaces"
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"SKIPPED: needs {program}"
    return None


class Host:
    """A namespace, held by a process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{self.pid}/ns/net") != own)

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def wrap(self) -> list[str]:
        """What begins a command that is to run there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, *command: str) -> None:
        subprocess.run([*self.wrap, *command], check=True, timeout=60)

    def link(self, up: bool) -> None:
        """Plug or unplug the cable."""
        self.run("ip", "link", "set", "la0", "up" if up else "down")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


def two_hosts() -> tuple[Host, Host]:
    """Two hosts that reach each other by their addresses."""
    one, other = Host("10.99.0.1"), Host("10.99.0.2")
    one.run(*f"ip link add la0 type veth peer name la0 netns {other.pid}".split())
    for host in (one, other):
        host.run(*f"ip addr add {host.address}/24 dev la0".split())
        host.run(*["ip", "link", "set", "lo", "up"])
        host.link(True)
    return one, other


def certificates(directory: Path, *addresses: str) -> Path:
    """Make an authority (ca.crt) and a certificate for each address (ADDRESS.crt and .key)."""

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60
        )

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=ca")
    for name in addresses:
        (directory / f"{name}.ext").write_text(f"subjectAltName=IP:{name}\n")
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=host")
        openssl(
            *f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial".split(),
            *f"-extfile {name}.ext -out {name}.crt".split(),
        )
    return directory
