"""NVIDIA Dynamo's cost, with its default, its preset for agents, and better weights (docs/quality.md).

What lives here: `DynamoCost`. What must not: this project's own cost of the same family (core.routing.cost), which the
mode `kv` uses.

    cost  = scale * max(0, prefill - cached) + decode + request_weight * requests
    prefill  blocks that earlier requests still have to compute on the rank, and those of this request
    cached   decay * credit * device + host_weight * host + disk_weight * disk, of the rank's leading blocks
    decay    1 / (1 + credit_decay * excess / request), with the blocks that earlier requests have to compute on the
             rank beyond those on the candidate with the fewest of them
    decode   distinct blocks in use on the rank with this request
    requests requests in flight on the rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from streams.core.loads.observations import NO_FORECAST, Forecast, Observation
from streams.core.routing.policies.interface import Policy, PolicyFactory, Prices, Situation
from streams.errors import SettingsError

_NAMES = ("prefill_blocks", "decode_blocks", "requests_as_blocks")


@dataclass(frozen=True, slots=True)
class DynamoWeights:
    """Weights of the cost; the defaults are those of Dynamo 1.6."""

    credit: float = 1.0
    scale: float = 1.0
    request_weight: float = 0.0
    credit_decay: float = 0.0
    host_weight: float = 0.75
    disk_weight: float = 0.25
    pool_weight: float = 0.75

    def with_parameters(self, policy: str, parameters: Mapping[str, float]) -> DynamoWeights:
        """Replace weights by name. Raises SettingsError."""
        names = [field.name for field in fields(self)]
        for name, value in parameters.items():
            if name not in names:
                raise SettingsError(f"policy {policy} has no parameter {name!r}; it has {', '.join(names)}")
            if not 0.0 <= value < math.inf:
                raise SettingsError(f"{name} of policy {policy} is {value}; it must be finite and not negative")
        return replace(self, **parameters)


class DynamoCost:
    """The policy. It learns nothing."""

    reads_index = True
    reads_metrics = False

    def __init__(self, weights: DynamoWeights) -> None:
        self.weights = weights

    def price(self, situation: Situation) -> Prices:
        """See Policy."""
        weights, loads = self.weights, situation.loads
        table, rows, block_size = loads.table, situation.rows, situation.block_size
        active_tokens = table[0].take(rows)
        device = situation.held((1.0, 0.0, 0.0, 0.0), 0.0)
        slower = situation.held((0.0, weights.host_weight, weights.disk_weight, 0.0), weights.pool_weight)
        credit = weights.credit * device
        if weights.credit_decay:
            excess = (active_tokens - active_tokens.min()) / block_size / max(1, situation.request_blocks)
            credit /= 1.0 + weights.credit_decay * excess
        prefill = (active_tokens + situation.n_tokens) / block_size - credit - slower
        prefill = weights.scale * np.maximum(0.0, prefill)
        decode = (table[1].take(rows) + len(situation.sequence) // 8 - situation.active_overlap()).astype(np.float64)
        requests = weights.request_weight * table[2].take(rows)
        return Prices(prefill + decode + requests, device + slower, _NAMES, np.array([prefill, decode, requests]))

    def forecast(self, situation: Situation, prices: Prices, chosen: int) -> Forecast:  # noqa: ARG002
        """See Policy."""
        return NO_FORECAST

    def observe(self, observations: Sequence[Observation], block_size_of: Callable[[str], int]) -> None:
        """See Policy."""


def _factory(name: str, weights: DynamoWeights) -> PolicyFactory:
    def make(parameters: Mapping[str, float]) -> Policy:
        return DynamoCost(weights.with_parameters(name, parameters))

    return make


#: Dynamo's default, its preset for agents, and the weights that served best on a chat trace (docs/quality.md).
PRESETS: Mapping[str, DynamoWeights] = {
    "dynamo-default": DynamoWeights(),
    "dynamo-agentic": DynamoWeights(credit=2.0, scale=4.0, request_weight=64.0),
    "dynamo-tuned": DynamoWeights(credit=2.55, scale=23.9, request_weight=278.0),
}

#: Factories by name.
POLICIES: Mapping[str, PolicyFactory] = {name: _factory(name, weights) for name, weights in PRESETS.items()}
