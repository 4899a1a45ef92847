"""What the sidecars are advised about pages that they hold already.

Pages that are stored carry their hints with them (saves.py). Pages that are held when a request
comes, and those that its load brings up, are named in an Advise: when the request arrives, so that
they stay while it runs, and when it ends, so that a time to retain or pin them counts from its end.

Advice is not answered, and nothing waits for it.
"""

from __future__ import annotations

from lookaside import hints, wire
from lookaside.scheduler.identification import Identification
from lookaside.scheduler.names import Names
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.setup import Setup


class Advice:
    """Sends what the hints of requests mean for pages that are held."""

    def __init__(
        self, setup: Setup, names: Names, identification: Identification, digest_bytes: int
    ) -> None:
        self._setup = setup
        self._names = names
        self._identification = identification
        self._digest_bytes = digest_bytes

    def begin(self, state: RequestState) -> None:
        """Advise about the prompt of a request, once it has names."""
        asked = state.hints
        if state.advised or not (asked.keeps or asked.prefetch or asked.named):
            return
        if asked.named:
            state.advised = True
            self._prefetch_named(state)
        if (asked.keeps or asked.prefetch) and self._identification.is_known(state):
            state.advised = True
            self._keep(state)
            if asked.prefetch:
                self._send(state, wire.ADVISE_PREFETCH)

    def end(self, state: RequestState) -> None:
        """Advise about all pages of a request that ends."""
        if not (state.hints.keeps or state.hints.demote):
            return
        if not self._identification.is_known(state):
            return
        if state.hints.demote:
            self._send(state, wire.ADVISE_DEMOTE)
        else:
            self._keep(state)

    def _keep(self, state: RequestState) -> None:
        asked = state.hints
        if asked.retain_ms or asked.priority:
            self._send(state, wire.ADVISE_RETAIN, asked.retain_ms, asked.priority)
        if asked.pin_ms:
            self._send(state, wire.ADVISE_PIN, asked.pin_ms)

    def _send(self, state: RequestState, action: int, ms: int = 0, priority: int = 0) -> None:
        """Send advice about the pages of a request that have names."""
        pages = min(self._names.known(state.request), self._setup.sidecars.max_pages)
        if pages:
            names = b"".join(self._names.of(state, 0, pages))
            self._deliver(names, action, ms, priority, state.hints.tenant)

    def _prefetch_named(self, state: RequestState) -> None:
        named = state.hints.named
        if len(named[0]) != self._digest_bytes:
            self._setup.stats.add(f"hints_ignored:{hints.MALFORMED}")
            return
        names = b"".join(named[: self._setup.sidecars.max_pages])
        self._deliver(names, wire.ADVISE_PREFETCH, 0, 0, state.hints.tenant)

    def _deliver(self, names: bytes, action: int, ms: int, priority: int, tenant: str) -> None:
        sidecars = self._setup.sidecars
        if not (sidecars.available and sidecars.advise(names, action, ms, priority, tenant)):
            self._setup.stats.add(f"hints_ignored:{hints.UNSENT}")
