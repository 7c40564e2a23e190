"""Choosing one of several ranks, given the cost or load of each.

What lives here: the selectors. What must not: computing costs (cost, policies), and booking. A selector changes nothing
but its own turn counter or its generator.

State: the position of round-robin, and the random generator.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: Throughput of a worker on another device divided by that of a worker on a CPU; the default of NVIDIA Dynamo.
CUDA_TO_CPU_RATIO = 8.0


class RouterMode(enum.StrEnum):
    """How a router chooses.

    expected-time and policy are policies of core.routing.policies that are found by name: the first one by its own, the
    second one by a name in the settings. The last two are older cost functions.
    """

    __hash__ = str.__hash__  # that of Enum is a Python function, which every look-up by a member would call

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    DIRECT = "direct"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    DEVICE_AWARE_WEIGHTED = "device-aware-weighted"
    EXPECTED_TIME = "expected-time"
    POLICY = "policy"
    HIT_USAGE_WAITING = "hit-usage-waiting"
    LOAD_DEVIATION = "load-deviation"


#: Modes whose policy is found by name.
NAMED_MODES = frozenset({RouterMode.EXPECTED_TIME, RouterMode.POLICY})


class Rng(Protocol):
    """A generator of uniform floats in [0, 1)."""

    def random(self) -> float:
        """Return the next float."""


def select_by_cost(costs: Sequence[float] | npt.NDArray[np.float64], temperature: float, rng: Rng) -> int:
    """Choose an index of `costs`, which must not be empty; lower costs win.

    Temperature 0 takes the minimum and breaks exact ties at random. A temperature above 0 samples the softmax of
    -cost / ((max - min) * temperature), which is uniform if all costs are equal. Source: docs/bookings.md.
    """
    columns = np.asarray(costs, dtype=np.float64)
    low = float(columns.min())
    scale = (float(columns.max()) - low) * temperature if temperature else 0.0
    if not scale > 0.0:  # also if the product of two small numbers is 0, or 0 times infinity is NaN
        return _any_of_the_lowest(columns.tolist(), low, rng)
    with np.errstate(over="ignore"):  # a quotient that is too large is infinite, and its weight is 0
        ends = np.exp((low - columns) / scale).cumsum()
    return min(int(ends.searchsorted(rng.random() * ends[-1], side="right")), len(columns) - 1)


def select_lowest(
    costs: npt.NDArray[np.float64], first: int, n_lowest: int, rng: Rng, preference: npt.NDArray[np.int64] | None = None
) -> int:
    """Choose as `select_by_cost` does at temperature 0, with the same draws.

    first: index of the first candidate with the lowest cost and, among exact ties, the greatest preference. n_lowest:
    how many candidates have both. preference: int64[n]; None or int64[0] for none.
    """
    if n_lowest == 1:
        return first
    best = costs == costs.item(first)
    if preference is not None and preference.size:
        best &= preference == preference.item(first)
    ties: list[int] = best.nonzero()[0].tolist()
    return ties[_uniform(len(ties), rng)]


def select_random(n: int, rng: Rng) -> int:
    """Choose one of n at random, uniformly."""
    return _uniform(n, rng)


def select_least_loaded(in_flight: Sequence[int], rng: Rng) -> int:
    """Choose one of those with the fewest requests in flight, at random. in_flight must not be empty."""
    return _any_of_the_lowest(in_flight, min(in_flight), rng)


def select_power_of_two(in_flight: Sequence[int], rng: Rng) -> int:
    """Draw two different candidates at random and choose the one with fewer requests in flight.

    If both have the same number, the first one drawn is chosen. A single candidate is chosen without a draw.
    """
    if len(in_flight) == 1:
        return 0
    first = _uniform(len(in_flight), rng)
    second = _uniform(len(in_flight) - 1, rng)
    second += second >= first
    return second if in_flight[second] < in_flight[first] else first


def select_device_aware(
    in_flight: Sequence[int], on_cpu: Sequence[bool] | npt.NDArray[np.bool_], cuda_to_cpu_ratio: float, rng: Rng
) -> int:
    """Choose between CPUs and other devices by normalised load, then the least loaded candidate of that group.

    The normalised load of a group is its requests in flight / (candidates * throughput weight). The weight is 1 for
    CPUs and cuda_to_cpu_ratio for other devices. If both loads are equal, the other devices win, since they are faster.
    If there is only one group, its least loaded candidate is chosen. Source: NVIDIA Dynamo's mode of this name.
    """
    loads, cpu = np.asarray(in_flight, dtype=np.int64), np.asarray(on_cpu, dtype=np.bool_)
    n_cpus = int(cpu.sum())
    n_others = len(cpu) - n_cpus
    choose_cpus = n_others == 0
    if n_cpus and n_others:
        # Both loads are multiplied by both denominators, which is exact for whole ratios; quotients might be rounded.
        load_cpus = int(loads[cpu].sum()) * n_others * cuda_to_cpu_ratio
        load_others = int(loads[~cpu].sum()) * n_cpus
        choose_cpus = load_cpus < load_others
    group = np.flatnonzero(cpu == choose_cpus)
    return int(group[select_least_loaded(loads[group].tolist(), rng)])


class RoundRobin:
    """Takes turns over the candidates, whose number may differ from call to call."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, n: int) -> int:
        """Choose the next one of n."""
        chosen = self._turn % n
        self._turn += 1
        return chosen


def _any_of_the_lowest(values: Sequence[float], low: float, rng: Rng) -> int:
    """Choose at random one of the indices of `low`, which is the least of the values."""
    if values.count(low) == 1:  # by far the most frequent case; for 64 values this saves 2 us
        return values.index(low)
    ties: list[int] = np.flatnonzero(np.asarray(values) == low).tolist()
    return ties[_uniform(len(ties), rng)]


def _uniform(n: int, rng: Rng) -> int:
    return min(int(rng.random() * n), n - 1)
