"""How a process that serves the HTTP API stops: it says that it is not ready, finishes its requests, and leaves.

What lives here: the order of these steps and their common limit. What must not: listening (http_server), and what a
router publishes (loads_sync).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Protocol

from streams.process.http_server import HttpServer
from streams.router_api.deciding.router import Router

log = logging.getLogger(__name__)


class Closing(Protocol):
    """Another server of the router."""

    def close(self, timeout_s: float) -> Awaitable[None]:
        """Finish what runs, and stop."""


async def drain(router: Router, server: HttpServer | None, door: Closing | None = None) -> None:
    """Stop a router that may be serving, within `drain_timeout_s` after `drain_notice_s`. Logs one line at the end.

    During the notice the router answers as before, but /ready says that it is stopping, and each answer closes its
    connection, so that load balancers and clients turn to other routers. Then it refuses new connections, finishes the
    requests that it has, and waits until Kafka has its records. A cancellation ends the notice. door: another server of
    the router, which does the same.
    """
    settings = router.settings
    began_s = time.monotonic()
    router.stopping = True
    try:
        if server is not None:
            await asyncio.sleep(settings.drain_notice_s)
    finally:
        until_s = time.monotonic() + settings.drain_timeout_s
        if door is not None:
            await door.close(settings.drain_timeout_s)
        if server is not None:
            await server.close()
        left = await asyncio.to_thread(router.stop, max(0.0, until_s - time.monotonic()))
        log.info(
            "stopped after %.1f s. Requests that were cut off: %d. Records that Kafka did not acknowledge: %d",
            time.monotonic() - began_s,
            router.requests_cut_off,
            left,
        )
