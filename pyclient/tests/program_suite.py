"""What every shipped program that is a tier must do, asked as the sidecar asks it.

A test module has a fixture ``program``, which is one that serves, and a subclass of Contract whose
name begins with Test.
"""

from __future__ import annotations

import random
import threading

from lookaside.tier import Status

from bench._program import HEADER, Program

REGION = 32 << 20
CANARY = 0x5A


class Contract:
    """The tests. ``program`` has a region of REGION bytes."""

    def test_values_of_one_piece_and_of_several(self, program: Program) -> None:
        for number, sizes in enumerate([[1], [4096], [4096, 1 << 20], [100, 5, 70_000], [512] * 8]):
            key = b"\0key %d" % number
            expected = fill(program, seed=number, size=sum(sizes))
            assert program.put((key, laid(0, sizes)))[0] == [Status.OK]
            assert program.contains(key, key + b"x") == [Status.OK, Status.MISSING]
            at = 8 << 20
            blank(program, at, sum(sizes) + 100)
            assert program.get((key, laid(at, sizes)))[0] == [Status.OK]
            assert program.memory[at : at + sum(sizes)] == expected
            assert program.memory[at + sum(sizes)] == CANARY, "it wrote behind the pieces"

    def test_a_beginning_of_a_value(self, program: Program) -> None:
        expected = fill(program, seed=1, size=HEADER + (1 << 20))
        program.put((b"a", laid(0, [HEADER, 1 << 20])))
        for second in (1, 4096, 70_000, 1 << 20):
            blank(program, 8 << 20, HEADER + second + 1)
            assert program.get((b"a", laid(8 << 20, [HEADER, second])))[0] == [Status.OK]
            end = (8 << 20) + HEADER + second
            assert program.memory[8 << 20 : end] == expected[: HEADER + second]
            assert program.memory[end] == CANARY
        assert program.get((b"a", laid(8 << 20, [HEADER])))[0] == [Status.OK]

    def test_more_than_there_is_fails(self, program: Program) -> None:
        fill(program, seed=1, size=2 << 20)
        program.put((b"a", laid(0, [HEADER, 1 << 20])))
        statuses, _ = program.get(
            (b"a", laid(8 << 20, [HEADER, (1 << 20) + 1])), (b"b", laid(16 << 20, [HEADER]))
        )
        assert statuses == [Status.FAILED, Status.MISSING]

    def test_the_new_value_of_a_key_replaces_the_old_one(self, program: Program) -> None:
        fill(program, seed=1, size=1 << 20)
        program.put((b"a", laid(0, [HEADER, 100_000])))
        for size in (100_000, 200_000, 50_000):
            expected = fill(program, seed=size, size=HEADER + size)
            assert program.put((b"a", laid(0, [HEADER, size])))[0] == [Status.OK]
            assert program.get((b"a", laid(8 << 20, [HEADER, size])))[0] == [Status.OK]
            assert program.memory[8 << 20 : (8 << 20) + HEADER + size] == expected

    def test_many_at_once_keep_their_order(self, program: Program) -> None:
        size, count = 20_000, 40
        expected = fill(program, seed=9, size=size * count)
        keys = [b"%d" % n for n in range(count)]
        put = [(key, laid(n * size, [size])) for n, key in enumerate(keys)]
        assert program.put(*put)[0] == [Status.OK] * count
        base = 8 << 20
        asked = [(key, laid(base + n * size, [size])) for n, key in enumerate(keys)]
        asked[7] = (b"no such key", asked[7][1])
        blank(program, base, size * count)
        statuses, _ = program.get(*asked)
        assert [n for n, status in enumerate(statuses) if status != Status.OK] == [7]
        assert statuses[7] == Status.MISSING
        for n in set(range(count)) - {7}:
            at = base + n * size
            assert program.memory[at : at + size] == expected[n * size : (n + 1) * size]

    def test_one_key_from_several_threads_and_twice_in_a_call(self, program: Program) -> None:
        size = 100_000
        values = [fill(program, seed=n, size=size) for n in range(4)]
        for n, value in enumerate(values):
            program.memory[n * size : (n + 1) * size] = value
        twice = program.put((b"a", laid(0, [size])), (b"a", laid(size, [size])))
        assert twice[0] == [Status.OK] * 2
        calls = [program.begin_put((b"a", laid(n * size, [size])))[1] for n in range(4)] * 3
        assert [call.result(60)[0] for call in calls] == [[Status.OK]] * 12
        assert program.get((b"a", laid(8 << 20, [size])))[0] == [Status.OK]
        assert program.memory[8 << 20 : (8 << 20) + size] in values

    def test_drop_and_clear(self, program: Program) -> None:
        fill(program, seed=2, size=4096)
        keys = [b"\xff\x00one", b"\xff\x00two", b"\xff\x01three", b"\xff", b"a" * 255]
        program.put(*((key, laid(0, [4096])) for key in keys))
        assert program.contains(*keys) == [Status.OK] * 5
        assert program.drop(keys[0], b"none") == [Status.OK] * 2
        assert program.contains(*keys) == [Status.MISSING] + [Status.OK] * 4
        assert program.get((keys[0], laid(8 << 20, [4096])))[0] == [Status.MISSING]
        assert program.clear(b"\xff\x00").keys == 1
        assert program.contains(*keys) == [Status.MISSING] * 2 + [Status.OK] * 3
        cleared = program.clear()
        assert (cleared.keys, cleared.error) == (3, "")
        assert program.contains(*keys) == [Status.MISSING] * 5

    def test_a_history_agrees_with_a_model(self, program: Program) -> None:
        """Four threads, each with keys and memory of its own."""
        failures: list[BaseException] = []

        def history(seed: int) -> None:
            try:
                play(program, seed)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=history, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures

    def test_a_sidecar_that_leaves_ends_the_program(self, program: Program) -> None:
        assert program.close() == 0


def play(program: Program, seed: int) -> None:
    """A random history of one thread. The seed is in every message."""
    chance = random.Random(seed)
    base = seed * (4 << 20)
    model: dict[bytes, bytes] = {}
    keys = [b"%d/%d" % (seed, n) for n in range(8)]
    for step in range(60):
        where = f"seed {seed}, step {step}"
        key = chance.choice(keys)
        action = chance.choices(["put", "get", "contains", "drop", "clear"], [6, 6, 3, 2, 1])[0]
        if action == "put":
            sizes = [chance.choice([HEADER, 64]), chance.randrange(1, 300_000)]
            value = chance.randbytes(sum(sizes))
            program.memory[base : base + len(value)] = value
            assert program.put((key, laid(base, sizes)))[0] == [Status.OK], where
            model[key] = value
        elif action == "get":
            value = model.get(key, bytes(100))
            cut = chance.randrange(1, len(value) + 1)
            at = base + (2 << 20)
            statuses, _ = program.get((key, laid(at, [cut])))
            if key in model:
                assert statuses == [Status.OK], where
                assert program.memory[at : at + cut] == value[:cut], where
            else:
                assert statuses == [Status.MISSING], where
        elif action == "contains":
            held = [Status.OK if each in model else Status.MISSING for each in keys]
            assert program.contains(*keys) == held, where
        elif action == "drop":
            program.drop(key)
            model.pop(key, None)
        else:
            assert program.clear(b"%d/" % seed).keys == len(model), where
            model.clear()


def laid(at: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Pieces of these sizes, one behind the other from an offset on."""
    pieces = []
    for size in sizes:
        pieces.append((at, size))
        at += size
    return pieces


def fill(program: Program, seed: int, size: int) -> bytes:
    """Fill the beginning of the region at random; return what it is."""
    value = random.Random(seed).randbytes(size)
    program.memory[:size] = value
    return value


def blank(program: Program, at: int, size: int) -> None:
    program.memory[at : at + size] = bytes([CANARY]) * size
