"""Code blocks of the documentation, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Return a page's code blocks in one language, each with the number of the line that precedes its code."""
    text = (ROOT / page).read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start(1)].count("\n"), block[1]) for block in found]
