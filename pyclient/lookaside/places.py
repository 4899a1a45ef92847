"""Where the ranks of an engine have their sidecars, and which of them are on other hosts.

The ranks of one engine may be on several hosts (``--nnodes``, Ray). Each worker uses the sidecar of
its own host, in a directory there. The scheduler looks up in all of them. It reaches those of other
hosts through a sidecar of its own host, which carries the session over TCP.

A worker says where its sidecar is: before the engine serves, in the metadata that vLLM's workers
give their scheduler, and with a step's report whenever it has changed. The scheduler compares that
with its own host: a directory that both see is the same one if boot id, device and inode are.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lookaside import wire
from lookaside.config import Config
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session, Subscriber

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

ADDRESS_NAME = "hosts.addr"
"""The file in a sidecar's directory with the host:port where it accepts schedulers of others."""

_MAX_ADDRESS_BYTES = 300
_ANY_HOST = ("0.0.0.0", "::", "")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank's worker has its sidecar."""

    host: str
    """The worker's host, by the address that vLLM has for it."""
    boot_id: str
    """Of the worker's kernel."""
    directory: tuple[int, int] | None
    """Device and inode of the sidecar's directory; None: it is not there."""
    address: str
    """host:port where the sidecar accepts schedulers of other hosts; empty: nowhere."""
    connected: bool
    """The worker has a session with it."""


def survey(endpoint: str, host: str, connected: bool) -> Place:
    """Return the place of a worker of this host."""
    return Place(host, _boot_id(), _identity(endpoint), _address(endpoint, host), connected)


def is_here(place: Place, endpoint: str) -> bool:
    """Report whether a worker's sidecar is the one in a directory of this host."""
    if place.boot_id != _boot_id():
        return False
    # A worker whose sidecar is not started yet has none; it reports again when it has.
    return place.directory is None or place.directory == _identity(endpoint)


def _boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _identity(endpoint: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(endpoint)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _address(endpoint: str, host: str) -> str:
    """Return where the sidecar of a directory accepts schedulers of other hosts."""
    try:
        with open(os.path.join(endpoint, ADDRESS_NAME), encoding="ascii") as file:
            text = file.read(_MAX_ADDRESS_BYTES).strip()
    except (OSError, ValueError):
        return ""
    name, _, port = text.rpartition(":")
    name = name.strip("[]")
    return join(host if name in _ANY_HOST else name, port)


def join(host: str, port: str) -> str:
    """Return host:port, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Places:
    """Aims the scheduler's sessions at the sidecars of all ranks, and starts them.

    For the scheduler's thread alone.
    """

    def __init__(
        self, config: Config, dp_rank: int, sessions: Sequence[Session], several_hosts: bool
    ) -> None:
        """sessions are not started, and aimed at this host. several_hosts: ranks may be elsewhere,
        and nothing is started before it is known where they are."""
        self._config = config
        self._dp_rank = dp_rank
        self._sessions = sessions
        self._several_hosts = several_hosts
        self._places: dict[int, Place] = {}
        self._started: set[int] = set()  # first ranks of sessions
        self._log = RateLimitedLog(logger)

    def start(self) -> None:
        """Start the sessions of which it is known already where their sidecars are."""
        listed = self._config.listed_endpoints(self._dp_rank)
        if listed is not None:
            self._start_listed(listed)
        elif not self._several_hosts:
            for session in self._sessions:
                session.start()

    def learn(self, places: Mapping[int, Place]) -> None:
        """Take in where workers have their sidecars, by rank. Start what can be started."""
        if not self._several_hosts or self._config.listed_endpoints(self._dp_rank) is not None:
            return
        for rank, place in places.items():
            if self._places.get(rank) != place:
                logger.debug("rank %d: %s", rank, place)
                self._places[rank] = place
        remote: list[tuple[Session, Place]] = []
        for session in self._sessions:
            place = self._place_of(session)
            if place is None:
                continue
            if is_here(place, self._endpoint(session.options.rank)):
                self._aim(session, self._endpoint(session.options.rank), "")
            else:
                remote.append((session, place))
        for session, place in remote:
            address = self._config.address_for(session.options.rank, self._dp_rank, place.host)
            if address or place.address:
                self._aim(session, self._own_endpoint(), address or place.address)
            elif place.connected:
                self._refuse(
                    session,
                    f"rank {session.options.rank} is on another host ({place.host}), whose sidecar "
                    "accepts no schedulers of other hosts: set hosts.listen of that sidecar, and "
                    "hosts.token_file of all",
                )

    def _start_listed(self, listed: Sequence[str]) -> None:
        """Start all sessions as lookaside.remote_endpoint has them by rank."""
        own = next((rank for rank, address in enumerate(listed) if not address), 0)
        for session in self._sessions:
            first, ranks = session.options.rank, session.options.ranks
            if first + ranks > len(listed):
                self._refuse(
                    session,
                    f"lookaside.remote_endpoint lists {len(listed)} ranks, and rank "
                    f"{first + ranks - 1} is not among them",
                )
            elif len(set(listed[first : first + ranks])) > 1:
                self._refuse(session, _DIVIDED)
            elif listed[first]:
                self._aim(session, self._endpoint(own), listed[first])
            else:
                self._aim(session, self._endpoint(first), "")

    def _place_of(self, session: Session) -> Place | None:
        """Return the place of the ranks of a session; None while it is not known of all."""
        first = session.options.rank
        places = [self._places.get(rank) for rank in range(first, first + session.options.ranks)]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return None
        if len({(place.boot_id, place.directory) for place in known}) > 1:
            self._refuse(session, _DIVIDED)
            return None
        return known[0]

    def _endpoint(self, rank: int) -> str:
        return self._config.endpoint_for(rank, self._dp_rank)

    def _own_endpoint(self) -> str:
        """Return the directory of the sidecar that carries sessions to other hosts: that of the
        first rank of this host, or rank 0's directory here if all ranks are elsewhere."""
        for rank, place in sorted(self._places.items()):
            if is_here(place, self._endpoint(rank)):
                return self._endpoint(rank)
        return self._endpoint(0)

    def _aim(self, session: Session, endpoint: str, remote: str) -> None:
        options = session.options
        if (options.endpoint, options.remote) != (endpoint, remote):
            session.options = replace(options, endpoint=endpoint, remote=remote)
        if options.rank not in self._started:
            self._started.add(options.rank)
            session.start()

    def _refuse(self, session: Session, reason: str) -> None:
        self._log.warning(
            f"place {session.options.rank}",
            "lookaside: nothing is looked up, so nothing is loaded: %s",
            reason,
        )


_DIVIDED = (
    "ranks that hold the same pages have one sidecar each host, but are looked up together: put "
    "{rank} into lookaside.endpoint, and start a sidecar for each rank"
)


class Whereabouts(Subscriber):
    """What a worker tells its scheduler of where its sidecar is.

    It follows the worker's session: whenever that connects, the place may be another.
    """

    def __init__(self, rank: int, endpoint: str, host: str) -> None:
        self._rank = rank
        self._endpoint = endpoint
        self._host = host
        self._connected = False
        self._due = True  # set on the session's thread
        self._told: Place | None = None  # the worker's thread's

    def take(self) -> dict[int, Place]:
        """Return the place by rank if it is not what was returned last, else nothing."""
        if not self._due:
            return {}
        self._due = False
        place = survey(self._endpoint, self._host, self._connected)
        if place == self._told:
            return {}
        self._told = place
        return {self._rank: place}

    # ---- session.Subscriber, on the session's thread ----

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self._connected = True
        self._due = True
