"""The seam between the feed and the dialects, shown with a second dialect that exists only here.

The dialect "notes" is JSON, does not count copies, and buffers a block until its parent has arrived. It is fed through
a whole `RankFeed`, with real sockets and a producer that records.
"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
import xxhash

from streams.core.events import BlocksRemoved, BlocksStored, EngineBatch, EngineEvents
from streams.core.ids import Epoch
from streams.core.reducer.ordering import Progress
from streams.engines.dialects.auto import AUTO
from streams.engines.dialects.registry import DIALECTS
from streams.engines.feed_counters import NOT_INDEXED
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank
from streams.errors import BadRecord
from tests.helpers.dialect_feeds import (
    BLOCK,
    RANK,
    await_batches,
    feed,
    note,
    published,
    started,
)
from tests.helpers.engine_double import EngineDouble, offload_placeholder
from tests.helpers.recording_producer import RecordingProducer


def store(name: int, parent: int | None = None) -> list[Any]:
    return ["store", name, parent, [name] * BLOCK]


def contents(batch: EngineBatch) -> list[tuple[str, int | None, list[int]]]:
    assert isinstance(batch.body, EngineEvents)
    return [
        ("stored", event.parent, event.engine.tolist())
        if isinstance(event, BlocksStored)
        else ("removed", None, event.engine.tolist() if isinstance(event, BlocksRemoved) else [])
        for event in batch.body.events
    ]


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
