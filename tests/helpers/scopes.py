"""Fixtures of every folder whose tests use Kafka: one real broker, and for each test a scope with topics of its own.

What lives here: the fixtures `kafka`, `new_scope`, `scope` and `stack`, which the conftest modules of these folders
import. What must not: anything that only one folder uses.

KVSTREAMS_TEST_KAFKA can name a running broker, which is then used instead of starting one.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streams.core.routing.selection import RouterMode
from streams.kafka.clients import admin
from streams.lab.kafka.broker import KafkaState, LocalKafka
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.broker import DIRECTORY_ENV, broker_config

#: Environment variable with the bootstrap address of a running broker, which saves time while writing a test.
KAFKA_ENV = "KVSTREAMS_TEST_KAFKA"

#: Few, so that a test starts quickly, and more than one, so that a record in a wrong partition is noticed.
PARTITIONS = 4

#: Long enough for a worker that shares two cores with five other workers.
SESSION_TIMEOUT_S = 3.0

_DELETE_TIMEOUT_S = 30.0

ScopeFactory = Callable[[Path], Settings]


@pytest.fixture(scope="session")
def kafka() -> KafkaState:
    """Give a real broker, which the first test process that needs it starts for all processes."""
    directory = Path(os.environ[DIRECTORY_ENV])
    bootstrap = os.environ.get(KAFKA_ENV)
    if bootstrap:
        return KafkaState(bootstrap, (0,), "unknown", "unknown", directory, reused=True)
    return LocalKafka(broker_config(directory)).up()


@pytest.fixture(scope="session")
def new_scope(kafka: KafkaState) -> Iterator[ScopeFactory]:
    """Give a function that returns settings with a unique topic prefix, for a folder of tables."""
    given: list[Settings] = []

    def give(data_dir: Path) -> Settings:
        given.append(
            Settings(
                kafka=kafka.bootstrap,
                # Costs of this mode can be computed by hand. Tests of other modes, and of the default, name theirs.
                router_mode=RouterMode.KV,
                topic_prefix=f"t{uuid.uuid4().hex[:12]}-",
                partitions=PARTITIONS,
                session_timeout_s=SESSION_TIMEOUT_S,
                data_dir=str(data_dir),
            )
        )
        return given[-1]

    yield give
    if os.environ.get(KAFKA_ENV) and given:  # a broker that this run started is deleted with all its topics
        client = admin(given[0])
        names = client.list_topics(timeout=_DELETE_TIMEOUT_S).topics
        ours = [spec.name for settings in given for spec in topics(settings).all() if spec.name in names]
        if ours:
            for deleted in client.delete_topics(ours).values():
                deleted.result(_DELETE_TIMEOUT_S)


@pytest.fixture
def scope(new_scope: ScopeFactory, tmp_path: Path) -> Settings:
    """Give the settings of a scope that only this test uses."""
    return new_scope(tmp_path / "state")


@pytest.fixture
def stack(scope: Settings, tmp_path: Path, children: Children) -> Stack:
    """Give a Stack, which starts processes in the test's scope."""
    return Stack(scope, tmp_path, children)
