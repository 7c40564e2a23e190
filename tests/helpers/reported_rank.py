"""One rank that reports its cache, from an engine's payloads to what a router may answer, without Kafka.

What lives here: a decoder, the rank's writer, the reducer with its maintenance, and an index of what is published. What
must not: the payloads (each test), sockets and order (feeds).
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np

from streams.core.events import BEFORE_FIRST, EngineBatch, EngineEvents
from streams.core.hashing import Tokens, hash_seed, local_hashes, salted_seed
from streams.core.ids import DpRank, Incarnation, RankId, Tier, WorkerId
from streams.core.reducer.maintenance import MAINTENANCE_TICK_MS, RankMaintenance
from streams.core.reducer.ordering import Health, Verdict
from streams.engines.dialects.interface import Decoder, undecodable
from streams.engines.dialects.registry import DIALECTS
from streams.engines.rank_writer import RankWriter
from streams.engines.recovery import ledger_of
from streams.errors import WRONG_BLOCK_SIZE, BadRecord
from streams.kafka.records import decode_batch
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.folded_index import FoldedIndex, UnknownParent, apply_event
from tests.helpers.plain_run_store import plain_holdings

RANK = RankId(WorkerId(1), DpRank(0))

BLOCK = 16


def tokens_from(first: int, n: int) -> list[int]:
    """n tokens, counted from the first one."""
    return list(range(first, first + n))


def store(hashes: list[int], parent: int | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    """One BlockStored event of vLLM."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def as_array(event: dict[str, Any]) -> list[Any]:
    """An event as vLLM before 0.26 writes it, a store up to its extra keys, or its cache group if it has one."""
    tag = event["type"]
    if tag == "BlockRemoved":
        return [tag, event["block_hashes"], event["medium"], event.get("group_idx")]
    if tag != "BlockStored":
        return [tag]
    names = [*list(store([], None, []))[1:], "extra_keys", *(["group_idx"] if "group_idx" in event else [])]
    return [tag, *(event.get(name) for name in names)]


class _Log:
    """Takes the place of Kafka's client, and keeps the batches that a writer produces."""

    def __init__(self) -> None:
        self.batches: list[EngineBatch] = []

    def produce(self, topic: str, *, key: bytes, value: bytes, on_delivery: Any) -> None:  # noqa: ARG002
        if topic == topics(Settings()).kv_events.name:
            self.batches.append(decode_batch(value))

    def poll(self, timeout_s: float) -> int:  # noqa: ARG002
        return 0


class ReportedRank:
    """A rank whose engine sends events, and what is known of it.

    not_indexed: what was not indexed, by reason. wrong_sizes: block sizes that events showed instead of the scope's.
    n_resyncs: restatements that the partition's owner has requested.
    """

    def __init__(self, dialect: str = "vllm") -> None:
        self._dialect = DIALECTS[dialect]
        self._log = _Log()
        self._sequence = BEFORE_FIRST
        self._holdings = plain_holdings()
        self._maintenance = RankMaintenance(self._holdings, grace_ms=10_000, clear_degraded_after_ms=0)
        self._now_ms = 0
        self._index = FoldedIndex()
        self.not_indexed: Counter[str] = Counter()
        self.wrong_sizes: set[object] = set()
        self.n_resyncs = 0
        self._start()

    def _start(self) -> None:
        self._decoder: Decoder = self._dialect.decoder(BLOCK)
        counts_copies = self._dialect.counts_copies
        self._writer = RankWriter(Settings(), self._log, RANK, "m", Incarnation(1), counts_copies)  # type: ignore[arg-type]

    def restart_bridge(self) -> None:
        """Continue with another bridge, which has the table and none of the engine's earlier batches."""
        ledger = self._writer.ledger
        is_approximate = self.health is Health.APPROXIMATE
        self._start()
        table = ledger_of(
            ledger.restated(), ledger.complete, counts_copies=self._dialect.counts_copies, removed_early=is_approximate
        )
        self._writer.resume(self._sequence, 0, table)

    def lose_batch(self) -> None:
        """Let one of the engine's batches be missing, as its numbers show."""
        self._sequence += 1
        self._writer.ledger.lost_events()

    def send(self, *events: Any) -> None:
        """Take one batch of the engine."""
        self.send_payload(msgpack.packb([1.0, list(events), 0]))

    def send_payload(self, payload: bytes) -> None:
        """Take one payload of the engine."""
        self._sequence += 1
        try:
            decoded = self._decoder.decode(payload)
        except BadRecord as exc:
            decoded = undecodable(exc, 0)
        before = self._writer.ledger.skipped.counts.copy()
        self._writer.write(
            self._sequence,
            self._sequence + 100,
            0,
            decoded.events,
            decoded.n_unindexed,
            is_incomplete=decoded.is_incomplete,
        )
        self.not_indexed.update(decoded.not_indexed)
        self.not_indexed.update(self._writer.ledger.skipped.counts - before)
        errors = [unusable.error for unusable in decoded.unusable]
        self.wrong_sizes |= {error.detail.get("block_size") for error in errors if error.reason == WRONG_BLOCK_SIZE}
        for batch in self._log.batches:
            assert isinstance(batch.body, EngineEvents)
            verdict = self._holdings.apply(batch, batch.body.events)
            assert verdict in (Verdict.APPLIED, Verdict.GAP)
            for event in batch.body.events:
                with suppress(UnknownParent):
                    apply_event(self._index, RANK, event)
        self._log.batches.clear()
        self._now_ms += MAINTENANCE_TICK_MS
        actions = self._maintenance.tick(self._now_ms, 0, lambda: self._now_ms)
        self.n_resyncs += actions.counts["resync_requested"]
        self._holdings.take_changes(1000)

    @property
    def health(self) -> Health:
        """How far the rank's answers can be trusted."""
        return self._holdings.progress[RANK].health

    @property
    def is_complete(self) -> bool:
        """Whether the ledger has all events that the engine reported."""
        return self._writer.ledger.complete

    def blocks_in(self, tier: Tier) -> int:
        """Return how many blocks the ledger has in a tier."""
        return sum(len(run.engine) for run in self._writer.ledger.restated() if run.tier is tier)

    def answer(self, tokens: Tokens, salt: str | None = None, lora: str | None = None) -> tuple[int, Health]:
        """Return a prompt's overlap in blocks, and how far it can be trusted."""
        seed = hash_seed(lora)
        local = local_hashes(np.asarray(tokens, dtype=np.uint32), BLOCK, seed, first_seed=salted_seed(seed, salt))
        return int(self._index.find_matches(local).scores.get(RANK, 0)), self.health
