"""Session affinity: which rank the requests of one session go to.

What lives here: bindings, their expiry and their limit. What must not: clocks (time is an argument), and whether a
bound rank may still be chosen (registry). Owner of the state: one router; bindings are not told to others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from streams.core.ids import RankId

#: Sessions bound at once; beyond it the one that was used longest ago is forgotten and counted. Some 25 MB.
SESSIONS_MAX = 100_000


class SessionAffinity:
    """Bindings of sessions to ranks, each until `ttl_s` after its last request; a ttl_s of 0 binds nothing."""

    def __init__(self, ttl_s: float, sessions_max: int = SESSIONS_MAX) -> None:
        self._ttl_s = ttl_s
        self._sessions_max = sessions_max
        # Used last is last, with the time of that: times never fall from one entry to the next.
        self._bound: OrderedDict[Hashable, tuple[RankId, float]] = OrderedDict()
        self.forgotten = 0

    def rank_of(self, session: Hashable, now_s: float) -> RankId | None:
        """The rank that a session is bound to. now_s: seconds of any clock that does not go back."""
        self._expire(now_s)
        bound = self._bound.get(session)
        return bound[0] if bound else None

    def bind(self, session: Hashable, rank: RankId, now_s: float) -> None:
        """A request of the session went to this rank, and its time begins anew."""
        self._expire(now_s)
        if not self._ttl_s > 0.0:
            return
        self._bound[session] = (rank, now_s)
        self._bound.move_to_end(session)
        if len(self._bound) > self._sessions_max:
            self._bound.popitem(last=False)
            self.forgotten += 1

    def __len__(self) -> int:
        return len(self._bound)

    def _expire(self, now_s: float) -> None:
        while self._bound:
            oldest = next(iter(self._bound))
            if now_s - self._bound[oldest][1] < self._ttl_s:
                return
            del self._bound[oldest]
