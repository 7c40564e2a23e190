"""Calls that came before their booking, and requests that this router refused.

What lives here: what waits for a booking that another router made, and for how long. What must not: bookings, and what
a call does to them (loads_sync, whose lock guards this state).

State: buffered calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple

from streams.core.loads.bookings import BookingPhase

#: Calls that are buffered because their booking, made by another router, may still be on its way.
BUFFERED_CALLS_MAX = 10_000
BUFFERED_CALL_TTL_MS = 60_000

#: Refused requests that are remembered, for as long as a call is buffered.
REFUSED_MAX = 10_000

#: The phases that a booking may have.
_PHASES = (None, "prefill", "decode")
_NONE: frozenset[str | None] = frozenset()

#: What a buffered call reports: a phase, or generated tokens.
Call = BookingPhase | Literal["output"]
_CALLS: tuple[Call, ...] = ("output", BookingPhase.PREFILL, BookingPhase.FREE)

#: Where a call is buffered: request id, what it reports, and the phase of the booking that it named.
_Key = tuple[str, Call, str | None]


class _LateCall(NamedTuple):
    """A call that waits for its booking. output_tokens: 0 for a phase.

    of_refused: phases that this router refused. The call is about these requests, so it must not end the next ones.
    """

    since_ms: int
    output_tokens: int
    of_refused: frozenset[str | None]


class LateCalls:
    """Not thread-safe. unknown: calls that were dropped because their booking did not come."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """now_ms: a monotonic clock."""
        self._now_ms = now_ms
        self._calls: OrderedDict[_Key, _LateCall] = OrderedDict()
        self._refused: OrderedDict[tuple[str, str | None], int] = OrderedDict()  # since when
        self.unknown = 0

    def buffer(self, request_id: str, call: Call, phase: str | None, output_tokens: int = 0) -> None:
        """Keep a call until its booking comes. Of several ones with output, the greatest number counts."""
        before = self._calls.pop((request_id, call, phase), None)
        if before is not None:
            output_tokens = max(output_tokens, before.output_tokens)
        of_refused = _NONE
        if self._refused:
            phases = _PHASES if phase is None else (phase,)
            of_refused = frozenset(name for name in phases if (request_id, name) in self._refused)
        self._calls[request_id, call, phase] = _LateCall(self._now_ms(), output_tokens, of_refused)
        if len(self._calls) > BUFFERED_CALLS_MAX:
            self._calls.popitem(last=False)
            self.unknown += 1

    def note_refused(self, request_id: str, phase: str | None) -> None:
        """A request ended here without a booking: calls about it do not apply to the next one of its id."""
        self._refused.pop((request_id, phase), None)
        self._refused[request_id, phase] = self._now_ms()
        if len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)
        for key in _keys_of(request_id, phase):
            call = self._calls.get(key)
            if call is not None:
                self._calls[key] = call._replace(of_refused=call.of_refused | {phase})

    def begin_anew(self, request_id: str, phase: str | None) -> None:
        """This router books: drop the calls for an earlier request of this id and phase, which it refused."""
        if not self._refused and not self._calls:
            return
        self._refused.pop((request_id, phase), None)
        for key in _keys_of(request_id, phase):
            call = self._calls.get(key)
            if call is not None and phase in call.of_refused:
                del self._calls[key]
                self.unknown += 1

    def take_output(self, request_id: str, phase: str | None) -> list[int]:
        """Remove and return the output that was reported for a booking of this id and phase."""
        return [call.output_tokens for _, call in self._take(request_id, "output", phase)]

    def take(self, request_id: str, what: BookingPhase, phase: str | None) -> dict[str | None, int]:
        """Remove the reports for a booking of this id and phase; return since when they wait, by the phase they named.

        Those are its own phase and None, which stands for all.
        """
        return {named: call.since_ms for named, call in self._take(request_id, what, phase)}

    def expire(self, now_ms: int) -> None:
        """Drop the calls whose booking did not come in time, and forget refused requests."""
        while self._calls:
            oldest = next(iter(self._calls))
            if self._calls[oldest].since_ms + BUFFERED_CALL_TTL_MS > now_ms:
                break
            del self._calls[oldest]
            self.unknown += 1
        while self._refused:
            first = next(iter(self._refused))
            if self._refused[first] + BUFFERED_CALL_TTL_MS > now_ms:
                break
            del self._refused[first]

    def __bool__(self) -> bool:
        """Whether any call waits."""
        return bool(self._calls)

    def _take(self, request_id: str, call: Call, phase: str | None) -> list[tuple[str | None, _LateCall]]:
        calls = [(named, self._calls.pop((request_id, call, named), None)) for named in _named_by(phase)]
        return [(named, late) for named, late in calls if late is not None]


def _named_by(phase: str | None) -> tuple[str | None, ...]:
    """The phases that calls name which apply to a booking of this phase."""
    return (None,) if phase is None else (None, phase)


def _keys_of(request_id: str, phase: str | None) -> list[_Key]:
    """Where the calls are buffered that a booking of this id and phase would get."""
    return [(request_id, call, named) for named in _named_by(phase) for call in _CALLS]
