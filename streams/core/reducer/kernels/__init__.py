"""Compiled kernels of the agents' store of runs: `layout` is the format, tables.run_table the interface."""

#: What Python calls, as module and kernel, the slowest to compile first.
ENTRY_POINTS = (
    "changes.apply_rows",
    "changes.restate_run",
    "changes.end_rank",
    "changes.reserve_blocks",
    "changes.next_stale",
    "changes.add_stale",
    "maps.move_entries",
)
