"""A real Kafka for one machine, made of packages alone: for `kvstreams kafka`, the tests and the demo.

What lives here: finding a Java, fetching the pinned jars, and one broker's life. What must not: topics, records or
anything else of the pipeline; a fleet that has a Kafka never imports this. Needs the `local` extra, and Linux or macOS.
"""

from __future__ import annotations

from streams.local.jars import KAFKA_VERSION, Progress, ensure_jars
from streams.local.java import Java, find_java
from streams.local.kafka import DEFAULT_DIRECTORY, KafkaState, LocalKafka, LocalKafkaConfig

__all__ = [
    "DEFAULT_DIRECTORY",
    "KAFKA_VERSION",
    "Java",
    "KafkaState",
    "LocalKafka",
    "LocalKafkaConfig",
    "Progress",
    "ensure_jars",
    "find_java",
]
