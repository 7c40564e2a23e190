"""Which ranks a request may go to.

What lives here: the filters that are applied before ranks are priced, each of them once, and a part of a fleet as
positions. What must not: Kafka, HTTP, and busy thresholds (busy).

Filters that most requests share (model, role, taints, adapter) are applied to every worker, and their result is kept as
long as the fleet is the same. A request's own ids then only remove positions from it, so that a request that excludes
one worker of a thousand does not examine the others.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, overload

import numpy as np

from streams.core.ids import DpRank, Int64Array, RankId, WorkerId
from streams.core.workers import Role, Worker, WorkerState

_NO_RANKS: frozenset[RankId] = frozenset()
_NO_WORKERS: frozenset[WorkerId] = frozenset()


class WorkerFilter(NamedTuple):
    """What a request requires of the ranks that it may go to. A field that is None requires nothing.

    block_size: of the request's blocks. Blocks of another size never match, whatever the rank holds. lora_name: the
    adapter that the request names. lists_lora: whether only workers that list it will do.
    """

    model: str
    worker_id: WorkerId | None = None
    dp_rank: DpRank | None = None
    allowed: frozenset[WorkerId] | None = None
    excluded: frozenset[WorkerId] = frozenset()
    phase: Role | None = None
    required_taints: frozenset[str] = frozenset()
    block_size: int | None = None
    lora_name: str | None = None
    lists_lora: bool = False

    def shared(self) -> WorkerFilter:
        """The part that most requests have in common: without the ids of workers and ranks."""
        return self._replace(worker_id=None, dp_rank=None, allowed=None, excluded=frozenset())


class FilterReason(enum.StrEnum):
    """The first filter that a rank does not pass, in the order in which filters are applied."""

    OTHER_MODEL = "other_model"
    WRONG_BLOCK_SIZE = "wrong_block_size"  # the engine's blocks have another size than the scope's for the model
    CORDONED = "cordoned"
    OTHER_WORKER = "other_worker"  # the request names another worker
    NOT_ALLOWED = "not_allowed"
    EXCLUDED = "excluded"
    OTHER_ROLE = "other_role"
    TAINTS_MISSING = "taints_missing"
    LORA_MISSING = "lora_missing"  # the worker lists its adapters, and the request's is not among them
    OTHER_DP_RANK = "other_dp_rank"  # the request names another rank number
    SILENT = "silent"  # the rank was not heard from within its lease


def names_another_rank(rank: RankId, worker_filter: WorkerFilter) -> bool:
    """Whether a request's lists of workers rule out a rank: they exclude its worker, or name others only."""
    worker_id = rank.worker_id
    return (
        worker_id in worker_filter.excluded
        or worker_filter.worker_id not in (None, worker_id)
        or (worker_filter.allowed is not None and worker_id not in worker_filter.allowed)
        or worker_filter.dp_rank not in (None, rank.dp_rank)
    )


class RankSelection(Sequence[RankId]):
    """Some of a tuple of ranks, in its order, so that what is cached for the tuple serves them as well.

    base: the tuple, which is the same object for all requests with the same shared filters. positions: int64[n], in it,
    ascending.
    """

    __slots__ = ("base", "positions")

    def __init__(self, base: tuple[RankId, ...], positions: Int64Array) -> None:
        self.base = base
        self.positions = positions

    @overload
    def __getitem__(self, index: int) -> RankId: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RankId, ...]: ...

    def __getitem__(self, index: int | slice) -> RankId | tuple[RankId, ...]:
        if isinstance(index, slice):
            return tuple(self.base[position] for position in self.positions[index].tolist())
        return self.base[self.positions.item(index)]

    def __iter__(self) -> Iterator[RankId]:
        return map(self.base.__getitem__, self.positions.tolist())

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankSelection | tuple | list) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # equal to tuples, whose hash takes a pass over all ranks

    def __repr__(self) -> str:
        return f"RankSelection({tuple(self)!r})"


def base_of(ranks: Sequence[RankId]) -> tuple[Sequence[RankId], Int64Array | None]:
    """Return the ranks for which columns are cached, and the positions of `ranks` in them; None for all of them."""
    # The first check answers for most requests; isinstance takes longer, since Sequence is an abstract class.
    if type(ranks) is not tuple and isinstance(ranks, RankSelection):
        return ranks.base, ranks.positions
    return ranks, None


class EligibleRanks:
    """The ranks that pass the shared filters, in order of worker and rank, and where each worker's ranks are."""

    __slots__ = ("_numbers", "_spans", "ranks")

    def __init__(self, ranks: Iterable[RankId]) -> None:
        self.ranks = tuple(ranks)
        self._numbers: Int64Array | None = None
        self._spans: dict[WorkerId, tuple[int, int]] = {}
        for position, rank in enumerate(self.ranks):
            first = self._spans.get(rank.worker_id, (position, position))[0]
            self._spans[rank.worker_id] = (first, position + 1)

    def narrowed(self, worker_filter: WorkerFilter) -> Sequence[RankId]:
        """Return the ranks that pass a filter's ids as well; `ranks` itself if all of them do."""
        allowed, excluded, worker_id = worker_filter.allowed, worker_filter.excluded, worker_filter.worker_id
        if worker_id is None and allowed is None and not excluded and worker_filter.dp_rank is None:
            return self.ranks
        if worker_id is None and allowed is None:
            passes = np.ones(len(self.ranks), dtype=np.bool_)
        else:
            passes = np.zeros(len(self.ranks), dtype=np.bool_)
            named = allowed if worker_id is None else frozenset({worker_id})
            assert named is not None
            for first, last in self._spans_of(named if allowed is None else named & allowed):
                passes[first:last] = True
        for first, last in self._spans_of(excluded):
            passes[first:last] = False
        if worker_filter.dp_rank is not None:
            passes &= self._dp_ranks() == worker_filter.dp_rank
        positions = np.flatnonzero(passes)
        return self.ranks if len(positions) == len(self.ranks) else RankSelection(self.ranks, positions)

    def _spans_of(self, worker_ids: Set[WorkerId]) -> Iterator[tuple[int, int]]:
        """First and last position of each of these workers that has ranks here; examines the smaller set."""
        spans = self._spans
        if len(worker_ids) <= len(spans):
            return (spans[worker_id] for worker_id in worker_ids if worker_id in spans)
        return (span for worker_id, span in spans.items() if worker_id in worker_ids)

    def _dp_ranks(self) -> Int64Array:
        if self._numbers is None:
            self._numbers = np.array([rank.dp_rank for rank in self.ranks], dtype=np.int64)
        return self._numbers


def first_refusal(worker: Worker, worker_filter: WorkerFilter) -> FilterReason | None:
    """Return the first filter that no rank of a worker passes, or None if its ranks are to be checked one by one."""
    if worker.model != worker_filter.model and worker_filter.model not in worker.aliases:
        return FilterReason.OTHER_MODEL
    if worker_filter.block_size is not None and worker.block_size != worker_filter.block_size:
        return FilterReason.WRONG_BLOCK_SIZE
    if worker.state is not WorkerState.ACTIVE:
        return FilterReason.CORDONED
    if worker_filter.worker_id is not None and worker.worker_id != worker_filter.worker_id:
        return FilterReason.OTHER_WORKER
    if worker_filter.allowed is not None and worker.worker_id not in worker_filter.allowed:
        return FilterReason.NOT_ALLOWED
    if worker.worker_id in worker_filter.excluded:
        return FilterReason.EXCLUDED
    if worker_filter.phase is not None and worker.role not in (Role.BOTH, worker_filter.phase):
        return FilterReason.OTHER_ROLE
    if not worker_filter.required_taints.issubset(worker.taints):
        return FilterReason.TAINTS_MISSING
    if worker_filter.lists_lora and worker.lora_names is None:
        return FilterReason.LORA_MISSING
    return None if worker.may_serve(worker_filter.lora_name) else FilterReason.LORA_MISSING


def rank_refusal(
    rank: RankId, worker_filter: WorkerFilter, silent: Set[RankId], wrong_size: Set[RankId] = _NO_RANKS
) -> FilterReason | None:
    """Return the first filter that a rank of an accepted worker does not pass, or None if it passes all of them."""
    if worker_filter.dp_rank is not None and rank.dp_rank != worker_filter.dp_rank:
        return FilterReason.OTHER_DP_RANK
    if rank in wrong_size:
        return FilterReason.WRONG_BLOCK_SIZE
    return FilterReason.SILENT if rank in silent else None


def eligible_ranks(
    workers: Mapping[WorkerId, Worker],
    worker_filter: WorkerFilter,
    silent: Set[RankId] = _NO_RANKS,
    wrong_size: Set[RankId] = _NO_RANKS,
    avoided: Set[WorkerId] = _NO_WORKERS,
) -> list[RankId]:
    """List the ranks that pass every filter.

    They are ordered by worker and rank, so that candidates have the same positions on every router. silent: ranks that
    were not heard from within their lease. wrong_size: ranks whose events have blocks of another size than the scope's.
    avoided: workers that are left out as well.
    """
    ranks: list[RankId] = []
    for worker_id in sorted(workers):
        worker = workers[worker_id]
        if worker_id not in avoided and first_refusal(worker, worker_filter) is None:
            ranks.extend(
                rank for rank in worker.ranks() if rank_refusal(rank, worker_filter, silent, wrong_size) is None
            )
    return ranks


def refusals(
    workers: Iterable[Worker], worker_filter: WorkerFilter, silent: Set[RankId], wrong_size: Set[RankId] = _NO_RANKS
) -> dict[FilterReason, int]:
    """Count the ranks that do not pass, by the first filter that refuses each of them.

    This explains an error; the ranks that pass are listed by `eligible_ranks`, which applies the same filters.
    """
    counts: Counter[FilterReason] = Counter()
    for worker in workers:
        reason = first_refusal(worker, worker_filter)
        if reason is not None:
            counts[reason] += worker.dp_size
            continue
        reasons = (rank_refusal(rank, worker_filter, silent, wrong_size) for rank in worker.ranks())
        counts.update(filter(None, reasons))
    return {reason: counts[reason] for reason in FilterReason if counts[reason]}
