"""`kvstreams router`: the HTTP API on a server of its own.

What lives here: starting and stopping the server and its router. What must not: the calls (handlers).
"""

from __future__ import annotations

import asyncio
import logging
import sys

from aiohttp import web

from streams.errors import KvStreamsError, SettingsError, TopicMismatch
from streams.kafka import missing_topics
from streams.router_api.handlers import Handlers, error_shape
from streams.router_api.router import Router
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Interval of a router's ticks, which serve delivery reports and expiry.
TICK_S = 0.5

#: Interval at which missing topics are checked for; each check is one call to the broker.
TOPICS_POLL_S = 1.0

#: Threads that fold records share the interpreter with the thread that answers. With Python's default of 5 ms, a query
#: waits that long for each busy thread. With one busy thread, the p99 is 5 to 7 ms; this interval reduces it to 0.3 ms.
SWITCH_INTERVAL_S = 1e-4


def prefer_request_threads() -> None:
    """Make busy threads release the interpreter soon. Every process that serves the API calls this."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def tick_forever(router: Router) -> None:
    """Call the router's tick periodically until cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        router.tick()


async def serve(settings: Settings) -> None:
    """Serve until cancelled; raises KvStreamsError if Kafka cannot be reached or the port is not available.

    A router creates no topics: a typo in `topic_prefix` would then create a scope to which nothing is ever written.
    While topics are missing, the server answers that it is not ready, and why.
    """
    missing = await asyncio.to_thread(missing_topics, settings, topics(settings).all())
    prefer_request_threads()
    router = Router(settings)
    router.topics_missing = tuple(missing)
    app = web.Application(middlewares=[error_shape], client_max_size=settings.body_bytes_max)
    handlers = Handlers(router)
    handlers.add_to(app)
    runner = handlers.runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as exc:
        await runner.cleanup()
        raise SettingsError(
            f"host and port: cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}",
            remedy="Set --host and --port, or stop the process that listens there",
        ) from exc
    log.info("routing on http://%s:%d", *runner.addresses[0][:2])
    ticking: asyncio.Task[None] | None = None
    try:
        await _until_topics_are_there(router)
        router.start()
        ticking = asyncio.create_task(tick_forever(router))
        await asyncio.Event().wait()
    finally:
        if ticking is not None:
            ticking.cancel()
        await runner.cleanup()
        await asyncio.to_thread(router.stop)


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
