"""Workloads and selectors by name, and runs of several of them.

What lives here: what `kvstreams simulate` and `tune`, benchmarks and tests call. What must not: output. Names of
policies may lead to entry points of other packages, and names of traces to files.

A name may have parameters: `dynamo-default:credit=2:scale=4`, `agentic:working_set=2`. A policy's name may end with
`+queue`: requests wait while the rank that is best for them is busy, as with `queue=on` in the live router.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streams.core.routing.decision import RoutePolicy
from streams.core.routing.policies.expected_time_defaults import EXPECTED_TIME_QUEUE_MS
from streams.core.routing.queue import QUEUE_BACKLOG_MS
from streams.core.routing.selection import Rng, RouterMode
from streams.errors import SettingsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.simulation import generators
from streams.lab.simulation.fleet import FleetConfig, run
from streams.lab.simulation.lab_engine_config import LabEngineConfig, default_engine, engine_from_toml
from streams.lab.simulation.peers import find_policy, policy_names
from streams.lab.simulation.results import Figures, RunResult
from streams.lab.simulation.router import LabQueue, LabRouter
from streams.lab.simulation.trace_files import read_workload
from streams.lab.simulation.workload import Workload
from streams.security.files import read_text

#: Modes of the live router that need nothing but bookings and the index.
MODES = (
    RouterMode.KV,
    RouterMode.ROUND_ROBIN,
    RouterMode.RANDOM,
    RouterMode.LEAST_LOADED,
    RouterMode.POWER_OF_TWO,
)

#: The end of the name of a policy that is used with a queue.
WITH_QUEUE = "+queue"

#: An engine has nine parameters, with comments in a file.
_ENGINE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one policy on one workload. took_s: how long the run took on this machine."""

    policy: str
    concurrency: int
    speedup: float
    figures: Figures
    result: RunResult
    took_s: float

    def as_json(self) -> dict[str, object]:
        """The row of `kvstreams simulate --json`."""
        figures = self.figures
        return {
            "policy": self.policy,
            "concurrency": self.concurrency,
            "speedup": self.speedup,
            "mean_ttft_ms": round(figures.mean_ttft_ms, 3),
            "p50_ttft_ms": round(figures.p50_ttft_ms, 3),
            "p99_ttft_ms": round(figures.p99_ttft_ms, 3),
            "itl_ms": round(figures.itl_ms, 4),
            "requests_per_s": round(figures.requests_per_s, 4),
            "reuse": round(figures.reuse, 5),
            "loaded": round(figures.loaded, 5),
            "preempted": self.result.n_preempted,
            "took_s": round(self.took_s, 2),
        }


def known_policies() -> list[str]:
    """The names that `run_policy` takes."""
    return sorted({*(str(mode) for mode in MODES), *policy_names()})


def split_name(text: str) -> tuple[str, dict[str, float]]:
    """Split `name:parameter=value:...`. Raises SettingsError."""
    name, *rest = text.split(":")
    parameters: dict[str, float] = {}
    for assignment in rest:
        parameter, equals, value = assignment.partition("=")
        try:
            parameters[parameter] = float(value)
        except ValueError as exc:
            raise SettingsError(f"{assignment!r} of {text!r} is not NAME=NUMBER") from exc
        if not equals:
            raise SettingsError(f"{assignment!r} of {text!r} is not NAME=NUMBER")
    return name, parameters


def load_workload(text: str, engine: LabEngineConfig | EngineConfig, n_workers: int) -> Workload:
    """Read a trace's file or folder, or generate traffic by name. Raises SettingsError, InvalidRequest."""
    path = Path(text)
    if path.exists():
        return read_workload(path, engine.block_size)
    name, parameters = split_name(text)
    if name not in generators.PARAMETERS:
        known = ", ".join(generators.PARAMETERS)
        raise SettingsError(f"{text!r} is neither a file nor one of the generators: {known}")
    fleet_tokens = n_workers * engine.n_blocks * engine.block_size
    return generators.generate(name, parameters, engine.block_size, fleet_tokens)


def engine_of(file: Path | None) -> LabEngineConfig:
    """Return the engine in the file of --engine, or the reference engine. Raises SettingsError."""
    if file is None:
        return default_engine()
    return engine_from_toml(read_text("--engine", str(file), _ENGINE_BYTES_MAX))


def check_policy(text: str) -> tuple[str, dict[str, float]]:
    """Split the name of a policy as `split_name` does. Raises SettingsError if there is none of this name."""
    name, parameters = split_name(text)
    modes = {str(mode) for mode in MODES}
    if name in modes and parameters:
        raise SettingsError(f"mode {name} has no parameters")
    if name not in modes and name not in policy_names():
        raise SettingsError(f"there is no policy {name!r}; there are {', '.join(known_policies())}")
    return name, parameters


def make_router(text: str, config: FleetConfig, rng: Rng, kind: type[LabRouter] = LabRouter) -> LabRouter:
    """The router of a policy's name. kind: a class of routers with the same constructor. Raises SettingsError."""
    name, parameters = check_policy(text.removesuffix(WITH_QUEUE))
    modes = {str(mode) for mode in MODES}
    policy = RoutePolicy(mode=RouterMode(name)) if name in modes else RoutePolicy(mode=RouterMode.POLICY, name=name)
    queue = None
    if text.endswith(WITH_QUEUE):
        queue = LabQueue(EXPECTED_TIME_QUEUE_MS if name == RouterMode.EXPECTED_TIME else QUEUE_BACKLOG_MS)
    return kind(
        config.n_workers,
        config.engine.block_size,
        config.engine.n_blocks,
        policy,
        rng,
        lambda policy_name: find_policy(policy_name, parameters),
        queue,
    )


def run_policy(
    workload: Workload,
    config: FleetConfig,
    policy: str,
    *,
    seed: int = 1,
    on_progress: Callable[[int], None] | None = None,
    kind: type[LabRouter] = LabRouter,
) -> Row:
    """Run one policy. kind: as of `make_router`. Raises SettingsError."""
    router = make_router(policy, config, random.Random(seed), kind)
    started = time.perf_counter()
    result = run(workload, config, router, on_progress)
    return Row(policy, config.concurrency, config.speedup, result.figures(), result, time.perf_counter() - started)
