"""`kvstreams compare`: routing modes compared on a live fleet (docs/compare.md).

What lives here: the experiment's plan (plan), the modes that it compares (variants), the traffic (traffic), and what
follows from its measurements (estimates). What must not: anything that changes a fleet. It is a client of routers.
"""
