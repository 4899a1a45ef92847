"""Lookups over real ZMQ sockets against ranks that are late, silent, wrong or gone."""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from lookaside import wire
from lookaside.lookups import Lookup, LookupClient
from lookaside.scheduler.waiting import Waiting
from lookaside.session import Session
from lookaside.stats import Collector
from peer import Peer, until
from test_session import options

RANKS = 2


class Clock:
    """Time that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ranks:
    """Some peers and a client of them all."""

    def __init__(self, root: Path, ranks: int = RANKS) -> None:
        self.peers = [Peer(root / f"rank-{rank}") for rank in range(ranks)]
        self.clock = Clock()
        self.sessions = [
            Session(options(root / f"rank-{rank}", role="scheduler", rank=rank))
            for rank in range(ranks)
        ]
        self.counts: Counter[str] = Counter()
        self.client = LookupClient(
            self.sessions,
            1.0,
            10.0,
            self.clock,
            longest_s=5.0,
            count=lambda name: self.counts.update([name]),
        )
        for session in self.sessions:
            session.start()
        for session in self.sessions:
            assert session.wait_connected(30)

    def answers(self, *hits: int | None) -> None:
        """What each rank will answer; None for nothing."""
        for peer, pages in zip(self.peers, hits, strict=True):
            peer.script[wire.Lookup] = lambda conn, m, pages=pages: (
                None if pages is None else wire.LookupResult(m.lookup, pages, pages * 16)
            )

    def close(self) -> None:
        self.client.close()
        for session in self.sessions:
            session.close()
        for peer in self.peers:
            if not peer._stop:
                peer.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    each = Ranks(tmp_path)
    yield each
    each.close()


def tick(ranks: Ranks, lookup: Lookup, seconds: float) -> int | None:
    """What a lookup says after so long."""
    ranks.clock.now += seconds
    return lookup.poll()


@pytest.mark.parametrize(
    ("prefill_s", "patience_s"),
    [(0.0, 1.0), (4.0, 1.0), (30.0, 3.0), (300.0, 5.0)],
    ids=["not known", "short", "a tenth", "the bound"],
)
def test_what_takes_long_to_compute_is_waited_for_longer(
    ranks: Ranks, prefill_s: float, patience_s: float
) -> None:
    ranks.answers(4, None)
    ranks.peers[1].script[wire.Ping] = lambda conn, m: None
    lookup = ranks.client.start(0, b"", bytes(32 * 4), 0, prefill_s)
    assert tick(ranks, lookup, patience_s - 0.01) is None
    assert tick(ranks, lookup, 0.02) == 0
    assert ranks.counts["lookup_timeouts"] == 1
    # Another one is not asked for: the wait is over for all until the sidecar speaks.
    assert ranks.client.start(0, b"", bytes(32 * 4), 0, prefill_s).poll() == 0
    assert ranks.counts["lookups_unasked"] == 1


def test_an_answer_within_that_time_is_a_hit(ranks: Ranks) -> None:
    held: list[Any] = []
    ranks.answers(4, 4)
    ranks.peers[1].script[wire.Lookup] = lambda conn, m: held.append(m)
    ranks.peers[1].script[wire.Cancel] = lambda conn, m: wire.LookupResult(held[0].lookup, 4, 64)
    lookup = ranks.client.start(0, b"", bytes(32 * 4), 0, 30.0)
    assert tick(ranks, lookup, 2.5) is None
    until(lambda: held)
    # Its thread is the only one that may answer: it does when it hears of another lookup's end.
    ranks.client.start(8, b"p" * 32, bytes(32)).cancel()
    assert answered(lookup) == 4 and ranks.counts["lookup_timeouts"] == 0


def test_what_vllm_has_itself_is_not_waited_for(ranks: Ranks) -> None:
    """A conversation's next turn: of a long prompt little is left to compute."""
    ranks.answers(None, None)
    lookup = ranks.client.start(0, b"", bytes(32 * 40), 0, 40.0)
    lookup.trim(20)
    assert tick(ranks, lookup, 1.9) is None
    lookup.trim(39)
    assert lookup.poll() == 0


def test_a_suspect_rank_gets_no_more_than_the_others(ranks: Ranks) -> None:
    ranks.answers(4, None)
    for kind in (wire.Ping, wire.Lookup):
        ranks.peers[1].script[kind] = lambda conn, m: None
    lookup = ranks.client.start(0, b"", bytes(32 * 4), 0, 300.0)
    ranks.sessions[1].doubt()  # as by a Pong that did not come
    assert tick(ranks, lookup, 0.9) is None
    assert tick(ranks, lookup, 0.2) == 0 and ranks.counts["lookup_timeouts"] == 1


def answered(lookup: Lookup) -> Any:
    until(lambda: lookup.poll() is not None)
    return lookup.poll()


def test_hit_is_the_minimum_over_ranks(ranks: Ranks) -> None:
    for hits in [(5, 3), (3, 5), (0, 9), (4, 4)]:
        ranks.answers(*hits)
        assert answered(ranks.client.start(8, b"p" * 32, bytes(32 * 9), 1500)) == min(hits)
    message = ranks.peers[0].of(wire.Lookup)[0]
    assert (message.first_page, message.prev, message.hashes) == (8, b"p" * 32, bytes(32 * 9))
    assert (message.deadline_ms, message.recompute_us) == (10_000, 1500)


def test_refs_name_the_lookup_on_every_rank(ranks: Ranks) -> None:
    ranks.answers(1, 1)
    lookup = ranks.client.start(0, b"", bytes(32))
    answered(lookup)
    for rank, peer in enumerate(ranks.peers):
        (seen,) = peer.of(wire.Lookup)
        welcome = ranks.sessions[rank].welcome
        assert welcome is not None and (seen.session, seen.secret) == (
            welcome.session,
            welcome.secret,
        )
        assert lookup.refs[rank] == (
            seen.session,
            seen.lookup,
            wire.ticket(welcome.secret, seen.lookup),
        )
        assert lookup.refs[rank].ticket.hex() not in repr(lookup.refs), (
            "a ticket is told to workers alone"
        )
        assert repr(lookup.refs[rank].ticket) not in repr(lookup.refs)
    assert lookup.refs[0].ticket != lookup.refs[1].ticket


def test_start_and_poll_do_not_wait(ranks: Ranks) -> None:
    ranks.answers(None, None)
    lookups = [ranks.client.start(0, b"", bytes(32 * 64)) for _ in range(20)]
    for _ in range(50):
        assert all(lookup.poll() is None for lookup in lookups)


def test_deadline_is_a_miss_and_frees(ranks: Ranks) -> None:
    ranks.answers(4, None)
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    ranks.peers[1].wait_for(wire.Lookup)
    assert lookup.poll() is None
    ranks.clock.now += 1.01
    assert lookup.poll() == 0
    assert ranks.counts["lookup_timeouts"] == 1
    for peer in ranks.peers:
        (cancel,) = peer.wait_for(wire.Cancel)
        assert cancel.lookup == lookup.id
    until(lambda: ranks.sessions[1].available)  # the pong has cleared it
    assert lookup.poll() == 0


def test_late_answer_is_cancelled(ranks: Ranks) -> None:
    asked: list[Any] = []
    ranks.answers(4, None)
    ranks.peers[1].script[wire.Lookup] = lambda conn, m: asked.append(m)
    late = ranks.client.start(0, b"", bytes(32 * 4))
    ranks.peers[1].wait_for(wire.Lookup)
    until(lambda: late.poll() is None and 0 not in late._out)  # the other rank's is in
    ranks.clock.now += 2
    assert late.poll() == 0
    ranks.peers[1].wait_for(wire.Cancel)
    until(lambda: ranks.sessions[1].available)
    # The answer comes with the next one's.
    ranks.peers[1].script[wire.Lookup] = lambda conn, m: [
        wire.LookupResult(asked[0].lookup, 4, 64),
        wire.LookupResult(m.lookup, 2, 32),
    ]
    assert answered(ranks.client.start(0, b"", bytes(32 * 4))) == 2
    assert ranks.client.late_answers == 1
    assert ranks.peers[1].wait_for(wire.Cancel, 2)[1].lookup == late.id
    assert late.poll() == 0


def test_suspect_rank_is_not_asked(ranks: Ranks) -> None:
    ranks.answers(4, 4)
    ranks.peers[0].script[wire.Ping] = lambda conn, m: None
    ranks.sessions[0].doubt()
    assert ranks.client.start(0, b"", bytes(32)).poll() == 0
    assert not ranks.peers[1].of(wire.Lookup), "nobody is asked for nothing"
    assert ranks.counts["lookups_unasked"] == 1 and ranks.counts["lookup_timeouts"] == 0


def test_rank_whose_queue_is_full_is_a_miss_and_counted(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.answers(4, 4)
    assert answered(ranks.client.start(0, b"", bytes(32))) == 4
    link = ranks.client._links.present[1]
    assert link is not None
    monkeypatch.setattr(type(link), "send", lambda self, data: self is not link)
    assert ranks.client.start(0, b"", bytes(32)).poll() == 0
    assert ranks.counts["lookups_unasked"] == 1 and ranks.counts["lookup_timeouts"] == 0
    assert ranks.sessions[1].suspect or ranks.peers[1].of(wire.Ping), "doubted until it speaks"


def test_trim_and_cancel_reach_every_rank(ranks: Ranks) -> None:
    ranks.answers(4, 4)
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    assert answered(lookup) == 4
    lookup.trim(2)
    lookup.cancel()
    lookup.cancel()
    assert lookup.poll() == 4
    for peer in ranks.peers:
        assert peer.wait_for(wire.Trim)[0].first_page == 2
        peer.wait_for(wire.Cancel)


def test_cancel_before_the_answer(ranks: Ranks) -> None:
    ranks.answers(None, None)
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    lookup.cancel()
    assert lookup.poll() == 0


def test_nothing_asked_is_nothing_held(ranks: Ranks) -> None:
    assert ranks.client.start(0, b"", b"").poll() == 0
    assert not ranks.peers[0].of(wire.Lookup)


def test_lost_rank_ends_the_lookup_at_once(ranks: Ranks) -> None:
    ranks.answers(4, None)
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    ranks.peers[1].wait_for(wire.Lookup)
    ranks.peers[1].close()
    assert until(lambda: lookup.poll() is not None)
    assert (
        lookup.poll() == 0
        and ranks.counts["lookup_timeouts"] == 0
        and ranks.counts["lookups_unasked"] == 1
    )
    ranks.peers[0].wait_for(wire.Cancel)
    assert ranks.client.start(0, b"", bytes(32)).poll() == 0


def test_reconnected_rank_is_asked_again(ranks: Ranks) -> None:
    ranks.answers(4, 4)
    before = ranks.client.start(0, b"", bytes(32 * 4))
    assert answered(before) == 4
    directory = ranks.peers[1].directory
    ranks.peers[1].close()
    until(lambda: not ranks.sessions[1].connected)
    ranks.peers[1] = Peer(directory)
    ranks.answers(4, 3)
    assert ranks.sessions[1].wait_connected(30)
    assert answered(ranks.client.start(0, b"", bytes(32 * 4))) == 3
    before.cancel()
    ranks.peers[0].wait_for(wire.Cancel)
    time.sleep(0.05)
    assert not ranks.peers[1].of(wire.Cancel), "the new session knows nothing of old lookups"


@pytest.mark.parametrize(
    "garbage", [b"", b"\xc1", b"x" * 200, b"x" * 4096, wire.encode(wire.Pong(1, 1))]
)
def test_garbage_answers_are_dropped(ranks: Ranks, garbage: bytes) -> None:
    ranks.answers(4, 4)
    ranks.peers[0].script[wire.Lookup] = lambda conn, m: [
        garbage,
        wire.LookupResult(m.lookup, 4, 64),
    ]
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    if len(garbage) > 256:
        # ZMQ drops the connection of one that sends too much; the deadline remains.
        time.sleep(0.1)
        ranks.clock.now += 2
        assert lookup.poll() in (0, 4)
    else:
        assert answered(lookup) == 4


def test_same_answer_twice_counts_once(ranks: Ranks) -> None:
    ranks.answers(4, None)
    ranks.peers[0].script[wire.Lookup] = lambda conn, m: [wire.LookupResult(m.lookup, 4, 64)] * 2
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    time.sleep(0.1)
    assert lookup.poll() is None


# ---- ranks that promote ----


def pending(ranks: Ranks, *etas_ms: int | None) -> Lookup:
    """A lookup that each rank has promised pages for after its eta; None: that rank says
    nothing."""
    for peer, eta_ms in zip(ranks.peers, etas_ms, strict=True):
        peer.script[wire.Lookup] = lambda conn, m, eta_ms=eta_ms: (
            None if eta_ms is None else wire.LookupPending(m.lookup, 4, eta_ms)
        )
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    wanted = {rank for rank, eta_ms in enumerate(etas_ms) if eta_ms is not None}
    for peer in ranks.peers:
        peer.wait_for(wire.Lookup)
    until(lambda: lookup.poll() is None and lookup._promised.keys() == wanted)
    return lookup


def answer(ranks: Ranks, rank: int, lookup: Lookup, pages: int) -> None:
    """Have a rank answer a lookup that it has been asked before. By way of another one's
    message."""
    peer = ranks.peers[rank]
    done = len(peer.of(wire.Cancel))
    peer.script[wire.Cancel] = lambda conn, m: wire.LookupResult(lookup.id, pages, pages * 16)
    link = ranks.client._links.present[rank]
    assert link is not None
    link.send(wire.encode(wire.Cancel(link.session_id, link.secret, 1)))
    peer.wait_for(wire.Cancel, done + 1)


def test_a_promise_extends_the_wait(ranks: Ranks) -> None:
    lookup = pending(ranks, 3000, 200)
    assert ranks.counts["lookups_promoted"] == 1
    ranks.clock.now += 5.9  # long past the first wait, and within 2 * 3 s + 0.1 s
    answer(ranks, 1, lookup, 3)
    time.sleep(0.05)
    assert lookup.poll() is None, "pending while any rank is"
    answer(ranks, 0, lookup, 4)
    assert answered(lookup) == 3
    assert ranks.counts["lookup_timeouts"] == 0 and all(
        session.available for session in ranks.sessions
    )


@pytest.mark.parametrize(
    "eta_ms, patience_s", [(0, 1.0), (200, 1.0), (2000, 4.1), (5000, 10.0), (0xFFFFFFFF, 10.0)]
)
def test_the_extended_wait_ends_too(ranks: Ranks, eta_ms: int, patience_s: float) -> None:
    """At twice the promised time and a little, never before the first wait's end, never after
    promotion_timeout_s."""
    lookup = pending(ranks, eta_ms, eta_ms)
    ranks.clock.now += patience_s - 0.01
    assert lookup.poll() is None
    ranks.clock.now += 0.02
    assert lookup.poll() == 0 and ranks.counts["lookup_timeouts"] == 1
    for peer in ranks.peers:
        assert peer.wait_for(wire.Cancel)[0].lookup == lookup.id


def test_promises_again_and_again_extend_the_wait_no_further(ranks: Ranks) -> None:
    """Asking a tier may take long, too, and its pages longer: later promises count, within the
    first one's bound."""
    lookup = pending(ranks, 100, 100)
    for peer in ranks.peers:
        peer.script[wire.Trim] = lambda conn, m: wire.LookupPending(m.lookup, 4, 4000)
    for turn, later in enumerate((0.9, 8.0, 1.05)):
        ranks.clock.now += later
        assert lookup.poll() is None, turn
        before = dict(lookup._out)
        lookup.trim(0)
        for peer in ranks.peers:
            peer.wait_for(wire.Trim, turn + 1)
        if turn < 2:  # the last one changes nothing
            until(
                lambda before=before: (
                    lookup.poll() is None
                    and all(lookup._out[rank] > at for rank, at in before.items())
                )
            )
        assert lookup.poll() is None
    ranks.clock.now += 0.1
    assert (
        lookup.poll() == 0
        and ranks.counts["lookups_promoted"] == 1
        and ranks.counts["lookup_timeouts"] == 1
    )


def test_a_rank_without_a_promise_has_its_first_wait_only(ranks: Ranks) -> None:
    lookup = pending(ranks, 2000, None)
    ranks.clock.now += 0.99
    assert lookup.poll() is None
    ranks.clock.now += 0.02
    assert lookup.poll() == 0 and ranks.counts["lookup_timeouts"] == 1
    ranks.peers[0].wait_for(wire.Cancel)


def test_a_promise_read_late_counts_from_then(ranks: Ranks) -> None:
    """The scheduler was busy past the first wait: what has come meanwhile is read first."""
    for peer in ranks.peers:
        peer.script[wire.Lookup] = lambda conn, m: wire.LookupPending(m.lookup, 4, 100)
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    for peer in ranks.peers:
        peer.wait_for(wire.Lookup)
    fds = [link.fileno() for link in ranks.client._links.present if link is not None]
    until(lambda: len(select.select(fds, [], [], 0)[0]) == len(fds))
    ranks.clock.now += 5
    assert lookup.poll() is None and ranks.counts["lookup_timeouts"] == 0
    for rank in (0, 1):
        answer(ranks, rank, lookup, 4)
    assert answered(lookup) == 4


def test_lost_while_pending_is_a_miss_at_once(ranks: Ranks) -> None:
    lookup = pending(ranks, 5000, 5000)
    ranks.peers[1].close()
    until(lambda: lookup.poll() is not None)
    assert (
        lookup.poll() == 0
        and ranks.counts["lookups_unasked"] == 1
        and ranks.counts["lookup_timeouts"] == 0
    )
    ranks.peers[0].wait_for(wire.Cancel)


def test_trim_and_cancel_while_pending(ranks: Ranks) -> None:
    lookup = pending(ranks, 5000, 5000)
    lookup.trim(2)
    assert lookup.poll() is None
    lookup.cancel()
    assert lookup.poll() == 0
    for peer in ranks.peers:
        assert peer.wait_for(wire.Trim)[0].first_page == 2
        peer.wait_for(wire.Cancel)
    late = len(ranks.peers[0].of(wire.Cancel))
    answer(ranks, 0, lookup, 4)  # what had been promoted already is given back
    ranks.peers[0].script.clear()
    ranks.answers(1, 1)
    assert answered(ranks.client.start(0, b"", bytes(32))) == 1
    assert ranks.client.late_answers == 1
    ranks.peers[0].wait_for(wire.Cancel, late + 2)


def test_promises_to_nobody_are_dropped(ranks: Ranks) -> None:
    ranks.answers(2, 2)
    ranks.peers[0].script[wire.Lookup] = lambda conn, m: [
        wire.LookupPending(m.lookup + 1, 4, 5000),
        wire.LookupResult(m.lookup, 2, 32),
        wire.LookupPending(m.lookup, 4, 5000),
    ]
    lookup = ranks.client.start(0, b"", bytes(32 * 4))
    assert answered(lookup) == 2
    assert answered(ranks.client.start(0, b"", bytes(32 * 4))) == 2
    assert ranks.counts["lookups_promoted"] == 0


def test_without_promotions_a_promise_changes_nothing(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ranks=1)
    ranks.client._promotion_timeout_s = 0
    ranks.peers[0].script[wire.Lookup] = lambda conn, m: wire.LookupPending(m.lookup, 4, 5000)
    lookup = ranks.client.start(0, b"", bytes(32))
    ranks.peers[0].wait_for(wire.Lookup)
    time.sleep(0.05)
    assert lookup.poll() is None
    ranks.clock.now += 1.01
    assert lookup.poll() == 0
    ranks.close()


def test_first_lookup_of_a_session_is_answered(tmp_path: Path) -> None:
    """The reply socket is up before the session counts as connected."""
    for attempt in range(10):
        ranks = Ranks(tmp_path / str(attempt), ranks=1)
        ranks.answers(1)
        assert answered(ranks.client.start(0, b"", bytes(32))) == 1
        ranks.close()


def test_wait_is_poll_with_patience(ranks: Ranks) -> None:
    ranks.client._clock, ranks.client._timeout_s = time.monotonic, 60.0
    ranks.answers(4, 4)
    assert ranks.client.wait(ranks.client.start(0, b"", bytes(32 * 4)), 60) == 4
    ranks.answers(None, None)
    assert ranks.client.wait(ranks.client.start(0, b"", bytes(32 * 4)), 0.01) is None


def test_closed_client_misses(ranks: Ranks) -> None:
    ranks.client.close()
    assert ranks.client.start(0, b"", bytes(32)).poll() == 0
    ranks.client.close()


def test_an_answer_on_its_way_is_waited_for(ranks: Ranks) -> None:
    ranks.answers(5, 3)
    lookup = ranks.client.start(0, b"", bytes(32 * 8))
    assert lookup.wait(30) == 3


def test_what_waits_for_a_tier_is_not_waited_for(ranks: Ranks) -> None:
    for peer in ranks.peers:
        peer.script[wire.Lookup] = lambda conn, m: wire.LookupPending(m.lookup, 0, 0)
    lookup = ranks.client.start(0, b"", bytes(32 * 8))
    assert lookup.wait(1000) is None  # as soon as it is known
    assert ranks.counts["lookups_promoted"] == 0
    for rank in (0, 1):
        answer(ranks, rank, lookup, 4)
    assert answered(lookup) == 4


def test_a_silent_rank_is_waited_for_once_until_it_speaks(ranks: Ranks) -> None:
    ranks.answers(8, None)
    first = ranks.client.start(0, b"", bytes(32 * 8))
    second = ranks.client.start(0, b"", bytes(32 * 8))
    for peer in ranks.peers:
        peer.wait_for(wire.Lookup, 2)
    assert first.wait(0.001) is None
    assert first.wait(1000) is None and second.wait(1000) is None
    answer(ranks, 1, first, 6)
    assert answered(first) == 6
    ranks.answers(8, 7)
    assert ranks.client.start(0, b"", bytes(32 * 8)).wait(30) == 7


def test_only_waits_are_measured(ranks: Ranks) -> None:
    """Neither what waits for a tier is one, nor what a silent rank is asked meanwhile."""
    stats = Collector()
    config = SimpleNamespace(lookup_wait_ms=30_000, lookup_wait_step_ms=60_000)
    setup: Any = SimpleNamespace(config=config, clock=time.monotonic, stats=stats)
    waiting = Waiting(setup)

    def measured() -> int:
        taken = stats.take()
        return len(taken.data["lookup_wait_seconds"]) if taken else 0

    for peer in ranks.peers:
        peer.script[wire.Lookup] = lambda conn, m: wire.LookupPending(m.lookup, 0, 0)
    lookup = ranks.client.start(0, b"", bytes(32 * 8))
    assert waiting.answer(lookup) is None and measured() <= 1, "until it was known"
    assert waiting.answer(lookup) is None and not measured()

    ranks.answers(8, None)
    config.lookup_wait_ms = 1
    waiting = Waiting(setup)
    first, second = (ranks.client.start(0, b"", bytes(32 * 8)) for _ in range(2))
    assert waiting.answer(first) is None and measured() == 1
    assert waiting.answer(first) is None and waiting.answer(second) is None and not measured()


def test_what_the_direct_socket_does_not_take_goes_over_zmq(ranks: Ranks) -> None:
    """A lookup that is longer than a packet may be, and lookups that nobody reads for a while."""
    ranks.answers(9, 9)
    assert ranks.client.start(0, b"", bytes(32 * 60_000)).wait(30) == 9
    lookups = [ranks.client.start(0, b"", bytes(32 * 4000)) for _ in range(40)]
    assert [lookup.wait(30) for lookup in lookups] == [9] * 40


def test_long_lookups_go_to_the_process_that_has_taken_over(ranks: Ranks, tmp_path: Path) -> None:
    """The direct socket is the same; the endpoint for what it does not take may be another."""
    ranks.answers(9, 9)
    assert ranks.client.start(0, b"", bytes(32 * 60_000)).wait(30) == 9
    endpoint = f"ipc://{tmp_path}/elsewhere.sock"
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind(endpoint)
        peer, session = ranks.peers[0], ranks.sessions[0]
        peer.conns[0].send(wire.Moved(peer.generation, endpoint, ""), peer.control)
        until(lambda: session.welcome is not None and session.welcome.lookup_endpoint == endpoint)
        lookup = ranks.client.start(0, b"", bytes(32 * 60_000))
        assert pull.poll(30_000), "it went to the process before"
        message = msgspec.msgpack.decode(pull.recv(), type=wire.Lookup)
        assert message.session == session.session_id and len(message.hashes) == 32 * 60_000
        # The answer, and what fits a packet, go over the direct socket.
        peer.answer_lookup(message.session, wire.LookupResult(message.lookup, 9, 9 * 16))
        assert lookup.wait(30) == 9
        assert ranks.client.start(0, b"", bytes(32 * 4)).wait(30) is not None


def test_a_dead_rank_is_not_waited_for(ranks: Ranks) -> None:
    ranks.answers(8, None)
    lookup = ranks.client.start(0, b"", bytes(32 * 8))
    ranks.peers[1].wait_for(wire.Lookup)
    ranks.peers[1].close()
    assert lookup.wait(30) == 0
