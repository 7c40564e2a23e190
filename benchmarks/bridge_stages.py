"""`python -m benchmarks.bridge_stages OUT bridge ...`: a bridge with clocks around its parts, for `benchmarks.bridge`.

What lives here: the clocks, and dividing the time from an engine's event to its record by stage. What must not:
starting engines and Kafka (bridge).

The clocks are put around `EventConnection.take` and around the producer's `produce`, so that nothing of the bridge
itself measures. The first record after a message was taken is that of its batch. A task that sleeps shows how late
the loop is, and a callback of the garbage collector how long that stops everything.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError, Message

from benchmarks.report import OURS, Samples
from streams.engines.bridge import Bridge
from streams.engines.connection import EventConnection
from streams.engines.rank_records import event_producer
from streams.settings import Settings
from streams.topics import topics

#: Stages in order; each ends with the time in the column of the same number, and begins with that before it.
STAGES = ("until taken from the socket", "until handed to Kafka's client", "until appended")

#: How long the task sleeps that shows how late the loop is.
PROBE_S = 0.01

#: Where a payload has its time (bridge).
_TIME_AT = 2


class _Clocks:
    """rows: times of batches: of the event, taken, handed over, appended. late, pauses: each with its time. Seconds."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float, float]] = []
        self.late: list[tuple[float, float]] = []
        self.pauses: list[tuple[float, float]] = []
        self._collects_from_s = 0.0
        self._taken: tuple[float, float] | None = None  # the event's time, and now

    def took(self, frames: list[bytes]) -> None:
        emitted_s = np.frombuffer(frames[-1], ">f8", 1, _TIME_AT)[0]
        self._taken = float(emitted_s), time.time()

    async def probe(self) -> None:
        """Note how late the loop is, until cancelled."""
        while True:
            due_s = time.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            now_s = time.time()
            self.late.append((now_s, now_s - due_s))

    def collect(self, phase: str, _: object) -> None:
        """Note the length of a garbage collection."""
        now_s = time.time()
        if phase == "start":
            self._collects_from_s = now_s
        else:
            self.pauses.append((now_s, now_s - self._collects_from_s))

    def produce(self, producer: Any, topic: str, **arguments: Any) -> None:
        """Produce a record of events, and note when the broker appended it if it is a batch's."""
        if self._taken is None:
            producer.produce(topic, **arguments)
            return
        (emitted_s, taken_s), handed_s, self._taken = self._taken, time.time(), None
        report = arguments.pop("on_delivery")

        def on_delivery(error: KafkaError | None, message: Message) -> None:
            self.rows.append((emitted_s, taken_s, handed_s, message.timestamp()[1] / 1000))
            report(error, message)

        producer.produce(topic, on_delivery=on_delivery, **arguments)


class _TimedProducer:
    """A producer of events whose records are timed."""

    def __init__(self, producer: Any, clocks: _Clocks, topic: str) -> None:
        self._producer, self._clocks, self._topic = producer, clocks, topic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def produce(self, topic: str, **arguments: Any) -> None:
        if topic == self._topic:
            self._clocks.produce(self._producer, topic, **arguments)
        else:
            self._producer.produce(topic, **arguments)


def add_stages(samples: Samples, case: str, path: Path, began_s: float) -> None:
    """Add each stage's share of the time from event to record, of the batches since `began_s`."""
    times = np.load(path)
    rows: npt.NDArray[np.float64] = times["rows"]
    ended_s = rows[:, 0].max()  # what the bridge does later, when it stops, delays no batch
    for name, what in (("late", "the loop is late"), ("pauses", "a garbage collection")):
        at_s, took_s = times[name].T
        found_ms = took_s[(at_s >= began_s) & (at_s <= ended_s)] * 1000
        if len(found_ms):
            samples.add(case, f"{what}, p99", "ms", OURS, float(np.percentile(found_ms, 99)))
            samples.add(case, f"{what}, max", "ms", OURS, float(found_ms.max()))
    rows = rows[rows[:, 0] >= began_s]
    total = rows[:, -1] - rows[:, 0]
    slowest = total >= np.percentile(total, 99)
    for number, stage in enumerate(STAGES, 1):
        took_ms = (rows[:, number] - rows[:, number - 1]) * 1000
        for share in (50, 90, 99):
            samples.add(case, f"{stage}, p{share}", "ms", OURS, float(np.percentile(took_ms, share)))
        samples.add(case, f"{stage}, mean of the slowest 1 %", "ms", OURS, float(took_ms[slowest].mean()))


def main() -> None:
    """Run `kvstreams` with the arguments after the first, and write the times when it ends."""
    from streams.cli import main as kvstreams

    out, clocks = sys.argv[1], _Clocks()
    take, run = EventConnection.take, Bridge.run

    def timed_take(connection: EventConnection) -> list[bytes]:
        frames = take(connection)
        clocks.took(frames)
        return frames

    def timed_producer(settings: Settings) -> _TimedProducer:
        return _TimedProducer(event_producer(settings), clocks, topics(settings).kv_events.name)

    async def probed_run(bridge: Bridge) -> None:
        probe = asyncio.create_task(clocks.probe())
        try:
            await run(bridge)
        finally:
            probe.cancel()

    gc.callbacks.append(clocks.collect)
    sys.argv = ["kvstreams", *sys.argv[2:]]
    try:
        with (
            patch.object(EventConnection, "take", timed_take),
            patch.object(Bridge, "run", probed_run),
            patch("streams.engines.bridge.event_producer", timed_producer),
        ):
            kvstreams()
    finally:
        late, pauses = (np.array(found).reshape(-1, 2) for found in (clocks.late, clocks.pauses))
        np.savez(out, rows=np.array(clocks.rows), late=late, pauses=pauses)


if __name__ == "__main__":
    main()
