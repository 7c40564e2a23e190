"""The digests by which a router is compared with the topics: equal for equal knowledge, and changed by any fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import MoeLabels
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.core.loads.bookings import Booking, BookingId
from streams.core.reducer.ordering import Progress
from streams.core.workers import Worker
from streams.cxl.records import BlockKey, BlockRow, Placement, block_key, encode_block
from streams.kafka.clients import worker_key
from streams.kafka.records import encode_worker
from streams.lab.engines.held_chains import FIRST_EPOCH, runs_of_chain
from streams.replay.rebuilding import Replay
from streams.router_api.deciding.router import Router
from streams.router_api.deciding.state_digests import copy_state, digests_of, facts_of
from streams.settings import Settings
from streams.tables.records import PROGRESS_KEY, RUN_KEY, encode_progress, encode_run
from tests.helpers.reference import u64

RANK = RankId(WorkerId(7), DpRank(0))
LOCAL = u64([11, 12, 13, 14])
(RUN,) = runs_of_chain(RANK, LOCAL)
LABELLED = replace(RUN, moe={1: MoeLabels(2, None, None)})
ROW = BlockKey(SequenceHash(99), RANK, "rack1")
PLACEMENT = Placement(CxlMemoryState.CXL_POOLED, "rack1", 0, (WorkerId(1), WorkerId(2)), "m", Incarnation(1), 5)
BOOKING = Booking(RANK, "m", 64, b"", 0, 4)

Digests = dict[str, Any]


class Known:
    """A router that folds without Kafka."""

    def __init__(self) -> None:
        self.router = Router(Settings(kafka="127.0.0.1:9", partitions=2, router_replica_sync=True))
        self.router._kafka.close()  # otherwise it keeps trying to connect
        self.router.view.fold_index(PROGRESS_KEY.pack(RANK), encode_progress(Progress(RANK, FIRST_EPOCH, 3)))
        self.run(LABELLED)
        self.row(PLACEMENT)
        self.router.view.fold_worker(worker_key(7), encode_worker(Worker(WorkerId(7), "http://e", "m", 16)))
        self.book("r1")
        self.book("r2")

    def run(self, run: Any) -> None:
        self.router.view.fold_index(RUN_KEY.pack(RUN.key), None if run is None else encode_run(run))

    def row(self, placement: Placement) -> None:
        self.router.view.fold_pooled(block_key(ROW), encode_block(BlockRow(placement, None, 0, EngineHash(1))))

    def book(self, request_id: str, at_ms: int | None = 1000) -> BookingId:
        booking_id = BookingId(request_id, "a-router", 1)
        with self.router.loads.locked() as loads:
            loads.add(booking_id, BOOKING, at_ms)
        return booking_id

    def copy(self) -> Any:
        return copy_state(self.router.feeds, self.router.view, self.router.loads, (RANK,))

    def digests(self) -> Digests:
        state = digests_of(self.copy())
        (rank,) = state["ranks"]
        return {**rank["digests"], "registry": state["registry"]}


def changed(known: Known, before: Digests) -> set[str]:
    after = known.digests()
    return {kind for kind in before.keys() | after.keys() if before.get(kind) != after.get(kind)}


def test_routers_with_the_same_records_have_the_same_digests() -> None:
    """A booking of which the log has no record is left out."""
    one, other = Known(), Known()
    other.book("unlogged", None)
    assert one.digests() == other.digests()
    assert set(one.digests()) == {"progress", "blocks", "labels", "pooled", "bookings", "registry"}


@pytest.mark.parametrize("kind", ["bit", "run", "label", "row", "booking", "progress", "worker"])
def test_each_single_fault_changes_the_digest_of_its_kind_alone(kind: str) -> None:
    """So does its repair, which brings back the former digest."""
    known = Known()
    before = known.digests()
    match kind:
        case "bit":
            known.run(replace(LABELLED, present=RUN.present ^ 1))
            assert changed(known, before) == {"blocks"}
            known.run(LABELLED)
        case "run":
            known.run(None)
            assert changed(known, before) == {"blocks", "labels"}
            known.run(LABELLED)
        case "label":
            known.run(replace(RUN, moe={1: MoeLabels(3, None, None)}))
            assert changed(known, before) == {"labels"}
            known.run(LABELLED)
        case "row":
            known.row(replace(PLACEMENT, accessible_workers=(WorkerId(1),)))
            assert changed(known, before) == {"pooled"}
            known.row(PLACEMENT)
        case "booking":
            with known.router.loads.locked() as loads:
                loads.forget(BookingId("r1", "a-router", 1))
            assert changed(known, before) == {"bookings"}
            known.book("r1")
        case "progress":
            known.router.view.fold_index(PROGRESS_KEY.pack(RANK), encode_progress(Progress(RANK, FIRST_EPOCH, 4)))
            assert changed(known, before) == {"progress"}
            return
        case "worker":
            known.router.view.fold_worker(worker_key(7), None)
            assert changed(known, before) == {"registry"}
            return
    assert known.digests() == before


def test_the_facts_of_a_rank_name_each_block_label_row_and_booking() -> None:
    """What each fact is about identifies it, and a rank that is not known has none."""
    state = Known().copy()
    facts = facts_of(state, RANK)["facts"]
    assert {kind: [about for about, _ in found] for kind, found in facts.items()} == {
        "progress": [""],
        "blocks": sorted(f"device {block}" for block in RUN.sequence),
        "labels": [str(RUN.sequence[1])],
        "pooled": ["99 rack1"],
        "bookings": ["r1 a-router 1", "r2 a-router 1"],
    }
    other = facts_of(state, RankId(WorkerId(8), DpRank(0)))["facts"]
    assert not any(other.values())


def test_a_replay_has_all_models_whatever_the_settings_say() -> None:
    """A digest says which models a router has, so that one of some models is not compared with a replay."""
    replay = Replay(Settings(kafka="127.0.0.1:9", models="a,b"))
    replay.router._kafka.close()
    replay.router.view.served.check("c")
    assert replay.router.state_digest()["models"] == []
