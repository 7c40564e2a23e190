"""`python -m benchmarks.memory FILE`: the memory that a router's tree of one workload takes, in a process of its own.

A process that has measured anything else has free pages to reuse, and would grow too little. Prints one JSON line: the
memory that the tree reports, the growth of the process, and the number of entries.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

from benchmarks import ours
from benchmarks.workload import load
from streams.core.index.tree_fold import TreeRunFold
from streams.tables.run_decoding import decode_runs

TRANSACTION, FOLD_RECORDS = 128, 500


def resident_bytes() -> int:
    """Resident anonymous bytes of this process, after the allocator has returned what it can; Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure the workload that the command line names."""
    workload = load(Path(sys.argv[1]))
    batches = ours.batches_of(workload)
    holdings = ours.Path(workload).holdings
    log = [
        record
        for first in range(0, len(batches), TRANSACTION)
        for record in ours.logged(holdings, batches[first : first + TRANSACTION])
    ]
    del batches, holdings
    # Compile the kernels, or read them from their cache, before anything is measured.
    TreeRunFold().fold_records(decode_runs(log[:64])[0])
    before = resident_bytes()
    tree = TreeRunFold()
    for first in range(0, len(log), FOLD_RECORDS):
        assert not tree.fold_records(decode_runs(log[first : first + FOLD_RECORDS])[0])
    grown = resident_bytes() - before
    figures = {"memory_bytes": tree.memory_bytes(), "rss_bytes": grown, "entries": len(tree)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
