"""How commands print: tables, and the addresses that a simulated process listens on.

What lives here: the console and what is written with it. What must not: what is printed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import orjson
from rich.console import Console

#: Characters of a line in a pipe, for tables of which each row takes one line, so that `grep` and `sort` can be used.
ONE_LINE_WIDTH = 1000


def console(piped_width: int = 200) -> Console:
    """A console for tables, without markup, which would take `[compact]` in a setting for a style and remove it.

    piped_width: characters of a line that is not written to a terminal.
    """
    return Console(width=None if sys.stdout.isatty() else piped_width, markup=False, emoji=False, highlight=False)


def print_addresses(addresses: dict[str, str], path: Path | None) -> None:
    """Print where a process listens, as JSON, and write the same to a file if one is given."""
    text = orjson.dumps(addresses).decode()
    click.echo(text)
    if path is not None:
        # Written elsewhere and moved: a process that waits for the file must never read half of it.
        half = path.with_suffix(".half")
        half.write_text(text)
        half.replace(path)
