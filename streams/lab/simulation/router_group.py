"""Several routers in front of the same engines, which read each other's bookings late (pure).

What lives here: which router gets a request, and when the others have its booking. What must not: how a router decides
(router).

Each request goes to a router at random. Every router reads the engines' events by itself. A booking and its changes
reach the other routers after a delay that is exponential: its p99 is 4.6 times the mean. What one router writes reaches
another one in its order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

from streams.core.ids import EngineHash, HashArray, RankId
from streams.core.loads.bookings import BookingId
from streams.core.routing.selection import Rng
from streams.lab.simulation.router import LabRouter, RoutedRequest


class RouterGroup:
    """Takes the place of one LabRouter in a run. The owner of the bookings that are under way between routers."""

    def __init__(self, routers: Sequence[LabRouter], rng: Rng, delay_ms_mean: float) -> None:
        """routers: with distinct ids, for the same engines."""
        self._routers = routers
        self._rng = rng
        self._delay_ms_mean = delay_ms_mean
        self._router_of: dict[int, LabRouter] = {}  # by request
        # Heap: when a change reaches a router, the order of equal times, and the change.
        self._changes: list[tuple[float, int, Callable[[], None]]] = []
        self._n_changes = 0
        self._last_ms: dict[tuple[str, str], float] = {}  # of the last change from one router to another

    @property
    def reads_index(self) -> bool:
        """Whether the routers need the engines' events."""
        return self._routers[0].reads_index

    @property
    def alive(self) -> tuple[RankId, ...]:
        """The ranks that get requests."""
        return self._routers[0].alive

    @property
    def wake_ms(self) -> float:
        """When to call `pump` next."""
        wake_ms = min(router.wake_ms for router in self._routers)
        return min(wake_ms, self._changes[0][0]) if self._changes else wake_ms

    # -- from engines --------------------------------------------------------------------------------------------------

    def stored(self, worker: int, parent: EngineHash | None, names: HashArray) -> None:
        """As LabRouter.stored."""
        for router in self._routers:
            router.stored(worker, parent, names)

    def removed(self, worker: int, names: HashArray) -> None:
        """As LabRouter.removed."""
        for router in self._routers:
            router.removed(worker, names)

    def kept_on_host(self, worker: int, parent: EngineHash | None, names: HashArray, gone: HashArray) -> None:
        """As LabRouter.kept_on_host."""
        for router in self._routers:
            router.kept_on_host(worker, parent, names, gone)

    def pool_changed(self, new: list[int], evicted: list[int], span: int) -> None:
        """As LabRouter.pool_changed."""
        for router in self._routers:
            router.pool_changed(new, evicted, span)

    def worker_failed(self, worker: int) -> None:
        """As LabRouter.worker_failed."""
        for router in self._routers:
            router.worker_failed(worker)

    def worker_returned(self, worker: int) -> None:
        """As LabRouter.worker_returned."""
        for router in self._routers:
            router.worker_returned(worker)

    # -- requests ------------------------------------------------------------------------------------------------------

    def arrive(self, request: RoutedRequest, now_ms: float) -> int | None:
        """Hand a request to a router at random; as LabRouter.arrive."""
        router = self._routers[int(self._rng.random() * len(self._routers))]
        self._router_of[request.number] = router
        worker = router.arrive(request, now_ms)
        if worker is not None:
            self._share_booking(router, request.number, now_ms)
        return worker

    def pump(self, now_ms: float) -> list[tuple[int, int]]:
        """Let routers read the changes that have arrived, and send what waits; as LabRouter.pump."""
        while self._changes and self._changes[0][0] <= now_ms:
            heapq.heappop(self._changes)[2]()
        sent = []
        for router in self._routers:
            if router.wake_ms <= now_ms:
                sent_here = router.pump(now_ms)
                for number, _ in sent_here:
                    self._share_booking(router, number, now_ms)
                sent += sent_here
        return sent

    def first_token(self, number: int, now_ms: float) -> None:
        """As LabRouter.first_token."""
        router = self._router_of[number]
        router.first_token(number, now_ms)
        booking_id = router.booking_id(number)
        self._share(router, now_ms, lambda other, at_ms: other.note_prefill(booking_id, at_ms))

    def ended(self, number: int, now_ms: float, n_output_tokens: int = 0) -> None:
        """As LabRouter.ended."""
        router = self._router_of[number]
        router.ended(number, now_ms, n_output_tokens)
        booking_id = router.booking_id(number)
        self._share(router, now_ms, lambda other, at_ms: other.note_end(booking_id, at_ms, n_output_tokens))

    def _share_booking(self, router: LabRouter, number: int, now_ms: float) -> None:
        booking_id: BookingId = router.booking_id(number)
        booking = router.loads.booking(booking_id)
        assert booking is not None  # the router has just booked it
        self._share(router, now_ms, lambda other, at_ms: other.note_booking(booking_id, booking, at_ms))

    def _share(self, router: LabRouter, now_ms: float, change: Callable[[LabRouter, float], None]) -> None:
        """Let every other router have a change of this one's bookings after a delay."""
        for other in self._routers:
            if other is router:
                continue
            pair = router.router_id, other.router_id
            delayed_ms = now_ms - self._delay_ms_mean * math.log(1.0 - self._rng.random())
            at_ms = self._last_ms[pair] = max(delayed_ms, self._last_ms.get(pair, 0.0))
            self._n_changes += 1
            arrives: Callable[[], None] = partial(change, other, at_ms)
            heapq.heappush(self._changes, (at_ms, self._n_changes, arrives))
