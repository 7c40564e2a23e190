"""`kvstreams compare`: routing modes compared on a live fleet, in alternation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streams.process.options import GroupedCommand, OutputFile
from streams.process.output import console

if TYPE_CHECKING:
    from streams.lab.compare.estimates import ComparedModes, Estimate
    from streams.lab.compare.variants import Variant


@click.command(cls=GroupedCommand)
@click.option(
    "--router",
    "routers",
    multiple=True,
    required=True,
    metavar="URL",
    help="a router of the fleet; repeat it for several",
)
@click.option(
    "--mode",
    "modes",
    multiple=True,
    metavar="MODE",
    help="[NAME=]MODE[:FIELD=VALUE][+queue][@URL], at least two; the others are compared with the first. FIELDs are "
    "those of router_config_override; +queue lets requests wait in the router; URL is a router for this mode alone, "
    "with other settings  [default: kv and expected-time]",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="file of Mooncake's format  [default: generated conversations]"
)
@click.option(
    "--requests", "n_requests", default=0, help="requests of all modes together  [default: 4,000, or the trace]"
)
@click.option("--concurrency", default=0, help="requests at the same time  [default: they come at their times]")
@click.option(
    "--speedup", default=1.0, show_default=True, help="without --concurrency: time runs so many times as fast"
)
@click.option("--block", "block_requests", default=100, show_default=True, help="requests before the mode changes")
@click.option(
    "--washout", "washout_requests", default=30, show_default=True, help="of these, the first ones that do not count"
)
@click.option("--model", default=None, help="model  [default: the only one]")
@click.option("--vocabulary", default=32_000, show_default=True, help="prompts have token ids below this")
@click.option("--prompt-max", default=0, help="leaves out requests with more prompt tokens  [default: none]")
@click.option("--output-max", default=0, help="answers have at most so many tokens  [default: as in the trace]")
@click.option(
    "--seed", default=None, type=int, help="of the order of modes and of generated requests  [default: random]"
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    help="file with a token for the routers, which has the rights `route` and `read`",
)
@click.option("--engine-key-file", type=click.Path(path_type=Path), help="file with the key that engines require")
@click.option("--json", "json_file", type=OutputFile(), help="file for the figures")
def compare(
    routers: tuple[str, ...],
    modes: tuple[str, ...],
    trace: Path | None,
    n_requests: int,
    concurrency: int,
    speedup: float,
    block_requests: int,
    washout_requests: int,
    model: str | None,
    vocabulary: int,
    prompt_max: int,
    output_max: int,
    seed: int | None,
    token_file: Path | None,
    engine_key_file: Path | None,
    json_file: Path | None,
) -> None:
    """Compare routing modes on a live fleet: send requests, and let the modes take turns.

    Prompts are synthetic tokens with the shared prefixes of a trace. docs/compare.md explains the experiment and how to
    run it. Ctrl-C ends it early, with what was measured until then.
    """
    import random

    import numpy as np
    import orjson
    from rich.console import Console

    from streams.errors import SettingsError
    from streams.lab.compare.estimates import complete_rounds, evaluate
    from streams.lab.compare.plan import make_plan
    from streams.lab.compare.report import NotPlanned, in_words, left_out_in_words, report
    from streams.lab.compare.traffic import RUNS_MAX, Measured, TrafficConfig, run
    from streams.lab.compare.variants import parse_variants
    from streams.process.progress import shown
    from streams.security.files import read_secret

    variants = parse_variants(modes or ("kv", "expected-time"))
    given_seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    rng = random.Random(given_seed)
    requests, n_too_long = _requests(trace, n_requests, prompt_max, output_max, given_seed)
    plan = make_plan(len(requests), len(variants), block_requests, washout_requests, rng)
    config = TrafficConfig(
        routers,
        model,
        concurrency,
        speedup,
        vocabulary,
        random.SystemRandom().randrange(RUNS_MAX),
        None if token_file is None else read_secret("--token-file", str(token_file)),
        None if engine_key_file is None else read_secret("--engine-key-file", str(engine_key_file)),
    )
    measured = Measured()
    names = ", ".join(variant.name for variant in variants)
    with shown(Console(stderr=True), f"comparing {names}", plan.n_requests) as step:
        try:
            asyncio.run(run(requests, variants, plan, config, measured, step.advance))
        except KeyboardInterrupt:
            click.echo("Ended early; the figures are of what was measured until now.", err=True)
    if not complete_rounds(measured.samples, len(variants)):
        raise SettingsError("not one round was completed, so there is nothing to compare")
    outcome = evaluate(measured.samples, len(variants), measured.worker_ids, np.random.default_rng(given_seed))
    not_planned = NotPlanned(n_too_long, len(requests) - plan.n_requests)
    figures = report(variants, plan, config, measured, outcome, not_planned) | {"seed": given_seed}
    _print(variants, outcome, figures)
    left_out = left_out_in_words(figures["left_out"])
    if left_out is not None:
        click.echo(left_out)
    for sentence in in_words(variants, outcome):
        click.echo(f"{sentence}.")
    for warning in figures["warnings"]:
        click.echo(f"Note: {warning}", err=True)
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")


def _requests(
    trace: Path | None, n_requests: int, prompt_max: int, output_max: int, seed: int
) -> tuple[list[Any], int]:
    """The requests to send, by time, and how many have prompts that are too long."""
    from dataclasses import replace

    import numpy as np

    from streams.errors import SettingsError
    from streams.lab.trace import generate, parse_trace

    if trace is None:
        requests = generate(n_requests or 4000, np.random.default_rng(seed))
    else:
        try:
            with trace.open(encoding="utf-8", errors="replace") as lines:
                requests = parse_trace(lines)
        except OSError as exc:
            raise SettingsError(f"--trace {trace} cannot be read: {exc.strerror}") from exc
    n_read = len(requests)
    if prompt_max:
        requests = [request for request in requests if request.input_length <= prompt_max]
    n_too_long = n_read - len(requests)
    if output_max:
        requests = [replace(request, output_length=min(request.output_length, output_max)) for request in requests]
    return requests[:n_requests] if n_requests else requests, n_too_long


def _print(variants: list[Variant], outcome: ComparedModes, figures: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("mode")
    for column in ("requests", "left out", "mean TTFT ms", "p50", "p95", "hit share", "balance"):
        table.add_column(column, justify="right")
    for row, variant, values in zip(figures["rows"], variants, outcome.values, strict=True):
        table.add_row(
            variant.name,
            f"{row['requests']:,}",
            f"{sum(row['left_out'].values()):,}",
            _cell(values["ttft_ms_mean"], "{:.0f}"),
            _cell(values["ttft_ms_p50"], "{:.0f}"),
            _cell(values["ttft_ms_p95"], "{:.0f}"),
            _cell(values["hit_share"], "{:.3f}"),
            _cell(values["balance"], "{:.2f}"),
        )
    console().print(table)
    click.echo(
        f"In brackets: intervals of 95 % from {figures['rounds']} rounds of blocks of {figures['block_requests']}."
    )


def _cell(estimate: Estimate, form: str) -> str:
    low, high = form.format(estimate.low), form.format(estimate.high)
    return f"{form.format(estimate.value)} [{low}, {high}]"


COMMANDS = (compare,)
