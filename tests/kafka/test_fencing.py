"""Owners that come back from the dead, owners that all die, and a broker that stands still, on a real Kafka.

What is acknowledged is fed to the plain reference as in test_pipeline; whoever was believed dead must change nothing.
"""

from __future__ import annotations

import json
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from streams.codec import encode_batch
from streams.core.events import EngineBatch, WorkerRemoved
from streams.core.ids import Incarnation
from streams.engines.publisher import KvEventPublisher
from streams.kafka import Record, partition_of
from streams.local.kafka import LocalKafka, LocalKafkaConfig
from streams.local.processes import Child, Children
from streams.local.stack import RouterProcess, Stack, facts
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import decode_partition, partition_key
from streams.tables.transactions import (
    IN_TRANSACTION,
    INIT_TIMEOUT_S,
    commit_until_answered,
    produce,
    table_producer,
)
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal
from tests.kafka.test_pipeline import owners

#: Beyond session and transaction timeouts of these tests, each a few seconds.
PAUSE_S = 6.0

#: An answer that was on its way, and two laden cores between a reading of the clock and the answer.
SLACK_S = 2.0


def writers(settings: Settings, partition: int) -> list[str]:
    """Who wrote partition records into a partition's changelog, in order, each once for a stretch of his own."""
    found: list[str] = []

    def note(records: list[Record]) -> None:
        found.extend(
            decode_partition(record.key, record.value).owner
            for record in records
            if record.key == partition_key(partition) and record.value is not None
        )

    read_to_end(settings, topics(settings).index_changelog.name, partition, None, note)
    return [owner for owner, _ in groupby(found)]


def assigned(process: RouterProcess) -> set[int]:
    """Partitions of a worker's last assignment, from its log."""
    lines = [line for line in process.child.log_path.read_text().splitlines() if "partitions assigned" in line]
    numbers = lines[-1].partition("[")[2].partition("]")[0] if lines else ""
    return {int(number) for number in numbers.split(",") if number.strip()}


@contextmanager
def paused(child: Child) -> Iterator[None]:
    """Hold a process still for as long as the block runs."""
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def both_own(first: RouterProcess, second: RouterProcess, partitions: int) -> bool:
    mine, others = assigned(first), assigned(second)
    return bool(mine) and bool(others) and not mine & others and len(mine | others) == partitions


def test_a_paused_owner_writes_nothing_once_its_partitions_have_moved_and_then_works_again(stack: Stack) -> None:
    """It wakes up in the middle of its successor's work, is fenced, does not fence him, rejoins and is given some."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    n = stack.settings.partitions
    first = stack.worker("first", router=False)
    second = stack.worker("second", router=False)
    router = stack.router("router")
    wait_for(lambda: both_own(first, second, n), VISIBLE_TIMEOUT_S, "both workers to own partitions")
    engines = Engines(stack.settings, seed)
    engines.publish(200)
    assert_equal(router.url, engines.reference)
    before = assigned(first)
    paused_owner = writers(stack.settings, min(before))[-1]
    with engines.publishing(200), paused(first.child):
        wait_for(lambda: owners(second) == n, VISIBLE_TIMEOUT_S, "every partition to move")
        wait_for(
            lambda: all(writers(stack.settings, each)[-1] != paused_owner for each in before),
            VISIBLE_TIMEOUT_S,
            "the successor to write",
        )
    with engines.publishing(200):
        wait_for(lambda: both_own(first, second, n), VISIBLE_TIMEOUT_S, "the paused worker to rejoin")
    assert_equal(router.url, engines.reference)
    late = stack.router("late")
    assert_equal(late.url, engines.reference)
    for partition in sorted(before):
        history = writers(stack.settings, partition)
        back = history.index(paused_owner)
        behind = history[back + 1 :]
        # He wrote again only where the group gave the partition back to him, and then once and for all.
        assert behind.count(paused_owner) == (partition in assigned(first)), history
        assert len(behind) == 1 + (partition in assigned(first)), history
    second.child.kill()  # what he is given now, he can do alone
    engines.publish(100)
    wait_for(lambda: owners(first) == n, VISIBLE_TIMEOUT_S, "every partition to move back")
    assert_equal(router.url, engines.reference)


def ask_mode(url: str, worker_id: int) -> str:
    """Mode of an answer for which only this worker was eligible."""
    body = json.dumps({"block_hashes": [1, 2], "update_states": False, "allowed_worker_ids": [worker_id]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/route", data=body, method="POST")) as response:
        return str(json.loads(response.read())["mode"])


@pytest.fixture
def publishing() -> Iterator[ExitStack]:
    """Owner of a test's publishers, which flush what they have at the end."""
    with ExitStack() as owned:
        yield owned


@pytest.mark.parametrize(
    "effect", [IN_TRANSACTION, 4, 5], ids=["in an open transaction", "before it", "behind its commit"]
)
def test_without_any_agent_no_answer_is_exact_and_with_a_new_one_they_are(
    stack: Stack, publishing: ExitStack, effect: int
) -> None:
    """One agent dies inside its transaction, the other by SIGKILL: every partition's answers degrade within 3 s."""
    settings = stack.settings
    doomed = stack.worker("doomed", router=False, env={"KVSTREAMS_FAULT": f"{effect}:150"})
    second = stack.worker("second", router=False)
    router = stack.router("router")
    home = {partition_of(n, settings.partitions): n for n in range(100, 0, -1)}
    workers = list(home.values())
    for worker_id in workers:
        url = f"{router.url}/workers/{worker_id}"
        body = b'{"url": "http://nowhere", "model": "m", "block_size": 16}'
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method="PUT")) as response:
            assert response.status == 200
    publishers = [publishing.enter_context(KvEventPublisher(settings, worker_id=each, model="m")) for each in workers]
    for publisher in publishers:
        publisher.flush()

    def all_exact() -> bool:
        return all(ask_mode(router.url, worker_id) == "exact" for worker_id in workers)

    wait_for(lambda: both_own(doomed, second, settings.partitions), VISIBLE_TIMEOUT_S, "both to own partitions")
    wait_for(all_exact, VISIBLE_TIMEOUT_S, "exact answers of every partition")
    assert doomed.child.running
    told = 0
    while doomed.child.running:
        for publisher in publishers:
            publisher.stored([told + 1], list(range(16)))
            publisher.removed([told + 1])
            publisher.flush()
        told += 1
        assert told < 10_000
    second.child.kill()
    dead_at = time.monotonic()
    last_exact = dead_at
    while time.monotonic() - dead_at < PAUSE_S + settings.stale_after_ms / 1000:
        for worker_id in workers:
            if ask_mode(router.url, worker_id) == "exact":
                last_exact = time.monotonic()
        time.sleep(0.05)
    print(f"the last exact answer came {last_exact - dead_at:.2f} s after the last agent's death")
    assert last_exact - dead_at < settings.stale_after_ms / 1000 + SLACK_S
    stack.worker("heir", router=False)
    wait_for(all_exact, VISIBLE_TIMEOUT_S, "exact answers again")


def test_a_broker_that_stands_still_for_longer_than_a_transaction_may_loses_nothing(
    kafka: object, scope: Settings, tmp_path: Path, children: Children
) -> None:
    """Open transactions are ended, sessions and members forgotten; two workers go on to the reference state."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    # A broker of its own: others may not be paused with it.
    broker = LocalKafka(
        LocalKafkaConfig(tmp_path / "kafka", {"group.min.session.timeout.ms": "1000"}, class_archive=False)
    )
    settings = replace(scope, kafka=broker.up().bootstrap, transaction_timeout_ms=2000)
    try:
        stack = Stack(settings, tmp_path, children)
        first, second = stack.worker("first"), stack.worker("second", router=False)
        wait_for(lambda: both_own(first, second, settings.partitions), VISIBLE_TIMEOUT_S, "both to own partitions")
        engines = Engines(settings, seed)
        engines.publish(200)
        for _ in range(2):
            with engines.publishing(300):
                broker.pause()
                time.sleep(PAUSE_S)
                broker.resume()
            engines.publish(50)
            assert_equal(first.url, engines.reference)
        assert first.child.running
        assert second.child.running
        late = stack.router("late")
        assert_equal(late.url, engines.reference)
        for child in (first.child, second.child, late.child):
            child.stop()
    finally:
        broker.down()


def test_what_an_aborted_transaction_left_in_the_source_never_happened(stack: Stack) -> None:
    """Only agents write to kv-events in transactions; of a fenced one's, nobody may take the expiries for the truth."""
    worker = stack.worker()
    settings = stack.settings
    engines = Engines(settings, seed=3)
    engines.publish(100)
    assert_equal(worker.url, engines.reference)
    source = topics(settings).kv_events.name
    zombie = table_producer(replace(settings, topic_prefix=f"{settings.topic_prefix}zombie-"), 0)
    zombie.init_transactions(INIT_TIMEOUT_S)

    def remove_all() -> None:
        zombie.begin_transaction()
        for rank in engines.reference.ranks:
            gone = EngineBatch(rank, "m", 16, Incarnation(1 << 40), 0, 0, 0, WorkerRemoved("a test says so"))
            home = partition_of(rank.worker_id, settings.partitions)
            produce(zombie, source, home, str(rank.worker_id).encode(), encode_batch(gone), None, None)
        assert zombie.flush(INIT_TIMEOUT_S) == 0

    remove_all()
    zombie.abort_transaction(INIT_TIMEOUT_S)
    engines.publish(100)
    assert_equal(worker.url, engines.reference)
    assert engines.reference.members()
    remove_all()
    commit_until_answered(zombie)
    wait_for(lambda: not facts(worker.url), VISIBLE_TIMEOUT_S, "what was committed to be applied")
