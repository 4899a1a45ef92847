"""An engine whose ranks are on two hosts: its scheduler looks up in the sidecar of the other one.

The hosts are network namespaces (netns.py). Both roles, vLLM's real Scheduler and the real sidecars
as in test_engine.py.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import netns
import pytest
from lookaside import places, space, wire
from lookaside.config import parse
from lookaside.endpoint import (
    HOSTS_SOCKET_NAME,
    EndpointAbsent,
    EndpointError,
    open_endpoint,
)
from lookaside.places import Place, Places, Whereabouts
from peer import Peer, until
from scheduling import BLOCK, full_attention, make_config, tokens
from test_engine import BINARY, Engine, Sidecar, hits_again
from test_session import options

HEADS = [replace(full_attention(), num_kv_heads=2)]
PORT = 7411
PAGES = 9
PROMPT = tokens(PAGES * BLOCK + 1)

real = pytest.mark.skipif(
    netns.missing() is not None or not BINARY.exists(),
    reason=netns.missing() or "bin/lookaside is not built",
)


@pytest.fixture
def pair() -> Iterator[tuple[netns.Host, netns.Host]]:
    hosts = netns.two_hosts()
    yield hosts
    for host in hosts:
        host.close()


class TwoHosts:
    """A sidecar on each of two hosts, and engines with a rank on each."""

    def __init__(self, pair: tuple[netns.Host, netns.Host], root: Path, model: Path) -> None:
        self.hosts = pair
        self.root = root
        self.model = model
        self.sidecars: list[Sidecar] = []
        self.engines: list[Engine] = []

    def start(self, *arguments: str) -> None:
        for host in self.hosts:
            self.start_on(host, *arguments)

    def start_on(self, host: netns.Host, *arguments: str) -> None:
        self.sidecars.append(
            Sidecar(
                self.root / f"rank-{len(self.sidecars)}",
                "--peers-enabled=false",
                f"--hosts-listen={host.address}:{PORT}",
                *(argument.replace("ADDRESS", host.address) for argument in arguments),
                wrap=host.wrap,
            )
        )
        self.sidecars[-1].wait_serving()

    def engine(self, kind: type[Engine] = Engine, **extra: Any) -> Engine:
        settings: dict[str, Any] = {
            "lookaside.endpoint": str(self.root / "rank-{rank}"),
            "lookaside.remote_endpoint": ["", f"{self.hosts[1].address}:{PORT}"],
            "lookaside.lookup_timeout_ms": 60_000,  # the machine is shared
            "lookaside.store_timeout_ms": 60_000,
            "lookaside.load_timeout_ms": 60_000,
            **extra,
        }
        settings = {name: value for name, value in settings.items() if value is not None}
        self.engines.append(kind(make_config(self.model, settings, tp=2), HEADS))
        return self.engines[-1]

    def status(self, rank: int) -> dict[str, Any]:
        transport = httpx.HTTPTransport(uds=str(self.root / f"rank-{rank}" / "admin.sock"))
        with httpx.Client(transport=transport, timeout=60) as client:
            return client.get("http://localhost/v1/status").json()

    def close(self) -> None:
        for engine in self.engines:
            engine.shutdown()
        for each in self.sidecars:
            with contextlib.suppress(ProcessLookupError):
                each.signal(signal.SIGCONT)
                each.kill()


@pytest.fixture
def two(pair: Any, tmp_path: Path, model: Path) -> Iterator[TwoHosts]:
    made = TwoHosts(pair, tmp_path, model)
    yield made
    made.close()


def token(tmp_path: Path, text: str) -> str:
    file = tmp_path / f"token-{text}"
    file.write_text(f"{text}\n")
    file.chmod(0o600)
    return f"--hosts-token-file={file}"


def available(engine: Engine) -> bool:
    return engine.role.setup.sidecars.available


@real
def test_the_other_host_hits_goes_away_and_comes_back(two, tmp_path):
    two.start(token(tmp_path, "secret"))
    one, other = two.engine(), two.engine()
    assert one.ask(PROMPT)[1] == 0
    assert other.ask(PROMPT)[1] == PAGES, "what one has stored the other loads"
    carried = two.status(1)["hosts"]["carried"]
    assert [(each["direction"], each["rank"]) for each in carried] == [("in", 1)] * 2
    assert carried[0]["address"].startswith(f"{two.hosts[0].address}:")
    assert [each["direction"] for each in two.status(0)["hosts"]["carried"]] == ["out"] * 2

    # A lookup that is out when the cable is cut is a miss in time, and so is what comes after.
    assert one.role.setup.sidecars.max_pages <= 8192, "a lookup must fit a packet"
    two.hosts[1].link(False)
    one.role.setup.sidecars._lookups._timeout_s = 0.2
    one.forget_local()
    began = time.monotonic()
    assert one.ask(PROMPT)[1] == 0
    assert one.ask(tokens(PAGES * BLOCK + 1, seed=2))[1] == 0
    assert time.monotonic() - began < 10
    # Both kernels find that the other host is dead: what it had leased is free.
    until(lambda: not two.status(1)["hosts"]["carried"] and not two.status(1)["leases"], 60)
    until(lambda: not available(one), 60)

    two.hosts[1].link(True)
    one.role.setup.sidecars._lookups._timeout_s = 60
    until(lambda: available(one), 60)
    assert hits_again(one, PROMPT)
    for engine in (one, other):
        assert engine.workers.invalid == engine.workers.failed == 0


@real
def test_the_other_hosts_sidecar_is_killed_and_restarted(two, tmp_path):
    two.start(token(tmp_path, "secret"))
    engine = two.engine()
    engine.ask(PROMPT)
    assert hits_again(engine, PROMPT)
    two.sidecars[1].kill()
    until(lambda: not available(engine), 60)
    engine.forget_local()
    assert engine.ask_without(PROMPT) == 0
    two.sidecars[1].start()
    until(lambda: hits_again(engine, PROMPT), 120)
    # The sidecar of the scheduler's own host carries the session: both ranks' sessions end.
    two.sidecars[0].kill()
    until(lambda: not any(s.connected for s in engine.role.setup.sidecars.sessions), 60)
    two.sidecars[0].start()
    until(lambda: hits_again(engine, PROMPT), 120)


class Placed(Engine):
    """As vLLM does before it serves, the workers tell their scheduler where their sidecars are."""

    def connect(self, patience_s: float = 60.0) -> None:
        told: dict[tuple[int, int], Any] = {}
        for rank, role in enumerate(self.workers.roles):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("vllm.distributed.kv_transfer.get_kv_transfer_group", lambda: None)
                assert role.get_handshake_metadata() is None, "MultiConnector would pass it on"
                patch.setattr(
                    "vllm.distributed.kv_transfer.get_kv_transfer_group", lambda role=role: role
                )
                told[0, rank] = role.get_handshake_metadata()
        told[1, 0] = object()  # another connector's
        assert not any(session.connected for session in self.role.setup.sidecars.sessions)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(told)
        super().connect(patience_s)


@real
def test_workers_say_where_their_sidecars_are(two, tmp_path, monkeypatch):
    """Nothing is configured. Then the sidecar of the other host comes back with another port, which
    its worker reports with a step."""
    survey = places.survey

    def elsewhere(endpoint: str, host: str, connected: bool) -> Place:
        place = survey(endpoint, host, connected)
        return replace(place, boot_id="another kernel") if endpoint.endswith("-1") else place

    monkeypatch.setattr(places, "survey", elsewhere)
    monkeypatch.setattr(space, "may_span_hosts", lambda config: True)
    two.start(token(tmp_path, "secret"))
    engine = two.engine(Placed, **{"lookaside.remote_endpoint": None})
    where = [session.options.remote for session in engine.role.setup.sidecars.sessions]
    assert where == ["", f"{two.hosts[1].address}:{PORT}"]
    engine.ask(PROMPT)
    assert hits_again(engine, PROMPT)

    two.sidecars[1].kill()
    until(lambda: not available(engine), 60)
    two.sidecars[1].arguments += (f"--hosts-listen={two.hosts[1].address}:{PORT + 1}",)
    two.sidecars[1].start()
    until(lambda: hits_again(engine, PROMPT), 120)
    where = [session.options.remote for session in engine.role.setup.sidecars.sessions]
    assert where == ["", f"{two.hosts[1].address}:{PORT + 1}"]


@real
def test_a_reset_reaches_the_other_host(two, tmp_path):
    """While it is away, a note in the directory of the scheduler's host says what is void."""
    two.start(token(tmp_path, "secret"))
    engine = two.engine(**{"lookaside.reset_timeout_ms": 300})
    engine.ask(PROMPT)
    assert hits_again(engine, PROMPT)
    two.hosts[1].link(False)
    until(lambda: not available(engine), 60)
    engine.reset()
    notes = two.root / "rank-0"
    assert len(list(notes.glob("void-*"))) == 1, "that of the other host: this one is cleared"
    assert two.status(0)["pages"] == 0 and two.status(1)["pages"] == PAGES
    engine.shutdown()
    two.hosts[1].link(True)
    again = two.engine()
    assert again.ask(PROMPT)[1] == 0, "the next engine clears it before it asks"
    assert not list(notes.glob("void-*"))
    assert hits_again(again, PROMPT)


@real
@pytest.mark.parametrize("mutual", [False, True], ids=["token", "certificates"])
def test_tls(two, tmp_path, mutual):
    directory = netns.certificates(tmp_path, *(host.address for host in two.hosts))
    arguments = [
        f"--hosts-ca-file={directory}/ca.crt",
        f"--hosts-cert-file={directory}/ADDRESS.crt",
        f"--hosts-key-file={directory}/ADDRESS.key",
        f"--hosts-client-ca-file={directory}/ca.crt" if mutual else token(tmp_path, "secret"),
    ]
    two.start(*arguments)
    engine = two.engine()
    engine.ask(PROMPT)
    assert hits_again(engine, PROMPT)


@real
def test_the_log_names_what_is_wrong(two, tmp_path, caplog):
    """The engine serves without hits, and the reason is one that its user can act upon."""
    two.start_on(two.hosts[0], token(tmp_path, "secret"))
    two.start_on(two.hosts[1], token(tmp_path, "other"))
    with caplog.at_level(logging.WARNING, "vllm.lookaside"), pytest.raises(AssertionError):
        original, Engine.connect = Engine.connect, lambda self: original(self, 3.0)
        try:
            two.engine()
        finally:
            Engine.connect = original
    assert "hosts.token_file must have the same one on all hosts" in caplog.text
    assert "secret" not in caplog.text
    address = (two.root / "rank-1" / "admin.addr").read_text().strip()
    assert address.startswith("127."), "of its own namespace"
    assert two.status(1)["hosts"]["refused"] >= 1


def test_a_sidecar_that_carries_nothing_says_which_setting_is_missing(tmp_path):
    peer = Peer(tmp_path / "own")
    with pytest.raises(EndpointError, match=r"set hosts\.token_file, or hosts\.listen"):
        open_endpoint(str(tmp_path / "own"), HOSTS_SOCKET_NAME)
    peer.close()
    # One that was killed may have carried.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "own" / HOSTS_SOCKET_NAME))
    with pytest.raises(EndpointAbsent):
        open_endpoint(str(tmp_path / "own"), HOSTS_SOCKET_NAME)


# ---- where the ranks are ----


class Started:
    """A session that notes what it is aimed at."""

    def __init__(self, rank: int, ranks: int = 1) -> None:
        self.options = replace(options(Path("/nowhere"), role="scheduler", rank=rank), ranks=ranks)
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    @property
    def aim(self) -> tuple[str, str] | None:
        return (self.options.endpoint, self.options.remote) if self.starts else None


def sessions_of(root: Path, ranks: int, **extra: Any) -> tuple[list[Any], Places]:
    config = parse({"lookaside.endpoint": str(root / "rank-{rank}"), **extra})
    made = [Started(rank) for rank in range(ranks)]
    return made, Places(config, 0, made, True)  # type: ignore[arg-type]


def elsewhere(address: str = "", connected: bool = True) -> Place:
    return Place("10.0.0.2", "another kernel", (1, 2), address, connected)


def endpoint(root: Path, rank: int) -> str:
    (root / f"rank-{rank}").mkdir(exist_ok=True)
    return str(root / f"rank-{rank}")


def test_sessions_begin_as_their_ranks_are_placed(tmp_path):
    made, where = sessions_of(tmp_path, 3)
    where.start()
    assert [session.aim for session in made] == [None] * 3
    where.learn({2: elsewhere("10.0.0.2:7411")})
    own = endpoint(tmp_path, 1)
    assert made[2].aim == (str(tmp_path / "rank-0"), "10.0.0.2:7411"), "no rank is known to be here"
    where.learn({1: places.survey(own, "10.0.0.1", True)})
    assert made[1].aim == (own, "") and made[0].aim is None
    assert made[2].aim == (own, "10.0.0.2:7411"), "a sidecar of this host carries it"
    # Its sidecar comes back with another port.
    where.learn({2: elsewhere("10.0.0.2:7500")})
    assert made[2].aim == (own, "10.0.0.2:7500") and made[2].starts == 1


def test_a_directory_of_another_host_is_no_directory_of_this_one(tmp_path):
    own = endpoint(tmp_path, 0)
    here = places.survey(own, "h", True)
    assert places.is_here(here, own)
    assert not places.is_here(replace(here, boot_id="another kernel"), own)
    # A container of this machine with a directory of its own under the same path.
    assert not places.is_here(replace(here, directory=(1, 2)), own)
    assert not places.is_here(here, str(tmp_path / "not mounted here"))
    # One that is still to be made; the worker reports again when it is.
    assert places.is_here(replace(here, directory=None), own)


def test_a_sidecar_that_accepts_nobody_is_named_once(tmp_path, caplog):
    made, where = sessions_of(tmp_path, 2)
    own = places.survey(endpoint(tmp_path, 0), "10.0.0.1", True)
    with caplog.at_level(logging.WARNING, "vllm.lookaside"):
        where.learn({0: own, 1: elsewhere(connected=False)})
        assert not caplog.records, "its worker is not connected: that is what its own log says"
        for _ in range(2):
            where.learn({1: elsewhere()})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "10.0.0.2" in caplog.text and "hosts.listen" in caplog.text
    assert made[0].aim is not None and made[1].aim is None


def test_an_address_template_overrides_what_workers_say(tmp_path):
    made, where = sessions_of(
        tmp_path, 2, **{"lookaside.remote_endpoint": "{host}:74{rank}{dp_rank}"}
    )
    own = endpoint(tmp_path, 0)
    where.learn({0: places.survey(own, "10.0.0.1", True), 1: elsewhere("10.0.0.2:1")})
    assert made[1].aim == (own, "10.0.0.2:7410")
    where.learn({1: replace(elsewhere(), host="fe80::2")})
    assert made[1].aim == (own, "[fe80::2]:7410")


def test_a_list_needs_no_worker(tmp_path, caplog):
    made, where = sessions_of(
        tmp_path, 4, **{"lookaside.remote_endpoint": ["n{rank}:1", "", "n{rank}:2"]}
    )
    with caplog.at_level(logging.WARNING, "vllm.lookaside"):
        where.start()
    own = str(tmp_path / "rank-1")
    assert [session.aim for session in made] == [(own, "n0:1"), (own, ""), (own, "n2:2"), None]
    assert "lists 3 ranks, and rank 3 is not among them" in caplog.text
    where.learn({3: elsewhere("a:1")})
    assert made[3].aim is None


def test_ranks_that_are_looked_up_together_must_be_on_one_host(tmp_path, caplog):
    config = parse({"lookaside.endpoint": str(tmp_path)})
    session: Any = Started(0, ranks=2)
    where = Places(config, 0, [session], True)
    with caplog.at_level(logging.WARNING, "vllm.lookaside"):
        where.learn({0: places.survey(str(tmp_path), "h", True)})
        assert session.aim is None and not caplog.records
        where.learn({1: elsewhere("a:1")})
    assert session.aim is None and "put {rank} into lookaside.endpoint" in caplog.text
    where.learn({1: places.survey(str(tmp_path), "h", True)})
    assert session.aim == (str(tmp_path), "")


def test_a_worker_reports_where_its_sidecar_is_when_that_changes(tmp_path):
    where = Whereabouts(3, str(tmp_path), "10.0.0.7")
    first = where.take()[3]
    assert (first.host, first.address, first.connected) == ("10.0.0.7", "", False)
    assert where.take() == {}
    for text, address in [
        ("0.0.0.0:7411\n", "10.0.0.7:7411"),
        ("[::]:7412\n", "10.0.0.7:7412"),
        ("[fe80::1]:7411\n", "[fe80::1]:7411"),
        ("10.1.1.1:7411\n", "10.1.1.1:7411"),
    ]:
        (tmp_path / places.ADDRESS_NAME).write_text(text)
        assert where.take() == {}, "nothing is read in every step"
        where.on_connected(None, None)  # type: ignore[arg-type]
        assert where.take()[3].address == address
        where.on_connected(None, None)  # type: ignore[arg-type]
        assert where.take() == {}, "the same place"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{host}", "not HOST:PORT"),
        ("{host}:x", "not HOST:PORT"),
        (":7411", "not HOST:PORT"),
        ("{host}:70000", "not HOST:PORT"),
        ("{node}:7411", "may stand in braces"),
        ("{host:7411", "may stand in braces"),
        ("::1:7411", "in brackets"),
        (["{host}:7411"], "may stand in braces"),
        ([], "leave the setting out"),
        (7411, "not a non-empty string"),
    ],
)
def test_addresses_that_cannot_be_are_refused(value, says):
    with pytest.raises(ValueError, match=says):
        parse({"lookaside.remote_endpoint": value})


def test_a_reach_is_what_the_sidecar_reads():
    assert wire.encode(wire.Reach(wire.VERSION, "a:1"))[1] == 80
