"""`kvstreams demo` and `kvstreams up`: a whole fleet on one machine, and what it shows.

What lives here: the acts (run), the requests that they send (drive), streams that migrate between engines
(pooled_fleet), and the figures that are shown (figures). What must not: how processes are started (stack, processes).
Requires the `local` extra.
"""
