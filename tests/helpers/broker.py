"""The broker that all tests of one pytest run share, and brokers that a test breaks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from streams.errors import LocalKafkaError
from streams.lab.kafka.broker import LocalKafka, LocalKafkaConfig
from streams.process.waiting import wait_for

#: Environment variable with the broker's folder; the worker processes of pytest-xdist inherit it.
DIRECTORY_ENV = "KVSTREAMS_TEST_KAFKA_DIRECTORY"

#: A killed process that is still there after this time hangs in the kernel.
_END_S = 10.0


def broker_config(directory: Path) -> LocalKafkaConfig:
    """Return the configuration of the shared broker, whose files are in this folder."""
    # By default, brokers refuse session timeouts below 6 s. Every test that kills a worker waits for one to end.
    return LocalKafkaConfig(directory, {"group.min.session.timeout.ms": "1000"})


class BreakableKafka(LocalKafka):
    """A broker that a test may kill and pause."""

    def kill(self) -> None:
        """End the broker with SIGKILL, as a crash would, and wait until the process has ended."""
        process = self._running()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        wait_for(lambda: self.status() is None, _END_S, "the broker's process to end")

    def pause(self) -> None:
        """Pause the broker with SIGSTOP: connections stay open, and no request is answered."""
        self._running().suspend()

    def resume(self) -> None:
        """Let a paused broker continue."""
        self._running().resume()

    def _running(self) -> psutil.Process:
        """Return the broker's process. Raises LocalKafkaError if none is running."""
        state = self.status()
        if state is None:
            raise LocalKafkaError(f"No broker runs in {self.directory}")
        return psutil.Process(state.pid)
