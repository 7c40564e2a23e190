"""The spans of a request as the front's other modules use them, and their absence.

What lives here: the interface, and the spans of a front without traces, which cost nothing. What must not:
OpenTelemetry (tracing).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

#: What a span says; it is filled while the span lasts.
Attributes = dict[str, Any]


class Spans(Protocol):
    """Spans of one front's requests."""

    def request(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[Attributes]:
        """Span of a client's request."""

    def child(self, name: str) -> AbstractContextManager[Attributes]:
        """Span of a part of the current request."""

    def context(self) -> dict[str, str]:
        """The current span as headers, for routers and engines; empty without traces."""

    def close(self) -> None:
        """Send the last spans."""


class NoSpans:
    """What a front without traces has."""

    def request(self, path: str, headers: Mapping[str, str]) -> AbstractContextManager[Attributes]:  # noqa: ARG002
        """Return nothing to enter."""
        return nullcontext({})

    def child(self, name: str) -> AbstractContextManager[Attributes]:  # noqa: ARG002 - the interface's
        """Return nothing to enter."""
        return nullcontext({})

    def context(self) -> dict[str, str]:
        """Return no headers, so that the client's own are passed on."""
        return {}

    def close(self) -> None:
        """Do nothing."""
