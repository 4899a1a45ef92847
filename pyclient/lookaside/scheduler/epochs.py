"""Which weights the engine has, as the name of an epoch.

KV that old weights computed is wrong for new ones. The epoch's name is a field of the space, so
that pages of different epochs cannot meet. The weights that the engine starts with have the name
that lookaside.weights_epoch gives, normally none. An operator may name an epoch
(docs/operations.md). Otherwise a digest of the weights does: so weights that come back find what
they stored before, and instances with the same weights share it.

A digest takes time. So it is taken when weights may have changed, and not before their pages are
needed again:

1. *Doubt.* vLLM is about to pause, to sleep, or to call a method of its workers that may change
   weights (enginecalls.py), or the cache was reset. From here on nothing is looked up or stored.
   Requests that are running keep what they have, and nothing of them is stored: they may go on with
   other weights.
2. *Settled.* vLLM schedules a request. The weights are looked at. If they are the same, everything
   goes on as before. If they are not, the sessions of both roles move to the space of the new
   epoch: the scheduler's at once, a worker's with the metadata of the step (LookasideMetadata). A
   sidecar welcomes a scheduler in a space only after the worker of its rank, so nothing is asked
   before all ranks have moved.

What changes weights without any of these calls is seen at the next of them. Then everything in the
space is suspect that was stored since the last one, and the space is cleared.

**Blocks of vLLM's own cache.** vLLM may keep what the old weights computed, and give it to requests
that come later. These are stored as little as those that were running. That ends when vLLM's cache
has been empty and none of them is left.

All methods are for the scheduler's thread.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lookaside import weights
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.setup import Setup

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

logger = logging.getLogger("vllm.lookaside")

# Epochs whose digests are known by name. Those of earlier ones are named by their digest anew.
_MAX_NAMES = 1024
# How long requests wait for the sessions to move to another space.
_MOVE_PATIENCE_S = 2.0
# After a digest none is taken for so many times as long as it took. Otherwise calls that come again
# and again could have vLLM take nothing but digests.
_PAUSE_FACTOR = 4


class Epochs:
    """See the module's comment."""

    def __init__(
        self,
        setup: Setup,
        requests: Mapping[str, RequestState],
        let_go: Callable[[], list[RequestState]],
        clear: Callable[[], None],
    ) -> None:
        """let_go gives back all leases, and returns the requests that became stale by it. clear has
        the sidecars forget all of the space."""
        self._setup = setup
        self._requests = requests
        self._let_go = let_go
        self._clear = clear
        self.name = setup.config.weights_epoch
        """The present epoch's."""
        self.pausing = False
        """vLLM resets its caches because it pauses, not because somebody wants them empty."""
        self.pool: BlockPool | None = None
        self._executor: Any = None  # None: the weights are not looked at
        self._digest: str | None = None  # of the present epoch's weights; None: not known
        self._names: OrderedDict[str, str] = OrderedDict()  # of epochs, by digest
        self._doubted = False
        self._named: str | None = None  # what an operator has named the weights that are to come
        self._staled: list[RequestState] = []  # by the present doubt alone
        self._mixed = False  # vLLM's cache may have blocks of another epoch
        self._not_before = 0.0
        self._moving_until: float | None = None

    def watch(self, executor: Any) -> None:
        """Look at the weights by this executor of vLLM. Call once, before anything is scheduled."""
        self._executor = executor
        self._digest = self._look()
        if self._digest is None:
            logger.warning(
                "lookaside: the weights of this model cannot be compared; a pause of vLLM clears "
                "what is stored, and weights that change begin an epoch that does not come back "
                "unless it is named"
            )
        else:
            self._note_name()

    # ---- doubt ----

    def expect_change(self) -> None:
        """vLLM calls what may change the weights."""
        if self._doubted or self._executor is None:
            return
        seen = self._digest is None or self._look() == self._digest
        self._doubt()
        if not seen:
            logger.warning(
                "lookaside: the weights have changed without a call that says so; what was stored "
                "since is cleared"
            )
            self._clear()

    def keeps_cache(self) -> bool:
        """vLLM resets its caches. Report whether what is stored may stay, as far as it is known by
        which weights it was computed.

        If not, the caller clears the space.
        """
        if not self.pausing or self._executor is None or self._digest is None:
            return False
        if self._doubted:
            return True
        same = self._look() == self._digest
        self._doubt()
        return same

    def note_reset(self) -> None:
        """The space is being cleared, perhaps because the weights have changed."""
        if not self._doubted and self._digest is not None:
            self._doubt()
        self._staled = []
        self._mixed = True

    def _doubt(self) -> None:
        self._doubted = self._mixed = True
        self._setup.sidecars.hold_back()
        self._staled = self._let_go()

    # ---- settled ----

    def settle(self) -> None:
        """Find out which weights the engine has, if that is in doubt. To be called before a request
        is scheduled."""
        setup = self._setup
        if (named := setup.sidecars.take_named()) is not None:
            self._named = named
            if not self._doubted:
                self._doubt()
        if not self._doubted or not setup.sidecars.is_clean or self._sleeps():
            return
        begun = setup.clock()
        if self._named is None and begun < self._not_before:
            return
        digest = self._look()
        now = setup.clock()
        self._not_before = now + _PAUSE_FACTOR * (now - begun)
        if self._named is not None:
            name, self._named = self._named, None
        elif digest is None:
            name = f"unknown:{secrets.token_hex(16)}"
        else:
            name = self._names.get(digest, f"digest:{digest}")
        self._doubted, self._digest = False, digest
        if name == self.name:
            self._go_on()
        else:
            self._move(name)
        self._note_name()

    def is_moving(self) -> bool:
        """Report whether requests shall wait a moment for the sessions to move."""
        until = self._moving_until
        if until is None:
            return False
        if self._setup.sidecars.available or self._setup.clock() >= until:
            self._moving_until = None
            return False
        return True

    def is_mixed(self) -> bool:
        """Report whether vLLM's own cache may have blocks that other weights computed."""
        if not self._mixed or self.pool is None:
            return False
        if not len(self.pool.cached_block_hash_to_block) and not any(
            state.stale for state in self._requests.values()
        ):
            self._mixed = False
        return self._mixed

    def _go_on(self) -> None:
        """The weights are what they were: what is running may be stored."""
        for state in self._staled:
            state.stale = False
        self._staled, self._mixed = [], False
        self._setup.sidecars.go_on()

    def _move(self, name: str) -> None:
        logger.info(
            "lookaside: other weights: epoch %r in place of %r", name or "none", self.name or "none"
        )
        self.name, self._staled = name, []
        self._setup.stats.add("epochs")
        self._setup.sidecars.move(name)
        self._moving_until = self._setup.clock() + _MOVE_PATIENCE_S

    # ---- digests ----

    def _note_name(self) -> None:
        """Have the present weights named alike when they come back."""
        if self._digest is not None:
            self._names[self._digest] = self.name
            self._names.move_to_end(self._digest)
            if len(self._names) > _MAX_NAMES:
                self._names.popitem(last=False)

    def _sleeps(self) -> bool:
        """Report whether the weights may be out of memory."""
        return bool(getattr(self._executor, "is_sleeping", False))

    def _look(self) -> str | None:
        """Return a digest of the weights of all ranks; None if they cannot be looked at now."""
        if self._executor is None or self._sleeps():
            return None
        begun = self._setup.clock()
        try:
            found = self._executor.collective_rpc(weights.digest_of)
            self._setup.stats.observe("weights_seconds", self._setup.clock() - begun)
        except Exception:
            self._setup.stats.add("errors")
            logger.exception("lookaside: the weights could not be looked at")
            return None
        if len(found) != self._setup.ranks or not all(isinstance(each, str) for each in found):
            return None
        return hashlib.sha256("\n".join(found).encode()).hexdigest()[:32]
