"""Routers that share bookings through a real Kafka while a router is killed and Kafka is stopped: `make replicas`.

What lives here: clients that book, free and repeat calls at any router; the faults that are injected meanwhile; and
what must be true at the end. What must not: interleavings that need a particular order (test_loads_sync has those, in
memory).

Three routers run as processes. While clients send requests, one router is killed and Kafka is stopped; the other
routers continue to route, and their answers are `degraded`. Then the topic is compacted, the removed records are
checked, and another router starts from what is left. All running routers must have the same loads as an independent
fold of every record that was ever written. Once all bookings have expired, no load may remain. In mode `kv` a booking
counts until its client or its TTL ends it; in `expected-time` it also ends by its forecast. A run is made in each.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource  # type: ignore[attr-defined]

from streams.core.hashing import unpack_hashes
from streams.core.ids import RankId
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.routing.selection import RouterMode
from streams.errors import KvStreamsError
from streams.kafka.clients import Record, admin, ensure_topics
from streams.kafka.records import decode_load
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import READY_TIMEOUT_S, RouterProcess, Stack, is_ready
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.topics import topics
from tests.helpers.api import BLOCK_SIZE, Api, metrics

N_WORKERS = 8
CLIENTS = 4
EQUAL_TIMEOUT_S = 60.0

#: Settings for fast compaction: a segment is closed at the next tick, and is compacted however few records are dirty.
COMPACTING = {"segment.ms": "1000", "min.cleanable.dirty.ratio": "0.0"}

#: Interval of the broker's cleaner; its default is 15 s.
CLEANER = {"log.cleaner.backoff.ms": "200", "group.min.session.timeout.ms": "1000"}

#: The modes in which a run is made: one whose bookings count until they end, and one whose bookings age.
MODES = (RouterMode.KV.value, RouterMode.EXPECTED_TIME.value)

Loads = dict[RankId, tuple[int, int, int]]
Rank = tuple[int, int]


class Broken(AssertionError):
    """A property that every run must have was violated."""


class LiveBooking(NamedTuple):
    """A booking that has an add and no free.

    since_ms: append time of its last add. computed: its prefill was reported.
    """

    booking: Booking
    since_ms: int
    computed: bool

    def counted_tokens(self, now_ms: float) -> int | None:
        """The prefill tokens that count at a time of the log; None if the booking counts as over without a report."""
        booking, forecast = self.booking, self.booking.forecast
        if 0 < forecast.over_within_ms <= now_ms - self.since_ms:
            return None
        aged = 0 < forecast.prefilled_within_ms <= now_ms - self.since_ms
        generates = forecast.prefill_us > 0 and booking.output_blocks > 0
        return 0 if self.computed or aged or generates else booking.prefill_tokens


def live_bookings(records: Iterable[Record]) -> dict[BookingId, LiveBooking]:
    """The bookings that have an add and no free."""
    adds: dict[BookingId, tuple[Booking, int]] = {}
    ended: dict[BookingPhase, set[BookingId]] = {BookingPhase.PREFILL: set(), BookingPhase.FREE: set()}
    for record in records:
        if record.value is not None:
            booking_id, phase, booking = decode_load(record.value)
            if booking is not None:
                adds[booking_id] = booking, record.timestamp_ms
            else:
                ended[phase].add(booking_id)
    return {
        booking_id: LiveBooking(booking, since_ms, booking_id in ended[BookingPhase.PREFILL])
        for booking_id, (booking, since_ms) in adds.items()
        if booking_id not in ended[BookingPhase.FREE]
    }


def loads_of(records: Iterable[Record], now_ms: float = 0.0) -> Loads:
    """Compute each rank's prefill tokens, blocks (distinct prompt blocks plus output) and requests from all records.

    now_ms: the time of the log, at which bookings with a forecast may count as prefilled or over without a report.
    """
    tokens: Counter[RankId] = Counter()
    requests: Counter[RankId] = Counter()
    output: Counter[RankId] = Counter()
    blocks: dict[RankId, set[int]] = {}
    for live in live_bookings(records).values():
        counted_tokens = live.counted_tokens(now_ms)
        if counted_tokens is None:
            continue
        booking = live.booking
        tokens[booking.rank] += counted_tokens
        requests[booking.rank] += 1
        output[booking.rank] += booking.output_blocks
        blocks.setdefault(booking.rank, set()).update(unpack_hashes(booking.sequence).tolist())
    return {rank: (tokens[rank], len(blocks[rank]) + output[rank], requests[rank]) for rank in requests}


@dataclass
class SentCalls:
    """The calls that clients made.

    simple: whether a request was freed, for ids that were booked once and by a router that was not killed.
    """

    calls: Counter[str] = field(default_factory=Counter)
    simple: dict[str, bool] = field(default_factory=dict)


class Replicas:
    """One run."""

    def __init__(self, stack: Stack, broker: LocalKafka, seed: int, say: Callable[[str], None] = print) -> None:
        """broker: the one that the stack uses and that `run` stops. say: prints one line."""
        self._stack = stack
        self._settings = stack.settings
        self._topic = topics(stack.settings).router_loads
        self._broker = broker
        self._seed = seed
        self._say = say
        self._routers: list[RouterProcess] = []
        self._lock = threading.Lock()
        self._written: dict[tuple[int, int], Record] = {}
        self.sent = SentCalls()

    def run(self, n_bookings: int, outage_s: float, stop: Callable[[], None], go_on: Callable[[], None]) -> None:
        """Carry out the run. stop, go_on: stop Kafka and start it again. Raises Broken or KvStreamsError."""
        ensure_topics(self._settings, topics(self._settings).all())
        self._routers = [self._stack.router(f"router-{n}", wait=False) for n in range(3)]
        for router in self._routers:
            router.child.wait_ready(lambda url=router.url: is_ready(url), READY_TIMEOUT_S)  # type: ignore[misc]
        for worker_id in range(1, N_WORKERS + 1):
            body = {"url": "http://e", "model": "m", "block_size": BLOCK_SIZE, "dp_size": 2}
            Api(self._routers[0].url).call("PUT", f"/workers/{worker_id}", body).given()
        for router in self._routers:
            wait_for(lambda url=router.url: len(Api(url).workers()) == N_WORKERS, EQUAL_TIMEOUT_S, "the workers")  # type: ignore[misc]
        third = n_bookings // 3
        began_s = time.monotonic()
        self._flow(0, third)
        self._routers.pop().child.kill()
        self._say(f"{third} bookings in {time.monotonic() - began_s:.1f} s; one router was killed")
        self._flow(third, 2 * third)
        self._modes("approximate")
        stop()
        stopped_s = time.monotonic()
        try:
            self._flow(2 * third, n_bookings)
            wait_for(lambda: self._mode_is("degraded"), EQUAL_TIMEOUT_S, "the routers to notice")
            self._flow(n_bookings, n_bookings + CLIENTS)  # routing continues in mode `degraded`
            waiting = [int(metrics(Api(router.url))["kvstreams_bookings_unacknowledged"]) for router in self._routers]
            if not all(waiting):
                raise Broken(f"a router has no unacknowledged records although Kafka is stopped: {waiting}")
            time.sleep(max(0.0, outage_s - (time.monotonic() - stopped_s)))
        finally:
            go_on()
        self._say(f"Kafka was stopped for {time.monotonic() - stopped_s:.1f} s; records that waited: {waiting}")
        wait_for(lambda: self._mode_is("approximate"), EQUAL_TIMEOUT_S, "the routers to be in sync again")
        active = self._equal("before compaction")
        n_compacted = self._compact()
        late = self._stack.router("late")
        self._routers.append(late)
        if self._equal(f"with a late router, after {n_compacted} superseded records were removed") != active:
            raise Broken("bookings changed although no client booked anything")
        self._check_simple()
        self._say(f"calls: {dict(self.sent.calls)}; {time.monotonic() - began_s:.1f} s")

    def expire(self) -> None:
        """Wait until every booking has expired and no router has any load left."""
        ttl_s = self._settings.booking_ttl_s

        def empty() -> bool:
            known = [metrics(Api(router.url))["kvstreams_bookings_known"] for router in self._routers]
            left = [load for router in self._routers for load in self._loads(router).values() if any(load)]
            return not any(known) and not left

        wait_for(empty, ttl_s + EQUAL_TIMEOUT_S, "every booking to expire", 0.5)
        self._say("all bookings have expired, and no load remains")

    # -- clients -------------------------------------------------------------------------------------------------------

    def _flow(self, first: int, last: int) -> None:
        """Let clients run requests `first` to `last` - 1, at any running router."""
        apis = [Api(router.url) for router in self._routers]
        will_kill = len(self._routers) == 3  # one of these routers is killed afterwards

        def run_client(client: int) -> None:
            rng = random.Random(f"{self._seed}-{first}-{client}")
            for number in range(first + client, last, CLIENTS):
                freed = self._run_request(apis, f"r{number}", rng)
                if freed is not None and not will_kill:
                    with self._lock:
                        self.sent.simple[f"r{number}"] = freed

        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(run_client, client) for client in range(CLIENTS)]:
                done.result()

    def _run_request(self, apis: Sequence[Api], request_id: str, rng: random.Random) -> bool | None:
        """Run one request; return whether it was freed, or None if it may have been booked more than once."""
        tokens = [rng.randrange(4)] * (BLOCK_SIZE * rng.randrange(1, 9) + rng.randrange(BLOCK_SIZE))
        asked = {"model": "m", "token_ids": tokens, "request_id": request_id}
        owner = rng.choice(apis)
        other = rng.choice([api for api in apis if api is not owner])
        fate = rng.random()
        if fate < 0.08:  # a free that precedes its add
            self._free(other, request_id)
            owner.route(**asked)
            self.sent.calls["free before add"] += 1
            return True
        chosen = owner.route(**asked)
        self.sent.calls["book"] += 1
        if rng.random() < 0.3:  # a client's retry
            if owner.route(**asked)["worker_id"] != chosen["worker_id"]:
                raise Broken(f"{request_id} was routed twice by one router")
            self.sent.calls["repeated"] += 1
        if rng.random() < 0.3:  # the booking is replaced by one with more cached blocks
            body = {name: chosen[name] for name in ("worker_id", "dp_rank")}
            owner.call("POST", f"/loads/{request_id}", {**body, "token_ids": tokens, "overlap_blocks": 1}).given()
            self.sent.calls["replaced"] += 1
        twice = rng.random() < 0.05
        if twice:  # a retry at another router, which may not have read the booking
            other.route(**asked)
            self.sent.calls["booked at two routers"] += 1
        for _ in range(rng.randrange(3)):
            self._report(rng.choice(apis), "POST", f"/loads/{request_id}/prefill-complete", "prefill")
        for _ in range(rng.randrange(3)):  # calls at any router, in any order
            body = {"output_tokens": rng.randrange(10 * BLOCK_SIZE)}
            self._report(rng.choice(apis), "POST", f"/loads/{request_id}/output", "output", body)
        freed = rng.random() < 0.8
        if freed:
            self._free(rng.choice(apis), request_id)
            if rng.random() < 0.2:
                self._free(rng.choice(apis), request_id)
            if rng.random() < 0.3:  # another router's late prefill-complete
                self._report(other, "POST", f"/loads/{request_id}/prefill-complete", "late prefill")
            if rng.random() < 0.1:  # the id is used again while its free is on its way
                rng.choice(apis).route(**asked)
                self.sent.calls["id used again"] += 1
                return None
        return None if twice else freed

    def _free(self, api: Api, request_id: str) -> None:
        self._report(api, "DELETE", f"/loads/{request_id}", "free")

    def _report(self, api: Api, method: str, path: str, name: str, body: dict[str, Any] | None = None) -> None:
        answer = api.call(method, path, body)
        if answer.status not in (200, 202):
            raise Broken(f"{method} {path}: {answer.status} {answer.body!r}")
        self.sent.calls[f"{name}, buffered" if answer.status == 202 else name] += 1

    # -- checks --------------------------------------------------------------------------------------------------------

    def _loads(self, router: RouterProcess) -> dict[Rank, tuple[int, int, int]]:
        return Api(router.url).loads(range(1, N_WORKERS + 1))

    def _mode_is(self, mode: str) -> bool:
        asked = {"model": "m", "token_ids": [1] * BLOCK_SIZE}
        return all(Api(router.url).ask(**asked)["mode"] == mode for router in self._routers)

    def _modes(self, mode: str) -> None:
        wait_for(lambda: self._mode_is(mode), EQUAL_TIMEOUT_S, f"the routers to answer {mode}")

    def _read(self) -> set[tuple[int, int]]:
        """Read the topic and keep every record; return the positions of the records that it has now."""
        present: set[tuple[int, int]] = set()

        def take(records: list[Record]) -> None:
            for record in records:
                present.add((record.partition, record.offset))
                self._written.setdefault((record.partition, record.offset), record)

        for partition in range(self._topic.partitions):
            read_to_end(self._settings, self._topic.name, partition, None, take)
        return present

    def _equal(self, when: str) -> set[BookingId]:
        """Wait until every router has the loads that follow from the log; return the active bookings.

        The broker and the routers have one clock here, so the time of the log is that of this process.
        """
        truth: Loads = {}

        def same() -> bool:
            self._read()
            truth.clear()
            truth.update(loads_of(self._written.values(), time.time() * 1000))
            expected = {(rank.worker_id, rank.dp_rank): load for rank, load in truth.items()}
            return all(
                {rank: load for rank, load in self._loads(router).items() if any(load)} == expected
                for router in self._routers
            )

        try:
            wait_for(same, EQUAL_TIMEOUT_S, "all routers to have the same loads", 0.2)
        except KvStreamsError as exc:
            expected = {(int(rank.worker_id), int(rank.dp_rank)): load for rank, load in truth.items()}
            differ = {
                router.child.name: {rank: (load, expected.get(rank)) for rank, load in self._loads(router).items()}
                for router in self._routers
            }
            raise Broken(f"{when}: loads differ from those of the log (found, expected): {differ}") from exc
        requests = sum(load[2] for load in truth.values())
        if not requests:
            raise Broken("no booking counts, so there is nothing to compare")
        active = set(live_bookings(self._written.values()))
        self._say(
            f"{when}: {len(self._routers)} routers agree on {requests} requests of {len(active)} active ones, "
            f"{len(self._written)} records"
        )
        return active

    def _compact(self) -> int:
        """Have the topic compacted, and return the number of removed records.

        Waits until more than 80 % of the superseded records are removed; some stay in the newest segments. Raises
        Broken if a record was removed that no later record superseded.
        """
        self._alter(COMPACTING)
        present: set[tuple[int, int]] = set()

        def superseded() -> set[tuple[int, int]]:
            last = {record.key: position for position, record in sorted(self._written.items())}
            return {
                position
                for position, record in self._written.items()
                if record.value is not None and last[record.key] != position
            }

        def compacted() -> bool:
            nonlocal present
            present = self._read()
            old = superseded()
            return bool(old) and len(old - present) > 0.8 * len(old)

        wait_for(compacted, EQUAL_TIMEOUT_S, "superseded records to be compacted away", 0.5)
        removed = {each for each in self._written.keys() - present if self._written[each].value is not None}
        if removed - superseded():
            raise Broken(f"{len(removed - superseded())} records were removed that no later record superseded")
        self._alter({name: self._topic.config[name] for name in COMPACTING})
        return len(removed)

    def _alter(self, config: dict[str, str]) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in config.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, self._topic.name, incremental_configs=entries)
        client = admin(self._settings)
        for future in client.incremental_alter_configs([resource]).values():
            future.result(30.0)

    def _check_simple(self) -> None:
        """Check that each request with one booking is active or ended as its client left it."""
        live = Counter(booking_id.request_id for booking_id in live_bookings(self._written.values()))
        wrong = {request_id for request_id, freed in self.sent.simple.items() if live[request_id] != (not freed)}
        if wrong:
            raise Broken(
                f"{len(wrong)} requests of {len(self.sent.simple)} are not as their clients left them: {wrong}"
            )
        if not self.sent.simple:
            raise Broken("no request was booked exactly once")


def settings_of(kafka: str, **changes: Any) -> Settings:
    """Settings of a run. No index is read, so an answer's mode depends only on whether routers share bookings."""
    given = {"partitions": 4, "kv_events": False, "topic_prefix": "replicas-", **changes}
    return Settings(kafka=kafka, **given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one run. If a check fails, print the difference, keep the files, and return 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.replicas", description=__doc__)
    parser.add_argument("--bookings", type=int, default=5_000)
    parser.add_argument("--outage", type=float, default=20.0, help="seconds")
    parser.add_argument(
        "--ttl", type=float, default=180.0, help="seconds; must exceed the duration of the run before expiry"
    )
    parser.add_argument("--mode", choices=MODES, default=RouterMode.EXPECTED_TIME.value, help="router_mode")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="kvstreams-replicas-"))
    print(f"seed {seed}, mode {options.mode}, {options.bookings} bookings, in {directory}", flush=True)
    broker = LocalKafka(LocalKafkaConfig(directory / "kafka", CLEANER))
    try:
        settings = settings_of(broker.up().bootstrap, booking_ttl_s=options.ttl, router_mode=options.mode)
        with Children() as children:
            replicas = Replicas(
                Stack(settings, directory, children), broker, seed, lambda line: print(line, flush=True)
            )
            replicas.run(options.bookings, options.outage, lambda: _down(broker), lambda: _up(broker))
            replicas.expire()
    except (AssertionError, KvStreamsError) as exc:
        same = f"--mode {options.mode} --bookings {options.bookings} --seed {seed}"
        print(f"{exc}\nto repeat this run: python -m tests.replicas {same}")
        print(f"logs and data are kept in {directory}")
        return 1
    finally:
        broker.down()
    shutil.rmtree(directory)
    print(f"no difference, seed {seed}")
    return 0


def _down(broker: LocalKafka) -> None:
    broker.down()


def _up(broker: LocalKafka) -> None:
    broker.up()


if __name__ == "__main__":
    sys.exit(main())
