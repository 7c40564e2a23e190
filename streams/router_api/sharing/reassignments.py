"""Requests that were booked more than once: which booking remains, and what a report on another one means for it.

What lives here: decisions about bookings of one request that several routers made, or that were reassigned. What must
not: state (attempts, core.loads), and publishing what follows (loads_sync).

Times of day are those of all routers, in ms since the epoch. A record says when it was written: an add, when its
booking was made; another one, when a client reported it.
"""

from __future__ import annotations

from typing import NamedTuple

from streams.core.loads.bookings import ActiveLoads, BookingId, BookingPhase
from streams.kafka.load_records import time_written_ms
from streams.router_api.sharing.attempts import Attempts
from streams.router_api.sharing.own_bookings import Content

#: In the record of an add: the router that wrote it does not know when the booking was made.
UNKNOWN = 0

#: In the record of a free: no client reported the end of this booking. Another booking replaces it, or its router
#: expects no report and assumes its end.
UNREPORTED = 0


class Reassigned(NamedTuple):
    """One booking of a request replaces another one. at_ms: the time of day of that."""

    former: BookingId
    latter: BookingId
    at_ms: int


class PhaseReport(NamedTuple):
    """A phase of a booking that is to be published, and the time of day of what a client reported."""

    booking_id: BookingId
    phase: BookingPhase
    reported_ms: int


def between_two(
    own: BookingId, made_ms: int | None, newer: BookingId, newer_ms: int, *, unlogged: bool
) -> Reassigned | None:
    """Which of two bookings of one request id and phase remains: that of this router, or a newer one in the log.

    made_ms, newer_ms: when they were made. unlogged: this router's has not been read back from the log, so it is the
    later one there. The order of the log decides only between bookings of the same millisecond: while Kafka is away,
    the records of two routers wait, and come into the log in any order. None if one of the times is not known here: the
    other router decides then, since if both could take theirs for the earlier one, both would end.
    """
    if made_ms is None or newer_ms == UNKNOWN:
        return None
    if made_ms > newer_ms or (made_ms == newer_ms and unlogged):
        return Reassigned(newer, own, made_ms)
    return Reassigned(own, newer, newer_ms)


def own_ended_by(
    freed: BookingId, value: bytes, loads: ActiveLoads, attempts: Attempts, router_id: str
) -> list[PhaseReport]:
    """Ends of this router's bookings of a request that a client ended elsewhere after they were made.

    That router knew another booking of the request, which the record names, and has not read these. value: the record,
    which is not folded yet. If the booking that it names is of one phase, the client may have ended that phase alone;
    then the router that was asked remembers it (LoadsSync.report_phase).
    """
    own = [known for known in loads.live_ids(freed.request_id) if known.router_id == router_id and known != freed]
    reported_ms = time_written_ms(value) if own else UNREPORTED
    if reported_ms == UNREPORTED:
        return []
    booking = loads.booking(freed)
    if booking is None:  # it has ended, or is not known
        is_of_phase = any(loads.knows(freed.request_id, phase) for phase in ("prefill", "decode"))
    else:
        is_of_phase = booking.phase is not None
    if is_of_phase:
        return []
    return [
        PhaseReport(booking_id, BookingPhase.FREE, reported_ms)
        for booking_id in own
        if (attempts.made_ms(booking_id) or reported_ms) < reported_ms
    ]


def ended_before(content: Content, value: bytes, loads: ActiveLoads, attempts: Attempts) -> list[PhaseReport]:
    """The end of a booking of another router that was read, if it was made before a client ended the request here."""
    booking_id, _, booking = content
    assert booking is not None  # it is an add
    ended_ms = attempts.ended_ms(booking_id.request_id, booking.phase)
    if not ended_ms or loads.booking(booking_id) is None:
        return []
    # One of the same millisecond is probably the next one of this id, after which no other call may come.
    is_before = UNKNOWN < time_written_ms(value) < ended_ms
    return [PhaseReport(booking_id, BookingPhase.FREE, ended_ms)] if is_before else []


def followed(content: Content, value: bytes, loads: ActiveLoads, attempts: Attempts) -> list[PhaseReport]:
    """What a report that was read means for the bookings that have replaced the one which it names.

    This router must have reassigned that one, and not after the report. A report that came before is about an attempt
    that is over, as that of a client which ends a request and then repeats it under its id.
    """
    booking_id, phase, _ = content
    if phase is BookingPhase.ADD or not attempts.was_reassigned(booking_id):
        return []
    reported_ms = time_written_ms(value)
    if reported_ms == UNREPORTED:
        return []
    reports: list[PhaseReport] = []
    seen = {booking_id}  # records of a faulty writer may form a circle
    once = phase is BookingPhase.FREE  # otherwise two routers could answer each other without end
    while (latter := attempts.reassigned_to(booking_id, reported_ms, once=once)) is not None and latter not in seen:
        booking_id = latter
        seen.add(booking_id)
        # Another router may have ended it, because it reassigned it. It waits for this report as well.
        if phase is BookingPhase.FREE or (loads.booking(booking_id) is not None and not loads.is_prefilled(booking_id)):
            reports.append(PhaseReport(booking_id, phase, reported_ms))
    return reports
