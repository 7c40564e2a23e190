"""Render parity from end to end: two engines of which one has another chat template, a bridge, two routers and a front
on a real Kafka.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from streams.core.ids import WorkerId
from streams.kafka.clients import assign, reader
from streams.kafka.records import RENDER_PARITIES
from streams.lab.engines.chat_template import tokenizer_files
from streams.lab.processes import Children
from streams.lab.stack import Engine, FrontProcess, RouterProcess, Stack, get_bytes, get_json, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.bridges import SMALL
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S

MODEL = "m"

#: The front reads the registry every 2 s, and the bridge renews what it knows of a restarted engine.
PATIENCE_S = 45.0

#: Worker 2 renders chats with another style. Its completions have the same tokens.
OTHER_STYLE = ("--chat-style", "terse")
EQUAL, DIFFERS = ("equal", None), ("differs", "chat")


@dataclass(slots=True)
class Fleet:
    stack: Stack
    main: RouterProcess
    peer: RouterProcess
    front: FrontProcess
    engines: dict[int, Engine]


@pytest.fixture(scope="module")
def fleet(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("parity")
    model = folder / "model"
    model.mkdir()
    for name, text in tokenizer_files().items():
        (model / name).write_text(text)
    with Children() as children:
        stack = Stack(new_scope(folder), folder, children)
        worker = stack.worker()
        peer = stack.router("peer", wait=False)
        engines = stack.engines(2, SMALL, MODEL, 10.0, own_options={2: OTHER_STYLE})
        stack.bridge(engines)
        wait_workers(worker.url, 2)
        stack.wait_ready(peer)
        wait_workers(peer.url, 2)
        front = stack.front("front", [worker], ["--tokenizer", f"{MODEL}={model}"])
        yield Fleet(stack, worker, peer, front, {engine.worker_id: engine for engine in engines})


def rows(router: RouterProcess) -> dict[int, dict[str, Any]]:
    return {row["worker_id"]: row for row in get_json(f"{router.url}/workers")["workers"]}


def outcomes(router: RouterProcess) -> dict[int, tuple[str, str | None]]:
    found = {worker_id: row["render"] for worker_id, row in rows(router).items()}
    return {worker_id: (render["outcome"], render["part"] or render["reason"]) for worker_id, render in found.items()}


def last_records(settings: Settings) -> dict[bytes, bytes | None]:
    """Read the last record of each key of the topic `workers`, tombstones included."""
    topic = topics(settings).workers.name
    kafka = reader(settings)
    assign(kafka, [TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(settings.partitions)])
    found: dict[bytes, bytes | None] = {}
    n_ended = 0
    while n_ended < settings.partitions:
        message = kafka.poll(10.0)
        assert message is not None
        if message.error() is None:
            found[message.key() or b""] = message.value()
        else:
            n_ended += 1  # the end of a partition
    kafka.close()
    return found


def test_every_router_shows_which_engine_renders_otherwise(fleet: Fleet) -> None:
    """The front probes both engines; its log names the second one, and a restart of it is probed again."""
    wanted = {1: EQUAL, 2: DIFFERS}
    for router in (fleet.main, fleet.peer):
        wait_for(lambda r=router: outcomes(r) == wanted, PATIENCE_S, "both engines to be probed")  # type: ignore[misc]
    first = rows(fleet.peer)
    assert first[2]["render"]["from_token"] > 0
    assert first[2]["render"]["probed_by"].startswith("front ")
    assert first[1]["incarnation"] is not None
    page = get_bytes(f"{fleet.peer.url}/metrics").decode()
    for outcome, number in (("equal", 1), ("differs", 1), ("unknown", 0)):
        assert f'kvstreams_render_parity_workers{{outcome="{outcome}"}} {number}' in page.replace(".0\n", "\n")
    log = fleet.front.child.log_path.read_text()
    assert log.count("makes other tokens than the --tokenizer") == 1
    assert "worker 2 " in log and "--chat-template" in log
    for record in last_records(fleet.main.settings).values():
        assert record is None or not any(word in record for word in (b"terse", b"naive", b"5.14"))

    fleet.engines[2] = fleet.stack.restart_engine(fleet.engines[2], SMALL, MODEL, 10.0)  # with the right template
    for router in (fleet.main, fleet.peer):
        wait_for(lambda r=router: outcomes(r) == {1: EQUAL, 2: EQUAL}, PATIENCE_S, "the restart to be probed")  # type: ignore[misc]
    again = rows(fleet.peer)
    assert again[2]["incarnation"] > first[2]["incarnation"]
    assert again[1]["render"] == first[1]["render"]


def test_a_deleted_worker_takes_its_result_with_it(fleet: Fleet) -> None:
    """A worker without a bridge is registered, probed and deleted: its record becomes a tombstone."""
    api, settings = Api(fleet.main.url), fleet.main.settings
    url, key = fleet.engines[1].url, RENDER_PARITIES.keys.pack(WorkerId(9))
    body = {"url": f"{url}/", "model": MODEL, "block_size": SMALL.block_size}
    api.call("PUT", "/workers/9", body).given()
    wait_for(lambda: outcomes(fleet.peer).get(9) == EQUAL, PATIENCE_S, "the worker to be probed")
    assert last_records(settings)[key] is not None
    api.call("DELETE", "/workers/9").given()
    wait_for(lambda: last_records(settings)[key] is None, VISIBLE_TIMEOUT_S, "the record to be removed")
    wait_for(lambda: 9 not in rows(fleet.peer), VISIBLE_TIMEOUT_S, "the peer to forget the worker")
