"""What a partition is given when it is created: its tables and topics, and how it reaches the loop that feeds it.

What lives here: the value. What must not: any behaviour.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from streams.settings import AgentSettings
from streams.tables.reducer import Reducer
from streams.tables.store import TableSpec
from streams.topics import TopicSpec


@dataclass(frozen=True, slots=True)
class PartitionWiring:
    """What a partition works with. Its own thread makes all the calls.

    acknowledge: takes handles, in offset order. drained: called when the queue can take records again. opened: takes a
    map of each topic to its next offset. is_ours: asks the group's coordinator whether a partition is assigned to this
    worker. source_recreated: takes the name and the new id of a source whose offsets start over. on_effect: the fault
    point that a test armed. partitions_open: returns how many partitions this worker has. answers: returns whether the
    process answers requests at the moment.

    turn: a lock that is held while records of a changelog are processed, never while waiting for a broker. Without it,
    four partitions that open at once switch threads at every call into RocksDB, and take twice as long as if they were
    opened one after the other (measured).
    """

    settings: AgentSettings
    tables: tuple[TableSpec, ...]
    sources: tuple[TopicSpec, ...]
    dead_letters: TopicSpec
    owner: str
    make_reducer: Callable[[], Reducer[Any]]
    acknowledge: Callable[[list[Any]], None]
    drained: Callable[[int], None]
    opened: Callable[[int, dict[str, int]], None]
    is_ours: Callable[[int], bool]
    on_effect: Callable[[int], None] | None
    now_ms: Callable[[], int]
    source_recreated: Callable[[str, str], None] = lambda *_: None
    partitions_open: Callable[[], int] = lambda: 1
    answers: Callable[[], bool] = lambda: False
    turn: threading.Lock = field(default_factory=threading.Lock)
