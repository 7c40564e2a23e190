"""A run: requests arrive, a router sends them to engines, engines compute, events come back later (pure).

What lives here: the order of everything that happens, by simulated time. What must not: what routers and engines do
with it; which requests arrive when (arrivals).

At one point in time, in this order: events that are due reach the router; engines end their steps; requests arrive;
they are routed, together with those that wait; engines begin their steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from streams.core.ids import EngineHash, Float64Array, HashArray
from streams.errors import SettingsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.speeds import MODELS
from streams.lab.simulation.agenda import Agenda
from streams.lab.simulation.arrivals import Arrivals
from streams.lab.simulation.lab_engine import LabEngine, LabRequest, Load
from streams.lab.simulation.lab_engine_config import LabEngineConfig
from streams.lab.simulation.lab_pool import LabPool, LabPoolConfig
from streams.lab.simulation.results import RunResult
from streams.lab.simulation.router import LabRouter, RoutedRequest
from streams.lab.simulation.router_group import RouterGroup
from streams.lab.simulation.simulated_engine import SimulatedEngine
from streams.lab.simulation.workload import Workload

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
        self._agenda = Agenda(config.event_lag_ms)
        self._arrivals = Arrivals(workload, config.concurrency, config.speedup)
        self._on_progress = on_progress
        # The arrays' elements as Python integers, since they are read one at a time.
        self._n_in: list[int] = workload.n_in.tolist()
        self._n_out: list[int] = workload.n_out.tolist()
        self._own: list[int] = workload.own.tolist()

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
            self._agenda.at(failure.at_ms, lambda failure=failure: self._fail(failure))  # type: ignore[misc]
        touched: set[int] = set()
        engines, ends, agenda, arrivals = self.engines, self._ends, self._agenda, self._arrivals
        while arrivals.n_ended < n:
            for number in arrivals.take(self.now_ms):
                self.result.arrived_ms[number] = self.now_ms
                self._send(number, touched)
            if self.router.wake_ms <= self.now_ms:
                for request, worker in self.router.pump(self.now_ms):
                    self._submit(request, worker, touched)
            for number in sorted(touched):
                engine = engines[number]
                if not engine.is_busy and engine.has_work and not self._down[number]:
                    engine.start(self.now_ms)
                    heapq.heappush(ends, (engine.end_ms, number, self._version[number]))
            touched.clear()
            if arrivals.n_ended >= n:
                break
            self.now_ms = now_ms = self._next_ms()
            agenda.run(now_ms)
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
        end_ms = self._ends[0][0] if self._ends else _NEVER
        at_ms = min(end_ms, self.router.wake_ms, self._agenda.next_ms(), self._arrivals.next_ms())
        assert at_ms < _NEVER, "requests are left, and nothing will happen"
        return max(self.now_ms, at_ms)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _send(self, number: int, touched: set[int], excluded: int | None = None) -> None:
        """Route a request and submit it to its engine. excluded: the engine that failed it."""
        if not self.router.alive:
            self._agenda.at(self.now_ms + _RETRY_MS, lambda: self._send(number, touched))
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
            self._agenda.at(self.now_ms + _RETRY_MS, lambda: self._send(number, touched, worker))
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
            self._arrivals.ended(number, now_ms, now_ms if lateness is None else request.last_ms)
            n_ended = self._arrivals.n_ended
            if self._on_progress is not None and not n_ended % PROGRESS_EVERY:
                self._on_progress(n_ended)

    def _report_first(self, request: LabRequest, late_ms: float) -> None:
        self._agenda.at(request.first_ms + late_ms, lambda: self.router.first_token(request.number, self.now_ms))

    def _report_end(self, request: LabRequest, late_ms: float) -> None:
        self._agenda.at(request.last_ms + late_ms, lambda: self.router.ended(request.number, self.now_ms))

    # -- events --------------------------------------------------------------------------------------------------------

    def _load(self, worker: int, keys: Sequence[int], first: int, n_max: int) -> tuple[int, float]:
        """Load blocks into an engine: from its host as far as possible, then from the pool."""
        n_loaded, took_ms = 0, 0.0
        pools = [self._hosts[worker]] if self._hosts else []
        for pool in [*pools, *([] if self.pool is None else [self.pool])]:
            begin = first + n_loaded
            n_more = min(pool.n_continuing(keys, begin), n_max - n_loaded)
            if n_more:
                took_ms += pool.load(self.now_ms, keys, begin, n_more)
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
            self._agenda.after_lag(self.now_ms, lambda: self.router.kept_on_host(worker, parent, stored, gone))

    def _offload(self, request: LabRequest, first: int, last: int) -> None:
        """Write blocks to the pool."""
        assert self.pool is not None and self.config.pool is not None
        new, evicted = self.pool.store(request.chain[:last], first)
        if self.config.pool.is_credited and self.router.reads_index and (new or evicted):
            names, span = self.workload.names, self.config.pool.chunk_blocks
            self._agenda.after_lag(
                self.now_ms, lambda: self.router.pool_changed(names[new].tolist(), names[evicted].tolist(), span)
            )

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
        self._agenda.after_lag(self.now_ms, lambda: self._store(worker, parent, names))

    def _store(self, worker: int, parent: EngineHash | None, names: HashArray) -> None:
        self.router.stored(worker, parent, names)

    def _on_removed(self, worker: int, keys: list[int]) -> None:
        if not self.router.reads_index:
            return
        gone = np.array(keys, dtype=np.int64)
        names = self.workload.names[gone[gone < self.workload.n_keys]]
        if names.size:
            self._agenda.after_lag(self.now_ms, lambda: self.router.removed(worker, names))

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
        self._agenda.at(self.now_ms + failure.for_ms, lambda: self._return(worker))
        self._agenda.at(
            self.now_ms + min(failure.known_after_ms, failure.for_ms), lambda: self.router.worker_failed(worker)
        )
        for number in lost:  # clients see a broken connection at once, and try again
            self.router.ended(number, self.now_ms)
            self._agenda.at(self.now_ms + _RETRY_MS, lambda number=number: self._send(number, set(), worker))  # type: ignore[misc]

    def _return(self, worker: int) -> None:
        self._down[worker] = False
        self.router.worker_returned(worker)
