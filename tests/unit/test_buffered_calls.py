"""Calls that are buffered because their booking is not known: to which bookings they apply."""

from __future__ import annotations

import pytest

from streams.core.loads.bookings import BookingPhase
from streams.errors import NoEligibleWorker
from streams.router_api.router import Router
from streams.router_api.wire import parse_route_query
from tests.helpers.api import TOKENS, packed, rank_of
from tests.unit.test_loads_sync import World, booking
from tests.unit.test_router_choices import ask, router_of


def active(router: Router) -> int:
    with router.loads.locked() as loads:
        return sum(load.requests for load in loads.ranks().values())


def refuse(router: Router, request_id: str) -> None:
    with pytest.raises(NoEligibleWorker):
        ask(router, request_id, allowed_worker_ids="99")


@pytest.mark.parametrize("phase", [None, "decode"])
def test_a_call_for_a_refused_request_applies_to_other_routers_and_not_to_the_repetition(phase: str | None) -> None:
    """It ends another router's booking of that id when that is read, and does not end one that is made here later."""
    world = World()
    first, second, _ = world.replicas
    for request_id in ("r", "s"):
        second.sync.note_refused(request_id, phase)
        assert second.sync.report_phase(request_id, BookingPhase.FREE) is False
        assert second.sync.report_output(request_id, 16, phase) is False
    first.sync.book("r", booking(1, phase=phase))
    second.sync.book("s", booking(2, phase=phase))
    assert second.sync.unknown_calls == 2
    assert world.same() == {rank_of(2): (16, 1, 1)}


def test_a_dropped_call_does_not_end_the_booking_after_it_moved_to_another_router() -> None:
    """A call that is older than this router's booking does not wait for the booking of a router that comes after it."""
    world = World()
    first, second, _ = world.replicas
    assert first.sync.report_phase("r", BookingPhase.FREE) is False
    first.sync.note_refused("r", None)
    first.sync.book("r", booking(1))
    world.settle()
    second.sync.end("r", None)
    second.sync.book("r", booking(2))
    assert world.same() == {rank_of(2): (16, 1, 1)}


def test_a_call_that_overtakes_its_request_counts() -> None:
    """A client that gives up breaks its connection and sends the end on another one, which may be read first."""
    router = router_of(1)
    assert router.report_phase("r", BookingPhase.FREE)["buffered"] is True
    early = router.prepare(parse_route_query({"request_id": "s"}), packed(TOKENS))
    assert router.report_phase("s", BookingPhase.FREE)["buffered"] is True
    router.try_book(early)
    ask(router, "r")
    assert active(router) == 0


@pytest.mark.parametrize("early", [True, False])
def test_a_refused_request_can_be_repeated_after_its_end_was_reported(early: bool) -> None:
    """Whether the end came before the refusal or after it. The end of the repetition counts."""
    router = router_of(1)
    if early:
        assert router.report_phase("r", BookingPhase.FREE)["buffered"] is True
    refuse(router, "r")
    if not early:
        assert router.report_phase("r", BookingPhase.FREE)["buffered"] is True
    ask(router, "r")
    assert active(router) == 1
    assert router.report_phase("r", BookingPhase.FREE)["buffered"] is False
    assert active(router) == 0
