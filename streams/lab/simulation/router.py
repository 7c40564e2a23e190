"""The router of a run: the product's index, loads and selector, driven by simulated time (pure).

What lives here: what a live router does around them, in the same order: apply events, price, book. What must not: a
formula, and what engines do (lab_engine).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from streams.core.block_facts.fact_sets import FactSets, RankNumbering
from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import DpRank, EngineHash, HashArray, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.index.interface import PrefixScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingId, with_output
from streams.core.routing.admission import PROPAGATION_MS, Gate
from streams.core.routing.busy import BlocksInUse
from streams.core.routing.cost import prefill_tokens
from streams.core.routing.decision import Chooser, Decision, Policies
from streams.core.routing.policies.expected_time import ExpectedTime
from streams.core.routing.policies.registry import built_in_policy
from streams.core.routing.policies.timings import Timings
from streams.core.routing.queue import PREFILL_US_PER_TOKEN, QueueLimits, QueuePolicy, RequestQueue, Waiting
from streams.core.routing.request import FleetState, Matches, PromptBlocks, RoutePolicy, RoutingRequest
from streams.core.routing.saturation import NOTHING_QUEUED, Queued
from streams.core.routing.selection import Rng
from streams.core.routing.supplementary import SupplementaryMatches
from streams.cxl.events import CxlPool
from streams.cxl.pooled_index import PooledIndex
from streams.cxl.records import Placement
from streams.lab.simulation.index import LabIndex

#: As in the live router (router_api.deciding.admission): the shortest time between two pumps, the longest one while
#: requests wait, and how many of them a pump examines.
PUMP_MS, CHECK_MS, LOOKAHEAD = 5.0, 50.0, 64

#: Bookings of a run do not expire.
_NEVER_MS = 1 << 60
_NEVER = float("inf")

_NO_SCORES = PrefixScores({})
_NO_LIMITS = QueueLimits(1 << 30, 1 << 60, 1 << 30)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router is asked. names: uint64[n], sequence hashes of the prompt's full blocks. sequence: packed.

    excluded: a worker that just failed the request, as excluded_worker_ids; None for none.
    """

    number: int
    n_tokens: int
    names: HashArray
    sequence: bytes
    excluded: int | None = None


@dataclass(frozen=True, slots=True)
class LabQueue:
    """A queue as the live router has one. backlog_ms: a rank with a longer backlog is closed to waiting requests."""

    backlog_ms: float
    policy: QueuePolicy = QueuePolicy.ARRIVAL_PLUS_PREFILL


class _Pool:
    """The router's index of a pool that all of its workers read."""

    def __init__(self, ranks: tuple[RankId, ...], span: int) -> None:
        members = tuple(rank.worker_id for rank in ranks)
        pool = CxlPool("pool", "default", None, members)
        self.index = PooledIndex(FactSets(), {"pool": pool})
        self.numbers = RankNumbering(ranks)
        self.placed = Placement(CxlMemoryState.CXL_POOLED, "pool", 0, (), "", Incarnation(0), 0, span)


class _WaitingRequests:
    """The requests in a router's queue, and the gate that lets them go."""

    def __init__(self, policy: QueuePolicy, gate: Gate) -> None:
        self.gate = gate
        self.queue = RequestQueue(policy, _NO_LIMITS, PREFILL_US_PER_TOKEN)
        self._requests: dict[int, RoutedRequest] = {}  # by their numbers in the queue
        self._n_arrived = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: RoutedRequest, uncached_tokens: int, now_ms: float) -> None:
        """Let a request wait."""
        self._n_arrived += 1
        self.queue.add(Waiting(self._n_arrived, now_ms, _NEVER, uncached_tokens, 0))
        self._requests[self._n_arrived] = request

    def sum(self, block_size: int) -> Queued:
        """What all of them need."""
        tokens = sum(self.queue.waiting(number).uncached_tokens for number in self._requests)
        blocks = sum(-(-request.n_tokens // block_size) for request in self._requests.values())
        return Queued(len(self._requests), tokens, blocks)

    def first(self) -> list[tuple[int, RoutedRequest]]:
        """Return the requests that a pump examines, with their numbers in the queue, in the queue's order."""
        return [(number, self._requests[number]) for number in islice(self.queue.in_order(), LOOKAHEAD)]

    def leave(self, number: int, now_ms: float) -> None:
        """Remove a request that was sent."""
        self.queue.leave(number, self.queue.waiting(number).uncached_tokens, now_ms)
        del self._requests[number]


class LabRouter:
    """One router in front of all engines. The owner of its index, loads and queue.

    wake_ms: when to call `pump` next.
    """

    def __init__(
        self,
        n_workers: int,
        block_size: int,
        capacity_blocks: int,
        policy: RoutePolicy,
        rng: Rng,
        policies: Policies = built_in_policy,
        queue: LabQueue | None = None,
        router_id: str = "lab",
    ) -> None:
        """capacity_blocks: of each engine. policies: finds the policy of mode `policy`. queue: None for no queue.

        router_id: of its bookings; several routers of a fleet need several ids.
        """
        self.router_id = router_id
        self._router_ids = {router_id}  # of all bookings so far
        self._counter = count()  # of its bookings
        self._booking_ids: dict[int, BookingId] = {}  # by request
        self.ranks = tuple(RankId(WorkerId(number + 1), DpRank(0)) for number in range(n_workers))
        self.loads = ActiveLoads(_NEVER_MS, observe=True)
        self.index = LabIndex()
        self.alive = self.ranks
        self._without: dict[RankId, tuple[tuple[RankId, ...], tuple[RankId, ...]]] = {}
        self.wake_ms = _NEVER
        self.reads_index = policy.reads_index
        self._block_size = block_size
        self._worker_of = {rank: number for number, rank in enumerate(self.ranks)}
        n_used = np.zeros(n_workers, dtype=np.int64)  # engines report nothing
        capacity = BlocksInUse(np.full(n_workers, capacity_blocks, dtype=np.int64), n_used)
        self._fleet = FleetState(blocks_of=lambda ranks: BlocksInUse(*(column[: len(ranks)] for column in capacity)))
        self._policy = policy
        self._chooser = Chooser(rng, policies)
        self._pool: _Pool | None = None
        self._waiting = None if queue is None else _WaitingRequests(queue.policy, self._new_gate(queue.backlog_ms))
        self._pumped_ms = -_NEVER

    def _new_gate(self, backlog_ms: float) -> Gate:
        """The gate of the live router: by time in mode expected-time, otherwise by tokens."""
        timings = self._timings()
        if timings is not None:
            return Gate(
                lambda: self.router_id,
                None,
                backlog_ms_max=backlog_ms,
                ms_per_token=lambda: timings.slowest_prefill().slope,
            )
        return Gate(
            lambda: self.router_id,
            backlog_ms * 1000.0 / PREFILL_US_PER_TOKEN,
            propagation_tokens=int(PROPAGATION_MS * 1000.0 / PREFILL_US_PER_TOKEN),
        )

    def _timings(self) -> Timings | None:
        """What the policy has learnt about the time of prefills, if it is one that learns it."""
        if not self._policy.policy_name:
            return None
        policy = self._chooser.policy(self._policy.policy_name)
        return policy.timings if isinstance(policy, ExpectedTime) else None

    def ms_per_token(self) -> float:
        """Time per prompt token, as the live router has it."""
        timings = self._timings()
        return PREFILL_US_PER_TOKEN / 1000.0 if timings is None else timings.slowest_prefill().slope

    def blocks_of(self, ranks: tuple[RankId, ...]) -> BlocksInUse:
        """The blocks of some ranks, as far as the router knows them."""
        assert self._fleet.blocks_of is not None
        return self._fleet.blocks_of(ranks)

    def queued(self) -> Queued:
        """What waits in this router."""
        return NOTHING_QUEUED if self._waiting is None else self._waiting.sum(self._block_size)

    # -- from engines --------------------------------------------------------------------------------------------------

    def stored(self, worker: int, parent: EngineHash | None, names: HashArray) -> None:
        """Apply an event of an engine."""
        self.index.store(self.ranks[worker], Tier.DEVICE, parent, names, names)

    def removed(self, worker: int, names: HashArray) -> None:
        """Apply an event of an engine."""
        self.index.remove(self.ranks[worker], Tier.DEVICE, names)

    def kept_on_host(self, worker: int, parent: EngineHash | None, names: HashArray, gone: HashArray) -> None:
        """Apply an engine's events of its host memory: it stored these blocks, and evicted others."""
        rank = self.ranks[worker]
        # Without effect if the block before them is neither on the device nor on the host any more.
        self.index.store(rank, Tier.HOST, parent, names, names)
        if gone.size:
            self.index.remove(rank, Tier.HOST, gone)

    def pool_changed(self, new: list[int], evicted: list[int], span: int) -> None:
        """Blocks came to the pool that all engines read, or left it.

        new, evicted: sequence hashes, each of the last block of `span` blocks.
        """
        if self._pool is None:
            self._pool = _Pool(self.ranks, span)
        for key in new:
            self._pool.index.replace(SequenceHash(key), None, self._pool.placed)
        for key in evicted:  # a small pool evicts blocks that it has just stored
            self._pool.index.replace(SequenceHash(key), self._pool.placed, None)

    def worker_failed(self, worker: int) -> None:
        """An engine's lease has expired: it gets no more requests, and what it held is gone."""
        self.index.clear(self.ranks[worker])
        self._set_alive({*self.alive} - {self.ranks[worker]})

    def worker_returned(self, worker: int) -> None:
        """An engine is back, with an empty cache."""
        self._set_alive({*self.alive, self.ranks[worker]})

    def _set_alive(self, alive: set[RankId]) -> None:
        self.alive = tuple(rank for rank in self.ranks if rank in alive)

    # -- requests ------------------------------------------------------------------------------------------------------

    def arrive(self, request: RoutedRequest, now_ms: float) -> int | None:
        """Route a request: return the number of its engine, or None if it waits (see `pump`).

        With a queue, every request waits for the pump of its own instant, so that those that come together are ordered.
        """
        if self._waiting is None:
            return self._book(request, self._choose(request, now_ms), now_ms)
        if self._waiting:
            self._pump_soon(now_ms)
        else:
            self.wake_ms = now_ms
        self._waiting.add(request, self._uncached_tokens(request), now_ms)
        return None

    def pump(self, now_ms: float) -> list[tuple[int, int]]:
        """Send waiting requests whose ranks are open; return their numbers with those of their engines."""
        waiting = self._waiting
        assert waiting is not None
        queue, gate = waiting.queue, waiting.gate
        self._pumped_ms, self.wake_ms = now_ms, _NEVER
        self.loads.advance(int(now_ms))
        queue.ms_per_token = self.ms_per_token()
        gate.begin(now_ms, now_ms, sorted(self._router_ids))
        sent = []
        for number, request in waiting.first():
            if not gate.may_go(self._ranks_for(request), self.loads):
                break
            queue.revalue(number, self._uncached_tokens(request))
            worker = self._try(gate, request, now_ms)
            if worker is not None:
                waiting.leave(number, now_ms)
                sent.append((request.number, worker))
        if waiting:
            self.wake_ms = now_ms + CHECK_MS
        else:
            gate.end()
        return sent

    def first_token(self, number: int, now_ms: float) -> None:
        """A client reports that the prompt of a request is computed."""
        self.note_prefill(self.booking_id(number), now_ms)

    def ended(self, number: int, now_ms: float, n_output_tokens: int = 0) -> None:
        """A client reports the end of a request, and how long its answer was."""
        self.note_end(self.booking_id(number), now_ms, n_output_tokens)

    # -- bookings, also those of other routers -------------------------------------------------------------------------

    def booking_id(self, number: int) -> BookingId:
        """The id of this router's last booking of a request."""
        return self._booking_ids[number]

    def note_booking(self, booking_id: BookingId, booking: Booking, now_ms: float) -> None:
        """A router has booked a request."""
        self._router_ids.add(booking_id.router_id)
        self.loads.add(booking_id, booking, int(now_ms))

    def note_prefill(self, booking_id: BookingId, now_ms: float) -> None:
        """The prompt of a booked request is computed."""
        self.loads.prefill_complete(booking_id, int(now_ms))
        self._pump_soon(now_ms)

    def note_end(self, booking_id: BookingId, now_ms: float, n_output_tokens: int = 0) -> None:
        """A booked request has ended, with an answer of this length; 0 if the length is unknown."""
        booking = self.loads.booking(booking_id)
        if n_output_tokens and booking is not None:
            self.loads.add(booking_id, with_output(booking, n_output_tokens, self._block_size), int(now_ms))
        self.loads.free(booking_id, int(now_ms))
        self._pump_soon(now_ms)

    def _pump_soon(self, now_ms: float) -> None:
        if self._waiting:
            self.wake_ms = min(self.wake_ms, max(now_ms, self._pumped_ms + PUMP_MS))

    def _ranks_for(self, request: RoutedRequest) -> tuple[RankId, ...]:
        """The candidates for a request; the same object for the same ranks."""
        if request.excluded is None:
            return self.alive
        out = self.ranks[request.excluded]
        if out not in self._without or self._without[out][0] is not self.alive:
            self._without[out] = (self.alive, tuple(rank for rank in self.alive if rank != out) or self.alive)
        return self._without[out][1]

    def _try(self, gate: Gate, request: RoutedRequest, now_ms: float) -> int | None:
        """Send a request if its rank is open."""
        routing = self._routing_request(request, self._policy, now_ms)
        decision = gate.decide(routing, self.loads, self._chooser)
        if decision is None:
            return None
        worker = self._book(request, decision, now_ms)
        gate.booked(decision.chosen.rank, self.loads)
        return worker

    def _choose(self, request: RoutedRequest, now_ms: float) -> Decision:
        return self._chooser.choose(self._routing_request(request, self._policy, now_ms), self.loads)

    def _routing_request(self, request: RoutedRequest, policy: RoutePolicy, now_ms: float) -> RoutingRequest:
        """Advance to this time, learn, and return what a policy is given."""
        self.loads.advance(int(now_ms))
        while self._chooser.learn(self.loads, lambda _: self._block_size):
            pass
        n_blocks = -(-request.n_tokens // self._block_size)
        return RoutingRequest(
            policy,
            PromptBlocks(request.sequence, request.n_tokens, n_blocks, self._block_size),
            Matches(
                self._ranks_for(request),
                self._scores(request),
                supplementary=self._supplementary(request.names),
            ),
            self._fleet,
        )

    def _book(self, request: RoutedRequest, decision: Decision, now_ms: float) -> int:
        booking = decision.booking()
        # A request that is sent again after a failure is a new booking: its first one has ended.
        booking_id = BookingId(str(request.number), self.router_id, next(self._counter))
        self._booking_ids[request.number] = booking_id
        self.note_booking(booking_id, booking, now_ms)
        return self._worker_of[booking.rank]

    def _scores(self, request: RoutedRequest) -> PrefixScores:
        return self.index.find_matches(request.names) if self.reads_index else _NO_SCORES

    def _supplementary(self, names: HashArray) -> SupplementaryMatches | None:
        """The blocks of a request that are in the pool; None without a pool. names: uint64[n]."""
        if self._pool is None:
            return None
        query = self._pool.index.query("", self._pool.numbers)
        return SupplementaryMatches(names, query, None, lambda *_: None, nullcontext())

    def _uncached_tokens(self, request: RoutedRequest) -> int:
        return prefill_tokens(request.n_tokens, self._scores(request).max_score, self._block_size)
