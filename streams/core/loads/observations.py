"""What bookings show about the speed of engines and about clients: the input from which policies learn.

What lives here: the observations, as values. What must not: what follows from them (core.routing.policies).

State: a part of active load: what policies have not learnt from yet.
"""

from __future__ import annotations

from typing import NamedTuple

from streams.core.ids import RankId


class Forecast(NamedTuple):
    """What a policy expects of a request on the rank that was chosen. It is part of the booking.

    prefill_us: how long the rank loads and computes the prompt. load_us: the part of it for blocks that the rank loads
    from other memory. prefilled_within_ms, over_within_ms: if the client reports nothing, the request counts as
    prefilled, or as over, this long after the booking's last add; 0 for never.
    """

    prefill_us: int = 0
    prefilled_within_ms: int = 0
    over_within_ms: int = 0
    load_us: int = 0


#: A policy that expects nothing: the booking counts until its client or its TTL ends it.
NO_FORECAST = Forecast()

#: The same of a booking whose router alone sees the request end, as a picker does. The router renews the lease when
#: half of it has passed, so that a request of less than 15 s costs no further record. If the router is killed, loads
#: are right again after one lease.
LEASE_MS = 30_000
LEASE = Forecast(over_within_ms=LEASE_MS)


class PrefillObserved(NamedTuple):
    """A rank completed a prompt.

    A rank computes one prompt after another, so a prompt starts when it is booked, or when the rank has completed the
    one before it. n_tokens: the tokens to compute, as booked. took_ms: from that start. forecast: NO_FORECAST if the
    booking has none. continues: the rank was still busy with the prompt before when this one was booked, and may have
    computed a part of it by the time that one was complete.
    """

    rank: RankId
    model: str
    n_tokens: int
    took_ms: float
    forecast: Forecast
    continues: bool = False


class OutputObserved(NamedTuple):
    """A rank generated tokens for a request.

    output_blocks: blocks of tokens generated so far; 0 if the client did not report any. took_ms: since the prompt was
    completed. active_blocks: distinct blocks in use on the rank. ended: whether the request is over. prefills_ms: the
    forecasts of prompts that the rank computed meanwhile, during which it generated nothing.
    """

    rank: RankId
    model: str
    output_blocks: int
    took_ms: float
    active_blocks: int
    ended: bool
    prefills_ms: float = 0.0


class Unreported(NamedTuple):
    """A booking aged because its client did not report in time. ended: it counts as over, otherwise as prefilled."""

    rank: RankId
    ended: bool


Observation = PrefillObserved | OutputObserved | Unreported
