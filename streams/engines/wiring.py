"""What the tasks that feed and scrape one engine share, for as long as this bridge holds the engine's lease.

What lives here: the value that the bridge passes to them. What must not: behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import zmq.asyncio
from confluent_kafka import Producer

from streams.engines.address import EngineAddress
from streams.engines.lease_handle import LeaseHandle
from streams.settings import Settings


@dataclass(frozen=True, slots=True)
class EngineWiring:
    """term: of the lease that the bridge holds. epoch_of: returns a CXL pool's epoch from the registry."""

    settings: Settings
    kafka: Producer
    context: zmq.asyncio.Context
    http: aiohttp.ClientSession
    engine: EngineAddress
    model: str
    lease_handle: LeaseHandle
    term: int
    epoch_of: Callable[[str], int]
