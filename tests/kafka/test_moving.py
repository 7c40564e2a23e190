"""`kvstreams replay --into` on a real Kafka: a scope moves to another number of partitions while it is used."""

from __future__ import annotations

import random
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streams.core.events import EngineBatch, EngineEvents
from streams.core.ids import DpRank, Incarnation, RankId, WorkerId
from streams.engines.publisher import KvEventPublisher
from streams.kafka.clients import admin, ensure_topics, producer, worker_key
from streams.kafka.records import encode_batch
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.engines.journal import CacheHistory
from streams.lab.kafka.broker import LocalKafka
from streams.lab.processes import Child, Children
from streams.lab.stack import Stack, facts, get_json, held_blocks, known_blocks, wait_workers
from streams.process.waiting import wait_for
from streams.settings import Settings, TopicProfile, as_environ
from streams.topics import topics
from tests.helpers.api import Api
from tests.helpers.background import repeated
from tests.helpers.broker import broker_config
from tests.helpers.cluster_clients import Clients, prompt_of
from tests.helpers.exact_answers import Asked, wrong_answers
from tests.helpers.pages import block_of
from tests.helpers.replayed_scope import MODEL, Writer, fill_registry
from tests.helpers.scopes import ScopeFactory
from tests.helpers.support import VISIBLE_TIMEOUT_S

#: The scope that is moved has four.
N_NEW = 7

#: Small, so that blocks are evicted all the time.
CACHE = EngineConfig(block_size=16, n_blocks=256)
TIME_SCALE = 100.0

#: An engine that was killed may get requests for so long (docs/trust.md), and answers name what it held.
DEATH_NOTICED_NS = 2_000_000_000

#: Two workers, two routers and two scopes share two cores.
MOVED_TIMEOUT_S = 90.0


@pytest.fixture
def new(stack: Stack, new_scope: ScopeFactory, children: Children, tmp_path: Path) -> Stack:
    """Give the scope that is moved to, with more partitions."""
    settings = replace(new_scope(tmp_path / "new-state"), partitions=N_NEW)
    ensure_topics(stack.settings, topics(stack.settings).all())
    ensure_topics(settings, topics(settings).all())
    return Stack(settings, tmp_path / "new", children)


@pytest.fixture
def move(stack: Stack, new: Stack, children: Children, tmp_path: Path) -> Callable[[], Child]:
    """Give a function that starts the move, as docs/replay.md has the command."""

    def start() -> Child:
        return children.add(moving_child(stack, new, tmp_path)).start()

    return start


def moving_child(old: Stack, new: Stack, directory: Path) -> Child:
    """Give the process of the command in docs/replay.md, with the names of these scopes, not yet started."""
    ours = {"v2-": new.settings.topic_prefix, "kafka-b:9092": new.settings.kafka}
    words = shlex.split(block_of("docs/replay.md", "kvstreams replay --into"))
    arguments = ["-m", "streams.cli", *(ours.get(word, word) for word in words[1:])]
    log_path = directory / "logs" / f"move-{time.monotonic_ns()}.log"
    return Child("move", arguments, log_path, as_environ(old.settings))


def ranks_of(url: str) -> dict[tuple[int, int], tuple[Any, ...]]:
    """What a router knows of each rank that another scope has alike: not how often it was restated."""
    names = ("incarnation", "sequence", "health", "blocks")
    return {
        (rank["worker_id"], rank["dp_rank"]): tuple(rank[name] for name in names)
        for rank in get_json(f"{url}/state")["ranks"]
    }


def pooled_of(url: str) -> set[tuple[Any, ...]]:
    """The blocks in CXL pools that a router may use."""
    return {
        (
            block["sequence_hash"],
            block["worker_id"],
            block["dp_rank"],
            block["pool_id"],
            tuple(block["accessible_workers"]),
        )
        for block in get_json(f"{url}/state/cxl")["blocks"]
        if block["state"] == "cxl_pooled"
    }


def test_a_history_is_moved_while_it_is_written(stack: Stack, new: Stack, move: Callable[[], Child]) -> None:
    """Blocks, labels, pools, gaps, restarts and removals are the same, whenever the move was killed."""
    seed = random.randrange(1 << 16)
    writer = Writer(stack.settings, seed, 600)
    old_worker, new_worker = stack.worker(), new.worker("new-worker")
    fill_registry(stack.settings, Api(old_worker.url))
    rng = random.Random(seed)
    writer.write(200)
    writer.wait_known(old_worker.url)
    moving = move()
    for _ in range(3):
        for _ in range(10):
            writer.write(rng.randint(1, 12))
            time.sleep(rng.random() * 0.5)
        moving.kill()
        writer.write(rng.randint(1, 12))
        moving = move()
    writer.write(600)
    writer.wait_known(old_worker.url)
    assert_moved(old_worker.url, new_worker.url, moving)
    assert get_json(f"{new_worker.url}/pools") == get_json(f"{old_worker.url}/pools")
    names = ("worker_id", "url", "model", "state")
    workers = [
        [[each[name] for name in names] for each in get_json(f"{url}/workers")["workers"]]
        for url in (old_worker.url, new_worker.url)
    ]
    assert workers[0] == workers[1]
    assert get_json(f"{new_worker.url}/loads")["loads"] != get_json(f"{old_worker.url}/loads")["loads"]
    moving.stop()
    assert moving.exit_code == 0, moving.tail()


def test_a_scope_is_moved_to_another_kafka(stack: Stack, children: Children, tmp_path: Path) -> None:
    """It may have another profile. Only the new topics are there."""
    kafka = LocalKafka(broker_config(tmp_path / "kafka-b")).up()
    try:
        moved = replace(
            stack.settings,
            kafka=kafka.bootstrap,
            topic_prefix=f"v2-{stack.settings.topic_prefix}",
            partitions=N_NEW,
            topic_profile=TopicProfile.REDPANDA,
            data_dir=str(tmp_path / "new-state"),
        )
        ensure_topics(stack.settings, topics(stack.settings).all())
        ensure_topics(moved, topics(moved).all())
        new = Stack(moved, tmp_path / "new", children)
        writer = Writer(stack.settings, random.randrange(1 << 16), 300)
        old_worker, new_worker = stack.worker(), new.worker("new-worker")
        fill_registry(stack.settings, Api(old_worker.url))
        writer.write(150)
        moving = children.add(moving_child(stack, new, tmp_path)).start()
        writer.write(300)
        writer.wait_known(old_worker.url)
        assert_moved(old_worker.url, new_worker.url, moving)
        moving.stop()
        assert moving.exit_code == 0, moving.tail()
        names = set(admin(moved).list_topics(timeout=20.0).topics)
        assert {name for name in names if not name.startswith("__")} == {spec.name for spec in topics(moved).all()}
        for child in (new_worker.child, old_worker.child):
            child.stop()
    finally:
        LocalKafka(broker_config(tmp_path / "kafka-b")).down()


def assert_moved(old_url: str, new_url: str, moving: Child) -> None:
    """Wait until a router of the new scope knows what one of the old scope does."""

    def same() -> bool:
        assert moving.running, moving.tail()
        return (
            facts(new_url) == facts(old_url)
            and ranks_of(new_url) == ranks_of(old_url)
            and pooled_of(new_url) == pooled_of(old_url)
        )

    try:
        wait_for(same, MOVED_TIMEOUT_S, "the new scope to have what the old one has", 0.5)
    finally:
        assert ranks_of(new_url) == ranks_of(old_url), moving.tail()
        assert facts(new_url) ^ facts(old_url) == set()
        assert pooled_of(new_url) ^ pooled_of(old_url) == set()


class Watcher:
    """Asks a router for prompts of the clients' kind, without booking, and notes every answer."""

    def __init__(self, seed: int) -> None:
        self.url = ""
        self._rng = random.Random(seed)
        self._prompts: list[list[int]] = []
        self.asked: list[Asked] = []
        self.modes: Counter[str] = Counter()

    def ask(self) -> None:
        """Ask once. A router that has no worker yet refuses."""
        prompt, url, sent_ns = prompt_of(self._rng), self.url, time.time_ns()
        try:
            done = Api(url).call("POST", "/route", {"model": MODEL, "token_ids": prompt, "update_states": False})
        except (OSError, HTTPException):
            return
        if done.status != 200:
            return
        answer = done.given()
        why = str(answer.get("degraded_because"))
        number, received_ns = len(self._prompts), time.time_ns()
        self._prompts.append(prompt)
        modes = answer["chosen_mode"], answer["mode"]
        self.asked.append(
            Asked(number, sent_ns, received_ns, 0, answer["worker_id"], *modes, answer["overlap_blocks"], why)
        )
        self.modes[answer["chosen_mode"]] += 1

    def tokens_of(self, number: int) -> bytes:
        """The prompt of an answer, u32 LE."""
        return np.array(self._prompts[number], dtype="<u4").tobytes()


def test_a_fleet_is_moved_under_load_without_a_wrong_exact_answer(
    stack: Stack, new: Stack, move: Callable[[], Child]
) -> None:
    """Engines go on while the move is killed, an engine restarts, bridges change the scope, and routers follow.

    In the end, the caches of the engines and the index of the new router are the same, and all of it is exact.
    """
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    journals = {number: stack.directory / f"journal-{number}" for number in (1, 2, 3)}
    options = {number: ("--journal", str(path)) for number, path in journals.items()}
    engines = stack.engines(3, CACHE, MODEL, TIME_SCALE, own_options=options)
    old_worker, new_worker = stack.worker(), new.worker("new-worker")
    bridges = [stack.bridge(engines[:2], "bridge-0"), stack.bridge(engines[2:], "bridge-1")]
    wait_workers(old_worker.url, 3)
    clients = Clients([old_worker.url], {engine.worker_id: engine.url for engine in engines}, seed)
    watcher = Watcher(seed)
    watcher.url = new_worker.url
    deaths_ns: dict[int, list[int]] = {number: [] for number in journals}

    def exact_answers() -> int:
        return watcher.modes["exact"]

    def wait_exact(n: int, what: str) -> None:
        target = exact_answers() + n
        wait_for(lambda: exact_answers() >= target, MOVED_TIMEOUT_S, f"{n} exact answers {what}")

    with repeated(watcher.ask, 0.02):
        with clients.running(2, 0.05):
            wait_for(lambda: clients.n_answered > 100, MOVED_TIMEOUT_S, "the clients' first requests")
            moving = move()
            wait_workers(new_worker.url, 3)
            wait_exact(50, "while the scope is followed")
            with paused(moving):
                wait_for(
                    lambda: last_modes(watcher) == {"degraded"}, VISIBLE_TIMEOUT_S, "no exact answer without a copy"
                )
            wait_exact(20, "after the move goes on")
            moving.kill()
            wait_for(lambda: last_modes(watcher) == {"degraded"}, VISIBLE_TIMEOUT_S, "no exact answer without a copy")
            moving = move()
            wait_exact(20, "after the move has started again")
            deaths_ns[1].append(time.time_ns())
            engines[0] = stack.restart_engine(engines[0], CACHE, MODEL, TIME_SCALE, options=options[1])
            wait_exact(20, "after the restart of an engine")
        # Bookings end on the old scope.
        assert any(load["active_requests"] for load in get_json(f"{old_worker.url}/loads")["loads"])
        assert not any(load["active_requests"] for load in get_json(f"{new_worker.url}/loads")["loads"])
        clients.routers = [new_worker.url]
        n_failed = len(clients.failures)
        with clients.running(2, 0.05):
            incarnations = incarnations_of(old_worker.url)
            old_bridges = {*holders(old_worker.url).values()}
            for number, (bridge, fed) in enumerate(zip(bridges, (engines[:2], engines[2:]), strict=True)):
                bridge.stop()
                new.bridge(fed, f"new-bridge-{number}")
                n_fed = 2 + number

                def are_fed(n_fed: int = n_fed) -> bool:
                    return sum(each not in old_bridges for each in holders(new_worker.url).values()) == n_fed

                wait_for(are_fed, MOVED_TIMEOUT_S, "the new bridge to hold the leases of its engines")
            moving.stop()
            assert moving.exit_code == 0, moving.tail()
            wait_exact(100, "while clients use the new scope")
        assert clients.failures[n_failed:] == []
        assert incarnations_of(new_worker.url) == incarnations  # the new bridges have recognised the engines
    wait_for(
        lambda: known_blocks(new_worker.url) == held_blocks(engines), VISIBLE_TIMEOUT_S, "the index to be the caches"
    )
    ranks = get_json(f"{new_worker.url}/state")["ranks"]
    assert [(rank["health"], rank["silent"]) for rank in ranks] == [("exact", False)] * 3
    histories = {number: CacheHistory.read(path, deaths_ns[number]) for number, path in journals.items()}
    excused = [
        answer
        for answer in watcher.asked
        if not any(0 <= answer.received_ns - death < DEATH_NOTICED_NS for death in deaths_ns[answer.worker_id])
    ]
    wrong = wrong_answers(excused, watcher.tokens_of, CACHE.block_size, histories)
    assert not wrong, [f"{each}, {each.age}" for each in wrong]
    print(f"{dict(watcher.modes)}, {clients.n_answered} requests, {clients.failures}")


@contextmanager
def paused(child: Child) -> Iterator[None]:
    """Stop a process with SIGSTOP while the block runs."""
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)


def last_modes(watcher: Watcher, n: int = 20) -> set[str]:
    """The modes of the last answers."""
    return {answer.chosen_mode for answer in watcher.asked[-n:]}


def incarnations_of(url: str) -> dict[int, int]:
    """The incarnation of each rank."""
    return {rank["worker_id"]: rank["incarnation"] for rank in get_json(f"{url}/state")["ranks"]}


def holders(url: str) -> dict[int, str]:
    """The bridge that holds each worker's lease, as a router knows it."""
    workers = get_json(f"{url}/workers")["workers"]
    return {worker["worker_id"]: worker["lease"]["bridge"] for worker in workers if worker["lease"] is not None}


def lose_a_batch(settings: Settings, url: str, rank: RankId) -> None:
    """Write a rank's next batch without its events, and say so."""
    (state,) = (each for each in get_json(f"{url}/state")["ranks"] if each["worker_id"] == rank.worker_id)
    number, incarnation = state["sequence"] + 1, Incarnation(state["incarnation"])
    batch = EngineBatch(rank, MODEL, 16, incarnation, number, 0, 0, EngineEvents(()), incomplete=True)
    kafka = producer(settings)
    kafka.produce(topics(settings).kv_events.name, key=worker_key(rank.worker_id), value=encode_batch(batch))
    assert kafka.flush(30.0) == 0


def test_a_worker_without_a_bridge_is_degraded_until_its_engine_publishes_to_the_new_scope(
    stack: Stack, new: Stack, move: Callable[[], Child]
) -> None:
    """No pulse would show that the move has ended. The worker's adapters and its removal are copied as they are."""
    old_worker, new_worker = stack.worker(), new.worker("new-worker")
    old, moved = Api(old_worker.url), Api(new_worker.url)
    body = {"url": "http://e", "model": MODEL, "block_size": 16, "lora_names": ["sql"]}
    for worker_id in (50, 51):
        old.call("PUT", f"/workers/{worker_id}", body).given()
    asked = {"model": MODEL, "token_ids": list(range(64)), "allowed_worker_ids": [50]}

    def answered(api: Api, mode: str) -> bool:
        done = api.call("POST", "/route", {**asked, "update_states": False})
        return done.status == 200 and (done.given()["mode"], done.given()["overlap_blocks"]) == (mode, 4)

    with KvEventPublisher(stack.settings, 50, MODEL) as publisher:
        publisher.stored([11, 12, 13, 14], token_ids=list(range(64)))
        publisher.flush()
        wait_for(lambda: answered(old, "exact"), VISIBLE_TIMEOUT_S, "an exact answer of the old scope")
        moving = move()
        wait_for(lambda: answered(moved, "degraded"), MOVED_TIMEOUT_S, "a degraded answer of the new scope")
        answer = moved.ask(**asked)
        assert answer["degraded_because"] == "feed_behind"
        assert moved.workers()[50]["lora_names"] == ["sql"]
        lose_a_batch(new.settings, new_worker.url, RankId(WorkerId(50), DpRank(0)))
        wait_for(lambda: ranks_of(new_worker.url)[50, 0][2] == "degraded", VISIBLE_TIMEOUT_S, "a loss")
        publisher.stored([15], token_ids=list(range(64, 80)), parent=14)
        publisher.flush()
        assert_moved(
            old_worker.url, new_worker.url, moving
        )  # an owner asked for it, and the partition was loaded again
        old.call("DELETE", "/workers/51").given()
        wait_for(lambda: 51 not in moved.workers(), VISIBLE_TIMEOUT_S, "the removal to be copied")
    with KvEventPublisher(new.settings, 50, MODEL) as publisher:
        publisher.stored([11, 12, 13, 14], token_ids=list(range(64)))
        publisher.flush()
        wait_for(lambda: answered(moved, "exact"), VISIBLE_TIMEOUT_S, "an exact answer of the new scope")
    moving.stop()
    assert moving.exit_code == 0, moving.tail()
