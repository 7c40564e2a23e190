"""The JSON lines of `kvstreams replay --out`, as values; tests/kafka/test_replay.py reads a whole file."""

from __future__ import annotations

import numpy as np
import pytest

from streams.core.cxl_memory import CxlMemoryState
from streams.core.events import FeedState, MoeLabels
from streams.core.hashing import pack_hashes, sequence_hashes
from streams.core.ids import DpRank, EngineHash, Epoch, Incarnation, RankId, SequenceHash, Tier, WorkerId
from streams.core.loads.bookings import Booking, BookingId
from streams.core.reducer.ordering import Health, Progress
from streams.core.runs import Run, RunKey
from streams.core.workers import Avoidance, BridgeLease, Cordon, ServedModel, Worker
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow, Placement
from streams.replay.partition_tables import PartitionTables
from streams.replay.state_lines import booking_line, registry_line, table_lines
from streams.tables.records import PROGRESS_KEY, RUN_KEY, encode_progress, encode_run

BIG = (1 << 64) - 1
RANK = RankId(WorkerId(BIG), DpRank(3))
EPOCH = Epoch(Incarnation(1_764_370_000_000_000), 2)


def run_of(n: int, present: int, moe: dict[int, MoeLabels]) -> Run:
    local = [100 + number for number in range(n)]
    sequence = sequence_hashes(np.array(local, dtype=np.uint64)).tolist()
    key = RunKey(RANK, Tier.HOST, SequenceHash(sequence[0]))
    return Run(key, EPOCH, 0, None, local, [BIG - number for number in range(n)], sequence, present, moe)


def tables_of(progress: Progress, run: Run) -> PartitionTables:
    rows = {PROGRESS_KEY.pack(RANK): encode_progress(progress), RUN_KEY.pack(run.key): encode_run(run)}
    return PartitionTables({b"": rows}, {}, (), {})


def test_a_rank_has_a_line_and_its_blocks_have_one_for_each_part_without_a_hole() -> None:
    """Blocks behind a hole name their parent, and labels name the blocks of their own line."""
    labels = MoeLabels(layer_id=1, expert_id=2)
    run = run_of(6, 0b110011, {0: labels, 1: labels, 5: MoeLabels(expert_group=7)})
    health, feed = Health.APPROXIMATE, FeedState.CATCHING_UP
    progress = Progress(RANK, EPOCH, 9, BIG, health, "m", 16, n_blocks=4, feed=feed)
    tables = tables_of(progress, run)
    rank, *blocks = table_lines(tables)
    assert rank == {
        "kind": "rank",
        "worker_id": BIG,
        "dp_rank": 3,
        "incarnation": EPOCH.incarnation,
        "generation": 2,
        "sequence": 9,
        "digest": BIG,
        "health": "approximate",
        "feed": "catching_up",
        "silent": False,
        "model": "m",
        "block_size": 16,
        "n_blocks": 4,
    }
    first, second = blocks
    assert first == {
        "kind": "blocks",
        "worker_id": BIG,
        "dp_rank": 3,
        "tier": "host",
        "start": 0,
        "parent": None,
        "sequence_hashes": run.sequence[:2],
        "local_hashes": [100, 101],
        "engine_hashes": [BIG, BIG - 1],
        "labels": [{"first": 0, "n_blocks": 2, "layer_id": 1, "expert_id": 2, "expert_group": None}],
    }
    assert (second["start"], second["parent"], second["sequence_hashes"]) == (4, run.sequence[3], run.sequence[4:])
    assert second["labels"] == [{"first": 1, "n_blocks": 1, "layer_id": None, "expert_id": None, "expert_group": 7}]


def test_a_removed_rank_has_no_blocks() -> None:
    """Its line says that it was removed."""
    progress = Progress(RANK, EPOCH, health=Health.REMOVED)
    tables = tables_of(progress, run_of(2, 0b11, {}))
    (line,) = table_lines(tables)
    assert line["health"] == "removed"


def test_a_pooled_block_names_its_owner_and_its_pool() -> None:
    """The incarnation is the one in which the block entered its state."""
    placement = Placement(CxlMemoryState.CXL_POOLED, "rack1", 4, (WorkerId(BIG),), "m", Incarnation(7), 5)
    row = BlockRow(placement, SequenceHash(1), 2, EngineHash(BIG))
    tables = PartitionTables({}, {BlockKey(SequenceHash(3), RANK, "rack1"): row}, (), {})
    assert list(table_lines(tables)) == [
        {
            "kind": "pooled",
            "worker_id": BIG,
            "dp_rank": 3,
            "sequence_hash": 3,
            "parent": 1,
            "position": 2,
            "engine_hash": BIG,
            "state": "cxl_pooled",
            "pool_id": "rack1",
            "pool_epoch": 4,
            "accessible_workers": (BIG,),
            "model": "m",
            "incarnation": 7,
            "entered_at_ms": 5,
            "span": 1,
        }
    ]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (Worker(WorkerId(BIG), "http://e", "m", 16, lease=BridgeLease("b", 1, 6000, 1)), "worker"),
        (Cordon(WorkerId(BIG), 5), "cordon"),
        (Avoidance(WorkerId(BIG), 5, 1000), "avoidance"),
        (ServedModel("m", 16), "model"),
        (CxlPool("rack1", members=(WorkerId(BIG),)), "pool"),
    ],
)
def test_the_registry_has_a_line_for_each_record(record: object, kind: str) -> None:
    """A bridge's lease is left out, since no process of another scope holds it."""
    line = registry_line(record)
    assert line["kind"] == kind
    assert "lease" not in line


def test_a_booking_has_the_hashes_of_its_prompt() -> None:
    """Nothing in it is a token."""
    booking = Booking(RANK, "m", 40, pack_hashes([1, BIG]), 1, 3, phase="decode")
    line = booking_line(BookingId("r", "router", 5), booking, is_prefilled=True)
    assert line["sequence_hashes"] == [1, BIG]
    assert (line["request_id"], line["worker_id"], line["phase"], line["prefilled"]) == ("r", BIG, "decode", True)
