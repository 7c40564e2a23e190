"""The simulated engine in every dialect: what a bridge's decoder and ledger make of it is what the engine holds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from streams.core.hashing import pack_tokens
from streams.engines.dialects.auto import AutoDecoder
from streams.engines.dialects.registry import DIALECTS
from streams.engines.ledger import Ledger
from streams.errors import BadRecord, SettingsError
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.engine_messages import KvCleared, KvReused, KvStored, ModelRequest
from streams.lab.engines.event_publisher import (
    BlockEvent,
    EventDialect,
    EventPublisher,
    PublisherConfig,
    WireForm,
    damaged,
)
from streams.lab.engines.model import EngineModel
from tests.helpers.reference import chain_hashes

BLOCK = 4
FORMS: list[tuple[EventDialect, int]] = [
    ("array", 0),
    ("map", 0),
    ("map_batch", 0),
    ("sglang_array", 0),
    ("sglang_array", 1),
    ("sglang_map", 2),
    ("sglang_map", 1),
    ("trtllm", 0),
    ("trtllm", 2),
]


class Published:
    """Payloads that an EventPublisher sends, decoded as a bridge does it. held: sequence hashes in the ledger."""

    def __init__(self, form: WireForm, damage_every: int = 0) -> None:
        self._publisher = EventPublisher(form, "127.0.0.1", PublisherConfig(damage_every=damage_every))
        self._n_read = 0
        self.decoder = AutoDecoder(BLOCK)
        self.ledger = Ledger(DIALECTS["auto"].counts_copies)
        self.refused = self.unusable = 0

    def publish(self, events: list[BlockEvent]) -> None:
        self._publisher.publish(events)
        for _, payload in list(self._publisher._buffer)[self._n_read :]:
            self._n_read += 1
            try:
                batch = self.decoder.decode(payload)
            except BadRecord:
                self.refused += 1
                continue
            self.unusable += len(batch.unusable)
            if batch.dialect is not None:
                self.ledger.count_copies(batch.dialect.counts_copies)
            for event in batch.events:
                self.ledger.apply(event, may_wait=True)  # type: ignore[arg-type]
            self.ledger.end_batch()

    def held(self) -> set[int]:
        return {block for run in self.ledger.restated() for block in chain_hashes(run.local.tolist(), run.parent)}

    def close(self) -> None:
        self._publisher.close()


def kv_events(outputs: list[Any]) -> list[BlockEvent]:
    return [each for each in outputs if type(each).__name__.startswith("Kv")]


@pytest.mark.parametrize(("event_dialect", "page_size"), FORMS)
def test_what_is_read_of_an_engine_is_what_it_holds(event_dialect: EventDialect, page_size: int) -> None:
    """Prompts with common prefixes on a crowded cache: stores, copies, evictions and a clear, in every dialect."""
    rng = random.Random(7)
    model = EngineModel(EngineConfig(block_size=BLOCK, n_blocks=24))
    form = WireForm(BLOCK, event_dialect=event_dialect, page_size=page_size, lora_names=("poet",))
    published = Published(form)
    truth = EngineTruth()
    try:
        now_ms = 0.0
        for number in range(60):
            n_tokens = rng.randrange(4, 40)
            tokens = pack_tokens([rng.randrange(2) for _ in range(n_tokens)])
            model.submit(now_ms, ModelRequest(str(number), tokens, 1 + rng.randrange(6)))
            outputs: list[Any] = []
            while (due := model.next_event_ms()) is not None:
                now_ms = max(now_ms, due)
                outputs += model.advance(now_ms)
            events = kv_events(outputs)
            truth.apply(events)
            published.publish(events)
            if published.ledger.removed_early:
                # Copies of vLLM's that are stored at the root are not counted, and the rank is approximate.
                assert not form.is_paged and published.held() <= truth.held(), f"request {number}"
            else:
                assert published.held() == truth.held(), f"request {number}"
        assert len(truth.held()) > 5
        published.publish([KvCleared(now_ms)])
        assert published.held() == set()
        assert (published.refused, published.unusable, published.ledger.complete) == (0, 0, True)
    finally:
        published.close()


class EngineTruth:
    """What the engine's own events say that it holds: names with their copies."""

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.sequence: dict[int, int] = {}

    def apply(self, events: list[BlockEvent]) -> None:
        for event in events:
            match event:
                case KvStored():
                    for name, block in zip(event.engine.tolist(), event.sequence.tolist(), strict=True):
                        self.copies[name] = self.copies.get(name, 0) + 1
                        self.sequence[name] = block
                case KvReused():
                    pass
                case KvCleared():
                    self.copies.clear()
                case _:
                    for name in event.engine.tolist():
                        self.copies[name] -= 1

    def held(self) -> set[int]:
        return {self.sequence[name] for name, n in self.copies.items() if n}


@pytest.mark.parametrize(("event_dialect", "page_size"), FORMS)
def test_damaged_batches_are_refused_or_unusable_and_the_view_heals_with_a_clear(
    event_dialect: EventDialect, page_size: int
) -> None:
    """Every third batch is damaged; after the engine clears its cache, undamaged batches are read again."""
    published = Published(WireForm(BLOCK, event_dialect=event_dialect, page_size=page_size), damage_every=3)
    rng = np.random.default_rng(3)

    def store(first: int) -> KvStored:
        tokens = pack_tokens(list(range(first, first + BLOCK)))
        name = rng.integers(1, 1 << 63, 1, dtype=np.uint64)
        return KvStored(0.0, None, name, name, name, tokens, 0, None)

    try:
        for number in range(29):
            published.publish([store(1000 * number)])
        assert 0 < published.refused + published.unusable <= 9
        published.publish([KvCleared(0.0)])  # the 30th batch is damaged
        published.publish([KvCleared(0.0)])
        published.publish([store(5)])
        assert len(published.held()) == 1
    finally:
        published.close()


def test_damage_changes_the_payload_in_three_ways() -> None:
    """A byte is changed, the rest cut off, or a byte inserted; the same number damages in the same way."""
    payload = bytes(range(50))
    results = [damaged(payload, number) for number in range(3)]
    assert [len(result) - len(payload) for result in (results[0], results[2])] == [0, 1]
    assert len(results[1]) < len(payload) and payload.startswith(results[1])
    assert results == [damaged(payload, number) for number in range(3)]


@pytest.mark.parametrize("wrong", [{"page_size": 3, "event_dialect": "trtllm"}, {"page_size": 2}])
def test_a_page_size_that_no_engine_has_is_refused(wrong: dict[str, Any]) -> None:
    """It must divide the block size, and vLLM has none."""
    with pytest.raises(SettingsError, match="page_size"):
        WireForm(BLOCK, **wrong)
