"""The doctor on a real fleet: it says nothing while all is well, and names each of these faults, one at a time.

The fleet is a Faust worker with a router, a second router, a bridge and two simulated engines. Faults that would damage
it are made in a second scope, `quiet`, which has topics and no processes, or with doubles: real HTTP and ZMQ servers
that behave wrongly.
"""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from streams import __version__
from streams.cli import cli
from streams.core.ids import WorkerId
from streams.core.workers import BridgeLease, Worker
from streams.doctor.findings import Group
from streams.doctor.run import Order, examine
from streams.kafka.clients import admin, delete_topics, ensure_topics, partition_of, producer, worker_key
from streams.kafka.records import encode_worker
from streams.lab.engines.chat_template import CHAT_TEMPLATE, tokenizer_files
from streams.lab.engines.engine_config import EngineConfig
from streams.lab.kafka.ports import free_port
from streams.lab.processes import Children
from streams.lab.stack import RouterProcess, Stack, get_json, is_ready, wait_workers
from streams.lmcache.feeds import KnownCursor, KnownFeed, encode_feed
from streams.process.waiting import wait_for
from streams.settings import Settings, as_environ
from streams.tables.records import PARTITION_KEY, PartitionRecord, SourceProgress, encode_partition
from streams.topics import topics
from tests.helpers.api import served
from tests.helpers.commands import PATIENCE_S, Run
from tests.helpers.engine_double import BLOCK_SIZE, EngineDouble
from tests.helpers.http_double import HttpDouble
from tests.helpers.scopes import ScopeFactory

MODEL = "m"

#: Groups that most faults have nothing to do with, and that take seconds.
KAFKA_ALONE = frozenset(Group) - {Group.KAFKA, Group.TOPICS}
REGISTRY = frozenset(Group) - {Group.REGISTRY, Group.LEASES}
ENGINES = frozenset(Group) - {Group.ENGINES}


@dataclass(frozen=True, slots=True)
class DoctorsFleet:
    """A fleet that is well, a scope without processes, and an engine that no test registers unchanged."""

    settings: Settings
    quiet: Settings
    worker: RouterProcess
    routers: tuple[str, ...]
    spare: EngineDouble
    kafka: Producer

    def write(self, settings: Settings, key: bytes, value: bytes | None, topic: str = "workers", **more: Any) -> None:
        """Write a record to a topic of a scope, given by the name of its field."""
        self.kafka.produce(getattr(topics(settings), topic).name, key=key, value=value, **more)
        assert self.kafka.flush(PATIENCE_S) == 0

    @contextmanager
    def registered(self, **changes: Any) -> Iterator[Worker]:
        """Register the spare engine, with changes, as worker 77 while the block runs."""
        worker = replace(
            Worker(WorkerId(77), self.spare.url, MODEL, BLOCK_SIZE),
            **{"events_endpoint": self.spare.events, "replay_endpoint": self.spare.replay, **changes},
        )
        self.write(self.settings, worker_key(worker.worker_id), encode_worker(worker))
        try:
            yield worker
        finally:
            self.write(self.settings, worker_key(worker.worker_id), None)


@pytest.fixture(scope="module")
def well(new_scope: ScopeFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoctorsFleet]:
    """Give the fleet."""
    folder = tmp_path_factory.mktemp("doctor")
    settings = replace(new_scope(folder / "state"), stale_after_ms=1500, bridge_lease_s=2.0)
    quiet = new_scope(folder / "quiet")
    quiet = replace(quiet, stale_after_ms=1500, partitions=2)
    ensure_topics(quiet, topics(quiet).all())
    with Children() as children, EngineDouble(model=MODEL) as spare:
        stack = Stack(settings, folder, children)
        engines = stack.engines(2, EngineConfig(block_size=BLOCK_SIZE, n_blocks=256), MODEL, 100.0)
        worker = stack.worker()
        stack.bridge(engines)
        with served(settings) as second:
            for url in (worker.url, second.url):
                wait_workers(url, 2)
                wait_for(lambda url=url: all_exact(url), PATIENCE_S, "exact answers")  # type: ignore[misc]
            yield DoctorsFleet(settings, quiet, worker, (worker.url, second.url), spare, producer(settings))


def all_exact(url: str) -> bool:
    return {row["state"] for row in get_json(f"{url}/live")["workers"]} == {"exact"}


def test_it_says_nothing_while_all_is_well(well: DoctorsFleet) -> None:
    """With every group, there is no finding; the blocks of the probe are found by both routers."""
    with files_of(tokenizer_files()) as path:
        order = Order(routers=well.routers, pages=(well.worker.url,), probe=True, tokenizers={"": path})
        report = examine(well.settings, order)
    assert report.findings == ()
    assert set(report.groups) == set(Group)
    assert set(report.versions.values()) == {__version__}


# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sick:
    """A fleet with one fault. codes: exactly those that the doctor finds. names: what its findings mention."""

    settings: Settings
    codes: set[str]
    names: Sequence[str] = ()
    order: Order = field(default_factory=Order)


Fault = Callable[[DoctorsFleet], AbstractContextManager[Sick]]
FAULTS: list[Fault] = []


def fault(make: Callable[[DoctorsFleet], Iterator[Sick]]) -> Fault:
    """Add a fault to the list. make: yields once while the fault is there."""
    FAULTS.append(contextmanager(make))
    return FAULTS[-1]


@fault
def broker_is_down(well: DoctorsFleet) -> Iterator[Sick]:
    address = f"127.0.0.1:{free_port()}"
    yield Sick(replace(well.settings, kafka=address), {"kafka_unreachable"}, [address, "kvstreams kafka up"])


@fault
def topic_is_missing(well: DoctorsFleet) -> Iterator[Sick]:
    control = topics(well.quiet).kv_control
    delete_topics(well.quiet, [control])
    yield Sick(well.quiet, {"topic_missing"}, [control.name], Order(skip=KAFKA_ALONE))
    ensure_topics(well.quiet, [control])


@fault
def scope_is_mistyped(well: DoctorsFleet) -> Iterator[Sick]:
    typo = replace(well.settings, topic_prefix=well.settings.topic_prefix + "x")
    yield Sick(typo, {"topic_missing"}, [repr(well.settings.topic_prefix)], Order(skip=KAFKA_ALONE))


@fault
def partitions_differ(well: DoctorsFleet) -> Iterator[Sick]:
    yield Sick(
        replace(well.settings, partitions=5),
        {"wrong_partitions"},
        ["4 partitions", "the settings have 5"],
        Order(skip=KAFKA_ALONE),
    )


@contextmanager
def topic_setting(settings: Settings, topic: str, name: str, value: str) -> Iterator[None]:
    """Change a setting of a topic while the block runs. A broker answers before it shows a change to readers."""
    client = admin(settings)

    def shown() -> str | None:
        (future,) = client.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values()
        found: str | None = future.result(PATIENCE_S)[name].value
        return found

    def alter(to: str) -> None:
        entry = ConfigEntry(name, to, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
        for future in client.incremental_alter_configs([resource]).values():
            future.result(PATIENCE_S)
        wait_for(lambda: shown() == to, PATIENCE_S, f"the broker to show {name} as {to}")

    before = next(spec for spec in topics(settings).all() if spec.name == topic).config[name]
    alter(value)
    try:
        yield
    finally:
        alter(before)


@fault
def cleanup_policy_is_wrong(well: DoctorsFleet) -> Iterator[Sick]:
    name = topics(well.quiet).workers.name
    with topic_setting(well.quiet, name, "cleanup.policy", "delete"):
        yield Sick(well.quiet, {"wrong_topic_settings"}, [name, "delete, not compact"], Order(skip=KAFKA_ALONE))


@fault
def message_size_is_too_small(well: DoctorsFleet) -> Iterator[Sick]:
    name = topics(well.quiet).kv_events.name
    with topic_setting(well.quiet, name, "max.message.bytes", "1000000"):
        yield Sick(well.quiet, {"wrong_topic_settings"}, [name, "kafka-configs --alter"], Order(skip=KAFKA_ALONE))


@fault
def timestamps_are_the_producers(well: DoctorsFleet) -> Iterator[Sick]:
    name = topics(well.quiet).router_loads.name
    with topic_setting(well.quiet, name, "message.timestamp.type", "CreateTime"):
        yield Sick(well.quiet, {"wrong_topic_settings"}, [name, "LogAppendTime"], Order(skip=KAFKA_ALONE))


@fault
def no_worker_and_no_engine(well: DoctorsFleet) -> Iterator[Sick]:
    """Also an engine that publishes in another scope: the doctor names the other prefixes of this Kafka."""
    codes = {"no_worker", "no_engine"}
    yield Sick(well.quiet, codes, ["kvstreams worker", "other scopes on this Kafka: '"])


@fault
def worker_is_stopped(well: DoctorsFleet) -> Iterator[Sick]:
    well.worker.child.signal(signal.SIGSTOP)
    try:
        named = [str(well.worker.child.pid), "SIGSTOP"]
        yield Sick(well.settings, {"owner_silent"}, named, Order(skip=INDEX_ALONE))
    finally:
        well.worker.child.signal(signal.SIGCONT)
        wait_for(lambda: is_ready(well.worker.url) and all_exact(well.worker.url), PATIENCE_S, "the worker")


def state_owner(well: DoctorsFleet, owner: str, source: SourceProgress | None = None) -> None:
    """Write the partition records of the quiet scope, as their owner would."""
    for partition in range(well.quiet.partitions):
        sources = () if source is None else (source,)
        record = PartitionRecord(partition, time.time_ns() // 1_000_000, owner, sources)
        value = encode_partition(record)
        well.write(well.quiet, PARTITION_KEY.pack(partition), value, "index_changelog", partition=partition)


@contextmanager
def repeating(call: Callable[[], None]) -> Iterator[None]:
    """Call a function several times per second while the block runs."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.2):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


INDEX_ALONE = frozenset(Group) - {Group.INDEX}


@fault
def owner_lags(well: DoctorsFleet) -> Iterator[Sick]:
    """Nothing was applied for 20 s, which the owner says of itself."""
    source = SourceProgress(topics(well.quiet).kv_events.name, "", 5, 0, 90, 20_000)
    with repeating(lambda: state_owner(well, "host-0:1", source)):
        yield Sick(well.quiet, {"owner_behind"}, ["host-0:1", "20.0 s"], Order(skip=INDEX_ALONE))


@fault
def two_workers_write_one_partition(well: DoctorsFleet) -> Iterator[Sick]:
    for number in range(4):
        state_owner(well, f"host-{number % 2}:1")
    with repeating(lambda: state_owner(well, "host-0:1")):
        yield Sick(well.quiet, {"two_owners"}, ["host-0:1, host-1:1"], Order(skip=INDEX_ALONE))


@fault
def record_has_an_unknown_schema(well: DoctorsFleet) -> Iterator[Sick]:
    well.write(well.quiet, b"12", b"\xc3\x01newerone and so on")
    skip = frozenset(Group) - {Group.SCHEMAS}
    yield Sick(well.quiet, {"unreadable_records"}, ["unknown_schema", "Upgrade"], Order(skip=skip, watch_s=0.5))
    well.write(well.quiet, b"12", None)


@fault
def dead_letters_grow(well: DoctorsFleet) -> Iterator[Sick]:
    headers = [("kvstreams.topic", b"tcp://gpu7:5557"), ("kvstreams.reason", b"bad_event")]
    for _ in range(3):
        well.write(well.quiet, b"7", b"{}", "dead_letters", headers=headers)
    skip = frozenset(Group) - {Group.DEAD_LETTERS}
    order = Order(skip=skip, watch_s=0.5)
    yield Sick(well.quiet, {"dead_letters"}, ["tcp://gpu7:5557", "3 dead letters", "bad_event"], order)


LMCACHE_ALONE = frozenset(Group) - {Group.LMCACHE}


@contextmanager
def lmcache_feed(well: DoctorsFleet, feed: KnownFeed, *, renews: bool = True) -> Iterator[None]:
    """A feed of LMCache is in the quiet scope, whose lease a bridge renews while the block runs."""
    numbers = count(1)

    def write() -> None:
        lease = BridgeLease("bridge-9", 1, 1500, next(numbers))
        well.write(well.quiet, feed.key.encode(), encode_feed(replace(feed, lease=lease)))

    write()
    with repeating(write if renews else lambda: None):
        yield
    well.write(well.quiet, feed.key.encode(), None)


FEED = KnownFeed("lmcache/node-a", "events", (4,), (KnownCursor("node-a", 1, 2),), {}, 1000, (MODEL,))


@contextmanager
def quiet_engine(well: DoctorsFleet, **changes: Any) -> Iterator[None]:
    """An engine is in the registry of the quiet scope while the block runs."""
    worker = Worker(WorkerId(78), well.spare.url, MODEL, BLOCK_SIZE, **changes)
    well.write(well.quiet, worker_key(worker.worker_id), encode_worker(worker))
    yield
    well.write(well.quiet, worker_key(worker.worker_id), None)


@fault
def engine_names_a_server_of_lmcache_without_events(well: DoctorsFleet) -> Iterator[Sick]:
    with quiet_engine(well, lmcache="node-b"), lmcache_feed(well, FEED):
        names = ["worker 78", "node-b", "known: node-a", "lmcache=node-a"]
        yield Sick(well.quiet, {"lmcache_unknown_server", "lmcache_unused"}, names, Order(skip=LMCACHE_ALONE))


@fault
def nobody_passes_on_the_events_of_lmcache(well: DoctorsFleet) -> Iterator[Sick]:
    with quiet_engine(well, lmcache="node-a"), lmcache_feed(well, FEED, renews=False):
        yield Sick(well.quiet, {"lmcache_silent"}, ["bridge-9", "--lmcache events"], Order(skip=LMCACHE_ALONE))


@fault
def events_of_lmcache_are_missing_and_chunks_are_left_out(well: DoctorsFleet) -> Iterator[Sick]:
    gap = (KnownCursor("node-a", 1, 2, gap_s=5),)
    feed = replace(FEED, cursors=gap, counts={"chunk_size": 900, "no_tokens": 3})
    with quiet_engine(well, lmcache="node-a"), lmcache_feed(well, feed):
        names = ["900 of 1000", "--chunk-size", "lmcache_unconfirmed_ttl_s"]
        yield Sick(well.quiet, {"lmcache_incomplete", "lmcache_left_out"}, names, Order(skip=LMCACHE_ALONE))


@fault
def lmcache_has_another_name_of_the_model(well: DoctorsFleet) -> Iterator[Sick]:
    feed = replace(FEED, models=(f"/models/{MODEL}",))
    with quiet_engine(well, lmcache="node-a"), lmcache_feed(well, feed):
        names = [f"lmcache_models of the bridge to /models/{MODEL}={MODEL}"]
        yield Sick(well.quiet, {"lmcache_other_model"}, names, Order(skip=LMCACHE_ALONE))


@fault
def engine_is_dead(well: DoctorsFleet) -> Iterator[Sick]:
    url, events, replay = (f"{scheme}://127.0.0.1:{free_port()}" for scheme in ("http", "tcp", "tcp"))
    with well.registered(url=url, events_endpoint=events, replay_endpoint=replay):
        codes = {"engine_unreachable", "events_unreachable", "replay_unreachable"}
        yield Sick(well.settings, codes, ["worker 77", url, events, replay], Order(skip=ENGINES))


@fault
def event_port_is_closed(well: DoctorsFleet) -> Iterator[Sick]:
    events = f"tcp://127.0.0.1:{free_port()}"
    with well.registered(events_endpoint=events):
        yield Sick(well.settings, {"events_unreachable"}, [events, "nothing listens"], Order(skip=ENGINES))


@fault
def event_and_replay_ports_are_swapped(well: DoctorsFleet) -> Iterator[Sick]:
    with well.registered(events_endpoint=well.spare.replay, replay_endpoint=well.spare.events):
        codes = {"events_unreachable", "replay_unreachable"}
        yield Sick(well.settings, codes, ["swapped"], Order(skip=ENGINES))


@fault
def engine_serves_without_events(well: DoctorsFleet) -> Iterator[Sick]:
    served_tokens = iter(range(100, 10_000, 100))
    pages = {"/metrics": lambda _: f'vllm:prompt_tokens_total{{engine="0"}} {next(served_tokens)}\n'.encode()}
    with HttpDouble(pages) as http, well.registered(url=http.url):
        yield Sick(well.settings, {"no_events"}, ["worker 77", "got nothing"], Order(skip=ENGINES))


@fault
def replay_is_missing(well: DoctorsFleet) -> Iterator[Sick]:
    with well.registered(replay_endpoint=None):
        yield Sick(well.settings, {"no_replay"}, ["worker 77", "replay="], Order(skip=ENGINES))


@fault
def replay_does_not_answer(well: DoctorsFleet) -> Iterator[Sick]:
    well.spare.stop_replays()
    with well.registered():
        yield Sick(well.settings, {"replay_unreachable"}, [well.spare.replay], Order(skip=ENGINES))
    well.spare.answer_replays()


@fault
def engine_serves_another_model(well: DoctorsFleet) -> Iterator[Sick]:
    with HttpDouble({"/v1/models": {"data": [{"id": "other"}]}}) as http, well.registered(url=http.url):
        yield Sick(well.settings, {"other_model"}, ["serves other"], Order(skip=ENGINES))


@fault
def engine_has_another_block_size(well: DoctorsFleet) -> Iterator[Sick]:
    pages = {"/metrics": b'vllm:cache_config_info{block_size="24"} 1\n'}
    with HttpDouble(pages) as http, well.registered(url=http.url):
        yield Sick(well.settings, {"engine_block_size"}, ["24 tokens", "--block-size 16"], Order(skip=ENGINES))


@fault
def registered_block_size_is_wrong(well: DoctorsFleet) -> Iterator[Sick]:
    with well.registered(block_size=32):
        codes = {"wrong_block_size", "no_bridge"}
        yield Sick(well.settings, codes, ["32 tokens", "--block-size 16"], Order(skip=REGISTRY))


@fault
def settings_have_another_block_size(well: DoctorsFleet) -> Iterator[Sick]:
    settings = replace(well.settings, model_block_sizes={MODEL: 64})
    yield Sick(settings, {"settings_block_size"}, ["blocks of 64", "it has 16"], Order(skip=REGISTRY))


@fault
def engine_is_registered_twice(well: DoctorsFleet) -> Iterator[Sick]:
    url = get_json(f"{well.worker.url}/workers")["workers"][0]["url"]
    with well.registered(url=url):
        yield Sick(well.settings, {"registered_twice", "no_bridge"}, ["workers 1, 77", url], Order(skip=REGISTRY))


@fault
def lease_has_expired(well: DoctorsFleet) -> Iterator[Sick]:
    with well.registered(lease=BridgeLease("gone:1:ab", 3, 1000, 5)):
        yield Sick(well.settings, {"lease_expired"}, ["worker 77", "gone:1:ab"], Order(skip=REGISTRY))


@fault
def lease_was_given_up(well: DoctorsFleet) -> Iterator[Sick]:
    """As a bridge that was stopped leaves it."""
    with well.registered(lease=BridgeLease("stopped:1:ab", 3, 0, 5)):
        yield Sick(well.settings, {"lease_released"}, ["worker 77", "stopped:1:ab"], Order(skip=REGISTRY))


@fault
def lease_is_about_to_expire(well: DoctorsFleet) -> Iterator[Sick]:
    """Its bridge pulses, but has renewed nothing for more than two thirds of the lease."""
    bridge = get_json(f"{well.worker.url}/workers")["workers"][0]["lease"]["bridge"]
    with well.registered(lease=BridgeLease(bridge, 3, 3000, 5)):
        order = Order(skip=REGISTRY, watch_s=2.1)
        yield Sick(well.settings, {"lease_about_to_expire"}, ["worker 77"], order)


@fault
def engine_hashes_other_tokens(well: DoctorsFleet) -> Iterator[Sick]:
    """The engine adds a token to each prompt, so that no block has the tokens that a router hashes."""

    def complete(body: Mapping[str, Any]) -> dict[str, Any]:
        tokens = [1, *body["prompt"]][: 2 * BLOCK_SIZE]
        names = [abs(hash(tuple(tokens))), abs(hash(tuple(tokens))) + 1]
        well.spare.publish(["BlockStored", names, None, tokens, BLOCK_SIZE, None, "GPU"])
        return {"choices": []}

    with HttpDouble({"/v1/completions": complete}) as http, well.registered(url=http.url):
        order = Order(probe=True, skip=frozenset(Group) - {Group.PROBE})
        yield Sick(well.settings, {"hash_disagreement"}, ["worker 77", "have 0 with the hashes"], order)


@fault
def engine_has_another_chat_template(well: DoctorsFleet) -> Iterator[Sick]:
    """The files have an older template, without the tools."""
    old = tokenizer_files()
    old["tokenizer_config.json"] = json.dumps({"chat_template": CHAT_TEMPLATE.replace("if tools", "if false")})
    with files_of(old) as path:
        order = Order(tokenizers={MODEL: path}, skip=frozenset(Group) - {Group.TOKENIZERS})
        yield Sick(well.settings, {"tokens_differ"}, ["chat with tools", "chat template"], order)


@contextmanager
def files_of(files: Mapping[str, str]) -> Iterator[str]:
    """Write files to a folder, and give its path."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        yield folder


@fault
def router_does_not_find_the_blocks(well: DoctorsFleet) -> Iterator[Sick]:
    """A router whose index has none of them, as one of another scope or version."""
    row = {"worker_id": 1, "silent_dp_ranks": []}
    pages = {
        **router_pages(workers=[row, {**row, "worker_id": 2}]),
        "/matches": lambda _: {"request_blocks": 2, "workers": [], "ranks": [], "mode": "exact"},
    }
    with HttpDouble(pages) as router:
        order = Order(routers=(router.url,), probe=True, skip=frozenset(Group) - {Group.PROBE})
        yield Sick(well.settings, {"hash_disagreement"}, [router.url, "it finds 0"], order)


def router_pages(**changes: Any) -> dict[str, Any]:
    """Pages of a router with no ranks, without /metrics."""
    return {
        "/ready": {"ready": changes.get("reason") is None, "reason": changes.get("reason")},
        "/state": {"ranks": changes.get("ranks", [])},
        "/workers": {"workers": changes.get("workers", [])},
        "/loads": {"loads": [], "in_sync": changes.get("in_sync", True)},
        "/live": {"workers": changes.get("live", [])},
        "/metrics": changes.get("metrics", b""),
    }


ROUTERS_ALONE = frozenset(Group) - {Group.ROUTERS, Group.MEMORY, Group.VERSIONS}


@fault
def router_is_down(well: DoctorsFleet) -> Iterator[Sick]:
    url = f"http://127.0.0.1:{free_port()}"
    yield Sick(well.settings, {"router_unreachable"}, [url], Order(routers=(url,), skip=ROUTERS_ALONE))


@fault
def router_is_not_ready(well: DoctorsFleet) -> Iterator[Sick]:
    with HttpDouble(router_pages(reason="3 topics of this scope are missing")) as http:
        order = Order(routers=(http.url,), skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"router_not_ready"}, [http.url, "3 topics of this scope are missing"], order)


@fault
def router_refuses_the_token(well: DoctorsFleet) -> Iterator[Sick]:
    with HttpDouble(router_pages(), status=403) as http:
        order = Order(routers=(http.url,), token="t", skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"router_refuses"}, ["403", "`read`"], order)


@fault
def router_reads_another_scope(well: DoctorsFleet) -> Iterator[Sick]:
    with served(well.quiet) as api:
        skip = frozenset(Group) - {Group.ROUTERS, Group.REGISTRY}
        order = Order(routers=(well.worker.url, api.url), skip=skip)
        yield Sick(well.settings, {"other_scope"}, [api.url, "lacks 1, 2"], order)


@fault
def routers_have_different_blocks(well: DoctorsFleet) -> Iterator[Sick]:
    rank = {"worker_id": 1, "dp_rank": 0, "incarnation": 5, "generation": 0, "sequence": 9, "health": "exact"}
    with ExitStack() as stack:
        urls = [
            stack.enter_context(HttpDouble(router_pages(ranks=[{**rank, "digest": digest}]))).url
            for digest in ("aa", "bb")
        ]
        order = Order(routers=tuple(urls), skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"routers_disagree"}, [*urls, "worker 1 rank 0"], order)


@fault
def bookings_are_not_in_sync(well: DoctorsFleet) -> Iterator[Sick]:
    with HttpDouble(router_pages(in_sync=False)) as http:
        order = Order(routers=(http.url,), skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"bookings_not_in_sync"}, [http.url], order)


@fault
def rank_has_lost_events(well: DoctorsFleet) -> Iterator[Sick]:
    live = [{"worker_id": "5", "state": "degraded", "reason": "events_lost"}]
    with HttpDouble(router_pages(live=live)) as http:
        order = Order(routers=(http.url,), skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"degraded_events_lost"}, ["workers 5", "replay socket"], order)


def router_counts(well: DoctorsFleet, page: bytes, code: str, words: list[str]) -> Iterator[Sick]:
    """A router whose metrics page has these lines."""
    with HttpDouble(router_pages(metrics=page)) as http:
        yield Sick(well.settings, {code}, words, Order(routers=(http.url,), skip=ROUTERS_ALONE))


@fault
def prompts_never_match(well: DoctorsFleet) -> Iterator[Sick]:
    page = b'kvstreams_unmatched_prompts{model="m"} 240.0\n'
    return router_counts(well, page, "unmatched_prompts", ["240 prompts of m", "chat template"])


@fault
def gateway_asks_too_early(well: DoctorsFleet) -> Iterator[Sick]:
    page = b'kvstreams_picker_calls_total{status="ok"} 9.0\nkvstreams_picker_calls_total{status="unavailable"} 3.0\n'
    return router_counts(well, page, "picker_asked_early", ["asked 3 times", "gRPC health"])


@fault
def gateway_breaks_the_protocol(well: DoctorsFleet) -> Iterator[Sick]:
    page = b"kvstreams_picker_broken_streams_total 4.0\n"
    return router_counts(well, page, "gateway_breaks_ext_proc", ["4 streams", "ext_proc filter"])


@fault
def engine_renders_otherwise(well: DoctorsFleet) -> Iterator[Sick]:
    render = {"outcome": "differs", "part": "chat_with_tools", "from_token": 27, "reason": None}
    workers = [
        {"worker_id": 1, "silent_dp_ranks": [], "render": {**render, "outcome": "equal", "part": None}},
        {"worker_id": 2, "silent_dp_ranks": [], "render": render},
        {"worker_id": 3, "silent_dp_ranks": []},  # a router of an earlier version
    ]
    with HttpDouble(router_pages(workers=workers)) as http:
        order = Order(routers=(http.url,), skip=ROUTERS_ALONE)
        wanted = ["worker 2", "chat with tools, from token 27 on", "--chat-template"]
        yield Sick(well.settings, {"renders_differ"}, wanted, order)


@fault
def clock_is_off(well: DoctorsFleet) -> Iterator[Sick]:
    with HttpDouble({"/metrics": b"up 1\n"}, date_off_s=-3600.0) as http, well.registered(url=http.url):
        yield Sick(
            well.settings,
            {"clock_off"},
            [http.url, "s behind this machine's", "NTP"],
            Order(skip=frozenset(Group) - {Group.CLOCKS}),
        )


@fault
def memory_is_low(well: DoctorsFleet) -> Iterator[Sick]:
    page = b"kvstreams_resident_memory_bytes 960e6\nkvstreams_memory_limit_bytes 1e9\n"
    with HttpDouble({"/metrics": page}) as http:
        order = Order(pages=(http.url,), skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"memory_low"}, [http.url, "960 MB of the 1000 MB"], order)


@fault
def index_is_over_its_limit(well: DoctorsFleet) -> Iterator[Sick]:
    page = b"kvstreams_records_over_capacity_total 7\n"
    return router_counts(well, page, "over_capacity", ["7 records of the index"])


@fault
def versions_differ(well: DoctorsFleet) -> Iterator[Sick]:
    with HttpDouble({"/metrics": b'kvstreams_build_info{version="0.0.9"} 1\n'}) as http:
        order = Order(pages=(http.url, well.worker.url), skip=ROUTERS_ALONE)
        yield Sick(well.settings, {"versions_differ"}, ["0.0.9", __version__, http.url], order)


@pytest.mark.parametrize("make", FAULTS, ids=[make.__name__ for make in FAULTS])
def test_it_names_the_fault(make: Fault, well: DoctorsFleet) -> None:
    """The doctor finds exactly what this fault causes, and says in words what it is and what to do."""
    with make(well) as sick:
        report = examine(sick.settings, sick.order)
        assert {each.code for each in report.findings} == sick.codes
        text = " ".join(f"{each.subject} {each.problem} {each.remedy}" for each in report.findings)
        for name in sick.names:
            assert name in text
        for each in report.findings:
            assert each.subject and each.problem and each.remedy


@pytest.mark.first_ring("doctor")
def test_the_command_prints_findings_and_its_status_is_for_scripts(well: DoctorsFleet, run: Run) -> None:
    """0 without output if all is well, 1 with findings as text or JSON, 2 if it could not run."""
    env = as_environ(well.settings)
    routers = [option for url in well.routers for option in ("--router", url)]

    seen: list[tuple[int, str, str]] = []

    def is_well() -> bool:
        done = run("doctor", *routers, env=env)
        seen.append((done.returncode, done.stdout, done.stderr))
        return seen[-1] == (0, "", "")

    # On a busy machine, an owner may be behind for a moment, which is rightly reported.
    try:
        wait_for(is_well, PATIENCE_S, "a fleet without findings")
    finally:
        assert seen[-1] == (0, "", "")
    url = f"http://127.0.0.1:{free_port()}"
    alone = [
        "--router",
        url,
        *(each for group in ROUTERS_ALONE - {Group.PROBE, Group.TOKENIZERS} for each in ("--skip", group.value)),
    ]
    done = run("doctor", *alone, "--json", env=env)
    assert (done.returncode, done.stderr) == (1, "")
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["group"], finding["code"]) == ("routers", "router_unreachable")
    for options, status, printed in (
        (alone, 1, [f"router {url}: it does not answer as a router: ", "    Start it, or correct the address"]),
        (["--token-file", "nowhere"], 2, ["kvstreams: --token-file: nowhere cannot be read"]),
    ):
        shown = CliRunner().invoke(cli, ["doctor", *options], env=env)
        assert shown.exit_code == status
        lines = zip(shown.output.splitlines(), printed, strict=True)
        assert all(line.startswith(start) for line, start in lines)


def test_it_says_nothing_again_after_all_faults_are_gone(well: DoctorsFleet) -> None:
    """The faults have left no trace in the fleet, and the doctor has not changed it."""
    assert partition_of(77, well.settings.partitions) in range(well.settings.partitions)
    assert examine(well.settings, Order(routers=well.routers)).findings == ()
