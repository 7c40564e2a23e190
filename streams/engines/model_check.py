"""Whether the process that a rank is fed from serves the rank's model.

What lives here: the task that finds it out for one feed, and how long the feed is not live because of it. What must
not: asking the engine (process_start), and when a process may be another one (feed_machine).
"""

from __future__ import annotations

import asyncio
import time

from streams.engines.process_start import ListedModel, ModelChanged


class ModelCheck:
    """Checks the model whenever another process may be fed, in a task of its own. Owner of that task."""

    def __init__(self, served: ListedModel | None) -> None:
        """served: what the engine serves; without it, nothing is checked."""
        self._served = served
        self._task: asyncio.Task[str | None] | None = None
        self._unconfirmed_until_s = float("-inf")

    @property
    def pending(self) -> asyncio.Task[str | None] | None:
        """The running task, None if the model is known."""
        return self._task

    def start(self, *, waits: bool) -> None:
        """Find out the model of a process that was not fed before. waits: whether the feed is not live meanwhile."""
        if self._served is None:
            return
        self.close()
        self._unconfirmed_until_s = time.monotonic() + (self._served.wait_s if waits else 0.0)
        self._task = asyncio.create_task(self._served.check())

    def attend(self) -> None:
        """Raise ModelChanged if the engine serves another model."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            other = task.result()
            if other is not None:
                raise ModelChanged(other)

    def is_unconfirmed(self, now_s: float) -> bool:
        """Whether the feed must not be live, since its process may not serve the model."""
        if self._served is None or self._task is None:
            return False
        return self._served.is_missing or now_s < self._unconfirmed_until_s

    def close(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
