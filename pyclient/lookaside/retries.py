"""Why an attempt to connect has ended, and how long to pause before the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from lookaside.endpoint import EndpointAbsent, EndpointError
from lookaside.handshake import RefusedError
from lookaside.line import HandshakeError
from lookaside.mapping import RegionError
from lookaside.ratelog import RateLimitedLog

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# A sidecar that is restarted is back within a second: no token has to wait for us to notice. So for
# a while after a session that was more than a moment, attempts come often.
_EAGER_FOR_S = 5.0
_EAGER_PAUSE_S = 0.02
_EAGER_AFTER_S = 1.0
_BACKOFF_FIRST_S = 0.1
_BACKOFF_LAST_S = 1.0
_REFUSED_BACKOFF_S = 5.0
# Refusals whose reason may pass by itself.
_PASSING = ("busy", "draining", "unreachable")
# The field of a space on which the two roles of an engine differ while they move.
_EPOCH = "weights_epoch"


class Retries:
    """The pauses between the attempts of one session, which grow. For its thread alone."""

    def __init__(
        self,
        where: Callable[[], str],
        log: RateLimitedLog,
        on_absent: Callable[[], None] | None,
    ) -> None:
        """where names the sidecar. on_absent is called, in place of a warning, each time nothing
        listens."""
        self._where = where
        self._log = log
        self._on_absent = on_absent
        self._backoff = _BACKOFF_FIRST_S
        self._connected_at: float | None = None  # None without a session
        self._eager_until = float("-inf")

    def note_connected(self) -> None:
        """Note a success: the next pause is short again."""
        self._backoff = _BACKOFF_FIRST_S
        self._connected_at = time.monotonic()

    def hurry(self) -> float:
        """Return how long to pause after the session has moved: attempts come often for a while.

        The sidecar refuses one role in the new space for as long as the other is in the old one.
        """
        self._connected_at = None
        self._backoff = _BACKOFF_FIRST_S
        self._eager_until = time.monotonic() + _EAGER_FOR_S
        return 0.0

    def pause_s(self, error: Exception | None) -> float:
        """Log why an attempt or its session has ended; return how long to pause.

        error is None if it was ended on our side.
        """
        now = time.monotonic()
        if self._connected_at is not None and now - self._connected_at >= _EAGER_AFTER_S:
            self._eager_until = now + _EAGER_FOR_S
        self._connected_at = None
        pause_s = self._growing_pause_s(error)
        if now < self._eager_until and _may_pass_soon(error):
            self._backoff = _BACKOFF_FIRST_S
            return _EAGER_PAUSE_S
        return pause_s

    def _growing_pause_s(self, error: Exception | None) -> float:
        """Log why an attempt or its session has ended; return the pause of one of many."""
        backoff = self._backoff
        self._backoff = min(backoff * 2, _BACKOFF_LAST_S)
        if error is None:
            return backoff
        if isinstance(error, EndpointAbsent):
            self._report_absent(error)
            return backoff
        if isinstance(error, RefusedError):
            return self._pause_after_refusal(error, backoff)
        if isinstance(error, EndpointError | HandshakeError | RegionError | OSError):
            self._log.warning(type(error).__name__, "session with %s: %s", self._where(), error)
            return _BACKOFF_LAST_S if isinstance(error, EndpointError) else backoff
        self._log.warning("bug", "session with %s", self._where(), exc_info=True)
        return _BACKOFF_LAST_S

    def _report_absent(self, error: EndpointAbsent) -> None:
        if self._on_absent is None:
            self._log.warning("absent", "no sidecar answers: %s; serving without it", error)
            return
        try:
            self._on_absent()
        except Exception:
            self._log.warning("autostart", "starting a sidecar failed", exc_info=True)

    def _pause_after_refusal(self, error: RefusedError, backoff: float) -> float:
        code, field = error.refusal.code, error.refusal.field
        if code == "no_worker" or field == _EPOCH:
            # Its worker has not connected yet, or the other role is still in the space of another
            # epoch. That is an order of arrival, no fault.
            logger.debug("sidecar at %s: %s", self._where(), error)
            return backoff
        self._log.warning(
            f"refused {code} {field}",
            "the sidecar at %s refused this engine: %s",
            self._where(),
            error,
        )
        return backoff if code in _PASSING else _REFUSED_BACKOFF_S


def _may_pass_soon(error: Exception | None) -> bool:
    """Report whether an attempt may have ended because the sidecar is being replaced."""
    if isinstance(error, RefusedError):
        return error.refusal.code in ("no_worker", "unreachable") or error.refusal.field == _EPOCH
    if isinstance(error, EndpointError):
        return isinstance(error, EndpointAbsent)
    return isinstance(error, HandshakeError | OSError)
