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
from streams.engines.connection import RECEIVE_HWM
from streams.engines.lease_handle import LeaseHandle
from streams.settings import Settings


def _ignore(_: int | None) -> None:
    """Take a block size that no bridge needs."""


@dataclass(frozen=True, slots=True)
class EngineWiring:
    """term: of the lease that the bridge holds. epoch_of: returns a CXL pool's epoch from the registry.

    on_page_block_size: takes the size of the engine's blocks from its metrics page, None if the page has none.
    on_stored_block_size: takes it from an event that stores blocks. It is called with None when a rank begins another
    incarnation. receive_hwm: returns how many batches may wait in one rank's socket.
    """

    settings: Settings
    kafka: Producer
    context: zmq.asyncio.Context
    http: aiohttp.ClientSession
    engine: EngineAddress
    model: str
    lease_handle: LeaseHandle
    term: int
    epoch_of: Callable[[str], int]
    on_page_block_size: Callable[[int | None], None] = _ignore
    on_stored_block_size: Callable[[int | None], None] = _ignore
    receive_hwm: Callable[[], int] = lambda: RECEIVE_HWM
