"""`kvstreams`: the command line, one module per group of commands.

What lives here: the group that all commands belong to, including those of the laboratory (lab.commands), and the entry
point. What must not: a command. Importing this package must stay cheap, because `kvstreams --help` imports all of it: a
command imports what it runs inside its body.
"""

from __future__ import annotations

import os
import signal

import click

from streams import __version__
from streams.cli import cxl, decisions, doctor, front, gateway, metrics, picker, replay, scope, serving, top
from streams.errors import KvStreamsError
from streams.lab.commands import compare, demo, kafka, plan, sim, simulate
from streams.lab.commands import replay as replay_decisions
from streams.process.options import ESSENTIAL, GroupedGroup
from streams.settings import unknown_variables

__all__ = ["ESSENTIAL", "cli", "main"]


@click.group(cls=GroupedGroup, context_settings={"max_content_width": 120, "help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """kvstreams routes each LLM request to the engine that already holds its KV cache. It runs on Kafka."""
    for name, warning in unknown_variables(os.environ).items():
        click.echo(f"kvstreams: {warning}", err=True)
        del os.environ[name]  # child processes would print the same warning again


for _module in (
    serving,
    picker,
    gateway,
    front,
    scope,
    cxl,
    kafka,
    demo,
    sim,
    simulate,
    compare,
    decisions,
    plan,
    replay_decisions,
    replay,
    metrics,
    doctor,
    top,
):
    for _command in _module.COMMANDS:
        cli.add_command(_command)


def _exit_for(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line. A KvStreamsError becomes one line with its remedy; other exceptions keep their trace."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # SystemExit runs every `finally`, so that no child process outlives `demo` or `up`.
        signal.signal(number, _exit_for)
    try:
        cli()
    except KvStreamsError as exc:
        click.echo(f"kvstreams: {exc}", err=True)
        raise SystemExit(1) from exc
