"""What tests of trust share: a fleet of real processes, to which each test adds its own model, engines and bridge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack
from tests.helpers.scopes import ScopeFactory, kafka, new_scope, scope, stack
from tests.helpers.trust import TrustFleet

__all__ = ["kafka", "new_scope", "scope", "stack"]  # fixtures, which pytest finds in this module


@dataclass(frozen=True, slots=True)
class _Running:
    stack: Stack
    worker: RouterProcess


@pytest.fixture(scope="session")
def running(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Running]:
    """Start one worker with its router for all tests of this process."""
    directory = tmp_path_factory.mktemp("trust")
    with Children() as owned:
        stack = Stack(new_scope(directory / "state"), directory, owned)
        yield _Running(stack, stack.worker())


@pytest.fixture
def fleet(running: _Running, children: Children) -> TrustFleet:
    """Give the running fleet. What the test starts ends with it; the worker and its router must be left as they are."""
    return TrustFleet(running.stack, running.worker, children)
