"""Compiled kernels of the run tree; `layout` is the format of its memory."""

# The kernels that Python calls, by module and name, the slowest to compile first.

#: Folding run records into a tree, queries, and the columns of ranks.
ENTRY_POINTS = (
    "run_records.fold_known",
    "match.match_tiers",
    "match.match",
    "columns.sweep",
    "columns.clear_rank",
    "trace.trace",
    "fold.drop_old_records",
    "maps.join_segments",
    "fold.digest_columns",
    "place.place_scores",
    "columns.assign_column",
    "columns.take_column",
    "run_records.find_known",
)
