"""What a routing policy is: it prices the candidates of one request by what a router can know (docs/quality.md).

What lives here: `Policy`, what it is given (`Situation`), and what it returns (`Prices`). What must not: any policy,
and how one is found by name (registry).

A policy is pure: it reads no clock and performs no I/O. Time is an argument. It never books; the caller books the
cheapest candidate, and breaks exact ties at random. A policy may learn from observations. What it learns belongs to one
router, in contrast to bookings, which all routers share (core.loads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from streams.core.engine_metrics import WorkerMetrics
from streams.core.ids import Float64Array, Int64Array, RankId
from streams.core.loads.bookings import ActiveLoads
from streams.core.loads.observations import Forecast, Observation

#: Entry points of other packages in this group are policies: name = "package.module:factory". A factory is a
#: `PolicyFactory`.
ENTRY_POINTS = "kvstreams.policies"

_NO_METRICS: Mapping[RankId, WorkerMetrics] = MappingProxyType({})
NO_CLASSES: Mapping[str, float] = MappingProxyType({})


class WeighHeld(Protocol):
    """Weighs what candidates hold of a request."""

    def __call__(
        self, tier_values: tuple[float, ...], pool_value: float, by_class: Mapping[str, float] = NO_CLASSES, /
    ) -> Float64Array:
        """Return, for each candidate, the sum of the values of the request's leading blocks that it holds: float64[n].

        tier_values: of a block by the tier of its fastest copy (device, host, disk, external). pool_value: of a block
        that the candidate reaches in a pool after its own leading blocks. by_class: the same for pools of some latency
        classes; those from which blocks are loaded at the same speed must have the same value.
        """


class Situation(NamedTuple):
    """One request, and what a router knows of the candidates for it. It is a tuple because one is made per decision.

    ranks: the candidates; never empty. The same tuple may come again, so that what follows from it can be cached.
    rows: int64[n], the candidates' rows in `loads`. scores: int64[n], the leading blocks that each candidate holds in
    any tier. held: the same by value. shared: int64[n_rows], the leading blocks that running requests use on each row
    of `loads`. sequence: the request's sequence hashes from the root, packed. request_blocks:
    its length in blocks, including a partial last one. n_tokens: its length in tokens. now_ms: the time, on the clock
    of the bookings in `loads`. capacity_blocks: int64[n], blocks of each candidate's cache, 0 where it is not known;
    None if none is known. on_device: whether all that the candidates hold is on their devices. labelled: float64[n],
    how many cached blocks a candidate's matching labels are worth; None without any. expected_output_tokens: from the
    client. metrics: the last report of each rank's engine, if there is one. users: how many running requests use the
    request's leading blocks, on how many ranks: (blocks, requests, ranks) for each run of blocks, from the root on; so
    many blocks up to its end.
    """

    ranks: Sequence[RankId]
    rows: Int64Array
    loads: ActiveLoads
    scores: Int64Array
    held: WeighHeld
    shared: Int64Array
    sequence: bytes
    request_blocks: int
    n_tokens: int
    block_size: int
    now_ms: float
    model: str = ""
    capacity_blocks: Int64Array | None = None
    on_device: bool = True
    labelled: Float64Array | None = None
    expected_output_tokens: int | None = None
    metrics: Mapping[RankId, WorkerMetrics] = _NO_METRICS
    users: Sequence[tuple[int, int, int]] = ()

    def active_overlap(self) -> Int64Array:
        """Leading blocks of the request that running requests use on each candidate: int64[n]."""
        active: Int64Array = self.shared.take(self.rows)
        return active


class Prices(NamedTuple):
    """What a policy makes of a situation.

    costs: float64[n]; the lowest wins. cached_blocks: float64[n], the leading blocks that each candidate need not
    compute; the booking charges it for the others. names, terms: what the costs are made of, for `explain`, as
    float64[len(names), n]. Names carry their unit, for example `backlog_ms`. best: index of the first of the cheapest
    candidates and how many are as cheap, if the policy has found that out already.

    The arrays must not change afterwards: the decision log reads them after the answer.
    """

    costs: Float64Array
    cached_blocks: Float64Array
    names: tuple[str, ...]
    terms: Float64Array
    best: tuple[int, int] | None = None


class Policy(Protocol):
    """Prices candidates.

    reads_index: whether it uses what ranks hold. reads_metrics: whether it uses what engines report.
    """

    reads_index: bool
    reads_metrics: bool

    def price(self, situation: Situation) -> Prices:
        """Price a request at each candidate. It must not change the loads."""

    def forecast(self, situation: Situation, prices: Prices, chosen: int) -> Forecast:
        """Return what to expect of the request on the chosen candidate (an index); NO_FORECAST is always valid."""

    def observe(self, observations: Sequence[Observation], block_size_of: Callable[[str], int]) -> None:
        """Learn from what happened since the last call. A policy that does not learn ignores this.

        block_size_of: tokens per block of a model.
        """


#: Makes a policy from parameters by name, which are numbers; raises SettingsError for a name that it does not have or
#: a value that it cannot use.
PolicyFactory = Callable[[Mapping[str, float]], Policy]
