"""Whether an engine's batches arrive late (pure; the clock is an argument).

What lives here: judging the delay of live batches by the times that the engine wrote into them. What must not: reading
these times (dialects), and asking the replay socket (gap_filling).

Batches that wait on a slow link have been published by the engine, and the bridge does not know of them. A replay
socket shows them within seconds; without one, only the delay of those that do arrive does. The engine's clock need not
agree with the bridge's: the least delay is taken for the difference of the clocks. It rises no faster than two clocks
can drift apart, so a link that stays slow is late for hours. The arrival is measured on a clock that nothing sets.
"""

from __future__ import annotations

import math

#: A batch is late if it needed this much longer than the fastest one. An engine's publishing thread, and this loop when
#: it is busy, delay a batch by less.
LATE_S = 0.5

#: Seconds per second by which the least delay rises: two clocks that nothing adjusts drift apart by 100 us per second
#: at most, and twice that is allowed. A second of delay counts as drift after 80 minutes.
DRIFT = 200e-6

#: After a late batch, nothing else is assumed to be on its way once nothing has arrived for as long as that batch was
#: late, and for twice the longest pause between late batches, within these limits. A link that delivers what it holds
#: in order, and pauses in between, would otherwise count as empty during each pause.
QUIET_S_MIN = 1.0
QUIET_S_MAX = 10.0


class LinkDelay:
    """The delay of one engine's live batches.

    emitted_s: when the engine published a batch, by its own clock. All other times are monotonic, so the delay also
    contains the difference of the two clocks.
    """

    def __init__(self) -> None:
        self._least_s = math.inf  # as of the last batch
        self._arrived_at_s = 0.0  # when that was
        self._last_emitted_s = -math.inf
        self._late_at_s: float | None = None  # when the last batch arrived, if it was late
        self._late_by_s = 0.0  # how late it was
        self._pause_s = 0.0  # the longest one between two late batches in a row

    def on_batch(self, emitted_s: float, arrived_s: float) -> None:
        """Note that a live batch has arrived."""
        if emitted_s == self._last_emitted_s:
            return  # an engine without a clock may send a constant
        if emitted_s < self._last_emitted_s - LATE_S:
            # Live batches arrive in order, so the engine's clock was set back, or the last time was damaged.
            self._least_s = math.inf
        self._last_emitted_s = emitted_s
        delay_s = arrived_s - emitted_s
        self._least_s = min(self._least_s + DRIFT * (arrived_s - self._arrived_at_s), delay_s)
        self._arrived_at_s = arrived_s
        late_by_s = delay_s - self._least_s
        if late_by_s < LATE_S:
            self._late_at_s, self._pause_s = None, 0.0
            return
        if self._late_at_s is not None:
            self._pause_s = max(self._pause_s, arrived_s - self._late_at_s)
        self._late_at_s, self._late_by_s = arrived_s, late_by_s

    def is_behind(self, now_s: float, answered_from_s: float) -> bool:
        """Whether further batches may be on their way.

        answered_from_s: when the last replay began that was answered completely, since it brought all of them.
        """
        late_at_s = self._late_at_s
        if late_at_s is None or answered_from_s >= late_at_s:
            return False
        return now_s - late_at_s < min(QUIET_S_MAX, max(QUIET_S_MIN, self._late_by_s, 2.0 * self._pause_s))
