"""A whole system on one machine: a real Kafka, child processes, and the demo.

What lives here: finding a Java, downloading the pinned jars, running one broker, and what runs on it for the tests and
the demo. What must not: anything that a fleet with its own Kafka needs. Requires the `local` extra, and Linux or macOS.
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
