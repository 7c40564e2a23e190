"""What all tests share: child processes, and the end of the broker that the tests in tests/kafka may have started.

A test that asks for none of these starts nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from streams.local.kafka import LocalKafka
from streams.local.processes import Children
from tests.helpers.broker import DIRECTORY_ENV, broker_config


def pytest_configure(config: pytest.Config) -> None:
    """Choose the folder of the broker that all worker processes of this run share."""
    if not hasattr(config, "workerinput"):
        os.environ[DIRECTORY_ENV] = tempfile.mkdtemp(prefix="kvstreams-test-kafka-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the broker behind the last worker process, if a test ever asked for it."""
    if not hasattr(config, "workerinput"):
        directory = Path(os.environ.pop(DIRECTORY_ENV))
        LocalKafka(broker_config(directory)).down()
        shutil.rmtree(directory)


@pytest.fixture
def children() -> Iterator[Children]:
    """Owner of the test's child processes, each ended by its own id."""
    with Children() as owned:
        yield owned
