"""The scheduler role's sessions with the sidecars of all ranks, as one thing.

An engine with N ranks has N sidecars, or one for all ranks of a host. They are connected in the
background; those of other hosts as places.py says. Until all of them are connected, everything is a
miss.

A session is of one space of one sidecar. Ranks that hold the same pages (space.replicas) have the
same space. If they have the same sidecar too, one session speaks for all of them: a page is looked
up, and leased, once.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lookaside import about, space, wire
from lookaside.clearing import Clearing
from lookaside.config import Config
from lookaside.events import SessionFeed
from lookaside.handshake import SessionOptions
from lookaside.lookups import Lookup, LookupClient
from lookaside.places import Place, Places
from lookaside.session import Session, Subscriber
from lookaside.stats import Collector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# While a rank is not connected, nothing is looked up there, and it limits no lookup.
_NO_LIMIT = sys.maxsize


class RankSidecars:
    """All ranks' sidecars. For the scheduler's thread alone; the sessions have their own."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        stats: Collector,
    ) -> None:
        """Open nothing; connect does. Lookups are counted in stats."""
        where = space.world(vllm_config)
        geometry, _ = space.geometry(config, vllm_config, kv_cache_config)
        transfer: Any = vllm_config.kv_transfer_config
        self._replicas = space.replicas(vllm_config, kv_cache_config)
        self._held_back = False
        self._named: str | None = None  # written by the sessions' threads
        heads = space.same_heads(vllm_config, kv_cache_config)
        together = self._replicas if config.one_sidecar else 1
        if together > 1:
            # Ranks of several hosts have several sidecars, whatever their directory is called.
            together = math.gcd(together, max(1, where.ranks // space.hosts(vllm_config)))
        # Of each session's space, without the epoch, by the session's first rank.
        self._fields = {
            rank: space.space_fields(
                vllm_config,
                place=rank % where.stage_size,
                pp_rank=rank // where.stage_size,
                heads=heads,
                engine_id=transfer.engine_id,
                geometry=geometry,
            )
            for rank in range(0, where.ranks, together)
        }
        told_about = about.of_engine(config, vllm_config, kv_cache_config)
        self.sessions = [
            Session(
                SessionOptions(
                    endpoint=config.endpoint_for(rank, where.dp_rank),
                    role="scheduler",
                    engine_id=transfer.engine_id,
                    rank=rank,
                    ranks=together,
                    page_tokens=geometry.page_tokens,
                    page_bytes=0,  # only the worker knows
                    pages_per_chunk=geometry.pages_per_chunk,
                    digest_bytes=geometry.digest_bytes,
                    fields=space.with_epoch(fields, config.weights_epoch),
                    about=told_about,
                ),
                # The worker starts the sidecar, and logs what there is to log.
                on_absent=(lambda: None) if config.autostart else None,
            )
            for rank, fields in self._fields.items()
        ]
        for session in self.sessions:
            session.subscribe(_Namer(self))
        self._places = Places(
            config, where.dp_rank, self.sessions, space.may_span_hosts(vllm_config)
        )
        self._clearing = Clearing(self.sessions)
        self._lookups = LookupClient(
            self.sessions,
            config.lookup_timeout_ms / 1e3,
            config.promotion_timeout_ms / 1e3,
            longest_s=config.lookup_timeout_max_ms / 1e3,
            count=stats.add,
        )

    def connect(self) -> None:
        """Begin to connect, and keep connecting, in the background. Call once.

        Where ranks may be on several hosts, sessions begin as learn is told of their sidecars.
        """
        self._places.start()

    def learn(self, places: Mapping[int, Place]) -> None:
        """Take in where workers have their sidecars, by rank."""
        self._places.learn(places)

    @property
    def available(self) -> bool:
        """Whether every rank's sidecar is connected and has cleared what a reset made void, and
        nothing holds it back."""
        return (
            not self._held_back
            and self._clearing.is_clean
            and all(session.connected for session in self.sessions)
        )

    @property
    def is_clean(self) -> bool:
        """Whether every rank's sidecar has cleared what a reset made void."""
        return self._clearing.is_clean

    def hold_back(self) -> None:
        """Be not available until go_on or move is called."""
        self._held_back = True

    def go_on(self) -> None:
        """Be available as before hold_back."""
        self._held_back = False

    def move(self, epoch: str) -> None:
        """Connect anew in the space of this epoch of weights. Call only while clean."""
        self._clearing.move()
        for session, fields in zip(self.sessions, self._fields.values(), strict=True):
            session.move(space.with_epoch(fields, epoch))
        self._held_back = False

    def take_named(self) -> str | None:
        """Return the epoch that an operator has named since the last call; None if none was."""
        if self._named is None:
            return None
        named, self._named = self._named, None
        return named

    @property
    def lease_s(self) -> float:
        """How long an answered lookup keeps its leases on every rank.

        0 while a rank is not connected.
        """
        return (
            min(
                (w.lease_ms if (w := session.welcome) is not None else 0)
                for session in self.sessions
            )
            / 1e3
        )

    @property
    def max_pages(self) -> int:
        """How many pages one lookup may name on every rank."""
        return min(
            (w.max_pages if (w := session.welcome) is not None else _NO_LIMIT)
            for session in self.sessions
        )

    @property
    def divided(self) -> bool:
        """Whether ranks that hold the same pages may store a part of them each.

        They may if each can load what any of them has stored: they have the same sidecar, or
        sidecars that lend to each other.
        """
        if self._replicas == 1:
            return False
        each = self.sessions[0].options.ranks
        if each == self._replicas:
            return True
        for first in range(0, len(self.sessions), self._replicas // each):
            welcomes = [
                session.welcome for session in self.sessions[first : first + self._replicas // each]
            ]
            peers = {welcome.peers if welcome is not None else 0 for welcome in welcomes}
            if len(peers) > 1 or 0 in peers:
                return False
        return True

    def start(
        self,
        first_page: int,
        prev: bytes,
        hashes: bytes,
        recompute_us: int,
        prefill_s: float = 0.0,
        tenant: str = "",
        request: str = "",
    ) -> Lookup:
        """Look up on all ranks; a miss if one of them cannot be asked."""
        return self._lookups.start(
            first_page, prev, hashes, recompute_us, prefill_s, tenant, request
        )

    def advise(self, hashes: bytes, action: int, ms: int, priority: int, tenant: str) -> bool:
        """Advise all ranks about the pages of a prefix; return whether all were told."""
        return self._lookups.advise(hashes, action, ms, priority, tenant)

    def feeds(self) -> list[SessionFeed]:
        """Return what reports the pages that each rank's sidecar holds."""
        return [SessionFeed(session, time.monotonic) for session in self.sessions]

    def void(self) -> None:
        """Make void what every rank holds in this engine's space.

        available is false until it has been cleared.
        """
        self._clearing.void()

    def report_prefilled(
        self, tokens: int, found: int, loaded: int, own: int, lookup: int = 0, reason: int = 0
    ) -> None:
        """Report to each sidecar, once however many ranks it has, what became of a request.

        See contract.Sidecars.

        Never blocks; the report may be lost.
        """
        told: set[str] = set()
        for session in self.sessions:
            where = session.options.where
            if where not in told and session.available:
                told.add(where)
                report = wire.Prefilled(tokens, found, loaded, own, lookup, reason)
                session.send(report, session.session_id)

    def clear(self, timeout_s: float) -> bool:
        """Have what is void cleared; return whether every rank has cleared it in time.

        The other ranks clear it in the background.
        """
        return self._clearing.clear(timeout_s)

    def close(self) -> None:
        """End the sessions, which frees whatever they held. Safe to call again."""
        self._clearing.close()
        for session in self.sessions:
            session.close()
        # Last: a session that is just connecting makes its lookup sockets.
        self._lookups.close()


class _Namer(Subscriber):
    """Notes the epochs that operators name."""

    def __init__(self, sidecars: RankSidecars) -> None:
        self._sidecars = sidecars

    def on_weights_named(self, session: Session, epoch: str) -> None:
        self._sidecars._named = epoch
