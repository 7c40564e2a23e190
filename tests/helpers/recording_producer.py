"""A Kafka producer that keeps records instead of sending them.

What lives here: the double. What must not: a cluster's behaviour; tests of that use a real Kafka.
"""

from __future__ import annotations

from typing import Any

from confluent_kafka import Producer


class RecordingProducer(Producer):
    """A real client, configured for a port on which no broker listens, whose `produce` only records."""

    def __init__(self) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
        self.records: list[tuple[str, dict[str, Any]]] = []

    def produce(self, topic: str, *_: Any, **record: Any) -> None:
        self.records.append((topic, record))

    def values(self, topic_suffix: str) -> list[bytes]:
        """The values of all records of the topic with this suffix, in order."""
        return [record["value"] for topic, record in self.records if topic.endswith(topic_suffix)]
