"""`kvstreams plan`: a recorded time with other numbers of engines (docs/scaling.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streams.process.options import SINCE_HELP, GroupedCommand, OutputFile, with_settings
from streams.process.output import console
from streams.settings import Resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streams.lab.simulation.decisions import Recording
    from streams.lab.simulation.scaling import PlannedFleet
    from streams.lab.simulation.workload import Workload

_MS_PER_HOUR = 3_600_000.0

#: More engines would take minutes and gigabytes for each of the numbers.
_ENGINES_MAX = 10_000

#: From here on, the time between arrival and decision was a wait in the queue. Parsing and hashing a prompt takes less.
_QUEUED_MS_MIN = 100


@click.command(cls=GroupedCommand)
@with_settings
@click.argument("trace", required=False)
@click.option(
    "--engines",
    "sizes",
    default="",
    metavar="N,...",
    help="numbers of engines  [default: from one less to two more than were recorded]",
)
@click.option("--policy", default="", help="as for `kvstreams simulate`  [default: as recorded, or expected-time]")
@click.option("--since", default="1h", show_default=True, help=SINCE_HELP)
@click.option("--until", default="0s", show_default=True, help="end of the recorded time, in the same form")
@click.option("--model", default=None, help="the model, if decisions of several are recorded")
@click.option("--speedup", default=1.0, show_default=True, help="requests come so many times as fast")
@click.option("--price", default=0.0, metavar="X", help="of an engine and hour, in any currency")
@click.option("--ttft-limit-ms", default=0.0, metavar="MS", help="name the fewest engines whose p95 is within it")
@click.option(
    "--engine",
    "engine_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file of the engine",
)
@click.option("--seed", default=1, show_default=True, help="of random choices between equal engines")
@click.option("--json", "json_file", type=OutputFile(), help="file for the figures")
def plan(
    resolved: Resolved,
    trace: str | None,
    sizes: str,
    policy: str,
    engine_file: Path | None,
    speedup: float,
    price: float,
    ttft_limit_ms: float,
    seed: int,
    json_file: Path | None,
    **recorded: str | None,
) -> None:
    """Replay a recorded time with other numbers of engines, and print what each would have cost.

    Without TRACE, requests are rebuilt from the decision log. TRACE is as for `simulate`, and needs --engines. An
    engine is one rank. docs/scaling.md explains the figures.
    """
    import orjson
    from rich.console import Console

    from streams.errors import SettingsError
    from streams.lab.commands.replay import engine_as_recorded, print_recording, read_recording, workload_of
    from streams.lab.simulation.experiment import WITH_QUEUE, check_policy, engine_of, load_workload
    from streams.lab.simulation.fleet import FleetConfig
    from streams.lab.simulation.scaling import with_engines
    from streams.process.progress import shown

    n_engines = _sizes(sizes)
    for name, amount in (("--price", price), ("--ttft-limit-ms", ttft_limit_ms)):
        if not 0.0 <= amount < math.inf:
            raise SettingsError(f"{name} {amount:g} is not a number from 0 on")
    if trace is not None and not n_engines:
        raise SettingsError("a trace does not say how many engines there were", remedy="Name --engines, such as 6,7,8")
    if policy:
        check_policy(policy.removesuffix(WITH_QUEUE))
    engine = engine_of(engine_file)
    errors = Console(stderr=True)
    if trace is not None:
        policy = policy or "expected-time"
        with shown(errors, f"reading {trace}"):
            workload = load_workload(trace, engine, max(n_engines))
    else:
        recording = read_recording(resolved, recorded["since"] or "", recorded["until"] or "", recorded["model"])
        engine, is_known = engine_as_recorded(engine, recording, by_file=engine_file is not None)
        policy = policy or _policy_of(recording)
        n_engines = n_engines or [n for n in range(recording.n_ranks - 1, recording.n_ranks + 3) if n]
        workload = workload_of(recording, recording.trace(), engine)
        print_recording(recording, engine, is_known=is_known)
    fleet = FleetConfig(engine, max(n_engines), speedup=speedup)
    rows = []
    for n in n_engines:
        with shown(errors, f"{n} engines", len(workload)) as step:
            rows.append(with_engines(workload, fleet, policy, n, seed=seed, on_progress=step.update))
    hours = float(workload.at_ms[-1] - workload.at_ms[0]) / speedup / _MS_PER_HOUR
    _print(rows, workload, policy, hours, price)
    if ttft_limit_ms:
        click.echo(_fewest(rows, ttft_limit_ms))
    if json_file is not None:
        record = {
            "policy": policy,
            "requests": len(workload),
            "hours": round(hours, 5),
            "price": price,
            "rows": [row.as_json(price, hours) for row in rows],
        }
        json_file.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")


def _sizes(text: str) -> list[int]:
    from streams.errors import SettingsError

    try:
        sizes = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError as exc:
        raise SettingsError(f"--engines {text!r} is not a list of numbers, such as 6,7,8") from exc
    if sizes and not 1 <= sizes[0] <= sizes[-1] <= _ENGINES_MAX:
        raise SettingsError(f"--engines {text!r} has a number that is not from 1 to {_ENGINES_MAX:,}")
    return sizes


def _policy_of(recording: Recording) -> str:
    """The policy that made the last recorded decision, with a queue if any request waited in one."""
    from streams.lab.simulation.experiment import WITH_QUEUE, known_policies

    kind = recording.requests[-1].decision.kind
    name = kind.policy or kind.router_mode
    if name not in known_policies():
        return "expected-time"
    return name + (
        WITH_QUEUE if any(request.decision.queued_ms >= _QUEUED_MS_MIN for request in recording.requests) else ""
    )


def _print(rows: Sequence[PlannedFleet], workload: Workload, policy: str, hours: float, price: float) -> None:
    from rich.table import Table

    click.echo(f"{len(workload):,} requests within {hours * 3600.0:,.1f} s, routed by {policy}.")
    click.echo("")
    table = Table(box=None, pad_edge=False)
    columns = ("engines", "mean TTFT ms", "p95", "p99", "ITL ms", "reuse", "saturation", "peak", "engine hours")
    for column in (*columns, *(("cost", "per 1,000 requests") if price else ())):
        table.add_column(column, justify="right")
    for row in rows:
        figures, cost = row.figures, row.n_engines * price * hours
        values = (
            str(row.n_engines),
            f"{figures.mean_ttft_ms:.0f}",
            f"{row.p95_ttft_ms:.0f}",
            f"{figures.p99_ttft_ms:.0f}",
            f"{figures.itl_ms:.1f}",
            f"{figures.reuse:.3f}",
            f"{row.saturation:.2f}",
            f"{row.saturation_peak:.2f}",
            f"{row.n_engines * hours:.2f}",
        )
        costs = (f"{cost:,.2f}", f"{1000.0 * cost / len(workload):,.2f}") if price else ()
        table.add_row(*values, *costs)
    console().print(table)
    click.echo("")


def _fewest(rows: Sequence[PlannedFleet], limit_ms: float) -> str:
    """Which size keeps the limit, as a sentence."""
    within = next((row for row in rows if row.p95_ttft_ms <= limit_ms), None)
    if within is None:
        return f"With none of these numbers is the p95 of the time to the first token within {limit_ms:g} ms."
    engines = "1 engine is" if within.n_engines == 1 else f"{within.n_engines} engines are"
    return (
        f"{engines} the fewest of these with a p95 of the time to the first token within "
        f"{limit_ms:g} ms. The saturation was {within.saturation:.2f} on average, and {within.saturation_peak:.2f} "
        "in the busiest minute."
    )


COMMANDS = (plan,)
