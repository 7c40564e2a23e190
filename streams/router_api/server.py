"""`kvstreams router`: the HTTP API on a server of its own.

What lives here: starting and stopping the server and its router. What must not: the calls (handlers).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from streams.errors import KvStreamsError, TopicMismatch
from streams.http_server import HttpServer, Startup, starting_app
from streams.interpreter import exempt_from_collection, prefer_request_threads
from streams.kafka import TOPICS_POLL_S, missing_topics
from streams.metrics import MetricsRegistry
from streams.router_api.draining import drain
from streams.router_api.handlers import Handlers, error_shape
from streams.router_api.router import Router
from streams.settings import Settings
from streams.topics import topics
from streams.warming import ROUTER, warm_while_serving

log = logging.getLogger(__name__)

#: Interval of a router's ticks, which serve delivery reports and expiry.
TICK_S = 0.5

#: Interval at which a starting router checks whether it has read the registry.
REGISTRY_POLL_S = 0.05


async def tick_forever(router: Router) -> None:
    """Call the router's tick periodically until cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        router.tick()


def api_runner(router: Router, more_metrics: Sequence[MetricsRegistry[Any]] = ()) -> web.AppRunner:
    """The HTTP API of a router, with its limits. more_metrics: further registries of this process."""
    app = web.Application(middlewares=[error_shape])
    handlers = Handlers(router, more_metrics)
    handlers.add_to(app)
    return handlers.runner(app)


async def serve(settings: Settings) -> None:
    """Serve until cancelled.

    Raises KvStreamsError if Kafka cannot be reached, the port is not available, or the scope has another block size for
    a model than the settings.

    A router creates no topics: a typo in `topic_prefix` would then create a scope to which nothing is ever written.
    While topics are missing, the server answers that it is not ready, and why.
    """
    startup = Startup()
    server = HttpServer(settings.host, settings.port)
    router: Router | None = None
    ticking: asyncio.Task[None] | None = None
    try:
        await server.serve(starting_app(startup))
        startup.note("connecting to Kafka")
        missing = await asyncio.to_thread(missing_topics, settings, topics(settings).all())
        await warm_while_serving(ROUTER, startup.note)
        prefer_request_threads()
        router = Router(settings)
        router.topics_missing = tuple(missing)
        await server.serve(api_runner(router))
        log.info("routing on http://%s:%d", *server.address)
        await _until_topics_are_there(router)
        exempt_from_collection()
        router.start()
        ticking = asyncio.create_task(tick_forever(router))
        await _check_block_sizes(router)
        await asyncio.Event().wait()
    finally:
        if router is None:
            await server.close()
        else:
            await drain(router, server)
        if ticking is not None:
            ticking.cancel()


async def _until_topics_are_there(router: Router) -> None:
    """Wait until no topic is missing; raises TopicMismatch if one appears with other settings than required."""
    if router.topics_missing:
        log.warning("not ready: %s", router.missing())
    while router.topics_missing:
        await asyncio.sleep(TOPICS_POLL_S)
        try:
            missing = await asyncio.to_thread(missing_topics, router.settings, topics(router.settings).all())
        except TopicMismatch:
            raise
        except KvStreamsError as exc:  # the broker may be unreachable for a while
            log.warning("cannot check for missing topics, trying again: %s", exc)
            continue
        router.topics_missing = tuple(missing)


async def _check_block_sizes(router: Router) -> None:
    """Wait until the registry was read; raises BlockSizeContradicted if a model contradicts the router's settings.

    A contradiction that appears later does not end the router: it refuses the requests for that model.
    """
    while "workers" in router.feeds.pending():
        await asyncio.sleep(REGISTRY_POLL_S)
    router.view.check_block_sizes()
