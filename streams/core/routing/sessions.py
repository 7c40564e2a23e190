"""Session affinity: requests of one session go to the same rank.

What lives here: bindings, their expiry and their limit. What must not: clocks (time is an argument), and whether a
bound rank is still a candidate (eligibility, busy). The state belongs to one router and is not shared with others.

State: a router's session bindings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from streams.core.ids import RankId

#: Sessions bound at once, which take about 25 MB. Beyond this limit the least recently used one is dropped and counted.
SESSIONS_MAX = 100_000


class SessionAffinity:
    """Bindings of sessions to ranks, each valid until `ttl_s` after its last request. A ttl_s of 0 binds nothing."""

    def __init__(self, ttl_s: float, sessions_max: int = SESSIONS_MAX) -> None:
        self._ttl_s = ttl_s
        self._sessions_max = sessions_max
        # The rank of each session and the time of its last use, least recently used first.
        self._bound: OrderedDict[Hashable, tuple[RankId, float]] = OrderedDict()
        self.evicted = 0

    def rank_of(self, session: Hashable, now_s: float) -> RankId | None:
        """The rank to which a session is bound. now_s: seconds of any clock that does not go backwards."""
        self._expire(now_s)
        bound = self._bound.get(session)
        return bound[0] if bound else None

    def bind(self, session: Hashable, rank: RankId, now_s: float) -> None:
        """Bind a session to the rank that its last request went to, for `ttl_s` from now."""
        self._expire(now_s)
        if not self._ttl_s > 0.0:
            return
        self._bound[session] = (rank, now_s)
        self._bound.move_to_end(session)
        if len(self._bound) > self._sessions_max:
            self._bound.popitem(last=False)
            self.evicted += 1

    def __len__(self) -> int:
        return len(self._bound)

    def _expire(self, now_s: float) -> None:
        while self._bound:
            oldest = next(iter(self._bound))
            if now_s - self._bound[oldest][1] < self._ttl_s:
                return
            del self._bound[oldest]
