"""What all parts of the scheduler role know of their engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lookaside.config import Config
from lookaside.scheduler.contract import Sidecars
from lookaside.stats import Collector
from lookaside.tracing import Tracer


@dataclass(slots=True)
class Setup:
    """Made once by the role and shared by its parts, which change nothing in it."""

    config: Config
    sidecars: Sidecars
    stats: Collector
    clock: Callable[[], float]
    ranks: int
    """Workers that acknowledge each save."""
    steps_ahead: int
    """Steps that a worker may have to carry out before it sees what is ordered now."""
    may_load: bool
    may_save: bool
    page: int
    """Tokens of a page."""
    chunk: int
    """Pages of a chunk."""
    hashes_per_page: int
    """vLLM's block hashes for each page; the last of them names it."""
    lookahead: int
    """Tokens after a page that its name covers as well."""
    drafts: bool
    """Whether the layers of a draft head are cached. Their KV of a page's last position depends on
    the token after it, which the page's name does not tell. So a page counts only when the next one
    matches too."""
    draft_lag: int
    """For how many computed tokens, the last ones, such layers are not final yet."""
    in_step: bool
    """Whether this engine recovers from a load that fails within its step; see in_step.py."""
    hybrid: bool
    """Whether some layers need less than the whole prefix, or are in groups of their own."""
    tracer: Tracer | None = None
    """What makes spans; None where vLLM exports no traces."""

    @property
    def whole_pages(self) -> bool:
        """Whether only whole pages can be handed over.

        A page that ends in its middle has other needs of a window, and of draft layers.
        """
        return self.drafts or self.hybrid
