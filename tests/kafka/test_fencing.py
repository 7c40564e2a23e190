"""Owners that are paused and resume, owners that are all killed, and a broker that pauses, on a real Kafka.

Acknowledged batches are applied to the reference as in test_pipeline. An owner that was replaced must change nothing.
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

from streams.core.events import EngineBatch, WorkerRemoved
from streams.core.ids import Incarnation
from streams.engines.publisher import KvEventPublisher
from streams.kafka.clients import Record, partition_of
from streams.kafka.records import encode_batch
from streams.lab.kafka.broker import LocalKafkaConfig
from streams.lab.processes import Child, Children
from streams.lab.stack import RouterProcess, Stack, facts
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY, decode_partition
from streams.tables.transactions import (
    IN_TRANSACTION,
    INIT_TIMEOUT_S,
    commit_until_answered,
    produce,
    table_producer,
)
from streams.topics import topics
from tests.helpers.broker import BreakableKafka
from tests.helpers.support import VISIBLE_TIMEOUT_S
from tests.helpers.truth import Engines, assert_equal
from tests.helpers.workers import owners

#: Longer than the session and transaction timeouts of these tests, each a few seconds.
PAUSE_S = 6.0

#: Allows for an answer in flight, and for two busy cores between reading the clock and the answer.
SLACK_S = 2.0


def writers(settings: Settings, partition: int) -> list[str]:
    """Return the owners that wrote a partition's record, in order, without consecutive repeats."""
    found: list[str] = []

    def note(records: list[Record]) -> None:
        found.extend(
            decode_partition(record.key, record.value).owner
            for record in records
            if record.key == PARTITION_KEY.pack(partition) and record.value is not None
        )

    read_to_end(settings, topics(settings).index_changelog.name, partition, None, note)
    return [owner for owner, _ in groupby(found)]


def assigned(process: RouterProcess) -> set[int]:
    """Return the partitions of a worker's last logged assignment."""
    lines = [line for line in process.child.log_path.read_text().splitlines() if "partitions assigned" in line]
    numbers = lines[-1].partition("[")[2].partition("]")[0] if lines else ""
    return {int(number) for number in numbers.split(",") if number.strip()}


@contextmanager
def paused(child: Child) -> Iterator[None]:
    """Pause a process while the block runs."""
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def both_own(first: RouterProcess, second: RouterProcess, partitions: int) -> bool:
    mine, others = assigned(first), assigned(second)
    return bool(mine) and bool(others) and not mine & others and len(mine | others) == partitions


def test_a_paused_owner_writes_nothing_after_its_partitions_have_moved_and_then_rejoins(stack: Stack) -> None:
    """It resumes while its successor works, is fenced, does not fence its successor, and gets partitions again."""
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
        later = history[back + 1 :]
        # It wrote again only if the group assigned the partition to it again, and from then on it alone did.
        assert later.count(paused_owner) == (partition in assigned(first)), history
        assert len(later) == 1 + (partition in assigned(first)), history
    second.child.kill()  # the resumed worker can work alone
    engines.publish(100)
    wait_for(lambda: owners(first) == n, VISIBLE_TIMEOUT_S, "every partition to move back")
    assert_equal(router.url, engines.reference)


def ask_mode(url: str, worker_id: int) -> str:
    """Return the mode of an answer for which only this worker is eligible."""
    body = json.dumps({"block_hashes": [1, 2], "update_states": False, "allowed_worker_ids": [worker_id]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/route", data=body, method="POST")) as response:
        return str(json.loads(response.read())["mode"])


@pytest.fixture
def publishing() -> Iterator[ExitStack]:
    """Owns a test's publishers, which are flushed at the end."""
    with ExitStack() as owned:
        yield owned


@pytest.mark.parametrize(
    "effect", [IN_TRANSACTION, 4, 5], ids=["in an open transaction", "before it", "after its commit"]
)
def test_answers_degrade_without_any_agent_and_are_exact_again_with_a_new_one(
    stack: Stack, publishing: ExitStack, effect: int
) -> None:
    """One agent is killed at a fault point, the other by SIGKILL: answers of every partition degrade within 3 s."""
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
    n_published = 0
    while doomed.child.running:
        for publisher in publishers:
            publisher.stored([n_published + 1], list(range(16)))
            publisher.removed([n_published + 1])
            publisher.flush()
        n_published += 1
        assert n_published < 10_000
    second.child.kill()
    killed_at = time.monotonic()
    last_exact = killed_at
    while time.monotonic() - killed_at < PAUSE_S + settings.stale_after_ms / 1000:
        for worker_id in workers:
            if ask_mode(router.url, worker_id) == "exact":
                last_exact = time.monotonic()
        time.sleep(0.05)
    print(f"the last exact answer came {last_exact - killed_at:.2f} s after the last agent was killed")
    assert last_exact - killed_at < settings.stale_after_ms / 1000 + SLACK_S
    stack.worker("next", router=False)
    wait_for(all_exact, VISIBLE_TIMEOUT_S, "exact answers again")


def test_nothing_is_lost_when_a_broker_pauses_for_longer_than_the_transaction_timeout(
    kafka: object, scope: Settings, tmp_path: Path, children: Children
) -> None:
    """The broker ends open transactions and expels members; two workers still reach the reference state."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    # A separate broker, since pausing the shared one would affect other tests.
    broker = BreakableKafka(LocalKafkaConfig(tmp_path / "kafka", {"group.min.session.timeout.ms": "1000"}))
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


def test_records_of_an_aborted_transaction_in_the_source_are_not_applied(stack: Stack) -> None:
    """Agents write expiries to kv-events in transactions, and those of a fenced agent must have no effect."""
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
            removal = EngineBatch(rank, "m", 16, Incarnation(1 << 40), 0, 0, 0, WorkerRemoved("a test"))
            home = partition_of(rank.worker_id, settings.partitions)
            produce(zombie, source, home, str(rank.worker_id).encode(), encode_batch(removal), None, None)
        assert zombie.flush(INIT_TIMEOUT_S) == 0

    remove_all()
    zombie.abort_transaction(INIT_TIMEOUT_S)
    engines.publish(100)
    assert_equal(worker.url, engines.reference)
    assert engines.reference.members()
    remove_all()
    commit_until_answered(zombie)
    wait_for(lambda: not facts(worker.url), VISIBLE_TIMEOUT_S, "the committed removals to be applied")
