"""Fleets in simulated time that the product's own routing code drives (docs/quality.md).

What lives here: engines whose time is a formula (`lab_engine`, on `block_pool`, with `lab_engine_config`) and the
engines of `kvstreams sim` (`simulated_engine`), workloads (`workload`, `trace_files`, `generators`), the router under
test (`router`) and several of them (`router_group`), the loop of events (`fleet`) and what comes out (`results`).
All of it is pure except the reading of files, which is in `trace_files`.

What must not: routing policies, which are in core.routing, clocks, and processes.
"""
