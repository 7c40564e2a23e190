"""The ranks that pass a filter, kept until the fleet changes.

What lives here: the caches of filters and of the parts of filters that many requests share, with their limits. What
must not: the filters themselves (core.routing.eligibility), and what changes the fleet (fleet_view, the owner of this
state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from streams.core.ids import RankId, WorkerId
from streams.core.routing.eligibility import EligibleRanks, WorkerFilter

#: Filters whose eligible ranks are cached until the fleet changes, and parts of filters that many requests share. Most
#: requests filter by nothing but their model, and listing 64 ranks takes 30 us. Beyond a limit the cache is cleared: a
#: filter may name 16,384 workers, and 256 such filters would take half a gigabyte.
_CACHED_FILTERS_MAX = 256
_CACHED_TABLES_MAX = 64
CACHED_FILTERS_BYTES_MAX = 16 * 1024 * 1024

#: Bytes of a cached filter without ids, of a worker id in a set, and of a rank in a tuple that others share.
_FILTER_BYTES, _ID_BYTES, _RANK_BYTES = 1024, 100, 8


class EligibleCache:
    """Ranks by filter. Its owner calls it under a lock, except `get`.

    n_bytes: about how much memory the filters take.
    """

    def __init__(self) -> None:
        self._ranks: dict[WorkerFilter, Sequence[RankId]] = {}
        # By the part that many filters share, and the workers that are left out because they are avoided.
        self._tables: dict[tuple[WorkerFilter, frozenset[WorkerId]], EligibleRanks] = {}
        self.n_bytes = 0

    def get(self, worker_filter: WorkerFilter) -> Sequence[RankId] | None:
        """Return the ranks that were put for a filter, or None."""
        return self._ranks.get(worker_filter)

    def put(self, worker_filter: WorkerFilter, ranks: Sequence[RankId]) -> None:
        """Keep the ranks that pass a filter."""
        n_bytes = _bytes_of(worker_filter) + _RANK_BYTES * len(ranks)
        self.n_bytes += n_bytes
        if len(self._ranks) >= _CACHED_FILTERS_MAX or self.n_bytes > CACHED_FILTERS_BYTES_MAX:
            self._ranks.clear()
            self.n_bytes = n_bytes
        self._ranks[worker_filter] = ranks

    def table(
        self, shared: WorkerFilter, avoided: frozenset[WorkerId], list_ranks: Callable[[], Iterable[RankId]]
    ) -> EligibleRanks:
        """Return the ranks that pass shared filters, without those of avoided workers. list_ranks: lists them."""
        table = self._tables.get((shared, avoided))
        if table is None:
            if len(self._tables) >= _CACHED_TABLES_MAX:
                self._tables.clear()
            table = self._tables[shared, avoided] = self._table_of(tuple(list_ranks()), shared)
        return table

    def _table_of(self, ranks: tuple[RankId, ...], shared: WorkerFilter) -> EligibleRanks:
        """Return a table of ranks, for adapters that the same ranks serve the same one: columns belong to a table."""
        if shared.lora_name is not None:
            for table in self._tables.values():
                if table.ranks == ranks:
                    return table
        return EligibleRanks(ranks)

    def clear(self) -> None:
        """Drop everything, since the fleet has changed."""
        self._ranks.clear()
        self._tables.clear()
        self.n_bytes = 0


def _bytes_of(worker_filter: WorkerFilter) -> int:
    """About how much memory a filter takes."""
    n_ids = len(worker_filter.allowed or ()) + len(worker_filter.excluded)
    names = (*worker_filter.required_taints, worker_filter.lora_name or "")
    return _FILTER_BYTES + _ID_BYTES * n_ids + sum(_ID_BYTES + len(name) for name in names)
