"""Clearing a space whose sidecar is there, silent, unable, dead, or away until the next engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lookaside import wire
from lookaside.clearing import Clearing
from lookaside.connection import SessionUnavailable
from lookaside.session import Session
from peer import Conn, Peer, serving, until
from test_session import options


class Engine:
    """What a scheduler has of its ranks: sessions, and what is void in them."""

    def __init__(self, *directories: Path) -> None:
        self.sessions = [
            Session(options(each, role="scheduler", page_bytes=0)) for each in directories
        ]
        self.clearing = Clearing(self.sessions)
        for session in self.sessions:
            session.start()

    def wait(self) -> None:
        until(lambda: all(session.connected for session in self.sessions))

    def close(self) -> None:
        self.clearing.close()
        for session in self.sessions:
            session.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "endpoint"


@pytest.fixture
def made() -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for each in engines:
        each.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    until(lambda: not [each for each in threading.enumerate() if each.name == "lookaside-clearing"])


def cleared(conn: Conn, message: wire.ClearSpace) -> wire.Cleared:
    return wire.Cleared(message.id, 7)


def notes(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("void-*"))


def test_a_sidecar_that_is_there_clears_at_once(directory: Path, made: list[Engine]) -> None:
    with serving(directory) as peer:
        peer.script[wire.ClearSpace] = cleared
        made.append(engine := Engine(directory))
        engine.wait()
        assert engine.clearing.is_clean
        engine.clearing.void()
        assert not engine.clearing.is_clean and len(notes(directory)) == 1
        assert not peer.of(wire.ClearSpace), "what is under way comes first"
        assert engine.clearing.clear(60) and engine.clearing.is_clean
        assert len(peer.of(wire.ClearSpace)) == 1 and not notes(directory)


def test_a_dead_sidecar_is_not_waited_for_and_clears_when_it_is_back(
    directory: Path, made: list[Engine]
) -> None:
    with serving(directory):
        made.append(engine := Engine(directory))
        engine.wait()
    until(lambda: not engine.sessions[0].connected)
    engine.clearing.void()
    assert not engine.clearing.clear(3600), "this returns at once"
    (note,) = notes(directory)
    with serving(directory) as peer:
        until(lambda: engine.sessions[0].connected)
        peer.wait_for(wire.ClearSpace)
        assert not engine.clearing.is_clean and notes(directory) == [note]
    # Killed before it had cleared: the next one is asked, too.
    until(lambda: not engine.sessions[0].connected)
    with serving(directory) as peer:
        peer.script[wire.ClearSpace] = cleared
        until(lambda: engine.clearing.is_clean)
        assert len(peer.of(wire.ClearSpace)) == 1 and not notes(directory)


def test_a_silent_sidecar_costs_the_timeout_and_clears_when_it_speaks(
    directory: Path, made: list[Engine]
) -> None:
    with serving(directory) as peer:
        made.append(engine := Engine(directory))
        engine.wait()
        asked: list[tuple[Conn, wire.ClearSpace]] = []
        peer.script[wire.ClearSpace] = lambda conn, message: asked.append((conn, message))
        engine.clearing.void()
        assert not engine.clearing.clear(0.05)
        # Another reset while that is out: its answer tells nothing of what was stored in between.
        engine.clearing.void()
        assert not engine.clearing.clear(0.05)
        ((conn, message),) = until(lambda: asked)
        peer.script[wire.ClearSpace] = lambda conn, message: asked.append((conn, message))
        conn.send(cleared(conn, message))
        until(lambda: len(asked) == 2)
        assert not engine.clearing.is_clean and len(notes(directory)) == 1
        conn.send(cleared(*asked[1]))
        until(lambda: engine.clearing.is_clean)
        assert not notes(directory)


def test_a_sidecar_that_cannot_is_asked_until_it_can(
    directory: Path, made: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookaside.clearing._RETRY_FIRST_S", 0.01)
    with serving(directory) as peer:
        answers: list[Any] = [wire.Error, wire.Error, None]

        def answer(conn: Conn, message: wire.ClearSpace) -> Any:
            kind = answers.pop(0)
            return (
                cleared(conn, message)
                if kind is None
                else kind(message.id, "busy", "tier redis is not cleared")
            )

        peer.script[wire.ClearSpace] = answer
        made.append(engine := Engine(directory))
        engine.wait()
        engine.clearing.void()
        engine.clearing.clear(60)
        until(lambda: engine.clearing.is_clean)
        assert not answers and not notes(directory)


def test_the_next_engine_clears_what_the_last_one_could_not(
    directory: Path, made: list[Engine]
) -> None:
    with serving(directory):
        first = Engine(directory)
        first.wait()
    until(lambda: not first.sessions[0].connected)
    first.clearing.void()
    first.clearing.clear(0)
    first.close()
    (directory / f"void-{'1' * 64}-0123456789abcdef").touch()  # of another space
    assert len(notes(directory)) == 2
    with serving(directory) as peer:
        answers = threading.Event()

        def answer(conn: Conn, message: wire.ClearSpace) -> Any:
            answers.wait()
            return cleared(conn, message)

        peer.script[wire.ClearSpace] = answer
        made.append(engine := Engine(directory))
        engine.wait()
        assert not engine.clearing.is_clean, "before anything can be asked"
        answers.set()
        until(lambda: engine.clearing.is_clean)
        assert notes(directory) == [f"void-{'1' * 64}-0123456789abcdef"]


def test_a_note_whose_writer_was_faster_is_no_reason_to_clear(
    directory: Path, made: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(directory) as peer:
        note = directory / f"void-{'0' * 64}-0123456789abcdef"
        note.touch()
        may = threading.Event()
        submit = Session.submit

        def late(session: Session, *arguments: Any) -> Any:
            if not may.is_set():
                raise SessionUnavailable("the sidecar does not answer")
            return submit(session, *arguments)

        monkeypatch.setattr(Session, "submit", late)
        made.append(engine := Engine(directory))
        engine.wait()
        assert not engine.clearing.is_clean
        note.unlink()
        may.set()
        until(lambda: engine.clearing.is_clean)
        assert not peer.of(wire.ClearSpace)


def test_of_two_ranks_one_is_dead(tmp_path: Path, made: list[Engine]) -> None:
    directories = [tmp_path / "rank-0", tmp_path / "rank-1"]
    with serving(directories[0]) as peer:
        peer.script[wire.ClearSpace] = cleared
        with serving(directories[1]):
            made.append(engine := Engine(*directories))
            engine.wait()
        until(lambda: not engine.sessions[1].connected)
        engine.clearing.void()
        assert not engine.clearing.clear(3600)
        assert (
            len(peer.of(wire.ClearSpace)) == 1
            and not notes(directories[0])
            and notes(directories[1])
        )
        with serving(directories[1]) as other:
            other.script[wire.ClearSpace] = cleared
            until(lambda: engine.clearing.is_clean)
            assert len(peer.of(wire.ClearSpace)) == len(other.of(wire.ClearSpace)) == 1


def test_a_directory_that_is_gone_is_no_obstacle(directory: Path, made: list[Engine]) -> None:
    peer = Peer(directory)
    made.append(engine := Engine(directory))
    engine.wait()
    peer.close()
    until(lambda: not engine.sessions[0].connected)
    (directory / "session.sock").unlink()
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    engine.clearing.void()
    assert not engine.clearing.clear(3600)
    with serving(directory) as peer:
        peer.script[wire.ClearSpace] = cleared
        until(lambda: engine.clearing.is_clean)
        assert not notes(directory)
