"""Avro bytes to values and back: schemas, frames, and the records of the topics.

What lives here: loading schemas, framing, and the conversion of all records except those of the index table
(tables.records) and of CXL (cxl.records). What must not: the meaning of a record.

A frame is Avro's single-object encoding: C3 01, the schema's CRC-64-AVRO fingerprint, the datum. It costs 10 bytes and
lets a reader distinguish bytes that are not Avro from an unknown schema. The Confluent wire header (00, schema id) is
also read, for the ids in the settings.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, assert_never

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from streams.core.bridge_pulses import BridgePulse
from streams.core.cxl_memory import CxlMemoryMetadata
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
    KvEvent,
    MoeLabels,
    RestatedRun,
    RestatementChunk,
    ResyncRequest,
    WorkerRemoved,
    check_labels,
)
from streams.core.hashing import pack_hashes, unpack_hashes
from streams.core.ids import (
    U64_MASK,
    DpRank,
    EngineHash,
    HashArray,
    Incarnation,
    RankId,
    SequenceHash,
    Tier,
    WorkerId,
)
from streams.core.loads.bookings import Booking, BookingId, BookingPhase
from streams.core.loads.kernels.layout import NAME_BYTES_MAX, NUMBER_MAX
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
from streams.errors import BadRecord, InvalidEvent, InvalidRequest, KvStreamsError
from streams.event_encoding import datum_of

#: Folders in that of the schemas: of the last release, and of earlier forms.
RELEASED = "released"
PREVIOUS = "previous"

_SINGLE_OBJECT = b"\xc3\x01"
_SINGLE_OBJECT_HEADER_BYTES = 10
_CONFLUENT_MAGIC = 0
_CONFLUENT_HEADER_BYTES = 5
_U63 = 1 << 63
#: fastavro reads ints that are longer than Avro allows, so they are checked.
_I32_MAX = (1 << 31) - 1
_U64_DIGITS = 20


def schemas_dir() -> Path:
    """Return the folder of the .avsc files: inside the package in a wheel, at the top level in a checkout."""
    packaged = Path(__file__).parent / "_schemas"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "schemas"


class RecordCodec:
    """Encodes and decodes the records of one schema, including the frame.

    Records of earlier schemas are read too, with the defaults of the fields that they lack, since a topic or a table
    has such records after an upgrade. The schema of the last release is `schemas/released/<name>.avsc`, earlier ones
    are `schemas/previous/<name>.<number>.avsc`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.source: dict[str, Any] = json.loads((schemas_dir() / f"{name}.avsc").read_text())
        self._schema = fastavro.parse_schema(self.source)
        # fastavro returns the fingerprint as hex, in the byte order of the frame (little-endian).
        self.fingerprint = bytes.fromhex(fingerprint(to_parsing_canonical_form(self._schema), "CRC-64-AVRO"))
        #: The first bytes of a record of the current schema.
        self.header = _SINGLE_OBJECT + self.fingerprint
        #: By fingerprint, what records may have been written with.
        self._writers: dict[bytes, Any] = {self.fingerprint: self._schema}
        folder = schemas_dir()
        for path in (*(folder / PREVIOUS).glob(f"{name}.*.avsc"), *(folder / RELEASED).glob(f"{name}.avsc")):
            earlier = fastavro.parse_schema(json.loads(path.read_text()))
            # A current one stays: a reader that has the same schema twice compares their fields for every record.
            self._writers.setdefault(
                bytes.fromhex(fingerprint(to_parsing_canonical_form(earlier), "CRC-64-AVRO")), earlier
            )

    def encode(self, datum: Mapping[str, Any]) -> bytes:
        """Frame and encode; raises KvStreamsError for a value that does not fit the schema."""
        out = io.BytesIO()
        out.write(self.header)
        try:
            fastavro.schemaless_writer(out, self._schema, datum)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as exc:
            raise KvStreamsError(f"cannot encode a {self.name} record: {exc}") from exc
        return out.getvalue()

    def decode(self, raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Check the frame and decode.

        schema_ids: Confluent ids by schema name, if a registry is configured.
        Raises BadRecord with reason not_avro, unknown_schema or bad_avro.
        """
        if not raw:
            raise BadRecord("not_avro", "the record is empty")
        start, writer = self._frame(raw, schema_ids or {})
        stream = io.BytesIO(raw)
        stream.seek(start)
        try:
            datum: Any = fastavro.schemaless_reader(stream, writer, None if writer is self._schema else self._schema)
        except EOFError as exc:  # without its own message, which contains a memory address
            raise BadRecord("bad_avro", f"the datum is not a {self.name} record: it ends early") from exc
        except Exception as exc:  # fastavro passes on any exception of its C code
            # Some of them quote the datum, which a foreign writer may have filled with anything.
            raise BadRecord("bad_avro", f"the datum is not a {self.name} record ({type(exc).__name__})") from None
        if stream.tell() != len(raw):
            raise BadRecord("bad_avro", f"{len(raw) - stream.tell()} bytes follow the {self.name} datum")
        assert isinstance(datum, dict)
        return datum

    def _frame(self, raw: bytes, schema_ids: Mapping[str, int]) -> tuple[int, Any]:
        """Return where the datum begins, and the schema that it was written with."""
        if raw[:2] == _SINGLE_OBJECT and len(raw) >= _SINGLE_OBJECT_HEADER_BYTES:
            found = raw[2:_SINGLE_OBJECT_HEADER_BYTES]
            writer = self._writers.get(found)
            if writer is None:
                raise BadRecord("unknown_schema", f"schema fingerprint {found.hex()} is not that of {self.name}")
            return _SINGLE_OBJECT_HEADER_BYTES, writer
        if raw[0] == _CONFLUENT_MAGIC and len(raw) >= _CONFLUENT_HEADER_BYTES:
            found_id = int.from_bytes(raw[1:_CONFLUENT_HEADER_BYTES], "big")
            if schema_ids.get(self.name) != found_id:
                raise BadRecord("unknown_schema", f"registry id {found_id} is not the one configured for {self.name}")
            return _CONFLUENT_HEADER_BYTES, self._schema
        raise BadRecord("not_avro", "the record does not begin with the header of an Avro datum")


@cache
def codec(name: str) -> RecordCodec:
    """Return the codec of a schema by its file name without the extension."""
    return RecordCodec(name)


def to_long(value: int) -> int:
    """Return a u64 as the signed long with the same bits."""
    return value - (1 << 64) if value >= _U63 else value


def from_long(value: int) -> int:
    """Return a signed long as the u64 with the same bits."""
    return value & U64_MASK


def to_hash(value: int | None) -> bytes | None:
    """Return a u64 as an Avro fixed(8), little-endian."""
    return None if value is None else value.to_bytes(8, "little")


def from_hash(value: bytes | None) -> int | None:
    """Return an Avro fixed(8) as a u64."""
    return None if value is None else int.from_bytes(value, "little")


def encode_batch(batch: EngineBatch) -> bytes:
    """Encode one record of kv-events."""
    datum = datum_of(batch)
    return encode_batch_by_schema(batch) if datum is None else codec("kv-events").header + datum


def encode_batch_by_schema(batch: EngineBatch) -> bytes:
    """Encode one record of kv-events with fastavro; the bytes are the same. Raises what RecordCodec.encode raises."""
    return codec("kv-events").encode(
        {
            "worker_id": to_long(batch.rank.worker_id),
            "dp_rank": batch.rank.dp_rank,
            "model": batch.model,
            "block_size": batch.block_size,
            "incarnation": to_long(batch.incarnation),
            "sequence": to_long(batch.sequence),
            "digest": to_hash(batch.digest),
            "emitted_at_ms": batch.emitted_at_ms,
            "n_unindexed": batch.n_unindexed,
            "incomplete": batch.incomplete,
            "feed": batch.feed.name.lower(),
            "body": _body_datum(batch.body),
        }
    )


def decode_batch(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> EngineBatch:
    """Decode one record of kv-events; raises BadRecord."""
    datum = codec("kv-events").decode(raw, schema_ids)
    if not 1 <= datum["block_size"] <= _I32_MAX:
        raise BadRecord("wrong_block_size", f"block size is {datum['block_size']}")
    if not 0 <= datum["n_unindexed"] <= _I32_MAX:
        raise BadRecord("bad_count", f"the number of unindexed blocks is {datum['n_unindexed']}")
    body = _body(datum["body"])
    if datum["sequence"] < 0 and not (datum["sequence"] == BEFORE_FIRST and _has_no_blocks(body)):
        raise BadRecord("bad_sequence", f"sequence is {datum['sequence']}")
    return EngineBatch(
        rank=_rank(datum),
        model=datum["model"],
        block_size=datum["block_size"],
        incarnation=Incarnation(from_long(datum["incarnation"])),
        sequence=datum["sequence"],
        digest=from_hash(datum["digest"]) or 0,
        emitted_at_ms=datum["emitted_at_ms"],
        body=body,
        n_unindexed=datum["n_unindexed"],
        incomplete=datum["incomplete"],
        feed=FeedState[datum["feed"].upper()],
    )


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


def decode_batch_or_error(value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> EngineBatch | BadRecord:
    """Decode a record of kv-events as `decode_batch` does, and return the error of a bad one instead of raising it."""
    try:
        return decode_batch(value, schema_ids)
    except BadRecord as exc:
        return exc


def encode_resync(request: ResyncRequest) -> bytes:
    """Encode one record of kv-control."""
    return codec("kv-control").encode(
        {
            "worker_id": to_long(request.rank.worker_id),
            "dp_rank": request.rank.dp_rank,
            "incarnation": to_long(request.incarnation),
            "sequence": request.sequence,
            "attempt": request.attempt,
            "reason": request.reason,
            "asked_at_ms": request.asked_at_ms,
        }
    )


def decode_resync(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> ResyncRequest:
    """Decode one record of kv-control; raises BadRecord."""
    datum = codec("kv-control").decode(raw, schema_ids)
    if datum["sequence"] < BEFORE_FIRST or datum["attempt"] < 1:
        raise BadRecord("bad_resync", f"attempt {datum['attempt']} after batch {datum['sequence']}")
    return ResyncRequest(
        rank=_rank(datum),
        incarnation=Incarnation(from_long(datum["incarnation"])),
        sequence=datum["sequence"],
        attempt=datum["attempt"],
        reason=datum["reason"],
        asked_at_ms=datum["asked_at_ms"],
    )


def encode_worker(worker: Worker) -> bytes:
    """Encode one record of workers."""
    lora_names = None if worker.lora_names is None else list(worker.lora_names)  # a tuple in a union is a named value
    return codec("workers").encode({**asdict(worker), "worker_id": to_long(worker.worker_id), "lora_names": lora_names})


def decode_worker(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> Worker:
    """Decode one record of workers; raises BadRecord."""
    datum = codec("workers").decode(raw, schema_ids)
    try:
        return Worker(
            worker_id=WorkerId(from_long(datum["worker_id"])),
            url=datum["url"],
            model=datum["model"],
            block_size=datum["block_size"],
            dp_size=datum["dp_size"],
            role=Role(datum["role"]),
            state=WorkerState(datum["state"]),
            kv_total_blocks=datum["kv_total_blocks"],
            max_requests=datum["max_requests"],
            device_class=datum["device_class"],
            taints=tuple(datum["taints"]),
            lora_names=None if datum["lora_names"] is None else tuple(datum["lora_names"]),
            events_endpoint=datum["events_endpoint"],
            replay_endpoint=datum["replay_endpoint"],
            registered_at_ms=datum["registered_at_ms"],
            lease=_lease(datum["lease"]),
        )
    except InvalidRequest as exc:
        raise BadRecord("bad_worker", exc.message) from exc


def _lease(datum: dict[str, Any] | None) -> BridgeLease | None:
    if datum is None:
        return None
    if min(datum["term"], datum["lease_ms"], datum["renewal"]) < 0:
        raise BadRecord("bad_lease", f"term {datum['term']}, {datum['lease_ms']} ms, renewal {datum['renewal']}")
    return BridgeLease(datum["bridge"], datum["term"], datum["lease_ms"], datum["renewal"])


#: Prefixes of the keys that the topic `workers` has in addition to worker ids.
AVOID_KEY_PREFIX = b"avoid/"
CORDON_KEY_PREFIX = b"cordon/"
MODEL_KEY_PREFIX = b"model/"
RENDER_KEY_PREFIX = b"render/"


def cordon_key(worker_id: WorkerId) -> bytes:
    """Return the key of a worker's cordon in the topic workers."""
    return CORDON_KEY_PREFIX + str(worker_id).encode()


def parse_cordon_key(key: bytes) -> WorkerId:
    """Return the worker whose cordon has this key; raises BadRecord."""
    return _worker_of_key(key, CORDON_KEY_PREFIX, "a cordon")


def _worker_of_key(key: bytes, prefix: bytes, what: str) -> WorkerId:
    text = key.removeprefix(prefix)
    worker_id = WorkerId(int(text)) if text.isdigit() and len(text) <= _U64_DIGITS else None
    if worker_id is None or worker_id > U64_MASK or prefix + str(worker_id).encode() != key:
        raise BadRecord("bad_key", f"{key!r} is not the key of {what}")
    return worker_id


def encode_cordon(cordon: Cordon) -> bytes:
    """Encode one cordon of the topic workers."""
    return codec("cordons").encode({**asdict(cordon), "worker_id": to_long(cordon.worker_id)})


def decode_cordon(key: bytes, value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> Cordon:
    """Decode one cordon of the topic workers; raises BadRecord, also if its key is not the worker's own."""
    datum = codec("cordons").decode(value, schema_ids)
    cordon = Cordon(WorkerId(from_long(datum["worker_id"])), datum["cordoned_at_ms"])
    if parse_cordon_key(key) != cordon.worker_id:
        raise BadRecord("wrong_key", f"key {key!r} is not that of the cordon of worker {cordon.worker_id}")
    return cordon


def avoid_key(worker_id: WorkerId) -> bytes:
    """Return the key of a worker's avoidance in the topic workers."""
    return AVOID_KEY_PREFIX + str(worker_id).encode()


def parse_avoid_key(key: bytes) -> WorkerId:
    """Return the worker whose avoidance has this key; raises BadRecord."""
    return _worker_of_key(key, AVOID_KEY_PREFIX, "an avoidance")


def encode_avoidance(avoidance: Avoidance) -> bytes:
    """Encode one avoidance of the topic workers."""
    return codec("avoidances").encode({**asdict(avoidance), "worker_id": to_long(avoidance.worker_id)})


def decode_avoidance(key: bytes, value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> Avoidance:
    """Decode one avoidance of the topic workers; raises BadRecord, also if its key is not the worker's own."""
    datum = codec("avoidances").decode(value, schema_ids)
    try:
        avoidance = Avoidance(WorkerId(from_long(datum["worker_id"])), datum["avoided_at_ms"], datum["ttl_ms"])
    except InvalidRequest as exc:
        raise BadRecord("bad_avoidance", exc.message) from exc
    if parse_avoid_key(key) != avoidance.worker_id:
        raise BadRecord("wrong_key", f"key {key!r} is not that of the avoidance of worker {avoidance.worker_id}")
    return avoidance


def render_key(worker_id: WorkerId) -> bytes:
    """Return the key of a worker's render parity in the topic workers."""
    return RENDER_KEY_PREFIX + str(worker_id).encode()


def parse_render_key(key: bytes) -> WorkerId:
    """Return the worker whose render parity has this key; raises BadRecord."""
    return _worker_of_key(key, RENDER_KEY_PREFIX, "a render parity")


def encode_render(parity: RenderParity) -> bytes:
    """Encode one render parity of the topic workers."""
    result = parity.result
    return codec("render-parities").encode(
        {
            "worker_id": to_long(parity.worker_id),
            "incarnation": None if parity.incarnation is None else to_long(parity.incarnation),
            "url": parity.url,
            "model": parity.model,
            "outcome": result.outcome.value,
            "reason": None if result.reason is None else result.reason.value,
            "part": None if result.part is None else result.part.value,
            "from_token": result.from_token,
            "probed_at_ms": parity.probed_at_ms,
            "probed_by": parity.probed_by,
        }
    )


def decode_render(key: bytes, value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> RenderParity:
    """Decode one render parity of the topic workers; raises BadRecord, also if its key is not the worker's own."""
    datum = codec("render-parities").decode(value, schema_ids)
    incarnation, reason, part = datum["incarnation"], datum["reason"], datum["part"]
    try:
        result = RenderResult(
            RenderOutcome(datum["outcome"]),
            None if reason is None else RenderReason(reason),
            None if part is None else RenderPart(part),
            datum["from_token"],
        )
    except (ValueError, InvalidRequest) as exc:
        raise BadRecord("bad_render_parity", str(exc)) from exc
    worker_id = WorkerId(from_long(datum["worker_id"]))
    if parse_render_key(key) != worker_id:
        raise BadRecord("wrong_key", f"key {key!r} is not that of the render parity of worker {worker_id}")
    return RenderParity(
        worker_id,
        None if incarnation is None else Incarnation(from_long(incarnation)),
        datum["url"],
        datum["model"],
        result,
        datum["probed_at_ms"],
        datum["probed_by"],
    )


def model_key(name: str) -> bytes:
    """Return the key of a model's record in the topic workers."""
    return MODEL_KEY_PREFIX + name.encode(errors="replace")


def encode_model(model: ServedModel) -> bytes:
    """Encode one model of the topic workers."""
    return codec("models").encode(asdict(model))


def decode_model(key: bytes, value: bytes | None, schema_ids: Mapping[str, int] | None = None) -> ServedModel:
    """Decode one model of the topic workers; raises BadRecord, also if its key is not the model's own."""
    datum = codec("models").decode(value, schema_ids)
    try:
        model = ServedModel(datum["name"], datum["block_size"], datum["writer"], datum["written_at_ms"])
    except InvalidRequest as exc:
        raise BadRecord("bad_model", exc.message) from exc
    if model_key(model.name) != key:
        raise BadRecord("wrong_key", f"key {key!r} is not that of model {model.name!r}")
    return model


def encode_metrics(report: MetricsReport) -> bytes:
    """Encode one record of worker-metrics."""
    return codec("worker-metrics").encode(
        {
            "worker_id": to_long(report.rank.worker_id),
            "dp_rank": report.rank.dp_rank,
            "scraped_at_ms": report.scraped_at_ms,
            "ttl_ms": report.ttl_ms,
            "n_scrapes_failed": report.n_scrapes_failed,
            **asdict(report.metrics),
        }
    )


PULSE_KEY_PREFIX = b"bridge/"


def pulse_key(bridge: str) -> bytes:
    """Return the key of a bridge's pulses in worker-metrics."""
    return PULSE_KEY_PREFIX + bridge.encode()


def encode_pulse(pulse: BridgePulse) -> bytes:
    """Encode one pulse of worker-metrics."""
    fed = None if pulse.fed is None else [to_long(worker_id) for worker_id in pulse.fed]
    return codec("bridge-pulses").encode({"bridge": pulse.bridge, "number": pulse.number, "fed": fed})


def decode_pulse(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> BridgePulse:
    """Decode one pulse of worker-metrics; raises BadRecord."""
    datum = codec("bridge-pulses").decode(raw, schema_ids)
    listed = datum["fed"]
    fed = None if listed is None else tuple(WorkerId(from_long(worker_id)) for worker_id in listed)
    return BridgePulse(datum["bridge"], datum["number"], fed)


_METRIC_COUNTS = (
    "num_requests_waiting",
    "request_active_slots",
    "request_total_slots",
    "kv_active_blocks",
    "kv_total_blocks",
)


def decode_metrics(raw: bytes | None, schema_ids: Mapping[str, int] | None = None) -> MetricsReport:
    """Decode one record of worker-metrics; raises BadRecord."""
    datum = codec("worker-metrics").decode(raw, schema_ids)
    usage, counts = datum["gpu_cache_usage_perc"], {name: datum[name] for name in _METRIC_COUNTS}
    if not 0.0 <= usage <= 1.0:  # also false for NaN
        raise BadRecord("bad_metrics", f"a cache usage of {usage} is not from 0 to 1")
    if min(counts.values()) < 0 or datum["n_scrapes_failed"] < 0:
        raise BadRecord("bad_metrics", f"a negative number: {counts}, {datum['n_scrapes_failed']} failed scrapes")
    if not 1 <= datum["ttl_ms"] <= METRICS_TTL_MS_MAX:
        raise BadRecord("bad_metrics", f"a TTL of {datum['ttl_ms']} ms is not from 1 to {METRICS_TTL_MS_MAX}")
    return MetricsReport(
        rank=_rank(datum),
        metrics=WorkerMetrics(gpu_cache_usage_perc=usage, **counts),
        ttl_ms=datum["ttl_ms"],
        scraped_at_ms=datum["scraped_at_ms"],
        n_scrapes_failed=datum["n_scrapes_failed"],
    )


_KEY_SEPARATOR = "\x1f"
_BOOKING_COUNTS = ("prefill_tokens", "request_blocks", "overlap_blocks", "output_blocks", *Forecast._fields)


def load_key(booking_id: BookingId, phase: BookingPhase) -> bytes:
    """Return the key of one phase's record of router-loads."""
    parts = (booking_id.request_id, booking_id.router_id, str(booking_id.counter), phase)
    return _KEY_SEPARATOR.join(parts).encode()


def encode_load(
    booking_id: BookingId, phase: BookingPhase, booking: Booking | None, written_at_ms: int
) -> tuple[bytes, bytes]:
    """Encode one record of router-loads; returns key and value."""
    value = codec("router-loads").encode(
        {
            "request_id": booking_id.request_id,
            "router_id": booking_id.router_id,
            "counter": booking_id.counter,
            "phase": phase.value,
            "written_at_ms": written_at_ms,
            "booking": None
            if booking is None
            else {
                "worker_id": to_long(booking.rank.worker_id),
                "dp_rank": booking.rank.dp_rank,
                "model": booking.model,
                "prefill_tokens": booking.prefill_tokens,
                "request_blocks": booking.request_blocks,
                "overlap_blocks": booking.overlap_blocks,
                "sequence_hashes": booking.sequence,
                "expected_output_tokens": booking.expected_output_tokens,
                "output_blocks": booking.output_blocks,
                "phase": booking.phase,
                "prefill_us": booking.forecast.prefill_us,
                "prefilled_within_ms": booking.forecast.prefilled_within_ms,
                "over_within_ms": booking.forecast.over_within_ms,
                "load_us": booking.forecast.load_us,
            },
        }
    )
    return load_key(booking_id, phase), value


def decode_load(
    raw: bytes | None, schema_ids: Mapping[str, int] | None = None
) -> tuple[BookingId, BookingPhase, Booking | None]:
    """Decode one record of router-loads; raises BadRecord."""
    datum = codec("router-loads").decode(raw, schema_ids)
    booking_id = BookingId(datum["request_id"], datum["router_id"], datum["counter"])
    phase = BookingPhase(datum["phase"])
    found = datum["booking"]
    if (phase is BookingPhase.ADD) != (found is not None):
        raise BadRecord("bad_booking", f"phase {phase.value} {'lacks' if found is None else 'has'} a booking")
    if found is None:
        return booking_id, phase, None
    counts = [found[name] for name in _BOOKING_COUNTS]
    if min(*counts, found["expected_output_tokens"] or 0) < 0:
        raise BadRecord("bad_booking", f"a booking with a negative number: {counts}")
    if max(*counts, found["expected_output_tokens"] or 0) > NUMBER_MAX:
        raise BadRecord("bad_booking", f"a booking with a number over {NUMBER_MAX}: {counts}")
    n_bytes = max(len(name.encode()) for name in (booking_id.request_id, booking_id.router_id, found["model"]))
    if n_bytes > NAME_BYTES_MAX:
        raise BadRecord("bad_booking", f"a booking with a name of {n_bytes} bytes, more than {NAME_BYTES_MAX}")
    return (
        booking_id,
        phase,
        Booking(
            rank=_rank(found),
            model=found["model"],
            prefill_tokens=found["prefill_tokens"],
            sequence=pack_hashes(_hashes(found["sequence_hashes"])),
            overlap_blocks=found["overlap_blocks"],
            request_blocks=found["request_blocks"],
            expected_output_tokens=found["expected_output_tokens"],
            output_blocks=found["output_blocks"],
            phase=found["phase"],
            forecast=Forecast(*[found[name] for name in Forecast._fields]),
        ),
    )


def _rank(datum: dict[str, Any]) -> RankId:
    # A greater rank would not fit in a key.
    if not 0 <= datum["dp_rank"] <= _I32_MAX:
        raise BadRecord("bad_rank", f"data-parallel rank is {datum['dp_rank']}")
    return RankId(WorkerId(from_long(datum["worker_id"])), DpRank(datum["dp_rank"]))


def _body_datum(body: Body) -> tuple[str, dict[str, Any]]:
    match body:
        case EngineEvents():
            return "io.kvstreams.EngineEvents", {"events": [_event_datum(event) for event in body.events]}
        case RestatementChunk():
            return "io.kvstreams.RestatementChunk", {
                "restatement_id": to_long(body.restatement_id),
                "chunk": body.chunk,
                "n_chunks": body.n_chunks,
                "exact": body.exact,
                "runs": [
                    {
                        "start": run.start,
                        "parent": to_hash(run.parent),
                        "engine_hashes": pack_hashes(run.engine),
                        "local_hashes": pack_hashes(run.local),
                        "tier": run.tier.name.lower(),
                        "facts": [
                            {
                                "first": each.first,
                                "n_blocks": each.n_blocks,
                                "moe": _labels_datum(each.moe),
                                "cxl_metadata": _cxl_datum(each.cxl),
                            }
                            for each in run.facts
                        ],
                    }
                    for run in body.runs
                ],
            }
        case WorkerRemoved():
            return "io.kvstreams.WorkerRemoved", {"reason": body.reason, "seen_sequence": body.seen_sequence}
        case Heartbeat():
            return "io.kvstreams.Heartbeat", {"bridge": body.bridge, "lease_ms": body.lease_ms}
        case _:
            assert_never(body)


def _event_datum(event: KvEvent) -> tuple[str, dict[str, Any]]:
    match event:
        case BlocksStored():
            return "io.kvstreams.BlocksStored", {
                "parent": to_hash(event.parent),
                "engine_hashes": pack_hashes(event.engine),
                "local_hashes": pack_hashes(event.local),
                "tier": event.tier.name.lower(),
                "moe": _labels_datum(event.moe),
                "cxl_metadata": _cxl_datum(event.cxl),
            }
        case BlocksRemoved():
            return "io.kvstreams.BlocksRemoved", {
                "engine_hashes": pack_hashes(event.engine),
                "tier": event.tier.name.lower(),
            }
        case AllBlocksCleared():
            return "io.kvstreams.AllBlocksCleared", {}
        case _:
            assert_never(event)


def _labels_datum(moe: MoeLabels | None) -> dict[str, Any] | None:
    if moe is None:
        return None
    return {"layer_id": moe.layer_id, "expert_id": moe.expert_id, "expert_group": moe.expert_group}


def _cxl_datum(cxl: CxlMemoryMetadata | None) -> dict[str, Any] | None:
    if cxl is None:
        return None
    return {
        "state": cxl.state.value,
        "pool_id": cxl.pool_id,
        "accessible_workers": [to_long(worker) for worker in cxl.accessible_workers],
    }


def _body(datum: dict[str, Any]) -> Body:
    """Decode a body; its type is recognised by its fields, because fastavro does not return the union's branch."""
    if "events" in datum:
        return EngineEvents(tuple(_event(event) for event in datum["events"]))
    if "runs" in datum:
        if not 0 <= datum["chunk"] < datum["n_chunks"] <= _I32_MAX:
            raise BadRecord("bad_restatement", f"chunk {datum['chunk']} of {datum['n_chunks']}")
        return RestatementChunk(
            restatement_id=from_long(datum["restatement_id"]),
            chunk=datum["chunk"],
            n_chunks=datum["n_chunks"],
            exact=datum["exact"],
            runs=tuple(_restated(run) for run in datum["runs"]),
        )
    if "lease_ms" in datum:
        if not 1 <= datum["lease_ms"] <= _I32_MAX:
            raise BadRecord("bad_lease", f"a lease of {datum['lease_ms']} ms is too short or too long")
        return Heartbeat(datum["bridge"], datum["lease_ms"])
    return WorkerRemoved(datum["reason"], datum["seen_sequence"])


def _restated(datum: dict[str, Any]) -> RestatedRun:
    engine, local = _paired(datum)
    parent = from_hash(datum["parent"])
    if not 0 <= datum["start"] <= _I32_MAX or (datum["start"] == 0) != (parent is None):
        raise BadRecord("bad_restatement", f"a run at position {datum['start']} has parent {parent}")
    return RestatedRun(
        start=datum["start"],
        parent=None if parent is None else SequenceHash(parent),
        engine=engine,
        local=local,
        tier=Tier[datum["tier"].upper()],
        facts=_block_facts(datum["facts"], len(local)),
    )


def _block_facts(facts: list[dict[str, Any]], n_blocks: int) -> tuple[BlockFacts, ...]:
    end = 0
    for each in facts:
        if each["first"] < end or each["n_blocks"] < 1:
            raise BadRecord("bad_restatement", f"labels of {each['n_blocks']} blocks from {each['first']} after {end}")
        end = each["first"] + each["n_blocks"]
    if end > n_blocks:
        raise BadRecord("bad_restatement", f"labels of blocks up to {end} in a run of {n_blocks}")
    return tuple(
        BlockFacts(each["first"], each["n_blocks"], _labels(each["moe"]), _cxl_metadata(each["cxl_metadata"]))
        for each in facts
    )


def _event(datum: dict[str, Any]) -> KvEvent:
    if "local_hashes" in datum:
        engine, local = _paired(datum)
        parent = from_hash(datum["parent"])
        return BlocksStored(
            parent=None if parent is None else EngineHash(parent),
            engine=engine,
            local=local,
            tier=Tier[datum["tier"].upper()],
            moe=_labels(datum["moe"]),
            cxl=_cxl_metadata(datum["cxl_metadata"]),
        )
    if "engine_hashes" in datum:
        return BlocksRemoved(_hashes(datum["engine_hashes"]), Tier[datum["tier"].upper()])
    return AllBlocksCleared()


def _labels(datum: dict[str, Any] | None) -> MoeLabels | None:
    if datum is None:
        return None
    labels = MoeLabels(datum["layer_id"], datum["expert_id"], datum["expert_group"])
    check_labels(labels)
    return labels


def _cxl_metadata(datum: dict[str, Any] | None) -> CxlMemoryMetadata | None:
    if datum is None:
        return None
    try:
        return CxlMemoryMetadata(datum["state"], datum["pool_id"], tuple(map(from_long, datum["accessible_workers"])))
    except InvalidEvent as exc:
        raise BadRecord("bad_state", exc.message) from exc


def _paired(datum: dict[str, Any]) -> tuple[HashArray, HashArray]:
    engine, local = _hashes(datum["engine_hashes"]), _hashes(datum["local_hashes"])
    if len(engine) != len(local):
        raise BadRecord("bad_hashes", f"{len(engine)} engine hashes for {len(local)} local hashes")
    return engine, local


def _hashes(packed: bytes) -> HashArray:
    try:
        return unpack_hashes(packed)
    except InvalidRequest as exc:
        raise BadRecord("bad_hashes", exc.message, **exc.detail) from exc
