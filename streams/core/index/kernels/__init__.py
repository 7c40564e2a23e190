"""Compiled kernels of the run tree; `layout` is the format of its memory."""

# What Python calls, as module and kernel, the slowest to compile first.

#: Run records folded into a tree: what a router does.
FOLDING = (
    "run_records.fold_known",
    "trace.trace",
    "fold.drop_old_records",
    "fold.digest_columns",
    "run_records.find_known",
)
#: Engine events applied to a tree: what the index does as a library.
EVENTS = ("events.apply_events",)
#: Queries, and the columns of ranks: both.
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
