"""A scope's state as JSON lines, each of which can be read without any other (docs/replay.md).

What lives here: what a line contains. What must not: reading the tables (partition_tables) and folding records
(rebuilding).

Numbers are whole, and up to 2^64 - 1. Hashes are those of docs/architecture.md; there are no tokens and no text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from streams.core.events import LABEL_NAMES, RestatedRun
from streams.core.hashing import sequence_hashes, unpack_hashes
from streams.core.ids import RankId
from streams.core.loads.bookings import Booking, BookingId
from streams.core.reducer.ordering import Progress
from streams.core.workers import Avoidance, Cordon, ServedModel, Worker
from streams.cxl.events import CxlPool
from streams.cxl.records import BlockKey, BlockRow
from streams.errors import InvalidRequest
from streams.kafka.records import CORDONS
from streams.process.progress import Step
from streams.replay.partition_tables import PartitionTables, read_tables
from streams.replay.rebuilding import Replay
from streams.replay.summary import offsets_of

#: Grows when a reader of older lines would misunderstand newer ones.
FORMAT = 1

#: The kind of a line about a record of the registry, by the type of the record.
_KINDS = {Worker: "worker", Cordon: "cordon", Avoidance: "avoidance", ServedModel: "model", CxlPool: "pool"}

#: Fields of such records that a line leaves out: a lease belongs to a bridge of this scope, a cordon is a line of its
#: own, and a router knows no time of it.
_LEFT_OUT = ("lease", "state", "cordoned_at_ms")

#: A line, before it is encoded.
Line = dict[str, Any]

_encode = msgspec.json.Encoder().encode


def state_lines(replay: Replay, step: Step | None = None) -> Iterator[Line]:
    """Return the lines of everything that a replay has. Reads the tables again, a partition at a time.

    step: shows how many partitions have been read. Raises TableError.
    """
    cut, n_lines = replay.cut, 1
    yield {
        "kind": "scope",
        "format": FORMAT,
        "app_id": replay.settings.app_id,
        "moment_ms": cut.moment_ms,
        "offsets": offsets_of(cut),
    }
    for line in _lines(replay, step):
        n_lines += 1
        yield line
    yield {"kind": "end", "lines": n_lines + 1}


def write_lines(replay: Replay, file: Path, step: Step | None = None) -> None:
    """Write the lines to a file; see state_lines. Raises InvalidRequest if the file cannot be written."""
    try:
        with file.open("wb") as lines:
            lines.writelines(_encode(line) + b"\n" for line in state_lines(replay, step))
    except OSError as exc:
        raise InvalidRequest(
            f"{file} cannot be written: {exc.strerror}", remedy="It is not complete, as its last line shows"
        ) from exc


def _lines(replay: Replay, step: Step | None) -> Iterator[Line]:
    router, settings = replay.router, replay.settings
    fleet = router.view.fleet
    for key, record in fleet.registry().items():
        known = Cordon(CORDONS.keys.parse(key.encode())) if record is True else record
        yield registry_line(known)
    yield from (registry_line(record) for record in (*fleet.avoidances, *router.view.facts.pools().values()))
    changelogs = {topic for topic, _ in replay.cut.ends if topic.endswith("-changelog")}
    for partition in range(settings.partitions if changelogs else 0):
        ends = {topic: end for (topic, number), end in replay.cut.ends.items() if number == partition}
        yield from table_lines(read_tables(settings, partition, ends))
        if step is not None:
            step.update(partition + 1, "partitions written", settings.partitions)
    with router.loads.locked() as loads:
        bookings = loads.logged_bookings()
    yield from (booking_line(*booking) for booking in bookings)


def registry_line(record: object) -> Line:
    """The line of a record of the registry: the fields of docs/topics.md, without a bridge's lease."""
    fields: Line = msgspec.to_builtins(record)
    for name in _LEFT_OUT:
        fields.pop(name, None)
    return {"kind": _KINDS[type(record)], **fields}


def table_lines(tables: PartitionTables) -> Iterator[Line]:
    """The lines of a partition's ranks: each rank before its blocks, parents before children; then pooled blocks."""
    for found in tables.ranks():
        yield rank_line(found.progress)
        yield from (blocks_line(found.progress.rank, run) for run in found.ledger.restated())
    yield from (pooled_line(block, row) for block, row in tables.pooled.items())


def rank_line(progress: Progress) -> Line:
    """The line of a rank: how far its batches are applied, and how far it can be trusted."""
    return {
        "kind": "rank",
        **progress.rank._asdict(),
        **progress.epoch._asdict(),
        "sequence": progress.sequence,
        "digest": progress.digest,
        "health": progress.health.name.lower(),
        "feed": progress.feed.name.lower(),
        "silent": progress.silent,
        "model": progress.model,
        "block_size": progress.block_size,
        "n_blocks": progress.n_blocks,
    }


def blocks_line(rank: RankId, run: RestatedRun) -> Line:
    """The line of consecutive blocks of one chain that a rank holds in one tier."""
    labels = [
        {"first": fact.first, "n_blocks": fact.n_blocks, **{name: getattr(fact.moe, name) for name in LABEL_NAMES}}
        for fact in run.facts
        if fact.moe is not None
    ]
    return {
        "kind": "blocks",
        **rank._asdict(),
        "tier": run.tier.name.lower(),
        "start": run.start,
        "parent": run.parent,
        "sequence_hashes": sequence_hashes(run.local, run.parent).tolist(),
        "local_hashes": run.local.tolist(),
        "engine_hashes": run.engine.tolist(),
        "labels": labels,
    }


def pooled_line(block: BlockKey, row: BlockRow) -> Line:
    """The line of one block of one owner in one CXL pool."""
    placement: Mapping[str, Any] = msgspec.to_builtins(row.placement)
    return {
        "kind": "pooled",
        **block.owner._asdict(),
        "sequence_hash": block.sequence,
        "parent": row.parent,
        "position": row.position,
        "engine_hash": row.engine,
        **placement,
    }


def booking_line(booking_id: BookingId, booking: Booking, is_prefilled: bool) -> Line:
    """The line of an active booking."""
    return {
        "kind": "booking",
        **booking_id._asdict(),
        **booking.rank._asdict(),
        "model": booking.model,
        "phase": booking.phase,
        "prefilled": is_prefilled,
        "prefill_tokens": booking.prefill_tokens,
        "overlap_blocks": booking.overlap_blocks,
        "request_blocks": booking.request_blocks,
        "output_blocks": booking.output_blocks,
        "expected_output_tokens": booking.expected_output_tokens,
        "sequence_hashes": unpack_hashes(booking.sequence).tolist(),
    }
