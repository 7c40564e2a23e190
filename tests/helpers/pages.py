"""Code blocks of the documentation, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The pages of the documentation.
PAGES = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Return a page's code blocks in one language, each with the number of the line that precedes its code."""
    return [(line, code) for line, each, code in blocks_of(page) if each == language]


def blocks_of(page: str) -> list[tuple[int, str, str]]:
    """Return all code blocks of a page in order: the number of the line that precedes its code, language, code."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start(2)].count("\n"), block[1], block[2]) for block in found]
