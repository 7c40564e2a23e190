"""The ledger: copies and names as an engine reports them become blocks that a rank holds, as Kafka has them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.cxl_memory import CxlMemoryMetadata
from streams.core.events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvents,
    KvEvent,
    ResyncRequest,
)
from streams.core.events import MoeLabels as Labels
from streams.core.hashing import sequence_hashes
from streams.core.ids import Epoch, HashArray, Incarnation, Tier
from streams.cxl.events import CxlStateChanged
from streams.engines import ledger as ledger_module
from streams.engines.dialects.interface import BlocksCopied, BlocksLeftOut, DeviceCleared, TierCleared
from streams.engines.dialects.vllm import VLLM, decode_payload
from streams.engines.ledger import Ledger
from streams.engines.restatements import ANSWERED_FOR_S, CHUNK_BYTES_MAX, RESTATE_EVERY_S, Restatements, chunks
from streams.lab.engines.engine_messages import KvRemoved, KvReused, KvStored
from streams.lab.engines.event_publisher import WireForm
from streams.lab.engines.model import EngineModel
from tests.helpers.holdings import RANK, batch, judge, stored, u64
from tests.helpers.invariants import check, members_of
from tests.helpers.plain_run_store import PlainRunStore, plain_holdings
from tests.helpers.reference import chain_hashes, random_history
from tests.helpers.sim_requests import BLOCK as SIM_BLOCK
from tests.helpers.sim_requests import CROWDED, FOREVER, Asked, ask, requests_

LedgerEvent = tuple[str, int | None, list[int], list[int]]

#: A name that no engine of these tests gives to a block.
NO_PARENT = 10_000


class RawRank:
    """What an engine holds according to its own reports: physical copies under names.

    names: (tier, engine hash) to (sequence hash, copies). A block is held while it has a name. reports_reuse: whether a
    store that names no parent, and whose blocks are all held, reports that a request reuses them.
    """

    def __init__(self, counts_copies: bool, reports_reuse: bool = False) -> None:
        self.counts_copies = counts_copies
        self.reports_reuse = reports_reuse
        self.names: dict[tuple[Tier, int], tuple[int, int]] = {}

    def apply(self, event: KvEvent | BlocksLeftOut | TierCleared) -> None:
        if isinstance(event, BlocksLeftOut):
            return
        if isinstance(event, AllBlocksCleared):
            self.names.clear()
        elif isinstance(event, TierCleared):
            self.names = {where: block for where, block in self.names.items() if where[0] is not event.tier}
        elif isinstance(event, BlocksRemoved):
            for engine in event.engine.tolist():
                block, copies = self.names.pop((event.tier, engine), (0, 0))
                if copies > 1:
                    self.names[event.tier, engine] = (block, copies - 1)
        else:
            self.store(event)

    def store(self, event: BlocksStored) -> None:
        parent = None
        if event.parent is not None:
            parent = self.named(event.parent, event.tier)
            if parent is None:
                return
        blocks = list(zip(event.engine.tolist(), chain_hashes(event.local.tolist(), parent), strict=True))
        held = [self.names.get((event.tier, engine), (None, 0))[0] == block for engine, block in blocks]
        if self.reports_reuse and event.parent is None and all(held):
            return
        for engine, block in blocks:
            known, copies = self.names.get((event.tier, engine), (block, 0))
            again = copies + 1 if self.counts_copies and known == block else 1
            self.names[event.tier, engine] = (block, again)

    def named(self, engine: int, tier: Tier) -> int | None:
        found = [self.names[where, engine][0] for where in (tier, *Tier) if (where, engine) in self.names]
        return found[0] if found else None

    def facts(self) -> set[tuple[Tier, int]]:
        return {(tier, block) for (tier, _), (block, _) in self.names.items()}


class Published:
    """A ledger and the holdings that its events lead to, with one batch per engine event."""

    def __init__(self, counts_copies: bool) -> None:
        self.ledger = Ledger(counts_copies)
        self.holdings = plain_holdings()
        self._sequence = -1

    def apply(self, event: KvEvent | BlocksCopied | BlocksLeftOut | TierCleared) -> list[KvEvent]:
        out = self.ledger.apply(event)
        self._sequence += 1
        judge(self.holdings, batch(self._sequence, *out))
        check(self.holdings)
        return out

    def facts(self) -> set[tuple[Tier, int]]:
        return {(tier, int(block)) for _, tier, block in members_of(self.holdings.runs)}


def comparable(events: Iterable[KvEvent]) -> list[LedgerEvent]:
    """Events in a form that can be compared."""
    plain: list[LedgerEvent] = []
    for event in events:
        match event:
            case BlocksStored():
                plain.append(("stored", event.parent, event.engine.tolist(), event.local.tolist()))
            case BlocksRemoved():
                plain.append(("removed", None, event.engine.tolist(), []))
            case AllBlocksCleared():
                plain.append(("cleared", None, [], []))
    return plain


def removed(*engine: int, tier: Tier = Tier.DEVICE) -> BlocksRemoved:
    return BlocksRemoved(u64(*engine), tier)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_copies_are_stored_once_and_removed_once(copies: int) -> None:
    """The first of n stores and the last of n removals are published."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(stored(u64(10), u64(9)))
    outs = [comparable(ledger.apply(stored(u64(11, 12), u64(1, 2), parent=10))) for _ in range(copies)]
    assert outs == [[("stored", 10, [11, 12], [1, 2])]] + [[]] * (copies - 1)
    outs = [comparable(ledger.apply(removed(12))) for _ in range(copies)]
    assert outs == [[]] * (copies - 1) + [[("removed", None, [12], [])]]
    assert (len(ledger), ledger.unknown_removals, ledger.may_lack_blocks) == (2, 0, False)


@pytest.mark.parametrize("reports", [1, 3])
def test_a_report_of_reused_blocks_is_not_a_copy(reports: int) -> None:
    """The first removal of such a block is published; from then on, the ledger may lack a copy, until a clear."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(stored(u64(11, 12, 13), u64(1, 2, 3)))
    for _ in range(reports):
        assert ledger.apply(stored(u64(11, 12), u64(1, 2))) == []
    assert comparable(ledger.apply(removed(13))) == [("removed", None, [13], [])]
    assert not ledger.may_lack_blocks
    assert comparable(ledger.apply(removed(12))) == [("removed", None, [12], [])]
    assert ledger.may_lack_blocks
    assert comparable(ledger.apply(stored(u64(11, 12), u64(1, 2)))) == [("stored", 11, [12], [2])]
    assert comparable(ledger.apply(removed(11, 12))) == [("removed", None, [11, 12], [])]
    ledger.apply(AllBlocksCleared())
    assert not ledger.may_lack_blocks


def test_a_repeated_store_with_a_new_block_has_copies() -> None:
    """Reused blocks are all held. After lost events, a report of them may contain a block that the ledger lacks."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(stored(u64(11), u64(1)))
    ledger.apply(stored(u64(11, 12), u64(1, 2)))
    assert ledger.apply(removed(11)) == []
    ledger.lost_events()
    ledger.apply(stored(u64(11, 12, 13), u64(1, 2, 3)))
    assert comparable(ledger.apply(removed(11))) == [("removed", None, [11], [])]
    assert ledger.may_lack_blocks


def test_copies_of_adopted_blocks_are_unknown() -> None:
    """The first removal of such a block is published, and the ledger may lack a copy from then on."""
    before, ledger = Ledger(counts_copies=True), Ledger(counts_copies=True)
    before.apply(stored(u64(11, 12), u64(1, 2)))
    for run in before.restated():
        ledger.adopt(run)
    ledger.apply(stored(u64(12), u64(2), parent=11))
    assert ledger.apply(removed(12)) == []
    assert not ledger.may_lack_blocks
    assert comparable(ledger.apply(removed(12))) == [("removed", None, [12], [])]
    assert ledger.may_lack_blocks


def test_a_removal_may_name_a_block_once_for_each_copy() -> None:
    """A block with two copies is removed by one removal that names it twice."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(stored(u64(10), u64(9)))
    ledger.apply(stored(u64(11), u64(1), parent=10))
    ledger.apply(stored(u64(11), u64(1), parent=10))
    assert comparable(ledger.apply(removed(11, 11))) == [("removed", None, [11], [])]
    assert len(ledger) == 1


def test_without_counted_copies_the_first_removal_removes_a_block() -> None:
    """A dialect that does not count copies may repeat a store; the number of stores does not matter."""
    ledger = Ledger(counts_copies=False)
    for _ in range(3):
        ledger.apply(stored(u64(11), u64(1)))
    assert comparable(ledger.apply(removed(11))) == [("removed", None, [11], [])]
    assert comparable(ledger.apply(removed(11))) == [("removed", None, [11], [])]  # for the agent to count
    assert ledger.unknown_removals == 1


def test_a_block_stored_again_after_its_removal_is_published_again() -> None:
    """The copies of a block that was removed are counted from one again."""
    ledger = Ledger(counts_copies=True)
    event = stored(u64(11), u64(1))
    for _ in range(3):
        assert comparable(ledger.apply(event)) == [("stored", None, [11], [1])]
        assert comparable(ledger.apply(removed(11))) == [("removed", None, [11], [])]


def test_only_new_blocks_are_published_with_their_own_parent() -> None:
    """A store with some new blocks is split; each part names the published name of the block before it as parent."""
    ledger = Ledger(counts_copies=False)
    ledger.apply(stored(u64(11, 12, 13, 14, 15), u64(1, 2, 3, 4, 5)))
    ledger.apply(removed(11, 13, 14))
    out = ledger.apply(stored(u64(21, 22, 23, 24, 25, 26), u64(1, 2, 3, 4, 5, 6)))
    assert comparable(out) == [
        ("stored", None, [21], [1]),
        ("stored", 12, [23, 24], [3, 4]),
        ("stored", 15, [26], [6]),
    ]


def test_parts_of_a_store_keep_its_tier_and_labels() -> None:
    """Each part of a split store has the tier, the labels and the CXL metadata of the whole."""
    ledger = Ledger(counts_copies=False)
    ledger.apply(stored(u64(12), u64(1), tier=Tier.HOST))
    labels, cxl = Labels(1, 2, 3), CxlMemoryMetadata("in_transit", "p", (1,))
    whole = BlocksStored(None, u64(12, 13), u64(1, 2), Tier.HOST, labels, cxl)
    (part,) = ledger.apply(whole)
    assert isinstance(part, BlocksStored)
    assert (part.tier, part.moe, part.cxl, part.parent) == (Tier.HOST, labels, cxl, 12)


def test_an_event_without_blocks_is_not_published() -> None:
    """Neither a store nor a removal without blocks changes anything."""
    ledger = Ledger(counts_copies=True)
    assert ledger.apply(stored(u64(), u64())) == []
    assert ledger.apply(removed()) == []


def test_two_names_for_one_block_are_two_copies_of_it() -> None:
    """Children of either name have the block as parent, and the removal of the last name removes it."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(stored(u64(11), u64(1)))
    assert ledger.apply(stored(u64(99), u64(1))) == []
    assert comparable(ledger.apply(stored(u64(12), u64(2), parent=99))) == [("stored", 11, [12], [2])]
    assert ledger.apply(removed(11)) == []
    assert comparable(ledger.apply(stored(u64(13), u64(3), parent=99))) == [("stored", 11, [13], [3])]
    assert comparable(ledger.apply(removed(99))) == [("removed", None, [11], [])]


@pytest.mark.parametrize("counts_copies", [True, False])
def test_a_name_given_to_another_block_ends_the_first_one(counts_copies: bool) -> None:
    """The first block is no longer held, however many copies it had; the second has one copy."""
    published = Published(counts_copies)
    published.apply(stored(u64(11), u64(1)))
    published.apply(stored(u64(11), u64(1)))
    published.apply(stored(u64(11), u64(2)))
    assert published.facts() == {(Tier.DEVICE, 2)}
    published.apply(removed(11))
    assert published.facts() == set()
    assert len(published.ledger) == 0


@pytest.mark.parametrize(
    ("engine", "local"),
    [([9], [2]), ([9, 8], [2, 3]), ([8, 9], [2, 3]), ([9, 9], [2, 3]), ([9, 9, 9], [2, 3, 4]), ([8, 8, 9], [2, 3, 4])],
)
def test_a_name_may_move_to_the_blocks_own_children(engine: list[int], local: list[int]) -> None:
    """The children are held at their own positions, although the parent's name is theirs now."""
    published = Published(counts_copies=True)
    raw = RawRank(counts_copies=True)
    for event in (stored(u64(9), u64(1)), stored(u64(*engine), u64(*local), parent=9)):
        published.apply(event)
        raw.apply(event)
    assert published.facts() == raw.facts()
    assert published.ledger.unknown_parents == 0


def test_a_dropped_name_that_is_reused_leaves_the_old_block_to_its_other_name() -> None:
    """An engine names copies by their slot: slot 1 is freed and gets another block, slot 2 still has the first."""
    published = Published(counts_copies=True)
    first, other = stored(u64(1), u64(50)), stored(u64(1), u64(60))
    published.apply(first)
    published.apply(stored(u64(2), u64(50)))
    published.apply(removed(1))
    published.apply(other)
    assert published.facts() == {(Tier.DEVICE, 50), (Tier.DEVICE, 60)}
    published.apply(removed(2))
    assert published.facts() == {(Tier.DEVICE, 60)}
    published.apply(removed(1))
    assert published.facts() == set()


def test_a_second_removal_of_a_dropped_name_changes_nothing() -> None:
    """The block is still held under its other name, so the removal is the engine's fault and is not published."""
    published = Published(counts_copies=True)
    published.apply(stored(u64(1), u64(50)))
    published.apply(stored(u64(2), u64(50)))
    published.apply(removed(1))
    assert published.apply(removed(1)) == []
    assert published.ledger.unknown_removals == 1
    assert published.facts() == {(Tier.DEVICE, 50)}


def test_a_dropped_name_is_still_valid_as_a_parent() -> None:
    """A store after that name follows the block that it named, for as long as the block is held."""
    published = Published(counts_copies=True)
    published.apply(stored(u64(1), u64(50)))
    published.apply(stored(u64(2), u64(50)))
    published.apply(removed(1))
    published.apply(stored(u64(3), u64(51), parent=1))
    published.apply(stored(u64(3), u64(51), parent=1))
    assert published.facts() == {(Tier.DEVICE, 50), (Tier.DEVICE, chain_hashes([50, 51])[1])}
    published.apply(removed(3))
    assert published.facts() == {(Tier.DEVICE, 50), (Tier.DEVICE, chain_hashes([50, 51])[1])}


def test_after_lost_events_an_event_that_cannot_be_placed_is_published_unchanged() -> None:
    """A store after an unknown parent and an unknown removal reach the agent, which counts them."""
    published = Published(counts_copies=True)
    published.ledger.lost_events()
    orphan = stored(u64(1, 2), u64(1, 2), parent=NO_PARENT)
    assert published.apply(orphan) == [orphan]
    assert comparable(published.apply(removed(7, 8))) == [("removed", None, [7, 8], [])]
    assert (published.ledger.unknown_parents, published.ledger.unknown_removals) == (1, 2)
    progress = published.holdings.progress[RANK]
    assert (progress.n_unknown_parents, progress.n_unknown_removals) == (1, 2)
    assert len(published.ledger) == 0


def test_a_clear_is_published_and_empties_the_ledger() -> None:
    """Blocks that were held before a clear are new again, in every tier."""
    ledger = Ledger(counts_copies=True)
    for tier in Tier:
        ledger.apply(stored(u64(11), u64(1), tier=tier))
    assert len(ledger) == 4
    assert comparable(ledger.apply(AllBlocksCleared())) == [("cleared", None, [], [])]
    assert len(ledger) == 0
    assert comparable(ledger.apply(stored(u64(11), u64(1)))) == [("stored", None, [11], [1])]
    assert ledger.apply(stored(u64(12), u64(1), parent=NO_PARENT)) == []


def test_tiers_are_independent() -> None:
    """A copy on the host is published although the device holds the block, and a removal ends one of them only."""
    published = Published(counts_copies=True)
    published.apply(stored(u64(11), u64(1)))
    published.apply(stored(u64(11), u64(1), tier=Tier.HOST))
    published.apply(removed(11))
    assert published.facts() == {(Tier.HOST, 1)}


#: With six names and three contents, every store collides with an older one.
few_names = st.integers(0, 5)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.HOST])
stores = st.tuples(
    st.one_of(st.none(), few_names),
    st.lists(st.tuples(few_names, st.integers(20, 22)), min_size=1, max_size=4),
    tiers,
)
removals = st.tuples(st.lists(few_names, max_size=4), tiers)
#: Blocks that a decoder has left out, under a reason that makes a rank approximate, or one that does not.
left_out = st.builds(
    BlocksLeftOut,
    st.lists(few_names, max_size=2).map(lambda names: u64(*names)),
    st.sampled_from(["content_unknown", "masked"]),
)
clears = st.one_of(st.builds(AllBlocksCleared), st.builds(DeviceCleared), st.builds(TierCleared, tiers))


def check_claims(published: Published, raws: Sequence[RawRank]) -> None:
    """What is published is held, however the engine's stores are to be read; and nothing is missing without notice."""
    for raw in raws:
        assert published.facts() <= raw.facts()
        assert published.facts() == raw.facts() or published.ledger.removed_early


@settings(max_examples=500, deadline=None)
@given(counts_copies=st.booleans(), ops=st.lists(st.one_of(stores, removals, left_out, clears), max_size=30))
def test_what_is_published_is_what_the_engine_holds(
    counts_copies: bool,
    ops: list[
        tuple[int | None, list[tuple[int, int]], Tier]
        | tuple[list[int], Tier]
        | BlocksLeftOut
        | AllBlocksCleared
        | TierCleared
    ],
) -> None:
    """However names collide, the published events lead to exactly the blocks that have a name.

    Where a copy cannot be distinguished from a report of reused blocks, they lead to no block that may be gone. What is
    left out, and what a clear may have left in lower tiers, is counted, and never lost.
    """
    published = Published(counts_copies)
    ledger, lower_was_used = published.ledger, False
    raws = [RawRank(counts_copies), RawRank(counts_copies, reports_reuse=True)]
    raw = raws[1]  # of the two, the one that holds less
    for op in ops:
        event: KvEvent | BlocksLeftOut | TierCleared
        before = sum(ledger.skipped.counts.values())
        if isinstance(op, BlocksLeftOut | AllBlocksCleared | TierCleared):
            event = op
        elif len(op) == 3:
            parent, blocks, tier = op
            if parent is not None and raw.named(parent, tier) is None:
                parent = NO_PARENT  # a dropped name is neither known nor unknown; another test covers it
            event = stored(u64(*(name for name, _ in blocks)), u64(*(local for _, local in blocks)), parent, tier)
        else:
            event = removed(*op[0], tier=op[1])
        published.apply(event)
        for each in raws:
            each.apply(event)
        check_claims(published, raws)
        assert len(ledger) == len(published.facts())
        if ledger.removed_early:
            return  # the ledger may lack a parent that the engine names
        n_skipped = sum(ledger.skipped.counts.values()) - before
        lower_was_used |= isinstance(event, BlocksStored | BlocksRemoved) and event.tier is not Tier.DEVICE
        if isinstance(event, BlocksStored) and event.parent == NO_PARENT:
            assert n_skipped == len(event.engine)
        else:
            assert (n_skipped > 0) == (isinstance(event, DeviceCleared) and lower_was_used)
        assert ledger.complete
    progress = published.holdings.progress.get(RANK)
    assert progress is None or progress.n_unknown_parents == ledger.unknown_parents == 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), counts_copies=st.booleans())
def test_an_engines_whole_history_leads_to_what_it_holds(seed: int, counts_copies: bool) -> None:
    """Long histories with doubled and moved names lead to exactly the blocks that have a name.

    Repeated stores that name no parent are left out, since they may have copies or not.
    """
    published, raw = Published(counts_copies), RawRank(counts_copies)
    for one in random_history(random.Random(seed), 150, 1, n_blocks_max=150):
        for event in one.body.events if isinstance(one.body, EngineEvents) else ():
            if isinstance(event, BlocksStored) and event.parent and raw.named(event.parent, event.tier) is None:
                continue
            if is_ambiguous(event, raw):
                continue
            published.apply(event)
            raw.apply(event)
        assert published.facts() == raw.facts()
    assert not published.ledger.may_lack_blocks


@settings(max_examples=150, deadline=None)
@given(asked=requests_, full=st.lists(st.booleans(), min_size=14, max_size=14), n_blocks=st.integers(9, 20))
def test_a_simulated_engine_never_holds_less_than_its_ledger(asked: Asked, full: list[bool], n_blocks: int) -> None:
    """Some requests ask for reports of reused blocks. What the ledger lacks is a copy that it could not count."""
    model, ledger = EngineModel(replace(CROWDED, n_blocks=n_blocks)), Ledger(VLLM.counts_copies)
    form = WireForm(SIM_BLOCK)
    for at, (arrival, tokens, n_output, seed) in enumerate(asked):
        request = ask(str(at), tokens, n_output, output_seed=seed, reports_reuse=full[at])
        model.submit(float(arrival), request)
    for to_ms in [*range(0, 400, 7), FOREVER]:
        for output in model.advance(float(to_ms)):
            if isinstance(output, KvStored | KvReused | KvRemoved):
                payload = msgpack.packb([1.0, form.events(output), 0])
                for event in decode_payload(payload, SIM_BLOCK).events:
                    assert not isinstance(event, CxlStateChanged)
                    ledger.apply(event)
        held = {block for _, block in facts_of(ledger)}
        truth = set(model.cached_blocks().sequence.tolist())
        assert held <= truth
        assert held == truth or ledger.may_lack_blocks


def is_ambiguous(event: KvEvent, raw: RawRank) -> bool:
    """Whether an event is a store without a parent whose names are all known."""
    return (
        isinstance(event, BlocksStored)
        and event.parent is None
        and all((event.tier, name) in raw.names for name in event.engine.tolist())
    )


def restored(
    ledger: Ledger, bytes_max: int = CHUNK_BYTES_MAX
) -> tuple[set[tuple[Tier, int]], dict[tuple[Tier, int], int]]:
    """What a store of runs holds after a ledger's restatement in chunks, and under which names."""
    pieces = chunks(ledger.restated(), 1, exact=True, bytes_max=bytes_max)
    assert [piece.chunk for piece in pieces] == list(range(len(pieces)))
    assert {piece.n_chunks for piece in pieces} == {len(pieces)}
    store = plain_holdings().runs
    assert isinstance(store, PlainRunStore)
    store.end(RANK, Epoch(Incarnation(1), 1))
    held: set[tuple[Tier, int]] = set()
    all_held = facts_of(ledger)
    for piece in pieces:
        for run in piece.runs:
            assert run.parent is None or (run.tier, run.parent) in held or (run.tier, run.parent) not in all_held
            held |= {(run.tier, block) for block in sequence_hashes(run.local, run.parent).tolist()}
        store.restate(RANK, piece.runs)
        assert sum(48 + 16 * len(run.local) for run in piece.runs) <= bytes_max
    check(store)
    names = {
        (key.tier, run.sequence[offset]): run.engine[offset]
        for key, run in store.runs_of(RANK).items()
        for offset in run.held()
    }
    return {(tier, int(block)) for _, tier, block in members_of(store)}, names


def facts_of(ledger: Ledger) -> set[tuple[Tier, int]]:
    """What a ledger holds, by its runs."""
    return {(run.tier, block) for run in ledger.restated() for block in sequence_hashes(run.local, run.parent).tolist()}


def raw_history(seed: int, n_batches: int) -> Iterable[KvEvent]:
    """The events of one engine's random history."""
    for one in random_history(random.Random(seed), n_batches, 1, n_blocks_max=120):
        if isinstance(one.body, EngineEvents):
            yield from one.body.events


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), counts_copies=st.booleans(), bytes_max=st.sampled_from([64, 200, 1024, 1 << 20]))
def test_a_restatement_contains_all_that_the_ledger_holds(seed: int, counts_copies: bool, bytes_max: int) -> None:
    """Whatever the history and the chunk size, a restatement fills an empty store with what the engine holds."""
    published, raw = Published(counts_copies), RawRank(counts_copies)
    for event in raw_history(seed, 60):
        if isinstance(event, BlocksStored) and event.parent and raw.named(event.parent, event.tier) is None:
            continue
        if is_ambiguous(event, raw):
            continue
        published.apply(event)
        raw.apply(event)
    facts, names = restored(published.ledger, bytes_max)
    assert facts == raw.facts() == published.facts()
    runs = published.holdings.runs
    assert isinstance(runs, PlainRunStore)
    agents = {
        (key.tier, run.sequence[offset]): run.engine[offset]
        for key, run in runs.runs_of(RANK).items()
        for offset in run.held()
    }
    assert names == agents  # later events must find the blocks under the names that the agent has


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_ledger_rebuilt_from_runs_continues_and_never_holds_more_than_the_engine(seed: int) -> None:
    """With one copy per block it may publish a removal too early but never too late, and it loses no name or parent."""
    events = list(raw_history(seed, 60))
    published, raw = Published(counts_copies=True), RawRank(counts_copies=True)
    for number, event in enumerate(events):
        if number == len(events) // 2:
            before = published.ledger
            published.ledger = Ledger(counts_copies=True)
            for run in before.restated():
                published.ledger.adopt(run)
            assert facts_of(published.ledger) == facts_of(before)
        if isinstance(event, BlocksStored) and event.parent and raw.named(event.parent, event.tier) is None:
            continue
        published.apply(event)
        raw.apply(event)
        assert published.facts() == facts_of(published.ledger)


def test_a_ledger_is_complete_until_events_are_lost_and_again_after_a_clear() -> None:
    """A restatement cannot contain a lost batch. A store whose parent was never reported is no loss."""
    ledger = Ledger(counts_copies=True)
    assert ledger.complete
    ledger.lost_events()
    ledger.apply(stored(u64(11), u64(1)))
    assert not ledger.complete
    ledger.apply(AllBlocksCleared())
    assert ledger.complete
    ledger.apply(stored(u64(12), u64(2), parent=NO_PARENT))
    assert (ledger.complete, ledger.left_out) == (True, 1)


def test_a_restatement_of_an_empty_ledger_is_one_chunk_without_runs() -> None:
    """The table must be emptied as well if the rank holds nothing."""
    (piece,) = chunks(Ledger(counts_copies=True).restated(), 5, exact=False)
    assert (piece.restatement_id, piece.chunk, piece.n_chunks, piece.exact, piece.runs) == (5, 0, 1, False, ())


def test_consecutive_blocks_are_one_run_and_a_hole_begins_another() -> None:
    """Runs are as long as possible; a run after a hole or at a branch names its parent by its sequence hash."""
    ledger = Ledger(counts_copies=True)
    ledger.apply(stored(u64(11, 12, 13, 14), u64(1, 2, 3, 4)))
    ledger.apply(stored(u64(23), u64(9), parent=12))
    ledger.apply(removed(13))
    runs = [(run.start, run.parent, run.engine.tolist(), run.local.tolist()) for run in ledger.restated()]
    chain = chain_hashes([1, 2, 3, 4])
    assert runs == [(0, None, [11, 12, 23], [1, 2, 9]), (3, chain[2], [14], [4])]


REQUEST = ResyncRequest(RANK, Incarnation(5), 10, 1, "gap", 0)


@pytest.mark.parametrize(
    ("request_of", "at_s", "answered"),
    [
        (replace(REQUEST, incarnation=Incarnation(4)), 100.0, False),  # of another incarnation
        (replace(REQUEST, incarnation=Incarnation(6)), 100.0, False),
        (REQUEST, 100.0, True),
        (replace(REQUEST, sequence=20, attempt=2), 1.0, False),  # answered: restated to 20 at 0 s
        (replace(REQUEST, sequence=20, attempt=2), ANSWERED_FOR_S, True),  # repeated nevertheless: the answer was lost
        (replace(REQUEST, sequence=21), RESTATE_EVERY_S / 2, False),  # a new gap, but too soon
        (replace(REQUEST, sequence=21), RESTATE_EVERY_S, True),
    ],
)
def test_a_request_is_answered_once(request_of: ResyncRequest, at_s: float, answered: bool) -> None:
    """Only requests for this incarnation are answered, and again only when the answer cannot still be on its way."""
    restatements = Restatements()
    assert restatements.answers(REQUEST, Incarnation(5), 20, 0.0)
    restatements.sent(20, 0.0)
    assert restatements.answers(request_of, Incarnation(5), 30, at_s) is answered
    assert not Restatements().answers(REQUEST, Incarnation(5), -1, at_s)  # no batch has been published yet
    of_idle = Restatements().answers(REQUEST, Incarnation(5), -1, at_s, is_proven=True)
    assert of_idle is True  # nor has the engine reported any, so it is known to hold nothing
    assert not Restatements().answers(REQUEST, Incarnation(6), -1, at_s, is_proven=True)


def waits(ledger: Ledger, *events: Any) -> list[tuple[Any, ...]]:
    """Apply the events of one batch; return what is published."""
    out = [each for event in events for each in ledger.apply(event, may_wait=True)]
    return comparable(out + ledger.end_batch())


def host(engine: HashArray, local: HashArray, parent: int | None = None) -> BlocksStored:
    return replace(stored(engine, local, parent=parent), tier=Tier.HOST)


def test_a_store_in_a_lower_tier_waits_for_its_parent_across_batches() -> None:
    """vLLM's offloading connector reports chunks in any order; nothing is lost, and parents are published first."""
    ledger = Ledger(counts_copies=True)
    assert waits(ledger, host(u64(5, 6), u64(5, 6), parent=4)) == []
    assert waits(ledger, host(u64(3, 4), u64(3, 4), parent=2)) == []
    assert (ledger.n_waiting, ledger.complete, ledger.unknown_parents) == (2, True, 0)
    published = waits(ledger, host(u64(1, 2), u64(1, 2)))
    assert [names for _, _, names, *_ in published] == [[1, 2], [3, 4], [5, 6]]
    assert (ledger.n_waiting, len(ledger), ledger.complete) == (0, 6, True)


def test_a_store_in_the_device_tier_waits_until_the_end_of_its_batch() -> None:
    """Within the batch its parent may come later; after it, the parent was not reported, or was lost."""
    ledger = Ledger(counts_copies=True)
    published = waits(ledger, stored(u64(2), u64(2), parent=1), stored(u64(1), u64(1)))
    assert [names for _, _, names, *_ in published] == [[1], [2]]
    orphan = stored(u64(9), u64(9), parent=8)
    assert waits(ledger, orphan) == []
    assert (ledger.left_out, ledger.unknown_parents, ledger.complete, ledger.n_waiting) == (1, 0, True, 0)
    ledger.lost_events()
    lost = stored(u64(7), u64(7), parent=6)
    assert waits(ledger, lost) == comparable([lost])
    assert (ledger.unknown_parents, ledger.n_waiting) == (1, 0)


def test_a_removed_block_and_its_children_stop_waiting() -> None:
    """The rest of the store waits on; a removal in another tier changes nothing, and a clear ends all waiting."""
    ledger = Ledger(counts_copies=True)
    waits(ledger, host(u64(2, 3, 4), u64(2, 3, 4), parent=1), removed(2), replace(removed(3), tier=Tier.HOST))
    published = waits(ledger, host(u64(1), u64(1)))
    assert [names for _, _, names, *_ in published] == [[1], [2]]
    waits(ledger, host(u64(8), u64(8), parent=7), AllBlocksCleared(), host(u64(7), u64(7)))
    assert (ledger.n_waiting, len(ledger)) == (0, 1)


def test_the_number_of_waiting_stores_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are given up and counted; the others are placed when their parents come."""
    monkeypatch.setattr(ledger_module, "WAITING_STORES_MAX", 3)
    ledger = Ledger(counts_copies=True)
    for name in (10, 20, 30, 40):
        waits(ledger, host(u64(name + 1), u64(name + 1), parent=name))
    assert (ledger.n_waiting, ledger.left_out, ledger.complete) == (3, 1, True)
    waits(ledger, *(host(u64(name), u64(name)) for name in (10, 20, 30, 40)))
    assert (ledger.n_waiting, len(ledger)) == (0, 7)


def test_a_block_that_is_reported_by_its_name_alone_is_held_in_the_further_tier() -> None:
    """It is published under its parent, and stays when the first tier evicts it; an unknown name is counted."""
    published = Published(counts_copies=True)
    published.apply(stored(u64(1, 2), u64(50, 51)))
    out = published.apply(BlocksCopied(u64(2, 99), Tier.HOST))
    assert [(each.parent, each.engine.tolist(), each.tier) for each in out if isinstance(each, BlocksStored)] == [
        (1, [2], Tier.HOST)
    ]
    assert published.ledger.left_out == 1
    published.apply(removed(2))
    assert published.facts() == {(Tier.DEVICE, 50), (Tier.HOST, chain_hashes([50, 51])[1])}


def test_copies_are_dropped_when_the_engine_proves_not_to_count_them() -> None:
    """A repeated store was taken for a copy until the dialect was recognised; the first removal removes the block."""
    published = Published(counts_copies=True)
    published.apply(stored(u64(1), u64(50)))
    published.apply(stored(u64(2), u64(51), parent=1))
    published.apply(stored(u64(2), u64(51), parent=1))
    published.ledger.count_copies(False)
    published.apply(removed(2))
    assert published.facts() == {(Tier.DEVICE, 50)}
