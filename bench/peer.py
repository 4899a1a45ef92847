"""Bench `peer`: hits at another sidecar of the host, against the same hits in the own arena.

  ttft      Two servers of the demo's small model, each with a sidecar. In every round one of them
            loads a prompt that it had computed itself, and one that only the other had, both with
            its own cache emptied, in either order. A lookup may take two seconds before it is a
            miss, rather than 20 ms: what it takes is in the figure.
  lookup    Two sidecars without vLLM, whose workers have stored prefixes. Lookups over ZMQ of one
            that lies in the own arena and of one at the other alternate: borrowed anew each time
            (`peer`) or a moment before (`lingering`).

The limit of a hit's TTFT is 1.1 times that in the own arena in the same round, that of a lookup's
median twice the own. A round's own ratio is that of its two medians.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lookaside import wire
from lookaside.handshake import SessionOptions
from lookaside.lookups import Lookup, LookupClient
from lookaside.session import Session

from bench._report import Report, arguments
from examples.stand import client, model
from examples.stand.command import ended
from examples.stand.processes import (
    Server,
    Sidecar,
    Stand,
    connector_config,
    eventually,
)
from examples.stand.progress import say

TTFT_LIMIT, LOOKUP_LIMIT = 1.1, 2.0
SIZES = (64, 1024, 4096)
PAGE_TOKENS, PAGE_BYTES, PAGES_PER_CHUNK, DIGEST = 16, 4096, 16, 32
PATIENCE_S = 5.0
PREFIXES = 8  # of each size at each sidecar
WARM_UP = 3  # rounds of hits


class Hits:
    """Two servers apart, and what was measured on them."""

    def __init__(self, stand: Stand, tokens: int, rounds: int) -> None:
        self.tokens = tokens
        self.seconds: dict[str, list[float]] = defaultdict(list)
        room = (WARM_UP + rounds + 2) * tokens * model.kv_bytes_per_token(stand.model)
        settings = {"arena_limit": str(room)}  # nothing is evicted
        self.sidecars: list[Sidecar] = [
            stand.sidecar(name=f"s{number}", settings=settings) for number in range(2)
        ]
        self.servers: list[Server] = [
            stand.server(
                f"p{number}",
                connector=connector_config(stand.endpoint(f"s{number}"), lookup_timeout_ms=2000),
            )
            for number in range(2)
        ]
        for server in self.servers:
            server.wait_ready()
        say("two servers up; warming up ...")
        self._meet()
        for number in range(WARM_UP):
            self._round(-1 - number)
        self.seconds.clear()

    def _meet(self) -> None:
        """Waits until the second server hits what the first has: its worker maps that memory a
        moment later."""
        seeds = itertools.count(1)

        def hit() -> bool:
            prompt = model.prompt(1000, next(seeds))
            self._computed(0, prompt)
            return client.complete(self.servers[1].base_url, prompt).cached_tokens > 0

        eventually(hit, "a hit at the peer", 60)

    def round(self, number: int) -> None:
        self._round(number)

    def _round(self, number: int) -> None:
        mine, theirs = (model.prompt(self.tokens, 50_000 + 10 * number + side) for side in range(2))
        truths = {"own": self._computed(1, mine), "peer": self._computed(0, theirs)}
        prompts = {"own": mine, "peer": theirs}
        for where in ("own", "peer") if number % 2 else ("peer", "own"):
            client.reset_prefix_cache(self.servers[1].base_url)
            client.settle()
            hit = client.complete(self.servers[1].base_url, prompts[where])
            if hit.tokens != truths[where].tokens or hit.cached_tokens < self.tokens - 256:
                raise RuntimeError(
                    f"{where}: {hit.cached_tokens} tokens hit, or the outputs differ"
                )
            self.seconds[where].append(hit.ttft_s)

    def _computed(self, number: int, prompt: list[int]) -> client.Answer:
        """Has a prompt computed, and waits until both sidecars know of it."""
        before = self._known()
        answer = client.complete(self.servers[number].base_url, prompt)
        page_tokens = self.sidecars[number].status()["spaces"][0]["page_tokens"]
        eventually(
            lambda: min(self._known()) >= max(before) + len(prompt) // page_tokens,
            "both to know of it",
            20,
        )
        return answer

    def _known(self) -> list[int]:
        return [
            (s := sidecar.status())["pages"] + s["peers"]["hint_pages"] for sidecar in self.sidecars
        ]


class Shelf:
    """A worker without a KV cache: what it stores has no bytes of its own."""

    def __init__(self, endpoint: Path, name: str) -> None:
        self.session = session_at(endpoint, "worker", name)

    def store(self, hashes: bytes) -> None:
        pages = wire.max_store_pages(DIGEST) // PAGES_PER_CHUNK * PAGES_PER_CHUNK
        for first in range(0, len(hashes) // DIGEST, pages):
            some = hashes[first * DIGEST : (first + pages) * DIGEST]
            prev = hashes[(first - 1) * DIGEST : first * DIGEST] if first else b""
            grant = self.session.submit(
                lambda number, first=first, prev=prev, some=some: wire.PrepareStore(
                    number, first, prev, some, 1, 0
                )
            ).wait(PATIENCE_S)
            if not isinstance(grant, wire.StoreGrant) or grant.shed:
                raise RuntimeError(f"{grant} for a store")
            self.session.send(wire.CommitStore(grant.store), self.session.session_id)


def session_at(endpoint: Path, role: str, name: str) -> Session:
    """A connected session."""
    session = Session(
        SessionOptions(
            endpoint=str(endpoint),
            role=role,
            engine_id=name,
            rank=0,
            page_tokens=PAGE_TOKENS,
            page_bytes=PAGE_BYTES,
            pages_per_chunk=PAGES_PER_CHUNK,
            digest_bytes=DIGEST,
        )
    )
    session.start()
    if not session.wait_connected(PATIENCE_S):
        raise RuntimeError(f"no session at {endpoint}: {session.refused}")
    return session


def prefix(name: str, pages: int) -> bytes:
    """Hashes of a prefix's pages."""
    return b"".join(hashlib.sha256(f"{name} {page}".encode()).digest() for page in range(pages))


class Lookups:
    """Two sidecars and who asks the first of them."""

    def __init__(self, stand: Stand) -> None:
        settings = {"arena_limit": "1G", "arena_kind": "memfd", "peers_linger": "5ms"}
        self.sidecars = [stand.sidecar(name=f"l{number}", settings=settings) for number in range(2)]
        names = ("own", "peer")
        self.shelves = [
            Shelf(sidecar.endpoint, name)
            for sidecar, name in zip(self.sidecars, names, strict=True)
        ]
        self._session = session_at(self.sidecars[0].endpoint, "scheduler", "own")
        self.asker = LookupClient([self._session], PATIENCE_S, 0)
        self.prefixes: dict[tuple[str, int], list[bytes]] = {}
        total = 0
        for shelf, where in zip(self.shelves, names, strict=True):
            for pages in SIZES:
                each = [prefix(f"{where} {pages} {number}", pages) for number in range(PREFIXES)]
                self.prefixes[where, pages] = each
                for hashes in each:
                    shelf.store(hashes)
            total += PREFIXES * sum(SIZES)
        eventually(lambda: self._known() == total, "the first to know what the other holds", 30)

    def _known(self) -> int:
        status = self.sidecars[0].status()
        return status["pages"] + status["peers"]["hint_pages"]

    def round(self, pages: int, count: int) -> dict[str, float]:
        """Medians of so many lookups of each kind, in microseconds."""
        took: dict[str, list[float]] = defaultdict(list)
        for number in range(count):
            for where in ("own", "peer") if number % 2 else ("peer", "own"):
                hashes = self.prefixes[where, pages][number % PREFIXES]
                took[where].append(self._ask(hashes))
                if where == "peer":
                    took["lingering"].append(self._ask(hashes))
                    time.sleep(0.03)  # until it is given back
        return {name: statistics.median(values) for name, values in took.items()}

    def _ask(self, hashes: bytes) -> float:
        began = time.perf_counter_ns()
        lookup: Lookup = self.asker.start(0, b"", hashes)
        hits = self.asker.wait(lookup, PATIENCE_S)
        took = time.perf_counter_ns() - began
        if hits != len(hashes) // DIGEST:
            raise RuntimeError(f"{hits} of {len(hashes) // DIGEST} pages found")
        lookup.cancel()
        return took / 1e3

    def close(self) -> None:
        self.asker.close()
        self._session.close()
        for shelf in self.shelves:
            shelf.session.close()


@contextlib.contextmanager
def lookups() -> Iterator[Lookups]:
    with Stand(Path(tempfile.gettempdir())) as stand:
        each = Lookups(stand)
        try:
            yield each
        finally:
            each.close()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=7, help="of hits in vLLM (default 7; 0: none)"
    )
    parser.add_argument("--tokens", type=int, default=8000, help="of each prompt (default 8000)")
    parser.add_argument(
        "--lookups", type=int, default=7, help="rounds of lookups of each size (default 7)"
    )
    parser.add_argument(
        "--count", type=int, default=100, help="lookups of each kind in a round (default 100)"
    )
    args = parser.parse_args()
    report = Report("peer")
    with ended("peer"):
        if args.lookups:
            say("lookups at two sidecars ...")
            with lookups() as each:
                for pages in SIZES:
                    each.round(pages, args.count)
                    rounds = [each.round(pages, args.count) for _ in range(args.lookups)]
                    own = [r["own"] for r in rounds]
                    report.rounds(f"lookup.{pages}.own", "us", own)
                    for name in ("peer", "lingering"):
                        report.rounds(
                            f"lookup.{pages}.{name}",
                            "us",
                            [r[name] for r in rounds],
                            [LOOKUP_LIMIT * v for v in own],
                        )
        if args.rounds:
            with Stand(model.ensure()) as stand:
                say("starting two vLLM servers (about a minute) ...")
                hits = Hits(stand, args.tokens, args.rounds)
                for number in range(args.rounds):
                    hits.round(number)
                    say(
                        f"round {number + 1} of {args.rounds}, seconds: "
                        + ", ".join(f"{name} {v[-1]:.4f}" for name, v in hits.seconds.items())
                    )
                report.rounds("ttft.own", "s", hits.seconds["own"])
                report.rounds(
                    "ttft.peer",
                    "s",
                    hits.seconds["peer"],
                    [TTFT_LIMIT * v for v in hits.seconds["own"]],
                )
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
