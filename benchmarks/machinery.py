"""A broker and a scope for one benchmark run, and the processor time and bytes that it uses.

What lives here: starting and stopping the parts. What must not: the measurements.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from streams.kafka.clients import ensure_topics
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.lab.processes import Children
from streams.lab.stack import Stack
from streams.settings import Settings
from streams.topics import topics


@dataclass(frozen=True, slots=True)
class Machinery:
    """A running broker, and the settings of a scope of its own."""

    stack: Stack
    settings: Settings
    data: Path
    broker_pid: int

    def topic_bytes(self, topic: str) -> int:
        """Bytes of a topic's segments on the broker's disk, including markers."""
        return sum(path.stat().st_size for path in self.data.glob(f"{topic}-*/*.log"))


@contextmanager
def machinery(partitions: int = 8, directory: Path | None = None, **changes: object) -> Iterator[Machinery]:
    """Start a broker with its default settings, and stop everything afterwards.

    directory: parent of the temporary directory for all data, which is removed afterwards. SIGTERM, which `timeout`
    sends, stops everything as well. Call it on the main thread.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _running(partitions, directory, changes) as parts:
            yield parts
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _running(partitions: int, directory: Path | None, changes: Mapping[str, object]) -> Iterator[Machinery]:
    with tempfile.TemporaryDirectory(prefix="kvstreams-bench-", dir=directory) as folder:
        root = Path(folder)
        # By default, brokers allow no session timeout below 6 s, which is ours.
        broker = LocalKafka(LocalKafkaConfig(root / "kafka", optimized=True))
        state = broker.up()
        try:
            settings = Settings(
                kafka=state.bootstrap,
                topic_prefix=f"b{uuid.uuid4().hex[:8]}-",
                partitions=partitions,
                data_dir=str(root / "state"),
                **changes,  # type: ignore[arg-type]
            )
            ensure_topics(settings, topics(settings).all())
            with Children() as children:
                yield Machinery(Stack(settings, root, children), settings, root / "kafka" / "data", state.pid)
        finally:
            broker.down()


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def compiler_seconds(pid: int) -> float | None:
    """Processor time that the compiler threads of a JVM have used; None where the system does not name threads."""
    used_s = None
    for thread in psutil.Process(pid).threads():
        try:
            name = Path(f"/proc/{pid}/task/{thread.id}/comm").read_text()
        except OSError:  # it has ended, or there is no /proc
            continue
        if name.startswith(("C1 ", "C2 ")):
            used_s = (used_s or 0.0) + thread.user_time + thread.system_time
    return used_s
