"""Calls that are buffered because their booking is not known: to which bookings they apply."""

from __future__ import annotations

import pytest

from streams.core.loads.bookings import BookingPhase
from streams.errors import NoEligibleWorker, UnknownModel
from streams.router_api.deciding.router import Router
from streams.router_api.messages.requests import parse_route_query
from tests.helpers.api import TOKENS, packed, rank_of
from tests.helpers.routers import ask, router_of
from tests.helpers.shared_loads import World, booking


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
    second.sync.book("r", booking(2), reassigns=True)
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


def test_a_request_that_was_refused_before_a_rank_was_sought_can_be_repeated() -> None:
    """Here because its model is not served yet."""
    router = router_of(1)
    with pytest.raises(UnknownModel):
        ask(router, "r", model="other")
    assert router.report_phase("r", BookingPhase.FREE)["buffered"] is True
    ask(router, "r")
    assert active(router) == 1


def test_a_refused_phase_does_not_change_calls_for_the_other_phase() -> None:
    """A call for the other phase, or for both, still ends that one's booking."""
    for phase_of_call in (None, "prefill"):
        sync = World().replicas[0].sync
        sync.note_refused("r", "decode")
        assert sync.report_phase("r", BookingPhase.FREE, phase_of_call) is False
        sync.book("r", booking(1, phase="prefill"))
        with sync.locked() as loads:
            assert not loads.ranks()


def test_a_call_for_a_refused_request_is_dropped_also_if_the_refusal_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many other requests were refused in the meantime."""
    monkeypatch.setattr("streams.router_api.sharing.late_calls.REFUSED_MAX", 2)
    sync = World().replicas[0].sync
    sync.note_refused("r", None)
    assert sync.report_phase("r", BookingPhase.FREE) is False
    for number in range(3):
        sync.note_refused(f"other {number}", None)
    sync.book("r", booking(1))
    with sync.locked() as loads:
        assert sum(load.requests for load in loads.ranks().values()) == 1


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
