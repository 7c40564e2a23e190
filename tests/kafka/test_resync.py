"""A resync, end to end: the log lacks records, the agent requests a restatement, and the bridge publishes it.

Records are deleted from kv-events before any agent has read them; the engine, and the bridge's ledger, still have them.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from streams.core.events import RestatementChunk, ResyncRequest
from streams.kafka.clients import Record, admin, ensure_topics, partition_of
from streams.kafka.log_offsets import log_end
from streams.kafka.records import decode_batch, decode_resync
from streams.lab.processes import Child
from streams.lab.stack import RouterProcess, Stack, get_json, known_blocks, wait_workers
from streams.process.faults import FAULT_ENV
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import CHUNK_KEY, PARTITION_KEY, decode_partition
from streams.topics import topics
from tests.helpers.bridges import RANK, WORKER_ID, await_log, bridge_to, read_log
from tests.helpers.engine_double import EngineDouble
from tests.helpers.support import VISIBLE_TIMEOUT_S

#: Longer than a worker takes to start, so that a bridge that is paused meanwhile keeps its engine.
LEASE_S = 60.0

#: Stores, and blocks per store, whose restatement has three chunks.
LARGE = (60, 2400)

_ADMIN_TIMEOUT_S = 30.0


@pytest.fixture
def engine() -> Iterator[EngineDouble]:
    with EngineDouble() as double:
        yield double


def fed(stack: Stack, engine: EngineDouble, lease_s: float) -> tuple[Child, RouterProcess]:
    """Start a bridge and a worker, and wait until the worker has everything that the engine holds."""
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
    """Report events that no agent reads: they are deleted from the log once the bridge has published them."""
    engine.store(200)
    engine.remove(1, 1)
    last = engine.store(300)
    await_log(settings, lambda log: log.numbers()[-1:] == [last], "the records to be lost")
    source, partition = topics(settings).kv_events.name, partition_of(WORKER_ID, settings.partitions)
    end = log_end(settings, source, partition)
    client = admin(settings)
    for deleted in client.delete_records([TopicPartition(source, partition, end)]).values():
        deleted.result(_ADMIN_TIMEOUT_S)


def rank_state(router: RouterProcess) -> tuple[str, int, set[tuple[int, int]]]:
    """Return health and generation of the rank, and its worker's blocks."""
    ranks = [rank for rank in get_json(f"{router.url}/state")["ranks"] if rank["worker_id"] == WORKER_ID]
    if not ranks:
        return "unknown", -1, set()
    return ranks[0]["health"], ranks[0]["generation"], known_blocks(router.url)


def await_exact(router: RouterProcess, engine: EngineDouble, generation: int = 0) -> None:
    truth = ("exact", generation, {(int(WORKER_ID), block) for _, block in engine.truth})
    wait_for(lambda: rank_state(router) == truth, VISIBLE_TIMEOUT_S * 2, "the rank to be exact", 0.1)


def requests_of_rank(settings: Settings) -> list[ResyncRequest]:
    """Return the resync requests of the rank."""
    found: list[ResyncRequest] = []

    def take(records: list[Record]) -> None:
        found.extend(decode_resync(record.value) for record in records)

    read_to_end(settings, topics(settings).kv_control.name, partition_of(WORKER_ID, settings.partitions), None, take)
    return [request for request in found if request.rank == RANK]


def test_records_lost_from_the_log_are_restated_under_a_new_epoch(stack: Stack, engine: EngineDouble) -> None:
    """The rank is exact again and equals the engine, and later events are applied."""
    _, worker = fed(stack, engine, LEASE_S)
    worker.child.kill()
    lose(stack.settings, engine)
    engine.store(400)
    stack.restart_worker(worker)
    await_exact(worker, engine, generation=1)
    engine.remove(200, 1)
    engine.store(500)
    await_exact(worker, engine, generation=1)
    assert [request.rank for request in requests_of_rank(stack.settings)][:1] == [RANK]
    assert read_log(stack.settings).chunks


def test_a_request_is_repeated_for_a_bridge_that_was_killed_before_it_answered(
    stack: Stack, engine: EngineDouble
) -> None:
    """No request is kept for a bridge that is not running; the next one gets the whole ledger from the engine."""
    bridge, worker = fed(stack, engine, lease_s=3.0)
    worker.child.kill()
    lose(stack.settings, engine)
    bridge.signal(signal.SIGSTOP)
    engine.store(400)
    stack.restart_worker(worker)
    wait_for(lambda: bool(requests_of_rank(stack.settings)), VISIBLE_TIMEOUT_S, "a request", 0.1)
    # The router reads what the agent wrote together with the request.
    wait_for(lambda: rank_state(worker)[0] == "degraded", VISIBLE_TIMEOUT_S, "the rank to be degraded", 0.1)
    bridge.kill()
    bridge.start()
    await_exact(worker, engine, generation=1)
    engine.remove(200, 1)
    await_exact(worker, engine, generation=1)


def test_the_next_agent_recovers_a_chunk_parked_by_one_that_was_killed(stack: Stack, engine: EngineDouble) -> None:
    """A parked chunk is a row of the table, so a worker that never read it can apply the restatement."""
    bridge, worker = fed(stack, engine, LEASE_S)
    n_stores, n_blocks = LARGE
    for n in range(n_stores):
        engine.store(100_000 * (n + 1), n_blocks)
    await_exact(worker, engine)
    worker.child.kill()
    lose(stack.settings, engine)
    bridge.signal(signal.SIGSTOP)  # until the worker that requests the resync is killed
    stack.restart_worker(worker)
    wait_for(lambda: bool(requests_of_rank(stack.settings)), VISIBLE_TIMEOUT_S, "a request", 0.1)
    worker.child.kill()
    bridge.signal(signal.SIGCONT)
    log = await_log(stack.settings, lambda log: len(log.chunks) >= 3, "three chunks")
    assert [each.body.chunk for each in log.chunks if isinstance(each.body, RestatementChunk)] == [0, 1, 2]

    # One record per transaction, and SIGKILL at effect 4 of the second chunk, when the first one is committed.
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
    # A worker that takes longer to read on than a new owner waits for the rest requests another restatement.
    truth = ("exact", {(int(WORKER_ID), block) for _, block in engine.truth})
    wait_for(lambda: rank_state(worker)[::2] == truth, VISIBLE_TIMEOUT_S * 2, "the rank to be exact", 0.1)
    wait_for(lambda: parked_rows(stack.settings) == 0, VISIBLE_TIMEOUT_S, "no chunk to be parked", 0.1)


def records_before_second_chunk(settings: Settings) -> int:
    """Return how many records no agent has applied, up to the first chunk of the last restatement."""
    partition = partition_of(WORKER_ID, settings.partitions)
    applied = -1

    def take(records: list[Record]) -> None:
        nonlocal applied
        for record in records:
            if record.key == PARTITION_KEY.pack(partition) and record.value is not None:
                applied = decode_partition(record.key, record.value).sources[0].applied_offset

    read_to_end(settings, topics(settings).index_changelog.name, partition, None, take)
    source: list[Record] = []
    read_to_end(settings, topics(settings).kv_events.name, partition, None, source.extend)
    waiting = [decode_batch(record.value).body for record in source if record.offset > applied]
    return 1 + next(n for n, body in enumerate(waiting) if isinstance(body, RestatementChunk) and body.chunk == 0)


def parked_rows(settings: Settings) -> int:
    """Return the number of parked chunks in the table."""
    rows: dict[bytes, bytes | None] = {}

    def take(records: list[Record]) -> None:
        rows.update((record.key, record.value) for record in records if record.key.startswith(CHUNK_KEY.prefix))

    partition = partition_of(WORKER_ID, settings.partitions)
    read_to_end(settings, topics(settings).index_changelog.name, partition, None, take)
    return sum(value is not None for value in rows.values())
