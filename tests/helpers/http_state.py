"""A router that random requests are sent to: its settings, and everything that a request can change."""

from __future__ import annotations

from typing import Any

from streams.settings import Settings
from tests.helpers.api import Api, metrics

SETTINGS = Settings(body_timeout_s=5.0, body_bytes_max=64 * 1024, request_tokens_max=1024)


def state_of(api: Api) -> dict[str, Any]:
    """Everything that a request can change."""
    sampled = metrics(api)
    return {
        **{path: api.get(path) for path in ("/workers", "/pools", "/loads", "/state", "/state/cxl", "/ready")},
        "bookings": sampled["kvstreams_bookings_known"],
        "faults": sampled.get("kvstreams_errors_total/internal", 0),
    }
