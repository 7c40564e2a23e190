"""What tests on Kafka share: the fixtures of tests.helpers.scopes, and two routers for the tests of the HTTP API."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from streams.router_api.http import fast_lane, handlers
from tests.helpers.api import BLOCK_SIZE, BODY_BYTES_MAX, LIVE, TOKENS_MAX, Agents, Fleet, served
from tests.helpers.scopes import ScopeFactory, kafka, new_scope, scope, stack

__all__ = ["kafka", "new_scope", "scope", "stack"]  # fixtures, which pytest finds in this module


@pytest.fixture(scope="session")
def fleet(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give two routers that all tests of the HTTP API share; neither may log an error while handling a request."""
    scope = replace(
        new_scope(tmp_path_factory.mktemp("fleet")),
        block_size=BLOCK_SIZE,
        request_tokens_max=TOKENS_MAX,
        body_bytes_max=BODY_BYTES_MAX,
        stale_after_ms=2000,
    )
    faults: list[str] = []

    class Faults(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            faults.append(self.format(record))

    collector = Faults(logging.ERROR)
    loggers = [logging.getLogger(module.__name__) for module in (handlers, fast_lane)]
    for logger in loggers:
        logger.addHandler(collector)
    agents = Agents(scope, fresh=[LIVE])
    with served(scope) as main, served(scope) as peer, agents.keeping_fresh():
        yield Fleet(scope, main, peer, agents, iter(range(1, 1_000_000)))
    for logger in loggers:
        logger.removeHandler(collector)
    assert not faults


@pytest.fixture(scope="session")
def model(fleet: Fleet) -> str:
    """Give a model with two workers of two ranks each, for tests that leave no booking behind."""
    name = fleet.model()
    fleet.register(name, 2, dp_size=2)
    return name
