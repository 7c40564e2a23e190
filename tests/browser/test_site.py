"""The site of the documentation in a browser, without a server and without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route

from tests.helpers.browser import browser
from tests.helpers.page_texts import unreadable
from tests.helpers.pages import PAGES, ROOT, blocks

#: Pages with diagrams, with long tables, and with pictures.
LOOKED_AT = ("index", "write-path", "read-path", "trust", "architecture", "settings", "first-request")

#: Names at the beginning of a row that take more than one line.
_BROKEN_NAMES = """cells => cells.filter(each => each.getClientRects().length > 1).map(each => each.textContent)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "tools.site", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return folder


def drawn(page: Page) -> None:
    """Wait until every diagram is drawn."""
    page.wait_for_function("() => document.querySelectorAll('pre.mermaid').length === 0")


def test_every_page_can_be_read_at_a_desk_and_on_a_phone(site: Path) -> None:
    """No text overlaps another, no page is wider than its window, and no name at the beginning of a row is broken."""
    with browser() as running:
        for width in (1280, 390):
            # The theme clips what is below the window, and what is clipped is not compared.
            page = running.new_page(viewport={"width": width, "height": 20_000})
            for name in LOOKED_AT:
                page.goto((site / f"{name}.html").as_uri())
                drawn(page)
                # The theme itself cuts off long titles of the next page.
                assert [each for each in unreadable(page, 20) if not each.startswith("cut off")] == [], name
                assert page.eval_on_selector_all("td:first-child code", _BROKEN_NAMES) == [], name


def test_diagrams_are_drawn_and_the_search_finds_pages_without_a_network(site: Path) -> None:
    """Every diagram of the page on the architecture has a height, and nothing is asked for outside of the site."""
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
            page.goto((site / name).as_uri())
            page.wait_for_selector("div.mermaid")
            drawn(page)
            heights = page.eval_on_selector_all("div.mermaid", "drawn => drawn.map(each => each.clientHeight)")
            assert len(heights) == n_drawn, name
            assert min(heights) > 50, name
        page.fill("input.md-search__input", "tombstone")
        page.wait_for_selector("a.md-search-result__link")
    assert outside == []
