"""`kvstreams replay-decisions`: other policies over recorded decisions (docs/decisions.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streams.process.options import SINCE_HELP, GroupedCommand, OutputFile, time_ms, with_settings
from streams.process.output import console
from streams.settings import Resolved

if TYPE_CHECKING:
    from streams.lab.simulation.decisions import Recording
    from streams.lab.simulation.lab_engine_config import LabEngineConfig
    from streams.lab.simulation.recorded import Replay
    from streams.lab.simulation.workload import Workload
    from streams.lab.trace import TraceRequest


@click.command("replay-decisions", cls=GroupedCommand)
@with_settings
@click.option(
    "--policy",
    "policies",
    default="kv,expected-time",
    show_default=True,
    help="names, separated by commas, as for `kvstreams simulate`",
)
@click.option("--since", default="1h", show_default=True, help=SINCE_HELP)
@click.option("--until", default="0s", show_default=True, help="end of the recorded time, in the same form")
@click.option("--model", default=None, help="the model, if decisions of several are recorded")
@click.option("--speedup", default=1.0, show_default=True, help="requests come so many times as fast")
@click.option("--lag-ms", default=0.0, show_default=True, help="until the simulated router has an engine's events")
@click.option(
    "--engine",
    "engine_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file of the engine",
)
@click.option("--seed", default=1, show_default=True, help="of random choices between equal engines")
@click.option("--trace", "trace_file", type=OutputFile(), help="file for the requests as a trace")
@click.option("--json", "json_file", type=OutputFile(), help="file for the figures")
def replay_decisions(
    resolved: Resolved,
    policies: str,
    since: str,
    until: str,
    model: str | None,
    speedup: float,
    lag_ms: float,
    engine_file: Path | None,
    seed: int,
    trace_file: Path | None,
    json_file: Path | None,
) -> None:
    """Run other policies over recorded decisions, and report what would have changed.

    Requests are rebuilt from the decision log and sent through simulated engines, as many as were registered. --trace
    writes them as a trace, which `kvstreams simulate` and `tune` take.
    """
    import orjson
    from rich.console import Console

    from streams.lab.simulation.experiment import WITH_QUEUE, check_policy, engine_of, run_policy
    from streams.lab.simulation.fleet import FleetConfig
    from streams.lab.simulation.recorded import replay
    from streams.lab.trace import dump
    from streams.process.progress import shown

    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:  # before anything is read
        check_policy(name.removesuffix(WITH_QUEUE))
    engine = engine_of(engine_file)
    errors = Console(stderr=True)
    recording = read_recording(resolved, since, until, model)
    trace = recording.trace()
    if trace_file is not None:
        trace_file.write_text("".join(f"{line}\n" for line in dump(trace)), encoding="utf-8")
    engine, is_known = engine_as_recorded(engine, recording, by_file=engine_file is not None)
    fleet = FleetConfig(engine, recording.n_ranks, speedup=speedup, event_lag_ms=lag_ms)
    workload = workload_of(recording, trace, engine)
    number = {rank: index for index, rank in enumerate(recording.ranks)}
    chosen = [number[request.decision.chosen] for request in recording.requests]
    kind = recording.requests[-1].decision.kind
    by = kind.policy or kind.router_mode
    with shown(errors, "following the record", len(workload)) as step:
        followed = replay(workload, fleet, chosen, names, by=by, seed=seed, on_progress=step.update)
    rows = []
    for name in names:
        with shown(errors, name, len(workload)) as step:
            rows.append(run_policy(workload, fleet, name, seed=seed, on_progress=step.update))
    print_recording(recording, engine, is_known=is_known)
    _print_replay(followed, rows)
    _print_measured(recording)
    if json_file is not None:
        record = {
            "model": recording.model,
            "requests": len(workload),
            "workers": recording.n_ranks,
            "router_mode": by,
            "measured": {
                "reuse": round(recording.measured_reuse(), 5),
                "mean_ttft_ms": recording.measured_ttft_ms(),
            },
            "rows": [{**row.as_json(), "changed": followed.changed.get(row.policy)} for row in (followed.row, *rows)],
        }
        json_file.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")


def read_recording(resolved: Resolved, since: str, until: str, model: str | None) -> Recording:
    """Read what the decision log has of a time; ends the process with status 1 if that is nothing."""
    from rich.console import Console

    from streams.decision_log.reading import nothing_recorded, read_log
    from streams.lab.simulation.decisions import recording_of
    from streams.process.progress import shown

    now_ms = time.time_ns() // 1_000_000
    since_ms, until_ms = time_ms(since, now_ms), time_ms(until, now_ms)
    with shown(Console(stderr=True), "reading the decision log"):
        log = read_log(resolved.settings, since_ms)
    if log.warning:
        click.echo(f"kvstreams: {log.warning}", err=True)
    if not log.n_records:
        click.echo(f"kvstreams: {nothing_recorded(since)}", err=True)
        raise SystemExit(1)
    return recording_of(log.batches, since_ms, until_ms, model)


def workload_of(recording: Recording, trace: Sequence[TraceRequest], engine: LabEngineConfig) -> Workload:
    """The recorded requests for simulated engines. trace: of the recording."""
    from streams.lab.simulation.workload import RawRequest, build
    from streams.lab.trace import TRACE_BLOCK_TOKENS

    raw = (
        RawRequest(request.timestamp_ms, request.input_length, request.output_length, request.hash_ids)
        for request in trace
    )
    return build(recording.model or "recorded", raw, TRACE_BLOCK_TOKENS, engine.block_size)


def engine_as_recorded(engine: LabEngineConfig, recording: Recording, *, by_file: bool) -> tuple[LabEngineConfig, bool]:
    """An engine with the cache of the recorded ranks, and whether that is known. A file's own number is kept."""
    fleet = recording.fleet
    if by_file or fleet is None or not fleet.kv_blocks:
        return engine, by_file
    n_blocks = max(1, fleet.kv_blocks * fleet.block_size // fleet.n_ranks // engine.block_size)
    return replace(engine, n_blocks=n_blocks), True


def print_recording(recording: Recording, engine: LabEngineConfig, *, is_known: bool) -> None:
    requests = recording.requests
    seconds = (requests[-1].arrived_at_ms - requests[0].arrived_at_ms) / 1000.0
    model = f" for model {recording.model}" if recording.model else ""
    click.echo(f"{len(requests):,} requests{model} within {seconds:,.1f} s, on {recording.n_ranks} ranks.")
    size = f"{engine.n_blocks:,} blocks of {engine.block_size} tokens"
    if is_known:
        click.echo(f"Each simulated engine has {size}.")
    else:
        click.echo(f"The ranks' numbers of blocks are not recorded, so each simulated engine has {size}.")
    if recording.n_without_output:
        click.echo(
            f"Nobody reported the output of {recording.n_without_output:,} requests, which get "
            f"{recording.mean_output_tokens()} tokens each."
        )
    if recording.n_prefill_only:
        click.echo(
            f"Prefill workers computed the prompts of {recording.n_prefill_only:,} requests. Simulated engines also "
            "decode, so the figures below are not those of such a fleet."
        )
    if recording.share < 1.0:
        click.echo(
            f"Only {recording.share:.0%} of the requests were recorded (decision_log_share), so loads and reuse are "
            f"lower than they were. With --speedup {1.0 / recording.share:g}, they come as often as all requests did."
        )
    click.echo("")


def _print_replay(followed: Replay, rows: list[Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for column in ("changed", "mean TTFT ms", "p99", "ITL ms", "reuse"):
        table.add_column(column, justify="right")
    for row in (followed.row, *rows):
        changed, figures = followed.changed.get(row.policy), row.figures
        table.add_row(
            row.policy,
            "" if changed is None else f"{changed:.1%}",
            f"{figures.mean_ttft_ms:.0f}",
            f"{figures.p99_ttft_ms:.0f}",
            f"{figures.itl_ms:.1f}",
            f"{figures.reuse:.3f}",
        )
    console().print(table)


def _print_measured(recording: Recording) -> None:
    measured_ms = recording.measured_ttft_ms()
    ttft = (
        "" if measured_ms is None else f", and clients reported a mean time to the first token of {measured_ms:.0f} ms"
    )
    click.echo("")
    click.echo(f"In reality, the chosen ranks held {recording.measured_reuse():.3f} of the prompts' blocks{ttft}.")


COMMANDS = (replay_decisions,)
