"""When an engine's process started, as its HTTP server reports it.

What lives here: reading `process_start_time_seconds`, and which answers of an HTTP server are a sign of life. What must
not: what follows from it (continuity).

A proxy in front of an engine answers in its place while the engine is away: 502 or 503, and some proxies 404. So only
a page with status 200 shows that the engine is running. An engine that serves no metrics answers 404 itself; it is then
asked for its models.
"""

from __future__ import annotations

import re

import aiohttp

from streams.core.ids import Incarnation
from streams.engines.continuity import Evidence

#: Bytes of a page. vLLM's page of eight ranks with all its histograms is about 500 KB.
PAGE_BYTES_MAX = 8 * 1024 * 1024

_START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)

_OK, _CLIENT_ERRORS = 200, range(400, 500)


async def read_process_start(http: aiohttp.ClientSession, metrics_url: str, models_url: str) -> Evidence:
    """Read the start time from an engine's metrics; a page without one still shows that the engine is reachable.

    Raises ClientError, TimeoutError.
    """
    async with http.get(metrics_url) as response:
        if response.status == _OK:
            return parse_process_start((await read_body(response, PAGE_BYTES_MAX)).decode(errors="replace"))
        if response.status not in _CLIENT_ERRORS:
            return Evidence(reachable=False, started=None)
    async with http.get(models_url) as response:
        return Evidence(reachable=response.status == _OK, started=None)


async def read_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Read a body, and stop after `bytes_max` bytes or slightly more. Raises ClientError, TimeoutError."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > bytes_max:
            break
    return bytes(body)


def parse_process_start(page: str) -> Evidence:
    """Find the start time on a Prometheus page, converted to microseconds."""
    found = _START_TIME.search(page)
    try:
        return Evidence(True, Incarnation(round(float(found[1]) * 1_000_000)) if found else None)
    except (ValueError, OverflowError):
        return Evidence(True, None)
