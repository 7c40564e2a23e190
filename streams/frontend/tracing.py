"""OpenTelemetry traces of requests, with the extra `otel`. A front without the setting `tracing` never imports this.

What lives here: the span of a request with its children `route`, `engine` and `migration`, and the context that routers
and engines get. What must not: anything that a front without traces needs.

No span has prompt text, token ids or hashes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from streams.errors import KvStreamsError
from streams.frontend.spans import Attributes
from streams.process.otlp import LAST_SPANS_S, exporting_provider

#: The service's name unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another one.
SERVICE_NAME = "kvstreams-front"


class TracedSpans:
    """Spans of one front's requests. Owner of the provider, which `close` shuts down."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = exporting_provider(SERVICE_NAME) if provider is None else provider
        self._tracer = self._provider.get_tracer("kvstreams", version("kvstreams"))
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, path: str, headers: Mapping[str, str]) -> Iterator[Attributes]:
        """Span of a client's request; it continues the client's trace."""
        context = self._propagator.extract(headers)
        with self._span(f"POST {path}", kind=SpanKind.SERVER, context=context) as attributes:
            attributes["http.request.method"], attributes["http.route"] = "POST", path
            yield attributes

    @contextmanager
    def child(self, name: str) -> Iterator[Attributes]:
        """Span of a part of the current request."""
        with self._span(name, kind=SpanKind.CLIENT) as attributes:
            yield attributes

    @contextmanager
    def _span(self, name: str, **options: Any) -> Iterator[Attributes]:
        attributes: Attributes = {}
        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False, **options
        ) as span:
            try:
                yield attributes
            except KvStreamsError as exc:
                # Without its message, which may quote an engine's answer.
                span.set_attribute("error.type", exc.code)
                span.set_status(Status(StatusCode.ERROR))
                raise
            finally:
                span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def context(self) -> dict[str, str]:
        """The current span as headers, for routers and engines."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers)
        return headers

    def close(self) -> None:
        """Send the last spans, for at most LAST_SPANS_S."""
        # On a thread, since the exporter tries for 8 s to reach a collector that is away.
        sending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sending.start()
        sending.join(LAST_SPANS_S)
