"""Choosing one rank of several, given what each costs. A selector never books and never mutates anything but its own
turn counter or generator."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Protocol


class RouterMode(enum.StrEnum):
    """How a router chooses."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


class Rng(Protocol):
    """The one thing asked of a generator: uniform floats in [0, 1)."""

    def random(self) -> float:
        """Give the next float."""


def select_by_cost(costs: Sequence[float], temperature: float, rng: Rng) -> int:
    """Choose an index of `costs`; lower cost wins.

    temperature 0 takes the minimum, exact ties uniformly; above 0 samples softmax of -cost / ((max - min) * T), uniform
    where all are equal. costs must not be empty. Source: docs/architecture.md, Cost.
    """
    low, high = min(costs), max(costs)
    scale = (high - low) * temperature
    if not scale > 0.0:  # also where the product of two small numbers is none, or nothing times infinity no number
        ties = [index for index, cost in enumerate(costs) if cost == low]
        return ties[_uniform(len(ties), rng)]
    weights = [math.exp((low - cost) / scale) for cost in costs]
    point = rng.random() * math.fsum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0.0:
            return index
    return len(weights) - 1


def select_random(n: int, rng: Rng) -> int:
    """Choose one of n uniformly."""
    return _uniform(n, rng)


class RoundRobin:
    """Takes turns over however many candidates there are at the time."""

    def __init__(self) -> None:
        self._turn = 0

    def select(self, n: int) -> int:
        """Choose the next of n."""
        chosen = self._turn % n
        self._turn += 1
        return chosen


def _uniform(n: int, rng: Rng) -> int:
    return min(int(rng.random() * n), n - 1)
