"""Whether a router may answer: which topics of its scope exist, and whether it has read them.

What lives here: the checks before a call and the errors that explain what is missing, and what follows from each
reading of the topics. What must not: reading the topics' records (topic_readers), and asking the broker (topic_watch).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from streams.errors import NotReady
from streams.kafka.applied_until import SourceOffset
from streams.kafka.clients import TOPICS_REMEDY, topics_missing
from streams.kafka.topic_watch import TopicReading, TopicWatch
from streams.router_api.knowledge.topic_readers import Feeds
from streams.router_api.knowledge.view import View
from streams.settings import RouterSettings
from streams.topics import topics

log = logging.getLogger(__name__)


class ScopeTopics:
    """Which topics of a scope exist.

    missing: those that do not exist yet, as set by the process that starts the router. deleted: those that were deleted
    since the router started.
    """

    def __init__(self) -> None:
        self.missing: tuple[str, ...] = ()
        self.deleted: tuple[str, ...] = ()

    def error(self) -> NotReady:
        """The error that explains which topics are missing."""
        return NotReady(topics_missing(self.missing), remedy=TOPICS_REMEDY, topics_missing=list(self.missing))

    def check(self) -> None:
        """Raise NotReady while topics of the scope are missing, or deleted.

        Decisions do not check for deleted ones: what this router has read is still there, and answers are degraded as
        soon as it becomes outdated.
        """
        if self.missing:
            raise self.error()
        if self.deleted:
            raise NotReady(
                f"topics of this scope were deleted: {', '.join(self.deleted)}",
                remedy="`kvstreams topics create` with the same settings creates them again",
                topics_missing=list(self.deleted),
            )


class Readiness:
    """Whether one router may answer. Owner of the watch that asks the broker which topics exist and where they end.

    topics: those of the scope.
    """

    def __init__(
        self, settings: RouterSettings, scope: ScopeTopics, view: View, feeds: Feeds, folded_topics: Iterable[str]
    ) -> None:
        """folded_topics: names of the topics that `feeds` reads."""
        self._settings = settings
        self.topics = scope
        self._view = view
        self._feeds = feeds
        self._had_enough_workers = False
        known = topics(settings)
        self._sources = (known.kv_events.name, known.cxl_events.name)
        self._pooled = known.cxl_changelog.name
        self._changelogs = (known.index_changelog.name, known.cxl_changelog.name)
        self._folded_topics = tuple(folded_topics)
        self._topic_ids: dict[str, str] = {}  # of the folded topics; a deleted one keeps its id
        with_ends = (known.kv_events, known.cxl_events, known.cxl_changelog) if settings.reads_index else ()
        closely = (known.index_changelog,) if settings.reads_index else ()
        self._watch = TopicWatch(settings, known.all(), with_ends, self.note_reading, closely)

    def start(self) -> None:
        """Begin to ask the broker for the topics."""
        self._watch.start()

    def stop(self) -> None:
        """Ask no more."""
        self._watch.stop()

    def workers_left(self) -> int:
        """How many workers must still be registered before a starting router is ready; 0 once there were enough."""
        if not self._had_enough_workers:
            left = self._settings.router_min_initial_workers - len(self._view.fleet.workers)
            if left > 0:
                return left
            self._had_enough_workers = True
        return 0

    def check(self) -> None:
        """Raise NotReady while topics are missing or not read to their ends, or too few workers are registered."""
        if self.topics.missing:
            raise self.topics.error()
        pending = self._feeds.pending()
        if pending:
            raise NotReady("topics are still being read", partitions_left=pending)
        left = self.workers_left()
        if left:
            raise NotReady(
                f"{left} more workers must be registered first",
                remedy="`kvstreams bridge` or PUT /workers/{id} registers one. router_min_initial_workers sets the "
                "number",
                workers_left=left,
            )

    def note_reading(self, reading: TopicReading) -> None:
        """Take in which topics exist and where they end; the watch's thread calls this, or a replay."""
        for name in sorted(set(reading.missing) - set(self.topics.deleted)):
            log.warning("%s was deleted; `kvstreams topics create` with the same settings creates it again", name)
        self.topics.deleted = reading.missing
        recreated = [
            name
            for name in self._folded_topics
            if name in reading.ids and self._topic_ids.setdefault(name, reading.ids[name]) != reading.ids[name]
        ]
        if recreated:
            self._topic_ids.update({name: reading.ids[name] for name in recreated})
            log.warning("%s: deleted and recreated, so all topics are read again", ", ".join(recreated))
            self._feeds.read_again()
        # What was folded of a recreated topic must not be trusted again before the view is emptied.
        if self._settings.reads_index and not self._feeds.begins_again:
            self._note_ends(reading)

    def _note_ends(self, reading: TopicReading) -> None:
        """Pass on to the view where the sources and the changelog of pooled blocks end.

        A partition record has the ids of the changelogs that its owner writes. The ends prove nothing if it writes
        others than those that exist: one of them was recreated, and lacks what the old one had. An end of 0 passes on
        the id alone.
        """
        pooled = self._pooled
        changelogs = {name: SourceOffset(reading.ids[name], 0) for name in self._changelogs if name in reading.ids}
        for partition in range(self._settings.partitions):
            ends = reading.ends_of(self._sources, partition)
            if ends is not None and len(changelogs) == len(self._changelogs):
                self._view.note_ends(partition, reading.asked_ms, {**ends, **changelogs})
            pooled_ends = reading.ends_of((pooled,), partition)
            if pooled_ends is not None:
                read_to = SourceOffset(reading.ids[pooled], self._feeds.read_to(pooled, partition))
                self._view.note_pooled_ends(partition, reading.asked_ms, pooled_ends, {pooled: read_to})
