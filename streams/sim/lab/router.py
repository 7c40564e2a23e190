"""The router of a run: the product's index, loads and selector, driven by simulated time (pure).

What lives here: what a live router does around them, in the same order: apply events, price, book. What must not: a
formula, and what engines do (engine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from streams.core.ids import DpRank, EngineHash, HashArray, RankId, Tier, WorkerId
from streams.core.index.interface import Candidates, OverlapScores, PrefixIndex
from streams.core.index.plain_index import PlainPrefixIndex
from streams.core.kernels.available import kernels_available
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId
from streams.core.routing.cost import prefill_tokens
from streams.core.routing.decision import Chooser, RoutePolicy, booking_of
from streams.core.routing.policies.interface import Policy, Situation
from streams.core.routing.selection import Rng, select_by_cost

#: Bookings of a run do not expire.
_NEVER_MS = 1 << 60

_NO_SCORES = OverlapScores({})
_ROUTER_ID = "lab"


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router is asked. names: uint64[n], sequence hashes of the prompt's full blocks."""

    number: int
    n_tokens: int
    names: HashArray


class Selector(Protocol):
    """Chooses a rank; what a run compares. reads_index: whether it uses what ranks hold."""

    reads_index: bool

    def choose(self, request: RoutedRequest, sequence: bytes, scores: OverlapScores, now_ms: float) -> Booking:
        """Return the booking of the chosen rank."""


def new_index() -> PrefixIndex:
    """The index of a router: the fast one if its kernels are available."""
    if kernels_available():
        from streams.core.index.run_tree import RunTreeIndex

        return RunTreeIndex()
    return PlainPrefixIndex()


class LabRouter:
    """One router in front of all engines. The owner of its index and loads."""

    def __init__(self, n_workers: int, block_size: int, capacity_blocks: int) -> None:
        self.block_size = block_size
        self.ranks = tuple(RankId(WorkerId(number + 1), DpRank(0)) for number in range(n_workers))
        self.worker_of = {rank: number for number, rank in enumerate(self.ranks)}
        self.capacity_blocks = np.full(n_workers, capacity_blocks, dtype=np.int64)
        self.loads = ActiveLoads(_NEVER_MS)
        self.index = new_index()
        self.alive = self.ranks
        self._selector: Selector | None = None

    def use(self, selector: Selector) -> None:
        """Set what chooses."""
        self._selector = selector

    # -- from engines --------------------------------------------------------------------------------------------------

    @property
    def reads_index(self) -> bool:
        """Whether events of engines matter."""
        assert self._selector is not None
        return self._selector.reads_index

    def stored(self, worker: int, parent: EngineHash | None, names: HashArray) -> None:
        """Apply an event of an engine."""
        self.index.store(self.ranks[worker], Tier.DEVICE, parent, names, names)

    def removed(self, worker: int, names: HashArray) -> None:
        """Apply an event of an engine."""
        self.index.remove(self.ranks[worker], Tier.DEVICE, names)

    def worker_failed(self, worker: int) -> None:
        """An engine's lease has expired: it gets no more requests, and what it held is gone."""
        self.index.remove_rank(self.ranks[worker])
        self.alive = tuple(rank for rank in self.alive if rank != self.ranks[worker])

    def worker_returned(self, worker: int) -> None:
        """An engine is back, with an empty cache."""
        back = {*self.alive, self.ranks[worker]}
        self.alive = tuple(rank for rank in self.ranks if rank in back)

    # -- requests ------------------------------------------------------------------------------------------------------

    def route(self, request: RoutedRequest, now_ms: float) -> int:
        """Choose an engine and book it; return its number."""
        selector = self._selector
        assert selector is not None
        scores = self.index.find_matches(request.names) if selector.reads_index else _NO_SCORES
        booking = selector.choose(request, request.names.tobytes(), scores, now_ms)
        self.loads.add(self._booking_id(request.number), booking, int(now_ms))
        return self.worker_of[booking.rank]

    def first_token(self, number: int, now_ms: float) -> None:
        """A client reports that the prompt of a request is computed."""
        self.loads.prefill_complete(self._booking_id(number), int(now_ms))

    def ended(self, number: int, now_ms: float) -> None:
        """A client reports the end of a request."""
        self.loads.free(self._booking_id(number), int(now_ms))

    def _booking_id(self, number: int) -> BookingId:
        return BookingId(str(number), _ROUTER_ID, 0)


class ModeSelector:
    """The selector of the live router (core.routing.decision), with one of its modes."""

    def __init__(self, router: LabRouter, policy: RoutePolicy, rng: Rng) -> None:
        self.reads_index = policy.reads_index
        self._router = router
        self._policy = policy
        self._chooser = Chooser(rng)

    def choose(self, request: RoutedRequest, sequence: bytes, scores: OverlapScores, now_ms: float) -> Booking:  # noqa: ARG002
        """See Selector."""
        router = self._router
        n_blocks = -(-request.n_tokens // router.block_size)
        decision = self._chooser.choose(
            self._policy,
            router.alive,
            scores,
            router.loads,
            sequence=sequence,
            request_blocks=n_blocks,
            block_size=router.block_size,
            n_tokens=request.n_tokens,
        )
        return booking_of(
            decision.chosen,
            model="",
            sequence=sequence,
            n_tokens=request.n_tokens,
            request_blocks=n_blocks,
            block_size=router.block_size,
        )


class PolicySelector:
    """A policy that was found by name (core.routing.policies)."""

    def __init__(self, router: LabRouter, policy: Policy, rng: Rng) -> None:
        self.reads_index = policy.reads_index
        self._router = router
        self._policy = policy
        self._rng = rng
        self._candidates: Candidates | None = None
        self._numbering = -1
        self._rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def choose(self, request: RoutedRequest, sequence: bytes, scores: OverlapScores, now_ms: float) -> Booking:
        """See Selector."""
        router, ranks = self._router, self._router.alive
        if self._candidates is None or self._candidates.ranks is not ranks:
            self._candidates, self._numbering = Candidates(ranks), -1
        if self._numbering != router.loads.numbering:
            self._numbering, self._rows = router.loads.numbering, router.loads.rows_of(ranks)
        candidates = self._candidates
        overlap = scores.columns(candidates, (1.0, 1.0, 1.0, 1.0))[0]
        situation = Situation(
            ranks=ranks,
            rows=self._rows,
            loads=router.loads,
            scores=overlap,
            held=lambda tiers, _: scores.columns(candidates, tiers)[1],
            sequence=sequence,
            request_blocks=-(-request.n_tokens // router.block_size),
            n_tokens=request.n_tokens,
            block_size=router.block_size,
            now_ms=now_ms,
            capacity_blocks=router.capacity_blocks,
        )
        prices = self._policy.price(situation)
        index = select_by_cost(prices.costs, 0.0, self._rng)
        return Booking(
            rank=ranks[index],
            model="",
            prefill_tokens=prefill_tokens(request.n_tokens, prices.cached_blocks.item(index), router.block_size),
            sequence=sequence,
            overlap_blocks=overlap.item(index),
            request_blocks=situation.request_blocks,
        )


#: Selectors by name, for those who run several.
Selectors = Mapping[str, Selector]
