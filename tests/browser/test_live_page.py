"""The live page in a real browser: what it shows, how it follows the router, its colours, and its accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from streams.router_api.http.calls import CALLS
from streams.settings import Settings
from tests.helpers.browser import browser
from tests.helpers.local_router import LocalRouter, hold, local_router, random_blocks, rank

#: The page asks every two seconds; on a busy machine an answer may take a while.
PATIENCE_MS = 20_000.0

BLOCKS = random_blocks(np.random.default_rng(3), 8)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def served() -> Iterator[LocalRouter]:
    with local_router(Settings(), n_workers=3) as router:
        hold(router.router, rank(2), BLOCKS)
        yield router


@contextmanager
def opened(chromium: Browser, url: str, scheme: str = "light", path: str = "") -> Iterator[Page]:
    """The page in a tab of its own. At the end: it had no error and asked no other host."""
    problems: list[str] = []
    asked: set[str] = set()
    context = chromium.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 900})  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda each: problems.append(each.text) if "Content Security Policy" in each.text else None)
        page.on("request", lambda request: asked.add(request.url))
        page.goto(f"{url}{path}")
        yield page
        assert problems == []
        assert {each for each in asked if not each.startswith((f"{url}/", "data:"))} == set()
    finally:
        context.close()


def text_of(page: Page, selector: str) -> str:
    return page.locator(selector).inner_text()


def test_the_page_shows_the_fleet_and_follows_it(chromium: Browser, served: LocalRouter) -> None:
    """Workers, loads, hit share and modes appear without a reload, after requests were routed."""
    with opened(chromium, served.api.url) as page:
        status = page.locator("#status")
        expect(status).to_have_text("Ready", timeout=PATIENCE_MS)
        rows = page.locator("#workers tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(1).locator("th")).to_have_text("2")
        expect(rows.nth(1).locator("td").nth(2)).to_have_text("0")
        for number in range(5):
            body = {"request_id": f"page-{number}", "block_hashes": list(map(str, BLOCKS.tolist())), "worker_id": 2}
            served.api.call("POST", "/route", body).given()
        expect(rows.nth(1).locator("td").nth(2)).to_have_text("5", timeout=PATIENCE_MS)
        expect(rows.nth(1).locator("td").nth(4)).to_have_text("8")
        expect(rows.nth(1).locator("td").nth(6)).to_have_text("100 %")
        expect(rows.nth(1).locator("td").nth(1)).to_have_text("degraded no events yet")
        expect(page.locator("#tile-requests .value")).to_have_text("5 8 blocks", timeout=PATIENCE_MS)
        expect(page.locator("#tile-hits .value")).to_have_text("100 %", timeout=PATIENCE_MS)
        expect(page.locator("#modes-legend .degraded")).to_have_text("degraded 100 %")
        expect(page.locator("#tile-latency .value")).to_have_text(re.compile(r"^[\d.]+ ms p50, [\d.]+ p99$"))
        expect(page.locator("#tiles svg polyline").nth(3)).to_be_attached(timeout=PATIENCE_MS)
        expect(page.locator("#modes-chart svg polygon.degraded")).to_be_attached()
        expect(page.locator("#partitions li")).to_have_count(Settings().partitions)
        assert page.locator("#notice").is_hidden() and page.locator("#token-form").is_hidden()


def test_the_page_of_the_api_lists_every_call(chromium: Browser, served: LocalRouter) -> None:
    """/docs shows each call with its path and right, and the fields of a request when they are opened."""
    with opened(chromium, served.api.url, path="/docs") as page:
        errors: list[str] = []
        page.on("console", lambda each: errors.append(each.text) if each.type == "error" else None)
        page.reload()
        calls = page.locator("main > details")
        expect(calls).to_have_count(len(CALLS), timeout=PATIENCE_MS)
        listed = {
            (each.locator(".method").inner_text(), each.locator("> summary > code").inner_text())
            for each in calls.all()
        }
        assert listed == {(call.method, call.path) for call in CALLS}
        route = page.locator("#route")
        route.locator("> summary").click()
        expect(route.get_by_text("Right of the token, if the router has tokens: route")).to_be_visible()
        route.locator("details > summary", has_text="RouteRequest").first.click()
        expect(route.locator("td", has_text="token_ids").first).to_be_visible()
        assert errors == []


def test_light_and_dark_follow_the_system_and_are_accessible(chromium: Browser, served: LocalRouter) -> None:
    """Both schemes have enough contrast, names for every chart, and no other fault that axe-core finds."""
    grounds = {}
    for scheme in ("light", "dark"):
        with opened(chromium, served.api.url, scheme) as page:
            expect(page.locator("#workers tr")).to_have_count(3, timeout=PATIENCE_MS)
            grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            for drawing in page.locator("svg").all():
                assert drawing.get_attribute("aria-label")
    light, dark = (sum(map(int, re.findall(r"\d+", grounds[scheme])[:3])) for scheme in ("light", "dark"))
    assert dark < 3 * 64 < 3 * 192 < light


def test_a_narrow_window_scrolls_only_the_table(chromium: Browser, served: LocalRouter) -> None:
    """On a phone the page itself does not scroll sideways."""
    with opened(chromium, served.api.url) as page:
        page.set_viewport_size({"width": 360, "height": 800})
        expect(page.locator("#workers tr")).to_have_count(3, timeout=PATIENCE_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_the_page_says_when_its_router_is_not_ready_or_gone(chromium: Browser) -> None:
    """The last numbers stay, marked as old, until the router answers again."""
    with ExitStack() as router_runs:
        served = router_runs.enter_context(local_router(Settings(router_min_initial_workers=2), n_workers=1))
        with opened(chromium, served.api.url) as page:
            expect(page.locator("#status")).to_have_text("Not ready", timeout=PATIENCE_MS)
            expect(page.locator("#notice")).to_contain_text("1 more workers must be registered first")
            router_runs.close()
            expect(page.locator("#status")).to_have_text("No answer", timeout=PATIENCE_MS)
            expect(page.locator("body")).to_have_class("stale")
            expect(page.locator("#workers tr")).to_have_count(1)


def test_a_token_that_its_user_enters_is_kept_for_the_tab_and_sent_to_the_router(
    chromium: Browser, tmp_path: Path
) -> None:
    """Without a token the page asks for one and refuses a wrong one; the right one survives a reload, in this tab."""
    token = "a-token-of-the-page-0123456789"
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[viewer]\ntoken = "{token}"\nrights = ["read"]\n')
    with local_router(Settings(tokens_file=str(tokens)), n_workers=1) as served:
        with opened(chromium, served.api.url) as page:
            expect(page.locator("#status")).to_have_text("Token required", timeout=PATIENCE_MS)
            expect(page.locator("#workers tr")).to_have_count(0)
            page.get_by_label("This router requires a token").fill("not-the-token-0123456789")
            page.get_by_role("button", name="Use this token").click()
            expect(page.locator("#notice")).to_have_text("The router refused this token.", timeout=PATIENCE_MS)
            page.get_by_label("This router requires a token").fill(token)
            page.keyboard.press("Enter")
            expect(page.locator("#workers tr")).to_have_count(1, timeout=PATIENCE_MS)
            expect(page.locator("#token-form")).to_be_hidden()
            page.reload()
            expect(page.locator("#workers tr")).to_have_count(1, timeout=PATIENCE_MS)
            assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
            assert token not in page.content()
        with opened(chromium, served.api.url) as page:
            expect(page.locator("#status")).to_have_text("Token required", timeout=PATIENCE_MS)
