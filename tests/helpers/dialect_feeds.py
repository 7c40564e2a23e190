"""A feed of one rank whose engine speaks a dialect of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import zmq.asyncio

from streams.core.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvents
from streams.core.hashing import hash_seed, local_hashes
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, WorkerId
from streams.core.workers import Worker
from streams.engines.address import EngineAddress
from streams.engines.dialects.interface import DecodedBatch, Dialect, EngineEvent
from streams.engines.feed import RankFeed
from streams.engines.lease import EngineLease
from streams.engines.lease_handle import LeaseHandle
from streams.engines.recovery import RecoveredRank
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord
from streams.kafka.records import decode_batch
from streams.process.waiting import wait_for
from streams.settings import Settings
from tests.helpers.engine_double import EngineDouble
from tests.helpers.holdings import u64
from tests.helpers.recording_producer import RecordingProducer

BLOCK = 4
RANK = RankId(WorkerId(7), DpRank(0))
TIMEOUT_S = 20.0


class NotesDecoder:
    """Payloads are JSON lists: `["store", name, parent, tokens]` and `["remove", name]`."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[int | None] = {None}
        self._waiting: dict[int, list[tuple[int, list[int]]]] = {}

    def decode(self, payload: bytes) -> DecodedBatch:
        try:
            notes = json.loads(payload)
        except ValueError as exc:
            raise BadRecord("not_json", f"the payload is not JSON: {exc}") from exc
        events = [event for note in notes for event in self._events(*note)]
        return DecodedBatch(1_000, 0, tuple(events))

    def _events(self, what: str, name: int, parent: int | None = None, tokens: list[int] | None = None) -> Any:
        if what == "remove":
            return [BlocksRemoved(u64(name))]
        assert tokens is not None
        if parent not in self._known:
            assert parent is not None
            self._waiting.setdefault(parent, []).append((name, tokens))
            return []
        self._known.add(name)
        local = local_hashes(tokens, self._block_size, hash_seed(None))
        stored: list[EngineEvent] = [BlocksStored(None if parent is None else EngineHash(parent), u64(name), local)]
        for child, of_child in self._waiting.pop(name, []):
            stored += self._events("store", child, name, of_child)
        return stored


NOTES = Dialect("notes", counts_copies=False, computed_tokens_min=1, decoder=NotesDecoder)


def note(*notes: list[Any]) -> bytes:
    return json.dumps(notes).encode()


def started(engine: EngineDouble) -> Incarnation:
    return Incarnation(round(engine.started_s * 1_000_000))


def published(kafka: RecordingProducer) -> list[EngineBatch]:
    """The batches with a number of their own, without heartbeats and beginnings."""
    batches = [decode_batch(value) for value in kafka.values("kv-events")]
    return [batch for batch in batches if isinstance(batch.body, EngineEvents) and batch.sequence >= 0]


def feed(
    engine: EngineDouble,
    script: Callable[[RecordingProducer], None],
    recovered: RecoveredRank | None = None,
    dialect: Dialect = NOTES,
) -> tuple[RankFeed, RecordingProducer]:
    """Feed a rank of an engine that speaks a dialect while the script runs on a thread."""
    kafka = RecordingProducer()
    settings = Settings(block_size=BLOCK)
    address = EngineAddress(RANK.worker_id, engine.url, engine.events, engine.replay, model="m", dialect=dialect)

    async def main() -> RankFeed:
        def write(worker: Worker | None) -> None:
            loop.call_soon(handle.on_record, worker)  # the registry: every record is read back at once

        loop = asyncio.get_running_loop()
        handle = LeaseHandle(EngineLease("bridge", 600.0), write)
        handle.lease.want(Worker(RANK.worker_id, engine.url, "m", BLOCK))
        handle.on_end()
        context = zmq.asyncio.Context()
        async with aiohttp.ClientSession() as http:
            term = await handle.held()
            wiring = EngineWiring(settings, kafka, context, http, address, "m", handle, term, lambda _: 0)
            one = RankFeed(wiring, RANK.dp_rank, recovered)
            feeding = asyncio.create_task(one.run())
            try:
                await asyncio.to_thread(script, kafka)
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
        context.destroy(linger=0)
        return one

    return asyncio.run(main()), kafka


def await_batches(kafka: RecordingProducer, n: int) -> None:
    wait_for(lambda: len(published(kafka)) == n, TIMEOUT_S, f"{n} batches")
