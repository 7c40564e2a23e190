"""A reducer that waits for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from streams.errors import BadRecord
from streams.tables.records import Change
from streams.tables.reducer import Outgoing, SourceRecord
from streams.tables.store import TableSpec


class Slow:
    """A reducer that keeps nothing, and decodes only after an event is set."""

    def __init__(self, proceed: threading.Event) -> None:
        self._proceed = proceed

    def load(self, table: TableSpec, items: Iterator[tuple[bytes, bytes]]) -> None:
        pass

    def follow(self, *_: object) -> None:
        pass

    def resume(self, *_: object) -> bool:
        return False

    def take_refused(self) -> list[tuple[SourceRecord, BadRecord]]:
        return []

    def decode(self, records: Sequence[SourceRecord]) -> Sequence[None]:
        if records:  # there are none if only the partition record is due
            self._proceed.wait()
        return [None] * len(records)

    def apply(self, record: SourceRecord, decoded: None) -> None:
        pass

    @property
    def full(self) -> bool:
        return False

    def source_lost(self) -> None:
        pass

    def tick(self, *_: Any, **__: Any) -> list[Outgoing]:
        return []

    def take_changes(self) -> dict[TableSpec, list[Change]]:
        return {}
