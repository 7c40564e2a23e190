"""The start time of an engine's process, read from its Prometheus page."""

from __future__ import annotations

import pytest

from streams.core.ids import Incarnation
from streams.engines.continuity import Evidence
from streams.engines.process_start import parse_process_start


@pytest.mark.parametrize(
    ("page", "started"),
    [
        ("process_start_time_seconds 1.5\n", 1_500_000),
        ('# TYPE x gauge\nprocess_start_time_seconds{pid="7"} 1.7e9\nup 1\n', 1_700_000_000_000_000),
        ("up 1\n", None),
        ("my_process_start_time_seconds 5\n", None),
        ("process_start_time_seconds soon\n", None),
        ("process_start_time_seconds NaN\n", None),
        ("process_start_time_seconds +Inf\n", None),
        ("", None),
    ],
)
def test_a_start_time_becomes_microseconds(page: str, started: int | None) -> None:
    """A page without a usable start time still shows that the engine is reachable."""
    assert parse_process_start(page) == Evidence(True, None if started is None else Incarnation(started))
