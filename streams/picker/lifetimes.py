"""The bookings of a picker, from the pick to the end of the request.

What lives here: what the stream of a request says about its booking, and what is assumed where it says nothing. What
must not: the order of a stream's messages (protocol), and the rules of assuming (assumed_ends).

State: the bookings that gateways report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streams.core.ids import RankId, WorkerId
from streams.core.loads.bookings import BookingPhase
from streams.core.routing.policies.timings import DECODE_DEFAULT, OUTPUT_TOKENS_DEFAULT
from streams.core.routing.selection import RouterMode
from streams.errors import KvStreamsError
from streams.picker.assumed_ends import Assumed, AssumedEnds, RankReport
from streams.picker.fleet import PickerFleet
from streams.router_api.deciding.compose import monotonic_ms
from streams.router_api.deciding.router import Router


@dataclass(frozen=True, slots=True)
class Booked:
    """A booking that was made for a stream. ranks: those that were picked by their endpoints, the chosen one first."""

    request_id: str
    phase: str | None
    ranks: Mapping[str, RankId]

    @property
    def endpoint(self) -> str:
        """The endpoint that was chosen."""
        return next(iter(self.ranks))


class Lifetimes:
    """Ends every booking of one picker. Used on one loop.

    n_served_elsewhere: requests that another endpoint served than the first one of their pick. n_assumed: bookings
    whose ends were assumed.
    """

    def __init__(self, router: Router, fleet: PickerFleet, avoid: Callable[[WorkerId], None]) -> None:
        """avoid: lets every router avoid a worker for a short time, without waiting."""
        self._router = router
        self._fleet = fleet
        self._avoid = avoid
        self._assumed = AssumedEnds()
        self._ages_by_itself = router.policy.mode is RouterMode.EXPECTED_TIME
        self.n_served_elsewhere = 0
        self.n_assumed = 0

    @property
    def n_open(self) -> int:
        """Bookings whose ends will be assumed."""
        return len(self._assumed)

    def first_byte(self, booked: Booked, status: int, served: str | None) -> None:
        """The answer of a request has begun. served: the endpoint that sent it."""
        if served is not None and served != booked.endpoint:
            self._served_elsewhere(booked, served)
        if status < 300:
            self._report(booked, BookingPhase.PREFILL)

    def ended(self, booked: Booked, *, is_seen: bool) -> None:
        """A stream has ended. is_seen: the request has, too; otherwise it goes on unseen."""
        if is_seen:
            self._report(booked, BookingPhase.FREE)
        else:
            self._assume(booked)

    def tick(self) -> None:
        """End bookings that are over by now. Called about once a second."""
        prefilled, over = self._assumed.due(monotonic_ms())
        for request_id, phase in prefilled:
            self._report_phase(request_id, BookingPhase.PREFILL, phase)
        if len(self._assumed):
            over += self._assumed.reported(self._reports())
        self._end_all(over)

    def _served_elsewhere(self, booked: Booked, served: str) -> None:
        """The gateway turned to another endpoint, since the chosen one did not answer: others should avoid it too."""
        self.n_served_elsewhere += 1
        rank = booked.ranks.get(served) or self._fleet.rank_at(served)
        if rank is not None:
            self._router.served_by(booked.request_id, rank, booked.phase)
        self._avoid(booked.ranks[booked.endpoint].worker_id)

    def _end_all(self, over: list[Assumed]) -> None:
        for request_id, phase in over:
            self.n_assumed += 1
            self._router.end_unreported(request_id, phase)

    def _reports(self) -> dict[RankId, RankReport]:
        """What engines report now, by the clock of this module."""
        engines = self._router.view.fleet.engines
        metrics = engines.fleet().metrics
        state = engines.fleet(metrics)
        received_ms = state.received_ms or {}
        return {
            rank: RankReport(found.request_active_slots + found.num_requests_waiting, received_ms[rank])
            for rank, found in state.metrics.items()
            if rank in received_ms
        }

    def _assume(self, booked: Booked) -> None:
        with self._router.loads.locked() as loads:
            live = loads.live(booked.request_id, booked.phase)
        if live is None:
            return
        booking, now_ms = live[1], float(monotonic_ms())
        forecast = booking.forecast
        if forecast.over_within_ms:
            prefilled_ms = None if self._ages_by_itself else now_ms + forecast.prefilled_within_ms
            over_ms = now_ms + forecast.over_within_ms
        else:  # the mode has no forecast of its own
            prefilled_ms = now_ms + booking.prefill_tokens * self._router.settings.prefill_us_per_token / 1000.0
            n_tokens = booking.expected_output_tokens or OUTPUT_TOKENS_DEFAULT
            over_ms = prefilled_ms + n_tokens * DECODE_DEFAULT.base
        assumed = Assumed(booked.request_id, booked.phase)
        self._end_all(self._assumed.add(assumed, booking.rank, now_ms, prefilled_ms, over_ms))

    def _report(self, booked: Booked, what: BookingPhase) -> None:
        self._report_phase(booked.request_id, what, booked.phase)

    def _report_phase(self, request_id: str, what: BookingPhase, phase: str | None) -> None:
        try:
            self._router.report_phase(request_id, what, phase)
        except KvStreamsError:  # the router reads its topics again: the booking ends by its TTL
            pass
