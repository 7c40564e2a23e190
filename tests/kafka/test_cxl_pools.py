"""Who reaches a pooled block: the registry's pools and workers, as masks over rows that are never rewritten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from streams.cli import cli
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, SequenceHash, WorkerId
from streams.cxl.events import POOL_MEMBERS_MAX, CxlPool, state_changed
from streams.cxl.pool_registry import (
    PoolChange,
    change_pool,
    changed_pool,
    lose_pool,
    register_pool,
    registered_pool,
    write_pool_change,
)
from streams.cxl.pooled_view import PooledView, RowChange
from streams.cxl.records import (
    BlockKey,
    BlockRow,
    OwnerRow,
    Placement,
    block_key,
    encode_block,
    encode_owner,
    encode_pool,
    owner_key,
    pool_key,
)
from streams.cxl.states import CxlMemoryState
from streams.errors import BadRecord, EpochConflict, InvalidRequest, KvStreamsError, UnknownId
from streams.kafka import consume, ensure_topics, reader
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.api import Fleet

LOCAL, TRANSIT, POOLED, EVICTED = CxlMemoryState

OWNER = RankId(WorkerId(1), DpRank(0))
BLOCK = SequenceHash(5)
PLACED = Placement(POOLED, "p", 1, (), "m", Incarnation(3), 0)
POOL = CxlPool("p", members=(WorkerId(2), WorkerId(3), WorkerId(4)), epoch=1)
REGISTERED = {WorkerId(1), WorkerId(2), WorkerId(3)}


def reached(placement: Placement, pool: CxlPool | None = POOL, owner: OwnerRow | None = None) -> set[int]:
    """Who of the workers 1 to 3, which are registered, reaches a block."""
    view = PooledView()
    view.fold(block_key(BlockKey(BLOCK, OWNER, "p")), encode_block(BlockRow(placement, None, 0, EngineHash(9))))
    if owner is not None:
        view.fold(owner_key(OWNER), encode_owner(owner))
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
        (PLACED, replace(POOL, epoch=2), set()),  # the pool lost what it held
        (PLACED, replace(POOL, epoch=0), {2, 3}),  # the registry's newest record has not been read yet
        (PLACED, replace(POOL, lost=True), set()),
        (PLACED, None, set()),  # nobody named, and no pool to have members
        (replace(PLACED, accessible_workers=(WorkerId(1), WorkerId(9))), None, {1}),
        (replace(PLACED, state=TRANSIT), POOL, set()),
        (replace(PLACED, state=EVICTED), POOL, set()),
    ],
)
def test_a_block_is_reached_by_whom_every_mask_lets_through(
    placement: Placement, pool: CxlPool | None, workers: set[int]
) -> None:
    """State, pool, epoch, members and registry; the owner need be none of them."""
    assert reached(placement, pool) == workers


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
def test_the_end_of_a_life_shows_at_once_and_takes_nothing_out_of_a_pool(
    owner: OwnerRow | None, state: CxlMemoryState
) -> None:
    """By the owner's one row, before or behind the block's."""
    assert reached(PLACED, owner=owner) == {2, 3}
    view = PooledView()
    if owner is not None:
        view.fold(owner_key(OWNER), encode_owner(owner))
    row = BlockRow(replace(PLACED, state=TRANSIT), None, 0, EngineHash(9))
    assert view.fold(block_key(BlockKey(BLOCK, OWNER, "p")), encode_block(row)) == RowChange(BLOCK, None, row.placement)
    assert [block.metadata.state for block in view.blocks()] == [state]
    assert len(view) == 1
    assert view.fold(block_key(BlockKey(BLOCK, OWNER, "p")), None) == RowChange(BLOCK, row.placement, None)
    assert (len(view), list(view.blocks())) == (0, [])


@pytest.mark.parametrize("key", [b"", b"hello", b"R" + bytes(20)])
def test_a_strangers_record_is_refused(key: bytes) -> None:
    """And leaves the view as it was."""
    view = PooledView()
    with pytest.raises(BadRecord):
        view.fold(key, b"world")
    assert len(view) == 0


@pytest.mark.parametrize(
    "body",
    [
        {"members": ["x"]},
        {"members": [-1]},
        {"members": list(range(POOL_MEMBERS_MAX + 1))},
        {"capacity_blocks": 0},
        {"epoch": -1},
        {"latency_class": ""},
        {"size": 1},
        [],
    ],
)
def test_what_is_no_pool_is_refused_over_http(fleet: Fleet, body: Any) -> None:
    """As any other request that cannot be understood."""
    fleet.main.call("PUT", "/pools/refused", body).refused(400, "invalid_request")
    assert "refused" not in {pool["pool_id"] for pool in fleet.main.get("/pools")["pools"]}


KNOWN = CxlPool("p", "near", 5, (WorkerId(1), WorkerId(2)), epoch=3, registered_at_ms=9)


@pytest.mark.parametrize(
    ("known", "change", "wanted"),
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
def test_a_change_of_a_pool_leaves_what_it_does_not_name(
    known: CxlPool | None, change: PoolChange, wanted: CxlPool
) -> None:
    """Nothing named is nothing changed, and members of a pool that was lost bring it back."""
    assert changed_pool("p", known, change) == wanted


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
def test_a_change_that_cannot_be_is_refused(
    known: CxlPool | None, change: PoolChange, refused: type[KvStreamsError]
) -> None:
    """A new pool without a word about its members is a slip in a name, and by none does one that is lost come back."""
    with pytest.raises(refused):
        changed_pool("p", known, change)


def test_the_command_changes_what_its_options_name(scope: Settings) -> None:
    """And without one shows the pool, which a command that was typed too soon used to empty."""
    ensure_topics(scope, topics(scope).all())

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["cxl", "pool", "p", *arguments], env=as_environ(scope))

    slip = command("--latency-class", "near")
    assert isinstance(slip.exception, UnknownId)
    assert command("--member", "2", "--member", "1", "--latency-class", "near", "--capacity-blocks", "9").exit_code == 0
    told = "pool p: epoch 0, members 1, 2, latency class near, room for 9 blocks\n"
    assert command().output == told
    assert command("--epoch", "1").output == told.replace("epoch 0", "epoch 1")
    assert command("--no-members").output == told.replace("epoch 0, members 1, 2", "epoch 1, members none")
    assert command("--member", "1", "--no-members").exit_code == 2
    assert command("--lost", "--epoch", "9").exit_code == 2
    assert command("--lost").output == "pool p: epoch 2, lost, latency class near, room for 9 blocks\n"
    assert command().output == "pool p: epoch 2, lost, latency class near, room for 9 blocks\n"


def test_pools_are_known_to_every_router_and_their_epochs_never_go_back(fleet: Fleet) -> None:
    """A pool that is lost comes back in another epoch; one that nobody registered cannot be lost."""
    put = {"members": [3, 2, 3], "latency_class": "near", "capacity_blocks": 5, "epoch": 4}
    told = fleet.main.call("PUT", "/pools/epochs", put).given()
    assert (told["members"], told["epoch"], told["lost"]) == ([2, 3], 4, False)
    assert fleet.main.call("PUT", "/pools/epochs", {"members": [2]}).given()["epoch"] == 4
    fleet.main.call("PUT", "/pools/epochs", {"members": [2], "epoch": 3}).refused(409, "epoch_conflict")
    fleet.main.call("PUT", "/pools/epochs", {"latency_class": "far"}).refused(400, "invalid_request")
    lost = fleet.main.call("DELETE", "/pools/epochs").given()
    assert (lost["epoch"], lost["lost"]) == (5, True)
    back = fleet.main.call("PUT", "/pools/epochs", {"members": [2]}).given()
    assert (back["epoch"], back["lost"]) == (6, False)
    fleet.main.call("PUT", "/pools/epochs", {"members": [2], "epoch": (1 << 63) - 1}).refused(400, "invalid_request")
    greatest = (1 << 52) - 1
    assert fleet.main.call("PUT", "/pools/epochs", {"members": [2], "epoch": greatest}).given()["epoch"] == greatest
    assert fleet.main.call("DELETE", "/pools/epochs").given()["epoch"] == greatest + 1
    fleet.main.call("PUT", "/pools/epochs", {"members": [2], "epoch": greatest}).refused(409, "epoch_conflict")
    assert fleet.main.call("PUT", "/pools/epochs", {"members": [2]}).given()["epoch"] == greatest + 2
    fleet.wait(lambda: fleet.peer.get("/pools") == fleet.main.get("/pools"), "the peer to know the pools")
    fleet.main.call("DELETE", "/pools/nobody").refused(404, "unknown_id")
    for name in ("x" * 129, "a%00b", "a%0Ab", "%E2%80%A8"):
        fleet.main.call("PUT", f"/pools/{name}", {}).refused(400, "invalid_request")
        fleet.main.call("DELETE", f"/pools/{name}").refused(400, "invalid_request")


def test_a_writer_that_has_not_read_of_a_loss_does_not_undo_it(scope: Settings) -> None:
    """It is told so, and the loss is the last record again: what compaction keeps, and later readers find."""
    ensure_topics(scope, topics(scope).all())
    known = change_pool(scope, "raced", PoolChange(members=(WorkerId(2),)))
    lost = lose_pool(scope, "raced")
    with pytest.raises(EpochConflict):
        register_pool(scope, replace(known, members=(WorkerId(3),)))
    assert registered_pool(scope, "raced") == lost
    assert last_record(scope, "raced") == encode_pool(lost)
    back = change_pool(scope, "raced", PoolChange(members=(WorkerId(3),)))
    assert (back.epoch, back.lost) == (2, False)


def last_record(settings: Settings, pool_id: str) -> bytes | None:
    """Of a pool, in the registry."""
    spec, found = topics(settings).workers, None
    left = set(range(spec.partitions))
    consumer = reader(settings)
    consumer.assign([TopicPartition(spec.name, number, OFFSET_BEGINNING) for number in left])
    while left:
        for message in consume(consumer, 100, 1.0):
            if message.error() is not None:
                left.discard(message.partition() or 0)
            elif message.key() == pool_key(pool_id):
                found = message.value()
    consumer.close()
    return found


NEWER = [
    (replace(POOL, epoch=2, lost=True), replace(POOL, epoch=1)),
    (replace(POOL, epoch=2), replace(POOL, epoch=1, lost=True)),
    (replace(POOL, epoch=2, lost=True), replace(POOL, epoch=2)),
]


@pytest.mark.parametrize(("newer", "older"), NEWER)
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_records_of_a_pool_the_newer_counts_in_either_order(
    newer: CxlPool, older: CxlPool, turned: bool
) -> None:
    """A loss that was read is not undone by whoever had not read it."""
    view = PooledView()
    for pool in (newer, older) if turned else (older, newer):
        view.fold_pool(pool_key("p"), encode_pool(pool))
    assert view.pools == {"p": newer}


def test_of_equal_epochs_the_later_record_counts() -> None:
    """Members come and go within an epoch."""
    view = PooledView()
    for members in ((WorkerId(1),), (), (WorkerId(2),)):
        view.fold_pool(pool_key("p"), encode_pool(replace(POOL, members=members)))
    assert view.pools["p"].members == (WorkerId(2),)


@pytest.mark.parametrize(("newer", "older"), NEWER)
def test_a_writer_that_came_too_late_publishes_what_it_came_too_late_for(newer: CxlPool, older: CxlPool) -> None:
    """And one that did not writes nothing more."""
    published: list[CxlPool] = []
    with pytest.raises(EpochConflict):
        write_pool_change(older, newer, published.append)
    write_pool_change(newer, newer, published.append)
    write_pool_change(newer, None, published.append)
    assert published == [newer]


@pytest.mark.parametrize("name", ["a\nb", "\udcff", "a\0", "..", "", "x" * 129])
def test_a_name_that_no_pool_can_have_is_refused_wherever_it_is_told(name: str) -> None:
    """By what scripts, engines and publishers call, before anything is read or written."""
    nowhere = Settings(kafka="127.0.0.1:1")
    for refuses in (
        lambda: CxlPool(name),
        lambda: change_pool(nowhere, name, PoolChange(members=())),
        lambda: lose_pool(nowhere, name),
        lambda: state_changed(1, [2], "in_transit", name, None),
    ):
        with pytest.raises(InvalidRequest):
            refuses()
