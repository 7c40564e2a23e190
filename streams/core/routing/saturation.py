"""How much of a worker pool is needed: its saturation, its backlog and the replicas that it wants (docs/scaling.md).

What lives here: what is read of a pool at one moment (`PoolReading`), and the signals that follow from several of them
(`PoolMeter`). What must not: clocks (time is an argument), which workers a pool has, and what is done with the
signals. The state belongs to one router.

A worker pool is all workers of one model and role to which requests may go. Its saturation is what it is asked to do,
divided by what it can do: 0 while it is idle, 1 when it needs all of its capacity, and above 1 when requests wait
longer and longer. It is the greatest of three shares:

    compute = (prompts that arrive + backlog / DRAIN_MS) / ranks
    blocks  = blocks of the KV cache in use / those that may be in use
    slots   = requests in flight / those that engines run at a time

Prompts that arrive are counted by the time that they take: by the forecasts of their bookings, or by their tokens.
Both may be too long, if engines are faster than a policy or a setting says. But a rank that had no prompt to compute
for a part of the time did not need that part. So prompts count as not much more than the time for which ranks had any,
plus the growth of their backlogs.

All of this follows from the log of bookings, as means over the last readings, whose weights fade. So routers that read
the same log have about the same signals, although they take their readings at different moments.

State: means over the last minute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.loads.bookings import ActiveLoads
from streams.core.loads.load_table import DECODE, PREFILL, REQUESTS
from streams.core.loads.rank_times import COMPUTED_US, RECENT_TOKENS, WAITING_US
from streams.core.routing.busy import BlocksInUse
from streams.core.routing.policies.expected_time import ROOM_SHARE

#: Interval of the readings. The means over them do not depend on it, down to about the time of one prompt.
READ_EVERY_S = 2.0

#: A reading weighs 1/e of a new one after this time. Shorter, and the signals follow single long prompts; longer, and
#: engines are started too late when load doubles.
WINDOW_MS = 30_000.0

#: The time within which a backlog should be computed in addition to what arrives. Shorter, and a backlog that grows
#: while an engine starts asks for several more; longer, and it hardly matters.
DRAIN_MS = 60_000.0

#: Prompts count as no more than this many times the time for which ranks had any. That time is a sample, which varies
#: from router to router by a tenth and more. What was booked does not, so it should count wherever it is about right.
_BUSY_FACTOR = 1.25

#: The least time of which a meter has to know something, so that a router that starts does not show an idle pool.
_SPAN_MS_MIN = 8_000.0

#: Readings that are further apart say nothing about the time between them, such as after a pause of the process.
_GAP_MS_MAX = 60_000.0

_NO_BLOCKS = BlocksInUse(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


class Queued(NamedTuple):
    """Requests that wait in routers for a rank of a pool, the tokens that these must compute, and their blocks."""

    requests: float = 0.0
    tokens: float = 0.0
    blocks: float = 0.0

    def plus(self, other: Queued) -> Queued:
        """The sum of both."""
        return Queued(self.requests + other.requests, self.tokens + other.tokens, self.blocks + other.blocks)

    def times(self, factor: float) -> Queued:
        """So many times as much."""
        return Queued(self.requests * factor, self.tokens * factor, self.blocks * factor)


NOTHING_QUEUED = Queued()


class _Used(NamedTuple):
    """How much of a capacity is used or waited for, and the capacity; 0 if it is not known."""

    used: float
    capacity: float


@dataclass(frozen=True, slots=True)
class PoolReading:
    """What a router has of a pool at one moment.

    at_ms: on a clock that does not go backwards. booked_us: the forecasts of what was booked on each rank so far,
    int64[n]; only differences between readings count. booked_tokens: the same in tokens, halved with each period.
    backlog_ms: float64[n]. busy: how many ranks have prompts to compute. queued_ms: time to compute what waits in
    routers. blocks, slots: of the ranks whose capacity is known.
    """

    at_ms: float
    ranks: Sequence[RankId]
    booked_us: Int64Array
    booked_tokens: Int64Array
    period: int
    ms_per_token: float
    backlog_ms: Float64Array
    busy: int
    queued_ms: float
    blocks: _Used
    slots: _Used


def read_pool(
    at_ms: float,
    ranks: Sequence[RankId],
    loads: ActiveLoads,
    ms_per_token: float,
    *,
    blocks: BlocksInUse = _NO_BLOCKS,
    slots: Int64Array | None = None,
    running: Int64Array | None = None,
    queued: Queued = NOTHING_QUEUED,
) -> PoolReading:
    """Read a pool's ranks, of which there is at least one.

    ms_per_token: for prompts that were booked without a forecast. blocks: as the registry and engines report them.
    slots: int64[n], requests that each rank runs at a time, 0 where it is not known. running: int64[n], requests that
    engines report as running or waiting.
    """
    rows = loads.rows_of(ranks)
    load, times = loads.table.take(rows, axis=1), loads.times.table.take(rows, axis=1)
    unknown = np.zeros(len(ranks), dtype=np.int64)
    total, active = blocks if len(blocks.total) else (unknown, unknown)
    in_use = np.maximum(load[DECODE], active)
    in_flight = load[REQUESTS] if running is None else np.maximum(load[REQUESTS], running)
    return PoolReading(
        at_ms=at_ms,
        ranks=ranks,
        booked_us=times[WAITING_US] + times[COMPUTED_US],
        booked_tokens=times[RECENT_TOKENS],
        period=loads.times.period,
        ms_per_token=ms_per_token,
        backlog_ms=loads.backlog_ms(rows, loads.times.now_ms, ms_per_token),
        busy=int(np.count_nonzero(load[PREFILL])),
        queued_ms=queued.tokens * ms_per_token,
        blocks=_used(in_use, total, ROOM_SHARE, queued.blocks),
        slots=_used(in_flight, unknown if slots is None else slots, 1.0, queued.requests),
    )


def _used(used: Int64Array, total: Int64Array, usable: float, queued: float) -> _Used:
    """What is used of a capacity. usable: the part of the total that may be. queued: what waits for all ranks."""
    known = total > 0
    if not known.any():
        return _Used(0.0, 0.0)
    return _Used(float(used[known].sum() + queued * known.mean()), float(usable * total[known].sum()))


class PoolSignals(NamedTuple):
    """The signals of a pool. compute, blocks, slots: the shares; None where the capacity is not known.

    backlog_ms: how long a request that arrives now waits until its prompt begins.
    """

    compute: float
    blocks: float | None
    slots: float | None
    backlog_ms: float

    @property
    def saturation(self) -> float:
        """The greatest of the shares."""
        return max(self.compute, self.blocks or 0.0, self.slots or 0.0)

    def replicas_wanted(self, replicas: int, target: float) -> float:
        """How many replicas would have a saturation of `target`, at least 1; the replicas there are have `self`'s.

        It is no whole number, so that what rounds it up can ignore small changes before it rounds.
        """
        return max(1.0, replicas * self.saturation / target)


#: What a meter adds up, each with the same fading weights: the time between readings; what was booked in it, by
#: forecasts and by tokens; what came to wait in routers; how long ranks had prompts to compute; how much their backlogs
#: and the queues grew; and how many blocks and slots were used, times the time.
SPAN, BOOKED, BOOKED_BY_TOKENS, QUEUED, BUSY, GROWN, BLOCKS, SLOTS = range(8)


class PoolMeter:
    """The signals of one pool, from readings every few seconds."""

    __slots__ = ("_last", "_sums")

    def __init__(self) -> None:
        self._last: PoolReading | None = None
        self._sums: Float64Array = np.zeros(8)  # in ms

    def note(self, reading: PoolReading) -> PoolSignals | None:
        """Take in a reading, and return the signals at its time; None while the time before it is too short."""
        last, self._last = self._last, reading
        if last is not None and 0.0 < reading.at_ms - last.at_ms <= _GAP_MS_MAX:
            keep = math.exp((last.at_ms - reading.at_ms) / WINDOW_MS)
            self._sums = self._sums * keep + _since(last, reading)
        sums, n_ranks = self._sums, len(reading.ranks)
        if sums[SPAN] < _SPAN_MS_MIN:
            return None
        booked_ms = max(sums[BOOKED], sums[BOOKED_BY_TOKENS]) + sums[QUEUED]
        arriving = max(0.0, min(booked_ms, _BUSY_FACTOR * (sums[BUSY] + sums[GROWN]))) / sums[SPAN]
        waiting_ms = float(reading.backlog_ms.sum()) + reading.queued_ms
        return PoolSignals(
            compute=float(arriving + waiting_ms / DRAIN_MS) / n_ranks,
            blocks=_share(sums[BLOCKS] / sums[SPAN], reading.blocks),
            slots=_share(sums[SLOTS] / sums[SPAN], reading.slots),
            # Until what waits in routers is sent, and then for the first rank that is free.
            backlog_ms=float(reading.backlog_ms.min()) + reading.queued_ms / n_ranks,
        )


def _share(used: float, now: _Used) -> float | None:
    """The share of the present capacity that was used; None if it is not known."""
    return float(used / now.capacity) if now.capacity else None


def _since(last: PoolReading, reading: PoolReading) -> Float64Array:
    """What a meter adds up, between two readings: float64[8], in ms."""
    took_ms = reading.at_ms - last.at_ms
    booked_us, booked_tokens = _booked_since(last, reading)
    queued_ms = reading.queued_ms - last.queued_ms
    grown_ms = float(reading.backlog_ms.sum() - last.backlog_ms.sum()) + queued_ms
    return np.array(
        (
            took_ms,
            booked_us / 1000.0,
            booked_tokens * reading.ms_per_token,
            queued_ms,
            reading.busy * took_ms,
            grown_ms,
            reading.blocks.used * took_ms,
            reading.slots.used * took_ms,
        )
    )


def _booked_since(last: PoolReading, reading: PoolReading) -> tuple[int, int]:
    """What was booked between two readings on the ranks that both have: in us by forecasts, and in tokens.

    A rank has less than before if bookings aged without a report, or if it has been given another row.
    """
    before = np.arange(len(last.ranks))
    now = before
    if reading.ranks is not last.ranks and list(reading.ranks) != list(last.ranks):
        position = {rank: index for index, rank in enumerate(last.ranks)}
        both = [(position[rank], index) for index, rank in enumerate(reading.ranks) if rank in position]
        before, now = (np.array(column, dtype=np.int64) for column in (zip(*both, strict=True) if both else ((), ())))
    halvings = min(63, max(0, reading.period - last.period))
    us = np.maximum(0, reading.booked_us[now] - last.booked_us[before])
    tokens = np.maximum(0, reading.booked_tokens[now] - (last.booked_tokens[before] >> halvings))
    return int(us.sum()), int(tokens.sum())
