"""What follows from the measurements of a comparison, with intervals (pure).

What lives here: figures of each mode, their differences, and the bootstrap. What must not: I/O.

Requests of one block are not independent: they share a queue, a cache and a moment of the day. So whole rounds are
drawn with replacement, not requests (a block bootstrap), and the same rounds for every mode, so that what changed
between rounds cancels out in the comparison of two modes. An interval has the middle 95 % of the values of all draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from streams.core.ids import Float64Array, Int64Array

#: Draws of rounds. More change the ends of an interval by less than they differ between two runs of a comparison.
DRAWS = 2000

#: Ends of an interval, in percent.
_ENDS = (2.5, 97.5)


class ComparedRequest(NamedTuple):
    """One request that counts. cached_tokens: of its prompt, found in the engine's cache."""

    round: int
    variant: int
    worker_id: int
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its interval of 95 %."""

    value: float
    low: float
    high: float

    def as_json(self) -> dict[str, float]:
        """The three numbers by name."""
        return {"value": round(self.value, 5), "low": round(self.low, 5), "high": round(self.high, 5)}


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure. is_share: modes are compared by their difference, otherwise by their ratio."""

    name: str
    is_share: bool = False


#: Times to the first token in ms; the share of prompt tokens that engines found in a cache; and the work of the busiest
#: worker divided by the mean of all, where 1 is even.
METRICS = (
    ComparedFigure("ttft_ms_mean"),
    ComparedFigure("ttft_ms_p50"),
    ComparedFigure("ttft_ms_p95"),
    ComparedFigure("hit_share", True),
    ComparedFigure("balance"),
)


@dataclass(frozen=True, slots=True)
class ComparedModes:
    """All figures of a comparison.

    values: by mode and metric. against: by mode and metric, relative to the first mode: a ratio, or a difference for
    shares; the first mode has none.
    """

    values: Sequence[dict[str, Estimate]]
    against: Sequence[dict[str, Estimate]]


def evaluate(
    samples: Sequence[ComparedRequest],
    n_variants: int,
    worker_ids: Sequence[int],
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> ComparedModes:
    """Compute all figures. worker_ids: every worker of the fleet, also those that served nothing.

    Only rounds in which every mode has a sample are used. There must be at least one.
    """
    rounds = complete_rounds(samples, n_variants)
    counts = np.ones((1 + draws, len(rounds)))  # the first row is what was measured
    counts[1:] = rng.multinomial(len(rounds), np.full(len(rounds), 1.0 / len(rounds)), size=draws)
    values: list[dict[str, Estimate]] = []
    drawn: list[dict[str, Float64Array]] = []
    for variant in range(n_variants):
        columns = _Columns([sample for sample in samples if sample.variant == variant], rounds, worker_ids)
        by_metric = {
            "ttft_ms_mean": _ratio(counts, columns.ttft_sums, columns.n),
            "ttft_ms_p50": columns.percentile(counts, 0.5),
            "ttft_ms_p95": columns.percentile(counts, 0.95),
            "hit_share": _ratio(counts, columns.cached, columns.prompts),
            "balance": _ratio(counts, columns.balance, np.ones(len(rounds))),
        }
        drawn.append(by_metric)
        values.append({name: _estimate(estimate) for name, estimate in by_metric.items()})
    against = []
    for by_metric in drawn[1:]:
        relative: dict[str, Estimate] = {}
        for metric in METRICS:
            combine: Callable[[Float64Array, Float64Array], Float64Array] = (
                np.subtract if metric.is_share else np.divide
            )
            relative[metric.name] = _estimate(combine(by_metric[metric.name], drawn[0][metric.name]))
        against.append(relative)
    return ComparedModes(values, against)


def complete_rounds(samples: Sequence[ComparedRequest], n_variants: int) -> list[int]:
    """The rounds in which every mode has a sample, which `evaluate` uses."""
    seen: dict[int, set[int]] = {}
    for sample in samples:
        seen.setdefault(sample.round, set()).add(sample.variant)
    return sorted(number for number, variants in seen.items() if len(variants) == n_variants)


class _Columns:
    """The samples of one mode as sums by round, and in the order of their times to the first token."""

    def __init__(self, samples: Sequence[ComparedRequest], rounds: Sequence[int], worker_ids: Sequence[int]) -> None:
        position = {number: index for index, number in enumerate(rounds)}
        samples = sorted((sample for sample in samples if sample.round in position), key=lambda sample: sample.ttft_ms)
        columns: Int64Array = np.array([position[sample.round] for sample in samples], dtype=np.int64)
        self._at = columns
        self._ttft = np.array([sample.ttft_ms for sample in samples])
        n_rounds = len(rounds)

        def summed(values: Sequence[float]) -> Float64Array:
            sums: Float64Array = np.bincount(columns, np.array(values, dtype=np.float64), n_rounds).astype(np.float64)
            return sums

        self.n = summed([1.0] * len(samples))
        self.ttft_sums = summed([sample.ttft_ms for sample in samples])
        self.cached = summed([sample.cached_tokens for sample in samples])
        self.prompts = summed([sample.prompt_tokens for sample in samples])
        workers = {
            worker_id: row for row, worker_id in enumerate(sorted({*worker_ids, *(s.worker_id for s in samples)}))
        }
        work = np.zeros((len(workers), n_rounds))
        for sample, column in zip(samples, columns.tolist(), strict=True):
            work[workers[sample.worker_id], column] += (
                sample.prompt_tokens - sample.cached_tokens + sample.output_tokens
            )
        self.balance: Float64Array = work.max(axis=0) / np.maximum(work.mean(axis=0), 1e-9)

    def percentile(self, counts: Float64Array, share: float) -> Float64Array:
        """The least time that at least this share of the requests of each draw do not exceed."""
        times = np.empty(len(counts))
        for row, count in enumerate(counts):
            weights = np.cumsum(count[self._at])
            times[row] = self._ttft[min(int(np.searchsorted(weights, share * weights[-1])), len(self._ttft) - 1)]
        return times


def _ratio(counts: Float64Array, above: Float64Array, below: Float64Array) -> Float64Array:
    ratio: Float64Array = (counts @ above) / np.maximum(counts @ below, 1e-9)
    return ratio


def _estimate(drawn: Float64Array) -> Estimate:
    low, high = np.percentile(drawn[1:], _ENDS).tolist()
    return Estimate(float(drawn[0]), low, high)
