"""The start time of an engine's process, read from its Prometheus page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web

from streams.core.ids import Incarnation
from streams.engines.continuity import Evidence
from streams.engines.process_start import PAGE_BYTES_MAX, parse_process_start, read_process_start


@pytest.mark.parametrize(
    ("page", "started"),
    [
        ("process_start_time_seconds 1.5\n", 1_500_000),
        ('# TYPE x gauge\nprocess_start_time_seconds{pid="7"} 1.7e9\nup 1\n', 1_700_000_000_000_000),
        ("up 1\n", None),
        ("my_process_start_time_seconds 5\n", None),
        ("process_start_time_seconds soon\n", None),
        ("process_start_time_seconds NaN\n", None),
        ("process_start_time_seconds +Inf\n", None),
        ("", None),
    ],
)
def test_a_start_time_becomes_microseconds(page: str, started: int | None) -> None:
    """A page without a usable start time still shows that the engine is reachable."""
    assert parse_process_start(page) == Evidence(True, None if started is None else Incarnation(started))


START = "process_start_time_seconds 1.5\n"


@pytest.mark.parametrize(
    ("metrics", "models", "found"),
    [
        ((200, START), (200, ""), Evidence(True, Incarnation(1_500_000))),
        ((200, "up 1\n"), (502, ""), Evidence(True, None)),
        ((502, START), (200, ""), Evidence(False, None)),  # a proxy in front of an engine that is away
        ((503, ""), (200, ""), Evidence(False, None)),
        ((404, ""), (404, ""), Evidence(False, None)),  # so do some proxies answer
        ((404, ""), (200, ""), Evidence(True, None)),  # an engine without metrics
        ((200, "#" * (PAGE_BYTES_MAX + 1_000_000)), (200, ""), Evidence(True, None)),
    ],
)
def test_only_a_page_shows_that_an_engine_is_running(
    metrics: tuple[int, str], models: tuple[int, str], found: Evidence
) -> None:
    """Any other status may be a proxy's; an engine that serves no metrics is asked for its models."""

    def answering(answer: tuple[int, str]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            return web.Response(status=answer[0], text=answer[1])

        return handler

    async def main() -> Evidence:
        app = web.Application()
        app.router.add_get("/metrics", answering(metrics))
        app.router.add_get("/v1/models", answering(models))
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with aiohttp.ClientSession() as http:
                return await read_process_start(http, f"{url}/metrics", f"{url}/v1/models")
        finally:
            await runner.cleanup()

    assert asyncio.run(main()) == found
