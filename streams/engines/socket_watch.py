"""Which of a bridge's event sockets have something to read, found out for all of them together.

What lives here: the poll of all event sockets of a bridge, and when it is due. What must not: a socket's messages
(connection), and what is done with them (feed).

Hundreds of ranks send a batch every 50 ms each. If every message woke the process up on its own, waking up would take
as long as most of the work. So after a poll that found something, the next one is due `POLL_EVERY_S` later, and finds
what has arrived at all sockets since. A message that arrives after a pause is found at once.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: The time between two polls while messages arrive, by half of which a batch is delayed on average. With 4,000 batches
#: per second from 200 ranks, each poll finds about twenty of them.
POLL_EVERY_S = 0.005

#: A poll that takes longer is continued after everything else on the loop had its turn: after a standstill, thousands
#: of batches may wait, and leases have to be renewed meanwhile.
POLL_S_MAX = 0.02


class SocketWatch:
    """Polls file descriptors on behalf of all feeds of a bridge. All methods run on the loop."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._is_watched = False  # whether the loop watches the selector
        self._next_poll: asyncio.TimerHandle | None = None
        #: Whether the last poll ended early, so that other sockets may be readable too.
        self.is_cut_short = False

    def add(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` at each poll at which the descriptor is readable, until it is removed."""
        self.remove(descriptor)  # that of a socket which was closed without being removed may be in use again
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)
        if self._next_poll is None:
            self._await_first()

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor before it is closed; one that was not added changes nothing."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        if not self._selector.get_map():
            self._stop()

    def poll(self) -> bool:
        """Call back for every descriptor that is readable now; return whether there was one."""
        readable = self._selector.select(0)
        watched = self._selector.get_map()
        ends_at_s = time.monotonic() + POLL_S_MAX
        self.is_cut_short = False
        for key, _ in readable:
            if time.monotonic() > ends_at_s:
                self.is_cut_short = True
                break
            if watched.get(key.fd) is not key:
                continue  # an earlier callback has removed it
            try:
                key.data()
            except Exception:  # the other sockets must be read nevertheless
                log.exception("a socket cannot be read")
        return bool(readable)

    def _on_readable(self) -> None:
        """Poll, and from now on by the clock, for as long as there is something to read."""
        self._stop()
        self._poll_and_continue()

    def _poll_and_continue(self) -> None:
        loop = asyncio.get_running_loop()
        due_at_s = loop.time() + POLL_EVERY_S
        self._next_poll = None
        had_readable = self.poll()
        if not self._selector.get_map():
            self._stop()
        elif had_readable:
            # Counted from the beginning of this poll: a process with much to do polls again once others had their turn.
            self._next_poll = loop.call_at(due_at_s, self._poll_and_continue)
        else:
            self._await_first()

    def _await_first(self) -> None:
        """Let the loop notice the first message."""
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().add_reader(self._selector.fileno(), self._on_readable)

    def _stop(self) -> None:
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        if self._is_watched:
            self._is_watched = False
            asyncio.get_running_loop().remove_reader(self._selector.fileno())
