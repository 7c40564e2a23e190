"""A topic that is read in intervals, with a real Kafka: what changes when the interval does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import Message

from streams.errors import BadRecord
from streams.kafka.clients import ensure_topics, producer
from streams.process.waiting import wait_for
from streams.router_api.knowledge.topic_readers import Feed, Feeds
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import PATIENCE_S

#: How often the interval changes, and how many records are written in each.
N_CHANGES = 6
N_WRITTEN = 40


def test_no_record_is_lost_or_folded_twice_when_the_interval_changes(scope: Settings) -> None:
    """Records that are written while the reader goes over to another client come once, in the order of the log."""
    topic = topics(scope).router_loads
    ensure_topics(scope, [topic])
    folded: dict[int, list[int]] = {partition: [] for partition in range(topic.partitions)}
    intervals = [0.05]

    def fold(messages: Sequence[Message], _: bool) -> list[tuple[int, BadRecord]]:
        for message in messages:
            partition, offset = message.partition(), message.offset()
            assert partition is not None and offset is not None
            folded[partition].append(offset)
        return []

    feeds = Feeds(scope, {"loads": Feed(topic, fold, interval_s=lambda: intervals[-1])}, lambda: None)
    kafka = producer(scope)
    feeds.start()
    try:
        wait_for(lambda: not feeds.pending(), PATIENCE_S, "the topic to be read")
        for change in range(N_CHANGES):
            intervals.append(0.01 if change % 2 else 0.03)
            for number in range(N_WRITTEN):
                kafka.produce(topic.name, key=b"%d" % number, value=None, partition=number % topic.partitions)
                kafka.poll(0)
                time.sleep(0.002)
        kafka.flush()
        n_written = N_CHANGES * N_WRITTEN
        wait_for(lambda: sum(map(len, folded.values())) >= n_written, PATIENCE_S, "the records to be folded")
    finally:
        feeds.stop()
    assert sum(map(len, folded.values())) == n_written
    assert all(offsets == list(range(len(offsets))) for offsets in folded.values())
    assert feeds.bad_records == 0
