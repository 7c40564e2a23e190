"""A Kafka of three brokers: it starts and keeps what was acknowledged, and a fleet survives the loss of any broker.

The brokers are killed and paused one at a time, the controller and a partition leader among them, while clients book
requests at two routers and engines compute them. At the end the caches of the engines, the index of both routers and
of one that starts then, and the loads of all three are compared.
"""

from __future__ import annotations

import random
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Producer

from streams.core.routing.selection import RouterMode
from streams.errors import LocalKafkaError
from streams.kafka.clients import ensure_topics
from streams.kafka.group_limits import check_session_timeout
from streams.kafka.topic_watch import TopicReading, TopicWatch
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka import LocalCluster
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_json, held_blocks, known_blocks, wait_workers
from streams.process.waiting import wait_for
from streams.replay.cuts import log_ends, places_of
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.broken_cluster import (
    FAILOVER_S,
    N_BROKERS,
    breakable,
    controller,
    in_sync,
    killed,
    leader_of,
    paused,
)
from tests.helpers.broker import BreakableKafka, broker_config
from tests.helpers.cluster_clients import Clients, post
from tests.helpers.commands import Run
from tests.helpers.pages import block_of
from tests.helpers.support import VISIBLE_TIMEOUT_S

CACHE = EngineConfig(block_size=16, n_blocks=256)

#: How long the processor time of clients is measured after a broker has died.
SPIN_S = 4.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Give three running brokers."""
    made = LocalCluster(broker_config(tmp_path_factory.mktemp("kafka")), N_BROKERS, BreakableKafka)
    made.up()
    yield made
    made.down()
    assert made.status() is None


def test_a_cluster_keeps_what_was_acknowledged_when_a_broker_is_killed(cluster: LocalCluster) -> None:
    """`up` finds the brokers that run and starts the one that does not, at its address and with its data."""
    state = cluster.up()
    assert state.reused
    assert len(state.pids) == N_BROKERS
    assert cluster.answers()
    settings = Settings(**state.settings, topic_prefix="kept-", partitions=2)
    assert settings.replication == N_BROKERS
    spec = topics(settings).workers
    assert ensure_topics(settings, [spec])[spec.name].replication == N_BROKERS
    kafka = Producer({"bootstrap.servers": state.bootstrap, "acks": "all"})
    kafka.produce(spec.name, b"before", b"k", 0)
    assert kafka.flush(FAILOVER_S) == 0
    breakable(cluster, leader_of(settings, spec.name)).kill()
    assert len(cluster.status().pids) == N_BROKERS - 1  # type: ignore[union-attr]
    assert not cluster.answers()
    kafka.produce(spec.name, b"meanwhile", b"k", 0)
    assert kafka.flush(FAILOVER_S) == 0
    again = cluster.up()
    assert not again.reused
    assert again.bootstrap == state.bootstrap
    assert len(again.pids) == N_BROKERS
    values: list[bytes | None] = []
    read_to_end(settings, spec.name, 0, None, lambda records: values.extend(record.value for record in records))
    assert values == [b"before", b"meanwhile"]


def test_the_ends_of_logs_are_known_while_partitions_change_their_leader(cluster: LocalCluster) -> None:
    """A broker that led partitions is killed: nobody takes a wrong end for the right one, and all find the new leaders.

    librdkafka reports the end -1001 of a partition whose leader is dead, without an error, until it is told to look for
    the new one. A router that took it for an end would think that the table lacks nothing.
    """
    state = cluster.up()
    settings = Settings(**state.settings, topic_prefix="led-", partitions=6)
    spec = topics(settings).kv_events
    ensure_topics(settings, [spec])
    kafka = Producer({"bootstrap.servers": state.bootstrap, "acks": "all"})
    for partition in range(spec.partitions):
        kafka.produce(spec.name, b"a record", b"k", partition)
    assert kafka.flush(FAILOVER_S) == 0
    expected = dict.fromkeys(places_of([spec]), 1)
    readings: list[TopicReading] = []
    watch = TopicWatch(settings, [spec], [spec], readings.append)
    watch.start()
    try:
        wait_for(lambda: any(reading.ends == expected for reading in readings), FAILOVER_S, "a reading of all ends")
        breakable(cluster, leader_of(settings, spec.name)).kill()
        used_s = time.process_time()
        time.sleep(SPIN_S)
        # A client that demands a connection to the dead broker without a pause takes a core or more.
        assert time.process_time() - used_s < SPIN_S / 2
        assert log_ends(settings, list(expected)) == expected
        wait_for(lambda: not in_sync(settings), FAILOVER_S, "the broker to be missed")
        wait_for(lambda: readings[-1].ends == expected, FAILOVER_S, "a reading of all ends, of the new leaders")
    finally:
        watch.stop()
    assert all(reading.ends.items() <= expected.items() for reading in readings)
    cluster.up()


def test_a_worker_does_without_the_limits_of_a_broker_that_does_not_answer(cluster: LocalCluster) -> None:
    """It asks the broker with the lowest number, which takes connections here and answers nothing."""
    settings = Settings(**cluster.up().settings)
    with paused(cluster, 1):
        check_session_timeout(settings, settings.session_timeout_s)


def test_two_ups_at_once_start_one_cluster(cluster: LocalCluster) -> None:
    """Of two simultaneous calls, one starts the brokers and the other finds them; `down` stops all of them."""
    assert cluster.down()
    assert not cluster.down()
    with ThreadPoolExecutor(2) as threads:
        states = list(threads.map(lambda _: LocalCluster(cluster.config, N_BROKERS).up(), range(2)))
    assert sorted(state.reused for state in states) == [False, True]
    assert states[0].pids == states[1].pids


def test_a_cluster_that_cannot_start_leaves_no_broker(tmp_path: Path) -> None:
    """The error has the reason of the broker that failed, and the others are ended."""
    config = replace(broker_config(tmp_path / "kafka"), overrides={"num.io.threads": "many"})
    made = LocalCluster(config, N_BROKERS)
    with pytest.raises(LocalKafkaError, match="Invalid value many"):
        made.up()
    assert made.status() is None


def test_the_commands_of_the_page_start_and_stop_three_brokers(run: Run) -> None:
    """Pasted with the line that `up` prints, they create topics with three replicas, and leave no process."""
    page = [
        line for line in block_of("docs/kafka.md", "kvstreams kafka up").splitlines() if not line.startswith("export")
    ]
    up, create, status, down = (shlex.split(line)[1:] for line in page)
    done = run(*up)
    assert done.returncode == 0, done.stderr
    use = next(line for line in done.stdout.splitlines() if line.startswith("use it:"))
    env = dict(word.split("=", 1) for word in shlex.split(use) if word.startswith("KVSTREAMS_"))
    try:
        assert env["KVSTREAMS_REPLICATION"] == "3"
        created = run(*create, env=env).stdout.splitlines()
        assert created and all(line.endswith(" 3 replicas") for line in created)
        assert "answers at" in run(*status).stdout
    finally:
        assert run(*down).stdout == "Kafka is down\n"
    assert run(*status).returncode == 1


def test_a_router_reads_from_the_replica_in_its_rack(cluster: LocalCluster, tmp_path: Path, children: Children) -> None:
    """Its client leaves the leader for the broker in its rack, and answers are exact; other readers stay."""
    settings = Settings(**cluster.up().settings, topic_prefix="rack-", partitions=1, data_dir=str(tmp_path / "state"))
    stack = Stack(settings, tmp_path, children)
    stack.worker(router=False)
    ensure_topics(settings, topics(settings).all())
    leader = leader_of(settings, topics(settings).index_changelog.name)
    nearest = leader % N_BROKERS + 1
    shown = {"debug": "topic,fetch", "log_level": "7"}
    router = stack.router("near", router_rack=f"rack-{nearest}", log_level="debug", kafka_properties=shown)
    leaders = stack.router("far", log_level="debug", kafka_properties=shown)
    engines = stack.engines(1, CACHE, "m", time_scale=100.0)
    stack.bridge(engines)
    wait_workers(router.url, 1)
    for n in range(20):
        post(f"{engines[0].url}/v1/completions", {"prompt": list(range(n * 1000, n * 1000 + 160))})
    wait_for(lambda: known_blocks(router.url) == held_blocks(engines), VISIBLE_TIMEOUT_S, "the engine's blocks")
    changelog = f"{topics(settings).index_changelog.name} [0]"

    def followed(process: RouterProcess) -> bool:
        lines = process.child.log_path.read_text().splitlines()
        return any(changelog in line and "preferred replica" in line for line in lines)

    wait_for(lambda: followed(router), VISIBLE_TIMEOUT_S, "the router to read from the replica in its rack")
    assert not followed(leaders)


@pytest.mark.long_running
@pytest.mark.timeout(900)
def test_caches_index_and_loads_agree_after_every_broker_fault(
    cluster: LocalCluster, tmp_path: Path, children: Children
) -> None:
    """The controller and a leader are killed and paused: nothing is lost, and no process needs help."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    settings = Settings(
        **cluster.up().settings,
        topic_prefix="faults-",
        partitions=4,
        router_mode=RouterMode.KV,
        data_dir=str(tmp_path / "state"),
    )
    stack = Stack(settings, tmp_path, children)
    workers = [stack.worker(name, router=False) for name in ("first", "second")]
    routers = [stack.router("one"), stack.router("two")]
    engines = stack.engines(2, CACHE, "m", time_scale=100.0)
    bridge = stack.bridge(engines)
    for router in routers:
        wait_workers(router.url, len(engines))
    events = topics(settings).kv_events.name
    clients = Clients([router.url for router in routers], {each.worker_id: each.url for each in engines}, seed)

    def leader() -> int:
        return leader_of(settings, events)

    with clients.running():
        for fault in (killed, paused):
            for find in (lambda: controller(cluster), leader):
                victim: Callable[[], int] = find
                node = victim()
                before = clients.n_answered
                with fault(cluster, node):
                    wait_for(lambda: victim() not in (node, -1), FAILOVER_S, f"a successor of broker {node}")  # noqa: B023
                    wait_for(lambda: leader() not in (node, -1), FAILOVER_S, "a leader")  # noqa: B023
                    time.sleep(2.0)
                wait_for(lambda: in_sync(settings), FAILOVER_S, "all replicas to be in sync")
                assert clients.n_answered > before, "no request was answered meanwhile"
    assert not clients.failures, clients.failures[:5]
    for child in (*(each.child for each in (*workers, *routers)), bridge):
        assert child.running

    def settled(url: str) -> bool:
        ranks = get_json(f"{url}/state")["ranks"]
        exact = len(ranks) == len(engines) and all(rank["health"] == "exact" for rank in ranks)
        return exact and known_blocks(url) == held_blocks(engines)

    late = stack.router("late")
    urls = [router.url for router in (*routers, late)]
    for url in urls:
        wait_for(lambda: settled(url), VISIBLE_TIMEOUT_S, f"{url} to have the caches of the engines")  # noqa: B023
    ids = [engine.worker_id for engine in engines]
    wait_for(
        lambda: all(sum(load[2] for load in Api(url).loads(ids).values()) == clients.n_kept for url in urls),
        VISIBLE_TIMEOUT_S,
        "every booking to be free or kept at every router",
    )
    loads = [Api(url).loads(ids) for url in urls]
    assert loads[0] == loads[1] == loads[2]
    assert clients.n_kept > 0
