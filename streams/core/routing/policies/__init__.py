"""Routing policies: how candidates are priced by what a router knows.

What lives here: the policies by engine reports (engine_reports), the protocol of policies that are found by name
(interface), the built-in ones (registry), and `expected-time`. What must not: clocks, I/O, booking.
"""
