"""What the scheduler role knows of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lookaside.hints import Hints
from lookaside.identity import Identity
from lookaside.scheduler.contract import Lookup

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Question:
    """A lookup that a request holds, and its answer. Owned by hits.py."""

    lookup: Lookup | None
    """None once its leases were given back or handed to the workers."""
    first_page: int
    end_page: int
    """The lookup is for pages [first_page, end_page)."""
    last_digest: bytes
    """The name of page end_page - 1."""
    since: float
    trimmed: int
    """Leases on chunks below this page were given back."""
    leased: float
    """The earliest moment at which its leases may have begun: until then it had no answer."""
    held: int | None = None
    """The end of the pages held, counted from the prefix's start; None while not answered."""
    answered: float = 0.0
    late: bool = False
    """A rank gave no answer in time."""
    page_bytes: int = 0
    """Of a page at all ranks, as its answer says."""

    # Of a model that keeps states; owned by states.py.
    states: list[tuple[int, Lookup]] = field(default_factory=list)
    """Lookups of the states at the ends of these pages, the last page first."""
    states_asked: int = 0
    """At the ends of how many pages states were looked up."""
    reached: int | None = None
    """The end of the last page whose states are held as well; None while not known."""


@dataclass(slots=True)
class RequestState:
    """One request between its on_new_request and its end."""

    request: Request
    preemptions: int
    """The request's own count when it was last seen."""
    hints: Hints
    """How its pages should be kept, and whose they are."""
    trace: Mapping[str, str] | None = None
    """The headers of the trace that it belongs to, if vLLM exports traces."""
    advised: bool = False
    """The sidecars were advised about its prompt; owned by advice.py."""

    # How its pages are named; owned by identification.py.
    identity: Identity | None = None
    """None while not known."""
    unshared: bool = False
    """The identity cannot be known."""
    patient_since: float | None = None
    """When vLLM first asked for a hit while the identity was not known."""

    # Its hit; owned by hits.py.
    asked: Question | None = None
    local_page: int = 0
    """The end of vLLM's own hit when it last asked."""
    denied: bool = False
    """A load failed: no hit is offered again."""
    expired: bool = False
    """The lease of one hit ended before the hit could be used."""
    lookup_id: int = 0
    """The id of its last lookup; 0: it had none."""
    in_step: bool = False
    """The hit was last offered as one that is loaded within the step."""
    admitted: bool = False
    counted: bool = False
    """Its tokens are in the statistics."""

    # What of it is stored; owned by saves.py.
    stale: bool = False
    """It was computed before a reset, and must not be saved."""
    saved: int = 0
    """Pages known to be held, or handed to the workers."""
    saved_digest: bytes = b""
    """The name of page saved - 1."""
    owes_prompt: bool = False
    """The prompt ended in a step of which nothing could be saved."""
    saved_tail: bool = False
    """The prompt's incomplete last page was handed to the workers too."""

    # What a prefiller handed over of it; owned by promises.py.
    handed: int = 0
    """Tokens that may have been handed over."""
    tail: bytes = b""
    """The name of the page that these tokens end in, if they do not fill it."""
    promised: int = 0
    """Pages that the prefiller said it stores."""
    patient_until: float = 0.0
    """Until when the request waits for them."""
