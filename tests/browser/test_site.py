"""The site of the documentation in a browser, without a server and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Route

from tests.helpers.browser import browser
from tests.helpers.pages import PAGES, ROOT, blocks


def test_diagrams_are_drawn_and_the_search_finds_pages_without_a_network(tmp_path: Path) -> None:
    """Every diagram of the page on the architecture has a height, and nothing is asked for outside of the site."""
    subprocess.run(
        [sys.executable, "-m", "tools.site", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    outside: list[str] = []
    diagrams = {Path(page).with_suffix(".html").name: len(blocks(page, "mermaid")) for page in PAGES}
    diagrams = {name: n_drawn for name, n_drawn in diagrams.items() if n_drawn}
    assert len(diagrams) > 4

    def load(route: Route) -> None:
        if route.request.url.startswith(("file:", "blob:", "data:")):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    with browser() as running:
        page = running.new_page()
        page.route("**/*", load)
        for name, n_drawn in diagrams.items():
            page.goto((tmp_path / name).as_uri())
            page.wait_for_selector("div.mermaid")
            page.wait_for_function("() => document.querySelectorAll('pre.mermaid').length === 0")
            heights = page.eval_on_selector_all("div.mermaid", "drawn => drawn.map(each => each.clientHeight)")
            assert len(heights) == n_drawn, name
            assert min(heights) > 50, name
        page.fill("input.md-search__input", "tombstone")
        page.wait_for_selector("a.md-search-result__link")
    assert outside == []
