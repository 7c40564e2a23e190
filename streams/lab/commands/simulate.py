"""`kvstreams simulate` and `tune`: what routing policies would do to a fleet, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from streams.process.options import GroupedCommand, OutputFile
from streams.process.output import console

_F = TypeVar("_F", bound=Callable[..., None])

if TYPE_CHECKING:
    from streams.lab.simulation.experiment import Row
    from streams.lab.simulation.fleet import FleetConfig


def _numbers(text: str, of: type[int] | type[float]) -> list[float]:
    from streams.errors import SettingsError

    try:
        return [of(part) for part in text.split(",") if part.strip()]
    except ValueError as exc:
        raise SettingsError(f"{text!r} is not a list of numbers") from exc


def _failures(texts: tuple[str, ...]) -> list[tuple[int, float, float]]:
    """Parse WORKER@SECONDS+SECONDS."""
    from streams.errors import SettingsError

    parsed = []
    for text in texts:
        worker, _, times = text.partition("@")
        at_s, _, for_s = times.partition("+")
        try:
            parsed.append((int(worker) - 1, float(at_s) * 1000.0, float(for_s or 30) * 1000.0))
        except ValueError as exc:
            raise SettingsError(f"--fail {text!r} is not WORKER@SECONDS+SECONDS, for example 3@60+30") from exc
    return parsed


def _table(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for column in ("load", "mean TTFT ms", "p50", "p99", "ITL ms", "requests/s", "reuse", "run took s"):
        table.add_column(column, justify="right")
    for row in rows:
        figures = row.figures
        load = f"{row.concurrency} at once" if row.concurrency else f"by time x{row.speedup:g}"
        values = (
            f"{figures.mean_ttft_ms:.0f}",
            f"{figures.p50_ttft_ms:.0f}",
            f"{figures.p99_ttft_ms:.0f}",
            f"{figures.itl_ms:.1f}",
            f"{figures.requests_per_s:.2f}",
            f"{figures.reuse:.3f}",
            f"{row.took_s:.1f}",
        )
        table.add_row(row.policy, load, *values)
    console().print(table)


def fleet_options(command: _F) -> _F:
    """Add the options that describe a fleet."""
    for option in reversed(
        (
            click.option("--workers", "n_workers", default=8, show_default=True, help="number of engines"),
            click.option("--lag-ms", default=0.0, show_default=True, help="until the router has an engine's events"),
            click.option(
                "--speeds", default="", metavar="A,B,...", help="time of a step of each engine, 2 is half as fast"
            ),
            click.option("--fail", multiple=True, metavar="WORKER@S+S", help="an engine fails then, for so long"),
            click.option("--pool", default=0.0, metavar="X", help="shared memory, X times all device memory"),
            click.option("--pool-gb-per-s", default=64.0, show_default=True, help="bandwidth of the link to it"),
            click.option(
                "--pool-link",
                type=click.Choice(["own", "shared"]),
                default="own",
                show_default=True,
                help="whether each engine has that bandwidth, or all of them together",
            ),
            click.option("--pool-chunk", default=1, show_default=True, help="blocks per chunk, as in LMCache"),
            click.option("--credit-pool/--no-credit-pool", default=True, help="whether the router knows of the pool"),
            click.option("--host", default=0.0, metavar="X", help="host memory, X times each engine's device memory"),
            click.option("--host-gb-per-s", default=25.0, show_default=True, help="bandwidth of the link to it"),
            click.option(
                "--engine",
                "engine_file",
                type=click.Path(path_type=Path, exists=True, dir_okay=False),
                help="TOML file",
            ),
            click.option("--requests", "n_requests", default=0, help="only the first requests of the trace"),
            click.option("--seed", default=1, show_default=True, help="of random choices between equal engines"),
        )
    ):
        command = option(command)
    return command


def fleet_of(
    *,
    n_workers: int,
    lag_ms: float,
    speeds: str,
    fail: tuple[str, ...],
    pool: float,
    pool_gb_per_s: float,
    pool_link: str,
    pool_chunk: int,
    credit_pool: bool,
    host: float,
    host_gb_per_s: float,
    engine_file: Path | None,
) -> FleetConfig:
    """The fleet that these options describe. Raises SettingsError."""
    from streams.lab.simulation.experiment import engine_of
    from streams.lab.simulation.fleet import FleetConfig, LabFailure
    from streams.lab.simulation.lab_pool import LabPoolConfig

    engine = engine_of(engine_file)
    shared = None
    if pool:
        n_blocks = round(pool * n_workers * engine.n_blocks)
        shared = LabPoolConfig(n_blocks, pool_gb_per_s, pool_link == "shared", credit_pool, pool_chunk)
    return FleetConfig(
        engine,
        n_workers,
        event_lag_ms=lag_ms,
        speeds=tuple(_numbers(speeds, float)),
        failures=tuple(LabFailure(*failure) for failure in _failures(fail)),
        pool=shared,
        host=LabPoolConfig(round(host * engine.n_blocks), host_gb_per_s) if host else None,
    )


@click.command(cls=GroupedCommand)
@click.argument("trace")
@click.option(
    "--policy",
    "policies",
    default="round-robin,kv",
    show_default=True,
    help="names, separated by commas; with parameters: dynamo-default:credit=2:scale=4",
)
@click.option(
    "--concurrency",
    default="64",
    show_default=True,
    metavar="N,...",
    help="requests at the same time; 0: requests come at their times",
)
@click.option("--speedup", default=1.0, show_default=True, help="with --concurrency 0: time runs so many times as fast")
@fleet_options
@click.option("--json", "json_file", type=OutputFile(), help="file for the figures")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="folder for plots (kvstreams[local])")
def simulate(
    trace: str,
    policies: str,
    concurrency: str,
    speedup: float,
    n_requests: int,
    seed: int,
    json_file: Path | None,
    plots: Path | None,
    **fleet_settings: Any,
) -> None:
    """Run a trace through a simulated fleet with each policy, and compare times to the first token.

    TRACE is a file of Mooncake's format, a file of LMCache's traces of agents, a file or folder of agents' sessions, or
    a generator: uniform, hot, cold, bursts, agentic (agentic:working_set=2). docs/quality.md explains the model and its
    calibration.
    """
    from dataclasses import replace

    import orjson
    from rich.console import Console

    from streams.lab.simulation.experiment import load_workload, run_policy
    from streams.process.progress import shown

    fleet = fleet_of(**fleet_settings)
    n_workers = fleet.n_workers
    errors = Console(stderr=True)
    with shown(errors, f"reading {trace}"):
        workload = load_workload(trace, fleet.engine, n_workers)
        if n_requests:
            workload = workload.limited(n_requests)
    rows: list[Row] = []
    for at_once in map(int, _numbers(concurrency, int)):
        for policy in policies.split(","):
            config = replace(fleet, concurrency=at_once, speedup=speedup)
            with shown(errors, policy, len(workload)) as step:
                rows.append(run_policy(workload, config, policy, seed=seed, on_progress=step.update))
    _table(rows)
    if json_file is not None:
        record = {
            "trace": trace,
            "requests": len(workload),
            "workers": n_workers,
            "rows": [row.as_json() for row in rows],
        }
        json_file.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
    if plots is not None:
        from streams.lab.simulation.plots import write_plots

        for path in write_plots(rows, plots):
            click.echo(str(path))


def _range(text: str) -> tuple[str, tuple[float, float]]:
    from streams.errors import SettingsError

    name, _, values = text.partition("=")
    low, _, high = values.partition("..")
    try:
        return name, (float(low), float(high))
    except ValueError as exc:
        raise SettingsError(f"--sweep {text!r} is not NAME=LOW..HIGH, for example decode_weight=0.001..0.1") from exc


@click.command(cls=GroupedCommand)
@click.argument("trace")
@click.option(
    "--policy", default="expected-time", show_default=True, help="dynamo-default is the cost of mode kv, by its weights"
)
@click.option(
    "--objective",
    type=click.Choice(["mean-ttft", "p99-ttft", "goodput"]),
    default="mean-ttft",
    show_default=True,
    help="goodput: requests per second with a first token within --ttft-limit-ms",
)
@click.option("--ttft-limit-ms", default=1000.0, show_default=True, help="for goodput")
@click.option("--sweep", multiple=True, metavar="NAME=LOW..HIGH", help="a parameter to vary, instead of the usual ones")
@click.option("--trials", default=30, show_default=True, help="number of runs")
@click.option("--queue/--no-queue", default=False, help="whether requests wait in the router's queue")
@click.option("--concurrency", default=64, show_default=True, help="requests at the same time; 0: by time")
@click.option("--speedup", default=1.0, show_default=True, help="with --concurrency 0: time runs so many times as fast")
@fleet_options
def tune(
    trace: str,
    policy: str,
    objective: str,
    ttft_limit_ms: float,
    sweep: tuple[str, ...],
    trials: int,
    queue: bool,
    concurrency: int,
    speedup: float,
    n_requests: int,
    seed: int,
    **fleet_settings: Any,
) -> None:
    """Search for the weights of a policy that serve a trace best, and print settings to paste.

    TRACE is as for `simulate`. Weights are drawn at random from their ranges; the first trial has the policy's own.
    Choose with one trace and check with another one: weights that are best for one hour need not be for the next.
    """
    from dataclasses import replace

    from rich.console import Console
    from rich.table import Table

    from streams.errors import SettingsError
    from streams.lab.simulation import tuning
    from streams.lab.simulation.experiment import load_workload
    from streams.process.progress import shown

    ranges = dict(map(_range, sweep)) or dict(tuning.RANGES.get(policy, {}))
    if not ranges:
        raise SettingsError(f"it is not known what to vary of policy {policy}", remedy="Name it with --sweep")
    fleet = replace(fleet_of(**fleet_settings), concurrency=concurrency, speedup=speedup)
    errors = Console(stderr=True)
    with shown(errors, f"reading {trace}"):
        workload = load_workload(trace, fleet.engine, fleet.n_workers)
        if n_requests:
            workload = workload.limited(n_requests)
    aim = tuning.Objective(objective)
    with shown(errors, policy, trials) as step:
        tried = tuning.tune(
            workload,
            fleet,
            policy,
            ranges,
            objective=aim,
            limit_ms=ttft_limit_ms,
            n_trials=trials,
            seed=seed,
            with_queue=queue,
            on_trial=lambda _: step.advance(),
        )
    table = Table(box=None, pad_edge=False)
    for column in (*ranges, "mean TTFT ms", "p99", "ITL ms", "goodput/s"):
        table.add_column(column, justify="right")
    own = next(trial for trial in tried if not trial.parameters)
    for trial in (*tried[:5], *(() if own in tried[:5] else (own,))):
        figures = trial.row.figures
        values = (f"{trial.parameters[name]:g}" if trial.parameters else "own" for name in ranges)
        good = tuning.goodput_per_s(trial.row, ttft_limit_ms)
        table.add_row(
            *values, f"{figures.mean_ttft_ms:.0f}", f"{figures.p99_ttft_ms:.0f}", f"{figures.itl_ms:.1f}", f"{good:.2f}"
        )
    console().print(table)
    best = tried[0]
    if not best.parameters:
        click.echo("The policy's own weights were the best.")
        return
    gain = f"{own.loss:.4g} with the policy's own, {best.loss:.4g} with these".replace("-", "")
    click.echo(f"{objective}: {gain}")
    for line in tuning.settings_of(policy, best.parameters) or [
        f"{name} = {value:g}" for name, value in best.parameters.items()
    ]:
        click.echo(line)


COMMANDS = (simulate, tune)
