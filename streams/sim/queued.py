"""Several routers with queues in front of simulated engines, without processes (pure).

What lives here: the queue, the gate and the decisions of the live router, driven by simulated time, with bookings that
reach the other routers after a delay. What must not: clocks and I/O. The result is a pure function of trace, engines,
policy, queues and random generator.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from streams.core.hashing import pack_hashes
from streams.core.ids import HashArray, RankId
from streams.core.index.interface import Candidates, OverlapScores
from streams.core.loads.bookings import ActiveLoads, Booking, BookingPhase
from streams.core.routing.admission import PROPAGATION_MS, Gate
from streams.core.routing.cost import prefill_tokens
from streams.core.routing.decision import Chooser, Decision, RoutePolicy, booking_of
from streams.core.routing.queue import QUEUE_BACKLOG_MS, QueueLimits, QueuePolicy, RequestQueue, Waiting
from streams.core.routing.selection import Rng
from streams.sim.engine_config import EngineConfig
from streams.sim.engine_messages import ModelRequest, PromptHashes, hash_prompt
from streams.sim.offline import NEVER_MS, Fleet, Outcome, apply_phase, booking_id_of
from streams.sim.trace import TraceRequest, tokens_for

#: As in the live router (router_api.admission): the shortest time between two pumps, the longest one while requests
#: wait, and how many of them a pump examines.
PUMP_MS, CHECK_MS, LOOKAHEAD = 5.0, 50.0, 64

#: Bookings from which a router knows the others.
_RECENT_BOOKINGS = 256


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Routers and their queues. backlog_ms: None sends every request at once.

    delay_ms_mean: of the time until another router has a booking, which is exponential: its p99 is 4.6 times the mean.
    """

    n_routers: int = 1
    policy: QueuePolicy = QueuePolicy.ARRIVAL_PLUS_PREFILL
    backlog_ms: float | None = QUEUE_BACKLOG_MS
    prefill_us_per_token: float = 100.0
    delay_ms_mean: float = 10.9


def simulate_queued(
    requests: Sequence[TraceRequest],
    n_engines: int,
    config: EngineConfig,
    policy: RoutePolicy,
    queue: QueueConfig,
    rng: Rng,
) -> list[Outcome]:
    """Route and run a trace, each request by a router at random; returns one outcome per request, in its order.

    Times to the first token include the time in the queue.
    """
    return _Simulation(requests, n_engines, config, policy, queue, rng).run()


@dataclass(slots=True)
class _Request:
    """One request of the trace, prepared for routing."""

    number: int
    trace: TraceRequest
    tokens: bytes
    hashes: PromptHashes
    sequence: bytes
    request_blocks: int


class _Simulation:
    """The events of all parts in the order of their times."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        n_engines: int,
        config: EngineConfig,
        policy: RoutePolicy,
        queue: QueueConfig,
        rng: Rng,
    ) -> None:
        self.config, self.policy, self.queue = config, policy, queue
        self.fleet = Fleet(n_engines, config, None, self._on_phase)
        self.candidates = Candidates(self.fleet.ranks)
        self.now_ms = 0.0
        self._requests = requests
        self.rng = rng
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._routers = [_Router(self, f"router-{number}") for number in range(queue.n_routers)]
        self._owner: dict[str, _Router] = {}
        self._sent_ms: dict[int, float] = {}

    def run(self) -> list[Outcome]:
        """Run until every request has ended."""
        for number, request in enumerate(self._requests):
            router = self._routers[int(self.rng.random() * len(self._routers))]
            self.at(request.timestamp_ms, lambda number=number, router=router: router.arrive(self._prepared(number)))  # type: ignore[misc]
        while self._events or self.fleet.next_event_ms() < float("inf"):
            engine_ms = self.fleet.next_event_ms()
            if not self._events or engine_ms < self._events[0][0]:
                self.now_ms = max(self.now_ms, engine_ms)
                self.fleet.advance(engine_ms)
                continue
            self.now_ms, _, event = heapq.heappop(self._events)
            event()
        return [self._outcome(number) for number in range(len(self._requests))]

    def at(self, at_ms: float, event: Callable[[], None]) -> None:
        """Let something happen at a time."""
        heapq.heappush(self._events, (at_ms, next(self._order), event))

    def send(self, router: _Router, request: _Request, rank: RankId, booking: Booking) -> None:
        """Send a request to an engine, and its booking to the other routers."""
        request_id = str(request.number)
        self._owner[request_id] = router
        self._sent_ms[request.number] = self.now_ms
        for other in self._others(router):
            self.at(self._arrival_ms(), lambda other=other: other.fold(router, request_id, booking))  # type: ignore[misc]
        n_output = max(1, request.trace.output_length)
        sent = ModelRequest(request_id, request.tokens, n_output, output_seed=request.number, hashes=request.hashes)
        self.fleet.submit(rank, self.now_ms, sent)

    def _prepared(self, number: int) -> _Request:
        trace, block_size = self._requests[number], self.config.block_size
        tokens = tokens_for(trace)
        hashes = hash_prompt(tokens, block_size)
        return _Request(
            number, trace, tokens, hashes, pack_hashes(hashes.sequence), -(-trace.input_length // block_size)
        )

    def _on_phase(self, request_id: str, phase: BookingPhase, at_ms: float) -> None:  # noqa: ARG002 - it is now
        router = self._owner[request_id]
        router.phase(router, request_id, phase)
        for other in self._others(router):
            self.at(self._arrival_ms(), lambda other=other: other.phase(router, request_id, phase))  # type: ignore[misc]

    def _others(self, router: _Router) -> list[_Router]:
        return [each for each in self._routers if each is not router]

    def _arrival_ms(self) -> float:
        return self.now_ms - self.queue.delay_ms_mean * math.log(1.0 - self.rng.random())

    def _outcome(self, number: int) -> Outcome:
        outcome = self.fleet.outcomes[str(number)]
        waited_ms = self._sent_ms[number] - self._requests[number].timestamp_ms
        if outcome.ttft_ms is None or outcome.latency_ms is None:
            return outcome
        return replace(outcome, ttft_ms=outcome.ttft_ms + waited_ms, latency_ms=outcome.latency_ms + waited_ms)


class _Router:
    """One router: its loads, its queue, and its pumps."""

    def __init__(self, simulation: _Simulation, router_id: str) -> None:
        self._simulation = simulation
        self.router_id = router_id
        self.loads = ActiveLoads(NEVER_MS)
        self._chooser = Chooser(simulation.rng)
        config = simulation.queue
        limits = QueueLimits(1 << 30, 1 << 60, 1 << 30)
        self.waiting = RequestQueue(config.policy, limits, config.prefill_us_per_token)
        tokens_max = None if config.backlog_ms is None else config.backlog_ms * 1000 / config.prefill_us_per_token
        # Without a queue requests pass no gate in the live router.
        propagation_tokens = int(PROPAGATION_MS * 1000 / config.prefill_us_per_token) if tokens_max is not None else 0
        self._gate = Gate(lambda: router_id, tokens_max, propagation_tokens=propagation_tokens)
        self._requests: dict[int, _Request] = {}
        self._numbers = itertools.count()
        self._pumped_ms = float("-inf")
        self._pump_at_ms = float("inf")

    # -- bookings ------------------------------------------------------------------------------------------------------

    def fold(self, owner: _Router, request_id: str, booking: Booking) -> None:
        """Read another router's booking."""
        self.loads.add(booking_id_of(request_id, owner.router_id), booking, 0)

    def phase(self, owner: _Router, request_id: str, phase: BookingPhase) -> None:
        """Read a booking's new phase; load falls."""
        apply_phase(self.loads, booking_id_of(request_id, owner.router_id), phase)
        if self.waiting:
            self._pump_soon()

    # -- the queue -----------------------------------------------------------------------------------------------------

    def arrive(self, request: _Request) -> None:
        """Route a request at once if it may go, or let it wait."""
        now_ms = self._simulation.now_ms
        if not self.waiting:
            self._gate.begin(now_ms, now_ms, self._routers())
            if self._try(request):
                return
        number = next(self._numbers)
        waiting = Waiting(number, now_ms, float("inf"), self._uncached_tokens(request), 0)
        self.waiting.add(waiting)
        self._requests[number] = request
        self._pump_soon()

    def _pump_soon(self) -> None:
        self._pump_at(max(self._simulation.now_ms, self._pumped_ms + PUMP_MS))

    def _pump_at(self, at_ms: float) -> None:
        if at_ms < self._pump_at_ms:
            self._pump_at_ms = at_ms
            self._simulation.at(at_ms, lambda: self._pump(at_ms))

    def _pump(self, at_ms: float) -> None:
        if at_ms != self._pump_at_ms:  # an earlier one took its place
            return
        self._pump_at_ms, self._pumped_ms = float("inf"), at_ms
        self._gate.begin(at_ms, at_ms, self._routers())
        ranks = self._simulation.fleet.ranks
        for number in list(itertools.islice(self.waiting.in_order(), LOOKAHEAD)):
            if not self._gate.may_go(ranks, self.loads):
                break
            request = self._requests[number]
            if self._try(request):
                self.waiting.leave(number, self._uncached_tokens(request), at_ms)
                del self._requests[number]
        for number in self._requests:
            self.waiting.revalue(number, self._uncached_tokens(self._requests[number]))
        if self.waiting:
            self._pump_at(at_ms + CHECK_MS)
        else:
            self._gate.end()

    def _routers(self) -> list[str]:
        return sorted(self.loads.recent_routers(_RECENT_BOOKINGS))

    def _try(self, request: _Request) -> bool:
        """Send a request if its rank is open."""
        simulation, ranks = self._simulation, self._simulation.fleet.ranks
        block_size, n_tokens = simulation.config.block_size, request.trace.input_length
        scores = self._scores(request.hashes.local)

        def choose() -> Decision:
            return self._chooser.choose(
                simulation.policy,
                ranks,
                scores,
                self.loads,
                sequence=request.sequence,
                request_blocks=request.request_blocks,
                block_size=block_size,
                n_tokens=n_tokens,
            )

        decision = self._gate.decide(ranks, self.loads, choose, n_tokens, block_size)
        if decision is None:
            return False
        booking = booking_of(
            decision.chosen,
            model="",
            sequence=request.sequence,
            n_tokens=n_tokens,
            request_blocks=request.request_blocks,
            block_size=block_size,
        )
        self.loads.add(booking_id_of(str(request.number), self.router_id), booking, 0)
        self._gate.booked(decision.chosen.rank, self.loads)
        simulation.send(self, request, decision.chosen.rank, booking)
        return True

    def _scores(self, local: HashArray) -> OverlapScores:
        simulation = self._simulation
        return simulation.fleet.index.find_matches(local) if simulation.policy.reads_index else OverlapScores({})

    def _uncached_tokens(self, request: _Request) -> int:
        best = self._scores(request.hashes.local).max_score
        return prefill_tokens(request.trace.input_length, best, self._simulation.config.block_size)
