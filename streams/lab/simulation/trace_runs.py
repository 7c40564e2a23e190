"""A trace on a simulated fleet, and the laboratory's version of a live run of one.

What lives here: requests, conditions and outcomes in the form of live runs. What must not: the run (experiment).

The laboratory runs the state machine of `kvstreams sim` itself (simulated_engine). So it differs from a live fleet of
these engines only by the way from client to router to engine and back. That takes no time in the laboratory, unless
the delays of a live run are given.

A policy that looks at loads and caches is sensitive to small delays. If one request arrives 5 ms later, it may go to
another engine, and then the requests after it find other blocks there. So a single run says little about a policy's hit
share. There are two remedies. `repeat_choices` sends each request to the engine that the live run chose. `simulate`
can be called several times with different values of `shuffle`, which give the mean and its spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streams.core.ids import Float64Array
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.simulation.experiment import run_policy
from streams.lab.simulation.fleet import FleetConfig, Lateness
from streams.lab.simulation.lab_pool import LabPoolConfig
from streams.lab.simulation.recorded import replay
from streams.lab.simulation.results import RequestOutcome, RunResult
from streams.lab.simulation.workload import RawRequest, Workload, build
from streams.lab.trace import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class LiveTimes:
    """When the router of a live run had decided about a request, and when it had each of the client's reports.

    In model ms since the time 0 of the trace. On an idle machine, decisions come at the requests' times, and reports
    when the first and the last token are out.
    """

    decided_ms: float
    first_reported_ms: float
    ended_reported_ms: float


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The conditions of a live run, as the laboratory takes them. Both lists are in the order of the requests.

    speedup: model ms per wall ms. Routers measure wall time.
    """

    outcomes: Sequence[RequestOutcome]
    times: Sequence[LiveTimes]
    speedup: float


@dataclass(frozen=True, slots=True)
class RepeatedRun:
    """A run that makes a live run's choices.

    changed: the share of requests that the policy would have sent elsewhere in the laboratory.
    """

    outcomes: list[RequestOutcome]
    changed: float


def workload_of(requests: Sequence[TraceRequest], block_size: int) -> Workload:
    """Return the same requests as a workload. They must be in the order of their times."""
    raw = (
        RawRequest(request.timestamp_ms, request.input_length, request.output_length, request.hash_ids)
        for request in requests
    )
    return build("requests", raw, TRACE_BLOCK_TOKENS, block_size)


def simulate(
    requests: Sequence[TraceRequest],
    n_engines: int,
    config: EngineConfig,
    policy: str,
    seed: int = 1,
    *,
    pool: LabPoolConfig | None = None,
    live: LiveRun | None = None,
    shuffle: int = 0,
) -> list[RequestOutcome]:
    """Route and run a trace by a policy's name; return one outcome per request, in the order of the trace.

    policy: a name as in `kvstreams simulate`. pool: memory that all engines share, None for none. live: a live run
    whose decisions and reports were late; they are as late here. It cannot be combined with a pool. shuffle: another
    number than 0 gives the same delays to other requests, at random. Equal arguments give equal outcomes. Raises
    SettingsError.
    """
    conditions = _Conditions(requests, n_engines, config, pool, live, shuffle)
    return conditions.outcomes(run_policy(conditions.workload, conditions.fleet, policy, seed=seed).result)


def repeat_choices(
    requests: Sequence[TraceRequest], n_engines: int, config: EngineConfig, policy: str, live: LiveRun, seed: int = 1
) -> RepeatedRun:
    """Run requests under the conditions of a live run and with its choices, which the policy made."""
    conditions = _Conditions(requests, n_engines, config, None, live, 0)
    chosen = [live.outcomes[number].worker_id - 1 for number in conditions.order]
    replayed = replay(conditions.workload, conditions.fleet, chosen, [policy], by=policy, seed=seed)
    return RepeatedRun(conditions.outcomes(replayed.row.result), replayed.changed[policy])


class _Conditions:
    """The workload and the fleet of a run, in wall ms if it follows a live one. order: the requests by their times."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        n_engines: int,
        config: EngineConfig,
        pool: LabPoolConfig | None,
        live: LiveRun | None,
        shuffle: int,
    ) -> None:
        self._scale = 1.0 if live is None else live.speedup
        at_ms = np.array([request.timestamp_ms for request in requests], dtype=np.float64)
        lateness = None
        decided_ms = at_ms
        if live is not None:
            decided_late, first_late, ended_late = _delays(at_ms, live)
            if shuffle:
                other = np.random.default_rng(shuffle).permutation(len(requests))
                decided_late, first_late, ended_late = decided_late[other], first_late[other], ended_late[other]
            decided_ms = at_ms + decided_late
        self.order: list[int] = np.argsort(decided_ms, kind="stable").tolist()
        if live is not None:
            lateness = Lateness(
                at_ms[self.order] / self._scale,
                first_late[self.order] / self._scale,
                ended_late[self.order] / self._scale,
            )
        raw = (
            RawRequest(
                float(decided_ms[number]) / self._scale,
                requests[number].input_length,
                requests[number].output_length,
                requests[number].hash_ids,
            )
            for number in self.order
        )
        self.workload = build("requests", raw, TRACE_BLOCK_TOKENS, config.block_size)
        self.fleet = FleetConfig(
            config, n_engines, speeds=(1.0 / self._scale,) * n_engines, pool=pool, lateness=lateness
        )

    def outcomes(self, result: RunResult) -> list[RequestOutcome]:
        """Return one outcome per request, in model time and in the order of the requests."""
        ttft_ms = result.ttft_ms * self._scale
        latency_ms = (result.last_ms - result.arrived_ms) * self._scale
        outcomes: dict[int, RequestOutcome] = {}
        for place, number in enumerate(self.order):
            n_loaded = int(result.loaded_tokens[place])
            outcomes[number] = RequestOutcome(
                request=number,
                worker_id=int(result.worker[place]) + 1,
                prompt_tokens=int(result.n_in[place]),
                cached_tokens=int(result.reused_tokens[place]) + n_loaded,
                output_tokens=int(result.n_out[place]),
                ttft_ms=float(ttft_ms[place]),
                latency_ms=float(latency_ms[place]),
                pooled_tokens=n_loaded,
            )
        return [outcomes[number] for number in range(len(self.order))]


def _delays(at_ms: Float64Array, live: LiveRun) -> tuple[Float64Array, Float64Array, Float64Array]:
    """How late each request's decision and reports were, float64[n] in model ms; at least 0."""

    def column(values: Sequence[float | None]) -> Float64Array:
        return np.array(values, dtype=np.float64)

    decided = column([times.decided_ms for times in live.times]) - at_ms
    first = column([times.first_reported_ms for times in live.times]) - at_ms
    ended = column([times.ended_reported_ms for times in live.times]) - at_ms
    first -= column([outcome.ttft_ms for outcome in live.outcomes])
    ended -= column([outcome.latency_ms for outcome in live.outcomes])
    return np.maximum(decided, 0.0), np.maximum(first, 0.0), np.maximum(ended, 0.0)
