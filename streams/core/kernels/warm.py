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
    ("xxh3", "hash_blocks"),
    ("xxh3", "chain_blocks"),
    ("maps", "split_segments_to"),
    ("match", "match"),
    ("match", "match_fresh"),
    ("match", "match_tiers"),
    ("columns", "take_column"),
    ("columns", "assign_column"),
    ("columns", "sweep"),
    ("columns", "clear_rank"),
    ("events", "apply_events"),
    ("fold", "fold_runs"),
    ("fold", "drop_old_records"),
    ("fold", "digest_columns"),
)

_TYPES = {"int": types.int64, "bool": types.boolean}


def warm() -> Iterator[str]:
    """Compile or load one kernel after the other; gives each one's name before it begins."""
    for module_name, name in ENTRIES:
        yield name
        kernel: Any = getattr(importlib.import_module(f"streams.core.kernels.{module_name}"), name)
        if not kernel.signatures:
            code = kernel.py_func.__code__
            annotations = kernel.py_func.__annotations__
            kernel.compile(tuple(_TYPES[annotations[each]] for each in code.co_varnames[: code.co_argcount]))
