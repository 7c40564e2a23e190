"""The seam between the feed and the dialects, shown with a second dialect that exists only here.

The dialect "notes" is JSON, does not count copies, and buffers a block until its parent has arrived. It is fed through
a whole `RankFeed`, with real sockets and a producer that records.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import msgpack
import pytest
import xxhash
import zmq.asyncio

from streams.codec import decode_batch
from streams.core.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvents
from streams.core.hashing import hash_seed, local_hashes
from streams.core.ids import DpRank, EngineHash, Epoch, Incarnation, RankId, WorkerId
from streams.core.reducer.ordering import Progress
from streams.core.workers import Worker
from streams.engines.address import EngineAddress
from streams.engines.dialects.auto import AUTO
from streams.engines.dialects.interface import DecodedBatch, Dialect, EngineEvent
from streams.engines.dialects.registry import DIALECTS
from streams.engines.feed import RankFeed
from streams.engines.feed_counters import NOT_INDEXED
from streams.engines.lease import EngineLease
from streams.engines.lease_handle import LeaseHandle
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank
from streams.engines.wiring import EngineWiring
from streams.errors import BadRecord
from streams.settings import Settings
from streams.waiting import wait_for
from tests.helpers.engine_double import EngineDouble, offload_placeholder
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


NOTES = Dialect("notes", counts_copies=False, decoder=NotesDecoder)


def note(*notes: list[Any]) -> bytes:
    return json.dumps(notes).encode()


def store(name: int, parent: int | None = None) -> list[Any]:
    return ["store", name, parent, [name] * BLOCK]


def started(engine: EngineDouble) -> Incarnation:
    return Incarnation(round(engine.started_s * 1_000_000))


def published(kafka: RecordingProducer) -> list[EngineBatch]:
    """The batches with a number of their own, without heartbeats and beginnings."""
    batches = [decode_batch(value) for value in kafka.values("kv-events")]
    return [batch for batch in batches if isinstance(batch.body, EngineEvents) and batch.sequence >= 0]


def contents(batch: EngineBatch) -> list[tuple[str, int | None, list[int]]]:
    assert isinstance(batch.body, EngineEvents)
    return [
        ("stored", event.parent, event.engine.tolist())
        if isinstance(event, BlocksStored)
        else ("removed", None, event.engine.tolist() if isinstance(event, BlocksRemoved) else [])
        for event in batch.body.events
    ]


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


def test_a_second_dialect_reaches_kafka_through_the_feed() -> None:
    """The feed decodes its payloads with its state, counts no copies, and publishes the number of a refused payload."""
    with EngineDouble() as engine:
        engine.send(note(store(12, 11)))  # its parent arrives in the next payload
        engine.send(note(store(11)))
        engine.send(note(store(11), store(12, 11)))  # a repetition, not a second copy
        engine.send(b"{")
        engine.send(note(["remove", 12]))
        one, kafka = feed(engine, lambda kafka: await_batches(kafka, 5))
    batches = published(kafka)
    assert [(batch.sequence, batch.incomplete) for batch in batches] == [
        (0, False),
        (1, False),
        (2, False),
        (3, True),
        (4, False),
    ]
    assert [contents(batch) for batch in batches] == [
        [],
        [("stored", None, [11]), ("stored", 11, [12])],
        [],
        [],
        [("removed", None, [12])],
    ]
    (letter,) = map(json.loads, kafka.values("kv-dead-letters"))
    assert (letter["sequence"], letter["bytes"], letter["unusable"][0]["reason"]) == (3, 1, "not_json")
    headers = dict(next(record["headers"] for topic, record in kafka.records if topic.endswith("dead-letters")))
    assert headers["kvstreams.reason"] == b"not_json"
    counts = one.counts()
    assert (counts["batches_published"], counts["dead_letters"], counts["incarnations"]) == (5, 1, 1)


def test_a_decoders_state_is_rebuilt_from_the_engines_batches_when_a_bridge_resumes() -> None:
    """A block that an earlier bridge's decoder had buffered is published when its parent arrives."""
    with EngineDouble() as engine:
        first = note(store(12, 11))
        engine.send(first)
        engine.send(note(store(11)))
        digest = xxhash.xxh3_64_intdigest(first)
        progress = Progress(RANK, Epoch(started(engine), 0), 0, digest=digest, model="m")
        recovered = RecoveredRank(progress, Ledger(counts_copies=False))
        one, kafka = feed(engine, lambda kafka: await_batches(kafka, 1), recovered)
    (batch,) = published(kafka)
    assert batch.sequence == 1
    assert contents(batch) == [("stored", None, [11]), ("stored", 11, [12])]
    assert (one.counts()["resumed"], one.counts()["resumed_from_table"]) == (1, 0)


def test_a_new_incarnation_gets_a_new_decoder() -> None:
    """A block that was buffered in the old incarnation is not held in the new one."""
    with EngineDouble() as engine:
        engine.send(note(store(12, 11)))

        def restart(kafka: RecordingProducer) -> None:
            await_batches(kafka, 1)
            engine.restart()
            engine.send(note(store(11)))
            await_batches(kafka, 2)

        one, kafka = feed(engine, restart)
    old, new = published(kafka)
    assert new.incarnation > old.incarnation
    assert contents(new) == [("stored", None, [11])]
    assert one.counts()["incarnations"] == 2


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_registered_dialect_refuses_random_bytes_with_a_reason(name: str) -> None:
    """Every decoder raises BadRecord for a payload that it cannot read, and decodes the next one."""
    decoder = DIALECTS[name].decoder(BLOCK)
    for _ in range(2):
        with pytest.raises(BadRecord) as caught:
            decoder.decode(b"\xc1")
        assert caught.value.reason


def sglang(*events: dict[str, Any]) -> bytes:
    raw: bytes = msgpack.packb([1.0, list(events), 0])
    return raw


def sglang_store(first: int, parent: int | None = None) -> dict[str, Any]:
    tokens = list(range(first, first + BLOCK))
    fields = {"block_hashes": [-first], "parent_block_hash": parent, "token_ids": tokens, "block_size": BLOCK}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU"}


def test_a_recognised_dialect_is_logged_once_and_counts_copies_as_it_does(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang is recognised from its bytes, so a repeated store is no copy; and again after a restart of the engine."""
    removal = {"type": "BlockRemoved", "block_hashes": [-10], "medium": "GPU"}
    payloads = [sglang(sglang_store(10)), sglang(sglang_store(10)), sglang(removal)]
    with caplog.at_level("INFO", "streams.engines"), EngineDouble() as engine:
        for payload in payloads:
            engine.send(payload)

        def restart(kafka: RecordingProducer) -> None:
            await_batches(kafka, 3)
            engine.restart()
            for payload in payloads:
                engine.send(payload)
            await_batches(kafka, 6)

        feed(engine, restart, dialect=AUTO)[0].counts()
        _, kafka = feed(engine, lambda kafka: await_batches(kafka, 3), dialect=AUTO)
    name = (1 << 64) - 10
    assert [contents(batch) for batch in published(kafka)] == [
        [("stored", None, [name])],
        [],
        [("removed", None, [name])],
    ]
    lines = [record.getMessage() for record in caplog.records if "in the dialect" in record.getMessage()]
    assert len(lines) == 2 and "sglang" in lines[0]  # one for each of the two feeds


def test_what_is_not_indexed_is_counted_by_reason() -> None:
    """The counters of a feed have each reason under its name."""
    with EngineDouble() as engine:
        remote = ["BlockStored", [1], None, [1] * BLOCK, BLOCK, None, "GPU", None, None, 0, None, None, "REMOTE"]
        twice = ["BlockStored", [2, 2], None, [1] * (2 * BLOCK), BLOCK, None, "GPU"]
        too_large = ["BlockStored", [3], None, [1] * (2 * BLOCK), 2 * BLOCK, None, "GPU"]
        unknown = offload_placeholder(77)
        engine.publish(remote, twice, too_large, unknown)
        one, _ = feed(engine, lambda kafka: await_batches(kafka, 1), dialect=AUTO)
    counts = {name: n for name, n in one.counts().items() if name.startswith(NOT_INDEXED)}
    assert counts == {
        f"{NOT_INDEXED}{reason}": 1
        for reason in ("locality", "duplicate_hash", "block_size", "placeholder", "unplaced")
    }
