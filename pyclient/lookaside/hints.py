"""The hints of a request: how its pages should be kept, and whose they are.

They come in ``kv_transfer_params["lookaside"]``, which OpenAI requests carry in their body, and in
the actions of vLLM's ``Request.kv_hints`` (since 0.33). An envelope of that form is also read from
``kv_transfer_params`` (``kv_hints``, or ``kv_hint`` as Dynamo's router writes it), for versions of
vLLM that have no such field. Where several say the same thing, ``kv_transfer_params["lookaside"]``
is believed.

A sender is not trusted. A hint that makes no sense is left out, counted and logged at a bounded
rate; the request goes on without it. Nothing of a hint can fail a request.

This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lookaside import wire
from lookaside.ratelog import RateLimitedLog

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

KEY = "lookaside"

# What the prefiller of a request says in the same place; see handover.py.
_HANDOVER = ("tokens", "digest")

# The names under which an envelope may stand in kv_transfer_params.
_ENVELOPES = ("kv_hints", "kv_hint")

# An action's type may begin with one of these; "retain" and "kv.retain" are the same.
_PREFIXES = ("kv.", "lookaside.")

# The actions of one envelope that are looked at.
_MAX_ACTIONS = 64

# The pages of another prefix that one request may have brought up.
_MAX_NAMED = 8192

_MAX_MS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Hints:
    """What one request asks for. The default asks for nothing."""

    tenant: str = ""
    """Whose pages they are; empty: nobody's."""
    priority: int = 0
    """1 is evicted first, 100 last; 0: none is given."""
    retain_ms: int = 0
    """How long the pages are kept before others; 0: not."""
    pin_ms: int = 0
    """How long they may not be evicted at all; 0: not."""
    store: bool = True
    """Whether what is computed is stored."""
    store_from_use: int = 0
    """From which use on it is stored; 0 and 1: the first."""
    prefetch: bool = False
    """Bring all of the prompt up from the tiers below the sidecars' memory."""
    named: tuple[bytes, ...] = ()
    """The digests of a prefix to bring up, from its first page on."""
    demote: bool = False
    """When the request ends, write its pages to the tiers and evict them before others."""

    def of_store(self) -> dict[str, Any]:
        """Return the fields of a PrepareStore that these hints fill."""
        priority = self.priority or (1 if self.demote else 0)
        return {
            "tenant": self.tenant,
            "priority": priority,
            "retain_ms": self.retain_ms,
            "pin_ms": self.pin_ms,
            "from_use": self.store_from_use,
        }

    @property
    def keeps(self) -> bool:
        """Whether pages that are held already should be kept in another way than others."""
        return bool(self.retain_ms or self.pin_ms or self.priority)


class _Malformed(ValueError):
    """A hint that makes no sense; the message says why."""


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Malformed(f"{value!r:.80} is not a number")
    if not math.isfinite(value) or value < 0:
        raise _Malformed(f"{value!r:.80} is not a number of at least 0")
    return value


def _ms(value: object) -> int:
    """Return the milliseconds of a number of seconds, at least 1 if it is not 0."""
    return min(_MAX_MS, math.ceil(min(_number(value), _MAX_MS) * 1000))


def _priority(value: object) -> int:
    number = _number(value)
    if number != int(number) or number > wire.MAX_PRIORITY:
        raise _Malformed(f"{value!r:.80} is not a whole number from 0 to {wire.MAX_PRIORITY}")
    return max(1, int(number))


def _uses(value: object) -> int:
    number = _number(value)
    if number != int(number) or not 1 <= number <= 0xFF:
        raise _Malformed(f"{value!r:.80} is not a whole number from 1 to 255")
    return int(number)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Malformed(f"{value!r:.80} is neither true nor false")
    return value


def tenant(value: object) -> str:
    """Return the name of a tenant. Raises ValueError if it cannot be one."""
    if not isinstance(value, str) or not value.isprintable():
        raise _Malformed(f"{value!r:.80} is not a name of printable characters")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise _Malformed(f"{value!r:.80} is not text") from None
    if not 0 < length <= wire.MAX_TENANT_BYTES:
        raise _Malformed(f"{value!r:.80} does not have 1 to {wire.MAX_TENANT_BYTES} bytes")
    return value


def _digests(value: object) -> tuple[bytes, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_NAMED:
        raise _Malformed(f"hashes are not a list of 1 to {_MAX_NAMED}")
    try:
        digests = tuple(bytes.fromhex(each) for each in value)
    except (TypeError, ValueError):
        raise _Malformed("hashes are not all hexadecimal") from None
    lengths = {len(each) for each in digests}
    if len(lengths) > 1 or not 0 < len(digests[0]) <= wire.MAX_DIGEST_BYTES:
        raise _Malformed("hashes do not have the length of a page's")
    return digests


def _prefetch(value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"prefetch": value}
    return {"named": _digests(value)}


_READ: dict[str, Callable[[object], dict[str, Any]]] = {
    "tenant": lambda value: {"tenant": tenant(value)},
    "priority": lambda value: {"priority": _priority(value)},
    "retain_s": lambda value: {"retain_ms": _ms(value)},
    "pin_s": lambda value: {"pin_ms": _ms(value)},
    "store": lambda value: {"store": _flag(value)},
    "store_from_use": lambda value: {"store_from_use": _uses(value)},
    "prefetch": _prefetch,
    "demote": lambda value: {"demote": _flag(value)},
}
"""How each hint of ``kv_transfer_params["lookaside"]`` is read."""

NAMES = tuple(_READ)
"""All hints."""

# What an action of an envelope means: its type, and what each key of its payload is called above.
# A type without a needed key asks for what _ALONE says.
_ACTIONS: dict[str, dict[str, str]] = {
    "hints": {name: name for name in _READ},
    "retain": {"ttl_s": "retain_s", "priority": "priority"},
    "pin": {"ttl_s": "pin_s"},
    "prefetch": {"hashes": "prefetch"},
    "demote": {},
    "store": {"enabled": "store", "from_use": "store_from_use"},
}
_ALONE: dict[str, dict[str, object]] = {
    "prefetch": {"prefetch": True},
    "demote": {"demote": True},
}

# Why hints are left out, as counted.
MALFORMED = "malformed"
UNKNOWN = "unknown"
UNSENT = "unsent"


class HintReader:
    """Reads the hints of requests. For one thread.

    ``count`` is called with the name of a counter: ``hints:NAME`` for each hint that a request has,
    ``hints_ignored:REASON`` for each that is left out.
    """

    def __init__(self, default_tenant: str, count: Callable[[str], None]) -> None:
        self._default = Hints(tenant=default_tenant)
        self._count = count
        self._log = RateLimitedLog(logger)

    def read(self, request: Any) -> Hints:
        """Return the hints of a request. Never fails."""
        params = request.kv_transfer_params
        envelope = getattr(request, "kv_hints", None)
        if params is None and envelope is None:
            return self._default
        found: dict[str, Any] = {}
        names: set[str] = set()
        try:
            if not isinstance(params, dict):
                params = {}
            for name in _ENVELOPES:
                if envelope is None:
                    envelope = params.get(name)
            for name, value in self._of_envelope(envelope):
                self._take(name, value, found, names)
            ours = params.get(KEY)
            if isinstance(ours, dict):
                for name, value in ours.items():
                    if name not in _HANDOVER:
                        self._take(name, value, found, names)
            elif ours is not None:
                self._ignore(MALFORMED, "%.80r is not a dictionary of hints", ours)
        except Exception:  # a payload of a kind that nobody has thought of
            self._ignore(MALFORMED, "the hints of a request could not be read", exc_info=True)
        for name in names:
            self._count(f"hints:{name}")
        return replace(self._default, **found) if found else self._default

    def _take(self, name: object, value: object, found: dict[str, Any], names: set[str]) -> None:
        """Note one hint."""
        read = _READ.get(name) if isinstance(name, str) else None
        if read is None or not isinstance(name, str):
            self._ignore(UNKNOWN, "%.80r is no hint; there are %s", name, ", ".join(NAMES))
            return
        try:
            found.update(read(value))
        except _Malformed as error:
            self._ignore(MALFORMED, "%s: %s", name, error)
            return
        names.add(name)

    def _of_envelope(self, envelope: Any) -> Iterator[tuple[str, object]]:
        """Yield the hints that the actions of an envelope mean.

        Actions of other types are for others, and passed over without a word.
        """
        if envelope is None:
            return
        actions = _part(envelope, "actions")
        if not isinstance(actions, (list, tuple)):
            self._ignore(MALFORMED, "an envelope of KV hints has no list of actions")
            return
        if len(actions) > _MAX_ACTIONS:
            self._ignore(MALFORMED, "of %d KV hints only %d are read", len(actions), _MAX_ACTIONS)
        for action in actions[:_MAX_ACTIONS]:
            yield from self._of_action(action)

    def _of_action(self, action: Any) -> Iterator[tuple[str, object]]:
        kind, payload = _part(action, "action_type"), _part(action, "payload")
        if not isinstance(kind, str):
            self._ignore(MALFORMED, "a KV hint has no action_type")
            return
        name = kind
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        keys = _ACTIONS.get(name)
        if keys is None:
            self._count(f"hints_ignored:{UNKNOWN}")
            return
        version = _part(action, "action_version")
        if str(version).partition(".")[0] != "1":
            self._ignore(UNKNOWN, "version %.40r of the KV hint %.40r; 1 is known", version, kind)
            return
        if payload is None:
            payload = {}
        if not isinstance(payload, dict):
            self._ignore(MALFORMED, "the payload of the KV hint %.40r is no dictionary", kind)
            return
        if name in _ALONE and not payload:
            yield from _ALONE[name].items()
            return
        for key, value in payload.items():
            if key in keys:
                yield keys[key], value
            else:
                self._ignore(UNKNOWN, "%.80r is no part of the KV hint %.40r", key, kind)
        if name == "demote":
            yield "demote", True

    def _ignore(self, reason: str, message: str, *args: object, exc_info: bool = False) -> None:
        """Count a hint that is left out, and log it unless one like it was logged lately."""
        self._count(f"hints_ignored:{reason}")
        self._log.warning(
            f"{reason} {message}", f"a hint is ignored: {message}", *args, exc_info=exc_info
        )


def _part(value: Any, name: str) -> Any:
    """Return a part of an envelope or action, which may be vLLM's struct or a dictionary."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
