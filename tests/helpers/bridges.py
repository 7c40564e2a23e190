"""Bridges and engines on a real Kafka: starting them, and reading what they published."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from streams.core.events import (
    EngineBatch,
    EngineEvents,
    RestatementChunk,
)
from streams.core.ids import DpRank, RankId, Tier, WorkerId
from streams.kafka.clients import Record, partition_of
from streams.kafka.records import decode_batch
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.processes import Child
from streams.lab.stack import Engine, RouterProcess, Stack, get_json
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.engine_double import EngineDouble
from tests.helpers.invariants import members_of
from tests.helpers.plain_run_store import plain_holdings
from tests.helpers.support import VISIBLE_TIMEOUT_S

SMALL = EngineConfig(block_size=16, n_blocks=64)


def complete(engine: Engine, tokens: list[int], n_output_tokens: int = 2) -> None:
    body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": n_output_tokens}).encode()
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30.0) as response:
        assert response.status == 200


def health(router: RouterProcess) -> dict[int, str]:
    return {rank["worker_id"]: rank["health"] for rank in get_json(f"{router.url}/state")["ranks"]}


def incarnation(router: RouterProcess, worker_id: int) -> int:
    ranks = get_json(f"{router.url}/state")["ranks"]
    return next(int(rank["incarnation"]) for rank in ranks if rank["worker_id"] == worker_id)


WORKER_ID = WorkerId(7)
RANK = RankId(WORKER_ID, DpRank(0))

#: Short, so that a rival takes over soon, but long enough for processes that share two cores with five others.
LEASE_S = 3.0


@dataclass
class KafkaLog:
    """The batches of one rank in kv-events, folded as an agent would fold the events among them."""

    batches: list[EngineBatch] = field(default_factory=list)

    @property
    def facts(self) -> set[tuple[Tier, int]]:
        holdings = plain_holdings()
        for batch in self.batches:
            if isinstance(batch.body, EngineEvents):
                holdings.apply(batch, batch.body.events)
        return {(tier, int(block)) for _, tier, block in members_of(holdings.runs)}

    def numbers(self, incarnation: int | None = None) -> list[int]:
        chosen = self.incarnations[-1] if incarnation is None else incarnation
        return [
            batch.sequence
            for batch in self.batches
            if isinstance(batch.body, EngineEvents) and batch.incarnation == chosen and batch.sequence >= 0
        ]

    @property
    def incarnations(self) -> list[int]:
        return list(dict.fromkeys(int(batch.incarnation) for batch in self.batches))

    @property
    def chunks(self) -> list[EngineBatch]:
        return [batch for batch in self.batches if isinstance(batch.body, RestatementChunk)]


def read_log(settings: Settings) -> KafkaLog:
    seen = KafkaLog()

    def take(records: list[Record]) -> None:
        seen.batches += [decode_batch(record.value) for record in records]

    read_to_end(settings, topics(settings).kv_events.name, partition_of(WORKER_ID, settings.partitions), None, take)
    return seen


def await_log(settings: Settings, condition: Callable[[KafkaLog], bool], what: str) -> KafkaLog:
    last = [KafkaLog()]

    def reached() -> bool:
        last[0] = read_log(settings)
        return condition(last[0])

    wait_for(reached, VISIBLE_TIMEOUT_S, what, 0.1)
    return last[0]


def bridge_to(stack: Stack, engine: EngineDouble) -> Child:
    stand_in = Engine(int(WORKER_ID), None, engine.url, engine.events, engine.replay)  # type: ignore[arg-type]
    return stack.bridge([stand_in])
