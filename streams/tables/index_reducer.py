"""The meaning of `kv-events`: the reducer of one partition's index table.

What lives here: which rule applies to each kind of record, and how progress, runs and parked chunks become rows. What
must not: transactions (partition), the rules themselves (core.reducer), Faust.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from streams.core.events import BEFORE_FIRST, EngineBatch, EngineEvents, Heartbeat, RestatementChunk, WorkerRemoved
from streams.core.ids import Epoch, Incarnation, RankId
from streams.core.reducer.holdings import Holdings
from streams.core.reducer.maintenance import RankMaintenance
from streams.core.reducer.ordering import Progress, Verdict
from streams.core.reducer.restatement import ChunkKey
from streams.errors import WRONG_BLOCK_SIZE, BadRecord
from streams.kafka.clients import partition_of, worker_key
from streams.kafka.outage import Repetitions, repeated
from streams.kafka.records import decode_batch, encode_batch, encode_resync
from streams.settings import AgentSettings
from streams.tables.event_decoding import decode_events
from streams.tables.records import CHUNK_KEY, PROGRESS_KEY, RUN_KEY, Change, decode_progress, encode_progress
from streams.tables.reducer import Outgoing, SourceRecord
from streams.tables.run_table import RunTable
from streams.tables.store import TableSpec
from streams.topics import PARKED_CHUNK_BYTES_MAX, PREFIX_INDEX, topics
from streams.warming import AGENT, warm

log = logging.getLogger(__name__)

#: Tombstones of ended epochs per transaction. The restart of a worker with a million blocks must not delay other ranks.
TOMBSTONES_PER_BATCH = 1000

#: Run records loaded with one call when a partition is opened.
LOAD_RECORDS = 4096

#: In the counter of verdicts: the rows that could not be read when the table was loaded.
BAD_TABLE_RECORD = "bad_table_record"

#: Ranks whose dead letter for a wrong block size is remembered. Beyond that, some ranks get a second one.
WRONG_SIZES_MAX = 65_536

#: Verdicts that are too common to be logged.
_USUAL = frozenset({Verdict.APPLIED, Verdict.RENEWED, Verdict.PARKED})


def prefix_index_table(settings: AgentSettings) -> TableSpec:
    """The table of runs, progress and partition records."""
    return TableSpec(PREFIX_INDEX, 1, topics(settings).index_changelog.name)


class IndexReducer:
    """The pure state of one partition's index table, and its records.

    verdicts: incremented for each record that is applied, for each unreadable row, and by maintenance ticks.
    """

    def __init__(
        self, settings: AgentSettings, verdicts: Counter[str], on_effect: Callable[[int], None] | None = None
    ) -> None:
        self._settings = settings
        self._table = prefix_index_table(settings)
        self._verdicts = verdicts
        warm(AGENT)  # before a partition is opened, so that no batch waits for a compiler
        self._runs = RunTable()
        self.holdings = Holdings(self._runs, on_effect)
        self._verdicts_logged = Repetitions()  # by verdict and rank
        self._wrong_sizes: dict[RankId, Incarnation] = {}  # incarnations with a dead letter for their block size
        self._maintenance = RankMaintenance(
            self.holdings,
            grace_ms=int(settings.worker_grace_s * 1000),
            clear_degraded_after_ms=int(settings.clear_degraded_after_s * 1000),
        )

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:
        """Start from the rows of the table, in order of their keys: parked chunks, progress, runs."""
        progress, parked, run = self._read_ranks(table, items)
        self.holdings.load(progress, (), parked)
        runs = [] if run is None else [run]
        n_strays = 0
        for row in items:
            runs.append(row)
            if len(runs) == LOAD_RECORDS:
                n_strays += self._load_runs(table, runs)
                runs.clear()
        n_strays += self._load_runs(table, runs)
        if n_strays:
            log.warning("%s: skipped %d runs of ranks that have no progress row", table.name, n_strays)

    def follow(self, table: TableSpec, changes: Sequence[Change]) -> None:
        """Take in the runs that the table's owner has written; of progress, only the epochs."""
        epochs: dict[RankId, Epoch | None] = {}
        runs: list[Change] = []
        for key, value in dict(changes).items():  # the last value of each key
            if key.startswith(RUN_KEY.prefix):
                runs.append((key, value))
            elif key.startswith(PROGRESS_KEY.prefix):
                try:
                    rank = PROGRESS_KEY.parse(key)
                    epochs[rank] = None if value is None else decode_progress(key, value).epoch
                except BadRecord as exc:
                    self._skip(table, exc)
        for bad in self._runs.follow(epochs, runs):
            self._skip(table, bad)

    def resume(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> bool:
        """Take in parked chunks and progress; the runs are there. False if they are not what progress says."""
        progress, parked, _ = self._read_ranks(table, items)
        self.holdings.progress = {each.rank: each for each in progress}
        self.holdings.parking.load(parked)
        self._runs.end_following()
        return all(self._runs.epoch(each.rank) == each.epoch for each in progress) and all(
            self._runs.n_blocks(each.rank) == each.n_blocks for each in progress
        )

    def _read_ranks(
        self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]
    ) -> tuple[list[Progress], list[tuple[ChunkKey, EngineBatch, int]], tuple[bytes, bytes] | None]:
        """Read the rows before the first run; returns progress, parked chunks, and the first run if there is one."""
        progress: list[Progress] = []
        parked: list[tuple[ChunkKey, EngineBatch, int]] = []
        for key, value in items:
            if key.startswith(RUN_KEY.prefix):
                return progress, parked, (key, value)
            try:
                if key.startswith(PROGRESS_KEY.prefix):
                    progress.append(decode_progress(key, value))
                elif key.startswith(CHUNK_KEY.prefix):
                    parked.append(self._decode_parked(key, value))
                else:
                    raise BadRecord("bad_key", f"{key.hex()} is not a key of this table")
            except BadRecord as exc:
                self._skip(table, exc)
        return progress, parked, None

    def _load_runs(self, table: TableSpec, runs: list[tuple[bytes, bytes]]) -> int:
        n_strays, bad = self._runs.load_records(runs)
        for _, exc in bad:
            self._skip(table, exc)
        return n_strays

    def _skip(self, table: TableSpec, exc: BadRecord) -> None:
        # A foreign writer wrote to the changelog. Nothing stops because of it: without the row, the index can only
        # report fewer blocks than the rank holds.
        self._verdicts[BAD_TABLE_RECORD] += 1
        log.warning("%s: skipped a row: %s", table.name, exc)

    def _decode_parked(self, key: bytes, value: bytes) -> tuple[ChunkKey, EngineBatch, int]:
        batch = decode_batch(value, self._settings.schema_ids)
        if not isinstance(batch.body, RestatementChunk):
            raise BadRecord("bad_parked", f"the value of {key.hex()} is not a chunk of a restatement")
        return CHUNK_KEY.parse(key), batch, len(value)

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[EngineBatch | BadRecord]:
        """Effect 1: each record's batch, or the reason why it cannot be decoded."""
        return decode_events([record.value for record in records], self._settings.schema_ids)

    def apply(self, record: SourceRecord, decoded: EngineBatch | BadRecord) -> None:
        """Effects 2 to 4 of one record. Raises BadRecord for a dead letter."""
        if isinstance(decoded, BadRecord):
            raise decoded
        batch = decoded
        check_home(record, batch.rank.worker_id, self._settings)
        expected = self._settings.block_size_of(batch.model)
        if batch.block_size != expected and _has_blocks(batch):
            self._refuse(batch, expected)
            return
        match batch.body:
            case EngineEvents(events):
                verdict = self.holdings.apply(batch, events)  # 2 fence, 3 verdict, 4 apply
            case WorkerRemoved():
                verdict = self._remove(batch, batch.body)
            case Heartbeat():
                verdict = self.holdings.renew(batch, batch.body)
            case RestatementChunk():
                raw = record.value or b""
                if len(raw) > PARKED_CHUNK_BYTES_MAX:
                    raise BadRecord(
                        "bad_restatement", f"a chunk has {len(raw)} bytes; the limit is {PARKED_CHUNK_BYTES_MAX}"
                    )
                verdict = self.holdings.restate(batch, raw)
            case _:
                assert_never(batch.body)
        self._verdicts[verdict.value] += 1
        if verdict not in _USUAL:
            n = self._verdicts_logged.happened((verdict, batch.rank), time.monotonic())
            if n is not None:
                log.info(
                    "%s: batch %d of rank %s, incarnation %d%s",
                    verdict.value,
                    batch.sequence,
                    batch.rank,
                    batch.incarnation,
                    repeated(n),
                )

    def _refuse(self, batch: EngineBatch, expected: int) -> None:
        """Take a record whose blocks have another size than the scope's. Raises BadRecord for the first of each rank's
        incarnation; the following ones are only counted, since every further record of the rank is one."""
        verdict = self.holdings.refuse(batch)
        self._verdicts[verdict.value] += 1
        if verdict is Verdict.STALE or self._wrong_sizes.get(batch.rank) == batch.incarnation:
            return
        if len(self._wrong_sizes) >= WRONG_SIZES_MAX:
            self._wrong_sizes.clear()
        self._wrong_sizes[batch.rank] = batch.incarnation
        raise BadRecord(
            WRONG_BLOCK_SIZE,
            f"rank {batch.rank} has blocks of {batch.block_size} tokens; {batch.model} has {expected} here. Further "
            f"records of incarnation {batch.incarnation} are counted and not copied",
        )

    def _remove(self, batch: EngineBatch, removed: WorkerRemoved) -> Verdict:
        if removed.seen_sequence is None:
            return self.holdings.remove_worker(batch.rank.worker_id, batch.incarnation)
        return self.holdings.expire_worker(batch, removed.seen_sequence)

    @property
    def full(self) -> bool:
        """Whether the partition must commit before it applies more."""
        return self.holdings.full

    def source_lost(self) -> None:
        """Degrade every rank: records of the source were lost before this partition read them."""
        self.holdings.degrade_all()

    def tick(self, monotonic_ms: int, wall_ms: int, applied_until: Callable[[], int]) -> list[Outgoing]:
        """Return resync requests, and expiries; an expiry is applied when it is read back in order with other events.

        The arguments are those of `Reducer.tick`.
        """
        actions = self._maintenance.tick(monotonic_ms, wall_ms, applied_until)
        self._verdicts.update(actions.counts)
        names = topics(self._settings)
        for request in actions.requests:
            log.info(
                "requesting a restatement of rank %s, attempt %d: %s", request.rank, request.attempt, request.reason
            )
        for expiry in actions.expiries:
            log.warning("worker %s is removed: it was silent for too long", expiry.rank.worker_id)
        return [
            Outgoing(names.kv_control.name, worker_key(request.rank.worker_id), encode_resync(request))
            for request in actions.requests
        ] + [
            Outgoing(names.kv_events.name, worker_key(expiry.rank.worker_id), encode_batch(expiry))
            for expiry in actions.expiries
        ]

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        """Return an empty list: a record of this topic is refused when it is applied, and never later."""
        return []

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        """Take what changed since the last call.

        Progress comes first, since a new epoch tells readers to drop the runs of older ones.
        """
        changes = self.holdings.take_changes(TOMBSTONES_PER_BATCH)
        records: list[Change] = [
            (PROGRESS_KEY.pack(progress.rank), encode_progress(progress)) for progress in changes.progress
        ]
        records += [(CHUNK_KEY.pack(key), raw) for key, raw in changes.parked]
        records += changes.runs
        return {self._table: records}


def _has_blocks(batch: EngineBatch) -> bool:
    """Whether a record may contain blocks, which only the scope's block size makes comparable with a request's."""
    return batch.sequence != BEFORE_FIRST and isinstance(batch.body, EngineEvents | RestatementChunk)


def check_home(record: SourceRecord, worker_id: int, settings: AgentSettings) -> None:
    """Raise BadRecord for a record that does not have its worker's key, or is not in its worker's partition."""
    if record.key is not None and record.key != worker_key(worker_id):
        raise BadRecord("wrong_key", f"the record's key is not that of worker {worker_id}")
    home = partition_of(worker_id, settings.partitions)
    if record.partition != home:
        # If it were applied, two owners would each have a part of one rank. Producers that use librdkafka's default
        # partitioner write such records.
        raise BadRecord("wrong_partition", f"worker {worker_id} belongs in partition {home} (murmur2)")
