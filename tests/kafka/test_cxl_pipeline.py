"""Pooled blocks end to end: a real Kafka, real workers, SIGKILL at every effect, recovery from the changelog alone."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import MoeLabels
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import DpRank, RankId, SequenceHash, WorkerId
from streams.cxl.events import BlockAddress
from streams.cxl.pool_registry import PoolDirectory
from streams.cxl.records import encode_transition
from streams.engines.publisher import KvEventPublisher
from streams.errors import InvalidEvent
from streams.kafka.clients import ensure_topics, partition_of, producer
from streams.kafka.records import encode_batch
from streams.lab.kafka.broker import LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, facts, get_json
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ, tables_path
from streams.tables.cxl_reducer import partition_plan
from streams.tables.store import PartitionStore
from streams.tables.transactions import scope_of
from streams.topics import topics
from tests.helpers.bridges import LEASE_S, WORKER_ID, bridge_to
from tests.helpers.broker import BreakableKafka
from tests.helpers.cxl_fleet import POOL, await_reach, await_supplementary, call
from tests.helpers.cxl_histories import History, Reference, expected_blocks, random_history, reference_of
from tests.helpers.engine_double import EngineDouble
from tests.helpers.pages import blocks
from tests.helpers.support import VISIBLE_TIMEOUT_S, dead_letters

#: What a router returns about each pooled block: its metadata, its pool's epoch and its position in its chain.
Blocks = dict[tuple[RankId, int], tuple[CxlMemoryMetadata, int, BlockAddress]]


def blocks_of(url: str) -> Blocks:
    found: Blocks = {}
    for row in get_json(f"{url}/state/cxl")["blocks"]:
        metadata = CxlMemoryMetadata(
            CxlMemoryState(row["state"]), row["pool_id"], tuple(map(WorkerId, row["accessible_workers"]))
        )
        address = BlockAddress(SequenceHash(row["sequence_hash"]), row["parent"], row["position"])
        owner = RankId(WorkerId(row["worker_id"]), DpRank(row["dp_rank"]))
        found[owner, row["sequence_hash"]] = metadata, row["pool_epoch"], address
    return found


@dataclass
class TransitionSender:
    """Writes a history to both topics, in parts, and checks the results against the reference."""

    settings: Settings
    history: History

    def __post_init__(self) -> None:
        self._kafka = producer(self.settings)
        self._rng = random.Random(len(self.history.cxl))
        self._at = [0, 0]

    def publish(self, share: float) -> None:
        """Publish a share of both logs, alternating at random."""
        logs = [
            (topics(self.settings).kv_events.name, [(each.rank, encode_batch(each)) for each in self.history.kv]),
            (
                topics(self.settings).cxl_events.name,
                [(each.rank, encode_transition(each)) for each in self.history.cxl],
            ),
        ]
        ends = [int(len(log) * share) for _, log in logs]
        while self._at != ends:
            which = self._rng.choice([n for n in (0, 1) if self._at[n] < ends[n]])
            topic, log = logs[which]
            rank, value = log[self._at[which]]
            self._kafka.produce(topic, key=str(rank.worker_id).encode(), value=value)
            self._at[which] += 1
        assert self._kafka.flush(30.0) == 0

    @property
    def reference(self) -> Reference:
        """The reference for the published part."""
        return reference_of(History(self.history.kv[: self._at[0]], self.history.cxl[: self._at[1]]))

    def assert_known(self, router: RouterProcess) -> None:
        expected = expected_blocks(self.reference)
        try:
            wait_for(lambda: blocks_of(router.url) == expected, VISIBLE_TIMEOUT_S, "the reference's rows", 0.25)
        finally:
            assert blocks_of(router.url) == expected

    def assert_refused(self) -> None:
        """Check that every refusal is exactly one dead letter, whichever process was killed meanwhile."""
        expected = self.reference.refused
        cxl = topics(self.settings).cxl_events.name.encode()

        def found() -> Counter[str]:
            letters = [headers for _, headers in dead_letters(self.settings) if headers["kvstreams.topic"] == cxl]
            return Counter(headers["kvstreams.reason"].decode() for headers in letters)

        wait_for(lambda: found().total() >= expected.total(), VISIBLE_TIMEOUT_S, "the refusals")
        assert found() == expected


@pytest.mark.parametrize("effect", [0, 1, 2, 4, 5, 6, 7])
def test_a_worker_killed_at_an_effect_leaves_pooled_blocks_as_they_were(stack: Stack, effect: int) -> None:
    """The next owner ends with the reference's rows, whichever step of a transaction the first owner was killed at."""
    stack.settings = replace(stack.settings, batch_records_max=10)  # for enough transactions
    sender = TransitionSender(stack.settings, random_history(effect, 200, 250))
    ensure_topics(stack.settings, topics(stack.settings).all())
    sender.publish(0.7)
    times = 12 if effect in (0, 5, 6, 7) else 150  # of transactions, or of records
    doomed = stack.worker("doomed", router=False, env={"KVSTREAMS_FAULT": f"{effect}:{times}"})
    wait_for(lambda: not doomed.child.running, VISIBLE_TIMEOUT_S, "the fault")
    next_owner = stack.worker("next-owner")
    sender.publish(1.0)
    sender.assert_known(next_owner)
    sender.assert_refused()


def opened(worker: RouterProcess) -> set[int]:
    """Return the partitions that are open according to a worker's log."""
    logged = re.findall(r"partition (\d+) is open", worker.child.log_path.read_text())
    return {int(number) for number in logged}


def assert_equally_old(settings: Settings) -> None:
    """Check that both tables of each partition's local copy have the same age, even if one of them seldom changes."""
    for partition in range(settings.partitions):
        name = scope_of(settings, partition)
        store = PartitionStore(tables_path(settings) / name, name, settings.rocksdb_cache_mb)
        positions = [store.position(table) for table in partition_plan(settings).tables]
        store.close()
        assert len({position.as_of_ms for position in positions if position is not None}) == 1
        assert None not in positions


@pytest.mark.long_running
def test_rows_outlive_kill_9_a_deleted_disk_and_are_the_same_on_every_router(stack: Stack) -> None:
    """A new owner and a late router recover everything, including parked transitions, from the changelog alone."""
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    sender = TransitionSender(stack.settings, random_history(seed, 300, 400))
    worker = stack.worker()
    sender.publish(0.3)
    sender.assert_known(worker)
    # A partition without any record of the history may be opened after those with rows.
    wait_for(lambda: opened(worker) == set(range(sender.settings.partitions)), VISIBLE_TIMEOUT_S, "all to be open")
    worker.child.kill()
    assert_equally_old(worker.settings)
    sender.publish(0.5)
    stack.restart_worker(worker)
    sender.assert_known(worker)
    worker.child.kill()
    shutil.rmtree(Path(worker.settings.data_dir))
    kafka = producer(stack.settings)  # a foreign writer's record in the changelog is skipped
    kafka.produce(topics(stack.settings).cxl_changelog.name, key=b"hello", value=b"world", partition=0)
    assert kafka.flush(30.0) == 0
    sender.publish(0.7)
    stack.restart_worker(worker)
    sender.assert_known(worker)
    second = stack.worker("second", router=False)
    sender.publish(0.8)
    worker.child.kill()
    sender.publish(1.0)
    late = stack.router("late")
    sender.assert_known(late)
    assert second.child.running
    sender.assert_refused()


@pytest.mark.long_running
def test_rows_outlive_a_broker_that_is_killed(scope: Settings, tmp_path: Path) -> None:
    """The broker restarts from its disk; a worker that was running meanwhile and one started later both continue."""
    # This test needs its own broker, since it kills it.
    broker = BreakableKafka(LocalKafkaConfig(tmp_path / "kafka", {"group.min.session.timeout.ms": "1000"}))
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    try:
        settings = replace(scope, kafka=broker.up().bootstrap)
        sender = TransitionSender(settings, random_history(seed, 300, 400))
        with Children() as children:
            stack = Stack(settings, tmp_path / "stack", children)
            worker = stack.worker()
            sender.publish(0.4)
            sender.assert_known(worker)
            sender.publish(0.6)  # the worker is processing these
            broker.kill()
            broker.up()
            sender.publish(0.8)
            sender.assert_known(worker)
            worker.child.kill()
            shutil.rmtree(Path(worker.settings.data_dir))
            broker.kill()
            broker.up()
            next_owner = stack.worker("next-owner", router=False)
            sender.publish(1.0)
            late = stack.router("late")
            sender.assert_known(late)
            assert next_owner.child.running
            sender.assert_refused()
    finally:
        broker.down()


# -- what engines, scripts and operators report ------------------------------------------------------------------------


def put_worker(router: RouterProcess, worker_id: int) -> None:
    call(router, "PUT", f"/workers/{worker_id}", {"url": "http://w", "model": "m", "block_size": 16})


def script(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streams.cli", "cxl", *arguments]
    environ = {**as_environ(settings), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60.0, check=False)


@pytest.mark.long_running
def test_members_can_read_a_pooled_block_whatever_happens_to_its_owner(stack: Stack) -> None:
    """Members can read a pooled block after its owner drops its copy, clears its cache, restarts and is removed.

    A worker that left the pool cannot read it, and once the pool is lost, no worker can.
    """
    worker = stack.worker()
    for worker_id in (1, 2, 3):
        put_worker(worker, worker_id)
    pool = call(worker, "PUT", f"/pools/{POOL}", {"members": [1, 2, 3], "latency_class": "near", "capacity_blocks": 9})
    assert (pool["epoch"], pool["members"], pool["lost"]) == (0, [1, 2, 3], False)
    tokens = list(range(48))
    with KvEventPublisher(stack.settings, worker_id=1, model="m") as publisher:
        publisher.stored([11, 12, 13], tokens)
        publisher.publish_cxl_state_transition(1, [11, 12, 13], "in_transit", POOL, [1, 2])
        publisher.removed([11, 12, 13])
        publisher.publish_cxl_state_transition(2, [11, 12], "cxl_pooled")
        publisher.flush()
        pooled = {11: ("cxl_pooled", [1, 2]), 12: ("cxl_pooled", [1, 2])}
        await_reach(worker, {**pooled, 13: ("in_transit", [])})
        rows = get_json(f"{worker.url}/state/cxl")["blocks"]
        chain = sequence_hashes(local_hashes(tokens, 16)).tolist()
        assert {row["engine_hash"]: (row["sequence_hash"], row["parent"], row["position"]) for row in rows} == {
            11: (chain[0], None, 0),
            12: (chain[1], chain[0], 1),
            13: (chain[2], chain[1], 2),
        }
        with pytest.raises(InvalidEvent, match="1 of 2 hashes"):
            publisher.publish_cxl_state_transition(3, [13, 99], "in_transit", POOL, [3])
        with pytest.raises(InvalidEvent, match="must name a pool"):
            publisher.publish_cxl_state_transition(4, [13], "in_transit")
        with pytest.raises(InvalidEvent, match="not a state"):
            publisher.publish_cxl_state_transition(5, [13], "somewhere", POOL)
        publisher.cleared()
        publisher.publish_cxl_state_transition(6, [11], "cxl_pooled")  # refused, because it is already in the pool
    await_reach(worker, {**pooled, 13: ("in_transit", [])})
    wait_for(lambda: len(dead_letters(stack.settings)) == 1, VISIBLE_TIMEOUT_S, "the refusal")
    assert dead_letters(stack.settings)[0][1]["kvstreams.reason"] == b"not_in_transit"

    with KvEventPublisher(stack.settings, worker_id=1, model="m") as publisher:  # a restart
        await_reach(worker, {**pooled, 13: ("evicted", [])})
        publisher.stored([21], tokens[:16])  # the new incarnation has another name for the first block
        publisher.publish_cxl_state_transition(1, [21], "evicted", POOL)
    await_reach(worker, {21: ("evicted", []), 12: ("cxl_pooled", [1, 2]), 13: ("evicted", [])})

    call(worker, "DELETE", "/workers/1")
    await_reach(worker, {21: ("evicted", []), 12: ("cxl_pooled", [2]), 13: ("evicted", [])})
    call(worker, "PUT", f"/pools/{POOL}", {"members": [3]})  # the host of 2 leaves the pool
    await_reach(worker, {21: ("evicted", []), 12: ("cxl_pooled", []), 13: ("evicted", [])})
    call(worker, "PUT", f"/pools/{POOL}", {"members": [2, 3]})
    await_reach(worker, {21: ("evicted", []), 12: ("cxl_pooled", [2]), 13: ("evicted", [])})
    assert call(worker, "DELETE", f"/pools/{POOL}")["lost"]
    await_reach(worker, {21: ("evicted", []), 12: ("cxl_pooled", []), 13: ("evicted", [])})
    assert call(worker, "PUT", f"/pools/{POOL}", {"members": [2, 3]})["epoch"] == 2  # back, and empty
    await_reach(worker, {21: ("evicted", []), 12: ("cxl_pooled", []), 13: ("evicted", [])})
    with KvEventPublisher(stack.settings, worker_id=2, model="m") as publisher:
        publisher.stored([31], tokens[:16])
        publisher.publish_cxl_state_transition(1, [31], "in_transit", POOL)
        publisher.publish_cxl_state_transition(2, [31], "cxl_pooled")
    late = stack.router("late")
    for router in (worker, late):
        await_reach(
            router,
            {21: ("evicted", []), 12: ("cxl_pooled", []), 13: ("evicted", []), 31: ("cxl_pooled", [2, 3])},
        )
    assert get_json(f"{late.url}/pools") == get_json(f"{worker.url}/pools")


def test_a_request_goes_to_a_worker_that_can_read_a_removed_owners_pooled_prefix(stack: Stack) -> None:
    """A request goes to a worker that can read the pooled prefix, also after the prefix's owner was removed.

    Every router also counts labels, and pooled blocks that continue a worker's own blocks, and ignores the pool once it
    is lost.
    """
    worker = stack.worker()
    for worker_id in (1, 2, 3):
        put_worker(worker, worker_id)
    call(worker, "PUT", f"/pools/{POOL}", {"members": [1, 2]})
    tokens = list(range(80))
    with KvEventPublisher(stack.settings, worker_id=1, model="m") as publisher:
        publisher.stored([11, 12, 13, 14], tokens[:64])
        publisher.publish_cxl_state_transition(1, [11, 12, 13, 14], "in_transit", POOL)
        publisher.publish_cxl_state_transition(2, [11, 12, 13, 14], "cxl_pooled")
        publisher.removed([11, 12, 13, 14])
    with KvEventPublisher(stack.settings, worker_id=3, model="m") as publisher:
        publisher.stored([31], tokens[:16], moe=MoeLabels(2, 7, 3))
        publisher.stored([32], tokens[16:32], parent=31)
    assert await_supplementary(worker, {1: (0, 4, 0), 2: (0, 4, 0), 3: (2, 0, 0)}, tokens) in (1, 2)
    call(worker, "DELETE", "/workers/1")
    late = stack.router("late")
    for router in (worker, late):
        assert await_supplementary(router, {2: (0, 4, 0), 3: (2, 0, 0)}, tokens) == 2
        assert await_supplementary(router, {2: (0, 4, 0), 3: (2, 0, 1)}, tokens, layer_id=2, expert_ids=[7]) == 2
        strict = {"layer_id": 2, "expert_group": 3, "fallback_to_unlabeled": False}
        assert await_supplementary(router, {3: (2, 0, 1)}, tokens, **strict) == 3
    with KvEventPublisher(stack.settings, worker_id=2, model="m") as publisher:  # a hole in its own blocks
        publisher.stored([21, 22], tokens[:32])
        publisher.removed([21])
        publisher.flush()
        assert await_supplementary(worker, {2: (0, 4, 0), 3: (2, 0, 0)}, tokens) == 2
        publisher.stored([21], tokens[:16])  # two of its own, followed by two pooled ones
        assert await_supplementary(worker, {2: (2, 2, 0), 3: (2, 0, 0)}, tokens) == 2
    call(worker, "DELETE", f"/pools/{POOL}")
    for router in (worker, late):
        await_supplementary(router, {2: (2, 0, 0), 3: (2, 0, 0)}, tokens)


@pytest.mark.long_running
def test_stores_in_a_pool_and_scripts_publish_transitions_like_any_other(stack: Stack) -> None:
    """The CXL metadata of a store become transitions, and `kvstreams cxl` publishes transitions by engine hash."""
    worker = stack.worker()
    for worker_id in (1, 2):
        put_worker(worker, worker_id)
    done = script(stack.settings, "pool", POOL, "--member", "1", "--member", "2", "--latency-class", "far")
    assert (done.returncode, done.stdout) == (0, f"pool {POOL}: epoch 0, members 1, 2, latency class far\n"), (
        done.stderr
    )
    with KvEventPublisher(stack.settings, worker_id=1, model="m") as publisher:
        publisher.stored([11, 12], list(range(32)), cxl=CxlMemoryMetadata("cxl_pooled", POOL, (2,)))
        publisher.removed([11, 12])
        publisher.stored([13], list(range(100, 116)))
    await_reach(worker, {11: ("cxl_pooled", [2]), 12: ("cxl_pooled", [2])})

    transition = ["transition", "--worker-id", "1", "--event-id", "7"]
    typo = script(stack.settings, *transition, "--state", "in_transit", "--pool-id", "rack2", "13")
    assert (typo.returncode, typo.stdout) == (1, "")
    assert f"no pool rack2 is registered; there are: {POOL}" in typo.stderr
    early = script(stack.settings, *transition, "--state", "cxl_pooled", "--wait", "60", "13")
    assert (early.returncode, early.stdout) == (1, "sent: 1 blocks of worker 1 rank 0 to cxl_pooled\n"), early.stderr
    assert early.stderr.startswith("refused: not_in_transit: ")
    done = script(stack.settings, *transition, "--state", "in_transit", "--pool-id", POOL, "13", "14")
    sent = "sent: 1 blocks of worker 1 rank 0 to in_transit; the agents judge it, and --wait prints their verdict\n"
    assert (done.returncode, done.stdout) == (1, sent), done.stderr
    assert "1 hashes are unknown for this rank: 14" in done.stderr
    await_reach(worker, {11: ("cxl_pooled", [2]), 12: ("cxl_pooled", [2]), 13: ("in_transit", [])})
    pooled = script(stack.settings, *transition, "--state", "cxl_pooled", "--wait", "60", "13")
    assert (pooled.returncode, pooled.stdout.splitlines()[1:]) == (0, ["applied"]), pooled.stderr
    assert script(stack.settings, *transition, "--state", "evicted", "12").returncode == 0  # not in the ledger any more
    await_reach(worker, {11: ("cxl_pooled", [2]), 12: ("evicted", []), 13: ("cxl_pooled", [1, 2])})
    lost = script(stack.settings, "pool", POOL, "--lost")
    assert lost.stdout == f"pool {POOL}: epoch 1, lost, latency class far\n", lost.stderr
    await_reach(worker, {11: ("cxl_pooled", []), 12: ("evicted", []), 13: ("cxl_pooled", [])})
    back = [*transition, "--state", "in_transit", "--pool-id", POOL]
    assert f"pool {POOL} is lost" in script(stack.settings, *back, "13").stderr
    forced = script(stack.settings, *back, "--force", "--wait", "60", "13")
    assert (forced.returncode, forced.stdout.splitlines()[1:]) == (0, ["applied"]), forced.stderr
    ended = script(stack.settings, "pool", POOL, "--member", "1", "--epoch", "0")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "is in epoch 1 already" in ended.stderr
    unknown = script(stack.settings, "transition", "--worker-id", "9", "--state", "evicted", "11")
    assert unknown.returncode == 1
    assert "has published nothing" in unknown.stderr
    worker.child.kill()
    unread = script(stack.settings, *transition, "--state", "evicted", "--wait", "1", "13")
    assert unread.returncode == 1
    assert "no agent has read it" in unread.stderr


def test_the_example_of_the_docs_reports_labels_and_pooled_blocks(stack: Stack) -> None:
    """The Python code of docs/cxl.md runs unchanged."""
    ((_, code),) = blocks("docs/cxl.md", "python")
    worker = stack.worker()
    for worker_id in (7, 8):
        put_worker(worker, worker_id)
    environ = {**as_environ(stack.settings), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr
    await_reach(worker, dict.fromkeys((11, 12, 13), ("cxl_pooled", [7, 8])))
    tokens = list(range(48))
    query = {"layer_id": 2, "expert_ids": [7], "expert_group": 3}
    await_supplementary(worker, {7: (3, 0, 2), 8: (0, 3, 0)}, tokens, **query)


def test_a_restarted_bridge_recovers_the_names_of_its_engines_pooled_blocks(stack: Stack) -> None:
    """A restarted bridge recovers the names from the table if the engine no longer keeps the batches with them."""
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    worker = stack.worker()
    call(worker, "PUT", f"/pools/{POOL}", {"members": [int(WORKER_ID)]})
    first, second = 1000, 1001  # names of the prompt that begins with token 1
    with EngineDouble(kept=3) as engine:
        bridge = bridge_to(stack, engine)
        wait_for(lambda: get_json(f"{worker.url}/workers")["workers"] != [], VISIBLE_TIMEOUT_S, "the registration")
        engine.store(1, 2)
        engine.publish(["CxlStateTransition", 1, [first, second], "in_transit", POOL, [int(WORKER_ID)]])
        engine.remove(1)
        await_reach(worker, {first: ("in_transit", []), second: ("in_transit", [])})
        wait_for(lambda: len(facts(worker.url)) == 1, VISIBLE_TIMEOUT_S, "the removal")
        bridge.kill()
        for number in range(2, 6):  # more than the engine keeps
            engine.store(1000 * number, 1)
        bridge.start()
        engine.publish({"type": "CxlStateTransition", "block_hashes": [first], "new_state": "cxl_pooled"})
        await_reach(worker, {first: ("cxl_pooled", [int(WORKER_ID)]), second: ("in_transit", [])})


def test_a_partition_of_both_topics_has_one_owner(stack: Stack) -> None:
    """Faust assigns equal partitions of both topics to one worker, and all records of a rank are in one partition."""
    first, second = stack.worker("first", router=False), stack.worker("second", router=False)
    router = stack.router("router")
    for worker_id in range(1, 9):
        put_worker(router, worker_id)
        with KvEventPublisher(stack.settings, worker_id=worker_id, model="m") as publisher:
            publisher.stored([worker_id], list(range(16)))
            publisher.publish_cxl_state_transition(1, [worker_id], "in_transit", POOL)
    assert len({partition_of(worker_id, stack.settings.partitions) for worker_id in range(1, 9)}) > 1
    await_reach(router, {worker_id: ("in_transit", []) for worker_id in range(1, 9)})
    assert first.child.running and second.child.running
    directory = PoolDirectory(stack.settings)
    assert (directory.pools(), directory.epoch_of(POOL)) == ({}, 0)
    directory.close()
