"""Pooled blocks end to end: real Kafka, real workers, SIGKILL at every effect, rebuilt from the changelog alone."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from streams.codec import encode_batch
from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.events import (
    MoeLabels,
)
from streams.core.hashing import local_hashes, sequence_hashes
from streams.core.ids import DpRank, RankId, SequenceHash, WorkerId
from streams.cxl.events import BlockAddress
from streams.cxl.pool_registry import PoolDirectory
from streams.cxl.records import encode_transition
from streams.engines.publisher import KvEventPublisher
from streams.errors import InvalidEvent
from streams.kafka import ensure_topics, partition_of, producer
from streams.local.kafka import LocalKafka, LocalKafkaConfig
from streams.local.processes import Children
from streams.local.stack import RouterProcess, Stack, facts, get_json
from streams.settings import Settings, as_environ, tables_path
from streams.tables.cxl_reducer import partition_plan
from streams.tables.store import PartitionStore
from streams.tables.transactions import scope_of
from streams.topics import topics
from streams.waiting import wait_for
from tests.helpers.engine_double import EngineDouble
from tests.helpers.support import VISIBLE_TIMEOUT_S, dead_letters
from tests.kafka.test_bridge_faults import LEASE_S, WORKER_ID, bridge_to
from tests.unit.test_cxl_interleavings import History, Reference, random_history, reference_of, wanted_blocks
from tests.unit.test_docs import blocks

#: What a router says of each pooled block: its metadata, its pool's epoch and where it lies on its chain.
Blocks = dict[tuple[RankId, int], tuple[CxlMemoryMetadata, int, BlockAddress]]

POOL = "rack1"


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
    """Writes a history to both topics, in pieces, and knows what must come of it."""

    settings: Settings
    history: History

    def __post_init__(self) -> None:
        self._kafka = producer(self.settings)
        self._rng = random.Random(len(self.history.cxl))
        self._at = [0, 0]

    def publish(self, share: float) -> None:
        """Publish both logs up to a share of them, at random turns."""
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
        """Of what has been published."""
        return reference_of(History(self.history.kv[: self._at[0]], self.history.cxl[: self._at[1]]))

    def assert_known(self, router: RouterProcess) -> None:
        wanted = wanted_blocks(self.reference)
        try:
            wait_for(lambda: blocks_of(router.url) == wanted, VISIBLE_TIMEOUT_S, "the reference's rows", 0.25)
        finally:
            assert blocks_of(router.url) == wanted

    def assert_refused(self) -> None:
        """Every refusal is one dead letter, whoever died when it was made."""
        wanted = self.reference.refused
        cxl = topics(self.settings).cxl_events.name.encode()

        def found() -> Counter[str]:
            letters = [headers for _, headers in dead_letters(self.settings) if headers["kvstreams.topic"] == cxl]
            return Counter(headers["kvstreams.reason"].decode() for headers in letters)

        wait_for(lambda: found().total() >= wanted.total(), VISIBLE_TIMEOUT_S, "the refusals")
        assert found() == wanted


@pytest.mark.parametrize("effect", [0, 1, 2, 4, 5, 6, 7])
def test_a_worker_killed_at_an_effect_leaves_pooled_blocks_as_they_were(stack: Stack, effect: int) -> None:
    """Inside its transaction, or before or behind any step: another one goes on to the reference's rows."""
    stack.settings = replace(stack.settings, batch_records_max=10)  # so that there are transactions enough
    told = TransitionSender(stack.settings, random_history(effect, 200, 250))
    ensure_topics(stack.settings, topics(stack.settings).all())
    told.publish(0.7)
    times = 12 if effect in (0, 5, 6, 7) else 150  # of transactions, or of records
    doomed = stack.worker("doomed", router=False, env={"KVSTREAMS_FAULT": f"{effect}:{times}"})
    wait_for(lambda: not doomed.child.running, VISIBLE_TIMEOUT_S, "the fault")
    heir = stack.worker("heir")
    told.publish(1.0)
    told.assert_known(heir)
    told.assert_refused()


def opened(worker: RouterProcess) -> set[int]:
    """Partitions that a worker's log says are open."""
    said = re.findall(r"partition (\d+) is open", worker.child.log_path.read_text())
    return {int(number) for number in said}


def assert_equally_old(settings: Settings) -> None:
    """A partition's tables stand at their changelogs' ends together, however seldom one of them changes."""
    for partition in range(settings.partitions):
        name = scope_of(settings, partition)
        store = PartitionStore(tables_path(settings) / name, name, settings.rocksdb_cache_mb)
        positions = [store.position(table) for table in partition_plan(settings).tables]
        store.close()
        assert len({position.as_of_ms for position in positions if position is not None}) == 1
        assert None not in positions


def test_rows_outlive_kill_9_a_deleted_disk_and_are_the_same_on_every_router(stack: Stack) -> None:
    """What was parked, too: the changelog alone brings everything back, to a new owner and to a late router."""
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    told = TransitionSender(stack.settings, random_history(seed, 300, 400))
    worker = stack.worker()
    told.publish(0.3)
    told.assert_known(worker)
    # One that no record of the history is in may be opened behind those that the rows are in.
    wait_for(lambda: opened(worker) == set(range(told.settings.partitions)), VISIBLE_TIMEOUT_S, "all to be open")
    worker.child.kill()
    assert_equally_old(worker.settings)
    told.publish(0.5)
    stack.restart_worker(worker)
    told.assert_known(worker)
    worker.child.kill()
    shutil.rmtree(Path(worker.settings.data_dir))
    kafka = producer(stack.settings)  # a stranger's record in the changelog is passed over
    kafka.produce(topics(stack.settings).cxl_changelog.name, key=b"hello", value=b"world", partition=0)
    assert kafka.flush(30.0) == 0
    told.publish(0.7)
    stack.restart_worker(worker)
    told.assert_known(worker)
    second = stack.worker("second", router=False)
    told.publish(0.8)
    worker.child.kill()
    told.publish(1.0)
    late = stack.router("late")
    told.assert_known(late)
    assert second.child.running
    told.assert_refused()


def test_rows_outlive_a_broker_that_is_killed(scope: Settings, tmp_path: Path) -> None:
    """It comes back on what it had on disk; a worker that lived through it, and one that begins behind it, go on."""
    # A broker of its own: others would not survive it.
    broker = LocalKafka(
        LocalKafkaConfig(tmp_path / "kafka", {"group.min.session.timeout.ms": "1000"}, class_archive=False)
    )
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    try:
        settings = replace(scope, kafka=broker.up().bootstrap)
        told = TransitionSender(settings, random_history(seed, 300, 400))
        with Children() as children:
            stack = Stack(settings, tmp_path / "stack", children)
            worker = stack.worker()
            told.publish(0.4)
            told.assert_known(worker)
            told.publish(0.6)  # the worker is in the midst of it
            broker.kill()
            broker.up()
            told.publish(0.8)
            told.assert_known(worker)
            worker.child.kill()
            shutil.rmtree(Path(worker.settings.data_dir))
            broker.kill()
            broker.up()
            heir = stack.worker("heir", router=False)
            told.publish(1.0)
            late = stack.router("late")
            told.assert_known(late)
            assert heir.child.running
            told.assert_refused()
    finally:
        broker.down()


# -- what engines, scripts and operators say ---------------------------------------------------------------------------


def call(router: RouterProcess, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else orjson.dumps(body)
    request = urllib.request.Request(f"{router.url}{path}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=30.0) as response:
        return orjson.loads(response.read())


def put_worker(router: RouterProcess, worker_id: int) -> None:
    call(router, "PUT", f"/workers/{worker_id}", {"url": "http://w", "model": "m", "block_size": 16})


def reach(router: RouterProcess) -> dict[int, tuple[str, list[int]]]:
    """State and reachable workers by engine hash."""
    rows = get_json(f"{router.url}/state/cxl")["blocks"]
    return {row["engine_hash"]: (row["state"], row["reachable_workers"]) for row in rows}


def await_reach(router: RouterProcess, wanted: dict[int, tuple[str, list[int]]]) -> None:
    try:
        wait_for(lambda: reach(router) == wanted, VISIBLE_TIMEOUT_S, "who reaches what")
    finally:
        assert reach(router) == wanted


def script(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streams.cli", "cxl", *arguments]
    environ = {**as_environ(settings), "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60.0, check=False)


def test_a_pooled_block_is_reached_by_members_through_everything_that_befalls_its_owner(stack: Stack) -> None:
    """Its GPU copy's end, clear, restart and removal; and by nobody who left the pool, once the pool lost it."""
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
        publisher.publish_cxl_state_transition(6, [11], "cxl_pooled")  # it is there already: refused, and nothing lost
    await_reach(worker, {**pooled, 13: ("in_transit", [])})
    wait_for(lambda: len(dead_letters(stack.settings)) == 1, VISIBLE_TIMEOUT_S, "the refusal")
    assert dead_letters(stack.settings)[0][1]["kvstreams.reason"] == b"not_in_transit"

    with KvEventPublisher(stack.settings, worker_id=1, model="m") as publisher:  # a restart
        await_reach(worker, {**pooled, 13: ("evicted", [])})
        publisher.stored([21], tokens[:16])  # the new life's name of the first block
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


def ask(router: RouterProcess, tokens: list[int], **query: Any) -> dict[str, Any]:
    """Ask without booking, with every candidate's terms."""
    asked = {"token_ids": tokens, "update_states": False, "explain": True}
    if query:
        asked["router_config_override"] = {"moe_query": query}
    answer: dict[str, Any] = call(router, "POST", "/route", asked)
    return answer


def supplementary(answer: dict[str, Any]) -> dict[int, tuple[int, int, int]]:
    """Own, pooled and matching blocks by worker."""
    names = ("scores", "cxl_accessible_scores", "moe_scores")
    return {each["worker_id"]: tuple(each[name] for name in names) for each in answer["candidates"]}


def await_supplementary(
    router: RouterProcess, wanted: dict[int, tuple[int, int, int]], tokens: list[int], **query: Any
) -> int:
    """Wait until a choice is made by these terms; gives the worker chosen."""
    try:
        wait_for(
            lambda: supplementary(ask(router, tokens, **query)) == wanted, VISIBLE_TIMEOUT_S, "the terms of a choice"
        )
    finally:
        answer = ask(router, tokens, **query)
        assert supplementary(answer) == wanted
    chosen: int = answer["worker_id"]
    return chosen


def test_a_request_goes_where_a_dead_owners_pooled_prefix_is_reached_and_labels_match(stack: Stack) -> None:
    """On every router, across blocks partly on the GPU; and elsewhere once the pool is lost."""
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
    with KvEventPublisher(stack.settings, worker_id=2, model="m") as publisher:  # a hole that nobody's pool has
        publisher.stored([21, 22], tokens[:32])
        publisher.removed([21])
        publisher.flush()
        assert await_supplementary(worker, {2: (0, 4, 0), 3: (2, 0, 0)}, tokens) == 2
        publisher.stored([21], tokens[:16])  # two of its own, and then two that are pooled
        assert await_supplementary(worker, {2: (2, 2, 0), 3: (2, 0, 0)}, tokens) == 2
    call(worker, "DELETE", f"/pools/{POOL}")
    for router in (worker, late):
        await_supplementary(router, {2: (2, 0, 0), 3: (2, 0, 0)}, tokens)


def test_a_store_in_a_pool_and_scripts_are_told_like_any_transition(stack: Stack) -> None:
    """Metadata of a store are transitions; a script finds the names in what Kafka has, whoever feeds the rank."""
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

    told = ["transition", "--worker-id", "1", "--event-id", "7"]
    slip = script(stack.settings, *told, "--state", "in_transit", "--pool-id", "rack2", "13")
    assert (slip.returncode, slip.stdout) == (1, "")
    assert f"no pool rack2 is registered; there are: {POOL}" in slip.stderr
    early = script(stack.settings, *told, "--state", "cxl_pooled", "--wait", "60", "13")
    assert (early.returncode, early.stdout) == (1, "sent: 1 blocks of worker 1 rank 0 to cxl_pooled\n"), early.stderr
    assert early.stderr.startswith("refused: not_in_transit: ")
    done = script(stack.settings, *told, "--state", "in_transit", "--pool-id", POOL, "13", "14")
    sent = "sent: 1 blocks of worker 1 rank 0 to in_transit; the agents judge it, and --wait prints their verdict\n"
    assert (done.returncode, done.stdout) == (1, sent), done.stderr
    assert "1 hashes are unknown for this rank: 14" in done.stderr
    await_reach(worker, {11: ("cxl_pooled", [2]), 12: ("cxl_pooled", [2]), 13: ("in_transit", [])})
    pooled = script(stack.settings, *told, "--state", "cxl_pooled", "--wait", "60", "13")
    assert (pooled.returncode, pooled.stdout.splitlines()[1:]) == (0, ["applied"]), pooled.stderr
    assert script(stack.settings, *told, "--state", "evicted", "12").returncode == 0  # no ledger has it any more
    await_reach(worker, {11: ("cxl_pooled", [2]), 12: ("evicted", []), 13: ("cxl_pooled", [1, 2])})
    lost = script(stack.settings, "pool", POOL, "--lost")
    assert lost.stdout == f"pool {POOL}: epoch 1, lost, latency class far\n", lost.stderr
    await_reach(worker, {11: ("cxl_pooled", []), 12: ("evicted", []), 13: ("cxl_pooled", [])})
    back = [*told, "--state", "in_transit", "--pool-id", POOL]
    assert f"pool {POOL} is lost" in script(stack.settings, *back, "13").stderr
    forced = script(stack.settings, *back, "--force", "--wait", "60", "13")
    assert (forced.returncode, forced.stdout.splitlines()[1:]) == (0, ["applied"]), forced.stderr
    over = script(stack.settings, "pool", POOL, "--member", "1", "--epoch", "0")
    assert (over.returncode, over.stdout) == (1, "")
    assert "is in epoch 1 already" in over.stderr
    nobody = script(stack.settings, "transition", "--worker-id", "9", "--state", "evicted", "11")
    assert nobody.returncode == 1
    assert "has told nothing" in nobody.stderr
    worker.child.kill()
    silence = script(stack.settings, *told, "--state", "evicted", "--wait", "1", "13")
    assert silence.returncode == 1
    assert "no agent has read it" in silence.stderr


def test_the_publisher_of_the_page_tells_of_labels_and_pools(stack: Stack) -> None:
    """The code of docs/cxl.md as it stands, its imports among it."""
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


def test_a_bridge_tells_what_its_engine_does_with_a_pool_and_knows_its_names_again(
    stack: Stack,
) -> None:
    """From the engine's own batches, or where it has forgotten them from the table."""
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
    """Faust gives two workers the same numbers of both; whatever is told of a rank is in its worker's partition."""
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
