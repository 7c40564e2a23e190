"""Requests that wait for a rank: their order, their limits, and how fast they leave (docs/queue.md).

What lives here: the queue of one router. What must not: clocks (time is an argument), the requests themselves and
whether a rank is free for one (admission, in core.routing and in router_api). The state belongs to one router and is
not shared with others.

The order has three levels. A greater priority comes first. Within a priority, tenants take turns by the tokens that
were computed for each of them, as in start-time fair queueing. Within a tenant, the policy's key decides.

State: a router's queue.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import assert_never

#: Time per prompt token: that of an 8B model on one A100, or of a 70B model on 4 H100 (EngineConfig has the sums).
PREFILL_US_PER_TOKEN = 100.0

#: A rank with a longer backlog is closed to waiting requests. docs/queue.md has the measurements.
QUEUE_BACKLOG_MS = 1000.0

#: Tenants whose share is remembered after their last request has left, so that a tenant gains nothing by waiting with
#: one request at a time. Beyond this limit the one that was served the longest ago is forgotten.
SHARES_MAX = 4096

#: The rate at which requests leave is measured over this time, and over at most this many of them.
DRAIN_WINDOW_MS = 30_000.0
DRAIN_SAMPLES_MAX = 256

#: A client that is refused is asked to try again within this time, however slowly the queue drains.
RETRY_AFTER_S_MAX = 60


class QueuePolicy(enum.StrEnum):
    """What decides between waiting requests of one tenant and one priority."""

    FCFS = "fcfs"
    WSPT = "wspt"
    ARRIVAL_PLUS_PREFILL = "arrival-plus-prefill"


class QueueRefusal(enum.StrEnum):
    """Why a request may not wait."""

    FULL = "full"
    BYTES = "bytes"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait at the same time. n_bytes: of memory, by the estimates of those who add requests."""

    n_requests: int
    n_bytes: int
    n_tenant_requests: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request in the queue.

    number: its name in the queue; a later request has a greater one. arrival_ms, deadline_ms: on the clock of the
    router. priority_jump: with wspt, adds to the weight of 1; with the other policies, how many seconds earlier the
    request is treated as having arrived. uncached_tokens: what a rank must compute if the request goes to the one that
    holds the most of it.
    """

    number: int
    arrival_ms: float
    deadline_ms: float
    uncached_tokens: int
    n_bytes: int
    priority: int = 0
    priority_jump: float = 0.0
    tenant: str = ""


def wspt_key(n_tokens: int, best_cached_tokens: int, priority_jump: float = 0.0) -> float:
    """Return the weight of a request divided by its work; the greatest goes first (weighted shortest processing time).

    n_tokens: of the prompt. best_cached_tokens: how many of them the rank that holds the most has.
    """
    return (1.0 + priority_jump) / max(1, n_tokens - best_cached_tokens)


#: A waiting request's place within its tenant: the policy's key, then the order of arrival.
_Place = tuple[float, int]


class _Flow:
    """The waiting requests of one tenant and priority."""

    __slots__ = ("places", "served")

    def __init__(self, served: float) -> None:
        self.places: list[_Place] = []  # sorted
        self.served = served  # tokens computed for the tenant, or what others got while it waited for nothing


class RequestQueue:
    """The waiting requests of one router.

    n_bytes: how much memory they take, by the estimates of those who added them. ms_per_token: time per prompt token,
    for requests that are added or revalued from now on.
    """

    def __init__(self, policy: QueuePolicy, limits: QueueLimits, prefill_us_per_token: float) -> None:
        self._policy = policy
        self._limits = limits
        self.ms_per_token = prefill_us_per_token / 1000.0
        self._waiting: dict[int, tuple[Waiting, _Place]] = {}
        self._flows: dict[int, dict[str, _Flow]] = {}  # by priority and tenant; only those with waiting requests
        self._by_tenant: Counter[str] = Counter()
        # Tokens served to tenants without waiting requests, the one that was served the longest ago first, and the
        # share of the tenant that was served last in each priority. A tenant that comes back starts there.
        self._shares: OrderedDict[tuple[int, str], float] = OrderedDict()
        self._level: dict[int, float] = {}
        self._drained: deque[float] = deque(maxlen=DRAIN_SAMPLES_MAX)  # when requests left for a rank
        self._filling_since_ms = 0.0
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def waiting(self, number: int) -> Waiting:
        """The request with this number, which must be waiting."""
        return self._waiting[number][0]

    def lengths(self) -> dict[int, int]:
        """How many requests wait, by priority."""
        return {priority: sum(len(flow.places) for flow in flows.values()) for priority, flows in self._flows.items()}

    # -- in and out ----------------------------------------------------------------------------------------------------

    def refusal(self, tenant: str, n_bytes: int) -> QueueRefusal | None:
        """Return why another request of this tenant may not wait, or None if it may."""
        limits = self._limits
        if len(self._waiting) >= limits.n_requests:
            return QueueRefusal.FULL
        if self.n_bytes + n_bytes > limits.n_bytes:
            return QueueRefusal.BYTES
        return QueueRefusal.TENANT if self._by_tenant[tenant] >= limits.n_tenant_requests else None

    def add(self, request: Waiting) -> None:
        """Let a request wait. The caller has checked `refusal`, and its number is greater than all before."""
        if not self._waiting:
            self._filling_since_ms = request.arrival_ms
        flows = self._flows.setdefault(request.priority, {})
        flow = flows.get(request.tenant)
        if flow is None:
            level = self._level.get(request.priority, 0.0)
            served = self._shares.pop((request.priority, request.tenant), level)
            flow = flows[request.tenant] = _Flow(max(served, level))
        place = self._place(request)
        insort(flow.places, place)
        self._waiting[request.number] = (request, place)
        self._by_tenant[request.tenant] += 1
        self.n_bytes += request.n_bytes

    def remove(self, number: int) -> Waiting:
        """Take out a request that gets no rank: it was cancelled, is late, or cannot be served."""
        request, place = self._waiting.pop(number)
        flows = self._flows[request.priority]
        flow = flows[request.tenant]
        del flow.places[bisect_left(flow.places, place)]
        if not flow.places:
            del flows[request.tenant]
            self._remember(request, flow.served)
            if not flows:
                del self._flows[request.priority]
        self._by_tenant[request.tenant] -= 1
        if not self._by_tenant[request.tenant]:
            del self._by_tenant[request.tenant]
        self.n_bytes -= request.n_bytes
        return request

    def leave(self, number: int, uncached_tokens: int, now_ms: float) -> Waiting:
        """Take out a request that goes to a rank, and charge its tenant for what that rank must compute."""
        request = self._waiting[number][0]
        flow = self._flows[request.priority][request.tenant]
        self._level[request.priority] = max(self._level.get(request.priority, 0.0), flow.served)
        flow.served += max(1, uncached_tokens)
        self._drained.append(now_ms)
        return self.remove(number)

    def revalue(self, number: int, uncached_tokens: int) -> None:
        """Note how much a rank would have to compute now, after the index changed."""
        request, place = self._waiting[number]
        if request.uncached_tokens == uncached_tokens:
            return
        changed = Waiting(
            request.number,
            request.arrival_ms,
            request.deadline_ms,
            uncached_tokens,
            request.n_bytes,
            request.priority,
            request.priority_jump,
            request.tenant,
        )
        moved = self._place(changed)
        places = self._flows[request.priority][request.tenant].places
        del places[bisect_left(places, place)]
        insort(places, moved)
        self._waiting[number] = (changed, moved)

    # -- order ---------------------------------------------------------------------------------------------------------

    def together(self, requests: Iterable[Waiting]) -> list[int]:
        """Give the numbers of requests that came together while nothing waited, in the order in which to route them.

        None of them is in the queue, so there are no shares of tenants yet: priority decides, then the policy's key.
        """
        ordered = sorted(requests, key=lambda request: (-request.priority, self._place(request)))
        return [request.number for request in ordered]

    def in_order(self) -> Iterator[int]:
        """Give the numbers of the waiting requests in their order. The queue must not change meanwhile.

        Each one counts towards its tenant's share as if it left, so that tenants alternate.
        """
        for priority in sorted(self._flows, reverse=True):
            flows = self._flows[priority]
            heads = [(flow.served, flow.places[0], tenant, 0) for tenant, flow in flows.items()]
            heapq.heapify(heads)
            while heads:
                served, (_, number), tenant, index = heads[0]
                yield number
                places = flows[tenant].places
                if index + 1 == len(places):
                    heapq.heappop(heads)
                else:
                    served += max(1, self._waiting[number][0].uncached_tokens)
                    heapq.heapreplace(heads, (served, places[index + 1], tenant, index + 1))

    def late(self, now_ms: float) -> list[int]:
        """The numbers of requests whose deadline has passed."""
        return [number for number, (request, _) in self._waiting.items() if request.deadline_ms <= now_ms]

    def _place(self, request: Waiting) -> _Place:
        jump = request.priority_jump
        match self._policy:
            case QueuePolicy.FCFS:
                key = request.arrival_ms - 1000.0 * jump
            case QueuePolicy.WSPT:
                key = -wspt_key(request.uncached_tokens, 0, jump)
            case QueuePolicy.ARRIVAL_PLUS_PREFILL:
                key = request.arrival_ms - 1000.0 * jump + request.uncached_tokens * self.ms_per_token
            case _:
                assert_never(self._policy)
        return key, request.number

    def _remember(self, request: Waiting, served: float) -> None:
        self._shares[request.priority, request.tenant] = served
        if len(self._shares) > SHARES_MAX:
            self._shares.popitem(last=False)
        if not self._flows[request.priority] and len(self._level) > SHARES_MAX:  # priorities are chosen by clients
            self._level.clear()

    # -- rate ----------------------------------------------------------------------------------------------------------

    def retry_after_s(self, now_ms: float) -> int:
        """Return after how many seconds the queue will have drained, at the rate of the last 30 s; 1 to 60.

        The rate assumes that one more request leaves right now, so that it is defined before the first one has left.
        """
        while self._drained and self._drained[0] <= now_ms - DRAIN_WINDOW_MS:
            self._drained.popleft()
        since_ms = max(self._filling_since_ms, now_ms - DRAIN_WINDOW_MS)
        if self._drained:
            since_ms = min(self._drained[0], since_ms) if len(self._drained) < DRAIN_SAMPLES_MAX else self._drained[0]
        elapsed_s = max(0.001, (now_ms - since_ms) / 1000.0)
        rate = (len(self._drained) + 1) / elapsed_s
        return min(RETRY_AFTER_S_MAX, max(1, -int(-len(self._waiting) // rate)))
