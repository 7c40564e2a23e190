"""`kvstreams router`: the HTTP API on a server of its own.

What lives here: starting and stopping the server and its router. What must not: the calls (handlers).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from aiohttp import web

from streams.errors import KvStreamsError, NotReady, SettingsError, TopicMismatch
from streams.kafka.clients import TOPICS_POLL_S, missing_topics
from streams.process.http_server import HttpServer, Startup, starting_app
from streams.process.interpreter import exempt_from_collection, prefer_request_threads, run_in_real_time
from streams.process.metrics import MetricsRegistry
from streams.router_api.deciding.admission import Admission
from streams.router_api.deciding.router import Router
from streams.router_api.http.handlers import Handlers, error_shape
from streams.router_api.processes.draining import drain
from streams.router_api.processes.process_group import ProcessPlace
from streams.security.access import Access
from streams.settings import RouterServerSettings
from streams.topics import topics
from streams.warming import ROUTER, warm_while_serving

log = logging.getLogger(__name__)

#: Interval of a router's ticks, which serve delivery reports and expiry.
TICK_S = 0.5

#: Interval at which a starting router checks whether it has read the registry.
REGISTRY_POLL_S = 0.05


async def tick_forever(router: Router) -> None:
    """Call the router's tick periodically until cancelled. The loop is the one that answers requests."""
    router.loads.send_on(asyncio.get_running_loop())
    while True:
        await asyncio.sleep(TICK_S)
        router.tick()


def api_runner(
    router: Router,
    more_metrics: Sequence[MetricsRegistry[Any]] = (),
    process: str = "",
    access: Access | None = None,
    admission: Admission | None = None,
) -> web.AppRunner:
    """The HTTP API of a router, with its limits.

    more_metrics: further registries of this process. process: the value of the label `process`; "" for no such label.
    access: who may call what; None lets everyone. admission: the router's queue, if others use it as well.
    """
    handlers = Handlers(router, more_metrics, process, admission)
    permitting = (access or Access()).middlewares(handlers.right_of)
    app = web.Application(middlewares=[error_shape, *permitting, *_tracing(router)])
    handlers.add_to(app)
    return handlers.runner(app)


def make_router(settings: RouterServerSettings) -> Router:
    """Make a router, with traces if the settings ask for them. Raises SettingsError if that needs a missing package."""
    if not settings.tracing:
        return Router(settings)
    try:
        from streams.router_api.http.tracing import TracedRouter
    except ImportError as exc:
        raise SettingsError(
            f"tracing is on, but {exc.name} is not installed", remedy="`pip install 'kvstreams[otel]'` installs it"
        ) from exc
    return TracedRouter(settings)


def _tracing(router: Router) -> list[Any]:
    """The middleware of a router with traces. One without imports nothing for them."""
    if not router.settings.tracing:
        return []
    from streams.router_api.http.tracing import TracedRouter, middleware_of

    return [middleware_of(router)] if isinstance(router, TracedRouter) else []


class Door(Protocol):
    """Another server of the same router, next to its HTTP API."""

    def listen(self) -> Awaitable[None]:
        """Listen, and answer that it is not ready. Raises SettingsError for an address that is not available."""

    def open(self, router: Router, admission: Admission) -> Awaitable[Sequence[MetricsRegistry[Any]]]:
        """Answer with this router from now on; returns further metrics for its HTTP API."""

    def close(self, timeout_s: float) -> Awaitable[None]:
        """Finish what runs, and stop. The router still answers until then."""


async def serve(settings: RouterServerSettings, place: ProcessPlace | None = None, door: Door | None = None) -> None:
    """Serve until cancelled. place: which of several processes this one is; None if it is the only one.

    door: another server of the router.

    Raises KvStreamsError if Kafka cannot be reached, the port is not available, or the scope has another block size for
    a model than the settings.

    A router creates no topics: a typo in `topic_prefix` would then create a scope to which nothing is ever written.
    While topics are missing, the server answers that it is not ready, and why.
    """
    startup, access = Startup(), Access(settings)
    if place is None:
        server = HttpServer(settings.host, settings.port, access=access)
    else:
        server = HttpServer(settings.host, place.own_port(settings), "process_port", access)
    router: Router | None = None
    ticking: asyncio.Task[None] | None = None
    try:
        await server.serve(starting_app(startup))
        if door is not None:
            await door.listen()
        if place is not None and place.joins_at_once:
            await server.listen_also(settings.host, settings.port)
        startup.note("connecting to Kafka")
        missing = await asyncio.to_thread(missing_topics, settings, topics(settings).all())
        await warm_while_serving(ROUTER, startup.note)
        prefer_request_threads()
        if settings.router_realtime:  # after the kernels were compiled, which may take all processors for minutes
            run_in_real_time()
        router = make_router(settings)
        router.readiness.topics.missing = tuple(missing)
        process = "" if place is None else str(place.number)
        admission = Admission(router)
        more_metrics = () if door is None else await door.open(router, admission)
        await server.serve(api_runner(router, more_metrics, process, access, admission))
        log.info("routing on %s in mode %s", server.url, router.policy.mode)
        await _until_topics_are_there(router)
        exempt_from_collection()
        router.start()
        ticking = asyncio.create_task(tick_forever(router))
        await _check_block_sizes(router)
        if place is not None and not place.joins_at_once:
            await _until_ready(router)
            await server.listen_also(settings.host, settings.port)
        await asyncio.Event().wait()
    finally:
        if router is None:
            await server.close()
            if door is not None:
                await door.close(0.0)
        else:
            await drain(router, server, door)
        if ticking is not None:
            ticking.cancel()


async def _until_topics_are_there(router: Router) -> None:
    """Wait until no topic is missing; raises TopicMismatch if one appears with other settings than required."""
    if router.readiness.topics.missing:
        log.warning("not ready: %s", router.readiness.topics.error())
    while router.readiness.topics.missing:
        await asyncio.sleep(TOPICS_POLL_S)
        try:
            missing = await asyncio.to_thread(missing_topics, router.settings, topics(router.settings).all())
        except TopicMismatch:
            raise
        except KvStreamsError as exc:  # the broker may be unreachable for a while
            log.warning("cannot check for missing topics, trying again: %s", exc)
            continue
        router.readiness.topics.missing = tuple(missing)


async def _check_block_sizes(router: Router) -> None:
    """Wait until the registry was read; raises BlockSizeContradicted if a model contradicts the router's settings.

    A contradiction that appears later does not end the router: it refuses the requests for that model.
    """
    while "workers" in router.feeds.pending():
        await asyncio.sleep(REGISTRY_POLL_S)
    router.view.fleet.check_block_sizes()


async def _until_ready(router: Router) -> None:
    """Wait until the router is ready."""
    while True:
        try:
            router.readiness.check()
        except NotReady:
            await asyncio.sleep(REGISTRY_POLL_S)
        else:
            return
