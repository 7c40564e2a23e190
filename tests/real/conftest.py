"""Real engines and the whole stack, which the tests of one module share. A module says which engines it wants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.engine import RealEngine
from tests.real.environment import FULL, missing
from tests.real.fleet import Fleet, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests with a real engine where there is none, with the reason."""
    reason = missing()
    if reason is not None:
        for item in items:
            if item.path.parent.name == "real":
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Give two engines of one model. The module may set MODEL, FLAGS (of `vllm serve`) and SETTINGS (of the scope)."""
    directory = tmp_path_factory.mktemp("real")
    model, flags = getattr(request.module, "MODEL", FULL), getattr(request.module, "FLAGS", ())
    engines = [RealEngine(number, model, directory / "engines", flags) for number in (1, 2)]
    with running(engines, directory, **getattr(request.module, "SETTINGS", {})) as started:
        yield started
