"""CXL pools of the registry: over HTTP, by the command, and with two writers at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from streams.cli import cli
from streams.core.ids import WorkerId
from streams.cxl.events import POOL_MEMBERS_MAX
from streams.cxl.pool_registry import PoolChange, change_pool, lose_pool, register_pool, registered_pool
from streams.cxl.records import encode_pool, pool_key
from streams.errors import EpochConflict, UnknownId
from streams.kafka.clients import consume, ensure_topics, reader
from streams.settings import Settings, as_environ
from streams.topics import topics
from tests.helpers.api import Fleet


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
def test_an_invalid_pool_is_refused_over_http(fleet: Fleet, body: Any) -> None:
    """The answer is the one to any other invalid request, and nothing is registered."""
    fleet.main.call("PUT", "/pools/refused", body).refused(400, "invalid_request")
    assert "refused" not in {pool["pool_id"] for pool in fleet.main.get("/pools")["pools"]}


@pytest.mark.first_ring("cxl")
def test_the_command_changes_what_its_options_name(scope: Settings) -> None:
    """Without options the command only shows the pool, and it does not register an unknown pool without members."""
    ensure_topics(scope, topics(scope).all())

    def command(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["cxl", "pool", "p", *arguments], env=as_environ(scope))

    unknown = command("--latency-class", "near")
    assert isinstance(unknown.exception, UnknownId)
    assert command("--member", "2", "--member", "1", "--latency-class", "near", "--capacity-blocks", "9").exit_code == 0
    shown = "pool p: epoch 0, members 1, 2, latency class near, capacity 9 blocks\n"
    assert command().output == shown
    assert command("--epoch", "1").output == shown.replace("epoch 0", "epoch 1")
    assert command("--no-members").output == shown.replace("epoch 0, members 1, 2", "epoch 1, members none")
    assert command("--member", "1", "--no-members").exit_code == 2
    assert command("--lost", "--epoch", "9").exit_code == 2
    assert command("--lost").output == "pool p: epoch 2, lost, latency class near, capacity 9 blocks\n"
    assert command().output == "pool p: epoch 2, lost, latency class near, capacity 9 blocks\n"


def test_every_router_has_the_pools_and_their_epochs_never_decrease(fleet: Fleet) -> None:
    """A lost pool returns in the next epoch, and a pool that is not registered cannot be lost."""
    put = {"members": [3, 2, 3], "latency_class": "near", "capacity_blocks": 5, "epoch": 4}
    pool = fleet.main.call("PUT", "/pools/epochs", put).given()
    assert (pool["members"], pool["epoch"], pool["lost"]) == ([2, 3], 4, False)
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
    fleet.wait(lambda: fleet.peer.get("/pools") == fleet.main.get("/pools"), "the peer to have the pools")
    fleet.main.call("DELETE", "/pools/nobody").refused(404, "unknown_id")
    for name in ("x" * 129, "a%00b", "a%0Ab", "%E2%80%A8"):
        fleet.main.call("PUT", f"/pools/{name}", {}).refused(400, "invalid_request")
        fleet.main.call("DELETE", f"/pools/{name}").refused(400, "invalid_request")


def test_a_writer_that_has_not_read_of_a_loss_does_not_undo_it(scope: Settings) -> None:
    """The writer gets an error, and the loss becomes the last record again, so that compaction keeps it."""
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
    """Return the last record of a pool in the registry."""
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
