"""The counters of one rank's feed (pure).

What lives here: the counters and their text for the log, and which ranks' counters a bridge keeps. What must not:
metric names and help texts (bridge_metrics). Owner: the bridge, one set per rank; the rank's feed increments it.

State: the counters of every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from streams.core.ids import RankId

#: Counters that grow with every batch of some engine, so that the log names only the others. A wrong block size is
#: logged once, by the bridge.
_ORDINARY = frozenset(
    {
        "batches_published",
        "batches_repeated",
        "batches_of_wrong_block_size",
        "events_unusable",
        "events_ignored",
        "blocks_unindexed",
        "replays",
        "heartbeats",
    }
)

#: Ranks of released engines whose own counters are kept, about 1 KB each. In a fleet that scales up and down every day,
#: each engine may have an id of its own.
RELEASED_RANKS_MAX = 1024

#: How the names of the counters by reason begin in `FeedCounters.counts`.
NOT_INDEXED = "not_indexed:"


@dataclass(slots=True)
class GapCounters:
    """What gap filling counts."""

    gaps: int = 0
    gap_batches_filled: int = 0
    gap_batches_lost: int = 0
    replays: int = 0  # requests to the engine's replay socket
    replays_unanswered: int = 0
    batches_foreign: int = 0  # dropped because they belong to another incarnation than the one that is running


@dataclass(slots=True)
class FeedCounters(GapCounters):
    """Totals since the bridge started. None ever decreases, so that each can be exported as a counter."""

    batches_published: int = 0
    batches_repeated: int = 0  # received a second time, for example from the replay socket and then live
    batches_of_wrong_block_size: int = 0  # of these, only the first one of an incarnation is a dead letter
    dead_letters: int = 0
    events_unusable: int = 0  # in these dead letters
    events_ignored: int = 0  # they cannot matter, for example the beginning of a block
    blocks_unindexed: int = 0  # reported, and not represented by the index, or not exactly
    not_indexed: Counter[str] = field(default_factory=Counter)  # blocks and events, by reason; none of them is unusual
    incarnations: int = 0  # incarnations of the engine that this bridge began to feed from their start
    resumed: int = 0  # incarnations that this bridge continued after an earlier holder of the lease
    resumed_from_table: int = 0  # of these, the ones whose ledger came from the table and not from the engine
    resyncs_requested: int = 0
    restatements: int = 0
    restatement_chunks: int = 0
    heartbeats: int = 0

    def counts(self) -> Mapping[str, int]:
        """Return a copy of every counter by name; those of `not_indexed` are under `not_indexed:REASON`."""
        plain = {counter.name: getattr(self, counter.name) for counter in fields(self) if counter.name != "not_indexed"}
        return plain | {f"{NOT_INDEXED}{reason}": n for reason, n in self.not_indexed.items()}

    def __str__(self) -> str:
        counts = self.counts().items()
        unusual = [f"{name} {n}" for name, n in counts if n and name not in _ORDINARY and NOT_INDEXED not in name]
        return ", ".join(unusual) or "nothing unusual"


class RankCounters:
    """The counters of every rank that a bridge has fed.

    The totals over all ranks never decrease. Of released ranks, only the last `RELEASED_RANKS_MAX` keep counters of
    their own; those of the others are added up.
    """

    def __init__(self) -> None:
        self._of_rank: dict[RankId, FeedCounters] = {}
        self._released: dict[RankId, None] = {}  # in the order of their release
        self._merged: Counter[str] = Counter()
        #: Released ranks whose counters were added up. One that returns after that counts as another rank.
        self.n_merged = 0

    def of(self, rank: RankId) -> FeedCounters:
        """Return the counters of a rank that is fed now."""
        self._released.pop(rank, None)
        return self._of_rank.setdefault(rank, FeedCounters())

    def release(self, rank: RankId) -> None:
        """Note that a rank is fed no longer; nothing changes its counters from now on."""
        if rank not in self._of_rank:
            return
        self._released.pop(rank, None)
        self._released[rank] = None
        while len(self._released) > RELEASED_RANKS_MAX:
            oldest = next(iter(self._released))
            del self._released[oldest]
            self._merged.update(self._of_rank.pop(oldest).counts())
            self.n_merged += 1

    def counts(self) -> Mapping[RankId, Mapping[str, int]]:
        """Return a copy of the counters that ranks have of their own, by rank and name."""
        return {rank: counters.counts() for rank, counters in self._of_rank.items()}

    def totals(self) -> Counter[str]:
        """Return the totals over all ranks, by name."""
        totals = Counter(self._merged)
        for counters in self._of_rank.values():
            totals.update(counters.counts())
        return totals

    def __len__(self) -> int:
        """The number of ranks that were fed."""
        return len(self._of_rank) + self.n_merged
