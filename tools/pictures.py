"""Make the pictures of the docs: the live page and the page of the API with a fleet that is well, and the demo's plot.

What lives here: which fleet and traffic the pictures show. What must not: starting processes (streams.lab.stack), and
whether a page can be read (tests.helpers.page_texts).

    make pictures

It takes about eight minutes on two cores, of which five are the demo. Nothing else should run meanwhile: on a busy
machine events come late, answers are degraded, and the fleet is not well. Then the script says so and fails.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from playwright.sync_api import Browser, Page, expect

from streams.kafka.clients import delete_topics
from streams.lab.commands.kafka import start_kafka
from streams.lab.demo.drive import ModelClock, drive
from streams.lab.demo.run import DemoConfig, run_demo
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import Stack, get_json, wait_workers
from streams.lab.trace import ChatShape, generate
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.browser import browser
from tests.helpers.page_texts import unreadable

DOCS = Path(__file__).parent.parent / "docs"

#: A fleet that one machine runs without delays: its engines serve 15 requests at a time.
ENGINES = 6
SHAPE = ChatShape(rate_per_s=3.0)
TRACE_SEED = 20261128

#: Traffic before the first picture, and after it, until the last one is taken.
BEFORE_S, AFTER_S = 150, 90

#: A fleet is well if at least this share of the decisions is exact.
EXACT_SHARE_MIN = 0.95

#: A desk and a phone.
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")

_PATIENCE_MS = 30_000.0


def main() -> None:
    """Make all pictures, or those of one kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("pages", "demo"), help="pictures of the pages, or the demo's plot")
    parser.add_argument("--folder", type=Path, default=Path(".kvstreams/pictures"), help="folder of all pictures")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.only != "demo":
        take_pages(given.folder)
    if given.only != "pages":
        demo = given.folder / "demo"
        run_demo(DemoConfig(directory=demo, kafka_directory=given.folder / "kafka"), start_kafka)
        for scheme, name in zip(SCHEMES, ("demo.png", "demo-dark.png"), strict=True):
            shutil.copyfile(demo / name, DOCS / f"demo-{scheme}.png")
    print(f"All pictures are in {given.folder}; those of the docs are in {DOCS}")


def take_pages(folder: Path) -> None:
    """Take pictures of both pages in both colour schemes and at both widths, while requests are served."""
    requests = generate(round(SHAPE.rate_per_s * (BEFORE_S + AFTER_S)), np.random.default_rng(TRACE_SEED), SHAPE)
    with _fleet(folder) as (url, engines), browser() as chromium:
        clock, over = ModelClock(1.0), threading.Event()

        def traffic() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(drive(requests, url, engines, clock, "pictures", lambda: None))
            over.set()

        thread = threading.Thread(target=traffic, daemon=True)
        thread.start()
        over.wait(BEFORE_S)
        for scheme in SCHEMES:
            for width in WIDTHS:
                with _opened(chromium, url, scheme, width) as page:
                    live = get_json(f"{url}/live")
                    _check_well(live)
                    expect(page.locator("#decisions tr").first).to_be_visible(timeout=_PATIENCE_MS)
                    _take(page, folder / f"live-{scheme}-{width}.png")
                    page.goto(f"{url}/docs")
                    expect(page.locator("#route")).to_be_visible(timeout=_PATIENCE_MS)
                    _take(page, folder / f"api-{scheme}-{width}.png")
            shutil.copyfile(folder / f"live-{scheme}-{WIDTHS[0]}.png", DOCS / f"live-{scheme}.png")
        assert not over.is_set(), "the traffic ended before the last picture"
        thread.join()


def _check_well(live: dict[str, Any]) -> None:
    rates = {mode: sum(values) for mode, values in live["samples"]["modes"].items()}
    exact = rates["exact"] / sum(rates.values())
    states = {f"{worker['state']} {worker['reason'] or ''}".strip() for worker in live["workers"]}
    if exact < EXACT_SHARE_MIN or states != {"exact"}:
        raise SystemExit(
            f"The fleet is not well: {exact:.0%} of the decisions are exact, and workers are {sorted(states)}. "
            "Take the pictures while nothing else runs on this machine."
        )


def _take(page: Page, path: Path) -> None:
    """Take a picture of a page that can be read."""
    faults = unreadable(page, texts_min=30)
    page.screenshot(path=path, full_page=True)
    if faults:
        raise SystemExit(f"{path} cannot be read: {faults}")
    print(path)


@contextmanager
def _opened(chromium: Browser, url: str, scheme: str, width: int) -> Iterator[Page]:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    try:
        page = context.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.goto(url)
        yield page
    finally:
        context.close()


@contextmanager
def _fleet(folder: Path) -> Iterator[tuple[str, dict[int, str]]]:
    """A router's URL and those of its engines, by worker id, for as long as the block runs."""
    kafka = start_kafka(folder / "kafka")
    settings = Settings(kafka=kafka.bootstrap, topic_prefix=f"pictures-{uuid.uuid4().hex[:8]}.", partitions=4)
    children = Children()
    try:
        stack = Stack(settings, folder / "fleet", children)
        worker = stack.worker()
        engines = stack.engines(ENGINES, EngineConfig(), "llama-3.1-8b", time_scale=1.0)
        stack.bridge(engines)
        wait_workers(worker.url, ENGINES)
        wait_for(
            lambda: {each["state"] for each in get_json(f"{worker.url}/live")["workers"]} == {"exact"},
            60.0,
            "all workers to be exact",
        )
        yield worker.url, {engine.worker_id: engine.url for engine in engines}
    finally:
        children.stop()
        delete_topics(settings, topics(settings).all())
        LocalKafka(LocalKafkaConfig(folder / "kafka")).down()


if __name__ == "__main__":
    main()
