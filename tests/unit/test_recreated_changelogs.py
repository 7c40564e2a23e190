"""A router trusts a changelog only while its owner writes the one that exists.

A changelog that was recreated under its owner gets the changes that the owner makes before it notices. The new log then
lacks everything that the old one had, although the partition record in it says that the sources are applied.
"""

from __future__ import annotations

import pytest

from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.kafka.clients import partition_of
from streams.kafka.topic_watch import TopicReading
from streams.router_api.knowledge.readiness import Readiness, ScopeTopics
from streams.router_api.knowledge.topic_readers import Feed, Feeds
from streams.router_api.knowledge.view import View
from streams.settings import Settings
from streams.tables.records import PARTITION_KEY, PartitionRecord, SourceProgress, encode_partition
from streams.topics import topics
from tests.helpers.views import LOCAL as BLOCKS
from tests.helpers.views import Clock, hold_only, rank, view_of

SETTINGS = Settings()
NAMES = topics(SETTINGS)
SOURCES = (NAMES.kv_events.name, NAMES.cxl_events.name)
INDEX, POOLED = NAMES.index_changelog.name, NAMES.cxl_changelog.name
RANK = rank(1)
PARTITION = partition_of(RANK.worker_id, SETTINGS.partitions)

#: Readings come four times per tolerated lag.
READ_EVERY_MS = SETTINGS.behind_after_ms // 4


class Rig:
    """What one router knows, and the readings of its topics, which the test makes. ids: of the topics that exist."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.view: View = view_of(self.clock)
        self.ids = {name: f"{name} 1" for name in (*SOURCES, INDEX, POOLED)}
        read = {spec.name: Feed(spec, lambda *_: []) for spec in (NAMES.index_changelog, NAMES.cxl_changelog)}
        self.feeds = Feeds(SETTINGS, read, self.view.reset)
        self.readiness = Readiness(SETTINGS, ScopeTopics(), self.view, self.feeds, read)

    def recreate(self, topic: str) -> None:
        self.ids[topic] = f"{topic} 2"

    def reading(self) -> None:
        """Pass in a reading; nothing was appended to the sources."""
        self.clock.now_ms += READ_EVERY_MS
        ends = dict.fromkeys(((name, PARTITION) for name in (*SOURCES, POOLED)), 1)
        self.readiness.note_reading(TopicReading(self.clock.now_ms, dict(self.ids), (), ends))

    def begin_again(self) -> None:
        """Do what the feeds do between the end of their threads and the start of new ones."""
        assert self.feeds.begins_again
        self.view.reset()
        self.feeds._over.clear()

    def commit(self, written: dict[str, str]) -> None:
        """Fold a live partition record of an owner that writes these changelogs and has applied its sources."""
        sources = [SourceProgress(name, self.ids[name], 0, 0, 1, 0) for name in SOURCES]
        changelogs = [SourceProgress(name, written[name], -1, 0, -1, 0) for name in (INDEX, POOLED)]
        record = PartitionRecord(PARTITION, 0, "owner", (*sources, *changelogs))
        self.view.fold_index(PARTITION_KEY.pack(PARTITION), encode_partition(record))

    def reason(self) -> DegradedReason | None:
        trust = self.view.assess([RANK])
        assert (trust.mode is AnswerMode.EXACT) == (trust.reason is None)
        return trust.reason


@pytest.mark.parametrize("changelog", [INDEX, POOLED])
def test_changes_without_the_state_before_them_are_never_exact(changelog: str) -> None:
    """The router has read the new log to its end when the owner's first transaction arrives there."""
    rig = Rig()
    old = dict(rig.ids)
    hold_only(rig.view, RANK, BLOCKS)
    rig.commit(old)
    rig.reading()
    assert rig.reason() is None
    rig.recreate(changelog)
    rig.reading()
    rig.begin_again()
    hold_only(rig.view, RANK, BLOCKS[:1])  # one of the rank's blocks changed
    for _ in range(8):
        rig.commit(old)
        assert rig.reason() is DegradedReason.OWNER_BEHIND
        rig.reading()
        assert rig.reason() is DegradedReason.OWNER_BEHIND
    hold_only(rig.view, RANK, BLOCKS)  # the table starts over
    rig.commit(rig.ids)
    rig.reading()
    assert rig.reason() is None


@pytest.mark.parametrize("changelog", [INDEX, POOLED])
def test_records_of_a_new_log_do_not_renew_the_trust_in_the_old_one(changelog: str) -> None:
    """If the new log is the longer one, its consumer goes on at the old offset, and only the topic's id shows it."""
    rig = Rig()
    hold_only(rig.view, RANK, BLOCKS)
    rig.commit(rig.ids)
    rig.reading()
    proven_ms = rig.clock.now_ms
    rig.recreate(changelog)
    for _ in range(8):
        rig.commit(rig.ids)
        rig.reading()
        is_old = rig.clock.now_ms - proven_ms > SETTINGS.behind_after_ms
        assert rig.reason() is (DegradedReason.OWNER_BEHIND if is_old else None)
    rig.begin_again()
    assert rig.reason() is not None


def test_a_deleted_changelog_proves_nothing() -> None:
    """Its owner cannot write what it applies."""
    rig = Rig()
    hold_only(rig.view, RANK, BLOCKS)
    written = dict(rig.ids)
    rig.commit(written)
    rig.reading()
    del rig.ids[INDEX]
    for _ in range(5):
        rig.commit(written)
        rig.reading()
    assert rig.reason() is DegradedReason.OWNER_BEHIND
