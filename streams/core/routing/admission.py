"""Which ranks a waiting request may go to now (docs/queue.md).

What lives here: the threshold of a rank's backlog, what requests that wait for a rank are charged to it, and which
router's turn it is. What must not: the order of requests (queue), clocks (time is an argument), and busy thresholds
(busy). The state belongs to one router.

Several routers see that a rank has room again before they hear of each other's bookings. Without turns each of them
would send its first request there. So one router sends at once, and the others only after the propagation delay, when
they know what it sent. For the same reason a router charges the ranks for which it is not the first with what an engine
computes in that time, so that of ranks with about the same cost each router prefers others. Which router is the first
follows from a rendezvous hash of router, worker and period, which all routers compute alike without exchanging
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np
import xxhash

from streams.core.ids import Int64Array, RankId, WorkerId
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.cost import prefill_tokens
from streams.core.routing.decision import Chooser, Decision
from streams.core.routing.request import RoutingRequest

#: How long a booking takes until the other routers have it. p99 of the measurements in docs/queue.md.
PROPAGATION_MS = 100.0

#: How long the same router is the first for a worker, so that each of them is the first for a fair share of time.
PERIOD_MS = 1000.0

#: With several routers, a rank is closed only above this many times the threshold. A router does not see what waits in
#: the others, so the less waits in routers, the better they share the ranks. In benchmarks.queueing, the mean time to
#: first token of four routers is 1.10 times that of one at 1.5, and 1.09 times at 2.
SEVERAL_ROUTERS_FACTOR = 2.0

#: Tuples of candidates whose rows are kept. There is one for each combination of model and filters, and new ones after
#: each change of the registry. Beyond this limit all are dropped.
_CANDIDATES_MAX = 64

#: Time per prompt token that bookings without a forecast take, in ms.
MsPerToken = Callable[[], float]

#: Returns those of some ranks that are not over a busy threshold.
IdleRanks = Callable[[Sequence[RankId], ActiveLoads], Sequence[RankId]]

#: Ranks whose state is remembered until nothing waits. Beyond this limit all is forgotten.
_RANKS_MAX = 65_536

_NO_CHARGES: Mapping[RankId, float] = {}

#: In place of a time, for ranks that are above the threshold.
_CLOSED = float("inf")


def is_first(router_id: str, router_ids: Iterable[str], worker_id: WorkerId, period: int) -> bool:
    """Whether none of the routers is before this one in the order of a worker. period: number of the period."""
    own = _rendezvous(router_id, worker_id, period)
    return all(_rendezvous(other_id, worker_id, period) <= own for other_id in router_ids)


def _rendezvous(router_id: str, worker_id: WorkerId, period: int) -> tuple[int, str]:
    return xxhash.xxh3_64_intdigest(f"{router_id}/{worker_id}/{period}".encode()), router_id


class _Candidates:
    """Candidates and what is known of them in the current pump.

    ranks: the tuple is kept, so that no other one gets its id(). rows: of their loads, valid for `loads` and its
    `numbering`. open: those that this router may send to. pump: the pump that found this out. others: charges of the
    ranks for which another router is the first, in the period and with the routers of others_as_of.
    """

    __slots__ = ("loads", "numbering", "open", "others", "others_as_of", "pump", "ranks", "rows")

    def __init__(self, ranks: Sequence[RankId]) -> None:
        self.ranks = ranks
        self.loads: ActiveLoads | None = None
        self.numbering = -1
        self.rows: Int64Array = np.empty(0, dtype=np.int64)
        self.open: set[RankId] = set()
        self.pump = -1
        self.others: Mapping[RankId, float] = _NO_CHARGES
        self.others_as_of: tuple[int, tuple[str, ...]] = (-1, ())


class Gate:
    """Decides whether a waiting request may go to the rank that was chosen for it.

    Use: `begin` once for each pump, then for each request in the queue's order `may_go`, and `decide` where that is
    true; `end` when nothing waits any more.
    """

    def __init__(
        self,
        router_id: Callable[[], str],
        backlog_tokens_max: float | None,
        idle: IdleRanks | None = None,
        propagation_tokens: int = 0,
        *,
        backlog_ms_max: float | None = None,
        ms_per_token: MsPerToken | None = None,
    ) -> None:
        """router_id: it changes when a router reads its topics again. backlog_tokens_max: a rank with more uncached
        tokens booked is closed; None sets no limit. idle: returns the ranks that are not over a busy threshold; None if
        there are no such thresholds. propagation_tokens: what an engine computes in the propagation delay.

        ms_per_token: if given, backlogs are times, as forecasts of bookings give them (policy expected-time), and a
        rank with a longer one than backlog_ms_max is closed. Then the numbers of tokens are not used. With several
        routers, both thresholds are SEVERAL_ROUTERS_FACTOR times as high.
        """
        self._ms_per_token = ms_per_token
        self._backlog_ms_max = np.inf if backlog_ms_max is None else backlog_ms_max
        self._router_id = router_id
        self._backlog_tokens_max = np.inf if backlog_tokens_max is None else backlog_tokens_max
        self._factor = 1.0  # of the threshold
        self._idle = idle
        self._propagation_tokens = propagation_tokens
        self._candidates: dict[int, _Candidates] = {}
        self._charges: dict[RankId, float] = {}  # in tokens, or in ms
        # When a rank was first seen below the threshold after it had been above it; _CLOSED while it is above.
        self._opened_ms: dict[RankId, float] = {}
        self._router_ids: tuple[str, ...] = ()
        self._now_ms = self._wall_ms = 0.0
        self._pump = 0

    def begin(self, now_ms: float, wall_ms: float, router_ids: Sequence[str]) -> None:
        """Begin a pump: nothing waits for any rank yet.

        now_ms: this router's monotonic clock. wall_ms: the time of day, from which routers derive the same period. A
        clock that is off only changes whose turn it is. router_ids: routers that booked lately.
        """
        self._charges.clear()
        if len(self._opened_ms) > _RANKS_MAX:
            self._opened_ms.clear()
        self._router_ids = tuple(router_ids)
        self._factor = SEVERAL_ROUTERS_FACTOR if len(self._router_ids) > 1 else 1.0
        self._now_ms, self._wall_ms = now_ms, wall_ms
        self._pump += 1

    def end(self) -> None:
        """Forget which ranks are closed: the next request that waits finds that out anew."""
        self._candidates.clear()
        self._opened_ms.clear()

    def may_go(self, ranks: Sequence[RankId], loads: ActiveLoads) -> bool:
        """Whether any of these ranks is open to this router in this pump and no earlier request waits for it."""
        if self._backlog_tokens_max < 0:
            return False
        return bool(self._open_ranks(ranks, loads))

    def decide(
        self, request: RoutingRequest, loads: ActiveLoads, chooser: Chooser, now_s: float = 0.0
    ) -> Decision | None:
        """Choose a rank from loads that include what earlier requests wait for; None if the request must wait.

        A request that must wait is charged to its rank until the pump ends, so that those behind it choose another rank
        where that is better, and do not go before it. chooser, now_s: as in Chooser.choose, whose errors are raised.
        """
        ranks, prompt = request.matches.ranks, request.prompt
        if request.matches.refusal is None and not self.may_go(ranks, loads):
            return None
        with self._charged(loads, self._others_ranks(ranks)), self._charged(loads, self._charges):
            decision = chooser.choose(request, loads, now_s)
        chosen = decision.chosen
        if chosen.rank in self._charges or chosen.rank not in self._open_ranks(ranks, loads):
            work: float = max(1, prefill_tokens(prompt.n_tokens, chosen.cached_blocks, prompt.block_size))
            if self._ms_per_token is not None:
                work = decision.forecast().prefill_us / 1000.0 or work * self._ms_per_token()
            self._charges[chosen.rank] = self._charges.get(chosen.rank, 0) + work
            self._close(chosen.rank)
            return None
        return decision

    def booked(self, rank: RankId, loads: ActiveLoads) -> None:
        """Note that a request went to a rank in this pump."""
        is_idle = self._idle is None or len(self._idle([rank], loads)) > 0
        if not is_idle or self._are_over(loads, loads.rows_of((rank,)))[0]:
            self._close(rank)

    def _are_over(self, loads: ActiveLoads, rows: Int64Array) -> list[bool]:
        """Whether the ranks at these rows have a longer backlog than the threshold."""
        over: list[bool]
        if self._ms_per_token is None:
            over = (loads.table[0].take(rows) > self._factor * self._backlog_tokens_max).tolist()
        else:
            backlog_ms = loads.backlog_ms(rows, loads.times.now_ms, self._ms_per_token())
            over = (backlog_ms > self._factor * self._backlog_ms_max).tolist()
        return over

    def _charged(self, loads: ActiveLoads, charges: Mapping[RankId, float]) -> AbstractContextManager[None]:
        if self._ms_per_token is None:
            return loads.charged({rank: int(tokens) for rank, tokens in charges.items()})
        return loads.charged({}, charges)

    def _others_ranks(self, ranks: Sequence[RankId]) -> Mapping[RankId, float]:
        """What to charge to the ranks for which another router is the first: it may have sent there just now."""
        work = self._propagation_tokens if self._ms_per_token is None else PROPAGATION_MS
        if len(self._router_ids) < 2 or not work:
            return _NO_CHARGES
        candidates = self._candidates_of(ranks)
        period = self._period()
        if candidates.others_as_of != (period, self._router_ids):
            candidates.others_as_of = (period, self._router_ids)
            router_id, routers = self._router_id(), self._router_ids
            candidates.others = {
                rank: work for rank in ranks if not is_first(router_id, routers, rank.worker_id, period)
            }
        return candidates.others

    def _period(self) -> int:
        return int(self._wall_ms // PERIOD_MS)

    def _candidates_of(self, ranks: Sequence[RankId]) -> _Candidates:
        candidates = self._candidates.get(id(ranks))
        if candidates is None:
            if len(self._candidates) >= _CANDIDATES_MAX:
                self._candidates.clear()
            candidates = self._candidates[id(ranks)] = _Candidates(ranks)
        return candidates

    def _close(self, rank: RankId) -> None:
        for candidates in self._candidates.values():
            candidates.open.discard(rank)

    def _open_ranks(self, ranks: Sequence[RankId], loads: ActiveLoads) -> set[RankId]:
        """Return those of these ranks that are open to this router in this pump."""
        candidates = self._candidates_of(ranks)
        if candidates.pump == self._pump:
            return candidates.open
        candidates.pump = self._pump
        if candidates.loads is not loads or candidates.numbering != loads.numbering:
            candidates.loads, candidates.numbering, candidates.rows = loads, loads.numbering, loads.rows_of(ranks)
        over = self._are_over(loads, candidates.rows)
        idle = None if self._idle is None else set(self._idle(ranks, loads))
        if not (self._opened_ms or self._charges or any(over)) and (idle is None or len(idle) == len(ranks)):
            candidates.open = set(ranks)  # as nearly always: nothing waits, and no rank is busy
            return candidates.open
        candidates.open = set()
        period, router_id = self._period(), self._router_id()
        for rank, is_over in zip(ranks, over, strict=True):
            if is_over or (idle is not None and rank not in idle):
                self._opened_ms[rank] = _CLOSED
            elif rank not in self._charges and self._is_our_turn(rank, router_id, period):
                candidates.open.add(rank)
        return candidates.open

    def _is_our_turn(self, rank: RankId, router_id: str, period: int) -> bool:
        opened_ms = self._opened_ms.get(rank)
        if opened_ms is None:  # it has been open since before anything waited, or for long enough
            return True
        if opened_ms == _CLOSED:
            opened_ms = self._opened_ms[rank] = self._now_ms
        waited_ms = self._now_ms - opened_ms
        if waited_ms >= PROPAGATION_MS:
            del self._opened_ms[rank]
            return True
        return is_first(router_id, self._router_ids, rank.worker_id, period)
