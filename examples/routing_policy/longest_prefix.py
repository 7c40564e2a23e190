"""A routing policy of your own: the rank that holds the most of the prompt, unless it has many more requests.

kvstreams finds it by the entry point in pyproject.toml. The cost of a rank is the number of blocks that it does not
hold, plus its requests in flight times a weight; the lowest cost wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from streams.core.loads.observations import NO_FORECAST, Forecast, Observation
from streams.core.routing.policies.interface import Prices, Situation
from streams.errors import SettingsError


class LongestPrefix:
    """One request is worth as much as blocks_per_request blocks of the prompt."""

    reads_index = True
    reads_metrics = False

    def __init__(self, blocks_per_request: float = 20.0) -> None:
        self._blocks_per_request = blocks_per_request

    def price(self, situation: Situation) -> Prices:
        """Price a request at each rank."""
        cached = situation.held((1.0, 1.0, 1.0, 0.0), 1.0)  # blocks on the device, in host memory, on disk; in a pool
        missing = situation.request_blocks - cached
        requests = self._blocks_per_request * situation.loads.table[2].take(situation.rows)
        return Prices(missing + requests, cached, ("missing_blocks", "requests_blocks"), np.array([missing, requests]))

    def forecast(self, situation: Situation, prices: Prices, chosen: int) -> Forecast:  # noqa: ARG002
        """Expect nothing: bookings count until they are freed."""
        return NO_FORECAST

    def observe(self, observations: Sequence[Observation], block_size_of: Callable[[str], int]) -> None:
        """Learn nothing."""


def make(parameters: Mapping[str, float]) -> LongestPrefix:
    """Make the policy from the parameters in its name, as in `longest-prefix:blocks_per_request=10`."""
    try:
        return LongestPrefix(**parameters)
    except TypeError as exc:
        raise SettingsError(f"longest-prefix: {exc}") from exc
