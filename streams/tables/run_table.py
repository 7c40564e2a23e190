"""The compiled store of runs: what the ranks of one partition hold. A change is a key and a value.

What lives here: memory, numbers for ranks, kernel calls. What must not: what an event does (core.reducer.kernels), and
the bytes of a record (kernels.runs). Tests compare it with a store in pure Python.

One thread uses a store. A block takes 24 bytes, at most twice that while its run grows, and two slots of 8 bytes in
maps that are at most 60 % full. Five million blocks of Mooncake's runs take about 400 MB.

State: what a partition's ranks hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from streams.core.events import KvEvent, RestatedRun
from streams.core.hashing import sequence_hashes
from streams.core.ids import U64_MASK, Epoch, Incarnation, RankId, SequenceHash
from streams.core.index.arenas import Arena
from streams.core.reducer.kernels import layout
from streams.core.reducer.kernels.changes import (
    add_stale,
    apply_rows,
    end_rank,
    next_stale,
    reserve_blocks,
    restate_run,
)
from streams.core.reducer.kernels.maps import move_entries
from streams.core.reducer.run_store import Applied
from streams.core.runs import Run
from streams.errors import BadRecord, IndexFull
from streams.tables.event_decoding import label_words, rows_of
from streams.tables.kernels.runs import (
    KEY_BYTES,
    RECORD_BYTES_MAX,
    drop_records,
    encode_dirty,
    encode_emptied,
    encode_stale,
    load_records,
)
from streams.tables.records import RUN_KEY, Change, decode_run, encode_run
from streams.tables.run_decoding import address_of, frame_header, join

#: The limits of a partition in runs, and in words of their blocks: 64 million blocks in runs of ten. This is only
#: address space until it is written to.
RUNS_MAX = 1 << 23
SPAN_WORDS_MAX = 1 << 29
STALE_MAX = 1 << 25
RANKS_MAX = 1 << 16

#: Initial slots of a map.
_SLOTS_FIRST = 1 << 12
#: Records that one kernel call writes or reads back.
_RECORDS_PER_CALL = 1024
#: Written tombstones that STALE keeps before the pending ones are moved to its front.
_STALE_SLACK = 1 << 16


class RunTable:
    """A `core.reducer.run_store.RunStore` of rows and bytes."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._context = Arena(layout.CONTEXT_WORDS * 8)
        self._arenas = {
            layout.RUNS: Arena(RUNS_MAX * layout.RUN_WORDS * 8),
            layout.SPANS: Arena(SPAN_WORDS_MAX * 8),
            layout.RANKS: Arena(RANKS_MAX * layout.RANK_WORDS * 8),
            layout.COLUMNS: Arena(RANKS_MAX * layout.N_TIERS * layout.COLUMN_WORDS * 8),
            layout.DIRTY: Arena(RUNS_MAX * 8),
            layout.EMPTIED: Arena(RUNS_MAX * 16),
            layout.STALE: Arena(STALE_MAX * 16),
        }
        words = self._context.words
        for word, arena in self._arenas.items():
            words[word] = arena.address
        words[layout.SALT] = secrets.randbits(63)
        words[layout.RUNS_MAX] = RUNS_MAX
        words[layout.SPAN_WORDS_MAX] = SPAN_WORDS_MAX
        words[layout.STALE_MAX] = STALE_MAX
        self._maps = {which: Arena(_SLOTS_FIRST * 8) for which in (layout.BY_ENGINE, layout.BY_SEQUENCE)}
        for which, arena in self._maps.items():
            words[which + layout.MAP_ADDRESS], words[which + layout.MAP_MASK] = arena.address, _SLOTS_FIRST - 1
        self._words = words
        self._at = self._context.address
        self._numbers: dict[RankId, int] = {}
        self._ranks = self._arenas[layout.RANKS].words.reshape(-1, layout.RANK_WORDS)
        self._columns = self._arenas[layout.COLUMNS].words.reshape(-1, layout.COLUMN_WORDS)
        self._out = np.empty(_RECORDS_PER_CALL * RECORD_BYTES_MAX, dtype=np.uint8)
        self._ends = np.empty(_RECORDS_PER_CALL + 1, dtype=np.int64)
        self._header = frame_header("prefix-index-run")
        self._stale: set[bytes] = set()  # while following: keys of rows whose epoch has ended

    # -- RunStore ---------------------------------------------------------------------------------------------

    def load(self, epochs: Mapping[RankId, Epoch], runs: Iterable[Run]) -> int:
        """See RunStore."""
        self.begin_load(epochs)
        records = [(RUN_KEY.pack(run.key), encode_run(run)) for run in runs]
        n_strays, bad = self.load_records(records)
        assert not bad
        return n_strays

    def end(self, rank: RankId, epoch: Epoch) -> None:
        """See RunStore."""
        number = self._number(rank)
        if int(self._words[layout.STALE_END] + self._words[layout.N_RUNS]) > STALE_MAX:
            raise IndexFull(f"rank {rank} cannot end: the limit of {STALE_MAX} pending tombstones is reached")
        end_rank(self._at, number)
        self._set_epoch(number, epoch)

    def apply(self, rank: RankId, events: Iterable[KvEvent]) -> Applied:
        """See RunStore. Raises IndexFull, having changed nothing."""
        table, address, kept = rows_of(events)
        number = self._number(rank)
        while (failure := apply_rows(self._at, number, address, len(table))) != 0:
            self._grow_maps(failure, int(table[:, layout.EVENT_BLOCKS].sum()))
        del kept  # not earlier, since the rows point into it
        n_parents, before_clear, n_removals, n_clears = self._words[layout.FOUND : layout.FOUND_END].tolist()
        if n_clears or n_parents or n_removals:
            return Applied(n_clears, n_parents, n_parents - before_clear, n_removals)
        return _NOTHING_FOUND

    def restate(self, rank: RankId, runs: Iterable[RestatedRun]) -> None:
        """See RunStore. Raises IndexFull."""
        number = self._number(rank)
        words = np.empty(layout.LABEL_WORDS, dtype=np.int64)
        for run in runs:
            engine = np.ascontiguousarray(run.engine, dtype=np.uint64)
            local = np.ascontiguousarray(run.local, dtype=np.uint64)
            chain = sequence_hashes(local, run.parent) if run.facts else local
            before = run.parent
            for first, end, moe in run.by_labels():
                if first:
                    before = SequenceHash(int(chain[first - 1]))
                if moe is not None:
                    words[:] = label_words(moe)
                while (
                    failure := restate_run(
                        self._at,
                        number,
                        int(run.tier),
                        run.start + first,
                        np.uint64(before or 0).view(np.int64).item(),
                        int(before is not None),
                        end - first,
                        engine.ctypes.data + first * 8,
                        local.ctypes.data + first * 8,
                        int(moe is not None),
                        words.ctypes.data,
                    )
                ) != 0:
                    self._grow_maps(failure, end - first)

    def n_blocks(self, rank: RankId) -> int:
        """See RunStore."""
        number = self._numbers.get(rank)
        if number is None:
            return 0
        first = number * layout.N_TIERS
        return int(self._columns[first : first + layout.N_TIERS, layout.COLUMN_HELD].sum())

    def take_changes(self, tombstones_max: int) -> list[Change]:
        """See RunStore; changes are keys and values as Kafka stores them, None for a tombstone."""
        changes: list[Change] = []
        out = self._out.ctypes.data
        n_emptied = int(self._words[layout.N_EMPTIED])
        for begin in range(0, n_emptied, _RECORDS_PER_CALL):
            changes += self._tombstones(encode_emptied(self._at, begin, out, _RECORDS_PER_CALL))
        self._words[layout.N_EMPTIED] = 0
        begin = 0
        while int(self._words[layout.N_DIRTY]):
            begin = encode_dirty(
                self._at, begin, out, self._out.nbytes, self._ends.ctypes.data, _RECORDS_PER_CALL, *self._header
            )
            written = int(self._ends[0])
            ends = self._ends[1 : written + 1].tolist()
            data = self._out[: ends[-1] if ends else 0].tobytes()
            record = 0
            for end in ends:
                changes.append((data[record : record + KEY_BYTES], data[record + KEY_BYTES : end]))
                record = end
        while tombstones_max > 0:
            written = encode_stale(self._at, out, min(tombstones_max, _RECORDS_PER_CALL))
            if not written:
                break
            changes += self._tombstones(written)
            tombstones_max -= written
        self._move_stale()
        return changes

    @property
    def has_pending_tombstones(self) -> bool:
        """See RunStore."""
        return next_stale(self._at) != 0

    # -- reading back -----------------------------------------------------------------------------------------

    def begin_load(self, epochs: Mapping[RankId, Epoch]) -> None:
        """Drop everything, and start with these ranks."""
        self._reset()
        for rank, epoch in epochs.items():
            self._set_epoch(self._number(rank), epoch)

    def load_records(self, records: Sequence[tuple[bytes, bytes]]) -> tuple[int, list[tuple[int, BadRecord]]]:
        """Load records that were read back, in any order; it is fastest if those of one rank are adjacent.

        Returns the number of records whose rank is unknown, and the position and error of each bad one.
        """
        data, lengths = join(records)
        n_blocks = len(data) // 16
        while (failure := reserve_blocks(self._at, n_blocks)) != 0:
            self._grow_maps(failure, n_blocks)
        labels = np.empty(layout.LABEL_WORDS, dtype=np.int64)
        others = load_records(
            self._at,
            address_of(data),
            lengths.ctypes.data,
            len(records),
            len(self._numbers),
            *self._header,
            labels.ctypes.data,
        )
        if not others:
            return 0, []
        fates = lengths[::2]
        n_strays, bad = int(np.count_nonzero(fates == 1)), []
        for position in np.flatnonzero(fates == 2).tolist():
            key, value = records[position]
            try:
                # Only a foreign writer's record is rejected by the kernel and accepted by decode_run. Once we have
                # encoded it again, the kernel accepts it, too.
                n_strays += self.load_records([(key, encode_run(decode_run(key, value)))])[0]
            except BadRecord as exc:
                bad.append((position, exc))
        return n_strays, bad

    # -- following another owner ------------------------------------------------------------------------------

    def follow(self, epochs: Mapping[RankId, Epoch | None], records: Sequence[Change]) -> list[BadRecord]:
        """Take in rows that another owner has written since they were loaded: one row for each key, in any order.

        epochs: of the ranks whose progress is among the rows, None for one that was deleted. Returns the errors of bad
        records.
        """
        for rank, epoch in epochs.items():
            if self.epoch(rank) != epoch:
                self.end(rank, epoch or _NO_EPOCH)
        for key, value in self._drop(records):
            # Compaction has removed the progress record that was written before it, and a later one follows.
            try:
                run = decode_run(key, value)
            except BadRecord:
                continue  # it is reported below
            known = self.epoch(run.key.rank)
            if known is None or known < run.epoch:
                self.end(run.key.rank, run.epoch)
        written = [(key, value) for key, value in records if value is not None]
        bad = [exc for _, exc in self.load_records(written)[1]]
        # The owner writes its pending tombstones in an order of its own, so they are kept by key.
        while n_keys := encode_stale(self._at, self._out.ctypes.data, _RECORDS_PER_CALL):
            self._stale.update(key for key, _ in self._tombstones(n_keys))
        self._move_stale()
        self._stale.difference_update(key for key, value in records if value is None)
        return bad

    def end_following(self) -> None:
        """Become the owner, which has to write the tombstones that are still pending."""
        for key in self._stale:
            rank, tier, first = RUN_KEY.parse(key)
            add_stale(self._at, self._number(rank) << 2 | tier, np.uint64(first).view(np.int64).item())
        self._stale.clear()

    def epoch(self, rank: RankId) -> Epoch | None:
        """Return a rank's epoch; None for an unknown rank."""
        number = self._numbers.get(rank)
        if number is None:
            return None
        incarnation, generation = self._ranks[number, layout.RANK_INCARNATION : layout.RANK_GENERATION + 1].tolist()
        return Epoch(Incarnation(incarnation & U64_MASK), generation)

    def _drop(self, records: Sequence[Change]) -> list[tuple[bytes, bytes]]:
        """Drop the runs with these keys; return the records of unknown ranks, or of newer epochs than their rank's."""
        data, lengths = join(records)
        newer = np.zeros(len(records), dtype=np.int64)
        n_newer = drop_records(
            self._at,
            address_of(data),
            lengths.ctypes.data,
            len(records),
            len(self._numbers),
            *self._header,
            newer.ctypes.data,
        )
        if not n_newer:
            return []
        return [(records[at][0], records[at][1] or b"") for at in np.flatnonzero(newer).tolist()]

    # -- inside -----------------------------------------------------------------------------------------------

    def _number(self, rank: RankId) -> int:
        number = self._numbers.get(rank)
        if number is None:
            number = len(self._numbers)
            if number == RANKS_MAX:
                raise IndexFull(f"the limit of {RANKS_MAX} ranks per partition is reached")
            self._ranks[number, layout.RANK_WORKER] = np.uint64(rank.worker_id).view(np.int64)
            self._ranks[number, layout.RANK_DP] = rank.dp_rank
            self._numbers[rank] = number
        return number

    def _set_epoch(self, number: int, epoch: Epoch) -> None:
        self._ranks[number, layout.RANK_INCARNATION] = np.uint64(epoch.incarnation).view(np.int64)
        self._ranks[number, layout.RANK_GENERATION] = epoch.generation

    def _tombstones(self, n_keys: int) -> list[Change]:
        data = self._out[: n_keys * KEY_BYTES].tobytes()
        return [(data[begin : begin + KEY_BYTES], None) for begin in range(0, len(data), KEY_BYTES)]

    def _grow_maps(self, failure: int, n_blocks: int) -> None:
        """Grow the maps for this many more blocks; raises IndexFull if another limit is reached."""
        if failure == layout.FULL:
            raise IndexFull(f"a partition is over capacity: it cannot take {n_blocks} more blocks")
        for which, old in self._maps.items():
            n_entries = int(self._words[which + layout.MAP_ENTRIES]) + n_blocks
            slots = old.n_bytes // 8
            wanted = slots
            while n_entries * 5 > wanted * 3:
                wanted *= 2
            if wanted > slots:
                new = Arena(wanted * 8)
                move_entries(old.address, slots - 1, new.address, wanted - 1)
                self._maps[which] = new
                self._words[which + layout.MAP_ADDRESS] = new.address
                self._words[which + layout.MAP_MASK] = wanted - 1

    def _move_stale(self) -> None:
        """Move the pending tombstones to the front of STALE, so that it does not run out of space."""
        begin, end = int(self._words[layout.STALE_BEGIN]), int(self._words[layout.STALE_END])
        if begin > max(_STALE_SLACK, end - begin):
            stale = self._arenas[layout.STALE].words
            stale[: (end - begin) * 2] = stale[begin * 2 : end * 2]
            self._words[layout.STALE_BEGIN], self._words[layout.STALE_END] = 0, end - begin


_NOTHING_FOUND = Applied()
#: Before every epoch.
_NO_EPOCH = Epoch(Incarnation(0), 0)
