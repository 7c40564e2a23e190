"""The dead letters of a scope, counted by source and reason.

What lives here: reading two headers of each dead letter. What must not: its content.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Message

from streams.errors import BadRecord
from streams.settings import ScopeSettings
from streams.topics import topics

#: The source of a bridge's dead letters. Their header has an engine's address, of which there are many.
ENGINE = "engine"

#: Stands for missing or unexpected sources and reasons, since other applications can write to the topic.
OTHER = "other"

#: Pairs of source and reason that are counted separately. kvstreams has a few dozen; the limit keeps a foreign writer
#: from filling the memory of this process or of Prometheus.
PAIRS_MAX = 256

#: Characters of a reason. Those of kvstreams have at most 20.
REASON_CHARS_MAX = 64


class DeadLetterCounts:
    """Counts since the router started. Thread-safe: threads that read topics fold, and others read the counts."""

    def __init__(self, settings: ScopeSettings) -> None:
        names = topics(settings)
        self._sources = {
            spec.name: spec.name.removeprefix(settings.topic_prefix) for spec in (names.kv_events, names.cxl_events)
        }
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def fold(self, messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:  # noqa: ARG002 - the signature of every fold
        """Count dead letters; returns no bad records, since every dead letter can be counted."""
        for message in messages:
            pairs: Any = message.headers() or []
            headers = {name: value for name, value in pairs if isinstance(value, bytes)}
            self._count(_text(headers, "kvstreams.topic"), _text(headers, "kvstreams.reason"))
        return []

    def _count(self, origin: str, reason: str) -> None:
        source = self._sources.get(origin, ENGINE if "://" in origin else OTHER)
        pair = source, reason if 0 < len(reason) <= REASON_CHARS_MAX else OTHER
        with self._lock:
            if pair not in self._counts and len(self._counts) >= PAIRS_MAX:
                pair = OTHER, OTHER
            self._counts[pair] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """Number of dead letters by source (`kv-events`, `cxl-events`, `engine`, `other`) and reason."""
        with self._lock:
            return dict(self._counts)


def _text(headers: dict[str, bytes], name: str) -> str:
    return headers.get(name, b"").decode(errors="replace")
