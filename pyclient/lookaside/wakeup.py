"""Wakes the thread of a session from its poll."""

from __future__ import annotations

import os


class Wakeup:
    """An event that any thread may set, and that the session's thread polls for.

    It does nothing until it is opened. The file descriptor is the caller's to close.
    """

    def __init__(self) -> None:
        self.fd = -1
        """What is readable while the event is set; -1 while it is not open."""
        self.ended = False
        """Whether the thread is to end. The event is set after this."""

    def open(self) -> None:
        """Make the file descriptor."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Set the event."""
        if self.fd >= 0:
            try:
                os.eventfd_write(self.fd, 1)
            except OSError:
                pass  # set already, or closed

    def clear(self) -> None:
        """Clear the event. For the thread that polls."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
