"""What sidecars want users to know."""

from __future__ import annotations

import logging

from lookaside.ratelog import RateLimitedLog

# Logged once an hour for all ranks: their sidecars say the same.
_notices = RateLimitedLog(logging.getLogger("vllm.lookaside"), every_s=3600.0)
_MAX_NOTICES = 256


def show(text: str) -> None:
    """Log a notice, unless sidecars have sent too many different ones."""
    if text in _notices.counts or len(_notices.counts) < _MAX_NOTICES:
        _notices.warning(text, "lookaside: %s", text)
