"""The HTTP calls of docs/http.md, bound to a Router: the same ones under Faust and under `kvstreams router`.

What lives here: reading requests, calling the router, and responding; the shape of all errors. What must not: decisions
(router), and the JSON of values (wire).
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from aiohttp import web

from streams.core.ids import WorkerId
from streams.core.loads.bookings import BookingPhase
from streams.core.workers import Worker
from streams.cxl.events import check_pool_id
from streams.errors import (
    HTTP_CODES,
    HTTP_ERROR,
    InvalidRequest,
    KvStreamsError,
    NotReady,
    RequestTooLarge,
    api_error,
)
from streams.metrics import MetricsRegistry, metrics_response
from streams.router_api.metrics import RouterMetrics
from streams.router_api.router import Router
from streams.router_api.wire import (
    NAME_CHARS_MAX,
    OCTET_STREAM,
    RouteRequest,
    answer_json,
    parse_book,
    parse_output,
    parse_pool,
    parse_route,
    parse_route_query,
    parse_worker,
    pool_json,
    pooled_json,
    report_json,
    u64,
    worker_json,
)

log = logging.getLogger(__name__)

#: Seconds after which a client may retry, as the header Retry-After.
RETRY_AFTER_S = "1"

#: One fact in the answer of GET /state/blocks: worker id, dp rank, tier, sequence hash; little-endian.
FACT = struct.Struct("<QIBQ")

#: A request id in a path. aiohttp's own pattern does not match ids with braces, which /route accepts.
_ANY_ID = "{request_id:[^/]+}"

#: Counts of an application's errors by code. Only its own event loop changes them.
_ERRORS = web.AppKey("errors", Counter)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Handlers:
    """Binds a router's calls to paths.

    Calls that wait for Kafka run on a thread, so that an unreachable broker delays them but no answer to /route.
    """

    def __init__(self, router: Router, more_metrics: Sequence[MetricsRegistry[Any]] = ()) -> None:
        """more_metrics: further registries of this process, served after the router's own."""
        self._router = router
        self._metrics = RouterMetrics(router)
        self._more_metrics = more_metrics

    def routes(self) -> list[web.RouteDef]:
        """Every path with its handler."""
        return [
            web.post("/route", self.route),
            web.get("/loads", self.loads),
            web.post("/loads/potential", self.potential),
            web.post(f"/loads/{_ANY_ID}", self.book),
            web.post(f"/loads/{_ANY_ID}/prefill-complete", self.prefill_complete),
            web.post(f"/loads/{_ANY_ID}/output", self.output),
            web.delete(f"/loads/{_ANY_ID}", self.free),
            web.get("/workers", self.workers),
            web.put("/workers/{worker_id}", self.put_worker),
            web.delete("/workers/{worker_id}", self.delete_worker),
            web.put("/workers/{worker_id}/cordon", self.cordon),
            web.delete("/workers/{worker_id}/cordon", self.uncordon),
            web.get("/pools", self.pools),
            web.put("/pools/{pool_id}", self.put_pool),
            web.delete("/pools/{pool_id}", self.delete_pool),
            web.get("/state", self.state),
            web.get("/state/blocks", self.state_blocks),
            web.get("/state/cxl", self.state_cxl),
            web.get("/healthz", self.healthz),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
        ]

    def add_to(self, app: web.Application) -> None:
        """Bind every path to an application that has the middleware `error_shape`, and count its errors."""
        app.add_routes(self.routes())
        app[_ERRORS] = self._metrics.errors

    async def route(self, request: web.Request) -> web.Response:
        """Choose a rank and book it."""
        started = time.perf_counter()
        route_request, packed = await _route_request(request)
        answer = answer_json(self._router.route(route_request, packed))
        self._metrics.route_seconds.observe(time.perf_counter() - started)
        return _json(answer)

    async def potential(self, request: web.Request) -> web.Response:
        """Return the load that each eligible rank would have with this request."""
        return _json(self._router.potential(*await _route_request(request)))

    async def loads(self, request: web.Request) -> web.Response:  # noqa: ARG002 - aiohttp hands it to every handler
        """Return every rank's active load."""
        return _json(self._router.rank_loads())

    async def book(self, request: web.Request) -> web.Response:
        """Book a choice that was made elsewhere."""
        return _json(self._router.book(_request_id(request), parse_book(await _body(request))))

    async def prefill_complete(self, request: web.Request) -> web.Response:
        """Note that the rank has computed the prompt."""
        return _accepted(self._router.report_phase(_request_id(request), BookingPhase.PREFILL))

    async def output(self, request: web.Request) -> web.Response:
        """Note how many tokens have been generated so far."""
        reported = parse_output(await _body(request))
        return _accepted(self._router.report_output(_request_id(request), reported.output_tokens))

    async def free(self, request: web.Request) -> web.Response:
        """Note that the request has ended."""
        return _accepted(self._router.report_phase(_request_id(request), BookingPhase.FREE))

    async def workers(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the registered workers."""
        return _json({"workers": [self._worker_json(worker) for worker in self._router.registry.workers()]})

    async def put_worker(self, request: web.Request) -> web.Response:
        """Register a worker, or change it."""
        worker_id, registry = _worker_id(request), self._router.registry
        worker = parse_worker(
            worker_id, await _body(request), time.time_ns() // 1_000_000, registry.registration(worker_id)
        )
        return _json(self._worker_json(await asyncio.to_thread(registry.put_worker, worker)))

    async def delete_worker(self, request: web.Request) -> web.Response:
        """Remove a worker and everything that it held."""
        await asyncio.to_thread(self._router.registry.delete_worker, _worker_id(request))
        return _json({"worker_id": _worker_id(request), "removed": True})

    async def cordon(self, request: web.Request) -> web.Response:
        """Keep new requests from a worker."""
        return _json(self._worker_json(await asyncio.to_thread(self._router.registry.cordon, _worker_id(request))))

    async def uncordon(self, request: web.Request) -> web.Response:
        """Let a worker get new requests again."""
        await asyncio.to_thread(self._router.registry.uncordon, _worker_id(request))
        return _json({"worker_id": _worker_id(request), "cordoned": False})

    def _worker_json(self, worker: Worker) -> dict[str, Any]:
        """A worker of the registry with the ranks that get no requests, and the metrics that its engine reports."""
        view = self._router.view
        served = view.served_model(worker.model)
        return {
            **worker_json(worker),
            "model_block_size": None if served is None else served.block_size,
            "wrong_block_size_dp_ranks": view.ranks_of_wrong_block_size(worker),
            "silent_dp_ranks": view.silent_ranks(worker.worker_id),
            "metrics": [report_json(report) for report in view.reports_of(worker)],
        }

    async def state(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return what the view has of each rank. Routers with the same blocks of a rank return the same digest."""
        ranks = self._router.view.rank_states()
        return _json(
            {
                "blocks": sum(rank.n_blocks for rank in ranks),
                "applied_offsets": {str(n): at for n, at in self._router.view.applied_offsets().items()},
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

    async def state_blocks(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return every fact in the index, 21 bytes each (FACT), in order."""

        def page() -> bytes:
            facts = sorted(self._router.view.members())
            return b"".join(FACT.pack(rank.worker_id, rank.dp_rank, tier, block) for rank, tier, block in facts)

        # A million facts take seconds, during which other calls are answered.
        return web.Response(body=await asyncio.to_thread(page), content_type=OCTET_STREAM)

    async def pools(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return the CXL pools of the registry."""
        return _json({"pools": [pool_json(pool) for _, pool in sorted(self._router.view.pools().items())]})

    async def put_pool(self, request: web.Request) -> web.Response:
        """Register a CXL pool, or change it."""
        body = parse_pool(await _body(request))
        return _json(pool_json(await asyncio.to_thread(self._router.registry.put_pool, _pool_id(request), body)))

    async def delete_pool(self, request: web.Request) -> web.Response:
        """Mark a CXL pool and its contents as lost."""
        return _json(pool_json(await asyncio.to_thread(self._router.registry.lose_pool, _pool_id(request))))

    async def state_cxl(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return every pooled block with its placement and the workers that can reach it."""

        def page() -> bytes:
            rows = [pooled_json(block, workers) for block, workers in self._router.view.pooled_blocks()]
            return orjson.dumps({"blocks": rows})

        return web.Response(body=await asyncio.to_thread(page), content_type="application/json")

    async def healthz(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Answer as long as the process is running."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Return whether every topic exists and was read to its end, and whether enough workers are registered."""
        reported: dict[str, Any] = {
            "ready": True,
            "partitions_left": self._router.feeds.pending(),
            "workers_left": self._router.workers_left(),
            "topics_missing": self._router.topics_missing or self._router.topics_deleted,
        }
        try:
            self._router.check_topics()
            self._router.check_ready()
        except NotReady as exc:
            return _json({**reported, "ready": False, "reason": str(exc)}, status=exc.http_status)
        return _json(reported)

    async def metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002
        """Prometheus."""
        return metrics_response(self._metrics.registry, *self._more_metrics)


@web.middleware
async def error_shape(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Give every error the same shape, and count it.

    An unexpected exception becomes a 500. Its traceback is logged and is not part of the answer.
    """
    try:
        return await handler(request)
    except KvStreamsError as exc:
        reported = api_error(exc)
        if reported.http_status == 500:
            log.exception("%s %s failed", request.method, request.path)
        return _refusal(request, reported.code, str(exc), reported.http_status, exc.detail)
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
    retry = {"Retry-After": RETRY_AFTER_S} if status == 503 else {}
    body = {"error": {"code": code, "message": message, "detail": detail or {}}}
    return _json(body, status=status, headers={**(headers or {}), **retry})


async def _route_request(request: web.Request) -> tuple[RouteRequest, bytes | None]:
    body = await _body(request)
    # Not request.content_type: for a missing or broken header, aiohttp returns octet-stream, and JSON would be read as
    # tokens.
    if request.headers.get("Content-Type", "").partition(";")[0].strip().lower() == OCTET_STREAM:
        return parse_route_query(request.query), body
    return parse_route(body), None


async def _body(request: web.Request) -> bytes:
    try:
        return await request.read()
    except web.HTTPException:
        raise
    except (OSError, web.RequestPayloadError) as exc:  # the client disconnected, or its encoding is not as declared
        raise InvalidRequest("the body was not received completely") from exc


def _request_id(request: web.Request) -> str:
    request_id = request.match_info["request_id"]
    if not request_id or len(request_id) > NAME_CHARS_MAX:
        raise InvalidRequest(f"a request id has 1 to {NAME_CHARS_MAX} characters")
    return request_id


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
