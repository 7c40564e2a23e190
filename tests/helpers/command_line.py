"""Parses command lines as `kvstreams` does, without running them."""

from __future__ import annotations

from collections.abc import Iterable

import click

from streams.cli import cli


def parse_command(name: str, arguments: Iterable[str]) -> click.Context:
    """Return the context of a command with these arguments; raises click.UsageError.

    A command without its parent would keep a help option that lacks `-h`, for all later tests.
    """
    return cli.commands[name].make_context(
        name, list(arguments), parent=click.Context(cli, info_name="kvstreams", **cli.context_settings)
    )
