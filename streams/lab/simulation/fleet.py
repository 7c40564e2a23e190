"""A run: requests arrive, a router sends them to engines, engines compute, events come back later (pure).

What lives here: the order of everything that happens, by simulated time. What must not: what routers and engines do
with it.

At one point in time, in this order: events that are due reach the router; engines end their steps; requests arrive;
they are routed, together with those that wait; engines begin their steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from streams.core.ids import EngineHash, Float64Array, HashArray
from streams.errors import SettingsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.speeds import MODELS
from streams.lab.simulation.lab_engine import LabEngine, LabRequest, Load
from streams.lab.simulation.lab_engine_config import LabEngineConfig
from streams.lab.simulation.lab_pool import LabPool, LabPoolConfig
from streams.lab.simulation.results import RunResult
from streams.lab.simulation.router import LabRouter, RoutedRequest
from streams.lab.simulation.router_group import RouterGroup
from streams.lab.simulation.simulated_engine import SimulatedEngine
from streams.lab.simulation.workload import NO_REQUEST, Workload

#: Progress is reported after this many requests.
PROGRESS_EVERY = 500

_NEVER = float("inf")

#: A request waits for this long before it is routed again, if no engine is alive.
_RETRY_MS = 100.0


@dataclass(frozen=True, slots=True)
class LabFailure:
    """An engine that fails at a time, and is back with an empty cache later. known_after_ms: until the router knows."""

    worker: int
    at_ms: float
    for_ms: float = 30_000.0
    known_after_ms: float = 2_000.0


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late a live run was, so that the laboratory can run under the same conditions. Each is float64[n], in ms.

    arrived_ms: when an engine of `kvstreams sim` counts each request as arrived. The times of the workload are those of
    its decision then, which are later. first_ms, ended_ms: from its first token and from its end until the router had
    the client's report. Clients of live runs do not report how long an answer was.
    """

    arrived_ms: Float64Array
    first_ms: Float64Array
    ended_ms: Float64Array


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The fleet and how requests come.

    concurrency: requests at the same time, each followed by the next one; 0: they come at their times, divided by
    speedup. event_lag_ms: until the router has an engine's event. speeds: for each worker, how many times as long its
    steps take; missing ones are 1. pool: memory that all engines share, None for none. host: memory of each
    engine's host, from which only that engine loads, None for none. engine: that of a laboratory engine, or of one of
    `kvstreams sim`, whose blocks take as many bytes in a pool as those of an 8B model. lateness: of a live run; only
    with engines of `kvstreams sim` without a pool, whose requests come at their times.
    """

    engine: LabEngineConfig | EngineConfig
    n_workers: int = 8
    concurrency: int = 0
    speedup: float = 1.0
    event_lag_ms: float = 0.0
    speeds: tuple[float, ...] = ()
    failures: tuple[LabFailure, ...] = field(default=())
    pool: LabPoolConfig | None = None
    host: LabPoolConfig | None = None
    lateness: Lateness | None = None

    def __post_init__(self) -> None:
        if self.n_workers < 1:
            raise SettingsError(f"there are {self.n_workers} workers; there must be at least one")
        if self.concurrency < 0 or not self.speedup > 0.0 or not self.event_lag_ms >= 0.0:
            raise SettingsError("concurrency and the lag of events must not be negative, and speedup must be above 0")
        if any(not speed > 0.0 for speed in self.speeds) or len(self.speeds) > self.n_workers:
            raise SettingsError("speeds must be above 0, and there must not be more of them than workers")
        is_lab = isinstance(self.engine, LabEngineConfig)
        has_pool = self.pool is not None or self.host is not None
        if self.lateness is not None and (is_lab or has_pool or self.concurrency or self.speedup != 1.0):
            raise SettingsError(
                "lateness is for engines of kvstreams sim without a pool, with requests that come at their times"
            )
        if any(not 0 <= failure.worker < self.n_workers for failure in self.failures):
            raise SettingsError(f"a failure names a worker that is not one of the {self.n_workers}")


def run(
    workload: Workload,
    config: FleetConfig,
    router: LabRouter | RouterGroup,
    on_progress: Callable[[int], None] | None = None,
) -> RunResult:
    """Run a workload to its end. Equal arguments, including the router's generator, give equal results."""
    return _Run(workload, config, router, on_progress).run()


class _Run:
    def __init__(
        self,
        workload: Workload,
        config: FleetConfig,
        router: LabRouter | RouterGroup,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        if workload.block_size != config.engine.block_size:
            raise SettingsError(
                f"{workload.name} has blocks of {workload.block_size} tokens, the engine of {config.engine.block_size}"
            )
        self.workload, self.config, self.router = workload, config, router
        self.now_ms = 0.0
        n = len(workload)
        self.result = RunResult(workload.name, workload.n_in, workload.n_out, config.n_workers)
        self.pool = None
        if config.pool is not None:
            self.pool = self._new_pool(config.pool)
        self._hosts: list[LabPool] = []
        if config.host is not None:
            self._hosts = [self._new_pool(config.host) for _ in range(config.n_workers)]
        loads = self.pool is not None or bool(self._hosts)
        speeds = (*config.speeds, *[1.0] * config.n_workers)
        self.engines = [
            self._new_engine(number, speeds[number], partial(self._load, number) if loads else None)
            for number in range(config.n_workers)
        ]
        self._down = [False] * config.n_workers
        self._version = [0] * config.n_workers
        self._ends: list[tuple[float, int, int]] = []  # heap: end of a step, worker, version
        self._lagged: deque[tuple[float, Callable[[], None]]] = deque()  # in order, since all have the same lag
        self._timers: list[tuple[float, int, Callable[[], None]]] = []  # heap: failures and retries
        self._n_timers = 0
        self._on_progress = on_progress
        # Requests by time. One whose session's answer before it is missing is in _held until that is there.
        self._next = 0
        self._held: dict[int, list[int]] = {}
        self._ready: list[int] = []  # heap: requests before _next that may start now (closed loop)
        self._done = np.zeros(n, dtype=np.bool_)
        self._n_done = self._n_in_flight = 0
        self._requests: dict[int, LabRequest] = {}
        self._worker: dict[int, int] = {}
        # Names are looked up one request at a time; the arrays' elements as Python integers, once.
        self._n_in: list[int] = workload.n_in.tolist()
        self._n_out: list[int] = workload.n_out.tolist()
        self._own: list[int] = workload.own.tolist()
        self._previous: list[int] = workload.previous.tolist()
        self._pause_ms: list[float] = (workload.pause_ms / config.speedup).tolist()
        self._at_ms: list[float] = (workload.at_ms / config.speedup).tolist()

    def _new_engine(self, number: int, speed: float, load: Load | None) -> LabEngine | SimulatedEngine:
        config = self.config.engine
        if isinstance(config, EngineConfig):
            return SimulatedEngine(number, config, self._on_stored, self._on_removed, speed=speed, load=load)
        return LabEngine(number, config, self._on_stored, self._on_removed, speed=speed, load=load)

    def _new_pool(self, config: LabPoolConfig) -> LabPool:
        engine = self.config.engine
        bytes_per_token = (
            engine.bytes_per_token if isinstance(engine, LabEngineConfig) else MODELS["8b"].bytes_per_token
        )
        return LabPool(config, engine.block_size * bytes_per_token)

    def run(self) -> RunResult:
        n = len(self.workload)
        for failure in self.config.failures:
            self._at(failure.at_ms, lambda failure=failure: self._fail(failure))  # type: ignore[misc]
        touched: set[int] = set()
        engines, ends = self.engines, self._ends
        while self._n_done < n:
            self._arrive(touched)
            if self.router.wake_ms <= self.now_ms:
                for request, worker in self.router.pump(self.now_ms):
                    self._submit(request, worker, touched)
            for number in sorted(touched):
                engine = engines[number]
                if not engine.is_busy and engine.has_work and not self._down[number]:
                    engine.start(self.now_ms)
                    heapq.heappush(ends, (engine.end_ms, number, self._version[number]))
            touched.clear()
            if self._n_done >= n:
                break
            self.now_ms = now_ms = self._next_ms()
            while self._lagged and self._lagged[0][0] <= now_ms:
                self._lagged.popleft()[1]()
            while self._timers and self._timers[0][0] <= now_ms:
                heapq.heappop(self._timers)[2]()
            while ends and ends[0][0] <= now_ms:
                _, number, version = heapq.heappop(ends)
                if version == self._version[number]:
                    self._finish(number)
                    touched.add(number)
            touched.update(number for number, down in enumerate(self._down) if not down and not engines[number].is_busy)
        self.result.close(self.now_ms, [engine.busy_ms for engine in self.engines])
        self.result.n_preempted = sum(engine.n_preempted for engine in self.engines)
        return self.result

    def _next_ms(self) -> float:
        """The next time at which anything happens."""
        while self._ends and self._ends[0][2] != self._version[self._ends[0][1]]:
            heapq.heappop(self._ends)
        at_ms = min(self._ends[0][0] if self._ends else _NEVER, self.router.wake_ms)
        if self._lagged:
            at_ms = min(at_ms, self._lagged[0][0])
        if self._timers:
            at_ms = min(at_ms, self._timers[0][0])
        if not self.config.concurrency and self._next < len(self.workload):
            at_ms = min(at_ms, self._at_ms[self._next])
        assert at_ms < _NEVER, "requests are left, and nothing will happen"
        return max(self.now_ms, at_ms)

    def _at(self, at_ms: float, event: Callable[[], None]) -> None:
        self._n_timers += 1
        heapq.heappush(self._timers, (at_ms, self._n_timers, event))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, touched: set[int]) -> None:
        """Route the requests that arrive now."""
        n, concurrency = len(self.workload), self.config.concurrency
        while self._ready and (not concurrency or self._n_in_flight < concurrency):
            self._route(heapq.heappop(self._ready), self.now_ms, touched)
        while self._next < n:
            if concurrency:
                if self._n_in_flight >= concurrency:
                    return
            elif self._at_ms[self._next] > self.now_ms:
                return
            number = self._next
            self._next += 1
            previous = self._previous[number]
            if previous == NO_REQUEST:
                self._route(number, self.now_ms, touched)
            elif not self._done[previous]:
                self._held.setdefault(previous, []).append(number)
            elif self._pause_ms[number] > 0.0:  # its pause has begun when the answer ended
                ready_ms = float(self.result.last_ms[previous]) + self._pause_ms[number]
                self._at(max(self.now_ms, ready_ms), lambda number=number: heapq.heappush(self._ready, number))  # type: ignore[misc]
            else:
                self._route(number, self.now_ms, touched)

    def _let_follow(self, number: int) -> None:
        """The answer before this request is there: it comes after its pause."""
        pause_ms = self._pause_ms[number]
        if pause_ms > 0.0:  # not if it is NaN
            self._at(self.now_ms + pause_ms, lambda: heapq.heappush(self._ready, number))
        else:
            heapq.heappush(self._ready, number)

    def _route(self, number: int, arrived_ms: float, touched: set[int]) -> None:
        self._n_in_flight += 1
        self.result.arrived_ms[number] = arrived_ms
        self._send(number, touched)

    def _send(self, number: int, touched: set[int], excluded: int | None = None) -> None:
        """Route a request and submit it to its engine. excluded: the engine that failed it."""
        if not self.router.alive:
            self._at(self.now_ms + _RETRY_MS, lambda: self._send(number, touched))
            return
        names = self.workload.names[self.workload.keys_of(number)]
        request = RoutedRequest(number, self._n_in[number], names, names.tobytes(), excluded)
        worker = self.router.arrive(request, self.now_ms)
        if worker is not None:
            self._submit(number, worker, touched)

    def _submit(self, number: int, worker: int, touched: set[int]) -> None:
        """Hand a routed request to its engine."""
        engine = self.engines[worker]
        if self._down[worker]:  # the router does not know yet
            self.router.ended(number, self.now_ms)
            self._at(self.now_ms + _RETRY_MS, lambda: self._send(number, touched, worker))
            return
        keys: list[int] = self.workload.keys_of(number).tolist()
        request = LabRequest(number, self._n_in[number], self._n_out[number], keys, self._own[number])
        if not engine.fits(request):
            raise SettingsError(
                f"request {number} of {self.workload.name} has {request.n_in} + {request.n_out} tokens, which no "
                f"engine with {self.config.engine.n_blocks} blocks can serve"
            )
        if self.config.lateness is not None:
            request.arrived_ms = self.result.arrived_ms[number] = float(self.config.lateness.arrived_ms[number])
        self._requests[number] = request
        self._worker[number] = worker
        self.result.worker[number] = worker
        touched.add(worker)
        if engine.submit(request, self.now_ms):
            self._version[worker] += 1
            heapq.heappush(self._ends, (engine.end_ms, worker, self._version[worker]))

    def _finish(self, worker: int) -> None:
        """An engine ends its step."""
        first, ended = self.engines[worker].finish()
        now_ms, result, router, lateness = self.now_ms, self.result, self.router, self.config.lateness
        for request in first:
            result.first_ms[request.number] = now_ms if lateness is None else request.first_ms
            result.reused_tokens[request.number] = request.reused_tokens
            result.loaded_tokens[request.number] = min(request.loaded_tokens, request.n_in - request.reused_tokens)
            if lateness is None:
                router.first_token(request.number, now_ms)
            else:
                self._report_first(request, float(lateness.first_ms[request.number]))
        for request in ended:
            number = request.number
            result.last_ms[number] = now_ms if lateness is None else request.last_ms
            if lateness is None:
                router.ended(number, now_ms, request.n_out)
            else:
                self._report_end(request, float(lateness.ended_ms[number]))
            del self._requests[number], self._worker[number]
            self._done[number] = True
            self._n_done += 1
            self._n_in_flight -= 1
            for follower in self._held.pop(number, ()):
                self._let_follow(follower)
            if self._on_progress is not None and not self._n_done % PROGRESS_EVERY:
                self._on_progress(self._n_done)

    def _report_first(self, request: LabRequest, late_ms: float) -> None:
        self._at(request.first_ms + late_ms, lambda: self.router.first_token(request.number, self.now_ms))

    def _report_end(self, request: LabRequest, late_ms: float) -> None:
        self._at(request.last_ms + late_ms, lambda: self.router.ended(request.number, self.now_ms))

    # -- events --------------------------------------------------------------------------------------------------------

    def _load(self, worker: int, keys: Sequence[int], n_max: int) -> tuple[int, float]:
        """Load blocks into an engine: from its host as far as possible, then from the pool."""
        n_loaded, took_ms = 0, 0.0
        pools = [self._hosts[worker]] if self._hosts else []
        for pool in [*pools, *([] if self.pool is None else [self.pool])]:
            left = keys[n_loaded:n_max]
            n_more = pool.n_continuing(left)
            if n_more:
                took_ms += pool.load(self.now_ms, left[:n_more])
                n_loaded += n_more
        return n_loaded, took_ms

    def _keep_on_host(self, worker: int, request: LabRequest, first: int, last: int) -> None:
        """Write blocks to an engine's host."""
        assert self.config.host is not None
        _, evicted = self._hosts[worker].store(request.chain[:last], first)
        if self.config.host.is_credited and self.router.reads_index:
            keys, names = self.workload.keys_of(request.number), self.workload.names
            parent = EngineHash(int(names[keys[first - 1]])) if first else None
            stored, gone = names[keys[first:last]], names[evicted]
            self._later(lambda: self.router.kept_on_host(worker, parent, stored, gone))

    def _offload(self, request: LabRequest, first: int, last: int) -> None:
        """Write blocks to the pool."""
        assert self.pool is not None and self.config.pool is not None
        new, evicted = self.pool.store(request.chain[:last], first)
        if self.config.pool.is_credited and self.router.reads_index and (new or evicted):
            names = self.workload.names
            self._later(lambda: self.router.pool_changed(names[new].tolist(), names[evicted].tolist()))

    def _on_stored(self, worker: int, request: LabRequest, first: int, last: int) -> None:
        if self.pool is not None:
            self._offload(request, first, last)
        if self._hosts:
            self._keep_on_host(worker, request, first, last)
        if not self.router.reads_index:
            return
        keys = self.workload.keys_of(request.number)
        names = self.workload.names[keys[first:last]]
        parent = EngineHash(int(self.workload.names[keys[first - 1]])) if first else None
        self._later(lambda: self._store(worker, parent, names))

    def _store(self, worker: int, parent: EngineHash | None, names: HashArray) -> None:
        self.router.stored(worker, parent, names)

    def _on_removed(self, worker: int, keys: list[int]) -> None:
        if not self.router.reads_index:
            return
        gone = np.array(keys, dtype=np.int64)
        names = self.workload.names[gone[gone < self.workload.n_keys]]
        if names.size:
            self._later(lambda: self.router.removed(worker, names))

    def _later(self, event: Callable[[], None]) -> None:
        if self.config.event_lag_ms:
            self._lagged.append((self.now_ms + self.config.event_lag_ms, event))
        else:
            event()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _fail(self, failure: LabFailure) -> None:
        worker = failure.worker
        if self._down[worker]:
            return
        self._down[worker] = True
        self._version[worker] += 1
        lost = [request.number for request in self.engines[worker].fail()]
        if self.config.host is not None:
            self._hosts[worker] = self._new_pool(self.config.host)
        self._at(self.now_ms + failure.for_ms, lambda: self._return(worker))
        self._at(self.now_ms + min(failure.known_after_ms, failure.for_ms), lambda: self.router.worker_failed(worker))
        for number in lost:  # clients see a broken connection at once, and try again
            self.router.ended(number, self.now_ms)
            del self._requests[number]
            self._at(self.now_ms + _RETRY_MS, lambda number=number: self._send(number, set(), worker))  # type: ignore[misc]

    def _return(self, worker: int) -> None:
        self._down[worker] = False
        self.router.worker_returned(worker)
