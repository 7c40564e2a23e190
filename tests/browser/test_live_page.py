"""The live page in a real browser: what it shows, how it follows the router, its colours, and its accessibility."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from streams.process.waiting import wait_for
from streams.router_api.http.calls import CALLS
from streams.settings import Settings
from tests.helpers.browser import browser, installed
from tests.helpers.local_router import LocalRouter, hold, local_router, random_blocks, rank
from tests.helpers.page_texts import unreadable
from tools.npm_package import NoPackage

#: The page asks every two seconds; on a busy machine an answer may take a while.
PATIENCE_MS = 20_000.0

#: Wide enough for a desk, and a phone.
WIDTHS = (1280, 390)

BLOCKS = random_blocks(np.random.default_rng(3), 8)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    try:
        installed()
    except NoPackage as exc:
        pytest.skip(str(exc))
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
        expect(page.locator("#tile-requests .value")).to_have_text("5 0 waiting, 8 blocks", timeout=PATIENCE_MS)
        expect(page.locator("#tile-hits .value")).to_have_text("100 %", timeout=PATIENCE_MS)
        expect(page.locator("#modes-legend .degraded")).to_have_text("degraded 100 %")
        expect(page.locator("#tile-latency .value")).to_have_text(re.compile(r"^[\d.]+ ms p50, [\d.]+ ms p99$"))
        expect(page.locator("#tiles svg polyline").nth(3)).to_be_attached(timeout=PATIENCE_MS)
        expect(page.locator("#modes-chart svg polygon.degraded")).to_be_attached()
        expect(page.locator("#partitions li")).to_have_count(Settings().partitions)
        expect(page.locator("#decisions tr:not(.terms)").first.locator("th")).to_have_text("2/0", timeout=PATIENCE_MS)
        expect(page.locator("#decisions tr:not(.terms)").first.locator("td").nth(1)).to_have_text("8 of 8")
        expect(page.locator("#decisions .terms").first).to_contain_text(
            "8 cached blocks · 1 tokens to compute · 20 ms to compute the prompt"
        )
        expect(page.locator("#pools li")).to_have_text(
            re.compile(r"^m saturation \d+ % · backlog \d+ ms · 3 replicas, [\d.]+ wanted$"), timeout=PATIENCE_MS
        )
        assert page.locator("#notice").is_hidden() and page.locator("#token-form").is_hidden()


@pytest.mark.first_ring("live page")
def test_the_page_appears_and_can_be_read(chromium: Browser, served: LocalRouter) -> None:
    """At a desk and on a phone, all parts are there, and no text overlaps another or is cut off."""
    for width in WIDTHS:
        with opened(chromium, served.api.url) as page:
            page.set_viewport_size({"width": width, "height": 900})
            expect(page.locator("#workers tr")).to_have_count(3, timeout=PATIENCE_MS)
            expect(page.locator("#tiles article")).to_have_count(8)
            assert unreadable(page, texts_min=50) == []


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


#: Which part of a chart's width has a line or an area, by the name of the chart. In one call, as the page redraws them.
_SHARES_DRAWN = """() => Object.fromEntries([...document.querySelectorAll(".chart svg")].map((chart) => [
  chart.getAttribute("aria-label"),
  chart.firstElementChild.getBoundingClientRect().width / chart.getBoundingClientRect().width,
]))"""


def crowded(served: LocalRouter) -> dict[str, Any]:
    """The router's answer of GET /live, with the longest names and numbers that a page gets."""
    live: dict[str, Any] = served.api.get("/live")
    n = 100
    samples: dict[str, Any] = {name: [1234567.89] * n for name in live["samples"] if name != "modes"}
    modes = {mode: [4321.5] * n for mode in live["samples"]["modes"]}
    samples |= {"age_s": [2.0 * (n - i) for i in range(n)], "modes": modes, "latency_ms_p99": [12345.67] * n}
    samples |= {"hit_rate": [0.99] * n, "agreed_share": [0.999] * n, "imbalance": [12.34] * n, "lag_s": [1234.5] * n}
    reasons = ("no_events_yet", "pooled_rank_unknown", None, "bridge_silent")
    numbers = {"requests": 1234567, "prefill_tokens": 12345678, "decode_blocks": 1234567, "hit_rate": 1.0}
    workers = [
        {
            **live["workers"][0],
            **numbers,
            "worker_id": str(2**64 - 1 - number) if number % 4 == 3 else str(number),
            "ranks": 64,
            "model": "meta-llama/Llama-3.3-70B-Instruct-FP8-dynamic",
            "state": "wrong_block_size" if reason is None else "degraded",
            "reason": reason,
            "cache_usage": 1.0,
        }
        for number, reason in enumerate(reasons * 16)
    ]
    terms = {
        **dict.fromkeys(("own_prefill_blocks", "active_prefill_blocks", "decode_blocks"), 1234567.0),
        "x_ms": -12.5,
    }
    decision = {**live["decisions"][0], "cost": 1234567.0, "load_blocks": 1234567.0, "terms": terms, "candidates": 9}
    decision |= {"next_best": {"worker_id": "12345", "dp_rank": 15, "overlap_blocks": 1, "cost": 2345678.0}}
    pools = [
        {**pool, "model": workers[0]["model"], "backlog_ms": 1234567.0, "replicas": 1234} for pool in live["pools"]
    ]
    explanations = {name: {"meaning": "It lags. " * 9, "remedy": "Do this. " * 20} for name in reasons if name}
    router = {**live["router"], "audited": {**live["router"]["audited"], "over": 1234567}, "agreed_share": 0.9876}
    router |= {"index_blocks": 123456789, "dead_letters": 1234567}
    return {
        **live,
        "router": router,
        "samples": samples,
        "workers": workers,
        "pools": 3 * pools,
        "explanations": explanations,
        "decisions": [{**decision, "age_s": float(age)} for age in range(9)],
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_overlaps_another_or_is_cut_off(chromium: Browser, served: LocalRouter, width: int) -> None:
    """At a desk and on a phone, everything can be read: with the figures of this router, and with crowded ones."""
    served.api.route(request_id=f"texts-{width}", block_hashes=list(map(str, BLOCKS.tolist())))
    wait_for(lambda: bool(served.api.get("/live")["decisions"]), PATIENCE_MS / 1000, "a decision to be shown")
    answer = json.dumps(crowded(served))
    for scheme in ("light", "dark"):
        with opened(chromium, served.api.url, scheme) as page:
            page.set_viewport_size({"width": width, "height": 900})
            expect(page.locator("#decisions tr").first).to_be_visible(timeout=PATIENCE_MS)
            expect(page.locator("#tiles svg polyline").first).to_be_attached(timeout=PATIENCE_MS)
            assert unreadable(page, texts_min=60) == []
            page.route("**/live", lambda route: route.fulfill(body=answer, content_type="application/json"))
            expect(page.locator("#workers tr")).to_have_count(64, timeout=PATIENCE_MS)
            assert unreadable(page, texts_min=500) == []
            shares = page.evaluate(_SHARES_DRAWN)
            assert len(shares) == 9 and min(shares.values()) > 0.95, shares
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()


def test_the_page_of_a_router_without_workers_can_be_read(chromium: Browser) -> None:
    """Before the first engine is there, the page says how one gets there, and no text overlaps another."""
    with local_router(Settings(), n_workers=0) as served:
        for width in WIDTHS:
            with opened(chromium, served.api.url) as page:
                page.set_viewport_size({"width": width, "height": 900})
                expect(page.locator("#workers-empty")).to_contain_text("A bridge registers its engines")
                expect(page.locator("#tiles svg polyline").first).to_be_attached(timeout=PATIENCE_MS)
                assert unreadable(page, texts_min=30) == []


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_of_the_page_of_the_api_overlaps_another(chromium: Browser, served: LocalRouter, width: int) -> None:
    """Also with a call's fields shown."""
    for scheme in ("light", "dark"):
        with opened(chromium, served.api.url, scheme, path="/docs") as page:
            page.set_viewport_size({"width": width, "height": 900})
            expect(page.locator("main > details")).to_have_count(len(CALLS), timeout=PATIENCE_MS)
            page.locator("#route > summary").click()
            page.locator("#route details > summary", has_text="RouteRequest").first.click()
            assert unreadable(page, texts_min=150) == []
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()


def test_a_reason_leads_to_its_meaning_and_remedy(chromium: Browser, served: LocalRouter) -> None:
    """A click on a degraded worker's reason shows what it means and what to do; a router without one shows nothing."""
    with opened(chromium, served.api.url) as page:
        page.locator("#workers a", has_text="no events yet").first.click(timeout=PATIENCE_MS)
        meaning = page.locator("#why-no_events_yet:target + dd")
        expect(meaning).to_contain_text("No event of a rank has arrived yet")
        expect(meaning).to_contain_text("What to do: Check events= and replay=")


def test_the_test_of_texts_finds_what_cannot_be_read(chromium: Browser, served: LocalRouter) -> None:
    """Texts over each other, a text that is cut off and a page that is too wide are found, each by its words."""
    faults = {
        '<p>first</p><p style="margin-top: -30px">second</p>': "overlap: first | second",
        '<p style="width: 20px; overflow: hidden; white-space: nowrap">a long text</p>': "cut off: a long text",
        '<p style="width: 2000px">wide</p>': "the page is",
    }
    for body, fault in faults.items():
        with opened(chromium, served.api.url, path="/live.css") as page:
            page.set_content(f"<body><p>plain</p>{body}</body>")
            assert [each for each in unreadable(page, texts_min=2) if each.startswith(fault)], fault


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
