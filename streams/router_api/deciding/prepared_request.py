"""A request that has been hashed, filtered and matched, so that a router can choose among its ranks.

What lives here: the value that `Router.prepare` returns. What must not: how it is made (router, matching).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from streams.core.loads.bookings import Booking
from streams.core.loads.observations import Forecast
from streams.core.routing.eligibility import WorkerFilter
from streams.core.routing.request import RoutingRequest
from streams.core.workers import Role
from streams.router_api.messages.requests import Blocks, MoeQuery, RouteRequest


class PreparedRequest(NamedTuple):
    """A request as it came, and as routing sees it. It is a tuple because one is made for every request.

    routing: the value from which the decision is made. filters, moe_query: what its matches depend on besides the
    prompt's blocks. arrived_at_ms: only if decisions are recorded. expect: what to expect of its booking where the
    policy expects nothing; None if that is nothing as well.
    """

    request: RouteRequest
    request_id: str
    blocks: Blocks
    filters: WorkerFilter
    moe_query: MoeQuery | None
    routing: RoutingRequest
    arrived_at_ms: int = 0
    expect: Callable[[Booking], Forecast] | None = None

    @property
    def booked_phase(self) -> str | None:
        """The phase by which its booking is identified."""
        return booked_phase(self.request.phase)


def booked_phase(phase: Role | None) -> str | None:
    """The phase by which a booking is identified: a request for both phases is one for the whole request."""
    return None if phase is None or phase is Role.BOTH else phase.value
