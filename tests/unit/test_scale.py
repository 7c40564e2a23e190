"""No decision makes a call for each rank: one in a fleet of 512 ranks makes as many calls as one in a fleet of 64.

The calls of Python and of C are counted, so that a loop over all ranks shows, whatever it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.decision import RouterFleet
from streams.core.bridge_pulses import BridgePulse
from streams.core.ids import DpRank, RankId, Tier, WorkerId
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.selection import RouterMode
from streams.core.routing.trust import AnswerMode
from streams.kafka.records import PULSES
from streams.lab.engines.held_chains import FIRST_EPOCH
from streams.router_api.messages.requests import ConfigOverride, RouteRequest
from streams.tables.records import PROGRESS_KEY, encode_progress

SMALL, LARGE = 64, 512
TOKENS = 512

#: Some calls depend on the time, such as those that expire bookings once per millisecond. A loop makes 448 more.
MORE_MAX = 64

#: Modes whose costs add up what each engine reports, in Python.
BY_REPORTS = {RouterMode.HIT_USAGE_WAITING, RouterMode.LOAD_DEVIATION}
MODES = sorted(set(RouterMode) - BY_REPORTS - {RouterMode.POLICY, RouterMode.DIRECT})


def calls_of(action: Callable[[], object]) -> int:
    """How many functions an action calls."""
    n_calls = 0

    def count(frame: FrameType, event: str, of: Any) -> None:
        nonlocal n_calls
        n_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return n_calls


class Asked:
    """A fleet whose ranks hold prompts in two tiers, and the decisions that are asked of it."""

    def __init__(self, n_ranks: int, **changes: object) -> None:
        self.fleet = RouterFleet(n_ranks, TOKENS, (Tier.DEVICE, Tier.HOST), **changes)
        self.view = self.fleet.router.view
        self.number = 0

    def decide(self, **fields: Any) -> AnswerMode:
        """Decide and book."""
        self.number += 1
        request = RouteRequest(request_id=f"r{self.number}", **fields)
        return self.fleet.router.route(request, self.fleet.prompts[self.number % 4]).trust.mode

    def calls_after(self, change: Callable[[Asked, int], object], **fields: Any) -> int:
        """The calls of a decision after a change, which was made for other ranks before: caches are filled."""
        for number in (2, 3, 4):
            change(self, number)
            self.decide(**fields)
        change(self, 5)
        return calls_of(lambda: self.decide(**fields))

    def close(self) -> None:
        self.fleet.router._kafka.close()


def nothing(asked: Asked, number: int) -> None:
    """The fleet is as it was."""


def booked(asked: Asked, number: int) -> None:
    """A rank gets its first booking."""
    asked.decide(worker_id=number + 10)


def reported(asked: Asked, number: int) -> None:
    """An engine reports for the first time, and its lease and its progress are renewed."""
    asked.fleet.renew(number)


def degraded(asked: Asked, number: int) -> None:
    """A rank loses events while the bridge of all ranks does not feed one of them."""
    rank = RankId(WorkerId(number), DpRank(0))
    pulse = BridgePulse("bench", number, tuple(map(WorkerId, asked.fleet.worker_ids[1:])))
    asked.view.fold_report(PULSES.keys.pack("bench"), PULSES.encode(pulse))
    lost = Progress(rank, FIRST_EPOCH, 1000, health=Health.DEGRADED, model="m", block_size=16, lease_ms=6000)
    asked.view.fold_index(PROGRESS_KEY.pack(rank), encode_progress(lost))


def stored(asked: Asked, number: int) -> None:
    """A rank stores another prompt."""
    records = asked.fleet._held(number, asked.fleet.prompt(), number, Tier.DEVICE)
    assert not asked.view.fold_index_batch(records)


CASES: dict[str, tuple[Callable[[Asked, int], object], dict[str, object], dict[str, Any]]] = {
    **{mode: (nothing, {"router_mode": mode}, {}) for mode in MODES},
    "booked": (booked, {}, {}),
    "reported": (reported, {}, {}),
    "reported, busy thresholds": (reported, {"active_decode_blocks_threshold": 0.9}, {}),
    "degraded": (degraded, {}, {}),
    "stored": (stored, {}, {}),
    "temperature": (nothing, {}, {"router_config_override": ConfigOverride(router_temperature=0.5)}),
    "a worker excluded": (nothing, {}, {"excluded_worker_ids": [7]}),
    "a session": (nothing, {"router_session_affinity_ttl_s": 60.0}, {"session_id": "s"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_decision_makes_as_many_calls_in_a_larger_fleet(case: str) -> None:
    """After each change that a fleet at work makes all the time, and in each mode that prices ranks as columns."""
    change, settings, fields = CASES[case]
    counts = []
    for n_ranks in (SMALL, LARGE):
        asked = Asked(n_ranks, **settings)
        try:
            counts.append(asked.calls_after(change, **fields))
        finally:
            asked.close()
    small, large = counts
    assert large <= small + MORE_MAX, f"{small} calls with {SMALL} ranks, {large} with {LARGE}"


def test_counting_finds_a_loop() -> None:
    """A pass over all ranks in Python shows in the count."""
    numbers = dict.fromkeys(range(LARGE), 1)
    assert calls_of(lambda: [numbers.get(number) for number in range(LARGE)]) >= LARGE
