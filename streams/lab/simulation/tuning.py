"""Searching for the parameters of a policy that serve a workload best.

What lives here: what is varied, the order of trials, and objectives. What must not: output.

Parameters are drawn from ranges, uniformly in their logarithms, after the policy's own values. That is simple, and with
two or three parameters as good as a model of the objective; runs are independent of each other.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from streams.errors import SettingsError
from streams.lab.simulation.experiment import Row, run_policy
from streams.lab.simulation.fleet import FleetConfig
from streams.lab.simulation.workload import Workload

#: What is varied unless the user says otherwise: lowest and highest value.
RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "expected-time": {"uncached_weight": (0.2, 5.0), "decode_weight": (0.001, 0.1)},
        "dynamo-default": {"credit": (0.5, 8.0), "scale": (0.5, 40.0), "request_weight": (1.0, 600.0)},
    }
)

#: The settings of a router for these parameters, by policy. Mode kv has Dynamo's cost.
SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "expected-time": {
            "uncached_weight": "expected_time_uncached_weight",
            "decode_weight": "expected_time_decode_weight",
        },
        "dynamo-default": {
            "credit": "kv_overlap_score_credit",
            "scale": "kv_overlap_score_weight",
            "request_weight": "decode_active_request_weight",
        },
    }
)
MODES: Mapping[str, str] = MappingProxyType({"expected-time": "expected-time", "dynamo-default": "kv"})


class Objective(enum.StrEnum):
    """What a good policy is. Goodput is the rate of requests whose first token comes within a limit."""

    MEAN_TTFT = "mean-ttft"
    P99_TTFT = "p99-ttft"
    GOODPUT = "goodput"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run. loss: lower is better."""

    parameters: Mapping[str, float]
    row: Row
    loss: float


def loss_of(row: Row, objective: Objective, limit_ms: float) -> float:
    """The number that is minimised."""
    match objective:
        case Objective.MEAN_TTFT:
            return row.figures.mean_ttft_ms
        case Objective.P99_TTFT:
            return row.figures.p99_ttft_ms
        case Objective.GOODPUT:
            return -goodput_per_s(row, limit_ms)


def goodput_per_s(row: Row, limit_ms: float) -> float:
    """Requests per second whose first token came within the limit."""
    share = float((row.result.ttft_ms <= limit_ms).mean())
    return share * row.figures.requests_per_s


def candidates(ranges: Mapping[str, tuple[float, float]], n_trials: int, seed: int) -> Iterator[Mapping[str, float]]:
    """Parameters to try: first none, which is the policy as it is."""
    for name, (low, high) in ranges.items():
        if not 0.0 < low < high < math.inf:
            raise SettingsError(f"the range of {name} is {low}..{high}; its ends must be above 0 and ascend")
    rng = random.Random(seed)
    yield {}
    for _ in range(n_trials - 1):
        yield {
            name: float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")
            for name, (low, high) in ranges.items()
        }


def tune(
    workload: Workload,
    config: FleetConfig,
    policy: str,
    ranges: Mapping[str, tuple[float, float]],
    *,
    objective: Objective,
    limit_ms: float,
    n_trials: int,
    seed: int,
    with_queue: bool,
    on_trial: Callable[[Trial], None],
) -> list[Trial]:
    """Run the trials; return them, the best first. Raises SettingsError."""
    trials = []
    for parameters in candidates(ranges, n_trials, seed):
        name = ":".join([policy, *(f"{name}={value:g}" for name, value in parameters.items())])
        row = run_policy(workload, config, name + ("+queue" if with_queue else ""))
        trial = Trial(parameters, row, loss_of(row, objective, limit_ms))
        trials.append(trial)
        on_trial(trial)
    return sorted(trials, key=lambda trial: trial.loss)


def settings_of(policy: str, parameters: Mapping[str, float]) -> list[str]:
    """The lines of a settings file (TOML) for these parameters; empty if the policy has no settings."""
    names = SETTINGS.get(policy)
    if names is None:
        return []
    return [f'router_mode = "{MODES[policy]}"', *(f"{names[name]} = {value:g}" for name, value in parameters.items())]
