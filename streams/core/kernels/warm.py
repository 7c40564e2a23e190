"""Compiling the kernels ahead of their first use, or loading them from the cache.

What lives here: which kernels Python calls. What must not: progress bars; who calls this shows them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from numba import types

#: Module and kernel, in the order in which they are compiled; what they call is compiled with the first that calls it.
ENTRIES = (
    ("streams.core.kernels.xxh3", "hash_blocks"),
    ("streams.core.kernels.xxh3", "chain_blocks"),
    ("streams.core.index.kernels.maps", "split_segments_to"),
    ("streams.core.index.kernels.maps", "join_segments"),
    ("streams.core.index.kernels.match", "match"),
    ("streams.core.index.kernels.match", "match_fresh"),
    ("streams.core.index.kernels.match", "match_tiers"),
    ("streams.core.routing.kernels.price", "price_ranks"),
    ("streams.core.index.kernels.place", "place_scores"),
    ("streams.core.index.kernels.trace", "trace"),
    ("streams.core.block_facts.kernels.fact_sets", "get_set"),
    ("streams.core.block_facts.kernels.fact_sets", "put_set"),
    ("streams.core.block_facts.kernels.fact_sets", "drop_set"),
    ("streams.core.block_facts.kernels.fact_sets", "move_segment"),
    ("streams.core.block_facts.kernels.fact_sets", "find_rows"),
    ("streams.core.block_facts.kernels.fact_sets", "walk"),
    ("streams.core.block_facts.kernels.fact_sets", "weigh"),
    ("streams.core.index.kernels.columns", "take_column"),
    ("streams.core.index.kernels.columns", "assign_column"),
    ("streams.core.index.kernels.columns", "sweep"),
    ("streams.core.index.kernels.columns", "clear_rank"),
    ("streams.core.index.kernels.events", "apply_events"),
    ("streams.core.index.kernels.fold", "drop_old_records"),
    ("streams.core.index.kernels.fold", "digest_columns"),
    ("streams.core.index.kernels.run_records", "find_known"),
    ("streams.core.index.kernels.run_records", "fold_known"),
    ("streams.tables.kernels.runs", "decode_records"),
    ("streams.tables.kernels.runs", "decode_labels"),
    ("streams.tables.kernels.runs", "load_records"),
    ("streams.tables.kernels.runs", "encode_dirty"),
    ("streams.tables.kernels.runs", "encode_emptied"),
    ("streams.tables.kernels.runs", "encode_stale"),
    ("streams.tables.kernels.events", "decode_batches"),
    ("streams.core.reducer.kernels.changes", "apply_rows"),
    ("streams.core.reducer.kernels.changes", "restate_run"),
    ("streams.core.reducer.kernels.changes", "end_rank"),
    ("streams.core.reducer.kernels.changes", "room_for"),
    ("streams.core.reducer.kernels.changes", "next_stale"),
    ("streams.core.reducer.kernels.maps", "move_entries"),
)

_TYPES = {"int": types.int64, "bool": types.boolean}


def warm() -> Iterator[str]:
    """Compile or load one kernel after the other; gives each one's name before it begins."""
    for module_name, name in ENTRIES:
        yield name
        module = importlib.import_module(module_name)
        kernel: Any = getattr(module, name)
        if not kernel.signatures:
            code = kernel.py_func.__code__
            annotations = kernel.py_func.__annotations__
            kernel.compile(tuple(_TYPES[annotations[each]] for each in code.co_varnames[: code.co_argcount]))
