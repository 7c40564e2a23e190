"""Feeds in the registry: how far a bridge has passed on each instance of LMCache, and the lease on it.

What lives here: the record and its bytes (pure). What must not: Kafka (bridge), and its lease (feed_lease).

The record is written whenever the lease is renewed, so that it is the feed's position as well: no consumer group keeps
one. It never says more than Kafka has acknowledged of `cxl-events`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streams.core.workers import BridgeLease
from streams.errors import BadRecord
from streams.kafka.records import LEASE
from streams.kafka.shapes import TEXTS, RecordShape, Shape, many, optional
from streams.lmcache.pools import Cursor, parse_feed

#: Models of one feed that its record names.
MODELS_SHOWN_MAX = 16


@dataclass(frozen=True, slots=True)
class KnownCursor:
    """An instance's `Cursor`, in a record."""

    instance: str
    incarnation: int
    number: int
    gap_s: int = 0
    uses_backend: bool = False


@dataclass(frozen=True, slots=True)
class KnownFeed:
    """A feed as the registry has it.

    positions: by partition of the topic, the offset of the first record that was not passed on. The rest is shown to
    people: stored, objects that were stored, and counts, those of them that are in no pool by reason, both since a
    bridge took over; models, our names of those that objects are of, at most MODELS_SHOWN_MAX.
    """

    key: str
    topic: str
    positions: tuple[int, ...] = ()
    cursors: tuple[KnownCursor, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    models: tuple[str, ...] = ()
    lease: BridgeLease | None = None

    @property
    def is_incomplete(self) -> bool:
        """Whether batches are missing whose loss still matters."""
        return any(cursor.gap_s for cursor in self.cursors)

    @property
    def is_set_back(self) -> bool:
        """Whether nothing was passed on, as a reset of the scope writes it."""
        return self.lease is None and not self.positions

    def cursors_by_instance(self) -> dict[str, Cursor]:
        """The cursors, to continue with."""
        return {
            known.instance: Cursor(known.incarnation, known.number, known.gap_s, known.uses_backend)
            for known in self.cursors
        }


def known_cursors(cursors: dict[str, Cursor]) -> tuple[KnownCursor, ...]:
    """Return cursors as a record has them."""
    return tuple(
        KnownCursor(name, each.incarnation, each.number, each.gap_s, each.uses_backend)
        for name, each in cursors.items()
    )


def _check(feed: KnownFeed) -> None:
    numbers = [number for each in feed.cursors for number in (each.incarnation, each.number, each.gap_s)]
    if parse_feed(feed.key) is None or min((0, *feed.positions, *numbers)) < 0:
        raise BadRecord("bad_feed", f"{feed.key!r} is no feed of LMCache, or one of its numbers is negative")


_FEED = RecordShape(
    "lmcache-feeds",
    Shape(
        KnownFeed,
        check=_check,
        positions=TEXTS,
        models=TEXTS,
        cursors=many(Shape(KnownCursor).nested()),
        lease=optional(LEASE),
    ),
)
encode_feed, decode_feed = _FEED.encode, _FEED.decode
