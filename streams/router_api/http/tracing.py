"""OpenTelemetry traces of decisions, with the extra `otel`. A router without the setting `tracing` never imports this.

What lives here: the span of a call, the span of a decision with its attributes, and where spans are sent. What must
not: anything that a router without traces needs.

The trace context comes from the request's `traceparent`, or from the application around a router in its own process. It
is not written to Kafka: a booking would grow by a tenth, and the records of a trace are those of its spans already. A
client calls the chosen engine itself and passes its own context on.

No span has prompt text, token ids or hashes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streams.core.routing.admission import Gate
from streams.errors import AllWorkersBusy, KvStreamsError, api_error
from streams.process.otlp import LAST_SPANS_S, exporting_provider
from streams.router_api.deciding.prepared_request import PreparedRequest
from streams.router_api.deciding.router import Router
from streams.router_api.messages.answer import RouteAnswer
from streams.router_api.sharing.registry import PUBLISH_TIMEOUT_S
from streams.settings import RouterServerSettings

log = logging.getLogger(__name__)

#: The service's name unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another one.
SERVICE_NAME = "kvstreams-router"

#: The call whose decisions are traced. Spans of scrapes and of polled pages would outnumber those of requests.
_TRACED_PATH = "/route"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TracedRouter(Router):
    """A router with a span for each decision. Owner of the provider, which `stop` shuts down."""

    def __init__(self, settings: RouterServerSettings, provider: TracerProvider | None = None) -> None:
        super().__init__(settings)
        self._provider = exporting_provider(SERVICE_NAME) if provider is None else provider
        self.tracer = self._provider.get_tracer("kvstreams", version("kvstreams"))

    def try_admit(self, prepared: PreparedRequest, gate: Gate | None) -> RouteAnswer | None:
        """Choose and book as any router does, with a span unless the request has to wait."""
        started_ns = time.time_ns()
        try:
            answer = super().try_admit(prepared, gate)
        except KvStreamsError as exc:
            if gate is None or not isinstance(exc, AllWorkersBusy):
                with self._span(prepared, started_ns) as span:
                    _note_error(span, exc)
            raise
        if answer is not None:
            with self._span(prepared, started_ns) as span:
                if span.is_recording():
                    span.set_attributes(_answered(prepared, answer))
        return answer

    @contextmanager
    def _span(self, prepared: PreparedRequest, started_ns: int) -> Iterator[Span]:
        """The span of a decision that has been made. One that lets a request wait is not known before, and has none."""
        with self.tracer.start_as_current_span(
            f"route {prepared.routing.prompt.model}".rstrip(),
            start_time=started_ns,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            if span.is_recording():
                span.set_attributes(_asked(prepared))
            yield span

    def stop(self, timeout_s: float = PUBLISH_TIMEOUT_S) -> int:
        """Stop as any router does, and send the last spans."""
        n_left = super().stop(timeout_s)
        # On a thread, since the exporter tries for 8 s to reach a collector that is away.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)
        if sending.is_alive():
            log.warning("the last spans were not sent: the collector did not take them within %g s", LAST_SPANS_S)
        return n_left


def middleware_of(router: TracedRouter) -> Callable[[web.Request, _Handler], Awaitable[web.StreamResponse]]:
    """Make the middleware that gives calls of `/route` a span, with the context of the request's `traceparent`."""
    propagator = TraceContextTextMapPropagator()

    @web.middleware
    async def traced(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.path != _TRACED_PATH:
            return await handler(request)
        with router.tracer.start_as_current_span(
            f"{request.method} {_TRACED_PATH}",
            context=propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": request.method, "http.route": _TRACED_PATH},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                response = await handler(request)
            except KvStreamsError as exc:
                _note_error(span, exc)
                span.set_attribute("http.response.status_code", api_error(exc).http_status)
                raise
            span.set_attribute("http.response.status_code", response.status)
            return response

    return traced


def _asked(prepared: PreparedRequest) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "route",
        "gen_ai.request.model": prepared.routing.prompt.model,
        "gen_ai.usage.input_tokens": prepared.blocks.n_tokens,
        "kvstreams.request_id": prepared.request_id,
        "kvstreams.router_mode": prepared.routing.policy.mode.value,
        "kvstreams.request_blocks": prepared.blocks.request_blocks,
        "kvstreams.candidates": len(prepared.routing.matches.ranks),
    }


def _answered(prepared: PreparedRequest, answer: RouteAnswer) -> dict[str, Any]:
    cached_tokens = min(answer.overlap_blocks * prepared.routing.prompt.block_size, prepared.blocks.n_tokens)
    attributes: dict[str, Any] = {
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "kvstreams.worker_id": str(answer.rank.worker_id),  # attributes are signed, and ids are not
        "kvstreams.dp_rank": answer.rank.dp_rank,
        "kvstreams.overlap_blocks": answer.overlap_blocks,
        "kvstreams.mode": answer.trust.mode.value,
        "kvstreams.chosen_mode": answer.chosen_trust.mode.value,
        "kvstreams.repeated": answer.cost is None,
    }
    if answer.cost is not None:
        attributes["kvstreams.cost"] = answer.cost
    if answer.trust.reason is not None:
        attributes["kvstreams.degraded_because"] = answer.trust.reason.value
    return attributes


def _note_error(span: Span, exc: KvStreamsError) -> None:
    """Mark a span as refused, by the error's code: its message may quote what a client sent."""
    code = api_error(exc).code
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))
