"""lookaside.tiers.mooncake with the real Mooncake: its master and its store, over TCP.

The hosts of the last tests are network namespaces (netns.py).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns
import pytest
from lookaside.tier import Status
from lookaside.tiers.mooncake import Settings
from peer import until
from program_suite import REGION, Contract, fill, laid

from bench._program import HEADER, Program

MIB = 1 << 20


def missing() -> str:
    """Why Mooncake cannot run here; "" if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is not installed: see requirements-test.lock"
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=60
    )
    return done.stderr.strip().rpartition("\n")[2]


_missing = missing()
real = pytest.mark.skipif(bool(_missing), reason=_missing or "-")
hosts = pytest.mark.skipif(netns.missing() is not None, reason=netns.missing() or "-")


class Master:
    """A mooncake_master."""

    def __init__(self, log: Path, address: str = "127.0.0.1", wrap: Any = ()) -> None:
        self.address = address
        self.wrap = wrap
        self.log = log
        self.port, self.metrics = (free_port(), free_port()) if not wrap else (50051, 9003)
        self.start()

    def start(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations
        binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrap, str(binary), f"--rpc_port={self.port}",
                 f"--rpc_address={self.address}", f"--metrics_port={self.metrics}",
                 f"--metrics_host={self.address}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    @property
    def flags(self) -> list[str]:
        return [
            f"--master={self.address}:{self.port}",
            f"--metrics={self.address}:{self.metrics}",
        ]


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


class Cluster:
    """A master and programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs: list[Program] = []
        self.masters: list[Master] = []

    def master(self, *arguments: Any) -> Master:
        self.masters.append(Master(self.directory / "master.log", *arguments))
        return self.masters[-1]

    def program(self, *flags: str, wrap: Any = (), wait: bool = True) -> Program:
        log = self.directory / f"program-{len(self.programs)}.log"
        command = [sys.executable, "-m", "lookaside.tiers.mooncake"]
        more = flags if any("--master" in flag for flag in flags) else self.masters[0].flags
        self.programs.append(
            Program([*command, *dict.fromkeys([*more, *flags])], REGION, wrap, log)
        )
        if wait:
            until(lambda: connected(self.programs[-1]), 60)
        return self.programs[-1]

    def close(self) -> None:
        for program in self.programs:
            program.kill()
        for master in self.masters:
            master.kill()


def connected(program: Program) -> bool:
    stats = program.stats()
    return not stats.problem or "no memory" in stats.problem


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    it = Cluster(tmp_path)
    yield it
    it.close()


@pytest.fixture
def program(cluster: Cluster) -> Program:
    cluster.master()
    return cluster.program("--segment=64M")


@real
class TestContract(Contract):
    pass


@real
def test_programs_of_one_master_share(cluster: Cluster) -> None:
    cluster.master()
    one, other = cluster.program("--segment=64M"), cluster.program()
    apart = cluster.program("--namespace=another")
    expected = fill(one, seed=1, size=HEADER + MIB)
    assert one.put((b"a", laid(0, [HEADER, MIB])))[0] == [Status.OK]
    assert other.get((b"a", laid(0, [HEADER, MIB])))[0] == [Status.OK]
    assert other.memory[: HEADER + MIB] == expected
    assert other.put((b"b", laid(0, [HEADER])))[0] == [Status.OK]
    assert one.contains(b"a", b"b") == [Status.OK] * 2
    assert apart.contains(b"a", b"b") == [Status.MISSING] * 2
    assert apart.clear().keys == 0
    until(lambda: one.stats().keys == 2)
    stats = one.stats()
    assert stats.capacity == 64 * MIB and 0 < stats.used <= 4 * MIB
    assert other.clear().keys == 2
    assert one.contains(b"a", b"b") == [Status.MISSING] * 2


@real
def test_a_store_without_memory_says_so(cluster: Cluster) -> None:
    cluster.master()
    program = cluster.program(wait=False)
    until(lambda: "--segment" in program.stats().problem, 60)
    assert program.contains(b"a") == [Status.MISSING]
    assert program.put((b"a", laid(0, [4096])))[0] == [Status.NO_ROOM]
    cluster.program("--segment=64M")
    until(lambda: not program.stats().problem, 60)
    assert program.put((b"a", laid(0, [4096])))[0] == [Status.OK]


@real
def test_a_full_store_has_no_room_or_forgets(cluster: Cluster) -> None:
    cluster.master()
    program = cluster.program("--segment=16M")
    fill(program, seed=1, size=2 * MIB)
    statuses = [program.put((b"%d" % n, laid(0, [2 * MIB])))[0][0] for n in range(20)]
    assert set(statuses) <= {Status.OK, Status.NO_ROOM} and Status.NO_ROOM in statuses
    stats = program.stats()
    assert stats.used <= stats.capacity == 16 * MIB
    assert program.put((b"big", [(0, 32 * MIB)]))[0] == [Status.NO_ROOM]


@real
def test_the_master_is_killed_and_comes_back(cluster: Cluster) -> None:
    master = cluster.master()
    program = cluster.program("--segment=64M")
    fill(program, seed=1, size=MIB)
    program.put((b"a", laid(0, [MIB])))
    master.kill()
    until(lambda: "(--master)" in program.stats().problem, 60)
    address = f"{master.address}:{master.port}"
    for _ in range(3):
        begun = time.monotonic()
        for call in (program.get, program.put):
            statuses, text = call((b"a", laid(0, [MIB])))
            assert statuses == [Status.FAILED] and address in text
        assert program.contains(b"a") == [Status.FAILED]
        assert time.monotonic() - begun < 30, "it waited for a master that is known to be gone"
    master.start()
    until(lambda: program.put((b"a", laid(0, [MIB])))[0] == [Status.OK], 120)
    assert program.get((b"a", laid(0, [MIB])))[0] == [Status.OK]
    master.kill()
    assert program.close() == 0


@real
def test_a_program_waits_for_its_master(cluster: Cluster) -> None:
    master = cluster.master()
    master.kill()
    program = cluster.program("--segment=64M", wait=False)
    assert program.contains(b"a") == [Status.FAILED]
    problem = program.stats().problem
    assert f"{master.address}:{master.port}" in problem
    master.start()
    until(lambda: connected(program), 120)
    fill(program, seed=1, size=MIB)
    assert program.put((b"a", laid(0, [MIB])))[0] == [Status.OK]


@real
def test_a_master_that_hangs_ends_calls_in_time(cluster: Cluster) -> None:
    master = cluster.master()
    program = cluster.program("--segment=64M")
    fill(program, seed=1, size=MIB)
    program.put((b"a", laid(0, [MIB])))
    master.process.send_signal(signal.SIGSTOP)
    calls = [
        program.begin_get((b"a", laid(MIB, [MIB])))[1],
        program.begin_put((b"b", laid(0, [MIB])))[1],
    ]
    for call in calls:
        assert call.result(25)[0] == [Status.FAILED], "Mooncake's own timeout is 30 s"
    master.process.send_signal(signal.SIGCONT)
    until(lambda: program.get((b"a", laid(MIB, [MIB])))[0] == [Status.OK], 60)


@real
def test_a_host_with_memory_hangs_and_dies(cluster: Cluster) -> None:
    cluster.master()
    holder, program = cluster.program("--segment=64M"), cluster.program()
    expected = fill(program, seed=1, size=4 * MIB)
    assert program.put((b"a", laid(0, [4 * MIB])))[0] == [Status.OK]
    holder.process.send_signal(signal.SIGSTOP)
    statuses, _ = program.begin_get((b"a", laid(8 * MIB, [4 * MIB])))[1].result(25)
    assert statuses[0] in (Status.FAILED, Status.MISSING)
    # Whatever comes late comes into nobody's memory.
    program.memory[8 * MIB : 12 * MIB] = bytes(4 * MIB)
    holder.process.send_signal(signal.SIGCONT)
    until(lambda: connected(program) and program.contains(b"a") != [Status.FAILED], 60)
    assert program.memory[8 * MIB : 12 * MIB] == bytes(4 * MIB)
    statuses, _ = program.get((b"a", laid(8 * MIB, [4 * MIB])))
    if statuses == [Status.OK]:
        assert program.memory[8 * MIB : 12 * MIB] == expected
    holder.kill()
    statuses, _ = program.begin_get((b"a", laid(8 * MIB, [4 * MIB])))[1].result(60)
    assert statuses[0] in (Status.FAILED, Status.MISSING)
    until(lambda: program.put((b"a", laid(0, [MIB])))[0] == [Status.NO_ROOM], 120)


@real
def test_values_stay_when_a_program_is_killed(cluster: Cluster) -> None:
    cluster.master()
    cluster.program("--segment=64M")
    program = cluster.program()
    expected = fill(program, seed=1, size=HEADER + MIB)
    program.put((b"a", laid(0, [HEADER, MIB])))
    program.begin_put(*((b"%d" % n, laid(0, [HEADER, MIB])) for n in range(16)))
    program.kill()
    again = cluster.program()
    assert again.get((b"a", laid(0, [HEADER, MIB])))[0] == [Status.OK]
    assert again.memory[: HEADER + MIB] == expected
    keys = [b"%d" % n for n in range(16)]
    for n, status in enumerate(again.contains(*keys)):
        if status == Status.OK:
            assert again.get((keys[n], laid(0, [HEADER, MIB])))[0] == [Status.OK]
            assert again.memory[: HEADER + MIB] == expected, "half of a value is there"


STRANGER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert not store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1])
assert not store.remove(sys.argv[2], True)
assert not store.put(sys.argv[2], b"garbage" * int(sys.argv[3]))
"""


@real
@pytest.mark.parametrize("times", [1, 10_000])
def test_garbage_in_the_store(cluster: Cluster, times: int) -> None:
    """What is too short fails; what is not goes to the sidecar, which has its checksums."""
    master = cluster.master()
    program = cluster.program("--segment=64M")
    fill(program, seed=1, size=HEADER + 50_000)
    program.put((b"a", laid(0, [HEADER, 50_000])))
    address = f"{master.address}:{master.port}"
    subprocess.run(
        [sys.executable, "-c", STRANGER, address, f"lookaside/{b'a'.hex()}", str(times)],
        check=True,
        timeout=60,
    )
    statuses, _ = program.get((b"a", laid(MIB, [HEADER, 50_000])))
    if times == 1:
        assert statuses == [Status.FAILED]
    else:
        assert statuses == [Status.OK] and program.memory[MIB : MIB + 7] == b"garbage"
    assert program.put((b"a", laid(0, [HEADER, 50_000])))[0] == [Status.OK]


@real
@hosts
def test_two_hosts_and_a_cable(cluster: Cluster, tmp_path: Path) -> None:
    """Each host has its own network. One has the master, the other the memory."""
    pair = netns.two_hosts()
    try:
        master = cluster.master(pair[0].address, pair[0].wrap)
        one = cluster.program(*master.flags, wrap=pair[0].wrap)
        other = cluster.program(*master.flags, "--segment=64M", wrap=pair[1].wrap)
        expected = fill(one, seed=1, size=HEADER + MIB)
        assert one.put((b"a", laid(0, [HEADER, MIB])))[0] == [Status.OK]
        assert other.get((b"a", laid(0, [HEADER, MIB])))[0] == [Status.OK]
        assert other.memory[: HEADER + MIB] == expected
        pair[1].link(False)
        for program in (one, other):  # other has lost its master, one its memory
            statuses, _ = program.begin_get((b"a", laid(MIB, [HEADER, MIB])))[1].result(60)
            assert statuses[0] in (Status.FAILED, Status.MISSING)
        pair[1].link(True)
        until(
            lambda: (
                one.put((b"b", laid(0, [HEADER])))[0] == [Status.OK]
                and other.get((b"b", laid(0, [HEADER])))[0] == [Status.OK]
            ),
            240,
        )
    finally:
        cluster.close()
        for host in pair:
            host.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"master": "10.0.0.1"}, "--master '10.0.0.1': it is not HOST:PORT"),
        ({"master": "a:0"}, "--master"),
        ({"master": "a:1", "metrics": "x"}, "--metrics"),
        ({"master": "a:1", "timeout": 0}, "--timeout"),
        ({"master": "a:1", "replicas": 0}, "--replicas"),
        ({"master": "a:1", "namespace": "a.*"}, "--namespace"),
        ({"master": "a:1", "namespace": ""}, "--namespace"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("*", r"\*")):
        Settings(**settings)


def test_where_the_figures_are() -> None:
    assert Settings("10.0.0.1:50051").figures_url == "http://10.0.0.1:9003/metrics"
    assert Settings("[fe80::1]:50051").figures_url == "http://[fe80::1]:9003/metrics"
    assert Settings("a:1", metrics="b:2").figures_url == "http://b:2/metrics"
    assert Settings("a:1", metrics="").figures_url == ""
    assert Settings("etcd://a:1").figures_url == ""


def said(*flags: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom lookaside.tiers.mooncake import main; main()"
    environment = {n: v for n, v in os.environ.items() if n != "MOONCAKE_MASTER"}
    return subprocess.run(
        [sys.executable, "-c", code, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--master"),
        (["--master", "nowhere"], "it is not HOST:PORT"),
        (["--master", "a:1", "--segment", "lots"], "not a size"),
    ],
)
def test_wrong_flags(flags: list[str], says: str) -> None:
    done = said(*flags)
    assert done.returncode == 2 and says in done.stderr


@real
def test_a_program_that_no_sidecar_started_says_so() -> None:
    done = said("--master", "127.0.0.1:1")
    assert done.returncode == 2 and "--listen PATH" in done.stderr


def test_without_mooncake_it_says_what_to_install() -> None:
    gone = "import sys; sys.modules['mooncake'] = None"
    done = said("--master", "a:1", before=gone)
    assert done.returncode == 2 and "pip install 'lookaside-kv[mooncake]'" in done.stderr


def test_help_names_every_flag() -> None:
    done = said("--help")
    assert done.returncode == 0
    for flag in Settings.__dataclass_fields__:
        assert f"--{flag}" in done.stdout
