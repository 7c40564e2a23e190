"""Whether an engine serves requests and reports no events (pure; the clock is an argument).

What lives here: when that is reported. What must not: reading the engine's metrics (scraping), and logging (feed).
"""

from __future__ import annotations

#: How long requests must have been seen, and how often, before their events are missed. A prompt shorter than a block
#: causes no event; several requests over this time that are all so short are rare.
MISSED_AFTER_S = 10.0
SEEN_MIN = 3


class MissingEvents:
    """Counts how often requests were seen before the first event of a rank."""

    def __init__(self) -> None:
        self._done = False
        self._n_seen = 0
        self._first_at_s = 0.0

    def on_event(self) -> None:
        """Note that an event has arrived; nothing is reported from then on."""
        self._done = True

    def on_requests(self, now_s: float) -> bool:
        """Note that requests are running; return whether to report now that their events are missing, which is once."""
        if self._done:
            return False
        if not self._n_seen:
            self._first_at_s = now_s
        self._n_seen += 1
        if self._n_seen < SEEN_MIN or now_s - self._first_at_s < MISSED_AFTER_S:
            return False
        self._done = True
        return True
