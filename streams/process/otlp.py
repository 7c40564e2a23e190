"""Where spans are sent: OTLP over HTTP, with the extra `otel`. Without the setting `tracing`, nothing imports this.

What lives here: the provider of spans. What must not: spans (router_api.http.tracing, frontend.tracing).
"""

from __future__ import annotations

import os
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

#: How long a process that stops waits until the collector has the last spans.
LAST_SPANS_S = 2.0


def exporting_provider(service_name: str) -> TracerProvider:
    """Make a provider that sends spans by OTLP over HTTP, in batches and from its own thread.

    service_name: unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another one. Variables of OpenTelemetry
    configure the rest, such as OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_TRACES_SAMPLER. Spans that the collector does not
    take in time are dropped beyond 2,048 (OTEL_BSP_MAX_QUEUE_SIZE).
    """
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ours = {"service.version": version("kvstreams"), **({} if named else {"service.name": service_name})}
    provider = TracerProvider(resource=Resource.create(ours), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
