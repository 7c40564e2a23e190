"""Which of a bridge's event sockets have something to read, found out for all of them together.

What lives here: the one watch of a bridge's sockets, and how often it is looked at. What must not: a socket's messages
(connection), and what is done with them (feed).

Hundreds of ranks send a batch every 50 ms each. If each message woke the process up on its own, waking up would take
longer than most of the work. So after a look, the next one is `LOOK_EVERY_S` later, and takes what has arrived
at all sockets since. A message that comes after a pause of the engines is taken at once.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

#: The time between two looks at the sockets while messages arrive. It delays a batch by half as much on average. With
#: 4,000 batches per second from 200 ranks, each look finds some twenty of them.
LOOK_EVERY_S = 0.005

#: A look that takes longer is continued after everything else on the loop had its turn: after a standstill, thousands
#: of batches may wait, and leases have to be renewed meanwhile.
LOOK_S_MAX = 0.02


class SocketWatch:
    """Watches file descriptors on behalf of all feeds of a bridge. All methods run on the loop."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._is_watched = False  # whether the loop watches the selector
        self._next_look: asyncio.TimerHandle | None = None
        #: Whether the last look ended early, so that other sockets may be readable too.
        self.is_cut_short = False

    def add(self, descriptor: int, on_readable: Callable[[], None]) -> None:
        """Call `on_readable` at the looks at which the descriptor is readable, until it is removed."""
        self._selector.register(descriptor, selectors.EVENT_READ, on_readable)
        if self._next_look is None:
            self._await_first()

    def remove(self, descriptor: int) -> None:
        """Forget a descriptor before it is closed; one that was not added changes nothing."""
        if descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)
        if not self._selector.get_map():
            self._stop()

    def look(self) -> bool:
        """Call back for every descriptor that is readable now; return whether there was one."""
        found = self._selector.select(0)
        watched = self._selector.get_map()
        ends_at_s = time.monotonic() + LOOK_S_MAX
        self.is_cut_short = False
        for key, _ in found:
            if time.monotonic() > ends_at_s:
                self.is_cut_short = True
                break
            if watched.get(key.fd) is not key:
                continue  # an earlier callback has removed it
            try:
                key.data()
            except Exception:  # the other sockets must be read nevertheless
                log.exception("a socket cannot be read")
        return bool(found)

    def _on_readable(self) -> None:
        """Look, and from now on look by the clock, for as long as there is something to read."""
        self._stop()
        self._look_and_go_on()

    def _look_and_go_on(self) -> None:
        loop = asyncio.get_running_loop()
        next_at_s = loop.time() + LOOK_EVERY_S
        self._next_look = None
        found = self.look()
        if not self._selector.get_map():
            self._stop()
        elif found:
            # From the beginning of this look on: a process with much to do looks again once others had their turn.
            self._next_look = loop.call_at(next_at_s, self._look_and_go_on)
        else:
            self._await_first()

    def _await_first(self) -> None:
        """Let the loop notice the first message."""
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().add_reader(self._selector.fileno(), self._on_readable)

    def _stop(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        if self._is_watched:
            self._is_watched = False
            asyncio.get_running_loop().remove_reader(self._selector.fileno())
