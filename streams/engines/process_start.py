"""When an engine's process started, as its Prometheus page reports it.

What lives here: reading `process_start_time_seconds`. What must not: what follows from it (continuity).
"""

from __future__ import annotations

import re

import aiohttp

from streams.core.ids import Incarnation
from streams.engines.continuity import Evidence

_START_TIME = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


async def read_process_start(http: aiohttp.ClientSession, metrics_url: str) -> Evidence:
    """Read the start time from an engine's metrics; an answer without one is evidence that the engine is reachable.

    Raises ClientError, TimeoutError.
    """
    async with http.get(metrics_url) as response:
        text = await response.text() if response.status == 200 else ""
    return parse_process_start(text)


def parse_process_start(page: str) -> Evidence:
    """Find the start time on a Prometheus page, converted to microseconds."""
    found = _START_TIME.search(page)
    try:
        return Evidence(True, Incarnation(round(float(found[1]) * 1_000_000)) if found else None)
    except (ValueError, OverflowError):
        return Evidence(True, None)
