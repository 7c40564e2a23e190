"""What the tasks that feed and scrape one engine share, for as long as this bridge holds the engine's lease.

What lives here: the value that the bridge passes to them. What must not: behaviour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import zmq.asyncio
from confluent_kafka import Producer

from streams.core.ids import RankId, WorkerId
from streams.engines.address import EngineAddress
from streams.engines.connection import RECEIVE_HWM
from streams.engines.cxl_names import PooledRows
from streams.engines.engine_ranks import EngineRanks
from streams.engines.lease_handle import LeaseHandle
from streams.engines.socket_watch import SocketWatch
from streams.settings import BridgeSettings


async def _no_rows(_: WorkerId) -> Mapping[RankId, PooledRows]:
    """Return the rows of a table that is empty."""
    return {}


def _never(_: float) -> bool:
    """Return that no event is late: the engine sends its events to the sockets itself."""
    return False


def _ignore(_: int | None) -> None:
    """Take a block size that no bridge needs."""


@dataclass(frozen=True, slots=True)
class EngineWiring:
    """term: of the lease that the bridge holds. epoch_of: returns a CXL pool's epoch from the registry.

    on_page_block_size: takes the size of the engine's blocks from its metrics page, None if the page has none.
    on_stored_block_size: takes it from an event that stores blocks. It is called with None when a rank begins another
    incarnation. receive_hwm: returns how many batches may wait in one rank's socket. read_pooled: reads a worker's rows
    from the agents' table of pooled blocks, by rank. in_flight: see RankRecords. watch: of all event sockets.
    is_late: whether events of the engine may be late before they reach the sockets, at a monotonic time. ranks: of its
    sockets.
    """

    settings: BridgeSettings
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
    read_pooled: Callable[[WorkerId], Awaitable[Mapping[RankId, PooledRows]]] = _no_rows
    in_flight: Counter[WorkerId] = field(default_factory=Counter)
    watch: SocketWatch = field(default_factory=SocketWatch)
    is_late: Callable[[float], bool] = _never
    ranks: EngineRanks = field(default_factory=EngineRanks)
