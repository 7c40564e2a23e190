"""Code blocks of the documentation, for tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: The pages of the documentation.
PAGES = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

TOP_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")

#: Pages that are pasted in this order into one shell, by what a reader sets out to do (kafka/test_pasted_docs.py).
JOURNEYS = {
    "api": ("docs/own-fleet.md", "docs/publisher.md", "docs/http.md", "docs/sim.md", "docs/cxl.md"),
    "operating": (
        *("docs/own-fleet.md", "docs/more-routers.md", "docs/troubleshooting.md", "docs/recovery.md"),
        *("docs/upgrades.md", "docs/doctor.md", "docs/metrics.md"),
    ),
    "decisions": ("docs/own-fleet.md", "docs/decisions.md", "docs/scaling.md"),
    "front": ("docs/own-fleet.md", "docs/front.md"),
    "gateway": ("docs/gateway.md",),
    "security": ("docs/tls-and-tokens.md",),
    "litellm": ("docs/own-fleet.md", "docs/litellm.md"),
}

#: Python blocks of these pages that are programs, which a reader pastes next to the processes of the page: beginnings.
PASTED_PYTHON = {
    "docs/own-fleet.md": "import asyncio",
    "docs/publisher.md": "from streams.engines.publisher",
    "docs/front.md": "from openai",
}


def is_pasted(page: str, language: str, code: str) -> bool:
    """Whether a journey pastes this block."""
    if language == "python":
        return page in PASTED_PYTHON and code.startswith(PASTED_PYTHON[page])
    return language == "sh" and any(page in pages for pages in JOURNEYS.values())


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Return a page's code blocks in one language, each with the number of the line that precedes its code."""
    return [(line, code) for line, each, code in blocks_of(page) if each == language]


def blocks_of(page: str) -> list[tuple[int, str, str]]:
    """Return all code blocks of a page in order: the number of the line that precedes its code, language, code."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: block.start(2)].count("\n"), block[1], block[2]) for block in found]


def block_of(page: str, beginning: str) -> str:
    """Return the code of the page's only block that begins like this."""
    (code,) = [code for _, _, code in blocks_of(page) if code.startswith(beginning)]
    return code


def shape(text: str) -> str:
    """Return a line without what differs from run to run: numbers, and the width of columns."""
    return " ".join(re.sub(r"[+-]?\d+(,\d{3})*(\.\d+)?", "0", text).split())
