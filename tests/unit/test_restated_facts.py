"""Labels and CXL metadata in restatements: what agents hold after one is what they would hold without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import (
    AllBlocksCleared,
    BlockFacts,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    KvEvent,
    MoeLabels,
    RestatedRun,
    RestatementChunk,
)
from streams.core.hashing import sequence_hashes
from streams.core.ids import EngineHash, Epoch, Incarnation, SequenceHash, Tier, WorkerId
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.ordering import Health, Progress, Verdict
from streams.core.runs import Run
from streams.cxl.events import BlockAddress, CxlStateChanged
from streams.engines.cxl_names import CxlNames
from streams.engines.ledger import Ledger
from streams.engines.recovery import RecoveredRank, held_runs, recovered_rank
from streams.engines.restatements import chunks
from streams.errors import BadRecord
from streams.kafka.records import decode_batch, encode_batch
from streams.tables.records import decode_run
from streams.tables.run_table import RunTable
from tests.helpers.holdings import RANK, batch, judge, u64
from tests.helpers.plain_run_store import PlainHoldings, plain_holdings

CompiledHoldings = Holdings[Iterable[KvEvent], tuple[bytes, bytes | None]]

#: Tier and sequence hash to the published name and the labels.
Held = dict[tuple[Tier, int], tuple[int, MoeLabels | None]]

LABELS = [None, None, MoeLabels(1, 2, 3), MoeLabels(1, None, 0), MoeLabels(expert_id=2**31 - 1)]
WORKERS = (WorkerId(7), WorkerId(8))
POOLED = CxlMemoryMetadata("cxl_pooled", "rack1", (7, 8))

few_names = st.integers(0, 12)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
stores = st.tuples(
    st.one_of(st.none(), few_names),
    st.lists(st.tuples(few_names, st.integers(20, 22)), min_size=1, max_size=6),
    tiers,
    st.sampled_from(LABELS),
)
removals = st.tuples(st.lists(few_names, max_size=4), tiers)


def held_by(holdings: PlainHoldings) -> Held:
    """Everything that the pure-Python store writes after it was empty."""
    return held_in(run for _, run in holdings.take_changes(1 << 30).runs if run is not None)


def held_by_compiled(holdings: CompiledHoldings) -> Held:
    """Everything that the compiled store writes after it was empty."""
    rows = [(key, value) for key, value in holdings.take_changes(1 << 30).runs if value is not None]
    return held_in(decode_run(key, value) for key, value in rows)


def held_in(runs: Iterable[Run]) -> Held:
    return {
        (run.key.tier, run.sequence[offset]): (run.engine[offset], run.moe.get(offset))
        for run in runs
        for offset in run.held()
    }


def restated(ledger: Ledger, bytes_max: int, placements: dict[int, CxlMemoryMetadata]) -> list[EngineBatch]:
    """The chunks of a ledger's restatement, as they are read from Kafka."""
    pieces = chunks(ledger.restated(placements), 1, exact=True, bytes_max=bytes_max)
    return [decode_batch(encode_batch(replace(batch(5), body=piece))) for piece in pieces]


@settings(max_examples=300, deadline=None)
@given(
    counts_copies=st.booleans(),
    ops=st.lists(st.one_of(stores, stores, removals, st.none()), max_size=20),
    bytes_max=st.sampled_from([64, 120, 1 << 20]),
    placed=st.booleans(),
)
def test_a_restated_state_equals_the_state_that_events_led_to(
    counts_copies: bool,
    ops: list[tuple[int | None, list[tuple[int, int]], Tier, MoeLabels | None] | tuple[list[int], Tier] | None],
    bytes_max: int,
    placed: bool,
) -> None:
    """In both stores of runs, however the chunks are cut: the same blocks, with the same names and labels."""
    ledger = Ledger(counts_copies)
    direct, direct_compiled = plain_holdings(), Holdings(RunTable())
    for number, op in enumerate(ops):
        event: KvEvent
        if op is None:
            event = AllBlocksCleared()
        elif len(op) == 4:
            parent, blocks, tier, labels = op
            if parent is not None and ledger.address(EngineHash(parent)) is None:
                parent = None
            named = None if parent is None else EngineHash(parent)
            names, contents = u64(*(name for name, _ in blocks)), u64(*(local for _, local in blocks))
            event = BlocksStored(named, names, contents, tier, labels)
        else:
            event = BlocksRemoved(u64(*op[0]), op[1])
        out = ledger.apply(event)
        judge(direct, batch(number, *out))
        direct_compiled.apply(batch(number, *out), out)
    held = held_by(direct)
    assert held_by_compiled(direct_compiled) == held

    placements = {block: POOLED for _, block in held} if placed else {}
    pieces = restated(ledger, bytes_max, placements)
    plain, compiled = plain_holdings(), Holdings(RunTable())
    for number, piece in enumerate(pieces):
        verdict = Verdict.RESTATED if number == len(pieces) - 1 else Verdict.PARKED
        assert plain.restate(piece, b"x") is compiled.restate(piece, b"x") is verdict
    assert held_by(plain) == held_by_compiled(compiled) == held
    assert cxl_of(piece for piece in pieces) == placements

    again = Ledger(counts_copies)
    for piece in pieces:
        assert isinstance(piece.body, RestatementChunk)
        for run in piece.body.runs:
            again.adopt(run)
    assert ledger_holds(again) == ledger_holds(ledger) == held


def ledger_holds(ledger: Ledger) -> Held:
    """What a ledger restates, as agents would hold it."""
    held: Held = {}
    for run in ledger.restated():
        blocks, names = sequence_hashes(run.local, run.parent).tolist(), run.engine.tolist()
        for first, end, moe in run.by_labels():
            held.update({(run.tier, blocks[at]): (names[at], moe) for at in range(first, end)})
    return held


def cxl_of(pieces: Iterable[EngineBatch]) -> dict[int, CxlMemoryMetadata]:
    """The CXL metadata in the chunks of a restatement, by sequence hash."""
    found: dict[int, CxlMemoryMetadata] = {}
    for piece in pieces:
        assert isinstance(piece.body, RestatementChunk)
        for run in piece.body.runs:
            blocks = sequence_hashes(run.local, run.parent).tolist()
            for each in run.facts:
                if each.cxl is not None:
                    found.update(dict.fromkeys(blocks[each.first : each.first + each.n_blocks], each.cxl))
    return found


def labelled_ledger() -> Ledger:
    """Five blocks of one chain, of which the second and third have labels, and one block on the host."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(BlocksStored(None, u64(11), u64(1)))
    ledger.apply(BlocksStored(EngineHash(11), u64(12, 13), u64(2, 3), moe=MoeLabels(1, 2, 3)))
    ledger.apply(BlocksStored(EngineHash(13), u64(14, 15), u64(4, 5)))
    ledger.apply(BlocksStored(None, u64(11), u64(1), Tier.HOST, MoeLabels(9)))
    return ledger


def test_a_run_lists_its_labels_by_stretches() -> None:
    """Blocks without labels cost nothing, and a removed block's labels are gone."""
    ledger = labelled_ledger()
    device, host = ledger.restated()
    assert device.facts == (BlockFacts(1, 2, MoeLabels(1, 2, 3)),)
    assert host.facts == (BlockFacts(0, 1, MoeLabels(9)),)
    ledger.apply(BlocksRemoved(u64(12)))
    assert [run.facts for run in ledger.restated()] == [
        (),
        (BlockFacts(0, 1, MoeLabels(9)),),
        (BlockFacts(0, 1, MoeLabels(1, 2, 3)),),
    ]
    ledger.apply(BlocksStored(EngineHash(11), u64(12), u64(2)))
    assert ledger.restated()[0].facts == (BlockFacts(2, 1, MoeLabels(1, 2, 3)),)


def test_a_repeated_store_does_not_change_the_labels_that_agents_have() -> None:
    """Nothing is published for a block that is held already, so its restatement has its first labels as well."""
    ledger = labelled_ledger()
    assert ledger.apply(BlocksStored(EngineHash(11), u64(12, 13), u64(2, 3), moe=MoeLabels(7))) == []
    assert ledger.restated()[0].facts == (BlockFacts(1, 2, MoeLabels(1, 2, 3)),)


def test_a_restatement_has_the_last_reported_state_of_cxl_memory() -> None:
    """A block that is on its way into a pool, or in it, has its metadata; one that was evicted has none."""
    ledger, names = labelled_ledger(), CxlNames()
    names.resolve(CxlStateChanged(1, u64(12, 13, 14), CxlMemoryState.IN_TRANSIT, "rack1", WORKERS), ledger)
    names.resolve(CxlStateChanged(2, u64(12, 14), CxlMemoryState.CXL_POOLED), ledger)
    names.resolve(CxlStateChanged(3, u64(14), CxlMemoryState.EVICTED), ledger)
    labels = MoeLabels(1, 2, 3)
    transit = CxlMemoryMetadata("in_transit", "rack1", (7, 8))
    assert ledger.restated(names.placements())[0].facts == (
        BlockFacts(1, 1, labels, POOLED),
        BlockFacts(2, 1, labels, transit),
    )


def test_a_recovered_bridge_restates_the_labels_and_the_metadata_of_the_table() -> None:
    """It reads labels from runs and metadata from rows of pooled blocks, and follows records after the table."""
    holdings = plain_holdings()
    ledger = labelled_ledger()
    for piece in restated(ledger, 64, {}):
        holdings.restate(piece, b"x")
    progress = holdings.progress[RANK]
    runs = [run for _, run in holdings.take_changes(0).runs if run is not None]
    recovered = recovered_rank(progress, runs)
    block = SequenceHash(int(sequence_hashes(u64(1))[0]))
    recovered.names.adopt(EngineHash(11), BlockAddress(block, None, 0), POOLED)
    assert ledger_holds(recovered.table_ledger(True)) == ledger_holds(ledger)
    assert recovered.table_ledger(True).restated(recovered.names.placements())[0].facts == (
        BlockFacts(0, 1, None, POOLED),
        BlockFacts(1, 2, MoeLabels(1, 2, 3)),
    )
    # A bridge that starts before any agent has applied a restatement folds the restatement itself.
    follower = RecoveredRank(Progress(RANK, Epoch(Incarnation(0), 0)), Ledger(counts_copies=False))
    for piece in restated(ledger, 64, {}):
        follower.fold(piece)
    assert ledger_holds(follower.table_ledger(True)) == ledger_holds(ledger)


def test_a_bridge_that_recovers_an_approximate_rank_keeps_it_approximate() -> None:
    """The batch that made it approximate is not repeated, and a later restatement must not make the rank exact."""
    progress = Progress(RANK, Epoch(Incarnation(1), 0), 5, health=Health.APPROXIMATE)
    assert recovered_rank(progress, ()).table_ledger(counts_copies=True).may_lack_blocks
    assert not recovered_rank(replace(progress, health=Health.EXACT), ()).table_ledger(True).may_lack_blocks


def test_runs_without_holes_keep_the_labels_of_their_blocks() -> None:
    """A hole in a run record shifts the offsets of the labels after it."""
    ledger = labelled_ledger()
    holdings = plain_holdings()
    for piece in restated(ledger, 1 << 20, {}):
        holdings.restate(piece, b"x")
    holdings.apply(batch(6), [BlocksRemoved(u64(12))])
    (run,) = [run for key, run in holdings.take_changes(0).runs if key.tier is Tier.DEVICE and run is not None]
    assert [part.facts for part in held_runs(run)] == [(), (BlockFacts(0, 1, MoeLabels(1, 2, 3)),)]


@pytest.mark.parametrize("bytes_max", [600, 4096, 1 << 20])
def test_labels_and_metadata_count_towards_the_size_of_a_chunk(bytes_max: int) -> None:
    """Each block has labels and metadata of its own, so they take far more bytes than the hashes."""
    n_blocks = 500
    names = u64(*range(n_blocks))
    pooled = [CxlMemoryMetadata("cxl_pooled", "é" * 100, range(n_workers)) for n_workers in range(8)]
    facts = tuple(BlockFacts(at, 1, MoeLabels(2**31 - 1, at, 2**31 - 1), pooled[at % 8]) for at in range(n_blocks))
    pieces = chunks([RestatedRun(0, None, names, names, Tier.DEVICE, facts)], 1, exact=True, bytes_max=bytes_max)
    sizes = [len(encode_batch(replace(batch(5), body=piece))) for piece in pieces]
    assert max(sizes) <= bytes_max + 200  # the record's own fields
    assert len(pieces) <= 2 * sum(sizes) / bytes_max + 1
    labels = [moe for piece in pieces for run in piece.runs for _, _, moe in run.by_labels()]
    assert labels == [each.moe for each in facts]


@pytest.mark.parametrize(
    "facts",
    [
        (BlockFacts(2, 2),),
        (BlockFacts(0, 0),),
        (BlockFacts(-1, 1),),
        (BlockFacts(0, 2), BlockFacts(1, 1)),
    ],
    ids=["beyond the end", "no blocks", "before the start", "overlapping"],
)
def test_facts_of_blocks_that_a_run_does_not_have_are_refused(facts: tuple[BlockFacts, ...]) -> None:
    """Only a foreign writer writes them; the record is a dead letter."""
    run = RestatedRun(0, None, u64(1, 2, 3), u64(1, 2, 3), Tier.DEVICE, facts)
    with pytest.raises(BadRecord) as caught:
        decode_batch(encode_batch(replace(batch(5), body=RestatementChunk(1, 0, 1, True, (run,)))))
    assert caught.value.reason == "bad_restatement"
