"""`python -m benchmarks.queueing`: what it costs that several routers queue, each by itself.

What lives here: the times to first token of simulated engines behind one router and behind four, with queues and
without. What must not: the simulation (streams.lab.simulation). Exits 1 if four routers that queue take more than
RATIO_MAX times as long as one, over all traces.

Everything is simulated, so the results do not depend on the machine. Bookings reach the other routers after a delay
that is exponential and whose p99 is PROPAGATION_MS, the time that the product waits for them.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from typing import NamedTuple

import click
import numpy as np
from rich.table import Table

from benchmarks.report import wide_console
from streams.core.routing.admission import PROPAGATION_MS
from streams.core.routing.decision import RoutePolicy
from streams.core.routing.queue import QUEUE_BACKLOG_MS, QueuePolicy
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.simulation.fleet import FleetConfig, run
from streams.lab.simulation.router import LabQueue, LabRouter
from streams.lab.simulation.router_group import RouterGroup
from streams.lab.simulation.trace_runs import workload_of
from streams.lab.simulation.workload import Workload
from streams.lab.trace import ChatShape, generate

N_ENGINES = 8
N_ROUTERS = 4
ENGINE = EngineConfig()

#: The mean time to first token with four routers, divided by that with one.
RATIO_MAX = 1.10

#: The mean of an exponential delay whose p99 is PROPAGATION_MS.
DELAY_MS_MEAN = PROPAGATION_MS / math.log(100.0)


class Variant(NamedTuple):
    """Routers, and the queue that each of them has; None for none."""

    n_routers: int
    queue: LabQueue | None


def ttft_ms(workload: Workload, variant: Variant, seed: int) -> float:
    """Mean time to first token of a trace, including the time in the queue."""
    rng = random.Random(seed)
    routers = [
        LabRouter(
            N_ENGINES,
            ENGINE.block_size,
            ENGINE.n_blocks,
            RoutePolicy(),
            rng,
            queue=variant.queue,
            router_id=f"router-{number}",
        )
        for number in range(variant.n_routers)
    ]
    group = RouterGroup(routers, rng, DELAY_MS_MEAN)
    return run(workload, FleetConfig(ENGINE, N_ENGINES), group).figures().mean_ttft_ms


def workload(rate_per_s: float, n_requests: int, seed: int) -> Workload:
    """Chat traffic; eight engines are saturated at about 22 requests per second."""
    trace = generate(n_requests, np.random.default_rng(seed), ChatShape(rate_per_s=rate_per_s))
    return workload_of(trace, ENGINE.block_size)


@click.command()
@click.option("--rate", "rate_per_s", default=20.0, show_default=True, help="Requests per second.")
@click.option("--requests", "n_requests", default=400, show_default=True, help="Requests of each trace.")
@click.option("--seeds", default=26, show_default=True, help="Number of traces, of which one varies by 10 %.")
@click.option("--backlog-ms", default=QUEUE_BACKLOG_MS, show_default=True, help="As router_queue_backlog_ms.")
@click.option("--policy", type=click.Choice(list(QueuePolicy)), default=QueuePolicy.ARRIVAL_PLUS_PREFILL)
def main(rate_per_s: float, n_requests: int, seeds: int, backlog_ms: float, policy: str) -> None:
    """Compare one router with four, on the same traces."""
    queue = LabQueue(backlog_ms, QueuePolicy(policy))
    variants = {
        "1 router, no queue": Variant(1, None),
        f"{N_ROUTERS} routers, no queue": Variant(N_ROUTERS, None),
        "1 router": Variant(1, queue),
        f"{N_ROUTERS} routers": Variant(N_ROUTERS, queue),
    }
    ttfts: dict[str, list[float]] = {name: [] for name in variants}
    for seed in range(1, seeds + 1):
        requests = workload(rate_per_s, n_requests, seed)
        for name, variant in variants.items():
            ttfts[name].append(ttft_ms(requests, variant, seed))
    means = {name: statistics.fmean(values) for name, values in ttfts.items()}
    table = Table("", "mean time to first token, ms", "per trace")
    for name, values in ttfts.items():
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
