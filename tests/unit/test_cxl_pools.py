"""Which workers can read a pooled block, and how a pool changes: the parts that need no Kafka."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streams.core.cxl_memory import CxlMemoryState
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import CxlPool, state_changed
from streams.cxl.pool_registry import PoolChange, change_pool, changed_pool, lose_pool, write_pool_change
from streams.cxl.pooled_view import PooledView, RowChange
from streams.cxl.records import (
    OWNER_KEY,
    BlockKey,
    BlockRow,
    OwnerRow,
    Placement,
    block_key,
    encode_block,
    encode_owner,
    encode_pool,
    pool_key,
)
from streams.errors import BadRecord, EpochConflict, InvalidRequest, KvStreamsError, UnknownId
from streams.settings import Settings

LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState

OWNER = RankId(WorkerId(1), DpRank(0))
BLOCK = SequenceHash(5)
PLACED = Placement(POOLED, "p", 1, (), "m", Incarnation(3), 0)
POOL = CxlPool("p", members=(WorkerId(2), WorkerId(3), WorkerId(4)), epoch=1)
REGISTERED = {WorkerId(1), WorkerId(2), WorkerId(3)}


def accessible_to(placement: Placement, pool: CxlPool | None = POOL, owner: OwnerRow | None = None) -> set[int]:
    """Return which of the workers 1 to 3, which are registered, can read a block."""
    view = PooledView()
    view.fold(block_key(BlockKey(BLOCK, OWNER, "p")), encode_block(BlockRow(placement, None, 0, EngineHash(9))))
    if owner is not None:
        view.fold(OWNER_KEY.pack(OWNER), encode_owner(owner))
    if pool is not None:
        view.fold_pool(pool_key("p"), encode_pool(pool))
    (block,) = view.blocks_of(BLOCK)
    assert list(view.blocks()) == [block]
    return set(view.reachable(block, REGISTERED))


@pytest.mark.parametrize(
    ("placement", "pool", "workers"),
    [
        (PLACED, POOL, {2, 3}),  # every member that is registered
        (replace(PLACED, accessible_workers=(WorkerId(1), WorkerId(2))), POOL, {2}),  # those named that are members
        (replace(PLACED, accessible_workers=(WorkerId(9),)), POOL, set()),
        (PLACED, replace(POOL, members=(WorkerId(3),)), {3}),  # a host left
        (PLACED, replace(POOL, epoch=2), set()),  # the pool lost its contents
        (PLACED, replace(POOL, epoch=0), {2, 3}),  # the registry's newest record has not been read yet
        (PLACED, replace(POOL, lost=True), set()),
        (PLACED, None, set()),  # no worker is named, and an unregistered pool has no members
        (replace(PLACED, accessible_workers=(WorkerId(1), WorkerId(9))), None, {1}),
        (replace(PLACED, state=TRANSIT), POOL, set()),
        (replace(PLACED, state=EVICTED), POOL, set()),
    ],
)
def test_a_block_is_accessible_to_the_workers_that_pass_every_mask(
    placement: Placement, pool: CxlPool | None, workers: set[int]
) -> None:
    """The masks are state, pool, epoch, members and registry; the owner itself need not pass them."""
    assert accessible_to(placement, pool) == workers


@pytest.mark.parametrize(
    ("owner", "state"),
    [
        (None, TRANSIT),
        (OwnerRow(incarnation=Incarnation(3)), TRANSIT),
        (OwnerRow(incarnation=Incarnation(2), ended=True), TRANSIT),
        (OwnerRow(incarnation=Incarnation(3), ended=True), EVICTED),
        (OwnerRow(incarnation=Incarnation(4)), EVICTED),
    ],
)
def test_the_end_of_an_incarnation_applies_at_once_and_takes_nothing_out_of_a_pool(
    owner: OwnerRow | None, state: CxlMemoryState
) -> None:
    """The owner's one row has this effect whether it is read before the block's row or after it."""
    assert accessible_to(PLACED, owner=owner) == {2, 3}
    view = PooledView()
    if owner is not None:
        view.fold(OWNER_KEY.pack(OWNER), encode_owner(owner))
    row = BlockRow(replace(PLACED, state=TRANSIT), None, 0, EngineHash(9))
    assert view.fold(block_key(BlockKey(BLOCK, OWNER, "p")), encode_block(row)) == RowChange(BLOCK, None, row.placement)
    assert [block.metadata.state for block in view.blocks()] == [state]
    assert len(view) == 1
    assert view.fold(block_key(BlockKey(BLOCK, OWNER, "p")), None) == RowChange(BLOCK, row.placement, None)
    assert (len(view), list(view.blocks())) == (0, [])


@pytest.mark.parametrize("key", [b"", b"hello", b"R" + bytes(20)])
def test_a_record_of_a_foreign_writer_is_refused(key: bytes) -> None:
    """The record leaves the view as it was."""
    view = PooledView()
    with pytest.raises(BadRecord):
        view.fold(key, b"world")
    assert len(view) == 0


KNOWN = CxlPool("p", "near", 5, (WorkerId(1), WorkerId(2)), epoch=3, registered_at_ms=9)


@pytest.mark.parametrize(
    ("known", "change", "expected"),
    [
        (KNOWN, PoolChange(), KNOWN),
        (KNOWN, PoolChange(members=(WorkerId(4),)), replace(KNOWN, members=(WorkerId(4),))),
        (KNOWN, PoolChange(members=()), replace(KNOWN, members=())),
        (KNOWN, PoolChange(latency_class="far"), replace(KNOWN, latency_class="far")),
        (KNOWN, PoolChange(capacity_blocks=7), replace(KNOWN, capacity_blocks=7)),
        (KNOWN, PoolChange(capacity_blocks=0), replace(KNOWN, capacity_blocks=None)),
        (KNOWN, PoolChange(epoch=3), KNOWN),
        (KNOWN, PoolChange(epoch=4), replace(KNOWN, epoch=4)),
        (replace(KNOWN, lost=True), PoolChange(), replace(KNOWN, lost=True)),
        (
            replace(KNOWN, lost=True),
            PoolChange(members=(WorkerId(4),)),
            replace(KNOWN, members=(WorkerId(4),), epoch=4),
        ),
        (None, PoolChange(members=()), CxlPool("p")),
        (None, PoolChange((WorkerId(1),), "near", 5, 2), CxlPool("p", "near", 5, (WorkerId(1),), 2)),
    ],
)
def test_a_change_of_a_pool_keeps_what_it_does_not_name(
    known: CxlPool | None, change: PoolChange, expected: CxlPool
) -> None:
    """A change that names nothing changes nothing, and naming the members of a lost pool brings the pool back."""
    assert changed_pool("p", known, change) == expected


@pytest.mark.parametrize(
    ("known", "change", "refused"),
    [
        (None, PoolChange(), UnknownId),
        (None, PoolChange(latency_class="near"), UnknownId),
        (replace(KNOWN, lost=True), PoolChange(latency_class="near"), UnknownId),
        (KNOWN, PoolChange(epoch=2), EpochConflict),
        (KNOWN, PoolChange(capacity_blocks=-1), InvalidRequest),
        (KNOWN, PoolChange(latency_class=""), InvalidRequest),
    ],
)
def test_an_impossible_change_is_refused(
    known: CxlPool | None, change: PoolChange, refused: type[KvStreamsError]
) -> None:
    """Without members, a change registers no unknown pool, since its id may be a typo, and revives no lost one."""
    with pytest.raises(refused):
        changed_pool("p", known, change)


NEWER = [
    (replace(POOL, epoch=2, lost=True), replace(POOL, epoch=1)),
    (replace(POOL, epoch=2), replace(POOL, epoch=1, lost=True)),
    (replace(POOL, epoch=2, lost=True), replace(POOL, epoch=2)),
]


@pytest.mark.parametrize(("newer", "older"), NEWER)
@pytest.mark.parametrize("newer_first", [False, True])
def test_the_newer_of_two_records_of_a_pool_wins_in_either_order(
    newer: CxlPool, older: CxlPool, newer_first: bool
) -> None:
    """A writer that had not read of a loss does not undo it for a reader that has."""
    view = PooledView()
    for pool in (newer, older) if newer_first else (older, newer):
        view.fold_pool(pool_key("p"), encode_pool(pool))
    assert view.pools == {"p": newer}


def test_the_later_of_two_records_of_one_epoch_wins() -> None:
    """Members join and leave within an epoch."""
    view = PooledView()
    for members in ((WorkerId(1),), (), (WorkerId(2),)):
        view.fold_pool(pool_key("p"), encode_pool(replace(POOL, members=members)))
    assert view.pools["p"].members == (WorkerId(2),)


@pytest.mark.parametrize(("newer", "older"), NEWER)
def test_a_writer_that_was_too_late_publishes_the_newer_record_again(newer: CxlPool, older: CxlPool) -> None:
    """A writer that was in time publishes nothing more."""
    published: list[CxlPool] = []
    with pytest.raises(EpochConflict):
        write_pool_change(older, newer, published.append)
    write_pool_change(newer, newer, published.append)
    write_pool_change(newer, None, published.append)
    assert published == [newer]


@pytest.mark.parametrize("name", ["a\nb", "\udcff", "a\0", "..", "", "x" * 129])
def test_an_invalid_pool_id_is_refused_everywhere(name: str) -> None:
    """The calls of scripts, engines and publishers refuse it before they read or write anything."""
    nowhere = Settings(kafka="127.0.0.1:1")
    for refuses in (
        lambda: CxlPool(name),
        lambda: change_pool(nowhere, name, PoolChange(members=())),
        lambda: lose_pool(nowhere, name),
        lambda: state_changed(1, [2], "in_transit", name, None),
    ):
        with pytest.raises(InvalidRequest):
            refuses()
