"""Has the sidecars of all ranks clear an engine's space, however long that takes.

A reset of vLLM's cache must neither wait for a sidecar that is dead or silent nor fail because of
it: vLLM's ``/pause`` and ``/sleep`` would fail with it and leave the engine paused. So a reset
first makes void what the sidecars hold, here and at once. Until a sidecar has confirmed that it
cleared the space, this engine looks nothing up there, and hits nothing that it holds. A thread
exists for as long as something is void. It asks for the clear as soon as the sidecar can be
reached: after a restart, which may have recovered old pages from a disk, or after a stop.

A reset also leaves a note in the sidecar's directory, ``void-FINGERPRINT-NUMBER``, and removes it
when the clear is confirmed. If the engine ends before that, the next engine of the same space that
connects there finds the note and has the space cleared first.

Locks: Clearing._lock guards everything here. Session's own lock may be taken under it.
This module imports neither torch nor vLLM.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence

from lookaside import wire
from lookaside.connection import Pending, SessionUnavailable
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session, Subscriber

# Below "vllm", so that its handlers show it.
logger = logging.getLogger("vllm.lookaside")

# How often the thread looks whether a sidecar can be reached again.
_POLL_S = 0.05
# A sidecar may fail to clear, because a tier of it is down. It is asked again after this, then
# after twice as long, and so on.
_RETRY_FIRST_S = 0.5
_RETRY_LAST_S = 30.0


class _Rank(Subscriber):
    """What is void in one session's space. Guarded by Clearing._lock."""

    def __init__(self, clearing: Clearing, session: Session) -> None:
        self.session = session
        self.wanted = 0  # resets so far
        self.cleared = 0  # resets whose clear is confirmed
        self._clearing = clearing
        self._out: tuple[int, Pending] | None = None  # a ClearSpace, and how many resets it serves
        self._out_notes: set[str] = set()  # found before it was sent, so that it may remove them
        self._fingerprint = ""
        self._notes: set[str] = set()  # of the resets here that are not cleared
        self._found: set[str] = set()  # notes of other engines, which may have ended
        self._retry_at = 0.0
        self._pause_s = _RETRY_FIRST_S

    @property
    def is_void(self) -> bool:
        return self.cleared < self.wanted or bool(self._found)

    @property
    def pending(self) -> Pending | None:
        """The ClearSpace that is under way."""
        return self._out[1] if self._out is not None else None

    def void(self) -> None:
        self.wanted += 1
        self._retry_at = 0.0
        self._leave_note()

    def forget_space(self) -> None:
        """No note is left before the next space is known."""
        self._fingerprint = ""

    def advance(self) -> None:
        """Take in the answer if it is there, and ask anew if none is awaited."""
        if self._out is not None:
            resets, pending = self._out
            if not pending.done:
                return
            self._out = None
            self._take(resets, pending.wait(0))
        if self.cleared == self.wanted:
            # Whoever left a note may be alive, and may have had the space cleared by now. It is not
            # cleared again then: it may hold new pages.
            self._found = {note for note in self._found if os.path.exists(note)}
        if not self.is_void or time.monotonic() < self._retry_at:
            return
        try:
            pending = self.session.submit(lambda request_id: wire.ClearSpace(request_id))
        except SessionUnavailable:
            return
        self._out, self._out_notes = (self.wanted, pending), self._notes | self._found

    def _take(self, resets: int, reply: object) -> None:
        where = self.session.options.where
        if isinstance(reply, wire.Cleared):
            self.cleared = resets
            self._pause_s = _RETRY_FIRST_S
            for note in self._out_notes:
                _remove(note)
            self._notes -= self._out_notes
            self._found -= self._out_notes
            logger.info("the sidecar at %s has cleared its space: %d chunks", where, reply.chunks)
        elif isinstance(reply, wire.Error):
            self._retry_at = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _RETRY_LAST_S)
            self._clearing.log.warning(
                f"clear {where}",
                "the sidecar at %s could not clear its space after a reset, and nothing of it is "
                "used until it can: %s",
                where,
                reply.message,
            )

    def _leave_note(self) -> None:
        """Have the next engine clear the space if this one cannot any more."""
        if not self._fingerprint:
            return  # never connected: the space's fingerprint is not known
        path = os.path.join(
            self.session.options.endpoint, f"{self._note_prefix()}{secrets.token_hex(8)}"
        )
        try:
            os.close(
                os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
            )
        except OSError as error:
            self._clearing.log.warning("note", "a reset could not be noted in %s: %s", path, error)
            return
        self._notes.add(path)

    def _note_prefix(self) -> str:
        """Return how the names of the space's notes begin.

        A sidecar of another host has a directory that cannot be reached. Its notes are in that of
        the sidecar that carries the session, and have its address in their names, because two
        sidecars may hold one space.
        """
        remote = self.session.options.remote
        whose = hashlib.sha256(remote.encode()).hexdigest()[:16] + "-" if remote else ""
        return f"void-{whose}{self._fingerprint}-"

    # ---- session.Subscriber, on the session's thread ----

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        with self._clearing._lock:
            self._fingerprint = welcome.fingerprint.hex()
            pattern = os.path.join(glob.escape(session.options.endpoint), f"{self._note_prefix()}*")
            self._found = set(glob.glob(pattern)) - self._notes
            if self._found:
                logger.warning(
                    "the space at %s was reset while its sidecar was away", session.options.where
                )
            if self.cleared < self.wanted and not self._notes:
                self._leave_note()
            self._retry_at = 0.0
            self._clearing._note_change()


class Clearing:
    """See the module's comment. All methods may be called from any thread."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        """sessions are the caller's to start and close, and not yet started."""
        self.log = RateLimitedLog(logger)
        self._lock = threading.Condition()
        self._ranks = [_Rank(self, session) for session in sessions]
        self._held_back = False  # nothing is cleared before clear is called
        self._thread: threading.Thread | None = None
        self._closed = False
        self._clean = True  # read without the lock
        for rank in self._ranks:
            rank.session.subscribe(rank)

    @property
    def is_clean(self) -> bool:
        """Whether all that is void has been cleared on every rank."""
        return self._clean

    def void(self) -> None:
        """Make void what every rank's sidecar holds now, until it has been cleared.

        It is cleared after the next call of clear: bytes from before may still arrive until then.
        """
        with self._lock:
            self._held_back = True
            for rank in self._ranks:
                rank.void()
            self._note_change()

    def clear(self, timeout_s: float) -> bool:
        """Have what is void cleared, and wait up to timeout_s for sidecars that can be reached.

        Returns whether all are done. The others are asked for as long as it takes.
        """
        with self._lock:
            self._held_back = False
            self._note_change()
            self._lock.wait_for(
                lambda: not any(rank.is_void and rank.session.available for rank in self._ranks),
                timeout_s,
            )
            return self._clean

    def move(self) -> None:
        """The sessions go on in other spaces. Call only while is_clean."""
        with self._lock:
            for rank in self._ranks:
                rank.forget_space()

    def close(self) -> None:
        """Stop asking. The notes stay for the next engine. Safe to call again."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._lock.notify_all()
        if thread is not None:
            thread.join(1.0)

    def _note_change(self) -> None:
        """Wake the thread, and start it if there is something to do. The lock is held."""
        self._clean = not any(rank.is_void for rank in self._ranks)
        if not self._clean and self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=self._run, name="lookaside-clearing", daemon=True
            )
            self._thread.start()
        self._lock.notify_all()

    def _advance(self) -> None:
        """Ask the ranks that are void, and take in what they have replied. The lock is held."""
        if not self._held_back:
            for rank in self._ranks:
                rank.advance()
        self._clean = not any(rank.is_void for rank in self._ranks)
        self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._advance()
                if self._clean or self._closed:
                    self._thread = None
                    return
                out = [rank.pending for rank in self._ranks if rank.pending is not None]
                if not self._held_back and any(pending.done for pending in out):
                    continue
                out = [pending for pending in out if not pending.done]
                if not out:
                    self._lock.wait(_POLL_S)
            if out:
                out[0].wait_done(_POLL_S)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # another engine that found it was first
    except OSError as error:
        logger.warning(
            "%s could not be removed, and has the space cleared once more: %s", path, error
        )
