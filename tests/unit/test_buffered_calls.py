"""Calls that are buffered because their booking is not known: to which bookings they apply."""

from __future__ import annotations

import pytest

from streams.core.loads.bookings import BookingPhase
from streams.router_api.wire import BookRequest, parse_route_query
from tests.helpers.api import TOKENS, packed, rank_of
from tests.unit.test_loads_sync import World, booking
from tests.unit.test_router_choices import ask, router_of


def active(router: object) -> int:
    with router.loads.locked() as loads:  # type: ignore[attr-defined]
        return sum(load.requests for load in loads.ranks().values())


@pytest.mark.parametrize("phase", [None, "decode"])
def test_a_buffered_call_applies_to_other_routers_and_not_to_a_later_request_here(phase: str | None) -> None:
    """It ends another router's booking when that is read, and does not end one that is requested here afterwards."""
    world = World()
    first, second, _ = world.replicas
    for request_id in ("r", "s"):
        assert second.sync.report_phase(request_id, BookingPhase.FREE) is False
        assert second.sync.report_output(request_id, 16, phase) is False
    first.sync.book("r", booking(1, phase=phase))
    second.sync.book("s", booking(2, phase=phase), second.sync.calls_buffered)
    assert second.sync.unknown_calls == 2
    assert world.same() == {rank_of(2): (16, 1, 1)}


def test_a_dropped_call_does_not_end_the_booking_after_it_moved_to_another_router() -> None:
    """A call that is older than this router's booking does not wait for the booking of a router that comes after it."""
    world = World()
    first, second, _ = world.replicas
    assert first.sync.report_phase("r", BookingPhase.FREE) is False
    first.sync.book("r", booking(1), first.sync.calls_buffered)
    world.settle()
    second.sync.end("r", None)
    second.sync.book("r", booking(2))
    assert world.same() == {rank_of(2): (16, 1, 1)}


def test_a_call_that_overtakes_its_request_counts() -> None:
    """A request that is still being prepared, or waits, when its client ends it is not charged; the next one is."""
    router = router_of(1)
    early = router.prepare(parse_route_query({"request_id": "r"}), packed(TOKENS))
    assert router.report_phase("r", BookingPhase.FREE)["buffered"] is True
    router.try_book(early)
    assert active(router) == 0
    assert router.report_phase("s", BookingPhase.FREE)["buffered"] is True
    ask(router, "s")
    assert active(router) == 1
    assert router.report_phase("t", BookingPhase.FREE)["buffered"] is True
    router.book("t", BookRequest(worker_id=1, dp_rank=0), packed(TOKENS))
    assert active(router) == 2
