"""What the reading threads do with messages, ends of partitions between them included."""

from __future__ import annotations

from collections.abc import Sequence

from confluent_kafka import KafkaError, Message

from streams.errors import BadRecord
from streams.router_api.knowledge.topic_readers import Feed, Feeds
from streams.settings import Settings
from streams.topics import topics

KNOBS = Settings(partitions=2)
TOPIC = topics(KNOBS).router_loads


def message(partition: int, offset: int) -> Message:
    return Message(topic=TOPIC.name, partition=partition, offset=offset, key=b"k", value=b"v")


def end(partition: int, offset: int) -> Message:
    error = KafkaError(KafkaError._PARTITION_EOF)
    return Message(topic=TOPIC.name, partition=partition, offset=offset, error=error)


class Folded:
    """Feeds of one topic, and what was folded together, with whether it was live."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[tuple[int | None, int | None]], bool]] = []
        self.read_to_when_folded: list[tuple[int, int]] = []
        self.feeds = Feeds(KNOBS, {"loads": Feed(TOPIC, self._fold, interval_s=lambda: 0.01)}, lambda: None)

    def take(self, *messages: Message) -> None:
        assert self.feeds._take(messages) == []

    def read_to(self) -> tuple[int, int]:
        return self.feeds.read_to(TOPIC.name, 0), self.feeds.read_to(TOPIC.name, 1)

    def _fold(self, messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:
        self.batches.append(([(each.partition(), each.offset()) for each in messages], live))
        self.read_to_when_folded.append(self.read_to())
        return []


def test_records_are_folded_up_to_the_first_end_of_their_partition_before_it_counts_as_read() -> None:
    """What comes before the first end of a partition is folded as old, and what follows as live."""
    folded = Folded()
    folded.take(message(0, 0), message(1, 0), end(0, 1), message(0, 1), message(1, 1), end(1, 2))
    assert folded.batches == [([(0, 0), (1, 0)], False), ([(0, 1)], True), ([(1, 1)], False)]
    assert folded.feeds.pending() == {}
    assert folded.read_to() == (2, 2)


def test_once_the_ends_were_reached_all_that_was_read_at_once_is_folded_together() -> None:
    """Later ends do not divide a batch. A partition counts as read to its end after what comes before was folded."""
    folded = Folded()
    folded.take(end(0, 0), end(1, 0))
    folded.take(message(0, 0), end(0, 2), message(1, 0), end(1, 1), message(0, 2))
    assert folded.batches == [([(0, 0), (1, 0), (0, 2)], True)]
    assert folded.read_to_when_folded == [(0, 0)]
    assert folded.read_to() == (3, 1)
