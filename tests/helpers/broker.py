"""The broker that all tests of one pytest run share."""

from __future__ import annotations

from pathlib import Path

from streams.local.kafka import LocalKafkaConfig

#: Environment variable with the broker's folder; the worker processes of pytest-xdist inherit it.
DIRECTORY_ENV = "KVSTREAMS_TEST_KAFKA_DIRECTORY"


def broker_config(directory: Path) -> LocalKafkaConfig:
    """Return the configuration of the shared broker, whose files are in this folder."""
    # By default, brokers refuse session timeouts below 6 s. Every test that kills a worker waits for one to end.
    return LocalKafkaConfig(directory, {"group.min.session.timeout.ms": "1000"}, class_archive=False)
