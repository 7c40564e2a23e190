"""Child processes: each has its own log file, and is stopped by its process id.

What lives here: starting, watching and stopping a child. What must not: which children there are (stack). Each child
has its own session, so that Ctrl-C in a terminal reaches only the parent, which decides the order of stopping.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from streams.errors import ProcessError
from streams.process.waiting import wait_for

#: A child that was sent SIGTERM gets this long before SIGKILL.
STOP_TIMEOUT_S = 20.0

#: Lines of a child's log that are shown when it exits unexpectedly.
_TAIL_LINES = 15


class Child:
    """One child process."""

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, env: Mapping[str, str]) -> None:
        """arguments: those after the interpreter. env: added to the parent's environment."""
        self.name = name
        self.log_path = log_path
        self._arguments = [sys.executable, *arguments]
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the process. Its output is appended to the log file of earlier runs."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        log: IO[bytes]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        """The process id; raises ProcessError if the child was never started."""
        if self._process is None:
            raise ProcessError(f"{self.name} was not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it is running."""
        return None if self._process is None else self._process.poll()

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `ready()` is true; raises ProcessError, with the end of the log, if the child exits or is late."""

        def ready_or_ended() -> bool:
            return not self.running or ready()

        try:
            wait_for(ready_or_ended, timeout_s, f"{self.name} to be ready")
        except ProcessError as exc:
            raise ProcessError(f"{exc.message}\n{self.tail()}", remedy=f"Its log is {self.log_path}") from exc
        if not self.running:
            raise ProcessError(f"{self.name} exited\n{self.tail()}", remedy=f"Its log is {self.log_path}")

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process with SIGKILL, as a crash would."""
        if self._process is not None and self.running:
            self._process.kill()
            self._process.wait()

    def ask_to_stop(self) -> None:
        """Send SIGTERM and return at once; `stop` waits."""
        if self._process is not None and self.running:
            self._process.terminate()

    def stop(self) -> None:
        """Send SIGTERM and wait; send SIGKILL after STOP_TIMEOUT_S."""
        if self._process is None:
            return
        self.ask_to_stop()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self) -> str:
        """The last lines of the log."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        width = shutil.get_terminal_size().columns * 2
        return "\n".join(line[:width] for line in lines[-_TAIL_LINES:])


class Children:
    """All children of a run, stopped in reverse order whatever happens."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def add(self, child: Child) -> Child:
        """Take over a child, which `stop` then stops."""
        self._children.append(child)
        return child

    def dead(self) -> list[Child]:
        """Children that have exited."""
        return [child for child in self._children if not child.running]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop all children."""
        # All get SIGTERM at once, since each may take seconds to stop. Later children depend on earlier ones.
        for child in reversed(self._children):
            child.ask_to_stop()
        for child in reversed(self._children):
            child.stop()
