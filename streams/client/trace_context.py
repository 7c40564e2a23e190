"""The trace context of a caller, as headers of its requests (W3C Trace Context).

What lives here: adding `traceparent` and `tracestate` to headers. What must not: spans, which are the caller's and the
router's. OpenTelemetry is used only where the caller's process uses it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


def add_trace_context(headers: dict[str, str]) -> None:
    """Add the context of the current span, if there is one, so that what is called joins its trace."""
    # A process that has never imported this has no span, and may not have the package.
    if "opentelemetry.trace" in sys.modules:
        _propagator().inject(headers)


@cache
def _propagator() -> Any:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
