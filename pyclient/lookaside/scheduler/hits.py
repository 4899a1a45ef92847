"""Lookups, and the hit that vLLM is told.

A lookup starts when a request is added, for its whole prefix. vLLM asks for the hit later. If the
answer is still out then, it is waited for a moment (waiting.py): where the pages lie in the
sidecars' memory, that is enough. After that vLLM is told to ask again, for as long as pages are
brought up from a tier below. What vLLM turns out to have itself is trimmed from the lookup, so that
it is not brought up either.

An answer belongs to the prefix and the local hit that it was asked for. The lookup is replaced when
one of them changes. It is replaced once if its lease may end before a worker has taken it over; a
request whose second lookup is too old as well is computed. Only the last lookup of a request holds
leases. It is cancelled when the request is admitted without a load, is preempted or ends.
"""

from __future__ import annotations

from typing import Any

from lookaside import wire
from lookaside.scheduler.identification import Identification
from lookaside.scheduler.names import Names
from lookaside.scheduler.pace import Pace
from lookaside.scheduler.promises import Promises
from lookaside.scheduler.requests import Question, RequestState
from lookaside.scheduler.setup import Setup
from lookaside.scheduler.states import States
from lookaside.scheduler.waiting import Waiting

# After this a miss is looked up again while the request still waits: others may have stored it.
_MISS_LIFE_S = 1.0
# After this an answer short of what a prefiller promised is looked up again.
_SHORT_LIFE_S = 0.005
# Requests that hold a lookup while they wait; further ones start theirs when vLLM asks.
_MAX_LOOKUPS = 512
# One load takes over no more.
_MAX_LOAD_CHUNKS = 8192


class Hits:
    """Starts the lookups of requests, and finds from their answers what can be loaded."""

    def __init__(
        self,
        setup: Setup,
        names: Names,
        identification: Identification,
        promises: Promises,
        states: States,
        pace: Pace,
        waiting: Waiting,
    ) -> None:
        self._setup = setup
        self._names = names
        self._identification = identification
        self._promises = promises
        self._states = states
        self._pace = pace
        self._waiting = waiting
        self._lookup_pages = _MAX_LOAD_CHUNKS * setup.chunk
        self.holding = 0
        """Requests with a lookup."""

    def begin(self, state: RequestState) -> None:
        """Start the lookup of a new request's whole prefix."""
        if self.holding < _MAX_LOOKUPS and self._is_wanted(state):
            self._ask(state, 0)

    def find(self, state: RequestState, computed_tokens: int) -> int | None:
        """Return how many tokens can be loaded beyond vLLM's own hit; None: ask again."""
        first = state.local_page
        if computed_tokens % self._setup.page or not self._is_wanted(state):
            self.drop(state)
            return 0
        limit, limit_tokens = self._reach(state)
        if first >= limit:
            self.drop(state)
            return 0
        asked = self._current(state, first)
        if asked is None:
            return 0
        if asked.held is None and not self._take_answer(state, asked):
            return None
        if self._is_too_old(asked, first):
            return self._replace_once(state, first)
        if self._promises.falls_short(state, asked) and self._promises.may_wait(state, asked):
            self._ask_later(state, asked, first)
            return None
        hit = self._end_of_hit(state, asked, first, limit)
        if hit is None:
            return None
        if hit <= first:
            if asked.lookup is not None:
                asked.lookup.cancel()
                asked.lookup = None
            return 0
        return min(hit * self._setup.page, limit_tokens) - computed_tokens

    def is_local(self, state: RequestState) -> bool:
        """Report whether vLLM's own hit reaches as far as any hit may."""
        return state.local_page >= self._reach(state)[0] > 0

    def wanted(self, state: RequestState, first_page: int, end_page: int) -> list[Any]:
        """Return the digests of pages [first_page, end_page) that a lookup asks for."""
        pages, tokens = self._reach(state)
        if tokens % self._setup.page and end_page == pages:
            return [*self._names.of(state, first_page, pages - 1), state.tail]
        return self._names.of(state, first_page, end_page)

    def take_over(
        self, state: RequestState, end_page: int
    ) -> tuple[tuple[wire.LeaseRef, ...], tuple[wire.LeaseRef, ...]]:
        """Hand the leases of a hit up to end_page to the workers, which own them from here on.

        Returns what takes over the leases of the pages and of the states at their end; both are
        empty if the lookup does not hold all of it.
        """
        asked = state.asked
        if asked is None or asked.lookup is None or end_page > (asked.held or 0):
            return (), ()
        at_end: tuple[wire.LeaseRef, ...] = ()
        if self._states.groups:
            at_end = self._states.take_over(asked, end_page)
            if not at_end:
                return (), ()
        refs, asked.lookup = asked.lookup.refs, None
        return refs, at_end

    def drop(self, state: RequestState) -> None:
        """Cancel the lookup of a request, if it has one."""
        asked, state.asked = state.asked, None
        if asked is None:
            return
        self.holding -= 1
        lookups = [lookup for _, lookup in asked.states]
        if asked.lookup is not None:
            lookups.append(asked.lookup)
        for lookup in lookups:
            try:
                lookup.cancel()
            except Exception:  # its lease has a deadline anyway
                self._setup.stats.add("errors")

    # ---- what to look up ----

    def _is_wanted(self, state: RequestState) -> bool:
        request = state.request
        return (
            self._setup.may_load
            and not state.denied
            and not request.skip_reading_prefix_cache
            and self._reach(state)[0] > 0
            and self._identification.is_known(state)
        )

    def _reach(self, state: RequestState) -> tuple[int, int]:
        """Return (pages, tokens) that a hit may reach at most.

        The last token is computed here to give logits. The page that it is in is therefore of no
        use, unless all before the token was handed over: vLLM takes a load that ends anywhere, and
        goes back by one token where the load is the whole prompt.
        """
        page, tokens = self._setup.page, state.request.num_tokens
        pages = (tokens - 1) // page
        if min(state.handed, tokens - 1) > pages * page:
            return pages + 1, state.handed
        return pages, pages * page

    def _end_page(self, state: RequestState, first_page: int) -> int:
        """Return where a lookup from first_page ends: after the last page that could be used.

        One page later with draft layers, where the last hit page only proves the one before.
        """
        pages, tokens = self._reach(state)
        known = self._names.known(state.request)
        if tokens % self._setup.page:
            known = pages  # its last page is named by what is in it
        most = min(self._lookup_pages, self._setup.sidecars.max_pages)
        return min(pages + self._setup.drafts, known, first_page + most)

    def _ask(self, state: RequestState, first_page: int) -> Question | None:
        """Start a lookup from first_page on; None if there is nothing to ask, or nobody."""
        setup = self._setup
        end = self._end_page(state, first_page)
        if end <= first_page or not setup.sidecars.available:
            return None
        names = self.wanted(state, first_page, end)
        prev = self._names.before(state, first_page)
        now = setup.clock()  # its leases cannot begin before
        state.asked = Question(
            lookup=setup.sidecars.start(
                first_page,
                prev,
                b"".join(names),
                self._pace.recompute_us(),
                self._pace.prefill_s(end - first_page),
                state.hints.tenant,
                state.request.request_id,
            ),
            first_page=first_page,
            end_page=end,
            last_digest=names[-1],
            since=now,
            trimmed=first_page,
            leased=now,
        )
        assert state.asked.lookup is not None
        state.lookup_id = state.asked.lookup.id
        self.holding += 1
        setup.stats.add("lookups")
        return state.asked

    def _current(self, state: RequestState, first_page: int) -> Question | None:
        """Return a lookup that fits the request, trimmed to first_page; None if there can be
        none."""
        asked = state.asked
        if asked is None or not self._is_valid(state, asked, first_page):
            asked = self._replace(state, first_page)
        if asked is not None and asked.lookup is not None and first_page > asked.trimmed:
            asked.lookup.trim(first_page)
            asked.trimmed = first_page
        return asked

    def _replace(self, state: RequestState, first_page: int) -> Question | None:
        """Drop the lookup of a request and start a new one.

        It begins at the first page of first_page's chunk: tiers know a chunk by all its pages.
        """
        self.drop(state)
        return self._ask(state, first_page - first_page % self._setup.chunk)

    # ---- what the answer is good for ----

    def _is_valid(self, state: RequestState, asked: Question, first_page: int) -> bool:
        """Report whether a lookup still fits the request, whose own hit ends at first_page."""
        if asked.trimmed > first_page:
            return False
        end = self._end_page(state, asked.first_page)
        if end != asked.end_page:
            return False
        if self.wanted(state, end - 1, end)[0] != asked.last_digest:
            return False
        if asked.held is None:
            return True
        # The age of a hit is looked at where the hit is used, and replaced once.
        return asked.lookup is not None or self._setup.clock() - asked.answered < _MISS_LIFE_S

    def _take_answer(self, state: RequestState, asked: Question) -> bool:
        """Report whether the answer to a lookup is in, and note it."""
        assert asked.lookup is not None
        pages = self._waiting.answer(asked.lookup)
        now = self._setup.clock()
        if pages is None:
            asked.leased = now
            return False
        asked.held = min(asked.first_page + pages, asked.end_page)
        asked.answered = now
        asked.late = asked.lookup.late
        asked.page_bytes = asked.lookup.page_bytes
        self._setup.stats.observe("lookup_seconds", now - asked.since)
        if (tracer := self._setup.tracer) is not None and (headers := state.trace):
            tracer.lookup(
                state.request.request_id,
                headers,
                asked.lookup,
                now - asked.since,
                asked.end_page - asked.first_page,
                asked.held - asked.first_page,
            )
        return True

    def _is_too_old(self, asked: Question, first_page: int) -> bool:
        """Report whether a hit's leases may be over before a worker has taken them over.

        Its load would fail then.
        """
        assert asked.held is not None
        return (
            asked.lookup is not None
            and asked.held > first_page
            and self._setup.clock() - asked.leased >= self._pace.hit_life_s()
        )

    def _replace_once(self, state: RequestState, first_page: int) -> int | None:
        """Replace a lookup that is too old, unless that was done before for this request."""
        if state.expired:
            self.drop(state)
            self._setup.stats.add("hits_expired")
            return 0
        state.expired = True
        return 0 if self._replace(state, first_page) is None else None

    def _ask_later(self, state: RequestState, asked: Question, first_page: int) -> None:
        """Replace a lookup that falls short of a promise, once its answer is a moment old."""
        if self._setup.clock() - asked.answered >= _SHORT_LIFE_S:
            self._replace(state, first_page)

    def _end_of_hit(
        self, state: RequestState, asked: Question, first_page: int, limit: int
    ) -> int | None:
        """Return the page that the hit ends at; None while that is not known."""
        assert asked.held is not None
        hit = min(asked.held - self._setup.drafts, limit)
        if not self._states.groups:
            return hit
        found = self._states.find(state, asked, first_page, hit)
        if found is None:
            return None
        short = found < min(state.promised, asked.end_page)
        if short and self._promises.may_wait(state, asked):
            self._ask_later(state, asked, first_page)
            return None
        return found
