"""lookaside.tiers.nixl with the real NIXL: its POSIX plug-in, on files of this machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lookaside.tier import Status
from lookaside.tiers.nixl import Files
from peer import until
from program_suite import REGION, Contract, fill, laid

from bench._program import HEADER, Program

real = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13")),
    reason="NIXL is not installed: pip install nixl-cu12 (requirements-test.lock)",
)

MIB = 1 << 20


def command(directory: Path, *more: str) -> list[str]:
    flags = ["--directory", str(directory), "--capacity", "64M", *more]
    return [sys.executable, "-m", "lookaside.tiers.nixl", *flags]


@pytest.fixture(params=["direct", "cached"])
def program(request: Any, tmp_path: Path) -> Iterator[Program]:
    more = [] if request.param == "direct" else ["--no-direct", "--param", "use_posix_aio=true"]
    it = Program(command(tmp_path / "kv", *more), REGION)
    yield it
    it.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    made: list[Program] = []

    def begin(*more: str) -> Program:
        made.append(Program(command(tmp_path / "kv", *more), REGION, stderr=tmp_path / "log"))
        return made[-1]

    yield begin
    for each in made:
        each.kill()


@real
class TestContract(Contract):
    pass


@real
def test_it_never_uses_more_than_its_capacity(start: Any, tmp_path: Path) -> None:
    program = start("--capacity", "8M")
    fill(program, seed=1, size=2 * MIB)
    for number in range(12):
        assert program.put((b"%d" % number, laid(0, [HEADER, MIB - HEADER])))[0] == [Status.OK]
        if number == 6:  # 0 was used, so 1 is the oldest one
            assert program.get((b"0", laid(8 * MIB, [HEADER])))[0] == [Status.OK]
    stats = program.stats()
    assert (stats.capacity, stats.used, stats.keys, stats.evictions) == (8 * MIB, 8 * MIB, 8, 4)
    assert on_disk(tmp_path / "kv") == 8 * MIB
    held = program.contains(*(b"%d" % number for number in range(12)))
    assert [n for n, status in enumerate(held) if status != Status.OK] == [1, 2, 3, 4]
    too_big = program.put((b"big", [(0, 16 * MIB)]), (b"small", [(0, 4096)]))
    assert too_big[0] == [Status.NO_ROOM, Status.OK]


@real
def test_values_stay_when_the_program_is_killed(start: Any, tmp_path: Path) -> None:
    program = start()
    expected = fill(program, seed=1, size=HEADER + MIB)
    key = bytes(range(255))
    program.put((key, laid(0, [HEADER, MIB])), (b"b", laid(0, [4096])))
    program.kill()
    left = tmp_path / "kv" / "tmp" / "7"
    left.write_bytes(bytes(100))  # what it was writing
    again = start()
    assert not left.exists()
    assert again.stats().used == HEADER + MIB + 4096
    assert again.get((key, laid(0, [HEADER, MIB])))[0] == [Status.OK]
    assert again.memory[: HEADER + MIB] == expected
    assert again.close() == 0
    smaller = start("--capacity", "8K")
    assert smaller.stats().used <= 8 << 10


@real
def test_killed_during_puts_it_leaves_nothing_half_written(start: Any, tmp_path: Path) -> None:
    program = start()
    size = 4 * MIB
    expected = fill(program, seed=1, size=size)
    keys = [b"%d" % number for number in range(12)]
    program.begin_put(*((key, laid(0, [size])) for key in keys))
    until(lambda: any((tmp_path / "kv").rglob("*.kv")))
    program.process.kill()
    program.process.wait()
    again = start()
    for key, status in zip(keys, again.contains(*keys), strict=True):
        if status == Status.OK:
            assert again.get((key, laid(size, [size])))[0] == [Status.OK]
            assert again.memory[size : 2 * size] == expected
    assert again.contains(keys[0]) == [Status.OK], "the first is written first"
    assert again.stats().used == on_disk(tmp_path / "kv")


@real
def test_garbage_in_the_directory(start: Any, tmp_path: Path) -> None:
    program = start()
    fill(program, seed=1, size=2 * MIB)
    program.put(*((key, laid(0, [MIB])) for key in (b"cut", b"gone", b"folder", b"good")))
    paths = {path.name: path for path in (tmp_path / "kv").rglob("*.kv")}
    os.truncate(paths[f"{b'cut'.hex()}.kv"], 1000)
    paths[f"{b'gone'.hex()}.kv"].unlink()
    paths[f"{b'folder'.hex()}.kv"].unlink()
    paths[f"{b'folder'.hex()}.kv"].mkdir()
    asked = [(key, laid(8 * MIB, [MIB])) for key in (b"cut", b"gone", b"folder", b"good")]
    statuses, _ = program.get(*asked)
    assert statuses == [Status.FAILED, Status.MISSING, Status.FAILED, Status.OK]
    assert program.contains(b"gone") == [Status.MISSING], "it has learnt that"
    program.kill()
    (tmp_path / "kv" / "zz").mkdir()
    (tmp_path / "kv" / "00").mkdir(exist_ok=True)
    (tmp_path / "kv" / "00" / "nothex.kv").touch()
    (tmp_path / "kv" / "00" / "abcd.kv").touch()
    (tmp_path / "kv" / "00" / "ab.kv").symlink_to("/etc/passwd")
    again = start()
    assert again.contains(b"good", b"\xab") == [Status.OK, Status.MISSING]


@real
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system of 8 MiB")
def test_a_full_disk(start: Any, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8M", "none", directory], check=True)
    try:
        program = start("--capacity", "8M")
        (directory / "someone else's").write_bytes(bytes(5 * MIB))
        fill(program, seed=1, size=2 * MIB)
        keys = [b"%d" % number for number in range(4)]
        statuses = [program.put((key, laid(0, [HEADER, MIB])))[0][0] for key in keys]
        assert statuses[:2] == [Status.OK] * 2 and Status.NO_ROOM in statuses
        held = program.contains(*keys)
        assert [s == Status.OK for s in held] == [s == Status.OK for s in statuses]
        for key, status in zip(keys, statuses, strict=True):
            if status == Status.OK:
                assert program.get((key, laid(8 * MIB, [HEADER, MIB])))[0] == [Status.OK]
        assert not list((directory / "tmp").iterdir())
        program.kill()
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@real
def test_a_cancelled_call_ends(start: Any) -> None:
    program = start()
    size = MIB
    fill(program, seed=1, size=size)
    program.put((b"a", laid(0, [size])))
    number, future = program.begin_get(*((b"a", laid(8 * MIB, [size])) for _ in range(256)))
    program.cancel(number)
    statuses, _ = future.result(60)
    assert set(statuses) <= {Status.OK, Status.CANCELLED}
    assert program.get((b"a", laid(8 * MIB, [size])))[0] == [Status.OK]


@real
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--capacity", "many"], "not a size"),
        (["--capacity", "1000T"], "the file system of"),
        (["--directory", "/proc/kv"], "--directory /proc/kv"),
        (["--plugin", "NONE"], "this NIXL has"),
        (["--plugin", "UCX"], "not between memory"),
        (["--param", "use_uring"], "not NAME=VALUE"),
        ([], "--listen PATH"),
    ],
)
def test_wrong_settings_name_the_flag(tmp_path: Path, flags: list[str], says: str) -> None:
    done = subprocess.run(
        command(tmp_path / "kv", *flags), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and says in done.stderr, done.stderr


@real
def test_a_directory_has_one_program(start: Any, tmp_path: Path) -> None:
    program = start()
    done = subprocess.run(command(tmp_path / "kv"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "another program uses it" in done.stderr
    program.kill()
    start()


def test_without_nixl_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update({n: None for n in ('nixl', 'nixl_cu12', 'nixl_cu13')});"
        "from lookaside.tiers.nixl import main; main()"
    )
    flags = ["--directory", str(tmp_path), "--capacity", "1M"]
    done = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "pip install 'lookaside-kv[nixl]'" in done.stderr


def test_help_names_every_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lookaside.tiers.nixl", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    for flag in ("--directory", "--capacity", "--plugin", "--param", "--direct", "--listen"):
        assert flag in done.stdout


def test_files_count_what_is_being_written(tmp_path: Path) -> None:
    files = Files(tmp_path, 100)
    one = files.reserve(60)
    assert one is not None and files.reserve(50) is None
    other = files.reserve(40)
    assert other is not None and other != one
    files.discard(other, 40)
    one.write_bytes(bytes(60))
    files.keep(one, b"a", 60)
    assert (files.used, len(files)) == (60, 1)
    third = files.reserve(50)
    assert third is not None and b"a" not in files and files.evictions == 1
    files.close()


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.kv"))
