"""Policies of other projects, for comparison: LMetric's product, and llm-d's filter by affinity (docs/quality.md).

What lives here: their formulas. What must not: Dynamo's cost (core.routing.policies.dynamo). The distribution names
them as entry points, so that a live router has them as it has those of other packages.

    lmetric         (tokens that wait for prefill there + uncached tokens of the request) * (requests there + 1)
    llm-d-affinity  the candidates that hold at least `threshold` of the prompt, unless the best of them has
                    `penalty_tokens` more to compute than the best of all; of those that are left, the one with the
                    fewest tokens to compute before this request's answer begins
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from streams import policy_plugins
from streams.core.ids import Float64Array
from streams.core.loads.observations import NO_FORECAST, Forecast, Observation
from streams.core.routing.policies.interface import Policy, PolicyFactory, Prices, Situation
from streams.errors import SettingsError

#: Every copy of a block counts as cached, whatever its tier.
_ANY_TIER = (1.0, 1.0, 1.0, 0.0)

#: What a filtered candidate costs in addition; it is chosen only if all are filtered. Finite, so that JSON has it.
_FILTERED = 1e12


class _Unlearning:
    reads_index = True
    reads_metrics = False

    def forecast(self, situation: Situation, prices: Prices, chosen: int) -> Forecast:  # noqa: ARG002
        """See Policy."""
        return NO_FORECAST

    def observe(self, observations: Sequence[Observation], block_size_of: Callable[[str], int]) -> None:
        """See Policy."""


def _tokens(situation: Situation) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Cached blocks, uncached tokens, and tokens to compute in all, of each candidate."""
    cached = situation.held(_ANY_TIER, 1.0)
    uncached = np.maximum(1.0, situation.n_tokens - cached * situation.block_size)
    return cached, uncached, uncached + situation.loads.table[0].take(situation.rows)


class LMetric(_Unlearning):
    """LMetric, "Simple is Better", 2026: no weights."""

    def price(self, situation: Situation) -> Prices:
        """See Policy."""
        cached, _, tokens = _tokens(situation)
        requests = situation.loads.table[2].take(situation.rows) + 1.0
        return Prices(tokens * requests, cached, ("prefill_tokens", "requests"), np.array([tokens, requests]))


class LlmdAffinity(_Unlearning):
    """llm-d's prefix-cache-affinity filter, without its exploration at random, in front of its queue scorer."""

    def __init__(self, threshold: float, penalty_tokens: float) -> None:
        self._threshold = threshold
        self._penalty_tokens = penalty_tokens

    def price(self, situation: Situation) -> Prices:
        """See Policy."""
        cached, _, tokens = _tokens(situation)
        sticky = cached * situation.block_size >= self._threshold * situation.n_tokens
        filtered = np.zeros(len(tokens))
        if sticky.any() and tokens[sticky].min() <= tokens.min() + self._penalty_tokens:
            filtered = np.where(sticky, 0.0, _FILTERED)
        return Prices(tokens + filtered, cached, ("prefill_tokens", "filtered"), np.array([tokens, filtered]))


#: Parameters of `llm-d-affinity`: its own threshold; 5,000 ms of its predicted TTFT are about 300,000 tokens here.
_AFFINITY: Mapping[str, float] = MappingProxyType({"threshold": 0.8, "penalty_tokens": 300_000.0})


def lmetric(parameters: Mapping[str, float]) -> LMetric:
    """Make LMetric's policy, which has no parameters. Raises SettingsError."""
    if parameters:
        raise SettingsError(f"policy lmetric has no parameter {next(iter(parameters))!r}")
    return LMetric()


def llmd_affinity(parameters: Mapping[str, float]) -> LlmdAffinity:
    """Make llm-d's policy. Raises SettingsError."""
    for name, value in parameters.items():
        if name not in _AFFINITY:
            raise SettingsError(f"policy llm-d-affinity has no parameter {name!r}; it has {', '.join(_AFFINITY)}")
        if not 0.0 <= value < math.inf:
            raise SettingsError(f"{name} of policy llm-d-affinity is {value}; it must be finite and not negative")
    return LlmdAffinity(**{**_AFFINITY, **parameters})


#: Factories by name.
POLICIES: Mapping[str, PolicyFactory] = MappingProxyType({"lmetric": lmetric, "llm-d-affinity": llmd_affinity})


def policy_names() -> list[str]:
    """The names of all policies that the laboratory has, sorted."""
    return sorted({*POLICIES, *policy_plugins.policy_names()})


def find_policy(name: str, parameters: Mapping[str, float] | None = None) -> Policy:
    """Make the policy of this name; raises SettingsError. One of this module is found without being installed."""
    if name in POLICIES:
        return POLICIES[name](parameters or {})
    return policy_plugins.find_policy(name, parameters)
