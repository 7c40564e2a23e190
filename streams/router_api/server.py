"""`kvstreams router`: the routes on a server of their own."""

from __future__ import annotations

import asyncio
import logging
import sys

from aiohttp import web

from streams.errors import SettingsError
from streams.kafka import ensure_topics
from streams.router_api.handlers import Handlers, error_shape
from streams.router_api.router import Router
from streams.settings import Settings
from streams.topics import topics

log = logging.getLogger(__name__)

#: Between two ticks of a router: delivery reports, expiry.
TICK_S = 0.5


#: Threads that fold and index share the interpreter with the one that answers. With Python's own 5 ms a query waits
#: its turn behind each of them: p99 5-7 ms beside one busy thread, 0.3 ms with this.
SWITCH_INTERVAL_S = 1e-4


def favour_answers() -> None:
    """Let the thread that answers come to its turn soon; for every process that serves the API."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


async def tick_forever(router: Router) -> None:
    """Call the router's tick until cancelled."""
    while True:
        await asyncio.sleep(TICK_S)
        router.tick()


async def serve(settings: Settings) -> None:
    """Serve until cancelled; raises KvStreamsError where Kafka or the port cannot be had."""
    await asyncio.to_thread(ensure_topics, settings, topics(settings).all())
    favour_answers()
    router = Router(settings)
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
    router.start()
    ticking = asyncio.create_task(tick_forever(router))
    log.info("routing on http://%s:%d", *runner.addresses[0][:2])
    try:
        await asyncio.Event().wait()
    finally:
        ticking.cancel()
        await runner.cleanup()
        await asyncio.to_thread(router.stop)
