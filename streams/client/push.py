"""`KvPushRouter`: the client with a router in its own process, without HTTP between them.

What lives here: starting and stopping the router, and calling it directly. What must not: the router itself
(router_api), which is the same as behind the HTTP API.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

import msgspec

from streams.client.base import REPORT_TIMEOUT_S, RETRY_TIMEOUT_S, Attempt, Call, CallRefused, KvRouter
from streams.client.engine import EngineOptions
from streams.client.reports import BookingKey, OutstandingReport
from streams.core.ids import WorkerId
from streams.core.loads.bookings import BookingPhase
from streams.errors import NoEligibleWorker, NotReady, QueueTimeout
from streams.kafka.clients import missing_topics
from streams.process.interpreter import prefer_request_threads
from streams.router_api.deciding.admission import Admission, may_wait
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer import RouteAnswer
from streams.router_api.messages.answer_json import answer_json
from streams.router_api.messages.body_errors import invalid_body
from streams.router_api.messages.requests import RouteRequest
from streams.router_api.processes.server import make_router, tick_forever
from streams.settings import RouterServerSettings
from streams.topics import topics
from streams.warming import ROUTER, warm_while_serving

#: How long starting waits until the router has read its topics. Reading 5 million blocks takes seven seconds.
READY_TIMEOUT_S = 120.0

#: Interval at which a starting router is checked.
_READY_POLL_S = 0.02

#: Tokens of a prompt from which on it is hashed on a thread, so that the caller's loop goes on: a millisecond.
HASHED_ON_THREAD_TOKENS = 65_536

#: Pause before a refused call is repeated; HTTP clients are asked to wait for as long.
RETRY_AFTER_S = 1.0


class KvPushRouter(KvRouter):
    """Routes requests with a router in this process, and generates with the fleet's engines.

    The router is a replica like any other: it reads the topics, shares bookings with all routers, and needs Kafka. Its
    process must be allowed half a core at times, and about as much memory as `kvstreams router`.
    """

    def __init__(
        self,
        settings: RouterServerSettings,
        *,
        engine: EngineOptions | None = None,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        """settings: those of the scope, as `streams.settings.load().settings` reads them. ready_timeout_s: how long
        `start` waits until the topics are read.
        """
        super().__init__(engine, retry_timeout_s)
        self.settings = settings
        self._ready_timeout_s = ready_timeout_s
        self._router: Router | None = None
        self._admission: Admission | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> Self:
        """Compile kernels if they are not compiled yet, start the router, and wait until it has read its topics.

        Raises NotReady if topics are missing or take too long, BlockSizeContradicted, KafkaUnreachable. It makes busy
        threads of this process take turns more often, as every process with a router does.
        """
        if self._router is not None:
            return self
        missing = await asyncio.to_thread(missing_topics, self.settings, topics(self.settings).all())
        await warm_while_serving(ROUTER, lambda _: None)
        prefer_request_threads()
        router = make_router(self.settings)
        router.readiness.topics.missing = tuple(missing)
        if missing:
            raise router.readiness.topics.error()
        self._router, self._admission = router, Admission(router)
        router.start()
        self._ticking = asyncio.create_task(tick_forever(router), name="kvstreams-router-ticks")
        await self._until_ready(router)
        router.view.fleet.check_block_sizes()
        await super().start()
        return self

    async def close(self) -> None:
        """Refuse what waits, end what is still running, and stop the router once Kafka has its records."""
        if self._router is not None and self._admission is not None:
            self._router.stopping = True
            self._admission.refuse_all()
        await super().close()
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
            self._ticking = None
        if self._router is not None:
            router, self._router, self._admission = self._router, None, None
            await asyncio.to_thread(router.stop, self.settings.drain_timeout_s)

    async def _until_ready(self, router: Router) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._ready_timeout_s
        while True:
            try:
                router.readiness.check()
                return
            except NotReady:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(_READY_POLL_S)

    async def _call(self, call: Call, fields: dict[str, Any], packed: bytes, attempt: Attempt) -> dict[str, Any]:
        router = self._running()
        fields = dict(fields)
        tenant = fields.pop("tenant", None)
        try:
            request = msgspec.convert(fields, RouteRequest)
        except msgspec.ValidationError as exc:
            raise invalid_body(exc, RouteRequest) from exc
        long = len(packed) // 4 >= HASHED_ON_THREAD_TOKENS
        try:
            if call == "/route":
                prepared = (
                    await asyncio.to_thread(router.prepare, request, packed)
                    if long
                    else router.prepare(request, packed)
                )
                if may_wait(prepared) and self._admission is not None:
                    return answer_json(await self._wait_for_rank(self._admission, prepared, tenant or "", attempt))
                return answer_json(router.try_book(prepared))
            answer = router.potential if call == "/loads/potential" else router.matches
            return await asyncio.to_thread(answer, request, packed) if long else answer(request, packed)
        except QueueTimeout:  # the caller's own deadline is over
            raise
        except (NoEligibleWorker, NotReady) as exc:
            if router.stopping:
                raise
            raise CallRefused(exc, exc.detail.get("retry_after_s", RETRY_AFTER_S)) from exc

    async def avoid(self, worker_id: int) -> bool:
        """Let all routers avoid a worker for a short time, this one at once."""
        router, avoided = self._running(), WorkerId(worker_id)
        await asyncio.to_thread(router.registry.avoid, avoided)
        return router.view.fleet.avoided(avoided)[0]

    @staticmethod
    async def _wait_for_rank(
        admission: Admission, prepared: PreparedRequest, tenant: str, attempt: Attempt
    ) -> RouteAnswer:
        """Wait as a request over HTTP does. A caller that is cancelled leaves the queue."""
        try:
            return await admission.route(prepared, tenant, lambda: False)
        except asyncio.CancelledError:
            attempt.may_be_booked = True  # it may have got a rank just before
            raise

    def report(self, key: BookingKey, report: OutstandingReport) -> None:
        """Report at once; in the background only if the router is not ready."""
        if self._router is not None and not len(self._reports):
            try:
                _apply(self._router, key, report)
                return
            except NotReady:
                pass
        super().report(key, report)

    async def _send_report(self, key: BookingKey, report: OutstandingReport) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + REPORT_TIMEOUT_S
        while True:
            try:
                _apply(self._running(), key, report)
                return
            except NotReady:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(RETRY_AFTER_S)

    def _running(self) -> Router:
        if self._router is None:
            raise NotReady("the router is not running", remedy="Use `async with`, or call start() first")
        return self._router


def _apply(router: Router, key: BookingKey, report: OutstandingReport) -> None:
    """Apply a report to the router's loads; Kafka gets it in the background."""
    found = report.usage or (None, None)
    if report.free:
        router.report_phase(key.request_id, BookingPhase.FREE, key.phase, *found)
        return
    if report.prefill_complete:
        router.report_phase(key.request_id, BookingPhase.PREFILL, key.phase, *found)
    if report.output_tokens:
        router.report_output(key.request_id, report.output_tokens, key.phase)
