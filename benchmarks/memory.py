"""`python -m benchmarks.memory FILE`: the memory that our index of one workload takes, in a process of its own.

A process that has measured anything else has free pages to reuse, and would grow too little. Prints one JSON line: the
memory that the index reports, the growth of the process, and the number of entries.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

from benchmarks import ours
from benchmarks.workload import load


def resident_bytes() -> int:
    """Resident anonymous bytes of this process, after the allocator has returned what it can; Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure the workload that the command line names."""
    workload = load(Path(sys.argv[1]))
    first = ours.empty(workload)
    # Compile the kernels, or read them from their cache, before anything is measured.
    first.index.apply(first.columns, 0, min(64, first.n_events))
    before = resident_bytes()
    target = ours.again(first, workload)
    ours.time_apply(target, 128)
    grown = resident_bytes() - before
    figures = {"memory_bytes": target.index.memory_bytes(), "rss_bytes": grown, "entries": len(target.index)}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
