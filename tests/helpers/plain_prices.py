"""The prices of all candidates in NumPy, with which the kernels are compared: they return the same bits.

What lives here: the formula of mode kv (`price_terms`), its prices (`price_in_numpy`), and those of expected-time
(`price_times_in_numpy`). What must not: kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array
from streams.core.loads.rank_times import RECENT_TOKENS


class Numbers(NamedTuple):
    """What the formula needs in addition to columns, before the popular runs (`popular_runs`).

    decode_per_block: of a step, for each block in use.
    """

    now_ms: float
    prefill_base: float
    prefill_per_token: float
    decode_base: float
    decode_per_block: float
    output_tokens: float
    uncached_weight: float
    recent_prefill_weight: float
    decode_weight: float
    room_share: float


def price_terms(
    request_blocks: int,
    effective_cached_blocks: Float64Array,
    active_prefill_tokens: Int64Array,
    decode_blocks: Int64Array,
    block_size: int,
    overlap_score_weight: float,
    more_credit: float = 0.0,
    request_weight: float = 0.0,
    requests: Int64Array | None = None,
    recent_weights: Float64Array | None = None,
) -> Float64Array:
    """Price a request at n ranks; return float64[5, n]: own, active prefill, decode and recent prefill blocks, and
    the cost.

    decode_blocks: distinct active blocks of each rank, including this request's. more_credit: how much more than its
    own prefill a cached block takes off a rank's prefill load, which does not fall below 0. request_weight: in blocks,
    for each of the requests in flight. recent_weights: of own prefill, by what each rank computed lately.
    """
    own = np.maximum(0.0, request_blocks - effective_cached_blocks)
    active = active_prefill_tokens / block_size
    prefill = own + active
    if more_credit:
        prefill = np.maximum(0.0, prefill - more_credit * effective_cached_blocks)
    recent = np.zeros(len(own)) if recent_weights is None else recent_weights * own
    cost = overlap_score_weight * (prefill + recent) + decode_blocks
    if requests is not None:
        cost = cost + request_weight * requests
    return np.array([own, active, decode_blocks, recent, cost])


def _by_load(recent: Int64Array, requests: Int64Array) -> float:
    """What the weight of recent prefill is multiplied by."""
    idle = len(recent) / int(len(recent) + requests.sum())
    return float(idle * idle / max(1, recent.max()))


def price_in_numpy(
    table: Int64Array,
    times: Int64Array,
    rows: Int64Array,
    shared: Int64Array,
    effective: Float64Array,
    preference: Int64Array,
    request_blocks: int,
    full_blocks: int,
    block_size: int,
    weight: float,
    more_credit: float,
    request_weight: float,
    recent_weight: float,
    tracked: bool,
    terms: Float64Array,
) -> int:
    """The same as kernels.price.price_ranks."""
    tokens, decode = table[0].take(rows), table[1].take(rows) + full_blocks - shared.take(rows)
    if not tracked:
        decode = np.zeros_like(decode)
    requests, recent = table[2].take(rows), times[RECENT_TOKENS].take(rows)
    recent_weights = recent_weight * _by_load(recent, requests) * recent
    terms[:] = price_terms(
        request_blocks,
        effective,
        tokens,
        decode,
        block_size,
        weight,
        more_credit,
        request_weight,
        requests,
        recent_weights,
    )
    cost = terms[-1]
    best = cost == cost.min()
    if preference.size:
        best &= preference == preference[best].max()
    return int(best.argmax()) << 32 | int(np.count_nonzero(best))


def price_times_in_numpy(
    table: Int64Array,
    times: Int64Array,
    rows: Int64Array,
    shared: Int64Array,
    cached: Float64Array,
    load_ms: Float64Array,
    capacity: Int64Array,
    n_tokens: int,
    full_blocks: int,
    block_size: int,
    numbers: Float64Array,
    terms: Float64Array,
) -> int:
    """The same as kernels.price_times.price_times, with the same bits."""
    n_numbers = len(Numbers._fields)
    given = Numbers(*numbers[:n_numbers].tolist())
    _, active_blocks, n_requests, output_blocks = table.take(rows, axis=1)
    waiting_us, n_waiting, earliest_ms, prefilled_ms, charged_us, waiting_tokens, _, recent = times.take(rows, axis=1)
    used = shared.take(rows)
    blocks = used.astype(np.float64)
    if cached.size:
        blocks = np.maximum(blocks, cached)
    uncached = np.maximum(1, n_tokens - (blocks * block_size).astype(np.int64)).astype(np.float64)
    own = given.prefill_base + given.prefill_per_token * uncached
    load = load_ms if load_ms.size else np.zeros(len(rows))
    elapsed = np.maximum(0.0, given.now_ms - np.maximum(earliest_ms, prefilled_ms))
    backlog = charged_us / 1000.0 + given.prefill_per_token * np.maximum(0, table[0].take(rows) - waiting_tokens)
    backlog += np.where(n_waiting > 0, np.maximum(0.0, waiting_us / 1000.0 - elapsed), 0.0)
    active, new = active_blocks.astype(np.float64), (full_blocks - used).astype(np.float64)
    in_use, wait = active + new, np.zeros(len(rows))
    if capacity.size:
        growth = np.maximum(0.0, n_requests * given.output_tokens * 0.5 / block_size - output_blocks)
        expected = active + growth
        excess = expected + new - given.room_share * capacity
        full_step = given.decode_base + given.decode_per_block * capacity
        wait = np.where(
            (capacity > 0) & (excess > 0.0),
            excess / np.maximum(1.0, expected) * given.output_tokens * full_step,
            0.0,
        )
        in_use = np.where(capacity > 0, np.minimum(in_use, capacity), in_use)
    n_decoding = np.maximum(0, n_requests - n_waiting)
    uncached_ms = given.uncached_weight * given.prefill_per_token * uncached
    per_token = (1.0 + given.uncached_weight) * given.prefill_per_token
    recent_ms = given.recent_prefill_weight * (_by_load(recent, n_requests) * per_token) * recent * uncached
    spared, start = np.zeros(len(rows)), 0.0
    for end, share in numbers[n_numbers:].reshape(-1, 2).tolist():
        spared += np.maximum(0.0, end - np.maximum(start, blocks)) * block_size * share
        start = end
    popular_ms = 0.0 - (1.0 + given.uncached_weight) * given.prefill_per_token * np.minimum(spared, uncached)
    slowed_ms = given.decode_weight * n_decoding * own
    decode_ms = given.decode_weight * given.output_tokens * (given.decode_base + given.decode_per_block * in_use)
    cost = backlog + wait + own + load + uncached_ms + recent_ms + popular_ms + slowed_ms + decode_ms
    further = (uncached_ms, recent_ms, popular_ms, slowed_ms, decode_ms)
    terms[:] = (blocks, uncached, backlog, wait, own, load, *further, cost)
    best = cost == cost.min()
    return int(best.argmax()) << 32 | int(np.count_nonzero(best))
