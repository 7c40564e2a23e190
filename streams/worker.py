# mypy: disable-error-code="untyped-decorator"
"""The composition root: the Faust App of `faust -A streams worker`, built from settings in the environment or a file.

What lives here: wiring. What must not: anything that can be tested without Faust.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import faust
from faust.types import TP

from streams.errors import KvStreamsError
from streams.indexer_agent import Indexer
from streams.kafka.clients import client_id, ensure_topics
from streams.kafka.delivery import App
from streams.kafka.group_limits import check_session_timeout
from streams.kafka.outage_log import unreachable
from streams.kafka.schema_compatibility import check_schemas
from streams.model_registry import check_models
from streams.process import faults
from streams.process import log as log_setup
from streams.process.http_server import HttpServer, Startup, monitoring_app, starting_app
from streams.process.interpreter import exempt_from_collection, prefer_request_threads, run_in_real_time
from streams.process.loop_thread import LoopThread
from streams.reset import reset_scope
from streams.router_api.deciding.router import Router
from streams.router_api.processes.draining import drain
from streams.router_api.processes.process_group import ProcessGroup
from streams.router_api.processes.server import api_runner, make_router, tick_forever
from streams.security.access import Access
from streams.security.faust_credentials import faust_credentials
from streams.settings import WorkerServerSettings, load, unknown_variables
from streams.tables.agent_metrics import agent_registry
from streams.tables.cxl_reducer import partition_plan
from streams.topics import topics
from streams.warming import AGENT, WORKER, warm_while_serving

log = logging.getLogger(__name__)

#: The time between two heartbeats to the group. The usual value, a third of the session timeout, makes a fail-over 1 s
#: longer.
HEARTBEAT_S = 0.5


class WorkerProcess:
    """What a worker needs besides Faust. Nothing is read, written, listened on or compiled before `prepare`.

    The HTTP API has a thread and a loop of its own: on Faust's loop, a request would wait for deliveries of records,
    seeks and rebalances. With `router_process`, it has a process of its own.
    """

    def __init__(self, app: faust.App, settings: WorkerServerSettings) -> None:
        self._app = app
        self._settings = settings
        self.indexer = Indexer(app, settings, partition_plan(settings), faults.armed())
        self._api: LoopThread | None = None  # from `prepare` on
        # Both are used on its loop.
        self._server: HttpServer | None = None
        self._router: Router | None = None
        self._processes: ProcessGroup | None = None  # with router_process
        self._running_processes: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []

    async def prepare(self) -> None:
        """Do everything that must be done before Faust starts. Raises KvStreamsError.

        The address comes first, since a scope must not be reset by a process that cannot run. Then it is possible to
        see from outside what the process is doing.
        """
        try:
            await self._prepare()
        except BaseException:
            await self._end_processes()
            raise

    async def _prepare(self) -> None:
        settings, startup, access = self._settings, Startup(), Access(self._settings)
        host, port, web_enabled = self._app.conf.web_bind, self._app.conf.web_port, self._app.conf.web_enabled
        is_apart = settings.router and settings.router_process
        answers = settings.router and not is_apart
        check_schemas()
        Path(settings.data_dir).mkdir(parents=True, exist_ok=True)  # Faust creates only the last folder of its path
        api = self._api = LoopThread("api")
        if is_apart and web_enabled:
            self._processes = ProcessGroup(replace(settings, host=host, port=port))
            await self._processes.check_address()
        if web_enabled and (answers or settings.metrics_port):
            own_port = settings.metrics_port if is_apart else port
            server = HttpServer(host, own_port, "port" if answers else "metrics_port", access)
            await api.run(lambda: server.serve(starting_app(startup)))
            self._server = server
        startup.note("connecting to Kafka")
        # Faust does not notice a source topic that appears after it has subscribed.
        await asyncio.to_thread(ensure_topics, settings, topics(settings).all())
        await asyncio.to_thread(check_session_timeout, settings, settings.session_timeout_s)
        if settings.router_reset_states:
            startup.note("resetting the scope")
            await asyncio.to_thread(reset_scope, settings, force=settings.router_reset_force)
        await asyncio.to_thread(check_models, settings)
        if self._processes is not None:
            self._running_processes = asyncio.create_task(self._processes.run())
        await warm_while_serving(WORKER if answers else AGENT, startup.note)
        if answers:
            self._router = make_router(settings)
            self.indexer.answers = self._router.is_asked
        serving = self._server
        if serving is not None:
            await api.run(lambda: self._serve(serving, access))

    async def _serve(self, server: HttpServer, access: Access) -> None:
        metrics = [agent_registry(self.indexer)]
        if self._router is not None:
            await server.serve(api_runner(self._router, metrics, access=access))
            log.info("routing on %s in mode %s", server.url, self._router.policy.mode)
        else:
            await server.serve(monitoring_app(self._not_ready, metrics, access))
            log.info("/healthz, /ready and /metrics on %s", server.url)

    def _not_ready(self) -> str | None:
        return unreachable(self._settings.kafka) or self.indexer.not_ready()

    async def start(self) -> None:
        """Start what runs next to Faust, once Faust has started."""
        exempt_from_collection()
        self._watching = asyncio.create_task(self.indexer.watch())
        if self._running_processes is not None:
            self._background.append(asyncio.create_task(self._end_without(self._running_processes)))
        router, api = self._router, self._api
        if router is not None and api is not None:
            # Agents' threads as well: the thread that answers waits for the one that has the interpreter.
            prefer_request_threads()
            if self._settings.router_realtime:
                run_in_real_time()
            await api.run(lambda: self._start(router))
            self._background.append(asyncio.create_task(api.run(lambda: tick_forever(router))))

    @staticmethod
    async def _start(router: Router) -> None:
        prefer_request_threads()
        router.start()

    async def _end_without(self, running: asyncio.Task[None]) -> None:
        """End the worker if its router processes cannot be kept running, so that what watches it sees the fault."""
        try:
            await asyncio.shield(running)
        except KvStreamsError as exc:
            log.error("%s", exc)
            await self._app.crash(exc)

    async def _end_processes(self) -> None:
        running, self._running_processes = self._running_processes, None
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvStreamsError):
                await running

    async def stop(self) -> None:
        """Stop everything, before Faust stops.

        The partitions come first, and this worker leaves the group at once: their standbys take over while routers here
        still finish their requests.
        """
        if self._watching is not None:
            await _cancel(self._watching)
        await self.indexer.close()
        await self._app.consumer.stop()
        await self._end_processes()
        router, server, api = self._router, self._server, self._api
        if api is not None and router is not None:
            await api.run(lambda: drain(router, server))
        elif api is not None and server is not None:
            await api.run(server.close)
        for task in self._background:
            await _cancel(task)
        if api is not None:
            await api.stop()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class FaustWorker(faust.Worker):  # type: ignore[misc]
    """Faust's worker, with our preparations before its start. Faust makes one for its command `worker` and no other."""

    def execute_from_commandline(self) -> NoReturn:
        """Prepare, and run until a signal arrives. An error of ours ends the process with one line."""
        log_setup.configure(self.app.worker_settings)
        preparing = self.loop.create_task(self.app.worker_process.prepare())
        for number in (signal.SIGINT, signal.SIGTERM):
            self.loop.add_signal_handler(number, preparing.cancel)
        try:
            self.loop.run_until_complete(preparing)
        except KvStreamsError as exc:
            raise SystemExit(f"kvstreams: {exc}") from exc
        except asyncio.CancelledError:
            raise SystemExit(0) from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                self.loop.remove_signal_handler(number)  # Faust sets its own
        raise super().execute_from_commandline()  # it never returns


class WorkerApp(App):
    """The App of a worker. worker_settings, worker_process: for `FaustWorker`."""

    worker_settings: WorkerServerSettings
    worker_process: WorkerProcess


def create_app(settings: WorkerServerSettings) -> WorkerApp:
    """Build the App, without any effect. Faust builds it for `--help` and for `faust -A streams agents` as well."""
    app = WorkerApp(
        settings.app_id,
        broker=";".join(f"kafka://{address.strip()}" for address in settings.kafka.split(",")),
        broker_credentials=faust_credentials(settings),
        datadir=str(Path(settings.data_dir).absolute() / "faust"),
        # Faust's own tables are not used (docs/architecture.md), so it has nothing to store. Its assignor knows which
        # workers follow a partition.
        store="memory://",
        table_standby_replicas=settings.table_standbys,
        # Unique per process: an owner that was paused finds itself in its group by this id.
        broker_client_id=f"{client_id(settings)}-{uuid.uuid4().hex[:8]}",
        broker_session_timeout=settings.session_timeout_s,
        # A surviving worker learns from the answer to a heartbeat that partitions must move.
        broker_heartbeat_interval=min(settings.session_timeout_s / 3, HEARTBEAT_S),
        # Where a new group starts; every partition is then sought to its table's own offset.
        consumer_auto_offset_reset="earliest",
        topic_disable_leader=True,
        topic_partitions=settings.partitions,
        topic_replication_factor=settings.replication,
        # The address is ours to listen on (WorkerProcess.prepare); Faust's options --web-port and --web-bind change it.
        web_bind=settings.host,
        web_host=settings.host,
        web_port=settings.port if settings.router or not settings.metrics_port else settings.metrics_port,
        stream_wait_empty=False,
        logging_config=log_setup.dict_config(settings),
        Worker=FaustWorker,
    )
    process = app.worker_process = WorkerProcess(app, settings)
    app.worker_settings = settings
    source = app.topic(
        *(spec.name for spec in partition_plan(settings).sources),
        key_type=bytes,
        value_type=bytes,
        key_serializer="raw",
        value_serializer="raw",
    )

    @app.agent(source)
    async def index(stream: Any) -> None:
        await process.indexer.run(stream)

    @app.on_partitions_assigned.connect(weak=False)
    async def assigned(_: Any, partitions: set[TP], **__: Any) -> None:
        await process.indexer.assigned(partitions)

    @app.on_partitions_revoked.connect(weak=False)
    async def revoked(_: Any, partitions: set[TP], **__: Any) -> None:
        await process.indexer.revoked(partitions)

    @app.task
    async def start() -> None:
        await process.start()

    @app.on_before_shutdown.connect(weak=False)
    async def stop(_: Any, **__: Any) -> None:
        await process.stop()

    return app


def _app_from_environment() -> WorkerApp:
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
