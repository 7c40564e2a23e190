"""Holders of run records: finding each record's holder, and checking that the record has its rank's epoch.

What lives here: the table of known holders, and the columns of records that follow those of fold_runs. What must not:
bytes (streams/tables), and what a record does to the tree (fold).

The table of known holders has a power of two of 64-byte entries, found by probing from a hash of worker id and place,
where place is data-parallel rank << 2 | tier. The words of an entry: worker id; place + 1, or 0 for a free entry;
holder + 1, or 0 if the rank was removed; incarnation; generation.
"""

from __future__ import annotations

from numba import njit

from streams.core.index.kernels.fold import FOLD_HOLDER, FOLD_LOCAL, FOLD_PRESENT, fold_runs
from streams.core.kernels.compiling import kernel
from streams.core.kernels.memory import load, store
from streams.core.kernels.words import SYNTHETIC_STEP, mix

#: Columns of a table of records after those of fold_runs: worker id, place, the epoch (u64 and int64), and the position
#: of the record's labels, 0 for none, which the fold does not read.
FOLD_WORKER, FOLD_PLACE, FOLD_INCARNATION, FOLD_GENERATION, FOLD_LABELLED = range(FOLD_LOCAL + 1, FOLD_LOCAL + 6)
N_FOLD_COLUMNS = FOLD_LABELLED + 1

KNOWN_WORKER, KNOWN_PLACE, KNOWN_HOLDER, KNOWN_INCARNATION, KNOWN_GENERATION = range(5)
KNOWN_WORDS = 8
_KNOWN_SHIFT = 6


@kernel()
def find_known(known: int, mask: int, worker: int, place: int) -> int:
    """Find the entry of a holder, or the free entry in which it belongs.

    known: address of mask + 1 entries, of which at least one is free.
    """
    entry = mix(worker ^ ((place + 1) * SYNTHETIC_STEP)) & mask
    while True:
        address = known + (entry << _KNOWN_SHIFT)
        taken = load(address + KNOWN_PLACE * 8)
        if taken == 0 or (taken == place + 1 and load(address) == worker):
            return entry
        entry = (entry + 1) & mask


@njit(inline="always")
def is_current(known: int, mask: int, table: int, record: int) -> bool:
    """Set the holder of a record if it is known and the record has its rank's epoch; returns whether that is so.

    A tombstone has no epoch and fits any.
    """
    at = record << 3
    entry = find_known(known, mask, load(load(table + FOLD_WORKER * 8) + at), load(load(table + FOLD_PLACE * 8) + at))
    address = known + (entry << _KNOWN_SHIFT)
    holder = load(address + KNOWN_HOLDER * 8)
    if load(address + KNOWN_PLACE * 8) == 0 or holder == 0:
        return False
    if load(load(table + FOLD_PRESENT * 8) + at) != 0 and (
        load(load(table + FOLD_INCARNATION * 8) + at) != load(address + KNOWN_INCARNATION * 8)
        or load(load(table + FOLD_GENERATION * 8) + at) != load(address + KNOWN_GENERATION * 8)
    ):
        return False
    store(load(table + FOLD_HOLDER * 8) + at, holder - 1)
    return True


@kernel()
def fold_known(context: int, known: int, mask: int, table: int, first: int, last: int) -> int:
    """Fold records from `first` on, as `fold_runs` does, as long as their holders are known and their epochs current.

    Returns the first record whose holder is unknown, whose epoch is not current, or that does not fit (FULL is set);
    `last` if there is none.
    """
    end = first
    while end < last and is_current(known, mask, table, end):
        end += 1
    return first + fold_runs(context, table, first, end)
