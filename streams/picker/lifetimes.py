"""The bookings of a picker, from the pick to the end of the request.

What lives here: what the stream of a request says about its booking, and what is assumed where it says nothing. What
must not: the order of a stream's messages (protocol), and the rules of assuming (assumed_ends).

A picker alone sees its streams end, so its bookings must not outlive it. While a stream is open, its booking has a
lease, which the picker renews. Where the stream ends with the pick, the booking has the forecast of assumed_ends. So
on every router the bookings of a picker that was killed count as over in the end.

State: the bookings that gateways report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile

from streams.core.ids import RankId, WorkerId
from streams.core.loads.bookings import Booking, BookingPhase
from streams.core.loads.observations import LEASE, LEASE_MS, Forecast
from streams.core.routing.selection import RouterMode
from streams.errors import KvStreamsError
from streams.picker.assumed_ends import Assumed, AssumedEnds, RankReport, unseen
from streams.picker.fleet import PickerFleet
from streams.router_api.deciding.compose import monotonic_ms
from streams.router_api.deciding.router import Router
from streams.settings import PickerServerSettings

#: Leases that are renewed in one step of the loop, so that it takes about a ms.
RENEWED_TOGETHER_MAX = 64


def expecting(settings: PickerServerSettings) -> Callable[[Booking], Forecast]:
    """What a picker expects of its bookings where the policy expects nothing."""
    if not settings.picker_ends_stream:
        return lambda _: LEASE
    return lambda booking: unseen(booking, settings.prefill_us_per_token)


@dataclass(frozen=True, slots=True, eq=False)
class Booked:
    """A booking that was made for a stream.

    ranks: those that were picked by their endpoints, the chosen one first. shows_prefill: whether the answer begins
    when the prompt is computed. A page with generated text begins when all of it is, and engines send the headers of a
    stream long before its first token.
    """

    request_id: str
    phase: str | None
    ranks: Mapping[str, RankId]
    shows_prefill: bool = True

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
        self._learns_speeds = router.policy.mode is RouterMode.EXPECTED_TIME
        self._running: dict[Booked, float] = {}  # those whose streams are open, and when their leases are renewed
        self.n_served_elsewhere = 0
        self.n_assumed = 0

    @property
    def n_open(self) -> int:
        """Bookings whose ends will be assumed."""
        return len(self._assumed)

    def picked(self, booked: Booked) -> None:
        """The stream of a request has its pick, and stays open until `ended`."""
        self._running[booked] = monotonic_ms() + LEASE_MS / 2

    def first_byte(self, booked: Booked, status: int, served: str | None) -> None:
        """The answer of a request has begun. served: the endpoint that sent it."""
        if served is not None and served != booked.endpoint:
            self._served_elsewhere(booked, served)
        # Where speeds are learnt, a wrong time is worse than none: the booking ages by its forecast.
        if status < 300 and (booked.shows_prefill or not self._learns_speeds):
            self._report(booked, BookingPhase.PREFILL)

    def ended(self, booked: Booked, *, is_seen: bool) -> None:
        """A stream has ended. is_seen: the request has, too; otherwise it goes on unseen."""
        self._running.pop(booked, None)
        if is_seen:
            self._report(booked, BookingPhase.FREE)
        else:
            self._assume(booked)

    def tick(self) -> None:
        """End bookings that are over by now. Called about once a second."""
        if len(self._assumed):
            self._end_all(self._assumed.over(monotonic_ms(), self._reports()))

    def renew(self) -> bool:
        """Renew leases of which half has passed. Returns whether others are due, for the next step of the loop."""
        now_ms = monotonic_ms()
        is_due = takewhile(lambda entry: entry[1] <= now_ms, self._running.items())
        due = [booked for booked, _ in islice(is_due, RENEWED_TOGETHER_MAX)]
        for booked in due:
            del self._running[booked]
            self.picked(booked)
            self._router.loads.renew(booked.request_id, booked.phase)
        return len(due) == RENEWED_TOGETHER_MAX

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
        if forecast == LEASE or not forecast.over_within_ms:
            forecast = unseen(booking, self._router.settings.prefill_us_per_token)
            self._router.loads.renew(booked.request_id, booked.phase, forecast)
        assumed = Assumed(booked.request_id, booked.phase)
        self._end_all(self._assumed.add(assumed, booking.rank, now_ms, now_ms + forecast.over_within_ms))

    def _report(self, booked: Booked, what: BookingPhase) -> None:
        try:
            self._router.report_phase(booked.request_id, what, booked.phase)
        except KvStreamsError:  # the router reads its topics again: the booking ends by its forecast
            pass
