"""`python -m benchmarks.queueing`: what it costs that several routers queue, each by itself.

What lives here: the times to first token of simulated engines behind one router and behind four, with queues and
without. What must not: the simulation (streams.sim.queued). Exits 1 if four routers that queue take more than
RATIO_MAX times as long as one, over all traces.

Everything is simulated, so the results do not depend on the machine. Bookings reach the other routers after 11 ms on
average and 50 ms at p99.
"""

from __future__ import annotations

import random
import statistics
import sys

import click
import numpy as np
from rich.table import Table

from benchmarks.report import wide_console
from streams.core.routing.decision import RoutePolicy
from streams.core.routing.queue import QUEUE_BACKLOG_MS, QueuePolicy
from streams.sim.engine_config import EngineConfig
from streams.sim.queued import QueueConfig, simulate_queued
from streams.sim.trace import ChatShape, TraceRequest, generate

N_ENGINES = 8
N_ROUTERS = 4

#: The mean time to first token with four routers, divided by that with one.
RATIO_MAX = 1.05


def ttft_ms(trace: list[TraceRequest], config: QueueConfig, seed: int) -> float:
    """Mean time to first token of a trace, including the time in the queue."""
    outcomes = simulate_queued(trace, N_ENGINES, EngineConfig(), RoutePolicy(), config, random.Random(seed))
    return statistics.fmean(outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None)


def trace_of(rate_per_s: float, n_requests: int, seed: int) -> list[TraceRequest]:
    """Chat traffic; eight engines are saturated at about 22 requests per second."""
    return generate(n_requests, np.random.default_rng(seed), ChatShape(rate_per_s=rate_per_s))


@click.command()
@click.option("--rate", "rate_per_s", default=18.0, show_default=True, help="Requests per second.")
@click.option("--requests", "n_requests", default=400, show_default=True, help="Requests of each trace.")
@click.option("--seeds", default=22, show_default=True, help="Number of traces, of which one varies by 10 %.")
@click.option("--backlog-ms", default=QUEUE_BACKLOG_MS, show_default=True, help="As router_queue_backlog_ms.")
@click.option("--policy", type=click.Choice(list(QueuePolicy)), default=QueuePolicy.ARRIVAL_PLUS_PREFILL)
def main(rate_per_s: float, n_requests: int, seeds: int, backlog_ms: float, policy: str) -> None:
    """Compare one router with four, on the same traces."""
    variants = {
        "1 router, no queue": QueueConfig(1, backlog_ms=None),
        f"{N_ROUTERS} routers, no queue": QueueConfig(N_ROUTERS, backlog_ms=None),
        "1 router": QueueConfig(1, QueuePolicy(policy), backlog_ms),
        f"{N_ROUTERS} routers": QueueConfig(N_ROUTERS, QueuePolicy(policy), backlog_ms),
    }
    found: dict[str, list[float]] = {name: [] for name in variants}
    for seed in range(1, seeds + 1):
        trace = trace_of(rate_per_s, n_requests, seed)
        for name, config in variants.items():
            found[name].append(ttft_ms(trace, config, seed))
    means = {name: statistics.fmean(values) for name, values in found.items()}
    table = Table("", "mean time to first token, ms", "per trace")
    for name, values in found.items():
        table.add_row(name, f"{means[name]:.0f}", " ".join(f"{value:.0f}" for value in values))
    console = wide_console()
    console.print(table)
    ratio = means[f"{N_ROUTERS} routers"] / means["1 router"]
    console.print(
        f"{N_ROUTERS} routers that queue take {ratio:.3f} times as long as one; at most {RATIO_MAX} is accepted"
    )
    sys.exit(ratio > RATIO_MAX)


if __name__ == "__main__":
    main()
