"""The pipeline on a real Kafka, with real faults: whichever process is killed, routers have every acknowledged batch.

The tests produce batches as engines do, and also apply each acknowledged batch to the reference. Two states are equal
if their sets of (rank, tier, sequence hash) and their epochs are equal (docs/architecture.md).
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streams.core.events import BlocksStored, EngineBatch, EngineEvents
from streams.core.ids import DpRank, EngineHash, Incarnation, RankId, Tier, WorkerId
from streams.engines.publisher import KvEventPublisher
from streams.kafka.clients import ensure_topics, partition_of, producer
from streams.kafka.records import encode_batch
from streams.lab.stack import Stack, facts, get_json
from streams.process.waiting import wait_for
from streams.topics import topics
from tests.helpers.support import VISIBLE_TIMEOUT_S, dead_letters
from tests.helpers.truth import Engines, assert_equal
from tests.helpers.workers import mode, owners, put_worker


def length_of(value: bytes) -> bytes:
    return json.dumps({"bytes": len(value)}).encode()


def test_routers_have_every_acknowledged_batch_after_any_failure(stack: Stack) -> None:
    """SIGKILL, a deleted RocksDB, a late router and the loss of one of two workers all end in the reference state."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    worker = stack.worker()
    engines = Engines(stack.settings, seed)
    engines.publish(200)
    assert_equal(worker.url, engines.reference)
    assert engines.reference.members()

    with engines.publishing(300):
        worker.child.kill()
    stack.restart_worker(worker)
    assert_equal(worker.url, engines.reference)

    with engines.publishing(200):
        worker.child.kill()
        shutil.rmtree(Path(worker.settings.data_dir))
        # Owners and routers skip a foreign writer's record in the changelog.
        foreign = producer(stack.settings)
        foreign.produce(topics(stack.settings).index_changelog.name, key=b"hello", value=b"world", partition=0)
        assert foreign.flush(30.0) == 0
    stack.restart_worker(worker)
    assert_equal(worker.url, engines.reference)

    with engines.publishing(100):
        worker.child.kill()
        for current in Path(worker.settings.data_dir).glob("tables/*/CURRENT"):
            current.write_bytes(b"")  # a RocksDB that cannot be opened
    stack.restart_worker(worker)
    assert_equal(worker.url, engines.reference)

    late = stack.router("late")
    assert_equal(late.url, engines.reference)

    second = stack.worker("second", router=False)
    wait_for(lambda: owners(second) > 0, VISIBLE_TIMEOUT_S, "the second worker to be assigned partitions")
    with engines.publishing(400):
        worker.child.kill()
    assert_equal(late.url, engines.reference)
    wait_for(lambda: owners(second) == stack.settings.partitions, VISIBLE_TIMEOUT_S, "every partition to move")
    assert_equal(late.url, engines.reference)


@pytest.mark.parametrize("effect", range(1, 8))
def test_a_worker_killed_at_any_effect_leaves_nothing_half_done(stack: Stack, effect: int) -> None:
    """After SIGKILL at any of the seven effects, with parked chunks, another worker reaches the same state."""
    engines = Engines(stack.settings, seed=effect)
    ensure_topics(stack.settings, topics(stack.settings).all())
    engines.publish(150)
    doomed = stack.worker("doomed", router=False, env={"KVSTREAMS_FAULT": f"{effect}:20"})
    wait_for(lambda: not doomed.child.running, VISIBLE_TIMEOUT_S, "the fault")
    next_owner = stack.worker("next")
    engines.publish(50)
    assert_equal(next_owner.url, engines.reference, stack.settings, [Path(doomed.settings.data_dir)])


def test_bad_records_become_dead_letters_with_reasons_and_the_next_record_is_applied(stack: Stack) -> None:
    """Bad Avro, an unknown schema, a wrong block size or key make dead letters; an unknown parent is counted."""
    worker = stack.worker()
    rank = RankId(WorkerId(5), DpRank(0))
    tokens = np.arange(4, dtype=np.uint64)

    def batch(sequence: int, **changes: object) -> EngineBatch:
        stored = BlocksStored(None, tokens + np.uint64(100 * sequence), tokens + np.uint64(sequence))
        whole = EngineBatch(rank, "m", 16, Incarnation(9), sequence, 0, 0, EngineEvents((stored,)))
        return replace(whole, **changes)  # type: ignore[arg-type]

    good, other = encode_batch(batch(0)), encode_batch(batch(1, block_size=32))
    unknown_schema = good[:2] + bytes(8) + good[10:]
    orphan = BlocksStored(EngineHash(12345), tokens, tokens, Tier.DEVICE)
    records = [
        (b"5", b"no avro at all"),
        (b"5", unknown_schema),
        (b"5", None),
        (b"5", good),
        (b"5", good[:-3]),
        (b"5", other),
        (b"6", encode_batch(batch(1))),
        (b"5", b"x" * 999_900),  # as large as clients send by default; the dead letter, with its reason, is larger
        (b"5", encode_batch(batch(1, body=EngineEvents((orphan,))))),
        (b"5", encode_batch(batch(2))),
    ]
    kafka = producer(stack.settings)
    elsewhere = (partition_of(5, stack.settings.partitions) + 1) % stack.settings.partitions
    kafka.produce(topics(stack.settings).kv_events.name, key=b"5", value=good, partition=elsewhere)
    for key, value in records:
        kafka.produce(topics(stack.settings).kv_events.name, key=key, value=value)
    assert kafka.flush(30.0) == 0

    def all_applied() -> bool:
        ranks = get_json(f"{worker.url}/state")["ranks"]
        return bool(ranks) and ranks[0]["sequence"] == 2

    wait_for(all_applied, VISIBLE_TIMEOUT_S, "the last record to be visible")
    state = get_json(f"{worker.url}/state")["ranks"][0]
    assert (state["blocks"], state["unknown_parents"], state["health"], state["gaps"]) == (8, 1, "degraded", 0)
    wait_for(lambda: len(dead_letters(stack.settings)) == 8, VISIBLE_TIMEOUT_S, "eight dead letters")
    letters = dead_letters(stack.settings)
    reasons = {headers["kvstreams.reason"].decode(): value for value, headers in letters}
    assert (
        reasons
        == {  # the content of a record is kept only if it has the topic's schema
            "not_avro": reasons["not_avro"],
            "unknown_schema": length_of(unknown_schema),
            "bad_avro": length_of(good[:-3]),
            "wrong_block_size": other,
            "wrong_key": encode_batch(batch(1)),
            "wrong_partition": good,
        }
    )
    assert {value for value, headers in letters if headers["kvstreams.reason"] == b"not_avro"} == {
        length_of(b"no avro at all"),
        None,
        length_of(b"x" * 999_900),
    }
    assert all(headers["kvstreams.topic"].decode() == topics(stack.settings).kv_events.name for _, headers in letters)


@pytest.mark.first_ring("publisher")
def test_blocks_from_an_embedded_publisher_reach_the_router(stack: Stack) -> None:
    """Blocks stored, removed and cleared through KvEventPublisher are in the router's index."""
    worker = stack.worker()
    tokens = list(range(64))
    with KvEventPublisher(stack.settings, worker_id=3, model="m") as publisher:
        publisher.stored([-1, 2, 3, 4], tokens)
        publisher.stored([5], list(range(100, 116)), parent=4)
        publisher.removed([3])
        publisher.flush()
        wait_for(lambda: len(facts(worker.url)) == 4, VISIBLE_TIMEOUT_S, "four blocks")
        publisher.cleared()
        publisher.stored([7], tokens[:16])
    wait_for(lambda: len(facts(worker.url)) == 1, VISIBLE_TIMEOUT_S, "one block")
    assert get_json(f"{worker.url}/state")["ranks"][0]["health"] == "exact"


def test_answers_are_degraded_while_no_agent_runs(stack: Stack) -> None:
    """Answers degrade within seconds after the last agent is killed, and are exact again once one is running."""
    worker = stack.worker()
    router = stack.router("alone")
    put_worker(router.url)
    assert mode(router.url) == "degraded"  # no events of this worker have arrived
    KvEventPublisher(stack.settings, worker_id=1, model="m").flush()  # an incarnation that holds nothing
    wait_for(lambda: mode(router.url) == "exact", VISIBLE_TIMEOUT_S, "exact answers")
    worker.child.kill()
    wait_for(lambda: mode(router.url) == "degraded", VISIBLE_TIMEOUT_S, "degraded answers")
    # A router that starts now reads the killed owner's last partition record, and must not treat it as recent.
    fresh = stack.router("fresh")
    put_worker(fresh.url)
    assert {mode(fresh.url) for _ in range(20)} == {"degraded"}
    stack.restart_worker(worker)
    wait_for(lambda: mode(router.url) == "exact", VISIBLE_TIMEOUT_S, "exact answers again")
