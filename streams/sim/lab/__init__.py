"""The routing laboratory: a fleet in simulated time that the product's own routing code drives (docs/quality.md).

What lives here: engines whose time is a formula (`engine`, on `block_pool`, with `engine_config`), workloads
(`workload`, `traces`, `generators`), the router under test (`router`), the loop of events (`fleet`) and what comes out
(`results`). All of it is pure except the reading of files, which is in `traces`.

What must not: routing policies, which are in core.routing, clocks, and processes.
"""
