"""When it is known what the pages of a request are named by.

Until the identity of a request is known (identity.py), and where it cannot be known, nothing of the
request is looked up or saved.
"""

from __future__ import annotations

from lookaside.identity import UNKNOWN, Identities, Identity
from lookaside.scheduler.promises import Promises
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.setup import Setup

# A request waits this long for its identity, then it is computed.
_IDENTITY_PATIENCE_S = 2.0


class Identification:
    """Finds the identity of each request, and notes what was handed over once it is known."""

    def __init__(self, setup: Setup, identities: Identities, promises: Promises) -> None:
        self._setup = setup
        self._identities = identities
        self._promises = promises

    def is_known(self, state: RequestState) -> bool:
        """Find the identity of a request if possible; report whether it is known."""
        known = state.identity
        if known is not None and known.features == len(state.request.mm_features or ()):
            return True
        if state.unshared:
            return False
        found = self._identities.of(state.request)
        if not isinstance(found, Identity):
            state.unshared = found is UNKNOWN
            return False
        state.identity = found
        if known is None:
            self._promises.expect(state)
        return True

    def may_wait(self, state: RequestState) -> bool:
        """Report whether vLLM shall ask again for a request whose identity is not known."""
        if state.unshared or state.request.skip_reading_prefix_cache:
            return False
        now = self._setup.clock()
        if state.patient_since is None:
            state.patient_since = now
        return now - state.patient_since < _IDENTITY_PATIENCE_S

    def may_save(self, state: RequestState) -> bool:
        """Report whether what is computed of a request now may be saved under its names."""
        if not self.is_known(state):
            return False
        assert state.identity is not None
        if not self._identities.hold(state.identity):
            state.stale = True
        return not state.stale

    def forget(self, state: RequestState) -> None:
        """Have the identity found anew where an adapter may be loaded anew before the request runs
        again."""
        if state.unshared or (state.identity is not None and state.identity.adapter is not None):
            state.identity, state.unshared, state.patient_since = None, False, None
