"""From the order to save pages to its acknowledgement. For the worker's main thread alone."""

from __future__ import annotations

import bisect
import functools
import time
from dataclasses import dataclass, field

import numpy as np

from lookaside import wire
from lookaside.config import Config
from lookaside.connection import Pending, SessionUnavailable
from lookaside.copies import Ticket
from lookaside.mapping import RegionError
from lookaside.metadata import SaveSpec
from lookaside.ratelog import RateLimitedLog
from lookaside.regions import Hold
from lookaside.session import Session
from lookaside.stats import Collector
from lookaside.worker.link import Link, Live


@dataclass(slots=True)
class _Piece:
    """One PrepareStore that is out, for some of a save's pages."""

    asked: range
    pending: Pending


@dataclass(slots=True)
class _Save:
    """One SaveSpec between its order and its acknowledgement."""

    spec: SaveSpec
    live: Live
    since: float
    pieces: list[_Piece] = field(default_factory=list)
    hold: Hold | None = None
    stores: list[tuple[int, list[int]]] = field(default_factory=list)
    """(store, indices of its grants that could not be copied)."""
    pages: int = 0
    """Pages being copied."""
    copied: list[tuple[int, list[int], int]] = field(default_factory=list)
    """Of each grant being copied: the end of its rows in the copy, its store's list of grants that
    could not be copied, and its index there."""
    ticket: Ticket | None = None


@dataclass(slots=True)
class _Copy:
    """The blocks to copy, and where to."""

    blocks: list[np.ndarray] = field(default_factory=list)
    addresses: list[np.ndarray] = field(default_factory=list)


class Saves:
    """Asks for room, copies pages out, commits and acknowledges. See the package's comment."""

    def __init__(self, config: Config, link: Link, stats: Collector, log: RateLimitedLog) -> None:
        self.config = config
        self._link = link
        self._stats = stats
        self._log = log
        self.share: tuple[int, int] = (1, 0)
        """(n, i): of n ranks that hold the same pages, this is number i."""
        self._orders: list[_Save] = []  # of this step
        self._copying: list[_Save] = []  # whose copy is under way
        self._done: dict[int, int] = {}

    # ---- orders ----

    def order(self, spec: SaveSpec) -> None:
        """Ask for room. Whatever happens, the save is acknowledged in the end."""
        live, session = self._link.live, self._link.session
        save: _Save | None = None
        try:
            self._check(spec)
            if live is None or session is None or self._link.closed or self._link.quiet:
                raise SessionUnavailable("not connected, or vLLM sleeps")
            save = _Save(spec, live, time.monotonic())
            self._ask(save, session)
            if save.pieces:
                self._orders.append(save)
            else:
                self._acknowledge(spec)
        except Exception as error:
            if not isinstance(error, SessionUnavailable):
                self._stats.add("errors")
                self._log.warning("save", "a save could not be ordered: %s", error)
            if save is not None and save.pieces:
                self._orders.append(save)  # the pieces that are out still get their room
            else:
                self._stats.add("save_failures")
                self._acknowledge(spec)

    def _check(self, spec: SaveSpec) -> None:
        """Raise ValueError for a malformed order."""
        layout = self._link.pages
        pages = len(spec.hashes) // layout.digest_bytes
        exact = (
            len(spec.hashes) == pages * layout.digest_bytes
            and len(layout.rows(spec.block_ids)) == pages
        )
        if not pages or not exact or spec.first_page % layout.per_chunk:
            raise ValueError(f"save {spec.save_id} is malformed")

    def _ask(self, save: _Save, session: Session) -> None:
        """Send the PrepareStores of a save's pages that this rank stores."""
        spec, live, chunk = save.spec, save.live, self._link.pages.per_chunk
        size = self._link.pages.digest_bytes
        pages = len(spec.hashes) // size
        every, which = self.share if spec.divided else (1, 0)
        abort = functools.partial(self._abort_late, session, live.session_id)
        for start in range(0, pages, live.max_pages):
            end = min(start + live.max_pages, pages)
            first_chunk = (spec.first_page + start) // chunk
            last_chunk = (spec.first_page + end - 1) // chunk
            if (which - first_chunk) % every > last_chunk - first_chunk:
                continue  # all of them are other ranks'
            make = functools.partial(
                wire.PrepareStore,
                first_page=spec.first_page + start,
                prev=spec.hashes[(start - 1) * size : start * size] if start else spec.prev,
                hashes=spec.hashes[start * size : end * size],
                every=every,
                which=which,
                **spec.hints,
            )
            pending = session.submit(make, abort)
            asked = range(spec.first_page + start, spec.first_page + end)
            save.pieces.append(_Piece(asked, pending))

    @staticmethod
    def _abort_late(session: Session, session_id: int, reply: object) -> None:
        """Give back room that came too late."""
        if isinstance(reply, wire.StoreGrant) and reply.store:
            session.send(wire.AbortStore(reply.store), session_id)

    # ---- copies ----

    def copy_out(self) -> None:
        """Copy the pages of this step's orders into the room that they get in time."""
        orders, self._orders = self._orders, []
        if not orders:
            return
        deadline = time.monotonic() + self.config.store_timeout_ms / 1000
        for save in orders:
            try:
                self._start(save, deadline)
            except Exception:
                self._stats.add("errors")
                self._log.warning("bug save", "a save failed", exc_info=True)
                self._abandon(save)
        self.finish()

    def _start(self, save: _Save, deadline: float) -> None:
        """Start copying one save into the room that it gets by the deadline."""
        hold = save.hold = save.live.regions.acquire()
        if hold is None:
            self._abandon(save)
            return
        held = True
        try:
            copy = self._collect(save, hold, deadline)
            if not save.stores:
                self._acknowledge(save.spec)
                return
            if copy.blocks:
                assert self._link.copies is not None
                save.ticket = self._link.copies.gather(
                    np.concatenate(copy.blocks), np.concatenate(copy.addresses)
                )
            self._copying.append(save)
            held = False  # finish releases
        finally:
            if held:
                save.hold = None
                hold.release()

    def _collect(self, save: _Save, hold: Hold, deadline: float) -> _Copy:
        """Wait for the grants of a save; return what to copy into them."""
        layout, copy = self._link.pages, _Copy()
        rows = layout.rows(save.spec.block_ids)
        failed = False
        # A page that is not whole cannot be copied. What follows it could not be found either.
        gone = False
        for piece in save.pieces:
            reply = piece.pending.wait(deadline - time.monotonic())
            if not isinstance(reply, wire.StoreGrant):
                failed = True
                if isinstance(reply, wire.Error):
                    self._log.warning(
                        f"store {reply.code}", "a store was refused: %s", reply.message
                    )
                continue
            self._stats.add("shed_pages", reply.shed)
            if not reply.store:
                continue
            bad: list[int] = []
            save.stores.append((reply.store, bad))
            for index, grant in enumerate(reply.grants):
                try:
                    into = layout.locate(hold, piece.asked, grant, 0.0, write=True)
                except RegionError as error:
                    self._log.warning("grant", "a grant cannot be used: %s", error)
                    bad.append(index)
                    continue
                at = grant.page - save.spec.first_page
                granted = rows[at : at + len(into)]
                gone = gone or not layout.are_whole(granted)
                if gone:
                    bad.append(index)
                    continue
                copy.blocks.append(layout.copied(granted) if layout.states else granted)
                copy.addresses.append(into)
                save.pages += len(into)
                save.copied.append((save.pages, bad, index))
        if failed:
            self._stats.add("save_failures")
        return copy

    def _abandon(self, save: _Save) -> None:
        """Give a save up before anything of it was copied."""
        for piece in save.pieces:
            reply = piece.pending.wait(0)
            if self._link.session is not None:
                self._abort_late(self._link.session, save.live.session_id, reply)
        self._stats.add("save_failures")
        self._acknowledge(save.spec)

    def give_up(self) -> None:
        """Give up this step's orders, of which nothing was copied yet."""
        orders, self._orders = self._orders, []
        for save in orders:
            self._abandon(save)

    # ---- ends ----

    def finish(self) -> None:
        """Commit and acknowledge every save whose copy has ended."""
        if not self._copying:
            return
        still: list[_Save] = []
        for save in self._copying:
            if save.ticket is not None and not save.ticket.done():
                still.append(save)
            else:
                self._commit(save)
        self._copying = still

    def _commit(self, save: _Save) -> None:
        error = save.ticket.error if save.ticket is not None else None
        if save.hold is not None:
            save.hold.release()
        if error is None and save.ticket is not None and save.ticket.unfit:
            self._leave_out(save, save.ticket.unfit)
        for store, bad in save.stores:
            message = (
                wire.CommitStore(store, tuple(bad)) if error is None else wire.AbortStore(store)
            )
            self._link.send(message, save.live.session_id)
        if error is not None:
            self._stats.add("save_failures")
            self._log.warning("gather", "pages could not be copied out: %s", error)
        else:
            self._stats.add("save_bytes", save.pages * self._link.pages.page_bytes)
            self._stats.observe("save_seconds", time.monotonic() - save.since)
        self._acknowledge(save.spec)

    def _leave_out(self, save: _Save, unfit: tuple[int, ...]) -> None:
        """Do not commit the grants with pages that the codec cannot keep."""
        ends = [end for end, _, _ in save.copied]
        for which in {bisect.bisect_right(ends, row) for row in unfit}:
            end, bad, index = save.copied[which]
            bad.append(index)
            save.pages -= end - (ends[which - 1] if which else 0)
        pages = len(set(unfit))
        self._stats.add("unfit_pages", pages)
        self._log.warning(
            "unfit",
            "lookaside.compress: %d pages cannot be encoded and are not stored: they have "
            "infinities or NaNs, or, for lossless, numbers of too many magnitudes",
            pages,
        )

    def drain(self, deadline: float) -> None:
        """Wait until the deadline for copies under way, and finish those that have ended."""
        self.wait_copied(max(0.0, deadline - time.monotonic()))
        self.finish()

    def wait_copied(self, timeout_s: float) -> bool:
        """Wait for copies under way, for so long at most; return whether all have ended."""
        deadline = time.monotonic() + timeout_s
        return all(
            save.ticket is None or save.ticket.wait(max(0.0, deadline - time.monotonic()))
            for save in self._copying
        )

    def take_done(self) -> dict[int, int]:
        """Return the saves acknowledged since the last call, as the metadata has them."""
        done, self._done = self._done, {}
        return done

    def _acknowledge(self, spec: SaveSpec) -> None:
        self._done[spec.save_id] = 1
