"""Fleets that follow their own signals, and fleets of other sizes for the same traffic (pure).

What lives here: laboratory routers that read the signals of their worker pool as live ones do, an autoscaler with the
rules of Kubernetes' HPA, and runs of one workload with several numbers of engines. What must not: the signals
(core.routing.saturation), and output.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streams.core.ids import RankId
from streams.core.routing.saturation import READ_EVERY_S, PoolMeter, PoolSignals, read_pool
from streams.errors import SettingsError
from streams.lab.simulation.experiment import make_router
from streams.lab.simulation.fleet import FleetConfig, run
from streams.lab.simulation.lab_engine_config import LabEngineConfig
from streams.lab.simulation.results import Figures, RunResult
from streams.lab.simulation.router import LabRouter, RoutedRequest
from streams.lab.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Reading:
    """The signals of the pool at one time, and how many engines get requests. signals: None in the first seconds."""

    at_ms: float
    replicas: int
    signals: PoolSignals | None


class Readings:
    """The readings of one router so far. slots: requests that an engine runs at a time, 0 if that is not known."""

    def __init__(self, slots: int) -> None:
        self.all: list[Reading] = []
        self.next_ms = 0.0
        self._slots = slots
        self._meter = PoolMeter()

    def take(self, router: LabRouter) -> Reading:
        """Take the reading that is due."""
        at_ms, ranks = self.next_ms, router.alive
        router.loads.advance(int(at_ms))
        read = read_pool(
            at_ms,
            ranks,
            router.loads,
            router.ms_per_token(),
            blocks=router.blocks_of(ranks),
            slots=np.full(len(ranks), self._slots, dtype=np.int64),
            queued=router.queued(),
        )
        reading = Reading(at_ms, len(ranks), self._meter.note(read))
        self.all.append(reading)
        self.next_ms += READ_EVERY_S * 1000.0
        return reading


class MeteredRouter(LabRouter):
    """A router that reads the signals of its pool every two seconds.

    Nothing changes between two events of a run. So what was due between them is read at the second one, as of its time.
    """

    readings: Readings

    def read(self, now_ms: float) -> None:
        """Take the readings that are due."""
        while self.readings.next_ms <= now_ms:
            self.follow(self.readings.take(self))

    def follow(self, reading: Reading) -> None:
        """Do what a reading asks for: nothing, in a fleet of a fixed size."""

    def arrive(self, request: RoutedRequest, now_ms: float) -> int | None:
        """Route a request."""
        self.read(now_ms)
        return super().arrive(request, now_ms)

    def pump(self, now_ms: float) -> list[tuple[int, int]]:
        """Send waiting requests."""
        self.read(now_ms)
        return super().pump(now_ms)

    def first_token(self, number: int, now_ms: float) -> None:
        """A client reports that the prompt of a request is computed."""
        self.read(now_ms)
        super().first_token(number, now_ms)

    def ended(self, number: int, now_ms: float, n_output_tokens: int = 0) -> None:
        """A client reports the end of a request."""
        self.read(now_ms)
        super().ended(number, now_ms, n_output_tokens)


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """How the number of engines follows `replicas_wanted`: the rules of Kubernetes' HPA, with its defaults.

    target: scale_saturation_target. start_ms: until an engine that is added gets requests. tolerance: changes that are
    smaller are ignored. down_after_ms: the greatest number that was wanted within this time counts. up_factor, up_by:
    in one step, engines become at most so many times as many, or so many more.
    """

    target: float
    start_ms: float = 60_000.0
    every_ms: float = 15_000.0
    tolerance: float = 0.1
    down_after_ms: float = 300_000.0
    up_factor: float = 2.0
    up_by: int = 4


class ScaledRouter(MeteredRouter):
    """A router whose engines are added and removed by what its signals say."""

    fleet: ScaledFleet

    def follow(self, reading: Reading) -> None:
        """Have the engines that the fleet has after a reading."""
        running = self.fleet.follow(reading)
        if len(running) != len(self.alive):
            self._set_alive(running)


class ScaledFleet:
    """The autoscaler's state: the engines that get requests, those that start, and what was wanted lately.

    An engine that is removed gets no more requests, ends those that it has, and does not come back.
    """

    def __init__(self, rules: Autoscaler, ranks: Sequence[RankId], n_first: int) -> None:
        self.running = set(ranks[:n_first])
        self._rules = rules
        self._unused = deque(ranks[n_first:])
        self._starting: list[tuple[float, RankId]] = []  # in order of the times when they get requests
        self._wanted: deque[tuple[float, int]] = deque()
        self._next_ms = 0.0

    def follow(self, reading: Reading) -> set[RankId]:
        """Return the engines that get requests from now on."""
        while self._starting and self._starting[0][0] <= reading.at_ms:
            self.running.add(self._starting.pop(0)[1])
        if reading.at_ms >= self._next_ms and reading.signals is not None:
            self._next_ms = reading.at_ms + self._rules.every_ms
            self._decide(reading.at_ms, reading.signals.replicas_wanted(reading.replicas, self._rules.target))
        return self.running

    def _decide(self, now_ms: float, wanted: float) -> None:
        rules, n_now = self._rules, len(self.running) + len(self._starting)
        n_wanted = n_now if abs(wanted / n_now - 1.0) <= rules.tolerance else math.ceil(wanted)
        self._wanted.append((now_ms, n_wanted))
        while self._wanted[0][0] < now_ms - rules.down_after_ms:
            self._wanted.popleft()
        most = max(n for _, n in self._wanted)
        if n_wanted > n_now:
            n_next = min(n_wanted, max(int(rules.up_factor * n_now), n_now + rules.up_by))
        else:
            n_next = min(n_now, most)
        if n_next - n_now > len(self._unused):
            raise SettingsError(f"the fleet has no engine left to add to {n_now}; give it more of them")
        for _ in range(n_next - n_now):
            self._starting.append((now_ms + rules.start_ms, self._unused.popleft()))
        for _ in range(n_now - n_next):
            if self._starting:
                self._starting.pop()
            else:
                self.running.remove(max(self.running))


@dataclass(frozen=True, slots=True)
class MeteredRun:
    """A run, and the readings of its router."""

    result: RunResult
    readings: Sequence[Reading]

    def saturation(self) -> tuple[float, float]:
        """The mean while requests arrived, and the greatest mean of a minute; 0 for a run of a few seconds."""
        until_ms = float(self.result.arrived_ms.max())
        of_minute: dict[int, list[float]] = {}
        for reading in self.readings:
            if reading.signals is not None and reading.at_ms <= until_ms:
                of_minute.setdefault(int(reading.at_ms // 60_000), []).append(reading.signals.saturation)
        if not of_minute:
            return 0.0, 0.0
        every = [value for values in of_minute.values() for value in values]
        return float(np.mean(every)), max(float(np.mean(values)) for values in of_minute.values())


def follow(
    workload: Workload, config: FleetConfig, policy: str, rules: Autoscaler, n_first: int, *, seed: int = 1
) -> MeteredRun:
    """Run a workload on a fleet that follows its signals. config: with as many engines as there are to add.

    policy: as of make_router. n_first: engines at the beginning. Raises SettingsError, also if there are too few.
    """
    router = make_router(policy, config, random.Random(seed), ScaledRouter)
    assert isinstance(router, ScaledRouter)
    router.readings = Readings(_slots(config))
    router.fleet = ScaledFleet(rules, router.ranks, n_first)
    router.alive = router.ranks[:n_first]
    return MeteredRun(run(workload, config, router), router.readings.all)


@dataclass(frozen=True, slots=True)
class PlannedFleet:
    """What the same traffic would have been with another number of engines. saturation: its mean; peak: of a minute."""

    n_engines: int
    figures: Figures
    p95_ttft_ms: float
    saturation: float
    saturation_peak: float

    def as_json(self, price: float, hours: float) -> dict[str, object]:
        """The row of `kvstreams plan --json`. price: of an engine and hour. hours: of the traffic."""
        figures = self.figures
        return {
            "engines": self.n_engines,
            "mean_ttft_ms": round(figures.mean_ttft_ms, 3),
            "p95_ttft_ms": round(self.p95_ttft_ms, 3),
            "p99_ttft_ms": round(figures.p99_ttft_ms, 3),
            "itl_ms": round(figures.itl_ms, 4),
            "reuse": round(figures.reuse, 5),
            "saturation": round(self.saturation, 4),
            "saturation_peak": round(self.saturation_peak, 4),
            "engine_hours": round(self.n_engines * hours, 4),
            "cost": round(self.n_engines * hours * price, 4),
        }


def with_engines(
    workload: Workload,
    config: FleetConfig,
    policy: str,
    n_engines: int,
    *,
    seed: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> PlannedFleet:
    """Run a workload on a fleet of this size. Raises SettingsError."""
    config = replace(config, n_workers=n_engines)
    router = make_router(policy, config, random.Random(seed), MeteredRouter)
    assert isinstance(router, MeteredRouter)
    router.readings = Readings(_slots(config))
    metered = MeteredRun(run(workload, config, router, on_progress), router.readings.all)
    p95 = float(np.percentile(metered.result.ttft_ms, 95))
    return PlannedFleet(n_engines, metered.result.figures(), p95, *metered.saturation())


def _slots(config: FleetConfig) -> int:
    """Requests that an engine runs at a time."""
    return config.engine.max_sequences if isinstance(config.engine, LabEngineConfig) else 0
