"""Child processes that their parent keeps running: routers on one port, and what `kvstreams gateway` needs.

What lives here: starting, watching and ending them. What must not: which processes there are (process_group,
gateway.process).

A process notices that its parent is gone when its standard input ends, however the parent ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from streams.errors import ProcessError

log = logging.getLogger(__name__)

#: A process that ended is started again after this time, which doubles with each further end up to the second value.
#: A crash at a client's request is over in a second; a Kafka that is away should not be asked much more often.
RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0

#: A process that ran for this long counts as having started well: the next end is its first one again.
STABLE_S = 60.0

#: If a process ends this often in a row, a restart does not help. The parent then ends the others and fails, so that
#: what watches the parent sees the fault.
ENDS_MAX = 6


@dataclass(frozen=True, slots=True)
class KeptProcess:
    """A process to keep running.

    name: in logs. command: for the first start, and for those after an end, which have True. env: its whole
    environment. port: in logs. gives_up: whether ENDS_MAX ends in a row are a fault even after it has once run for
    STABLE_S.
    """

    name: str
    command: Callable[[bool], Sequence[str]]
    env: dict[str, str]
    port: int
    gives_up: bool = True


class KeptProcesses:
    """The children of one parent. Used on one loop."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def run(
        self, kept: Sequence[KeptProcess], end_s: float, before_end: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Keep processes running until cancelled, then end them.

        before_end: called then, while they still run, and are no longer started again. end_s: how long they may take
        until they are killed. Raises ProcessError if a process cannot be kept running.
        """
        tasks = [asyncio.create_task(self._keep_running(each)) for each in kept]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            try:
                if before_end is not None:
                    await before_end()
            finally:
                await self.end(list(self._running), end_s)

    async def end(self, names: Sequence[str], end_s: float) -> None:
        """Send SIGTERM to processes, wait until they have ended, and kill those that have not."""
        left = [self._running[name] for name in names if name in self._running]
        for process in left:
            _signal(process, signal.SIGTERM)
        waiting = [asyncio.create_task(process.wait()) for process in left]
        if waiting:
            await asyncio.wait(waiting, timeout=end_s)
        for name in names:
            process_or_none = self._running.pop(name, None)
            if process_or_none is not None and process_or_none.returncode is None:
                log.error("%s did not end within %g s and is killed", name, end_s)
                _signal(process_or_none, signal.SIGKILL)
        await asyncio.gather(*waiting)

    async def _keep_running(self, kept: KeptProcess) -> None:
        n_ends, wait_s, is_again, was_stable = 0, RESTART_FIRST_S, False, False
        while True:
            started_s = time.monotonic()
            process = await self._start(kept, is_again)
            log.info("%s has pid %d and port %d", kept.name, process.pid, kept.port)
            code = await process.wait()
            del self._running[kept.name]
            if time.monotonic() - started_s >= STABLE_S:
                n_ends, wait_s, was_stable = 0, RESTART_FIRST_S, True
            n_ends += 1
            if n_ends >= ENDS_MAX and (kept.gives_up or not was_stable):
                raise ProcessError(
                    f"{kept.name} ended with code {code}, {n_ends} times in a row", remedy="Its messages are above"
                )
            log.error("%s ended with code %d; it is started again in %g s", kept.name, code, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RESTART_MAX_S)
            is_again = True

    async def _start(self, kept: KeptProcess, is_again: bool) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *kept.command(is_again),
            env=kept.env,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends them
        )
        self._running[kept.name] = process
        return process


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:  # it has ended meanwhile
        pass


def end_with_parent() -> None:
    """End this process as SIGTERM does once its parent is gone. Call it in a process that KeptProcesses started."""

    def wait() -> None:
        while os.read(0, 1024):  # the parent writes nothing
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
