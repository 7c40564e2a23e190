"""`python -m benchmarks.memory FILE`: what our index of one workload holds, in a process of its own.

A process that has measured anything else has pages to reuse, and its growth would say too little. Prints one JSON
line: what the index says of itself, how much the process grew, and the entries held.
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
    """Resident anonymous bytes of this process, once the allocator has given back what it can; Linux only."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Measure the workload that the command line names."""
    workload = load(Path(sys.argv[1]))
    first = ours.empty(workload)
    # Kernels are compiled or read from their cache before anything is measured.
    first.index.apply(first.columns, 0, min(64, first.n_events))
    before = resident_bytes()
    target = ours.again(first, workload)
    ours.time_apply(target, 128)
    grown = resident_bytes() - before
    told = {"memory_bytes": target.index.memory_bytes(), "rss_bytes": grown, "entries": len(target.index)}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
