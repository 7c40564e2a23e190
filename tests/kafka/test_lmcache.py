"""LMCache's cache events on a real Kafka: a bridge makes pools of them, which agree with LMCache's own directory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streams.doctor.findings import Group
from streams.doctor.run import Order, examine
from streams.errors import ProcessError
from streams.kafka.clients import Record
from streams.lab.demo.pooled_fleet import PooledFleet, killed_midway
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.pool import PoolConfig
from streams.lab.kafka.broker import LocalKafka
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Child
from streams.lab.stack import RouterProcess, Stack, get_bytes, get_json, wait_workers
from streams.lmcache.feeds import KnownFeed, decode_feed
from streams.process.waiting import wait_for
from streams.reset import reset_scope
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.bridges import SMALL
from tests.helpers.broker import broker_config
from tests.helpers.cxl_fleet import ask, await_supplementary, call
from tests.helpers.lmcache_events import EventTopic, directory_objects, golden, table_objects
from tests.helpers.support import VISIBLE_TIMEOUT_S

#: A Python that has LMCache 0.5.6.
REAL = "KVSTREAMS_REAL_LMCACHE"

TOKENS = list(range(100, 200))

#: Short, so that another bridge takes over soon, but long enough for processes that share two cores with others.
LEASE_S = 3.0

#: Random events between two looks at the pools, and the time from the first of them until a bridge is killed.
EVENTS_PER_PART = 2000
KILLED_WITHIN_S = 3.0


def lmcache_bridge(stack: Stack, topic: EventTopic, name: str) -> Child:
    return stack.bridge([], name, options=["--lmcache", topic.name])


def await_objects(
    stack: Stack,
    expected: list[list[object]],
    timeout_s: float = VISIBLE_TIMEOUT_S,
    allowed: Iterable[list[object]] = (),
) -> None:
    """Wait until the table has these objects, and no others except those that are allowed."""
    found: list[list[object]] = []
    may_be = {*map(tuple, expected), *map(tuple, allowed)}

    def agrees() -> bool:
        found[:] = table_objects(stack.settings)
        has = set(map(tuple, found))
        return has.issuperset(map(tuple, expected)) and has <= may_be

    try:
        wait_for(agrees, timeout_s, "the pools to agree", 0.3)
    except ProcessError:
        lacking = [each for each in expected if each not in found]
        more = [each for each in found if tuple(each) not in may_be]
        pytest.fail(f"{len(lacking)} of {len(expected)} are missing, as {lacking[:3]}; {len(more)} more, as {more[:3]}")


def await_holder(stack: Stack, bridge: Child) -> None:
    """Wait until a bridge holds the lease of an instance, as the registry has it."""

    def holders() -> set[str]:
        return {feed.lease.bridge.split(":")[1] for feed in known_feeds(stack) if feed.lease is not None}

    wait_for(lambda: str(bridge.pid) in holders(), VISIBLE_TIMEOUT_S, "a bridge to take over", 0.2)


def known_feeds(stack: Stack) -> list[KnownFeed]:
    """Return the feeds, as the registry has them."""
    found: dict[bytes, bytes] = {}
    for partition in range(stack.settings.partitions):
        records: list[Record] = []
        read_to_end(stack.settings, topics(stack.settings).workers.name, partition, None, records.extend)
        found.update((record.key, record.value) for record in records if record.value is not None)
    return [decode_feed(value) for key, value in found.items() if key.startswith(b"lmcache")]


def batch(number: int, kind: str, chunks: list[tuple[str, int, list[int]]], **fields: Any) -> dict[str, str]:
    """Return a batch of instance i, of chunks by hash, position and tokens, with one rank."""
    entries = [
        {
            "key": {"chunk_hash_hex": name * 32, "model_name": "m", "kv_rank": 1 << 24 | 1 << 8},
            "size_bytes": 1,
            "token_ids": tokens,
            "token_offset": at,
        }
        for name, at, tokens in chunks
    ]
    content = {
        "instance_id": "i",
        "incarnation": 1,
        "seq": number,
        "event_type": kind,
        "tier": "l1",
        "backend": "dram",
        "entries": entries,
        "shared": False,
        "ts": 1.0,
        **fields,
    }
    return {"key": "i", "value": json.dumps({"batches": [content]})}


@pytest.mark.first_ring("bridge")
@pytest.mark.long_running
def test_pools_agree_with_the_directory_of_lmcache_while_bridges_are_killed(stack: Stack) -> None:
    """After each part of the golden records the table has what LMCache's directory lists, whichever bridge was killed.

    A record that is not of LMCache's format is a counted dead letter, and nothing stops.
    """
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    worker = stack.worker()
    topic = EventTopic(stack.settings, 1)  # what two servers do in a shared backend has an order in one partition only
    records, bridge = golden()["records"], lmcache_bridge(stack, topic, "lmcache-0")
    for number, first in enumerate(range(0, len(records), 40)):
        topic.send(records[first : first + 40])
        await_holder(stack, bridge)
        following = lmcache_bridge(stack, topic, f"lmcache-{number + 1}")
        bridge.kill()
        bridge = following
    for damaged in range(20):
        value = [b"\x00", b"{}", b'{"batches":[{}]}', None][damaged % 4]
        topic.send_raw(b"node-a" if damaged % 2 else b"other", value)
    await_objects(stack, directory_objects(golden()["directory"]))
    feeds = {"lmcache/node-a", "lmcache/node-b", "lmcache-shared/s3"}
    assert {pool["pool_id"].rpartition("/")[0] for pool in get_json(f"{worker.url}/pools")["pools"]} <= {
        *feeds,
        "lmcache-shared",
        "lmcache/node-a/l2",
        "lmcache/node-b/l2",
    }
    wait_for(lambda: n_dead_letters(stack) >= 20, VISIBLE_TIMEOUT_S, "the dead letters")
    topic.send([batch(1, "store", [("aa", 0, TOKENS[:32])])])
    wait_for(lambda: any(row[3] == "i" for row in table_objects(stack.settings)), VISIBLE_TIMEOUT_S, "the last record")


def n_dead_letters(stack: Stack) -> int:
    found: list[Record] = []
    for partition in range(stack.settings.partitions):
        read_to_end(stack.settings, topics(stack.settings).dead_letters.name, partition, None, found.extend)
    assert all(b"token" not in (record.value or b"") for record in found)
    return len(found)


@pytest.mark.first_ring("bridge")
@pytest.mark.long_running
def test_an_engine_counts_the_chunks_of_its_instance_up_to_the_end_of_a_chunk(stack: Stack) -> None:
    """A request's blocks in the pool count for the engine that names the instance, as far as whole chunks match.

    They are gone once they are deleted, and when the server is restarted.
    """
    worker, topic = stack.worker(), EventTopic(stack.settings)
    engines = stack.engines(2, SMALL, "m", 100.0)
    stack.bridge(engines, options=["--lmcache", topic.name], instances={1: "i"})
    wait_workers(worker.url, 2)
    first, second = TOKENS[:32], TOKENS[32:64]
    topic.send([batch(1, "store", [("aa", 0, first)])])
    await_supplementary(worker, {1: (0, 2, 0), 2: (0, 0, 0)}, TOKENS)
    await_supplementary(worker, {1: (0, 0, 0), 2: (0, 0, 0)}, [*TOKENS[:16], *TOKENS])
    assert get_json(f"{worker.url}/workers")["workers"]
    topic.send([batch(2, "delete", [("aa", -1, [])])])
    await_supplementary(worker, {1: (0, 0, 0), 2: (0, 0, 0)}, TOKENS)
    topic.send([batch(3, "store", [("aa", 0, first), ("bb", 0, second)])])
    await_supplementary(worker, {1: (0, 2, 0), 2: (0, 0, 0)}, second)
    topic.send([batch(1, "store", [("bb", 0, second)], incarnation=2)])
    await_supplementary(worker, {1: (0, 0, 0), 2: (0, 0, 0)}, first)
    await_supplementary(worker, {1: (0, 2, 0), 2: (0, 0, 0)}, second)
    assert call(worker, "GET", "/pools")["pools"][0]["members"] == [1]


@pytest.mark.long_running
@pytest.mark.parametrize("runs", [True, False], ids=["while a bridge runs", "while no bridge runs"])
def test_a_topic_that_is_created_anew_is_read_from_its_beginning(stack: Stack, *, runs: bool) -> None:
    """While there is none, answers that use its chunks are degraded. What was deleted with it is missing, and shows."""
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    worker, topic = stack.worker(), EventTopic(stack.settings, 1)
    stack.bridge(stack.engines(1, SMALL, "m", 100.0), instances={1: "i"})
    wait_workers(worker.url, 1)
    bridge = lmcache_bridge(stack, topic, "lmcache-0")
    chunks = [(name, 0, [number, *TOKENS[:31]]) for number, name in enumerate(("aa", "bb", "cc", "dd"))]
    for number, chunk in enumerate(chunks[:3], 1):
        topic.send([batch(number, "store", [chunk])])
    await_supplementary(worker, {1: (0, 2, 0)}, chunks[2][2])
    await_degraded(worker, chunks[0][2], None)
    wait_for(lambda: [feed.positions for feed in known_feeds(stack)] == [(3,)], VISIBLE_TIMEOUT_S, "the position", 0.2)
    if not runs:
        bridge.kill()
    topic.delete()
    await_degraded(worker, chunks[0][2], "pooled_rank_unknown")
    topic.create(1)
    if not runs:
        lmcache_bridge(stack, topic, "lmcache-1")
    topic.send([batch(4, "store", [chunks[3]])])
    await_supplementary(worker, {1: (0, 2, 0)}, chunks[3][2])
    await_degraded(worker, chunks[0][2], None)
    topic.send([batch(6, "delete", [chunks[0]])])
    await_supplementary(worker, {1: (0, 0, 0)}, chunks[0][2])
    await_degraded(worker, chunks[3][2], "pooled_rank_unknown")


def await_degraded(worker: RouterProcess, tokens: list[int], reason: str | None) -> None:
    """Wait until an answer is degraded for a reason, or is not degraded."""
    try:
        wait_for(lambda: why_degraded(worker, tokens) == reason, VISIBLE_TIMEOUT_S, "the answer to be trusted as it is")
    finally:
        assert why_degraded(worker, tokens) == reason


def why_degraded(worker: RouterProcess, tokens: list[int]) -> str | None:
    answer = ask(worker, tokens)
    return answer.get("degraded_because") or answer.get("chosen_degraded_because")


@pytest.mark.long_running
def test_answers_are_degraded_while_lmcaches_own_kafka_is_away(stack: Stack, tmp_path: Path) -> None:
    """The scope's Kafka answers all the while, so that nothing else shows that the bridge learns of nothing."""
    broker = LocalKafka(broker_config(tmp_path / "kafka-b"))
    try:
        topic = EventTopic(replace(stack.settings, kafka=broker.up().bootstrap), 1)
        worker = stack.worker()
        stack.bridge(stack.engines(1, SMALL, "m", 100.0), instances={1: "i"})
        wait_workers(worker.url, 1)
        stack.bridge([], "lmcache", options=["--lmcache", topic.name, "--lmcache-kafka", topic.kafka])
        tokens = TOKENS[:32]
        topic.send([batch(1, "store", [("aa", 0, tokens)])])
        await_supplementary(worker, {1: (0, 2, 0)}, tokens)
        await_degraded(worker, tokens, None)
        broker.down()
        await_degraded(worker, tokens, "pooled_rank_unknown")
        broker.up()
        await_degraded(worker, tokens, None)  # although there is nothing to read
        topic.send([batch(2, "delete", [("aa", 0, [])])])
        await_supplementary(worker, {1: (0, 0, 0)}, tokens)
    finally:
        broker.down()


@pytest.mark.long_running
def test_a_bridge_that_cannot_read_the_topic_claims_no_server(stack: Stack) -> None:
    """It would keep the server from the bridges that can."""
    worker, topic = stack.worker(), EventTopic(stack.settings, 1)
    stack.bridge(stack.engines(1, SMALL, "m", 100.0), instances={1: "i"})
    wait_workers(worker.url, 1)
    bridge = lmcache_bridge(stack, topic, "lmcache-0")
    topic.send([batch(1, "store", [("aa", 0, TOKENS[:32])])])
    await_supplementary(worker, {1: (0, 2, 0)}, TOKENS[:32])
    cut_off = stack.bridge([], "cut-off", options=["--lmcache", topic.name, "--lmcache-kafka", "127.0.0.1:1"])
    outage = "Kafka at 127.0.0.1:1 does not answer"
    wait_for(lambda: outage in cut_off.log_path.read_text(), VISIBLE_TIMEOUT_S, "the bridge to fail")
    bridge.stop()
    lmcache_bridge(stack, topic, "lmcache-1")
    topic.send([batch(2, "delete", [("aa", 0, [])])])
    await_supplementary(worker, {1: (0, 0, 0)}, TOKENS[:32])
    await_degraded(worker, TOKENS[:32], None)


@pytest.mark.long_running
def test_a_bridge_leaves_the_servers_of_another_topic_alone(stack: Stack) -> None:
    """It could not read their events. The bridge of that topic goes on with them when it is started again."""
    worker, topics_of = stack.worker(), [EventTopic(stack.settings, 1, name) for name in ("", "-2")]
    stack.bridge(stack.engines(1, SMALL, "m", 100.0), instances={1: "i"})
    wait_workers(worker.url, 1)
    bridges = [lmcache_bridge(stack, topic, f"lmcache{topic.name[-2:]}") for topic in topics_of]
    topics_of[0].send([{**batch(1, "store", [("aa", 0, TOKENS[:32])], instance_id="j"), "key": "j"}])
    await_holder(stack, bridges[0])
    for number, chunk in enumerate((TOKENS[:32], TOKENS[32:64]), 1):
        topics_of[1].send([batch(number, "store", [("ab"[number - 1] * 2, 0, chunk)])])
        await_supplementary(worker, {1: (0, 2, 0)}, chunk)
        bridges[1].stop()
        bridges[1] = lmcache_bridge(stack, topics_of[1], f"lmcache-2-{number}")


@pytest.mark.long_running
def test_partitions_that_are_added_are_read(stack: Stack) -> None:
    """The events of a server move to another partition when some are added."""
    worker, topic = stack.worker(), EventTopic(stack.settings, 1)
    stack.bridge(stack.engines(1, SMALL, "m", 100.0), options=["--lmcache", topic.name], instances={1: "i"})
    wait_workers(worker.url, 1)
    first, second = TOKENS[:32], TOKENS[32:64]
    topic.send([batch(1, "store", [("aa", 0, first)])])
    await_supplementary(worker, {1: (0, 2, 0)}, first)
    topic.extend(3)
    topic.send([batch(2, "delete", [("aa", 0, [])]), batch(3, "store", [("bb", 0, second)])], partition=2)
    await_supplementary(worker, {1: (0, 2, 0)}, second)
    await_supplementary(worker, {1: (0, 0, 0)}, first)
    topic.send([batch(4, "delete", [("bb", 0, [])])], partition=1)
    await_supplementary(worker, {1: (0, 0, 0)}, second)


@pytest.mark.long_running
def test_a_stream_goes_on_from_what_lmcache_has_when_its_engine_is_killed(stack: Stack) -> None:
    """Another engine loads the whole chunks of the stream's context, and computes only what follows them."""
    worker, config = stack.worker(), EngineConfig()
    fleet = PooledFleet(
        stack, worker, "m", config, pool=PoolConfig("p", config.block_size), time_scale=20.0, lmcache="node-a"
    )
    fleet.start()
    front = fleet.front("front", [worker])
    prompt = list(range(7, 2_007))
    move = killed_midway(fleet, front, prompt, n_tokens=1_000, kill_at=500)
    fleet.until_free()
    assert move.streamed.error is None and len(move.streamed.token_ids) == 1_000
    assert move.second in fleet.members
    # Of 2,500 tokens, nine chunks of 256 are whole. It had eight blocks itself.
    assert move.loaded == 9 * 256 - 8 * 16 and move.computed <= 2_501 - 9 * 256
    (pool,) = get_json(f"{worker.url}/pools")["pools"]
    assert pool["pool_id"] == "lmcache/node-a/devdax" and pool["members"] == fleet.members


@pytest.mark.long_running
def test_a_model_that_lmcache_calls_otherwise_is_named_and_counts_after_the_setting(stack: Stack) -> None:
    """The doctor names the setting and the metrics count the events; a bridge with the setting corrects what is there.

    An engine that names another server is named as well, until it names this one.
    """
    worker, topic, stack.settings = stack.worker(), EventTopic(stack.settings), at_port(stack.settings)
    engines = stack.engines(1, SMALL, "m", 100.0)
    of_engines = stack.bridge(engines, instances={1: "node-1"})
    wait_workers(worker.url, 1)
    first, second = TOKENS[:32], TOKENS[32:64]
    named = {"value": batch(1, "store", [("aa", 0, first)])["value"].replace('"m"', '"/models/m"'), "key": "i"}
    topic.send([named])
    stack.settings = at_port(stack.settings)
    bridge = lmcache_bridge(stack, topic, "lmcache-0")
    await_findings(stack.settings, {"lmcache_other_model", "lmcache_unknown_server", "lmcache_unused"})
    page = get_bytes(f"http://127.0.0.1:{stack.settings.metrics_port}/metrics").decode()
    assert "kvstreams_bridge_lmcache_stored_total 1.0" in page
    assert "kvstreams_bridge_lmcache_chunks 1.0" in page
    assert "kvstreams_bridge_lmcache_records_behind 0.0" in page
    bridge.stop()
    stack.settings = replace(at_port(stack.settings), lmcache_models={"/models/m": "m"})
    lmcache_bridge(stack, topic, "lmcache-1")
    await_findings(stack.settings, {"lmcache_unknown_server", "lmcache_unused"})
    of_engines.stop()
    stack.settings = at_port(stack.settings)
    stack.bridge(engines, "bridge-1", instances={1: "i"})
    await_findings(stack.settings, set())
    await_supplementary(worker, {1: (0, 2, 0)}, first)
    topic.send([{**named, "value": named["value"].replace('"seq": 1', '"seq": 2').replace("aa", "bb")}])
    await_supplementary(worker, {1: (0, 0, 0)}, second)


def at_port(settings: Settings) -> Settings:
    """The settings of a process with a metrics page of its own."""
    return replace(settings, metrics_port=free_port())


def await_findings(settings: Settings, codes: set[str]) -> None:
    """Wait until the doctor's findings about LMCache are these."""
    order = Order(skip=frozenset(Group) - {Group.LMCACHE})

    def found() -> set[str]:
        return {each.code for each in examine(settings, order).findings}

    try:
        wait_for(lambda: found() == codes, VISIBLE_TIMEOUT_S, "the findings", 0.3)
    finally:
        assert found() == codes


@pytest.mark.long_running
def test_chunks_come_back_after_a_reset(stack: Stack) -> None:
    """A bridge that runs publishes them again from memory, as they are by then, and another one from the topic."""
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S)
    worker, topic = stack.worker(), EventTopic(stack.settings)
    engines = stack.engines(1, SMALL, "m", 100.0)
    first, second = TOKENS[:32], TOKENS[32:64]
    topic.send([batch(1, "store", [("aa", 0, first), ("bb", 0, second)])])
    stack.bridge(engines, instances={1: "i"})
    wait_workers(worker.url, 1)
    bridge = lmcache_bridge(stack, topic, "lmcache-0")
    await_supplementary(worker, {1: (0, 2, 0)}, first)
    for number in (1, 2):
        emptied = reset_scope(stack.settings, force=True)
        assert emptied.feeds == 1 and emptied.records > 0
        wait_for(
            lambda n=number: bridge.log_path.read_text().count("published again") == n,  # type: ignore[misc]
            VISIBLE_TIMEOUT_S,
            "the bridge to begin again",
        )
        await_supplementary(worker, {1: (0, 2, 0)}, second)
        topic.send([batch(number + 1, "delete" if number == 1 else "store", [("aa", 0, first)])])
        await_supplementary(worker, {1: (0, 2 if number == 2 else 0, 0)}, first)
    bridge.kill()
    assert reset_scope(stack.settings, force=True).feeds == 1
    await_supplementary(worker, {1: (0, 0, 0)}, first)
    lmcache_bridge(stack, topic, "lmcache-1")
    for tokens in (first, second):
        await_supplementary(worker, {1: (0, 2, 0)}, tokens)
    topic.send([batch(4, "delete", [("bb", 0, [])])])
    await_supplementary(worker, {1: (0, 0, 0)}, second)


@pytest.mark.long_running
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    not Path(os.environ.get(REAL, "-")).is_file(), reason=f"{REAL} does not name a Python that has lmcache 0.5.6"
)
def test_pools_agree_with_the_directory_of_the_real_lmcache(stack: Stack, long_form: bool) -> None:
    """Random events of the real classes, with bridges that are killed among them, and a look at each quiet point.

    With --long, 100,000 events.
    """
    chance, began_s = random.Random(1), time.monotonic()
    # Chunks in doubt would be evicted during a long run, and LMCache's directory keeps them.
    stack.settings = replace(stack.settings, bridge_lease_s=LEASE_S, lmcache_unconfirmed_ttl_s=0.0)
    stack.worker()
    topic = EventTopic(stack.settings, 1)
    producer = Path(__file__).parents[1] / "helpers" / "lmcache_producer.py"
    arguments = [os.environ[REAL], str(producer), "publish", stack.settings.kafka, topic.name, "1", "32"]
    environ = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    n_parts, n_objects, n_uncertain, dropped = (50 if long_form else 2), 0, 0, 0
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True) as fleet:
        assert fleet.stdin is not None and fleet.stdout is not None
        bridge = lmcache_bridge(stack, topic, "lmcache-0")
        for part in range(n_parts):
            fleet.stdin.write(f"{EVENTS_PER_PART}\n")
            fleet.stdin.flush()
            await_holder(stack, bridge)
            following = lmcache_bridge(stack, topic, f"lmcache-{part + 1}")
            time.sleep(chance.uniform(0.0, KILLED_WITHIN_S))
            bridge.kill()
            bridge = following
            answer = json.loads(fleet.stdout.readline())
            assert answer["dropped"] == 0
            uncertain = {tuple(each) for each in answer["uncertain"]}
            certain = [each for each in answer["directory"] if (each[0], each[3]) not in uncertain]
            expected, known = directory_objects(certain), directory_objects(answer["directory"])
            n_uncertain += len(known) - len(expected)
            await_objects(stack, expected, 120.0, allowed=known)
            n_objects += len(expected)
            dropped = answer["batches_dropped"]
        fleet.stdin.close()
    print(
        f"{n_parts * EVENTS_PER_PART} events, {dropped} batches dropped, {n_parts} kills and quiet points, "
        f"{n_objects} objects compared, {n_uncertain} that may lack a name, {time.monotonic() - began_s:.0f} s"
    )
