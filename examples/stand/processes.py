"""Starts and ends sidecars and vLLM servers, so that nothing of them is left: not after Ctrl-C, not
after a failure.

Each process leads its own process group, which is ended as a whole (vLLM starts an engine and
workers of its own), and asks the kernel for SIGTERM should its parent be killed. Logs go to files
in the stand's directory; the end of one is part of every error.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from .model import REPO

_COMMAND = Path(sys.executable).with_name("lookaside")
INSTALLED = _COMMAND.exists()
"""Whether the wheel is installed for this Python. If so the stand uses it, and else the tree."""
BINARY = _COMMAND if INSTALLED else REPO / "bin" / "lookaside"
LOGS = REPO / ".cache" / "logs"  # of stands that an error has ended
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Child(Protocol):
    """What is used here of subprocess.Popen."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def terminate(self) -> None: ...


Starter = Callable[[list[str], Path, dict[str, str]], Child]
"""Starts a command whose output goes to the end of a log, with this environment, as the leader of a
process group."""


def start_process(command: list[str], log: Path, env: dict[str, str]) -> Child:
    """Starts a program, which gets SIGTERM should this process be killed."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=REPO,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def send_signal(process: Child, number: int) -> None:
    """Sends a signal to a child, if it lives; SIGSTOP and SIGKILL have had their effect when this
    returns.

    Until a stop has reached all its threads, a process may still answer.
    """
    process.send_signal(number)
    if number == signal.SIGSTOP:
        # Leaves the status where it is: a second stop would wait for another one, and an end is
        # Popen's to read.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    elif number == signal.SIGKILL:
        process.wait()


class Process:
    """A child process with its group and its log. Not for use from several threads at once."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        env: dict[str, str] | None = None,
        start: Starter | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.popen = (start or start_process)(command, log, {**os.environ, **(env or {})})
        self.pid = self.popen.pid

    def alive(self) -> bool:
        return self.popen.poll() is None

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone, not to its group; see send_signal."""
        send_signal(self.popen, number)

    def wait(self, timeout_s: float) -> int:
        """Waits for the process to end and returns its status. Raises subprocess.TimeoutExpired."""
        return self.popen.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL for the whole group. Idempotent."""
        self.signal(signal.SIGKILL)
        self.end(patience_s=0)

    def end(self, patience_s: float = 15.0) -> None:
        """Ends the whole group: SIGTERM, then SIGKILL for what is left after ``patience_s``.
        Idempotent.

        Python's resource trackers, which remove the semaphores and shared memory of processes that
        were killed, go last and by themselves.
        """
        left = _shared_memory(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
        if self.alive():
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(patience_s)
        left |= _shared_memory(self.pid)
        for pid, command in _members(self.pid):
            if "resource_tracker" not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.popen.wait()
        deadline = time.monotonic() + 10
        while _members(self.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in left:
            path.unlink(missing_ok=True)

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


def _members(group: int) -> list[tuple[int, str]]:
    """Process id and command line of each process of a group that has not ended."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(proc.name)
            if (
                os.getpgid(pid) == group
                and (proc / "stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
            ):
                found.append(
                    (
                        pid,
                        (proc / "cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace"),
                    )
                )
    return found


def _shared_memory(group: int) -> set[Path]:
    """What a group's processes map of /dev/shm: vLLM's workers leave theirs behind when they are
    killed."""
    found = set()
    for pid, _ in _members(group):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[-1]
                if path.startswith("/dev/shm/") and not path.endswith(" (deleted)"):
                    found.add(Path(path))
    return found


class Sidecar(Process):
    """A running `lookaside serve`."""

    def __init__(
        self, endpoint: Path, log: Path, settings: dict[str, str], wrap: Sequence[str] = ()
    ) -> None:
        """``wrap`` begins the command: what runs it on another host (hosts.py)."""
        if not BINARY.exists():
            raise RuntimeError(f"{BINARY.relative_to(REPO)} is not built: run `make build`")
        command = [*wrap, str(BINARY), "serve", f"--runtime-dir={endpoint}"]
        command += [f"--{name}={value}" for name, value in settings.items()]
        super().__init__(f"sidecar {endpoint.name}", command, log)
        self.endpoint = endpoint

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Waits until it takes sessions and has memory. Raises RuntimeError with the log's end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive():
                raise RuntimeError(
                    f"the {self.name} ended with {self.popen.returncode}:\n{self.tail()}"
                )
            if self.healthy():
                return
            time.sleep(0.02)
        raise RuntimeError(f"the {self.name} is not ready after {timeout_s:.0f} s:\n{self.tail()}")

    def healthy(self) -> bool:
        try:
            ready = self.get("/readyz")
            return ready.status_code == 200 and ready.text == "ok\n"
        except (OSError, httpx.HTTPError):
            return False

    def get(self, path: str) -> httpx.Response:
        """An answer of the admin HTTP server, by its Unix socket: any host may ask."""
        transport = httpx.HTTPTransport(uds=str(self.endpoint / "admin.sock"))
        with httpx.Client(transport=transport, timeout=30.0) as asking:
            return asking.get(f"http://localhost{path}")

    def status(self) -> dict[str, Any]:
        """What `lookaside status --json` says."""
        return self.get("/v1/status").json()

    def tiers(self) -> dict[str, dict[str, Any]]:
        """What `lookaside tiers --json` says, by name."""
        return {tier["name"]: tier for tier in self.get("/v1/tiers").json()["tiers"]}

    def wait_kept(self, timeout_s: float = 120.0) -> None:
        """Waits until all that is in the arena would outlive the sidecar. Raises TimeoutError."""

        def kept() -> bool:
            status = self.status()
            arena = status["arena"]
            return arena["waiting_chunks"] == 0 and arena["kept_chunks"] == status["slots"]["ready"]

        eventually(kept, "the arena to be kept", timeout_s)

    def wait_stored(self, tier: str, pages: int, timeout_s: float = 120.0) -> None:
        """Waits until a tier, which is written to behind vLLM's back, holds so many pages.

        Where that cannot be known, as of Redis, until nothing was written to it for two seconds.
        Raises TimeoutError.
        """
        seen, since = -1, time.monotonic()

        def stored() -> bool:
            nonlocal seen, since
            status = self.tiers()[tier]
            if status["pages"] >= 0:
                return status["pages"] >= pages
            if status["store_queue_chunks"] or status["stored_chunks"] != seen:
                seen, since = status["stored_chunks"], time.monotonic()
            return time.monotonic() - since > 2

        eventually(stored, f"{pages} pages in {tier}", timeout_s)


class Redis(Process):
    """A Redis server on loopback that keeps nothing on disk."""

    def __init__(self, name: str, log: Path) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise RuntimeError("no redis-server in PATH: run `scripts/setup.sh redis`")
        self.port = free_port()
        command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        super().__init__(name, command, log)

    def command(self, *words: str) -> bytes:
        """The first bytes of what it answers to a command. Raises OSError."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(
                b"".join(
                    [
                        b"*%d\r\n" % len(words),
                        *(b"$%d\r\n%s\r\n" % (len(w), w.encode()) for w in words),
                    ]
                )
            )
            return link.recv(65536)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until it answers. Raises RuntimeError with the log's end."""

        def answers() -> bool:
            if not self.alive():
                raise RuntimeError(
                    f"{self.name} ended with {self.popen.returncode}:\n{self.tail()}"
                )
            with contextlib.suppress(OSError):
                return self.command("PING") == b"+PONG\r\n"
            return False

        eventually(answers, f"{self.name} to answer", timeout_s)


class Server(Process):
    """A running vLLM OpenAI server."""

    def __init__(
        self,
        name: str,
        model: Path,
        log: Path,
        env: dict[str, str],
        arguments: list[str],
        start: Starter | None = None,
        wrap: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> None:
        self.port = free_port()
        self.base_url = f"http://{address}:{self.port}"
        command = [
            *wrap, sys.executable, "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model), "--served-model-name", "small",
            "--host", address, "--port", str(self.port), *arguments,
        ]  # fmt: skip
        super().__init__(name, command, log, env, start)

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Waits until it answers. Raises RuntimeError with the log's end."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive():
                raise RuntimeError(
                    f"vLLM {self.name} ended with {self.popen.returncode}:\n{self.tail(60)}"
                )
            with contextlib.suppress(httpx.HTTPError):
                if (
                    httpx.get(f"{self.base_url}/health", timeout=10.0, trust_env=False).status_code
                    == 200
                ):
                    return
            time.sleep(0.1)
        raise RuntimeError(
            f"vLLM {self.name} is not ready after {timeout_s:.0f} s:\n{self.tail(60)}"
        )


class Proxy(Process):
    """A running examples.prefill_decode.proxy in front of two servers."""

    def __init__(self, prefiller: Server, decoder: Server, log: Path) -> None:
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable, "-m", "examples.prefill_decode.proxy", "--port", str(self.port),
            "--prefiller", prefiller.base_url, "--decoder", decoder.base_url,
        ]  # fmt: skip
        super().__init__("proxy", command, log)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Waits until it reaches the decoder. Raises RuntimeError with the log's end,
        TimeoutError."""

        def answers() -> bool:
            if not self.alive():
                raise RuntimeError(f"the proxy ended with {self.popen.returncode}:\n{self.tail()}")
            with contextlib.suppress(httpx.HTTPError):
                return (
                    httpx.get(f"{self.base_url}/health", timeout=10.0, trust_env=False).status_code
                    == 200
                )
            return False

        eventually(answers, "the proxy to answer", timeout_s)


def dax_arena(devices: str, **more: str) -> dict[str, str]:
    """Settings of a sidecar whose arena lies on files, PATH:SIZE,..., that stand in for DAX
    devices."""
    settings = {"devices": devices, "allow_files": "true", **more}
    return {"arena_kind": "dax"} | {f"arena_dax_{name}": v for name, v in settings.items()}


def connector_config(endpoint: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The value of --kv-transfer-config for this endpoint. ``extra`` names settings without their
    `lookaside.`."""
    # The package's entry point tells vLLM where the connector is. There is none where the package
    # is not installed; see server_env.
    installed = importlib.metadata.entry_points(group="vllm.general_plugins", name="lookaside")
    return {
        "kv_connector": "LookasideConnector",
        **({} if installed else {"kv_connector_module_path": "lookaside.connector"}),
        "kv_role": role,
        "kv_connector_extra_config": {
            "lookaside.endpoint": endpoint,
            **{f"lookaside.{name}": value for name, value in extra.items()},
        },
    }


class Stand:
    """A directory, and the processes that were started in it. A context manager: leaving it ends
    and removes all."""

    def __init__(
        self, model: Path, keep_logs: Path | None = None, start_server: Starter | None = None
    ) -> None:
        self.model = model
        self._start_server = start_server
        self.directory = Path(tempfile.mkdtemp(prefix="la-"))
        self._keep_logs = keep_logs
        self._processes: list[Process] = []
        self._closed = False

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Ends and removes everything. The logs are kept where an error leaves the stand.

        Raises RuntimeError with the log's name in place of an httpx.HTTPError, which has none.
        """
        if isinstance(error, Exception) and self._keep_logs is None:
            self._keep_logs = LOGS
        self.close()
        if isinstance(error, httpx.HTTPError):
            raise RuntimeError(self._unanswered(error)) from error

    def _unanswered(self, error: httpx.HTTPError) -> str:
        """Which of the processes did not answer, how, and where its log is."""
        what = f"{type(error).__name__} {error}".strip()
        with contextlib.suppress(RuntimeError):  # an error that was made without a request
            for process in self._processes:
                if isinstance(process, Server | Proxy) and str(error.request.url).startswith(
                    process.base_url
                ):
                    kept = (self._keep_logs or LOGS) / process.log.name
                    return f"{process.name} has not answered a request ({what}); its log is {kept}"
        return f"a request was not answered ({what}); the logs are in {self._keep_logs}"

    def close(self) -> None:
        """Ends everything, servers before sidecars, and removes the directory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        servers = [p for p in self._processes if isinstance(p, Server)]
        enders = [threading.Thread(target=p.end) for p in servers]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        for process in self._processes:
            process.end()
        for lock in self.directory.glob("*/lock"):
            _end_autostarted(lock)
        if self._keep_logs is not None:
            self._keep_logs.mkdir(parents=True, exist_ok=True)
            for log in self.directory.glob("*.log"):
                shutil.copy(log, self._keep_logs / log.name)
        shutil.rmtree(self.directory, ignore_errors=True)

    def sidecar(
        self,
        rank: int = 0,
        name: str = "ep",
        ready: bool = True,
        settings: dict[str, str] | None = None,
        wrap: Sequence[str] = (),
    ) -> Sidecar:
        """Starts a sidecar. ``settings`` are `lookaside serve` flags, with _ for -; tiers in their
        order. ``wrap``: as of Sidecar."""
        endpoint = self.directory / f"{name}-{rank}"
        flags = {key.replace("_", "-"): value for key, value in (settings or {}).items()}
        if flags.get("arena-kind") != "dax":  # which is as large as its devices
            flags = {"arena-limit": "2G", **flags}
        sidecar = Sidecar(endpoint, self.directory / f"sidecar-{name}-{rank}.log", flags, wrap)
        self._processes.append(sidecar)
        if ready:
            sidecar.wait_ready()
        return sidecar

    def process(self, name: str, command: list[str]) -> Process:
        """Starts a program of the caller's."""
        process = Process(name, command, self.directory / f"{name}.log")
        self._processes.append(process)
        return process

    def redis(self, name: str = "redis") -> Redis:
        """Starts a Redis server, and waits for it."""
        server = Redis(name, self.directory / f"{name}.log")
        self._processes.append(server)
        server.wait_ready()
        return server

    def endpoint(self, name: str = "ep") -> str:
        """The endpoint template of the sidecars called ``name``."""
        return str(self.directory / f"{name}-{{rank}}")

    def server(
        self,
        name: str,
        *,
        connector: dict[str, Any] | None,
        arguments: list[str] | None = None,
        env: dict[str, str] | None = None,
        kv_gib: int = 1,
        max_model_len: int = 9216,
        model: Path | None = None,
        wrap: Sequence[str] = (),
        address: str = "127.0.0.1",
    ) -> Server:
        """Starts a vLLM server, with the connector where its configuration is given. Does not wait
        for it. ``wrap`` and ``address``: of another host."""
        settings = {
            **server_env(kv_gib),
            "TMPDIR": str(self.directory),
            "VLLM_RPC_BASE_PATH": str(self.directory),
        }
        settings.update(env or {})
        flags = [
            "--dtype", "float32", "--enforce-eager", "--enable-prefix-caching",
            "--enable-prompt-tokens-details",
            "--max-model-len", str(max_model_len), "--max-num-seqs", "16",
            "--prefix-caching-hash-algo", "sha256_cbor", *(arguments or []),
        ]  # fmt: skip
        if connector is not None:
            flags += ["--kv-transfer-config", json.dumps(connector)]
        server = Server(
            name,
            model or self.model,
            self.directory / f"vllm-{name}.log",
            settings,
            flags,
            self._start_server,
            wrap,
            address,
        )
        self._processes.append(server)
        return server

    def proxy(self, prefiller: Server, decoder: Server) -> Proxy:
        """Starts the proxy of examples/prefill_decode, and waits for it: the decoder must be up."""
        proxy = Proxy(prefiller, decoder, self.directory / "proxy.log")
        self._processes.append(proxy)
        proxy.wait_ready()
        return proxy


def _end_autostarted(lock: Path) -> None:
    """Ends the sidecar that a server started by itself: its endpoint's lock holds the pid."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int(lock.read_text().split()[0])
        if f"--runtime-dir={lock.parent}" not in Path(
            f"/proc/{pid}/cmdline"
        ).read_bytes().decode().replace("\0", " "):
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)


def server_env(kv_gib: int = 1) -> dict[str, str]:
    """The environment that vLLM's CPU build and this stand need."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        # vLLM's automatic binding keeps a core per process free, which two cores do not have. One
        # server is busy at a time here, so each may use all of them.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        # Where the wheel is not installed, the package is found in the tree.
        "PYTHONPATH": os.pathsep.join(
            filter(
                None,
                ["" if INSTALLED else str(REPO / "pyclient"), os.environ.get("PYTHONPATH", "")],
            )
        ),
    }


def stop_on_signals() -> None:
    """Makes SIGINT (also where it was inherited as ignored), SIGTERM and SIGHUP a
    KeyboardInterrupt: cleanup runs."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Waits until the condition holds. Raises TimeoutError that names ``what``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not so after {timeout_s:.0f} s")
        time.sleep(0.02)
