"""When to log what may happen without end, such as that Kafka does not answer (pure; the clock is an argument).

What lives here: the limit of such lines. What must not: logging, and what follows (engines.feed,
streams.kafka.outage_log).
"""

from __future__ import annotations

from collections.abc import Hashable

#: Time between two lines about the same outage. An engine may be away for days, and a fleet has hundreds of engines.
REMIND_S = 60.0

#: Things whose lines are counted: the ranks of a partition, with some reasons each.
REPETITIONS_MAX = 10_000


class Outage:
    """Something that may not answer: it is reported once, then once a minute, and once when it answers again."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._logged_at_s = 0.0

    @property
    def is_running(self) -> bool:
        """Whether it did not answer when it was last asked."""
        return self._since_s is not None

    def failed(self, now_s: float, since_s: float | None = None) -> float | None:
        """Note that it did not answer; return for how many seconds that has lasted, or None if nothing is to be logged.

        The first failure returns 0. since_s: when the outage began, if that was before its first failure.
        """
        if self._since_s is None:
            self._since_s = now_s if since_s is None else since_s
            self._logged_at_s = now_s
            return 0.0
        if now_s - self._logged_at_s < REMIND_S:
            return None
        self._logged_at_s = now_s
        return now_s - self._since_s

    def answered(self, now_s: float) -> float | None:
        """Note that it answered; return for how many seconds it had not, or None if it had answered before."""
        since_s, self._since_s = self._since_s, None
        return None if since_s is None else now_s - since_s


class Repetitions:
    """Things that may happen many times a second: each is reported at once, then once a minute with its number."""

    def __init__(self) -> None:
        self._logged_at_s: dict[Hashable, float] = {}
        self._n: dict[Hashable, int] = {}  # how often each has happened since its last line

    def happened(self, what: Hashable, now_s: float) -> int | None:
        """Note that it happened; return how often it did since the last line, or None if nothing is to be logged.

        Once REPETITIONS_MAX things are known, all of them are forgotten.
        """
        n = self._n.get(what, 0) + 1
        logged_at_s = self._logged_at_s.get(what)
        if logged_at_s is not None and now_s - logged_at_s < REMIND_S:
            self._n[what] = n
            return None
        if logged_at_s is None and len(self._logged_at_s) >= REPETITIONS_MAX:
            self._logged_at_s.clear()
            self._n.clear()
        self._logged_at_s[what], self._n[what] = now_s, 0
        return n


def lasting(seconds: float) -> str:
    """Return how long an outage has lasted, to be appended to its line; empty for one that has just begun."""
    return f" (for {seconds:.0f} s)" if seconds else ""


def repeated(n: int) -> str:
    """Return how often something happened, to be appended to its line; empty for once."""
    return "" if n == 1 else f" ({n} times since the last such line)"
