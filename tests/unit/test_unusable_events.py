"""What a feed publishes of payloads with unusable events: real sockets, and a producer that records."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import xxhash

from streams.core.events import BlocksRemoved, EngineBatch, RestatementChunk
from streams.core.ids import Epoch
from streams.core.reducer.ordering import Health, Progress
from streams.engines.dialects.vllm import VLLM
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank
from tests.helpers.dialect_feeds import BLOCK, RANK, await_batches, feed, published, started
from tests.helpers.engine_double import EngineDouble, offload_placeholder
from tests.helpers.plain_run_store import plain_holdings
from tests.helpers.recording_producer import RecordingProducer

HELD = [100 + n for n in range(3)]
TOKENS = list(range(1, 1 + BLOCK * len(HELD)))
STORE = ["BlockStored", HELD, None, TOKENS, BLOCK, None, "GPU"]
EVICT = ["BlockRemoved", HELD, "GPU"]
PLACEHOLDER = offload_placeholder(HELD[0])
PARTIAL = ["BlockStored", [999], HELD[-1], [7], 1, None, "GPU"]
WRONG_SIZE = ["BlockStored", [999], HELD[-1], [7] * 16, 16, None, "GPU"]


def batch_of(*events: Any) -> bytes:
    raw: bytes = msgpack.packb([1.0, list(events), 0])
    return raw


def fed(*payloads: bytes) -> tuple[list[EngineBatch], RecordingProducer]:
    """Feed payloads of an engine; return the batches that are published, one for each."""
    with EngineDouble() as engine:
        for payload in payloads:
            engine.send(payload)
        _, kafka = feed(engine, lambda kafka: await_batches(kafka, len(payloads)), dialect=VLLM)
    return published(kafka), kafka


def judged(batches: list[EngineBatch]) -> tuple[int, Progress]:
    """Return how many blocks an agent holds after these batches, and the rank's progress."""
    holdings = plain_holdings()
    for batch in batches:
        holdings.apply(batch, batch.body.events)  # type: ignore[union-attr]
    return holdings.runs.n_blocks(RANK), holdings.progress[RANK]


@pytest.mark.parametrize(
    ("other", "health"),
    [
        (PLACEHOLDER, Health.APPROXIMATE),
        (PARTIAL, Health.EXACT),
        (WRONG_SIZE, Health.DEGRADED),
        (["BlockMoved", [1]], Health.DEGRADED),
        (["BlockRemoved", [999], 5], Health.APPROXIMATE),
    ],
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_an_unusable_event_does_not_hide_the_evictions_of_its_batch(
    other: Any, health: Health, comes_first: bool
) -> None:
    """Nothing but an offloaded copy is held afterwards; the rank is exact only if the other event cannot matter."""
    events = (other, EVICT) if comes_first else (EVICT, other)
    batches, _ = fed(batch_of(STORE), batch_of(*events))
    assert [batch.sequence for batch in batches] == [0, 1]
    n_blocks, progress = judged(batches)
    n_offloaded = int(other is PLACEHOLDER and comes_first)  # a name can be resolved while the block is held
    assert (n_blocks, progress.health, progress.sequence) == (n_offloaded, health, 1)


def test_a_payload_that_cannot_be_decoded_keeps_its_number() -> None:
    """Its record has no events and is incomplete; otherwise the loss would be hidden until the next batch."""
    batches, kafka = fed(batch_of(STORE), b"\xc1")
    assert [(batch.sequence, batch.incomplete) for batch in batches] == [(0, False), (1, True)]
    n_blocks, progress = judged(batches)
    assert (n_blocks, progress.health, progress.n_gaps) == (3, Health.DEGRADED, 1)
    assert len(kafka.values("kv-dead-letters")) == 1


def test_a_removal_with_unusable_fields_removes_what_it_names() -> None:
    """Whichever tier it means, none of its blocks is reported any more."""
    batches, _ = fed(batch_of(STORE), batch_of(["BlockRemoved", HELD[:2], 5]))
    removed = [event for event in batches[1].body.events if isinstance(event, BlocksRemoved)]  # type: ignore[union-attr]
    assert removed and judged(batches)[0] == 1


def test_what_cannot_matter_makes_no_dead_letter() -> None:
    """With an offloading connector, every batch would be one."""
    _, kafka = fed(batch_of(STORE), batch_of(PLACEHOLDER, PARTIAL))
    assert kafka.values("kv-dead-letters") == []


@pytest.mark.parametrize(("events", "exact"), [((WRONG_SIZE, EVICT), False), ((PARTIAL, EVICT), True)])
def test_a_restatement_is_exact_only_if_the_ledger_lacks_nothing(events: tuple[Any, ...], exact: bool) -> None:
    """What the bridge could not use, it cannot restate either; also if the ledger was rebuilt from the engine."""
    for resumes in (False, True):
        with EngineDouble() as engine:
            payloads = [batch_of(STORE), batch_of(*events)]
            for payload in payloads:
                engine.send(payload)
            recovered = None
            if resumes:
                progress = Progress(
                    RANK, Epoch(started(engine), 0), 1, digest=xxhash.xxh3_64_intdigest(payloads[1]), model="m"
                )
                recovered = RecoveredRank(progress, Ledger(counts_copies=True))

            def script(kafka: RecordingProducer, engine: EngineDouble = engine, resumes: bool = resumes) -> None:
                engine.send(batch_of())
                await_batches(kafka, 1 if resumes else 3)

            one, _ = feed(engine, script, recovered, dialect=VLLM)
            chunks = one._writer.restatement(1)
        assert [type(chunk) for chunk in chunks] == [RestatementChunk]
        assert (chunks[0].exact, chunks[0].runs) == (exact, ()), resumes
