"""Chooses the store of runs that a partition works with: compiled, or pure Python if numba cannot be imported.

What lives here: the interface that both stores provide, whose changes are rows in bytes. What must not: what an event
does (core.reducer.run_store), kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Protocol

from streams.codec import decode_batch_or_error
from streams.core.events import EngineBatch, KvEvent
from streams.core.ids import Epoch, RankId
from streams.core.kernels.available import kernels_available
from streams.core.reducer.run_store import PlainRunStore, RunStore
from streams.core.runs import Run, RunKey
from streams.errors import BadRecord
from streams.tables.records import Change, decode_run, encode_run, run_key

#: Decodes values of kv-events, given the schema registry's ids; returns a batch or an error for each value.
DecodeEvents = Callable[[Sequence[bytes | None], Mapping[str, int]], Sequence[EngineBatch | BadRecord]]


class IndexRuns(RunStore[Iterable[KvEvent], Change], Protocol):
    """A store of runs whose changes are rows of the index table."""

    def begin_load(self, epochs: Mapping[RankId, Epoch]) -> None:
        """Drop everything, and start with these ranks."""

    def load_records(self, records: Sequence[tuple[bytes, bytes]]) -> tuple[int, list[tuple[int, BadRecord]]]:
        """Load rows of the table, as keys and values.

        Returns the number of rows whose rank is unknown, and the position and error of each unreadable row.
        """


class PlainIndexRuns(PlainRunStore[Change]):
    """The pure-Python store, with rows as changes."""

    def __init__(self) -> None:
        super().__init__(_as_bytes)

    def load_records(self, records: Sequence[tuple[bytes, bytes]]) -> tuple[int, list[tuple[int, BadRecord]]]:
        """See IndexRuns."""
        runs, bad = [], []
        for position, (key, value) in enumerate(records):
            try:
                runs.append(decode_run(key, value))
            except BadRecord as exc:
                bad.append((position, exc))
        return self.adopt(runs), bad


def run_backend() -> tuple[IndexRuns, DecodeEvents]:
    """Return an empty store, and the function that decodes the events for it."""
    make, decode = _compiled() or (PlainIndexRuns, decode_one_by_one)
    return make(), decode


@cache
def _compiled() -> tuple[Callable[[], IndexRuns], DecodeEvents] | None:
    if not kernels_available():
        return None
    from streams.tables.event_decoding import decode_events
    from streams.tables.run_table import RunTable
    from streams.warming import AGENT, warm

    warm(AGENT)  # before a partition is opened, so that no batch waits for a compiler
    return RunTable, decode_events


def decode_one_by_one(values: Sequence[bytes | None], schema_ids: Mapping[str, int]) -> list[EngineBatch | BadRecord]:
    """See DecodeEvents."""
    return [decode_batch_or_error(value, schema_ids) for value in values]


def _as_bytes(key: RunKey, run: Run | None) -> Change:
    return run_key(key), None if run is None else encode_run(run)
