"""Dynamo's Python wheel as a peer, if it is installed: its RadixTree, called from Python like ours."""

from __future__ import annotations

import importlib
import json
import time
from typing import Any

from benchmarks.workload import STORED, U64Array, Workload

PACKAGE = "ai-dynamo-runtime"

#: Events encoded at a time. Encoding is not timed, since the messages of engines arrive encoded.
_EVENTS = 256


def radix_tree() -> Any | None:
    """The wheel's RadixTree class; None if it is not installed."""
    try:
        return importlib.import_module("dynamo._core").RadixTree
    except (ImportError, AttributeError):
        return None


class WheelPeer:
    """One tree for one workload."""

    def __init__(self, tree_class: Any, workload: Workload) -> None:
        self._tree = tree_class()
        self._workload = workload

    def apply(self) -> float:
        """Apply all events; returns nanoseconds per block."""
        apply, clock = self._tree.apply_event, time.perf_counter_ns
        took = 0
        for first in range(0, self._workload.n_events, _EVENTS):
            encoded = [self._encode(at) for at in range(first, min(first + _EVENTS, self._workload.n_events))]
            start = clock()
            for rank, event in encoded:
                apply(rank, event)
            took += clock() - start
        return took / self._workload.n_blocks

    def match(self, queries: list[U64Array]) -> tuple[list[int], int]:
        """Look up each query and read its scores; returns the nanoseconds of each, and the sum of depths."""
        find, clock = self._tree.find_matches, time.perf_counter_ns
        took: list[int] = []
        total = 0
        for query in [query.tolist() for query in queries]:  # the wheel takes lists only
            start = clock()
            scores = find(query, False).scores
            took.append(clock() - start)
            total += sum(scores.values())
        return took, total

    def _encode(self, at: int) -> tuple[int, bytes]:
        work = self._workload
        first, last = int(work.ev_off[at]), int(work.ev_off[at + 1])
        sequence = work.blk_seq[first:last].tolist()
        data: dict[str, Any]
        if work.ev_kind[at] == STORED:
            pairs = zip(sequence, work.blk_local[first:last].tolist(), strict=True)
            blocks = [{"block_hash": name, "tokens_hash": local} for name, local in pairs]
            data = {"stored": {"parent_hash": int(work.ev_parent[at]) or None, "blocks": blocks}}
        else:
            data = {"removed": {"block_hashes": sequence}}
        return int(work.ev_worker[at]), json.dumps({"event_id": at, "data": data}).encode()
