"""The state that every router must reach, and the tracing of differences from it.

What lives here: engines that publish a history, and apply it to the reference once the broker has acknowledged it;
comparing a router with the reference; tracing each block that differs through source, changelog and RocksDB. What must
not: faults, which `chaos` and the tests choose.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from streams.core.events import EngineBatch
from streams.core.ids import DpRank, Incarnation, RankId, Tier, WorkerId
from streams.core.runs import Run
from streams.errors import BadRecord, KvStreamsError
from streams.kafka.clients import Record, partition_of, producer
from streams.kafka.records import decode_batch, encode_batch
from streams.lab.stack import Fact, facts, get_json
from streams.process.waiting import wait_for
from streams.settings import Settings
from streams.tables.changelog import read_to_end
from streams.tables.index_reducer import prefix_index_table
from streams.tables.records import PROGRESS_KEY, RUN_KEY, decode_progress, decode_run
from streams.tables.store import PartitionStore
from streams.topics import topics
from tests.helpers.reference import ReferenceFleet, random_history
from tests.helpers.support import DUMP_POLL_S, VISIBLE_TIMEOUT_S

#: Blocks that are traced if a router differs; tracing more of them would show the same fault again.
FOLLOWED_MAX = 5

#: Batches in one piece of a history, and a number that is greater than the incarnations of any engine in one piece.
PIECE_BATCHES = 5_000
PIECE_INCARNATIONS = 1_000_000

_PUBLISH_TIMEOUT_S = 60.0


class Engines:
    """Engines that publish a history, and the reference, to which every acknowledged batch is applied."""

    def __init__(self, settings: Settings, seed: int, n_batches: int = 4000) -> None:
        self._settings = settings
        self._kafka = producer(settings)
        self._published: list[EngineBatch] = []
        self.reference = ReferenceFleet()
        self.n_published = 0
        self.history = long_history(seed, n_batches)

    def publish(self, n: int) -> None:
        """Publish the next n batches of the history."""
        self._publish([next(self.history) for _ in range(n)])

    def publish_again(self, n: int) -> None:
        """Publish the last n batches again, as an engine does that has not seen them acknowledged."""
        self._publish(self._published[-n:])

    def _publish(self, batches: Sequence[EngineBatch]) -> None:
        failed: list[str] = []
        for batch in batches:
            self._kafka.produce(
                topics(self._settings).kv_events.name,
                key=str(batch.rank.worker_id).encode(),
                value=encode_batch(batch),
                on_delivery=lambda error, _: failed.append(error.str()) if error else None,
            )
            self._kafka.poll(0)
        assert self._kafka.flush(_PUBLISH_TIMEOUT_S) == 0
        assert not failed
        for batch in batches:
            self.reference.apply(batch)
        self.n_published += len(batches)
        self._published = [*self._published, *batches][-100:]

    @contextmanager
    def publishing(self, n: int) -> Iterator[None]:
        """Publish n batches while the block runs."""

        def publish() -> None:
            for _ in range(n // 10):
                self.publish(10)

        thread = threading.Thread(target=publish)
        thread.start()
        yield
        thread.join()


def long_history(seed: int, n_batches: int) -> Iterator[EngineBatch]:
    """Yield a history in pieces, each with new incarnations, since one long history would need too much memory."""
    rng = random.Random(seed)
    for number, begin in enumerate(range(0, n_batches, PIECE_BATCHES)):
        piece = random_history(rng, n_batches=min(PIECE_BATCHES, n_batches - begin), n_ranks=12, bridged=True)
        for batch in piece:
            yield replace(batch, incarnation=Incarnation(batch.incarnation + number * PIECE_INCARNATIONS))


class ExpectedRank(NamedTuple):
    """How far a rank's batches are applied; this shows whether a batch was applied twice, or not at all."""

    incarnation: int
    generation: int
    sequence: int
    unknown_parents: int


@dataclass(frozen=True)
class Truth:
    """The state that every router must have in the end."""

    facts: set[Fact]
    ranks: dict[tuple[int, int], ExpectedRank]


def truth_of(reference: ReferenceFleet) -> Truth:
    """Return what a reference holds."""
    return Truth(
        {(rank.worker_id, rank.dp_rank, int(tier), block) for rank, tier, block in reference.members()},
        {
            (rank.worker_id, rank.dp_rank): ExpectedRank(*state.epoch, state.sequence, state.n_unknown_parents)
            for rank, state in reference.ranks.items()
        },
    )


def view_of(url: str) -> Truth:
    """Return what a router holds."""
    ranks = {
        (rank["worker_id"], rank["dp_rank"]): ExpectedRank(
            rank["incarnation"], rank["generation"], rank["sequence"], rank["unknown_parents"]
        )
        for rank in get_json(f"{url}/state")["ranks"]
    }
    return Truth(facts(url), ranks)


def assert_equal(
    url: str,
    reference: ReferenceFleet,
    settings: Settings | None = None,
    data_dirs: Iterable[Path] = (),
    timeout_s: float = VISIBLE_TIMEOUT_S,
) -> None:
    """Wait until a router holds what the reference holds; raises AssertionError with the differences if it never does.

    settings: of the scope, if differences should be traced. data_dirs: those of workers that are not running.
    """
    expected = truth_of(reference)
    try:
        wait_for(lambda: view_of(url) == expected, timeout_s, f"{url} to be equal", DUMP_POLL_S)
    except KvStreamsError:
        found = view_of(url)
        if found != expected:
            lines = [] if settings is None else list(followed(settings, expected, found, data_dirs))
            raise AssertionError("\n".join([*differences(url, expected, found), *lines])) from None


def differences(name: str, expected: Truth, found: Truth) -> Iterator[str]:
    """Describe the facts and ranks by which a router differs from the expected state."""
    more, less = found.facts - expected.facts, expected.facts - found.facts
    yield f"{name}: {len(found.facts)} facts, not {len(expected.facts)}; {len(more)} too many, {len(less)} missing"
    for fact in sorted(more):
        yield f"  too many: {fact}"
    for fact in sorted(less):
        yield f"  missing: {fact}"
    for rank in sorted(expected.ranks.keys() | found.ranks.keys()):
        if expected.ranks.get(rank) != found.ranks.get(rank):
            yield f"  rank {rank}: {found.ranks.get(rank)}, not {expected.ranks.get(rank)}"


# -- tracing differences -------------------------------------------------------------------------------------------


def followed(settings: Settings, expected: Truth, found: Truth, data_dirs: Iterable[Path]) -> Iterator[str]:
    """Describe where blocks that differ occur in the source, the changelog and each RocksDB."""
    for fact in sorted(expected.facts ^ found.facts)[:FOLLOWED_MAX]:
        partition = partition_of(fact[0], settings.partitions)
        yield f"fact {fact}, partition {partition}"
        yield from (f"  source {line}" for line in _in_source(settings, partition, fact))
        yield from (f"  changelog {line}" for line in _in_changelog(settings, partition, fact))
        for data_dir in data_dirs:
            path = data_dir / "tables" / f"{settings.app_id}-{partition}"
            if path.is_dir():
                yield from (f"  RocksDB of {data_dir.name} {line}" for line in _in_store(settings, path, fact))


def _in_source(settings: Settings, partition: int, fact: Fact) -> Iterator[str]:
    """Describe the batches of kv-events that added or removed a block."""
    reference, held = ReferenceFleet(), False
    for record in _records(settings, topics(settings).kv_events.name, partition):
        batch = decode_batch(record.value)
        verdict = reference.apply(batch)
        rank = reference.ranks.get(_rank(fact))
        if rank is not None and ((Tier(fact[2]), fact[3]) in rank.facts) != held:
            held = not held
            what = type(batch.body).__name__
            yield (
                f"offset {record.offset}: {'added' if held else 'removed'} by {what} {batch.sequence} of "
                f"incarnation {batch.incarnation}, {verdict}"
            )


def _in_changelog(settings: Settings, partition: int, fact: Fact) -> Iterator[str]:
    """Describe every committed record of a run that has the block, and the rank's last progress."""
    keys: set[bytes] = set()
    progress = "no progress"
    for record in _records(settings, topics(settings).index_changelog.name, partition):
        if record.key.startswith(PROGRESS_KEY.pack(_rank(fact))) and record.value is not None:
            progress = f"offset {record.offset}: {decode_progress(record.key, record.value)}"
        elif record.key in keys and record.value is None:
            yield f"offset {record.offset}: {record.key.hex()} ends"
        elif record.key.startswith(RUN_KEY.prefix) and record.value is not None:
            line = _run_line(record.key, record.value, fact)
            if line is not None:
                keys.add(record.key)
                yield f"offset {record.offset}: {line}"
    yield progress


def _in_store(settings: Settings, path: Path, fact: Fact) -> Iterator[str]:
    """Describe the run records that have the block, and the rank's progress."""
    store = PartitionStore(path, path.name, settings.rocksdb_cache_mb)
    try:
        yield f"is at {store.position(prefix_index_table(settings))}"
        for key, value in store.items(prefix_index_table(settings)):
            if key == PROGRESS_KEY.pack(_rank(fact)):
                yield str(decode_progress(key, value))
            elif key.startswith(RUN_KEY.prefix):
                line = _run_line(key, value, fact)
                if line is not None:
                    yield line
    finally:
        store.close()


def _run_line(key: bytes, value: bytes, fact: Fact) -> str | None:
    """Describe a run record that has a block; None if it does not have it."""
    where = RUN_KEY.parse(key)
    if (where.rank.worker_id, where.rank.dp_rank, int(where.tier)) != fact[:3]:
        return None
    try:
        run: Run = decode_run(key, value)
    except BadRecord as exc:
        return f"{key.hex()} is bad: {exc}"
    if fact[3] not in run.sequence:
        return None
    held = run.present >> run.sequence.index(fact[3]) & 1
    return f"{key.hex()} of epoch {tuple(run.epoch)} {'holds' if held else 'does not hold'} it"


def _rank(fact: Fact) -> RankId:
    return RankId(WorkerId(fact[0]), DpRank(fact[1]))


def _records(settings: Settings, topic: str, partition: int) -> list[Record]:
    found: list[Record] = []
    read_to_end(settings, topic, partition, None, found.extend)
    return found
