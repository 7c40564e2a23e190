"""One engine of a bridge without Kafka: its lease and its table are answered by the test."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import aiohttp
import zmq.asyncio

from streams.core.ids import DpRank, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Progress
from streams.engines.address import EngineAddress
from streams.engines.bridged_engine import BridgedEngine, BridgeParts
from streams.engines.connection import RECEIVE_HWM
from streams.engines.feed_counters import RankCounters
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank
from streams.engines.socket_watch import SocketWatch
from streams.kafka.records import decode_batch, decode_worker
from streams.settings import Settings
from tests.helpers.engine_double import EngineDouble
from tests.helpers.recording_producer import RecordingProducer

RANK = RankId(WorkerId(7), DpRank(0))

#: Ample for what takes a fraction of a second on a quiet machine.
PATIENCE_S = 20.0

#: Later than the lag that a router tolerates.
MUCH_LATER_S = 10.0


class TableUnderTest:
    """What a bridge reads of a worker's ranks, once the test lets it."""

    def __init__(self, *recovered: RecoveredRank) -> None:
        self._recovered = {int(each.progress.rank.dp_rank): each for each in recovered}
        self._applied_from: RecordingProducer | None = None
        self._n_applied = 0
        self.is_asked = False
        self.is_read = asyncio.Event()

    def apply_from(self, producer: RecordingProducer) -> None:
        """Contain what is published, too, from now on."""
        self._applied_from = producer

    async def result(self, _partition: int, _worker_id: WorkerId) -> dict[int, RecoveredRank]:
        self.is_asked = True
        await self.is_read.wait()
        if self._applied_from is not None:
            published = self._applied_from.values("kv-events")
            for batch in map(decode_batch, published[self._n_applied :]):
                unknown = RecoveredRank(Progress(batch.rank, Epoch(Incarnation(0), 0)), Ledger(False))
                self._recovered.setdefault(int(batch.rank.dp_rank), unknown).fold(batch)
            self._n_applied = len(published)
        return self._recovered


class _Claimed:
    """Claims every model."""

    def __init__(self) -> None:
        self.models: list[str] = []

    async def result(self, model: tuple[str, bool], _worker_id: WorkerId) -> None:
        self.models.append(model[0])


class EngineUnderTest:
    """An engine of a bridge that holds its lease, without a log: what is written about it is read back at once."""

    def __init__(
        self, bridged: BridgedEngine, table: TableUnderTest, producer: RecordingProducer, claimed: list[str]
    ) -> None:
        self.bridged = bridged
        self.table = table
        self.producer = producer
        self.claimed = claimed  # models

    async def read_back(self) -> None:
        """Read what the bridge writes about its worker, until cancelled."""
        self.bridged.lease_handle.on_end()
        n_read = 0
        while True:
            self.bridged.lease_handle.tick()
            written = self.producer.values("workers")
            for value in written[n_read:]:
                self.bridged.lease_handle.on_record(decode_worker(value))
            n_read = len(written)
            await asyncio.sleep(0.01)

    def is_fed_later(self) -> bool:
        """Whether the pulse will list the engine, once every router has read what Kafka has acknowledged."""
        return self.bridged.is_fed(time.monotonic() + MUCH_LATER_S)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, what
            await asyncio.sleep(0.01)


def bridging(
    address: EngineAddress, act: Callable[[EngineUnderTest], Awaitable[None]], *recovered: RecoveredRank
) -> None:
    """Run an engine of a bridge while `act` runs."""

    async def main() -> None:
        settings, producer, table = Settings(bridge_lease_s=600.0), RecordingProducer(), TableUnderTest(*recovered)
        context, claims = zmq.asyncio.Context(), _Claimed()
        async with aiohttp.ClientSession() as http:
            parts = BridgeParts(
                settings,
                producer,
                "bridge",
                http,
                cast(Any, table),
                cast(Any, claims),
                cast(Any, None),
                RankCounters(),
                Counter(),
                lambda _: 0,
                lambda: RECEIVE_HWM,
                lambda _worker_id, _refused: None,
                SocketWatch(),
                context,
            )
            under_test = EngineUnderTest(BridgedEngine(parts, address, 0), table, producer, claims.models)
            running = [asyncio.create_task(each) for each in (under_test.bridged.run(), under_test.read_back())]
            try:
                await act(under_test)
                assert not any(each.done() for each in running)
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                context.destroy(linger=0)

    asyncio.run(main())


def address_of(engine: EngineDouble) -> EngineAddress:
    return EngineAddress(RANK.worker_id, engine.url, engine.events, engine.replay, model="m")
