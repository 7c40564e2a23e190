"""What damaged event payloads may do to a rank: one dead letter each, and nothing that a clear does not end.

What lives here: a rank's decoder and writer without an engine, and its check. What must not: damaging payloads
(tests/helpers/event_mutations.py), and real bridges (tests/trust/test_damaged_events.py).
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import xxhash

from streams.core.events import BEFORE_FIRST, AllBlocksCleared, BlocksRemoved, BlocksStored, EngineEvents
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.engines.dead_letters import of_payload
from streams.engines.dialects.interface import UnusableEvent, undecodable
from streams.engines.dialects.registry import DIALECTS
from streams.engines.rank_writer import RankWriter
from streams.errors import BadRecord
from streams.kafka.records import decode_batch
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.event_mutations import Mutator
from tests.helpers.folded_index import FoldedIndex, UnknownParent
from tests.witness import BLOCK_SIZE

SETTINGS = Settings(block_size=BLOCK_SIZE)
EVENTS_TOPIC = topics(SETTINGS).kv_events.name
RANK = RankId(WorkerId(1), DpRank(0))

#: Undamaged payloads before the first damaged one, so that the dialect is recognised for good.
N_FIRST = 10


class _Log:
    """Takes the place of Kafka's client, and keeps what a writer produces."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def produce(self, topic: str, *, key: bytes, value: bytes, on_delivery: Any) -> None:  # noqa: ARG002
        if topic == EVENTS_TOPIC:
            self.records.append(value)

    def poll(self, timeout_s: float) -> int:  # noqa: ARG002
        return 0


class FuzzedRank:
    """One rank of an engine: its payloads are decoded, written as records, and indexed from these records.

    dialect: what the engine speaks. refused: how many payloads or events could not be used, by reason.
    """

    def __init__(self, dialect: str) -> None:
        self._dialect = dialect
        self._log = _Log()
        self.refused: Counter[str] = Counter()
        self._decoder = DIALECTS["auto"].decoder(BLOCK_SIZE)
        self._writer = RankWriter(SETTINGS, self._log, RANK, "m", Incarnation(1), counts_copies=True)  # type: ignore[arg-type]
        self._index = FoldedIndex()
        self._sequence = BEFORE_FIRST

    def send(self, payload: bytes) -> None:
        """Take one payload as a feed does. Raises nothing, whatever the payload is."""
        self._sequence += 1
        digest = xxhash.xxh3_64_intdigest(payload)
        try:
            decoded = self._decoder.decode(payload)
        except BadRecord as exc:
            decoded = undecodable(exc, 0)
        if decoded.dialect is not None:
            self._writer.count_copies(decoded.dialect.counts_copies)
        unusable = list(decoded.unusable)
        try:
            self._writer.write(
                self._sequence,
                digest,
                decoded.emitted_at_ms,
                decoded.events,
                decoded.n_unindexed,
                is_incomplete=decoded.is_incomplete,
            )
        except BadRecord as exc:
            unusable.append(UnusableEvent(None, exc))
        if unusable:
            of_payload(self._sequence, len(payload), digest, unusable)
        self.refused.update(each.error.reason for each in unusable)
        self._index_records()

    def _index_records(self) -> None:
        """Apply the records to an index, as the tables do. Every batch has one, whatever its payload was."""
        numbers: list[int] = []
        for record in self._log.records:
            batch = decode_batch(record)
            assert isinstance(batch.body, EngineEvents)
            numbers.append(batch.sequence)
            for event in batch.body.events:
                match event:
                    case BlocksStored():
                        with suppress(UnknownParent):
                            self._index.store(RANK, event.tier, event.parent, event.engine, event.local)
                    case BlocksRemoved():
                        self._index.remove(RANK, event.tier, event.engine)
                    case AllBlocksCleared():
                        self._index.clear(RANK)
        assert numbers == [self._sequence]
        self._log.records.clear()

    def check(self, payload: bytes) -> None:
        """Send an undamaged payload that begins with a clear; the index then has exactly what an engine holds."""
        self.send(payload)
        fresh = FuzzedRank(self._dialect)
        fresh.send(payload)
        assert set(self._index.members()) == set(fresh._index.members())
        assert self._writer.ledger.complete
        assert len(self._writer.ledger) == len(fresh._writer.ledger)


def fuzz(found: dict[str, list[bytes]], seed: int, n_messages: int, n_between_checks: int) -> Counter[str]:
    """Send damaged messages of all dialects in turn; return how many could not be used, by reason.

    found: undamaged payloads by dialect, each of which begins with a clear.
    """
    refused: Counter[str] = Counter()
    mutator, dialects, n_sent = Mutator(seed), sorted(found), 0
    while n_sent < n_messages:
        dialect = dialects[n_sent // n_between_checks % len(dialects)]
        rank = FuzzedRank(dialect)
        usual = mutator.pick(found[dialect])
        for _ in range(N_FIRST):
            rank.send(usual)
        for _ in range(min(n_between_checks, n_messages - n_sent)):
            rank.send(mutator.mutated(mutator.pick(found[dialect])))
            n_sent += 1
        rank.check(usual)
        refused.update(rank.refused)
    return refused
