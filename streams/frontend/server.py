"""`kvstreams front`: the calls of the front on a server of its own.

What lives here: the table of calls, bodies and their limits, errors in the shape of each call, starting and stopping.
What must not: what becomes of a request (proxy).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from streams.client.http import KvRouterClient
from streams.errors import (
    HTTP_CODES,
    KvStreamsError,
    NotReady,
    Overloaded,
    RequestTimeout,
    RequestTooLarge,
    SettingsError,
    UnknownModel,
    UnsupportedEncoding,
)
from streams.frontend.fleet import Fleet
from streams.frontend.metrics import FRONT_METRICS, FrontCounts
from streams.frontend.protocol import SHORT_BODY_BYTES, FrontProtocol, Serve, json_page, kind_of
from streams.frontend.proxy import Proxy
from streams.frontend.spans import NoSpans, Spans
from streams.process.aiohttp_internals import LimitedRunner, arrived_body, is_supported
from streams.process.connections import Connections
from streams.process.http_server import RETRY_AFTER_S, HttpServer, Startup, error_headers, starting_app
from streams.process.interpreter import collect_by_the_clock, exempt_from_collection, prefer_request_threads
from streams.process.metrics import MetricsRegistry
from streams.process.process_metrics import metrics_response
from streams.prompts.calls import CALLS, Kind, call_of
from streams.prompts.engine_keys import EngineKeys
from streams.prompts.error_pages import error_page
from streams.prompts.parity_probes import ParityProbes
from streams.prompts.requests import NAME_CHARS_MAX, read_request
from streams.prompts.tokenizing import Tokenizing
from streams.security.access import ANY_RIGHT, Access, grant_of
from streams.security.router_token import RouterToken
from streams.security.tokens import Right
from streams.settings import FrontServerSettings, KvTransfer, LogSettings

log = logging.getLogger(__name__)

#: Interval of `Proxy.check`.
CHECK_EXCHANGES_S = 1.0

#: What a client may ask a front for, as an error says it.
SERVED_CALLS = f"POST {', POST '.join(Kind)} and GET /v1/models"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The header in which Anthropic's client sends its key.
_API_KEY = "X-Api-Key"

_RIGHTS = {"/healthz": None, "/health": None, "/ready": None, "/metrics": Right.READ}


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What a front needs in addition to the settings.

    router_urls: of the routers that it asks. router_token_file: with its token there. tokenizers: folders of tokenizers
    by model. engine_key_files: with the API keys of engines, by model. In both, "" is for all other models.
    """

    router_urls: tuple[str, ...]
    router_token_file: str = ""
    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    engine_key_files: Mapping[str, str] = field(default_factory=dict)


class Front:
    """The calls of one front, and what they use. Used on one loop."""

    def __init__(
        self, settings: FrontServerSettings, options: FrontOptions, access: Access, spans: Spans | None = None
    ) -> None:
        """spans: in place of those that the settings ask for."""
        self.settings = settings
        self._access = access
        self._token = RouterToken(options.router_token_file)
        self._keys = EngineKeys(options.engine_key_files)
        self.router = KvRouterClient(
            options.router_urls,
            token=self._token if self._token.exists else None,
            waiting_max=settings.router_queue_requests_max,
            queue_timeout_s=settings.router_queue_timeout_s,
            no_worker_timeout_s=settings.front_no_worker_wait_s,
        )
        cache_bytes = settings.tokenizer_cache_mb << 20
        self.tokenizing = Tokenizing(options.tokenizers, settings.tokenizer_processes, cache_bytes)
        self.fleet = Fleet(
            self.router,
            on_workers=lambda workers: self.parity.note(workers),
            reads_pools=settings.front_disaggregation and settings.front_kv_transfer is KvTransfer.POOL,
        )
        self.parity = ParityProbes(self.router.report_render, self.tokenizing, self._keys.of)
        self.counts = FrontCounts(self.tokenizing.sources, self.tokenizing.characters, self.parity.outcomes)
        self._spans = _make_spans(settings) if spans is None else spans
        self.proxy = Proxy(settings, self.router, self.tokenizing, self.fleet, self._keys.of, self.counts, self._spans)
        self.proxy.auditing.on_different = self.parity.check_again
        self.connections = Connections(
            settings.connections_max, settings.first_request_timeout_s, uses_tls=access.scheme == "https"
        )
        self.registry = MetricsRegistry(FRONT_METRICS, self._snapshot)
        self.stopping = False
        self._body_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the tokenizers and begin to read the registry. Raises SettingsError."""
        await self.tokenizing.start()
        await self.router.start()
        await self.fleet.poll()
        checks = (self._token.check_forever(), self._keys.check_forever(), self._check_forever())
        for background in (self.fleet.poll_forever(), *checks):
            self.in_background(background)

    def in_background(self, background: Coroutine[Any, Any, None]) -> None:
        """Run something until the front is closed."""
        self._tasks.append(asyncio.create_task(background))

    async def close(self) -> None:
        """End everything; the last reports on bookings are sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.parity.close()
        await self.proxy.close()
        await self.router.close()
        await self.tokenizing.close()
        await asyncio.to_thread(self._spans.close)

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EXCHANGES_S)
            self.proxy.check()

    def _snapshot(self) -> FrontCounts:
        self.counts.reports_lost = self.router.reports_lost
        self.counts.failures_reported = self.proxy.failures_reported
        return self.counts

    # -- the application -----------------------------------------------------------------------------------------------

    def runner(self) -> LimitedRunner:
        """Return what serves the calls."""
        checks = self._access.middlewares(_right_of, _API_KEY)
        app = web.Application(middlewares=[self._shape_errors, *checks])
        for slash in ("", "/"):  # engines take both
            app.add_routes(
                [
                    *(web.post(kind + slash, self._generate) for kind in Kind),
                    web.get(f"/v1/models{slash}", self._models),
                    web.get(f"/healthz{slash}", self._healthz),
                    web.get(f"/health{slash}", self._healthz),
                    web.get(f"/ready{slash}", self._ready),
                    web.get(f"/metrics{slash}", self._metrics),
                ]
            )
        app.router.add_get("/v1/models/{model:.+}", self._model)
        new_protocol = partial(FrontProtocol, self._shaped(self._checked()) if is_supported() else None)
        return LimitedRunner(
            app,
            self.connections,
            new_protocol,
            self.settings.drain_timeout_s,
            # Otherwise a request would go on, and its engine compute, after its client has left.
            handler_cancellation=True,
        )

    def _checked(self) -> _Handler:
        """Return what serves the calls that generate for clients that may make them."""
        handler: _Handler = self._generate
        for check in self._access.middlewares(lambda _: Right.GENERATE, _API_KEY):
            handler = partial(check, handler=handler)
        return handler

    def _shaped(self, handler: _Handler) -> Serve:
        """Return a handler whose errors have the shape of the call."""

        async def shaped(http: web.BaseRequest) -> web.StreamResponse:
            return await self._shape_errors(cast(web.Request, http), handler)  # the application makes all requests

        return shaped

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if len(self.proxy) >= self.settings.front_requests_max:
            raise Overloaded(f"the front serves {len(self.proxy)} requests, which is front_requests_max")
        content = http.content
        if content.is_eof() and content.total_bytes <= min(SHORT_BODY_BYTES, self.settings.body_bytes_max):
            _refuse_encoded(http)
            return await self._serve(http, arrived_body(content))  # there is nothing to wait for, and nothing to count
        async with self._body(http) as body:
            return await self._serve(http, body)

    async def _serve(self, http: web.Request, body: bytes) -> web.StreamResponse:
        return await self.proxy.serve(http, read_request(kind_of(http), body), body, grant_of(http))

    @asynccontextmanager
    async def _body(self, http: web.Request) -> AsyncIterator[bytes]:
        """Read a body within the limits, and count its bytes until the request has ended."""
        settings = self.settings
        _refuse_encoded(http)
        body, counted = bytearray(), 0
        try:
            async with asyncio.timeout(settings.body_timeout_s):
                while data := await http.content.readany():
                    body += data
                    if len(body) > settings.body_bytes_max:
                        raise RequestTooLarge(f"the body has more than body_bytes_max, {settings.body_bytes_max} bytes")
                    # There are at most front_requests_max short bodies.
                    if len(body) > SHORT_BODY_BYTES:
                        self._body_bytes += len(body) - counted
                        counted = len(body)
                        if self._body_bytes > settings.bodies_bytes_max:
                            raise Overloaded("the bodies of all requests have more than bodies_bytes_max")
            yield bytes(body)
        except TimeoutError as exc:
            raise RequestTimeout(f"the body did not arrive within {settings.body_timeout_s:g} s") from exc
        finally:
            self._body_bytes -= counted

    async def _models(self, _: web.Request) -> web.Response:
        return json_page(self.fleet.page())

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"].rstrip("/")
        for row in self.fleet.page()["data"]:
            if row["id"] == name:
                return json_page(row)
        raise UnknownModel(
            f"the model {name[:NAME_CHARS_MAX]!r} is not served here; GET /v1/models lists those that are"
        )

    async def _healthz(self, _: web.Request) -> web.Response:
        return json_page({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        reason = "the front is stopping" if self.stopping else self.fleet.not_ready()
        if reason is None:
            return json_page({"ready": True})
        return json_page({"ready": False, "reason": reason}, status=NotReady.http_status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return metrics_response(self.registry)

    @web.middleware
    async def _shape_errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer every error in the shape of the call. Messages never quote a prompt."""
        self.connections.note_request(request.protocol)
        preflight = self.proxy.cors.preflight(request.method, request.headers)
        try:
            response = await handler(request) if preflight is None else web.Response(status=204, headers=preflight)
        except KvStreamsError as exc:
            response = json_page(_page_of(request)(exc.http_status, str(exc), exc.code), exc.http_status)
            response.headers.update(error_headers(exc))
            if exc.http_status == NotReady.http_status:
                response.headers["Retry-After"] = str(exc.detail.get("retry_after_s", RETRY_AFTER_S))
        except web.HTTPException as exc:
            response = json_page(_http_error(request, exc), exc.status)
            if isinstance(exc, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = exc.headers["Allow"]
        if not response.prepared:
            if preflight is None:
                response.headers.update(self.proxy.cors.headers(request.headers))
            if self.stopping:
                response.force_close()
        return response


def _make_spans(settings: LogSettings) -> Spans:
    """Return traces if the settings ask for them. Raises SettingsError if that needs a missing package."""
    if not settings.tracing:
        return NoSpans()
    try:
        from streams.frontend.tracing import TracedSpans
    except ImportError as exc:
        raise SettingsError(
            f"tracing is on, but {exc.name} is not installed", remedy="`pip install 'kvstreams[otel]'` installs it"
        ) from exc
    return TracedSpans()


def _refuse_encoded(http: web.Request) -> None:
    if http.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedEncoding("the front reads bodies without Content-Encoding only")


def _http_error(http: web.Request, exc: web.HTTPException) -> dict[str, Any]:
    """Return the page of an error of the server itself. If the front lacks a call, it says which it has."""
    message, path = exc.reason, http.path[:NAME_CHARS_MAX]
    if exc.status == web.HTTPNotFound.status_code:
        message = f"there is no {path} here. The front serves {SERVED_CALLS}; ask an engine for anything else"
    elif isinstance(exc, web.HTTPMethodNotAllowed):
        message = f"{http.method[:NAME_CHARS_MAX]} {path} is not possible; use {exc.headers['Allow']}"
    return _page_of(http)(exc.status, message, HTTP_CODES.get(exc.status))


def _page_of(http: web.BaseRequest) -> Callable[[int, str, str | None], dict[str, Any]]:
    """Return what makes the page of an error, in the shape of the call."""
    kind = call_of(http.path)
    return error_page if kind is None else CALLS[kind].error_page


def _right_of(http: web.Request) -> str | None:
    """The right that a call needs. Models are listed for everyone who may use one."""
    if isinstance(http.match_info.http_exception, web.HTTPException):
        return ANY_RIGHT
    return _RIGHTS.get(http.path.rstrip("/"), Right.GENERATE)


async def serve(settings: FrontServerSettings, options: FrontOptions) -> None:
    """Serve until cancelled. Raises KvStreamsError if the port is not available, or a file cannot be used."""
    startup, access = Startup(), Access(settings)
    server = HttpServer(settings.host, settings.port, access=access)
    front: Front | None = None
    is_serving = False
    try:
        await server.serve(starting_app(startup))
        front = Front(settings, options, access)
        startup.note("loading tokenizers" if options.tokenizers else "starting")
        prefer_request_threads()
        await front.start()
        exempt_from_collection()
        # Python would examine all objects of all streams again after every few hundred requests.
        front.in_background(collect_by_the_clock())
        await server.serve(front.runner())
        is_serving = True
        log.info("serving on %s, with the routers %s", server.url, ", ".join(options.router_urls))
        await asyncio.Event().wait()
    finally:
        if front is not None and is_serving:
            await _drain(front, server)
        else:
            await server.close()
            if front is not None:
                await front.close()


async def _drain(front: Front, server: HttpServer) -> None:
    """Stop: say so, finish requests within drain_timeout_s, and send the last reports."""
    began_s, settings = time.monotonic(), front.settings
    front.stopping = True
    try:
        await asyncio.sleep(settings.drain_notice_s)
    finally:
        n_running = len(front.proxy)
        await server.close()
        await front.close()
        log.info("stopped after %.1f s, in which %d requests ended", time.monotonic() - began_s, n_running)
