"""kvstreams: the router that sends each LLM request to the engine that already holds its KV cache.

The map:

    core/             pure: ids, events, hashing, prefix index, holdings, loads, cost, selection, decision
    codec, topics     Avro bytes to events and back; the topics as data
    tables/           the transactional table: records, RocksDB, changelog, the order of effects
    indexer_agent     feeds the tables from Faust
    engines/          what engines say (pure), publisher and bridge (I/O)
    router_api/       the router: view, loads, HTTP
    sim/              one pure engine model; a live server and an offline simulator around it
    local/            a real Kafka for one machine, child processes, the demo
    worker            the Faust App of `faust -A streams worker`
    settings, cli     every knob; the command line

`streams.app` is made when it is first asked for: importing a part must not build a Faust app.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "app":
        from streams.worker import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
