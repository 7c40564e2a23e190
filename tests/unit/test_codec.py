"""The bytes of every record: written and read back, read by a second Avro library, and refused if they are invalid."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import avro.io
import avro.schema
import fastavro
import numpy as np
import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from fastavro.schema import fingerprint, to_parsing_canonical_form
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.core.bridge_pulses import BridgePulse
from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.engine_metrics import METRICS_TTL_MS_MAX, MetricsReport, WorkerMetrics
from streams.core.events import (
    LABEL_MAX,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    KvEvent,
    MoeLabels,
    RestatedRun,
    RestatementChunk,
    ResyncRequest,
    WorkerRemoved,
)
from streams.core.hashing import pack_hashes
from streams.core.ids import (
    U32_MAX,
    U64_MASK,
    DpRank,
    EngineHash,
    Epoch,
    HashArray,
    Incarnation,
    RankId,
    SequenceHash,
    Tier,
    WorkerId,
)
from streams.core.loads.bookings import NAME_BYTES_MAX, NUMBER_MAX, Booking, BookingId, BookingPhase
from streams.core.loads.observations import NO_FORECAST, Forecast
from streams.core.reducer.ordering import Health, Progress
from streams.core.routing.cost import TermColumns
from streams.core.runs import RUN_BLOCKS_MAX, Run, RunKey
from streams.core.workers import (
    DP_SIZE_MAX,
    Avoidance,
    BridgeLease,
    Cordon,
    RenderOutcome,
    RenderParity,
    RenderPart,
    RenderResult,
    Role,
    ServedModel,
    Worker,
    WorkerState,
)
from streams.cxl import records as cxl_records
from streams.cxl.events import CxlPool
from streams.cxl.records import (
    OWNER_KEY,
    PARKED_KEY,
    BlockKey,
    BlockRow,
    EndedIncarnation,
    OwnerRow,
    ParkedKey,
    ParkedRow,
    Placement,
    block_key,
    decode_block,
    decode_owner,
    decode_parked,
    decode_pool,
    decode_transition,
    encode_block,
    encode_owner,
    encode_parked,
    encode_pool,
    encode_transition,
    pool_key,
)
from streams.decision_log.families import family_keys
from streams.decision_log.noted import DecisionKind, NotedDecision, listed_candidates
from streams.decision_log.records import FleetSize, LogOrigin, OutcomeReport
from streams.decision_log.records import decode_batch as decode_decisions
from streams.decision_log.records import encode_batch as encode_decisions
from streams.errors import BadRecord, KvStreamsError
from streams.kafka import records as codec_module
from streams.kafka.avro_frames import codec, schemas_dir
from streams.kafka.event_encoding import datum_of
from streams.kafka.load_records import encoded_load, is_end_without_report, time_written_ms
from streams.kafka.records import (
    AVOIDANCES,
    CORDONS,
    MODELS,
    PULSES,
    RENDER_PARITIES,
    decode_batch,
    decode_load,
    decode_metrics,
    decode_resync,
    decode_worker,
    encode_batch,
    encode_batch_by_schema,
    encode_load,
    encode_metrics,
    encode_resync,
    encode_worker,
)
from streams.kafka.shapes import RecordShape, from_long, to_long
from streams.lmcache import feeds as lmcache_records
from streams.lmcache.feeds import KnownCursor, KnownFeed, decode_feed, encode_feed
from streams.tables import records as table_records
from streams.tables.event_decoding import decode_events
from streams.tables.records import (
    PARTITION_KEY,
    PROGRESS_KEY,
    RUN_KEY,
    PartitionRecord,
    SourceProgress,
    decode_partition,
    decode_progress,
    decode_run,
    encode_partition,
    encode_progress,
    encode_run,
)
from tests.helpers.encoding import (
    HEADER_BYTES,
    I31,
    I63,
    RANK,
    TRANSITION,
    counts,
    longs,
    ranks,
    reason_of,
    texts,
    u64s,
    witnessed,
)
from tests.helpers.reference import chain_hashes

hash_lists = st.lists(u64s, max_size=5)
some_tier = st.sampled_from(Tier)
labels = st.builds(MoeLabels, *[st.one_of(st.none(), counts)] * 3)


def u64(values: list[int]) -> HashArray:
    return np.array(values, dtype=np.uint64)


def arrays_of(n: int) -> st.SearchStrategy[HashArray]:
    return st.lists(u64s, min_size=n, max_size=n).map(u64)


cxl = st.builds(
    CxlMemoryMetadata,
    st.sampled_from(CxlMemoryState),
    st.one_of(st.none(), texts),
    st.lists(u64s, max_size=3),
)
stores = st.integers(0, 4).flatmap(
    lambda n: st.builds(
        BlocksStored,
        st.one_of(st.none(), u64s.map(EngineHash)),
        arrays_of(n),
        arrays_of(n),
        some_tier,
        st.one_of(st.none(), labels),
        st.one_of(st.none(), cxl),
    )
)
events = st.one_of(stores, st.builds(BlocksRemoved, hash_lists.map(u64), some_tier), st.just(AllBlocksCleared()))
restated_runs = st.tuples(st.integers(0, 4), st.one_of(st.none(), u64s.map(SequenceHash)), counts, some_tier).flatmap(
    lambda parts: st.builds(
        RestatedRun,
        st.just(0 if parts[1] is None else max(1, parts[2])),
        st.just(parts[1]),
        arrays_of(parts[0]),
        arrays_of(parts[0]),
        st.just(parts[3]),
    )
)
chunks = st.builds(
    lambda restatement, n, m, exact, runs: RestatementChunk(restatement, min(n, m - 1), m, exact, tuple(runs)),
    u64s,
    counts,
    st.integers(1, I31),
    st.booleans(),
    st.lists(restated_runs, max_size=3),
)
bodies = st.one_of(
    st.builds(lambda each: EngineEvents(tuple(each)), st.lists(events, max_size=4)),
    chunks,
    st.builds(WorkerRemoved, texts, st.one_of(st.none(), longs)),
)
batches = st.builds(
    EngineBatch,
    ranks,
    texts,
    st.integers(1, I31),
    u64s.map(Incarnation),
    st.integers(0, I63),
    u64s,
    longs,
    bodies,
    counts,
)
workers = st.builds(
    Worker,
    worker_id=u64s.map(WorkerId),
    url=texts,
    model=st.text(min_size=1, max_size=12),
    block_size=st.integers(1, I31),
    dp_size=st.integers(1, DP_SIZE_MAX),
    role=st.sampled_from(Role),
    state=st.sampled_from(WorkerState),
    kv_total_blocks=st.one_of(st.none(), longs),
    max_requests=st.one_of(st.none(), counts),
    device_class=texts,
    taints=st.lists(texts, max_size=3).map(tuple),
    lora_names=st.one_of(st.none(), st.lists(texts, max_size=3).map(tuple)),
    events_endpoint=st.one_of(st.none(), texts),
    replay_endpoint=st.one_of(st.none(), texts),
    registered_at_ms=longs,
)
metrics = st.builds(
    MetricsReport,
    ranks,
    st.builds(WorkerMetrics, st.floats(0.0, 1.0), counts, counts, counts, counts, counts),
    st.integers(1, METRICS_TTL_MS_MAX),
    longs,
    st.integers(0, I63),
)
booking_ids = st.builds(BookingId, texts, texts, longs)
bookings = st.builds(
    Booking,
    rank=ranks,
    model=texts,
    prefill_tokens=st.integers(0, NUMBER_MAX),
    sequence=hash_lists.map(pack_hashes),
    overlap_blocks=counts,
    request_blocks=counts,
    expected_output_tokens=st.one_of(st.none(), counts),
    output_blocks=counts,
    phase=st.sampled_from([None, "prefill", "decode"]),
    forecast=st.one_of(st.just(NO_FORECAST), st.builds(Forecast, *[st.integers(0, NUMBER_MAX)] * len(NO_FORECAST))),
)
epochs = st.builds(lambda incarnation, generation: Epoch(Incarnation(incarnation), generation), u64s, counts)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    n = draw(st.integers(1, RUN_BLOCKS_MAX))
    local = draw(st.lists(u64s, min_size=n, max_size=n))
    engine = draw(st.lists(u64s, min_size=n, max_size=n))
    parent = draw(st.one_of(st.none(), u64s))
    start = 0 if parent is None else draw(st.integers(1, I31))
    chain = chain_hashes(local, parent)
    key = RunKey(draw(ranks), draw(some_tier), SequenceHash(chain[0]))
    present = draw(st.integers(1, (1 << n) - 1))
    moe = draw(st.dictionaries(st.integers(0, n - 1), labels, max_size=3))
    before = None if parent is None else SequenceHash(parent)
    return Run(key, draw(epochs), start, before, local, engine, chain, present, moe)


progresses = st.builds(
    Progress,
    rank=ranks,
    epoch=epochs,
    sequence=st.integers(-1, I63),
    digest=u64s,
    health=st.sampled_from(Health),
    model=texts,
    block_size=counts,
    n_blocks=st.integers(0, I63),
    n_gaps=st.integers(0, I63),
    n_unknown_parents=st.integers(0, I63),
    n_unknown_removals=st.integers(0, I63),
    feed=st.sampled_from(FeedState),
)
source_progresses = st.builds(SourceProgress, texts, texts, longs, longs, longs, longs)
partition_records = st.builds(
    PartitionRecord, st.integers(0, U32_MAX), longs, texts, st.lists(source_progresses, max_size=3).map(tuple)
)


def plain(value: Any) -> Any:
    """Return a form that can be compared: arrays as lists, dataclasses as their fields."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.uint64
        return value.tolist()
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return [type(value).__name__, {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}]
    return value


STORED = BlocksStored(
    EngineHash(7),
    u64([1, U64_MASK]),
    u64([3, 4]),
    Tier.HOST,
    MoeLabels(1, None, 2),
    CxlMemoryMetadata("evicted", None, (5,)),
)
BATCH = EngineBatch(
    RANK,
    "model",
    16,
    Incarnation(U64_MASK),
    5,
    6,
    7,
    EngineEvents((STORED, BlocksRemoved(u64([9])), AllBlocksCleared())),
    8,
)
CHUNK = replace(
    BATCH,
    body=RestatementChunk(1, 0, 2, True, (RestatedRun(2, SequenceHash(5), u64([1]), u64([2]), Tier.DISK),)),
)
REMOVAL = replace(BATCH, body=WorkerRemoved("silent", 41))
HEARTBEAT = replace(BATCH, body=Heartbeat("bridge", 6000), feed=FeedState.UNPROVEN)
RESYNC = ResyncRequest(RANK, Incarnation(U64_MASK), -1, 2, "gap", 9)
WORKER = Worker(WorkerId(1), "http://w", "model", 16, taints=("a", "b"), kv_total_blocks=5, events_endpoint="tcp://w:1")
CORDON = Cordon(WorkerId(U64_MASK), 9)
RENDER = RenderParity(
    WorkerId(U64_MASK),
    Incarnation(U64_MASK - 1),
    "http://w",
    "m",
    RenderResult(RenderOutcome.DIFFERS, part=RenderPart.CHAT, from_token=3),
    9,
    "front",
)
AVOIDANCE = Avoidance(WorkerId(U64_MASK), 9, 5_000)
MODEL = ServedModel("modèle", 16, "bridge host:1", 9)
PULSE = BridgePulse("host:1:ab", 7, (WorkerId(7), WorkerId(U64_MASK)))
METRICS = MetricsReport(RANK, WorkerMetrics(0.5, 1, 2, 3, 4, 5), 3000, 6, 7)
BOOKING = Booking(RANK, "model", 100, pack_hashes([1, U64_MASK]), 2, 9, 50, 1)
BOOKING_ID = BookingId("request", "router", 3)
RUN = Run(
    RunKey(RANK, Tier.HOST, SequenceHash(chain_hashes([1, 2], 8)[0])),
    Epoch(Incarnation(4), 2),
    5,
    SequenceHash(8),
    [1, 2],
    [11, 12],
    chain_hashes([1, 2], 8),
    0b10,
    {1: MoeLabels(1, 2, None)},
)
PROGRESS = Progress(RANK, Epoch(Incarnation(4), 2), 9, 10, Health.DEGRADED, "model", 16, 1, 2, 3, 4, 6000, True)
PARTITION = PartitionRecord(3, 5, "owner", (SourceProgress("t", "id", -1, 6, 7, 8),))

FEED = KnownFeed(
    "lmcache/node-a",
    "t",
    (7, 0),
    (KnownCursor("node-a", 9, 5, 8),),
    {"no_tokens": 3},
    40,
    ("m",),
    BridgeLease("b", 2, 6000, 4),
)
POOL = CxlPool("pool", "near", 1 << 40, (WorkerId(7), WorkerId(8)), 3, True, 9)
POOLED = BlockRow(
    Placement(CxlMemoryState.CXL_POOLED, "pool", 3, (WorkerId(7),), "m", Incarnation(2), 9),
    SequenceHash(4),
    1,
    EngineHash(11),
)
OWNER = OwnerRow(Incarnation(2), Incarnation(3), True, 9, (EndedIncarnation(Incarnation(1), 41, 8),))


#: One valid record of every kind, with its schema and its decoder.
def decision_record() -> bytes:
    """Encode one decision between two ranks, and what its client reported."""
    terms = np.array([(3.0, 5.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (3.0, 5.0)])
    columns = TermColumns((RANK, RankId(WorkerId(8), DpRank(0))), np.array([2, 0]), np.array([2.0, 0.0]), terms)
    kind = DecisionKind("m", 16, "kv", "", 0.0, "exact", None, "exact", None)
    noted = NotedDecision("r", 1_000, 5, kind, 1024, 64, 0, 0, np.arange(64, dtype=np.uint64), columns, 0)
    decisions = [(noted, listed_candidates(columns, 0, 2))]
    origin = LogOrigin("router", family_keys("salt"), 1.0)
    return encode_decisions(
        origin, 1_300, decisions, [OutcomeReport("r", 1_200, 1_100, 20)], [FleetSize("m", 16, 2, 1000)]
    )


GOOD: dict[str, tuple[str, bytes, Callable[[bytes | None], Any]]] = {
    "events": ("kv-events", encode_batch(BATCH), decode_batch),
    "restatement": ("kv-events", encode_batch(CHUNK), decode_batch),
    "removal": ("kv-events", encode_batch(REMOVAL), decode_batch),
    "heartbeat": ("kv-events", encode_batch(HEARTBEAT), decode_batch),
    "resync": ("kv-control", encode_resync(RESYNC), decode_resync),
    "worker": ("workers", encode_worker(WORKER), decode_worker),
    "cordon": (
        "cordons",
        CORDONS.encode(CORDON),
        lambda raw: CORDONS.decode_row(CORDONS.keys.pack(CORDON.worker_id), raw),
    ),
    "render": (
        "render-parities",
        RENDER_PARITIES.encode(RENDER),
        lambda raw: RENDER_PARITIES.decode_row(RENDER_PARITIES.keys.pack(RENDER.worker_id), raw),
    ),
    "avoidance": (
        "avoidances",
        AVOIDANCES.encode(AVOIDANCE),
        lambda raw: AVOIDANCES.decode_row(AVOIDANCES.keys.pack(AVOIDANCE.worker_id), raw),
    ),
    "model": ("models", MODELS.encode(MODEL), lambda raw: MODELS.decode_row(MODELS.keys.pack(MODEL.name), raw)),
    "metrics": ("worker-metrics", encode_metrics(METRICS), decode_metrics),
    "pulse": ("bridge-pulses", PULSES.encode(PULSE), PULSES.decode),
    "add": ("router-loads", encode_load(BOOKING_ID, BookingPhase.ADD, BOOKING, 1)[1], decode_load),
    "free": ("router-loads", encode_load(BOOKING_ID, BookingPhase.FREE, None, 1)[1], decode_load),
    "run": ("prefix-index-run", encode_run(RUN), lambda raw: decode_run(RUN_KEY.pack(RUN.key), raw or b"")),
    "progress": (
        "prefix-index-progress",
        encode_progress(PROGRESS),
        lambda raw: decode_progress(PROGRESS_KEY.pack(RANK), raw or b""),
    ),
    "partition": (
        "prefix-index-partition",
        encode_partition(PARTITION),
        lambda raw: decode_partition(PARTITION_KEY.pack(3), raw or b""),
    ),
    "transition": ("cxl-events", encode_transition(TRANSITION), decode_transition),
    "feed": ("lmcache-feeds", encode_feed(FEED), decode_feed),
    "pool": ("cxl-pools", encode_pool(POOL), lambda raw: decode_pool(pool_key(POOL.pool_id), raw or b"")),
    "pooled": (
        "cxl-block",
        encode_block(POOLED),
        lambda raw: decode_block(block_key(BlockKey(SequenceHash(5), RANK, "pool")), raw or b""),
    ),
    "owner": ("cxl-owner", encode_owner(OWNER), lambda raw: decode_owner(OWNER_KEY.pack(RANK), raw or b"")),
    "decisions": ("router-decisions", decision_record(), decode_decisions),
    "parked": (
        "cxl-parked",
        encode_parked(ParkedRow(4, 5, b"as it came")),
        lambda raw: decode_parked(PARKED_KEY.pack(ParkedKey(RANK, 1)), raw or b""),
    ),
}
every_kind = pytest.mark.parametrize("kind", list(GOOD))
WITH_CONFLUENT_IDS: dict[str, Callable[[bytes, dict[str, int]], Any]] = {
    "kv-events": decode_batch,
    "kv-control": decode_resync,
    "workers": decode_worker,
    "worker-metrics": decode_metrics,
    "router-loads": decode_load,
}


@settings(max_examples=150, deadline=None)
@given(batch=batches)
def test_batches_come_back_as_they_were(batch: EngineBatch) -> None:
    """Events, restatements and removals keep every field, and the avro package reads the same values."""
    raw = encode_batch(batch)
    assert plain(decode_batch(raw)) == plain(batch)
    datum = witnessed("kv-events", raw)
    assert (from_long(datum["worker_id"]), datum["dp_rank"]) == batch.rank
    assert (datum["model"], datum["block_size"], datum["sequence"]) == (batch.model, batch.block_size, batch.sequence)
    assert int.from_bytes(datum["digest"], "little") == batch.digest


plain_stores = st.integers(0, 4).flatmap(
    lambda n: st.builds(BlocksStored, st.one_of(st.none(), u64s.map(EngineHash)), arrays_of(n), arrays_of(n), some_tier)
)
plain_batches = st.builds(
    EngineBatch,
    ranks,
    texts,
    st.integers(1, I31),
    u64s.map(Incarnation),
    st.integers(-1, I63) | st.integers(0, 1000),
    u64s,
    longs | st.integers(1 << 40, 1 << 41),
    st.lists(st.one_of(plain_stores, st.builds(BlocksRemoved, hash_lists.map(u64), some_tier), events), max_size=4).map(
        lambda each: EngineEvents(tuple(each))
    ),
    counts,
    st.booleans(),
    st.sampled_from(FeedState),
)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(batch=plain_batches)
def test_batches_of_events_have_the_bytes_of_fastavro(batch: EngineBatch) -> None:
    """The fast encoder writes what fastavro writes, and leaves labels and CXL metadata to it."""
    assert isinstance(batch.body, EngineEvents)
    has_facts = any(
        isinstance(event, BlocksStored) and (event.moe is not None or event.cxl is not None)
        for event in batch.body.events
    )
    assert (datum_of(batch) is None) == has_facts
    assert encode_batch(batch) == encode_batch_by_schema(batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"emitted_at_ms": 1 << 63},
        {"n_unindexed": 1 << 31},
        {"block_size": 1 << 31},
        {"rank": RankId(WorkerId(1), DpRank(1 << 31))},
        {"model": "\ud800"},
    ],
)
def test_a_batch_that_does_not_fit_the_schema_is_left_to_fastavro(changes: dict[str, Any]) -> None:
    """So the writer of such a batch gets the same error, or the same bytes."""
    assert datum_of(replace(BATCH, body=EngineEvents(()), **changes)) is None


def test_a_store_in_an_unknown_state_of_cxl_memory_is_refused() -> None:
    """The schema has the state as a string, so that the decoder checks it."""
    datum = witnessed("kv-events", encode_batch(BATCH))
    store = next(event for event in datum["body"]["events"] if event.get("cxl_metadata"))
    assert reason_of(lambda: decode_batch(codec("kv-events").encode(datum))) is None
    store["cxl_metadata"]["state"] = "elsewhere"
    assert reason_of(lambda: decode_batch(codec("kv-events").encode(datum))) == "bad_state"


@settings(max_examples=60, deadline=None)
@given(worker=workers)
def test_workers_come_back_as_they_were(worker: Worker) -> None:
    """A worker keeps every field, with and without the optional ones."""
    raw = encode_worker(worker)
    assert decode_worker(raw) == worker
    assert witnessed("workers", raw)["role"] == worker.role.value


@pytest.mark.parametrize("fed", [None, (), PULSE.fed])
def test_pulses_come_back_as_they_were(fed: tuple[WorkerId, ...] | None) -> None:
    """A pulse that lists no worker feeds none, which differs from one without a list."""
    pulse = replace(PULSE, fed=fed)
    assert PULSES.decode(PULSES.encode(pulse)) == pulse


@settings(max_examples=60, deadline=None)
@given(report=metrics)
def test_metrics_come_back_as_they_were(report: MetricsReport) -> None:
    """A report keeps every gauge, and the avro package reads the same values."""
    raw = encode_metrics(report)
    assert decode_metrics(raw) == report
    datum = witnessed("worker-metrics", raw)
    assert (from_long(datum["worker_id"]), datum["dp_rank"]) == report.rank
    assert {name: datum[name] for name in WorkerMetrics.__slots__} == asdict(report.metrics)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpu_cache_usage_perc": -0.01},
        {"gpu_cache_usage_perc": 1.01},
        {"gpu_cache_usage_perc": float("nan")},
        {"num_requests_waiting": -1},
        {"kv_total_blocks": -1},
        {"ttl_ms": 0},
        {"ttl_ms": METRICS_TTL_MS_MAX + 1},
        {"n_scrapes_failed": -1},
    ],
)
def test_impossible_gauges_are_refused(wrong: dict[str, Any]) -> None:
    """A usage outside 0 to 1, a negative count or an unlimited TTL makes the record invalid."""
    good = {
        "worker_id": 1,
        "dp_rank": 0,
        "scraped_at_ms": 0,
        "ttl_ms": 1,
        "n_scrapes_failed": 0,
        **asdict(WorkerMetrics()),
    }
    assert decode_metrics(codec("worker-metrics").encode(good)).metrics == WorkerMetrics()
    assert reason_of(lambda: decode_metrics(codec("worker-metrics").encode(good | wrong))) == "bad_metrics"


@settings(max_examples=60, deadline=None)
@given(booking_id=booking_ids, phase=st.sampled_from(BookingPhase), booking=bookings, at_ms=longs)
def test_loads_come_back_as_they_were(booking_id: BookingId, phase: BookingPhase, booking: Booking, at_ms: int) -> None:
    """An add has its booking, the other phases have none, and the key distinguishes a booking's phases."""
    carried = booking if phase is BookingPhase.ADD else None
    key, raw = encode_load(booking_id, phase, carried, at_ms)
    assert decode_load(raw) == (booking_id, phase, carried)
    assert key.decode().endswith(f"\x1f{booking_id.counter}\x1f{phase.value}")
    datum = witnessed("router-loads", raw)
    assert (datum["request_id"], datum["phase"], datum["written_at_ms"]) == (booking_id.request_id, phase.value, at_ms)


@given(booking_ids, st.sampled_from(BookingPhase), bookings, longs | st.integers(1 << 40, 1 << 41))
@settings(deadline=None, print_blob=True)
def test_loads_have_the_bytes_of_fastavro(
    booking_id: BookingId, phase: BookingPhase, booking: Booking, at_ms: int
) -> None:
    """The fast encoder writes fastavro's bytes."""
    carried = booking if phase is BookingPhase.ADD else None
    assert encoded_load(booking_id, phase, carried, at_ms) == encode_load(booking_id, phase, carried, at_ms)[1]


@given(booking_ids, longs | st.integers(-1, 1))
@settings(deadline=None, print_blob=True)
def test_an_end_without_a_report_is_told_by_its_last_bytes(booking_id: BookingId, at_ms: int) -> None:
    """Only a free with the time 0 is one."""
    raw = encoded_load(booking_id, BookingPhase.FREE, None, at_ms)
    assert is_end_without_report(raw) == (time_written_ms(raw) == 0) == (at_ms == 0)


def test_a_booking_written_by_the_last_release_is_read() -> None:
    """Records of a schema without phases are read."""
    schema = fastavro.parse_schema(json.loads((schemas_dir() / "released" / "router-loads.avsc").read_text()))
    found = {
        "worker_id": 7, "dp_rank": 1, "model": "m", "prefill_tokens": 3, "request_blocks": 1, "overlap_blocks": 0,
        "sequence_hashes": bytes(8), "expected_output_tokens": None, "output_blocks": 2,
    }  # fmt: skip
    datum = {
        "request_id": "r", "router_id": "o", "counter": 1, "phase": "add", "written_at_ms": 5, "booking": found,
    }  # fmt: skip
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, datum)
    written_with = bytes.fromhex(fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO"))
    rank = RankId(WorkerId(7), DpRank(1))
    expected = (BookingId("r", "o", 1), BookingPhase.ADD, Booking(rank, "m", 3, bytes(8), 0, 1, None, 2))
    assert decode_load(b"\xc3\x01" + written_with + out.getvalue()) == expected


@settings(max_examples=60, deadline=None)
@given(run=runs())
def test_runs_come_back_as_they_were(run: Run) -> None:
    """A run is restored from key and value, and its sequence hashes are computed."""
    key, raw = RUN_KEY.pack(run.key), encode_run(run)
    assert decode_run(key, raw) == run
    assert RUN_KEY.parse(key) == run.key
    datum = witnessed("prefix-index-run", raw)
    assert np.frombuffer(datum["local_hashes"], dtype="<u8").tolist() == run.local
    assert int.from_bytes(datum["present"], "little") == run.present


@settings(max_examples=100, deadline=None)
@given(record=partition_records, junk=st.binary(max_size=4), at=st.integers(0, 60), cut=st.booleans())
def test_partition_records_have_the_bytes_of_fastavro_and_damaged_ones_are_refused_as_it_refuses_them(
    record: PartitionRecord, junk: bytes, at: int, cut: bool
) -> None:
    """The fast encoder writes fastavro's bytes; the fast decoder reads what fastavro reads, or refuses it as well."""
    by_schema = codec("prefix-index-partition")
    raw = encode_partition(record)
    datum = {**asdict(record), "sources": [asdict(source) for source in record.sources]}
    assert raw == by_schema.encode({name: datum[name] for name in ("written_at_ms", "owner", "sources")})
    damaged = raw[:at] + junk + (b"" if cut else raw[at + len(junk) :])

    def read_by_schema() -> PartitionRecord:
        found = by_schema.decode(damaged)
        sources = tuple(SourceProgress(**source) for source in found["sources"])
        return PartitionRecord(record.partition, found["written_at_ms"], found["owner"], sources)

    def outcome(decode: Callable[[], PartitionRecord]) -> object:
        try:
            return decode()
        except BadRecord as exc:
            return exc.reason

    assert outcome(lambda: decode_partition(PARTITION_KEY.pack(record.partition), damaged)) == outcome(read_by_schema)


@settings(max_examples=60, deadline=None)
@given(progress=progresses, record=partition_records)
def test_progress_and_partition_records_come_back_as_they_were(progress: Progress, record: PartitionRecord) -> None:
    """They are restored from key and value, and the avro package reads the same values."""
    raw = encode_progress(progress)
    assert decode_progress(PROGRESS_KEY.pack(progress.rank), raw) == progress
    assert witnessed("prefix-index-progress", raw)["sequence"] == progress.sequence
    raw = encode_partition(record)
    assert decode_partition(PARTITION_KEY.pack(record.partition), raw) == record
    assert len(witnessed("prefix-index-partition", raw)["sources"]) == len(record.sources)


def test_the_avro_package_reads_every_schema_to_the_last_field() -> None:
    """Given nothing but the schema file and the bytes, it reads what was written."""
    batch = witnessed("kv-events", GOOD["events"][1])
    stored, removed, cleared = batch["body"]["events"]
    assert stored["engine_hashes"] == b"\x01" + bytes(7) + b"\xff" * 8
    assert stored["parent"] == b"\x07" + bytes(7)
    assert (stored["tier"], stored["moe"]) == ("host", {"layer_id": 1, "expert_id": None, "expert_group": 2})
    assert stored["cxl_metadata"] == {"state": "evicted", "pool_id": None, "accessible_workers": [5]}
    assert removed == {"engine_hashes": b"\x09" + bytes(7), "tier": "device"}
    assert cleared == {}
    assert (batch["worker_id"], batch["incarnation"]) == (-1, -1)  # a u64 as the signed long with the same bits
    assert witnessed("kv-events", GOOD["restatement"][1])["body"]["n_chunks"] == 2
    assert witnessed("kv-events", GOOD["removal"][1])["body"] == {"reason": "silent", "seen_sequence": 41}
    assert witnessed("workers", GOOD["worker"][1])["taints"] == ["a", "b"]
    assert witnessed("router-loads", GOOD["add"][1])["booking"]["sequence_hashes"] == b"\x01" + bytes(7) + b"\xff" * 8
    assert witnessed("router-loads", GOOD["free"][1])["booking"] is None
    assert witnessed("prefix-index-run", GOOD["run"][1])["labels"][0]["expert_id"] == 2
    assert witnessed("prefix-index-progress", GOOD["progress"][1])["health"] == "degraded"
    assert witnessed("prefix-index-partition", GOOD["partition"][1])["sources"][0]["applied_offset"] == -1


def test_every_schema_has_a_record_here() -> None:
    """A new schema needs a record that the avro package reads."""
    assert {schema for schema, _, _ in GOOD.values()} == {path.stem for path in schemas_dir().glob("*.avsc")}


@pytest.mark.parametrize(
    "record",
    [
        record
        for module in (codec_module, cxl_records, lmcache_records, table_records)
        for record in vars(module).values()
        if isinstance(record, RecordShape)
    ],
    ids=lambda record: record.schema,
)
def test_a_description_has_the_fields_of_its_schema(record: RecordShape[Any]) -> None:
    """A field that only the schema has would be written with its default for ever."""
    assert record.shape.names == {field["name"] for field in codec(record.schema).source["fields"]}


def canonical(schema: Any, known: set[str], namespace: str = "") -> str:
    """Return Avro's Parsing Canonical Form, as its specification defines it.

    Not the avro package's: in a union that one writes a named type out again where the form has its name.
    """
    if isinstance(schema, list):
        return "[" + ",".join(canonical(branch, known, namespace) for branch in schema) + "]"
    if isinstance(schema, str):
        full = schema if "." in schema or not namespace else f"{namespace}.{schema}"
        return json.dumps(full if full in known else schema)
    namespace = schema.get("namespace", namespace)
    parts: list[str] = []
    if "name" in schema:
        known.add(f"{namespace}.{schema['name']}")
        parts.append(f'"name":"{namespace}.{schema["name"]}"')
    parts.append(f'"type":"{schema["type"]}"')
    if "fields" in schema:
        fields = [
            f'{{"name":"{each["name"]}","type":{canonical(each["type"], known, namespace)}}}'
            for each in schema["fields"]
        ]
        parts.append(f'"fields":[{",".join(fields)}]')
    if "symbols" in schema:
        parts.append(f'"symbols":{json.dumps(schema["symbols"], separators=(",", ":"))}')
    if "items" in schema:
        parts.append(f'"items":{canonical(schema["items"], known, namespace)}')
    if "values" in schema:
        parts.append(f'"values":{canonical(schema["values"], known, namespace)}')
    if "size" in schema:
        parts.append(f'"size":{schema["size"]}')
    return "{" + ",".join(parts) + "}"


def crc_64_avro(text: str) -> int:
    """Compute the fingerprint bit by bit, as the specification defines it."""
    empty = 0xC15D213AA4D7A795
    value = empty
    for byte in text.encode():
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (empty if value & 1 else 0)
    return value


@every_kind
def test_the_header_is_avros_single_object_encoding(kind: str) -> None:
    """It is C3 01 and the little-endian CRC-64-AVRO fingerprint, computed here independently of the codec."""
    schema_name, raw, _ = GOOD[kind]
    schema = json.loads((schemas_dir() / f"{schema_name}.avsc").read_text())
    assert raw[:2] == b"\xc3\x01"
    assert raw[2:HEADER_BYTES] == codec(schema_name).fingerprint
    assert raw[2:HEADER_BYTES] == crc_64_avro(canonical(schema, set())).to_bytes(8, "little")


@every_kind
def test_an_invalid_record_is_refused_with_its_reason(kind: str) -> None:
    """It may be empty, not Avro, a header alone, of an unknown or another schema, or have bytes after the datum."""
    schema_name, raw, decode = GOOD[kind]
    assert reason_of(lambda: decode(raw)) is None
    assert reason_of(lambda: decode(b"")) == "not_avro"
    assert reason_of(lambda: decode(None)) == "not_avro"
    assert reason_of(lambda: decode(b"{}")) == "not_avro"
    assert reason_of(lambda: decode(raw[1:])) == "not_avro"
    assert reason_of(lambda: decode(raw[:9])) == "not_avro"
    assert reason_of(lambda: decode(b"\xc3\x02" + raw[2:])) == "not_avro"
    assert reason_of(lambda: decode(raw[:2] + bytes(8) + raw[HEADER_BYTES:])) == "unknown_schema"
    for other_name, other, _ in GOOD.values():
        if other_name != schema_name:
            assert reason_of(lambda other=other: decode(other)) == "unknown_schema"  # type: ignore[misc]
    assert reason_of(lambda: decode(raw + b"\x00")) == "bad_avro"


@every_kind
def test_a_record_cut_off_anywhere_is_refused(kind: str) -> None:
    """No prefix of a record is taken for a record."""
    _, raw, decode = GOOD[kind]
    for n_bytes in range(len(raw)):
        expected = "not_avro" if n_bytes < HEADER_BYTES else "bad_avro"
        assert reason_of(lambda n=n_bytes: decode(raw[:n])) == expected, n_bytes  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["events", "worker", "add"])
def test_the_confluent_header_is_read_if_its_id_is_configured(kind: str) -> None:
    """An id that is not configured, that is another schema's, or that is cut off is refused."""
    schema_name, raw, decode = GOOD[kind]
    with_ids = WITH_CONFLUENT_IDS[schema_name]
    framed = b"\x00" + (300).to_bytes(4, "big") + raw[HEADER_BYTES:]
    assert plain(with_ids(framed, {schema_name: 300})) == plain(decode(raw))
    assert plain(with_ids(raw, {schema_name: 300})) == plain(decode(raw))
    assert reason_of(lambda: decode(framed)) == "unknown_schema"
    assert reason_of(lambda: with_ids(framed, {schema_name: 301})) == "unknown_schema"
    assert reason_of(lambda: with_ids(framed, {"another": 300})) == "unknown_schema"
    assert reason_of(lambda: with_ids(framed[:4], {schema_name: 300})) == "not_avro"
    assert reason_of(lambda: with_ids(framed[:-1], {schema_name: 300})) == "bad_avro"


def by_reason(value: object) -> str:
    """Name a test case by its reason, since its bytes would fill pages."""
    return "" if isinstance(value, bytes) else str(value or "good")


def batch_datum(**changes: Any) -> bytes:
    datum = {
        "worker_id": 1,
        "dp_rank": 0,
        "model": "m",
        "block_size": 16,
        "incarnation": 1,
        "sequence": 0,
        "digest": bytes(8),
        "emitted_at_ms": 0,
        "n_unindexed": 0,
        "body": ("io.kvstreams.EngineEvents", {"events": []}),
    }
    return codec("kv-events").encode(datum | changes)


def stored_datum(engine: bytes, local: bytes, labels: dict[str, int] | None = None) -> bytes:
    stored = {"parent": None, "engine_hashes": engine, "local_hashes": local, "tier": "device", "moe": labels}
    return batch_datum(body=("io.kvstreams.EngineEvents", {"events": [("io.kvstreams.BlocksStored", stored)]}))


def oversized_label() -> bytes:
    """Return a store whose label is greater than an Avro int, which fastavro reads but would not write."""
    raw = stored_datum(bytes(8), bytes(8), {"expert_id": LABEL_MAX})
    assert raw.count(b"\xfe\xff\xff\xff\x0f") == 1
    return raw.replace(b"\xfe\xff\xff\xff\x0f", b"\xfe\xff\xff\xff\x7f")


def chunk_datum(**changes: Any) -> bytes:
    run = {"start": 0, "parent": None, "engine_hashes": bytes(8), "local_hashes": bytes(8), "tier": "device"}
    chunk = {"restatement_id": 1, "chunk": 0, "n_chunks": 1, "exact": True}
    runs = [run | {name: value for name, value in changes.items() if name in run}]
    chunk |= {name: value for name, value in changes.items() if name in chunk}
    body = ("io.kvstreams.RestatementChunk", {**chunk, "runs": changes.get("runs", runs)})
    return batch_datum(body=body, sequence=changes.get("sequence", 0))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (batch_datum(), None),
        (batch_datum(block_size=0), "wrong_block_size"),
        (batch_datum(block_size=-16), "wrong_block_size"),
        (batch_datum(block_size=1 << 31), "wrong_block_size"),
        (batch_datum(dp_rank=-1), "bad_rank"),
        (batch_datum(dp_rank=1 << 31), "bad_rank"),  # too large for an Avro int, but not for its bytes
        (batch_datum(dp_rank=1 << 40), "bad_rank"),
        (batch_datum(sequence=-1), None),  # announces an incarnation
        (batch_datum(sequence=-2), "bad_sequence"),
        (batch_datum(sequence=-1, body=("io.kvstreams.WorkerRemoved", {"reason": "r"})), "bad_sequence"),
        (batch_datum(n_unindexed=-1), "bad_count"),
        (batch_datum(n_unindexed=1 << 31), "bad_count"),
        (batch_datum(body=("io.kvstreams.Heartbeat", {"bridge": "b", "lease_ms": 0})), "bad_lease"),
        (batch_datum(body=("io.kvstreams.Heartbeat", {"bridge": "b", "lease_ms": 1 << 31})), "bad_lease"),
        (stored_datum(bytes(8), bytes(8)), None),
        (stored_datum(bytes(7), bytes(8)), "bad_hashes"),
        (stored_datum(bytes(8), bytes(9)), "bad_hashes"),
        (stored_datum(bytes(8), bytes(16)), "bad_hashes"),
        (stored_datum(bytes(8), b""), "bad_hashes"),
        (stored_datum(bytes(8), bytes(8), {"layer_id": 0, "expert_id": LABEL_MAX}), None),
        (stored_datum(bytes(8), bytes(8), {"layer_id": -1}), "bad_event"),
        (oversized_label(), "bad_event"),
        (chunk_datum(), None),
        (chunk_datum(sequence=-1), "bad_sequence"),
        (chunk_datum(sequence=-1, runs=[]), None),  # before its first batch, a rank holds nothing
        (chunk_datum(chunk=1), "bad_restatement"),
        (chunk_datum(chunk=-1), "bad_restatement"),
        (chunk_datum(n_chunks=0), "bad_restatement"),
        (chunk_datum(n_chunks=1 << 31), "bad_restatement"),
        (chunk_datum(start=1), "bad_restatement"),
        (chunk_datum(parent=bytes(8)), "bad_restatement"),
        (chunk_datum(parent=bytes(8), start=-1), "bad_restatement"),
        (chunk_datum(parent=bytes(8), start=1), None),
        (chunk_datum(parent=bytes(8), start=1 << 31), "bad_restatement"),
        (chunk_datum(engine_hashes=bytes(16)), "bad_hashes"),
        (chunk_datum(local_hashes=bytes(3)), "bad_hashes"),
    ],
    ids=by_reason,
)
def test_an_impossible_batch_is_refused_with_its_reason(raw: bytes, reason: str | None) -> None:
    """The Avro is valid, but a size, rank, number, label or array in it is not. The kernel refuses it as well."""
    assert reason_of(lambda: decode_batch(raw)) == reason
    (found,) = decode_events([raw])
    assert (found.reason if isinstance(found, BadRecord) else None) == reason


def test_a_removal_of_odd_length_is_refused() -> None:
    """The hashes of a removal must be complete, like those of a store."""
    removed = ("io.kvstreams.BlocksRemoved", {"engine_hashes": bytes(12), "tier": "device"})
    raw = batch_datum(body=("io.kvstreams.EngineEvents", {"events": [removed]}))
    assert reason_of(lambda: decode_batch(raw)) == "bad_hashes"


def worker_datum(**changes: Any) -> bytes:
    return codec("workers").encode(
        {"worker_id": 1, "url": "u", "model": "m", "block_size": 16, "registered_at_ms": 0} | changes
    )


@pytest.mark.parametrize(
    "changes", [{"block_size": 0}, {"dp_size": 0}, {"dp_size": DP_SIZE_MAX + 1}, {"dp_size": -1}, {"model": ""}]
)
def test_an_impossible_worker_is_refused(changes: dict[str, Any]) -> None:
    """A record on Kafka is checked like the body of a PUT, and fields that are left out have their defaults."""
    assert decode_worker(worker_datum()) == Worker(WorkerId(1), "u", "m", 16)
    assert reason_of(lambda: decode_worker(worker_datum(**changes))) == "bad_worker"


def load_datum(phase: str = "add", **changes: Any) -> bytes:
    booking: dict[str, Any] = {
        "worker_id": 1,
        "dp_rank": 0,
        "model": "m",
        "prefill_tokens": 5,
        "request_blocks": 1,
        "overlap_blocks": 0,
        "sequence_hashes": b"",
        "expected_output_tokens": None,
        "output_blocks": 0,
    }
    return codec("router-loads").encode(
        {
            "request_id": "r",
            "router_id": "o",
            "counter": 1,
            "phase": phase,
            "written_at_ms": 0,
            "booking": None if "booking" in changes else ("io.kvstreams.Booking", booking | changes),
        }
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (load_datum(), None),
        (load_datum(booking=None), "bad_booking"),
        (load_datum("free"), "bad_booking"),
        (load_datum("free", booking=None), None),
        (load_datum(sequence_hashes=bytes(9)), "bad_hashes"),
        (load_datum(prefill_tokens=-1), "bad_booking"),
        (load_datum(request_blocks=-1), "bad_booking"),
        (load_datum(overlap_blocks=-1), "bad_booking"),
        (load_datum(output_blocks=-1), "bad_booking"),
        (load_datum(expected_output_tokens=-1), "bad_booking"),
        (load_datum(prefill_tokens=NUMBER_MAX), None),
        (load_datum(prefill_tokens=NUMBER_MAX + 1), "bad_booking"),
        (load_datum(load_us=NUMBER_MAX + 1), "bad_booking"),
        (load_datum(model="m" * NAME_BYTES_MAX), None),
        (load_datum(model="ä" * NAME_BYTES_MAX), "bad_booking"),
        (load_datum(dp_rank=-1), "bad_rank"),
        (load_datum(dp_rank=1 << 31), "bad_rank"),
    ],
    ids=by_reason,
)
def test_an_impossible_load_is_refused_with_its_reason(raw: bytes, reason: str | None) -> None:
    """An add must have a booking, other phases must not, and no number is negative or too great to be added up."""
    assert reason_of(lambda: decode_load(raw)) == reason


def run_datum(**changes: Any) -> bytes:
    datum: dict[str, Any] = {
        "incarnation": 1,
        "generation": 0,
        "start": 0,
        "parent": None,
        "local_hashes": (1).to_bytes(8, "little"),
        "engine_hashes": bytes(8),
        "present": b"\x01",
        "labels": [],
    }
    return codec("prefix-index-run").encode(datum | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"local_hashes": b""}, "bad_run"),
        ({"local_hashes": b"", "engine_hashes": b"", "present": b""}, "bad_run"),
        ({"local_hashes": (2).to_bytes(8, "little")}, "bad_run"),
        ({"local_hashes": b"\x01" + bytes(33 * 8 - 1), "engine_hashes": bytes(33 * 8)}, "bad_run"),
        ({"engine_hashes": bytes(16)}, "bad_run"),
        ({"engine_hashes": bytes(5)}, "bad_hashes"),
        ({"local_hashes": bytes(5)}, "bad_hashes"),
        ({"present": b""}, "bad_run"),
        ({"present": b"\x00"}, "bad_run"),
        ({"present": b"\x03"}, "bad_run"),
        ({"present": b"\x01\x00"}, None),
        ({"present": b"\x01\x01"}, "bad_run"),
        ({"parent": bytes(8), "start": 1}, "bad_run"),  # its first sequence hash then differs from that of the key
        ({"start": 1}, "bad_run"),
        ({"start": -1}, "bad_run"),
        ({"labels": [{"offset": 1, "layer_id": 1, "expert_id": None, "expert_group": None}]}, "bad_run"),
        ({"labels": [{"offset": -1, "layer_id": 1, "expert_id": None, "expert_group": None}]}, "bad_run"),
        ({"labels": [{"offset": 0, "layer_id": 1, "expert_id": None, "expert_group": None}]}, None),
    ],
)
def test_an_impossible_run_is_refused_with_its_reason(changes: dict[str, Any], reason: str | None) -> None:
    """Hashes must fit each other and the key, and at least one block, and only blocks of the run, must be present."""
    key = RUN_KEY.pack(RunKey(RANK, Tier.DEVICE, SequenceHash(1)))
    assert reason_of(lambda: decode_run(key, run_datum(**changes))) == reason


@pytest.mark.parametrize(
    ("key", "parse"),
    [
        (RUN_KEY.pack(RUN.key), RUN_KEY.parse),
        (PROGRESS_KEY.pack(RANK), PROGRESS_KEY.parse),
        (PARTITION_KEY.pack(3), lambda key: decode_partition(key, encode_partition(PARTITION))),
    ],
)
def test_a_key_of_another_length_or_kind_is_refused(key: bytes, parse: Callable[[bytes], Any]) -> None:
    """A key may be too short, too long, of another kind, or of an unknown tier."""
    assert reason_of(lambda: parse(key)) is None
    for bad in (b"", key[:-1], key + b"\x00", b"X" + key[1:]):
        assert reason_of(lambda bad=bad: parse(bad)) == "bad_key"  # type: ignore[misc]
    if parse is RUN_KEY.parse:
        assert reason_of(lambda: parse(key[:13] + b"\x04" + key[14:])) == "bad_key"


def test_keys_sort_by_kind_and_rank() -> None:
    """A range of RocksDB contains one kind of row, and within it one rank after the other."""
    ordered = [RankId(WorkerId(1), DpRank(2)), RankId(WorkerId(1), DpRank(256)), RankId(WorkerId(256), DpRank(0))]
    keys = [PROGRESS_KEY.pack(rank) for rank in ordered]
    keys += [RUN_KEY.pack(RunKey(rank, tier, SequenceHash(U64_MASK))) for rank in ordered for tier in Tier]
    assert keys == sorted(keys)


@pytest.mark.parametrize("value", [0, 1, I63, I63 + 1, U64_MASK])
def test_a_u64_is_stored_as_the_long_with_the_same_bits(value: int) -> None:
    """The long is in Avro's range, and is read back as the same u64."""
    assert -(1 << 63) <= to_long(value) <= I63
    assert from_long(to_long(value)) == value


@pytest.mark.parametrize(
    "bad", [{"digest": b"short"}, {"model": 5}, {"sequence": "x"}, {"body": ("io.kvstreams.No", {})}]
)
def test_a_datum_that_does_not_fit_the_schema_raises_a_kvstreams_error(bad: dict[str, Any]) -> None:
    """No exception of fastavro reaches the caller."""
    with pytest.raises(KvStreamsError):
        batch_datum(**bad)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "decode_batch": decode_batch,
    "decode_worker": decode_worker,
    "decode_metrics": decode_metrics,
    "decode_load": decode_load,
    "decode_run": lambda raw: decode_run(RUN_KEY.pack(RUN.key), raw),
    "decode_progress": lambda raw: decode_progress(PROGRESS_KEY.pack(RANK), raw),
    "decode_partition": lambda raw: decode_partition(PARTITION_KEY.pack(3), raw),
}
SCHEMA_OF = {
    "decode_batch": "kv-events",
    "decode_worker": "workers",
    "decode_metrics": "worker-metrics",
    "decode_load": "router-loads",
    "decode_run": "prefix-index-run",
    "decode_progress": "prefix-index-progress",
    "decode_partition": "prefix-index-partition",
}


@pytest.mark.parametrize("name", list(DECODERS))
@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=80), framed=st.booleans())
def test_random_bytes_raise_at_most_bad_record(name: str, raw: bytes, framed: bool) -> None:
    """This holds with a valid header and without one."""
    header = b"\xc3\x01" + codec(SCHEMA_OF[name]).fingerprint
    reason_of(lambda: DECODERS[name](header + raw if framed else raw))


@every_kind
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_record_with_changed_bytes_raises_at_most_bad_record(kind: str, data: st.DataObject) -> None:
    """Bytes are changed, inserted or removed; a record that is nevertheless accepted can be written again."""
    _, good, decode = GOOD[kind]
    raw = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        value = decode(bytes(raw))
    except BadRecord:
        return
    if isinstance(value, EngineBatch):
        assert plain(decode_batch(encode_batch(value))) == plain(value)
        PROGRESS_KEY.pack(value.rank)  # an agent writes rows with such keys
    elif isinstance(value, Run):
        assert decode_run(RUN_KEY.pack(value.key), encode_run(value)) == value


@settings(max_examples=50, deadline=None)
@given(key=st.binary(max_size=24), letter=st.sampled_from([b"", b"R", b"P", b"Z"]))
def test_random_keys_raise_at_most_bad_record(key: bytes, letter: bytes) -> None:
    """A parser of keys accepts the bytes or refuses them with `bad_key`."""
    for parse in (RUN_KEY.parse, PROGRESS_KEY.parse):
        assert reason_of(lambda parse=parse: parse(letter + key)) in (None, "bad_key")  # type: ignore[misc]


def test_decoded_arrays_are_read_only() -> None:
    """They share the record's bytes."""
    body = decode_batch(GOOD["events"][1]).body
    assert isinstance(body, EngineEvents)
    event: KvEvent = body.events[0]
    assert isinstance(event, BlocksStored)
    assert not event.engine.flags.writeable


@pytest.mark.parametrize("path", sorted((schemas_dir() / "released").glob("*.avsc")), ids=lambda path: path.stem)
def test_the_avro_package_finds_each_schema_compatible_with_the_released_one(path: Path) -> None:
    """A reader of today understands what the last release wrote."""
    reader, writer = (avro.schema.parse(file.read_text()) for file in (schemas_dir() / path.name, path))
    found = ReaderWriterCompatibilityChecker().get_compatibility(reader, writer)
    assert found.compatibility is SchemaCompatibilityType.compatible, found.messages


def test_schemas_are_json_with_a_name_and_a_doc_string() -> None:
    """The doc strings of each schema explain it to readers of the topic who do not use this code."""
    for path in schemas_dir().glob("*.avsc"):
        schema = json.loads(path.read_text())
        assert schema["type"] == "record" and schema["namespace"] == "io.kvstreams" and schema["doc"]
