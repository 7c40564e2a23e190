"""`kvstreams router`: the routes on a server of their own."""

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

#: Between two ticks of a router: delivery reports, expiry.
TICK_S = 0.5

#: Between two questions whether the scope's topics are there now; each is one call of the broker.
TOPICS_POLL_S = 1.0

#: Threads that fold and index share the interpreter with the one that answers. With Python's own 5 ms a query waits
#: its turn behind each of them: p99 5-7 ms beside one busy thread, 0.3 ms with this.
SWITCH_INTERVAL_S = 1e-4


def prefer_request_threads() -> None:
    """Let the thread that answers come to its turn soon; for every process that serves the API."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def tick_forever(router: Router) -> None:
    """Call the router's tick until cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        router.tick()


async def serve(settings: Settings) -> None:
    """Serve until cancelled; raises KvStreamsError where Kafka or the port cannot be had.

    A router creates no topics: it would give the settings of a slip in `topic_prefix` a scope of its own, which nobody
    ever writes to. While some are missing it answers, is not ready, and says why.
    """
    missing = await asyncio.to_thread(missing_topics, settings, topics(settings).all())
    prefer_request_threads()
    router = Router(settings)
    router.topics_missing = tuple(missing)
    app = web.Application(middlewares=[error_shape], client_max_size=settings.body_bytes_max)
    Handlers(router).add_to(app)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port).start()
    except OSError as exc:
        await runner.cleanup()
        raise SettingsError(
            f"host and port: cannot listen on {settings.host}:{settings.port}: {exc.strerror or exc}",
            remedy="Set --host and --port, or end what listens there",
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
    """Ask again until no topic is missing; raises TopicMismatch where one appears that is not as it must be."""
    if router.topics_missing:
        log.warning("not ready: %s", router.missing())
    while router.topics_missing:
        await asyncio.sleep(TOPICS_POLL_S)
        try:
            missing = await asyncio.to_thread(missing_topics, router.settings, topics(router.settings).all())
        except TopicMismatch:
            raise
        except KvStreamsError as exc:  # a broker that is away, as it may be
            log.warning("it is not known whether the topics are there now: %s", exc)
            continue
        router.topics_missing = tuple(missing)
