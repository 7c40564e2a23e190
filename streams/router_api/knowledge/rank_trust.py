"""How far ranks can be trusted by their own records, in columns, so that thousands of ranks are assessed at once.

What lives here: the last progress record of each rank, what follows from it as one number per rank, and which ranks
lack records because the index was over capacity. What must not: the owners of partitions (owner_trust), the rule that
combines both, and locks (trust_tracker, which owns this state).

An answer needs the least trust over all eligible ranks. So nothing is computed per rank and answer: a rank's number
changes only with its records, and the ranks that requests share keep their columns from answer to answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from streams.core.events import FeedState
from streams.core.ids import Epoch, Int64Array, RankId, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.identity_cache import IdentityCache
from streams.core.routing.trust import DegradedReason
from streams.kafka.clients import partition_of

_NO_WORKERS: frozenset[WorkerId] = frozenset()

#: Workers whose partition is cached: computing it takes 0.4 us. Beyond this limit the cache is cleared.
_WORKERS_CACHED_MAX = 65_536

#: Ranks that have a place in the columns. Beyond this limit all of them get new places.
_NUMBERED_MAX = 262_144
_NUMBERED_FIRST = 64

#: Later than any position, for a reason that no rank has.
NOWHERE = 1 << 62

# What a rank's own records and the audit say about its trust, as a number: exact, approximate, approximate because
# engines contradict (routing.audit), or FIRST_REASON plus a position in OWN_REASONS.
IS_EXACT, IS_APPROXIMATE, IS_DISAGREEING, FIRST_REASON = range(4)
OWN_REASONS = (
    DegradedReason.NO_EVENTS_YET,
    DegradedReason.EVENTS_LOST,
    DegradedReason.REMOVED,
    DegradedReason.FEED_BEHIND,
    DegradedReason.BRIDGE_SILENT,
)
_CODES = {reason: FIRST_REASON + index for index, reason in enumerate(OWN_REASONS)}


def _code_of(progress: Progress | None) -> int:
    """What a progress record says about the trust in its rank, as a number."""
    if progress is None:
        return _CODES[DegradedReason.NO_EVENTS_YET]
    health, feed = progress.health, progress.feed
    if health is Health.DEGRADED:
        return _CODES[DegradedReason.EVENTS_LOST]
    if health is Health.REMOVED:
        return _CODES[DegradedReason.REMOVED]
    if feed:
        unproven = feed is FeedState.UNPROVEN
        return _CODES[DegradedReason.NO_EVENTS_YET if unproven else DegradedReason.FEED_BEHIND]
    return IS_EXACT if health is Health.EXACT else IS_APPROXIMATE


class RankColumns:
    """What an assessment needs of n ranks.

    places: int64[n], the place of each rank in the columns of all ranks, valid while their numbering is `numbering`.
    worker_ids: uint64[n]. partitions: int64[n]; distinct: each partition once. codes: uint8[n], what each rank's own
    records and its bridge say about its trust, as of `version` and `bridge_silent`. first: position of the first rank
    whose code is a reason, NOWHERE if there is none. approximate: the greatest code that is not a reason. incomplete:
    positions of ranks that may lack records, in order, as of `n_incomplete`. position: of each rank, created when it is
    needed.
    """

    __slots__ = (
        "_position",
        "approximate",
        "bridge_silent",
        "codes",
        "distinct",
        "first",
        "incomplete",
        "n_incomplete",
        "numbering",
        "partitions",
        "places",
        "ranks",
        "version",
        "worker_ids",
    )

    def __init__(self, ranks: Sequence[RankId], numbering: int, places: Int64Array, partitions: Int64Array) -> None:
        self.ranks = ranks
        self.numbering = numbering
        self.worker_ids = np.array([rank.worker_id for rank in ranks], dtype=np.uint64)
        self.places = places
        self.partitions = partitions
        self.distinct: list[int] = np.unique(partitions).tolist()
        self.version = -1
        self.bridge_silent: Set[WorkerId] = _NO_WORKERS
        self.codes: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self.first = NOWHERE
        self.approximate = IS_EXACT
        self.n_incomplete = 0
        self.incomplete: list[int] = []
        self._position: dict[RankId, int] | None = None

    @property
    def position(self) -> Mapping[RankId, int]:
        """Position of each rank."""
        if self._position is None:
            self._position = {rank: index for index, rank in enumerate(self.ranks)}
        return self._position

    def first_and_approximate(self, positions: Int64Array | None) -> tuple[int, int]:
        """`first` and `approximate`, of the ranks at these positions; None for all of them."""
        if positions is None:
            return self.first, self.approximate
        codes = self.codes[positions]
        degraded = codes >= FIRST_REASON
        index = int(degraded.argmax()) if len(positions) else 0
        first = positions.item(index) if len(positions) and degraded[index] else NOWHERE
        return first, _approximate(codes)

    def first_of(self, ranks: Iterable[RankId], positions: Int64Array | None) -> int:
        """First position of any of these ranks among the assessed ones; NOWHERE if there is none."""
        known = (self.position.get(rank) for rank in ranks)
        return min(
            (position for position in known if position is not None and includes(positions, position)),
            default=NOWHERE,
        )

    def first_in(self, partition: int, positions: Int64Array | None) -> int:
        """First position of a rank of a partition; NOWHERE if there is none."""
        partitions = self.partitions if positions is None else self.partitions[positions]
        matches = partitions == partition
        if not matches.any():
            return NOWHERE
        index = int(matches.argmax())
        return index if positions is None else positions.item(index)


def includes(positions: Int64Array | None, position: int) -> bool:
    """Whether a position is among ascending ones; None stands for all of them."""
    if positions is None:
        return True
    index = int(positions.searchsorted(position))
    return index < len(positions) and positions.item(index) == position


def cache_of(progress: Progress | None) -> Hashable | None:
    """What stays the same until a rank's engine clears its cache or restarts; None for a rank that is not known.

    A restatement begins another epoch too, but the engine's cache is what it was.
    """
    if progress is None or progress.health is Health.REMOVED:
        return None
    return progress.epoch.incarnation, progress.epoch.generation - progress.n_restated


def _approximate(codes: npt.NDArray[np.uint8]) -> int:
    """The greatest of these codes that is not a reason."""
    return int(codes[codes < FIRST_REASON].max(initial=IS_EXACT))


class RankTrust:
    """The records of all ranks, as far as trust depends on them. Not thread-safe.

    progress: the last progress record of each rank; only `note_progress` changes it.
    """

    def __init__(
        self,
        n_partitions: int,
        epoch_of: Callable[[RankId], Epoch | None],
        disagreeing: Mapping[RankId, Hashable] | None = None,
    ) -> None:
        """epoch_of: the greatest epoch that the index has seen of a rank. disagreeing: ranks whose engines contradict,
        each with the `cache_of` that this is about."""
        self._n_partitions = n_partitions
        self._epoch_of = epoch_of
        self._disagreeing = {} if disagreeing is None else disagreeing
        self.progress: dict[RankId, Progress] = {}
        self._partition_of: dict[WorkerId, int] = {}  # a cache
        # By partition, ranks that can be trusted more once the rest of a transaction is folded, each with the number
        # that counts until then.
        self._pending: defaultdict[int, dict[RankId, int]] = defaultdict(dict)
        # Columns over the ranks that were assessed: the number of each, and whether it has a lease.
        self._places: dict[RankId, int] = {}
        self._numbering = 0  # changes when a place may belong to another rank
        self._codes = np.zeros(_NUMBERED_FIRST, dtype=np.uint8)
        self._leased = np.zeros(_NUMBERED_FIRST, dtype=np.bool_)
        self._version = 0  # changes with every value in these columns
        self._columns: IdentityCache[RankColumns] = IdentityCache()
        # Ranks of which the index lacks a record because it was over capacity, with their epoch at that time: what the
        # index has of them is wrong until a newer epoch begins.
        self._incomplete: dict[RankId, Epoch] = {}
        self._n_incomplete = 0  # counts the changes of these

    # -- records -------------------------------------------------------------------------------------------------------

    def note_progress(self, rank: RankId, progress: Progress | None) -> None:
        """Take in the progress record of a rank, or its tombstone.

        A loss of trust counts at once. A gain counts from the end of the transaction on, which is marked by the
        partition record (`settle`): in a transaction, the records of a rank's blocks follow its progress record. A new
        epoch is treated like a gain, because its first record empties the rank.
        """
        known = self.progress.get(rank)
        before, now = self._code(rank), self._code_of(rank, progress)
        pending = self._pending[self.partition(rank.worker_id)]
        pending.pop(rank, None)
        if progress is None:
            self.progress.pop(rank, None)
        else:
            self.progress[rank] = progress
            if now < FIRST_REASON:
                is_emptied = known is not None and known.epoch != progress.epoch
                if before < FIRST_REASON and is_emptied:
                    pending[rank] = _CODES[DegradedReason.FEED_BEHIND]
                elif before > now:
                    pending[rank] = before
        self._update_columns(rank)

    def settle(self, partition: int) -> list[tuple[RankId, DegradedReason]]:
        """Let the last transaction of a partition count; return the ranks that are trusted more, and why not before."""
        pending = self._pending[partition]
        settled = []
        while pending:
            rank, before = pending.popitem()
            is_reason = before >= FIRST_REASON
            settled.append((rank, OWN_REASONS[before - FIRST_REASON] if is_reason else DegradedReason.FEED_BEHIND))
            self._update_columns(rank)
        return settled

    def note_over_capacity(self, rank: RankId) -> bool:
        """Mark a rank as incomplete; return True if it was complete before."""
        epoch = self._epoch_of(rank)
        if epoch is None or self._incomplete.get(rank) == epoch:
            return False
        self._incomplete[rank] = epoch
        self._n_incomplete += 1
        return True

    def partition(self, worker_id: WorkerId) -> int:
        """The partition of a worker's records."""
        partition = self._partition_of.get(worker_id)
        if partition is None:
            if len(self._partition_of) >= _WORKERS_CACHED_MAX:
                self._partition_of.clear()
            partition = self._partition_of[worker_id] = partition_of(worker_id, self._n_partitions)
        return partition

    def _code(self, rank: RankId) -> int:
        """What a rank's records say about its trust at this moment, as a number."""
        code = self._code_of(rank, self.progress.get(rank))
        return code if code >= FIRST_REASON else self._pending[self.partition(rank.worker_id)].get(rank, code)

    def _code_of(self, rank: RankId, progress: Progress | None) -> int:
        """What a progress record says about the trust in its rank, and the audit if the record says nothing worse."""
        code = _code_of(progress)
        if code >= FIRST_REASON or rank not in self._disagreeing:
            return code
        return IS_DISAGREEING if self._disagreeing[rank] == cache_of(progress) else code

    def note_disagreeing(self, rank: RankId) -> None:
        """Take in that a rank's engine contradicts too often."""
        self._update_columns(rank)

    def _update_columns(self, rank: RankId) -> None:
        place = self._places.get(rank)
        if place is not None:
            self._write(place, rank)

    def _write(self, place: int, rank: RankId) -> None:
        progress = self.progress.get(rank)
        code, leased = self._code(rank), progress is not None and progress.lease_ms != 0
        if self._codes[place] != code or self._leased[place] != leased:  # most records change neither
            self._codes[place], self._leased[place] = code, leased
            self._version += 1

    # -- assessments ---------------------------------------------------------------------------------------------------

    def columns(self, ranks: Sequence[RankId], bridge_silent: Set[WorkerId]) -> RankColumns:
        """Return the columns of these ranks as they are now. Those of a tuple are kept for the next answer.

        bridge_silent: workers whose bridge is silent or does not feed them.
        """
        columns = self._columns.get(ranks) if isinstance(ranks, tuple) else None
        if columns is None or columns.numbering != self._numbering:
            if len(self._places) + len(ranks) > _NUMBERED_MAX:
                self._places.clear()
                self._numbering += 1
            places = np.array([self._place_of(rank) for rank in ranks], dtype=np.int64)
            partitions = np.array([self.partition(rank.worker_id) for rank in ranks], dtype=np.int64)
            columns = RankColumns(ranks, self._numbering, places, partitions)
            if isinstance(ranks, tuple):  # the contents of a list may change
                self._columns.put(ranks, columns)
        if columns.version != self._version or columns.bridge_silent is not bridge_silent:
            self._refresh(columns, bridge_silent)
        return columns

    def _place_of(self, rank: RankId) -> int:
        place = self._places.get(rank)
        if place is None:
            place = self._places[rank] = len(self._places)
            if place >= len(self._codes):
                self._codes = np.concatenate([self._codes, np.zeros_like(self._codes)])
                self._leased = np.concatenate([self._leased, np.zeros_like(self._leased)])
            self._write(place, rank)
        return place

    def _refresh(self, columns: RankColumns, bridge_silent: Set[WorkerId]) -> None:
        """Copy the ranks' numbers, and add to them which bridges are silent."""
        codes = self._codes[columns.places]
        if bridge_silent:
            silent = np.isin(columns.worker_ids, np.fromiter(bridge_silent, np.uint64, len(bridge_silent)))
            silent &= self._leased[columns.places]  # without a lease, no bridge feeds the rank
            silent &= codes < FIRST_REASON
            codes[silent] = _CODES[DegradedReason.BRIDGE_SILENT]
        degraded = codes >= FIRST_REASON
        columns.codes = codes
        columns.first = int(degraded.argmax()) if degraded.any() else NOWHERE
        columns.approximate = _approximate(codes)
        columns.version, columns.bridge_silent = self._version, bridge_silent

    def first_incomplete(self, columns: RankColumns, positions: Int64Array | None) -> int:
        """First position of a rank of which the index lacks records; NOWHERE if there is none."""
        if not self._incomplete:
            return NOWHERE
        if columns.n_incomplete != self._n_incomplete:  # whether they still lack records depends on their epochs
            known = (columns.position.get(rank) for rank in self._incomplete)
            columns.incomplete = sorted(position for position in known if position is not None)
            columns.n_incomplete = self._n_incomplete
        for position in columns.incomplete:
            if includes(positions, position) and self._is_incomplete(columns.ranks[position]):
                return position
        return NOWHERE

    def incomplete(self, columns: RankColumns) -> list[int]:
        """Positions of all ranks of which the index lacks records."""
        known = ((columns.position.get(rank), rank) for rank in self._incomplete)
        return [position for position, rank in known if position is not None and self._is_incomplete(rank)]

    def _is_incomplete(self, rank: RankId) -> bool:
        return rank in self._incomplete and self._incomplete[rank] == self._epoch_of(rank)

    def any_is_unknown(self, ranks: tuple[RankId, ...], bridge_silent: Set[WorkerId]) -> bool:
        """Whether any of these ranks makes answers degraded by its own records, without those that were removed.

        Owners of LMCache's rows have no records of ranks: what counts is whether their bridge passes their events on.
        """
        if bridge_silent and any(rank.worker_id in bridge_silent and rank not in self.progress for rank in ranks):
            return True
        columns = self.columns(ranks, bridge_silent)
        if columns.first == NOWHERE:
            return False
        known = [self.progress.get(ranks[index]) for index in np.flatnonzero(columns.codes >= FIRST_REASON).tolist()]
        return any(progress is not None and progress.health is not Health.REMOVED for progress in known)
