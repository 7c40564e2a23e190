"""Routing policies: how candidates are priced by what a router knows.

What lives here: the policies by engine reports (engine_reports), the protocol of policies that are found by name
(interface), the built-in ones (registry), and `expected-time`. What must not: clocks, I/O, booking.
"""

from streams.core.routing.policies.engine_reports import (
    ALPHA_EVEN,
    ALPHA_UNEVEN,
    BALANCE_THRESHOLD,
    GAMMA,
    MODES,
    hit_rates,
    hit_usage_waiting,
    load_deviation,
)

__all__ = [
    "ALPHA_EVEN",
    "ALPHA_UNEVEN",
    "BALANCE_THRESHOLD",
    "GAMMA",
    "MODES",
    "hit_rates",
    "hit_usage_waiting",
    "load_deviation",
]
