"""From a loss to an exact rank again, end to end: the log lacks records, the agent asks, the bridge restates.

Records are deleted from kv-events before any agent has seen them; the engine, and the bridge's ledger, know them still.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from streams.codec import decode_batch, decode_resync
from streams.core.events import RestatementChunk, ResyncRequest
from streams.faults import FAULT_ENV
from streams.kafka import Record, admin, ensure_topics, log_end, partition_of
from streams.local.processes import Child
from streams.local.stack import RouterProcess, Stack, get_json, known_blocks, wait_workers
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARKED_PREFIX, decode_partition, partition_key
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.engine_double import EngineDouble
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.kafka.test_bridge_faults import RANK, WORKER_ID, await_log, bridge_to, read_log

#: Longer than a worker takes to start: a bridge that is stopped meanwhile keeps its engine.
LEASE_S = 60.0

#: Stores of so many blocks are three chunks of a restatement.
LARGE = (60, 2400)

_ADMIN_TIMEOUT_S = 30.0


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    with EngineDouble() as double:
        yield double


def fed(stack: Stack, engine: EngineDouble, lease_s: float) -> tuple[Child, RouterProcess]:
    """A bridge and a worker that know what an engine holds."""
    stack.settings = replace(stack.settings, bridge_lease_s=lease_s)
    ensure_topics(stack.settings, topics(stack.settings).all())
    engine.store(1)
    engine.store(100)
    worker = stack.worker()
    bridge = bridge_to(stack, engine)
    wait_workers(worker.url, 1)
    await_exact(worker, engine)
    return bridge, worker


def lose(settings: Settings, engine: EngineDouble) -> None:
    """Tell what no agent will see: it is deleted from the log when the bridge has published it."""
    engine.store(200)
    engine.remove(1, 1)
    last = engine.store(300)
    await_log(settings, lambda told: told.numbers()[-1:] == [last], "what is to be lost")
    source, partition = topics(settings).kv_events.name, partition_of(WORKER_ID, settings.partitions)
    end = log_end(settings, source, partition)
    client = admin(settings)
    for deleted in client.delete_records([TopicPartition(source, partition, end)]).values():
        deleted.result(_ADMIN_TIMEOUT_S)


def rank_state(router: RouterProcess) -> tuple[str, int, set[tuple[int, int]]]:
    """Health and generation of the rank, and its worker's blocks."""
    ranks = [rank for rank in get_json(f"{router.url}/state")["ranks"] if rank["worker_id"] == WORKER_ID]
    if not ranks:
        return "unknown", -1, set()
    return ranks[0]["health"], ranks[0]["generation"], known_blocks(router.url)


def await_exact(router: RouterProcess, engine: EngineDouble, generation: int = 0) -> None:
    truth = ("exact", generation, {(int(WORKER_ID), block) for _, block in engine.truth})
    wait_for(lambda: rank_state(router) == truth, VISIBLE_TIMEOUT_S * 2, "the rank to be exact", 0.1)


def asked(settings: Settings) -> list[ResyncRequest]:
    """Requests for the rank."""
    found: list[ResyncRequest] = []

    def take(records: list[Record]) -> None:
        found.extend(decode_resync(record.value) for record in records)

    read_to_end(settings, topics(settings).kv_control.name, partition_of(WORKER_ID, settings.partitions), None, take)
    return [request for request in found if request.rank == RANK]


def test_what_the_log_lost_is_asked_for_and_restated_under_a_new_epoch(stack: Stack, engine: EngineDouble) -> None:
    """The rank is exact again, equal to the engine, and goes on from there."""
    _, worker = fed(stack, engine, LEASE_S)
    worker.child.kill()
    lose(stack.settings, engine)
    engine.store(400)
    stack.restart_worker(worker)
    await_exact(worker, engine, generation=1)
    engine.remove(200, 1)
    engine.store(500)
    await_exact(worker, engine, generation=1)
    assert [request.rank for request in asked(stack.settings)][:1] == [RANK]
    assert read_log(stack.settings).chunks


def test_a_bridge_that_dies_with_a_request_unanswered_is_asked_again(stack: Stack, engine: EngineDouble) -> None:
    """Nobody keeps requests for a bridge that is not there; the next one has the whole ledger from the engine."""
    bridge, worker = fed(stack, engine, lease_s=3.0)
    worker.child.kill()
    lose(stack.settings, engine)
    bridge.signal(signal.SIGSTOP)
    engine.store(400)
    stack.restart_worker(worker)
    wait_for(lambda: bool(asked(stack.settings)), VISIBLE_TIMEOUT_S, "a request", 0.1)
    assert rank_state(worker)[0] == "degraded"
    bridge.kill()
    bridge.start()
    await_exact(worker, engine, generation=1)
    engine.remove(200, 1)
    await_exact(worker, engine, generation=1)


def test_an_agent_that_dies_between_two_chunks_leaves_the_first_to_the_next(stack: Stack, engine: EngineDouble) -> None:
    """What is parked is a row of the table; a worker that never saw it swaps the whole in."""
    bridge, worker = fed(stack, engine, LEASE_S)
    n_stores, n_blocks = LARGE
    for n in range(n_stores):
        engine.store(100_000 * (n + 1), n_blocks)
    await_exact(worker, engine)
    worker.child.kill()
    lose(stack.settings, engine)
    bridge.signal(signal.SIGSTOP)  # until the one that asks is dead
    stack.restart_worker(worker)
    wait_for(lambda: bool(asked(stack.settings)), VISIBLE_TIMEOUT_S, "a request", 0.1)
    worker.child.kill()
    bridge.signal(signal.SIGCONT)
    told = await_log(stack.settings, lambda told: len(told.chunks) >= 3, "three chunks")
    assert [each.body.chunk for each in told.chunks if isinstance(each.body, RestatementChunk)] == [0, 1, 2]

    # One record a transaction, and death at effect 4 of the second chunk: the first one is committed by then.
    doomed = stack.worker(
        "doomed",
        router=False,
        env={
            FAULT_ENV: f"4:{records_before_second_chunk(stack.settings) + 1}",
            "KVSTREAMS_BATCH_RECORDS_MAX": "1",
        },
    )
    wait_for(lambda: not doomed.child.running, VISIBLE_TIMEOUT_S, "the fault")
    assert parked_rows(stack.settings) == 1
    shutil.rmtree(Path(worker.settings.data_dir))
    stack.restart_worker(worker)
    # A worker that takes longer to read on than a new owner waits for the rest asks once more, and is told once more.
    truth = ("exact", {(int(WORKER_ID), block) for _, block in engine.truth})
    wait_for(lambda: rank_state(worker)[::2] == truth, VISIBLE_TIMEOUT_S * 2, "the rank to be exact", 0.1)
    wait_for(lambda: parked_rows(stack.settings) == 0, VISIBLE_TIMEOUT_S, "no chunk to be parked", 0.1)


def records_before_second_chunk(settings: Settings) -> int:
    """Records that no agent has applied, up to the first chunk of the last restatement."""
    partition = partition_of(WORKER_ID, settings.partitions)
    applied = -1

    def take(records: list[Record]) -> None:
        nonlocal applied
        for record in records:
            if record.key == partition_key(partition) and record.value is not None:
                applied = decode_partition(record.key, record.value).sources[0].applied_offset

    read_to_end(settings, topics(settings).index_changelog.name, partition, None, take)
    behind: list[Record] = []
    read_to_end(settings, topics(settings).kv_events.name, partition, None, behind.extend)
    waiting = [decode_batch(record.value).body for record in behind if record.offset > applied]
    return 1 + next(n for n, body in enumerate(waiting) if isinstance(body, RestatementChunk) and body.chunk == 0)


def parked_rows(settings: Settings) -> int:
    """Chunks that wait in the table."""
    rows: dict[bytes, bytes | None] = {}

    def take(records: list[Record]) -> None:
        rows.update((record.key, record.value) for record in records if record.key.startswith(PARKED_PREFIX))

    partition = partition_of(WORKER_ID, settings.partitions)
    read_to_end(settings, topics(settings).index_changelog.name, partition, None, take)
    return sum(value is not None for value in rows.values())
