"""A session with a sidecar that is absent, slow, silent, wrong or gone."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lookaside import wire
from lookaside.connection import SessionUnavailable
from lookaside.endpoint import EndpointAbsent, EndpointError, check_directory, open_endpoint
from lookaside.handshake import RefusedError, SessionOptions
from lookaside.line import HandshakeError
from lookaside.ratelog import RateLimitedLog
from lookaside.retries import Retries
from lookaside.session import Session, Subscriber
from peer import Conn, Peer, serving, until, waited_in_vain


def options(directory: Path, role: str = "worker", **more: Any) -> SessionOptions:
    values: dict[str, Any] = dict(
        endpoint=str(directory),
        role=role,
        engine_id="engine",
        rank=0,
        page_tokens=16,
        page_bytes=4096,
        pages_per_chunk=4,
        digest_bytes=32,
        fields={"model": "m", "dtype": "float32"},
    )
    return SessionOptions(**{**values, **more})


class Heard(Subscriber):
    """A subscriber that takes notes."""

    def __init__(self) -> None:
        self.connected: list[int] = []
        self.regions: list[int] = []
        self.lost = 0

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self.connected.append(welcome.session)

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        assert os.fstat(fd).st_size == region.size
        self.regions.append(region.region)

    def on_region_removed(self, session: Session, region: int) -> None:
        self.regions.remove(region)
        session.send(wire.RegionUnmapped(region), session.session_id)

    def on_lost(self, session: Session) -> None:
        self.lost += 1


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "endpoint"


@pytest.fixture
def peer(directory: Path) -> Iterator[Peer]:
    with serving(directory, regions=2) as each:
        yield each


@pytest.fixture
def session(directory: Path, peer: Peer) -> Iterator[Session]:
    each = Session(options(directory))
    each.start()
    assert each.wait_connected(30)
    yield each
    each.close()


def ping(session: Session) -> Any:
    return session.submit(lambda i: wire.ClearSpace(i))


def test_handshake_tells_who_we_are_and_maps_everything_first(directory: Path, peer: Peer) -> None:
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_settled(30)
    (hello,) = peer.of(wire.Hello)
    assert hello.fields == {"dtype": "float32", "model": "m"}
    assert list(hello.fields) == sorted(hello.fields)
    assert heard.regions == [0, 1]
    assert heard.connected == [session.session_id]
    assert session.generation == peer.generation
    assert session.is_current(session.session_id)
    assert not session.is_current(session.session_id + 1)
    session.close(30)
    assert heard.lost == 1
    assert not session.connected and session.session_id == 0
    session.close()


def test_absent_sidecar_is_awaited(directory: Path) -> None:
    absent = threading.Event()
    session = Session(options(directory), on_absent=absent.set)
    session.start()
    assert not session.wait_settled(30)
    assert absent.is_set()
    with pytest.raises(SessionUnavailable):
        ping(session)
    with serving(directory):
        assert session.wait_connected(30)
    until(lambda: not session.connected)
    session.close()


def test_starting_sidecar_that_fails_is_only_logged(directory: Path) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("no")

    session = Session(options(directory), on_absent=fail)
    session.start()
    until(lambda: len(calls) >= 2)
    session.close()


def test_refusal_is_kept_and_retried(directory: Path, peer: Peer) -> None:
    refusal = wire.Refuse(wire.VERSION, "no_worker", "", "", "", "its worker has not come yet")
    refused: list[int] = []

    def refuse_twice(conn: Conn, hello: wire.Hello) -> Any:
        refused.append(1)
        return refusal if len(refused) <= 2 else None

    peer.welcome = refuse_twice
    session = Session(options(directory, role="scheduler", page_bytes=0))
    session.start()
    assert not session.wait_settled(30)
    assert session.refused == refusal
    assert session.wait_connected(30)
    assert session.refused is None
    session.close()


@pytest.mark.parametrize("early", [False, True])
def test_refusal_of_a_sidecar_that_reads_nothing_is_read(directory: Path, early: bool) -> None:
    """It closes over our unread Hello, which resets the connection, or before we have sent one."""
    directory.mkdir(mode=0o700)
    refusal = wire.Refuse(wire.VERSION, "busy", "sessions.limit", "1", "", "full")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / "session.sock"))
        listener.listen(4)
        session = Session(options(directory))
        if early:
            sent = threading.Event()
            inner = session.options

            class Late:  # its Hello is built only when the sidecar has closed
                def __getattr__(self, name: str) -> Any:
                    if name == "fields":
                        assert sent.wait(30)
                    return getattr(inner, name)

            session.options = Late()  # type: ignore[assignment]
        session.start()
        conn, _ = listener.accept()
        if not early:
            poller = select.poll()
            poller.register(conn, select.POLLIN)
            assert poller.poll(30_000)
        conn.send(wire.encode(refusal))
        conn.close()
        if early:
            sent.set()
        until(lambda: session.refused == refusal)
    session.close()


def test_refusal_names_field_and_values(
    directory: Path, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.welcome = lambda conn, hello: wire.Refuse(
        wire.VERSION, "incompatible", "dtype", "bf16", "fp32", "no"
    )
    session = Session(options(directory))
    session.start()
    session.wait_settled(30)
    session.close()
    assert "dtype" in caplog.text and "bf16" in caplog.text and "fp32" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1garbage",
        b"\xdd\xff\xff\xff\xff",
        wire.encode(wire.Pong(1, 1)),
        wire.encode(wire.Refuse(wire.VERSION, "version", "version", "10", "2", "newer")),
    ],
)
def test_wrong_handshakes_end_in_another_try(directory: Path, peer: Peer, answer: bytes) -> None:
    wrong = []

    def once(conn: Conn, hello: wire.Hello) -> Any:
        if wrong:
            return None
        wrong.append(1)
        if not answer:
            conn.sock.shutdown(socket.SHUT_RDWR)
        return answer

    peer.welcome = once
    fds = len(os.listdir("/proc/self/fd"))
    session = Session(options(directory))
    session.start()
    assert session.wait_connected(30)
    session.close()
    until(lambda: all(conn.closed.is_set() for conn in peer.conns))
    fds += sum(conn.claim >= 0 for conn in peer.conns)  # the peer's own ends
    # The session keeps its wake-up descriptor until it is collected, no more.
    assert len(os.listdir("/proc/self/fd")) <= fds + 1


def test_control_region_of_another_run_is_refused(directory: Path, peer: Peer) -> None:
    true = peer.generation
    peer.generation += 1  # the welcome's, not the control region's
    session = Session(options(directory))
    session.start()
    session.wait_settled(30)
    assert not session.connected
    peer.generation = true
    assert session.wait_connected(30)
    session.close()


def test_reply_reaches_its_request(session: Session, peer: Peer) -> None:
    peer.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, 7)
    pending = [ping(session) for _ in range(50)]
    assert all(each.wait(30).chunks == 7 for each in pending)
    peer.script[wire.ClearSpace] = lambda conn, m: wire.Error(m.id, "stale", "old")
    assert ping(session).wait(30).code == "stale"


def test_silence_costs_one_deadline(session: Session, peer: Peer) -> None:
    """The breaker: one wait, then nothing is waited for until the peer speaks."""
    held: list[Any] = []
    late: list[Any] = []
    peer.script[wire.ClearSpace] = lambda conn, m: held.append((conn, m))
    peer.script[wire.Ping] = lambda conn, m: held.append((conn, m))
    pending = session.submit(lambda i: wire.ClearSpace(i), late.append)
    waits = waited_in_vain(session)
    began = time.monotonic()
    assert pending.wait(0.03) is None
    assert time.monotonic() - began >= 0.03
    assert session.suspect and session.connected and not session.available
    for _ in range(100):
        with pytest.raises(SessionUnavailable):
            ping(session)
    assert waits == [pending]
    peer.wait_for(wire.Ping)
    conn, message = next(each for each in held if isinstance(each[1], wire.ClearSpace))
    conn.send(wire.Cleared(message.id, 3))
    until(lambda: session.available)
    until(lambda: late)
    assert late[0].chunks == 3
    assert len(peer.of(wire.Ping)) == 1, "one ping at a time"


def test_pong_ends_suspicion(session: Session, peer: Peer) -> None:
    peer.script[wire.ClearSpace] = lambda conn, m: None
    assert ping(session).wait(0.02) is None
    until(lambda: session.available)


def test_impatience_is_not_suspicion(
    session: Session, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lookaside.connection._DOUBT_AFTER_S", 30.0
    )  # this thread may stand still, too
    peer.script[wire.ClearSpace] = lambda conn, m: None
    assert ping(session).wait(0) is None
    assert session.available


def test_idle_session_notices_a_stop(
    directory: Path, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookaside.heartbeat._HEARTBEAT_S", 0.2)
    monkeypatch.setattr("lookaside.heartbeat._PONG_PATIENCE_S", 0.2)
    peer.script[wire.Ping] = lambda conn, m: None
    session = Session(options(directory))
    session.start()
    until(lambda: session.suspect)
    assert session.connected
    session.close()


def test_death_ends_every_wait_at_once(directory: Path) -> None:
    peer = Peer(directory)
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    old = session.session_id
    peer.script[wire.ClearSpace] = lambda conn, m: None
    pending = ping(session)
    waits = waited_in_vain(session)
    answers: list[Any] = []

    def wait() -> None:
        answers.append(pending.wait(300))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.02)
    peer.close()
    assert not session.is_current(old), "known before the session's thread has run"
    thread.join(30)
    assert answers == [None] and not waits
    until(lambda: heard.lost == 1)
    assert not session.send(wire.AbortStore(1), old)
    with serving(directory):
        until(lambda: session.connected)
        assert session.session_id and len(heard.connected) == 2
        assert not session.send(wire.AbortStore(1), old), "the old session's messages stay unsent"
        assert session.send(wire.AbortStore(1), session.session_id)
    session.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\xc1", b"\x93\x0b\x01", wire.encode(wire.Refuse(wire.VERSION, "", "", "", "", ""))],
)
def test_garbage_ends_the_session_not_the_thread(
    session: Session, peer: Peer, garbage: bytes
) -> None:
    first = session.session_id
    peer.conns[0].send(garbage)
    until(lambda: session.session_id not in (0, first))


def test_unknown_ids_are_ignored(session: Session, peer: Peer) -> None:
    first = session.session_id
    peer.conns[0].send(wire.Cleared(99999, 1))
    peer.conns[0].send(wire.Error(0, "malformed", "what was that"))
    peer.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, 7)
    assert ping(session).wait(30).chunks == 7
    assert session.session_id == first


def test_region_added_later(directory: Path, peer: Peer) -> None:
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    peer.conns[0].send(peer.region_message(2), peer.regions[0])
    until(lambda: heard.regions == [0, 1, 2])
    # Without its fd it is no region; the session starts over.
    peer.conns[0].send(peer.region_message(3))
    until(lambda: heard.lost == 1)
    session.close()


def test_region_removed(directory: Path, peer: Peer) -> None:
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    first = session.session_id
    peer.remove_region(0)
    assert peer.wait_for(wire.RegionUnmapped) == [wire.RegionUnmapped(0)]
    assert heard.regions == [1] and session.session_id == first
    # What only a client sends is no answer from a sidecar; the session starts over.
    peer.conns[0].send(wire.RegionUnmapped(1))
    until(lambda: heard.lost == 1)
    session.close()


def test_region_may_go_as_soon_as_the_handshake_is_over(directory: Path, peer: Peer) -> None:
    heard = Heard()
    greet = peer._greet

    def greet_and_remove(conn: Conn, hello: wire.Hello) -> None:
        greet(conn, hello)
        conn.send(wire.RegionRemoved(1))

    peer._greet = greet_and_remove  # type: ignore[method-assign]
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    assert peer.wait_for(wire.RegionUnmapped) == [wire.RegionUnmapped(1)]
    assert heard.regions == [0] and heard.lost == 0
    session.close()


def test_peer_that_does_not_read_never_blocks_us(session: Session, peer: Peer) -> None:
    peer.reading.clear()
    first = session.session_id
    hashes = bytes(wire.max_store_pages(32) * 32)
    with pytest.raises(SessionUnavailable):
        for _ in range(1000):
            session.submit(lambda i: wire.PrepareStore(i, 0, b"", hashes, 1, 0))
    for i in range(100):
        assert session.send(wire.AbortStore(i + 1), first)
    assert session.suspect
    peer.reading.set()
    assert [m.store for m in peer.wait_for(wire.AbortStore, 100)] == list(range(1, 101))
    until(lambda: session.available)


def test_outbox_is_bounded(session: Session, peer: Peer) -> None:
    """Messages are never dropped one by one: past the bound the session ends, which frees all."""
    peer.reading.clear()
    first = session.session_id
    for i in range(1 << 20):
        if not session.send(wire.AbortStore(i + 1), first):
            break
    else:
        pytest.fail("it took a million messages")
    peer.reading.set()
    until(lambda: session.session_id not in (0, first))


def test_late_subscriber_is_greeted(session: Session) -> None:
    heard = Heard()
    session.subscribe(heard)
    until(lambda: heard.connected == [session.session_id])


def test_forked_child_neither_uses_nor_keeps_the_session(session: Session, peer: Peer) -> None:
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            session.submit(lambda i: wire.ClearSpace(i))
            os.write(w, b"usable")
        except SessionUnavailable:
            os.write(w, b"refused")
        signal.pause()
        os._exit(0)
    try:
        os.close(w)
        assert os.read(r, 16) == b"refused"
        peer.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, 7)
        assert ping(session).wait(30).chunks == 7, "the parent's session is as it was"
        session.close()
        assert peer.conns[0].closed.wait(30), "the child kept the parent's session open"
    finally:
        os.close(r)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Holder(Heard):
    """Holds the socket of every session that it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.releases: list[Any] = []

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        super().on_connected(session, welcome)
        self.releases.append(session.hold())


@pytest.mark.parametrize("who", ["sidecar", "client", "garbage"])
def test_held_socket_outlives_its_session(directory: Path, peer: Peer, who: str) -> None:
    """Its end tells the sidecar to give our room to others, so it waits for our copies."""
    holder = Holder()
    session = Session(options(directory))
    session.subscribe(holder)
    session.start()
    assert session.wait_connected(30)
    if who == "sidecar":  # as when it gives us up
        peer.conns[0].sock.shutdown(socket.SHUT_WR)
    elif who == "garbage":
        peer.conns[0].send(b"\xc1")
    else:
        session.close()
    until(lambda: holder.lost == 1)
    if who != "client":
        until(lambda: len(holder.releases) == 2 and session.connected)
    assert not peer.conns[0].closed.wait(0.2), "closed while it is held"
    holder.releases[0]()
    assert peer.conns[0].closed.wait(30)
    session.close(30)
    if who != "client":
        assert not peer.conns[1].closed.wait(0.05)
        holder.releases[1]()
        assert peer.conns[1].closed.wait(30)
    with pytest.raises(SessionUnavailable):
        session.hold()


def test_forked_child_does_not_keep_a_held_socket(directory: Path, peer: Peer) -> None:
    holder = Holder()
    session = Session(options(directory))
    session.subscribe(holder)
    session.start()
    assert session.wait_connected(30)
    session.close()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        holder.releases[0]()
        assert peer.conns[0].closed.wait(30), "the child keeps it open"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def claim_of(conn: Conn) -> Conn:
    """A connection's claim, to be seen after its peer was closed."""
    copy = Conn(conn.sock)
    copy.claim = os.dup(conn.claim)
    return copy


@pytest.mark.parametrize("held", [False, True])
def test_claim_lasts_until_the_next_sidecar_knows_of_us(directory: Path, held: bool) -> None:
    peer, holder = Peer(directory), Holder() if held else Heard()
    session = Session(options(directory))
    session.subscribe(holder)
    session.start()
    assert session.wait_connected(30)
    first = claim_of(peer.conns[0])
    peer.close()
    until(lambda: holder.lost == 1)
    assert first.claimed, "nobody has taken over yet"
    with serving(directory) as second:
        second.welcome = lambda conn, hello: wire.Refuse(wire.VERSION, "busy", "", "", "", "")
        until(lambda: second.of(wire.Hello))
        assert first.claimed, "a refusal is no welcome"
        second.welcome = None
        until(lambda: session.connected)
        last = claim_of(second.conns[-1])
        assert last.claimed and first.claimed is held
        if isinstance(holder, Holder):
            holder.releases[0]()
            assert not first.claimed
        session.close(30)
        assert last.claimed is held, "its copies go on"
        if isinstance(holder, Holder):
            holder.releases[1]()
            assert not last.claimed
    for each in (first, last):
        os.close(each.claim)


def test_claim_ends_if_no_sidecar_comes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookaside.session._KEEP_S", 0.2)
    given_up: list[Session] = []

    class Follower(Heard):
        def on_given_up(self, session: Session) -> None:
            given_up.append(session)

    peer = Peer(directory)
    session = Session(options(directory))
    session.subscribe(Follower())
    session.start()
    assert session.wait_connected(30)
    claim = claim_of(peer.conns[0])
    peer.close()
    until(lambda: not claim.claimed)
    os.close(claim.claim)
    assert given_up == [session]
    with serving(directory):
        assert session.wait_connected(30), "it goes on looking"
    until(lambda: len(given_up) == 2)
    session.close()


def test_forked_child_does_not_keep_a_claim(directory: Path) -> None:
    """Neither that of the session, nor that of one before which a copy goes on."""
    peer, holder = Peer(directory), Holder()
    session = Session(options(directory))
    session.subscribe(holder)
    session.start()
    assert session.wait_connected(30)
    claims = [claim_of(peer.conns[0])]
    peer.close()
    with serving(directory) as second:
        until(lambda: len(holder.releases) == 2 and session.connected)
        claims.append(claim_of(second.conns[0]))
        second.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, 7)
        assert ping(session).wait(30).chunks == 7, "the peer has closed its copy"
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            session.close(30)
            assert all(claim.claimed for claim in claims)
            for release in holder.releases:
                release()
            until(lambda: not any(claim.claimed for claim in claims))  # the child is slow at most
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            for claim in claims:
                os.close(claim.claim)


def test_what_is_held_travels_with_the_hello(directory: Path, peer: Peer) -> None:
    """And our copies of the descriptors are closed, whether the Hello can be sent or not."""
    fds = len(os.listdir("/proc/self/fd"))
    session = Session(
        options(directory), held=lambda: [os.dup(peer.regions[0]), os.dup(peer.regions[1])]
    )
    session.start()
    assert session.wait_connected(30)
    (hello,) = peer.of(wire.Hello)
    assert hello.held == 2
    assert [os.fstat(fd).st_ino for fd in peer.conns[0].held] == [
        os.fstat(fd).st_ino for fd in peer.regions
    ]
    session.close(30)
    # The peer has two of them, and its ends of the claims; the session its wake-up.
    until(lambda: len(os.listdir("/proc/self/fd")) <= fds + 2 + 1 + 1)


def test_regions_that_come_later_are_announced_as_complete(directory: Path, peer: Peer) -> None:
    ready: list[list[int]] = []

    class Follower(Heard):
        def on_regions_ready(self, session: Session) -> None:
            ready.append(list(self.regions))

    session = Session(options(directory))
    session.subscribe(Follower())
    session.start()
    assert session.wait_connected(30)
    assert ready == [[0, 1]], "without preparing they are there with the handshake"
    session.close(30)
    peer.preparing = True
    session = Session(options(directory))
    session.subscribe(Follower())
    session.start()
    assert session.wait_connected(30)
    assert len(ready) == 1
    peer.conns = [conn for conn in peer.conns if not conn.closed.is_set()]
    peer.ready()
    until(lambda: len(ready) == 2)
    assert ready[1] == [0, 1]
    session.close(30)


def new_control(peer: Peer, generation: int) -> int:
    """The control region of the process that takes over from a peer's."""
    old, peer.control = peer.control, os.memfd_create("control", os.MFD_CLOEXEC)
    os.close(old)
    peer.generation = generation
    peer.set_state(1)
    return peer.control


@pytest.mark.parametrize("generation", [None, 5])
def test_session_goes_on_with_another_process(
    directory: Path, peer: Peer, generation: int | None
) -> None:
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    number, fds = session.session_id, len(os.listdir("/proc/self/fd"))
    peer.set_state(3)  # the process before says that it is over
    assert not session.is_current(number)
    control = new_control(peer, generation or peer.generation)
    moved = wire.Moved(peer.generation, "ipc:///elsewhere", "")
    peer.conns[0].send(moved, control)
    until(lambda: session.is_current(number))
    assert session.session_id == number and session.generation == peer.generation
    assert session.welcome is not None and session.welcome.lookup_endpoint == "ipc:///elsewhere"
    peer.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, 7)
    assert ping(session).wait(30).chunks == 7
    assert session.send(wire.AbortStore(1), number)
    assert peer.wait_for(wire.AbortStore) == [wire.AbortStore(1)]
    peer.set_state(3)
    assert not session.is_current(number), "the new process's control region counts"
    assert heard.lost == 0 and heard.connected == [number]
    assert len(os.listdir("/proc/self/fd")) <= fds
    session.close()


@pytest.mark.parametrize("wrong", ["no fd", "two fds", "another run", "no control region"])
def test_wrong_move_ends_the_session(directory: Path, peer: Peer, wrong: str) -> None:
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    fds = {"no fd": [], "two fds": [peer.control] * 2, "no control region": [peer.regions[0]]}
    generation = peer.generation + (wrong == "another run")
    count = len(os.listdir("/proc/self/fd"))
    peer.conns[0].send(wire.Moved(generation, "", ""), *fds.get(wrong, [peer.control]))
    until(lambda: heard.lost == 1)
    until(lambda: session.connected)
    # Of the new connection: the peer's end of its claim.
    until(lambda: len(os.listdir("/proc/self/fd")) <= count + 1)
    session.close()


# ---- pauses between attempts ----


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("lookaside.retries.time", self)

    def monotonic(self) -> float:
        return self.now


def test_attempts_come_often_for_a_while_after_a_session(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, absent = Clock(monkeypatch), EndpointAbsent("nothing listens")
    early = RefusedError(wire.Refuse(wire.VERSION, "no_worker", "", "", "", ""))
    other = RefusedError(wire.Refuse(wire.VERSION, "incompatible", "", "", "", ""))
    retries = Retries(lambda: "e", RateLimitedLog(logging.getLogger("vllm.lookaside")), None)
    assert [retries.pause_s(absent) for _ in range(5)] == [0.1, 0.2, 0.4, 0.8, 1.0], "never served"
    retries.note_connected()
    clock.now += 60
    attempts = 0
    for error in (ConnectionResetError(), early, HandshakeError("cut short"), absent):
        assert retries.pause_s(error) == 0.02
    while (pause := retries.pause_s(absent)) == 0.02:
        clock.now += pause
        attempts += 1
    assert 200 <= attempts <= 300, "some seconds"
    assert [pause, *(retries.pause_s(absent) for _ in range(4))] == [0.1, 0.2, 0.4, 0.8, 1.0]
    assert len([r for r in caplog.records if "no sidecar" in r.message]) == 1, "a flood of them"
    retries.note_connected()
    clock.now += 60
    assert retries.pause_s(ConnectionResetError()) == 0.02
    assert retries.pause_s(other) == 5.0 and retries.pause_s(EndpointError("mode")) == 1.0


def test_sidecar_that_ends_every_session_at_once_is_not_hammered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    retries = Retries(lambda: "e", RateLimitedLog(logging.getLogger("vllm.lookaside")), None)
    for _ in range(10):
        retries.note_connected()
        clock.now += 0.01
        assert retries.pause_s(ConnectionResetError()) == 0.1


def test_directory_that_others_could_enter_is_refused(directory: Path) -> None:
    with pytest.raises(EndpointAbsent):
        check_directory(str(directory))
    directory.mkdir(mode=0o700)
    check_directory(str(directory))
    with pytest.raises(EndpointAbsent):
        open_endpoint(str(directory))
    os.chmod(directory, 0o750)
    with pytest.raises(EndpointError, match="0750"):
        open_endpoint(str(directory))
    os.chmod(directory, 0o700)
    link = directory.parent / "link"
    link.symlink_to(directory)
    with pytest.raises(EndpointError, match="symbolic"):
        open_endpoint(str(link))
    file = directory.parent / "file"
    file.write_text("")
    with pytest.raises(EndpointError, match="not a directory"):
        open_endpoint(str(file))
    with pytest.raises(EndpointError, match="107"):
        open_endpoint(str(directory.parent / ("x" * 120)))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_directory_of_another_user_is_refused(directory: Path) -> None:
    with serving(directory):
        os.chown(directory, 65534, 65534)
        with pytest.raises(EndpointError, match="65534"):
            open_endpoint(str(directory))
        os.chown(directory, 0, 0)


def test_stale_socket_is_absence(directory: Path) -> None:
    Peer(directory).close()
    assert (directory / "session.sock").exists()
    with pytest.raises(EndpointAbsent):
        open_endpoint(str(directory))


def test_nothing_leaks_over_many_sessions(directory: Path) -> None:
    def run() -> None:
        with serving(directory):
            session = Session(options(directory))
            session.start()
            assert session.wait_connected(30)
            session.close()

    run()
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run()
    until(lambda: threading.active_count() <= threads)
    import gc

    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds + 1


class Readers:
    """Which thread has given each reply to who waits for it."""

    def __init__(self, session: Session) -> None:
        self.names: list[str] = []
        connection = session._connection
        assert connection is not None
        answer = connection._answer

        def noted(message: Any) -> None:
            self.names.append(threading.current_thread().name)
            answer(message)

        connection._answer = noted  # type: ignore[method-assign]


def test_who_waits_here_reads_the_reply(session: Session, peer: Peer) -> None:
    """From the first call or the second on: the session's thread leaves the socket alone."""
    peer.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, 7)
    readers, mine = Readers(session), threading.current_thread().name
    for _ in range(20):
        assert ping(session).wait_here(30).chunks == 7
    assert mine in readers.names
    # Nobody waits here any more: the session's thread reads again.
    assert ping(session).wait(30).chunks == 7
    assert readers.names[-1] == "lookaside-worker"
    assert session.available


def test_threads_that_wait_here_get_their_own_replies(session: Session, peer: Peer) -> None:
    peer.script[wire.ClearSpace] = lambda conn, m: wire.Cleared(m.id, m.id)
    wrong: list[Any] = []

    def ask(here: bool) -> None:
        for _ in range(300):
            sent: list[wire.ClearSpace] = []

            def make(number: int, sent: list[wire.ClearSpace] = sent) -> wire.ClearSpace:
                sent.append(wire.ClearSpace(number))
                return sent[0]

            pending = session.submit(make)
            reply = pending.wait_here(30) if here else pending.wait(30)
            if reply is None or reply.chunks != sent[0].id:
                wrong.append(reply)

    threads = [threading.Thread(target=ask, args=(number != 3,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and session.available


def test_what_comes_before_a_reply_is_handled_before_it(directory: Path, peer: Peer) -> None:
    """A grant may lie in the region that was announced an instant before."""
    heard = Heard()
    session = Session(options(directory))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)

    def grow(conn: Conn, message: Any) -> Any:
        peer.add_region()
        return wire.Cleared(message.id, 0)

    peer.script[wire.ClearSpace] = grow
    for count in range(3, 13):
        assert ping(session).wait_here(30) is not None
        assert len(heard.regions) == count
    session.close()


@pytest.mark.parametrize("end", ["peer", "close", "garbage"])
def test_who_waits_here_notices_the_end(directory: Path, end: str) -> None:
    with serving(directory) as peer:
        session = Session(options(directory))
        session.start()
        assert session.wait_connected(30)
        first = session.session_id
        replies: list[Any] = []
        peer.script[wire.ClearSpace] = lambda conn, m: None
        waiting = threading.Thread(target=lambda: replies.append(ping(session).wait_here(300)))
        waiting.start()
        peer.wait_for(wire.ClearSpace)
        if end == "garbage":
            peer.conns[0].send(b"\xc1")
        elif end == "close":
            session.close(30)
        else:
            peer.conns[0].sock.shutdown(socket.SHUT_RDWR)
        waiting.join(60)
        assert replies == [None]
        if end != "close":
            until(lambda: session.connected and session.session_id != first)
        session.close(30)


def test_a_stopped_peer_is_suspect_also_for_who_waits_here(session: Session, peer: Peer) -> None:
    goes_on = threading.Event()
    peer.script[wire.ClearSpace] = lambda conn, m: goes_on.wait(60) and wire.Cleared(m.id, 1)
    late: list[Any] = []
    pending = session.submit(lambda i: wire.ClearSpace(i), late.append)
    assert pending.wait_here(0.05) is None
    with pytest.raises(SessionUnavailable):
        ping(session)
    goes_on.set()
    until(lambda: late and session.available)
    assert ping(session).wait_here(30).chunks == 1


def test_what_is_sent_later_goes_before_the_next_message(session: Session, peer: Peer) -> None:
    for load in (1, 2):
        assert session.send_later(wire.Release(load, ()), session.session_id)
    ping(session)
    peer.wait_for(wire.ClearSpace)
    assert [each.load for each in peer.of(wire.Release)] == [1, 2]
    session.send_later(wire.Release(3, ()), session.session_id)
    session.flush()
    assert peer.wait_for(wire.Release, 3)[-1].load == 3
    assert not session.send_later(wire.Release(4, ()), session.session_id + 1)


def test_nothing_that_is_sent_later_is_lost(session: Session, peer: Peer) -> None:
    """Not when the socket is full, and not when many wait: they are sent in their order."""
    goes_on = threading.Event()
    peer.script[wire.ClearSpace] = lambda conn, m: goes_on.wait(60) and wire.Cleared(m.id, 1)
    ping(session)
    peer.wait_for(wire.ClearSpace)
    loads = list(range(1, 2001))
    for load in loads:
        assert session.send_later(wire.Release(load, ()), session.session_id)
    session.flush()
    goes_on.set()
    assert [each.load for each in peer.wait_for(wire.Release, len(loads))] == loads
    until(lambda: session.available)
