"""A scope with something of everything that `kvstreams replay` rebuilds, and what was written to it, record by record.

What lives here: writing a history of both source topics with the offsets that its records got; a registry, bookings and
reports of engines; and which records of the sources a changelog includes at a moment. What must not: replays (the
tests).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from streams.core.engine_metrics import MetricsReport, WorkerMetrics
from streams.core.events import BlocksStored, EngineBatch, EngineEvents
from streams.core.ids import Tier
from streams.cxl.events import CxlTransition
from streams.cxl.records import encode_transition
from streams.kafka.clients import Record, producer
from streams.kafka.records import encode_batch, encode_metrics
from streams.lab.stack import facts
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.records import PARTITION_KEY, decode_partition
from streams.topics import topics
from tests.helpers.api import Api, rank_of
from tests.helpers.cxl_histories import History, random_history
from tests.helpers.reference import ReferenceFleet, overlap_of
from tests.helpers.support import VISIBLE_TIMEOUT_S

MODEL = "m"

#: Workers that a test registers and books; those of the histories have smaller ids.
WORKERS = (901, 902, 903)

#: By topic and partition, the last offset that is included.
Applied = dict[tuple[str, int], int]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Writer:
    """Writes a history with labels and pooled blocks, a part at a time, and knows the offset of each record."""

    def __init__(self, settings: Settings, seed: int, n_batches: int) -> None:
        print(f"seed {seed}")
        self._settings = settings
        self._history: History = random_history(seed, n_batches, n_batches)
        self._kafka: Producer = producer(settings)
        self._at = 0
        self._lock = threading.Lock()
        self._written: defaultdict[tuple[str, int], dict[int, EngineBatch | CxlTransition]] = defaultdict(dict)

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._history.kv)

    def write(self, n: int) -> None:
        """Write the next n batches and transitions, and wait until the broker has them."""
        known = topics(self._settings)
        begin, self._at = self._at, min(self._at + n, len(self._history.kv))
        failed: list[str] = []

        def produce(topic: str, written: EngineBatch | CxlTransition, value: bytes) -> None:
            def on_delivery(error: KafkaError | None, message: Message) -> None:
                partition, offset = message.partition(), message.offset()
                if error is not None or partition is None or offset is None:
                    failed.append(str(error))
                else:
                    with self._lock:
                        self._written[topic, partition][offset] = written

            self._kafka.produce(topic, key=str(written.rank.worker_id).encode(), value=value, on_delivery=on_delivery)

        for batch in self._history.kv[begin : self._at]:
            produce(known.kv_events.name, batch, encode_batch(batch))
        for transition in self._history.cxl[begin : self._at]:
            produce(known.cxl_events.name, transition, encode_transition(transition))
        assert self._kafka.flush(30.0) == 0
        assert not failed

    def included(self, applied: Applied | None = None) -> History:
        """What was written, or the part of it up to these offsets."""
        found: dict[str, list[EngineBatch | CxlTransition]] = defaultdict(list)
        for (topic, partition), written in sorted(self._written.items()):
            last = None if applied is None else applied.get((topic, partition), -1)
            found[topic] += [each for offset, each in sorted(written.items()) if last is None or offset <= last]
        known = topics(self._settings)
        return History(found[known.kv_events.name], found[known.cxl_events.name])  # type: ignore[arg-type]

    def reference(self, applied: Applied | None = None) -> ReferenceFleet:
        """The reference after these batches."""
        fleet = ReferenceFleet()
        for batch in self.included(applied).kv:
            fleet.apply(batch)
        return fleet

    def held_prompt(self) -> list[int]:
        """Local hashes of a prompt that some rank has on its device, after everything that was written."""
        members = {member for member in self.reference().members() if member[1] is Tier.DEVICE}
        stored = (
            event.local.tolist()
            for batch in self.included().kv
            if isinstance(batch.body, EngineEvents)
            for event in batch.body.events
            if isinstance(event, BlocksStored) and event.parent is None and len(event.local)
        )
        return next(local for local in stored if overlap_of(members, local))

    def wait_known(self, url: str) -> None:
        """Wait until a router has everything that was written."""
        expected = {(r.worker_id, r.dp_rank, int(tier), block) for r, tier, block in self.reference().members()}
        try:
            wait_for(lambda: facts(url) == expected, VISIBLE_TIMEOUT_S, "the router to have the history", 0.25)
        finally:
            assert facts(url) == expected


class _Applied(NamedTuple):
    at_ms: int
    sources: Applied


class Owners:
    """Every partition record of a scope, as the log has them."""

    def __init__(self, settings: Settings) -> None:
        self._records: list[list[_Applied]] = []
        known = topics(settings)
        for partition in range(settings.partitions):
            found: list[Record] = []
            read_to_end(settings, known.index_changelog.name, partition, None, found.extend)
            self._records.append([_applied(record) for record in found if record.key.startswith(PARTITION_KEY.prefix)])

    def applied_at(self, moment_ms: int) -> Applied:
        """What the last partition records before a moment include."""
        applied: Applied = {}
        for records in self._records:
            before = [record for record in records if record.at_ms < moment_ms]
            if before:
                applied |= before[-1].sources
        return applied


def _applied(record: Record) -> _Applied:
    assert record.value is not None
    progress = decode_partition(record.key, record.value).sources
    return _Applied(
        record.timestamp_ms, {(source.topic, record.partition): source.applied_offset for source in progress}
    )


def fill_registry(settings: Settings, api: Api) -> None:
    """Register workers, a cordon, an avoidance and a pool, book some requests, and report an engine's metrics."""
    for worker_id in WORKERS:
        body = {"url": f"http://e{worker_id}", "model": MODEL, "block_size": 16}
        api.call("PUT", f"/workers/{worker_id}", body).given()
    api.call("PUT", f"/workers/{WORKERS[0]}/cordon").given()
    api.call("PUT", f"/workers/{WORKERS[1]}/avoid").given()
    api.call("PUT", "/pools/rack1", {"members": list(WORKERS)}).given()
    for number in range(5):
        api.route(request_id=f"r{number}", model=MODEL, token_ids=list(range(number, number + 64)))
    # A request that ends before its booking was written leaves no record.
    wait_for(lambda: n_booking_records(settings) >= 5, VISIBLE_TIMEOUT_S, "the bookings in the log")
    api.call("POST", "/loads/r0/prefill-complete").given()
    api.call("DELETE", "/loads/r1").given()
    report_metrics(settings, WORKERS[2], 0.5)


def n_booking_records(settings: Settings) -> int:
    """How many records the log of bookings has."""
    found: list[Record] = []
    for partition in range(settings.partitions):
        read_to_end(settings, topics(settings).router_loads.name, partition, None, found.extend)
    return len(found)


def report_metrics(settings: Settings, worker_id: int, usage: float) -> None:
    """Write what an engine reports about itself."""
    metrics = WorkerMetrics(gpu_cache_usage_perc=usage)
    report = MetricsReport(rank_of(worker_id), metrics, 600_000, now_ms())
    kafka = producer(settings)
    kafka.produce(topics(settings).worker_metrics.name, key=str(worker_id).encode(), value=encode_metrics(report))
    assert kafka.flush(30.0) == 0
