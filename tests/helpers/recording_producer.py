"""A Kafka producer that keeps records instead of sending them.

What lives here: the double. What must not: a cluster's behaviour; tests of that use a real Kafka.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from confluent_kafka import Message, Producer


class RecordingProducer(Producer):
    """A real client, configured for a port on which no broker listens, whose `produce` only records.

    acknowledges: report each record as delivered, in the next step of the running loop or by `poll`. after_s: so many
    seconds after the step in which it was produced, and not by `poll`.
    """

    def __init__(self, *, acknowledges: bool = False, after_s: float = 0.0) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
        self.records: list[tuple[str, dict[str, Any]]] = []
        self._acknowledges = acknowledges
        self._after_s = after_s
        self._n_acknowledged = 0

    def produce(self, topic: str, *_: Any, **record: Any) -> None:
        self.records.append((topic, record))
        if self._acknowledges:
            with suppress(RuntimeError):  # not on a loop's thread
                loop = asyncio.get_running_loop()
                if self._after_s:
                    loop.call_later(self._after_s, self.acknowledge, len(self.records))
                else:
                    loop.call_soon(self.acknowledge)

    def poll(self, *_: Any) -> int:
        if self._acknowledges and not self._after_s:
            self.acknowledge()
        return 0

    def values(self, topic_suffix: str) -> list[bytes]:
        """The values of all records of the topic with this suffix, in order."""
        return [record["value"] for topic, record in self.records if topic.endswith(topic_suffix)]

    def acknowledge(self, until: int | None = None) -> None:
        """Report records as written to the log, to the callbacks that wait for it. until: how many; all by default."""
        begin = self._n_acknowledged
        self._n_acknowledged = max(begin, len(self.records) if until is None else until)
        for _, record in self.records[begin : self._n_acknowledged]:
            if record.get("on_delivery") is not None:
                record["on_delivery"](None, Message())
