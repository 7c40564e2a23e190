"""A Kafka for one machine.

What lives here: finding a Java, downloading the pinned jars, and running one broker (broker) or several that form one
Kafka (cluster), open or secure. What must not: anything that a fleet with its own Kafka needs. Requires the `local`
extra, and Linux or macOS.
"""

from __future__ import annotations

from streams.lab.kafka.broker import DEFAULT_DIRECTORY, KafkaState, LocalKafka, LocalKafkaConfig
from streams.lab.kafka.cluster import LocalCluster, local_kafka
from streams.lab.kafka.jars import KAFKA_VERSION, Progress, ensure_jars
from streams.lab.kafka.java import Java, find_java

__all__ = [
    "DEFAULT_DIRECTORY",
    "KAFKA_VERSION",
    "Java",
    "KafkaState",
    "LocalCluster",
    "LocalKafka",
    "LocalKafkaConfig",
    "Progress",
    "ensure_jars",
    "find_java",
    "local_kafka",
]
