"""A standby of one partition: its local copy, kept up to date while another worker owns the partition.

What lives here: the thread that follows the owner's changelogs, and the hand-over when this worker becomes the owner.
What must not: sources, transactions and whatever else only an owner does (partition), how a copy is brought up to date
(local_copy), which partitions a worker follows (indexer_agent).

The new owner has left to do: fence the former owner, and read what that wrote last. It decides itself whether the copy
can be continued, so a standby that lags, or whose process was paused, costs time and never an answer.

State: the thread, and its copy until it is handed over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from confluent_kafka import KafkaException

from streams.errors import KvStreamsError, TableError
from streams.tables.local_copy import LocalCopy
from streams.tables.wiring import PartitionWiring

log = logging.getLogger(__name__)

#: How often a standby reads its changelogs to their ends, so that the copy counts as complete at that time, and flushes
#: its store. A worker that is killed reads at most what it followed for this long again.
REFRESH_EVERY_S = 600.0

#: The wait between two attempts to follow, doubled up to the second number.
RETRY_BACKOFF_S = (0.5, 30.0)

#: How often a standby asks whether it may load its copy.
BUSY_POLL_S = 0.1

#: How long the thread may take to end.
STOP_TIMEOUT_S = 15.0


class Standby:
    """Follows a partition from `start` to `stop` or `release`. Any thread may call these, one after another."""

    def __init__(self, partition: int, wiring: PartitionWiring, may_load: Callable[[], bool]) -> None:
        """may_load: whether no partition of this worker is being opened, which comes first."""
        self.partition = partition
        self._wiring = wiring
        self._may_load = may_load
        self._copy: LocalCopy | None = None
        self._is_current = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"standby-{partition}", daemon=True)

    def start(self) -> None:
        """Start to follow."""
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the copy was at the changelogs' ends, and has followed them since."""
        return self._is_current

    def ask_to_end(self) -> None:
        """Make the thread end soon, without waiting for it."""
        self._stopping.set()

    def release(self) -> LocalCopy | None:
        """End the thread and hand over its copy; None if it has none. Raises TableError if the thread does not end."""
        self.ask_to_end()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TableError(f"the standby of partition {self.partition} did not end within {STOP_TIMEOUT_S:g} s")
        copy, self._copy = self._copy, None
        return copy

    def stop(self) -> None:
        """End the thread and release the copy's folder."""
        try:
            copy = self.release()
        except TableError as exc:
            log.error("%s", exc)
            return
        if copy is not None:
            copy.close()

    def _run(self) -> None:
        backoff = RETRY_BACKOFF_S[0]
        while not self._stopping.is_set():
            try:
                self._await_turn()
                self._copy = copy = LocalCopy(self.partition, self._wiring)
                copy.read_topics()
                while not self._stopping.is_set():
                    self._refresh(copy)
                    copy.read_topics()  # for the new owner as well, which is fencing the former one meanwhile
                    backoff = RETRY_BACKOFF_S[0]
                return
            except Exception as exc:  # a standby that fails must not end: its worker owns other partitions
                self._is_current = False
                if self._copy is not None:
                    self._copy.close()
                    self._copy = None
                if self._stopping.is_set():
                    return
                expected = isinstance(exc, KafkaException | KvStreamsError)
                log.warning("standby of partition %d starts again: %s", self.partition, exc, exc_info=not expected)
                self._stopping.wait(backoff)
                backoff = min(backoff * 2, RETRY_BACKOFF_S[1])

    def _await_turn(self) -> None:
        while not self._may_load() and not self._stopping.wait(BUSY_POLL_S):
            pass
        self._check_needed()

    def _refresh(self, copy: LocalCopy) -> None:
        """Bring the copy to the ends of the changelogs, and follow them until the next time."""
        copy.catch_up(self._check_needed, to_own=False)
        if not self._is_current:
            self._is_current = True
            log.info("standby of partition %d is up to date", self.partition)
        until = time.monotonic() + REFRESH_EVERY_S
        copy.follow(lambda: self._stopping.is_set() or time.monotonic() >= until)

    def _check_needed(self) -> None:
        if self._stopping.is_set():
            raise TableError(f"the standby of partition {self.partition} was stopped while it was loaded")
