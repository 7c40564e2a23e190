"""Compiling the kernels ahead of their first use, or loading them from the cache.

What lives here: which kernels Python calls. What must not: progress bars; who calls this shows them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from numba import types

#: Module and kernel, in the order in which they are compiled; what they call is compiled with the first that calls it.
#: A module with a dot in its name is one of another package.
ENTRIES = (
    ("xxh3", "hash_blocks"),
    ("xxh3", "chain_blocks"),
    ("maps", "split_segments_to"),
    ("maps", "join_segments"),
    ("match", "match"),
    ("match", "match_fresh"),
    ("match", "match_tiers"),
    ("price", "price_ranks"),
    ("price", "place_scores"),
    ("trace", "trace"),
    ("block_sets", "get_set"),
    ("block_sets", "put_set"),
    ("block_sets", "drop_set"),
    ("block_sets", "move_segment"),
    ("block_sets", "find_rows"),
    ("block_sets", "walk"),
    ("block_sets", "weigh"),
    ("columns", "take_column"),
    ("columns", "assign_column"),
    ("columns", "sweep"),
    ("columns", "clear_rank"),
    ("events", "apply_events"),
    ("fold", "drop_old_records"),
    ("fold", "digest_columns"),
    ("run_records", "find_known"),
    ("run_records", "fold_known"),
    ("streams.tables.kernels.runs", "decode_records"),
    ("streams.tables.kernels.runs", "decode_labels"),
    ("streams.tables.kernels.runs", "load_records"),
    ("streams.tables.kernels.runs", "encode_dirty"),
    ("streams.tables.kernels.runs", "encode_emptied"),
    ("streams.tables.kernels.runs", "encode_stale"),
    ("streams.tables.kernels.events", "decode_batches"),
    ("streams.core.run_kernels.changes", "apply_rows"),
    ("streams.core.run_kernels.changes", "restate_run"),
    ("streams.core.run_kernels.changes", "end_rank"),
    ("streams.core.run_kernels.changes", "room_for"),
    ("streams.core.run_kernels.changes", "next_stale"),
    ("streams.core.run_kernels.maps", "move_entries"),
)

_TYPES = {"int": types.int64, "bool": types.boolean}


def warm() -> Iterator[str]:
    """Compile or load one kernel after the other; gives each one's name before it begins."""
    for module_name, name in ENTRIES:
        yield name
        module = importlib.import_module(module_name if "." in module_name else f"streams.core.kernels.{module_name}")
        kernel: Any = getattr(module, name)
        if not kernel.signatures:
            code = kernel.py_func.__code__
            annotations = kernel.py_func.__annotations__
            kernel.compile(tuple(_TYPES[annotations[each]] for each in code.co_varnames[: code.co_argcount]))
