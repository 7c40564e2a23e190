"""kvstreams: the router that sends each LLM request to the engine that already holds its KV cache.

The map of the package. docs/modules.md has every module.

    core/             pure, without I/O, clock, randomness or logging
      index/            which rank holds which blocks: the run tree, predictions, folding run records
      reducer/          what events do to the ranks of one partition: order, holdings, restatements, leases
      loads/            bookings, and the blocks that active requests use
      block_facts/      sets of facts about blocks: expert labels, placements in CXL pools
      routing/          a request becomes a choice: filters, cost, policies, sessions
      kernels/          what compiled kernels share
    tables/           the transactional tables of the agents: records, reducers, transactions, RocksDB, changelogs
    cxl/              blocks in CXL memory: states, records, views
    engines/          dialects, ledger, publisher, and the bridge that reads engines' events
    router_api/       the router: HTTP, decisions, bookings shared through Kafka, and what it knows of its scope
    client/           the Python client: over HTTP, or with a router in the same process
    indexer_agent     the Faust agent, which feeds partitions of the tables from a stream
    frontend/         the OpenAI-compatible front, a client of routers
    decision_log/     what routers write down of their decisions
    kafka/            clients, records and their bytes, how Faust delivers records, the private parts of Faust
    process/          logs, metrics, an HTTP server, progress, waiting, fault points of tests
    security/         tokens, certificates, credentials, ACLs
    worker            the Faust App that `faust -A streams worker` runs
    reset, warming    emptying a scope; compiling kernels before they are needed
    topics, settings  the topics as data; the settings of each process
    model_registry, policy_plugins
                      block sizes of models; policies of other packages
    lab/              for the command line only: simulated engines, the routing laboratory, comparisons, a local Kafka,
                      the demo
    doctor/           what is wrong with a fleet, in words
    cli/              the command line, one module per group of commands

The attribute `streams.app` is created when it is first used, because importing a part must not build a Faust App.
Building it has no effects: only Faust's command `worker` listens, connects to Kafka and compiles kernels.
"""

from __future__ import annotations

from typing import Any

from streams.version import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name == "app":
        from streams.worker import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
