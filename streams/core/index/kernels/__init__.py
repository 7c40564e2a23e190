"""Compiled kernels of the run tree; `layout` is the format of its memory."""

# The kernels that Python calls, by module and name, the slowest to compile first.

#: Folding run records into a tree, as a router does.
FOLDING = (
    "run_records.fold_known",
    "trace.trace",
    "fold.drop_old_records",
    "fold.digest_columns",
    "run_records.find_known",
)
#: Applying engine events to a tree, as the index does when it is used as a library.
EVENTS = ("events.apply_events",)
#: Queries and the columns of ranks, which both need.
TREE = (
    "match.match",
    "match.match_tiers",
    "match.match_fresh",
    "columns.sweep",
    "columns.clear_rank",
    "maps.split_segments_to",
    "maps.join_segments",
    "place.place_scores",
    "columns.assign_column",
    "columns.take_column",
)
ENTRY_POINTS = FOLDING + EVENTS + TREE
