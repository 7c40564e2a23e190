# mypy: disable-error-code="untyped-decorator"
"""The composition root: the Faust App of `faust -A streams worker`, built from settings in the environment or a file.

What lives here: wiring. What must not: anything that can be tested without Faust.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import faust
from faust.types import TP

from streams import faults, log
from streams.agent_metrics import agent_registry
from streams.delivery import App
from streams.errors import KvStreamsError
from streams.indexer_agent import Indexer
from streams.kafka import ensure_topics
from streams.metrics import monitoring_routes
from streams.reset import reset_scope
from streams.router_api.handlers import Handlers, error_shape
from streams.router_api.router import Router
from streams.router_api.server import prefer_request_threads, tick_forever
from streams.settings import Settings, load, unknown_variables
from streams.tables.cxl_reducer import partition_plan
from streams.topics import topics
from streams.warming import AGENT, WORKER, warm

#: The time between two heartbeats to the group. The usual value, a third of the session timeout, makes a fail-over 1 s
#: longer.
HEARTBEAT_S = 0.5


def create_app(settings: Settings) -> faust.App:
    """Build the App. Nothing is read or written before the worker starts."""
    data_dir = Path(settings.data_dir).absolute()
    warm(WORKER if settings.router else AGENT)
    serves_only_metrics = not settings.router and settings.metrics_port > 0
    app = App(
        settings.app_id,
        broker=";".join(f"kafka://{address.strip()}" for address in settings.kafka.split(",")),
        datadir=str(data_dir / "faust"),
        # Faust's own tables are not used (docs/architecture.md), so it has nothing to store.
        store="memory://",
        # Unique per process: an owner that was paused finds itself in its group by this id.
        broker_client_id=f"{settings.app_id}-{os.uname().nodename}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
        broker_session_timeout=settings.session_timeout_s,
        # A surviving worker learns from the answer to a heartbeat that partitions must move.
        broker_heartbeat_interval=min(settings.session_timeout_s / 3, HEARTBEAT_S),
        # Where a new group starts; every partition is then sought to its table's own offset.
        consumer_auto_offset_reset="earliest",
        topic_disable_leader=True,
        topic_partitions=settings.partitions,
        topic_replication_factor=settings.replication,
        web_enabled=settings.router or serves_only_metrics,
        web_bind=settings.host,
        web_port=settings.metrics_port if serves_only_metrics else settings.port,
        web_host=settings.host,
        web_application_options={"client_max_size": settings.body_bytes_max, "middlewares": [error_shape]},
        stream_wait_empty=False,
        logging_config=log.dict_config(settings),
    )
    plan = partition_plan(settings)
    indexer = Indexer(app, settings, plan, faults.armed())
    source = app.topic(
        *(spec.name for spec in plan.sources),
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
    )
    router = Router(settings) if settings.router else None

    @app.agent(source)
    async def index(stream: Any) -> None:
        await indexer.run(stream)

    @app.on_partitions_assigned.connect(weak=False)
    async def assigned(_: Any, partitions: set[TP], **__: Any) -> None:
        await indexer.assigned(partitions)

    @app.on_partitions_revoked.connect(weak=False)
    async def revoked(_: Any, partitions: set[TP], **__: Any) -> None:
        await indexer.revoked(partitions)

    @app.on_worker_init.connect(weak=False)
    def prepare(_: Any, **__: Any) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)  # Faust creates only the last folder of its path
        # Faust does not notice a source topic that appears after it has subscribed.
        try:
            ensure_topics(settings, topics(settings).all())
            if settings.router_reset_states:
                reset_scope(settings, force=settings.router_reset_force)
        except KvStreamsError as exc:
            raise SystemExit(f"kvstreams: {exc}") from exc

    background: list[asyncio.Task[None]] = []

    @app.task
    async def start() -> None:
        background.append(asyncio.create_task(indexer.watch()))
        if router is not None:
            prefer_request_threads()
            router.start()
            background.append(asyncio.create_task(tick_forever(router)))

    @app.on_before_shutdown.connect(weak=False)
    async def stop(_: Any, **__: Any) -> None:
        for task in background:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await indexer.close()
        if router is not None:
            await asyncio.to_thread(router.stop)

    agent_metrics = agent_registry(indexer)
    if router is not None:
        handlers = Handlers(router, [agent_metrics])
        handlers.add_to(app.web.web_app)
        app.web._runner = handlers.runner(app.web.web_app)  # Faust's own has no limits of connections
    elif serves_only_metrics:
        app.web.web_app.add_routes(monitoring_routes(agent_metrics))
    return app


def _app_from_environment() -> faust.App:
    for message in unknown_variables(os.environ).values():
        sys.stderr.write(f"kvstreams: {message}\n")  # Faust sets up logging later
    try:
        resolved = load()
        for warning in resolved.warnings:
            sys.stderr.write(f"kvstreams: {warning}\n")
        return create_app(resolved.settings)
    except KvStreamsError as exc:
        raise SystemExit(f"kvstreams: {exc}") from exc


app = _app_from_environment()
