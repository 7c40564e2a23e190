"""A Kafka of three brokers that tests break: which broker leads what, and faults of one broker.

What lives here: finding a broker by its duty, killing it, pausing it and filling its disk. What must not: a single
broker's process (broker), and what must hold meanwhile (tests).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from confluent_kafka import KafkaException

from streams.kafka.clients import admin
from streams.lab.kafka import LocalCluster
from streams.settings import Settings
from tests.helpers.background import repeated
from tests.helpers.broker import BreakableKafka, broker_config
from tests.helpers.small_disk import fill, mounted

N_BROKERS = 3

#: A broker's session ends after 9 s, then the others elect leaders; the machine may be busy.
FAILOVER_S = 60.0

#: How long a broker may take to start again while the whole fleet does so, too, on two cores.
START_TIMEOUT_S = 240.0

#: A broker that is up answers within milliseconds.
ANSWER_TIMEOUT_S = 3.0

#: A slow broker runs and pauses in turn for so long: each request takes up to half a second longer.
SLOW_RUNS_S = 0.1
SLOW_PAUSED_S = 0.4


#: The broker whose disk can be filled, and the size of the disk: more than what ten minutes of chaos write.
SMALL_DISK_NODE = N_BROKERS
BROKER_DISK_MB = 1024


@contextmanager
def breakable_cluster(directory: Path) -> Iterator[LocalCluster]:
    """Three brokers that can be broken, which end with the block. One has a small disk, where one may be mounted."""
    config = replace(broker_config(directory), start_timeout_s=START_TIMEOUT_S)
    cluster = LocalCluster(config, N_BROKERS, BreakableKafka)
    with ExitStack() as mounts:
        with suppress(OSError):
            mounts.enter_context(mounted(directory / f"broker-{SMALL_DISK_NODE}", BROKER_DISK_MB))
        try:
            yield cluster
        finally:
            cluster.down()


def breakable(cluster: LocalCluster, node: int) -> BreakableKafka:
    broker = cluster.brokers()[node - 1]
    assert isinstance(broker, BreakableKafka)
    return broker


def controller(cluster: LocalCluster) -> int:
    """The node of the active controller, by the newest election that any broker knows."""
    elections = []
    for broker in cluster.brokers():
        state = json.loads((broker.directory / "data/__cluster_metadata-0/quorum-state").read_text())
        elections.append((state["leaderEpoch"], state["leaderId"]))
    return int(max(elections)[1])


def leader_of(settings: Settings, topic: str, partition: int = 0) -> int:
    """The node that leads a partition, or -1 if there is none, or no broker answers in time."""
    try:
        # With a client of its own: one that has sent a request to a broker that hangs waits for its answer.
        found = admin(settings).list_topics(topic, timeout=ANSWER_TIMEOUT_S)
    except KafkaException:
        return -1
    return found.topics[topic].partitions[partition].leader


def in_sync(settings: Settings) -> bool:
    """Whether every replica of every partition is in sync."""
    try:
        found = admin(settings).list_topics(timeout=ANSWER_TIMEOUT_S)
    except KafkaException:
        return False
    return all(
        len(partition.isrs) == len(partition.replicas)
        for topic in found.topics.values()
        for partition in topic.partitions.values()
    )


@contextmanager
def killed(cluster: LocalCluster, node: int) -> Iterator[None]:
    breakable(cluster, node).kill()
    yield
    cluster.up()


@contextmanager
def paused(cluster: LocalCluster, node: int) -> Iterator[None]:
    broker = breakable(cluster, node)
    broker.pause()
    try:
        yield
    finally:
        broker.resume()


@contextmanager
def slowed(cluster: LocalCluster, node: int) -> Iterator[None]:
    """Pause a broker again and again, so briefly that its session goes on, as on a disk or a host that is too busy."""
    broker = breakable(cluster, node)

    def pause() -> None:
        broker.pause()
        time.sleep(SLOW_PAUSED_S)
        broker.resume()

    with repeated(pause, SLOW_RUNS_S):
        yield


@contextmanager
def filled(cluster: LocalCluster) -> Iterator[None]:
    """Fill the disk of the broker that has a small one, until the block ends; then the broker is started again.

    A broker ends when it cannot write. Where no disk could be mounted, it is killed instead.
    """
    broker = breakable(cluster, SMALL_DISK_NODE)
    if not broker.directory.is_mount():
        broker.kill()
        yield
    else:
        ballast = broker.directory / "ballast"
        fill(ballast)
        try:
            yield
        finally:
            ballast.unlink()
        if broker.status() is not None:  # it had nothing to write, or is about to end
            broker.kill()
    cluster.up()
