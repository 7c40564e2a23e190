"""Reasons for `degraded` that tests of trust do not cause: limits of a router, pooled blocks, and bookings.

Each test has a router of its own on a real Kafka. The stand-in for the agents writes what they would write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streams.core.block_facts.fact_sets import FactSets
from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import FeedState, MoeLabels
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import EngineHash, Epoch, Incarnation, RankId, SequenceHash
from streams.core.index.arenas import TreeLimits
from streams.core.index.tree_fold import TreeRunFold
from streams.core.reducer.ordering import Progress
from streams.cxl.pooled_view import PooledView
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block
from streams.kafka.clients import partition_of, producer
from streams.lab.engines.held_chains import runs_of_chain
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, RUN_KEY, encode_progress, encode_run
from streams.topics import topics
from tests.helpers.api import BLOCK_SIZE, PATIENCE_S, TOKENS, Agents, Api, rank_of, served
from tests.helpers.broker import BreakableKafka, broker_config

MODEL = "m"
CHAIN = [SequenceHash(block) for block in sequence_hashes(local_hashes(TOKENS, BLOCK_SIZE)).tolist()]
QUERY = {"moe_query": {"layer_id": 2, "expert_ids": [7], "expert_group": 3}}
LABELS = MoeLabels(2, 7, 3)

#: Partitions of the ranks: the owner of the first one is running, that of the second one is not.
OWNED, SILENT = 0, 1


class Rig:
    """A router, and the stand-in for the agents of its scope."""

    def __init__(self, api: Api, agents: Agents) -> None:
        self.api = api
        self.agents = agents
        self._kafka = producer(agents.settings)

    def ranks(self, n: int, partition: int = OWNED) -> list[RankId]:
        """Register n workers in a partition. Their ranks are exact once the partition has an owner."""
        ranks = [rank_of(worker_id) for worker_id in self.agents.worker_ids(n, partition)]
        for rank in ranks:
            body = {"url": "http://e", "model": MODEL, "block_size": BLOCK_SIZE}
            self.api.call("PUT", f"/workers/{rank.worker_id}", body).given()
            self.progress(rank)
        return ranks

    def progress(self, rank: RankId, **changes: Any) -> None:
        """Write a rank's progress record."""
        progress = Progress(rank, Epoch(Incarnation(1), 0), 0, model=MODEL, block_size=BLOCK_SIZE)
        self.agents.write(rank, PROGRESS_KEY.pack(rank), encode_progress(replace(progress, **changes)))

    def pool(self, rank: RankId, position: int) -> None:
        """Write the row of a block of the prompt that a rank has put into the pool."""
        placement = Placement(CxlMemoryState.CXL_POOLED, "p", 0, (), MODEL, Incarnation(1), 0)
        row = BlockRow(placement, CHAIN[position - 1] if position else None, position, EngineHash(position))
        settings = self.agents.settings
        self._kafka.produce(
            topics(settings).cxl_changelog.name,
            key=block_key(BlockKey(CHAIN[position], rank, "p")),
            value=encode_block(row),
            partition=partition_of(rank.worker_id, settings.partitions),
        )
        assert self._kafka.flush(PATIENCE_S) == 0

    def answer(self, override: Mapping[str, Any] | None = None) -> str:
        """The reason of an answer, or its mode if it has none."""
        answer = self.api.route(
            model=MODEL, token_ids=TOKENS, update_states=False, router_config_override=dict(override or {})
        )
        return str(answer.get("degraded_because", answer["mode"]))

    def becomes(self, wanted: str, override: Mapping[str, Any] | None = None) -> None:
        """Wait until answers have a reason or a mode."""
        wait_for(lambda: self.answer(override) == wanted, PATIENCE_S, f"an answer: {wanted}")


@contextmanager
def rig_of(scope: Settings) -> Iterator[Rig]:
    """Start the router of a rig."""
    settings = replace(scope, block_size=BLOCK_SIZE, stale_after_ms=2000)
    with served(settings) as api:
        agents = Agents(settings, fresh=[OWNED])
        with agents.keeping_fresh():
            yield Rig(api, agents)


@pytest.mark.first_ring("over_capacity")
def test_a_rank_whose_blocks_the_index_could_not_take_is_over_capacity(
    scope: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a record was dropped, answers say so, until the engine begins a new epoch."""
    limits = TreeLimits(blocks_max=1024)
    monkeypatch.setattr(TreeRunFold.__init__, "__kwdefaults__", {"blocks_hint": 0, "limits": limits})
    with rig_of(scope) as rig:
        (rank,) = rig.ranks(1)
        rig.becomes("exact")
        rig.agents.hold(rank, range(2 * limits.blocks_max * BLOCK_SIZE))
        rig.becomes("over_capacity")
        rig.progress(rank, epoch=Epoch(Incarnation(2), 0))
        rig.becomes("exact")


@pytest.mark.first_ring("labels_over_capacity")
def test_a_rank_whose_labels_a_router_could_not_take_is_degraded_for_requests_that_query_them(
    scope: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a query, the same ranks are exact."""
    monkeypatch.setattr(FactSets._number_of, "__defaults__", (1,))  # the labels of one rank
    with rig_of(scope) as rig:
        for rank in rig.ranks(2):
            for run in runs_of_chain(rank, local_hashes(TOKENS, BLOCK_SIZE)):
                labelled = replace(run, moe=dict.fromkeys(range(len(run.sequence)), LABELS))
                rig.agents.write(rank, RUN_KEY.pack(run.key), encode_run(labelled))
        rig.becomes("labels_over_capacity", QUERY)
        rig.becomes("exact")


@pytest.mark.first_ring("pooled_owner_silent", "pooled_owner_behind", "pooled_rank_unknown")
def test_an_answer_that_uses_pooled_blocks_is_no_better_than_what_is_known_of_them(scope: Settings) -> None:
    """The rank that pooled them is not eligible. Its partition's owner and its own feed count nevertheless."""
    with rig_of(scope) as rig:
        (member,) = rig.ranks(1)
        rig.api.call("PUT", "/pools/p", {"members": [member.worker_id]}).given()
        rig.becomes("exact")
        owner = rank_of(*rig.agents.worker_ids(1, SILENT))
        rig.pool(owner, 0)
        rig.becomes("pooled_owner_silent")
        assert rig.answer({"cxl_score_weight": 0.0}) == "exact"
        rig.agents.fresh = [OWNED, SILENT]
        rig.becomes("exact")
        rig.progress(owner, feed=FeedState.CATCHING_UP)
        rig.becomes("pooled_rank_unknown")
        rig.progress(owner, sequence=1)
        rig.becomes("exact")
        rig.agents.fresh = [OWNED]
        rig.agents.state_partition(SILENT, behind_ms=rig.agents.settings.behind_after_ms + 1)
        rig.becomes("pooled_owner_behind")


@pytest.mark.first_ring("pooled_over_capacity")
def test_pooled_blocks_that_a_router_could_not_take_make_answers_degraded(
    scope: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row beyond the limit is dropped."""
    monkeypatch.setattr(PooledView.__init__, "__defaults__", (None, 2))
    with rig_of(scope) as rig:
        member, owner = rig.ranks(2)
        rig.api.call("PUT", "/pools/p", {"members": [member.worker_id]}).given()
        for position in (0, 1):
            rig.pool(owner, position)
        rig.becomes("exact")
        rig.pool(owner, 2)
        rig.becomes("pooled_over_capacity")


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[BreakableKafka]:
    """Give a broker that the test may pause."""
    broker = BreakableKafka(broker_config(tmp_path / "kafka"))
    yield broker
    broker.down()


@pytest.mark.first_ring("approximate", "bookings_not_in_sync")
def test_answers_say_that_bookings_are_not_in_sync_while_kafka_does_not_answer(own_kafka: BreakableKafka) -> None:
    """A router without events has nothing else to be degraded for."""
    settings = Settings(kafka=own_kafka.up().bootstrap, partitions=2, kv_events=False, stale_after_ms=500)
    with served(settings) as api:
        rig = Rig(api, Agents(settings, fresh=()))
        api.call("PUT", "/workers/1", {"url": "http://e", "model": MODEL, "block_size": BLOCK_SIZE}).given()
        rig.becomes("approximate")
        own_kafka.pause()
        rig.becomes("bookings_not_in_sync")
        own_kafka.resume()
        rig.becomes("approximate")
