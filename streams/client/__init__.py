"""The Python client: routing and generating with one interface, over HTTP or with a router in the same process.

What lives here: the public names. `KvRouterClient` needs nothing but aiohttp, httptools and orjson. `KvPushRouter`
needs Kafka and the compiled kernels, so its module is imported when the name is first used. docs/client.md describes
both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streams.client.base import KvRouter, OneMode
from streams.client.booking import Booking
from streams.client.engine import EngineOptions
from streams.client.generation import Generation
from streams.client.http import KvRouterClient
from streams.client.matches import OverlapScores, RankOverlapScores, WorkerRank

if TYPE_CHECKING:
    from streams.client.push import KvPushRouter

__all__ = [
    "Booking",
    "EngineOptions",
    "Generation",
    "KvPushRouter",
    "KvRouter",
    "KvRouterClient",
    "OneMode",
    "OverlapScores",
    "RankOverlapScores",
    "WorkerRank",
]


def __getattr__(name: str) -> Any:
    if name == "KvPushRouter":
        from streams.client.push import KvPushRouter

        return KvPushRouter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
