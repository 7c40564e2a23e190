"""The records of the topics, and their keys.

What lives here: one description of each record, from which `encode_*` and `decode_*` follow. What must not: the
meaning of a record, the records of the index table (tables.records) and those of CXL (cxl.records).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, assert_never

from streams.core.bridge_pulses import BridgePulse
from streams.core.cxl_memory import CxlMemoryMetadata, CxlMemoryState
from streams.core.engine_metrics import METRICS_TTL_MS_MAX, MetricsReport, WorkerMetrics
from streams.core.events import (
    BEFORE_FIRST,
    AllBlocksCleared,
    BlockFacts,
    BlocksRemoved,
    BlocksStored,
    Body,
    EngineBatch,
    EngineEvents,
    FeedState,
    Heartbeat,
    MoeLabels,
    RestatedRun,
    RestatementChunk,
    ResyncRequest,
    WorkerRemoved,
    check_labels,
)
from streams.core.hashing import pack_hashes
from streams.core.ids import Tier
from streams.core.loads.bookings import NAME_BYTES_MAX, NUMBER_MAX, Booking, BookingId, BookingPhase
from streams.core.loads.observations import Forecast
from streams.core.workers import (
    Avoidance,
    BridgeLease,
    Cordon,
    RenderOutcome,
    RenderParity,
    RenderPart,
    RenderReason,
    RenderResult,
    Role,
    ServedModel,
    Worker,
    WorkerState,
)
from streams.errors import BadRecord
from streams.kafka.event_encoding import datum_of
from streams.kafka.shapes import (
    HASH,
    HASHES,
    I32_MAX,
    RANK,
    TEXTS,
    U64,
    Field,
    KeyedRecord,
    NameKey,
    RecordShape,
    Shape,
    WorkerKey,
    by_name,
    by_value,
    hashes,
    many,
    one_of,
    optional,
    to_long,
)

# -- kv-events -----------------------------------------------------------------------------------------------------


def _check_pairs(event: BlocksStored | RestatedRun) -> None:
    if len(event.engine) != len(event.local):
        raise BadRecord("bad_hashes", f"{len(event.engine)} engine hashes for {len(event.local)} local hashes")


def _check_run(run: RestatedRun) -> None:
    _check_pairs(run)
    if not 0 <= run.start <= I32_MAX or (run.start == 0) != (run.parent is None):
        raise BadRecord("bad_restatement", f"a run at position {run.start} has parent {run.parent}")
    end = 0
    for facts in run.facts:
        if facts.first < end or facts.n_blocks < 1:
            raise BadRecord("bad_restatement", f"labels of {facts.n_blocks} blocks from {facts.first} after {end}")
        end = facts.first + facts.n_blocks
    if end > len(run.local):
        raise BadRecord("bad_restatement", f"labels of blocks up to {end} in a run of {len(run.local)}")


def _check_chunk(chunk: RestatementChunk) -> None:
    if not 0 <= chunk.chunk < chunk.n_chunks <= I32_MAX:
        raise BadRecord("bad_restatement", f"chunk {chunk.chunk} of {chunk.n_chunks}")


def _check_heartbeat(heartbeat: Heartbeat) -> None:
    if not 1 <= heartbeat.lease_ms <= I32_MAX:
        raise BadRecord("bad_lease", f"a lease of {heartbeat.lease_ms} ms is too short or too long")


def _check_batch(batch: EngineBatch) -> None:
    if not 1 <= batch.block_size <= I32_MAX:
        raise BadRecord("wrong_block_size", f"block size is {batch.block_size}")
    if not 0 <= batch.n_unindexed <= I32_MAX:
        raise BadRecord("bad_count", f"the number of unindexed blocks is {batch.n_unindexed}")
    if batch.sequence < 0 and not (batch.sequence == BEFORE_FIRST and _has_no_blocks(batch.body)):
        raise BadRecord("bad_sequence", f"sequence is {batch.sequence}")


def _has_no_blocks(body: Body) -> bool:
    """Whether a record can come before the first batch of an incarnation, in which the rank holds nothing."""
    match body:
        case EngineEvents():
            return not body.events
        case RestatementChunk():
            return not body.runs
        case Heartbeat():
            return True
        case WorkerRemoved():
            return False
        case _:
            assert_never(body)


_ENGINE, _LOCAL = HASHES.named("engine_hashes"), HASHES.named("local_hashes")
_PARENT = optional(HASH)
_TIER = by_name(Tier)
_MOE = optional(Shape(MoeLabels, check=check_labels).nested())
_CXL = optional(
    Shape(CxlMemoryMetadata, refused="bad_state", state=by_value(CxlMemoryState), accessible_workers=many(U64)).nested()
).named("cxl_metadata")

_EVENT = one_of(
    Shape(
        BlocksStored, check=_check_pairs, parent=_PARENT, engine=_ENGINE, local=_LOCAL, tier=_TIER, moe=_MOE, cxl=_CXL
    ),
    Shape(BlocksRemoved, engine=_ENGINE, tier=_TIER),
    Shape(AllBlocksCleared),
)
_RUN = Shape(
    RestatedRun,
    check=_check_run,
    parent=_PARENT,
    engine=_ENGINE,
    local=_LOCAL,
    tier=_TIER,
    facts=many(Shape(BlockFacts, moe=_MOE, cxl=_CXL).nested()),
)
_BODY = one_of(
    Shape(EngineEvents, events=many(_EVENT)),
    Shape(RestatementChunk, check=_check_chunk, restatement_id=U64, runs=many(_RUN.nested())),
    Shape(WorkerRemoved),
    Shape(Heartbeat, check=_check_heartbeat),
)
_BATCH = RecordShape(
    "kv-events",
    Shape(
        EngineBatch,
        check=_check_batch,
        rank=RANK,
        incarnation=U64,
        sequence=Field(
            to_long, int
        ),  # a greater one than an engine can reach reads as a negative one, which is refused
        digest=HASH,
        feed=by_name(FeedState),
        body=_BODY,
    ),
    fast=datum_of,
)
encode_batch, decode_batch, encode_batch_by_schema = _BATCH.encode, _BATCH.decode, _BATCH.encode_by_schema


def decode_batch_or_error(value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> EngineBatch | BadRecord:
    """Decode a record of kv-events as `decode_batch` does, and return the error of a bad one instead of raising it."""
    try:
        return decode_batch(value, schema_ids)
    except BadRecord as exc:
        return exc


# -- kv-control ----------------------------------------------------------------------------------------------------


def _check_resync(request: ResyncRequest) -> None:
    if request.sequence < BEFORE_FIRST or request.attempt < 1:
        raise BadRecord("bad_resync", f"attempt {request.attempt} after batch {request.sequence}")


_RESYNC = RecordShape("kv-control", Shape(ResyncRequest, check=_check_resync, rank=RANK, incarnation=U64))
encode_resync, decode_resync = _RESYNC.encode, _RESYNC.decode


# -- workers: the workers themselves -------------------------------------------------------------------------------


def _check_lease(lease: BridgeLease) -> None:
    if min(lease.term, lease.lease_ms, lease.renewal) < 0:
        raise BadRecord("bad_lease", f"term {lease.term}, {lease.lease_ms} ms, renewal {lease.renewal}")


LEASE = Shape(BridgeLease, check=_check_lease).nested()

_WORKER = RecordShape(
    "workers",
    Shape(
        Worker,
        refused="bad_worker",
        worker_id=U64,
        role=by_value(Role),
        state=by_value(WorkerState),
        taints=TEXTS,
        aliases=TEXTS,
        lora_names=optional(TEXTS),
        lease=optional(LEASE),
    ),
)
encode_worker, decode_worker = _WORKER.encode, _WORKER.decode


# -- workers: the other records of the topic, each with its own prefix of keys -------------------------------------

CORDONS = KeyedRecord(
    "cordons", Shape(Cordon, worker_id=U64), WorkerKey(b"cordon/", "the cordon of worker"), "worker_id"
)
AVOIDANCES = KeyedRecord(
    "avoidances",
    Shape(Avoidance, refused="bad_avoidance", worker_id=U64),
    WorkerKey(b"avoid/", "the avoidance of worker"),
    "worker_id",
)
_RENDER_RESULT = Shape(
    RenderResult,
    refused="bad_render_parity",
    outcome=by_value(RenderOutcome),
    reason=optional(by_value(RenderReason)),
    part=optional(by_value(RenderPart)),
)
RENDER_PARITIES = KeyedRecord(
    "render-parities",
    Shape(RenderParity, worker_id=U64, incarnation=optional(U64), result=_RENDER_RESULT),
    WorkerKey(b"render/", "the render parity of worker"),
    "worker_id",
)
MODELS = KeyedRecord("models", Shape(ServedModel, refused="bad_model"), NameKey(b"model/", "model"), "name")


# -- worker-metrics ------------------------------------------------------------------------------------------------


def _check_metrics(report: MetricsReport) -> None:
    metrics = report.metrics
    usage, counts = metrics.gpu_cache_usage_perc, {name: getattr(metrics, name) for name in _METRIC_COUNTS}
    if not 0.0 <= usage <= 1.0:  # also false for NaN
        raise BadRecord("bad_metrics", f"a cache usage of {usage} is not from 0 to 1")
    if min(counts.values()) < 0 or report.n_scrapes_failed < 0:
        raise BadRecord("bad_metrics", f"a negative number: {counts}, {report.n_scrapes_failed} failed scrapes")
    if not 1 <= report.ttl_ms <= METRICS_TTL_MS_MAX:
        raise BadRecord("bad_metrics", f"a TTL of {report.ttl_ms} ms is not from 1 to {METRICS_TTL_MS_MAX}")


_METRICS = Shape(WorkerMetrics)
_METRIC_COUNTS = sorted(_METRICS.names - {"gpu_cache_usage_perc"})
_REPORT = RecordShape("worker-metrics", Shape(MetricsReport, check=_check_metrics, rank=RANK, metrics=_METRICS))
encode_metrics, decode_metrics = _REPORT.encode, _REPORT.decode

PULSES = KeyedRecord(
    "bridge-pulses", Shape(BridgePulse, fed=optional(many(U64))), NameKey(b"bridge/", "bridge"), "bridge"
)


# -- router-loads --------------------------------------------------------------------------------------------------

_KEY_SEPARATOR = "\x1f"


class LoadRecord(NamedTuple):
    """What happened to a booking; phase ADD alone contains it. written_at_ms: by the clock of the router that wrote."""

    booking_id: BookingId
    phase: BookingPhase
    written_at_ms: int
    booking: Booking | None


def _check_load(record: LoadRecord) -> None:
    booking_id, phase, _, booking = record
    if (phase is BookingPhase.ADD) != (booking is not None):
        raise BadRecord("bad_booking", f"phase {phase.value} {'lacks' if booking is None else 'has'} a booking")
    if booking is None:
        return
    counts = [booking.prefill_tokens, booking.request_blocks, booking.overlap_blocks, booking.output_blocks]
    counts += booking.forecast
    if min(*counts, booking.expected_output_tokens or 0) < 0:
        raise BadRecord("bad_booking", f"a booking with a negative number: {counts}")
    if max(*counts, booking.expected_output_tokens or 0) > NUMBER_MAX:
        raise BadRecord("bad_booking", f"a booking with a number over {NUMBER_MAX}: {counts}")
    n_bytes = max(len(name.encode()) for name in (booking_id.request_id, booking_id.router_id, booking.model))
    if n_bytes > NAME_BYTES_MAX:
        raise BadRecord("bad_booking", f"a booking with a name of {n_bytes} bytes, more than {NAME_BYTES_MAX}")


_BOOKING = Shape(
    Booking,
    rank=RANK,
    sequence=Field(bytes, lambda packed: pack_hashes(hashes(packed)), "sequence_hashes"),
    forecast=Shape(Forecast),
)
_LOAD = RecordShape(
    "router-loads",
    Shape(
        LoadRecord,
        check=_check_load,
        booking_id=Shape(BookingId),
        phase=by_value(BookingPhase),
        booking=optional(_BOOKING.nested()),
    ),
)


def load_key(booking_id: BookingId, phase: BookingPhase) -> bytes:
    """Return the key of one phase's record of router-loads."""
    parts = (booking_id.request_id, booking_id.router_id, str(booking_id.counter), phase)
    return _KEY_SEPARATOR.join(parts).encode()


def encode_load(
    booking_id: BookingId, phase: BookingPhase, booking: Booking | None, written_at_ms: int
) -> tuple[bytes, bytes]:
    """Encode one record of router-loads; returns key and value."""
    return load_key(booking_id, phase), _LOAD.encode(LoadRecord(booking_id, phase, written_at_ms, booking))


def decode_load(
    raw: bytes | None, schema_ids: Mapping[str, int] | None = None
) -> tuple[BookingId, BookingPhase, Booking | None]:
    """Decode one record of router-loads; raises BadRecord."""
    booking_id, phase, _, booking = _LOAD.decode(raw, schema_ids)
    return booking_id, phase, booking
