"""Policy `expected-time`: the cost of a rank is a time in milliseconds (docs/quality.md).

What lives here: the formula in NumPy, its parameters, and the policy. What must not: how fast engines are (timings),
the backlog of a rank (core.loads.rank_times), and the kernel with the same formula (core.routing.kernels.price_times).

    cost = backlog + wait for KV room + prefill + load + uncached_weight * slope * uncached tokens
         + recent_prefill_weight * (1 + uncached_weight) * slope * uncached tokens * recent
         - (1 + uncached_weight) * slope * popular tokens
         + decode_weight * (requests that decode there * prefill + length of output * time of a step there)

The first four are what this request waits for. The fifth stands for the blocks that its uncached tokens evict, which
other requests must compute again. The sixth is greater where these blocks are newer: `recent` is how many tokens the
rank was given to compute lately, relative to the candidate with the most of them (core.loads.rank_times). A prefix that
many running requests share pays the prefill and the fifth back, as a further copy serves those that follow: of such
uncached tokens, a part is popular (`popular_runs`). The last one is what the others lose: their steps take longer while
the rank prefills, and this request's own steps are longer where more tokens are in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from streams.core.ids import Float64Array, Int64Array, Tier
from streams.core.loads.observations import Forecast, Observation
from streams.core.routing.cost import RECENT_PREFILL_WEIGHT
from streams.core.routing.kernels.price_times import price_times
from streams.core.routing.policies.expected_time_defaults import (
    DECODE_WEIGHT,
    DISK_GB_PER_S,
    EXTERNAL_GB_PER_S,
    HOST_GB_PER_S,
    KV_BYTES_PER_TOKEN,
    POOL_GB_PER_S,
    UNCACHED_WEIGHT,
)
from streams.core.routing.policies.interface import NO_CLASSES, Prices, Situation
from streams.core.routing.policies.timings import DECODE_DEFAULT, PREFILL_DEFAULT, Line, Timings
from streams.errors import SettingsError

#: The share of a rank's blocks up to which requests do not wait for room.
ROOM_SHARE = 0.95

#: What `explain` shows, in the order of the terms.
NAMES = (
    "cached_blocks",
    "uncached_tokens",
    "backlog_ms",
    "kv_room_ms",
    "prefill_ms",
    "load_ms",
    "uncached_ms",
    "recent_prefill_ms",
    "popular_ms",
    "slowed_decodes_ms",
    "own_decode_ms",
)

_NO_INTS: Int64Array = np.empty(0, dtype=np.int64)
_NO_FLOATS: Float64Array = np.empty(0)


@dataclass(frozen=True, slots=True)
class ExpectedTimeParameters:
    """What a user may set.

    uncached_weight: how much a token that must be computed costs in addition to its own time. recent_prefill_weight: as
    in RoutePolicy. decode_weight: how much a
    millisecond of decoding counts against one of waiting for the first token; 0.003 favours the first token, 0.03
    throughput. room_share: of a rank's blocks; above it, a request is expected to wait. kv_bytes_per_token: size of the
    cache. host_gb_per_s, disk_gb_per_s, external_gb_per_s, pool_gb_per_s: at which a rank loads cached blocks; 0 does
    not credit blocks in that memory. pool_gb_per_s is for pools whose latency class has no speed of its own.
    prefill_base_ms, prefill_ms_per_token, decode_base_ms, decode_ms_per_token: the timing lines until observations
    replace them.
    """

    uncached_weight: float = UNCACHED_WEIGHT
    recent_prefill_weight: float = RECENT_PREFILL_WEIGHT
    decode_weight: float = DECODE_WEIGHT
    room_share: float = ROOM_SHARE
    kv_bytes_per_token: float = KV_BYTES_PER_TOKEN
    host_gb_per_s: float = HOST_GB_PER_S
    disk_gb_per_s: float = DISK_GB_PER_S
    external_gb_per_s: float = EXTERNAL_GB_PER_S
    pool_gb_per_s: float = POOL_GB_PER_S
    prefill_base_ms: float = PREFILL_DEFAULT.base
    prefill_ms_per_token: float = PREFILL_DEFAULT.slope
    decode_base_ms: float = DECODE_DEFAULT.base
    decode_ms_per_token: float = DECODE_DEFAULT.slope


def popular_runs(users: Sequence[tuple[int, int, int]]) -> list[float]:
    """Turn the users of a prompt's leading blocks into the last numbers that the kernel takes.

    users: as in Situation. Returns, one after the other, the blocks up to the end of each run, and the share of its
    tokens that this request is not charged for: if n requests use the run on k ranks, a rank that computes it as well
    will serve about n / (k + 1) of such requests besides this one, and all of them share the charge.
    """
    runs: list[float] = []
    for end, n_requests, n_ranks in users:
        runs += (end, n_requests / (n_requests + n_ranks + 1.0))
    return runs


class ExpectedTime:
    """The policy. Its timings belong to one router; all other state is in the loads."""

    reads_index = True
    reads_metrics = False

    def __init__(
        self,
        parameters: ExpectedTimeParameters | None = None,
        pool_class_gb_per_s: Mapping[str, float] = NO_CLASSES,
    ) -> None:
        """pool_class_gb_per_s: of pools by latency class. It must be what the index of pooled blocks was given."""
        given = self.parameters = parameters or ExpectedTimeParameters()
        self.timings = Timings(
            Line(given.prefill_base_ms, given.prefill_ms_per_token),
            Line(given.decode_base_ms, given.decode_ms_per_token),
        )
        speeds = (given.host_gb_per_s, given.disk_gb_per_s, given.external_gb_per_s, given.pool_gb_per_s)
        # A block of one token, in ms, by tier and for pools; a device copy takes no time.
        *tiers, pool = (_load_ms(given, speed) for speed in speeds)
        self._load_ms, self._pool_load_ms = (0.0, *tiers), pool
        self._class_load_ms = {name: _load_ms(given, speed) for name, speed in pool_class_gb_per_s.items()}
        *credited, pool = (float(speed > 0.0) for speed in speeds)
        self._credits, self._pool_credit = (1.0, *credited), pool
        self._class_credits = {name: float(speed > 0.0) for name, speed in pool_class_gb_per_s.items()}

    @property
    def tier_credits(self) -> tuple[float, ...]:
        """1 for each tier whose blocks count as cached, 0 for the others."""
        return self._credits

    def price(self, situation: Situation) -> Prices:
        """Price a request at each candidate."""
        given, loads, timings = self.parameters, situation.loads, self.timings.of(situation.model)
        cached = situation.held(self._credits, self._pool_credit, self._class_credits)
        shared = situation.shared
        load_ms = _NO_FLOATS
        if not situation.on_device:
            load_ms = self._time_to_load(situation, cached, shared.take(situation.rows))
        prefill, decode, block_size = timings.prefill, timings.decode, situation.block_size
        numbers = np.array(
            (
                situation.now_ms,
                prefill.base,
                prefill.slope,
                decode.base,
                decode.slope * block_size,
                float(situation.expected_output_tokens or timings.output_tokens),
                given.uncached_weight,
                given.recent_prefill_weight,
                given.decode_weight,
                given.room_share,
                *popular_runs(situation.users),
            )
        )
        terms = np.empty((len(NAMES) + 1, len(situation.rows)))
        lowest = price_times(
            loads.table,
            loads.times.table,
            situation.rows,
            shared,
            cached,
            load_ms,
            _NO_INTS if situation.capacity_blocks is None else situation.capacity_blocks,
            situation.n_tokens,
            len(situation.sequence) // 8,
            block_size,
            numbers,
            terms,
        )
        best = (lowest >> 32, lowest & 0xFFFFFFFF)
        if situation.labelled is not None:
            terms[-1] -= prefill.slope * block_size * situation.labelled
            return Prices(terms[-1], terms[0], NAMES, terms[:-1])
        return Prices(terms[-1], terms[0], NAMES, terms[:-1], best)

    def forecast(self, situation: Situation, prices: Prices, chosen: int) -> Forecast:
        """Return how long the chosen rank will take, by its own speed."""
        backlog_ms, room_ms, own_ms, load_ms = prices.terms[2:6, chosen].tolist()
        timings = self.timings.of(situation.model)
        output = float(situation.expected_output_tokens or timings.output_tokens)
        in_use = situation.loads.table.item(1, situation.rows.item(chosen)) + situation.request_blocks
        return self.timings.forecast(
            situation.ranks[chosen],
            wait_ms=backlog_ms + room_ms,
            own_ms=own_ms,
            load_ms=load_ms,
            decode_ms=output * timings.decode.at(in_use * situation.block_size),
        )

    def observe(self, observations: Sequence[Observation], block_size_of: Callable[[str], int]) -> None:
        """Learn from what happened since the last call."""
        self.timings.observe(observations, block_size_of)

    def _time_to_load(self, situation: Situation, cached: Float64Array, used: Int64Array) -> Float64Array:
        """How long each candidate loads blocks from other memory: float64[n], in ms.

        Blocks that running requests use are on the device already. Those on other memory are the last ones of a prefix,
        as engines evict the end of a prefix first.
        """
        block_size = situation.block_size
        on_device = situation.held((1.0,) + (0.0,) * (len(self._credits) - 1), 0.0)
        load_ms = block_size * situation.held(self._load_ms, self._pool_load_ms, self._class_load_ms)
        left = np.maximum(0.0, cached - np.maximum(used, on_device)) / np.maximum(1.0, cached - on_device)
        times: Float64Array = load_ms * left
        return times


def _load_ms(given: ExpectedTimeParameters, gb_per_s: float) -> float:
    """Return the time to load a token's blocks; 0 for memory that is not credited."""
    return given.kv_bytes_per_token / (1e6 * gb_per_s) if gb_per_s else 0.0


def expected_time(parameters: Mapping[str, float]) -> ExpectedTime:
    """Make the policy from parameters by name; raises SettingsError."""
    known = {field.name for field in fields(ExpectedTimeParameters)}
    for name, value in parameters.items():
        if name not in known:
            raise SettingsError(f"policy expected-time has no parameter {name!r}; it has {', '.join(sorted(known))}")
        if not (math.isfinite(value) and value >= 0.0):
            raise SettingsError(f"parameter {name} of policy expected-time is {value}, but must be 0 or greater")
    return ExpectedTime(ExpectedTimeParameters(**parameters))


assert len(Tier) == 4  # the bandwidths above are those of device, host, disk and external memory
