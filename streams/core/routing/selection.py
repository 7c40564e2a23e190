"""Choosing one rank of several, given what each costs. A selector never books and never mutates anything but its own
turn counter or generator."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

#: Throughput of a worker on another device in those of one on a CPU, NVIDIA Dynamo's default.
CUDA_TO_CPU_RATIO = 8.0


class RouterMode(enum.StrEnum):
    """How a router chooses. The last two are older cost functions, kept by name (core.policies)."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    DIRECT = "direct"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    DEVICE_AWARE_WEIGHTED = "device-aware-weighted"
    HIT_USAGE_WAITING = "hit-usage-waiting"
    LOAD_DEVIATION = "load-deviation"


class Rng(Protocol):
    """The one thing asked of a generator: uniform floats in [0, 1)."""

    def random(self) -> float:
        """Give the next float."""


def select_by_cost(costs: Sequence[float], temperature: float, rng: Rng) -> int:
    """Choose an index of `costs`; lower cost wins.

    temperature 0 takes the minimum, exact ties uniformly; above 0 samples softmax of -cost / ((max - min) * T), uniform
    where all are equal. costs must not be empty. Source: docs/architecture.md, Cost.
    """
    low = min(costs)
    scale = (max(costs) - low) * temperature if temperature else 0.0
    if not scale > 0.0:  # also where the product of two small numbers is none, or nothing times infinity no number
        return _any_of_the_lowest(costs, low, rng)
    weights = [math.exp((low - cost) / scale) for cost in costs]
    point = rng.random() * math.fsum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0.0:
            return index
    return len(weights) - 1


def select_lowest(costs: npt.NDArray[np.float64], first: int, n_lowest: int, rng: Rng) -> int:
    """As `select_by_cost` at temperature 0, where it is known already which index is the first of the cheapest, and how
    many cost as much: draws the same, and chooses the same."""
    if n_lowest == 1:
        return first
    ties = np.flatnonzero(costs == costs[first])
    return int(ties[_uniform(len(ties), rng)])


def select_random(n: int, rng: Rng) -> int:
    """Choose one of n uniformly."""
    return _uniform(n, rng)


def select_least_loaded(in_flight: Sequence[int], rng: Rng) -> int:
    """Choose one of those with the fewest requests in flight, uniformly; in_flight must not be empty."""
    return _any_of_the_lowest(in_flight, min(in_flight), rng)


def select_power_of_two(in_flight: Sequence[int], rng: Rng) -> int:
    """Draw two different ones uniformly and choose the one with fewer requests in flight; the first drawn where they
    are equal, and the only one where there is one."""
    if len(in_flight) == 1:
        return 0
    first = _uniform(len(in_flight), rng)
    second = _uniform(len(in_flight) - 1, rng)
    second += second >= first
    return second if in_flight[second] < in_flight[first] else first


def select_device_aware(in_flight: Sequence[int], on_cpu: Sequence[bool], cuda_to_cpu_ratio: float, rng: Rng) -> int:
    """Choose between CPUs and other devices by normalised load, then the least loaded within.

    Normalised load of a group: requests in flight / (candidates * throughput weight); the weight is 1 for CPUs and
    cuda_to_cpu_ratio for the others, which win where both are equal since they are faster. One group alone is
    least-loaded. Source: NVIDIA Dynamo's mode of this name.
    """
    cpus = [index for index, cpu in enumerate(on_cpu) if cpu]
    others = [index for index, cpu in enumerate(on_cpu) if not cpu]
    group = others or cpus
    if cpus and others:
        # Both loads times both denominators: exact for whole ratios, where quotients of equals might differ.
        load_cpus = sum(in_flight[index] for index in cpus) * len(others) * cuda_to_cpu_ratio
        load_others = sum(in_flight[index] for index in others) * len(cpus)
        group = cpus if load_cpus < load_others else others
    return group[select_least_loaded([in_flight[index] for index in group], rng)]


class RoundRobin:
    """Takes turns over however many candidates there are at the time."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, n: int) -> int:
        """Choose the next of n."""
        chosen = self._turn % n
        self._turn += 1
        return chosen


def _any_of_the_lowest(values: Sequence[float], low: float, rng: Rng) -> int:
    """Choose uniformly an index where `low`, the least of the values, stands."""
    if values.count(low) == 1:  # by far the most, and 64 take 2 us less
        return values.index(low)
    ties = [index for index, value in enumerate(values) if value == low]
    return ties[_uniform(len(ties), rng)]


def _uniform(n: int, rng: Rng) -> int:
    return min(int(rng.random() * n), n - 1)
