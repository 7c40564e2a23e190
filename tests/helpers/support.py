"""Checks of a running system that several end-to-end tests share."""

from __future__ import annotations

from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from streams.errors import KvStreamsError
from streams.kafka.clients import reader
from streams.lab.stack import Engine, RouterProcess, held_blocks, known_blocks
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics

VISIBLE_TIMEOUT_S = 60.0

#: Time between two dumps of a whole view. Dumps slow down the processes that the test waits for.
DUMP_POLL_S = 0.25


def assert_known(router: RouterProcess, engines: list[Engine]) -> set[tuple[int, int]]:
    """Wait until the router has exactly the blocks that the engines hold, and return them."""
    truth = held_blocks(engines)
    try:
        wait_for(
            lambda: known_blocks(router.url) == truth,
            VISIBLE_TIMEOUT_S,
            "the engines' blocks",
            DUMP_POLL_S,
        )
    except KvStreamsError:
        assert known_blocks(router.url) == truth
    return truth


def dead_letters(settings: Settings) -> list[tuple[bytes | None, dict[str, bytes]]]:
    """Return all dead letters of a scope as value and headers, partition by partition."""
    topic = topics(settings).dead_letters
    consumer = reader(settings)
    letters: list[tuple[bytes | None, dict[str, bytes]]] = []
    left = topic.partitions
    try:
        consumer.assign([TopicPartition(topic.name, n, OFFSET_BEGINNING) for n in range(topic.partitions)])
        while left:
            for message in consumer.consume(100, 1.0):
                error = message.error()
                if error is None:
                    pairs: Any = message.headers() or []
                    headers = {name: value or b"" for name, value in pairs}
                    letters.append((message.value(), headers))
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    left -= 1
    finally:
        consumer.close()
    return letters
