"""The laboratory's version of a live fleet of `kvstreams sim` engines, to compare a live run with a simulated one.

What lives here: requests, conditions and outcomes in the form of the other side. What must not: the run (experiment).

The laboratory runs the state machine of the live engines itself (simulated_engine). What remains between both is the
way from client to router to engine and back. It takes no time in the laboratory, unless a live run's times are given.

A run whose policy decides by load and content is sensitive: a request that comes 5 ms later changes a choice, and this
changes those after it. So a single run says little about a policy's hit share. There are two ways out, and both are
here: `follow_like` makes the live run's own choices, and `simulate_like` can be called with several `shuffles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streams.core.ids import Float64Array
from streams.sim.engine_config import EngineConfig
from streams.sim.lab.experiment import run_policy
from streams.sim.lab.fleet import FleetConfig, Lateness
from streams.sim.lab.recorded import replay
from streams.sim.lab.results import RunResult
from streams.sim.lab.workload import RawRequest, Workload, build
from streams.sim.offline import Outcome
from streams.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest


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

    outcomes: Sequence[Outcome]
    times: Sequence[LiveTimes]
    speedup: float


@dataclass(frozen=True, slots=True)
class Followed:
    """A run that makes a live run's choices. changed: share of the choices that the policy would have changed here."""

    outcomes: list[Outcome]
    changed: float


def workload_like(requests: Sequence[TraceRequest], block_size: int) -> Workload:
    """The same requests. They must be in the order of their times."""
    raw = (RawRequest(each.timestamp_ms, each.input_length, each.output_length, each.hash_ids) for each in requests)
    return build("requests", raw, TRACE_BLOCK_TOKENS, block_size)


def simulate_like(
    requests: Sequence[TraceRequest],
    n_engines: int,
    config: EngineConfig,
    policy: str,
    seed: int = 1,
    live: LiveRun | None = None,
    shuffle: int = 0,
) -> list[Outcome]:
    """Run requests by a policy's name, as `kvstreams simulate` does; return one outcome per request, in their order.

    live: a live run, under whose conditions this one is run: decisions and reports are as late as they were there. With
    another shuffle than 0, the same delays belong to other requests, at random.
    """
    situation = _Situation(requests, n_engines, config, live, shuffle)
    return situation.outcomes(run_policy(situation.workload, situation.fleet, policy, seed=seed).result)


def follow_like(
    requests: Sequence[TraceRequest], n_engines: int, config: EngineConfig, policy: str, live: LiveRun, seed: int = 1
) -> Followed:
    """Run requests under the conditions of a live run and with its choices, which the policy made."""
    situation = _Situation(requests, n_engines, config, live, 0)
    chosen = [live.outcomes[number].worker_id - 1 for number in situation.order]
    replayed = replay(situation.workload, situation.fleet, chosen, [policy], by=policy, seed=seed)
    return Followed(situation.outcomes(replayed.row.result), replayed.changed[policy])


class _Situation:
    """The workload and the fleet of a run, in wall ms if it follows a live one. order: the requests by their times."""

    def __init__(
        self, requests: Sequence[TraceRequest], n_engines: int, config: EngineConfig, live: LiveRun | None, shuffle: int
    ) -> None:
        self._scale = 1.0 if live is None else live.speedup
        at_ms = np.array([each.timestamp_ms for each in requests], dtype=np.float64)
        lateness = None
        decided_ms = at_ms
        if live is not None:
            decided_late, first_late, ended_late = _late(at_ms, live)
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
        self.fleet = FleetConfig(config, n_engines, speeds=(1.0 / self._scale,) * n_engines, lateness=lateness)

    def outcomes(self, result: RunResult) -> list[Outcome]:
        """One outcome per request, in model time and in the order of the requests."""
        ttft_ms = result.ttft_ms * self._scale
        latency_ms = (result.last_ms - result.arrived_ms) * self._scale
        found: dict[int, Outcome] = {}
        for at, number in enumerate(self.order):
            found[number] = Outcome(
                request=number,
                worker_id=int(result.worker[at]) + 1,
                prompt_tokens=int(result.n_in[at]),
                cached_tokens=int(result.reused_tokens[at]),
                output_tokens=int(result.n_out[at]),
                ttft_ms=float(ttft_ms[at]),
                latency_ms=float(latency_ms[at]),
            )
        return [found[number] for number in range(len(self.order))]


def _late(at_ms: Float64Array, live: LiveRun) -> tuple[Float64Array, Float64Array, Float64Array]:
    """How late each request's decision and reports were, float64[n] in model ms; at least 0."""

    def column(values: Sequence[float | None]) -> Float64Array:
        return np.array(values, dtype=np.float64)

    decided = column([each.decided_ms for each in live.times]) - at_ms
    first = column([each.first_reported_ms for each in live.times]) - at_ms
    ended = column([each.ended_reported_ms for each in live.times]) - at_ms
    first -= column([each.ttft_ms for each in live.outcomes])
    ended -= column([each.latency_ms for each in live.outcomes])
    return np.maximum(decided, 0.0), np.maximum(first, 0.0), np.maximum(ended, 0.0)
