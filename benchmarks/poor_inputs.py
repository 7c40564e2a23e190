"""`python -m benchmarks.poor_inputs TRACE`: policies where their inputs are poor, in the laboratory.

What lives here: fleets and clients that show a router less than usual, or run outside of what its defaults were made
for. What must not: the simulation (streams.lab.simulation). All time is simulated, so the figures do not depend on the
machine. It takes about half an hour of one core.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.quality import ENGINE, FLEET, figures_of, head, row, workload_of
from streams.core.ids import EngineHash, HashArray
from streams.core.loads.bookings import ActiveLoads
from streams.core.routing.request import FleetState
from streams.lab.simulation.experiment import run_policy
from streams.lab.simulation.fleet import FleetConfig
from streams.lab.simulation.router import LabRouter

POLICIES = ("kv", "dynamo-agentic", "expected-time", "expected-time+queue")

#: The default of `booking_ttl_s`.
BOOKING_TTL_MS = 600_000


class Expiring(LabRouter):
    """A router whose bookings expire, as in a live router. In the laboratory all clients report ends otherwise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loads = ActiveLoads(BOOKING_TTL_MS, observe=True)


class EndsOnly(Expiring):
    """Clients report when a request ends, but not when its prompt is computed: those that do not stream."""

    def first_token(self, number: int, now_ms: float) -> None:
        """Nothing is reported."""


class Silent(EndsOnly):
    """Clients report nothing."""

    def ended(self, number: int, now_ms: float, n_output_tokens: int = 0) -> None:
        """Nothing is reported."""


class WithoutMetrics(Expiring):
    """Engines have no metrics, so that the size of their caches is not known."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fleet = FleetState()


class WithoutEvents(Expiring):
    """Engines report no events, and the router does not predict."""

    def stored(self, worker: int, parent: EngineHash | None, names: HashArray) -> None:
        """Nothing is reported."""

    def removed(self, worker: int, names: HashArray) -> None:
        """Nothing is reported."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet, and what its router sees."""

    name: str
    kind: type[LabRouter]
    fleet: FleetConfig


AT_FOUR_TIMES = replace(FLEET, speedup=4.0)
CASES = (
    Case("everything is reported", Expiring, AT_FOUR_TIMES),
    Case("clients report ends only", EndsOnly, AT_FOUR_TIMES),
    Case("clients report nothing", Silent, AT_FOUR_TIMES),
    Case("engines without metrics", WithoutMetrics, AT_FOUR_TIMES),
    Case("engines without events", WithoutEvents, AT_FOUR_TIMES),
    Case("one worker", Expiring, FleetConfig(ENGINE, 1, speedup=0.5)),
    Case("CPU workers: 30 times slower", Expiring, replace(FLEET, speeds=(30.0,) * FLEET.n_workers, speedup=0.13)),
    Case("1,000 ranks", Expiring, FleetConfig(ENGINE, 1000, speedup=500.0)),
)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--only", default="", help="Run the cases whose names contain this text.")
@click.option("--policy", "policies", multiple=True, default=POLICIES, show_default=True)
def main(trace: Path, only: str, policies: tuple[str, ...]) -> None:
    """Print the figures of each policy in each case."""
    workload = workload_of(str(trace))
    head("case", "policy", "mean / p99 TTFT ms", "ITL ms", "requests/s", "reuse")
    for case in CASES:
        if only in case.name:
            for policy in policies:
                figures = figures_of(run_policy(workload, case.fleet, policy, kind=case.kind))
                row([case.name, f"`{policy}`", *figures])


if __name__ == "__main__":
    main()
