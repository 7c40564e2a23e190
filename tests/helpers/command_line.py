"""Parses command lines as `kvstreams` does, without running them."""

from __future__ import annotations

from collections.abc import Sequence

import click

from streams.cli import cli


def parse_command(words: Sequence[str]) -> click.Context:
    """Return the context of a command, given its names and its arguments; raises click.UsageError.

    It has the settings of `kvstreams`: a command keeps the names of its help options from its first context, so all
    later tests would otherwise lack `-h`.
    """
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest, parent=click.Context(cli, **cli.context_settings))
