"""What a bridge counts of LMCache's events, for its metrics (pure).

What lives here: the totals of one bridge, and what is true at a moment. What must not: the metrics themselves
(engines.bridge_metrics), and what a feed's record says of it (feeds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from streams.lmcache.chunk_names import Unnamed
from streams.lmcache.pools import FeedPools, NotCounted

#: Why a stored object is in no pool.
REASONS = tuple(map(str, (*Unnamed, *NotCounted)))


@dataclass(slots=True)
class LmcacheCounters:
    """Totals since the bridge started.

    batches: read, by kind. verdicts: batches of feeds that it passes on, by what they are in the order of their server.
    dead_letters: records. stored, not_counted: objects, the latter by reason; of feeds that it no longer passes on.
    behind: records of the topic that it has not read, as of the last ones that it read.
    """

    batches: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    dead_letters: int = 0
    stored: int = 0
    not_counted: Counter[str] = field(default_factory=Counter)
    behind: int = 0

    def end(self, pools: FeedPools) -> None:
        """Keep the totals of a feed that this bridge does not pass on any longer."""
        self.stored += pools.n_stored
        self.not_counted.update(pools.counts)

    def snapshot(self, passed_on: Collection[FeedPools]) -> LmcacheCounts:
        """Return all totals, with those of the feeds that are passed on."""
        not_counted = Counter(self.not_counted)
        for pools in passed_on:
            not_counted.update(pools.counts)
        return LmcacheCounts(
            n_feeds=len(passed_on),
            n_incomplete=sum(pools.is_incomplete() for pools in passed_on),
            n_chunks=sum(map(len, passed_on)),
            batches=dict(self.batches),
            verdicts=dict(self.verdicts),
            dead_letters=self.dead_letters,
            stored=self.stored + sum(pools.n_stored for pools in passed_on),
            not_counted={str(reason): n for reason, n in not_counted.items()},
            behind=self.behind,
        )


@dataclass(frozen=True, slots=True)
class LmcacheCounts:
    """Totals as of LmcacheCounters, and the feeds that are passed on, those of them with a gap, and their chunks."""

    n_feeds: int = 0
    n_incomplete: int = 0
    n_chunks: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0
    stored: int = 0
    not_counted: dict[str, int] = field(default_factory=dict)
    behind: int = 0
