"""Writes what the documentation has from the code: `python -m tools.reference`. A test fails until it has been run.

What lives here: which generated parts there are, and how they are replaced. What must not: the parts (reference_tables,
drawn_rules).

A page names each part in comments, and everything between them is replaced:

    <!-- generated: settings -->
    ...
    <!-- end of settings -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools import drawn_rules, reference_tables

DOCS = Path(__file__).parents[1] / "docs"

#: The generated parts by their names. Each is on one page.
PARTS: Mapping[str, Callable[[], str]] = {
    "settings": reference_tables.setting_tables,
    "calls": reference_tables.http_calls,
    "types": reference_tables.http_types,
    "metrics": reference_tables.metric_tables,
    "topics": reference_tables.topic_table,
    "records": reference_tables.schema_tables,
    "api errors": reference_tables.api_errors,
    "remedies": reference_tables.remedies,
    "reasons": reference_tables.degraded_reasons,
    "findings": reference_tables.findings,
    "commands": reference_tables.commands,
    "modules": reference_tables.module_map,
    "effects": drawn_rules.effects_diagram,
    "feed": drawn_rules.feed_diagram,
    "phases of a feed": drawn_rules.feed_phases,
    "rules of a feed": drawn_rules.feed_table,
    "states of a block": drawn_rules.cxl_diagram,
}

_REGION = re.compile(r"^<!-- generated: (?P<name>.+?) -->\n.*?^<!-- end of (?P=name) -->$", re.MULTILINE | re.DOTALL)


def rewritten(text: str) -> str:
    """A page with its generated parts as the code has them now. Raises KeyError for a part that does not exist."""

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- generated: {name} -->\n\n{PARTS[name]()}\n\n<!-- end of {name} -->"

    return _REGION.sub(part, text)


def names_of(text: str) -> list[str]:
    """The names of a page's generated parts."""
    return [found["name"] for found in _REGION.finditer(text)]


def main() -> None:
    """Rewrite every page that has generated parts."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        new = rewritten(text)
        if new != text:
            path.write_text(new)
            sys.stdout.write(f"{path.relative_to(DOCS.parent)}\n")


if __name__ == "__main__":
    main()
