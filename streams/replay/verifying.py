"""Comparing a router that runs with a replay of the topics, at the same offsets.

What lives here: asking the router, reading to the offsets that its answers include, and what differs. What must not:
digests and facts (router_api.deciding.state_digests), and HTTP (the caller passes a function).

A router applies its own bookings before the log has them, so a difference counts if it is found again at two later
offsets. Ranks whose digests differ are compared fact by fact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from streams.core.ids import DpRank, RankId, SequenceHash, WorkerId
from streams.core.loads.bookings import BookingId, BookingPhase
from streams.cxl.records import OWNER_KEY, BlockKey, block_key
from streams.errors import BadRecord, ProcessError
from streams.kafka.clients import Record, partition_of, partition_of_key
from streams.kafka.load_records import load_key, request_partition
from streams.kafka.log_offsets import Place
from streams.process.progress import Step
from streams.replay.cuts import Cut
from streams.replay.rebuilding import Replay
from streams.settings import ScopeSettings
from streams.tables.changelog import read_to_end
from streams.tables.records import PROGRESS_KEY, RUN_KEY, decode_run
from streams.topics import topics

#: Comparisons after which a difference counts, and the time between two of them. Owners write at least once per second,
#: so offsets are later each time; a router's record is in the log within a tenth of that.
ROUNDS = 3
ROUND_EVERY_S = 1.1

#: How long a router may be behind what was read here.
BEHIND_MAX_S = 30.0

#: A router copies its state for an answer, and shares the interpreter with decisions.
STATE_TIMEOUT_S = 60.0

#: Ranks that are compared fact by fact, and differences whose records are searched for. More would show the same fault.
RANKS_MAX = 16
TRACED_MAX = 20

#: Records that are named for each difference, the last ones.
RECORDS_MAX = 4

#: Gets a path of the router's API as JSON.
Get = Callable[[str], dict[str, Any]]


class Difference(NamedTuple):
    """A fact that the router and the replay do not have alike. rank: None for a record of the registry.

    kind: as in state_digests. about: a block with its tier, a booking and so on. router, replay: what each of them
    knows of it; None if it does not have the fact.
    """

    rank: RankId | None
    kind: str
    about: str
    router: str | None
    replay: str | None

    def __str__(self) -> str:
        whose = "the registry" if self.rank is None else f"rank {self.rank}"
        what = " ".join(filter(None, (self.kind, self.about)))
        return f"{whose}, {what}: the router has {_words(self.router)}, the topics have {_words(self.replay)}"


@dataclass(slots=True)
class Verification:
    """The result. offsets: at which the last comparison was made. records: by difference, those that it is about."""

    n_ranks: int
    offsets: Mapping[str, list[int]]
    differences: list[Difference] = field(default_factory=list)
    records: dict[Difference, list[str]] = field(default_factory=dict)


def as_values(result: Verification) -> dict[str, Any]:
    """A result as JSON has it."""
    return {
        "ranks": result.n_ranks,
        "offsets": result.offsets,
        "differences": [
            {
                "worker_id": None if each.rank is None else each.rank.worker_id,
                "dp_rank": None if each.rank is None else each.rank.dp_rank,
                **{name: getattr(each, name) for name in ("kind", "about", "router", "replay")},
                "records": result.records.get(each, []),
            }
            for each in result.differences
        ],
    }


def _words(known: str | None) -> str:
    return "nothing" if known is None else known or "it"


def verify(
    replay: Replay,
    get: Get,
    partitions: Collection[int] | None = None,
    step: Step | None = None,
) -> Verification:
    """Compare a router with the topics. Raises KvStreamsError if it cannot be asked, or serves some models only.

    partitions: those of the tables that are compared; None for all of them.
    """
    lasting: set[Difference] | None = None
    for number in range(ROUNDS):
        if number:
            time.sleep(ROUND_EVERY_S)
        compared = _Comparison(replay, get, partitions, step)
        found = set(compared.differences())
        lasting = found if lasting is None else lasting & found
        if not lasting:
            break
    result = Verification(compared.n_ranks, compared.offsets)
    result.differences = sorted(lasting or (), key=lambda each: (each.rank is not None, each.rank or (), each[1:3]))
    result.records = _records_of(replay, result.differences[:TRACED_MAX])
    return result


class _Comparison:
    """One comparison. offsets: at which the digests were compared. n_ranks: how many ranks."""

    def __init__(self, replay: Replay, get: Get, partitions: Collection[int] | None, step: Step | None) -> None:
        self._replay = replay
        self._get = get
        self._partitions = partitions
        self._begins = replay.cut.begins
        self._step = step
        self.n_ranks = 0
        self.offsets: Mapping[str, list[int]] = {}

    def differences(self) -> Iterator[Difference]:
        """What differs now."""
        theirs = self._asked("/state/digest")
        if theirs.get("models"):  # routers of before 0.1.0 do not say it
            raise ProcessError(
                "a router of some models cannot be compared with the topics, which have all of them",
                remedy="Compare one whose setting models has no value",
            )
        self.offsets = theirs["offsets"]
        ours = self._replay.router.state_digest()
        for key in sorted(theirs["registry"].keys() | ours["registry"].keys()):
            router, topic = theirs["registry"].get(key), ours["registry"].get(key)
            if router != topic:
                yield Difference(None, "record", key, *(each and f"digest {each}" for each in (router, topic)))
        there, here = self._ranks(theirs), self._ranks(ours)
        self.n_ranks = len(there.keys() | here.keys())
        differing = [rank for rank in sorted(there.keys() | here.keys()) if there.get(rank) != here.get(rank)]
        for rank in differing[:RANKS_MAX]:
            found = list(self._differing_facts(rank))
            yield from found
            if not found:
                yield from self._differing_digests(rank, there.get(rank, {}), here.get(rank, {}))

    def _ranks(self, state: Mapping[str, Any]) -> dict[RankId, dict[str, str]]:
        ranks = {
            RankId(WorkerId(each["worker_id"]), DpRank(each["dp_rank"])): each["digests"] for each in state["ranks"]
        }
        return {rank: digests for rank, digests in ranks.items() if self._is_compared(rank)}

    def _is_compared(self, rank: RankId) -> bool:
        n_partitions = self._replay.settings.partitions
        return self._partitions is None or partition_of(rank.worker_id, n_partitions) in self._partitions

    @staticmethod
    def _differing_digests(rank: RankId, there: Mapping[str, str], here: Mapping[str, str]) -> Iterator[Difference]:
        """What differs of a rank whose facts are the same: how many records have a fact. Bookings have one each."""
        for kind in sorted(there.keys() | here.keys()):
            if there.get(kind) != here.get(kind) and kind != "bookings":
                yield Difference(rank, f"digest of {kind}", "", "another one", "this one")

    def _differing_facts(self, rank: RankId) -> Iterator[Difference]:
        """What differs of a rank, at offsets of its own: the router goes on between two questions."""
        theirs = self._asked(f"/state/facts/{rank.worker_id}/{rank.dp_rank}")
        ours = self._replay.router.state_facts(rank)
        for kind, facts in theirs["facts"].items():
            here = {(about, known) for about, known in ours["facts"][kind]}
            there = {(about, known) for about, known in facts}
            for about in sorted({about for about, _ in here ^ there}):
                router = sorted(known for name, known in there - here if name == about)
                topic = sorted(known for name, known in here - there if name == about)
                yield Difference(rank, kind, about, *(" ".join(each) if each else None for each in (router, topic)))

    def _asked(self, path: str) -> dict[str, Any]:
        """Ask the router, and read on to the offsets of its answer."""
        until_s = time.monotonic() + BEHIND_MAX_S
        feeds = self._replay.router.feeds
        while True:
            answer = self._get(path)
            ends = _ends(answer["offsets"])
            places = [place for place in self._replay.places if self._is_read(place)]
            missing = {topic for topic, _ in places} - answer["offsets"].keys()
            if missing:
                raise ProcessError(
                    f"the router reads no topic {min(missing)}",
                    remedy="Use its settings: topic_prefix, kv_events, router_replica_sync and the others",
                )
            wanted = {place: ends[place] for place in places}
            if all(feeds.read_to(*place) <= end for place, end in wanted.items()):
                self._replay.advance(Cut(time.time_ns() // 1_000_000, self._begins, wanted), self._step)
                return answer
            if time.monotonic() > until_s:
                raise ProcessError(
                    f"the router is behind the topics for more than {BEHIND_MAX_S:g} s",
                    remedy="`kvstreams doctor --router URL` says what is wrong with it",
                )
            time.sleep(0.2)

    def _is_read(self, place: Place) -> bool:
        """Whether a partition is read: of the tables only those that are compared."""
        known = topics(self._replay.settings)
        of_tables = place[0] in (known.index_changelog.name, known.cxl_changelog.name)
        if place[0] == known.worker_metrics.name:
            return False  # reports depend on when they were received
        return self._partitions is None or not of_tables or place[1] in self._partitions


def _ends(offsets: Mapping[str, list[int]]) -> dict[Place, int]:
    return {(topic, partition): end for topic, ends in offsets.items() for partition, end in enumerate(ends)}


# -- the records concerned -----------------------------------------------------------------------------------------


def _records_of(replay: Replay, differences: Collection[Difference]) -> dict[Difference, list[str]]:
    """Find the last records of each difference, with what they say."""
    found: dict[Difference, list[str]] = {difference: [] for difference in differences}
    by_place: dict[Place, list[Difference]] = {}
    for difference in differences:
        by_place.setdefault(_place_of(replay.settings, difference), []).append(difference)
    for (topic, partition), here in by_place.items():
        for record in _records(replay, topic, partition):
            for difference in here:
                said = _said_of(record, difference)
                if said is not None:
                    found[difference].append(f"{topic} [{partition}] at {record.offset}: {said}")
    return {difference: lines[-RECORDS_MAX:] for difference, lines in found.items()}


def _records(replay: Replay, topic: str, partition: int) -> list[Record]:
    records: list[Record] = []
    end = replay.cut.ends.get((topic, partition), 0)
    read_to_end(replay.settings, topic, partition, None, lambda some: records.extend(r for r in some if r.offset < end))
    return records


def _place_of(settings: ScopeSettings, difference: Difference) -> Place:
    known, n = topics(settings), settings.partitions
    if difference.rank is None:
        return known.workers.name, partition_of_key(difference.about.encode(), n)
    if difference.kind == "bookings":
        return known.router_loads.name, request_partition(_booking_id(difference.about).request_id, n)
    table = known.cxl_changelog if difference.kind == "pooled" else known.index_changelog
    return table.name, partition_of(difference.rank.worker_id, n)


def _booking_id(about: str) -> BookingId:
    request_id, router_id, counter = about.rsplit(" ", 2)
    return BookingId(request_id, router_id, int(counter))


def _said_of(record: Record, difference: Difference) -> str | None:
    """What a record says about a difference; None if it is about something else."""
    rank, kind, about = difference[:3]
    if rank is None:
        return _written(record) if record.key == about.encode() else None
    if kind == "bookings":
        booking_id = _booking_id(about)
        phases = {load_key(booking_id, phase): phase for phase in BookingPhase}
        return f"{phases[record.key]}, {_written(record)}" if record.key in phases else None
    if kind == "pooled":
        block, _, pool_id = about.partition(" ")
        row = block_key(BlockKey(SequenceHash(int(block)), rank, pool_id)) if block else OWNER_KEY.pack(rank)
        return _written(record) if record.key == row else None
    if kind.startswith("digest"):
        return None
    if kind == "progress":
        return _written(record) if record.key == PROGRESS_KEY.pack(rank) else None
    return _said_of_block(record, rank, int(about.split(" ")[-1]))


def _said_of_block(record: Record, rank: RankId, block: int) -> str | None:
    """What a run record says about a block; None if it is another run."""
    if not record.key.startswith(RUN_KEY.prefix):
        return None
    try:
        where = RUN_KEY.parse(record.key)
        if where.rank != rank:
            return None
        if record.value is None:
            return f"run {where.first} ends" if where.first == block else None
        run = decode_run(record.key, record.value)
    except BadRecord:
        return None
    if block not in run.sequence:
        return None
    number = run.sequence.index(SequenceHash(block))
    held = "holds it" if run.present >> number & 1 else "does not hold it"
    labels = f", {run.moe[number]}" if number in run.moe else ""
    return f"run {where.first} of epoch {tuple(run.epoch)} {held}{labels}"


def _written(record: Record) -> str:
    return "a tombstone" if record.value is None else f"a value of {len(record.value)} bytes"
