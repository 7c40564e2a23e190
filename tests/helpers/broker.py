"""The broker that all tests of one run share."""

from __future__ import annotations

from pathlib import Path

from streams.local.kafka import LocalKafkaConfig

#: Folder of the run's own broker; the worker processes of pytest-xdist inherit it.
DIRECTORY_ENV = "KVSTREAMS_TEST_KAFKA_DIRECTORY"


def broker_config(directory: Path) -> LocalKafkaConfig:
    """Settings of the broker that all tests of a run share, whose files lie in this folder."""
    # Brokers allow no session below 6 s unless told to, and every test that kills a worker waits for one to end.
    return LocalKafkaConfig(directory, {"group.min.session.timeout.ms": "1000"}, class_archive=False)
