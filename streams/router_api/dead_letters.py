"""Dead letters of a scope, counted as they come: by where they came from, and why.

What lives here: two headers of each. What must not: their content, which is for whoever mends what wrote it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Message

from streams.errors import BadRecord
from streams.settings import Settings
from streams.topics import topics

#: Where a bridge's dead letters come from: their header has an engine's address, of which there are many.
ENGINE = "engine"

#: Sources and reasons of which there is none, or that are none of ours: anybody may write to the topic.
OTHER = "other"

#: Pairs of source and reason counted apart. Ours are some dozens; a stranger must not fill memory, ours or Prometheus'.
PAIRS_MAX = 256

#: Characters of a reason; ours have at most 20.
REASON_CHARS_MAX = 64


class DeadLetterCounts:
    """Counts since the router started; filled by the threads that read, read by whoever asks."""

    def __init__(self, settings: Settings) -> None:
        names = topics(settings)
        self._sources = {
            spec.name: spec.name.removeprefix(settings.topic_prefix) for spec in (names.kv_events, names.cxl_events)
        }
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def fold(self, messages: Sequence[Message], live: bool) -> list[tuple[int, BadRecord]]:  # noqa: ARG002 - as of all
        """Count dead letters; none is bad enough not to be."""
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
        """How many there were by source (`kv-events`, `cxl-events`, `engine`, `other`) and reason."""
        with self._lock:
            return dict(self._counts)


def _text(headers: dict[str, bytes], name: str) -> str:
    return headers.get(name, b"").decode(errors="replace")
