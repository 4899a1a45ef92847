"""Pages that this engine's KV events tell of; nothing where vLLM publishes none (events.py)."""

from __future__ import annotations

from typing import Any

from lookaside.events import EventBook
from lookaside.scheduler.names import Names
from lookaside.scheduler.requests import RequestState


class Announcements:
    """Hands pages to the event book, if there is one."""

    def __init__(self, book: EventBook | None, names: Names) -> None:
        self.book = book
        self._names = names

    def note(self, state: RequestState, first_page: int, end_page: int) -> None:
        """Have pages [first_page, end_page) announced once all ranks hold them.

        To be called when they are being saved, or were found held.
        """
        if self.book is None or end_page <= first_page:
            return
        request, names = state.request, self._names
        parent = names.hashes(request, first_page - 1, first_page)[0] if first_page else None
        hashes = names.hashes(request, first_page, end_page)
        self.book.note(request, first_page, names.of(state, first_page, end_page), hashes, parent)

    def hurry(self) -> None:
        """Keep the engine stepping for a moment: a save has ended, and its pages will be told."""
        if self.book is not None:
            self.book.hurry()

    def void(self) -> None:
        """Take back all that was announced."""
        if self.book is not None:
            self.book.void()

    def has_pending(self) -> bool:
        """Report whether the engine shall step on to hear of what it saved."""
        return self.book is not None and self.book.has_pending()

    def take(self) -> list[Any]:
        """Return vLLM's events since the last call."""
        return [] if self.book is None else self.book.take()
