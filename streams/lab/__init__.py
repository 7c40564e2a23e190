"""The laboratory: simulated engines and fleets, comparisons, a Kafka for one machine, and the demo.

What lives here: `engines` (`kvstreams sim` and `sim-pool`), `simulation` (fleets in simulated time, `kvstreams
simulate`), `compare` (routing modes on a live fleet), `kafka` (a broker for one machine), `demo`, their `commands`, and
what they share: `trace` (requests of a trace), `processes` and `stack` (child processes). What must not: anything that
a router, an agent, a bridge or a front needs. Only the command line imports this package, and an import contract checks
that.
"""
