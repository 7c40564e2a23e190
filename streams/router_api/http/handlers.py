"""The HTTP calls of docs/http.md, bound to a Router: the same ones under Faust and under `kvstreams router`.

What lives here: reading requests, calling the router, and responding; the shape of all errors. What must not: decisions
(router), and the JSON of values (answer_json).
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import orjson
from aiohttp import web

from streams.core.ids import DpRank, RankId, WorkerId
from streams.core.loads.bookings import BookingPhase
from streams.core.workers import Worker
from streams.cxl.events import CxlPool, check_pool_id
from streams.errors import (
    HTTP_CODES,
    HTTP_ERROR,
    InvalidRequest,
    KvStreamsError,
    NotReady,
    RequestTooLarge,
    api_error,
)
from streams.process.aiohttp_internals import LimitedRunner, is_supported
from streams.process.connections import Connections
from streams.process.http_server import error_headers
from streams.process.metrics import MetricsRegistry
from streams.process.process_metrics import metrics_response
from streams.router_api.deciding.admission import Admission, may_wait
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.deciding.router import Router
from streams.router_api.http.bodies import SHORT_BODY_BYTES_MAX, Bodies
from streams.router_api.http.body_parsing import BodyParser, check_no_query, packed_query, packed_tokens
from streams.router_api.http.calls import CALLS, HTML
from streams.router_api.http.fast_lane import FastLane
from streams.router_api.http.inspections import Inspections, written
from streams.router_api.http.live import Live
from streams.router_api.http.live_page import PAGE, SCRIPT, STYLE, page_response
from streams.router_api.http.metrics import RouterMetrics
from streams.router_api.http.openapi import PAGE_HEADERS, document_json, page_html
from streams.router_api.http.protocol import ApiProtocol
from streams.router_api.messages.answer_json import (
    answer_json,
    error_json,
    pool_json,
    pooled_json,
    render_json,
    report_json,
    worker_json,
)
from streams.router_api.messages.requests import (
    NAME_CHARS_MAX,
    OCTET_STREAM,
    BookRequest,
    PhaseReportQuery,
    ReportQuery,
    RouteRequest,
    is_list,
    parse_book,
    parse_output,
    parse_pool,
    parse_render,
    parse_report_query,
    parse_requests,
    parse_route,
    parse_worker,
    u64,
)
from streams.security.access import ANY_RIGHT, grant_of
from streams.security.tokens import Grant, Right

log = logging.getLogger(__name__)

#: Seconds after which a client may retry, as the header Retry-After.
RETRY_AFTER_S = "1"

#: One fact in the answer of GET /state/blocks: worker id, dp rank, tier, sequence hash; little-endian.
FACT = struct.Struct("<QIBQ")

#: Counts of an application's errors by code. Only its own event loop changes them.
_ERRORS = web.AppKey("errors", Counter)
_CONNECTIONS = web.AppKey("connections", Connections)
_ROUTER = web.AppKey("router", Router)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Handlers:
    """Binds a router's calls to paths.

    Calls that wait for Kafka run on a thread, so that an unreachable broker delays them but no answer to /route.
    """

    def __init__(
        self,
        router: Router,
        more_metrics: Sequence[MetricsRegistry[Any]] = (),
        process: str = "",
        admission: Admission | None = None,
    ) -> None:
        """more_metrics: further registries of this process, served after the router's own.

        process: as of RouterMetrics. admission: the router's queue, if others use it as well.
        """
        self._router = router
        self._bodies = Bodies(router.settings)
        tokens_max = router.settings.request_tokens_max
        self._route_parser = BodyParser(RouteRequest, parse_route, self._bodies, tokens_max)
        self._book_parser = BodyParser(BookRequest, parse_book, self._bodies, tokens_max)
        self._connections = Connections(
            router.settings.connections_max,
            router.settings.first_request_timeout_s,
            uses_tls=bool(router.settings.tls_certificate),
        )
        self._inspections = Inspections()
        self._admission = Admission(router) if admission is None else admission
        self._metrics = RouterMetrics(router, self._connections, self._bodies, self._admission, process)
        self._more_metrics = more_metrics
        self.lane = FastLane(router, self._route_parser, self._metrics, RETRY_AFTER_S)
        self._rights: dict[Any, Right | None] = {getattr(self, call.handler): call.right for call in CALLS}
        self._live = Live(router, self._metrics, lambda: len(self._admission))
        self._sampling: list[asyncio.Task[None]] = []

    def routes(self) -> list[web.RouteDef]:
        """Every path of the table of calls with its handler. GET also answers HEAD."""
        routes = []
        for call in CALLS:
            handler: _Handler = getattr(self, call.handler)
            add = web.get if call.method == "GET" else partial(web.route, call.method)
            routes.append(add(call.pattern, handler))
        return routes

    def right_of(self, request: web.Request) -> str | None:
        """The right that a request needs, by the table of calls; None if it needs no token."""
        return self._rights.get(request.match_info.handler, ANY_RIGHT)

    def add_to(self, app: web.Application) -> None:
        """Bind every path to an application that has the middleware `error_shape`, and count its errors."""
        app.add_routes(self.routes())
        app[_ERRORS] = self._metrics.errors
        app[_CONNECTIONS] = self._connections
        app[_ROUTER] = self._router
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._close)

    def runner(self, app: web.Application) -> LimitedRunner:
        """What runs the application of `add_to` on a server, within the limits of connections."""
        # A middleware sees every request, so that none may take the fast lane.
        lane = self.lane if list(app.middlewares) == [error_shape] and is_supported() else None
        new_protocol = partial(ApiProtocol, self._metrics.errors, lane, self._connections.note_request)
        return LimitedRunner(app, self._connections, new_protocol, self._router.settings.drain_timeout_s)

    async def _start(self, app: web.Application) -> None:  # noqa: ARG002 - aiohttp hands it over
        self._sampling = [asyncio.create_task(each.run()) for each in (self._live, self._metrics.scaling)]

    async def _close(self, app: web.Application) -> None:  # noqa: ARG002 - aiohttp hands it over
        for task in self._sampling:
            task.cancel()
        self._bodies.close()
        self._inspections.close()

    async def route(self, request: web.Request) -> web.Response:
        """Choose a rank and book it."""
        started = time.perf_counter()
        router = self._router
        query = packed_query(request)
        async with self._bodies.of(request) as body:
            if query is not None:
                prepared = router.prepare(query, packed_tokens(body))
            elif is_list(body):
                answers = await self._route_list(body)
                self._metrics.route_seconds.observe(time.perf_counter() - started)
                return _json(answers)
            else:
                prepared = await self._route_parser.parsed(body, router.prepare)
        if may_wait(prepared):
            grant = grant_of(request)
            waiting = self._admission.route(
                _with_priority_of(prepared, grant),
                grant.tenant_of(request.headers.get("X-Tenant", "")),
                lambda: request.transport is None,
            )
            del body, prepared  # while a request waits, only the queue has it, without what it does not count
            answer = await waiting
        else:
            answer = router.try_book(prepared)
        self._metrics.route_seconds.observe(time.perf_counter() - started - (answer.queued_ms or 0.0) / 1000.0)
        return _json(answer_json(answer))

    async def _route_list(self, body: bytes) -> list[dict[str, Any]]:
        """Answer each request of a list, in order. A request that is refused does not affect the others."""
        self._router.readiness.check()
        items = await self._bodies.on_thread(parse_requests, body)
        answers = []
        for item in items:
            try:
                prepared = await self._route_parser.parsed(item, self._router.prepare)
                if may_wait(prepared):
                    self._router.note_refused(prepared)
                    raise InvalidRequest("queue is on, but a request of a list cannot wait", remedy="Send it by itself")
                answers.append(answer_json(self._router.try_book(prepared)))
            except KvStreamsError as exc:
                answers.append(self._refused_item(exc))
            await asyncio.sleep(0)  # other requests are answered between any two of the list
        return answers

    def _refused_item(self, exc: KvStreamsError) -> dict[str, Any]:
        reported = api_error(exc)
        if reported.http_status == 500:
            log.error("an item of POST /route failed", exc_info=exc)
        self._metrics.errors[reported.code] += 1
        return error_json(reported.code, str(exc), exc.detail)

    async def potential(self, request: web.Request) -> web.Response:
        """Return the load that each eligible rank would have with this request."""
        return _json(await self._computed(request, self._router.potential))

    async def matches(self, request: web.Request) -> web.Response:
        """Return how many of the request's blocks each worker and rank holds, reaches and has labels for."""
        return _json(await self._computed(request, self._router.matches))

    async def _computed(
        self, request: web.Request, compute: Callable[[RouteRequest, bytes | None], dict[str, Any]]
    ) -> dict[str, Any]:
        """Compute an answer that books nothing."""
        query = packed_query(request)
        async with self._bodies.of(request) as body:
            if query is not None:
                return compute(query, packed_tokens(body))
            return await self._route_parser.parsed(body, compute)

    async def loads(self, request: web.Request) -> web.Response:  # noqa: ARG002 - aiohttp hands it to every handler
        """Return every rank's active load."""
        return _json(self._router.rank_loads())

    async def scale(self, request: web.Request) -> web.Response:  # noqa: ARG002 - aiohttp hands it to every handler
        """Return the saturation, the backlog and the wanted replicas of every worker pool."""
        return _json(self._metrics.scaling.answer())

    async def book(self, request: web.Request) -> web.Response:
        """Book a choice that was made elsewhere."""
        request_id = _request_id(request)
        check_no_query(request)
        async with self._bodies.of(request) as body:
            return _json(await self._book_parser.parsed(body, partial(self._router.book, request_id)))

    async def prefill_complete(self, request: web.Request) -> web.Response:
        """Note that the rank has computed the prompt."""
        return self._report_phase(request, BookingPhase.PREFILL)

    async def output(self, request: web.Request) -> web.Response:
        """Note how many tokens have been generated so far."""
        phase = parse_report_query(request.query, ReportQuery).phase
        async with self._bodies.of(request, SHORT_BODY_BYTES_MAX) as body:
            reported = parse_output(body)
        return _accepted(self._router.report_output(_request_id(request), reported.output_tokens, phase))

    async def free(self, request: web.Request) -> web.Response:
        """Note that the request has ended."""
        return self._report_phase(request, BookingPhase.FREE)

    def _report_phase(self, request: web.Request, what: BookingPhase) -> web.Response:
        request_id, report = _request_id(request), parse_report_query(request.query, PhaseReportQuery)
        reported = report.prompt_tokens, report.cached_tokens
        return _accepted(self._router.report_phase(request_id, what, report.phase, *reported))

    async def workers(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the registered workers. A part of the registry would look as if the others had been removed."""
        pending = self._router.feeds.pending()
        if "workers" in pending:
            raise NotReady("the registry is still being read", partitions_left=pending)
        pools = self._router.view.facts.pools_of_workers()
        workers = [self._worker_json(worker, pools) for worker in self._router.registry.workers()]
        return _json({"workers": workers, "router_mode": self._router.policy.mode})

    async def put_worker(self, request: web.Request) -> web.Response:
        """Register a worker, or change it."""
        worker_id, registry = _worker_id(request), self._router.registry
        worker = parse_worker(
            worker_id, await self._short_body(request), time.time_ns() // 1_000_000, registry.registration(worker_id)
        )
        return _json(self._worker_json(await asyncio.to_thread(registry.put_worker, worker)))

    async def delete_worker(self, request: web.Request) -> web.Response:
        """Remove a worker and everything that it held."""
        await asyncio.to_thread(self._router.registry.delete_worker, _worker_id(request))
        return _json({"worker_id": _worker_id(request), "removed": True})

    async def cordon(self, request: web.Request) -> web.Response:
        """Keep new requests from a worker."""
        return _json(self._worker_json(await asyncio.to_thread(self._router.registry.cordon, _worker_id(request))))

    async def avoid(self, request: web.Request) -> web.Response:
        """Let requests avoid a worker for a short time."""
        worker_id, router = _worker_id(request), self._router
        await asyncio.to_thread(router.registry.avoid, worker_id)
        return _json({"worker_id": worker_id, **self._avoided_json(worker_id)})

    async def put_render(self, request: web.Request) -> web.Response:
        """Note whether a worker's engine makes the same tokens as a front."""
        worker_id, registry = _worker_id(request), self._router.registry
        parity = parse_render(worker_id, await self._short_body(request), time.time_ns() // 1_000_000)
        await asyncio.to_thread(registry.put_render, parity)
        render = render_json(self._router.view.fleet.render_of(registry.worker(worker_id)))
        return _json({"worker_id": worker_id, "render": render})

    def _avoided_json(self, worker_id: WorkerId) -> dict[str, Any]:
        avoided, remaining_ms = self._router.view.fleet.avoided(worker_id)
        return {"avoided": avoided, "avoided_ms": remaining_ms}

    async def _short_body(self, request: web.Request) -> bytes:
        """Read a JSON body without tokens or hashes."""
        check_no_query(request)
        async with self._bodies.of(request, SHORT_BODY_BYTES_MAX) as body:
            return body

    async def uncordon(self, request: web.Request) -> web.Response:
        """Let a worker get new requests again."""
        await asyncio.to_thread(self._router.registry.uncordon, _worker_id(request))
        return _json({"worker_id": _worker_id(request), "cordoned": False})

    def _worker_json(self, worker: Worker, pools: Mapping[WorkerId, list[str]] | None = None) -> dict[str, Any]:
        """A worker of the registry with the ranks that get no requests, and the metrics that its engine reports.

        pools: those of all workers, if they have been read already.
        """
        view = self._router.view
        of_all = view.facts.pools_of_workers() if pools is None else pools
        served = view.fleet.served_model(worker.model)
        return {
            **worker_json(worker),
            "model_block_size": None if served is None else served.block_size,
            "wrong_block_size_dp_ranks": view.fleet.ranks_of_wrong_block_size(worker),
            "silent_dp_ranks": view.fleet.silent_ranks(worker.worker_id),
            **self._avoided_json(worker.worker_id),
            "incarnation": view.fleet.incarnation_of(worker),
            "render": render_json(view.fleet.render_of(worker)),
            "pools": of_all.get(worker.worker_id, []),
            "metrics": [report_json(report) for report in view.fleet.engines.reports_of(worker)],
        }

    async def state(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return what the view has of each rank. Routers with the same blocks of a rank return the same digest."""
        ranks = self._router.view.index.rank_states()
        return _json(
            {
                "blocks": sum(rank.n_blocks for rank in ranks),
                "applied_offsets": {str(n): offset for n, offset in self._router.view.trust.applied_offsets().items()},
                "ranks": [
                    {
                        "worker_id": rank.rank.worker_id,
                        "dp_rank": rank.rank.dp_rank,
                        "incarnation": rank.epoch.incarnation,
                        "generation": rank.epoch.generation,
                        "sequence": rank.sequence,
                        "health": rank.health.name.lower(),
                        "blocks": rank.n_blocks,
                        "gaps": rank.n_gaps,
                        "unknown_parents": rank.n_unknown_parents,
                        "lease_ms": rank.lease_ms,
                        "silent": rank.silent,
                        "digest": f"{rank.digest:016x}",
                    }
                    for rank in ranks
                ],
            }
        )

    async def state_blocks(self, request: web.Request) -> web.StreamResponse:
        """Return every fact in the index, 21 bytes each (FACT), in order."""
        response = web.StreamResponse(headers={"Content-Type": OCTET_STREAM})
        with suppress(ConnectionResetError):  # the client left, which is no fault of the router
            async with self._inspections.begun() as on_thread:
                await response.prepare(request)
                pages = self._router.view.index.fact_pages()
                while request.method != "HEAD" and (page := await on_thread(next, pages, None)) is not None:
                    if not await written(request, response, page):
                        return response
            await response.write_eof()
        return response

    async def state_digest(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return digests of everything, at exactly known offsets. While they are copied, nothing is folded."""
        return await self._inspected(lambda: self._router.state_digest())

    async def state_facts(self, request: web.Request) -> web.Response:
        """Return all facts of one rank, at exactly known offsets."""
        rank = RankId(_worker_id(request), DpRank(u64(request.match_info["dp_rank"], "dp_rank")))
        return await self._inspected(lambda: self._router.state_facts(rank))

    async def _inspected(self, state: Callable[[], dict[str, Any]]) -> web.Response:
        self._router.readiness.check()
        async with self._inspections.begun() as on_thread:
            body = await on_thread(lambda: orjson.dumps(state()))
            return web.Response(body=body, content_type="application/json")

    async def pools(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the CXL pools of the registry."""
        pools = sorted(self._router.view.facts.pools().items())
        return _json({"pools": [self._pool_json(pool) for _, pool in pools]})

    async def put_pool(self, request: web.Request) -> web.Response:
        """Register a CXL pool, or change it."""
        body = parse_pool(await self._short_body(request))
        return _json(self._pool_json(await asyncio.to_thread(self._router.registry.put_pool, _pool_id(request), body)))

    async def delete_pool(self, request: web.Request) -> web.Response:
        """Mark a CXL pool and its contents as lost."""
        return _json(self._pool_json(await asyncio.to_thread(self._router.registry.lose_pool, _pool_id(request))))

    def _pool_json(self, pool: CxlPool) -> dict[str, Any]:
        return pool_json(*self._router.view.facts.pool_contents(pool))

    async def state_cxl(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return every pooled block with its placement and the workers that can reach it."""

        def page() -> bytes:
            view = self._router.view
            blocks = view.facts.pooled_blocks(frozenset(view.fleet.workers))
            rows = [pooled_json(block, workers) for block, workers in blocks]
            return orjson.dumps({"blocks": rows})

        async with self._inspections.begun() as on_thread:
            return web.Response(body=await on_thread(page), content_type="application/json")

    async def healthz(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Answer as long as the process is running."""
        return _json({"status": "ok"})

    async def health(self, request: web.Request) -> web.Response:
        """Do the same as `healthz`, under the path that engines have."""
        return await self.healthz(request)

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return whether every topic exists and was read to its end, and whether enough workers are registered."""
        reported: dict[str, Any] = {
            "ready": True,
            "partitions_left": self._router.feeds.pending(),
            "workers_left": self._router.readiness.workers_left(),
            "topics_missing": self._router.readiness.topics.missing or self._router.readiness.topics.deleted,
        }
        try:
            if self._router.stopping:
                raise NotReady("the router is stopping")
            self._router.readiness.topics.check()
            self._router.readiness.check()
        except NotReady as exc:
            return _json({**reported, "ready": False, "reason": str(exc)}, status=exc.http_status)
        return _json(reported)

    async def openapi(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the OpenAPI document."""
        return web.Response(body=document_json(), content_type="application/json")

    async def docs(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the page that shows the OpenAPI document."""
        return web.Response(body=page_html(), content_type=HTML, charset="utf-8", headers=PAGE_HEADERS)

    async def live(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return what the live page shows."""
        return _json(self._live.answer())

    async def page(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the live page."""
        return page_response(PAGE)

    async def page_style(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the live page's style."""
        return page_response(STYLE)

    async def page_script(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the live page's script."""
        return page_response(SCRIPT)

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Prometheus."""
        return metrics_response(self._metrics.registry, *self._more_metrics)


@web.middleware
async def error_shape(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Give every error the same shape, and count it.

    An unexpected exception becomes a 500. Its traceback is logged and is not part of the answer.
    """
    connections = request.app.get(_CONNECTIONS)
    if connections is not None:
        connections.note_request(request.protocol)
    router = request.app.get(_ROUTER)
    response = await _answered(request, handler, router)
    if router is not None and router.stopping:
        response.force_close()  # the client's next request goes to another router
    return response


async def _answered(request: web.Request, handler: _Handler, router: Router | None) -> web.StreamResponse:
    try:
        return await handler(request)
    except asyncio.CancelledError:
        if router is not None and router.stopping:
            router.requests_cut_off += 1
        raise
    except KvStreamsError as exc:
        reported = api_error(exc)
        if reported.http_status == 500:
            log.exception("%s %s failed", request.method, request.path)
        return _refusal(request, reported.code, str(exc), reported.http_status, exc.detail, error_headers(exc))
    except web.HTTPRequestEntityTooLarge as exc:
        too_large = RequestTooLarge(exc.text or "the body is too large")
        return _refusal(request, too_large.code, str(too_large), too_large.http_status)
    except web.HTTPException as exc:
        if exc.status < 400:
            raise
        headers = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
        code = HTTP_CODES.get(exc.status, HTTP_ERROR)
        return _refusal(request, code, f"{request.method} {request.path}: {exc.reason}", exc.status, None, headers)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _refusal(request, KvStreamsError.code, "a fault of the router", 500)


def _refusal(
    request: web.Request,
    code: str,
    message: str,
    status: int,
    detail: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """Return an error in the shape of all errors, and count it."""
    errors = request.app.get(_ERRORS)
    if errors is not None:
        errors[code] += 1
    retry = {"Retry-After": str((detail or {}).get("retry_after_s", RETRY_AFTER_S))} if status == 503 else {}
    return _json(error_json(code, message, detail), status=status, headers={**(headers or {}), **retry})


def _request_id(request: web.Request) -> str:
    request_id = request.match_info["request_id"]
    if not request_id or len(request_id) > NAME_CHARS_MAX:
        raise InvalidRequest(f"a request id has 1 to {NAME_CHARS_MAX} characters")
    return request_id


def _with_priority_of(prepared: PreparedRequest, grant: Grant) -> PreparedRequest:
    """The request with the priority that its token allows."""
    asked = prepared.request.priority
    priority = grant.priority_of(asked)
    if priority == asked:
        return prepared
    return prepared._replace(request=msgspec.structs.replace(prepared.request, priority=priority))


def _pool_id(request: web.Request) -> str:
    pool_id = request.match_info["pool_id"]
    check_pool_id(pool_id)
    return pool_id


def _worker_id(request: web.Request) -> WorkerId:
    return WorkerId(u64(request.match_info["worker_id"], "worker_id"))


def _accepted(answer: dict[str, Any]) -> web.Response:
    return _json(answer, status=202 if answer["buffered"] else 200)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
