"""How commands print tables.

What lives here: the console. What must not: what is printed.
"""

from __future__ import annotations

import sys

from rich.console import Console

#: Characters of a line in a pipe, for tables of which each row takes one line, so that `grep` and `sort` can be used.
ONE_LINE_WIDTH = 1000


def console(piped_width: int = 200) -> Console:
    """A console for tables, without markup, which would take `[compact]` in a setting for a style and remove it.

    piped_width: characters of a line that is not written to a terminal.
    """
    return Console(width=None if sys.stdout.isatty() else piped_width, markup=False, emoji=False, highlight=False)
