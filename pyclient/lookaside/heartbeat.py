"""When an idle sidecar is asked for a sign of life: arithmetic of moments alone."""

from __future__ import annotations

# A session on which nothing was heard for this long is pinged.
_HEARTBEAT_S = 1.0
# A sidecar that has not answered a ping for this long is suspect.
_PONG_PATIENCE_S = 0.5
# How often a ping is tried that the socket does not take.
_RETRY_S = 0.05


class Heartbeat:
    """The pings of one session. For its thread alone."""

    def __init__(self, now: float) -> None:
        self.heard = now
        """When the sidecar last said anything."""
        self.pinged: float | None = None
        """When the ping that is out was sent; None if none is."""

    def wants_ping(self, now: float, suspect: bool) -> bool:
        """Report whether to send a ping."""
        return self.pinged is None and (suspect or now - self.heard >= _HEARTBEAT_S)

    def is_late(self, now: float) -> bool:
        """Report whether the answer to the ping that is out is late."""
        return self.pinged is not None and now - self.pinged >= _PONG_PATIENCE_S

    def due(self, now: float, suspect: bool) -> float:
        """Return the moment at which to look again if nothing is heard."""
        if self.pinged is not None:
            late = self.pinged + _PONG_PATIENCE_S
            return late if late > now else now + _HEARTBEAT_S
        return now + _RETRY_S if suspect else self.heard + _HEARTBEAT_S
